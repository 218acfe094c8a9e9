"""Runs that survive: exact resumption, signals, kill -9, a full disk, bad checkpoints."""

import json
import os
import random
import resource
import signal
import subprocess
import sys
import time

import minari
import pytest
import torch
from conftest import ROOT
from test_runs import scalars

OFFLINE, ONLINE = ["td3_bc_n", "sac_bc_n"], ["finetune_td3_bc_n", "finetune_sac_bc_n"]
COMMON = ["--num-critics", 2, "--batch-size", 16, "--log-frequency", 1]
COMMON += ["--eval-frequency", 5, "--eval-episodes", 1, "--final-eval-episodes", 1]


def arguments(script, steps, env_id="tests/hopper/random-v0"):
    if script in OFFLINE:
        return ["--env-id", env_id, "--gradient-steps", steps, *COMMON]
    env_id = "Hopper-v5" if env_id == "tests/hopper/random-v0" else env_id
    return [
        "--from-scratch",
        "--env-id",
        env_id,
        "--learning-starts",
        30,
        "--env-steps",
        steps,
        *COMMON,
    ]


def steps_flag(script):
    return "--gradient-steps" if script in OFFLINE else "--env-steps"


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
    """Weights, optimisers, random states, buffer, environment: bit for bit."""
    a, b = (torch.load(run / "checkpoint.pt", weights_only=True) for run in (one, other))
    for checkpoint in (a, b):
        del checkpoint["args"], checkpoint["facts"], checkpoint["history"]
    a, b = flat(a), flat(b)
    assert a.keys() == b.keys()
    for key, value in a.items():
        same = torch.equal(value, b[key]) if torch.is_tensor(value) else value == b[key]
        assert same, key


def losses_of(run):
    values, _ = scalars(run)
    return {tag: points for tag, points in values.items() if tag.startswith("losses/")}


@pytest.mark.parametrize("script", OFFLINE + ONLINE)
def test_steps_and_a_resumption_are_bit_for_bit_the_steps_without_it(script, run):
    whole = run(script, *arguments(script, 12))[1]
    part = run(script, *arguments(script, 7))[1]
    process, _ = run(script, "--resume", part, steps_flag(script), 12)
    assert "a new one begins" not in process.stdout
    assert_same_state(whole, part)
    # 7 was the last step of the shorter run, and evaluated; the rest of the curves is the same.
    history = [json.loads((d / "result.json").read_text())["history"] for d in (whole, part)]
    assert history[0] == [entry for entry in history[1] if entry["step"] != 7]
    assert losses_of(whole) == losses_of(part)
    assert [step for step, _ in losses_of(part)["losses/critic"]] == list(range(1, 13))


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


def test_killed_ten_times_at_random_moments_a_run_ends_with_the_same_weights(run, tmp_path):
    """With a checkpoint after every step, most of the time goes into writing them."""
    settings = [*arguments("td3_bc_n", 60), "--eval-frequency", 1, "--num-critics", 6]
    whole = run("td3_bc_n", *settings)[1]
    runs, moments = tmp_path / "killed", random.Random(0)
    process = start("td3_bc_n", runs, *settings)
    wait_for(lambda: list(runs.glob("*/checkpoint.pt")), process)
    (run_dir,) = runs.iterdir()
    writing, unfinished = 0, run_dir / "checkpoint.tmp"
    for kill in range(10):
        inode = os.stat(run_dir / "checkpoint.pt").st_ino
        wait_for(lambda before=inode: os.stat(run_dir / "checkpoint.pt").st_ino != before, process)
        if kill % 2:
            wait_for(unfinished.exists, process)  # half of them while a checkpoint is written
        else:
            time.sleep(moments.uniform(0, 0.1))
        process.send_signal(signal.SIGKILL)
        process.wait()
        writing += unfinished.exists()
        step = torch.load(run_dir / "checkpoint.pt", weights_only=True)["step"]
        assert 0 < step < 60
        process = start("td3_bc_n", runs, "--resume", run_dir)
    out, err = process.communicate()
    assert process.returncode == 0, out + err
    assert_same_state(whole, run_dir)
    assert losses_of(whole) == losses_of(run_dir)
    assert writing >= 3, "some were killed while they wrote"


@pytest.mark.parametrize("script", ["sac_bc_n", "finetune_td3_bc_n"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_says_how_to_go_on_and_nothing_is_lost(script, number, run, tmp_path):
    settings = [*arguments(script, 100_000), "--eval-frequency", 100_000]
    process = start(script, tmp_path, *settings)
    logs = lambda: list(tmp_path.glob("*/events*"))  # noqa: E731
    wait_for(logs, process)
    time.sleep(4)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 128 + number, out + err
    (run_dir,) = (log.parent for log in logs())
    assert f"--resume {run_dir}" in out and "Traceback" not in err
    step = torch.load(run_dir / "checkpoint.pt", weights_only=True)["step"]
    assert step > 0
    more = ["--resume", run_dir, steps_flag(script), step + 3]
    run(script, *more, "--eval-frequency", 100_000)
    whole = run(script, *arguments(script, step + 3), "--eval-frequency", 100_000)[1]
    assert_same_state(whole, run_dir)


def limit_file_size():
    resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000))


