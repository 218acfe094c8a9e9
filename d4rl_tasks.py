"""D4RL's tasks, as they were, on today's MuJoCo: environments, data files and scores.

    import gymnasium as gym
    env = gym.make("d4rl_tasks:antmaze-large-diverse-v0")

    import d4rl_tasks
    transitions = d4rl_tasks.load("antmaze-large-diverse-v0")       # from D4RL's own HDF5 file
    d4rl_tasks.normalized_score("antmaze-large-diverse-v0", 0.75)   # 75.0

D4RL itself needs mujoco-py and a toolchain of 2021. Here are the same tasks under the same names:
hopper, halfcheetah, walker2d (-v2), maze2d (-v1), antmaze (-v0, -v2), and the hand's pen, hammer,
door and relocate (-v1), with D4RL's physics, observations, rewards, ends and time limits. A score
is comparable with published ones if the data file and the environment are both D4RL's.
"""

import difflib
import os
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import NamedTuple

import gymnasium as gym
import h5py
import mujoco
import numpy as np
from gymnasium.envs.mujoco import MujocoEnv

TINY = "tiny-maze2d-umaze-v0"  # comes along; made by datasets/make_maze2d.py, not D4RL's
ADDRESS = "http://rail.eecs.berkeley.edu/datasets/offline_rl/"


class Task(NamedTuple):
    path: str  # of the data file, below ADDRESS
    horizon: int  # steps of an evaluation episode
    random_return: float  # normalised score 0
    expert_return: float  # normalised score 100
    minari: str  # Minari's counterpart: other data, for the mazes other physics too
    entry_point: str
    kwargs: dict


LOCOMOTION = {
    "hopper": ("hopper_v4:HopperEnv", -20.272305, 3234.3),
    "halfcheetah": ("half_cheetah_v4:HalfCheetahEnv", -280.178953, 12135.0),
    "walker2d": ("walker2d_v4:Walker2dEnv", 1.629008, 4592.3),
}
MAZE2D = {
    # '#' is a wall, 'O' is free, 'G' is the goal
    "umaze": ("##### #GOO# ###O# #OOO# #####", 300, 23.85, 161.86),
    "medium": (
        "######## #OO##OO# #OO#OOO# ##OOO### #OO#OOO# #O#OO#O# #OOO#OG# ########",
        600,
        13.13,
        277.39,
    ),
    "large": (
        "############ #OOOO#OOOOO# #O##O#O#O#O# #OOOOOO#OOO# #O####O###O# "
        "#OO#O#OOOOO# ##O#O#O#O### #OO#OOO#OGO# ############",
        800,
        6.7,
        273.99,
    ),
}
ANTMAZE = {
    # '1' is a wall, '0' is free, 'r' is the start, 'g' is the goal
    "umaze": ("u-maze", "11111 1r001 11101 1g001 11111", 700),
    "medium": (
        "big-maze",
        "11111111 1r011001 10010001 11000111 10010001 10100101 100010g1 11111111",
        1000,
    ),
    "large": (
        "hardest-maze",
        "111111111111 1r0001000001 101101010101 100000010001 101111011101 "
        "100101000001 110101010111 100100010g01 111111111111",
        1000,
    ),
}
HAND = {
    "pen": (100, 96.262799, 3076.8331017826877),
    "hammer": (200, -274.856578, 12794.134825156867),
    "door": (200, -56.512833, 2880.5693087298737),
    "relocate": (200, -6.425911, 4233.877797728884),
}


