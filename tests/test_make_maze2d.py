"""tools.make_maze2d: the bundled dataset, and files and Minari datasets by D4RL's recipe."""

import math
import resource
import subprocess

import h5py
import numpy as np
import pytest

import d4rl_tasks
import td3_bc_n
from tools import make_maze2d


@pytest.fixture(autouse=True)
def d4rl_dir(tmp_path, monkeypatch):
    monkeypatch.setenv("D4RL_DATASET_DIR", str(tmp_path / "d4rl"))
    return tmp_path / "d4rl"


def make(**kwargs):
    make_maze2d.main(make_maze2d.Args(**kwargs))


def read(path):
    with h5py.File(path) as file:
        return {key: file[key][()] for key in file}, file.attrs["made_by"]


@pytest.fixture(scope="module")
def bundled():
    return read(d4rl_tasks.find(d4rl_tasks.TINY))[0]


def test_the_bundled_file_is_what_the_tool_makes(tmp_path):
    path = d4rl_tasks.find(d4rl_tasks.TINY)
    assert path.stat().st_size < 3_000_000
    make(tiny=True, out=str(tmp_path / "again.hdf5"))
    (ours, made_by), (again, again_made_by) = read(path), read(tmp_path / "again.hdf5")
    assert ours.keys() == again.keys() and made_by == again_made_by == "tools.make_maze2d"
    for key, column in ours.items():
        np.testing.assert_array_equal(column, again[key])


def test_positions_and_targets_are_those_of_d4rls_file(bundled):
    """D4RL's file: 0.393 to 3.220 x 0.627 to 3.219. Without noise: 0.74 to 3.06 x 0.94 to 3.06."""
    obs = bundled["observations"]
    np.testing.assert_allclose(obs[:, :2].max(axis=0), [3.220, 3.219], atol=0.01)
    np.testing.assert_allclose(obs[:, :2].min(axis=0), [0.393, 0.627], atol=0.15)
    np.testing.assert_allclose(np.abs(obs[:, 2:]).max(axis=0), 5.2262554, atol=1e-4)
    assert np.abs(bundled["actions"]).max() == 1
    targets = 10 * bundled["timeouts"].sum()
    assert 12_000 < targets < 13_500, "of 1M steps, as in D4RL's and Minari's datasets"


def test_the_row_after_a_timeout_repeats_the_observation_while_the_ball_moves_on(bundled):
    obs, actions, timeouts = (bundled[key] for key in ("observations", "actions", "timeouts"))
    ends = np.flatnonzero(timeouts[:-1])
    np.testing.assert_array_equal(obs[ends], obs[ends + 1])
    others = np.flatnonzero(~timeouts[:-1])
    assert (obs[others] != obs[others + 1]).any(axis=1).all()
    # One step from a state is the next row, two steps from one with a timeout the row after it.
    env = d4rl_tasks.Maze2dEnv(d4rl_tasks.MAZE2D["umaze"][0])
    env.reset(seed=0)
    single = ends[~timeouts[ends + 1] & ~timeouts[ends - 1]]
    for rows, steps in ((others[~timeouts[others - 1]][:5000:50], 1), (single[:100], 2)):
        for i in rows:
            env.set_state(obs[i, :2].astype(float), obs[i, 2:].astype(float))
            for k in range(steps):
                state = env.step(actions[i + k])[0]
            np.testing.assert_allclose(state, obs[i + steps], atol=2e-3)


def test_rewards_are_of_the_goal_and_every_free_cell_is_visited(bundled):
    obs, rewards = bundled["observations"], bundled["rewards"]
    assert len(obs) == 100_000
    at_goal = np.linalg.norm(obs[:, :2] - [1, 1], axis=1) <= 0.5
    np.testing.assert_array_equal(rewards, at_goal)
    assert 15 < 300 * rewards.mean() < 30, "the controller collects about 24 in 300 steps"
    cells = {tuple(cell) for cell in np.round(obs[:, :2]).astype(int)}
    maze = d4rl_tasks.TASKS[d4rl_tasks.TINY].kwargs["maze"].split()
    free = {(i, j) for i, row in enumerate(maze) for j, c in enumerate(row) if c != "#"}
    assert free <= cells


def test_reached_targets_are_timeouts_and_nothing_is_terminal(bundled):
    assert not bundled["terminals"].any()
    ends = np.flatnonzero(bundled["timeouts"])
    assert np.diff(ends).max() <= 301, "a target is given up after 300 steps"
    at_end = bundled["observations"][ends, :2]
    assert np.linalg.norm(at_end - np.round(at_end), axis=1).max() < 0.1 + 1e-6
    targets = {tuple(cell) for cell in np.round(at_end).astype(int)}
    assert len(targets) == 7, "any free cell, and the goal"