def test_a_full_disk_keeps_the_last_good_checkpoint(run, tmp_path):
    run_dir = run("td3_bc_n", *arguments("td3_bc_n", 5))[1]
    before = (run_dir / "checkpoint.pt").read_bytes()
    command = [sys.executable, ROOT / "td3_bc_n.py", "--resume", run_dir, "--gradient-steps", "9"]
    process = subprocess.run(
        command, capture_output=True, text=True, preexec_fn=limit_file_size, cwd=tmp_path
    )
    assert process.returncode == 1
    assert "cannot be written, so the one before it stays" in process.stderr
    assert "Traceback" not in process.stderr
    assert (run_dir / "checkpoint.pt").read_bytes() == before
    assert not (run_dir / "checkpoint.tmp").exists()
    run("td3_bc_n", "--resume", run_dir, "--gradient-steps", 9)


def test_a_runs_directory_that_cannot_be_written_is_known_before_training(run, tmp_path):
    (tmp_path / "file").write_text("")
    process, _ = run(
        "td3_bc_n", *arguments("td3_bc_n", 5), "--runs-dir", tmp_path / "file", check=False
    )
    assert process.returncode == 1 and "cannot be made" in process.stderr
    assert "Traceback" not in process.stderr


class Payload:
    def __reduce__(self):
        return os.system, ("touch pwned",)


@pytest.mark.parametrize("script", ["td3_bc_n", "finetune_sac_bc_n"])
def test_nothing_in_a_checkpoint_is_executed(script, run, tmp_path):
    torch.save({"agent": {}, "args": Payload()}, tmp_path / "evil.pt")
    process, _ = run(script, "--resume", tmp_path / "evil.pt", check=False)
    assert process.returncode == 1 and "evil.pt: not a checkpoint" in process.stderr
    assert not (tmp_path / "pwned").exists()


def test_what_cannot_be_resumed_is_one_clear_line(run, tmp_path):
    run_dir = run("td3_bc_n", *arguments("td3_bc_n", 5))[1]
    cases = [
        (
            "td3_bc_n",
            ["--resume", run_dir, "--gamma", 0.9],
            "--gamma 0.9 contradicts the checkpoint's 0.99",
        ),
        ("td3_bc_n", ["--resume", run_dir], "finished already, at step 5"),
        ("td3_bc_n", ["--resume", tmp_path / "nowhere"], "nowhere: not a checkpoint"),
        ("sac_bc_n", ["--resume", run_dir], "a checkpoint of td3_bc_n, not of sac_bc_n"),
    ]
    for script, extra, message in cases:
        process, _ = run(script, *extra, check=False)
        assert process.returncode == 1 and message in process.stderr, process.stderr
        assert "Traceback" not in process.stderr


def test_an_environment_that_cannot_go_on_begins_a_new_episode_and_says_so(run):
    env_id = "gymnasium_robotics:PointMaze_UMaze-v3"
    run_dir = run("finetune_td3_bc_n", *arguments("finetune_td3_bc_n", 5, env_id))[1]
    process, _ = run("finetune_td3_bc_n", "--resume", run_dir, "--env-steps", 8)
    assert "cannot go on within an episode: a new one begins" in process.stdout


@pytest.mark.parametrize("env_id", ["maze2d-umaze-v1", "antmaze-umaze-v0", "door-human-v1"])
def test_mujocos_state_is_restored_bit_for_bit(env_id):
    import gymnasium as gym
    import numpy as np

    import d4rl_tasks  # noqa: F401
    import finetune_td3_bc_n as script

    first, second = (script.wrap(gym.make(gym.spec(env_id))) for _ in range(2))
    first.action_space.seed(0)
    first.reset(seed=0)
    second.reset(seed=99)
    for _ in range(30):
        first.step(first.action_space.sample())
    script.set_env_state(second, script.env_state(first))
    for _ in range(200):
        action = first.action_space.sample()
        ours, theirs = first.step(action), second.step(action)
        np.testing.assert_array_equal(ours[0], theirs[0])
        assert ours[1:4] == theirs[1:4]
        if ours[2] or ours[3]:
            np.testing.assert_array_equal(first.reset()[0], second.reset()[0])


def test_a_signal_writes_what_was_collected_for_a_data_set(tmp_path):
    settings = arguments("finetune_td3_bc_n", 100_000)
    process = start("finetune_td3_bc_n", tmp_path, *settings, "--save-dataset", "tests/stopped-v0")
    wait_for(lambda: list(tmp_path.glob("*/checkpoint.pt")), process)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 143
    assert minari.load_dataset("tests/stopped-v0").total_steps >= 30
    (run_dir,) = tmp_path.iterdir()
    again = start("finetune_td3_bc_n", tmp_path, "--resume", run_dir)
    assert "a run with --save-dataset cannot be resumed" in again.communicate()[1]
