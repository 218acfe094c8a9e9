"""From a Minari dataset to transitions, statistics and an evaluation environment."""

import json
import shutil
import subprocess
import sys

import gymnasium as gym
import h5py
import numpy as np
import pytest
import torch
from conftest import ROOT, collect, create, write_d4rl_file

import d4rl_tasks
import sac_bc_n
import td3_bc_n
from td3_bc_n import Agent, Args, Transitions, load_data, set_statistics

SCRIPTS = [td3_bc_n, sac_bc_n]  # each has an Agent of its own
HOPPER = "mujoco/hopper/medium-v0"


def stored_episodes(root, dataset_id):
    """The episodes as h5py reads them, in the order of their numbers."""
    keys = ("rewards", "actions", "observations", "terminations")
    with h5py.File(root / dataset_id / "data/main_data.hdf5") as file:
        for i in range(len(file)):
            yield {key: file[f"episode_{i}/{key}"][()] for key in keys}


def test_next_observations_never_cross_an_episode(datasets):
    data, metadata, _ = load_data(HOPPER)
    start = 0
    for episode in stored_episodes(datasets, HOPPER):
        end = start + len(episode["rewards"])
        obs = episode["observations"].astype(np.float32)
        np.testing.assert_array_equal(data.obs[start:end], obs[:-1])
        np.testing.assert_array_equal(data.next_obs[start:end], obs[1:])
        np.testing.assert_allclose(data.actions[start:end], episode["actions"], atol=1e-6)
        np.testing.assert_allclose(data.rewards[start:end], episode["rewards"], rtol=1e-6)
        start = end
    assert start == len(data.obs) == metadata["transitions"]
    assert all(column.dtype == np.float32 for column in data)


def test_a_fall_is_done_and_a_time_limit_is_not(datasets):
    dones = load_data(HOPPER)[0].dones
    lasts, start = [], 0
    for episode in stored_episodes(datasets, HOPPER):
        start += len(episode["rewards"])
        lasts.append((len(episode["rewards"]), dones[start - 1]))
    assert dones.sum() == sum(last for _, last in lasts), "dones are at the ends of episodes"
    assert any(last == 1 for _, last in lasts)
    assert any(length == 18 and last == 0 for length, last in lasts), "time limit"


def test_datasets_separated_by_commas_are_concatenated():
    medium, expert = load_data(HOPPER)[0], load_data("mujoco/hopper/expert-v0")[0]
    both, metadata, _ = load_data(f"{HOPPER},mujoco/hopper/expert-v0")
    for a, b, joined in zip(medium, expert, both, strict=True):
        np.testing.assert_array_equal(np.concatenate([a, b]), joined)
    assert metadata["episodes"] == 40


def test_the_metadata_of_a_minari_dataset(datasets):
    data, metadata, _ = load_data(HOPPER)
    returns = [e["rewards"].sum() for e in stored_episodes(datasets, HOPPER)]
    assert metadata == {
        "dataset": HOPPER,
        "source": "minari",
        "comparable_with_paper": False,
        "transitions": len(data.obs),
        "episodes": 30,
        "mean_return": pytest.approx(np.mean(returns)),
        "ref_min_score": -20.272305,  # D4RL's, which Minari's mujoco datasets lack
        "ref_max_score": 3234.3,
        "environment": "Hopper-v5",
        "action_low": [-1.0, -1.0, -1.0],
        "action_high": [1.0, 1.0, 1.0],
        "observation_keys": [],
    }
    assert json.dumps(metadata)


def test_a_task_not_in_the_paper_has_the_references_of_its_dataset():
    metadata = load_data("tests/swing-v0")[1]
    assert (metadata["ref_min_score"], metadata["ref_max_score"]) == (-400.0, 0.0)


def test_actions_are_rescaled_in_the_data_and_in_the_environment(datasets):
    data, _, make_env = load_data("tests/swing-v0")
    stored = np.concatenate([e["actions"] for e in stored_episodes(datasets, "tests/swing-v0")])
    assert np.abs(stored).max() > 1.5, "the torque of Pendulum is in [-2, 2]"
    np.testing.assert_allclose(data.actions, stored / 2, atol=1e-6)
    env, plain = make_env(), gym.make("Pendulum-v1")
    env.reset(seed=0)
    plain.reset(seed=0)
    next_obs = env.step(np.array([0.25], dtype=np.float32))[0]
    np.testing.assert_allclose(next_obs, plain.step(np.array([0.5]))[0], rtol=1e-5)


