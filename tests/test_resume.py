"""Resuming: exact after any interruption; signals, kill -9 and bad checkpoints."""

import os
import random
import signal
import subprocess
import sys
import time

import pytest
import torch
from conftest import ROOT, run_script
from test_runs import scalars

OFFLINE = ["td3_bc_n", "sac_bc_n"]
COMMON = ["--num-critics", 2, "--batch-size", 16, "--log-frequency", 1, "--eval-episodes", 1]


def arguments(script, steps, eval_frequency=5):
    """A short run. Online, untrained hoppers fall after 10 to 30 steps, which ends an episode."""
    frequency = ["--eval-frequency", eval_frequency]
    if script in OFFLINE:
        env_id = "mujoco/hopper/medium-v0"
        return ["--env-id", env_id, "--gradient-steps", steps, *COMMON, *frequency]
    steps = ["--learning-starts", 30, "--env-steps", steps]
    return ["--env-id", "Hopper-v5", *steps, *COMMON, *frequency]


def load(run_dir):
    return torch.load(run_dir / "checkpoint.pt", weights_only=True)


def flat(value, prefix=""):
    """Every tensor and number of a nested checkpoint, by its path."""
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, (list, tuple)):
        items = enumerate(value)
    else:
        return {prefix: value}
    return {k: v for key, part in items for k, v in flat(part, f"{prefix}/{key}").items()}


def assert_same_state(one, other):
    """Networks, optimizers, random states, buffer, evaluations: bit for bit."""
    a, b = load(one), load(other)
    for checkpoint in (a, b):
        del checkpoint["args"], checkpoint["steps_per_second"]
    a, b = flat(a), flat(b)
    assert a.keys() == b.keys()
    for key, value in a.items():
        same = torch.equal(value, b[key]) if torch.is_tensor(value) else value == b[key]
        assert same, key


def losses_of(run_dir):
    values, _ = scalars(run_dir)
    return {tag: points for tag, points in values.items() if tag.startswith("losses/")}


@pytest.mark.parametrize("script", OFFLINE)
def test_offline_a_resumed_run_equals_a_run_without_interruption(script, run):
    whole = run(script, *arguments(script, 12))[1]
    part = run(script, *arguments(script, 7))[1]
    checkpoint = load(part)
    checkpoint["history"].pop()  # 7 was the last step of the shorter run, and evaluated
    torch.save(checkpoint, part / "checkpoint.pt")
    (part / "checkpoint.pt").rename(part / "kept.pt")  # any file in the run directory
    run(script, "--resume", part / "kept.pt", "--gradient-steps", 12)
    assert_same_state(whole, part)
    assert losses_of(whole) == losses_of(part)
    assert [step for step, _ in losses_of(part)["losses/critic_loss"]] == list(range(1, 13))


@pytest.fixture
def saved(monkeypatch):
    """Copies every checkpoint that a run writes, by its step."""
    copies, replace = {}, os.replace

    def spy(source, target):
        if str(target).endswith("checkpoint.pt"):
            copies[torch.load(source, weights_only=True)["step"]] = source.read_bytes()
        replace(source, target)

    monkeypatch.setattr(os, "replace", spy)
    return copies


@pytest.mark.parametrize("algorithm", OFFLINE)
@pytest.mark.parametrize("checkpoint", [False, True])
def test_online_a_run_resumed_at_a_periodic_checkpoint_is_exact(
    algorithm, checkpoint, run, saved, tmp_path
):
    """As after kill -9: only the checkpoint at the end of an episode is left."""
    script = f"finetune_{algorithm}"
    settings = arguments(script, 90)
    if checkpoint:
        settings[:2] = ["--checkpoint", run(algorithm, *arguments(algorithm, 4))[1]]
        saved.clear()
    whole = run(script, *settings)[1]
    periodic = min(saved)
    assert 0 < periodic < 90
    killed = tmp_path / "killed"
    killed.mkdir()
    (killed / "checkpoint.pt").write_bytes(saved[periodic])
    process, _ = run(script, "--resume", killed)
    assert "a new episode begins" not in process.stdout
    assert_same_state(whole, killed)


