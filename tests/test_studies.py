"""The studies: tables and pictures on real short runs, and their arithmetic on known numbers."""

import json
import math
import os
import shutil
from itertools import pairwise, product
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
from conftest import run_script
from matplotlib.colors import LogNorm
from torch.utils.tensorboard import SummaryWriter

import sac_bc_n
import td3_bc_n
from studies import ablations, common, convergence, efficiency, uncertainty
from tools.runs import Run, default_args, load_agent, load_data, read_run

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
    """What studies.uncertainty writes for these runs."""
    out = tmp_path_factory.mktemp("out")
    uncertainty.main(uncertainty.Args(str(trained), str(out), states=STATES, bins=BINS))
    return out


@pytest.fixture(scope="module")
def grid(trained):
    return uncertainty.read_grid(uncertainty.Args(str(trained), states=STATES, bins=BINS))


def tables(path):
    """{picture or heading: rows} of a Markdown file. A row is a list of texts, first the header."""
    found, name = {}, None
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("!["):
            name = line[2:].split("]")[0]
        elif line.startswith("## "):
            name = line[3:]
        elif line.startswith("|") and "---" not in line:
            found.setdefault(name, []).append([cell.strip() for cell in line.split("|")[1:-1]])
    return found


def row_of(table, *first_cells):
    rows = [row for row in table if row[: len(first_cells)] == list(first_cells)]
    assert len(rows) == 1
    return rows[0][len(first_cells) :]


def numbers(cells):
    return [float(cell) for cell in cells]


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


def make_run(scores=(), diverged=False, steps_per_second=10.0, history=(), **args):
    args = vars(td3_bc_n.Args(**td3_bc_n.task_defaults(td3_bc_n.Args.env_id))) | args
    metadata = {"source": "d4rl", "ref_min_score": 0.0, "ref_max_score": 100.0}
    history = history or [
        {"step": 1, "score": float(np.mean(score))} for score in [scores][: len(scores)]
    ]
    return Run(
        *(Path("run"), "td3_bc_n", args, metadata, list(history), list(scores)),
        *(steps_per_second, "diverged" if diverged else "finished"),
    )


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


def test_tables_have_the_numbers_of_the_checkpoint(trained, written):
    found = tables(written / "uncertainty.md")
    pictures = {"score", "std", "clip_penalty", "q_min", "q_min_minus_data", "policy_q_min"}
    assert {path.stem for path in written.glob("*.png")} == pictures
    assert set(found) == {*pictures, "Clip penalty over std"}
    (data, policy, random), distance = ensemble_by_hand(trained / "3-0-1")
    cell = ("shared targets", "3", "0")
    edges = np.linspace(distance.min(), distance.max(), BINS + 1)
    edges[-1] += 1e-6
    statistics = {
        "std": np.sqrt(((random - random.mean(axis=0)) ** 2).sum(axis=0) / 2),
        "clip_penalty": random.mean(axis=0) - random.min(axis=0),
        "q_min": random.min(axis=0),
        "q_min_minus_data": random.min(axis=0) - data.min(axis=0),
    }
    counts = [((low <= distance) & (distance < high)).sum() for low, high in pairwise(edges)]
    assert [header.split("(")[1] for header in found["std"][0][3:]] == [
        f"{c} states)" for c in counts
    ]
    for name, values in statistics.items():
        binned = [
            values[(low <= distance) & (distance < high)].mean() for low, high in pairwise(edges)
        ]
        np.testing.assert_allclose(numbers(row_of(found[name], *cell)), binned, 6e-3, 1e-6)
    percentiles = np.percentile(policy.min(axis=0), (5, 25, 50, 75, 95))
    table = numbers(row_of(found["policy_q_min"], *cell))
    np.testing.assert_allclose(table, percentiles, rtol=6e-3)
    table = numbers(row_of(found["Clip penalty over std"], *cell))
    std, clip_penalty = statistics["std"].mean(), statistics["clip_penalty"].mean()
    expected = [std, clip_penalty, clip_penalty / std, uncertainty.gaussian_ratio(3)]
    np.testing.assert_allclose(table, expected, rtol=6e-3)