def test_data_recorded_through_wrappers_has_the_spaces_of_the_wrapped_environment():
    """Actions are rescaled by the bounds of the recorded environment, not of the inner one."""
    env = gym.wrappers.RescaleAction(gym.make("Pendulum-v1", max_episode_steps=20), -1.0, 1.0)
    buffers = collect(env, 2, seed=0)
    create("tests/wrapped-v0", buffers, env)
    data, _, make_env = load_data("tests/wrapped-v0")
    np.testing.assert_allclose(data.actions[:20], buffers[0].actions, atol=1e-6)
    replay = make_env()
    replay.reset(seed=0)
    next_obs, reward, *_ = replay.step(data.actions[0])
    np.testing.assert_allclose(next_obs, data.next_obs[0], atol=1e-5)
    assert reward == pytest.approx(data.rewards[0], rel=1e-4)


def test_dict_observations_recorded_flat_are_loaded():
    env = gym.wrappers.FlattenObservation(
        gym.make("PointMaze_UMaze-v3", continuing_task=True, max_episode_steps=10)
    )
    create("tests/flat-maze-v0", collect(env, 2, seed=0), env)
    data, _, make_env = load_data("tests/flat-maze-v0")
    assert data.obs.shape == (20, 8) and make_env().observation_space.shape == (8,)


class UnsortedDictEnv(gym.Env):
    """A dict observation with a scalar, whose keys are not in alphabetical order."""

    observation_space = gym.spaces.Dict(
        [("z", gym.spaces.Box(-9, 9, (2,))), ("a", gym.spaces.Box(-9, 9, ()))]
    )
    action_space = gym.spaces.Box(-1, 1, (1,))

    def observation(self):
        return {"z": np.array([1, 1], dtype="f4"), "a": np.array(5, dtype="f4")}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.observation(), {}

    def step(self, action):
        return self.observation(), 0.0, False, False, {}


def test_dict_observations_have_the_order_of_the_environment():
    """Minari sorts the keys of the space that it stores, the environment does not."""
    gym.register("UnsortedDict-v0", UnsortedDictEnv, max_episode_steps=3)
    gym.registry["UnsortedDict-v0"].entry_point = f"{__name__}:UnsortedDictEnv"
    env = gym.make("UnsortedDict-v0")
    create("tests/unsorted-v0", collect(env, 2, seed=0), env)
    data, metadata, make_env = load_data("tests/unsorted-v0", trust_env=True)
    np.testing.assert_array_equal(data.obs[0], make_env().reset(seed=0)[0])
    assert metadata["observation_keys"] == ["z", "a"]


def test_an_environment_with_other_observations_is_refused():
    env, other = gym.make("Hopper-v5", max_episode_steps=5), gym.make("Walker2d-v5")
    create("tests/mismatch-v0", collect(env, 1, seed=0), env, eval_env=other)
    with pytest.raises(SystemExit, match=r"tests/mismatch-v0: Walker2d-v5 has other obs.* \(17,\)"):
        load_data("tests/mismatch-v0")


def test_actions_beyond_the_bounds_are_clipped():
    env = gym.make("Hopper-v5", max_episode_steps=5)
    buffers = collect(env, 2, seed=5)
    buffers[0].actions[0] = [1.37, -1.2, 0.5]
    create("tests/hopper/wild-v0", buffers, env)
    np.testing.assert_allclose(load_data("tests/hopper/wild-v0")[0].actions[0], [1, -1, 0.5])


@pytest.mark.parametrize("name", ["D4RL/pointmaze/umaze-v2", "D4RL/antmaze/umaze-v1"])
def test_dict_observations_are_flattened_as_in_the_environment(datasets, name):
    data, _, make_env = load_data(name)
    env = make_env()
    with h5py.File(datasets / name / "data/main_data.hdf5") as file:
        group = file["episode_0/observations"]
        for row in (0, 7):
            step = {key: group[key][row] for key in group}
            expected = gym.spaces.flatten(env.unwrapped.observation_space, step)
            np.testing.assert_allclose(data.obs[row], expected, rtol=1e-6)
            assert set(step["desired_goal"].astype("f4")) <= set(data.obs[row]), "the goal is seen"
    assert env.observation_space.shape == data.obs.shape[1:]


def test_the_goal_of_an_antmaze_is_done_and_ends_an_evaluation_episode():
    data, metadata, make_env = load_data("D4RL/antmaze/umaze-v1")
    np.testing.assert_array_equal(data.dones, data.rewards > 0)
    assert data.dones.sum() == 3 and metadata["goal_is_terminal"]
    env = make_env()
    assert env.unwrapped.continuing_task is False
    assert env.spec.max_episode_steps == 700


