"""What the studies share: names of runs, and writing a picture and a table."""

import csv
import sys
from pathlib import Path

import matplotlib

from tools.runs import settings

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def differing(runs):
    """Names of the settings that differ between these runs."""
    values = [settings(run) for run in runs]
    names = dict.fromkeys(name for one in values for name in one)
    return [name for name in names if len({str(one.get(name)) for one in values}) > 1]


def dataset_name(run):
    """D4RL's data and Minari's are different datasets."""
    return run.args["env_id"] + (" (Minari)" if run.metadata["source"] == "minari" else "")


def save(out, name, figure, header, rows):
    """Writes NAME.png and NAME.csv."""
    path = Path(out, name)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(f"{path}.png", dpi=100)
        with open(f"{path}.csv", "w", newline="", encoding="utf-8") as file:
            csv.writer(file, lineterminator="\n").writerows([header, *rows])
    except OSError as error:
        sys.exit(f"{out}: cannot be written ({error})")
    plt.close(figure)
    print(f"{path}.png, {path}.csv")


def subplots(rows, columns, title, width=2.2, height=2.5, **kwargs):
    size = (width * columns + 1.6, height * rows + 0.9)
    kwargs |= {"figsize": size, "squeeze": False, "layout": "constrained"}
    figure, axes = plt.subplots(rows, columns, **kwargs)
    figure.suptitle(title, fontsize="medium")
    return figure, axes
