"""Turns OGBench's single-task datasets into Minari datasets that all scripts train on.

    python -m tools.ogbench cube-single-play-singletask-v0                   (downloads 1M steps)
    python -m tools.ogbench scene-play-singletask-task4-v0 --dataset-dir data
    python -m tools.ogbench cube-single-play-singletask-v0 --make 100 --processes 8
    python td3_bc_n.py --env-id ogbench/cube-single-play-singletask-v0 --eval-episodes 50

It needs OGBench: pip install ogbench==1.2.2. A name is TASK-TYPE-singletask-v0 for the default task
of an environment, or TASK-TYPE-singletask-taskN-v0 for one of its five tasks. Images (visual-*) are
not supported. The files are those of ogbench.make_env_and_datasets, in ~/.ogbench/data, and are
downloaded if they are missing. They become two Minari datasets, for training and for validation:

    ogbench/cube-single-play-singletask-v0 and ogbench/cube-single-play-singletask-val-v0

Rewards and dones are those of the package: the reward belongs to the current state, and is minus
the number of goals that are not reached; a done is a row whose mask is 0, that is, whose state
solves the task. Trajectories go on after that, so a done is not the end of an episode, and the end
of an episode is not a done. An evaluation episode ends with the task solved or at the time limit of
the package. The score is the success rate in percent.

--make needs no download. The scripted oracles of the package play with random targets, as in its
script for play datasets of cube, scene and puzzle, and one more episode for every ten is for
validation. The files have OGBench's format, and a mark. They are written to ~/.ogbench/made, and
their Minari datasets are called ogbench-made/..., so that they do not pass for OGBench's own. Other
tasks take them with --dataset-dir ~/.ogbench/made. The same seed makes the same dataset.
"""

import difflib
import importlib.metadata
import multiprocessing
import os
import re
import shutil
import signal
import sys
import warnings
from dataclasses import dataclass
from functools import cache
from itertools import count
from pathlib import Path

import gymnasium as gym
import numpy as np
import tyro
from minari.data_collector.episode_buffer import EpisodeBuffer
from minari.storage.datasets_root_dir import get_dataset_path
from tqdm import tqdm

import d4rl_tasks
from tools.record import check_dataset_id, write_dataset

# Probability that a cube is put on another one: uniform between these, drawn for every episode
STACKING = {"single": (0, 0), "double": (0, 0.25), "triple": (0.05, 0.35)}
STACKING |= {"quadruple": (0.1, 0.5), "octuple": (0, 0.35)}


@dataclass
class Args:
    name: tyro.conf.Positional[str]  # dataset of OGBench, such as cube-single-play-singletask-v0
    dataset_dir: str | None = None  # directory of the files (~/.ogbench/data, with --make .../made)
    dataset_id: str | None = None  # id of the new dataset (ogbench/NAME, --make: ogbench-made/...)
    # Making a play dataset
    make: int = 0  # number of training episodes to make (OGBench: 1000), 0: use OGBench's files
    episode_steps: int = 1001  # rows of an episode (OGBench: 1001, which are 1000 transitions)
    processes: int = 1  # number of processes that make episodes
    seed: int = 1  # random seed of targets, oracles and noise


def import_ogbench():
    """Imports the optional package, which also registers its environments."""
    os.environ.setdefault("MUJOCO_GL", "disable")  # without a display, dm_control would warn
    warnings.filterwarnings("ignore", message=".*precision lowered")  # of OGBench's action space
    try:
        import ogbench
    except ModuleNotFoundError as error:
        sys.exit(f"tools.ogbench needs OGBench: pip install ogbench==1.2.2 ({error})")
    version = importlib.metadata.version("ogbench")
    if tuple(map(int, re.findall(r"\d+", version)[:2])) < (1, 2):
        sys.exit(f"ogbench {version} has other rewards than 1.2: pip install ogbench==1.2.2")
    return ogbench


def dataset_names():
    """All single-task datasets without images: {name: (environment, name of its files)}."""
    names = {}
    for env_id in gym.registry:
        task, is_single_task, suffix = env_id.partition("-singletask")
        if is_single_task and not task.startswith("visual-"):
            is_manipulation = re.match("cube|scene|puzzle", task)
            for kind in ("play", "noisy") if is_manipulation else ("navigate", "stitch", "explore"):
                names[f"{task}-{kind}-singletask{suffix}"] = env_id, f"{task}-{kind}-v0"
    return names