def start(script, runs, *extra):
    command = [sys.executable, ROOT / f"{script}.py", "--runs-dir", runs, *extra]
    return subprocess.Popen(
        list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def wait_for(condition, process, seconds=120):
    end = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end
        time.sleep(0.001)


@pytest.mark.slow
def test_killed_twice_a_run_ends_with_the_same_weights(run, tmp_path):
    """With a checkpoint after every step, most of the time is spent in writing them."""
    settings = [*arguments("td3_bc_n", 40, eval_frequency=1), "--num-critics", 6]
    whole = run("td3_bc_n", *settings)[1]
    runs, moments = tmp_path / "killed", random.Random(0)
    process = start("td3_bc_n", runs, *settings)
    wait_for(lambda: list(runs.glob("*/checkpoint.pt")), process)
    (run_dir,) = runs.iterdir()
    writing, unfinished = 0, run_dir / "checkpoint.tmp"
    for kill in range(2):
        inode = os.stat(run_dir / "checkpoint.pt").st_ino
        wait_for(lambda before=inode: os.stat(run_dir / "checkpoint.pt").st_ino != before, process)
        if kill % 2:
            wait_for(unfinished.exists, process)  # the second kill during a write
        else:
            time.sleep(moments.uniform(0, 0.1))
        process.send_signal(signal.SIGKILL)
        process.wait()
        writing += unfinished.exists()
        assert 0 < load(run_dir)["step"] < 40, "the checkpoint is complete"
        process = start("td3_bc_n", runs, "--resume", run_dir)
    out, err = process.communicate()
    assert process.returncode == 0, out + err
    assert_same_state(whole, run_dir)
    assert losses_of(whole) == losses_of(run_dir)
    assert writing >= 1, "at least one kill hit a write"


@pytest.fixture
def signal_at(monkeypatch):
    """Sends a signal to this process when the actor is called for the n-th time."""

    def install(number, calls):
        remaining, forward = [calls], torch.nn.Sequential.forward

        def spy(self, *inputs):
            remaining[0] -= 1
            if remaining[0] == 0:
                os.kill(os.getpid(), number)
            return forward(self, *inputs)

        monkeypatch.setattr(torch.nn.Sequential, "forward", spy)
        return lambda: monkeypatch.setattr(torch.nn.Sequential, "forward", forward)

    return install


@pytest.mark.parametrize(
    ("script", "number"), [("sac_bc_n", signal.SIGTERM), ("td3_bc_n", signal.SIGINT)]
)
def test_offline_a_signal_saves_and_the_resumed_run_is_exact(script, number, run, signal_at):
    undo = signal_at(number, 25)
    process, run_dir = run(script, *arguments(script, 30, eval_frequency=30), check=False)
    undo()
    assert process.returncode == 128 + number
    assert f'--resume "{run_dir}"' in process.stdout
    assert 0 < load(run_dir)["step"] < 30
    run(script, "--resume", run_dir)
    whole = run(script, *arguments(script, 30, eval_frequency=30))[1]
    assert_same_state(whole, run_dir)


@pytest.mark.parametrize(("calls", "expected"), [(3, range(-30, 1)), (250, range(1, 100))])
def test_online_a_signal_saves_from_the_first_step_on(calls, expected, run, signal_at):
    """Also during the steps before the first update. A new episode begins after the resume."""
    env_id = ["--env-id", "mujoco/hopper/medium-v0", "--gradient-steps", 2, *COMMON]
    offline = run("td3_bc_n", *env_id)[1]
    settings = ["--checkpoint", offline, "--learning-starts", 30, "--env-steps", 100]
    settings += ["--eval-frequency", 100, "--eval-episodes", 1]
    undo = signal_at(signal.SIGTERM, calls)
    process, run_dir = run("finetune_td3_bc_n", *settings, check=False)
    undo()
    assert process.returncode == 143 and f'--resume "{run_dir}"' in process.stdout
    checkpoint = load(run_dir)
    assert checkpoint["step"] in expected
    assert len(checkpoint["buffer"][0]) > 30 + checkpoint["step"], "with the offline transitions"
    process, _ = run("finetune_td3_bc_n", "--resume", run_dir)
    assert "a new episode begins" in process.stdout
    assert load(run_dir)["step"] == 100


def test_a_saved_buffer_has_no_unused_memory(run):
    run_dir = run("finetune_td3_bc_n", *arguments("finetune_td3_bc_n", 5))[1]
    checkpoint = load(run_dir)
    for column in checkpoint["buffer"]:
        assert column.untyped_storage().nbytes() == column.numel() * 4 and len(column) == 35


def test_a_runs_directory_that_cannot_be_created_is_one_line_before_training(tmp_path):
    (tmp_path / "file").write_text("")
    process = run_script(
        "td3_bc_n", *arguments("td3_bc_n", 5), "--runs-dir", tmp_path / "file" / "runs"
    )
    assert process.returncode == 1 and "Not a directory" in process.stderr
    assert "step 5" not in process.stdout


class Payload:
    def __reduce__(self):
        return os.system, ("touch pwned",)


@pytest.mark.parametrize("script", ["td3_bc_n", "finetune_sac_bc_n"])
def test_no_code_in_a_checkpoint_is_executed(script, run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"agent": {}, "args": Payload()}, tmp_path / "evil.pt")
    process, _ = run(script, "--resume", tmp_path / "evil.pt", check=False)
    assert process.returncode == 1 and "evil.pt: not a checkpoint" in process.stderr
    assert not (tmp_path / "pwned").exists()


