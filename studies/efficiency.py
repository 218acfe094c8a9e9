"""Training time beside the paper's table, and score against training time.

    python -m tools.speed --json speed.json
    python -m studies.efficiency --speed speed.json                 (tables of seconds and hours)
    python -m studies.efficiency --speed speed.json runs            (and score against time)

The paper's numbers are of an RTX 2080 Ti. Nothing is trained.
"""

import json
import sys
from dataclasses import dataclass

import matplotlib.pyplot as plt
import numpy as np
import tyro

from studies import common
from tools.paper import COSTS, SCRIPT_COSTS
from tools.runs import settings


@dataclass
class Args:
    speed: str  # JSON file of tools.speed
    runs_dir: tyro.conf.Positional[str] = ""  # directory with runs, for score against time
    out: str = "studies-out"  # directory for the pictures and the tables


def read_speed(path):
    try:
        with open(path) as file:
            rows = json.load(file)
        keys = ("script", "num_critics", "task", "device", "steps_per_second")
        rows = [{key: row[key] for key in keys} for row in rows]
    except (OSError, ValueError, KeyError, TypeError) as error:
        sys.exit(f"{path}: not a JSON file of tools.speed ({error!r})")
    return rows or sys.exit(f"{path}: has no rows")


def speed_table(rows):
    """Seconds per 10,000 steps and hours per 1M steps of this machine."""
    lines = []
    for row in rows:
        seconds = 10_000 / row["steps_per_second"]
        paper = SCRIPT_COSTS.get((row["script"], row["num_critics"]))
        line = [row["script"], row["num_critics"], row["task"], row["device"], f"{seconds:.1f}"]
        lines.append([*line, f"{paper[0]}" if paper else "-", f"{seconds / 36:.1f}"])
    header = ["script", "N", "task", "device", "s per 10,000 steps", "paper's s"]
    return common.markdown_table([*header, "hours per 1M steps"], lines)


def paper_table():
    lines = [
        [name, seconds, f"{seconds / 36:.1f}", f"{millions}M", f"{millions * seconds / 36:.1f}", gb]
        for name, (seconds, millions, gb) in COSTS.items()
    ]
    header = ["method", "s per 10,000 steps", "hours per 1M steps", "steps in total"]
    return common.markdown_table([*header, "hours in total", "GPU memory (GB)"], lines)


def draw_hours(rows):
    """Hours of a whole run, as in the paper: SAC-N and EDAC need three times the steps."""
    bars = [(f"{name} (paper)", m * s / 36, "white") for name, (s, m, _) in COSTS.items()]
    for row in rows:
        label = f"{row['script']}, N = {row['num_critics']}, {row['task']}, {row['device']}"
        steps = 250_000 if row["script"].startswith("finetune") else 1_000_000
        bars.append((label, steps / row["steps_per_second"] / 3600, "dimgray"))
    bars.sort(key=lambda bar: bar[1])
    title = "Training time: the paper's methods on its GPU (white), this machine (gray)"
    figure, axes = common.subplots(1, 1, title, width=7, height=0.23 * len(bars) + 0.5)
    names, hours, colors = zip(*bars, strict=True)
    drawn = axes[0, 0].barh(names, hours, color=colors, edgecolor="black")
    axes[0, 0].bar_label(drawn, [f"{h:.1f}" for h in hours], padding=3)
    axes[0, 0].set(xlabel="hours for all gradient steps", ylim=(len(bars) - 0.4, -0.6))
    axes[0, 0].margins(x=0.1)
    return figure


def score_curves(runs):
    """{dataset: {label: curve}}. A label has the settings in which the runs of a script differ."""
    datasets = {}
    for run in runs:
        if run.diverged:
            print(f"left out: {run.path.name} diverged", file=sys.stderr)
        else:
            from_scratch = ", from scratch" if not run.args.get("checkpoint", True) else ""
            key = run.script, from_scratch, common.dataset_name(run)
            datasets.setdefault(key, []).append(run)
    curves = {}
    for (script, from_scratch, dataset), of_dataset in datasets.items():
        differing, groups = common.differing(of_dataset), {}
        for run in of_dataset:
            values = settings(run)
            label = ", ".join([script, *(f"{name} {values.get(name)}" for name in differing)])
            label += from_scratch
            groups.setdefault(label, []).append(run)
        lines = {label: mean_curve(group) for label, group in sorted(groups.items())}
        curves[dataset] = curves.get(dataset, {}) | lines
    return curves or sys.exit("no run is finished")


def mean_curve(runs):
    """Mean over seeds at the steps that all runs have evaluated."""
    steps = sorted(set.intersection(*({entry["step"] for entry in r.history} for r in runs)))
    scores = [[e["score"] for e in run.history if e["step"] in steps] for run in runs]
    played = np.array(steps) + runs[0].args.get("learning_starts", 0)  # online: also before step 0
    minutes = played * np.mean([1 / run.steps_per_second for run in runs]) / 60
    stats = [common.mean_and_stderr(column) for column in zip(*scores, strict=True)]
    return minutes, *np.transpose(stats), len(runs)


def draw_curves(curves):
    title = "Score against training time, evaluation included (mean ± s.e. over seeds)"
    figure, axes = common.subplots(len(curves), 1, title, width=7, height=3.2)
    for ax, (dataset, lines) in zip(axes[:, 0], curves.items(), strict=True):
        for i, (label, (minutes, mean, stderr, _)) in enumerate(lines.items()):
            color = plt.get_cmap("viridis")(0.9 * i / max(1, len(lines) - 1))
            style = ("-", "--", ":", "-.")[i % 4]
            ax.plot(minutes, mean, style, marker="os^Dv"[i % 5], color=color, label=label)
            ax.fill_between(minutes, mean - stderr, mean + stderr, color=color, alpha=0.2)
        ax.set(title=dataset, xlabel="training time (minutes)", ylabel="normalized score")
        ax.grid(alpha=0.3)
        ax.legend(fontsize="x-small", loc="upper left", bbox_to_anchor=(1, 1))
    return figure


def main(args):
    rows = read_speed(args.speed)
    figures = {"hours.png": draw_hours(rows)}
    sections = ["# Efficiency", "![hours](hours.png)", "This machine:", speed_table(rows)]
    sections += ["The paper, on an RTX 2080 Ti:", paper_table()]
    if args.runs_dir:
        curves = score_curves(common.ended_runs(args.runs_dir, offline=False))
        figures["score_time.png"] = draw_curves(curves)
        lines = [
            [dataset, label, seeds, f"{minutes[-1]:.1f}", f"{mean[-1]:.1f}"]
            for dataset, of_dataset in curves.items()
            for label, (minutes, mean, _, seeds) in of_dataset.items()
        ]
        header = ["dataset", "runs", "seeds", "minutes", "final score"]
        sections += ["![score_time](score_time.png)", common.markdown_table(header, lines)]
    common.save(args.out, "efficiency", sections, figures)


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
