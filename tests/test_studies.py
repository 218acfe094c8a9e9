"""The studies: tables and pictures on real short runs, and their arithmetic on known numbers."""

import csv
import json
import math
import shutil
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
from conftest import ROOT, run_script
from torch.utils.tensorboard import SummaryWriter

import sac_bc_n
import td3_bc_n
from studies import convergence, efficiency, uncertainty
from tools.runs import Run, read_run

STATES, BINS = 400, 4


@pytest.fixture(autouse=True)
def close_figures():
    yield
    plt.close("all")


@pytest.fixture(scope="module", autouse=True)
def paper_defaults():
    """The paper's settings of maze2d-umaze, with inflation, also for the bundled dataset."""
    with pytest.MonkeyPatch.context() as patch:
        for script in (td3_bc_n, sac_bc_n):
            task = script.TASK_DEFAULTS["maze2d-umaze"]
            patch.setitem(script.TASK_DEFAULTS, "tiny-maze2d-umaze", task | {"batch_size": 16})
        yield


PAPER = ["--tau", 0.005, "--bc-inflation", 10]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """N in (2, 3) and beta in (0, 0.2) with shared targets, one run with independent targets.

    They end during BC inflation, so that the final beta is 0 or 2. N = 3 and beta = 0.2 has two
    seeds.
    """
    directory = tmp_path_factory.mktemp("studies")
    settings = [(2, 0, 1), (2, 0.2, 1), (3, 0, 1), (3, 0.2, 1), (3, 0.2, 2), (3, 0.2, 1, "ind")]
    for n, beta, seed, *independent in settings:
        name = "-".join(map(str, (n, beta, seed, *independent)))
        arguments = ["--num-critics", n, "--beta", beta, "--seed", seed, "--gamma", 0.99, *PAPER]
        arguments += ["--independent-targets"] if independent else []
        arguments += ["--gradient-steps", 20, "--eval-frequency", 10, "--batch-size", 16]
        arguments += ["--eval-episodes", 2, "--runs-dir", directory, "--run-name", name]
        process = run_script("td3_bc_n", *arguments)
        assert process.returncode == 0, process.stderr
    return directory


@pytest.fixture
def runs_dir(trained, tmp_path):
    return Path(shutil.copytree(trained, tmp_path / "runs"))


@pytest.fixture(scope="module")
def written(trained, tmp_path_factory):
    """The rows that studies.uncertainty writes for these runs."""
    out = tmp_path_factory.mktemp("out")
    uncertainty.main(uncertainty.Args(str(trained), str(out), states=STATES, bins=BINS))
    assert (out / "uncertainty.png").exists()
    return rows_of(out / "uncertainty.csv")


def rows_of(path):
    """Rows of a CSV file, as dicts."""
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def change_run(directory, status="finished", score=None, agent=None, **args):
    """Changes status, arguments, score and weights in the files of a run."""
    checkpoint = torch.load(directory / "checkpoint.pt", weights_only=True)
    checkpoint["args"] |= args
    checkpoint["agent"] |= agent or {}
    torch.save(checkpoint, directory / "checkpoint.pt")
    result = json.loads((directory / "result.json").read_text()) | {"status": status}
    result["args"] |= args
    if score is not None:
        low, high = result["metadata"]["ref_min_score"], result["metadata"]["ref_max_score"]
        result["returns"] = [low + score / 100 * (high - low)] * 2
        result["history"][-1]["score"] = score
    (directory / "result.json").write_text(json.dumps(result))


def make_run(score, **args):
    args = vars(td3_bc_n.Args(**td3_bc_n.task_defaults(td3_bc_n.Args.env_id))) | args
    history = [{"step": 1, "score": score}]
    return Run(Path("run"), "td3_bc_n", args, {"source": "d4rl"}, history, 10.0, "finished")


# --- uncertainty ---


