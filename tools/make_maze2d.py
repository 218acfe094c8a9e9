"""Makes maze2d datasets with D4RL's script, in D4RL's physics. Nothing is learned or downloaded.

    python -m tools.make_maze2d --maze umaze          (1M steps, to where D4RL's file would be)
    python -m tools.make_maze2d --maze large --minari my/maze2d-large-v0
    python -m tools.make_maze2d --tiny                (the bundled dataset, 100,000 steps)

A controller drives a ball from one random cell to the next along shortest paths, without resets and
with noisy actions. Rewards are computed afterwards: 1 for every step that begins within 0.5 of the
goal of the maze. Most of the data is therefore not about the goal, and a policy that collects
rewards has to combine parts of many paths. As in D4RL's published files, reached targets are marked
as timeouts, and there are no terminals. The same seed makes the same dataset.
"""

import io
import math
import os
import sys
import tempfile
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import gymnasium as gym
import h5py
import numpy as np
import tyro
from minari.data_collector.episode_buffer import EpisodeBuffer
from tqdm import tqdm

import d4rl_tasks
from tools.record import check_dataset_id, write_dataset

TINY_STEPS = 100_000


@dataclass
class Args:
    maze: Literal["umaze", "medium", "large"] = "umaze"  # one of D4RL's mazes
    steps: int = 1_000_000  # number of steps (D4RL: 1000000)
    noise: float = 0.5  # std of the Gaussian noise on the actions (D4RL: 0.5), 0 for none
    seed: int = 1  # random seed for targets, paths and noise
    out: str | None = None  # HDF5 file to write (default: where the scripts look for D4RL's file)
    minari: str | None = None  # write a Minari dataset with this id instead of a file
    tiny: bool = False  # write the bundled dataset: 100000 steps of umaze with seed 1


def plan(maze, start, target):
    """Cells of a shortest path from start to target, without the start.

    A ball beside a wall can be in a wall cell, by rounding. As in D4RL, the path then goes to any
    free neighbour, also through an inner wall, and without one it stays.
    """

    def neighbours(cell):
        return [(cell[0] + i, cell[1] + j) for i, j in ((0, -1), (0, 1), (-1, 0), (1, 0))]

    distances, queue = {target: 0}, deque([target])
    while queue:
        cell = queue.popleft()
        for neighbour in neighbours(cell):
            if maze[neighbour[0]][neighbour[1]] != "#" and neighbour not in distances:
                distances[neighbour] = distances[cell] + 1
                queue.append(neighbour)
    path = [start]
    while path[-1] != target:
        free = [neighbour for neighbour in neighbours(path[-1]) if neighbour in distances]
        if not free:
            return [start]
        path.append(min(free, key=distances.get))
    return path[1:] or [target]


class Controller:
    """D4RL's controller: drives through the cells of a path and stops at the target cell."""

    def __init__(self, maze, rng):
        self.maze, self.rng, self.target = maze, rng, None

    def act(self, position, velocity, target):
        """The action, and whether the target is reached."""
        if target != self.target:  # the old plan serves for the same cell
            start = round(position[0]), round(position[1])
            self.waypoints = [
                np.array(cell) - (cell != target) * self.rng.uniform(0, 0.2, size=2)
                for cell in plan(self.maze, start, target)
            ]
            self.target, self.last_position = target, start
        is_slow = math.dist(self.last_position, position) < 0.1
        self.last_position = position
        reached = is_slow and math.dist(target, position) < 0.1
        waypoint = target if reached else self.waypoints[0]
        if not reached and is_slow and math.dist(waypoint, position) < 0.1:
            self.waypoints.pop(0)
        return np.clip(10 * (waypoint - position) - velocity, -1, 1), reached


def collect(name, steps, seed, noise):
    """Observations, actions, flags of reached targets, and the goal."""
    env, rng = gym.make(gym.spec(name)).unwrapped, np.random.default_rng(seed)
    max_steps = d4rl_tasks.TASKS[name].max_episode_steps
    observations, actions = np.empty((steps, 4), np.float32), np.empty((steps, 2), np.float32)
    timeouts, steps_to_target = np.zeros(steps, dtype=bool), 0
    # D4RL draws a point within 0.1 of the centre of a cell, and then drives to the centre.
    cells = env.cells("OG")
    target, controller = cells[rng.integers(len(cells))], Controller(env.maze, rng)
    obs, _ = env.reset(seed=seed)
    for i in tqdm(range(steps), disable=None, unit="step", unit_scale=True):
        action, reached = controller.act(obs[:2], obs[2:], target)
        action = np.clip(action + noise * rng.standard_normal(2), -1, 1)
        observations[i], actions[i] = obs, action
        timeouts[i] = reached or steps_to_target == max_steps
        next_obs = env.step(action)[0]
        if timeouts[i]:
            # As in D4RL, obs stays: the next row repeats it, although the ball has moved on.
            target, steps_to_target = cells[rng.integers(len(cells))], 0
        else:
            obs, steps_to_target = next_obs, steps_to_target + 1
    return observations, actions, timeouts, env.goal


