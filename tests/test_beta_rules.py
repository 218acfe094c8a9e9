"""studies.beta_rules: what the rules do to beta, in short runs on the bundled dataset."""

import json
import math

import pytest
import torch
import torch.nn.functional as F
from conftest import run_script

import td3_bc_n
from studies import beta_rules


@pytest.fixture(autouse=True)
def short_time_constant(monkeypatch):
    """2 / (1 (1 - 0.9)) = 20 steps."""
    changes = {"tau": 1.0, "gamma": 0.9, "batch_size": 16, "num_critics": 2}
    task = td3_bc_n.TASK_DEFAULTS["tiny-maze2d-umaze"] | changes
    monkeypatch.setitem(td3_bc_n.TASK_DEFAULTS, "tiny-maze2d-umaze", task)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def history(tmp_path):
    """Runs a rule and returns its evaluations."""

    def run(rule, **kwargs):
        kwargs = {"steps": 80, "eval_frequency": 5, "eval_episodes": 1} | kwargs
        beta_rules.main(beta_rules.Args((rule,), runs_dir=str(tmp_path), **kwargs))
        (path,) = tmp_path.glob(f"tiny-maze2d-umaze-v0__{rule}*/result.json")
        result = json.loads(path.read_text())
        assert result["status"] == "finished" and result["args"]["beta_rule"].startswith(rule)
        return result["history"]

    return run


def betas(history):
    return {entry["step"]: entry["beta"] for entry in history}


def test_with_a_fixed_beta_a_run_is_that_of_the_script(history, tmp_path):
    arguments = ["--tau", 1.0, "--gamma", 0.9, "--batch-size", 16, "--num-critics", 2]
    arguments += ["--gradient-steps", 20, "--eval-frequency", 10, "--eval-episodes", 2]
    names = ["--runs-dir", tmp_path, "--run-name", "script"]
    process = run_script("td3_bc_n", *arguments, *names)
    assert process.returncode == 0, process.stderr
    expected = json.loads((tmp_path / "script/result.json").read_text())["history"]
    assert len(expected) == 2
    for entry, other in zip(
        expected, history("fixed", steps=20, eval_frequency=10, eval_episodes=2), strict=True
    ):
        assert entry | {"beta": other["beta"], "bc": other["bc"]} == other
        assert other["beta"] == pytest.approx(0.2)


def test_a_checkpoint_is_continued(history, tmp_path, monkeypatch):
    """As a run without interruption. A directory is written once."""
    names = ["--runs-dir", tmp_path, "--run-name", "script"]
    arguments = ["--tau", 1.0, "--gamma", 0.9, "--batch-size", 16, "--num-critics", 2]
    run_script("td3_bc_n", *arguments, "--gradient-steps", 10, "--eval-episodes", 1, *names)
    short = history("fixed", steps=20, checkpoint=str(tmp_path / "script"))
    assert [entry["step"] for entry in short] == [15, 20]
    with pytest.raises(SystemExit, match="choose another --runs-dir"):
        history("fixed", steps=20)
    with pytest.raises(SystemExit, match="seed is 1, not 2"):  # it would be the same run
        history("dual", steps=20, checkpoint=str(tmp_path / "script"), seeds=(2,))
    monkeypatch.setitem(td3_bc_n.TASK_DEFAULTS["tiny-maze2d-umaze"], "independent_targets", True)
    with pytest.raises(SystemExit, match="independent_targets is False, not True"):
        history("dual", steps=20, checkpoint=str(tmp_path / "script"))
    monkeypatch.setitem(td3_bc_n.TASK_DEFAULTS["tiny-maze2d-umaze"], "independent_targets", False)
    whole = history("paper", steps=20)  # up to step 25 it is the same
    assert [entry["score"] for entry in whole[2:]] == [entry["score"] for entry in short]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rules": ()}, "expected a rule"),
        ({"seeds": ()}, "expected a rule"),
        ({"seeds": (-1,)}, "--seeds of at least 0"),
        ({"beta_start": float("nan")}, "--beta-start"),
        ({"beta_start": 0.0}, "--beta-start"),
        ({"clone_updates": 0}, "--clone-updates must be above 0"),
        ({"steps": 0}, "--steps must be larger than 0"),
        ({"checkpoint": "nowhere"}, "nowhere: not a checkpoint of td3_bc_n.py"),
    ],
)
def test_mistakes_are_one_line(changes, message, tmp_path):
    args = {"rules": ("fixed",), "runs_dir": str(tmp_path / "runs")} | changes
    with pytest.raises(SystemExit, match=message):
        beta_rules.main(beta_rules.Args(**args))
    assert not (tmp_path / "runs").exists()


def test_a_beta_that_is_not_finite_ends_the_run(tmp_path, capsys):
    args = beta_rules.Args(("gap",), steps=10, rate=float("nan"), runs_dir=str(tmp_path))
    beta_rules.main(args)
    (path,) = tmp_path.glob("*/result.json")
    result = json.loads(path.read_text())
    assert (result["status"], result["history"]) == ("diverged", [])
    assert "not finite" in capsys.readouterr().err


