"""Uncertainty of the critic ensemble by N and beta: section 5.3 of the paper, from finished runs.

    python -m tools.sweep tiny --runs-dir runs/tiny
    python -m studies.uncertainty runs/tiny --out studies-out

The runs are of one script and one dataset and differ in num_critics (N), beta, independent_targets
and seed. For 50,000 states of the dataset and a random action in each, the study computes std, clip
penalty (mean - minimum) and minimum (Q_min) over the critics, and their means by the distance of
the random action from the action of the dataset. uncertainty.csv has a row per run and distance;
uncertainty.png has the scores by N and beta, and the measures as curves, both as means over seeds.
beta is the weight of the BC term at the end of a run, so it includes bc_inflation if the run ended
before bc_inflation_steps. Runs that diverged are left out: their losses were not finite, or their
values are above any return.
"""

import sys
from collections import defaultdict
from dataclasses import dataclass

import matplotlib.pyplot as plt
import numpy as np
import torch
import tyro
from tqdm import tqdm

from studies import common
from tools.runs import differing_settings, load_agent, load_run, read_runs

SETTINGS = ("num_critics", "beta", "independent_targets")
TARGETS = {False: "shared targets", True: "independent targets"}
MEASURES = {"std": "std (log scale)", "clip_penalty": "clip penalty (log scale)", "q_min": "Q_min"}


@dataclass
class Args:
    runs_dir: tyro.conf.Positional[str]  # directory with the runs
    out: str = "studies-out"  # directory for the picture and the table
    states: int = 50_000  # number of dataset states, with one random action each (paper: 50000)
    bins: int = 10  # number of bins of the distance between random and dataset action


def final_beta(run):
    inflated = run.args["gradient_steps"] <= run.args["bc_inflation_steps"]
    return run.args["beta"] * (run.args["bc_inflation"] if inflated else 1)


def select_runs(runs_dir):
    """The finished runs of one experiment, in order of their settings."""
    runs = []
    for run in read_runs([runs_dir]):
        if run.status != "finished" or "score" not in run.history[-1]:
            print(f"left out: {run.path.name} ({run.status}, or without a score)", file=sys.stderr)
        else:
            runs.append(run)
    if not runs or any(name not in run.args for run in runs for name in SETTINGS):
        sys.exit(f"{runs_dir}: expected finished runs of td3_bc_n or of sac_bc_n")
    differing = set(differing_settings(runs)) - set(SETTINGS)
    differing |= {"script"} if len({run.script for run in runs}) > 1 else set()
    if differing:
        names = ", ".join(sorted(differing))
        sys.exit(f"{runs_dir}: the runs also differ in {names}, give one experiment only")
    return sorted(runs, key=lambda run: [run.args[name] for name in (*SETTINGS, "seed")])


def sample_pairs(data, num_states):
    """Dataset states, their actions, and a uniform random action each. The same for all runs."""
    rng = np.random.default_rng(0)
    index = rng.integers(len(data.obs), size=num_states)
    actions = data.actions[index]
    return data.obs[index], actions, rng.uniform(-1, 1, actions.shape).astype(np.float32)


@torch.no_grad()
def ensemble_values(agent, obs, actions):
    """Values (N, B) of all critics, in chunks to save memory."""
    obs, actions = agent.normalize(obs), agent.to_tensor(actions)
    chunks = zip(obs.split(2_000), actions.split(2_000), strict=True)
    return torch.cat([agent.critics(*chunk) for chunk in chunks], dim=1).numpy()


def measure(run, data, obs, data_actions, random_actions):
    """std, clip penalty and minimum for random actions: (3, B). None if the run diverged."""
    _, args, agent = load_agent(run.path)
    rewards = (data.rewards - agent.reward_shift.item()) * agent.reward_scale.item()
    max_return = np.abs(rewards).max() / (1 - args.gamma) if args.gamma < 1 else np.inf
    mean = ensemble_values(agent, obs, data_actions).mean()
    if not mean <= max_return:  # also if it is not a number
        reason = f"mean Q of dataset actions is {mean:.4g}, no return is above {max_return:.4g}"
        print(f"left out: {run.path.name} (diverged: {reason})", file=sys.stderr)
        return None
    q = ensemble_values(agent, obs, random_actions)
    std, q_min = q.std(axis=0, ddof=min(1, len(q) - 1)), q.min(axis=0)
    return np.stack([std, q.mean(axis=0) - q_min, q_min])