def test_scores_are_means_and_standard_errors_over_seeds(trained, written):
    scores = [
        json.loads((trained / f"3-0.2-{seed}" / "result.json").read_text())["score"]
        for seed in (1, 2)
    ]
    table = tables(written / "uncertainty.md")["score"]
    assert table[0] == ["targets", "N", "β = 0", "β = 2"]  # beta 0.2, inflated by 10
    stderr = abs(scores[0] - scores[1]) / 2
    expected = f"{np.mean(scores):.1f} ± {stderr:.1f}"
    assert row_of(table, "shared targets", "3")[1] == expected
    assert row_of(table, "independent targets", "2") == ["-", "-"]


def test_a_cell_has_the_values_of_all_its_seeds(trained, grid):
    by_hand = [ensemble_by_hand(trained / f"3-0.2-{seed}") for seed in (1, 2)]
    cell = grid.cells[False, 3, 2.0]
    distance = by_hand[0][1]
    far = distance >= grid.edges[-2]
    std = [random.std(axis=0, ddof=1) for (_, _, random), _ in by_hand]
    assert cell["binned"][0, -1] == pytest.approx(np.mean([one[far].mean() for one in std]), 1e-4)
    assert cell["means"][0] == pytest.approx(np.mean(std), 1e-4)
    q_min = np.concatenate([policy.min(axis=0) for (_, policy, _), _ in by_hand])
    np.testing.assert_allclose(cell["policy_q_min"], q_min, rtol=1e-4, atol=1e-5)


def test_heat_maps_show_the_numbers_of_the_cells(grid):
    for m, name in enumerate(uncertainty.MEASURES):
        figure = uncertainty.draw_measure(grid, name)
        for panel, (t, n) in enumerate(product(grid.targets, grid.ns)):
            for column, b in enumerate(grid.betas):
                if (t, n, b) in grid.cells:
                    expected = grid.cells[t, n, b]["binned"][m]
                    np.testing.assert_array_equal(shown(figure, panel)[:, column], expected)
        labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]
        assert labels == [f"{edge:.1f}" for edge in grid.edges[::2]]


def test_colour_scales_are_logarithmic_or_centred_at_zero_and_say_so(grid):
    for name, log in (("std", True), ("clip penalty", True), ("Q_min", False)):
        figure = uncertainty.draw_measure(grid, name)
        bars = [ax.get_ylabel() for ax in figure.axes if ax.get_label() == "<colorbar>"]
        assert bars == [f"{name} (log scale)" if log else name] * 2
        assert isinstance(figure.axes[0].images[0].norm, LogNorm) == log
    image = uncertainty.draw_measure(grid, "Q_min minus data").axes[0].images[0]
    assert image.norm.vmin == -image.norm.vmax < 0 and image.cmap.name == "RdBu_r"


def test_other_data_than_in_training_is_refused(runs_dir):
    for path in runs_dir.iterdir():
        checkpoint = torch.load(path / "checkpoint.pt", weights_only=True)
        checkpoint["metadata"]["transitions"] = 7
        torch.save(checkpoint, path / "checkpoint.pt")
    with pytest.raises(SystemExit, match=r"transitions was 7 in training, is now \d+"):
        uncertainty.main(uncertainty.Args(str(runs_dir)))


def shown(figure, panel):
    """The array of a heat map. Masked cells are white."""
    return np.ma.filled(figure.axes[panel].images[0].get_array(), np.nan)


