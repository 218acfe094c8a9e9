"""Makes maze2d datasets by D4RL's recipe, in D4RL's physics. Nothing is learned or downloaded.

    python -m tools.make_maze2d --maze umaze          (1M steps, to where D4RL's file would be)
    python -m tools.make_maze2d --maze large --minari my/maze2d-large-v0
    python -m tools.make_maze2d --tiny                (the bundled dataset, 100,000 steps)

A controller drives a ball from one random cell to the next along shortest paths, without resets.
Rewards are computed afterwards: 1 for every step that begins within 0.5 of the goal of the maze.
Most of the data is therefore not about the goal, and a policy that collects rewards has to combine
parts of many paths. As in D4RL's published files, reached targets are marked as timeouts, and there
are no terminals. The same seed makes the same dataset.
"""

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
    seed: int = 1  # random seed for targets and paths
    out: str | None = None  # HDF5 file to write (default: where the scripts look for D4RL's file)
    minari: str | None = None  # write a Minari dataset with this id instead of a file
    tiny: bool = False  # write the bundled dataset: 100000 steps of umaze with seed 1


def shortest_path(maze, start, end):
    """Cells from start to end, without the start, by breadth-first search."""
    previous, queue = {start: None}, deque([start])
    while queue:
        cell = queue.popleft()
        for step in ((0, 1), (0, -1), (1, 0), (-1, 0)):
            neighbour = cell[0] + step[0], cell[1] + step[1]
            if maze[neighbour[0]][neighbour[1]] != "#" and neighbour not in previous:
                previous[neighbour] = cell
                queue.append(neighbour)
    path = []
    while end != start:
        path.append(end)
        end = previous[end]
    return path[::-1]


class Controller:
    """D4RL's controller: drives through the cells of a path to a random target and stops there."""

    def __init__(self, maze, position, rng):
        cells = [(i, j) for i, row in enumerate(maze) for j, c in enumerate(row) if c != "#"]
        # D4RL draws a point within 0.1 of the centre of a cell, and then drives to the centre.
        target = cells[rng.integers(len(cells))]
        path = shortest_path(maze, (round(position[0]), round(position[1])), target) or [target]
        waypoints = [np.array(cell) - rng.uniform(0, 0.2, size=2) for cell in path[:-1]]
        self.waypoints = [*waypoints, np.array(target, dtype=float)]
        self.last_position = position

    def act(self, position, velocity):
        """The action, and whether the target is reached."""
        waypoint, moved = self.waypoints[0], math.dist(self.last_position, position)
        self.last_position = position
        action = np.clip(10 * (waypoint - position) - velocity, -1, 1)
        if math.dist(waypoint, position) < 0.1 and moved < 0.1:
            if len(self.waypoints) == 1:
                return action, True
            self.waypoints.pop(0)
        return action, False


def collect(name, steps, seed):
    """States (one more than steps), actions, flags of reached targets, and the goal."""
    env, rng = gym.make(gym.spec(name)).unwrapped, np.random.default_rng(seed)
    max_steps = d4rl_tasks.TASKS[name].max_episode_steps
    states, actions = np.empty((steps + 1, 4)), np.empty((steps, 2), np.float32)
    reached, steps_to_target = np.zeros(steps, dtype=bool), 0
    states[0] = env.reset(seed=seed)[0]
    controller = Controller(env.maze, states[0, :2], rng)
    for i in tqdm(range(steps), disable=None, unit="step", unit_scale=True):
        actions[i], done = controller.act(states[i, :2], states[i, 2:])
        states[i + 1] = env.step(actions[i])[0]
        steps_to_target += 1
        if done or steps_to_target == max_steps:
            reached[i], steps_to_target = True, 0
            controller = Controller(env.maze, states[i + 1, :2], rng)
    return states.astype(np.float32), actions, reached, env.goal


def write_file(path, states, actions, rewards, reached):
    """An HDF5 file as D4RL's. A temporary file is renamed when it is complete."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    columns = {"observations": states[:-1], "actions": actions, "rewards": rewards}
    columns |= {"terminals": np.zeros(len(actions), dtype=bool), "timeouts": reached}
    with h5py.File(temporary, "w") as file:
        for key, column in columns.items():
            file.create_dataset(key, data=column, compression="gzip", shuffle=True)
        file.attrs["made_by"] = "tools.make_maze2d"
    os.replace(temporary, path)


def write_minari(dataset_id, name, states, actions, rewards, goal):
    """Episodes end where the ball leaves the goal (terminated) or after an evaluation's length."""
    task = d4rl_tasks.TASKS[name]
    at_goal = np.linalg.norm(states[:, :2] - goal, axis=1) <= 0.5
    leaves, episodes, start = at_goal[:-1] & ~at_goal[1:], [], 0
    for i in range(len(actions)):
        length = i + 1 - start
        if leaves[i] or length == task.max_episode_steps or i + 1 == len(actions):
            terminations, truncations = np.zeros((2, length), dtype=bool)
            terminations[-1], truncations[-1] = leaves[i], not leaves[i]
            episode = EpisodeBuffer(
                observations=states[start : i + 2].astype(np.float64),
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
        description="maze2d by D4RL's recipe, made by tools.make_maze2d",
        ref_min_score=task.ref_min_score,
        ref_max_score=task.ref_max_score,
    )


def main(args):
    if args.steps < 1 or args.seed < 0:
        sys.exit("--steps must be at least 1, --seed at least 0")
    name = f"maze2d-{args.maze}-v1"
    if args.tiny:
        given = args.maze, args.steps, args.seed, args.minari
        if given != (Args.maze, Args.steps, Args.seed, Args.minari):
            sys.exit(
                "--tiny writes one fixed file: it takes no --maze, --steps, --seed or --minari"
            )
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

    states, actions, reached, goal = collect(name, args.steps, args.seed)
    rewards = (np.linalg.norm(states[:-1, :2] - goal, axis=1) <= 0.5).astype(np.float32)
    if args.minari:
        write_minari(args.minari, name, states, actions, rewards, goal)
    else:
        write_file(path, states, actions, rewards, reached)
    max_steps = d4rl_tasks.TASKS[name].max_episode_steps
    print(f"{args.minari or path}: {args.steps:,} steps, {reached.sum():,} targets, ", end="")
    print(f"return {max_steps * rewards.mean():.1f} in {max_steps} steps. Train on it:")
    if args.out and not args.tiny:
        place = d4rl_tasks.file_path(name)
        print(f'  mkdir -p "{place.parent}" && cp "{path}" "{place}"')
    print(f"  python td3_bc_n.py --env-id {args.minari or name}")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
