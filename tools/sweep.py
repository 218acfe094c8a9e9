"""Many runs with one command: on this machine, on a Ray cluster, or as a list of commands.

    python -m tools.sweep td3_bc_n sac_bc_n --env-id hopper-medium-v2 --seed 1 2 3 --beta 0.01 0.03
    python -m tools.sweep td3_bc_n finetune_td3_bc_n --seed 1 2    (fine-tunes each offline run)
    python -m tools.sweep paper --ray --gpus-per-run 0.25          (a named grid, four runs per GPU)
    python -m tools.sweep paper --env-id hopper-medium-v2          (a part of it)
    python -m tools.sweep tiny --dry-run                           (prints the commands)

Scripts or named grids come first, then arguments. Every argument of the scripts can have several
values, and the runs are their product. An argument goes to those scripts that have it. Boolean
arguments are flags as in the scripts, or take values: --independent-targets true false. In a named
grid, arguments replace its values; datasets that are in the grid select a part of it.

The name of a run is made from its script and the given arguments. To resume a sweep, repeat its
command: finished runs are skipped, interrupted runs are resumed, missing ones are started. A run
that diverged (non-finite losses) is not run again: remove its directory to do so. The output of a
run is in RUNS_DIR/logs. At the end there is the table of tools.plot. The returns of all episodes of
the last evaluation are in result.json of each run.
"""

import argparse
import hashlib
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from functools import cache
from itertools import product
from pathlib import Path
from typing import NamedTuple, get_args

from tqdm import tqdm

from tools.grids import GRIDS, TINY
from tools.runs import ALGORITHMS, FINETUNE, import_script, read_runs, script_path

try:
    import fcntl
except ModuleNotFoundError:
    fcntl = None  # Windows: nothing keeps two sweeps from starting the same run

ROOT = Path(__file__).resolve().parent.parent
DONE = ("finished", "diverged")

# --- From arguments to runs ---


class Job(NamedTuple):
    name: str  # of the run directory
    script: str
    arguments: dict  # of the script
    parent: "Job | None"  # the offline run that this run fine-tunes


@cache
def script_arguments():
    """{script: {argument: type}}, without those that the sweep sets itself."""
    own = ("run_name", "runs_dir", "resume")
    types = {script: import_script(script).Args.__annotations__ for script in ALGORITHMS}
    return {s: {name: t for name, t in types[s].items() if name not in own} for s in ALGORITHMS}