def _tasks():
    for robot, (module, low, high) in LOCOMOTION.items():
        entry_point = f"gymnasium.envs.mujoco.{module}"
        for kind in ("random", "medium", "medium-replay", "medium-expert", "expert"):
            minari = [f"mujoco/{robot}/{part}-v0" for part in kind.split("-")]
            minari = "" if kind in ("random", "medium-replay") else ",".join(minari)
            path = f"gym_mujoco_v2/{robot}_{kind.replace('-', '_')}-v2.hdf5"
            yield f"{robot}-{kind}-v2", Task(path, 1000, low, high, minari, entry_point, {})
    for size, (maze, horizon, low, high) in MAZE2D.items():
        path, minari = f"maze2d/maze2d-{size}-sparse-v1.hdf5", f"D4RL/pointmaze/{size}-v2"
        task = Task(path, horizon, low, high, minari, "d4rl_tasks:Maze2dEnv", {"maze": maze})
        yield f"maze2d-{size}-v1", task
        if size in TINY:
            yield TINY, task._replace(path=f"{TINY}.hdf5", minari="")
    starts_and_goals = {"": (False, False), "-diverse": (True, True), "-play": (True, False)}
    for size, (file_name, maze, horizon) in ANTMAZE.items():
        for kind in ("", "-diverse") if size == "umaze" else ("-play", "-diverse"):
            start, goal = starts_and_goals[kind]
            stem = f"Ant_maze_{file_name}_noisy_multistart_{start}_multigoal_{goal}_sparse"
            minari = f"D4RL/antmaze/{size}{kind}-v1"
            for version, path in (
                ("v0", f"ant_maze_new/{stem}.hdf5"),
                ("v2", f"ant_maze_v2/{stem}_fixed.hdf5"),
            ):
                task = Task(
                    path, horizon, 0.0, 1.0, minari, "d4rl_tasks:AntMazeEnv", {"maze": maze}
                )
                yield f"antmaze-{size}{kind}-{version}", task
    for hand, (horizon, low, high) in HAND.items():
        for kind in ("human", "cloned", "expert"):
            path, minari = f"hand_dapg_v1/{hand}-{kind}-v1.hdf5", f"D4RL/{hand}/{kind}-v2"
            task = Task(path, horizon, low, high, minari, "d4rl_tasks:make_hand", {"task": hand})
            yield f"{hand}-{kind}-v1", task


TASKS = dict(_tasks())


def normalized_score(name, returns):
    """0 is D4RL's random policy, 100 its expert."""
    task = TASKS[name]
    return 100 * (returns - task.random_return) / (task.expert_return - task.random_return)


# --- Environments ---


class MazeEnv(MujocoEnv):
    """What the two mazes share: a model made from a map, a goal, and a reward of 1 within 0.5."""

    def __init__(self, model_path, maze, frame_skip, observation_size, camera, **kwargs):
        self.maze = maze.split()
        self.goal = np.zeros(2)
        space = gym.spaces.Box(-np.inf, np.inf, (observation_size,), np.float64)
        super().__init__(model_path, frame_skip, space, default_camera_config=camera, **kwargs)

    def cells(self, kinds):
        """(row, column) of every cell of these kinds."""
        rows = enumerate(self.maze)
        return [(i, j) for i, row in rows for j, cell in enumerate(row) if cell in kinds]

    def _initialize_simulation(self):
        model = mujoco.MjModel.from_xml_string(self.model_xml())  # no file, so none to clean up
        model.vis.global_.offwidth, model.vis.global_.offheight = self.width, self.height
        return model, mujoco.MjData(model)

    def show_goal(self):
        self.model.site("goal").pos[:2] = self.goal + self.goal_offset

    def at_goal(self):
        return bool(np.linalg.norm(self.data.qpos[:2] - self.goal) <= 0.5)