def test_what_cannot_be_resumed_is_one_clear_line(run, tmp_path):
    online = "finetune_td3_bc_n"
    run_dir, online_dir = (run(name, *arguments(name, 5))[1] for name in ("td3_bc_n", online))
    (tmp_path / "empty.pt").touch()
    cases = [
        ("td3_bc_n", [run_dir, "--gamma", 0.9], "gamma cannot change from 0.99 to 0.9"),
        ("td3_bc_n", [run_dir, "--gradient-steps", 4], "already at step 5"),
        (online, [online_dir, "--gamma", 0.9], "gamma cannot change from 0.99 to 0.9"),
        (online, [online_dir, "--env-steps", 4], "already at step 5"),
        ("td3_bc_n", [tmp_path / "nowhere"], "nowhere: not a checkpoint"),
        ("td3_bc_n", [""], "checkpoint.pt: not a checkpoint"),
        ("td3_bc_n", [tmp_path / "empty.pt"], "empty.pt: not a checkpoint"),
        (
            "sac_bc_n",
            [run_dir],
            "not a checkpoint of sac_bc_n.py (ValueError('written by td3_bc_n.py'))",
        ),
    ]
    for script, extra, message in cases:
        process, _ = run(script, "--resume", *extra, check=False)
        assert process.returncode == 1 and message in process.stderr, process.stderr
        assert "\n" not in process.stderr


def test_a_run_is_not_resumed_on_other_data(run):
    run_dir = run("td3_bc_n", *arguments("td3_bc_n", 2))[1]
    checkpoint = load(run_dir)
    for key, value in (("transitions", 9), ("source", "d4rl"), ("environment", "Hopper-v4")):
        changed = checkpoint | {"metadata": checkpoint["metadata"] | {key: value}}
        torch.save(changed, run_dir / "checkpoint.pt")
        process, _ = run("td3_bc_n", "--resume", run_dir, "--gradient-steps", 4, check=False)
        assert process.returncode == 1
        assert (
            f"{key} is {checkpoint['metadata'][key]}, in the checkpoint {value}" in process.stderr
        )
