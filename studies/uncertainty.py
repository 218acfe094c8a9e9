"""Uncertainty of the critic ensemble by N and beta: section 5.3 of the paper, from finished runs.

    python -m tools.sweep tiny --runs-dir runs/tiny
    python -m studies.uncertainty runs/tiny --out studies-out

The runs are of one script and one dataset and differ in num_critics (N), beta, independent_targets
and seed. beta is the weight of the BC term at the end of a run: it includes bc_inflation if the run
ended before bc_inflation_steps. A run diverged if its losses were not finite, or if its values are
above any return (it still has a score). A cell with a diverged seed is white. Nothing is trained.
"""

import math
import sys
from dataclasses import dataclass
from itertools import pairwise, product
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
import torch
import tyro
from matplotlib.colors import LogNorm, Normalize
from tqdm import tqdm

from studies import common
from tools.runs import load_agent, load_run

TARGETS = {False: "shared targets", True: "independent targets"}
MEASURES = {  # of random actions, by their distance to the dataset action
    "std": "",
    "clip penalty": "",
    "Q_min": " Not all of it is distance: only some states have dataset actions far from others.",
    "Q_min minus data": " Q_min minus Q_min of the dataset action: the same states, other actions.",
}
RATIO_TEXT = """Means over random actions. Equation 5 is the paper's ratio for Gaussian values. For
N = 2 the ratio is 0.707 for all values."""
CENTER = {"ha": "center", "va": "center"}


@dataclass
class Args:
    runs_dir: tyro.conf.Positional[str]  # directory with the runs
    out: str = "studies-out"  # directory for the pictures and the tables
    states: int = 50_000  # number of dataset states, with one random action each (paper: 50000)
    bins: int = 10  # number of bins of the distance between random and dataset action


class Grid(NamedTuple):
    scores: dict  # (independent_targets, N, beta) -> final score per seed, NaN if diverged
    cells: dict  # (independent_targets, N, beta) -> measurements, None if a seed diverged
    targets: list
    ns: list
    betas: list
    edges: np.ndarray  # of the bins of the distance
    counts: np.ndarray  # number of states in each bin
    beta_label: str
    title: str


# --- Measurements ---


def final_beta(run):
    inflated = run.args["gradient_steps"] <= run.args["bc_inflation_steps"]
    return run.args["beta"] * (run.args["bc_inflation"] if inflated else 1)


def sample_pairs(data, num_states):
    """Dataset states, their actions, and a uniform random action each. The same for all runs."""
    rng = np.random.default_rng(0)
    index = rng.integers(len(data.obs), size=num_states)
    actions = data.actions[index]
    return data.obs[index], actions, rng.uniform(-1, 1, actions.shape).astype(np.float32)


@torch.no_grad()
def ensemble_values(agent, obs, data_actions, random_actions):
    """Values (N, B) of all critics for data, policy and random actions."""
    obs = agent.normalize(obs)
    actions = agent.to_tensor(data_actions), agent.actor(obs), agent.to_tensor(random_actions)
    chunks = [zip(obs.split(2_000), a.split(2_000), strict=True) for a in actions]  # saves memory
    return [torch.cat([agent.critics(*c) for c in chunk], dim=1).numpy() for chunk in chunks]


def statistics(q):
    """std, clip penalty (mean - min) and minimum over the ensemble: (3, B)."""
    std, q_min = q.std(axis=0, ddof=min(1, len(q) - 1)), q.min(axis=0)
    return np.stack([std, q.mean(axis=0) - q_min, q_min])


def measure(run, data, pairs, edges):
    """Measurements of one run; None if it diverged."""
    if run.status == "diverged":
        return None
    _, args, agent = load_agent(run.path)
    q = ensemble_values(agent, *pairs)
    rewards = (data.rewards - agent.reward_shift.item()) * agent.reward_scale.item()
    max_return = np.abs(rewards).max() / (1 - args.gamma) if args.gamma < 1 else np.inf
    mean = q[0].mean()
    if not np.isfinite(mean) or mean > max_return:
        text = f"mean Q of dataset actions is {mean:.4g}, no return is above {max_return:.4g}"
        tqdm.write(f"{run.path.name}: diverged, {text}")
        return None
    data_stats, policy_stats, random_stats = map(statistics, q)
    measures = np.stack([*random_stats, random_stats[2] - data_stats[2]])
    bins = np.digitize(np.linalg.norm(pairs[2] - pairs[1], axis=1), edges[1:-1])
    in_bin = [measures[:, bins == i] for i in range(len(edges) - 1)]
    empty = np.full(len(measures), np.nan)
    return {
        "binned": np.stack([m.mean(axis=1) if m.size else empty for m in in_bin], axis=1),
        "means": measures.mean(axis=1),
        "policy_q_min": policy_stats[2],
    }


