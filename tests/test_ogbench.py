"""tools.ogbench: OGBench's files become Minari datasets, with the success rate as the score."""

import importlib.metadata
import importlib.util
import itertools
import json
import shutil
import sys
from functools import cache, partial

import gymnasium as gym
import minari
import numpy as np
import pytest
from conftest import run_script

import td3_bc_n
from tools import ogbench as tool
from tools import record

installed = importlib.util.find_spec("ogbench") is not None
needs_ogbench = pytest.mark.skipif(not installed, reason="ogbench is optional: not installed")
CUBE, SCENE = "cube-single-play-singletask-v0", "scene-play-singletask-task4-v0"
MAZE = "pointmaze-medium-navigate-singletask-v0"
STEPS = 120  # an oracle moves a cube in about 90


def convert(name, directory, dataset_id):
    tool.main(tool.Args(name, str(directory), dataset_id))
    return dataset_id


def make(directory, name, episodes=1, steps=STEPS, **changes):
    """Makes files with the oracles. Returns their columns."""
    task, _ = name.split("-play")
    paths = [directory / f"{task}-play-v0{suffix}.npz" for suffix in ("", "-val")]
    args = tool.Args(name, make=episodes, episode_steps=steps, **changes)
    tool.make_files(paths, task, args)
    return [dict(np.load(path)) for path in paths]


@cache
def load(dataset_id):
    """Transitions, metadata and make_env, once: an environment takes a second."""
    return td3_bc_n.load_data(dataset_id)


def write_maze(directory, goal):
    """OGBench's files of a maze, with random walks of 7, 5 and 2 rows (training) and 4."""
    rng = np.random.default_rng(0)
    for suffix, lengths in (("", [7, 5, 2]), ("-val", [4])):
        rows = sum(lengths)
        qpos = rng.uniform(0, 4, size=(rows, 2)).astype(np.float32)
        if not suffix:
            qpos[[2, 5, 6, 9]] = goal  # row 6 is the last state of the first trajectory
        data = {"observations": qpos, "qpos": qpos, "qvel": np.zeros_like(qpos)}
        data["actions"] = rng.uniform(-1, 1, size=(rows, 2)).astype(np.float32)
        data["terminals"] = np.isin(np.arange(rows), np.cumsum(lengths) - 1)
        np.savez_compressed(directory / f"pointmaze-medium-navigate-v0{suffix}.npz", **data)


@pytest.fixture(scope="module")
def maze(tmp_path_factory):
    """The directory of the files of a maze, and the ids of its datasets."""
    tool.import_ogbench()
    directory = tmp_path_factory.mktemp("maze")
    env = gym.make("pointmaze-medium-singletask-v0")
    env.reset()
    write_maze(directory, env.unwrapped.cur_goal_xy)
    tool.main(tool.Args(MAZE, dataset_dir=str(directory)))
    return directory, (f"ogbench/{MAZE}", f"ogbench/{MAZE.replace('-v0', '-val-v0')}")


@pytest.fixture(scope="module")
def cube(tmp_path_factory):
    """The directory of the files that --make has written, and the ids of their datasets."""
    directory = tmp_path_factory.mktemp("cube")
    options = {"make": 2, "episode_steps": STEPS, "dataset_dir": str(directory)}
    tool.main(tool.Args(CUBE, **options))
    return directory, (f"ogbench-made/{CUBE}", f"ogbench-made/{CUBE.replace('-v0', '-val-v0')}")


@pytest.fixture(params=["maze", "cube"])
def converted(request):
    """Name, directory and ids of a dataset."""
    return {"maze": MAZE, "cube": CUBE}[request.param], *request.getfixturevalue(request.param)


# --- Transitions ---


@needs_ogbench
def test_the_transitions_are_those_of_the_package_and_dones_are_its_masks(converted):
    import ogbench

    name, directory, dataset_ids = converted
    _, *parts = ogbench.make_env_and_datasets(name, dataset_dir=str(directory))
    data, metadata, _ = load(dataset_ids[0])
    np.testing.assert_array_equal(data.obs, parts[0]["observations"])
    np.testing.assert_array_equal(data.next_obs, parts[0]["next_observations"])
    np.testing.assert_allclose(data.actions, parts[0]["actions"].clip(-1, 1), atol=1e-6)
    np.testing.assert_array_equal(data.rewards, parts[0]["rewards"])
    np.testing.assert_array_equal(data.dones, 1 - parts[0]["masks"])
    assert metadata["transitions"] == len(parts[0]["masks"])
    for dataset_id, part in zip(dataset_ids, parts, strict=True):
        episodes = minari.load_dataset(dataset_id)
        assert len(episodes) == part["terminals"].sum()
        rewards = np.concatenate([episode.rewards for episode in episodes])
        np.testing.assert_array_equal(rewards, part["rewards"])


