"""The tasks of D4RL: physics, rewards, terminations and datasets."""

import hashlib
import re
import threading
import warnings
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import gymnasium as gym
import h5py
import mujoco
import numpy as np
import pytest
from conftest import SHA256, write_d4rl_file
from gymnasium.utils.env_checker import check_env

import d4rl_tasks
from d4rl_tasks import TASKS, load, normalized_score

#                name: (observation, action, max_episode_steps, ref_min_score, ref_max_score)
KINDS = {
    "hopper": (11, 3, 1000, -20.272305, 3234.3),
    "halfcheetah": (17, 6, 1000, -280.178953, 12135.0),
    "walker2d": (17, 6, 1000, 1.629008, 4592.3),
    "maze2d-umaze": (4, 2, 300, 23.85, 161.86),
    "maze2d-medium": (4, 2, 600, 13.13, 277.39),
    "maze2d-large": (4, 2, 800, 6.7, 273.99),
    "antmaze-umaze": (29, 8, 700, 0, 1),
    "antmaze-medium": (29, 8, 1000, 0, 1),
    "antmaze-large": (29, 8, 1000, 0, 1),
    "pen": (45, 24, 100, 96.262799, 3076.8331017826877),
    "hammer": (46, 26, 200, -274.856578, 12794.134825156867),
    "door": (39, 28, 200, -56.512833, 2880.5693087298737),
    "relocate": (39, 30, 200, -6.425911, 4233.877797728884),
}


def names_of(kind):
    return [name for name in TASKS if name.removeprefix("tiny-").startswith(kind)]


def make(name, **kwargs):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Gymnasium finds antmaze-*-v0 out of date
        return gym.make(f"d4rl_tasks:{name}", **kwargs)


def test_the_names_are_those_of_d4rl():
    kinds = ["random", "medium", "medium-replay", "medium-expert", "expert"]
    names = [f"{r}-{k}-v2" for r in ("hopper", "halfcheetah", "walker2d") for k in kinds]
    names += [f"maze2d-{size}-v1" for size in ("umaze", "medium", "large")]
    mazes = [
        "umaze",
        "umaze-diverse",
        "medium-play",
        "medium-diverse",
        "large-play",
        "large-diverse",
    ]
    names += [f"antmaze-{maze}-{v}" for maze in mazes for v in ("v0", "v2")]
    hands = ("pen", "hammer", "door", "relocate")
    names += [f"{hand}-{k}-v1" for hand in hands for k in ("human", "cloned", "expert")]
    assert set(TASKS) == {*names, d4rl_tasks.TINY}, "and the bundled dataset"
    assert len(names) == 42


@pytest.mark.parametrize("kind", KINDS)
def test_shapes_bounds_time_limit_and_score_references_of_every_kind_of_task(kind):
    obs_dim, action_dim, *expected = KINDS[kind]
    names = names_of(kind)
    env = make(names[0])
    assert env.observation_space.shape == (obs_dim,)
    assert env.action_space.shape == (action_dim,)
    assert (env.action_space.low == -1).all() and (env.action_space.high == 1).all()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check_env(env.unwrapped, skip_render_check=True, skip_close_check=True)
    env.close()
    for name in names:
        task, spec = TASKS[name], gym.spec(name)
        assert [spec.max_episode_steps, task.ref_min_score, task.ref_max_score] == expected
        assert task.max_episode_steps == spec.max_episode_steps
        assert (spec.entry_point, spec.kwargs) == (env.spec.entry_point, TASKS[names[0]].kwargs)


@pytest.mark.parametrize("name", ["maze2d-large-v1", "antmaze-medium-play-v2", "door-human-v1"])
def test_episodes_end_at_the_time_limit_and_seeds_repeat(name):
    env = make(name)
    first, again, other = (env.reset(seed=seed)[0] for seed in (3, 3, 4))
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()
    max_episode_steps = TASKS[name].max_episode_steps
    action = np.zeros(env.action_space.shape, dtype=np.float32)
    for step in range(max_episode_steps):
        *_, terminated, truncated, _ = env.step(action)
        assert not terminated
        assert truncated == (step == max_episode_steps - 1)


