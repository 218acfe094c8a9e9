"""Plays the policies of runs in their environment and writes a Minari dataset.

    python -m tools.record runs/RUN --dataset-id my/hopper-medium-v0
    python -m tools.record runs/RUN --dataset-id my/hopper-noisy-v0 --steps 1000000 --explore
    python -m tools.record runs/EARLY runs/LATE --dataset-id my/hopper-mixed-v0 --steps 50000

Several runs are recorded in turn, --steps of each, into one dataset. Actions are deterministic, or
with --explore as in online training: with Gaussian noise for TD3, sampled for SAC. The dataset has
the observations and actions of the environment itself, without the flattening and rescaling of the
scripts. Episodes are whole; only the last episode of each run is cut off, and stored as truncated.
"""

import copy
import json
import shutil
import sys
import warnings
from dataclasses import dataclass

import minari
import numpy as np
import torch
import tyro
from minari.data_collector.episode_buffer import EpisodeBuffer
from minari.dataset.minari_dataset import parse_dataset_id
from minari.storage.datasets_root_dir import get_dataset_path
from tqdm import tqdm

from tools.runs import load_run


@dataclass
class Args:
    runs: tyro.conf.Positional[tuple[str, ...]]  # run directories or checkpoint.pt files
    dataset_id: str  # id of the new Minari dataset, namespace/name-v0
    steps: int = 100_000  # number of environment steps of each run
    explore: bool = False  # act as in online training: TD3 with noise, SAC with sampled actions
    seed: int = 1  # random seed for environment and exploration


def check_dataset_id(dataset_id):
    """Exits with one line if a Minari dataset cannot be written under this id."""
    try:
        namespace = parse_dataset_id(dataset_id)[0]
    except (TypeError, ValueError):  # TypeError: no version
        namespace = None
    if namespace is None:  # without a namespace, the scripts take an id for the name of a D4RL file
        sys.exit(f"{dataset_id}: not a dataset id of the form namespace/name-v0")
    try:
        exists = get_dataset_path(dataset_id).exists()
    except OSError as error:
        sys.exit(f"{dataset_id}: cannot be written ({error})")
    if exists:
        sys.exit(f"{dataset_id}: this Minari dataset exists, choose another id")


def write_dataset(dataset_id, episodes, env, eval_env=None, **metadata):
    """Writes a whole dataset, or none if it is interrupted."""
    eval_env = eval_env or env
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # about missing authors and links
            minari.create_dataset_from_buffers(
                dataset_id, episodes, env=env, eval_env=eval_env, data_format="hdf5", **metadata
            )
    except BaseException as error:  # also KeyboardInterrupt
        shutil.rmtree(get_dataset_path(dataset_id), ignore_errors=True)
        if isinstance(error, OSError | RuntimeError):  # of h5py, if the disk is full
            sys.exit(f"{dataset_id}: cannot be written ({error!r:.300})")
        raise


def score_references(metadata):
    """D4RL's references for its robots, otherwise those of the run if it has any."""
    import d4rl_tasks

    robot = metadata["environment"].split("-")[0].lower()  # Hopper-v5, hopper-medium-v2
    references = metadata["ref_min_score"], metadata["ref_max_score"]
    if robot in d4rl_tasks.LOCOMOTION:
        references = d4rl_tasks.LOCOMOTION[robot][1:]
    elif references == (0.0, 100.0):  # raw returns
        return {}
    return dict(zip(("ref_min_score", "ref_max_score"), references, strict=True))


def unwrap(env):
    """The environment without FlattenObservation and RescaleAction of the scripts."""
    return env.env.env


def same_environment(env, other):
    """Compares all but the names: D4RL has several names for one environment."""
    specs = []
    for one in (env, other):
        spec = json.loads(unwrap(one).spec.to_json())
        names = ("id", "namespace", "name", "version")
        specs.append({key: value for key, value in spec.items() if key not in names})
    return specs[0] == specs[1]