@needs_ogbench
def test_a_state_at_the_goal_is_done_with_reward_0_and_its_trajectory_goes_on(maze):
    data = load(maze[1][0])[0]
    at_goal = np.isin(np.arange(11), [2, 5, 8])  # rows 2, 5, 9 of the file: row 6 is not a step
    np.testing.assert_array_equal(data.dones, at_goal)
    np.testing.assert_array_equal(data.rewards, at_goal - 1.0)
    ends = [(e.terminations[-1], e.truncations[-1]) for e in minari.load_dataset(maze[1][0])]
    assert ends == [(True, False), (False, True), (False, True)]
    for episode in minari.load_dataset(maze[1][0]):
        assert not episode.truncations[:-1].any()


@needs_ogbench
def test_training_and_validation_files_are_datasets_apart(converted):
    name, directory, dataset_ids = converted
    for dataset_id, suffix in zip(dataset_ids, ("", "-val"), strict=True):
        file = np.load(directory / f"{name.split('-singletask')[0]}-v0{suffix}.npz")
        episodes = [episode.observations for episode in minari.load_dataset(dataset_id)]
        np.testing.assert_array_equal(np.concatenate(episodes), file["observations"])


# --- Evaluation and training ---


class AtGoal(gym.Wrapper):
    """Puts the ball of a maze, or the cube, where the task wants it."""

    def reset(self, **kwargs):
        obs, info = self.env.reset(**kwargs)
        env = self.unwrapped
        if hasattr(env, "set_xy"):
            env.set_xy(env.cur_goal_xy)
        else:
            qpos, qvel = env.data.qpos.copy(), np.zeros_like(env.data.qvel)
            qpos[14:17] = env.data.mocap_pos[0]
            env.set_state(qpos, qvel)
            env.post_step()
        return obs, info


@needs_ogbench
def test_the_score_is_the_success_rate_in_percent_and_success_ends_an_episode(converted):
    name, _, (dataset_id, _) = converted
    data, metadata, make_env = load(dataset_id)

    class Still:
        def act(self, obs):
            return np.zeros((len(obs), data.actions.shape[1]))

    evaluate = partial(td3_bc_n.evaluate, Still(), num_episodes=1, seed=1, metadata=metadata)
    env = make_env()
    scores, returns = evaluate([AtGoal(env)])
    assert (returns, scores["score"], scores["eval_length"]) == ([1.0], 100.0, 1)
    scores, returns = evaluate([env])
    limit = 1000 if name == MAZE else 200  # of the package
    assert (returns, scores["score"], scores["eval_length"]) == ([0.0], 0.0, limit)


@needs_ogbench
def test_fine_tuning_has_the_rewards_of_the_dataset_and_evaluation_those_of_success(maze):
    _, metadata, make_env = load(maze[1][0])
    rewards = []
    for kwargs in ({}, metadata["train_env_kwargs"]):
        for env in (make_env(**kwargs), AtGoal(make_env(**kwargs))):
            env.reset(seed=0)
            rewards.append(env.step(np.zeros(2))[1:3])
    assert rewards == [(0.0, False), (1.0, True), (-1.0, False), (0.0, True)]


@needs_ogbench
@pytest.mark.parametrize("script", ["td3_bc_n", "sac_bc_n"])
def test_a_script_trains_on_it_and_is_evaluated_without_trust(script, maze, tmp_path):
    arguments = ["--gradient-steps", 4, "--num-critics", 2, "--batch-size", 8]
    arguments += ["--eval-frequency", 4, "--eval-episodes", 2, "--run-name", "run"]
    process = run_script(script, "--env-id", f"ogbench/{MAZE}", *arguments, "--runs-dir", tmp_path)
    assert process.returncode == 0, process.stderr
    result = json.loads((tmp_path / "run/result.json").read_text())
    assert result["step"] == 4 and set(result["returns"]) <= {0.0, 1.0}
    assert result["score"] == 100 * np.mean(result["returns"])
    assert result["metadata"]["environment"] == "pointmaze-medium-singletask-v0"


@needs_ogbench
def test_the_environments_are_specified_by_packages_that_the_scripts_execute(converted):
    *_, (dataset_id, _) = converted
    stored = minari.load_dataset(dataset_id).storage.metadata
    env, eval_env = (json.loads(stored[key]) for key in ("env_spec", "eval_env_spec"))
    assert env["entry_point"].startswith("ogbench.") and not env["additional_wrappers"]
    (wrapper,) = eval_env.pop("additional_wrappers")
    assert wrapper["entry_point"] == "d4rl_tasks:SuccessReward"
    assert eval_env.items() <= env.items()
    assert (stored["ref_min_score"], stored["ref_max_score"]) == (0.0, 1.0)