def ensemble_by_hand(path):
    """Values (actions, N, B) from the weights alone, one critic after another; distances."""
    agent = torch.load(path / "checkpoint.pt", weights_only=True)["agent"]
    data, _, _ = td3_bc_n.load_data("tiny-maze2d-umaze-v0")
    rng = np.random.default_rng(0)
    index = rng.integers(len(data.obs), size=STATES)
    data_actions = torch.tensor(data.actions[index])
    random_actions = torch.tensor(rng.uniform(-1, 1, data_actions.shape), dtype=torch.float32)
    obs = (torch.tensor(data.obs[index]) - agent["obs_mean"]) / agent["obs_std"]
    x = obs
    for layer in ("hidden.0", "hidden.2", "hidden.4", "mean"):
        x = x @ agent[f"actor.{layer}.weight"].T + agent[f"actor.{layer}.bias"]
        x = torch.tanh(x) if layer == "mean" else x.clamp(min=0)
    values = []
    for actions in (data_actions, x, random_actions):
        for critic in range(len(agent["critics.weights.0"])):
            h = torch.cat([obs, actions], dim=1)
            for layer in range(4):
                h = h @ agent[f"critics.weights.{layer}"][critic]
                h = h + agent[f"critics.biases.{layer}"][critic]
                h = h if layer == 3 else h.clamp(min=0)
            values.append(h[:, 0])
    distance = (random_actions - data_actions).norm(dim=1).numpy()
    return torch.stack(values).reshape(3, -1, STATES).double().numpy(), distance


def test_the_table_has_the_numbers_of_the_checkpoint(trained, written):
    (_, _, random), distance = ensemble_by_hand(trained / "3-0.2-2")
    rows = [row for row in written if (row["num_critics"], row["seed"]) == ("3", "2")]
    edges = np.linspace(distance.min(), distance.max(), BINS + 1)
    assert len(rows) == BINS
    std = np.sqrt(((random - random.mean(axis=0)) ** 2).sum(axis=0) / 2)
    values = {"std": std, "clip_penalty": random.mean(axis=0) - random.min(axis=0)}
    values["q_min"] = random.min(axis=0)
    result = json.loads((trained / "3-0.2-2" / "result.json").read_text())
    for i, row in enumerate(rows):
        inside = (edges[i] <= distance) & (distance < edges[i + 1] + 1e-6 * (i == BINS - 1))
        assert int(row["states"]) == inside.sum()
        assert float(row["distance_from"]) == pytest.approx(edges[i], rel=1e-3)
        assert float(row["distance_to"]) == pytest.approx(edges[i + 1], rel=1e-3)
        for name in values:
            assert float(row[name]) == pytest.approx(values[name][inside].mean(), rel=1e-3)
        # beta is 0.2, inflated by 10
        assert (row["beta"], row["independent_targets"]) == ("2", "False")
        assert float(row["score"]) == pytest.approx(result["score"], abs=0.06)


def test_diverged_and_unfinished_runs_are_left_out(runs_dir, tmp_path, capsys):
    """Values above any return, 1 / (1 - 0.99), are divergence. Very low values are pessimism."""
    change_run(runs_dir / "3-0-1", "diverged")
    change_run(runs_dir / "2-0.2-1", "running")
    for name, bias in (("2-0-1", 110.0), ("3-0.2-1", float("nan")), ("3-0.2-2", -200.0)):
        n = int(name[0])
        change_run(runs_dir / name, agent={"critics.biases.3": torch.full((n, 1, 1), bias)})
    args = uncertainty.Args(str(runs_dir), str(tmp_path / "out"), states=STATES, bins=BINS)
    uncertainty.main(args)
    kept = {(row["num_critics"], row["seed"]) for row in rows_of(tmp_path / "out/uncertainty.csv")}
    assert kept == {("3", "2"), ("3", "1")}  # the last one has independent targets
    left_out = capsys.readouterr().err
    for name, reason in {
        "3-0-1": "diverged, or without a score",
        "2-0.2-1": "running, or without a score",
        "2-0-1": "diverged: mean Q of dataset actions is",
        "3-0.2-1": "diverged: mean Q of dataset actions is nan",
    }.items():
        assert f"left out: {name} ({reason}" in left_out
    for name in ("3-0.2-2", "3-0.2-1-ind"):
        change_run(runs_dir / name, agent={"critics.biases.3": torch.full((3, 1, 1), 110.0)})
    with pytest.raises(SystemExit, match="all runs diverged"):
        uncertainty.main(args)
    change_run(runs_dir / "3-0.2-2", gamma=1.0)
    data, _, _ = td3_bc_n.load_data("tiny-maze2d-umaze-v0")
    pairs = uncertainty.sample_pairs(data, STATES)
    run = read_run(runs_dir / "3-0.2-2")
    assert uncertainty.measure(run, data, *pairs) is not None, "with gamma 1 any return is possible"


