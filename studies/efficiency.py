"""Score against training time: the paper's figure of performance and efficiency, for any runs.

    python -m tools.speed --task tiny-maze2d-umaze-v0 --json speed.json
    python -m studies.efficiency runs --speed speed.json
    python -m studies.efficiency docs/results/methods.csv --speed docs/results/speed.json

Mean scores of the last evaluations of offline runs, with their standard error over seeds (one seed:
over episodes), against the time of all gradient steps by tools.speed, which measures all methods in
one process, without evaluation. efficiency.csv has all experiments, efficiency.png the best one of
each method and N. SAC-BC-N with beta 0 is SAC-N.
"""

import json
import sys
from collections import defaultdict
from dataclasses import dataclass

import matplotlib.pyplot as plt
import tyro
from matplotlib.ticker import LogLocator, NullFormatter

from studies import common
from tools.paper import NAMES
from tools.plot import finished, group, is_online, mean_and_stderr
from tools.runs import OFFLINE, read_runs


@dataclass
class Args:
    runs: tyro.conf.Positional[tuple[str, ...]]  # run directories, parents, or CSV files
    speed: str  # JSON file of tools.speed
    out: str = "studies-out"  # directory for the picture and the table


def read_speed(path):
    """Steps per second by script, number of critics and task."""
    try:
        with open(path) as file:
            rows = json.load(file)
        keys = ("script", "num_critics", "task")
        speeds = {tuple(row[key] for key in keys): float(row["steps_per_second"]) for row in rows}
    except (OSError, ValueError, KeyError, TypeError) as error:
        sys.exit(f"{path}: not a JSON file of tools.speed ({error!r})")
    return speeds or sys.exit(f"{path}: has no rows")


def read_points(experiments, speeds):
    """(label, run, seeds, minutes, score, standard error) per experiment, fastest first."""
    points = []
    for name, runs in experiments.items():
        run, done = runs[0], finished(runs)
        method = run.script, run.args.get("num_critics", 0), run.args["env_id"]
        if is_online(run) or not done or method not in speeds:
            known = "no speed of {}, N = {}, {}".format(*method)
            reason = "online" if is_online(run) else "not finished" if not done else known
            print(f"left out: {name} ({reason})", file=sys.stderr)
            continue
        minutes = run.args["gradient_steps"] / speeds[method] / 60
        label = name.replace(f", {run.args['env_id']}", "", 1)
        points.append((label, run, len(done), minutes, *mean_and_stderr(done)))
    if len({run.args["env_id"] for _, run, *_ in points}) != 1:
        sys.exit("there must be finished runs on one dataset, whose methods are in the speed file")
    return sorted(points, key=lambda point: point[3])


def method_name(run):
    is_sac_n = run.script == "sac_bc_n" and run.args["beta"] == 0
    num_critics = run.args.get("num_critics", 0)
    name = NAMES["sac_n" if is_sac_n else run.script]
    return f"{name}, N = {num_critics}" if num_critics > 2 or run.script in OFFLINE else name


def best_points(points):
    """The best point of each method, and how many there are."""
    methods = defaultdict(list)
    for point in points:
        methods[method_name(point[1])].append(point)
    best = {name: max(members, key=lambda p: p[4]) for name, members in methods.items()}
    return {name: (point, len(methods[name])) for name, point in best.items()}


def draw(points):
    env_id = points[0][1].args["env_id"]
    figure, ax = plt.subplots(figsize=(9.1, 3.4), layout="constrained")
    figure.suptitle(f"Score against training time, {env_id}", fontsize="medium")
    for i, (name, (point, count)) in enumerate(best_points(points).items()):
        _, _, seeds, minutes, score, stderr = point
        style = {"marker": "os^Dv*Ph"[i % 8], "color": f"C{i % 10}", "markersize": 8, "capsize": 3}
        label = name + (f", best of {count}" if count > 1 else "")
        label += f" ({seeds} seed{'s' if seeds > 1 else ''})"
        ax.errorbar(minutes, score, stderr, linestyle="none", label=label, **style)
    ax.set(xscale="log", xlabel="training time (minutes)", ylabel="normalized score")
    ax.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    ax.xaxis.set_major_formatter("{x:g}")
    ax.xaxis.set_minor_formatter(NullFormatter())
    ax.grid(alpha=0.3)
    ax.legend(fontsize="x-small", loc="upper left", bbox_to_anchor=(1, 1))
    return figure


def main(args):
    points = read_points(group(read_runs(args.runs)), read_speed(args.speed))
    lines = []
    for label, _, seeds, minutes, score, stderr in points:
        lines.append([label, seeds, f"{minutes:.1f}", f"{score:.1f}", f"{stderr:.1f}"])
    header = ["runs", "seeds", "minutes", "score", "stderr"]
    common.save(args.out, "efficiency", draw(points), header, lines)


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
