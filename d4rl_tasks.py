"""The tasks of D4RL on current MuJoCo: environments, datasets and normalized scores.

    import gymnasium as gym
    env = gym.make("d4rl_tasks:antmaze-large-diverse-v0")

    import d4rl_tasks
    data, metadata = d4rl_tasks.load("antmaze-large-diverse-v0")      # downloads D4RL's HDF5 file
    d4rl_tasks.normalized_score("antmaze-large-diverse-v0", 0.75)     # 75.0

D4RL itself needs mujoco-py and a toolchain of 2021. This module has its tasks under the same names:
hopper, halfcheetah, walker2d (-v2), maze2d (-v1), antmaze (-v0, -v2), and Adroit's pen, hammer,
door and relocate (-v1), with D4RL's physics, observations, rewards, terminations and time limits.
Scores are comparable with published ones if both the dataset and the environment are D4RL's.
"""

import difflib
import hashlib
import http.client
import os
import re
import sys
import urllib.request
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import NamedTuple

import gymnasium as gym
import h5py
import mujoco
import numpy as np
from gymnasium.envs.mujoco import MujocoEnv
from tqdm import tqdm

TINY = "tiny-maze2d-umaze-v0"  # the bundled dataset, written by tools/make_maze2d.py
BASE_URL = "http://rail.eecs.berkeley.edu/datasets/offline_rl/"
MIRROR = "imone/D4RL"  # dataset repository on Hugging Face, asked if BASE_URL fails


class Task(NamedTuple):
    path: str  # path of the dataset below BASE_URL
    max_episode_steps: int
    ref_min_score: float  # return with normalized score 0 (a random policy)
    ref_max_score: float  # return with normalized score 100 (an expert)
    minari: str  # similar Minari datasets: other data, and for mazes other physics
    entry_point: str
    kwargs: dict


LOCOMOTION = {
    "hopper": ("hopper_v4:HopperEnv", -20.272305, 3234.3),
    "halfcheetah": ("half_cheetah_v4:HalfCheetahEnv", -280.178953, 12135.0),
    "walker2d": ("walker2d_v4:Walker2dEnv", 1.629008, 4592.3),
}
MAZE2D = {
    # (maze, time limit, score references); # is a wall, O is free, G is the goal
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
    # (file name, maze, time limit); 1 is a wall, 0 is free, r is the start, g is the goal
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
    for size, (maze, max_steps, low, high) in MAZE2D.items():
        path, minari = f"maze2d/maze2d-{size}-sparse-v1.hdf5", f"D4RL/pointmaze/{size}-v2"
        task = Task(path, max_steps, low, high, minari, "d4rl_tasks:Maze2dEnv", {"maze": maze})
        yield f"maze2d-{size}-v1", task
        if size == "umaze":
            yield TINY, task._replace(path=f"{TINY}.hdf5", minari="")
    starts_and_goals = {"": (False, False), "-diverse": (True, True), "-play": (True, False)}
    for size, (file_name, maze, max_steps) in ANTMAZE.items():
        for kind in ("", "-diverse") if size == "umaze" else ("-play", "-diverse"):
            start, goal = starts_and_goals[kind]
            stem = f"Ant_maze_{file_name}_noisy_multistart_{start}_multigoal_{goal}_sparse"
            minari = f"D4RL/antmaze/{size}{kind}-v1"
            for version, path in (
                ("v0", f"ant_maze_new/{stem}.hdf5"),
                ("v2", f"ant_maze_v2/{stem}_fixed.hdf5"),
            ):
                task = Task(
                    path, max_steps, 0.0, 1.0, minari, "d4rl_tasks:AntMazeEnv", {"maze": maze}
                )
                yield f"antmaze-{size}{kind}-{version}", task
    for hand, (max_steps, low, high) in HAND.items():
        for kind in ("human", "cloned", "expert"):
            path, minari = f"hand_dapg_v1/{hand}-{kind}-v1.hdf5", f"D4RL/{hand}/{kind}-v2"
            task = Task(path, max_steps, low, high, minari, "d4rl_tasks:make_hand", {"task": hand})
            yield f"{hand}-{kind}-v1", task


TASKS = dict(_tasks())


def normalized_score(name, returns):
    """0 for a random policy, 100 for an expert."""
    task = TASKS[name]
    return 100 * (returns - task.ref_min_score) / (task.ref_max_score - task.ref_min_score)


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

    def __init__(self, maze, fixed_goal=False, **kwargs):
        self.fixed_goal = fixed_goal  # keep the goal of the first episode, as D4RL does in training
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
        if not (self.fixed_goal and self.goal.any()):
            self.goal = self.position(self.cells("g")[0]) + self.np_random.uniform(0, 1, size=2)
            self.goal += self.np_random.uniform(0, 0.5, size=2)
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
        _name,
        _task.entry_point,
        max_episode_steps=_task.max_episode_steps,
        kwargs=dict(_task.kwargs),
    )