def write_file(path, columns, made_by):
    """An HDF5 file as D4RL's. A temporary file is renamed when it is complete."""
    temporary, content = path.with_name(f"{path.name}.{os.getpid()}.tmp"), io.BytesIO()
    with h5py.File(content, "w") as file:  # in memory: on a full disk, HDF5 crashes
        for key, column in columns.items():
            file.create_dataset(key, data=column, compression="gzip", shuffle=True)
        file.attrs["made_by"] = made_by
    try:
        temporary.write_bytes(content.getbuffer())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_minari(dataset_id, name, columns, goal, made_by):
    """The transitions that the scripts take from the file, in episodes.

    Rows that are marked as timeouts are left out: the next row repeats their observation. Episodes
    end where the ball leaves the goal (terminated) or after an evaluation's length.
    """
    task, keep = d4rl_tasks.TASKS[name], ~columns["timeouts"]
    obs, actions, rewards = (columns[key][keep] for key in ("observations", "actions", "rewards"))
    at_goal = np.linalg.norm(obs[:, :2] - goal, axis=1) <= 0.5
    leaves, episodes, start = at_goal[:-1] & ~at_goal[1:], [], 0
    for i in range(len(leaves)):  # the last row has no next observation
        length = i + 1 - start
        if leaves[i] or length == task.max_episode_steps or i + 1 == len(leaves):
            terminations, truncations = np.zeros((2, length), dtype=bool)
            terminations[-1], truncations[-1] = leaves[i], not leaves[i]
            episode = EpisodeBuffer(
                observations=obs[start : i + 2].astype(np.float64),
                actions=actions[start : i + 1],
                rewards=rewards[start : i + 1],
                terminations=terminations,
                truncations=truncations,
            )
            episodes.append(episode)
            start = i + 1
    write_dataset(
        dataset_id,
        episodes,
        gym.make(gym.spec(name)),
        algorithm_name="waypoint controller",
        description=f"maze2d by D4RL's recipe, made by {made_by}",
        ref_min_score=task.ref_min_score,
        ref_max_score=task.ref_max_score,
    )


def main(args):
    if args.steps < 2 or args.seed < 0:
        sys.exit("--steps must be at least 2, --seed at least 0")
    if not 0 <= args.noise < math.inf:
        sys.exit("--noise must be at least 0")
    name = f"maze2d-{args.maze}-v1"
    if args.tiny:
        given = args.maze, args.steps, args.noise, args.seed, args.minari
        if given != (Args.maze, Args.steps, Args.noise, Args.seed, Args.minari):
            sys.exit("--tiny writes one fixed file: besides it only --out can be given")
        name, args.steps = d4rl_tasks.TINY, TINY_STEPS
    path = Path(args.out) if args.out else d4rl_tasks.file_path(name)
    if args.minari:
        if args.out:
            sys.exit("--out and --minari exclude each other")
        check_dataset_id(args.minari)
    elif path.exists() and (args.out or not args.tiny):
        sys.exit(f"{path} exists and is not overwritten; --out FILE writes another file")
    else:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=path.parent).close()
        except OSError as error:
            sys.exit(f"{path}: cannot be written ({error})")

    obs, actions, timeouts, goal = collect(name, args.steps, args.seed, args.noise)
    rewards = (np.linalg.norm(obs[:, :2] - goal, axis=1) <= 0.5).astype(np.float32)
    columns = {"observations": obs, "actions": actions, "rewards": rewards}
    columns |= {"terminals": np.zeros(args.steps, dtype=bool), "timeouts": timeouts}
    made_by = "tools.make_maze2d" + (f" --noise {args.noise}" if args.noise != Args.noise else "")
    if args.minari:
        write_minari(args.minari, name, columns, goal, made_by)
    else:
        try:
            write_file(path, columns, made_by)
        except OSError as error:
            sys.exit(f"{path}: cannot be written ({error})")
    max_steps = d4rl_tasks.TASKS[name].max_episode_steps
    (x_min, y_min), (x_max, y_max) = obs[:, :2].min(axis=0), obs[:, :2].max(axis=0)
    print(f"{args.minari or path}: {args.steps:,} steps, {timeouts.sum():,} targets, ", end="")
    print(f"positions {x_min:.3f}-{x_max:.3f} x {y_min:.3f}-{y_max:.3f}, ", end="")
    print(f"return {max_steps * rewards.mean():.1f} in {max_steps} steps. Train on it:")
    if args.out and not args.tiny:
        place = d4rl_tasks.file_path(name)
        print(f'  mkdir -p "{place.parent}" && cp "{path}" "{place}"')
    print(f"  python td3_bc_n.py --env-id {args.minari or name}")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
