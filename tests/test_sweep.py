"""tools.sweep: names, grids, and real runs in order and on Ray, killed and stopped on the way."""

import fcntl
import importlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from conftest import run_script

import d4rl_tasks
from tools import paper, sweep

needs_ray = pytest.mark.skipif(find_spec("ray") is None, reason="pip install ray")
FOUR = ["td3_bc_n", "sac_bc_n", "--seed", "1", "2", "--cpus-per-run", "1"]
FOUR += ["--gradient-steps", "60", "--eval-frequency", "5", "--eval-episodes", "2"]
FOUR += ["--num-critics", "2", "--batch-size", "16"]


@pytest.fixture(autouse=True)
def signal_handlers():
    numbers = signal.SIGINT, signal.SIGTERM, signal.SIGPIPE
    handlers = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, handlers, strict=True):
        signal.signal(number, handler)


@pytest.fixture(scope="session")
def four_runs(tmp_path_factory):
    """Four finished runs, one after another. The workers of pytest-xdist share them."""
    shared = tmp_path_factory.getbasetemp()
    shared = shared.parent if "PYTEST_XDIST_WORKER" in os.environ else shared
    with open(shared / "four_runs.lock", "w") as lock, pytest.MonkeyPatch.context() as patch:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (shared / "four_runs").exists():
            patch.setattr(sweep, "call", call_here)
            assert run_sweep(*FOUR, "--runs-dir", shared / "four_runs") == 0
    return shared / "four_runs"


def call_here(command, log, *_):
    """sweep.call without another process, which would import torch again."""
    print(f"$ {shlex.join(command)}", file=log, flush=True)
    process = run_script(command[1].removesuffix(".py"), *command[2:])
    log.write(process.stdout + process.stderr)
    log.flush()
    return process.returncode


def run_sweep(*arguments):
    """The exit code."""
    with pytest.raises(SystemExit) as exit_:
        sweep.main(list(map(str, arguments)))
    return exit_.value.code


def change_result(path, **changes):
    file = Path(path, "result.json")
    result = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps(result | changes))


def jobs_of(*arguments):
    parser = sweep.make_parser()
    args = parser.parse_args(list(map(str, arguments)))
    return sweep.make_jobs(sweep.make_sweeps(args.names, sweep.given_arguments(args), parser))