class Maze2dEnv(MazeEnv):
    """A ball pushed through a maze: it collects a reward of 1 for every step at a fixed goal.

    The observation is position and velocity, in cells (row, column), without the goal.
    """

    metadata = {"render_modes": ["human", "rgb_array", "depth_array"], "render_fps": 100}
    goal_offset = 1.2  # the ball's body is there, so its coordinates in the world are 1.2 larger

    def __init__(self, maze, **kwargs):
        rows, columns = len(maze.split()), len(maze.split()[0])
        lookat = np.array([(rows + 1) / 2, (columns + 1) / 2, 0.0])
        camera = {"lookat": lookat, "distance": 1.3 * columns, "elevation": -90.0, "azimuth": 180.0}
        # MujocoEnv wants a path that exists; what it reads is model_xml().
        super().__init__(os.path.abspath(__file__), maze, 1, 4, camera, **kwargs)

    def model_xml(self):
        walls = "".join(
            f'<geom type="box" size=".5 .5 .2" pos="{i + 1} {j + 1} 0" rgba=".5 .4 .3 1"/>'
            for i, j in self.cells("#")
        )
        return f"""
            <mujoco model="maze2d">
              <compiler inertiafromgeom="true" angle="radian"/>
              <option timestep="0.01" gravity="0 0 0" iterations="20" integrator="Euler"/>
              <default>
                <joint damping="1" limited="false"/>
                <geom friction=".5 .1 .1" density="1000" margin="0.002" condim="1"
                      contype="2" conaffinity="1"/>
              </default>
              <worldbody>
                <light directional="true" pos="0 0 10" dir="0 0 -1" diffuse=".8 .8 .8"/>
                <geom type="plane" size="30 30 .25" pos="0 0 -0.1" rgba=".8 .9 .8 1"/>
                <body pos="1.2 1.2 0">
                  <geom type="sphere" size="0.1" contype="1" rgba="0 0.4 0.1 1"/>
                  <joint name="ball_x" type="slide" axis="1 0 0"/>
                  <joint name="ball_y" type="slide" axis="0 1 0"/>
                </body>
                <site name="goal" type="sphere" size="0.2" pos="1 1 0" rgba="1 0 0 .7"/>
                {walls}
              </worldbody>
              <actuator>
                <motor joint="ball_x" ctrlrange="-1 1" ctrllimited="true" gear="100"/>
                <motor joint="ball_y" ctrlrange="-1 1" ctrllimited="true" gear="100"/>
              </actuator>
            </mujoco>"""

    def observation(self):
        return np.concatenate([self.data.qpos, self.data.qvel])

    def reset_model(self):
        self.goal = np.array(self.cells("G")[0], dtype=np.float64)
        self.show_goal()
        cells = self.cells("OG")
        cell = np.array(cells[self.np_random.integers(len(cells))])
        qpos = cell + self.np_random.uniform(-0.1, 0.1, size=2)
        self.set_state(qpos, 0.1 * self.np_random.standard_normal(2))
        return self.observation()

    def step(self, action):
        self.set_state(self.data.qpos, self.data.qvel.clip(-5, 5))
        self.do_simulation(np.clip(action, -1, 1), self.frame_skip)
        if self.render_mode == "human":
            self.render()
        success = self.at_goal()
        return self.observation(), float(success), False, False, {"success": success}


class AntMazeEnv(MazeEnv):
    """An ant walks to the goal: a reward of 1 ends the episode there, and nothing else does.

    The observation is qpos (with x and y) and qvel, without the goal.
    """

    metadata = {"render_modes": ["human", "rgb_array", "depth_array"], "render_fps": 10}
    cell_size = 4.0
    goal_offset = 0.0

    def __init__(self, maze, **kwargs):
        rows, columns = len(maze.split()), len(maze.split()[0])
        middle = np.array([(columns - 3) / 2, (rows - 3) / 2, 0.0]) * self.cell_size
        camera = {"lookat": middle, "distance": 5.5 * columns, "elevation": -70.0, "azimuth": 90.0}
        super().__init__("ant.xml", maze, 5, 29, camera, **kwargs)

    def position(self, cell):
        """(x, y) of a cell: the start is at (0, 0), x grows with the column and y with the row."""
        start = self.cells("r")[0]
        return self.cell_size * np.array([cell[1] - start[1], cell[0] - start[0]], dtype=float)

    def model_xml(self):
        """Gymnasium's ant, changed into D4RL's by three edits, and the walls."""
        root = ET.parse(self.fullpath).getroot()
        root.find("option").set("timestep", "0.02")
        root.find("default/geom").attrib.update(solref=".02 1", solimp=".8 .8 .01")
        for motor in root.iter("motor"):
            motor.set("gear", "30")
        world = root.find("worldbody")
        for cell in self.cells("1"):
            x, y = self.position(cell)
            attributes = {"type": "box", "size": "2 2 1", "pos": f"{x} {y} 1"}
            attributes |= {"contype": "1", "conaffinity": "1", "rgba": ".4 .4 .4 .5"}
            ET.SubElement(world, "geom", attributes)
        goal = {"name": "goal", "type": "cylinder", "size": ".5 .05", "pos": "0 0 .05"}
        goal["rgba"] = "1 0 0 .7"
        ET.SubElement(world, "site", goal)
        return ET.tostring(root, encoding="unicode")

    def observation(self):
        return np.concatenate([self.data.qpos[:15], self.data.qvel[:14]])

    def reset_model(self):
        self.goal = self.position(self.cells("g")[0])
        self.goal += self.np_random.uniform(0, 1, size=2) + self.np_random.uniform(0, 0.5, size=2)
        self.show_goal()
        qpos = self.init_qpos + self.np_random.uniform(-0.1, 0.1, size=self.model.nq)
        self.set_state(qpos, self.init_qvel + 0.1 * self.np_random.standard_normal(self.model.nv))
        return self.observation()

    def step(self, action):
        self.do_simulation(np.clip(action, -1, 1), self.frame_skip)
        if self.render_mode == "human":
            self.render()
        success = self.at_goal()
        return self.observation(), float(success), success, False, {"success": success}