# --- Datasets ---


# SHA-256 of D4RL's files, as in TensorFlow Datasets. Those of maze2d and a few others are unknown.
SHA256 = dict(
    line.split()
    for line in """
hopper-random-v2 63103ef7059db4c0819bd054f4e83ff339030b50bcdb46bdbe50385f234b5054
hopper-medium-v2 5bdf1bc4a713c82941de44633df669b36c89850b652a25985166796d25cf71a0
hopper-medium-replay-v2 e121c5f7c9857a307baa9edc6a2c3b48e85fedb9ac316ecddd0f48ca7ef4e39b
hopper-medium-expert-v2 9d51ad87f8c905be3880d84c6140bcdb7fbf39a19e046a237f238ba34fec9e26
hopper-expert-v2 01aa219a5f8eea5e639eccdc636ec2bf40e317159a95cf4bf6e985f16909941b
halfcheetah-random-v2 25407aef85b5d16c0f36b4149341edb4acc6a9e88c1db529b2de19e7464874ba
halfcheetah-medium-v2 41324e8487a9556d8cfa4538827f8937f4d63dae3030825ebc9f3a726ed08ca0
halfcheetah-medium-replay-v2 48d494a4770c11f48260736dec090b78bdca8375647ed4d24bfa5b6610c7f683
halfcheetah-medium-expert-v2 015db75dae5bbe8e94029b71fa0bafc2073365df0c94744e71031189f3f79c06
halfcheetah-expert-v2 d9fe53bb994eb1e20a99b4fa3412cd76a1bb7966a7ff55e0fcbdd6081bd2965f
walker2d-random-v2 4e863bb6090cf4a461548bd470564b32f1ae5b32ef3085f816b2ede7f092e7fa
walker2d-medium-v2 cf00f43add04c17fdfc2958dd581dea0851b2e5bedbe6fda073758a8f841aeda
walker2d-medium-replay-v2 e75de96a4f77acf7d4e0d6fdf0d7ccb177c26c44bb4388e4fd99f543ccfa18db
walker2d-medium-expert-v2 6b8d7f868c45bbaedf460be797fb7271b46dee6ebe45fe7a64319f2005b59a04
walker2d-expert-v2 2985dc3d436a8baa10e8f43f946fe1d7c6337a4e4fbc65def70618093b18c59a
antmaze-umaze-v0 188838316eab5882fa0e1dc8398b5e79772f64f27f0b78d6aebe838402a720c6
antmaze-umaze-v2 5ef15257771c50ef4d23c7de001750e96c8bb5d9b6a5e4a821dcfb3065fbd130
antmaze-umaze-diverse-v0 4aff7f77b97a8dd62e513cac8f57da7cdb458cfac7ac0cec3081b7765f2da59d
antmaze-umaze-diverse-v2 c771dd63963cd7d9f55f24a6d809064f6b82250a6aeac4c9d13f9a1d06e8c932
antmaze-medium-play-v0 527385c14b87892e8c222c43246546d6cd461fa2a5476d0b3b105ae422b7637c
antmaze-medium-diverse-v0 b77764cac90c23e09905539c49ceb3949b49c5b39eb9d51788cc64b9dd0a2c0d
antmaze-medium-diverse-v2 ad9dcbac05d1f8744a7a216083f513662f43f64f28a4a5eb225e9811902dfae7
antmaze-large-play-v0 e37afef5b80b968b30cad2682f9a93ee1b400e3b58c7a7f45e7d425d03a2b03d
antmaze-large-play-v2 6d353df2457829925d7f9d4b0215587469908bd57478ea76f16417cfa944f471
antmaze-large-diverse-v0 dda7acbdde1a94a14aa7b06a7e5d8141e60a03ccdc4578bff34b0444425bf11d
antmaze-large-diverse-v2 84f775eb7956ea9cc766704710dc520a8ab357adc7522ade47f556f0e335e284
pen-human-v1 209e345b2150b633f30a11612612c60f49e941f127ce6c4dc0cd790501c46f9f
pen-cloned-v1 6d1a982cee1950501bedebbddedbcbb377e6284d379986c83abac8a6c0be0c22
pen-expert-v1 3791b8ca6a802061770af2977c051ac3ae261488210ce73788760a5b8308f374
hammer-human-v1 3e42f3f49b5c92a901601dfe867c6c62a9651cbe79f6760ec8b402a15816a498
hammer-cloned-v1 e48d75b159bdd72f51d3f01448d3eca4d38275714e11e995c14a36f6cf159db3
hammer-expert-v1 1c069a0f6e4852493023c77dc3b3a12d8d5ac2e3a034827fea3ab8a161e7185f
door-human-v1 f9691288c3ddf2b4e7b31bdae0d8444b80ba035515495f8a902d60c43ee09370
door-cloned-v1 1f6a60ecc4d2a2e5c02f41dd3412be61bb265a33dcf120ceee9e9682d4fe4d48
door-expert-v1 66df4cd4e0a1e0b72ea72653ce088e29ecbfa99bac3cd2b52e64092e9a0aaab4
""".strip().splitlines()
)


