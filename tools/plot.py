"""Learning curves (PNG) and a table (Markdown) from run directories.

    python -m tools.plot runs                         (all runs below a directory, into plots/)
    python -m tools.plot runs/RUN1 runs/RUN2 --out figures

Runs that differ only in their seed are one experiment: one curve, with mean and standard error over
seeds. Runs on different data or in different environments are never one experiment. Of two runs
with the same experiment and seed, the finished one counts; if both are finished, the newer one.

The table is about the last evaluation of the finished runs: mean and standard error over all
episodes, as in the paper; interquartile mean (IQM) with a 95 % bootstrap interval, resampled over
seeds and over the episodes of each seed; (mean - worst) / mean, where worst is the worst episode.
A second table is about the stability of fine-tuning: the score before it, the largest drop below
that score, the step at which it is reached again, and the mean of the last ten evaluations.
"""

import json
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import numpy as np
import tyro

from tools import paper
from tools.runs import normalized_scores, read_runs, settings

matplotlib.use("Agg")
import matplotlib.pyplot as plt


@dataclass
class Args:
    runs: tyro.conf.Positional[tuple[str, ...]] = ("runs",)  # run directories, or parents of them
    out: str = "plots"  # directory to write to


def is_online(run):
    return run.script.startswith("finetune")


def group(runs):
    """Experiments as {name: runs in order of their seeds}. The name has the settings that differ.

    The runs are ordered by age, oldest first.
    """
    experiments = defaultdict(dict)
    for run in runs:
        if not run.diverged and not any("score" in entry for entry in run.history):
            never = "never evaluated: no environment, or --eval-episodes 0"
            reason = never if run.history else "no evaluation yet"
            print(f"left out: {run.path} ({reason})", file=sys.stderr)
            continue
        seeds = experiments[run.script, json.dumps(settings(run), sort_keys=True)]
        other = seeds.get(run.args["seed"])
        if other and other.returns is not None and run.returns is None:
            run, other = other, run
        if other:
            reason = f"same experiment and seed as {run.path}"
            print(f"left out: {other.path} ({reason})", file=sys.stderr)
        seeds[run.args["seed"]] = run
    named, alike = {}, defaultdict(list)
    for (script, key), seeds in experiments.items():
        name = f"{script}, {json.loads(key)['env_id']}"
        scratch = all(run.metadata["dataset"] is None for run in seeds.values())
        alike[script, name + (", from scratch" if scratch else "")].append(key)
    for (script, title), keys in alike.items():
        values = [json.loads(key) for key in keys]
        names = dict.fromkeys(name for one in values for name in one)
        differing = [name for name in names if len({str(one.get(name)) for one in values}) > 1]
        for key, one in zip(keys, values, strict=True):
            differences = [f"{name} {one.get(name)}" for name in differing]
            seeds = experiments[script, key]
            named[", ".join([title, *differences])] = [seeds[s] for s in sorted(seeds)]
    return named


def finished(runs):
    return [run for run in runs if run.returns is not None]


def interquartile_mean(scores):
    """Mean of the middle half. Scores at the quartiles count by their part inside."""
    scores = np.sort(np.asarray(scores, dtype=float).ravel())
    edges = np.arange(len(scores) + 1) / len(scores)
    weights = np.clip(np.minimum(edges[1:], 0.75) - np.maximum(edges[:-1], 0.25), 0, None)
    return float((weights * scores).sum() / weights.sum())


def bootstrap(seeds, statistic, repeats=2000):
    """95 % interval of a statistic: seeds are resampled, and episodes within each seed."""
    rng, values = np.random.default_rng(0), []
    for _ in range(repeats):
        drawn = rng.integers(len(seeds), size=len(seeds))
        scores = [rng.choice(seeds[i], size=len(seeds[i])) for i in drawn]
        values.append(statistic(np.concatenate(scores)))
    return np.percentile(values, [2.5, 97.5])


def summarize(runs):
    """Statistics over the episodes of the last evaluations of finished runs."""
    seeds = [normalized_scores(run.returns, run.metadata) for run in runs]
    scores = np.concatenate(seeds)
    low, high = bootstrap(seeds, interquartile_mean)
    mean = float(scores.mean())
    return {
        "episodes": len(scores),
        "mean": mean,
        "stderr": float(scores.std(ddof=1) / np.sqrt(len(scores))) if len(scores) > 1 else 0.0,
        "iqm": interquartile_mean(scores),
        "interval": (float(low), float(high)),
        "worst": float((mean - scores.min()) / mean) if mean > 0 else float("nan"),
    }


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
    """Steps at which all seeds were evaluated, mean and standard error of their scores."""
    by_step = [{e["step"]: e["score"] for e in run.history if "score" in e} for run in runs]
    steps = sorted(set.intersection(*map(set, by_step)))
    scores = np.array([[one[step] for step in steps] for one in by_step])
    std = scores.std(axis=0, ddof=1) if len(scores) > 1 else np.zeros(len(steps))
    return steps, scores.mean(axis=0), std / np.sqrt(len(scores))


