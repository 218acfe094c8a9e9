"""D4RL's tasks: physics, rewards, ends and files."""

import re
import subprocess
import sys
import warnings

import gymnasium as gym
import mujoco
import numpy as np
import pytest
from conftest import ROOT, write_d4rl_file
from gymnasium.utils.env_checker import check_env

import d4rl_tasks
from d4rl_tasks import TASKS, load, normalized_score

#                name: (observation, action, horizon)
SIZES = {
    "hopper": (11, 3, 1000),
    "halfcheetah": (17, 6, 1000),
    "walker2d": (17, 6, 1000),
    "maze2d-umaze": (4, 2, 300),
    "maze2d-medium": (4, 2, 600),
    "maze2d-large": (4, 2, 800),
    "antmaze-umaze": (29, 8, 700),
    "antmaze-medium": (29, 8, 1000),
    "antmaze-large": (29, 8, 1000),
    "pen": (45, 24, 100),
    "hammer": (46, 26, 200),
    "door": (39, 28, 200),
    "relocate": (39, 30, 200),
}


def make(name, **kwargs):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Gymnasium finds antmaze-*-v0 out of date
        return gym.make(f"d4rl_tasks:{name}", **kwargs)


def test_every_name_of_the_paper_and_no_other():
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
    assert set(TASKS) == {*names, d4rl_tasks.TINY}, "and the data set that comes along"
    assert len(names) == 42


@pytest.mark.parametrize("name", TASKS)
def test_shapes_bounds_and_horizon_of_every_task(name):
    env = make(name)
    prefix = next(p for p in SIZES if name.removeprefix("tiny-").startswith(p))
    observation_size, action_size, horizon = SIZES[prefix]
    assert env.observation_space.shape == (observation_size,)
    assert env.action_space.shape == (action_size,)
    assert (env.action_space.low == -1).all() and (env.action_space.high == 1).all()
    assert env.spec.max_episode_steps == horizon
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check_env(env.unwrapped, skip_render_check=True, skip_close_check=True)
    env.close()


@pytest.mark.parametrize("name", ["maze2d-large-v1", "antmaze-medium-play-v2", "door-human-v1"])
def test_episodes_end_at_the_time_limit_and_seeds_repeat(name):
    env = make(name)
    first, again, other = (env.reset(seed=seed)[0] for seed in (3, 3, 4))
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()
    horizon = TASKS[name].horizon
    action = np.zeros(env.action_space.shape, dtype=np.float32)
    for step in range(horizon):
        *_, terminated, truncated, _ = env.step(action)
        assert not terminated
        assert truncated == (step == horizon - 1)


def test_the_import_is_all_that_gymnasium_needs(tmp_path):
    code = "import gymnasium; print(gymnasium.make('d4rl_tasks:maze2d-umaze-v1').spec.id)"
    process = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert process.stdout.strip() == "maze2d-umaze-v1"


# --- AntMaze ---


def test_the_ant_is_d4rls():
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
def test_the_goal_is_drawn_anew_in_its_box_at_every_reset(name, cell):
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


def test_a_fixed_rollout_of_the_ant_is_the_stored_one():
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


def test_a_point_earns_one_for_every_step_within_half_a_cell_of_a_fixed_goal():
    env = make("maze2d-umaze-v1")
    env.reset(seed=0)
    point = env.unwrapped
    for position, reward in (((1.0, 1.0), 1.0), ((1.0, 1.45), 1.0), ((1.0, 1.55), 0.0)):
        point.set_state(np.array(position), np.zeros(2))
        for _ in range(3):
            _, earned, terminated, _, info = env.step(np.zeros(2, dtype=np.float32))
            assert (earned, terminated, info["success"]) == (reward, False, bool(reward))
    goals = {
        tuple(make(f"maze2d-{size}-v1").reset(seed=s)[0]) for size in ("umaze",) for s in (0, 1)
    }
    assert len(goals) == 2
    for size, goal in (("umaze", (1, 1)), ("medium", (6, 6)), ("large", (7, 9))):
        env = make(f"maze2d-{size}-v1")
        for seed in (0, 1):
            env.reset(seed=seed)
            assert tuple(env.unwrapped.goal) == goal


def test_the_point_is_d4rls():
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


def test_a_push_by_hand():
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


# --- The hand ---


@pytest.mark.parametrize("task", ["door", "hammer", "relocate"])
def test_the_hands_rewards_are_d4rls(task):
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


