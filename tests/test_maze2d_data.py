"""The data set that comes along, and the script that makes it and the full-size ones."""

import importlib.util
import math
import subprocess
import sys

import h5py
import minari
import numpy as np
import pytest
from conftest import ROOT

import d4rl_tasks
import td3_bc_n

MAKER = ROOT / "datasets/make_maze2d.py"
spec = importlib.util.spec_from_file_location("make_maze2d", MAKER)
make_maze2d = importlib.util.module_from_spec(spec)
spec.loader.exec_module(make_maze2d)


def make(*arguments, check=True):
    command = [sys.executable, MAKER, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=check)


def read(path):
    with h5py.File(path) as file:
        return {key: file[key][()] for key in file}


def test_the_file_that_comes_along_is_what_its_script_makes(tmp_path):
    bundled = d4rl_tasks.find(d4rl_tasks.TINY)
    assert bundled.stat().st_size < 3_000_000
    make("--tiny", "--out", tmp_path / "again.hdf5")
    ours, again = read(bundled), read(tmp_path / "again.hdf5")
    assert ours.keys() == again.keys()
    for key, column in ours.items():
        np.testing.assert_array_equal(column, again[key])


def test_its_rewards_actions_and_states_are_of_d4rls_recipe_and_physics():
    data = read(d4rl_tasks.find(d4rl_tasks.TINY))
    obs, actions, rewards = data["observations"], data["actions"], data["rewards"]
    assert len(obs) == 100_000 and np.abs(actions).max() <= 1
    at_goal = np.linalg.norm(obs[:, :2] - [1, 1], axis=1) <= 0.5
    np.testing.assert_array_equal(rewards, at_goal)
    assert 15 < 300 * rewards.mean() < 30, "its controller collects about 21 in 300 steps"
    cells = {tuple(cell) for cell in np.round(obs[:, :2]).astype(int)}
    maze = d4rl_tasks.TASKS[d4rl_tasks.TINY].kwargs["maze"].split()
    free = {(i, j) for i, row in enumerate(maze) for j, c in enumerate(row) if c != "#"}
    assert free <= cells, "every free cell is visited"
    # One step from recorded states is the next recorded state.
    env = d4rl_tasks.Maze2dEnv(" ".join(maze))
    env.reset(seed=0)
    for i in range(0, 99_000, 499):
        env.set_state(obs[i, :2].astype(float), obs[i, 2:].astype(float))
        np.testing.assert_allclose(env.step(actions[i])[0], obs[i + 1], atol=2e-3)


def test_targets_are_reached_slowly_or_given_up_at_the_horizon():
    data = read(d4rl_tasks.find(d4rl_tasks.TINY))
    ends = np.flatnonzero(data["terminals"])
    lengths = np.diff(np.concatenate([[-1], ends]))
    assert lengths.max() <= 300 and not data["timeouts"].any()
    at_end = data["observations"][ends[lengths < 300]][:, :2]
    assert np.linalg.norm(at_end - np.round(at_end), axis=1).max() < 0.1 + 1e-6
    targets = {tuple(cell) for cell in np.round(at_end).astype(int)}
    assert len(targets) == 7, "any free cell, and the goal"


def test_paths_are_shortest_and_go_through_free_cells():
    maze = d4rl_tasks.MAZE2D["large"][0].split()
    path = make_maze2d.shortest_path(maze, (1, 1), (7, 9))
    assert path[-1] == (7, 9) and all(maze[i][j] != "#" for i, j in path)
    for one, next_one in zip([(1, 1), *path], path, strict=False):
        assert math.dist(one, next_one) == 1
    assert len(path) == 6 + 8, "there is a way without a detour"
    umaze = d4rl_tasks.MAZE2D["umaze"][0].split()
    around = [(3, 2), (3, 3), (2, 3), (1, 3), (1, 2), (1, 1)]
    assert make_maze2d.shortest_path(umaze, (3, 1), (1, 1)) == around
    assert make_maze2d.shortest_path(maze, (3, 3), (3, 3)) == []


@pytest.mark.parametrize("maze", ["umaze", "medium", "large"])
def test_a_file_of_each_maze_is_read_under_d4rls_name(maze, tmp_path):
    path, name = tmp_path / "made.hdf5", f"maze2d-{maze}-v1"
    printed = make("--maze", maze, "--steps", 1500, "--out", path).stdout
    assert str(path) in printed and f"--env-id {name}" in printed
    _, facts, _ = td3_bc_n.load_data(name, path)
    assert facts["transitions"] == 1499
    assert facts["comparable_with_the_paper"].startswith("nearly: not D4RL's own file")
    horizon = d4rl_tasks.TASKS[name].horizon
    assert facts["episodes"] == math.ceil(1500 / horizon)
    assert make("--steps", 10, "--out", path, check=False).returncode == 1, "nothing is overwritten"
    other = tmp_path / "other.hdf5"
    make("--maze", maze, "--steps", 1500, "--seed", 2, "--out", other)
    assert not np.array_equal(read(path)["actions"], read(other)["actions"])


def test_as_a_minari_data_set_it_has_the_same_transitions(tmp_path):
    make("--steps", 4000, "--out", tmp_path / "made.hdf5")
    make("--steps", 4000, "--minari", "tests/maze2d-umaze-v0")
    assert minari.load_dataset("tests/maze2d-umaze-v0").total_steps == 4000
    flat, _, _ = td3_bc_n.load_data("maze2d-umaze-v1", tmp_path / "made.hdf5")
    data, facts, new_env = td3_bc_n.load_data("tests/maze2d-umaze-v0")
    assert data[4].sum() == flat[4].sum() > 3, "the goal was left, which is taken for an end"
    for one, other in zip(flat, data, strict=True):
        np.testing.assert_allclose(one, other[:-1], atol=1e-6)  # the last has a successor here
    assert facts["environment"] == "maze2d-umaze-v1, 300 steps"
    assert new_env().reset(seed=0)[0].shape == (4,)


def test_the_data_of_a_maze2d_is_told_by_evaluation_lengths():
    _, facts, _ = td3_bc_n.load_data(d4rl_tasks.TINY)
    rewards = read(d4rl_tasks.find(d4rl_tasks.TINY))["rewards"]
    assert facts["episodes"] == 334
    assert facts["mean_return"] == pytest.approx(rewards.sum() / 334)
    assert facts["data_score"] == pytest.approx(100 * (facts["mean_return"] - 23.85) / 138.01)
    assert facts["comparable_with_the_paper"] == "no: a small data set of our own"


def test_without_its_file_the_name_says_how_to_make_it(monkeypatch, tmp_path):
    monkeypatch.setattr(d4rl_tasks, "__file__", str(tmp_path / "d4rl_tasks.py"))
    with pytest.raises(SystemExit, match=r"make it: python .*make_maze2d.py --tiny"):
        td3_bc_n.load_data(d4rl_tasks.TINY)
