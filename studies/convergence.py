"""How long must a run be: values of the critics by gradient steps, from TensorBoard logs.

    python -m studies.convergence runs/RUN1 runs/RUN2 --out studies-out

Measured is uncertainty/data_min of offline runs: the minimum over the critics, mean over dataset
states and actions. Expected is Q_0 exp(-t / T) + Q (1 - exp(-t / T)), from the value of the initial
weights Q_0 to the converged value Q, with T = policy_frequency / (tau (1 - gamma)). Q_0 and Q are
fitted to the run. The table also has the T that fits best, if there is one.
"""

import sys
from dataclasses import dataclass

import matplotlib.pyplot as plt
import numpy as np
import tyro
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from studies import common
from tools.runs import FINETUNE, differing_settings, experiment_settings, read_runs


@dataclass
class Args:
    runs: tyro.conf.Positional[list[str]]  # run directories, or directories of them
    out: str = "studies-out"  # directory for the picture and the table


def read_values(run):
    """Steps and values of uncertainty/data_min. A resumed run has several files."""
    events = EventAccumulator(str(run.path)).Reload()
    logged = "uncertainty/data_min" in events.Tags()["scalars"]
    scalars = events.Scalars("uncertainty/data_min") if logged else []
    return np.array([s.step for s in scalars]), np.array([s.value for s in scalars])


def fit(steps, values, time_constant):
    """Q_0 and Q of the curve by least squares, and the root mean square error."""
    share = np.exp(-steps / time_constant)
    matrix = np.stack([share, 1 - share], axis=1)
    q = np.linalg.lstsq(matrix, values, rcond=None)[0]
    return q, np.sqrt(np.mean((values - matrix @ q) ** 2))


def main(args):
    runs, measured = [], {}
    for run in read_runs(args.runs):
        if run.script in FINETUNE:
            reason = "not an offline run"
        elif run.args.get("gamma", 1) == 1:  # BC has no gamma
            reason = "no critics, or gamma 1: no values that converge"
        else:
            measured[run.path] = read_values(run)
            if len(measured[run.path][0]):
                runs.append(run)
                continue
            reason = "no uncertainty/data_min in its logs"
        print(f"left out: {run.path} ({reason})", file=sys.stderr)
    if not runs:
        sys.exit(f"{', '.join(args.runs)}: no offline runs with TensorBoard logs")
    title = "Minimum over the critics on dataset actions: measured (dots), expected (lines)"
    figure, ax = plt.subplots(figsize=(7.6, 4.1), layout="constrained")
    figure.suptitle(title, fontsize="medium")
    lines = []
    for i, run in enumerate(runs):
        policy_frequency = run.args.get("policy_frequency", 1)  # SAC-BC-N has no such argument
        expected = policy_frequency / (run.args["tau"] * (1 - run.args["gamma"]))
        steps, values = measured[run.path]
        (q_0, q), error = fit(steps, values, expected)
        candidates = np.geomspace(expected / 20, expected * 20, 1_000)
        best = np.argmin([fit(steps, values, t)[1] for t in candidates])
        best = round(candidates[best]) if 0 < best < 999 and len(steps) > 2 else ""
        differing = differing_settings([other for other in runs if other.script == run.script])
        changes = [f"{name} {experiment_settings(run)[name]}" for name in differing]
        name = ", ".join(
            [run.script, common.dataset_name(run), *changes, f"seed {run.args['seed']}"]
        )
        color = plt.get_cmap("viridis")(0.8 * i / max(1, len(runs) - 1))
        x = np.linspace(0, steps[-1], 200)
        ax.plot(x, q + (q_0 - q) * np.exp(-x / expected), "-", color=color)
        ax.plot(steps, values, "os^Dv"[i % 5], color=color, markersize=3, label=name)
        numbers = [f"{number:.3g}" for number in (values[-1], q_0, q, error)]
        lines.append([name, steps[-1], round(expected), best, *numbers])
    ax.set(xlabel="gradient steps", ylabel="mean of Q_min")
    ax.grid(alpha=0.3)
    ax.legend(fontsize="x-small")
    header = ["run", "steps", "T", "T of the best fit", "last value", "Q_0", "Q", "RMS error"]
    common.save(args.out, "convergence", figure, header, lines)


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