# --- Files of --make ---


def assert_ogbench_file(data, episodes, steps, **shapes):
    """Keys, types and shapes as OGBench documents them, and rows that belong together."""
    shapes |= {"actions": (5,), "terminals": ()}
    assert data.keys() - {"made_by"} == shapes.keys()
    for key, shape in shapes.items():
        dtype = {"terminals": bool, "button_states": np.int64}.get(key, np.float32)
        assert (data[key].shape, data[key].dtype) == ((steps * episodes, *shape), dtype), key
    ends = np.flatnonzero(data["terminals"]).tolist()
    assert ends == [steps * (i + 1) - 1 for i in range(episodes)]
    assert np.abs(data["actions"]).max() <= 1
    # qpos is that of the observation of its row: the first six are the joints of the arm
    np.testing.assert_array_equal(data["observations"][:, :6], data["qpos"][:, :6])


@needs_ogbench
def test_made_files_have_the_format_of_ogbench(cube):
    shapes = {"observations": (28,), "qpos": (21,), "qvel": (20,)}
    for suffix, episodes in (("", 2), ("-val", 1)):
        data = dict(np.load(cube[0] / f"cube-single-play-v0{suffix}.npz"))
        assert_ogbench_file(data, episodes, STEPS, **shapes)


@needs_ogbench
def test_the_package_loads_a_made_file_of_scene_with_the_rewards_of_its_states(tmp_path):
    import ogbench

    file, _ = make(tmp_path, SCENE, steps=30)
    shapes = {"observations": (40,), "qpos": (25,), "qvel": (24,), "button_states": (2,)}
    assert_ogbench_file(file, 1, 30, **shapes)
    env, data, _ = ogbench.make_env_and_datasets(SCENE, dataset_dir=str(tmp_path))
    env.reset(seed=0)
    for row in range(29):
        state = [file[key][row].astype(float) for key in ("qpos", "qvel")]
        env.unwrapped.set_state(*state, file["button_states"][row])
        assert env.unwrapped.compute_reward() == data["rewards"][row]


@needs_ogbench
def test_the_oracle_lifts_the_cube_and_then_has_a_new_target(cube):
    data = np.load(cube[0] / "cube-single-play-v0.npz")
    for start, end in ((0, STEPS), (STEPS, 2 * STEPS)):
        assert np.ptp(data["qpos"][start:end, 16]) > 0.05
        assert np.ptp(data["observations"][end - 20 : end, 12]) > 0.05, "the hand moves on"


@needs_ogbench
@pytest.mark.parametrize("task", ["puzzle-3x3", "cube-double"])
def test_other_tasks_have_their_oracles(task):
    data = tool.play_episode((task, 6, 1, 0))
    assert len(data["observations"]) == 6 and np.isfinite(data["observations"]).all()
    assert ("button_states" in data) == (task == "puzzle-3x3")


@needs_ogbench
def test_the_same_seed_makes_the_same_files_whatever_the_number_of_processes(tmp_path):
    one, same = (make(tmp_path, CUBE, 2, steps=6, processes=processes) for processes in (1, 2))
    for part, same_part in zip(one, same, strict=True):
        for key in part:
            np.testing.assert_array_equal(part[key], same_part[key], err_msg=key)
    other = make(tmp_path, CUBE, 2, steps=6, seed=2)
    episodes = [*np.split(one[0]["qpos"], 2), one[1]["qpos"], *np.split(other[0]["qpos"], 2)]
    assert len({episode.tobytes() for episode in episodes}) == 5


def test_one_more_episode_for_every_ten_is_for_validation(tmp_path, monkeypatch):
    monkeypatch.setattr(tool, "play_episode", lambda job: {"qpos": np.full((1, 21), job[-1])})
    for episodes, more in ((1, 1), (19, 1), (20, 2)):
        training, validation = make(tmp_path, CUBE, episodes)
        assert training["qpos"][:, 0].tolist() == [*range(episodes)]
        assert validation["qpos"][:, 0].tolist() == [*range(episodes, episodes + more)]


@needs_ogbench
def test_an_episode_in_which_the_cube_of_scene_is_lost_is_played_again(monkeypatch):
    first = tool.play_episode(("scene", 3, 1, 0))
    answers = iter([True, False])
    monkeypatch.setattr(tool, "cube_is_lost", lambda qpos: next(answers))
    second = tool.play_episode(("scene", 3, 1, 0))
    assert not np.array_equal(first["qpos"], second["qpos"]) and len(second["qpos"]) == 3