# --- Making a play dataset ---


@cache
def make_oracles(task):
    """The environment, and the oracles by the target that they bring about."""
    import_ogbench()
    from ogbench.manipspace.oracles.plan.button_plan import ButtonPlanOracle
    from ogbench.manipspace.oracles.plan.cube_plan import CubePlanOracle
    from ogbench.manipspace.oracles.plan.drawer_plan import DrawerPlanOracle
    from ogbench.manipspace.oracles.plan.window_plan import WindowPlanOracle

    # Without its time limit
    env = gym.make(f"{task}-v0", mode="data_collection", terminate_at_goal=False).unwrapped
    return env, {
        "cube": CubePlanOracle(env=env),
        "button": ButtonPlanOracle(env=env, gripper_always_closed=task.startswith("puzzle")),
        "drawer": DrawerPlanOracle(env=env),
        "window": WindowPlanOracle(env=env),
    }


def play_episode(job):
    """The rows of an episode. An episode of scene in which the cube is lost is played again."""
    task, steps, *seed = job
    env, oracles = make_oracles(task)
    for attempt in count():
        seeds = np.random.SeedSequence([*seed, attempt]).generate_state(2).tolist()
        np.random.seed(seeds[0])  # the oracles draw from the global random stream
        p_stack = np.random.uniform(*STACKING.get(task.removeprefix("cube-"), (0.5, 0.5)))
        obs, info = env.reset(seed=seeds[1])
        oracle, rows = oracles[info["privileged/target_task"]], []
        oracle.reset(obs, info)
        for step in range(steps):
            action = np.clip(oracle.select_action(obs, info), -1, 1)
            next_obs, _, _, _, info = env.step(action)
            row = {"observations": obs, "actions": action, "terminals": step == steps - 1}
            row |= {"qpos": info["prev_qpos"], "qvel": info["prev_qvel"]}
            if "prev_button_states" in info:
                row["button_states"] = info["prev_button_states"]
            rows.append(row)
            obs = next_obs
            if oracle.done:  # the plan is finished, also if it has failed: a new target
                target_obs, target_info = env.set_new_target(p_stack=p_stack)
                oracle = oracles[target_info["privileged/target_task"]]
                oracle.reset(target_obs, target_info)
        dtypes = {"terminals": bool, "button_states": np.int64}
        columns = {
            key: np.array([row[key] for row in rows], dtypes.get(key, np.float32)) for key in row
        }
        if task != "scene" or not cube_is_lost(columns["qpos"]):
            return columns


def cube_is_lost(qpos):
    """Whether the cube of scene leaves the view of OGBench's camera, other than in the drawer."""
    _, y, z = qpos[:, 14:17].T
    return bool(((y >= 0.29) | (y <= -0.3) & ((z < 0.06) | (z > 0.08))).any())


