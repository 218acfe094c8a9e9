"""What each part of the method gives: scores of ablations against the full method.

    python -m studies.ablations runs/ablations --out studies-out

A run belongs to an ablation if it differs in exactly one of five arguments from the defaults of its
task: no BC (beta 0), two critics, no BC inflation (bc_inflation 1), the other targets
(independent_targets flipped), PyTorch's initialization (critic_init torch). The full method has
the defaults of all five. Differences are in percent of the full method's score, as in the paper, or
in points where that score is below 10. Intervals: 95 %, bootstrap over seeds. Nothing is trained.
"""

import sys
from dataclasses import dataclass
from itertools import chain

import numpy as np
import tyro

from studies import common

FULL = "full method"
ABLATIONS = {
    "beta": "no BC",
    "num_critics": "two critics",
    "bc_inflation": "no BC inflation",
    "independent_targets": "other targets",
    "critic_init": "PyTorch init",
}
VALUES = {"beta": 0, "num_critics": 2, "bc_inflation": 1, "critic_init": "torch"}
MIN_SCORE = 10  # percent of a smaller score are meaningless


@dataclass
class Args:
    runs_dir: tyro.conf.Positional[str]  # directory with the runs
    out: str = "studies-out"  # directory for the picture and the table


def group(args, defaults):
    """Name of the ablation of a run, or None if it is neither an ablation nor the full method."""
    changed = [name for name in ABLATIONS if args[name] != defaults[name]]
    if not changed:
        return FULL
    name = changed[0]
    is_ablation = len(changed) == 1 and args[name] == VALUES.get(name, args[name])
    return ABLATIONS[name] if is_ablation else None


def read_groups(runs_dir):
    """Runs by dataset and group: {dataset: {group: [run, ...]}}."""
    datasets = {}
    for run in common.ended_runs(runs_dir):
        name = group(run.args, common.task_defaults(run))
        if name is None:
            print(f"left out: {run.path.name}, not one of the ablations", file=sys.stderr)
            continue
        groups = datasets.setdefault(f"{run.script}, {common.dataset_name(run)}", {})
        groups.setdefault(name, []).append(run)
    for dataset, groups in datasets.items():
        differing = set(common.differing_args([*chain(*groups.values())])) - set(ABLATIONS)
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
    """For each group: final scores, number of diverged runs, difference, interval, unit."""
    scores = {name: [common.final_score(run) for run in runs] for name, runs in groups.items()}
    finished = {name: [s for s in scores[name] if not np.isnan(s)] for name in scores}
    full = finished.get(FULL, [])
    unit = "%" if full and np.mean(full) >= MIN_SCORE else "points"
    rows = {}
    for name in scores:
        compared = full and finished[name] and name != FULL
        numbers = difference(full, finished[name], unit == "%") if compared else [np.nan] * 3
        rows[name] = (finished[name], len(scores[name]) - len(finished[name]), *numbers, unit)
    return rows


def draw(compared):
    """A panel per ablation with a bar per dataset, as in the paper."""
    names = [name for name in ABLATIONS.values() if any(name in c for c in compared.values())]
    if not names:
        sys.exit("no run is one of the ablations")
    title = "Score of the ablations minus score of the full method (95 % intervals over seeds)"
    size = {"width": 2.2, "height": 0.4 * len(compared) + 0.5}
    figure, axes = common.subplots(1, len(names), title, **size, sharex=True, sharey=True)
    for ax, name in zip(axes[0], names, strict=True):
        for y, rows in enumerate(compared.values()):
            if name not in rows:
                continue
            _, diverged, value, low, high, unit = rows[name]
            ax.barh(y, value, color="lightgray", edgecolor="black", height=0.6)
            ax.plot([low, high], [y, y], "k-", linewidth=1.5)
            text = "" if np.isnan(value) else f"{value:+.0f} {unit}"
            text += f"\n{diverged} diverged" if diverged else ""
            place = {"transform": ax.get_yaxis_transform(), "ha": "right", "va": "center"}
            ax.text(0.98, y, text, fontsize="x-small", **place)
        ax.axvline(0, color="black", linewidth=0.8)
        ax.set_title(name, fontsize="medium")
        ax.set(xlabel="difference", ylim=(len(compared) - 0.5, -0.5))
        ax.set_yticks(range(len(compared)), compared)
    low, high = axes[0, 0].get_xlim()
    axes[0, 0].set_xlim(low, high + 0.4 * (high - low))  # room for the numbers
    return figure


def main(args):
    compared = {name: compare(groups) for name, groups in read_groups(args.runs_dir).items()}
    lines = []
    for dataset, rows in compared.items():
        for name in (FULL, *ABLATIONS.values()):
            if name in rows:
                scores, diverged, value, low, high, unit = rows[name]
                text = "-" if np.isnan(value) else f"{value:+.1f} {unit}"
                interval = "-" if np.isnan(low) else f"{low:+.1f} to {high:+.1f}"
                seeds = f"{len(scores)} ({diverged} more diverged)" if diverged else len(scores)
                lines.append([dataset, name, seeds, common.format_scores(scores), text, interval])
    header = ["dataset", "group", "seeds", "score, mean ± s.e.", "difference", "95 % interval"]
    sections = ["# Ablations", "![ablations](ablations.png)", __doc__.split("\n\n")[2].strip()]
    sections.append(common.markdown_table(header, lines))
    common.save(args.out, "ablations", sections, {"ablations.png": draw(compared)})


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