# --- AntMaze ---


def test_the_ant_is_that_of_d4rl():
    env = make("antmaze-umaze-v2").unwrapped
    model = env.model
    assert model.opt.timestep == 0.02 and env.frame_skip == 5 and env.dt == pytest.approx(0.1)
    assert (model.actuator_gear[:, 0] == 30).all() and model.nu == 8
    for geom in range(model.ngeom):
        np.testing.assert_allclose(model.geom_solref[geom], [0.02, 1])
        np.testing.assert_allclose(model.geom_solimp[geom][:3], [0.8, 0.8, 0.01])
    boxes = [g for g in range(model.ngeom) if model.geom_type[g] == mujoco.mjtGeom.mjGEOM_BOX]
    positions = {tuple(model.geom_pos[g][:2]) for g in boxes}
    #   11111   the start r is at (0, 0); x grows to the right, y downwards, 4 m a cell
    #   1r001
    #   11101
    #   1g001
    #   11111
    border = {(4.0 * x, 4.0 * y) for x in range(-1, 4) for y in (-1, 3)}
    border |= {(4.0 * x, 4.0 * y) for x in (-1, 3) for y in range(-1, 4)}
    assert positions == border | {(0.0, 4.0), (4.0, 4.0)}
    assert len(boxes) == 18
    for g in boxes:
        np.testing.assert_allclose(model.geom_size[g], [2, 2, 1])
        assert model.geom_pos[g][2] == 1 and model.geom_contype[g] == 1


@pytest.mark.parametrize(
    ("name", "cell"),
    [
        ("antmaze-umaze-v0", (0, 8)),
        ("antmaze-medium-play-v2", (20, 20)),
        ("antmaze-large-play-v2", (32, 24)),
    ],
)
def test_the_goal_is_drawn_in_its_box_at_every_reset(name, cell):
    env = make(name).unwrapped
    env.reset(seed=0)
    goals = []
    for _ in range(300):
        env.reset()
        goals.append(env.goal)
    offsets = np.array(goals) - cell
    assert (offsets >= 0).all() and (offsets <= 1.5).all()
    assert (offsets.max(0) > 1.3).all() and (offsets.min(0) < 0.2).all()
    np.testing.assert_allclose(offsets.mean(0), 0.75, atol=0.06)  # U[0, 1] + U[0, 0.5]


def test_an_ant_starts_near_the_middle_of_its_cell():
    env = make("antmaze-large-diverse-v0")
    starts = np.stack([env.reset(seed=seed)[0] for seed in range(200)])
    assert (np.abs(starts[:, :2]) <= 0.1).all() and np.abs(starts[:, :2]).max() > 0.09
    np.testing.assert_allclose(starts[:, 2].mean(), 0.75, atol=0.02)
    np.testing.assert_allclose(starts[:, 15:].std(), 0.1, atol=0.01)


def test_the_goal_ends_an_antmaze_episode_and_an_overturned_ant_does_not():
    env = make("antmaze-umaze-v0")
    env.reset(seed=0)
    ant = env.unwrapped
    upside_down = ant.init_qpos.copy()
    upside_down[3:7] = [0, 1, 0, 0]
    ant.set_state(upside_down, ant.init_qvel)
    for _ in range(20):
        _, reward, terminated, _, info = env.step(np.zeros(8, dtype=np.float32))
        assert (reward, terminated, info["success"]) == (0.0, False, False)
    at_goal = ant.init_qpos.copy()
    at_goal[:2] = ant.goal + 0.3
    ant.set_state(at_goal, ant.init_qvel)
    _, reward, terminated, truncated, info = env.step(np.zeros(8, dtype=np.float32))
    assert (reward, terminated, truncated, info["success"]) == (1.0, True, False, True)
    beside = ant.init_qpos.copy()
    beside[:2] = ant.goal + 0.45
    ant.set_state(beside, ant.init_qvel)
    assert env.step(np.zeros(8, dtype=np.float32))[1:3] == (0.0, False)


