"""Learning curves (PNG) and a table (Markdown) of runs.

    python -m tools.plot runs                         (all runs below a directory, into plots/)
    python -m tools.plot runs/RUN1 runs/RUN2 --out figures
    python -m tools.plot runs --csv results.csv       (and all evaluations as a CSV file)
    python -m tools.plot docs/results/bundled.csv     (runs from such a file)

Runs that differ only in their seed are one experiment: one curve. Runs on different data or in
different environments are never one experiment. Of two runs with the same experiment and seed, the
finished one counts; if both are finished, the newer one.

The table is about the last evaluation of the finished runs, and has the paper's score of its
settings, if D4RL's data or data made in the same way were used. Scores are means, and +- is the
standard error over seeds; if there is one seed, over its episodes, and the table says so. Bands in
the picture are the same. A second table is about the stability of fine-tuning: the score before it,
the largest drop below that score, the step at which it is reached again, and the mean of the last
ten evaluations.
"""

import json
import sys
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import numpy as np
import tyro

from tools import paper
from tools.runs import (
    DATA,
    FINETUNE,
    dataset_return,
    default_args,
    differing_settings,
    experiment_settings,
    normalized_score,
    read_runs,
    write_csv,
)

matplotlib.use("Agg")
import matplotlib.pyplot as plt

STATUS = {"finished": "", "diverged": " diverged", "running": " not finished"}


@dataclass
class Args:
    # run directories, parents of them, or CSV files of this tool
    runs: tyro.conf.Positional[tuple[str, ...]] = ("runs",)
    out: str = "plots"  # directory to write to
    csv: str | None = None  # file to write all evaluations to, one row each


def is_online(run):
    return run.script in FINETUNE


def group(runs):
    """Experiments as {name: runs in order of their seeds}. The name has the settings that differ.

    The runs are ordered by age, oldest first.
    """
    experiments = defaultdict(dict)
    for run in runs:
        if run.status != "diverged" and not any("score" in entry for entry in run.history):
            never = "never evaluated: no environment, or --eval-episodes 0"
            reason = never if run.history else "no evaluation yet"
            print(f"left out: {run.path} ({reason})", file=sys.stderr)
            continue
        seeds = experiments[run.script, json.dumps(experiment_settings(run), sort_keys=True)]
        other = seeds.get(run.args["seed"])
        if other and other.status == "finished" and run.status != "finished":
            run, other = other, run
        if other:
            reason = f"same experiment and seed as {run.path}"
            print(f"left out: {other.path} ({reason})", file=sys.stderr)
        seeds[run.args["seed"]] = run
    named, by_title = {}, defaultdict(list)
    for seeds in experiments.values():
        runs = [seeds[seed] for seed in sorted(seeds)]
        title = f"{runs[0].script}, {runs[0].args['env_id']}"
        if all(run.metadata["dataset"] is None for run in runs):
            title += ", from scratch"
        by_title[title].append(runs)
    for title, members in by_title.items():
        differing = sorted(differing_settings([runs[0] for runs in members]))
        for runs in members:
            values = experiment_settings(runs[0])
            differences = [f"{name} {values.get(name)}" for name in differing]
            named[", ".join([title, *differences])] = runs
    return named


def finished(runs):
    return [run for run in runs if run.status == "finished"]


def mean_and_stderr(runs, step=None):
    """Of the last scores, or those at a step: over seeds, or over the episodes of a single one."""
    entries = [
        next(e for e in reversed(run.history) if "score" in e and step in (None, e["step"]))
        for run in runs
    ]
    scores = [entry["score"] for entry in entries]
    if len(scores) == 1:
        return scores[0], entries[0].get("score_stderr", np.nan)  # not in every CSV file
    return float(np.mean(scores)), float(np.std(scores, ddof=1) / np.sqrt(len(scores)))


def stability(history):
    """Of a fine-tuning run, whose first evaluation is that of the offline agent."""
    before, scores = history[0]["score"], [entry["score"] for entry in history]
    worst = int(np.argmin(scores))
    recovered = [entry["step"] for entry in history[worst:] if entry["score"] >= before]
    return {
        "before": before,
        "largest_drop": before - scores[worst],
        "recovery_step": recovered[0] if recovered else None,
        "last_ten": float(np.mean(scores[1:][-10:] or scores)),
    }


def curve(runs):
    """Steps at which all seeds were evaluated, means and standard errors of their scores."""
    steps = [{entry["step"] for entry in run.history if "score" in entry} for run in runs]
    steps = sorted(set.intersection(*steps))
    points = np.array([mean_and_stderr(runs, step) for step in steps]).reshape(-1, 2)
    return steps, points[:, 0], points[:, 1]


def draw(experiments, path):
    """One picture of all experiments in an environment, offline and online side by side."""
    panels = defaultdict(dict)
    for name, runs in sorted(experiments.items(), key=lambda item: is_online(item[1][0])):
        panels[is_online(runs[0])][name] = runs
    size = 2.5 + 4.5 * len(panels), 4 + 0.2 * len(experiments)  # room for the legend
    options = {"figsize": size, "dpi": 120, "layout": "constrained"}
    figure, axes = plt.subplots(1, len(panels), sharey=True, **options)
    for (online, members), ax in zip(panels.items(), np.atleast_1d(axes), strict=True):
        # Thirty curves that differ in color or line
        styles = plt.cycler(linestyle=["-", "--", ":"])
        ax.set_prop_cycle(styles * plt.rcParams["axes.prop_cycle"])
        draw_panel(members, ax)
        ax.set_xlabel("environment steps" if online else "gradient steps")
    first = next(iter(experiments.values()))[0]
    references = first.metadata["ref_min_score"], first.metadata["ref_max_score"]
    figure.axes[0].set_ylabel("return" if references == (0, 100) else "normalized score")
    figure.suptitle(first.args["env_id"])
    labels = {}
    for ax in figure.axes:
        handles, names = ax.get_legend_handles_labels()
        labels |= dict(zip(names, handles, strict=True))
    figure.legend(labels.values(), labels.keys(), fontsize="small", loc="outside lower center")
    figure.savefig(path, bbox_inches="tight")
    plt.close(figure)


