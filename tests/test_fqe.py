"""tools.fqe: values that are known, and tables of real short runs."""

import csv
import json
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import ROOT, run_script, write_d4rl_file

import d4rl_tasks
from baselines import bc
from tools import fqe
from tools.runs import load_run

SHORT = ["--gradient-steps", 4, "--eval-frequency", 4, "--eval-episodes", 1, "--batch-size", 16]
RUNS = {
    "td3": ["td3_bc_n", "--num-critics", 2],
    "sac": ["sac_bc_n", "--num-critics", 2],
    "bc": ["baselines/bc"],
    "unplayed": ["baselines/iql", "--eval-episodes", 0],
}
BAR = SimpleNamespace(update=lambda: None)


@pytest.fixture(autouse=True)
def small_batches(monkeypatch):
    monkeypatch.setattr(fqe, "BATCH_SIZE", 32)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    directory = tmp_path_factory.mktemp("fqe")
    for name, (script, *arguments) in RUNS.items():
        names = ["--env-id", "tests/swing-v0", "--runs-dir", directory, "--run-name", name]
        assert run_script(script, *names, *SHORT, *arguments).returncode == 0
    return directory


def evaluate(trained, *names, **arguments):
    arguments = {"gradient_steps": 5, "num_critics": 2} | arguments
    fqe.main(fqe.Args(tuple(str(trained / name) for name in names), **arguments))


def constant_policy(action):
    """An agent of bc.py that always takes one action."""
    agent = bc.Agent(2, 1, bc.Args())
    with torch.no_grad():
        agent.actor.mean.weight.zero_()
        agent.actor.mean.bias.fill_(np.arctanh(action))
    return agent


def made_data(dones):
    """The reward is 2 + a, whatever the state."""
    generator = torch.Generator().manual_seed(0)
    obs = torch.randn(2_000, 2, generator=generator)
    actions = torch.rand(2_000, 1, generator=generator) * 2 - 1
    rewards = 2 + actions[:, 0]
    return bc.Transitions(obs, actions, rewards, obs.flip(0), torch.full((2_000,), dones))


@pytest.mark.parametrize(("dones", "horizon"), [(0.0, 5.0), (1.0, 1.0)])
def test_the_value_of_a_known_policy_is_found(dones, horizon):
    """V is r / (1 - gamma) without terminations and r with them, here for gamma 0.8."""
    args = fqe.Args((), gradient_steps=600)
    starts = torch.arange(2_000) % 100 == 0
    for action, reward in ((0.5, 2.5), (-0.5, 1.5)):
        data = made_data(dones)
        row = fqe.evaluate_policy(constant_policy(action), data, starts, 0.8, args, BAR)
        assert row["v"] == pytest.approx(reward * horizon, rel=0.05)
        assert row["v_low"] < row["v"] < row["v_high"]
        expected = (data.actions - action).square().mean().item()
        assert row["bc"] == pytest.approx(expected, rel=1e-5) and row["min_q"] is None


class TwoConstants(torch.nn.Module):
    """Two critics with the values 0 and 10 everywhere."""

    def __init__(self, *_):
        super().__init__()
        self.values = torch.nn.Parameter(torch.tensor([[0.0], [10.0]]))

    def forward(self, obs, actions):
        return self.values.expand(-1, len(obs))


def test_targets_are_the_mean_of_the_critics_not_their_minimum(monkeypatch):
    losses = []
    monkeypatch.setattr(fqe, "CriticEnsemble", TwoConstants)
    monkeypatch.setattr(fqe, "optimizer_step", lambda _, loss: losses.append(loss.item()))
    data = made_data(0.0)
    data = data._replace(rewards=torch.full((2_000,), 0.01))  # 10 in units of the smallest std
    starts, args = torch.ones(2_000, dtype=torch.bool), fqe.Args((), gradient_steps=1)
    fqe.evaluate_policy(constant_policy(0.1), data, starts, 0.5, args, BAR)
    assert losses == pytest.approx([12.5**2 + 2.5**2])  # y = 10 + 0.5 (0 + 10) / 2


def test_episodes_begin_where_the_observation_is_not_the_next_one_of_the_row_before():
    obs = np.array([[0.0], [1.0], [5.0], [6.0], [6.0]])
    data = SimpleNamespace(obs=obs, next_obs=np.array([[1.0], [2.0], [6.0], [7.0], [8.0]]))
    assert fqe.first_states(data, "my/data-v0").tolist() == [True, False, True, False, True]


def test_in_d4rls_files_episodes_begin_after_terminals_too(tmp_path):
    """There the next row of a terminal is its next observation. In a maze, a done is no end."""
    path, flags = tmp_path / "file.hdf5", np.arange(20)
    write_d4rl_file(path, terminals=flags == 4, timeouts=flags == 11)
    data, _ = d4rl_tasks.load("hopper-medium-v2", path)
    data = bc.Transitions(*data.values())
    assert np.flatnonzero(fqe.first_states(data, "hopper-medium-v2")).tolist() == [0, 5, 11]
    assert np.flatnonzero(fqe.first_states(data, "maze2d-umaze-v1")).tolist() == [0, 11]
    assert np.flatnonzero(fqe.first_states(data, "my/data-v0")).tolist() == [0, 11]