def test_beta_is_that_of_the_last_step(trained):
    run = read_run(trained / "2-0.2-1")
    assert uncertainty.final_beta(run) == pytest.approx(2.0)
    longer = run._replace(args=run.args | {"gradient_steps": 50_001})
    assert uncertainty.final_beta(longer) == 0.2


def test_runs_of_two_experiments_are_refused(runs_dir):
    change_run(runs_dir / "2-0-1", critic_init="torch", gamma=0.9)
    with pytest.raises(SystemExit, match="differ in critic_init, gamma"):
        uncertainty.main(uncertainty.Args(str(runs_dir)))


# --- efficiency ---


def test_score_against_training_time_of_real_runs(trained, tmp_path, capsys):
    """The time is by tools.speed, not that of the runs."""
    speed = {"script": "td3_bc_n", "num_critics": 3, "task": "tiny-maze2d-umaze-v0"}
    (tmp_path / "speed.json").write_text(json.dumps([speed | {"steps_per_second": 0.5}]))
    args = efficiency.Args((str(trained),), str(tmp_path / "speed.json"), str(tmp_path / "out"))
    efficiency.main(args)
    rows = {row["runs"]: row for row in rows_of(tmp_path / "out" / "efficiency.csv")}
    results = [json.loads((trained / f"3-0.2-{s}" / "result.json").read_text()) for s in (1, 2)]
    scores = [result["score"] for result in results]
    row = rows["td3_bc_n, beta 0.2, independent_targets False, num_critics 3"]
    assert (row["seeds"], row["minutes"]) == ("2", f"{20 / 0.5 / 60:.1f}")
    assert row["score"] == f"{np.mean(scores):.1f}"
    assert row["stderr"] == f"{np.std(scores, ddof=1) / 2**0.5:.1f}"
    assert "no speed of td3_bc_n, N = 2, tiny-maze2d-umaze-v0" in capsys.readouterr().err


def test_the_documented_picture_can_be_made(tmp_path):
    results = ROOT / "docs/results"
    speed = str(results / "speed.json")
    efficiency.main(efficiency.Args((str(results / "methods.csv"),), speed, str(tmp_path)))
    assert (tmp_path / "efficiency.png").exists()
    assert len(rows_of(tmp_path / "efficiency.csv")) == 19


def test_points_are_drawn_where_the_table_says():
    runs = [make_run(10.0 * s, seed=s, gradient_steps=8_000) for s in (1, 2)]
    slow = make_run(30.0, num_critics=50, gradient_steps=600)
    speeds = {("td3_bc_n", 10, "tiny-maze2d-umaze-v0"): 100.0}
    speeds["td3_bc_n", 50, "tiny-maze2d-umaze-v0"] = 0.1
    worse = make_run(5.0, gradient_steps=8_000, beta=1.0)
    points = efficiency.read_points({"b": [slow], "a": runs, "c": [worse]}, speeds)
    (axes,) = efficiency.draw(points).axes
    names = ["TD3-BC-N, N = 10, best of 2 (2 seeds)", "TD3-BC-N, N = 50 (1 seed)"]
    assert axes.get_legend_handles_labels()[1] == names
    drawn = [container[0].get_xydata()[0].tolist() for container in axes.containers]
    assert drawn == [pytest.approx([8_000 / 100 / 60, 15.0]), pytest.approx([100.0, 30.0])]