def test_a_rollout_of_the_ant_equals_the_stored_one():
    stored = [0.040328, -0.247223, 0.683785, 0.990364, -0.01368, -0.027324, -0.135078, 0.470918]
    stored += [1.232256, 0.29076, -1.299668, -0.582842, -1.042947, -0.528865, 0.79901, 0.425722]
    stored += [-0.442699, -0.490339, 0.664669, 0.105332, -1.398613, 6.674023, -0.439471, -3.231507]
    stored += [-1.996416, 0.91962, 2.485014, 0.733531, 3.37448]
    env = make("antmaze-umaze-v2").unwrapped
    env.reset(seed=0)
    env.set_state(env.init_qpos, env.init_qvel)
    for t in range(10):
        observation, *_ = env.step(np.sin(0.7 * t + np.arange(8)))
    np.testing.assert_allclose(observation, stored, atol=1e-4)


# --- Maze2d ---


def test_maze2d_has_reward_1_within_half_a_cell_of_a_fixed_goal():
    env = make("maze2d-umaze-v1")
    env.reset(seed=0)
    point = env.unwrapped
    for position, reward in (((1.0, 1.0), 1.0), ((1.0, 1.45), 1.0), ((1.0, 1.55), 0.0)):
        point.set_state(np.array(position), np.zeros(2))
        for _ in range(3):
            _, earned, terminated, _, info = env.step(np.zeros(2, dtype=np.float32))
            assert (earned, terminated, info["success"]) == (reward, False, bool(reward))
    for size, goal in (("umaze", (1, 1)), ("medium", (6, 6)), ("large", (7, 9))):
        env = make(f"maze2d-{size}-v1")
        for seed in (0, 1):
            env.reset(seed=seed)
            assert tuple(env.unwrapped.goal) == goal


def test_the_point_is_that_of_d4rl():
    env = make("maze2d-medium-v1").unwrapped
    model = env.model
    assert model.opt.timestep == 0.01 and env.frame_skip == 1 and model.opt.iterations == 20
    assert model.opt.integrator == mujoco.mjtIntegrator.mjINT_EULER
    assert (model.opt.gravity == 0).all() and (model.dof_damping == 1).all()
    assert (model.actuator_gear[:, 0] == 100).all()
    boxes = [g for g in range(model.ngeom) if model.geom_type[g] == mujoco.mjtGeom.mjGEOM_BOX]
    rows = TASKS["maze2d-medium-v1"].kwargs["maze"].split()
    walls = {(i + 1, j + 1) for i, row in enumerate(rows) for j, c in enumerate(row) if c == "#"}
    assert {tuple(model.geom_pos[g][:2]) for g in boxes} == walls
    assert all(model.geom_contype[g] == 2 and model.geom_conaffinity[g] == 1 for g in boxes)
    np.testing.assert_allclose(model.geom_size[boxes[0]], [0.5, 0.5, 0.2])
    mass = model.body_mass[-1]
    assert mass == pytest.approx(1000 * 4 / 3 * np.pi * 0.1**3)


def test_one_step_of_maze2d_by_hand():
    """One Euler step of a damped mass: v' = v + dt (100 a - v) / (m + dt), damping implicit."""
    env = make("maze2d-umaze-v1").unwrapped
    env.reset(seed=0)
    env.set_state(np.array([3.0, 2.0]), np.array([0.0, 1.0]))
    observation, *_ = env.step(np.array([0.0, 0.01]))
    mass, dt = 1000 * 4 / 3 * np.pi * 0.1**3, 0.01
    velocity = 1.0 + dt * (100 * 0.01 - 1.0) / (mass + dt)
    np.testing.assert_allclose(observation, [3.0, 2.0 + dt * velocity, 0.0, velocity], atol=1e-6)