def test_antmaze_is_evaluated_in_the_maze_of_its_data():
    """The evaluation map of Minari's antmaze-umaze mirrors the map of the data."""
    mirrored = [[1, 1, 1, 1, 1], [1, 0, 0, "r", 1], [1, 0, 1, 1, 1], [1, 0, 0, "g", 1], [1] * 5]
    env = gym.make("AntMaze_UMaze-v4", continuing_task=True, max_episode_steps=5)
    evaluation = gym.make("AntMaze_UMaze-v4", continuing_task=True, maze_map=mirrored)
    create("tests/antmaze/umaze-v1", collect(env, 1, seed=0), env, eval_env=evaluation)
    maze = load_data("tests/antmaze/umaze-v1")[2]().unwrapped.maze.maze_map
    assert maze == env.unwrapped.maze.maze_map != mirrored


def test_a_point_collects_rewards_at_a_goal_that_stays(datasets):
    metadata = json.loads((datasets / "D4RL/pointmaze/umaze-v2/data/metadata.json").read_text())
    assert '"max_episode_steps": 1e6' in metadata["env_spec"], "a float, as in Minari"
    env = load_data("D4RL/pointmaze/umaze-v2")[2]()
    assert env.spec.max_episode_steps == 300
    assert env.unwrapped.continuing_task is True and env.unwrapped.reset_target is False
    env.reset(seed=0)
    env.unwrapped.goal = env.unwrapped.point_env.data.qpos[:2].copy()
    steps = [env.step(np.zeros(2, dtype=np.float32))[1:3] for _ in range(5)]
    assert steps == [(1.0, False)] * 5


def test_a_maze_not_in_the_paper_has_an_integer_time_limit(datasets):
    shutil.copytree(datasets / "D4RL/pointmaze/umaze-v2", datasets / "tests/points-v0")
    assert load_data("tests/points-v0")[2]().spec.max_episode_steps == 1000


def test_a_dense_maze_has_no_terminal_goal():
    env = gym.make("PointMaze_UMazeDense-v3", continuing_task=True, max_episode_steps=10)
    create("D4RL/pointmaze/umaze-dense-v2", collect(env, 2, seed=0), env)
    data, metadata, _ = load_data("D4RL/pointmaze/umaze-dense-v2")
    assert (data.rewards > 0).all() and (data.dones == 0).all()
    assert metadata["ref_max_score"] == 100.0, "the references of the sparse task are others"