@pytest.mark.parametrize(
    ("y", "z", "lost"),
    [(0.0, 0.02, False), (0.3, 0.02, True), (-0.35, 0.07, False), (-0.35, 0.02, True)],
)
def test_a_cube_is_lost_beside_the_table_and_not_in_the_drawer(y, z, lost):
    qpos = np.zeros((3, 21))
    qpos[1, 14:17] = 0.4, y, z
    assert tool.cube_is_lost(qpos) == lost


@needs_ogbench
def test_made_files_do_not_pass_for_those_of_ogbench(maze, cube, tmp_path):
    """Without --make, the mark in the file decides."""
    for path in maze[0].glob("*.npz"):
        np.savez(tmp_path / path.name, **np.load(path), made_by="tools.ogbench")
    tool.main(tool.Args(MAZE, dataset_dir=str(tmp_path)))
    names = {"ogbench-made": "OGBench's oracles, by tools.ogbench", "ogbench": "OGBench"}
    for namespace, algorithm_name in names.items():
        stored = minari.load_dataset(f"{namespace}/{MAZE}").storage.metadata
        assert stored["algorithm_name"] == algorithm_name
    assert "made_by" in np.load(cube[0] / "cube-single-play-v0.npz")


# --- Mistakes ---


def assert_exits(message, name=MAZE, **options):
    with pytest.raises(SystemExit, match=message) as error:
        tool.main(tool.Args(name, **options))
    assert "\n" not in error.value.code


def test_a_missing_package_is_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "ogbench", None)
    assert_exits(r"tools.ogbench needs OGBench: pip install ogbench==1\.2\.2")


@needs_ogbench
def test_a_version_with_other_rewards_is_refused(monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "1.1.5")
    assert_exits("ogbench 1.1.5 has other rewards than 1.2")


@needs_ogbench
@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("cube-single-play-v0", {}, f"not a single-task dataset .*, such as {CUBE}"),
        ("cube-singel-play-singletask-v0", {}, f"not a single-task dataset .*, such as {CUBE}"),
        ("visual-antmaze-large-navigate-singletask-v0", {}, "without images"),
        (CUBE, {"make": -1}, "--make, --seed at least 0"),
        (CUBE, {"make": 1, "processes": 0}, "--processes at least 1"),
        (CUBE, {"make": 1, "episode_steps": 1}, "--episode-steps at least 2"),
        (CUBE.replace("play", "noisy"), {"make": 1}, "--make is for play datasets"),
        (MAZE, {"make": 1}, "--make is for play datasets"),
        (CUBE, {"dataset_id": "tests/swing-v0"}, "this Minari dataset exists"),
    ],
)
def test_mistakes_are_one_line_before_the_work_starts(name, options, message, monkeypatch):
    monkeypatch.setattr(tool, "make_files", None)  # it must not be called
    assert_exits(message, name, **options)


@needs_ogbench
def test_files_are_not_overwritten(cube):
    assert_exits(
        "exists: use it without --make",
        CUBE,
        dataset_dir=str(cube[0]),
        make=1,
        dataset_id="converted/o-v0",
    )


@needs_ogbench
def test_half_of_a_made_dataset_is_not_completed_by_a_download(cube, tmp_path):
    name = "cube-single-play-v0.npz"
    shutil.copy(cube[0] / name, tmp_path / name)
    options = {"dataset_dir": str(tmp_path), "dataset_id": "converted/half-v0"}
    assert_exits("only one of cube-single-play-v0.npz and -val.npz", CUBE, **options)


@needs_ogbench
def test_a_failed_download_and_a_broken_file_are_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr("ogbench.utils.DATASET_URL", "http://127.0.0.1:9")
    options = {"dataset_dir": str(tmp_path), "dataset_id": "converted/none-v0"}
    assert_exits("cannot be loaded from .*refused", **options)
    (tmp_path / "pointmaze-medium-navigate-v0.npz").write_bytes(b"<html>")
    assert_exits("pointmaze-medium-navigate-v0 cannot be read", **options)


@needs_ogbench
def test_both_datasets_are_written_or_none(maze, datasets, monkeypatch):
    calls = itertools.count()

    def write(*args, **kwargs):
        if next(calls) == 1:  # the validation dataset
            raise KeyboardInterrupt
        record.write_dataset(*args, **kwargs)

    monkeypatch.setattr(tool, "write_dataset", write)
    with pytest.raises(KeyboardInterrupt):
        convert(MAZE, maze[0], "converted/half-v0")
    assert not list((datasets / "converted").glob("half*"))