def test_velocity_is_clipped_and_walls_hold():
    env = make("maze2d-umaze-v1").unwrapped
    env.reset(seed=0)
    env.set_state(np.array([3.0, 1.0]), np.array([0.0, 40.0]))
    observation, *_ = env.step(np.zeros(2))
    assert observation[3] <= 5.0
    for _ in range(200):
        observation, *_ = env.step(np.array([0.0, 1.0]))
    assert 3.0 < observation[1] < 3.5, "the corridor ends at column 3"


def test_a_point_starts_in_any_free_cell():
    env = make("maze2d-large-v1")
    starts = np.stack([env.reset(seed=seed)[0] for seed in range(300)])
    cells = starts[:, :2].round().astype(int)
    assert (np.abs(starts[:, :2] - cells) <= 0.1).all()
    rows = TASKS["maze2d-large-v1"].kwargs["maze"].split()
    assert {rows[i][j] for i, j in cells} == {"O", "G"}
    assert len({tuple(cell) for cell in cells}) > 40
    np.testing.assert_allclose(starts[:, 2:].std(), 0.1, atol=0.01)


# --- Adroit ---


@pytest.mark.parametrize("task", ["door", "hammer", "relocate"])
def test_the_rewards_of_adroit_are_those_of_d4rl(task):
    """The distance of palm and object, from MuJoCo's sites, with D4RL's sign."""
    env = make(f"{task}-human-v1")
    env.reset(seed=0)
    rng = np.random.default_rng(0)
    for _ in range(5):
        _, reward, *_ = env.step(rng.uniform(-1, 1, env.action_space.shape).astype(np.float32))
        hand = env.unwrapped
        site = hand._model_names.site_name2id
        palm = hand.data.site_xpos[site["S_grasp"]]
        qvel = hand.data.qvel
        if task == "door":
            handle = hand.data.site_xpos[site["S_handle"]]
            angle = hand.data.qpos[hand.door_hinge_addrs]
            expected = -0.1 * np.linalg.norm(palm - handle) - 0.1 * (angle - 1.57) ** 2
            expected += -1e-5 * np.sum(qvel**2) + 2 * (angle > 0.2) + 8 * (angle > 1.0)
        elif task == "hammer":
            hammer = hand.data.xpos[hand._model_names.body_name2id["Object"]]
            head, nail = (hand.data.site_xpos[site[name]] for name in ("tool", "S_target"))
            goal = hand.data.site_xpos[site["nail_goal"]]
            expected = -0.1 * np.linalg.norm(palm - hammer) - np.linalg.norm(head - nail)
            expected += -10 * np.linalg.norm(nail - goal) - 1e-2 * np.linalg.norm(qvel)
            expected += 2 * (hammer[2] > 0.04 and head[2] > 0.04)
        else:
            ball = hand.data.xpos[hand._model_names.body_name2id["Object"]]
            target = hand.data.site_xpos[site["target"]]
            expected = -0.1 * np.linalg.norm(palm - ball)
            if ball[2] > 0.04:
                expected += 1.0 - 0.5 * np.linalg.norm(palm - target)
                expected += -0.5 * np.linalg.norm(ball - target)
        np.testing.assert_allclose(reward, expected, atol=1e-6)


def test_a_dropped_pen_ends_the_episode():
    env = make("pen-human-v1")
    env.reset(seed=0)
    assert env.step(np.zeros(24, dtype=np.float32))[2] is False
    rng = np.random.default_rng(0)
    for _ in range(100):
        observation, _, terminated, truncated, _ = env.step(
            rng.choice([-1.0, 1.0], 24).astype("f4")
        )
        assert terminated == (observation[26] < 0.075)
        if terminated or truncated:
            break
    assert terminated, "shaken for 100 steps, the pen falls"


@pytest.mark.parametrize("name", ["maze2d-medium-v1", "antmaze-umaze-v0"])
def test_the_goal_site_is_at_the_goal(name):
    maze = make(name).unwrapped
    maze.reset(seed=0)
    qpos = maze.init_qpos.copy()
    qpos[:2] = maze.goal
    maze.set_state(qpos, maze.init_qvel)
    np.testing.assert_allclose(maze.data.site("goal").xpos[:2], maze.data.body(1).xpos[:2])