def test_beta_of_the_paper_falls_at_once(history):
    found = betas(history("paper"))
    assert [found[step] for step in (5, 25)] == pytest.approx([0.2, 0.2])  # 1.25 time constants
    assert [found[step] for step in (30, 80)] == pytest.approx([0.02, 0.02])


def test_decay_is_exponential_from_0625_to_375_time_constants(history):
    found = betas(history("decay"))
    assert [found[step] for step in (10, 75, 80)] == pytest.approx([0.2, 0.02, 0.02])
    rate = (40 - 12.5) / (75 - 12.5)
    assert found[40] == pytest.approx(0.2 * 10**-rate)


@pytest.mark.parametrize(("factor", "falls"), [(1e3, True), (0.1, False)])
def test_dual_brings_the_bc_term_to_epsilon(history, monkeypatch, factor, falls):
    monkeypatch.setattr(beta_rules, "cloning_error", lambda dataset, updates: factor)
    found = betas(history("dual"))
    assert (found[80] < found[40] < 0.2) if falls else (found[80] > found[40] > 0.2)


def test_gap_lowers_beta_while_the_gain_is_small(history):
    """By the factor e^-rate at each actor update; the last one comes after the evaluation."""
    found = betas(history("gap", delta=1e3, rate=0.1))
    assert found[80] == pytest.approx(0.2 * math.exp(-0.1 * 39), rel=1e-3)


def test_log_beta_stays_above_minus_7(history):
    found = betas(history("gap", delta=1e3, rate=1.0))
    assert found[80] == pytest.approx(math.exp(-7))


def test_cloning_error_is_that_of_an_imitating_policy():
    data, _, _ = td3_bc_n.load_data("tiny-maze2d-umaze-v0")
    data = td3_bc_n.Transitions(*map(torch.as_tensor, data))
    torch.manual_seed(0)
    start, end = (beta_rules.cloning_error(data, updates) for updates in (1, 600))
    assert end < start
    imitable = data._replace(actions=data.obs[:, :2].tanh())
    assert beta_rules.cloning_error(imitable, 600) < 0.05 * end


def test_the_gradient_of_aspc_is_that_of_an_update_with_another_beta():
    """Finite differences, on a new batch: the last update with a slightly larger beta."""
    torch.manual_seed(0)
    agent = td3_bc_n.Agent(4, 2, td3_bc_n.Args(num_critics=2)).double()

    def make_batch():
        obs, actions = torch.randn(64, 4).double(), torch.rand(64, 2).double() * 2 - 1
        return td3_bc_n.Transitions(obs, actions, obs[:, 0], obs, obs[:, 0])

    batch, new_batch = make_batch(), make_batch()
    optimizer = torch.optim.Adam(agent.actor.parameters(), lr=3e-4)
    beta, old_q = torch.tensor(0.3), torch.tensor(0.1)
    for _ in range(3):
        before = {n: p.detach().clone().requires_grad_() for n, p in agent.actor.named_parameters()}
        td3_bc_n.optimizer_step(optimizer, td3_bc_n.actor_loss(agent, batch, beta)[0])
    gradient, q = beta_rules.aspc_gradient(agent, before, optimizer, batch, new_batch, beta, old_q)
    obs, actions = new_batch.obs, new_batch.actions
    assert q == pytest.approx(agent.critics(obs, agent.actor(obs)).amin(dim=0).mean().item())

    bc = F.mse_loss(torch.func.functional_call(agent.actor, before, batch.obs), batch.actions)
    bc_gradients = torch.autograd.grad(bc, list(before.values()))
    scale = agent.critics(obs, agent.actor(obs)).amin(dim=0).abs().mean().item()

    def objective(change_of_beta):
        with torch.no_grad():
            for p, g in zip(agent.actor.parameters(), bc_gradients, strict=True):
                v = optimizer.state[p]["exp_avg_sq"] / (1 - 0.999**3)
                p.sub_(3e-4 * change_of_beta * g / (v.sqrt() + 1e-8))
            q = agent.critics(obs, agent.actor(obs)).amin(dim=0)
            # mean|Q| is a scale that is held fixed
            loss = -q.mean() / scale + beta * F.mse_loss(agent.actor(obs), actions)
            loss += ((q.mean() - old_q) / scale) ** 2
            for p, g in zip(agent.actor.parameters(), bc_gradients, strict=True):
                v = optimizer.state[p]["exp_avg_sq"] / (1 - 0.999**3)
                p.add_(3e-4 * change_of_beta * g / (v.sqrt() + 1e-8))
        return loss.item()

    numeric = (objective(1e-5) - objective(-1e-5)) / 2e-5 * beta.item()
    assert gradient.item() == pytest.approx(numeric, rel=1e-3)


def test_aspc_takes_a_step_at_every_tenth_actor_update(history):
    found = betas(history("aspc"))
    assert [found[step] == pytest.approx(0.2) for step in (5, 20, 25)] == [True, True, False]
    steps = [abs(math.log(found[step + 5] / found[step])) for step in (20, 40, 60)]
    assert all(1e-6 < one < 2.1e-3 for one in steps)
    assert all(found[step + 5] == found[step + 15] for step in (20, 40, 60))