def test_diverged_and_missing_runs_are_white(runs_dir, tmp_path):
    """Also if only one of two seeds diverged."""
    change_run(runs_dir / "3-0-1", "diverged")
    change_run(runs_dir / "3-0.2-2", "diverged")
    args = uncertainty.Args(str(runs_dir), str(tmp_path / "out"), states=STATES, bins=BINS)
    grid = uncertainty.read_grid(args)
    shared, independent = (
        np.isnan(shown(uncertainty.draw_scores(grid), panel)) for panel in (0, 1)
    )
    assert shared.tolist() == [[False, False], [True, True]]  # rows N = 2, 3; columns beta
    assert independent.tolist() == [[True, True], [True, False]]
    for name in uncertainty.MEASURES:
        figure = uncertainty.draw_measure(grid, name)
        white = [np.isnan(shown(figure, panel)) for panel in range(4)]  # shared 2, 3, indep. 2, 3
        assert [w[:, 0].all() for w in white] == [False, True, True, True]
        assert [w[:, 1].all() for w in white] == [False, True, True, False]
        assert not white[0].any()
    uncertainty.main(args)
    found = tables(tmp_path / "out" / "uncertainty.md")
    assert row_of(found["score"], "shared targets", "3") == ["diverged", "1 of 2 diverged"]
    assert row_of(found["std"], "shared targets", "3", "0") == ["diverged"]
    boxes = [len(ax.patches) for ax in uncertainty.draw_boxes(grid).axes]
    assert boxes == [2, 0, 0, 1], "a box per cell that is not white"


def test_a_run_that_diverged_before_its_first_checkpoint_counts(runs_dir):
    first = runs_dir / "2-0-1"
    change_run(first, "diverged")
    (first / "checkpoint.pt").unlink()
    os.utime(first / "result.json", (0, 0))  # the oldest run is read first
    grid = uncertainty.read_grid(uncertainty.Args(str(runs_dir), states=STATES, bins=BINS))
    assert grid.cells[False, 2, 0.0] is None and grid.cells[False, 2, 2.0]


@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_values_above_any_return_count_as_diverged(runs_dir, capsys):
    """Their std would hide all other runs in the colour scale. The score is still shown."""
    # The largest return is 1 / (1 - 0.99). Very low values are pessimism.
    for bias, diverged in ((90.0, False), (-200.0, False), (float("nan"), True), (110.0, True)):
        change_run(runs_dir / "2-0-1", agent={"critics.biases.3": torch.full((2, 1, 1), bias)})
        args = uncertainty.Args(str(runs_dir), states=STATES, bins=BINS)
        grid = uncertainty.read_grid(args)
        assert (grid.cells[False, 2, 0.0] is None) == diverged
        assert ("2-0-1: diverged" in capsys.readouterr().out) == diverged
    assert np.isfinite(shown(uncertainty.draw_scores(grid), 0)[0, 0])
    for path in runs_dir.iterdir():
        change_run(path, gamma=1.0)
    assert uncertainty.read_grid(args).cells[False, 2, 0.0], "with gamma 1, any return is possible"


def test_all_runs_diverged_is_no_error(runs_dir, tmp_path):
    for path in runs_dir.iterdir():
        change_run(path, "diverged")
    out = tmp_path / "out"
    uncertainty.main(uncertainty.Args(str(runs_dir), str(out), states=STATES, bins=BINS))
    assert len(list(out.glob("*.png"))) == 6


def test_beta_is_that_of_the_last_step(trained):
    run = read_run(trained / "2-0.2-1")
    assert uncertainty.final_beta(run) == pytest.approx(2.0)
    longer = run._replace(args=run.args | {"gradient_steps": 50_001})
    assert uncertainty.final_beta(longer) == 0.2


def test_beta_is_labelled_without_inflation(runs_dir):
    args = uncertainty.Args(str(runs_dir), states=STATES, bins=BINS)
    assert uncertainty.read_grid(args).beta_label == "β (inflated by 10)"
    for path in runs_dir.iterdir():
        change_run(path, bc_inflation=1.0)
    grid = uncertainty.read_grid(args)
    assert (grid.beta_label, grid.betas) == ("β", [0.0, 0.2])


def test_runs_of_two_experiments_are_refused(runs_dir):
    change_run(runs_dir / "2-0-1", critic_init="torch", gamma=0.9)
    with pytest.raises(SystemExit, match="differ in critic_init, gamma"):
        uncertainty.main(uncertainty.Args(str(runs_dir)))


