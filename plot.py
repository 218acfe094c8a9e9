"""Curves and tables from run directories: PNG and Markdown, with the paper's figures beside them.

    python plot.py runs/RUN                       (writes to plots/)
    python plot.py runs --out figures             (all runs below a folder, seeds put together)

Runs that differ only in their seed are one curve: mean and standard error over seeds (of two runs
with one seed, the newer counts). The table has the last evaluation: mean and standard error over
all episodes, as in the paper; the interquartile mean with a bootstrap interval, drawn anew over
seeds and over each seed's episodes; and (mean - worst) / mean, how far the worst episode is below.
"""

import json
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import numpy as np
import torch
import tyro

matplotlib.use("Agg")
import matplotlib.pyplot as plt

# Table 1 of the paper: TD3-BC-N and SAC-BC-N.
PAPER = {
    "halfcheetah-medium-v2": (63.3, 65.6),
    "halfcheetah-medium-replay-v2": (55.3, 61.5),
    "halfcheetah-medium-expert-v2": (101.7, 102.6),
    "halfcheetah-expert-v2": (103.8, 105.3),
    "hopper-medium-v2": (101.5, 101.2),
    "hopper-medium-replay-v2": (99.1, 100.8),
    "hopper-medium-expert-v2": (112.3, 111.3),
    "hopper-expert-v2": (112.7, 111.5),
    "walker2d-medium-v2": (90.9, 85.3),
    "walker2d-medium-replay-v2": (91.4, 90.8),
    "walker2d-medium-expert-v2": (113.5, 110.9),
    "walker2d-expert-v2": (113.2, 110.4),
    "maze2d-umaze-v1": (153.1, 128.9),
    "maze2d-medium-v1": (133.9, 137.8),
    "maze2d-large-v1": (145.8, 141.4),
    "antmaze-umaze-v0": (98.3, 98.6),
    "antmaze-umaze-diverse-v0": (90.6, 91.2),
    "antmaze-medium-play-v0": (87.0, 85.8),
    "antmaze-medium-diverse-v0": (86.2, 73.8),
    "antmaze-large-play-v0": (76.2, 65.8),
    "antmaze-large-diverse-v0": (74.2, 75.8),
    "pen-cloned-v1": (67.2, 58.0),
    "pen-human-v1": (72.8, 70.3),
}
# What may differ between runs that are one experiment.
INCIDENTAL = {"seed", "resume", "cuda", "cudagraphs", "compile", "tf32", "runs_dir", "checkpoint"}
INCIDENTAL |= {"track", "wandb_project_name", "wandb_entity", "capture_video", "log_frequency"}
INCIDENTAL |= {"dataset_path", "save_dataset", "eval_frequency", "eval_episodes"}
INCIDENTAL |= {"final_eval_episodes"}
# What of the data and the environment must be the same.
DATA = ("dataset", "environment", "comparable_with_the_paper")


@dataclass
class Args:
    runs: tyro.conf.Positional[list[str]]  # run directories, or folders of them
    out: str = "plots"  # folder to write to


def read_runs(paths):
    """(script, result) of every run at or below these paths; of an unfinished one, its curve."""
    found, files = [], {}
    for path in map(Path, paths):
        if not path.is_dir():
            sys.exit(f"{path}: no such directory")
        for file in sorted(path.resolve().rglob("checkpoint.pt")):
            files[file] = file.stat().st_mtime
    for file in sorted(files, key=files.get):
        try:
            checkpoint = torch.load(file, map_location="cpu", weights_only=True)
            result = {key: checkpoint[key] for key in ("args", "facts", "history")}
            script, file = checkpoint["script"], file.with_name("result.json")
            if file.exists():
                finished = json.loads(file.read_text())
                if finished["history"] == result["history"]:  # not of a run that went on
                    result = finished
            if result["history"]:
                found.append((script, result))
            else:
                print(f"{file.parent}: no evaluation yet, left out")
        except Exception as error:  # torch.load has many ways to fail
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            sys.exit(f"{file}: not of these scripts ({reason})")
    if not found:
        sys.exit(f"no runs in {', '.join(map(str, paths))}")
    return found


def group(runs):
    """Runs by experiment, under a name that says what differs between the experiments."""
    groups = defaultdict(dict)
    for script, result in runs:
        settings = {k: v for k, v in result["args"].items() if k not in INCIDENTAL}
        settings |= {key: result["facts"].get(key) for key in DATA}
        seeds = groups[script, json.dumps(settings, sort_keys=True)]
        if (seed := result["args"]["seed"]) in seeds:
            print(f"{script}, {settings['env_id']}: seed {seed} twice, the newer run counts")
        seeds[seed] = result
    named, clashes = {}, defaultdict(list)
    for key in groups:
        clashes[key[0], json.loads(key[1])["env_id"]].append(key)
    for (script, env_id), keys in clashes.items():
        all_settings = [json.loads(key[1]) for key in keys]
        changing = [
            name
            for name in dict.fromkeys(name for settings in all_settings for name in settings)
            if len({json.dumps(settings.get(name)) for settings in all_settings}) > 1
        ]
        for key, settings in zip(keys, all_settings, strict=True):
            differences = ", ".join(f"{name} {settings.get(name)}" for name in changing)
            name = f"{script}, {env_id}" + (f", {differences}" if differences else "")
            named[name] = [groups[key][seed] for seed in sorted(groups[key])]
    return named


def episode_scores(result):
    low, high = result["facts"]["random_return"], result["facts"]["expert_return"]
    return 100 * (np.array(result["returns"]) - low) / (high - low)