class HandRewards(gym.Wrapper):
    """D4RL's reward and end of the hand's tasks, where gymnasium-robotics 1.4.2 has others.

    It adds 0.1 times the distance of palm and object where D4RL subtracts it, so twice that is
    taken off; and D4RL ends an episode of the pen when the pen is dropped.
    """

    distance = {
        "door": lambda observation: observation[35:38],
        "hammer": lambda observation: observation[33:36] - observation[36:39],
        "relocate": lambda observation: observation[30:33],
    }

    def __init__(self, env, task):
        super().__init__(env)
        self.task = task

    def step(self, action):
        observation, reward, terminated, truncated, info = self.env.step(action)
        if self.task == "pen":
            terminated = bool(observation[26] < 0.075)
        else:
            reward -= 0.2 * np.linalg.norm(self.distance[self.task](observation))
        return observation, float(reward), terminated, truncated, info


def make_hand(task, **kwargs):
    from gymnasium_robotics.envs import adroit_hand  # it prints a warning of its own when imported

    env = getattr(adroit_hand, f"AdroitHand{task.capitalize()}Env")(reward_type="dense", **kwargs)
    return HandRewards(env, task)


for _name, _task in TASKS.items():
    gym.register(
        _name, _task.entry_point, max_episode_steps=_task.horizon, kwargs=dict(_task.kwargs)
    )


# --- Data ---


def find(name):
    """The file of this data set, if it is where it belongs, or None."""
    path = place(name) if name in TASKS else None
    return path if path and path.is_file() else None


def place(name):
    """Where the file of this data set belongs: in $D4RL_DATASET_DIR or ~/.d4rl/datasets."""
    folder = os.environ.get("D4RL_DATASET_DIR") or Path.home() / ".d4rl" / "datasets"
    if name == TINY:
        folder = Path(__file__).resolve().parent / "datasets"
    return Path(folder) / Path(TASKS[name].path).name


def made_by(path):
    """The script that made a file; None if the file does not say, as D4RL's do not."""
    with h5py.File(path) as file:
        return file.attrs.get("made_by")


def missing(name):
    """What to do about a file that is not there ("" if the name is none of D4RL's)."""
    if name not in TASKS:
        return ""
    task, file = TASKS[name], place(name)
    if name == TINY:
        return f"{name}: no file {file}\n  make it: python {file.parent}/make_maze2d.py --tiny"
    fetch = f"mkdir -p {file.parent} && curl -o {file} {ADDRESS}{task.path}"
    other = f"\n  or use Minari's data instead: --env-id {task.minari}" if task.minari else ""
    return f"{name}: no file {file}\n  fetch it: {fetch}{other}"