def test_gaussian_ratio_is_equation_5():
    # Phi(1.5595) = 0.94056 = (10 - pi / 8) / (10 - pi / 4 + 1)
    ratio = uncertainty.gaussian_ratio(10)
    phi = 0.5 * (1 + math.erf(ratio / math.sqrt(2)))
    assert phi == pytest.approx((10 - math.pi / 8) / (11 - math.pi / 4))
    # Harter's table: the expected maximum of 50 standard normal values is 2.24907
    assert uncertainty.gaussian_ratio(50) == pytest.approx(2.249, abs=0.01)


# --- runs that a study reads ---


def test_unfinished_runs_are_left_out_and_the_newest_of_equal_runs_counts(runs_dir, capsys):
    change_run(runs_dir / "2-0-1", "running")
    unplayed = runs_dir / "2-0.2-1" / "result.json"  # its last evaluation has no episodes
    result = json.loads(unplayed.read_text())
    result["history"].append({"step": 21})
    unplayed.write_text(json.dumps(result))
    shutil.copytree(runs_dir / "3-0-1", runs_dir / "copy")
    change_run(runs_dir / "copy", score=123.0, run_name="copy", log_frequency=5)
    runs = common.ended_runs(runs_dir)
    names = {run.path.name for run in runs}
    assert names == {"copy", "3-0.2-1", "3-0.2-2", "3-0.2-1-ind"}
    lines = [f"left out: {name} is not finished or has no score" for name in ("2-0-1", "2-0.2-1")]
    assert sorted(capsys.readouterr().err.splitlines()) == lines


# --- ablations ---


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({}, "full method"),
        ({"seed": 7, "gradient_steps": 5}, "full method"),
        ({"beta": 0.0}, "no BC"),
        ({"num_critics": 2}, "two critics"),
        ({"bc_inflation": 1.0}, "no BC inflation"),
        ({"independent_targets": True}, "independent targets"),
        ({"critic_init": "torch"}, "PyTorch init"),
        ({"beta": 0.5}, None),
        ({"num_critics": 20}, None),
        ({"beta": 0.0, "num_critics": 2}, None),
    ],
)
def test_ablation_is_read_from_the_arguments(changes, name):
    run = make_run(**changes)
    assert ablations.group(run.args, default_args(run.script, run.args["env_id"])) == name


def test_ablations_are_relative_to_the_defaults_of_the_task():
    antmaze = td3_bc_n.task_defaults("antmaze-large-diverse-v0")
    run = make_run(**{"env_id": "antmaze-large-diverse-v0", **antmaze})
    defaults = default_args(run.script, run.args["env_id"])
    assert ablations.group(run.args, defaults) == "full method"
    assert ablations.group(run.args | {"independent_targets": False}, defaults) == "shared targets"
    cheetah = make_run(env_id="halfcheetah-medium-v2", beta=0.0)._replace(script="sac_bc_n")
    defaults = default_args(cheetah.script, cheetah.args["env_id"])  # its task has beta = 0
    assert ablations.group(cheetah.args, defaults) == "full method"


def test_difference_is_in_percent_of_the_full_method():
    rows = ablations.compare(
        {
            "full method": [make_run([40, 60]), make_run([150])],  # 50 and 150: mean 100
            "no BC": [make_run([20]), make_run([40])],
            "two critics": [make_run([110]), make_run([110]), make_run(diverged=True)],
            "PyTorch init": [make_run(diverged=True)],
        }
    )
    assert rows["full method"][0] == [50, 150]
    assert rows["no BC"][1] == pytest.approx(-70)
    assert rows["no BC"][4] == "%"
    for name in ("two critics", "PyTorch init"):  # the other seeds would be a biased sample
        assert np.isnan(rows[name][0][-1]) and np.isnan(rows[name][1])


def test_difference_is_in_points_if_the_full_method_is_near_zero():
    for full, unit, value in ((9.0, "points", -5.0), (-3.0, "points", 7.0), (16.0, "%", -75.0)):
        groups = {"full method": [make_run([full])], "no BC": [make_run([4])]}
        row = ablations.compare(groups)["no BC"]
        assert (row[1], row[4]) == (pytest.approx(value), unit)