def make_files(paths, task, args):
    """Writes the files of training and validation episodes, in OGBench's format."""
    num_episodes = args.make + max(1, args.make // 10)
    jobs = [(task, args.episode_steps, args.seed, episode) for episode in range(num_episodes)]
    options = {"total": len(jobs), "desc": "Making", "unit": "episode", "disable": None}
    if args.processes == 1:
        episodes = [*tqdm(map(play_episode, jobs), **options)]
    else:
        ignore_sigint = (signal.SIGINT, signal.SIG_IGN)  # the main process stops the others
        context = multiprocessing.get_context("spawn")
        with context.Pool(args.processes, signal.signal, ignore_sigint) as pool:
            episodes = [*tqdm(pool.imap(play_episode, jobs), **options)]
    parts = episodes[: args.make], episodes[args.make :]
    temporaries = [path.with_name(f"{path.name}.{os.getpid()}.tmp") for path in paths]
    try:
        for temporary, part in zip(temporaries, parts, strict=True):
            columns = {key: np.concatenate([episode[key] for episode in part]) for key in part[0]}
            with open(temporary, "wb") as file:
                np.savez_compressed(file, **columns, made_by=f"tools.ogbench --seed {args.seed}")
        for temporary, path in zip(temporaries, paths, strict=True):
            os.replace(temporary, path)
    finally:
        for temporary in temporaries:
            temporary.unlink(missing_ok=True)


# --- Writing the Minari datasets ---


def episode_buffers(data):
    """Trajectories of T + 1 observations, with the dones where the masks are 0."""
    stops = np.flatnonzero(data["terminals"]) + 1
    for start, stop in zip([0, *stops[:-1]], tqdm(stops, "Writing", disable=None), strict=True):
        terminations = data["masks"][start:stop] == 0
        truncations = np.zeros(stop - start, dtype=bool)
        truncations[-1] = not terminations[-1]
        last = data["next_observations"][stop - 1 : stop]
        yield EpisodeBuffer(
            observations=np.concatenate([data["observations"][start:stop], last]),
            actions=data["actions"][start:stop],
            rewards=data["rewards"][start:stop],
            terminations=terminations,
            truncations=truncations,
        )


def main(args):
    ogbench, names = import_ogbench(), dataset_names()
    if args.name not in names:
        close = difflib.get_close_matches(args.name, names, 1, cutoff=0)[0]
        sys.exit(f"{args.name}: not a single-task dataset without images, such as {close}")
    env_id, file_name = names[args.name]
    if min(args.make, args.seed) < 0 or args.episode_steps < 2 or args.processes < 1:
        sys.exit("--make, --seed at least 0, --episode-steps at least 2, --processes at least 1")
    if args.make and not file_name.endswith("-play-v0"):
        sys.exit(f"{args.name}: --make is for play datasets, of cube, scene and puzzle")
    directory = args.dataset_dir or f"~/.ogbench/{'made' if args.make else 'data'}"
    directory = Path(directory).expanduser()
    paths = [directory / f"{file_name}{suffix}.npz" for suffix in ("", "-val")]
    try:  # the mark of --make, which OGBench's loader does not see
        marks = [path.exists() and "made_by" in np.load(path) for path in paths]
    except Exception as error:  # of zipfile and NumPy
        sys.exit(f"{directory}: {file_name} cannot be read ({error!r:.300})")
    made = bool(args.make) or any(marks)
    if any(marks) and not all(marks):  # OGBench would download the other one
        sys.exit(f"{directory}: only one of {file_name}.npz and -val.npz is made by --make")
    dataset_id = args.dataset_id or f"ogbench{'-made' if made else ''}/{args.name}"
    dataset_ids = [dataset_id, re.sub(r"(-v\d+)$", r"-val\1", dataset_id)]
    for one in dataset_ids:
        check_dataset_id(one)

    if args.make:
        for path in paths:
            if path.exists():
                hint = f"use it without --make and with --dataset-dir {directory}, or"
                sys.exit(f"{path} exists: {hint} make another one with another --dataset-dir")
        try:
            directory.mkdir(parents=True, exist_ok=True)
            make_files(paths, file_name.removesuffix("-play-v0"), args)
        except OSError as error:
            sys.exit(f"{directory}: cannot be written ({error})")
    try:
        env, *parts = ogbench.make_env_and_datasets(args.name, dataset_dir=str(directory))
    except Exception as error:  # of urllib, zipfile and NumPy
        sys.exit(f"{args.name}: cannot be loaded from {directory} ({error!r:.300})")
    eval_env = d4rl_tasks.SuccessReward(gym.make(env_id))  # a return is a success
    try:
        for one, data in zip(dataset_ids, parts, strict=True):
            write_dataset(
                one,
                episode_buffers(data),
                env,
                eval_env,
                algorithm_name="OGBench's oracles, by tools.ogbench" if made else "OGBench",
                description=f"{args.name}, from {paths[0].name}",
                ref_min_score=0.0,
                ref_max_score=1.0,
            )
    except BaseException:  # both, or none
        for one in dataset_ids:
            shutil.rmtree(get_dataset_path(one), ignore_errors=True)
        raise
    for one, data in zip(dataset_ids, parts, strict=True):
        steps, solved = len(data["masks"]), 1 - data["masks"].mean()
        print(f"{one}: {steps:,} transitions, {int(data['terminals'].sum()):,} episodes, ", end="")
        print(f"the task is solved in {solved:.2%} of the states")
    print(f"Train on it:\n  python td3_bc_n.py --env-id {dataset_id}")


if __name__ == "__main__":
    for name in {"SIGINT", "SIGTERM", "SIGHUP"} & set(dir(signal)):  # Windows has no SIGHUP
        # An exception, so that incomplete datasets are deleted
        if signal.getsignal(getattr(signal, name)) != signal.SIG_IGN:  # nohup ignores SIGHUP
            signal.signal(getattr(signal, name), lambda signum, _: sys.exit(128 + signum))
    main(tyro.cli(Args, description=__doc__))
