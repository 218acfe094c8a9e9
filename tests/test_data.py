"""From a Minari data set to transitions, statistics and an evaluation environment."""

import json
import re
import shutil
import subprocess
import sys

import gymnasium as gym
import h5py
import numpy as np
import pytest
import torch
from conftest import ROOT, collect, create, write_d4rl_file

import sac_bc_n
import td3_bc_n
from td3_bc_n import Agent, Args, load_data

SCRIPTS = [td3_bc_n, sac_bc_n]


def stored_episodes(root, dataset_id):
    """The episodes as h5py reads them, in the order of their numbers."""
    with h5py.File(root / dataset_id / "data/main_data.hdf5") as file:
        for i in range(len(file)):
            yield {key: file[f"episode_{i}/{key}"][()] for key in ("rewards", "actions")} | {
                "observations": file[f"episode_{i}/observations"][()],
                "terminations": file[f"episode_{i}/terminations"][()],
            }


def test_transitions_have_their_true_successors_and_none_crosses_an_episode(datasets):
    data, facts, _ = load_data("tests/hopper/random-v0")
    obs, actions, rewards, next_obs, _ = data
    start = 0
    for episode in stored_episodes(datasets, "tests/hopper/random-v0"):
        end = start + len(episode["rewards"])
        observations = episode["observations"].astype(np.float32)
        np.testing.assert_array_equal(obs[start:end], observations[:-1])
        np.testing.assert_array_equal(next_obs[start:end], observations[1:])
        np.testing.assert_allclose(actions[start:end], episode["actions"], atol=1e-6)
        np.testing.assert_allclose(rewards[start:end], episode["rewards"], rtol=1e-6)
        start = end
    assert start == len(obs) == facts["transitions"]
    assert all(column.dtype == np.float32 for column in data)


def test_a_fall_is_terminal_and_a_time_limit_is_not(datasets):
    _, _, _, _, terminals = load_data("tests/hopper/random-v0")[0]
    lasts, start = [], 0
    for episode in stored_episodes(datasets, "tests/hopper/random-v0"):
        start += len(episode["rewards"])
        lasts.append((len(episode["rewards"]), terminals[start - 1]))
    assert terminals.sum() == sum(last for _, last in lasts), "a terminal ends its episode"
    assert any(last == 1 for _, last in lasts)
    assert any(length == 18 and last == 0 for length, last in lasts), "the limit bootstraps"


def test_episodes_are_read_in_the_order_of_their_numbers_and_data_sets_concatenated():
    first, more = load_data("tests/hopper/random-v0")[0], load_data("tests/hopper/more-v0")[0]
    both, facts, _ = load_data("tests/hopper/random-v0,tests/hopper/more-v0")
    for a, b, joined in zip(first, more, both, strict=True):
        np.testing.assert_array_equal(np.concatenate([a, b]), joined)
    assert facts["episodes"] == 40


def test_facts_are_those_of_the_data(datasets):
    facts = load_data("tests/hopper/random-v0")[1]
    returns = [e["rewards"].sum() for e in stored_episodes(datasets, "tests/hopper/random-v0")]
    assert facts["episodes"] == 30
    assert facts["mean_return"] == pytest.approx(np.mean(returns))
    assert facts["environment"] == "Hopper-v5, 1000 steps"
    assert facts["comparable_with_the_paper"].startswith("no")
    assert "Minari" in facts["source"]


def test_actions_of_other_bounds_are_rescaled_for_the_data_and_for_the_environment(datasets):
    data, _, make_env = load_data("tests/swing-v0")
    stored = np.concatenate([e["actions"] for e in stored_episodes(datasets, "tests/swing-v0")])
    assert np.abs(stored).max() > 1.5, "Pendulum's torque is in +-2"
    np.testing.assert_allclose(data[1], stored / 2, atol=1e-6)
    env, plain = make_env(), gym.make("Pendulum-v1")
    env.reset(seed=0)
    plain.reset(seed=0)
    np.testing.assert_allclose(
        env.step(np.array([0.25], dtype=np.float32))[0], plain.step(np.array([0.5]))[0], rtol=1e-5
    )


def test_unknown_task_takes_the_references_of_its_data_set():
    facts = load_data("tests/swing-v0")[1]
    assert (facts["random_return"], facts["expert_return"]) == (-400.0, 0.0)
    assert "generic" in facts["task"]


