"""The figures of the README and of the walk-through, from runs on the data set that comes along.

python docs/figures.py --maze runs/RUN
python docs/figures.py --uncertainty runs/RUN1 runs/RUN2 runs/RUN3 runs/RUN4
"""

import importlib
import sys
from dataclasses import dataclass, field
from pathlib import Path

import matplotlib
import numpy as np
import torch
import tyro

matplotlib.use("Agg")
import matplotlib.pyplot as plt

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))


@dataclass
class Args:
    maze: str | None = None  # a run in a maze2d: what the data does, and what the agent does
    uncertainty: list[str] = field(default_factory=list)  # runs: how far their critics disagree
    out: str = str(HERE)  # folder for maze.png and uncertainty.png


def load(run):
    """The run's agent, data and environment, by the script that made it."""
    try:
        checkpoint = torch.load(Path(run, "checkpoint.pt"), map_location="cpu", weights_only=True)
    except Exception as error:  # torch.load has many ways to fail on a file that is not its own
        sys.exit(f"{run}: no run of these scripts ({error})")
    if checkpoint.get("script") not in ("td3_bc_n", "sac_bc_n"):
        sys.exit(f"{run}: not a run of td3_bc_n or sac_bc_n")
    script = importlib.import_module(checkpoint["script"])
    args = script.Args(**checkpoint["args"])
    data, facts, new_env = script.load_data(args.env_id, args.dataset_path)
    agent = script.Agent(data[0].shape[1], data[1].shape[1], args)
    agent.load_state_dict(checkpoint["agent"])
    inflated = checkpoint["step"] <= args.bc_inflation_steps
    facts["beta"] = args.beta * (args.bc_inflation if inflated else 1)  # the one in force
    return agent, data, new_env, args, facts


def draw_walls(axes, maze):
    for i, row in enumerate(maze):
        for j, cell in enumerate(row):
            if cell == "#":
                # The ball's coordinates are 0.2 less than the walls'.
                axes.add_patch(plt.Rectangle((j - 0.7, i - 0.7), 1, 1, color="#8a7a68"))
            if cell == "G":
                axes.add_patch(plt.Circle((j, i), 0.5, color="#d62728", alpha=0.35))
    axes.set(xlim=(0, len(maze[0]) - 1.4), ylim=(len(maze) - 1.4, 0), aspect="equal")
    axes.set(xticks=[], yticks=[])


def draw_maze(run, path, episodes=20):
    agent, data, new_env, _, facts = load(run)
    env, returns = new_env(), []
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 4.7), layout="constrained")
    for axes in (left, right):
        draw_walls(axes, env.unwrapped.maze)
    positions = data[0][:6000, :2]
    left.plot(positions[:, 1], positions[:, 0], linewidth=0.4, color="#1f77b4")
    left.set_title(
        f"The data: {facts['mean_return']:.0f} reward in {env.spec.max_episode_steps} steps"
    )
    for episode in range(episodes):
        observation, _ = env.reset(seed=episode)
        trail, total, over = [observation[:2]], 0.0, False
        while not over:
            action = agent.act(observation[None])[0]
            observation, reward, terminated, truncated, _ = env.step(action)
            trail.append(observation[:2])
            total, over = total + reward, terminated or truncated
        trail = np.array(trail)
        right.plot(trail[:, 1], trail[:, 0], linewidth=0.9)
        right.plot(*trail[0][::-1], marker="o", markersize=4, color="black")
        returns.append(total)
    right.set_title(f"The agent, from {episodes} starts: {np.mean(returns):.0f}")
    figure.savefig(path, dpi=110)
    plt.close(figure)


@torch.no_grad()
def disagreement(agent, data, states=2000, actions=50, seed=0):
    """Per bin of the distance to the data's action: deviation, clip penalty and minimum."""
    random = torch.Generator().manual_seed(seed)
    rows = torch.randint(len(data[0]), (states,), generator=random)
    obs = agent.normalize(data[0])[rows].repeat_interleave(actions, dim=0)
    known = torch.as_tensor(data[1])[rows].repeat_interleave(actions, dim=0)
    uniform = torch.rand(known.shape, generator=random) * 2 - 1
    q = agent.critics(obs, uniform)
    distance = (uniform - known).norm(dim=1).numpy()
    values = {
        "standard deviation": q.std(dim=0, correction=min(1, len(q) - 1)),
        "clip penalty (mean - min)": q.mean(dim=0) - q.amin(dim=0),
        "minimum": q.amin(dim=0),
    }
    edges = np.linspace(0, 2.5, 26)
    which = np.digitize(distance, edges) - 1
    bins = [i for i in range(25) if (which == i).sum() >= 100]
    middle = (edges[bins] + edges[1]) - edges[1] / 2
    return middle, {k: [v.numpy()[which == i].mean() for i in bins] for k, v in values.items()}


def draw_uncertainty(runs, path):
    figure, panels = plt.subplots(1, 3, figsize=(11, 3.8), layout="constrained")
    for run in runs:
        agent, data, _, args, facts = load(run)
        distance, values = disagreement(agent, data)
        for axes, (name, value) in zip(panels, values.items(), strict=True):
            label = f"N = {args.num_critics}, β = {facts['beta']:g}"
            style = "-" if args.beta else "--"
            color = {True: "#d62728", False: "#1f77b4"}[args.num_critics >= 10]
            axes.plot(distance, value, style, color=color, label=label)
            axes.set(title=name, xlabel="distance from the data's action")
            axes.grid(alpha=0.3)
        print(f"{label}: " + "; ".join(f"{k} {v[0]:.3f} -> {v[-1]:.3f}" for k, v in values.items()))
    panels[0].legend(fontsize="small")
    figure.savefig(path, dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    args = tyro.cli(Args, description=__doc__)
    if not args.maze and not args.uncertainty:
        sys.exit("name a run with --maze, or runs with --uncertainty")
    if args.maze:
        draw_maze(args.maze, Path(args.out, "maze.png"))
    if args.uncertainty:
        draw_uncertainty(args.uncertainty, Path(args.out, "uncertainty.png"))