def test_interval_is_a_bootstrap_over_the_seeds_of_both_groups():
    assert ablations.difference([100, 100], [80, 120], True) == pytest.approx((0, -20, 20))
    assert ablations.difference([100, 120], [50, 50], False) == pytest.approx((-60, -70, -50))
    assert np.isnan(ablations.difference([100], [80, 120], True)[1])  # one seed has no interval
    rng = np.random.default_rng(1)
    full, ablation = rng.normal(100, 10, 40), rng.normal(80, 10, 40)
    value, low, high = ablations.difference(full, ablation, False)
    half_width = 1.96 * math.sqrt(full.var() / 40 + ablation.var() / 40)
    assert (high - low) / 2 == pytest.approx(half_width, rel=0.05)
    assert (high + low) / 2 == pytest.approx(value, abs=0.3)


def test_ablation_table_and_picture_of_run_directories(runs_dir, tmp_path, capsys):
    full = {"num_critics": 10, "beta": 0.02, "independent_targets": False}
    change_run(runs_dir / "2-0-1", **full, score=50.0)
    change_run(runs_dir / "2-0.2-1", **full, seed=2, score=70.0)
    change_run(runs_dir / "3-0-1", **full | {"beta": 0.0}, score=30.0)
    change_run(runs_dir / "3-0.2-1", **full | {"num_critics": 2}, score=66.0)
    change_run(runs_dir / "3-0.2-2", **full | {"beta": 0.5})
    change_run(runs_dir / "3-0.2-1-ind", "diverged", **full | {"num_critics": 2}, seed=2)
    ablations.main(ablations.Args(str(runs_dir), str(tmp_path / "out")))
    assert "left out: 3-0.2-2" in capsys.readouterr().err
    table = tables(tmp_path / "out" / "ablations.md")["ablations"]
    dataset = "td3_bc_n, tiny-maze2d-umaze-v0"
    assert row_of(table, dataset, "full method") == ["2", "60.0 ± 10.0", "-", "-"]
    assert row_of(table, dataset, "no BC") == ["1", "30.0", "-50.0 %", "-"]
    assert row_of(table, dataset, "two critics") == ["2", "1 of 2 diverged", "-", "-"]
    assert len(table) == 4
    assert (tmp_path / "out" / "ablations.png").exists()


def test_bars_of_the_ablations_are_their_differences():
    rows = {
        "full method": ([100.0], math.nan, math.nan, math.nan, "%"),
        "no BC": ([40.0], -60.0, -70.0, -50.0, "%"),
        "two critics": ([math.nan, 2.0], math.nan, math.nan, math.nan, "%"),
        "PyTorch init": ([3.0], math.nan, math.nan, math.nan, "%"),
    }
    figure = ablations.draw({"dataset": rows})
    no_bc = figure.axes[0]
    assert no_bc.get_title() == "no BC" and no_bc.patches[0].get_width() == -60
    assert list(no_bc.lines[0].get_xdata()) == [-70, -50]
    texts = [[text.get_text() for text in axes.texts] for axes in figure.axes]
    assert texts == [["-60 %"], ["1 of 2 diverged"], ["full method diverged"]]
    del rows["full method"]
    assert ablations.draw({"dataset": rows}).axes[2].texts[0].get_text() == "no full method"


def test_datasets_without_ablations_have_no_row(runs_dir, tmp_path):
    for path in runs_dir.iterdir():
        change_run(path, num_critics=10, beta=0.02, independent_targets=False)
    with pytest.raises(SystemExit, match="no run is one of the ablations"):
        ablations.main(ablations.Args(str(runs_dir), str(tmp_path)))


def test_ablations_of_different_lengths_are_refused(runs_dir):
    for path in runs_dir.iterdir():
        change_run(path, num_critics=10, beta=0.02)
    change_run(runs_dir / "2-0-1", num_critics=10, beta=0.0, gradient_steps=30)
    with pytest.raises(SystemExit, match="differ in gradient_steps"):
        ablations.main(ablations.Args(str(runs_dir)))


# --- efficiency ---