# --- Scores ---


def test_scores_are_0_for_random_and_100_for_an_expert():
    assert normalized_score("hopper-medium-v2", 3234.3) == 100
    assert normalized_score("hopper-medium-v2", -20.272305) == 0
    assert normalized_score("antmaze-umaze-v0", 0.75) == 75
    assert normalized_score("pen-human-v1", 96.262799) == 0


# --- Datasets: the transitions of the authors' code ---


def slow_reference(name, file):
    """d4rl.qlearning_dataset row by row, then the preprocessing in the authors' scripts."""
    obs = file["observations"].astype(np.float32)
    rows = []
    for i in range(len(obs) - 1):  # never the last row
        if file["timeouts"][i]:
            continue
        next_obs, done = obs[i + 1], bool(file["terminals"][i])
        moved = np.sqrt(((next_obs[:2] - obs[i][:2]) ** 2).sum())
        if name.startswith("antmaze") and name.endswith("-v0") and moved > 0.5:
            continue
        if "maze2d" in name:
            goal = {"umaze": (1, 1), "medium": (6, 6), "large": (7, 9)}[name.split("-")[-2]]
            inside, inside_next = (np.hypot(*(x[:2] - goal)) <= 0.5 for x in (obs[i], next_obs))
            done = inside and not inside_next
        rows.append((obs[i], file["actions"][i], file["rewards"][i], next_obs, done))
    return [np.array(column, dtype=np.float32) for column in zip(*rows, strict=True)]


def awkward_flags(rows, rng):
    """Every case that a file may have, and then random ones."""
    terminals, timeouts = np.zeros(rows, dtype=bool), np.zeros(rows, dtype=bool)
    terminals[[5, 20, 21, 22, 31]] = True  # within a trajectory, a cluster, before a reset
    timeouts[[12, 31, 40, 41, 43]] = True  # alone, with a terminal, trajectories of 0 and 1 rows
    terminals[60:] = rng.random(rows - 60) < 0.05
    timeouts[60:] = rng.random(rows - 60) < 0.05
    terminals[-1] = timeouts[-1] = True  # flags on the last row
    return terminals, timeouts


@pytest.mark.parametrize(
    "name",
    [
        *("hopper-medium-v2", "halfcheetah-expert-v2", "walker2d-random-v2"),
        *("maze2d-umaze-v1", "maze2d-medium-v1", "maze2d-large-v1", d4rl_tasks.TINY),
        *("antmaze-umaze-v0", "antmaze-large-play-v0", "antmaze-medium-diverse-v2"),
        *("pen-human-v1", "door-cloned-v1"),
    ],
)
def test_load_gives_the_transitions_of_the_authors_code(name, tmp_path):
    rows, rng = 400, np.random.default_rng(1)
    obs_dim, action_dim = next(KINDS[kind][:2] for kind in KINDS if name in names_of(kind))
    terminals, timeouts = awkward_flags(rows, rng)
    observations = rng.normal(size=(rows, obs_dim))
    if "maze" in name:  # a walk with jumps, with and without flags, around the goal
        steps = rng.normal(scale=0.15, size=(rows, 2))
        jumps = np.append(np.flatnonzero(timeouts), rng.integers(0, rows, 12)) % (rows - 1)
        steps[jumps + 1] += 5 * rng.normal(size=(len(jumps), 2))
        goals = {"umaze": (1, 1), "medium": (6, 6), "large": (7, 9)}
        center = goals[name.split("-")[-2]] if "maze2d" in name else (0, 0)
        observations[:, :2] = (np.cumsum(steps, axis=0) % 2) + np.array(center) - 1
    path = tmp_path / "file.hdf5"
    rewards = (rng.random(rows) < 0.2).astype(float)
    file = write_d4rl_file(
        path,
        rows,
        observations=observations,
        actions=rng.uniform(-1, 1, (rows, action_dim)),
        rewards=rewards,
        terminals=terminals,
        timeouts=timeouts,
    )
    data, metadata = load(name, path)
    expected = slow_reference(name, file)
    assert metadata["transitions"] == len(expected[0]) < rows - 15
    for (key, column), reference in zip(data.items(), expected, strict=True):
        np.testing.assert_array_equal(column.astype(np.float32), reference, err_msg=key)
    if "maze2d" in name:
        assert expected[4].sum() > 3, "the goal was left"