@torch.no_grad()
def choose_action(agent, obs, noise):
    """An action in [-1, 1]: deterministic if noise is None, otherwise as the online scripts act."""
    obs = agent.normalize(obs)
    if noise is None:
        return agent.actor(obs).numpy()
    if hasattr(agent.actor, "sample"):  # SAC
        return agent.actor.sample(obs)[0].numpy()
    action = agent.actor(obs)
    return (action + noise * torch.randn_like(action)).clamp(-1, 1).numpy()


def record_episode(env, agent, noise, max_steps, seed):
    """One episode, cut off after max_steps."""
    rescale, flatten, env = env, env.env, unwrap(env)
    low, high, dtype = env.action_space.low, env.action_space.high, env.action_space.dtype
    obs, _ = env.reset(seed=seed)
    observations, actions, rewards = [copy.deepcopy(obs)], [], []
    terminated = truncated = False
    while not (terminated or truncated):
        action = rescale.action(choose_action(agent, flatten.observation(obs), noise))
        action = np.clip(action, low, high).astype(dtype)
        obs, reward, terminated, truncated, _ = env.step(action)
        observations.append(copy.deepcopy(obs))
        actions.append(action)
        rewards.append(float(reward))
        truncated = truncated or (len(rewards) == max_steps and not terminated)
    if isinstance(obs, dict):
        observations = {key: np.stack([one[key] for one in observations]) for key in obs}
    else:
        observations = np.stack(observations)
    terminations, truncations = np.zeros((2, len(rewards)), dtype=bool)
    terminations[-1], truncations[-1] = terminated, truncated
    return EpisodeBuffer(
        seed=seed,
        observations=observations,
        actions=np.stack(actions),
        rewards=np.array(rewards),
        terminations=terminations,
        truncations=truncations,
    )


def main(args):
    check_dataset_id(args.dataset_id)
    if not args.runs:
        sys.exit("expected at least one run directory")
    if args.steps < 1 or args.seed < 0:
        sys.exit("--steps must be at least 1, --seed at least 0")
    agents, envs, noises, scripts, references = [], [], [], [], {}
    for path in args.runs:
        script, settings, agent, _, metadata, make_env = load_run(path)
        agents.append(agent)
        envs.append(make_env())
        noises.append(getattr(settings, "exploration_noise", 0.1) if args.explore else None)
        scripts.append(script.__name__)
        references = references or score_references(metadata)
        if not same_environment(envs[0], envs[-1]):
            sys.exit(f"{path}: not the same environment as {args.runs[0]}")

    torch.manual_seed(args.seed)
    rng, episodes = np.random.default_rng(args.seed), []
    with tqdm(total=args.steps * len(agents), unit="step", unit_scale=True, disable=None) as bar:
        for path, agent, env, noise in zip(args.runs, agents, envs, noises, strict=True):
            returns, steps_left = [], args.steps
            while steps_left:
                episode = record_episode(env, agent, noise, steps_left, int(rng.integers(2**31)))
                episodes.append(episode)
                returns.append(episode.rewards.sum())
                steps_left -= len(episode)
                bar.update(len(episode))
            tqdm.write(f"{path}: {len(returns)} episodes, mean return {np.mean(returns):.1f}")

    exploration = " with exploration" if args.explore else ""
    write_dataset(
        args.dataset_id,
        episodes,
        unwrap(envs[0]),
        algorithm_name=", ".join(dict.fromkeys(scripts)) + exploration,
        description=f"made by tools.record: {args.steps} steps of each of {len(agents)} policies",
        **references,
    )
    steps, mean_return = sum(map(len, episodes)), np.mean([e.rewards.sum() for e in episodes])
    summary = f"{steps:,} steps, {len(episodes)} episodes, mean return {mean_return:.1f}"
    print(f"{args.dataset_id}: {summary}. Train on it:")
    print(f"  python td3_bc_n.py --env-id {args.dataset_id}")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