def over_seeds(seeds):
    """Measurements of a cell: None if a seed diverged, since the others are a biased sample."""
    if None in seeds:
        return None
    cell = {name: np.mean([seed[name] for seed in seeds], axis=0) for name in ("binned", "means")}
    return cell | {"policy_q_min": np.concatenate([seed["policy_q_min"] for seed in seeds])}


def gaussian_ratio(n):
    """Clip penalty over std of n Gaussian values by the paper's equation 5."""
    return NormalDist().inv_cdf((n - math.pi / 8) / (n - math.pi / 4 + 1))


def read_grid(args):
    runs = sorted(common.ended_runs(args.runs_dir), key=lambda run: run.args["seed"])
    differing = set(common.differing(runs)) - {"num_critics", "beta", "independent_targets"}
    differing |= {"script"} if len({run.script for run in runs}) > 1 else set()
    if differing:
        names = ", ".join(sorted(differing))
        sys.exit(f"{args.runs_dir}: the runs also differ in {names}, give one experiment only")
    # A run may diverge before its first checkpoint.
    first = max(runs, key=lambda run: (run.path / "checkpoint.pt").exists())
    script, script_args, _, data, _, _ = load_run(first.path, needs_env=False)
    pairs = sample_pairs(data, args.states)
    distance = np.linalg.norm(pairs[2] - pairs[1], axis=1)
    counts, edges = np.histogram(distance, args.bins)
    scores, measured = {}, {}
    for run in tqdm(runs, "Runs", disable=None):
        key = run.args["independent_targets"], run.args["num_critics"], final_beta(run)
        scores.setdefault(key, []).append(common.final_score(run))
        measured.setdefault(key, []).append(measure(run, data, pairs, edges))
    inflated = any(final_beta(run) != run.args["beta"] for run in runs)
    beta_label = f"β (inflated by {script_args.bc_inflation:g})" if inflated else "β"
    cells = {key: over_seeds(seeds) for key, seeds in measured.items()}
    targets, ns, betas = (sorted(set(column)) for column in zip(*cells, strict=True))
    title = f"{script.__name__} on {script_args.env_id}"
    return Grid(scores, cells, targets, ns, betas, edges, counts, beta_label, title)


# --- Pictures ---


def panels(grid, title, ylabel, **kwargs):
    """A panel per targets and N, with beta on the x axis. White columns have a label."""
    rows, columns = len(grid.targets), len(grid.ns)
    figure, axes = common.subplots(rows, columns, f"{title}\n{grid.title}", **kwargs)
    for ax, (t, n) in zip(axes.flat, product(grid.targets, grid.ns), strict=True):
        ax.set_title(f"N = {n}, {TARGETS[t]}", fontsize="small")
        ax.set(xlabel=grid.beta_label, ylabel=ylabel, xlim=(-0.5, len(grid.betas) - 0.5))
        ax.set_xticks(range(len(grid.betas)), [f"{b:g}" for b in grid.betas])
        ax.label_outer()
        place = {"transform": ax.get_xaxis_transform(), "rotation": 90, **CENTER}
        for i, b in enumerate(grid.betas):
            if not grid.cells.get((t, n, b)):
                ax.text(i, 0.5, "diverged" if (t, n, b) in grid.cells else "no run", **place)
    return figure, axes


def color_scale(values, log=False, centered=False):
    """norm and cmap of a heat map: viridis, or red and blue around 0."""
    finite = values[np.isfinite(values)]
    low, high = (finite.min(), finite.max()) if finite.size else (0, 1)
    if centered:
        high = max(high, -low)
        return {"norm": Normalize(-high, high), "cmap": "RdBu_r"}
    return {"norm": LogNorm(low, high) if log and low > 0 else Normalize(low, high)}


def draw_scores(grid):
    title = f"Final score by ensemble size N and BC weight β\n{grid.title}"
    figure, axes = common.subplots(1, len(grid.targets), title, width=3.2)
    shape = len(grid.targets), len(grid.ns), len(grid.betas)
    scores = [grid.scores.get(key) for key in product(grid.targets, grid.ns, grid.betas)]
    maps = np.reshape([np.nan if s is None else np.mean(s) for s in scores], shape)
    scale = color_scale(maps)
    for ax, t, values in zip(axes[0], grid.targets, maps, strict=True):
        image = ax.imshow(values, aspect="auto", origin="lower", **scale)
        for (i, j), value in np.ndenumerate(values):
            missing = "diverged" if (t, grid.ns[i], grid.betas[j]) in grid.scores else "no run"
            text = missing if np.isnan(value) else f"{value:.0f}"
            dark = scale["norm"](value) < 0.5
            ax.text(j, i, text, color="white" if dark else "black", **CENTER)
        ax.set_xticks(range(len(grid.betas)), [f"{b:g}" for b in grid.betas])
        ax.set_yticks(range(len(grid.ns)), grid.ns)
        ax.set(title=TARGETS[t], xlabel=grid.beta_label, ylabel="N (number of critics)")
    figure.colorbar(image, ax=axes, label="normalized score, mean over seeds")
    return figure


