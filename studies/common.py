"""What the studies share: which runs they read, scores over seeds, tables and pictures."""

import sys
from pathlib import Path

import matplotlib
import numpy as np

from tools.runs import BASELINES, read_runs, settings

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def ended_runs(runs_dir, offline=True):
    """Runs that diverged or have a final score. Of runs with the same settings, the newest."""
    runs = {}
    for run in read_runs([runs_dir]):  # oldest first
        if offline and run.script.startswith("finetune"):
            print(f"left out: {run.path.name} is a fine-tuning run", file=sys.stderr)
        elif offline and run.script in BASELINES:
            print(f"left out: {run.path.name} is a run of {run.script}", file=sys.stderr)
        elif run.status == "running" or (
            run.status == "finished" and "score" not in run.history[-1]
        ):
            print(f"left out: {run.path.name} is not finished or has no score", file=sys.stderr)
        else:
            runs[run.script, str(settings(run)), run.args["seed"]] = run
    if not runs:
        sys.exit(f"{runs_dir}: no finished runs")
    return list(runs.values())


def differing(runs):
    """Names of the settings that differ between these runs."""
    values = [settings(run) for run in runs]
    names = dict.fromkeys(name for one in values for name in one)
    return [name for name in names if len({str(one.get(name)) for one in values}) > 1]


def dataset_name(run):
    """Scores on D4RL's data and on Minari's are never compared with each other."""
    return run.args["env_id"] + (" (Minari)" if run.metadata["source"] == "minari" else "")


def final_score(run):
    """Mean normalized score of the last evaluation; NaN if the run diverged."""
    return float("nan") if run.status == "diverged" else run.history[-1]["score"]


def mean_and_stderr(values):
    """Over seeds. The standard error of a single seed is NaN."""
    stderr = np.std(values, ddof=1) / np.sqrt(len(values)) if len(values) > 1 else np.nan
    return float(np.mean(values)), float(stderr)


def format_scores(values):
    """Mean ± standard error over seeds as text."""
    diverged = int(np.isnan(values).sum())
    if len(values) == 0:
        return "-"
    if diverged:
        return "diverged" if diverged == len(values) else f"{diverged} of {len(values)} diverged"
    mean, stderr = mean_and_stderr(values)
    return f"{mean:.1f}" if np.isnan(stderr) else f"{mean:.1f} ± {stderr:.1f}"


def markdown_table(header, rows):
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def save(out, name, sections, figures):
    """Writes NAME.md, with a title, a picture and text per section, and the pictures."""
    try:
        Path(out).mkdir(parents=True, exist_ok=True)
        for file_name, figure in figures.items():
            figure.savefig(Path(out, file_name), dpi=100)
            plt.close(figure)
        Path(out, f"{name}.md").write_text("\n\n".join(sections) + "\n", encoding="utf-8")
    except OSError as error:
        sys.exit(f"{out}: cannot be written ({error})")
    print(f"wrote {Path(out, name)}.md, {', '.join(figures)}")


def subplots(rows, columns, title, width=2.2, height=2.5, **kwargs):
    width = max(width * columns + 1.6, 0.09 * max(map(len, title.splitlines())))
    size = (width, height * rows + 0.9)
    kwargs |= {"figsize": size, "squeeze": False, "layout": "constrained"}
    figure, axes = plt.subplots(rows, columns, **kwargs)
    figure.suptitle(title, fontsize="medium")
    return figure, axes