def wait_for(condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def run_dirs(runs_dir):
    return sorted(
        path for path in Path(runs_dir).iterdir() if path.is_dir() and path.name != "logs"
    )


def starts(runs_dir, name):
    """The commands that were executed for this run, from its log."""
    lines = Path(runs_dir, "logs", f"{name}.log").read_text().splitlines()
    return [line for line in lines if line.startswith("$ ")]


def assert_same_results(runs_dir, expected_dir):
    for path in run_dirs(runs_dir):
        assert (path / "result.json").exists()
        one, other = (
            torch.load(directory / path.name / "checkpoint.pt", weights_only=True)
            for directory in (Path(runs_dir), Path(expected_dir))
        )
        assert one["step"] == other["step"] == 60 and one["history"] == other["history"]
        assert torch.equal(one["rng_state"], other["rng_state"])
        for key, value in other["agent"].items():
            assert torch.equal(one["agent"][key], value), (path.name, key)


def running_scripts(runs_dir):
    """{pid: (run, parent's pid)} of the scripts that write to this directory."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_text().rstrip("\0").split("\0")
            parent = int((process / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:  # it has ended
            continue
        if str(runs_dir) in command and "--run-name" in command and "-c" not in command:
            found[int(process.name)] = command[command.index("--run-name") + 1], parent
        elif "--resume" in command and command[-1].startswith(f"{runs_dir}/"):
            found[int(process.name)] = Path(command[-1]).name, parent
    # A child of a script has the same command until it executes another one.
    return {pid: (name, parent) for pid, (name, parent) in found.items() if parent not in found}


class Watch(threading.Thread):
    """While a sweep runs: counts its scripts, and acts once, when a run has a new checkpoint."""

    def __init__(self, runs_dir, act):
        super().__init__(daemon=True)
        self.runs_dir, self.act, self.most, self.acted_on = runs_dir, act, {}, None
        self.over, self.start_time = threading.Event(), time.time()

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *_):
        self.over.set()
        self.join()

    def run(self):
        while not self.over.wait(0.02):
            scripts = running_scripts(self.runs_dir)
            self.most = max(self.most, scripts, key=len)
            for pid, (name, parent) in scripts.items():
                path = Path(self.runs_dir, name, "checkpoint.pt")
                new = path.exists() and path.stat().st_mtime > self.start_time
                if new and not self.acted_on:
                    self.acted_on = name
                    self.act(pid, parent)


@pytest.mark.slow
@needs_ray
def test_runs_on_ray_are_the_same_even_if_a_worker_is_killed(four_runs, tmp_path, monkeypatch):
    """Half a GPU per run: two of the four runs at a time. (Ray only counts the GPU.)"""
    import ray

    options = {"num_cpus": 4, "num_gpus": 1, "include_dashboard": False, "log_to_driver": False}
    monkeypatch.setattr(sweep, "connect", lambda _: ray.init(**options, logging_level="ERROR"))
    dead_after = []

    def kill_worker(pid, worker):
        os.kill(worker, signal.SIGKILL)
        start = time.monotonic()
        while Path(f"/proc/{pid}").exists() and time.monotonic() < start + 30:
            time.sleep(0.01)
        dead_after.append(time.monotonic() - start)

    with Watch(tmp_path, kill_worker) as watch:
        assert run_sweep(*FOUR, "--runs-dir", tmp_path, "--ray", "--gpus-per-run", 0.5) == 0
    assert len(watch.most) == 2, watch.most
    assert dead_after[0] < 30  # the script of the killed worker does not continue
    assert_same_results(tmp_path, four_runs)
    assert len(run_dirs(tmp_path)) == 4
    for path in run_dirs(tmp_path):
        commands = starts(tmp_path, path.name)
        assert len(commands) == 1 + (path.name == watch.acted_on)
    first, second = starts(tmp_path, watch.acted_on)
    assert "--run-name" in first and f"--resume {tmp_path / watch.acted_on}" in second


@pytest.mark.slow
@needs_ray
def test_a_stopped_sweep_is_resumed_by_the_same_command(four_runs, tmp_path, capsys):
    two = [*FOUR, "--seed", "1", "--runs-dir", str(tmp_path)]
    (tmp_path / "sac_bc_n__tiny-maze2d-umaze-v0").mkdir()  # not a run of this sweep
    (tmp_path / next(iter(jobs_of(*two)))).mkdir()  # it was stopped before its first checkpoint

    with Watch(tmp_path, lambda pid, parent: os.kill(os.getpid(), signal.SIGTERM)) as watch:
        assert run_sweep(*two, "--ray") == 143
    assert not running_scripts(tmp_path) and not list(tmp_path.glob("logs/stop*"))
    assert "repeat the command to resume" in capsys.readouterr().out
    assert sweep.state(tmp_path / watch.acted_on) == "interrupted"
    sweep.main([*two, "--dry-run"])
    resume = f"--resume {tmp_path / watch.acted_on}"
    assert resume in capsys.readouterr().out

    with Watch(tmp_path, lambda pid, parent: os.kill(os.getpid(), signal.SIGINT)):
        assert run_sweep(*two) == 130
    assert not running_scripts(tmp_path)

    assert run_sweep(*two) == 0
    (tmp_path / "sac_bc_n__tiny-maze2d-umaze-v0").rmdir()  # it is still there
    assert_same_results(tmp_path, four_runs)
    assert resume in starts(tmp_path, watch.acted_on)[1]


def test_a_run_that_was_killed_before_its_last_result_is_resumed(four_runs, tmp_path, monkeypatch):
    (job,) = jobs_of("td3_bc_n", *FOUR[2:], "--seed", "1").values()
    path = Path(shutil.copytree(four_runs / job.name, tmp_path / job.name))
    expected = json.loads((path / "result.json").read_text())
    change_result(path, status="running", step=55, history=expected["history"][:-1], returns=[1.0])
    (tmp_path / "logs").mkdir()
    commands = []

    def call(command, *arguments):
        commands.append(command)
        return call_here(command, *arguments)

    monkeypatch.setattr(sweep, "call", call)
    status, message = sweep.run_job(job, str(tmp_path), ".", 1, lambda: False)
    assert status == "finished" and message.startswith("score ")
    assert len(commands) == 1 and commands[0][2:] == ["--resume", str(path)]
    expected["args"]["resume"] = str(path)
    assert json.loads((path / "result.json").read_text()) == expected


def test_runs_that_were_never_evaluated_are_finished(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sweep, "call", call_here)
    arguments = ["td3_bc_n", "--gradient-steps", 2, "--num-critics", 2, "--eval-episodes", 0, 1]
    arguments += ["--runs-dir", tmp_path]
    unplayed, played = jobs_of(*arguments[:-2])
    for _ in range(2):
        assert run_sweep(*arguments) == 0
        output = capsys.readouterr()
        assert f"left out: {tmp_path / unplayed} (never evaluated" in output.err
        assert "| td3_bc_n, tiny-maze2d-umaze-v0 | 1 |" in output.out
    assert "2 already done" in output.out
    assert sweep.outcome(tmp_path / unplayed) == ("finished", "no score")
    assert sweep.outcome(tmp_path / played)[1].startswith("score ")


def test_repeating_a_finished_sweep_runs_nothing(four_runs, monkeypatch, capsys):
    monkeypatch.setattr(sweep, "call", None)  # a script cannot be started
    monkeypatch.setitem(sys.modules, "ray", None)  # and Ray is not installed
    reordered = ["sac_bc_n", "td3_bc_n", *FOUR[2:], "--runs-dir", four_runs]
    assert run_sweep(*reordered) == run_sweep(*reordered, "--ray") == 0
    output = capsys.readouterr().out
    assert "4 runs" in output and "4 already done" in output
    assert "| sac_bc_n, tiny-maze2d-umaze-v0 | 2 |" in output  # two seeds
    assert run_sweep(*reordered, "--ray", "--seed", 3) == "--ray needs Ray: pip install ray"


@pytest.mark.slow
@needs_ray
def test_failed_and_diverged_runs_do_not_stop_the_others(tmp_path, monkeypatch, capsys):
    flags = "--gradient-steps 4 --eval-frequency 2 --env-steps 4 --learning-starts 10"
    flags += " --eval-episodes 1 --num-critics 2 --batch-size 16"
    lines = [
        f"td3_bc_n --learning-rate 1e9 {flags.replace(' --env-steps 4 --learning-starts 10', '')}",
        f"td3_bc_n finetune_td3_bc_n --env-id no-such-v0 tiny-maze2d-umaze-v0 {flags}",
    ]
    monkeypatch.setitem(sweep.GRIDS, "mixed", ("for this test", *lines))
    diverged, failed, finished, skipped, fine_tuned = jobs_of("mixed")
    for arguments in (["--ray"], []):  # a failed run is tried again, the others are not
        if not arguments:
            monkeypatch.setattr(sweep, "call", call_here)
        assert run_sweep("mixed", "--runs-dir", tmp_path, *arguments) == 1
        output = capsys.readouterr().out
        for name in (finished, fine_tuned):  # a line when a run ends, with its score
            assert (f"\nfinished: {name} score " in output) == bool(arguments)
        assert f"skipped: {skipped} offline run" in output
        assert (
            f"failed: {failed} exit code 1, no-such-v0: " in output
            and "not a D4RL dataset" in output
        )
        assert f"(log: {tmp_path}/logs/{failed}.log)" in output
        assert f"diverged: {diverged} step 2: " in output and "not finite" in output
        for status in ("2 finished", "1 diverged", "1 failed", "1 skipped"):
            assert status in output
    runs = [diverged, failed, finished, fine_tuned]
    assert [len(starts(tmp_path, name)) for name in runs] == [1, 2, 1, 1]

    checkpoint = torch.load(tmp_path / fine_tuned / "checkpoint.pt", weights_only=True)
    assert checkpoint["args"]["checkpoint"] == str(tmp_path / finished)


def test_a_script_has_its_threads_and_ends_with_its_parent(tmp_path, monkeypatch):
    """It saves and stops also if the sweep or a Ray worker is killed. Its log is unbuffered."""
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    code = "import os, time; print(os.environ['OMP_NUM_THREADS'], os.getpid()); time.sleep(60)"
    (tmp_path / "script.py").write_text(code)
    parent = "import sys; from tools import sweep; log = open(sys.argv[2], 'w'); "
    parent += "sweep.call(['python', sys.argv[1]], log, 3, lambda: False)"
    script, log = tmp_path / "script.py", tmp_path / "log"
    process = subprocess.Popen([sys.executable, "-c", parent, script, log], cwd=sweep.ROOT)
    wait_for(lambda: log.exists() and len(log.read_text().splitlines()) == 2)
    threads, pid = map(int, log.read_text().splitlines()[1].split())
    assert threads == 3
    process.kill()
    process.wait()
    wait_for(lambda: not Path(f"/proc/{pid}").exists())


def test_an_error_of_one_run_does_not_stop_the_others(tmp_path, monkeypatch, capsys):
    def run_job(job, *_):
        if job.arguments["seed"] == 1:
            raise OSError("no locks available")
        return "finished", "score 1"

    monkeypatch.setattr(sweep, "run_job", run_job)
    monkeypatch.setattr(sweep, "read_runs", lambda _: [])  # nothing was run
    assert run_sweep("td3_bc_n", "--seed", 1, 2, "--runs-dir", tmp_path) == 1
    output = capsys.readouterr().out
    assert "failed: td3_bc_n__tiny-maze2d-umaze-v0__seed=1 no locks available" in output
    assert "1 failed, 1 finished" in output


@pytest.mark.slow
@needs_ray
def test_a_run_that_fits_on_no_machine_is_refused(tmp_path):
    import ray

    for request in (["--cpus-per-run", 9999], ["--gpus-per-run", 64]):
        message = run_sweep("td3_bc_n", "--ray", *request, "--runs-dir", tmp_path)
        assert "does not fit on any machine" in message
        ray.shutdown()


def test_the_state_of_a_run_is_in_its_result(tmp_path):
    assert sweep.outcome(tmp_path / "none") == ("missing", "")
    assert sweep.outcome(tmp_path) == ("without checkpoint", "")
    change_result(tmp_path, status="running")  # online, it may be before the first checkpoint
    assert sweep.outcome(tmp_path) == ("without checkpoint", "")
    (tmp_path / "checkpoint.pt").touch()
    assert sweep.outcome(tmp_path) == ("interrupted", "")
    change_result(tmp_path, status="diverged", message="step 2: not finite")
    assert sweep.outcome(tmp_path) == ("diverged", "step 2: not finite")
    change_result(tmp_path, status="finished", score=1.25, score_stderr=0.5)
    assert sweep.outcome(tmp_path) == ("finished", "score 1.2 +/- 0.5")
    for text in ('{"score": 1.0}', "{"):  # of another version, or broken
        (tmp_path / "result.json").write_text(text)
        assert sweep.outcome(tmp_path) == ("interrupted", "")


def test_fine_tuning_of_diverged_and_missing_runs_in_a_dry_run(tmp_path, capsys):
    arguments = ["td3_bc_n", "finetune_td3_bc_n", "--seed", "1", "2"]
    first, second, *_ = jobs_of(*arguments)
    (tmp_path / first).mkdir()
    change_result(tmp_path / first, status="diverged", message="")
    sweep.main([*arguments, "--dry-run", "--runs-dir", str(tmp_path)])
    output = capsys.readouterr()
    assert output.out.count("\n") == 1 and second in output.out
    assert "not printed: 1 runs whose offline run is missing" in output.err
    assert "not printed: 1 runs whose offline run is diverged" in output.err


def test_a_run_that_another_process_writes_is_not_started(tmp_path, monkeypatch):
    monkeypatch.setattr(sweep, "call", None)
    (job,) = jobs_of("td3_bc_n").values()
    (tmp_path / "logs").mkdir()
    (tmp_path / job.name).mkdir()
    answers = [True, False, False, False]
    with open(tmp_path / "logs" / f"{job.name}.log", "w") as log:
        fcntl.flock(log, fcntl.LOCK_EX)
        result = sweep.run_job(job, str(tmp_path), ".", 1, lambda: not answers or answers.pop())
    assert result == ("stopped", "") and (tmp_path / job.name).exists()


def test_a_run_starts_without_locks_where_there_are_none(tmp_path, monkeypatch):
    """On Windows."""
    code = "import sys; sys.modules['fcntl'] = None; import tools.sweep"
    subprocess.run([sys.executable, "-c", code], cwd=sweep.ROOT, check=True)
    monkeypatch.setattr(sweep, "fcntl", None)
    (job,) = jobs_of("td3_bc_n").values()
    (tmp_path / "logs").mkdir()

    def call(*_):
        (tmp_path / job.name).mkdir()
        change_result(tmp_path / job.name, status="finished")
        return 0

    monkeypatch.setattr(sweep, "call", call)
    result = sweep.run_job(job, str(tmp_path), ".", 1, lambda: False)
    assert result == ("finished", "no score")


@pytest.mark.parametrize("code", [143, -15, 130, 1])
def test_a_signal_to_sweep_and_script_stops_the_run(code, tmp_path, monkeypatch):
    """Slurm signals all processes of a job. Without a signal to the sweep, the run has failed."""
    signals = []
    monkeypatch.setattr(sweep, "call", lambda *_: code)
    (job,) = jobs_of("td3_bc_n").values()
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / f"{job.name}.log").write_text("last words\n")
    status, message = sweep.run_job(job, str(tmp_path), ".", 1, lambda: bool(signals))
    assert status == "failed" and f"exit code {code}, last words" in message
    monkeypatch.setattr(sweep, "call", lambda *_: signals.append(signal.SIGTERM) or code)
    status, _ = sweep.run_job(job, str(tmp_path), ".", 1, lambda: bool(signals))
    assert status == ("failed" if code == 1 else "stopped")


GRIDS = {"paper": 230, "paper-adroit": 40, "paper-variable-beta": 120, "paper-finetune": 460}
GRIDS |= {"paper-ablations": 450, "paper-n-beta": 300}
GRIDS |= {"paper-baselines": 620, "tiny-baselines": 110}
GRIDS |= {"tiny": 32}


def test_named_grids_have_the_runs_of_the_paper(capsys):
    jobs = {name: jobs_of(name) for name in sweep.GRIDS}
    assert {name: len(members) for name, members in jobs.items()} == GRIDS
    with pytest.raises(SystemExit):
        sweep.main(["--help"])
    output = capsys.readouterr().out
    assert all(f"{count}  {name}: " in output for name, count in GRIDS.items())

    env_ids = {job.arguments["env_id"] for members in jobs.values() for job in members.values()}
    assert env_ids <= set(d4rl_tasks.TASKS)
    assert len({job.arguments["env_id"] for job in jobs["paper"].values()}) == 23
    assert len({job.arguments["env_id"] for job in jobs["paper-adroit"].values()}) == 8
    assert len(jobs["paper-variable-beta"].keys() - jobs["paper"].keys()) == 10 * 5
    assert jobs["paper"].keys() < jobs["paper-finetune"].keys()
    for job in jobs["paper-finetune"].values():
        assert (job.parent is None) == (job.script in ("td3_bc_n", "sac_bc_n"))
        assert job.parent is None or job.parent.name in jobs["paper"]
    compared = {(job.script, job.arguments["env_id"]) for job in jobs["paper-baselines"].values()}
    for method in ("td3_bc", "edac", "msg"):
        assert {name for script, name in compared if script == method} == set(paper.SCORES[method])
    assert {name for script, name in compared if script == "sac_bc_n"} == set(paper.SCORES["sac_n"])
    scratch = jobs_of("finetune_td3_bc_n", "finetune_sac_bc_n", "--env-id", "Hopper-v5")
    assert all("__scratch__" in name and job.parent is None for name, job in scratch.items())


def test_named_grids_have_the_values_of_the_paper():
    best = {}  # Table "allowing beta to vary": where it differs from the beta of the task
    for job in jobs_of("paper-variable-beta").values():
        if "beta" in job.arguments:
            best[job.script, job.arguments["env_id"].removesuffix("-v2")] = job.arguments["beta"]
    assert best == {
        ("td3_bc_n", "halfcheetah-medium"): 0,
        ("td3_bc_n", "halfcheetah-medium-replay"): 0,
        ("td3_bc_n", "hopper-medium"): 0.01,
        ("td3_bc_n", "hopper-medium-replay"): 0.01,
        ("td3_bc_n", "walker2d-medium"): 0.01,
        ("td3_bc_n", "walker2d-medium-expert"): 0,
        ("sac_bc_n", "hopper-medium-replay"): 0,
        ("sac_bc_n", "walker2d-medium"): 0.001,
        ("sac_bc_n", "walker2d-medium-replay"): 0,
        ("sac_bc_n", "walker2d-medium-expert"): 0.001,
    }

    def changes(grid):
        """{(argument, value): tasks}, of arguments other than dataset and seed."""
        found = {}
        for job in jobs_of(grid).values():
            for item in job.arguments.items():
                if item[0] not in ("env_id", "seed"):
                    found.setdefault(item, set()).add(job.arguments["env_id"].split("-")[0])
        return found

    locomotion = {"halfcheetah", "hopper", "walker2d"}
    assert changes("paper-ablations") == {
        ("beta", 0): locomotion,
        ("num_critics", 2): locomotion,
        ("bc_inflation", 1): locomotion,
        ("independent_targets", "false"): {"antmaze", "pen"},
        ("critic_init", "torch"): {*locomotion, "maze2d", "antmaze", "pen"},
    }
    assert {value for name, value in changes("paper-n-beta") if name == "num_critics"} == {
        *(2, 5, 10, 20, 50)
    }


def test_arguments_select_or_replace_values_of_a_grid():
    assert len(jobs_of("paper", "--env-id", "hopper-medium-v2", "--seed", "7")) == 2
    betas = jobs_of("paper-variable-beta", "--env-id", "hopper-medium-v2", "--seed", "1")
    assert [job.arguments.get("beta") for job in betas.values()] == [0.01, None]
    other = jobs_of("paper-n-beta", "--env-id", "walker2d-medium-v2")
    assert len(other) == 300 and all("walker2d" in name for name in other)
    pairs = jobs_of("td3_bc_n", "finetune_td3_bc_n", "--beta", 1, 2, "--beta-end", 3, 4, 5)
    scripts = [job.script for job in pairs.values()]
    assert scripts == ["td3_bc_n"] * 2 + ["finetune_td3_bc_n"] * 6
    assert len(jobs_of("td3_bc_n", "sac_bc_n", "--policy-noise", "0.1", "0.2")) == 3
    transforms = ["raw", "minus_one", "standardize"]  # only IQL has the second
    given = jobs_of("iql", "--reward-transform", *transforms, "--lr-decay-steps", 7).values()
    assert [job.arguments["reward_transform"] for job in given] == transforms


def test_a_name_belongs_to_one_run():
    (name,) = jobs_of("td3_bc_n")
    assert name == "td3_bc_n__tiny-maze2d-umaze-v0__seed=1"
    assert importlib.import_module("td3_bc_n").Args.env_id == sweep.TINY
    same = [
        jobs_of("td3_bc_n", "--beta", "0.10", "--num-critics", "5"),
        jobs_of("td3_bc_n", "--num-critics", "5", "--beta", "1e-1", "--seed", "1"),
    ]
    assert same[0].keys() == same[1].keys()
    minari = jobs_of(
        "td3_bc_n", "--env-id", "a/b-v0", "a,b-v0", "a-b-v0", "a" * 300 + "x", "a" * 300
    )
    assert len(minari) == 5
    assert all(len(name) < 160 and not set(name) & set("/, ") for name in minari)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("td3_bc_n --betta 1", "unrecognized arguments: --betta 1"),
        ("td3_bc_n --bc-form mse", "--bc-form: not an argument of these scripts"),
        ("td3_bc_n --num-critics 2.5", "--num-critics: invalid int value: '2.5'"),
        ("td3_bc_n --critic-init keras", "invalid choice: 'keras'"),
        ("iql --lr-decay-steps abc", "--lr-decay-steps: invalid int value: 'abc'"),
        ("dqn", "invalid choice: 'dqn'"),
        ("paper td3_bc_n", "scripts or named grids, not both"),
        ("finetune_td3_bc_n", "needs td3_bc_n before it, or --checkpoint, or --env-id"),
        ("td3_bc_n --gpus-per-run 0.5", "--gpus-per-run needs --ray"),
        ("td3_bc_n --cpus-per-run 0", "--cpus-per-run must be at least 1"),
        ("td3_bc_n --runs-dir README.md", "--runs-dir README.md: cannot be written"),
    ],
)
def test_mistakes_are_explained_in_one_line(arguments, message, capsys):
    text = run_sweep(*arguments.split())
    assert message in text and "\n" not in text
    assert not capsys.readouterr().err


@needs_ray
def test_a_cluster_that_does_not_answer_is_reported_at_once(tmp_path):
    message = run_sweep("td3_bc_n", "--runs-dir", tmp_path, "--ray", "127.0.0.1:1")
    assert message.startswith("--ray 127.0.0.1:1: ") and "refused" in message


def test_dry_run_prints_commands_that_the_scripts_understand(four_runs, monkeypatch, capsys):
    def check(*arguments, every=1):
        sweep.main([*map(str, arguments)])
        lines = capsys.readouterr().out.splitlines()
        parsed = []
        for line in lines[::every]:
            python, file, *rest = shlex.split(line)
            assert python == "python"
            monkeypatch.setattr(sys, "argv", [file, *rest])
            module = file.removesuffix(".py").replace("/", ".")
            parsed.append(importlib.import_module(module).parse_args()[0])
            assert parsed[-1].run_name in line
        return lines, parsed

    for name, count in GRIDS.items():
        count -= {"paper-finetune": 230}.get(name, 0)  # offline runs first
        lines, _ = check(name, "--dry-run", "--runs-dir", "none", every=19)
        assert len(lines) == count
    _, parsed = check("tiny", "--dry-run", "--runs-dir", "none", "--no-cuda")
    assert not any(args.cuda for args in parsed)
    settings = {(a.num_critics, a.beta, a.independent_targets, a.bc_inflation) for a in parsed}
    assert len(settings) == 32 and (20, 0.02, True, 1.0) in settings

    pairs = ["finetune_td3_bc_n", "finetune_sac_bc_n", *FOUR, "--env-steps", 7, "--dry-run"]
    _, parsed = check(*pairs, "--runs-dir", four_runs)
    assert len(parsed) == 4 and {args.seed for args in parsed} == {1, 2}
    assert all(args.num_critics == 2 and args.env_steps == 7 for args in parsed)
    assert all(Path(args.checkpoint).parent == four_runs for args in parsed)