def draw(cells, distances, title):
    """The first row has the scores, the others a measure each. A column per N and targets."""
    experiments = sorted({(independent, n) for n, _, independent in cells})
    betas = sorted({beta for _, beta, _ in cells})
    colors = plt.get_cmap("viridis")(np.linspace(0, 0.9, len(betas)))
    rows, columns = len(MEASURES) + 1, len(experiments)
    options = {"figsize": (2.6 * columns + 1.6, 2.1 * rows + 0.9), "layout": "constrained"}
    figure, axes = plt.subplots(rows, columns, squeeze=False, sharey="row", **options)
    figure.suptitle(title, fontsize="medium")
    for (independent, n), (scores, *panels) in zip(experiments, axes.T, strict=True):
        scores.set_title(f"N = {n}, {TARGETS[independent]}", fontsize="medium")
        scores.set_xticks(range(len(betas)), [f"{beta:g}" for beta in betas])
        scores.set_xlabel("β")
        for i, beta in enumerate(betas):
            if (n, beta, independent) not in cells:
                continue
            seeds = cells[n, beta, independent]
            scores.bar(i, np.mean([score for score, _ in seeds]), color=colors[i])
            means = np.mean([values for _, values in seeds], axis=0)
            for panel, values in zip(panels, means, strict=True):
                panel.plot(distances, values, color=colors[i], label=f"β = {beta:g}")
        for panel in panels:
            panel.set_xlabel("distance")
    for ax, name in zip(axes[:, 0], ("score", *MEASURES), strict=True):
        ax.set_ylabel(MEASURES.get(name, "normalized score"))
    for ax in axes[1:3].flat:
        ax.set_yscale("log")
    handles = {}
    for ax in axes[1]:
        handles |= dict(zip(*reversed(ax.get_legend_handles_labels()), strict=True))
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=len(betas))
    return figure


def main(args):
    if args.states < 1 or args.bins < 1:
        sys.exit("--states and --bins must be at least 1")
    runs = select_runs(args.runs_dir)
    _, _, _, data, _, _ = load_run(runs[0].path, needs_env=False)
    obs, data_actions, random_actions = sample_pairs(data, args.states)
    distance = np.linalg.norm(random_actions - data_actions, axis=1)
    counts, edges = np.histogram(distance, args.bins)
    bins, filled = np.digitize(distance, edges[1:-1]), np.flatnonzero(counts)
    cells, rows = defaultdict(list), []
    for run in tqdm(runs, "Runs", disable=None):
        values = measure(run, data, obs, data_actions, random_actions)
        if values is None:
            continue
        means = np.stack([values[:, bins == i].mean(axis=1) for i in filled], axis=1)
        score = run.history[-1]["score"]
        cell = run.args["num_critics"], final_beta(run), run.args["independent_targets"]
        cells[cell].append((score, means))
        for i, numbers in zip(filled, means.T, strict=True):
            row = [*cell, run.args["seed"], round(score, 1), edges[i], edges[i + 1], counts[i]]
            rows.append([f"{x:.4g}" if isinstance(x, float) else x for x in (*row, *numbers)])
    if not cells:
        sys.exit(f"{args.runs_dir}: all runs diverged")
    header = ["num_critics", "beta", "independent_targets", "seed", "score"]
    header += ["distance_from", "distance_to", "states", *MEASURES]
    title = f"{runs[0].script} on {common.dataset_name(runs[0])}: score, and uncertainty of random"
    title += " actions by their distance from the action of the dataset"
    distances = ((edges[:-1] + edges[1:]) / 2)[filled]
    common.save(args.out, "uncertainty", draw(cells, distances, title), header, rows)


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