def file_path(name):
    """Where D4RL keeps the file of a dataset: in $D4RL_DATASET_DIR, or ~/.d4rl/datasets."""
    if name == TINY:
        return Path(__file__).resolve().parent / "datasets" / TASKS[name].path
    directory = os.environ.get("D4RL_DATASET_DIR") or Path.home() / ".d4rl" / "datasets"
    return Path(directory) / Path(TASKS[name].path).name


def find(name):
    """Path of the dataset's file, downloaded if it is missing.

    Returns None, with a warning, if no download works and Minari has a similar dataset.
    """
    if name not in TASKS:
        nearest = ", ".join(difflib.get_close_matches(name, TASKS, cutoff=0))
        hint = f"A Minari id has a namespace: my/{name}"
        raise ValueError(f"{name}: not a D4RL dataset. Did you mean {nearest}? {hint}")
    path, task = file_path(name), TASKS[name]
    if path.is_file():
        return path
    if name == TINY:
        raise FileNotFoundError(f"{path} is missing: python -m tools.make_maze2d --tiny")
    reasons = []
    for url in (lambda: BASE_URL + task.path, lambda: mirror_url(path.name)):
        try:
            download(url(), path, SHA256.get(name))
            return path
        except Exception as error:  # Hugging Face's client has its own exception classes
            reasons.append(" ".join(str(error).split())[:200] or repr(error))
    reason = f"{name}: cannot download {path} ({'; '.join(reasons)})"
    if not task.minari:
        raise OSError(reason)
    warning = "other data, for mazes other physics, scores not comparable with the paper"
    print(f"WARNING: {reason}. Using Minari's {task.minari}: {warning}.", file=sys.stderr)
    return None


def mirror_url(file_name):
    """Address of a file of the mirror, in whatever folder it is."""
    from huggingface_hub import HfApi, hf_hub_url  # Minari needs it, too

    for path in HfApi().list_repo_files(MIRROR, repo_type="dataset"):
        if path.split("/")[-1] == file_name:
            return hf_hub_url(MIRROR, path, repo_type="dataset")
    raise FileNotFoundError(f"not in {MIRROR}")