@pytest.mark.parametrize("script", SCRIPTS)
def test_states_are_normalized_by_the_statistics_of_the_whole_dataset(script):
    data = load_data(HOPPER)[0]
    agent = script.Agent(11, 3, script.Args())
    set_statistics(agent, data, Args())
    np.testing.assert_allclose(agent.obs_mean, data.obs.astype("f8").mean(0), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(agent.obs_std, data.obs.astype("f8").std(0) + 1e-3, rtol=1e-5)
    normalized = agent.normalize(data.obs)
    by_hand = (data.obs - data.obs.mean(0)) / (data.obs.std(0) + 1e-3)
    np.testing.assert_allclose(normalized, by_hand, atol=1e-3)
    # Evaluation uses the same statistics, which are part of the state_dict.
    expected = agent.actor(normalized[:5]).detach().numpy()
    np.testing.assert_allclose(agent.act(data.obs[:5]), expected, atol=1e-6)
    other = script.Agent(11, 3, script.Args())
    other.load_state_dict(agent.state_dict())
    np.testing.assert_array_equal(other.act(data.obs[:5]), agent.act(data.obs[:5]))


def test_statistics_of_a_million_rows_are_precise():
    obs = np.full((1_000_000, 2), 1000.1, dtype=np.float32)  # numpy sums one column pairwise,
    obs[::2] += 1  # which is precise anyway; two columns are not
    agent = Agent(2, 1, Args())
    set_statistics(agent, Transitions(obs, None, obs[:, 0], obs, None), Args())
    np.testing.assert_allclose(agent.obs_mean, 1000.6, atol=1e-3)
    np.testing.assert_allclose(agent.obs_std, 0.501, atol=1e-3)


@pytest.mark.parametrize(
    ("transform", "expected"),
    [("raw", [0.0, 1.0, 5.0]), ("antmaze", [-2.0, 2.0, 18.0]), ("standardize", None)],
)
@pytest.mark.parametrize("script", SCRIPTS)
def test_rewards_are_transformed_by_the_task(script, transform, expected):
    rewards = np.array([0.0, 1.0, 5.0], dtype=np.float32)
    expected = (rewards - 2) / np.sqrt(14 / 3) if expected is None else expected
    agent, zeros = script.Agent(2, 1, script.Args()), np.zeros((3, 2), dtype=np.float32)
    data = Transitions(zeros + 1, zeros[:, :1] + 1, rewards, zeros, [False, True, False])
    set_statistics(agent, data._replace(obs=zeros), Args(reward_transform=transform))
    batch = agent.preprocess(data)
    np.testing.assert_allclose(batch.rewards, expected, rtol=1e-5)
    np.testing.assert_allclose(batch.obs, np.full((3, 2), 1000), rtol=1e-5)  # (1 - 0) / (0 + 0.001)
    assert batch.next_obs.eq(0).all() and batch.actions.eq(1).all()
    assert batch.dones.tolist() == [0, 1, 0]
    assert all(column.dtype == torch.float32 for column in batch)


# --- D4RL names ---


@pytest.fixture
def d4rl_dir(tmp_path, monkeypatch):
    monkeypatch.setenv("D4RL_DATASET_DIR", str(tmp_path))
    return tmp_path


def test_a_d4rl_name_uses_the_file_and_environment_of_d4rl(d4rl_dir):
    stored = write_d4rl_file(d4rl_dir / "hopper_medium-v2.hdf5", rows=50)
    data, metadata, make_env = load_data("hopper-medium-v2")
    np.testing.assert_allclose(data.obs, stored["observations"][:-1], rtol=1e-6)
    assert all(column.dtype == np.float32 for column in data)
    assert (metadata["source"], metadata["environment"]) == ("d4rl", "hopper-medium-v2")
    assert metadata["comparable_with_paper"] is True
    assert type(make_env().unwrapped).__module__.endswith("hopper_v4")


def test_antmaze_v2_is_not_comparable_with_the_paper(d4rl_dir):
    for version, ending in {"v0": "sparse", "v2": "sparse_fixed"}.items():
        name = f"Ant_maze_u-maze_noisy_multistart_False_multigoal_False_{ending}.hdf5"
        write_d4rl_file(d4rl_dir / name, observations=np.zeros((20, 29)), action_dim=8)
        metadata = load_data(f"antmaze-umaze-{version}")[1]
        assert metadata["comparable_with_paper"] is (version == "v0")


FILES = {  # path below BASE_URL, and what replaces it if it cannot be downloaded
    "hopper-medium-v2": ("gym_mujoco_v2/hopper_medium-v2", "mujoco/hopper/medium-v0"),
    "walker2d-expert-v2": ("gym_mujoco_v2/walker2d_expert-v2", "mujoco/walker2d/expert-v0"),
    "halfcheetah-medium-expert-v2": (
        "gym_mujoco_v2/halfcheetah_medium_expert-v2",
        "mujoco/halfcheetah/medium-v0,mujoco/halfcheetah/expert-v0",
    ),
    "hopper-medium-replay-v2": ("gym_mujoco_v2/hopper_medium_replay-v2", ""),
    "walker2d-random-v2": ("gym_mujoco_v2/walker2d_random-v2", ""),
    "maze2d-large-v1": ("maze2d/maze2d-large-sparse-v1", "D4RL/pointmaze/large-v2"),
    d4rl_tasks.TINY: (d4rl_tasks.TINY, ""),
    "antmaze-umaze-v0": (
        "ant_maze_new/Ant_maze_u-maze_noisy_multistart_False_multigoal_False_sparse",
        "D4RL/antmaze/umaze-v1",
    ),
    "antmaze-umaze-diverse-v2": (
        "ant_maze_v2/Ant_maze_u-maze_noisy_multistart_True_multigoal_True_sparse_fixed",
        "D4RL/antmaze/umaze-diverse-v1",
    ),
    "antmaze-medium-diverse-v0": (
        "ant_maze_new/Ant_maze_big-maze_noisy_multistart_True_multigoal_True_sparse",
        "D4RL/antmaze/medium-diverse-v1",
    ),
    "antmaze-large-play-v2": (
        "ant_maze_v2/Ant_maze_hardest-maze_noisy_multistart_True_multigoal_False_sparse_fixed",
        "D4RL/antmaze/large-play-v1",
    ),
    "pen-human-v1": ("hand_dapg_v1/pen-human-v1", "D4RL/pen/human-v2"),
    "relocate-cloned-v1": ("hand_dapg_v1/relocate-cloned-v1", "D4RL/relocate/cloned-v2"),
}


def test_files_of_d4rl_and_their_counterparts_in_minari():
    tasks = {name: d4rl_tasks.TASKS[name] for name in FILES}
    found = {name: (task.path.removesuffix(".hdf5"), task.minari) for name, task in tasks.items()}
    assert found == FILES


def test_if_the_download_fails_minari_is_used_with_a_warning(d4rl_dir, capsys):
    _, metadata, _ = load_data("hopper-medium-expert-v2")
    assert (metadata["episodes"], metadata["source"]) == (40, "minari"), "both datasets"
    assert metadata["comparable_with_paper"] is False
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("WARNING: hopper-medium-expert-v2: cannot download")
    assert "Using Minari's mujoco/hopper/medium-v0,mujoco/hopper/expert-v0: other data" in line
    assert line.endswith("scores not comparable with the paper.")


def test_without_file_and_counterpart_the_download_error_is_one_line(d4rl_dir):
    message = rf"walker2d-random-v2: cannot download {d4rl_dir}.*hdf5.*refused"
    with pytest.raises(SystemExit, match=message) as error:
        load_data("walker2d-random-v2")
    assert "\n" not in error.value.code


# --- Mistakes ---


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "env_id", "steps"),
    [("td3_bc_n", HOPPER, "--gradient-steps"), ("finetune_sac_bc_n", "Hopper-v5", "--env-steps")],
)
def test_a_script_copied_alone_trains(script, env_id, steps, tmp_path):
    shutil.copy(ROOT / f"{script}.py", tmp_path)
    command = [sys.executable, f"{script}.py", "--env-id", env_id, steps, "2", "--run-name", "r"]
    command += ["--learning-starts", "9"] if steps == "--env-steps" else []
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "runs/r/result.json").exists()