def make_parser():
    types = script_arguments()
    parser = argparse.ArgumentParser(
        usage="python -m tools.sweep SCRIPTS | GRID [options] [--ARGUMENT VALUES ...]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.error = lambda message: sys.exit(f"{message} (see python -m tools.sweep --help)")
    add = parser.add_argument
    text = f"scripts ({', '.join(ALGORITHMS)}), or named grids (below)"
    add("names", nargs="+", metavar="names", choices=[*ALGORITHMS, *GRIDS], help=text)
    add("--runs-dir", default="runs", help="directory for all runs (default: runs)")
    text = "run on Ray: on this machine, or on a cluster (auto: the one that ray start has joined)"
    add("--ray", nargs="?", const="local", metavar="ADDRESS", help=text)
    text = "CPU cores and threads per run (default: 1 with --ray, otherwise all cores)"
    add("--cpus-per-run", type=int, metavar="N", help=text)
    text = "GPUs per run with --ray, 0.25 for four runs per GPU (default: 1 if there are GPUs)"
    add("--gpus-per-run", type=float, metavar="X", help=text)
    text = "print the commands of all runs that can start now, one per line"
    add("--dry-run", action="store_true", help=text)
    hidden = {"default": argparse.SUPPRESS, "help": argparse.SUPPRESS}
    for name in dict.fromkeys(name for s in ALGORITHMS for name in types[s]):
        option = name.replace("_", "-")
        kinds = [types[s][name] for s in ALGORITHMS if name in types[s]]
        # The members of int | None, and the choices of a Literal, of all scripts
        kinds = dict.fromkeys(member for kind in kinds for member in get_args(kind) or [kind])
        if bool in kinds:
            add(f"--{option}", dest=name, nargs="*", choices=["true", "false"], **hidden)
            add(f"--no-{option}", dest=name, action="store_const", const=["false"], **hidden)
        else:
            kind = next((kind for kind in (int, float) if kind in kinds), str)
            choices = [choice for choice in kinds if isinstance(choice, str)] or None
            add(f"--{option}", dest=name, nargs="+", type=kind, choices=choices, **hidden)
    parser.epilog = "named grids and their number of runs:\n"
    for name, (title, *_) in GRIDS.items():
        runs = make_jobs(make_sweeps([name], {}, parser))
        parser.epilog += f"{len(runs):6}  {name}: {title}\n"
    return parser


def given_arguments(args):
    names = set().union(*script_arguments().values())
    return {name: values or ["true"] for name, values in vars(args).items() if name in names}


def make_sweeps(names, given, parser):
    """Pairs of scripts and {argument: values}: of these scripts, or of these named grids."""
    sweeps = [(names, {})]
    if not set(names) <= set(ALGORITHMS):
        if not set(names) <= set(GRIDS):
            parser.error(f"scripts or named grids, not both: {' '.join(names)}")
        lines = [parser.parse_args(line.split()) for name in names for line in GRIDS[name][1:]]
        sweeps = [(line.names, given_arguments(line)) for line in lines]
    for name in given:
        if not any(name in script_arguments()[s] for scripts, _ in sweeps for s in scripts):
            parser.error(f"--{name.replace('_', '-')}: not an argument of these scripts")
    datasets = given.get("env_id", [])
    in_grid = {x for _, values in sweeps for x in values.get("env_id", [])}
    if datasets and set(datasets) <= in_grid:  # they select a part of the grid
        for _, values in sweeps:
            values["env_id"] = [x for x in values["env_id"] if x in datasets]
        given = {name: values for name, values in given.items() if name != "env_id"}
    return [(scripts, values | given) for scripts, values in sweeps]


def make_jobs(sweeps):
    """All runs as {name: job}. Offline runs are before those that fine-tune them."""
    jobs, types = {}, script_arguments()
    for scripts, arguments in sweeps:
        made = []
        for script in sorted(scripts, key=FINETUNE.__contains__):
            offline, is_finetune = script.removeprefix("finetune_"), script in FINETUNE
            given = {name: arguments[name] for name in arguments if name in types[script]}
            inherited, parents = [], [None]
            if is_finetune and offline in scripts and "checkpoint" not in given:
                # Arguments that both scripts have come from the offline run, the others are swept.
                inherited = [name for name in given if name in types[offline]]
                parents = [job for job in made if job.script == offline]
            elif is_finetune and "checkpoint" not in given and "env_id" not in given:
                sys.exit(f"{script} needs {offline} before it, or --checkpoint, or --env-id")
            elif "checkpoint" not in given:  # the name of a run always has dataset and seed
                given = {"env_id": [TINY]} | given | {"seed": given.get("seed", [1])}
            swept = {name: values for name, values in given.items() if name not in inherited}
            for parent, own in product(parents, product(*swept.values())):
                own = dict(zip(swept, own, strict=True))
                name = run_name(script, parent, own)
                values = {name: parent.arguments[name] for name in inherited} | own
                made.append(Job(name, script, values, parent))
        jobs |= {job.name: job for job in made}
    return jobs


def run_name(script, parent, arguments):
    """Different arguments give different names, and the same arguments the same name."""
    scratch = script in FINETUNE and not parent and "checkpoint" not in arguments
    parts = [f"finetune_{parent.name}" if parent else script]
    parts += [arguments["env_id"]] if "env_id" in arguments else []
    parts += ["scratch"] if scratch else []
    names = sorted(arguments, key=lambda name: (name == "seed", name))  # seed last
    parts += [f"{name}={arguments[name]}" for name in names if name != "env_id"]
    text = "__".join(parts)
    name = re.sub(r"[^\w.=+-]", "-", text, flags=re.ASCII)
    if name != text or len(name) > 150:
        name = f"{name[:140]}__{hashlib.sha256(text.encode()).hexdigest()[:8]}"
    return name


# --- One run: this is what Ray workers do ---


def outcome(directory):
    """The state of a run, and a message if it is finished or diverged."""
    try:
        result = json.loads(Path(directory, "result.json").read_text())
    except (OSError, ValueError):  # there is none, or it cannot be read
        result = {}
    if result.get("status") == "diverged":
        return "diverged", result["message"]
    if result.get("status") == "finished":
        text = "score {score:.1f} +/- {score_stderr:.1f}" if "score" in result else "no score"
        return "finished", text.format(**result)
    if Path(directory, "checkpoint.pt").exists():
        return "interrupted", ""
    return "without checkpoint" if Path(directory).exists() else "missing", ""


def state(directory):
    """finished, diverged, interrupted, without checkpoint or missing."""
    return outcome(directory)[0]


def make_command(job, runs_dir):
    """The command that starts this run, or resumes it from its checkpoint."""
    command, directory = ["python", script_path(job.script)], Path(runs_dir, job.name)
    if state(directory) == "interrupted":
        return [*command, "--resume", str(directory)]
    for name, value in job.arguments.items():
        option = name.replace("_", "-")
        flags = {"true": [f"--{option}"], "false": [f"--no-{option}"]}
        command += flags.get(value, [f"--{option}", str(value)])
    if job.parent:
        command += ["--checkpoint", str(Path(runs_dir, job.parent.name))]
    return [*command, "--runs-dir", runs_dir, "--run-name", job.name]


def run_job(job, runs_dir, cwd, cpus, should_stop, offline=None):
    """Starts or resumes a run and waits for its end. Returns its status and a message.

    offline is what this function returned for the offline run, if that was in this sweep.
    """
    if should_stop():
        return "stopped", ""
    os.chdir(cwd)  # a Ray worker may be in another directory
    directory, log_path = Path(runs_dir, job.name), Path(runs_dir, "logs", f"{job.name}.log")
    if job.parent:
        status = offline[0] if offline else state(Path(runs_dir, job.parent.name))
        if status != "finished":
            return "skipped", f"offline run {status}"
    with open(log_path, "a") as log:
        # The script inherits this lock with its output. Two processes never write the same run,
        # even if this worker is lost or if there is a second sweep.
        while fcntl and not should_stop():
            try:
                fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.2)
        if should_stop():
            return "stopped", ""
        command, code = make_command(job, runs_dir), 0
        if state(directory) not in DONE:  # else a second sweep has just done it
            if "--resume" not in command:
                shutil.rmtree(directory, ignore_errors=True)  # it was stopped before a checkpoint
            code = call(command, log, cpus, should_stop)
        lines = log_path.read_text(errors="replace").strip().splitlines()
    if state(directory) in DONE:
        return outcome(directory)
    if should_stop() and code in (130, 143, -signal.SIGINT, -signal.SIGTERM):
        return "stopped", ""
    return "failed", f"exit code {code}, {lines[-1]} (log: {log_path})"