def test_actions_beyond_the_bounds_are_clipped():
    env = gym.make("Hopper-v5", max_episode_steps=5)
    buffers = collect(env, 2, seed=5)
    buffers[0].actions[0] = [1.37, -1.2, 0.5]
    create("tests/hopper/wild-v0", buffers, env)
    actions = load_data("tests/hopper/wild-v0")[0][1]
    np.testing.assert_allclose(actions[0], [1, -1, 0.5])
    assert load_data("tests/hopper/wild-v0")[1]["clipped_actions"] == 1


@pytest.mark.parametrize("name", ["pointmaze", "antmaze"])
def test_goal_observations_are_flattened_as_the_environment_does(datasets, name):
    data, _, make_env = load_data(f"tests/{name}/umaze-v0")
    env = make_env()
    plain = env.unwrapped.observation_space
    with h5py.File(datasets / f"tests/{name}/umaze-v0/data/main_data.hdf5") as file:
        group = file["episode_0/observations"]
        for row in (0, 7):
            step = {key: group[key][row] for key in group}
            expected = gym.spaces.flatten(plain, step)
            np.testing.assert_allclose(data[0][row], expected, rtol=1e-6)
            assert set(step["desired_goal"].astype("f4")) <= set(data[0][row]), "the goal is seen"
    assert env.observation_space.shape == data[0].shape[1:]


def test_reaching_the_goal_of_an_antmaze_is_terminal_and_ends_an_evaluation(datasets):
    data, _, make_env = load_data("tests/antmaze/umaze-v0")
    np.testing.assert_array_equal(data[4], data[2] > 0)
    assert data[4].sum() == 3
    env = make_env()
    assert env.unwrapped.continuing_task is False
    assert env.spec.max_episode_steps == 700


def test_antmaze_is_evaluated_in_the_maze_of_its_data():
    """Minari's evaluation map of antmaze-umaze is the mirror image of the data's."""
    mirrored = [[1, 1, 1, 1, 1], [1, 0, 0, "r", 1], [1, 0, 1, 1, 1], [1, 0, 0, "g", 1], [1] * 5]
    env = gym.make("AntMaze_UMaze-v4", continuing_task=True, max_episode_steps=5)
    evaluation = gym.make("AntMaze_UMaze-v4", continuing_task=True, maze_map=mirrored)
    create("tests/antmaze/umaze-v1", collect(env, 1, seed=0), env, eval_env=evaluation)
    maze = load_data("tests/antmaze/umaze-v1")[2]().unwrapped.maze.maze_map
    assert maze == env.unwrapped.maze.maze_map != mirrored


def test_a_float_for_a_time_limit_is_no_obstacle_to_a_task_we_do_not_know(datasets):
    shutil.copytree(datasets / "tests/pointmaze/umaze-v0", datasets / "tests/points-v0")
    env = load_data("tests/points-v0")[2]()
    assert isinstance(env.spec.max_episode_steps, int) and env.spec.max_episode_steps == 10_000


def test_a_point_collects_reward_at_a_goal_that_stays(datasets):
    metadata = json.loads((datasets / "tests/pointmaze/umaze-v0/data/metadata.json").read_text())
    assert re.search(r'"max_episode_steps": 1e6', metadata["env_spec"]), "Minari's float limit"
    env = load_data("tests/pointmaze/umaze-v0")[2]()
    assert env.spec.max_episode_steps == 300
    assert env.unwrapped.continuing_task is True and env.unwrapped.reset_target is False
    env.reset(seed=0)
    env.unwrapped.goal = env.unwrapped.point_env.data.qpos[:2].copy()
    rewards = [env.step(np.zeros(2, dtype=np.float32))[1:3] for _ in range(5)]
    assert rewards == [(1.0, False)] * 5


