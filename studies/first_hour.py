"""Offline training, then fine-tuning, in one picture: scores by steps, mean ± s.e. over seeds.

    python -m tools.sweep tiny-first-hour --runs-dir runs/first-hour
    python -m studies.first_hour runs/first-hour

Reads offline runs, the fine-tuning runs that started from them, and runs from scratch, all of one
environment. Writes first-hour.png and first-hour.md. Unfinished runs are left out.
"""

import sys
from dataclasses import dataclass
from itertools import chain

import matplotlib.pyplot as plt
import tyro

from studies import common
from tools.plot import curve
from tools.runs import normalized_scores, read_runs

COLORS = {"td3_bc_n": "#1f77b4", "sac_bc_n": "#d62728"}
PHASES = ("offline", "fine-tuning", "from scratch")


@dataclass
class Args:
    runs: tyro.conf.Positional[list[str]]  # run directories, or directories of them
    out: str = "studies-out"  # directory for the picture and the table


def phases(runs):
    """Finished runs by (algorithm, phase). Online runs without a checkpoint are from scratch."""
    found = {}
    for run in runs:
        algorithm = run.script.removeprefix("finetune_")
        phase = "offline"
        if run.script != algorithm:
            phase = "fine-tuning" if run.args["checkpoint"] else "from scratch"
        if algorithm not in COLORS:
            print(f"left out: {run.path.name} is a run of {algorithm}", file=sys.stderr)
        elif run.diverged:
            print(f"left out: {run.path.name} diverged", file=sys.stderr)
        elif run.returns is not None:
            found.setdefault((algorithm, phase), []).append(run)
    for (algorithm, phase), of_phase in found.items():
        if differing := common.differing(of_phase):
            sys.exit(f"{algorithm}, {phase}: the runs differ in {', '.join(differing)}")
    keys = ("environment", "ref_min_score", "ref_max_score")
    scales = {tuple(run.metadata.get(key) for key in keys) for run in chain(*found.values())}
    if len(scales) > 1:
        sys.exit(f"the runs differ in environment or score references: {sorted(scales)}")
    if all(phase == "from scratch" for _, phase in found):
        sys.exit("no finished run on a dataset")
    by_seed = {key: {run.args["seed"]: run for run in runs} for key, runs in found.items()}
    order = sorted(by_seed, key=lambda key: (key[0] != "td3_bc_n", PHASES.index(key[1])))
    return {key: [by_seed[key][seed] for seed in sorted(by_seed[key])] for key in order}


def label(algorithm, phase):
    """TD3-BC-N; without a dataset, and so without BC, it is TD3."""
    name = algorithm.upper().replace("_", "-")
    return name.removesuffix("-BC-N") if phase == "from scratch" else name


def draw(found):
    figure, panels = plt.subplots(1, 2, figsize=(10, 4), layout="constrained", sharey=True)
    for (algorithm, phase), runs in found.items():
        axes = panels[0] if phase == "offline" else panels[1]
        steps, mean, stderr = curve(runs)
        color, scratch = COLORS[algorithm], phase == "from scratch"
        name = label(algorithm, phase) + (" from scratch" if scratch else "")
        name += f" ({len(runs)} seed{'s' if len(runs) > 1 else ''})"
        marker = "s" if algorithm == "sac_bc_n" else "o"
        style = {"linestyle": ":" if scratch else "-", "marker": marker}
        style["markerfacecolor"] = "white" if scratch else color
        axes.plot(steps, mean, color=color, label=name, markersize=4, **style)
        axes.fill_between(steps, mean - stderr, mean + stderr, color=color, alpha=0.15)
        if phase == "fine-tuning":
            axes.axhline(mean[0], color=color, linestyle="--", linewidth=1)
    with_data = [runs[0].metadata for (_, phase), runs in found.items() if phase != "from scratch"]
    dataset = normalized_scores(with_data[0]["mean_return"], with_data[0])
    for axes, title in zip(panels, ("Offline training", "Online fine-tuning"), strict=True):
        axes.axhline(dataset, color="gray", linestyle="-.", linewidth=1, label="dataset")
        axes.set(title=title, xlabel="gradient steps" if "Off" in title else "environment steps")
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    raw = (with_data[0]["ref_min_score"], with_data[0]["ref_max_score"]) == (0, 100)
    panels[0].set_ylabel("return" if raw else "normalized score")
    return figure


def table(found):
    lines = []
    for (algorithm, phase), runs in found.items():
        scores = [[run.history[index]["score"] for run in runs] for index in (0, -1)]
        worst = min(run.history[-1]["score_worst"] for run in runs)
        name = f"{label(algorithm, phase)}, {phase}"
        lines.append([name, len(runs), *map(common.format_scores, scores), f"{worst:.1f}"])
    header = ["runs", "seeds", "first evaluation", "last evaluation", "worst episode"]
    return common.markdown_table(header, lines)


def table_of_seeds(found):
    """All evaluations of each run."""
    lines = []
    for (algorithm, phase), runs in found.items():
        for run in runs:
            scores = " ".join(f"{entry['score']:.1f}" for entry in run.history)
            lines.append([f"{label(algorithm, phase)}, {phase}", run.args["seed"], scores])
    return common.markdown_table(["runs", "seed", "scores"], lines)


def main(args):
    found = phases(read_runs(args.runs))
    sections = ["# The first hour", "![first-hour](first-hour.png)", table(found)]
    sections += ["Scores of all evaluations:", table_of_seeds(found)]
    common.save(args.out, "first-hour", sections, {"first-hour.png": draw(found)})


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
