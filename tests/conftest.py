"""Real environments and small real Minari datasets, made once per test session."""

import contextlib
import gc
import io
import json
import os
import runpy
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

os.environ.setdefault("OMP_NUM_THREADS", "1")  # one pytest worker per core
os.environ["HF_HUB_OFFLINE"] = "1"
if "DISPLAY" not in os.environ:
    os.environ.setdefault("MUJOCO_GL", "egl")  # before MuJoCo is imported

import gymnasium as gym
import gymnasium_robotics
import h5py
import minari
import numpy as np
import pytest
from minari.data_collector.episode_buffer import EpisodeBuffer

import d4rl_tasks

for _number in (signal.SIGINT, signal.SIGHUP):
    if signal.getsignal(_number) == signal.SIG_IGN:  # pytest was started by nohup, or with &
        signal.signal(_number, signal.SIG_DFL)
ROOT = Path(__file__).parent.parent
gym.register_envs(gymnasium_robotics)
d4rl_tasks.BASE_URL = "http://127.0.0.1:9/"  # no test downloads from D4RL
SHA256 = dict(d4rl_tasks.SHA256)
d4rl_tasks.SHA256.clear()  # files that tests make pass for D4RL's


def collect(env, num_episodes, seed):
    """Episodes of random actions, one EpisodeBuffer each."""
    rng, buffers = np.random.default_rng(seed), []
    for index in range(num_episodes):
        obs, actions, rewards, terminations, truncations = [], [], [], [], []
        obs.append(env.reset(seed=seed + index)[0])
        while not (terminations and (terminations[-1] or truncations[-1])):
            actions.append(rng.uniform(env.action_space.low, env.action_space.high).astype("f4"))
            next_obs, reward, terminated, truncated, _ = env.step(actions[-1])
            obs.append(next_obs)
            rewards.append(float(reward))
            terminations.append(bool(terminated))
            truncations.append(bool(truncated))
        if isinstance(next_obs, dict):
            obs = {key: np.stack([o[key] for o in obs]) for key in next_obs}
        else:
            obs = np.stack(obs)
        columns = (np.stack(actions), rewards, terminations, truncations)
        buffers.append(EpisodeBuffer(index, None, None, obs, *columns))
    return buffers


def create(dataset_id, buffers, env, **kwargs):
    return minari.create_dataset_from_buffers(
        dataset_id,
        buffers,
        env=env,
        eval_env=kwargs.pop("eval_env", env),
        algorithm_name="random",
        author="tests",
        author_email="tests@example.com",
        code_permalink="none",
        description="random actions",
        **kwargs,
    )


def write_d4rl_file(path, rows=20, obs_dim=11, action_dim=3, **changes):
    """A file in D4RL's layout, with keys changed or (None) left out."""
    rng = np.random.default_rng(0)
    data = {
        "observations": rng.normal(size=(rows, obs_dim)),
        "actions": rng.uniform(-1, 1, size=(rows, action_dim)),
        "rewards": rng.normal(size=rows),
        "terminals": np.zeros(rows, dtype=bool),
        "timeouts": np.zeros(rows, dtype=bool),
    } | changes
    with h5py.File(path, "w") as file:
        for key, value in data.items():
            if value is not None:
                file[key] = value
    return data


@pytest.fixture(scope="session", autouse=True)
def datasets(tmp_path_factory):
    """Directory of the datasets: Hopper and Pendulum (flat), PointMaze and AntMaze (dict)."""
    root = tmp_path_factory.mktemp("minari")
    os.environ["MINARI_DATASETS_PATH"] = str(root)
    # Most random hops end in a fall, which terminates; others reach the time limit of 18 steps.
    env = gym.make("Hopper-v5", max_episode_steps=18)
    create("mujoco/hopper/medium-v0", collect(env, 30, seed=0), env)
    create("mujoco/hopper/expert-v0", collect(env, 10, seed=100), env)
    # A task that is not in the paper, with actions in [-2, 2]
    env = gym.make("Pendulum-v1", max_episode_steps=40)
    create("tests/swing-v0", collect(env, 10, seed=0), env, ref_min_score=-400.0, ref_max_score=0.0)
    env = gym.make("PointMaze_UMaze-v3", continuing_task=True, max_episode_steps=60)
    create("D4RL/pointmaze/umaze-v2", collect(env, 20, seed=0), env)
    # The pointmaze datasets of Minari have a float as their time limit.
    path = root / "D4RL/pointmaze/umaze-v2/data/metadata.json"
    metadata = json.loads(path.read_text())
    for key in ("env_spec", "eval_env_spec"):
        metadata[key] = metadata[key].replace('"max_episode_steps": 60', '"max_episode_steps": 1e6')
    assert "1e6" in metadata["env_spec"]
    path.write_text(json.dumps(metadata))
    env = gym.make("AntMaze_UMaze-v4", continuing_task=True, max_episode_steps=30)
    buffers = collect(env, 4, seed=0)
    buffers[0].rewards[-3:] = [1.0, 1.0, 1.0]  # as if the ant had reached the goal and stayed
    create("D4RL/antmaze/umaze-v1", buffers, env)
    return root


def run_script(script, *arguments):
    """Runs a script's main program in this process. Importing torch again would take seconds."""
    argv, stdout, stderr, code = sys.argv, io.StringIO(), io.StringIO(), 0
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    handlers = {number: signal.getsignal(number) for number in numbers}
    sys.argv = [f"{script}.py", *map(str, arguments)]
    try:
        with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
            runpy.run_path(str(ROOT / f"{script}.py"), run_name="__main__")
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 0 if error.code is None else 1
        stderr.write(error.code if isinstance(error.code, str) else "")
    finally:
        sys.argv = argv
        for number, handler in handlers.items():
            signal.signal(number, handler)
        gc.collect()  # closes the lock of the run
    return SimpleNamespace(returncode=code, stdout=stdout.getvalue(), stderr=stderr.getvalue())


@pytest.fixture
def run(tmp_path):
    """Runs a script; returns its output and its run directory."""
    numbers = iter(range(1000))

    def run(script, *arguments, check=True):
        runs, name = tmp_path / "runs", f"run-{next(numbers)}"
        named = () if "--resume" in arguments else ("--runs-dir", runs, "--run-name", name)
        process = run_script(script, *named, *arguments)
        assert not check or process.returncode == 0, process.stdout + process.stderr
        return process, runs / name if (runs / name).exists() else None

    return run
