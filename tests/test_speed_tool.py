"""tools.speed, with measurements of a fraction of a second."""

import contextlib
import importlib
import json
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import ROOT

from tools import runs, speed

HOPPER = "hopper-medium-v2"
COLUMNS = ["script", "num_critics", "task", "device", "steps_per_second", "gflop_per_step"]
COLUMNS += ["matmul_ratio", "peak_memory_mb"]


@pytest.fixture(autouse=True)
def matmul_precision():
    yield
    torch.set_float32_matmul_precision("highest")


def test_rows_are_printed_and_written_as_json(tmp_path):
    command = [sys.executable, "-m", "tools.speed", "--script", "td3_bc_n", "--num-critics", "2"]
    command += ["--task", HOPPER, "--seconds", "0.1", "--json", tmp_path / "speed.json"]
    process = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    (row,) = json.loads((tmp_path / "speed.json").read_text())
    assert list(row) == COLUMNS and row["steps_per_second"] > 0 and row["peak_memory_mb"] > 100
    header, _, line = process.stdout.splitlines()
    assert header.count("|") == line.count("|") == 10
    steps_per_second = f"{row['steps_per_second']:.1f}"
    assert line.startswith(f"| td3_bc_n | 2 | {HOPPER} | {steps_per_second} |")


def gflop_by_hand(num_critics, sac):
    """Matrix products of an average step: layers of critics and actor, batches of 256."""
    layers = 14 * 256 + 2 * 256 * 256 + 256
    inputs = 2 * 256 * 256 + 256  # gradients of the inputs of all layers but the first
    outputs = 6 if sac else 3  # mean and std
    actor = 11 * 256 + 2 * 256 * 256 + 256 * outputs
    critic_loss = 2 * layers + inputs + layers  # targets, forward, inputs and weights backward
    actor_loss = 2 * layers  # forward, inputs backward
    actor_step = actor + actor + 2 * 256 * 256 + 256 * outputs  # forward, weights, inputs
    actor_updates = 1 if sac else 0.5
    critics = num_critics * (critic_loss + actor_loss * actor_updates)
    return 2 * 256 * (critics + actor + actor_step * actor_updates) / 1e9


@pytest.mark.parametrize("script", runs.SCRIPTS)
def test_the_matrix_products_of_a_step_are_counted(script):
    row = speed.measure(script, 3, HOPPER, speed.Args(seconds=0.05))
    assert row["gflop_per_step"] == pytest.approx(gflop_by_hand(3, "sac" in script), rel=1e-6)
    assert row["matmul_ratio"] > 0


@pytest.mark.parametrize("script", runs.SCRIPTS[2:])
def test_an_online_step_acts_and_stores_the_transition(script, monkeypatch):
    module = importlib.import_module(script)
    stored, add = [], module.ReplayBuffer.add
    monkeypatch.setattr(
        module.ReplayBuffer, "add", lambda self, data: stored.append(data) or add(self, data)
    )
    steps, _, env, period, _ = speed.make_steps(script, 2, HOPPER, speed.Args())
    stored.clear()
    before = env.unwrapped.data.time
    steps()
    assert len(stored) == period == (2 if "td3" in script else 1)
    assert all(data.obs.shape == (1, 11) for data in stored) and env.unwrapped.data.time > before
    assert not np.array_equal(stored[0].obs, stored[0].next_obs)


@pytest.mark.parametrize("script", runs.SCRIPTS)
def test_a_period_has_one_actor_update(script, monkeypatch):
    module = importlib.import_module(script)
    updates, update = [], module.update
    monkeypatch.setattr(
        module, "update", lambda *args: updates.append(update(*args)) or updates[-1]
    )
    steps, _, _, period, _ = speed.make_steps(script, 2, HOPPER, speed.Args())
    updates.clear()
    steps()
    assert len(updates) == period
    actor = ["losses/actor_loss" in metrics for metrics in updates]
    assert actor == ([False, True] if period == 2 else [True])


def test_without_the_module_resource_there_is_no_memory_and_the_rest_is_measured(
    monkeypatch, tmp_path, capsys
):
    monkeypatch.setattr(speed, "resource", None)
    pool = contextlib.nullcontext(SimpleNamespace(apply=lambda function, args: function(*args)))
    context = SimpleNamespace(Pool=lambda _: pool)  # in this process
    monkeypatch.setattr(speed.multiprocessing, "get_context", lambda _: context)
    args = speed.Args("td3_bc_n", (2,), HOPPER, seconds=0.05, json=str(tmp_path / "speed.json"))
    speed.main(args)
    assert capsys.readouterr().out.splitlines()[-1].endswith("| - |")
    (row,) = json.loads((tmp_path / "speed.json").read_text())
    assert row["peak_memory_mb"] is None and row["steps_per_second"] > 0


def test_the_matmul_precision_is_that_of_the_argument():
    speed.make_steps("td3_bc_n", 2, HOPPER, speed.Args(matmul_precision="medium"))
    assert torch.get_float32_matmul_precision() == "medium"


def test_loops_are_compared_with_their_parts(monkeypatch, capsys):
    monkeypatch.setattr(speed, "time_alternately", lambda functions, *_: np.array([[2.0, 3.0]]))
    speed.main(speed.Args(loops=True))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "10 hopper episodes at once: 1.50 times as fast"
    assert [line.split(":")[0] for line in lines[1:]] == list(runs.SCRIPTS[2:])


def test_functions_are_timed_alternately():
    calls = []
    functions = [lambda: calls.append("a"), lambda: calls.append("b")]
    assert speed.time_alternately(functions, 0, "cpu").shape == (3, 2)
    assert calls == ["a", "b"] * 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"device": "cuda"}, "--device cuda: no GPU found"),
        ({"task": "ant"}, "--task ant: expected one of hopper-medium-v2"),
        ({"num_critics": (0,)}, "--num-critics must be at least 1"),
        ({"json": "nowhere/speed.json"}, "not a file in an existing directory"),
        ({"json": str(ROOT)}, "not a file in an existing directory"),
    ],
)
def test_mistakes_are_one_line_before_the_work(arguments, message, monkeypatch):
    if "device" in arguments and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    monkeypatch.setattr(speed.multiprocessing, "get_context", lambda _: pytest.fail("measured"))
    with pytest.raises(SystemExit, match=message):
        speed.main(speed.Args(**arguments))