def sha256(path):
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def download(url, path, expected_sha256=None):
    """Writes to a temporary file, which is renamed when it is complete and the right file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with urllib.request.urlopen(url, timeout=60) as response, open(temporary, "wb") as file:
            size = int(response.headers.get("Content-Length") or 0)
            with tqdm(desc=path.name, total=size, unit="B", unit_scale=True, disable=None) as bar:
                while chunk := response.read(2**20):
                    file.write(chunk)
                    bar.update(len(chunk))
        received = temporary.stat().st_size
        if size and received != size:
            raise OSError(f"{url}: incomplete, {received} of {size} bytes")
        if expected_sha256 and sha256(temporary) != expected_sha256:
            raise OSError(f"{url}: its SHA-256 is not that of D4RL's file")
        with h5py.File(temporary) as file:  # raises OSError if it is truncated or no HDF5 file
            list(file)
        os.replace(temporary, path)
    except http.client.HTTPException as error:
        raise OSError(f"{url}: {error!r}") from None
    finally:
        temporary.unlink(missing_ok=True)


def load(name, path=None):
    """D4RL's file as (data, metadata), where data has the keys of d4rl.qlearning_dataset.

    The same transitions as in the authors' code: those of qlearning_dataset (next observations are
    the next rows, rows marked as timeouts and the last row are left out), for antmaze-v0 without
    jumps, and for maze2d with dones where the goal is left.
    """
    path = Path(path) if path else find(name)
    if path is None:
        raise FileNotFoundError(f"{name}: no file {file_path(name)}")
    (obs, actions, rewards, terminals, timeouts), made_by, action_space = read_file(name, path)
    if not made_by and name in SHA256 and sha256(path) != SHA256[name]:
        made_by = "not D4RL's file (its SHA-256 differs)"
    returns = episode_returns(name, obs, rewards, terminals, timeouts)
    next_obs, dones, keep = obs[1:], terminals[:-1], ~timeouts[:-1]
    obs, actions, rewards = obs[:-1], actions[:-1], rewards[:-1]
    if name.startswith("antmaze") and name.endswith("-v0"):
        # The timeouts of these files are not where the episodes end: an ant that jumps was reset.
        keep &= ~jumps(obs, next_obs)
    if "maze2d" in name:  # the controller had other goals, so the files have no terminals
        maze = TASKS[name].kwargs["maze"].split()
        goal = next((i, row.index("G")) for i, row in enumerate(maze) if "G" in row)
        at_goal, next_at_goal = (
            np.linalg.norm(x[:, :2] - np.array(goal), axis=1) <= 0.5 for x in (obs, next_obs)
        )
        dones = at_goal & ~next_at_goal
    if not keep.any():
        raise ValueError(f"{path}: no transitions")
    columns = (obs, actions, rewards, next_obs, dones)
    keys = ("observations", "actions", "rewards", "next_observations", "terminals")
    data = {key: column[keep] for key, column in zip(keys, columns, strict=True)}
    metadata = {
        "dataset": name,
        "source": made_by or "d4rl",
        # The antmaze results of the paper are for -v0.
        "comparable_with_paper": not (made_by or re.fullmatch("antmaze.*-v2", name)),
        "transitions": int(keep.sum()),
        "episodes": len(returns),
        "mean_return": float(returns.mean()),
        "action_low": action_space.low.tolist(),
        "action_high": action_space.high.tolist(),
        "observation_keys": [],
    }
    return data, metadata | env_metadata(name)


def env_metadata(name):
    """The metadata of a task that do not depend on its dataset."""
    low, high = TASKS[name].ref_min_score, TASKS[name].ref_max_score
    metadata = {"ref_min_score": low, "ref_max_score": high, "environment": name}
    if name.startswith("antmaze"):
        metadata["train_env_kwargs"] = {"fixed_goal": True}
    return metadata


def jumps(obs, next_obs):
    """Where (x, y) moves by more than 0.5 in one step, which only a reset does."""
    return np.linalg.norm(next_obs[:, :2] - obs[:, :2], axis=1) > 0.5


def episode_returns(name, obs, rewards, terminals, timeouts):
    """Returns of the episodes in a file, comparable with those of an evaluation."""
    lasts = terminals | timeouts
    if "maze2d" in name:  # one long trajectory: cut it into lengths of evaluation episodes
        max_steps = TASKS[name].max_episode_steps
        lasts = np.arange(1, len(obs) + 1) % max_steps == 0
    if name.startswith("antmaze"):  # terminals come in clusters: an episode ends with a reset
        lasts = timeouts.copy()
        lasts[:-1] |= jumps(obs[:-1], obs[1:])
    lasts[-1] = True
    starts = np.concatenate([[0], np.flatnonzero(lasts)[:-1] + 1])
    if name.startswith("antmaze"):
        return np.maximum.reduceat(rewards, starts)  # 1 if the goal was reached
    return np.add.reduceat(rewards.astype(np.float64), starts)


def read_file(name, path):
    """The five arrays of D4RL's file, checked, what made it (None for D4RL), the action space."""
    dtypes = {"observations": "f4", "actions": "f4", "rewards": "f4"}
    dtypes |= {"terminals": bool, "timeouts": bool}
    env = gym.make(gym.spec(name))
    shapes = {"observations": env.observation_space.shape, "actions": env.action_space.shape}
    columns = []
    try:
        with h5py.File(path) as file:
            made_by = file.attrs.get("made_by")
            made_by = made_by.decode() if isinstance(made_by, bytes) else made_by
            for key in dtypes:
                if not isinstance(file.get(key), h5py.Dataset):
                    raise ValueError(f"{path}: no '{key}' (found: {', '.join(file) or 'nothing'})")
                columns.append(np.asarray(file[key][()]))
    except OSError as error:
        raise ValueError(f"{path}: not a readable HDF5 file ({error})") from None
    if not isinstance(made_by, str | None):
        raise ValueError(f"{path}: the attribute 'made_by' is not a string")
    rows = len(columns[0]) if columns[0].shape else 0
    if rows == 0:
        raise ValueError(f"{path}: 'observations' has no rows")
    for i, (key, dtype) in enumerate(dtypes.items()):
        column, shape = columns[i], (rows, *shapes.get(key, ()))
        if not shapes.get(key) and column.shape == (rows, 1):
            column = column[:, 0]
        if column.dtype.kind not in "biuf":
            raise ValueError(f"{path}: '{key}' has no numbers but {column.dtype}")
        if column.shape != shape:
            raise ValueError(
                f"{path}: '{key}' has shape {column.shape}, expected {shape} for {name}"
            )
        finite = np.isfinite(column.astype(np.float64)).reshape(rows, -1).all(axis=1)
        if not finite.all():
            raise ValueError(f"{path}: '{key}' is not finite in row {finite.argmin()}")
        columns[i] = column.astype(dtype)
    return columns, made_by, env.action_space