def flags(rows, *indices):
    flagged = np.zeros(rows, dtype=bool)
    flagged[list(indices)] = True
    return flagged


def test_mean_returns_are_those_of_the_episodes_in_the_file(tmp_path):
    path = tmp_path / "file.hdf5"
    file = write_d4rl_file(path, terminals=flags(20, 4), timeouts=flags(20, 11))
    _, metadata = load("hopper-medium-v2", path)
    parts = [file["rewards"][a:b].sum() for a, b in ((0, 5), (5, 12), (12, 20))]
    assert metadata["episodes"] == 3
    assert metadata["mean_return"] == pytest.approx(np.mean(parts), rel=1e-5)


def test_episodes_of_maze2d_have_the_length_of_evaluation_episodes(tmp_path):
    """The published files mark reached targets in timeouts, which are not ends of episodes."""
    path, rewards = tmp_path / "file.hdf5", np.zeros(700)
    rewards[[10, 320, 330, 650]] = 1
    write_d4rl_file(
        path,
        700,
        observations=np.zeros((700, 4)),
        action_dim=2,
        rewards=rewards,
        timeouts=flags(700, 91, 144, 230),
    )
    _, metadata = load("maze2d-umaze-v1", path)
    assert (metadata["episodes"], metadata["mean_return"]) == (3, pytest.approx(4 / 3))
    assert metadata["transitions"] == 700 - 3 - 1


def test_episodes_of_antmaze_end_with_a_reset_and_succeed_once(tmp_path):
    """Terminals come in clusters (D4RL issue 199): they are one success, not many episodes."""
    observations = np.zeros((30, 29))
    observations[10:, 0] = 5.0  # a reset without a flag
    rewards = flags(30, 3, 4, 5, 25, 26).astype(float)
    path = tmp_path / "file.hdf5"
    write_d4rl_file(
        path,
        30,
        observations=observations,
        action_dim=8,
        rewards=rewards,
        terminals=rewards > 0,
        timeouts=flags(30, 19),
    )
    _, metadata = load("antmaze-umaze-v0", path)
    assert (metadata["episodes"], metadata["mean_return"]) == (3, pytest.approx(2 / 3))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rewards": None}, r"no 'rewards' \(found: actions, observations, terminals, timeouts"),
        ({"rewards": np.zeros(19)}, r"'rewards' has shape \(19,\), expected \(20,\) for hopper"),
        ({"actions": np.zeros(20)}, r"'actions' has shape \(20,\), expected \(20, 3\)"),
        ({"observations": np.full((20, 11), np.nan)}, "'observations' is not finite in row 0"),
        ({"rewards": np.where(np.arange(20) == 7, np.inf, 0)}, "'rewards' is not finite in row 7"),
        ({"rewards": None, "rewards/group": np.zeros(3)}, "no 'rewards'"),
        ({"observations": np.zeros((0, 11))}, "'observations' has no rows"),
        ({"rewards": np.array([b"much"] * 20)}, "'rewards' has no numbers"),
    ],
)
def test_a_broken_file_is_reported_with_its_key(tmp_path, changes, message):
    path = tmp_path / "file.hdf5"
    write_d4rl_file(path, **changes)
    with pytest.raises(ValueError, match=message) as error:
        load("hopper-medium-v2", path)
    assert str(path) in str(error.value)


def test_a_file_of_one_row_has_no_transitions(tmp_path):
    write_d4rl_file(tmp_path / "file.hdf5", rows=1)
    with pytest.raises(ValueError, match="no transitions"):
        load("hopper-medium-v2", tmp_path / "file.hdf5")


