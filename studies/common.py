"""What the studies share: the name of a dataset, and writing a picture and a table."""

import csv
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt


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