class SuccessReward(gym.Wrapper, gym.utils.RecordConstructorArgs):
    """Reward 1 for the step that solves the task, else 0: a return is a success (tools.ogbench)."""

    def __init__(self, env):
        gym.utils.RecordConstructorArgs.__init__(self)
        gym.Wrapper.__init__(self, env)

    def step(self, action):
        obs, _, terminated, truncated, info = self.env.step(action)
        return obs, float(info["success"]), terminated, truncated, info


def minari_task(ids, env_spec):
    """What D4RL's tasks in Minari need besides: metadata, and arguments of the environment.

    They have D4RL's score references and time limits, and the goals of mazes are as in D4RL.
    OGBench's tasks are evaluated with SuccessReward, but fine-tuned on the rewards of the dataset.
    """
    metadata, env_kwargs, first_id = {}, {}, ids.split(",")[0]
    max_steps = int(env_spec.max_episode_steps or 1000)
    same = [task for task in TASKS.values() if first_id in task.minari.split(",")]
    if first_id.startswith("mujoco/"):
        robot = "/".join(first_id.split("/")[:2]) + "/"
        same = [task for task in TASKS.values() if task.minari.startswith(robot)]
    if same:
        metadata["ref_min_score"] = same[0].ref_min_score
        metadata["ref_max_score"] = same[0].ref_max_score
        max_steps = env_kwargs["max_episode_steps"] = same[0].max_episode_steps
    if env_spec.id.startswith(("PointMaze_", "AntMaze_")):
        # Minari's time limit of pointmaze is the length of the whole dataset.
        env_kwargs["max_episode_steps"] = min(max_steps, 1000)
        # As in D4RL: an ant's episode ends at the goal, a point collects rewards there.
        env_kwargs["continuing_task"] = env_spec.id.startswith("PointMaze")
        env_kwargs["reset_target"] = False
        # Minari's evaluation map of the ant's umaze is not the map of its dataset.
        env_kwargs["eval_env"] = not env_spec.id.startswith("AntMaze_UMaze")
        metadata["goal_is_terminal"] = "Dense" not in env_spec.id
    if str(env_spec.entry_point).startswith("ogbench."):
        metadata["train_env_kwargs"] = {"eval_env": False}
    return metadata, env_kwargs