@pytest.mark.parametrize("script", SCRIPTS)
def test_states_are_normalised_by_the_statistics_of_the_whole_data_set(script):
    data = script.load_data("tests/hopper/random-v0")[0]
    agent = script.Agent(11, 3, Args())
    agent.fit_statistics(data[0], data[2], script.Args())
    np.testing.assert_allclose(agent.obs_mean, data[0].astype("f8").mean(0), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(agent.obs_std, data[0].astype("f8").std(0) + 1e-3, rtol=1e-5)
    normalised = agent.normalize(torch.as_tensor(data[0]))
    by_hand = (data[0] - data[0].mean(0)) / (data[0].std(0) + 1e-3)
    np.testing.assert_allclose(normalised, by_hand, atol=1e-3)
    # An evaluation normalises by the same numbers, which travel in the state_dict.
    expected = agent.policy(normalised[:5]).detach().numpy()
    np.testing.assert_allclose(agent.act(data[0][:5]), expected, atol=1e-6)
    other = script.Agent(11, 3, Args())
    other.load_state_dict(agent.state_dict())
    np.testing.assert_array_equal(other.act(data[0][:5]), agent.act(data[0][:5]))


def test_statistics_of_a_million_rows_keep_their_precision():
    observations = np.full((1_000_000, 2), 1000.1, dtype=np.float32)  # one column would be summed
    observations[::2] += 1  # pairwise by numpy, and be precise anyway
    agent = Agent(2, 1, Args())
    agent.fit_statistics(observations, observations[:, 0], Args())
    np.testing.assert_allclose(agent.obs_mean, 1000.6, atol=1e-3)
    np.testing.assert_allclose(agent.obs_std, 0.501, atol=1e-3)


def test_states_stay_as_they_are_without_normalisation():
    agent = Agent(11, 3, Args())
    agent.fit_statistics(np.random.rand(10, 11), np.random.rand(10), Args(normalize_states=False))
    obs = torch.randn(3, 11)
    assert torch.equal(agent.normalize(obs), obs)


@pytest.mark.parametrize(
    ("transform", "expected"),
    [("raw", [0.0, 1.0, 5.0]), ("antmaze", [-2.0, 2.0, 18.0]), ("standardize", None)],
)
def test_rewards_are_transformed_as_the_task_says(transform, expected):
    rewards = np.array([0.0, 1.0, 5.0], dtype=np.float32)
    expected = (rewards - 2) / np.sqrt(14 / 3) if expected is None else expected
    agent = Agent(2, 1, Args())
    agent.fit_statistics(np.zeros((3, 2)), rewards, Args(reward_transform=transform))
    transitions = np.ones((3, 2)), np.ones((3, 1)), rewards, np.zeros((3, 2)), [False, True, False]
    obs, actions, transformed, next_obs, terminals = agent.to_tensors(*transitions)
    np.testing.assert_allclose(transformed, expected, rtol=1e-5)
    np.testing.assert_allclose(obs, np.full((3, 2), 1000), rtol=1e-5)  # (1 - 0) / (0 + 0.001)
    assert next_obs.eq(0).all() and actions.eq(1).all() and terminals.tolist() == [0, 1, 0]
    assert all(x.dtype == torch.float32 for x in (obs, actions, transformed, next_obs, terminals))


@pytest.mark.parametrize(
    ("name", "ids"),
    [
        ("hopper-medium-v2", "mujoco/hopper/medium-v0"),
        ("walker2d-expert-v2", "mujoco/walker2d/expert-v0"),
        (
            "halfcheetah-medium-expert-v2",
            "mujoco/halfcheetah/medium-v0,mujoco/halfcheetah/expert-v0",
        ),
        ("maze2d-large-v1", "D4RL/pointmaze/large-v2"),
        ("antmaze-umaze-v0", "D4RL/antmaze/umaze-v1"),
        ("antmaze-umaze-diverse-v2", "D4RL/antmaze/umaze-diverse-v1"),
        ("antmaze-large-play-v2", "D4RL/antmaze/large-play-v1"),
        ("pen-human-v1", "D4RL/pen/human-v2"),
        ("relocate-cloned-v1", "D4RL/relocate/cloned-v2"),
    ],
)
def test_a_d4rl_name_without_its_file_asks_for_minaris_counterpart(name, ids, monkeypatch):
    asked = []

    def load_dataset(dataset_id, download):
        asked.append(dataset_id)
        raise ConnectionError("no network")

    monkeypatch.setattr("minari.load_dataset", load_dataset)
    with pytest.raises(SystemExit, match=re.escape(ids.split(",")[0])) as error:
        load_data(name)
    assert "fetch it: " in str(error.value), "or D4RL's own file"
    assert asked == ids.split(",")[:1]


@pytest.mark.parametrize("name", ["hopper-medium-replay-v2", "walker2d-random-v2"])
def test_a_d4rl_name_without_file_or_counterpart_says_how_to_get_the_file(name, monkeypatch):
    monkeypatch.setenv("D4RL_DATASET_DIR", "nowhere")
    monkeypatch.setattr("minari.load_dataset", lambda *_, **__: pytest.fail("not Minari's"))
    file = name.replace("-v2", "").replace("-", "_", 1).replace("-", "_")
    with pytest.raises(SystemExit, match=f"no file nowhere/{file}-v2.hdf5\n  fetch it: .*curl"):
        load_data(name)


def test_medium_expert_is_both_of_its_minari_data_sets(datasets):
    env = gym.make("Hopper-v5", max_episode_steps=5)
    create("mujoco/hopper/medium-v0", collect(env, 2, seed=0), env)
    create("mujoco/hopper/expert-v0", collect(env, 3, seed=9), env)
    assert load_data("hopper-medium-expert-v2")[1]["episodes"] == 5


@pytest.fixture
def d4rl_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("D4RL_DATASET_DIR", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_d4rl_name_takes_d4rls_file_and_environment_if_the_file_is_there(script, d4rl_folder):
    stored = write_d4rl_file(d4rl_folder / "hopper_medium-v2.hdf5", rows=50)
    data, facts, make_env = script.load_data("hopper-medium-v2")
    np.testing.assert_allclose(data[0], stored["observations"][:-1], rtol=1e-6)
    assert all(column.dtype == np.float32 for column in data)
    assert facts["source"] == str(d4rl_folder / "hopper_medium-v2.hdf5")
    assert facts["environment"] == "hopper-medium-v2, 1000 steps"
    assert facts["comparable_with_the_paper"].startswith("yes")
    env = make_env()
    assert type(env.unwrapped).__module__.endswith("hopper_v4")


def test_antmaze_v2_is_not_the_papers_antmaze(d4rl_folder):
    names = {"v0": "sparse", "v2": "sparse_fixed"}
    for version, ending in names.items():
        name = f"Ant_maze_u-maze_noisy_multistart_False_multigoal_False_{ending}.hdf5"
        observations = np.zeros((20, 29))
        write_d4rl_file(d4rl_folder / name, observations=observations, action_size=8)
        facts = load_data(f"antmaze-umaze-{version}")[1]
        assert facts["comparable_with_the_paper"][:3] == {"v0": "yes", "v2": "no:"}[version]


def test_dataset_path_forces_a_file(d4rl_folder):
    path = d4rl_folder / "somewhere.hdf5"
    write_d4rl_file(path, rows=30)
    assert load_data("hopper-expert-v2", str(path))[1]["transitions"] == 29


@pytest.mark.parametrize(
    ("env_id", "file", "message"),
    [
        ("hopper-expert-v2", "nowhere.hdf5", "no file .*nowhere.hdf5"),
        ("tests/hopper/random-v0", "file.hdf5", "not a data set of D4RL's"),
        (
            "walker2d-expert-v2",
            "file.hdf5",
            r"shape \(11,\), where walker2d-expert-v2 has \(17,\)",
        ),
    ],
)
def test_a_file_that_does_not_fit_is_one_clear_line(d4rl_folder, env_id, file, message):
    write_d4rl_file(d4rl_folder / "file.hdf5")
    with pytest.raises(SystemExit, match=message):
        load_data(env_id, str(d4rl_folder / file))


@pytest.mark.parametrize("script", ["td3_bc_n", "sac_bc_n"])
def test_one_file_copied_into_another_project_works(script, tmp_path):
    shutil.copy(ROOT / f"{script}.py", tmp_path)
    arguments = [
        "--env-id",
        "tests/hopper/random-v0",
        "--gradient-steps",
        "2",
        "--num-critics",
        "2",
    ]
    command = [sys.executable, f"{script}.py", *arguments]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    assert list(tmp_path.glob(f"runs/*__{script}__1__*/result.json"))
    process = subprocess.run(
        [*command, "--dataset-path", "x.hdf5"], cwd=tmp_path, capture_output=True, text=True
    )
    assert process.returncode == 1 and "needs d4rl_tasks.py beside this script" in process.stderr


def broken_copy(datasets, name):
    """A copy of the hopper's data set, to be broken."""
    shutil.copytree(datasets / "tests/hopper/random-v0", datasets / name, dirs_exist_ok=True)
    return datasets / name / "data"


@pytest.mark.parametrize(
    ("key", "row", "word"),
    [
        ("rewards", 2, "reward"),
        ("observations", 2, "observation"),
        ("observations", -1, "successor"),
    ],
)
def test_values_that_are_not_finite_are_named(datasets, key, row, word):
    name = f"tests/broken/{word}-v0"
    with h5py.File(broken_copy(datasets, name) / "main_data.hdf5", "r+") as file:
        first, length = (len(file[f"episode_{i}/rewards"]) for i in (0, 1))
        file[f"episode_1/{key}"][row] = np.nan
    index = first + (row if row >= 0 else length - 1)
    with pytest.raises(SystemExit, match=f"{name}: {word} {index} is not finite"):
        load_data(name)


def test_an_episode_with_an_observation_too_few_is_one_clear_line(datasets):
    with h5py.File(broken_copy(datasets, "tests/broken/few-v0") / "main_data.hdf5", "r+") as file:
        shorter = file["episode_4/observations"][:-1]
        del file["episode_4/observations"]
        file["episode_4/observations"] = shorter
    with pytest.raises(SystemExit, match="episode 4 has not one observation more than actions"):
        load_data("tests/broken/few-v0")


def test_data_of_two_environments_do_not_mix():
    with pytest.raises(
        SystemExit, match="not of one known environment, but of Hopper-v5, Pendulum-v1"
    ):
        load_data("tests/hopper/random-v0,tests/swing-v0")


def test_a_dense_maze_is_another_task_and_has_no_terminal_goal():
    env = gym.make("PointMaze_UMazeDense-v3", continuing_task=True, max_episode_steps=10)
    create("tests/pointmaze/umaze-dense-v0", collect(env, 2, seed=0), env)
    data, facts, _ = load_data("tests/pointmaze/umaze-dense-v0")
    assert (data[2] > 0).all() and (data[4] == 0).all() and "generic" in facts["task"]


def test_actions_without_bounds_are_one_clear_line():
    env = gym.make("CartPole-v1", max_episode_steps=5)
    with pytest.raises(SystemExit, match="CartPole-v1: its actions are not numbers between bounds"):
        td3_bc_n.wrap(env)


def test_a_data_file_cut_short_is_one_clear_line(datasets):
    path = broken_copy(datasets, "tests/broken/short-v0") / "main_data.hdf5"
    path.write_bytes(path.read_bytes()[:20_000])
    with pytest.raises(SystemExit, match="tests/broken/short-v0: its data file cannot be read"):
        load_data("tests/broken/short-v0")


def test_a_data_set_without_a_key_is_one_clear_line(datasets):
    folder = broken_copy(datasets, "tests/broken/key-v0")
    with h5py.File(folder / "main_data.hdf5", "r+") as file:
        del file["episode_3/actions"]
    with pytest.raises(SystemExit, match=r"cannot be read .*actions"):
        load_data("tests/broken/key-v0")


def test_an_empty_data_set_is_one_clear_line(datasets):
    path = broken_copy(datasets, "tests/broken/empty-v0") / "metadata.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"total_episodes": 0}))
    with pytest.raises(SystemExit, match="tests/broken/empty-v0: no episodes in it"):
        load_data("tests/broken/empty-v0")


def test_data_without_an_environment_is_one_clear_line(datasets):
    path = broken_copy(datasets, "tests/broken/nameless-v0") / "metadata.json"
    metadata = json.loads(path.read_text())
    del metadata["env_spec"], metadata["eval_env_spec"]
    path.write_text(json.dumps(metadata))
    with pytest.raises(SystemExit, match="not of one known environment, but of unknown"):
        load_data("tests/broken/nameless-v0")


def test_an_unknown_name_gets_the_nearest_and_the_ways_on():
    with pytest.raises(SystemExit) as error:
        load_data("hoper-medium-v2")
    text = str(error.value)
    assert "nearest names: hopper-medium-v2" in text and "minari download hoper-medium-v2" in text
    with pytest.raises(SystemExit, match="nearest names: tests/hopper/random-v0"):
        load_data("tests/hopper/randon-v0")


def test_episodes_of_one_step_are_transitions_like_others():
    env = gym.make("Hopper-v5", max_episode_steps=1)
    create("tests/hopper/steps-v0", collect(env, 5, seed=0), env)
    data, facts, _ = load_data("tests/hopper/steps-v0")
    assert facts["episodes"] == facts["transitions"] == 5
    assert (data[0] != data[3]).any(axis=1).all()
