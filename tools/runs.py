"""Reads run directories. Shared by the tools and the studies; the scripts do not need it."""

import contextlib
import csv
import importlib
import json
import sys
from pathlib import Path
from typing import NamedTuple

OFFLINE, FINETUNE = ("td3_bc_n", "sac_bc_n"), ("finetune_td3_bc_n", "finetune_sac_bc_n")
BASELINES = ("bc", "td3_bc", "iql", "cql", "edac", "msg")
ALGORITHMS = OFFLINE + FINETUNE + BASELINES
# Arguments that do not make another experiment
INCIDENTAL = {"seed", "run_name", "runs_dir", "resume", "checkpoint", "track", "log_frequency"}
INCIDENTAL |= {"trust_env", "cuda", "cudagraphs", "compile", "matmul_precision"}
INCIDENTAL |= {"eval_frequency", "eval_episodes"}
# Metadata that make another experiment
DATA = ("dataset", "source", "transitions", "environment")
METADATA = (*DATA, "mean_return", "ref_min_score", "ref_max_score", "comparable_with_paper")
EVALUATION = ("step", "score", "score_stderr", "score_worst", "eval_return")
COLUMNS = ("script", "env_id", "arguments", "seed", "status", *EVALUATION, "seconds")  # of a CSV


def script_path(algorithm):
    """Path of a script in the project."""
    return f"baselines/{algorithm}.py" if algorithm in BASELINES else f"{algorithm}.py"


def import_script(algorithm):
    return importlib.import_module(script_path(algorithm).removesuffix(".py").replace("/", "."))


class Run(NamedTuple):
    path: Path
    script: str
    args: dict
    metadata: dict
    history: list  # one dict per evaluation: step and, if the agent was played, score, ...
    steps_per_second: float
    status: str  # running (also if it was stopped), finished, or diverged: losses not finite


def read_run(path):
    """A run, finished or not, from its result.json. Raises ValueError."""
    file = Path(path, "result.json")
    try:
        result = json.loads(file.read_text())
        if result["algorithm"] not in ALGORITHMS:
            raise ValueError(f"it is of {result['algorithm']}.py")
        return Run(Path(path), result["algorithm"], *(result[key] for key in Run._fields[2:]))
    except (KeyError, TypeError):
        raise ValueError(f"{file}: written by another version of this project") from None
    except (OSError, ValueError) as error:
        raise ValueError(f"{file}: cannot be read ({error})") from None


def read_runs(paths):
    """All runs in these CSV files and at or below these directories, oldest first.

    Unreadable directories are reported.
    """
    files, runs = set(), []
    for path in map(Path, paths):
        if path.suffix == ".csv" and path.is_file():
            runs += read_csv(path)
        elif path.is_dir():
            files |= set(path.resolve().rglob("result.json"))
        else:
            sys.exit(f"{path}: no such directory, and no CSV file")
    for file in sorted(files, key=lambda file: (file.stat().st_mtime, file)):
        try:
            runs.append(read_run(file.parent))
        except ValueError as error:
            print(f"left out: {error}", file=sys.stderr)
    if not runs:
        sys.exit(f"no runs in {', '.join(map(str, paths))}")
    return runs


def default_args(script, env_id):
    """Default arguments of a script for a task."""
    script = import_script(script)
    return vars(script.Args(**{"env_id": env_id, **script.task_defaults(env_id)}))


