"""Real environments and real Minari data sets, small ones, made once per test session."""

import json
import os
import subprocess
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # the tests share the cores, one worker each
if "DISPLAY" not in os.environ:
    os.environ.setdefault("MUJOCO_GL", "egl")  # before MuJoCo is imported

import gymnasium as gym
import gymnasium_robotics
import h5py
import minari
import numpy as np
import pytest
from minari.data_collector.episode_buffer import EpisodeBuffer

ROOT = Path(__file__).parent.parent
gym.register_envs(gymnasium_robotics)


def collect(env, num_episodes, seed):
    """Episodes of random actions, as an EpisodeBuffer each."""
    rng, buffers = np.random.default_rng(seed), []
    for index in range(num_episodes):
        observations, actions, rewards, terminations, truncations = [], [], [], [], []
        observations.append(env.reset(seed=seed + index)[0])
        while not (terminations and (terminations[-1] or truncations[-1])):
            actions.append(rng.uniform(env.action_space.low, env.action_space.high).astype("f4"))
            observation, reward, terminated, truncated, _ = env.step(actions[-1])
            observations.append(observation)
            rewards.append(float(reward))
            terminations.append(bool(terminated))
            truncations.append(bool(truncated))
        if isinstance(observation, dict):
            observations = {key: np.stack([o[key] for o in observations]) for key in observation}
        buffers.append(
            EpisodeBuffer(
                id=index,
                observations=np.stack(observations)
                if isinstance(observations, list)
                else observations,
                actions=np.stack(actions),
                rewards=rewards,
                terminations=terminations,
                truncations=truncations,
            )
        )
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


def write_d4rl_file(path, rows=20, observation_size=11, action_size=3, **changes):
    """A file in D4RL's layout, with keys changed or (None) left out."""
    rng = np.random.default_rng(0)
    data = {
        "observations": rng.normal(size=(rows, observation_size)),
        "actions": rng.uniform(-1, 1, size=(rows, action_size)),
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
    """Where the data sets are: Hopper and Pendulum (flat), PointMaze and AntMaze (dict, goal)."""
    root = tmp_path_factory.mktemp("minari")
    os.environ["MINARI_DATASETS_PATH"] = str(root)
    os.environ["HF_HUB_OFFLINE"] = "1"
    # Most random hops end in a fall, a terminal; the limit of 18 steps cuts the others off.
    env = gym.make("Hopper-v5", max_episode_steps=18)
    create("tests/hopper/random-v0", collect(env, 30, seed=0), env)
    create("tests/hopper/more-v0", collect(env, 10, seed=100), env)
    # An environment that the paper does not know, with actions in +-2.
    env = gym.make("Pendulum-v1", max_episode_steps=40)
    create("tests/swing-v0", collect(env, 10, seed=0), env, ref_min_score=-400.0, ref_max_score=0.0)
    env = gym.make("PointMaze_UMaze-v3", continuing_task=True, max_episode_steps=60)
    create("tests/pointmaze/umaze-v0", collect(env, 20, seed=0), env)
    # Minari's own pointmaze data sets have a float for their time limit.
    path = root / "tests/pointmaze/umaze-v0/data/metadata.json"
    metadata = json.loads(path.read_text())
    for key in ("env_spec", "eval_env_spec"):
        metadata[key] = metadata[key].replace('"max_episode_steps": 60', '"max_episode_steps": 1e6')
    assert "1e6" in metadata["env_spec"]
    path.write_text(json.dumps(metadata))
    env = gym.make("AntMaze_UMaze-v4", continuing_task=True, max_episode_steps=30)
    buffers = collect(env, 4, seed=0)
    buffers[0].rewards[-3:] = [1.0, 1.0, 1.0]  # as if the goal were reached and the ant stayed
    create("tests/antmaze/umaze-v0", buffers, env)
    return root


@pytest.fixture
def run(tmp_path):
    """Run a script as a user would; returns the finished process and its run directory."""

    def run(script, *arguments, check=True):
        runs = tmp_path / "runs"
        before = set(runs.glob("*"))
        process = subprocess.run(
            [sys.executable, ROOT / f"{script}.py", "--runs-dir", runs, *map(str, arguments)],
            capture_output=True,
            text=True,
            cwd=tmp_path,
        )
        assert not check or process.returncode == 0, process.stdout + process.stderr
        new = set(runs.glob("*")) - before
        return process, new.pop() if new else None

    return run
