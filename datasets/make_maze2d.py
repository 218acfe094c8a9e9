"""Makes maze2d data by D4RL's recipe, in D4RL's physics, with no learned policy and no download.

    python datasets/make_maze2d.py --tiny                        (the file that comes along)
    python datasets/make_maze2d.py --maze umaze                  (1M steps, as large as D4RL's)
    python datasets/make_maze2d.py --maze large --minari my/maze2d-large-v0

A ball is driven from one random cell to the next along shortest paths. It never starts over, and
the rewards are given afterwards: 1 for every step that begins within 0.5 of the maze's one goal. So
most of the data is about other places, and a policy that collects reward must be put together from
pieces. The same seed makes the same data.
"""

import math
import os
import sys
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import gymnasium as gym
import h5py
import numpy as np
import tyro
from tqdm import tqdm

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import d4rl_tasks  # noqa: E402


@dataclass
class Args:
    maze: Literal["umaze", "medium", "large"] = "umaze"  # one of D4RL's three
    steps: int = 1_000_000  # how many (D4RL: 1000000)
    seed: int = 1  # of the targets and the paths
    out: str | None = None  # the file to write (D4RL's name, where the scripts look for D4RL's)
    minari: str | None = None  # write a Minari data set of this id instead
    tiny: bool = False  # write the small file that comes with the scripts (100000 steps of umaze)


def shortest_path(maze, start, end):
    """Cells from start to end, without the start, by breadth-first search."""
    before, queue = {start: None}, deque([start])
    while queue:
        cell = queue.popleft()
        for step in ((0, 1), (0, -1), (1, 0), (-1, 0)):
            neighbour = cell[0] + step[0], cell[1] + step[1]
            if maze[neighbour[0]][neighbour[1]] != "#" and neighbour not in before:
                before[neighbour] = cell
                queue.append(neighbour)
    path = []
    while end != start:
        path.append(end)
        end = before[end]
    return path[::-1]


class Controller:
    """D4RL's: through the middle of each cell on the path, slowly enough to stop there."""

    def __init__(self, maze, position, random):
        cells = [(i, j) for i, row in enumerate(maze) for j, c in enumerate(row) if c != "#"]
        # D4RL draws a point within 0.1 of a cell's middle, and then goes to the cell.
        target = cells[random.integers(len(cells))]
        path = shortest_path(maze, (round(position[0]), round(position[1])), target) or [target]
        waypoints = [np.array(cell) - random.uniform(0, 0.2, size=2) for cell in path[:-1]]
        self.waypoints, self.before = [*waypoints, np.array(target, dtype=float)], position

    def act(self, position, velocity):
        """The action, and whether the target is reached."""
        waypoint, moved = self.waypoints[0], math.dist(self.before, position)
        self.before = position
        action = np.clip(10 * (waypoint - position) - velocity, -1, 1)
        if math.dist(waypoint, position) < 0.1 and moved < 0.1:
            if len(self.waypoints) == 1:
                return action, True
            self.waypoints.pop(0)
        return action, False


def collect(name, steps, seed):
    """States (one more than steps), actions, and where a new target was drawn."""
    env, random = gym.make(gym.spec(name)).unwrapped, np.random.default_rng(seed)
    horizon = d4rl_tasks.TASKS[name].horizon
    states, actions = np.empty((steps + 1, 4)), np.empty((steps, 2), np.float32)
    reached, since = np.zeros(steps, dtype=bool), 0
    states[0] = env.reset(seed=seed)[0]
    controller = Controller(env.maze, states[0, :2], random)
    for i in tqdm(range(steps), disable=None, unit="step", unit_scale=True):
        actions[i], done = controller.act(states[i, :2], states[i, 2:])
        states[i + 1] = env.step(actions[i])[0]
        since += 1
        if done or since == horizon:
            reached[i], since = True, 0
            controller = Controller(env.maze, states[i + 1, :2], random)
    return states.astype(np.float32), actions, reached, env.goal


def write_file(path, states, actions, reached, rewards):
    """In D4RL's layout, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    columns = {"observations": states[:-1], "actions": actions, "rewards": rewards}
    columns |= {"terminals": reached, "timeouts": np.zeros(len(actions), dtype=bool)}
    with h5py.File(temporary, "w") as file:
        for key, column in columns.items():
            file.create_dataset(key, data=column, compression="gzip", shuffle=True)
        file.attrs["made_by"] = "datasets/make_maze2d.py"
    os.replace(temporary, path)


def write_minari(dataset_id, name, states, actions, rewards, goal):
    """Episodes of the evaluation's length at most, that end where the ball leaves the goal."""
    import minari
    from minari.data_collector.episode_buffer import EpisodeBuffer

    horizon = d4rl_tasks.TASKS[name].horizon
    inside = np.linalg.norm(states[:, :2] - goal, axis=1) <= 0.5
    left, episodes, start = inside[:-1] & ~inside[1:], [], 0
    for i in range(len(actions)):
        last = i + 1 - start == horizon or i + 1 == len(actions)
        if left[i] or last:
            rows, length = slice(start, i + 1), i + 1 - start
            flags = [False] * (length - 1)
            episode = EpisodeBuffer(
                observations=list(states[start : i + 2].astype(np.float64)),
                actions=list(actions[rows]),
                rewards=rewards[rows].tolist(),
                terminations=[*flags, bool(left[i])],
                truncations=[*flags, not left[i]],
            )
            episodes.append(episode)
            start = i + 1
    env = gym.make(gym.spec(name))
    minari.create_dataset_from_buffers(
        dataset_id,
        episodes,
        env=env,
        eval_env=env,
        algorithm_name="waypoint controller",
        description="maze2d by D4RL's recipe, made by datasets/make_maze2d.py",
        ref_min_score=d4rl_tasks.TASKS[name].random_return,
        ref_max_score=d4rl_tasks.TASKS[name].expert_return,
    )


if __name__ == "__main__":
    args = tyro.cli(Args, description=__doc__)
    if args.steps < 1:
        sys.exit(f"--steps {args.steps}: too small")
    name = f"maze2d-{args.maze}-v1"
    if args.tiny:
        if args.minari or args.maze != "umaze":
            sys.exit("--tiny is a file of umaze")
        name, args.steps = d4rl_tasks.TINY, 100_000
    path = Path(args.out) if args.out else d4rl_tasks.place(name)
    if args.minari:  # better to know of a bad name before the work than after it
        import minari
        from minari.dataset.minari_dataset import parse_dataset_id

        try:
            parse_dataset_id(args.minari)
        except (TypeError, ValueError):
            sys.exit(f"--minari {args.minari}: not of the form namespace/name-v0")
        if args.minari in minari.list_local_datasets():
            sys.exit(f"--minari {args.minari}: there already")
    elif path.exists() and (args.out or not args.tiny):
        sys.exit(f"{path} is there already; --out names another file")
    states, actions, reached, goal = collect(name, args.steps, args.seed)
    inside = np.linalg.norm(states[:-1, :2] - goal, axis=1) <= 0.5
    rewards = inside.astype(np.float32)
    if args.minari:
        write_minari(args.minari, name, states, actions, rewards, goal)
    else:
        write_file(path, states, actions, reached, rewards)
    per_episode = d4rl_tasks.TASKS[name].horizon * rewards.mean()
    print(f"{args.minari or path}: {args.steps:,} steps, {per_episode:.1f} reward per evaluation's")
    print(f"length, {reached.sum():,} targets. Train on it:")
    where = f" --dataset-path {path}" if args.out and not args.minari else ""
    print(f"  python td3_bc_n.py --env-id {args.minari or name}{where}")