def call(command, log, cpus, should_stop):
    """Runs a script to its end, or stops it. Returns its exit code."""
    print(f"$ {shlex.join(command)}", file=log, flush=True)
    command = [sys.executable, str(ROOT / command[1]), *command[2:]]
    if sys.platform == "linux":  # prctl(PR_SET_PDEATHSIG, SIGTERM): it stops with this process
        code = "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 15); "
        code += "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
        command[1:1] = ["-c", code]
    env = os.environ | {"PYTHONUNBUFFERED": "1"}  # keeps stdout and stderr in order
    env |= {"OMP_NUM_THREADS": str(cpus), "MKL_NUM_THREADS": str(cpus)} if cpus else {}
    # In a session of its own: Ctrl-C in a terminal reaches only the sweep.
    options = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log, "start_new_session": True}
    process = subprocess.Popen(command, env=env, **options)
    while process.poll() is None and not should_stop():
        time.sleep(0.1)
    process.terminate()  # has no effect if it has ended
    return process.wait()


# --- All runs ---


def run_in_order(jobs, args, report, should_stop):
    for job in jobs:
        try:
            result = run_job(job, args.runs_dir, os.getcwd(), args.cpus_per_run, should_stop)
        except Exception as error:  # for example, the disk is full
            result = "failed", str(error)
        report(job, *result)


def connect(address):
    """Starts Ray on this machine, or connects to a cluster."""
    try:
        import ray
    except ImportError:
        sys.exit("--ray needs Ray: pip install ray")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    options = {"address": address, "logging_level": "ERROR", "log_to_driver": False}
    if address == "local":
        options |= {"include_dashboard": False, "object_store_memory": 100 * 2**20}
        cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count()
        if cores < os.cpu_count():  # in a Slurm job, Ray would take all cores
            options["num_cpus"] = cores
    try:
        host, _, port = address.rpartition(":")
        if port.isdigit() and "://" not in host:  # Ray itself would try for minutes
            socket.create_connection((host, int(port)), timeout=10).close()
        ray.init(**options)
    except Exception as error:  # Ray has its own exception classes
        sys.exit(f"--ray {address}: {str(error).strip().splitlines()[0]}")