def load(name, path=None, clip=True):
    """D4RL's file as transitions (observations, actions, rewards, next_observations, terminals).

    Also `episode_returns`, of the file's episodes. The file has no next observations: the row after
    a row is its successor, unless the row ends an episode; the last row before a time limit or the
    end of the file has none, and is left out. Actions are clipped to [-1, 1].
    """
    if name not in TASKS:
        near = ", ".join(difflib.get_close_matches(name, TASKS, cutoff=0))
        raise ValueError(f"{name}: not a data set of D4RL's (the nearest: {near})")
    path = Path(path) if path else find(name)
    if path is None or not path.is_file():
        raise FileNotFoundError(missing(name) if path is None else f"{name}: no file {path}")
    try:
        with h5py.File(path) as file:
            wanted = ("observations", "actions", "rewards", "terminals", "timeouts")
            data = {key: file[key][()] for key in wanted if isinstance(file.get(key), h5py.Dataset)}
            found = sorted(file)
    except OSError as error:
        raise ValueError(f"{path}: not a readable HDF5 file ({error})") from None
    _check(path, data, wanted, found)

    obs, actions = data["observations"].astype(np.float32), data["actions"].astype(np.float32)
    rewards = data["rewards"].astype(np.float32).reshape(-1)
    terminals, timeouts = (data[key].astype(bool).reshape(-1) for key in ("terminals", "timeouts"))
    maze2d = TASKS[name].entry_point == "d4rl_tasks:Maze2dEnv"
    if maze2d:
        terminals = np.zeros_like(terminals)  # where the collector chose a new target, no end
    ends = terminals | timeouts
    ends[-1] = True
    lasts = ends.copy()
    if maze2d:  # the data never ends: what it collects is told by evaluation episodes' lengths
        lasts[TASKS[name].horizon - 1 :: TASKS[name].horizon] = True
    episode_returns = np.add.reduceat(
        rewards.astype(np.float64), np.concatenate([[0], np.flatnonzero(lasts)[:-1] + 1])
    )
    successors = np.minimum(np.arange(len(obs)) + 1, len(obs) - 1)
    successors[terminals] = np.flatnonzero(terminals)  # after a terminal nothing counts: itself
    keep = terminals | ~ends
    if name.startswith("antmaze") and name.endswith("-v0"):
        # The flags of these files are out of step with the ends: an ant that jumps was reset.
        keep &= np.linalg.norm(obs[successors, :2] - obs[:, :2], axis=1) <= 0.5
    if maze2d:
        # The data never ends; as the authors do, leaving the goal is taken for the end.
        rows = TASKS[name].kwargs["maze"].split()
        goal = next((i, row.index("G")) for i, row in enumerate(rows) if "G" in row)
        inside = np.linalg.norm(obs[:, :2] - np.array(goal), axis=1) <= 0.5
        terminals = inside & ~inside[successors]
    if not keep.any():
        raise ValueError(f"{path}: no transitions in it")
    return {
        "observations": obs[keep],
        "actions": actions[keep].clip(-1, 1) if clip else actions[keep],
        "rewards": rewards[keep],
        "next_observations": obs[successors[keep]],
        "terminals": terminals[keep].astype(np.float32),
        "episode_returns": episode_returns,
    }


def _check(path, data, wanted, found):
    for key in wanted:
        if key not in data:
            raise ValueError(f"{path}: no key '{key}' (there are: {', '.join(found) or 'none'})")
        dimensions = 2 if key in ("observations", "actions") else 1
        values, rows = data[key], len(data["observations"])
        if values.ndim == 2 and dimensions == 1 and values.shape[1] == 1:
            values = values[:, 0]
        if values.ndim != dimensions:
            raise ValueError(f"{path}: key '{key}' has shape {values.shape}, not {dimensions} axes")
        if len(values) != rows:
            raise ValueError(f"{path}: key '{key}' has {len(values)} rows, 'observations' {rows}")
        if rows == 0:
            raise ValueError(f"{path}: key '{key}' is empty")
        bad = np.flatnonzero(~np.isfinite(values.reshape(rows, -1).astype(np.float64)).all(axis=1))
        if len(bad):
            raise ValueError(f"{path}: key '{key}' has {len(bad)} rows not finite, first {bad[0]}")