def draw(experiments, path):
    """One picture of all experiments of an environment."""
    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    behaviours = {}
    for name, runs in experiments.items():
        first = runs[0]
        # A run that was stopped or that diverged would shorten the curve of the others.
        runs = finished(runs) or [run for run in runs if not run.diverged] or runs
        steps, mean, stderr = curve(runs)
        label = name.replace(f", {first.args['env_id']}", "", 1)
        label += "" if finished(runs) else ", diverged" if runs[0].diverged else ", not finished"
        label += f" ({len(runs)} seed{'s' if len(runs) > 1 else ''})"
        (line,) = axes.plot(steps, mean, marker=".", label=label)
        axes.fill_between(steps, mean - stderr, mean + stderr, alpha=0.2, color=line.get_color())
        if is_online(first) and first.metadata["dataset"] and steps:  # the score before fine-tuning
            axes.axhline(mean[0], linestyle="--", color=line.get_color(), linewidth=1)
        if "mean_return" in first.metadata:
            score = normalized_scores(first.metadata["mean_return"], first.metadata)
            behaviours[first.metadata["source"], first.metadata["dataset"]] = score
    for (source, _), score in behaviours.items():
        label = "mean of the dataset" + (f" ({source})" if len(behaviours) > 1 else "")
        axes.axhline(score, linestyle=":", color="gray", label=label)
    references = first.metadata["ref_min_score"], first.metadata["ref_max_score"]
    axes.set(title=first.args["env_id"])
    axes.set_ylabel("return" if references == (0, 100) else "normalized score")
    axes.set_xlabel("environment steps" if is_online(first) else "gradient steps")
    axes.grid(alpha=0.3)
    figure.legend(fontsize="small", loc="outside lower center")
    figure.savefig(path, dpi=120, bbox_inches="tight")
    plt.close(figure)


def paper_score(run):
    """The paper's score, for offline runs on D4RL's data or on data made by D4RL's recipe."""
    env_id, regenerated = run.args["env_id"], run.metadata.get("source") == "tools.make_maze2d"
    method = run.script
    if method == "sac_bc_n" and run.args["beta"] == 0 and not env_id.startswith("halfcheetah"):
        method = "sac_n"  # on halfcheetah, beta is 0 in SAC-BC-N, too
    scores = paper.SCORES.get(method, {})  # none for fine-tuning, IQL, CQL and BC
    if env_id not in scores:
        return ""
    score = f"{scores[env_id]:.1f}"
    if run.metadata.get("comparable_with_paper"):
        return score
    return f"{score} (regenerated data)" if regenerated else ""


def table(experiments):
    """The experiments of group() as Markdown."""
    header = "experiment", "seeds", "episodes", "mean ± s.e.", "IQM [95 %]"
    header += "(mean - worst)/mean", "paper"
    lines = [f"| {' | '.join(header)} |", "|---" * len(header) + "|"]
    fine_tuned = {}
    for name, runs in experiments.items():
        done, diverged = finished(runs), sum(run.diverged for run in runs)
        unfinished = len(runs) - len(done) - diverged
        counts = {"": len(done), " diverged": diverged, " not finished": unfinished}
        seeds = ", ".join(f"{count}{text}" for text, count in counts.items() if count)
        if not done:
            lines.append(f"| {name} | {seeds} | | | | | |")
            continue
        statistics = summarize(done)
        low, high = statistics["interval"]
        cells = [name, seeds, f"{statistics['episodes']}"]
        cells += [f"{statistics['mean']:.1f} ± {statistics['stderr']:.1f}"]
        cells += [f"{statistics['iqm']:.1f} [{low:.1f}, {high:.1f}]"]
        cells += [f"{statistics['worst']:.0%}" if statistics["mean"] > 0 else "-"]
        lines.append(f"| {' | '.join([*cells, paper_score(done[0])])} |")
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
    return "\n".join(lines) + "\n"


def main(args):
    experiments, out = group(read_runs(args.runs)), Path(args.out)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        sys.exit(f"--out {out}: not a directory that can be written ({error})")
    pictures = defaultdict(dict)
    for name, runs in experiments.items():
        kind = "online" if is_online(runs[0]) else "offline"
        pictures[runs[0].args["env_id"], kind][name] = runs
    for (env_id, kind), members in pictures.items():
        path = out / f"{env_id.replace('/', '-').replace(',', '-')}_{kind}.png"
        draw(members, path)
        print(path)
    text = table(experiments)
    (out / "table.md").write_text(text)
    print(f"{out / 'table.md'}\n\n{text}")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