def run_on_ray(jobs, args, report, should_stop):
    import ray

    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    cpus, gpus = args.cpus_per_run or 1, args.gpus_per_run
    gpus = max(min(1, node.get("GPU", 0)) for node in nodes) if gpus is None else gpus
    if not any(cpus <= node.get("CPU", 0) and gpus <= node.get("GPU", 0) for node in nodes):
        sys.exit(f"a run with {cpus} CPUs and {gpus} GPUs does not fit on any machine")

    stop_file = Path(args.runs_dir, "logs", f"stop-{os.getpid()}-{time.time_ns()}").absolute()
    # When a worker is lost, Ray calls run_job again, and that resumes the run.
    task = ray.remote(num_cpus=cpus, num_gpus=gpus, max_retries=10)(run_job)
    tasks = {}
    for job in jobs:
        offline = [tasks[job.parent.name]] if job.parent and job.parent.name in tasks else []
        settings = args.runs_dir, os.getcwd(), cpus, stop_file.exists
        tasks[job.name] = task.remote(job, *settings, *offline)
    pending = {tasks[job.name]: job for job in jobs}
    while pending:
        done, _ = ray.wait(list(pending), timeout=0.2)
        if should_stop():
            stop_file.touch()
        for reference in done:
            try:
                result = ray.get(reference)
            except Exception as error:  # for example, the worker was lost too often
                result = "failed", str(error).strip().splitlines()[-1]
            report(pending.pop(reference), *result)
    stop_file.unlink(missing_ok=True)
    ray.shutdown()


def dry_run(jobs, runs_dir):
    if sys.platform != "win32":
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # for --dry-run | head
    waiting = Counter()
    for job in jobs:
        directory = Path(runs_dir, job.name)
        offline = state(Path(runs_dir, job.parent.name)) if job.parent else "finished"
        if offline != "finished":
            waiting[offline] += 1
        elif state(directory) == "without checkpoint":
            print(f"{directory}: no checkpoint, remove it if it is not running", file=sys.stderr)
        elif state(directory) not in DONE:
            print(shlex.join(make_command(job, runs_dir)))
    for status, count in waiting.items():
        print(f"not printed: {count} runs whose offline run is {status}", file=sys.stderr)


def main(argv=None):
    parser = make_parser()
    args = parser.parse_args(argv)
    jobs = make_jobs(make_sweeps(args.names, given_arguments(args), parser))
    if args.gpus_per_run is not None and not args.ray:
        parser.error("--gpus-per-run needs --ray")
    if args.gpus_per_run is not None and args.gpus_per_run < 0:
        parser.error("--gpus-per-run must be at least 0")
    if args.cpus_per_run is not None and args.cpus_per_run < 1:
        parser.error("--cpus-per-run must be at least 1")
    if args.dry_run:
        return dry_run(jobs.values(), args.runs_dir)

    try:
        Path(args.runs_dir, "logs").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        sys.exit(f"--runs-dir {args.runs_dir}: cannot be written ({error})")
    results, signals = {name: outcome(Path(args.runs_dir, name)) for name in jobs}, []
    to_do = [job for job in jobs.values() if results[job.name][0] not in DONE]
    print(f"{len(jobs)} runs in {args.runs_dir}, {len(jobs) - len(to_do)} already done")
    if to_do and args.ray:
        connect(args.ray)  # before the signal handlers: Ray sets its own
    bar = tqdm(total=len(jobs), initial=len(jobs) - len(to_do), unit="run", disable=None)

    def stop(number, _):
        signals.append(number)
        signal.signal(number, signal.SIG_DFL)  # a second Ctrl-C ends the sweep at once

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)

    def should_stop():  # called several times per second
        bar.refresh()
        return bool(signals)

    def report(job, status, message):
        results[job.name] = status, message
        if status != "stopped":
            tqdm.write(f"{status}: {job.name} {message}")
            bar.update()

    if to_do:
        (run_on_ray if args.ray else run_in_order)(to_do, args, report, should_stop)
    bar.close()
    counts = Counter(status for status, _ in results.values())
    print("\n" + ", ".join(f"{count} {status}" for status, count in counts.items()))
    for name, (status, message) in results.items():
        if status in ("diverged", "skipped", "failed"):
            print(f"{status}: {name} {message}")
    if signals:
        print("stopped, repeat the command to resume")
        sys.exit(128 + signals[0])
    done = [job for job in jobs.values() if results[job.name][0] in DONE]
    if done:
        from tools import plot  # takes a while: it imports Matplotlib

        runs = read_runs([Path(args.runs_dir, job.name) for job in done])
        print(f"\n{plot.table(plot.group(runs))}")
    sys.exit(1 if counts["failed"] else 0)


if __name__ == "__main__":
    main()