def test_without_d4rl_tasks_its_datasets_and_mazes_are_refused(monkeypatch):
    monkeypatch.setattr(td3_bc_n, "d4rl_tasks", None)
    with pytest.raises(SystemExit, match=r"D4RL datasets need d4rl_tasks.py next to this script"):
        load_data("hopper-medium-v2")
    with pytest.raises(SystemExit, match=r"Minari mazes need d4rl_tasks.py next to this script"):
        load_data("D4RL/pointmaze/umaze-v2")


def broken_copy(datasets, name):
    """A copy of the Hopper dataset, to be broken."""
    shutil.copytree(datasets / HOPPER, datasets / name, dirs_exist_ok=True)
    return datasets / name / "data"


@pytest.mark.parametrize(
    ("key", "row"), [("rewards", 2), ("observations", 2), ("observations", -1)]
)
def test_values_that_are_not_finite_are_refused(datasets, key, row):
    name = f"tests/broken/{key}{row}-v0".replace("-1", "last")
    with h5py.File(broken_copy(datasets, name) / "main_data.hdf5", "r+") as file:
        file[f"episode_1/{key}"][row] = np.nan
    with pytest.raises(SystemExit, match=f"{name}: .*non-finite values"):
        load_data(name)


def test_an_episode_with_an_observation_too_few_is_refused(datasets):
    with h5py.File(broken_copy(datasets, "tests/broken/few-v0") / "main_data.hdf5", "r+") as file:
        shorter = file["episode_4/observations"][:-1]
        del file["episode_4/observations"]
        file["episode_4/observations"] = shorter
    with pytest.raises(SystemExit, match="columns of different lengths"):
        load_data("tests/broken/few-v0")


def test_a_broken_dataset_is_one_clear_line(datasets):
    path = broken_copy(datasets, "tests/broken/short-v0") / "main_data.hdf5"
    path.write_bytes(path.read_bytes()[:20_000])
    with pytest.raises(SystemExit, match="tests/broken/short-v0: cannot be loaded") as error:
        load_data("tests/broken/short-v0")
    assert "\n" not in str(error.value)


def test_an_unknown_dataset_is_one_line():
    with pytest.raises(SystemExit, match="tests/nowhere-v0: cannot be loaded"):
        load_data("tests/nowhere-v0")
    message = "hoper-medium-v2: .* Did you mean hopper-medium-v2.* namespace: my/hoper-medium-v2"
    with pytest.raises(SystemExit, match=message):
        load_data("hoper-medium-v2")


@pytest.mark.parametrize(
    ("dataset", "environment", "maximum"),
    [
        ("mujoco/hopper/expert-v0", "Hopper-v5", 3234.3),
        ("mujoco/ant-v0", "Ant-v5", None),
        ("my/carmaze-v0", "CarMaze-v0", None),
    ],
)
def test_only_d4rl_tasks_and_their_mazes_are_adapted(dataset, environment, maximum):
    spec = gym.envs.registration.EnvSpec(environment, max_episode_steps=1000)
    metadata, env_kwargs = d4rl_tasks.minari_task(dataset, spec)
    assert metadata.get("ref_max_score") == maximum
    assert env_kwargs.get("max_episode_steps", 1000) == 1000 and "continuing_task" not in env_kwargs