def test_a_target_is_given_up_after_the_time_limit(monkeypatch):
    task = d4rl_tasks.TASKS["maze2d-umaze-v1"]._replace(max_episode_steps=50)
    monkeypatch.setitem(d4rl_tasks.TASKS, "maze2d-umaze-v1", task)
    timeouts = make_maze2d.collect("maze2d-umaze-v1", 3000, 1, noise=0.5)[2]
    # D4RL compares before it counts: a target has one step more than the limit.
    assert np.diff(np.flatnonzero(timeouts)).max() == 51


def test_paths_are_shortest_and_go_through_free_cells():
    maze = d4rl_tasks.MAZE2D["large"][0].split()
    path = make_maze2d.plan(maze, (1, 1), (7, 9))
    assert path[-1] == (7, 9) and all(maze[i][j] != "#" for i, j in path)
    for cell, next_cell in zip([(1, 1), *path], path, strict=False):
        assert math.dist(cell, next_cell) == 1
    assert len(path) == 6 + 8, "there is a way without a detour"
    umaze = d4rl_tasks.MAZE2D["umaze"][0].split()
    around = [(3, 2), (3, 3), (2, 3), (1, 3), (1, 2), (1, 1)]
    assert make_maze2d.plan(umaze, (3, 1), (1, 1)) == around
    assert make_maze2d.plan(umaze, (2, 1), (1, 1)) == [(1, 1)], "out of a wall, through it"
    assert make_maze2d.plan(umaze, (0, 0), (1, 1)) == [(0, 0)], "no free neighbour: it stays"
    assert make_maze2d.plan(maze, (3, 3), (3, 3)) == [(3, 3)]


def test_the_controller_follows_d4rls_rules():
    umaze, rng = d4rl_tasks.MAZE2D["umaze"][0].split(), np.random.default_rng(0)
    controller, still = make_maze2d.Controller(umaze, rng), np.zeros(2)
    # After a new plan, the displacement is measured from the centre of the cell: 0.15 is too fast.
    action, reached = controller.act(np.array([1.09, 1.12]), still, (1, 1))
    assert not reached
    waypoints = controller.waypoints
    _, reached = controller.act(np.array([1.05, 1.05]), still, (1, 1))
    assert reached
    _, reached = controller.act(np.array([1.05, 1.05]), still, (1, 1))
    assert reached and controller.waypoints is waypoints, "no new plan for the same cell"
    controller.act(np.array([1.05, 1.05]), still, (1, 3))
    first, last = controller.waypoints
    assert ((np.array([1, 2]) - first >= 0) & (np.array([1, 2]) - first <= 0.2)).all()
    np.testing.assert_array_equal(last, [1, 3])
    # It advances when the waypoint is near, and brakes with the velocity.
    action, _ = controller.act(np.array([1.05, 1.1]), np.array([0.3, 5.0]), (1, 3))
    expected = np.clip(10 * (first - [1.05, 1.1]) - [0.3, 5.0], -1, 1)
    np.testing.assert_array_equal(action, expected)
    controller.act(first, still, (1, 3))  # too fast
    assert len(controller.waypoints) == 2
    controller.act(first + 0.05, still, (1, 3))
    assert len(controller.waypoints) == 1


@pytest.mark.parametrize("maze", ["umaze", "medium", "large"])
def test_a_file_of_each_maze_is_found_under_the_name_of_d4rl(maze, d4rl_dir, tmp_path, capsys):
    name = f"maze2d-{maze}-v1"
    make(maze=maze, steps=1500)
    path = d4rl_dir / f"maze2d-{maze}-sparse-v1.hdf5"
    columns, _ = read(path)
    out = capsys.readouterr().out
    assert str(path) in out and f"td3_bc_n.py --env-id {name}" in out and "cp" not in out
    data, metadata, _ = td3_bc_n.load_data(name)
    assert metadata["source"] == "tools.make_maze2d" and not metadata["comparable_with_paper"]
    assert len(data.obs) == 1499 - columns["timeouts"][:-1].sum()
    # The same arguments make the same data, another seed and another noise other data.
    for i, changes in enumerate(({}, {"seed": 2}, {"noise": 0.1})):
        make(maze=maze, steps=1500, **changes, out=str(tmp_path / f"{i}.hdf5"))
        again, made_by = read(tmp_path / f"{i}.hdf5")
        assert np.array_equal(again["actions"], columns["actions"]) == (not changes)
        assert made_by.endswith(" --noise 0.1") == ("noise" in changes)