def interquartile_mean(scores):
    """Mean of the middle half; of what the quartiles cut through, the part inside."""
    scores = np.sort(np.asarray(scores, dtype=float).ravel())
    edges = np.arange(len(scores) + 1) / len(scores)
    weights = np.clip(np.minimum(edges[1:], 0.75) - np.maximum(edges[:-1], 0.25), 0, None)
    return float((weights * scores).sum() / weights.sum())


def bootstrap(seeds, figure, repeats=2000):
    """95 % interval of a figure: seeds are drawn anew, and episodes within each."""
    random, values = np.random.default_rng(0), []
    for _ in range(repeats):
        drawn = random.integers(len(seeds), size=len(seeds))
        scores = [random.choice(seeds[i], size=len(seeds[i])) for i in drawn]
        values.append(figure(np.concatenate(scores)))
    return np.percentile(values, [2.5, 97.5])


def summarize(results):
    seeds = [episode_scores(result) for result in results]
    scores = np.concatenate(seeds)
    low, high = bootstrap(seeds, interquartile_mean)
    mean = float(scores.mean())
    return {
        "mean": mean,
        "stderr": float(scores.std(ddof=1) / np.sqrt(len(scores))) if len(scores) > 1 else 0.0,
        "iqm": interquartile_mean(scores),
        "interval": (float(low), float(high)),
        "worst": float((mean - scores.min()) / mean) if mean > 0 else float("nan"),
    }


def curve(results):
    """Steps that all seeds have evaluated, mean and standard error of their scores."""
    by_step = [{e["step"]: e["score"] for e in result["history"]} for result in results]
    steps = sorted(set.intersection(*(set(scores) for scores in by_step)))
    scores = np.array([[one[step] for step in steps] for one in by_step])
    spread = scores.std(axis=0, ddof=1) if len(scores) > 1 else np.zeros(len(steps))
    return steps, scores.mean(axis=0), spread / np.sqrt(len(scores))


def draw(env_id, experiments, path):
    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    for name, results in experiments.items():
        steps, mean, stderr = curve(results)
        label = name.replace(f", {env_id}", "") + f" ({len(results)} seed{'s'[: len(results) > 1]})"
        (line,) = axes.plot(steps, mean, marker=".", label=label)
        axes.fill_between(steps, mean - stderr, mean + stderr, alpha=0.2, color=line.get_color())
        if name.startswith("finetune"):  # the paper's dashed line: before fine-tuning
            before = np.mean([result["history"][0]["score"] for result in results])
            axes.axhline(before, linestyle="--", color=line.get_color(), linewidth=1)
    facts = results[0]["facts"]
    if "data_score" in facts and facts["dataset"] != "none":
        axes.axhline(facts["data_score"], linestyle=":", color="gray", label="the data's behaviour")
    online = name.startswith("finetune")
    axes.set(title=env_id, xlabel="environment steps" if online else "gradient steps")
    axes.set_ylabel("normalised score")
    axes.legend(fontsize="small")
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def table(experiments):
    lines = [
        "| runs | seeds | episodes | mean ± s.e. | IQM [95 %] | (mean - worst)/mean | the paper |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, results in experiments.items():
        results = [result for result in results if "returns" in result]
        if not results:
            lines.append(f"| {name} | not finished | | | | | |")
            continue
        figures, facts = summarize(results), results[0]["facts"]
        paper, script = PAPER.get(results[0]["args"]["env_id"]), name.split(",")[0]
        # "yes", "nearly" (data by D4RL's recipe) or "no" (other data, another environment)
        comparable = facts.get("comparable_with_the_paper", "no").split(",")[0].split(":")[0]
        beside = ""
        if paper and comparable != "no" and not script.startswith("finetune"):
            beside = f"{paper['sac' in script]:.1f}" + " (not D4RL's file)" * (comparable != "yes")
        low, high = figures["interval"]
        worst = f"{figures['worst']:.0%}" if figures["mean"] > 0 else "-"
        lines.append(
            f"| {name} | {len(results)} | {sum(len(r['returns']) for r in results)} "
            f"| {figures['mean']:.1f} ± {figures['stderr']:.1f} "
            f"| {figures['iqm']:.1f} [{low:.1f}, {high:.1f}] | {worst} | {beside} |"
        )
    tuned = {name: [r for r in all_ if "stability" in r] for name, all_ in experiments.items()}
    tuned = {name: results for name, results in tuned.items() if results}
    if tuned:
        lines += ["", "| fine-tuning | before | largest drop | back at step | last ten |"]
        lines += ["|---|---|---|---|---|"]
    for name, results in tuned.items():
        parts = [result["stability"] for result in results]
        mean = {
            key: np.mean([p[key] for p in parts])
            for key in ("score_before", "largest_drop", "last_10_mean")
        }
        back = ", ".join(
            "never" if p["recovery_step"] is None else str(p["recovery_step"]) for p in parts
        )
        lines.append(
            f"| {name} | {mean['score_before']:.1f} | {mean['largest_drop']:.1f} | {back} "
            f"| {mean['last_10_mean']:.1f} |"
        )
    return "\n".join(lines) + "\n"


def main(args):
    experiments, out = group(read_runs(args.runs)), Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    figures = defaultdict(dict)
    for name, results in experiments.items():
        kind = "online" if name.startswith("finetune") else "offline"
        figures[results[0]["args"]["env_id"], kind][name] = results
    for (env_id, kind), members in figures.items():
        path = out / f"{env_id.replace('/', '-').replace(',', '-')}_{kind}.png"
        draw(env_id, members, path)
        print(path)
    (out / "table.md").write_text(text := table(experiments))
    print(f"{out / 'table.md'}\n\n{text}")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