def draw_panel(experiments, axes):
    behaviours = {}
    for name, runs in experiments.items():
        first = runs[0]
        # A run that was stopped or that diverged would shorten the curve of the others.
        runs = finished(runs) or [run for run in runs if run.status == "running"] or runs
        steps, mean, stderr = curve(runs)
        label = name.replace(f", {first.args['env_id']}", "", 1)
        label += "" if finished(runs) else f",{STATUS[runs[0].status]}"
        label += f" ({len(runs)} seeds)" if len(runs) > 1 else " (1 seed)"
        (line,) = axes.plot(steps, mean, marker=".", label=label)
        axes.fill_between(steps, mean - stderr, mean + stderr, alpha=0.2, color=line.get_color())
        if is_online(first) and first.metadata["dataset"] and steps:  # the score before fine-tuning
            axes.axhline(mean[0], linestyle="--", color=line.get_color(), linewidth=1)
        if dataset_return(first) is not None:
            score = normalized_score(dataset_return(first), first.metadata)
            behaviours[first.metadata["source"], first.metadata["dataset"]] = score
    for (source, _), score in behaviours.items():
        label = "mean of the dataset" + (f" ({source})" if len(behaviours) > 1 else "")
        axes.axhline(score, linestyle="-.", color="gray", label=label)
    axes.grid(alpha=0.3)


def paper_score(run):
    """The paper's score, if the run has its settings, on D4RL's data or data made by its recipe."""
    env_id, regenerated = run.args["env_id"], run.metadata.get("source") == "tools.make_maze2d"
    method, may_differ = run.script, {"gradient_steps"}
    if method == "sac_bc_n" and run.args["beta"] == 0 and not env_id.startswith("halfcheetah"):
        method = "sac_n"  # on halfcheetah, beta is 0 in SAC-BC-N, too
        may_differ |= {"beta", "num_critics"}
    scores = paper.SCORES.get(method, {})  # none for fine-tuning, IQL, CQL and BC
    if env_id not in scores:
        return ""
    settings, defaults = experiment_settings(run), default_args(run.script, env_id)
    differing = {name for name in settings if settings[name] != defaults.get(name)}
    if differing - may_differ - set(DATA):
        return ""
    score = f"{scores[env_id]:.1f}"
    if run.metadata.get("comparable_with_paper"):
        return score
    return f"{score} (regenerated data)" if regenerated else ""


def table(experiments):
    """The experiments of group() as Markdown."""
    header = "experiment", "seeds", "score", "± over", "worst episode", "paper"
    lines = [f"| {' | '.join(header)} |", "|---" * len(header) + "|"]
    fine_tuned = {}
    for name, runs in experiments.items():
        done, counts = finished(runs), Counter(run.status for run in runs)
        seeds = ", ".join(f"{counts[key]}{STATUS[key]}" for key in STATUS if counts[key])
        if not done:
            lines.append(f"| {name} | {seeds} | | | | |")
            continue
        worst = np.min([run.history[-1].get("score_worst", np.nan) for run in done])
        cells = [name, seeds, "{:.1f} ± {:.1f}".format(*mean_and_stderr(done))]
        cells += ["seeds" if len(done) > 1 else "episodes", f"{worst:.1f}", paper_score(done[0])]
        lines.append(f"| {' | '.join(cells)} |")
        if is_online(done[0]) and done[0].metadata["dataset"]:  # not from scratch
            fine_tuned[name] = [stability(run.history) for run in done]
    if fine_tuned:
        lines += ["", "| fine-tuning | before | largest drop | recovered at step | last ten |"]
        lines += ["|---|---|---|---|---|"]
    for name, seeds in fine_tuned.items():
        before, drop, last = (
            np.mean([seed[key] for seed in seeds]) for key in ("before", "largest_drop", "last_ten")
        )
        steps = [seed["recovery_step"] for seed in seeds]
        recovered = ", ".join("never" if step is None else str(step) for step in steps)
        lines.append(f"| {name} | {before:.1f} | {drop:.1f} | {recovered} | {last:.1f} |")
    return "\n".join(lines).replace(" ± nan", "").replace(" nan ", " ") + "\n"


def main(args):
    experiments, out = group(read_runs(args.runs)), Path(args.out)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        sys.exit(f"--out {out}: not a directory that can be written ({error})")
    if args.csv:
        try:
            write_csv([run for runs in experiments.values() for run in runs], args.csv)
        except OSError as error:
            sys.exit(f"--csv {args.csv}: cannot be written ({error})")
        print(args.csv)
    pictures = defaultdict(dict)
    for name, runs in experiments.items():
        pictures[runs[0].args["env_id"]][name] = runs
    for env_id, members in pictures.items():
        path = out / f"{env_id.replace('/', '-').replace(',', '-')}.png"
        draw(members, path)
        print(path)
    text = table(experiments)
    (out / "table.md").write_text(text)
    print(f"{out / 'table.md'}\n\n{text}")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
