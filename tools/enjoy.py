"""Plays the policy of a run: a video or a window, and the score of every episode.

    python -m tools.enjoy runs/RUN                              (writes runs/RUN/enjoy.mp4)
    python -m tools.enjoy runs/RUN --episodes 5 --out ant.gif
    python -m tools.enjoy runs/RUN --window
    python -m tools.enjoy runs/RUN --picture maze.png           (maze2d, no video)

The picture has the paths of the dataset (left) and of the agent from 20 starts (right).
"""

import os
import sys
from dataclasses import dataclass
from pathlib import Path

import imageio
import matplotlib
import numpy as np
import tyro

from tools import runs

matplotlib.use("Agg")
import matplotlib.pyplot as plt

FPS = 25  # frames per second of the video: of a faster environment, frames are left out


@dataclass
class Args:
    run: tyro.conf.Positional[str]  # run directory or checkpoint.pt
    episodes: int = 3  # number of episodes of the video
    seed: int = 1  # environment seed of the first episode; it grows by 1 per episode
    out: str | None = None  # video file, .mp4 or .gif (default: enjoy.mp4 in the run directory)
    window: bool = False  # show the episodes in a window instead of writing a video
    picture: str | None = None  # maze2d runs: .png file for a picture of paths, instead of a video


def play(agent, env, seed, render_every=0):
    """One episode: its return, its observations, and a frame every so often."""
    obs, _ = env.reset(seed=seed)
    episode_return, observations, frames, ended = 0.0, [obs], [], False
    while not ended:
        if render_every and (len(observations) - 1) % render_every == 0:
            frames.append(env.render())
        obs, reward, terminated, truncated, _ = env.step(agent.act(obs[None])[0])
        episode_return += reward
        observations.append(obs)
        ended = terminated or truncated
    return episode_return, np.array(observations), frames


def draw_walls(axes, maze):
    for i, row in enumerate(maze):
        for j, cell in enumerate(row):
            if cell == "#":  # the coordinates of the ball are 0.2 less than those of the walls
                axes.add_patch(plt.Rectangle((j - 0.7, i - 0.7), 1, 1, color="#8a7a68"))
            if cell == "G":
                axes.add_patch(plt.Circle((j, i), 0.5, color="#d62728", alpha=0.35))
    axes.set(xlim=(0, len(maze[0]) - 1.4), ylim=(len(maze) - 1.4, 0), aspect="equal")
    axes.set(xticks=[], yticks=[])


def draw_maze(agent, dataset, env, path, seed):
    """Paths of the dataset (left) and of the agent (right). x is the column, y is the row."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 4.7), layout="constrained")
    for axes in (left, right):
        draw_walls(axes, env.unwrapped.maze)
    positions, max_steps = dataset.obs[:6000, :2], env.spec.max_episode_steps
    jumps = np.flatnonzero(np.linalg.norm(np.diff(positions, axis=0), axis=1) > 0.3) + 1
    positions = np.insert(positions, jumps, np.nan, axis=0)  # no line from an episode to the next
    left.plot(positions[:, 1], positions[:, 0], linewidth=0.4, color="#1f77b4")
    left.set_title(f"dataset: return {max_steps * dataset.rewards.mean():.0f} in {max_steps} steps")
    returns = []
    for episode in range(20):
        episode_return, observations, _ = play(agent, env, seed + episode)
        right.plot(observations[:, 1], observations[:, 0], linewidth=0.9)
        right.plot(observations[0, 1], observations[0, 0], "o", markersize=4, color="black")
        returns.append(episode_return)
    right.set_title(f"agent: return {np.mean(returns):.0f}, mean of {len(returns)} starts")
    figure.savefig(path, dpi=110, bbox_inches="tight")
    plt.close(figure)
    print(f"{path}: mean return of the agent {np.mean(returns):.1f}")


def main(args):
    displays = {"DISPLAY", "WAYLAND_DISPLAY"}
    if sys.platform == "linux" and not displays & set(os.environ):
        if args.window:  # GLFW would abort the process
            sys.exit("--window: there is no display")
        os.environ.setdefault("MUJOCO_GL", "egl")  # rendering without a display
    run_dir = Path(args.run) if Path(args.run).is_dir() else Path(args.run).parent
    out, suffixes = Path(args.out or run_dir / "enjoy.mp4"), (".mp4", ".gif")
    if args.picture:
        out, suffixes = Path(args.picture), (".png",)
    if out.suffix not in suffixes or not (args.window or out.parent.is_dir()):
        sys.exit(f"{out}: expected a {' or '.join(suffixes)} file in a directory that exists")
    if args.episodes < 1 or args.seed < 0:
        sys.exit("--episodes must be at least 1, --seed at least 0")
    _, settings, agent, dataset, metadata, make_env = runs.load_run(args.run)
    if args.picture:
        import d4rl_tasks

        env = make_env()
        if not isinstance(env.unwrapped, d4rl_tasks.Maze2dEnv) or not len(dataset.obs):
            sys.exit(f"{args.run}: --picture needs a run on a maze2d dataset")
        return draw_maze(agent, dataset, env, out, args.seed)

    try:
        env = make_env(render_mode="human" if args.window else "rgb_array")
        env.reset(seed=args.seed)
        env.render()
    except Exception as error:  # of many libraries: OpenGL, GLFW, pygame
        sys.exit(f"{settings.env_id}: the environment cannot be rendered here ({error})")
    speed = env.metadata.get("render_fps", FPS)
    render_every = 0 if args.window else max(1, round(speed / FPS))
    frames = []
    for episode in range(args.episodes):
        episode_return, _, new_frames = play(agent, env, args.seed + episode, render_every)
        frames += new_frames
        score = runs.normalized_score(episode_return, metadata)
        print(f"episode {episode + 1}: return {episode_return:.1f}, normalized score {score:.1f}")
    env.close()
    if not args.window:
        fps = speed / render_every
        rate = {"duration": 1000 / fps, "loop": 0} if out.suffix == ".gif" else {"fps": fps}
        imageio.mimsave(out, frames, **rate)
        print(f"{out}: {len(frames)} frames")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