def test_the_table_is_ordered_by_value_and_has_all_that_is_known(trained, tmp_path, capsys):
    evaluate(trained, "td3", "sac", "bc", "unplayed", csv=str(tmp_path / "fqe.csv"))
    captured = capsys.readouterr()
    header, _, *lines = captured.out.splitlines()
    assert header == "| run | V(s0) | 95 % interval | BC | min Q | score |"
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines[:4]]
    values = [float(row[1]) for row in cells]
    assert values == sorted(values, reverse=True) and {row[0] for row in cells} == set(RUNS)
    by_name = {row[0]: row for row in cells}
    assert by_name["bc"][4] == "-" and by_name["unplayed"][5] == "-"
    score = json.loads((trained / "td3/result.json").read_text())["score"]
    assert by_name["td3"][5] == f"{score:.1f}"
    assert lines[4].startswith("rank correlation of V(s0) with the score: ")
    assert len(lines) == 5  # of three runs with a score, only two have critics
    with open(tmp_path / "fqe.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["run"] for row in rows] == [row[0] for row in cells]
    assert {row["step"] for row in rows} == {"4"} and float(rows[0]["v"]) >= float(rows[1]["v"])


def test_the_own_estimate_is_the_minimum_of_the_critics_at_first_states(trained):
    evaluate(trained, "td3", seed=5)
    row = json.loads((trained / "td3/fqe.json").read_text())
    _, _, agent, dataset, _, _ = load_run(trained / "td3", needs_env=False)
    obs = torch.as_tensor(dataset.obs[fqe.first_states(dataset, "tests/swing-v0")])
    assert len(obs) == 10  # the episodes of the dataset
    with torch.no_grad():
        obs = agent.normalize(obs)
        expected = agent.critics(obs, agent.actor(obs)).min(dim=0).values.mean().item()
    assert row["min_q"] == pytest.approx(expected, rel=1e-5)


def test_known_results_are_used_again_until_settings_or_the_run_change(trained, monkeypatch):
    evaluated, evaluate_policy = [], fqe.evaluate_policy
    monkeypatch.setattr(
        fqe, "evaluate_policy", lambda *args: evaluated.append(1) or evaluate_policy(*args)
    )
    evaluate(trained, "td3", "bc", gradient_steps=3)
    evaluate(trained, "td3", "bc", gradient_steps=3)
    assert len(evaluated) == 2
    evaluate(trained, "bc", gradient_steps=3, gamma=0.5)
    assert len(evaluated) == 3
    result, checkpoint = trained / "td3/result.json", trained / "td3/checkpoint.pt"
    text, content = result.read_text(), checkpoint.read_bytes()
    result.write_text(text.replace('"step": 4', '"step": 5'))
    evaluate(trained, "td3", gradient_steps=3)
    assert len(evaluated) == 3, "online, result.json is written between two checkpoints"
    torch.save(torch.load(checkpoint, weights_only=True) | {"step": 5}, checkpoint)
    evaluate(trained, "td3", gradient_steps=3)
    result.write_text(text)
    checkpoint.write_bytes(content)
    assert len(evaluated) == 4


def test_discount_factors_of_0_and_1(trained, run):
    """0 is a discount factor like others. With 1, the values have no bounds."""
    evaluate(trained, "bc", gamma=0.0)
    assert json.loads((trained / "bc/fqe.json").read_text())["settings"]["gamma"] == 0
    (trained / "bc/fqe.json").unlink()
    _, other = run("td3_bc_n", "--env-id", "tests/swing-v0", *SHORT, "--gamma", 1)
    with pytest.raises(SystemExit, match=r"the runs have gamma 1.* choose one with --gamma"):
        fqe.main(fqe.Args((str(other),)))


def test_values_above_the_largest_possible_return_are_clipped_and_reported(
    trained, monkeypatch, capsys
):
    """Pendulum's rewards are below 0. Two constant critics say 5."""
    monkeypatch.setattr(fqe, "CriticEnsemble", TwoConstants)
    losses = []
    monkeypatch.setattr(fqe, "optimizer_step", lambda _, loss: losses.append(loss.item()))
    evaluate(trained, "bc", seed=9, gradient_steps=1, gamma=0.1)
    message = "do not trust V(s0), it exceeds the largest possible return"
    assert f"bc: {message}, 0.0" in capsys.readouterr().err
    assert json.loads((trained / "bc/fqe.json").read_text())["impossible"] == 1
    _, _, _, dataset, _, _ = load_run(trained / "bc", needs_env=False)
    largest = (-dataset.rewards.min() / dataset.rewards.std(ddof=1)).item()
    # y is the reward alone, from -largest to 0, and the loss is (0 - y)^2 + (10 - y)^2
    assert 0 <= losses[0] - 10**2 <= 2 * largest**2 + 20 * largest
    evaluate(trained, "bc", seed=9, gradient_steps=1, gamma=0.99)  # 5 is within a tenth of 1,000
    assert json.loads((trained / "bc/fqe.json").read_text())["impossible"] == 0
    (trained / "bc/fqe.json").unlink()


def test_spearmans_rank_correlation():
    assert fqe.rank_correlation([1, 2, 3, 4], [10, 20, 25, 90]) == pytest.approx(1)
    assert fqe.rank_correlation([1, 2, 3, 4], [1, 3, 2, 4]) == pytest.approx(0.8)
    ties = fqe.rank_correlation([1, 2, 3, 4], [5, 5, 5, 9])  # ranks 2, 2, 2 and 4
    assert ties == pytest.approx(np.corrcoef([1, 2, 3, 4], [2, 2, 2, 4])[0, 1])


def test_runs_with_impossible_values_or_far_from_the_data_are_last(trained, monkeypatch, capsys):
    """Whatever their V(s0): nobody should choose them."""
    rows = iter([(-1.0, 0.5, 1.0), (-2.0, 0.0, 2.1), (-9.0, 0.0, 1.0), (-8.0, 0.0, 2.0)])
    more = {"v_low": 0.0, "v_high": 0.0, "min_q": None}
    keys = "v", "impossible", "bc"
    evaluated = (dict(zip(keys, row, strict=True)) | more for row in rows)
    monkeypatch.setattr(fqe, "evaluate_policy", lambda *_: next(evaluated))
    evaluate(trained, "bc", "td3", "sac", "unplayed", seed=10)
    captured = capsys.readouterr()
    lines = captured.out.splitlines()[2:6]
    assert [line.split(" | ")[1] for line in lines] == ["-8.0", "-9.0", "-1.0", "-2.0"]
    warnings = captured.err.splitlines()
    assert len(warnings) == 2 and "50% of the next values exceed the largest" in warnings[0]
    assert "do not trust V(s0), BC 2.100 is more than twice the smallest, 1.000" in warnings[1]


def test_runs_that_cannot_be_compared_are_one_line(trained, run, capsys):
    _, other = run("td3_bc_n", "--env-id", "mujoco/hopper/medium-v0", *SHORT, "--num-critics", 2)
    with pytest.raises(SystemExit, match=r"differ in their dataset \(.*swing-v0.*medium-v0"):
        fqe.main(fqe.Args((str(trained / "td3"), str(other))))
    _, other = run("td3_bc_n", "--env-id", "tests/swing-v0", *SHORT, "--gamma", 0.9)
    with pytest.raises(SystemExit, match=r"different discount factors \[0.9, 0.99\]"):
        fqe.main(fqe.Args((str(trained / "td3"), str(other))))
    online = ["--env-steps", 2, "--learning-starts", 2, "--eval-episodes", 1, "--num-critics", 2]
    _, other = run("finetune_td3_bc_n", "--env-id", "Pendulum-v1", *online)
    with pytest.raises(SystemExit, match="no run is left"):
        fqe.main(fqe.Args((str(other),)))
    assert "was trained from scratch, without a dataset" in capsys.readouterr().err


def test_results_that_cannot_be_read_or_stored_are_made_again(trained, tmp_path, capsys):
    path = shutil.copytree(trained / "td3", tmp_path / "run")
    (path / "fqe.json").write_text('{"settings": ')  # the process was killed
    evaluate(tmp_path, "run", seed=11)
    (path / "fqe.json").unlink()
    (path / "fqe.json").mkdir()
    evaluate(tmp_path, "run", seed=11)
    captured = capsys.readouterr()
    assert captured.out.count("| run | V(s0) |") == 2 and "not stored: " in captured.err


def test_runs_without_a_policy_are_one_line(trained, tmp_path, capsys):
    path = shutil.copytree(trained / "td3", tmp_path / "young")
    (path / "checkpoint.pt").write_text("not a checkpoint")
    with pytest.raises(SystemExit, match=r"checkpoint\.pt: not a checkpoint of this project"):
        fqe.main(fqe.Args((str(path),)))
    (path / "checkpoint.pt").unlink()  # fine-tuning writes its first result before
    with pytest.raises(SystemExit, match="no run is left"):
        fqe.main(fqe.Args((str(path),)))
    assert "left out: young has no checkpoint yet" in capsys.readouterr().err
    file = str(ROOT / "docs/results/hopper.csv")
    with pytest.raises(SystemExit, match=r"hopper\.csv: a CSV file has no policies"):
        fqe.main(fqe.Args((file,)))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"gradient_steps": 0}, "must be at least 1"),
        ({"gamma": 1.0}, "--gamma must be"),
        ({"seed": -1}, "--seed at least 0"),
        ({"csv": "nowhere/fqe.csv"}, "not a file in an existing directory"),
    ],
)
def test_mistakes_are_one_line_before_the_work(arguments, message, monkeypatch):
    monkeypatch.setattr(fqe, "choose_runs", lambda _: pytest.fail("started"))
    with pytest.raises(SystemExit, match=message):
        fqe.main(fqe.Args(("runs",), **arguments))