# --- Pictures ---


@pytest.mark.parametrize("name", ["maze2d-medium-v1", "antmaze-umaze-v0", "door-human-v1"])
def test_pictures_show_the_goal_and_change(name):
    env = make(name, render_mode="rgb_array")
    env.reset(seed=0)
    if "maze" in name:
        maze = env.unwrapped
        expected = maze.goal + maze.goal_offset
        np.testing.assert_allclose(maze.data.site("goal").xpos[:2], expected)
    first = env.render()
    for _ in range(30):
        env.step(np.ones(env.action_space.shape, dtype=np.float32))
    second = env.render()
    assert first.ndim == 3 and first.std() > 5 and (first != second).any()
    if "maze" in name:
        red, green, blue = first.astype(int).transpose(2, 0, 1)
        assert ((red > 150) & (green < 100) & (blue < 100)).sum() > 20, "the goal is red"
    env.close()


# --- Scores and files ---


def test_scores():
    assert normalized_score("hopper-medium-v2", 3234.3) == 100
    assert normalized_score("hopper-medium-v2", -20.272305) == 0
    assert normalized_score("antmaze-umaze-v0", 0.75) == 75
    assert normalized_score("pen-human-v1", 96.262799) == 0


def flags(rows, *indices):
    flagged = np.zeros(rows, dtype=bool)
    flagged[list(indices)] = True
    return flagged


def test_successors_never_cross_an_end_and_time_limits_have_none(tmp_path):
    path = tmp_path / "file.hdf5"
    data = write_d4rl_file(path, terminals=flags(20, 4), timeouts=flags(20, 11))
    data = {key: value.astype("f4") for key, value in data.items()}
    loaded = load("hopper-medium-v2", path)
    # Row 11 ends by a time limit and row 19 with the file: their successors are not known.
    kept = [i for i in range(20) if i not in (11, 19)]
    np.testing.assert_array_equal(loaded["observations"], data["observations"][kept])
    np.testing.assert_array_equal(loaded["rewards"], data["rewards"][kept])
    np.testing.assert_array_equal(loaded["terminals"], [i == 4 for i in kept])
    for row, i in enumerate(kept):
        if i != 4:
            np.testing.assert_array_equal(
                loaded["next_observations"][row], data["observations"][i + 1]
            )
    assert len(loaded["episode_returns"]) == 3
    expected = [data["rewards"][a:b].sum() for a, b in ((0, 5), (5, 12), (12, 20))]
    np.testing.assert_allclose(loaded["episode_returns"], expected, rtol=1e-5)


def test_actions_are_clipped(tmp_path):
    path = tmp_path / "file.hdf5"
    actions = np.zeros((20, 3))
    actions[0] = [1.37, -1.2, 0.3]
    write_d4rl_file(path, actions=actions)
    np.testing.assert_allclose(load("hopper-medium-v2", path)["actions"][0], [1, -1, 0.3])


def test_jumps_of_antmaze_v0_are_dropped(tmp_path):
    """The flag says row 5, but the ant was reset after row 7."""
    path = tmp_path / "file.hdf5"
    observations = np.zeros((12, 29))
    observations[:8, 0] = np.arange(8) * 0.3
    observations[8:, 0] = -5.0
    write_d4rl_file(
        path, 12, observations=observations, actions=np.zeros((12, 8)), timeouts=flags(12, 5)
    )
    v0 = load("antmaze-umaze-v0", path)
    moved = np.linalg.norm(v0["next_observations"][:, :2] - v0["observations"][:, :2], axis=1)
    assert len(v0["rewards"]) == 12 - 3 and moved.max() <= 0.5  # less rows 5, 7 and 11
    assert len(load("antmaze-umaze-v2", path)["rewards"]) == 12 - 2


