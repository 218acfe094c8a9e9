"""tools.speed, with measurements of a fraction of a second."""

import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from conftest import ROOT

from studies import efficiency
from tools import speed

DATASET = [torch.rand(300, *shape) for shape in ((11,), (3,), (), (11,), ())]


@pytest.fixture(autouse=True)
def settings_of_torch():
    yield
    torch.set_float32_matmul_precision("highest")
    torch.use_deterministic_algorithms(False)


def parse(*methods, task="hopper-medium-v2"):
    """Methods with small batches, to be fast."""
    parsed = [speed.parse_method(method, task) for method in methods]
    for _, settings in parsed:
        settings.batch_size = 16
    return parsed


def test_methods_are_compared_with_td3_bc_n_and_written_as_json(tmp_path):
    command = [sys.executable, "-m", "tools.speed", "bc", "edac:2", "edac:2", "--seconds", "0.1"]
    command += ["--no-cuda", "--json", tmp_path / "speed.json"]
    process = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    speeds = efficiency.read_speed(tmp_path / "speed.json")
    task = "hopper-medium-v2"
    assert list(speeds) == [("td3_bc_n", 10, task), ("bc", 0, task), ("edac", 2, task)]
    where, _, header, _, *lines = process.stdout.splitlines()
    assert where.startswith("hopper-medium-v2, cpu") and "RTX 2080 Ti" in header
    assert [line.count("|") for line in (header, *lines)] == [8] * 4
    assert lines[0].endswith("| 1.00 | 31 | 1.00 |") and lines[1].endswith("| - | - |")


def test_speeds_and_ratios_are_medians_over_rounds(monkeypatch, capsys, tmp_path):
    """A column per method, for two steps. A slow round slows all methods."""
    times = [[2.0, 1.0], [20.0, 12.0], [4.0, 1.0]]
    monkeypatch.setattr(speed, "time_alternately", lambda *_: np.array(times))
    speed.main(speed.Args(("cql:2",), json=str(tmp_path / "speed.json")))
    first, second = json.loads((tmp_path / "speed.json").read_text())
    assert (first["steps_per_second"], second["steps_per_second"]) == (2 / 4, 2 / 1)
    assert (first["relative_time"], second["relative_time"]) == (1, 0.5)
    line = capsys.readouterr().out.splitlines()[-1]
    assert line == "| cql | 2 | 2.0 | 5000 | 0.50 | 123 | 3.97 |"  # 123 / 31


def test_every_method_is_measured():
    methods = parse("td3_bc_n:3", "sac_bc_n:3", "edac:3", "msg:3", "bc", "td3_bc", "iql", "cql")
    rows = speed.measure(methods, "cpu", speed.Args(seconds=0.05, matmul_precision="medium"))
    assert torch.get_float32_matmul_precision() == "medium"
    assert {row["script"] for row in rows} == set(speed.METHODS)
    assert all(row["steps_per_second"] > 0 for row in rows)


@pytest.mark.parametrize("method", speed.METHODS)
def test_two_steps_train_all_networks(method, monkeypatch):
    ((script, settings),) = parse(method)
    agent = script.Agent(11, 3, settings)
    monkeypatch.setattr(script, "Agent", lambda *_: agent)
    before = {name: value.clone() for name, value in agent.named_parameters()}
    speed.make_steps(script, settings, DATASET)()
    assert not [name for name, value in agent.named_parameters() if value.equal(before[name])]


def test_functions_take_turns_of_equal_length(monkeypatch):
    """A clock that the functions advance: b takes four times as long as a."""
    now, calls = [0.0], []
    monkeypatch.setattr(speed.time, "perf_counter", lambda: now[0])

    def call(name, seconds):
        calls.append(name)
        now[0] += seconds

    functions = [lambda: call("a", 1), lambda: call("b", 4)]
    times = speed.time_alternately(functions, 160, False)  # 20 rounds of two turns of 4 seconds
    assert times.tolist() == [[1, 4]] * 20
    assert "".join(calls) == "aaaaabbbbbab" + "aaaab" * 20  # warm-up and one call come first
    assert len(speed.time_alternately(functions, 1e-9, False)) == 3


def test_settings_and_dimensions_are_those_of_the_task(monkeypatch):
    assert [settings.num_critics for _, settings in parse("edac", "edac:7")] == [50, 7]
    task = "antmaze-large-diverse-v0"
    (_, msg), td3 = parse("msg", "td3_bc_n:1", task=task)
    assert (msg.num_critics, msg.beta_lcb) == (64, -8)
    data, make_steps = [], speed.make_steps
    monkeypatch.setattr(speed, "make_steps", lambda *a: data.append(a[2]) or make_steps(*a))
    speed.measure([td3], "cpu", speed.Args(task=task, seconds=0.01))
    assert [column.shape[1:] for column in data[0]] == [(29,), (8,), (), (29,), ()]


METHODS = ("sac", "finetune_td3_bc_n", "edac:0", "edac:", "edac:2.5", "bc:2")
MISTAKES = [({"methods": ("cql", method)}, f"{method}: expected SCRIPT or") for method in METHODS]
MISTAKES += [
    ({"task": "ant"}, "--task ant: expected one of hopper-random-v2"),
    ({"seconds": float("nan")}, "--seconds nan: expected a positive number"),
    ({"json": "nowhere/speed.json"}, "--json nowhere/speed.json: cannot be written"),
]


@pytest.mark.parametrize(("arguments", "message"), MISTAKES)
def test_mistakes_are_one_line_before_the_work(arguments, message, monkeypatch):
    monkeypatch.setattr(speed, "measure", lambda *_: pytest.fail("measured"))
    with pytest.raises(SystemExit) as error:
        speed.main(speed.Args(**arguments))
    assert message in error.value.code and "\n" not in error.value.code


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_cuda_methods_are_measured():
    rows = speed.measure(parse("td3_bc_n", "iql", "edac:2"), "cuda", speed.Args(seconds=0.1))
    assert all(row["device"] == "cuda" and row["steps_per_second"] > 0 for row in rows)
