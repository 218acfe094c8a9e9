"""Nothing is lost: killed runs, broken pipes, two processes, late signals, full disks."""

import fcntl
import gc
import io
import json
import os
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from conftest import ROOT, run_script

HOPPER = ["--env-id", "mujoco/hopper/medium-v0", "--gradient-steps", 6, "--eval-frequency", 3]
HOPPER += ["--num-critics", 2, "--batch-size", 16, "--eval-episodes", 1, "--log-frequency", 1]
STEPS = ["--learning-starts", 20, "--env-steps", 40, "--eval-frequency", 10, "--eval-episodes", 1]
SCRATCH = ["--env-id", "Hopper-v5", "--num-critics", 2, "--batch-size", 16, *STEPS]


def result(run_dir):
    return json.loads((run_dir / "result.json").read_text())


@pytest.mark.parametrize(
    ("script", "arguments", "last"),
    [("td3_bc_n", HOPPER, 6), ("finetune_sac_bc_n", SCRATCH, 40)],
)
def test_a_finished_run_without_its_result_writes_it_when_resumed(script, arguments, last, run):
    """As after kill -9 between the last checkpoint and result.json."""
    run_dir = run(script, *arguments)[1]
    before = result(run_dir)
    assert (before["status"], before["step"]) == ("finished", last)
    (run_dir / "result.json").unlink()
    process, _ = run(script, "--resume", run_dir)
    assert "results in" in process.stdout
    assert result(run_dir) == before | {"args": result(run_dir)["args"]}


def test_a_result_is_written_at_every_evaluation(run, monkeypatch):
    """A run in its middle has the scores so far, and the status running."""
    replaced, seen, replace = [], [], os.replace

    def spy(source, target):
        replaced.append(target.name)
        if target.name == "result.json":
            seen.append(json.loads(source.read_text()))
        replace(source, target)

    monkeypatch.setattr(os, "replace", spy)
    run("sac_bc_n", *HOPPER)
    assert replaced == [*["checkpoint.pt", "result.json"] * 2, "result.json"]
    assert [(one["status"], one["step"], len(one["history"])) for one in seen] == [
        ("running", 3, 1),
        ("running", 6, 2),
        ("finished", 6, 2),
    ]
    assert seen[0]["score"] == seen[0]["history"][0]["score"] and len(seen[0]["returns"]) == 1
    seen.clear()
    run("finetune_td3_bc_n", *SCRATCH)
    steps = [one["step"] for one in seen if one["status"] == "running"]
    assert {0, 10, 20, 30, 40} <= set(steps) and seen[-1]["status"] == "finished"