@pytest.mark.parametrize("text", ["not json", "[]", '[{"script": "td3_bc_n"}]', '{"a": 1}'])
def test_other_speed_files_are_refused_in_one_line(trained, tmp_path, text):
    (tmp_path / "speed.json").write_text(text)
    args = efficiency.Args((str(trained),), str(tmp_path / "speed.json"), str(tmp_path))
    with pytest.raises(SystemExit, match=r"speed\.json: (not a JSON file|has no rows)"):
        efficiency.main(args)


def test_convergence_of_both_algorithms(trained, tmp_path, capsys):
    """SAC-BC-N updates its target networks at every step, so its T is half as long."""
    arguments = ["--num-critics", 2, "--gradient-steps", 20, "--eval-frequency", 10, *PAPER]
    arguments += ["--eval-episodes", 2, "--runs-dir", tmp_path, "--run-name"]
    for name in (["sac", "--gamma", 0.99], ["gamma-1", "--gamma", 1]):
        process = run_script("sac_bc_n", *arguments, *name)
        assert process.returncode == 0, process.stderr
    runs = [str(trained / "2-0-1"), str(trained / "3-0-1"), str(tmp_path)]
    convergence.main(convergence.Args(runs, str(tmp_path)))
    assert "gamma-1 (no critics, or gamma 1: no values that converge)" in capsys.readouterr().err
    assert {row["run"]: row["T"] for row in rows_of(tmp_path / "convergence.csv")} == {
        "td3_bc_n, tiny-maze2d-umaze-v0, num_critics 2, seed 1": "40000",
        "td3_bc_n, tiny-maze2d-umaze-v0, num_critics 3, seed 1": "40000",
        "sac_bc_n, tiny-maze2d-umaze-v0, seed 1": "20000",
    }


def test_convergence_fits_the_time_constant(runs_dir, tmp_path):
    """A known curve, from -1 to 50, in two files as after --resume. tau 0.01, so T is 20,000."""
    run = runs_dir / "2-0-1"
    change_run(run, tau=0.01)
    for file in run.glob("events*"):
        file.unlink()
    for steps in (range(1_000, 30_000, 1_000), range(30_000, 60_000, 1_000)):
        with SummaryWriter(run, purge_step=steps[0]) as writer:
            for step in steps:
                value = 50 - 51 * math.exp(-step / 10_000)  # twice as fast
                writer.add_scalar("uncertainty/data_min", value, step)
    convergence.main(convergence.Args([str(run)], str(tmp_path)))
    (row,) = rows_of(tmp_path / "convergence.csv")
    steps, expected, best, last, q_0, q, error = map(float, list(row.values())[1:])
    assert (steps, expected, last) == (59_000, 20_000, 49.9)
    assert best == pytest.approx(10_000, rel=0.01)
    share = np.exp(-np.arange(1_000, 60_000, 1_000) / 20_000)
    values = 50 - 51 * np.exp(-np.arange(1_000, 60_000, 1_000) / 10_000)
    slope, intercept = np.polyfit(share, values, 1)  # Q + (Q_0 - Q) share
    assert (q, q_0) == (pytest.approx(intercept, 0.005), pytest.approx(intercept + slope, 0.005))
    rms = np.sqrt(np.mean((values - intercept - slope * share) ** 2))
    assert error == pytest.approx(rms, rel=0.005)


def test_convergence_needs_offline_runs_with_logs(runs_dir, tmp_path, capsys):
    for file in (runs_dir / "2-0-1").glob("events*"):
        file.unlink()
    with pytest.raises(SystemExit, match="no offline runs with TensorBoard logs"):
        convergence.main(convergence.Args([str(runs_dir / "2-0-1")], str(tmp_path)))
    convergence.main(convergence.Args([str(runs_dir)], str(tmp_path)))  # the others are drawn
    assert "2-0-1 (no uncertainty/data_min in its logs)" in capsys.readouterr().err
    rows = rows_of(tmp_path / "convergence.csv")
    assert len(rows) == 5
    assert {row["T of the best fit"] for row in rows} == {""}, "any curve fits two evaluations"