def draw_measure(grid, name):
    title = f"{name} of random actions by their distance to the dataset action"
    figure, axes = panels(grid, title, "distance")
    m, labelled = list(MEASURES).index(name), range(0, len(grid.edges), 2)
    white = np.full((len(MEASURES), len(grid.counts)), np.nan)
    for row, t in zip(axes, grid.targets, strict=True):  # a colour scale for each row
        cells = [[grid.cells.get((t, n, b)) for b in grid.betas] for n in grid.ns]
        maps = [[cell["binned"] if cell else white for cell in column] for column in cells]
        maps = np.array(maps)[:, :, m].swapaxes(1, 2)  # (N, bins, betas)
        scale = color_scale(maps, log="Q_min" not in name, centered="data" in name)
        for ax, values in zip(row, maps, strict=True):
            image = ax.imshow(values, aspect="auto", origin="lower", **scale)
            ax.set_yticks([i - 0.5 for i in labelled], [f"{grid.edges[i]:.1f}" for i in labelled])
        ticks = scale["norm"].inverse(np.linspace(0, 1, 5))
        label = f"{name} (log scale)" if isinstance(scale["norm"], LogNorm) else name
        bar = figure.colorbar(image, ax=row, label=label, ticks=ticks, format="%.2g")
        bar.minorticks_off()
    return figure


def draw_boxes(grid):
    title = "Q_min of policy actions (boxes: quartiles, whiskers: 5 % and 95 %)"
    figure, axes = panels(grid, title, "Q_min", sharey="row")
    style = {"whis": (5, 95), "showfliers": False, "patch_artist": True, "manage_ticks": False}
    style |= {
        "boxprops": {"facecolor": "lightgray"},
        "medianprops": {"color": "black"},
        "widths": 0.6,
    }
    for ax, (t, n) in zip(axes.flat, product(grid.targets, grid.ns), strict=True):
        for i, b in enumerate(grid.betas):
            if grid.cells.get((t, n, b)):
                ax.boxplot(grid.cells[t, n, b]["policy_q_min"], positions=[i], **style)
    return figure


# --- Tables ---


def cell_table(cells, header, values):
    """A row per cell with the numbers values(n, cell), or "diverged"."""
    rows = []
    for t, n, b in sorted(cells):
        cell = cells[t, n, b]
        numbers = [f"{v:.3g}" for v in values(n, cell)] if cell else ["diverged"]
        rows.append([TARGETS[t], n, f"{b:g}", *numbers])
    return common.markdown_table(["targets", "N", "β", *header], rows)


def score_table(grid):
    rows = []
    for t, n in product(grid.targets, grid.ns):
        scores = [grid.scores.get((t, n, b), []) for b in grid.betas]
        rows.append([TARGETS[t], n, *map(common.format_scores, scores)])
    return common.markdown_table(["targets", "N", *(f"β = {b:g}" for b in grid.betas)], rows)


def percentiles(_, cell):
    return np.percentile(cell["policy_q_min"], (5, 25, 50, 75, 95))


def ratios(n, cell):
    std, clip_penalty, *_ = cell["means"]
    return std, clip_penalty, clip_penalty / std, gaussian_ratio(n)


def main(args):
    if args.states < 1 or args.bins < 1:
        sys.exit("--states and --bins must be at least 1")
    grid = read_grid(args)
    sections, figures = [f"# Uncertainty of the critic ensemble: {grid.title}"], {}

    def add(name, figure, text, numbers):
        figures[f"{name}.png"] = figure
        sections.extend([f"![{name}]({name}.png)", text, numbers])

    text = f"Final score by N and {grid.beta_label}: mean ± standard error over seeds."
    add("score", draw_scores(grid), text, score_table(grid))
    bins = zip(pairwise(grid.edges), grid.counts, strict=True)
    header = [f"{low:.2f} to {high:.2f} ({count} states)" for (low, high), count in bins]
    for m, (name, remark) in enumerate(MEASURES.items()):
        text = f"{name} of {args.states:,} random actions by distance to the dataset action."
        numbers = cell_table(grid.cells, header, lambda _, cell, m=m: cell["binned"][m])
        add(name.lower().replace(" ", "_"), draw_measure(grid, name), text + remark, numbers)
    numbers = cell_table(grid.cells, ["5 %", "25 %", "50 %", "75 %", "95 %"], percentiles)
    add("policy_q_min", draw_boxes(grid), "Percentiles of Q_min of policy actions.", numbers)
    numbers = cell_table(grid.cells, ["std", "clip penalty", "ratio", "equation 5"], ratios)
    sections += ["## Clip penalty over std", RATIO_TEXT, numbers]
    common.save(args.out, "uncertainty", sections, figures)


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