def test_columns_with_one_number_per_row_may_have_two_axes(tmp_path):
    path = tmp_path / "file.hdf5"
    write_d4rl_file(path, rewards=np.arange(20.0)[:, None])
    np.testing.assert_array_equal(load("hopper-medium-v2", path)[0]["rewards"], np.arange(19.0))


@pytest.mark.parametrize("content", ["text", "half"])
def test_a_file_that_is_not_hdf5(tmp_path, content):
    path = tmp_path / "file.hdf5"
    write_d4rl_file(path, rows=5000)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2] if content == "half" else b"<p>")
    with pytest.raises(ValueError, match=r"file\.hdf5: not a readable HDF5 file"):
        load("hopper-medium-v2", path)


def test_files_are_found_in_their_two_places(tmp_path, monkeypatch):
    home, other = tmp_path / "home" / ".d4rl" / "datasets", tmp_path / "other"
    for folder in (home, other):
        folder.mkdir(parents=True)
        write_d4rl_file(folder / "hopper_medium-v2.hdf5")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("D4RL_DATASET_DIR", raising=False)
    assert d4rl_tasks.find("hopper-medium-v2").parent == home
    monkeypatch.setenv("D4RL_DATASET_DIR", str(other))
    assert d4rl_tasks.find("hopper-medium-v2").parent == other


def test_without_the_bundled_file_the_command_that_writes_it_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(d4rl_tasks, "__file__", str(tmp_path / "d4rl_tasks.py"))
    with pytest.raises(FileNotFoundError, match=r"python -m tools.make_maze2d --tiny"):
        d4rl_tasks.find(d4rl_tasks.TINY)


# --- Download ---