def write_csv(runs, path):
    """One row per evaluation. Arguments are those that differ from the defaults of the task."""
    with open(path, "w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow([*COLUMNS, *METADATA])
        for run in runs:
            env_id, seed = run.args["env_id"], run.args["seed"]
            arguments, defaults = experiment_settings(run), default_args(run.script, env_id)
            for name in arguments.keys() & (*DATA, *defaults):
                if name in DATA or arguments[name] == defaults[name]:
                    del arguments[name]
            row = [run.script, env_id, json.dumps(arguments, sort_keys=True), seed, run.status]
            metadata = run.metadata | {"mean_return": dataset_return(run)}
            metadata = [json.dumps(metadata.get(key)) for key in METADATA]
            for entry in run.history:
                values = [entry.get(key, "") for key in EVALUATION]
                seconds = round(entry["step"] / run.steps_per_second, 1)
                writer.writerow([*row, *values, seconds, *metadata])


def read_csv(path):
    """The runs of a file by write_csv."""
    runs = {}
    try:
        with open(path, newline="", encoding="utf-8") as file:
            for row in csv.DictReader(file):
                script, env_id, arguments, seed = (row[name] for name in COLUMNS[:4])
                key = tuple(row[name] for name in (*COLUMNS[:4], *METADATA))
                entry = {name: float(row[name]) for name in EVALUATION if row[name]}
                entry["step"] = int(entry["step"])
                if script not in ALGORITHMS:
                    raise ValueError(f"it is of {script}.py")
                if key not in runs:
                    args = default_args(script, env_id) | json.loads(arguments)
                    args["seed"] = int(seed)
                    metadata = {name: json.loads(row[name]) for name in METADATA}
                    runs[key] = Run(Path(path), script, args, metadata, [], 0.0, row["status"])
                runs[key].history.append(entry)
                seconds = float(row["seconds"] or "nan")  # it may be unknown
                speed = entry["step"] / seconds if seconds else 0.0
                runs[key] = runs[key]._replace(steps_per_second=speed)
    except (OSError, ValueError, KeyError, TypeError) as error:
        sys.exit(f"{path}: not a CSV file of tools.plot ({error!r})")
    return list(runs.values())


def experiment_settings(run):
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
            args = read_run(directory).args
            return values | {
                f"offline {name}": args[name]
                for name in args
                if name not in INCIDENTAL and name not in run.args
            }
    return values


def differing_settings(runs):
    """Names of the settings that differ between these runs."""
    values = [experiment_settings(run) for run in runs]
    names = dict.fromkeys(name for one in values for name in one)
    return [name for name in names if len({str(one.get(name)) for one in values}) > 1]


def load_checkpoint(path):
    """checkpoint.pt of a run directory, as a dict. Raises ValueError. No code is executed."""
    import torch

    from td3_bc_n import CHECKPOINT_FORMAT  # the same in all scripts

    path = Path(path, "checkpoint.pt") if Path(path).is_dir() else Path(path)
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
        if checkpoint.get("format") != CHECKPOINT_FORMAT:
            raise ValueError("written by another version of this project")
        if checkpoint["algorithm"] not in ALGORITHMS:
            raise ValueError(f"it is of {checkpoint['algorithm']}.py")
    except Exception as error:  # torch.load raises many kinds of exceptions
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(f"{path}: not a checkpoint of this project ({reason})") from None
    return checkpoint


def load_agent(path):
    """The script of a run as a module, its Args and its Agent."""
    checkpoint = load_checkpoint(path)
    script = import_script(checkpoint["algorithm"])
    args, weights = script.Args(**checkpoint["args"]), checkpoint["agent"]
    agent = script.Agent(len(weights["obs_mean"]), len(weights["actor.mean.bias"]), args)
    agent.load_state_dict(weights)
    return script, args, agent


def load_data(script, args):
    """Dataset, metadata and make_env (or None) of a run. From scratch, the dataset is empty."""
    if script.ALGORITHM in FINETUNE and not args.checkpoint:
        return script.load_env(args.env_id)
    return script.load_data(args.env_id, args.trust_env)


def load_run(path, needs_env=True):
    """Script, args, agent, dataset, metadata and make_env of a run. Exits with one line."""
    try:
        old = load_checkpoint(path)["metadata"]
        script, args, agent = load_agent(path)
    except ValueError as error:
        sys.exit(str(error))
    except (KeyError, TypeError) as error:
        sys.exit(f"{path}: written by another version of this project ({error!r})")
    dataset, metadata, make_env = load_data(script, args)
    for key in DATA[1:]:  # they change if D4RL's file is not there any more
        if metadata[key] != old[key]:
            sys.exit(f"{path}: {key} was {old[key]} in training, is now {metadata[key]}")
    if needs_env and make_env is None:
        sys.exit(f"{path}: the run has no environment to play in")
    return script, args, agent, dataset, metadata, make_env


def dataset_return(run):
    """Mean return of the dataset. None if it is not known, or of other rewards than evaluation."""
    same_rewards = run.metadata.get("train_env_kwargs", {}).get("eval_env", True)  # not in OGBench
    return run.metadata.get("mean_return") if same_rewards else None


def normalized_score(episode_return, metadata):
    low, high = metadata["ref_min_score"], metadata["ref_max_score"]
    return 100 * (episode_return - low) / (high - low)