def test_leaving_the_goal_is_terminal_in_maze2d(tmp_path):
    path = tmp_path / "file.hdf5"
    observations = np.zeros((10, 4))
    observations[:, 0] = 1.0
    observations[:, 1] = [3.0, 2.0, 1.4, 1.0, 1.2, 2.0, 3.0, 1.3, 1.0, 1.0]
    flagged = flags(10, 1)  # where the collector chose another target: not an end
    write_d4rl_file(
        path, 10, observations=observations, actions=np.zeros((10, 2)), terminals=flagged
    )
    loaded = load("maze2d-umaze-v1", path)
    assert loaded["terminals"].tolist() == [i == 4 for i in range(9)]
    np.testing.assert_allclose(loaded["next_observations"][:, 1], observations[1:, 1])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"rewards": None},
            r"no key 'rewards' \(there are: actions, observations, terminals, timeouts",
        ),
        ({"rewards": np.zeros(19)}, "key 'rewards' has 19 rows, 'observations' 20"),
        ({"actions": np.zeros(20)}, r"key 'actions' has shape \(20,\)"),
        (
            {"observations": np.full((20, 11), np.nan)},
            "key 'observations' has 20 rows not finite, first 0",
        ),
        (
            {"rewards": np.where(np.arange(20) == 7, np.inf, 0)},
            "'rewards' has 1 rows not finite, first 7",
        ),
        ({"rewards": None, "rewards/group": np.zeros(3)}, "no key 'rewards'"),
        ({"observations": np.zeros((0, 11))}, "key 'observations' is empty"),
    ],
)
def test_a_wrong_file_is_named_with_its_key(tmp_path, changes, message):
    path = tmp_path / "file.hdf5"
    write_d4rl_file(path, **changes)
    with pytest.raises(ValueError, match=message) as error:
        load("hopper-medium-v2", path)
    assert str(path) in str(error.value)


def test_a_file_of_one_row_has_no_transitions(tmp_path):
    write_d4rl_file(tmp_path / "file.hdf5", rows=1)
    with pytest.raises(ValueError, match="no transitions in it"):
        load("hopper-medium-v2", tmp_path / "file.hdf5")


def test_a_text_file_named_hdf5(tmp_path):
    path = tmp_path / "file.hdf5"
    path.write_text("<html>404 not found</html>")
    with pytest.raises(ValueError, match=r"file\.hdf5: not a readable HDF5 file"):
        load("hopper-medium-v2", path)


def test_a_download_cut_short(tmp_path):
    path = tmp_path / "file.hdf5"
    write_d4rl_file(path, rows=5000)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(ValueError, match="not a readable HDF5 file"):
        load("hopper-medium-v2", path)


def test_a_missing_file_says_where_it_goes_and_how_it_gets_there(tmp_path, monkeypatch):
    monkeypatch.setenv("D4RL_DATASET_DIR", str(tmp_path))
    assert d4rl_tasks.find("hopper-medium-v2") is None
    with pytest.raises(FileNotFoundError) as error:
        load("antmaze-large-diverse-v0")
    name = "Ant_maze_hardest-maze_noisy_multistart_True_multigoal_True_sparse.hdf5"
    address = f"http://rail.eecs.berkeley.edu/datasets/offline_rl/ant_maze_new/{name}"
    assert f"curl -o {tmp_path / name} {address}" in str(error.value)
    assert "--env-id D4RL/antmaze/large-diverse-v1" in str(error.value)
    with pytest.raises(FileNotFoundError) as error:
        load("hopper-random-v2")
    assert "Minari" not in str(error.value)


def test_files_are_found_in_their_two_places(tmp_path, monkeypatch):
    home = tmp_path / "home" / ".d4rl" / "datasets"
    elsewhere = tmp_path / "elsewhere"
    for folder in (home, elsewhere):
        folder.mkdir(parents=True)
        write_d4rl_file(folder / "hopper_medium-v2.hdf5")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("D4RL_DATASET_DIR", raising=False)
    assert d4rl_tasks.find("hopper-medium-v2").parent == home
    monkeypatch.setenv("D4RL_DATASET_DIR", str(elsewhere))
    assert d4rl_tasks.find("hopper-medium-v2").parent == elsewhere


def test_an_unknown_name_gets_the_nearest():
    assert d4rl_tasks.find("hoper-medium-v2") is None
    with pytest.raises(ValueError, match=r"hoper-medium-v2: not .* hopper-medium-v2"):
        load("hoper-medium-v2")


@pytest.mark.parametrize("name", sorted(set(TASKS) - {d4rl_tasks.TINY}))
def test_addresses_and_counterparts(name):
    task = TASKS[name]
    assert re.fullmatch(
        r"(gym_mujoco_v2|maze2d|ant_maze_new|ant_maze_v2|hand_dapg_v1)/[\w-]+\.hdf5", task.path
    )
    has_none = name.startswith(("hopper", "halfcheetah", "walker2d")) and (
        "random" in name or "replay" in name
    )
    assert bool(task.minari) != has_none