@pytest.fixture
def server(tmp_path, monkeypatch):
    """A local server of hopper-medium-replay-v2, which has no Minari counterpart, and its mirror.

    In the mode "mirror", the file is only below /hugging-face/.
    """
    write_d4rl_file(tmp_path / "source.hdf5", rows=5000)
    content, mode = (tmp_path / "source.hdf5").read_bytes(), {"mode": "whole", "requests": []}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            mode["requests"].append(self.path)
            if mode["mode"] == "forbidden":
                return self.send_error(403)
            if mode["mode"] == "mirror" and not self.path.startswith("/hugging-face/"):
                return self.send_error(404)
            body = b"<html>moved</html>" if mode["mode"] == "html" else content
            self.send_response(200)
            if "no length" not in mode["mode"]:
                self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body[: len(body) // 2] if "cut" in mode["mode"] else body)

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as httpd:
        threading.Thread(target=httpd.serve_forever, args=[0.01], daemon=True).start()
        address = f"http://127.0.0.1:{httpd.server_port}/"
        monkeypatch.setattr(d4rl_tasks, "BASE_URL", address)
        monkeypatch.setenv("D4RL_DATASET_DIR", str(tmp_path / "d4rl"))
        yield mode, tmp_path / "d4rl", content, f"{address}hugging-face"
        httpd.shutdown()


@pytest.mark.parametrize("mode", ["whole", "no length"])
def test_a_missing_file_is_downloaded_once(server, mode):
    state, folder, content, _ = server
    state["mode"] = mode
    data, metadata = load("hopper-medium-replay-v2")
    assert len(data["rewards"]) == 4999 and metadata["source"] == "d4rl"
    load("hopper-medium-replay-v2")
    assert state["requests"] == ["/gym_mujoco_v2/hopper_medium_replay-v2.hdf5"]
    assert [p.name for p in folder.iterdir()] == ["hopper_medium_replay-v2.hdf5"]
    assert next(folder.iterdir()).read_bytes() == content


@pytest.mark.parametrize(
    ("mode", "reason"),
    [
        ("cut", r"incomplete, \d+ of \d+ bytes"),
        ("forbidden", "HTTP Error 403: Forbidden"),
        ("html", "file signature not found"),
        ("cut, no length", "truncated file"),
    ],
)
def test_a_failed_download_is_one_line_and_leaves_no_file(server, mode, reason, capsys):
    state, folder, *_ = server
    state["mode"] = mode
    name = "hopper-medium-replay-v2"
    with pytest.raises(OSError, match=f"{name}: cannot download .*{reason}") as error:
        d4rl_tasks.find(name)
    assert "\n" not in str(error.value)
    assert list(folder.iterdir()) == []
    # With a counterpart in Minari, it is a warning.
    assert d4rl_tasks.find("hopper-medium-v2") is None
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("WARNING: hopper-medium-v2: cannot download")
    assert list(folder.iterdir()) == []


def test_a_download_with_another_sha256_is_not_kept(server, monkeypatch):
    _, folder, content, _ = server
    name = "hopper-medium-replay-v2"
    monkeypatch.setitem(d4rl_tasks.SHA256, name, SHA256[name])
    with pytest.raises(OSError, match="SHA-256 is not that of D4RL's file"):
        d4rl_tasks.find(name)
    assert list(folder.iterdir()) == []
    monkeypatch.setitem(d4rl_tasks.SHA256, name, hashlib.sha256(content).hexdigest())
    assert d4rl_tasks.find(name).read_bytes() == content
    assert load(name)[1]["comparable_with_paper"] is True


def test_a_local_file_with_another_sha256_is_used_but_is_not_d4rls(tmp_path, monkeypatch):
    write_d4rl_file(tmp_path / "file.hdf5")
    monkeypatch.setitem(d4rl_tasks.SHA256, "hopper-medium-v2", SHA256["hopper-medium-v2"])
    _, metadata = load("hopper-medium-v2", tmp_path / "file.hdf5")
    assert metadata["comparable_with_paper"] is False
    assert metadata["source"] == "not D4RL's file (its SHA-256 differs)"


def test_35_of_the_42_files_have_a_checksum():
    assert len(SHA256) == 35 and set(SHA256) < set(d4rl_tasks.TASKS)
    assert all(re.fullmatch("[0-9a-f]{64}", value) for value in SHA256.values())


@pytest.mark.parametrize("listed", [True, False])
def test_the_mirror_on_hugging_face_is_asked_second(listed, server, monkeypatch):
    state, folder, content, mirror = server
    state["mode"], name = "mirror", "hopper-medium-replay-v2"
    paths = ["README.md", *["some/folder/hopper_medium_replay-v2.hdf5"] * listed]

    def hf_hub_url(repo_id, path, repo_type):
        return f"{mirror}/{repo_type}/{repo_id}/{path}"

    def list_repo_files(self, repo_id, repo_type):
        assert (repo_id, repo_type) == ("imone/D4RL", "dataset")
        return paths

    monkeypatch.setattr("huggingface_hub.hf_hub_url", hf_hub_url)
    monkeypatch.setattr("huggingface_hub.HfApi.list_repo_files", list_repo_files)
    requests = ["/gym_mujoco_v2/hopper_medium_replay-v2.hdf5"]  # to D4RL's server first
    if listed:
        assert d4rl_tasks.find(name).read_bytes() == content
        requests.append(f"/hugging-face/dataset/imone/D4RL/{paths[1]}")
    else:
        with pytest.raises(OSError, match=r"HTTP Error 404.*; not in imone/D4RL\)"):
            d4rl_tasks.find(name)
        assert list(folder.iterdir()) == []
    assert state["requests"] == requests


@pytest.mark.parametrize(
    ("value", "source"), [(np.bytes_("a robot"), "a robot"), ("a robot", "a robot"), ([1, 2], None)]
)
def test_made_by_is_a_text_or_bytes(value, source, tmp_path):
    path = tmp_path / "file.hdf5"
    write_d4rl_file(path)
    with h5py.File(path, "r+") as file:
        file.attrs["made_by"] = value
    if source:
        assert load("hopper-medium-v2", path)[1]["source"] == source
    else:
        with pytest.raises(ValueError, match="attribute 'made_by' is not a string"):
            load("hopper-medium-v2", path)
