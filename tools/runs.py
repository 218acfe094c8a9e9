"""Reads run directories. Shared by the tools and the studies; the scripts do not need it."""

import contextlib
import importlib
import json
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

SCRIPTS = ("td3_bc_n", "sac_bc_n", "finetune_td3_bc_n", "finetune_sac_bc_n")
# Arguments that do not, and metadata that do, make another experiment.
INCIDENTAL = {"seed", "run_name", "runs_dir", "resume", "checkpoint", "track", "log_frequency"}
INCIDENTAL |= {"cuda", "cudagraphs", "compile", "matmul_precision"}
INCIDENTAL |= {"eval_frequency", "eval_episodes"}
DATA = ("dataset", "source", "transitions", "environment")


class Run(NamedTuple):
    path: Path
    script: str
    args: dict
    metadata: dict
    history: list  # one dict per evaluation: step, score, score_stderr, score_worst
    returns: list | None  # of the last evaluation's episodes; None if the run is not finished
    steps_per_second: float | None
    diverged: bool  # stopped because of non-finite losses


def load_checkpoint(path):
    """checkpoint.pt of a run directory, as a dict. Raises ValueError. No code is executed."""
    path = Path(path, "checkpoint.pt") if Path(path).is_dir() else Path(path)
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
        if checkpoint["script"] not in SCRIPTS:
            raise ValueError(f"it is of {checkpoint['script']}.py")
    except Exception as error:  # torch.load raises many kinds of exceptions
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(f"{path}: not a checkpoint of this project ({reason})") from None
    return checkpoint


def read_run(path):
    """A run, finished or not. Raises ValueError if its checkpoint cannot be read."""
    path = Path(path)
    checkpoint = load_checkpoint(path)
    result = {}
    if (path / "result.json").exists():
        result = json.loads((path / "result.json").read_text())
        steps = checkpoint["step"], checkpoint["history"][-1]["step"]
        if result["history"] != checkpoint["history"] or steps[0] != steps[1]:
            result = {}  # the run was resumed with more steps
    return Run(
        path,
        checkpoint["script"],
        checkpoint["args"],
        checkpoint["metadata"],
        checkpoint["history"],
        result.get("returns"),
        result.get("steps_per_second"),
        not result and (path / "diverged").exists(),  # a diverged run may be resumed and finish
    )


def read_runs(paths):
    """All runs at or below these directories, oldest first. Unreadable ones are reported."""
    files, diverged, runs = set(), set(), []
    for path in map(Path, paths):
        if not path.is_dir():
            sys.exit(f"{path}: no such directory")
        files |= set(path.resolve().rglob("checkpoint.pt"))
        diverged |= {file.parent for file in path.resolve().rglob("diverged")}
    for path in sorted(diverged - {file.parent for file in files}):
        print(f"left out: {path} (diverged before its first checkpoint)", file=sys.stderr)
    for file in sorted(files, key=lambda file: (file.stat().st_mtime, file)):
        try:
            runs.append(read_run(file.parent))
        except (KeyError, ValueError) as error:
            print(f"left out: {file.parent} ({error})", file=sys.stderr)
    if not runs:
        sys.exit(f"no runs in {', '.join(map(str, paths))}")
    return runs


def settings(run):
    """What makes an experiment: arguments, data and, of fine-tuning, arguments of the offline run.

    The arguments of the offline run are known if it is beside this run or at its old place.
    """
    values = {name: run.args[name] for name in run.args if name not in INCIDENTAL}
    values |= {key: run.metadata.get(key) for key in DATA}
    if not run.args.get("checkpoint"):
        return values
    offline = Path(run.args["checkpoint"])
    offline = offline.parent if offline.suffix == ".pt" else offline
    for directory in (run.path.parent / offline.name, offline):
        with contextlib.suppress(ValueError):  # it is not there, or cannot be read
            args = load_checkpoint(directory)["args"]
            return values | {
                f"offline {name}": args[name]
                for name in args
                if name not in INCIDENTAL and name not in run.args
            }
    return values


def load_agent(path):
    """The script of a run as a module, its Args and its Agent."""
    checkpoint = load_checkpoint(path)
    script = importlib.import_module(checkpoint["script"])
    args, weights = script.Args(**checkpoint["args"]), checkpoint["agent"]
    agent = script.Agent(len(weights["obs_mean"]), len(weights["actor.mean.bias"]), args)
    agent.load_state_dict(weights)
    return script, args, agent


def load_data(script, args):
    """Dataset, metadata and make_env of a run. From scratch, the dataset is empty."""
    if script.__name__.startswith("finetune") and not args.checkpoint:
        return script.load_env(args.env_id)
    return script.load_dataset(args.env_id)


def load_run(path):
    """Script, args, agent, dataset, metadata and make_env of a run. Exits with one line."""
    try:
        old = load_checkpoint(path)["metadata"]
        script, args, agent = load_agent(path)
    except (KeyError, TypeError, ValueError) as error:
        sys.exit(str(error))
    dataset, metadata, make_env = load_data(script, args)
    for key in DATA[1:]:  # they change if D4RL's file is not there any more
        if metadata[key] != old[key]:
            sys.exit(f"{path}: {key} was {old[key]} in training, is now {metadata[key]}")
    return script, args, agent, dataset, metadata, make_env


def normalized_scores(returns, metadata):
    low, high = metadata["ref_min_score"], metadata["ref_max_score"]
    return 100 * (np.asarray(returns) - low) / (high - low)
