"""How long must a run be: values of the critics by gradient steps, from TensorBoard logs.

    python -m studies.convergence runs/RUN1 runs/RUN2 --out studies-out

Measured is uncertainty/data_min of offline runs: the minimum over the critics, mean over dataset
states and actions. Expected is Q (1 - exp(-t / T)), with T = policy_frequency / (tau (1 - gamma))
and Q fitted to the run. The table also has the T that fits best. Nothing is trained.
"""

import sys
from dataclasses import dataclass

import matplotlib.pyplot as plt
import numpy as np
import tyro
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from studies import common
from tools.runs import read_runs


@dataclass
class Args:
    runs: tyro.conf.Positional[list[str]]  # run directories, or directories of them
    out: str = "studies-out"  # directory for the picture and the table


def read_values(run):
    """Steps and values of uncertainty/data_min. A resumed run has several files."""
    events = EventAccumulator(str(run.path)).Reload()
    if "uncertainty/data_min" not in events.Tags()["scalars"]:
        sys.exit(f"{run.path}: no uncertainty/data_min in its TensorBoard logs")
    scalars = events.Scalars("uncertainty/data_min")
    return np.array([s.step for s in scalars]), np.array([s.value for s in scalars])


def fit(steps, values, time_constant):
    """Q of the curve by least squares, and the root mean square error."""
    share = 1 - np.exp(-steps / time_constant)
    q = share @ values / (share @ share)
    return q, np.sqrt(np.mean((values - q * share) ** 2))


def main(args):
    runs = [run for run in read_runs(args.runs) if not run.script.startswith("finetune")]
    if not runs:
        sys.exit(f"{', '.join(args.runs)}: no offline runs")
    title = "Minimum over the critics on dataset actions: measured (dots), expected (lines)"
    figure, axes = common.subplots(1, 1, title, width=6, height=3.2)
    ax, lines = axes[0, 0], []
    for i, run in enumerate(runs):
        expected = run.args["policy_frequency"] / (run.args["tau"] * (1 - run.args["gamma"]))
        steps, values = read_values(run)
        q, error = fit(steps, values, expected)
        candidates = np.geomspace(expected / 20, expected * 20, 1_000)
        best = min(candidates, key=lambda t: fit(steps, values, t)[1])
        color = plt.get_cmap("viridis")(0.8 * i / max(1, len(runs) - 1))
        name = f"{run.script}, {common.dataset_name(run)}, seed {run.args['seed']}"
        x = np.linspace(0, steps[-1], 200)
        ax.plot(x, q * (1 - np.exp(-x / expected)), "-", color=color)
        ax.plot(steps, values, "os^Dv"[i % 5], color=color, markersize=3, label=name)
        numbers = [f"{expected:,.0f}", f"{best:,.0f}", f"{values[-1]:.3g}", f"{q:.3g}"]
        lines.append([name, f"{steps[-1]:,}", *numbers, f"{abs(100 * error / q):.1f} %"])
    ax.set(xlabel="gradient steps", ylabel="mean of Q_min")
    ax.grid(alpha=0.3)
    ax.legend(fontsize="x-small")
    header = ["run", "steps", "T", "T of the best fit", "last value", "Q", "error (RMS, of Q)"]
    sections = ["# Convergence", "![convergence](convergence.png)", __doc__.split("\n\n")[2]]
    sections.append(common.markdown_table(header, lines))
    common.save(args.out, "convergence", sections, {"convergence.png": figure})


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