def test_a_file_elsewhere_is_to_be_copied_to_the_directory_of_d4rl(tmp_path, capsys):
    path = tmp_path / "my data.hdf5"
    make(maze="large", steps=10, out=str(path))
    out = capsys.readouterr().out
    (command,) = [line for line in out.splitlines() if "cp" in line]
    subprocess.run(command, shell=True, check=True)
    _, metadata = d4rl_tasks.load("maze2d-large-v1")
    assert metadata["source"] == "tools.make_maze2d"


def test_a_file_that_cannot_be_written_is_reported_before_the_work(tmp_path, monkeypatch):
    monkeypatch.setattr(make_maze2d, "collect", lambda *args: pytest.fail("collected"))
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit, match="cannot be written"):
        make(out=str(tmp_path / "file" / "maze.hdf5"))


def test_a_disk_that_is_full_is_one_line_and_leaves_no_file(tmp_path):
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limit[1]))
    try:
        with pytest.raises(SystemExit, match=r"maze.hdf5: cannot be written .*too large") as error:
            make(steps=1000, out=str(tmp_path / "maze.hdf5"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert "\n" not in error.value.code and list(tmp_path.iterdir()) == []


def test_the_minari_dataset_has_the_same_transitions(capsys):
    make(steps=4000)
    make(steps=4000, minari="made/maze2d-umaze-v0")
    assert "td3_bc_n.py --env-id made/maze2d-umaze-v0" in capsys.readouterr().out
    ours, _, _ = td3_bc_n.load_data("maze2d-umaze-v1")
    data, metadata, make_env = td3_bc_n.load_data("made/maze2d-umaze-v0")
    assert data.dones.sum() > 3
    for name, column, other in zip(data._fields, ours, data, strict=True):
        np.testing.assert_allclose(other, column, atol=1e-6, err_msg=name)
    assert (metadata["ref_min_score"], metadata["ref_max_score"]) == (23.85, 161.86)
    assert metadata["environment"] == "maze2d-umaze-v1"
    env = make_env()
    assert env.reset(seed=0)[0].shape == (4,) and env.spec.max_episode_steps == 300


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tiny": True, "seed": 2}, "besides it only --out can be given"),
        ({"tiny": True, "steps": 5}, "besides it only --out can be given"),
        ({"tiny": True, "noise": 0.0}, "besides it only --out can be given"),
        ({"tiny": True, "maze": "large"}, "besides it only --out can be given"),
        ({"tiny": True, "minari": "my/tiny-v0"}, "besides it only --out can be given"),
        ({"tiny": True, "out": "BUNDLED"}, "exists and is not overwritten"),
        ({"tiny": True, "out": "OTHER"}, "exists and is not overwritten"),
        ({"out": "OTHER"}, "exists and is not overwritten"),
        ({"maze": "medium"}, "exists and is not overwritten"),
        ({"minari": "tests/swing-v0"}, "this Minari dataset exists"),
        ({"minari": "my/maze-v0", "out": "new.hdf5"}, "exclude each other"),
        ({"steps": 1}, "--steps must be at least 2"),
        ({"noise": -0.1}, "--noise must be at least 0"),
        ({"noise": math.nan}, "--noise must be at least 0"),
    ],
)
def test_mistakes_are_one_line_before_the_work(arguments, message, tmp_path, d4rl_dir, monkeypatch):
    monkeypatch.setattr(make_maze2d, "collect", None)  # it must not be called
    d4rl_dir.mkdir()
    (d4rl_dir / "maze2d-medium-sparse-v1.hdf5").touch()
    (tmp_path / "other.hdf5").touch()
    places = {"BUNDLED": d4rl_tasks.file_path(d4rl_tasks.TINY), "OTHER": tmp_path / "other.hdf5"}
    arguments = {k: str(places[v]) if v in places else v for k, v in arguments.items()}
    with pytest.raises(SystemExit, match=message) as error:
        make(**arguments)
    assert "\n" not in error.value.code


def test_plain_tiny_overwrites_the_bundled_file(tmp_path, monkeypatch):
    monkeypatch.setattr(d4rl_tasks, "__file__", str(tmp_path / "d4rl_tasks.py"))
    (tmp_path / "d4rl_tasks.py").touch()  # an environment wants it to exist
    monkeypatch.setattr(make_maze2d, "TINY_STEPS", 10)
    path = d4rl_tasks.file_path(d4rl_tasks.TINY)
    assert path.is_relative_to(tmp_path)
    for _ in range(2):
        make(tiny=True)
        assert len(read(path)[0]["actions"]) == 10
    assert [file.name for file in path.parent.iterdir()] == [path.name], "no temporary files"