def test_score_against_training_time_of_real_runs(trained, tmp_path, capsys):
    """The time is by tools.speed, not that of the runs."""
    speed = {"script": "td3_bc_n", "num_critics": 3, "task": "tiny-maze2d-umaze-v0"}
    (tmp_path / "speed.json").write_text(json.dumps([speed | {"steps_per_second": 0.5}]))
    args = efficiency.Args((str(trained),), str(tmp_path / "speed.json"), str(tmp_path / "out"))
    efficiency.main(args)
    table = tables(tmp_path / "out" / "efficiency.md")["efficiency"]
    results = [json.loads((trained / f"3-0.2-{s}" / "result.json").read_text()) for s in (1, 2)]
    scores = [result["score"] for result in results]
    label = "td3_bc_n, beta 0.2, independent_targets False, num_critics 3"
    seeds, minutes, score, paper = row_of(table, label)
    assert (seeds, minutes, paper) == ("2", f"{20 / 0.5 / 60:.1f}", "-")
    assert score == f"{np.mean(scores):.1f} ± {np.std(scores, ddof=1) / 2**0.5:.1f}"
    assert "no speed of td3_bc_n, N = 2, tiny-maze2d-umaze-v0" in capsys.readouterr().err


def test_points_are_drawn_where_the_table_says():
    runs = [make_run([10.0 * s], seed=s, gradient_steps=8_000) for s in (1, 2)]
    slow = make_run([30.0], num_critics=50, gradient_steps=600)
    speeds = {("td3_bc_n", 10, "tiny-maze2d-umaze-v0"): 100.0}
    speeds["td3_bc_n", 50, "tiny-maze2d-umaze-v0"] = 0.1
    worse = make_run([5.0], gradient_steps=8_000, beta=1.0)
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


def test_convergence_of_a_real_run(trained, tmp_path):
    """The last value in the logs is that of the checkpoint."""
    run = trained / "3-0.2-1"
    convergence.main(convergence.Args([str(run)], str(tmp_path)))
    (row,) = tables(tmp_path / "convergence.md")["convergence"][1:]
    assert row[:3] == ["td3_bc_n, tiny-maze2d-umaze-v0, seed 1", "20", "40,000"]
    _, args, agent = load_agent(run)
    dataset = agent.preprocess(load_data(td3_bc_n, args)[0])
    measured = td3_bc_n.ensemble_statistics(agent, dataset, args.seed)["uncertainty/data_min"]
    assert row[4] == f"{measured:.3g}"
    assert (tmp_path / "convergence.png").exists()


def test_convergence_of_both_algorithms(trained, tmp_path, capsys):
    """SAC-BC-N updates its target networks at every step, so its T is half as long."""
    arguments = ["--num-critics", 2, "--gradient-steps", 20, "--eval-frequency", 10, *PAPER]
    arguments += ["--eval-episodes", 2, "--runs-dir", tmp_path, "--run-name"]
    for name in (["sac", "--gamma", 0.99], ["gamma-1", "--gamma", 1]):
        process = run_script("sac_bc_n", *arguments, *name)
        assert process.returncode == 0, process.stderr
    runs = [str(trained / "2-0-1"), str(trained / "3-0-1"), str(tmp_path)]
    convergence.main(convergence.Args(runs, str(tmp_path)))
    assert "gamma-1 (with gamma 1, values do not converge)" in capsys.readouterr().err
    rows = [row[:3] for row in tables(tmp_path / "convergence.md")["convergence"][1:]]
    assert rows == [
        ["td3_bc_n, tiny-maze2d-umaze-v0, num_critics 2, seed 1", "20", "40,000"],
        ["td3_bc_n, tiny-maze2d-umaze-v0, num_critics 3, seed 1", "20", "40,000"],
        ["sac_bc_n, tiny-maze2d-umaze-v0, seed 1", "20", "20,000"],
    ]


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
    (row,) = tables(tmp_path / "convergence.md")["convergence"][1:]
    steps, expected, best, last, q_0, q, error = (float(c.replace(",", "")) for c in row[1:])
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
    rows = tables(tmp_path / "convergence.md")["convergence"][1:]
    assert len(rows) == 5
    assert {row[3] for row in rows} == {"-"}, "any curve fits two evaluations"
