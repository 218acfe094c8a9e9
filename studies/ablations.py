"""What each part of the method gives: scores of ablations against the full method.

    python -m tools.sweep tiny-ablations --runs-dir runs/ablations
    python -m studies.ablations runs/ablations --out studies-out

A run belongs to an ablation if it differs in exactly one of five arguments from the defaults of its
task: no BC (beta 0), two critics, no BC inflation (bc_inflation 1), shared instead of independent
targets or the other way round, PyTorch's initialization (critic_init torch). The full method has
the defaults of all five. Differences are in percent of the full method's score, as in the paper, or
in points and without a bar where that score is below 10. With a diverged seed there is no
difference. Intervals: 95 %, bootstrap over seeds; with five seeds they are too narrow. Nothing is
trained.
"""

import sys
from dataclasses import dataclass
from itertools import chain

import numpy as np
import tyro

from studies import common
from tools.runs import default_args

FULL = "full method"
ABLATIONS = {
    "no BC": ("beta", 0),
    "two critics": ("num_critics", 2),
    "no BC inflation": ("bc_inflation", 1),
    "shared targets": ("independent_targets", False),
    "independent targets": ("independent_targets", True),
    "PyTorch init": ("critic_init", "torch"),
}
ARGUMENTS = {name for name, _ in ABLATIONS.values()}
MIN_SCORE = 10  # percent of a smaller score are meaningless


@dataclass
class Args:
    runs_dir: tyro.conf.Positional[str]  # directory with the runs
    out: str = "studies-out"  # directory for the picture and the table


def group(args, defaults):
    """Name of the ablation of a run, or None if it is neither an ablation nor the full method."""
    changed = [(name, args[name]) for name in ARGUMENTS if args[name] != defaults[name]]
    if not changed:
        return FULL
    return next((label for label, change in ABLATIONS.items() if changed == [change]), None)


def read_groups(runs_dir):
    """Runs by dataset and group: {dataset: {group: [run, ...]}}."""
    datasets = {}
    for run in common.ended_runs(runs_dir):
        name = group(run.args, default_args(run.script, run.args["env_id"]))
        if name is None:
            print(f"left out: {run.path.name}, not one of the ablations", file=sys.stderr)
            continue
        groups = datasets.setdefault(f"{run.script}, {common.dataset_name(run)}", {})
        groups.setdefault(name, []).append(run)
    for dataset, groups in datasets.items():
        differing = set(common.differing([*chain(*groups.values())])) - ARGUMENTS
        if differing:
            sys.exit(f"{runs_dir}: runs of {dataset} also differ in {', '.join(sorted(differing))}")
    return datasets


def difference(full, ablation, in_percent):
    """Difference of the mean scores and its 95 % bootstrap interval over seeds."""

    def of(full, ablation):
        points = ablation.mean(axis=-1) - full.mean(axis=-1)
        return 100 * points / full.mean(axis=-1) if in_percent else points

    full, ablation, rng = np.asarray(full), np.asarray(ablation), np.random.default_rng(0)
    low = high = np.nan
    if len(full) > 1 and len(ablation) > 1:
        samples = [rng.choice(scores, (10_000, len(scores))) for scores in (full, ablation)]
        low, high = np.percentile(of(*samples), (2.5, 97.5))
    return float(of(full, ablation)), float(low), float(high)


def compare(groups):
    """For each group: final scores (NaN if diverged), difference, interval, unit."""
    scores = {name: [common.final_score(run) for run in runs] for name, runs in groups.items()}
    full = scores.get(FULL, [np.nan])
    unit = "%" if np.mean(full) >= MIN_SCORE else "points"
    rows = {}
    for name in scores:  # the seeds that did not diverge would be a biased sample
        diverged = np.isnan([*full, *scores[name]]).any()
        compared = name != FULL and not diverged
        numbers = difference(full, scores[name], unit == "%") if compared else [np.nan] * 3
        rows[name] = (scores[name], *numbers, unit)
    return rows


def draw(compared):
    """A panel per ablation with a bar per dataset, as in the paper."""
    names = [name for name in ABLATIONS if any(name in c for c in compared.values())]
    if not names:
        sys.exit("no run is one of the ablations")
    title = "Score of the ablations minus score of the full method (95 % intervals over seeds)"
    size = {"width": 2.2, "height": 0.4 * len(compared) + 0.5}
    figure, axes = common.subplots(1, len(names), title, **size, sharex=True, sharey=True)
    for ax, name in zip(axes[0], names, strict=True):
        for y, rows in enumerate(compared.values()):
            if name not in rows:
                continue
            scores, value, low, high, unit = rows[name]
            if unit == "%":
                ax.barh(y, value, color="lightgray", edgecolor="black", height=0.6)
                ax.plot([low, high], [y, y], "k-", linewidth=1.5)
            text = f"{value:+.0f} {unit}"
            if np.isnan(value):
                text = "full method diverged" if FULL in rows else "no full method"
                text = common.format_scores(scores) if np.isnan(scores).any() else text
            place = {"transform": ax.get_yaxis_transform(), "ha": "right", "va": "center"}
            ax.text(0.98, y, text, fontsize="x-small", **place)
        ax.axvline(0, color="black", linewidth=0.8)
        ax.set_title(name, fontsize="medium")
        ax.set(xlabel="difference in %", ylim=(len(compared) - 0.5, -0.5))
        ax.set_yticks(range(len(compared)), compared)
    low, high = axes[0, 0].get_xlim()
    axes[0, 0].set_xlim(low, high + 0.4 * (high - low))  # room for the numbers
    return figure


def main(args):
    groups = read_groups(args.runs_dir)
    compared = {name: compare(of) for name, of in groups.items() if set(of) - {FULL}}
    lines = []
    for dataset, rows in compared.items():
        for name in (FULL, *ABLATIONS):
            if name in rows:
                scores, value, low, high, unit = rows[name]
                text = "-" if np.isnan(value) else f"{value:+.1f} {unit}"
                interval = "-" if np.isnan(low) else f"{low:+.1f} to {high:+.1f}"
                cells = [len(scores), common.format_scores(scores), text, interval]
                lines.append([dataset, name, *cells])
    header = ["dataset", "group", "seeds", "score, mean ± s.e.", "difference", "95 % interval"]
    sections = ["# Ablations", "![ablations](ablations.png)", __doc__.split("\n\n")[2].strip()]
    sections.append(common.markdown_table(header, lines))
    common.save(args.out, "ablations", sections, {"ablations.png": draw(compared)})


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