def test_a_closed_pipe_loses_no_checkpoint(tmp_path):
    """python td3_bc_n.py | head -1"""
    command = [sys.executable, str(ROOT / "td3_bc_n.py"), "--runs-dir", str(tmp_path)]
    command += [*map(str, HOPPER), "--run-name", "r"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    while not process.stdout.readline().startswith(b"convergence"):
        assert process.poll() is None
    process.stdout.close()
    process.wait()
    assert torch.load(tmp_path / "r/checkpoint.pt", weights_only=True)["step"] in (3, 6)
    assert result(tmp_path / "r")["history"]


def test_an_ascii_terminal_stops_no_run(run, monkeypatch):
    run_dir = run("td3_bc_n", *HOPPER)[1]
    output = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(io, "StringIO", lambda: output)
    output.getvalue = lambda: ""
    assert run_script("td3_bc_n", "--resume", run_dir, "--gradient-steps", 9).returncode == 0


def test_two_processes_do_not_run_one_run(run):
    run_dir = run("td3_bc_n", *HOPPER)[1]
    with open(run_dir / "lock", "w") as lock:  # as that of another process
        fcntl.flock(lock, fcntl.LOCK_EX)
        process, _ = run("td3_bc_n", "--resume", run_dir, "--gradient-steps", 9, check=False)
    assert process.returncode == 1
    assert process.stderr == f"{run_dir}: another process is running it"
    run("td3_bc_n", "--resume", run_dir, "--gradient-steps", 9)


@pytest.mark.parametrize(
    ("script", "arguments"), [("td3_bc_n", HOPPER), ("finetune_td3_bc_n", SCRATCH)]
)
def test_a_signal_after_the_save_stops_the_next_step_with_a_checkpoint(
    script, arguments, run, monkeypatch
):
    """It comes after the loop has decided whether to save."""
    add_scalar, sent = torch.utils.tensorboard.SummaryWriter.add_scalar, []

    def spy(self, name, value, step):
        if step == 4 and not sent:
            sent.append(os.kill(os.getpid(), signal.SIGTERM))
        return add_scalar(self, name, value, step)

    monkeypatch.setattr(torch.utils.tensorboard.SummaryWriter, "add_scalar", spy)
    arguments = [*arguments, "--log-frequency", 4]
    process, run_dir = run(script, *arguments, check=False)
    assert process.returncode == 143 and "stopped at step 5" in process.stdout
    assert torch.load(run_dir / "checkpoint.pt", weights_only=True)["step"] == 5


def test_weights_that_are_not_finite_are_not_saved(run, monkeypatch):
    """The loss of a step is computed before its weights: here the fourth, of step 3."""
    step, calls = torch.optim.Adam.step, []

    def spoil(self, *args, **kwargs):
        step(self, *args, **kwargs)
        calls.append(0)
        if len(calls) == 4:  # critics, critics and actor, critics: then an evaluation is due
            self.param_groups[0]["params"][0].data.view(-1)[0] = float("inf")

    monkeypatch.setattr(torch.optim.Adam, "step", spoil)
    process, run_dir = run("td3_bc_n", *HOPPER, "--learning-rate", 0, check=False)
    assert process.returncode == 3 and result(run_dir)["status"] == "diverged"
    assert result(run_dir)["step"] == 3 and not (run_dir / "checkpoint.pt").exists()


def test_a_full_disk_keeps_the_last_good_checkpoint_and_no_temporary_file(run, monkeypatch):
    run_dir = run("td3_bc_n", *HOPPER)[1]
    before = (run_dir / "checkpoint.pt").read_bytes()

    def save(state, path):
        Path(path).write_bytes(b"half")
        raise OSError("No space left on device")

    with monkeypatch.context() as full, pytest.raises(OSError, match="No space left"):
        full.setattr(torch, "save", save)
        run("td3_bc_n", "--resume", run_dir, "--gradient-steps", 9)
    gc.collect()  # the traceback, and with it the lock of the run
    assert not (run_dir / "checkpoint.tmp").exists()
    assert (run_dir / "checkpoint.pt").read_bytes() == before
    run("td3_bc_n", "--resume", run_dir, "--gradient-steps", 9)


def test_a_checkpoint_of_another_version_is_one_line(run):
    run_dir = run("td3_bc_n", *HOPPER)[1]
    checkpoint = torch.load(run_dir / "checkpoint.pt", weights_only=True)
    torch.save(checkpoint | {"format": 1}, run_dir / "checkpoint.pt")
    for script, option in (("td3_bc_n", "--resume"), ("finetune_td3_bc_n", "--checkpoint")):
        process, _ = run(script, option, run_dir, check=False)
        assert process.returncode == 1 and "another version of this project" in process.stderr
        assert "\n" not in process.stderr.strip()


def test_a_renamed_script_writes_checkpoints_for_its_sibling(run, tmp_path):
    """The algorithm has a name, whatever the file is called; and the sibling has a path."""
    (tmp_path / "my_td3.py").write_text((ROOT / "td3_bc_n.py").read_text())
    process, run_dir = run(tmp_path / "my_td3", *HOPPER)
    assert f'python "{tmp_path / "finetune_td3_bc_n.py"}" --checkpoint' in process.stdout
    run("finetune_td3_bc_n", "--checkpoint", run_dir, *STEPS)


def test_optimizers_are_not_capturable_without_cuda_graphs(run, monkeypatch):
    """On a GPU, PyTorch warns about capturable optimizers outside of a graph."""
    seen, adam = [], torch.optim.Adam
    monkeypatch.setattr(
        torch.optim, "Adam", lambda *args, **kwargs: seen.append(kwargs) or adam(*args, **kwargs)
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        run("td3_bc_n", *HOPPER, "--no-cudagraphs")
    assert [kwargs["capturable"] for kwargs in seen] == [False, False]
