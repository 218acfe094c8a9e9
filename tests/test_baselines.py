"""The methods that the paper compares with: golden figures, resuming, command lines.

golden/baselines.json holds losses and final weights of twenty updates by the code of the authors of
TD3-BC-N, as updates.json does for their own methods (test_golden.py).
"""

import importlib
import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ROOT, run_script
from reference import make_optimizers, set_learning_rate
from test_golden import ROWS, critic_parameters, fill, fill_network, summary
from test_resume import arguments, assert_same_state, load, losses_of
from test_runs import scalars

import sac_bc_n
from baselines import bc, cql, edac, iql, msg, td3_bc

GOLDEN = json.loads((Path(__file__).parent / "golden/baselines.json").read_text())
SCRIPTS = [td3_bc, edac, msg, cql, iql, bc]
NAMES = [script.ALGORITHM for script in SCRIPTS]
S, A, N, B = 5, 2, 3, 32


# --- Twenty updates equal those of the authors' code ---


def twins(critics):
    """The tensors of two critics made of nn.Linear: all layers of the first, then the second."""
    layers = list(zip(critics.weights, critics.biases, strict=True))
    return [part for k in range(2) for w, b in layers for part in (w[k].T, b[k, 0])]


def fill_twins(critics, net):
    with torch.no_grad():
        for i, part in enumerate(twins(critics)):
            layer, is_bias = divmod(i % (2 * len(critics.weights)), 2)
            first_key = 100 * net + (50 if i >= 2 * len(critics.weights) else 0)
            fan_in = S + A if layer == 0 else 256
            part.copy_(fill(first_key + 10 * layer + is_bias, part.shape, fan_in**-0.5))


@pytest.mark.parametrize("name", GOLDEN)
def test_twenty_updates_equal_the_authors_code(name, monkeypatch):
    golden, script = GOLDEN[name], sac_bc_n
    if name != "sac_n":
        script = importlib.import_module(f"baselines.{name}")
    with_twins = name in ("td3_bc", "cql", "iql")
    args = script.Args() if with_twins else script.Args(num_critics=N)
    for argument, key in {
        "alpha": "alpha",
        "eta": "eta",
        "alpha_prime": "alpha_prime",
        "beta_lcb": "beta",
        "num_samples": "repeats",
        "expectile": "expectile",
        "temperature": "temperature",
    }.items():
        if key in golden:
            setattr(args, argument, golden[key])
    agent = script.Agent(S, A, args).double()
    for net, critics in enumerate((agent.critics, agent.critics_target)):
        if with_twins:
            fill_twins(critics, net)
        else:
            fill_network(critic_parameters(critics), net)
    networks = {"policy": list(agent.actor.parameters())}
    fill_network(networks["policy"][name == "iql" :], 2)  # IQL's log std comes first, and is 0
    if name == "td3_bc":
        networks["policy_target"] = list(agent.actor_target.parameters())
        fill_network(networks["policy_target"], 3)
    if name == "iql":
        networks["value"] = list(agent.value.parameters())
        fill_network(networks["value"], 4)
    optimizers = make_optimizers(agent, args)

    def uniform(actions):  # The authors draw CQL's uniform actions in [-1, 1] with NumPy.
        return torch.tensor(np.random.uniform(-1, 1, size=actions.shape) / 2 + 0.5)

    monkeypatch.setattr(torch, "rand_like", uniform)
    columns = [fill(500, (ROWS, S), 1), fill(501, (ROWS, A), 1), fill(502, (ROWS,), 1)]
    columns += [fill(503, (ROWS, S), 1), (torch.arange(ROWS) % 7 == 0).double()]
    torch.manual_seed(7)
    np.random.seed(7)
    losses = {"critic_loss": [], "policy_loss": [], "alpha_loss": [], "value_loss": []}
    for step in range(1, 21):
        rows = torch.randint(0, ROWS, (B,))
        batch = script.Transitions(*(column[rows] for column in columns))
        set_learning_rate(script, optimizers, step, args)
        more = {"sac_n": (0.0,), "td3_bc": (step % 2 == 0,)}.get(name, ())  # beta, update_actor
        metrics = script.update(agent, optimizers, batch, *more, args)
        for key, values in losses.items():
            metric = f"losses/{key.replace('policy', 'actor')}"
            if metric in metrics:
                values.append(metrics[metric].item())

    for key, values in losses.items():
        assert values == pytest.approx(golden.get(key, []), rel=1e-9, abs=1e-9), key
    tensors = twins if with_twins else critic_parameters
    networks["critics"] = tensors(agent.critics)
    networks["critics_target"] = tensors(agent.critics_target)
    for key, parameters in networks.items():
        actual = torch.tensor(summary(parameters), dtype=torch.float64)
        expected = torch.tensor(golden[key], dtype=torch.float64)
        torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9, msg=key)
    if "log_alpha" in golden:
        assert agent.log_alpha.item() == pytest.approx(golden["log_alpha"], rel=1e-9)


# --- Runs ---


def settings(name, steps):
    """A run of test_resume.py. BC has no critics; IQL's learning rate falls in all 12 steps."""
    options = list(map(str, arguments("td3_bc_n", steps)))
    if name == "bc":
        index = options.index("--num-critics")
        del options[index : index + 2]
    return options + (["--lr-decay-steps", "12"] if name == "iql" else [])


METRICS = {
    "td3_bc": {"losses/q_term", "losses/bc"},
    "edac": {"losses/diversity", "charts/alpha"},
    "msg": {"losses/cql", "charts/alpha"},
    "cql": {"losses/cql", "charts/alpha"},
    "iql": {"losses/value_loss", "losses/bc", "charts/actor_lr"},
}


@pytest.mark.parametrize("name", NAMES)
def test_a_resumed_run_equals_a_run_without_interruption(name, run):
    script = f"baselines/{name}"
    process, whole = run(script, *settings(name, 12))
    assert f"results in {whole}\n" in process.stdout and "fine-tune" not in process.stdout
    part = run(script, *settings(name, 7))[1]
    checkpoint = load(part)
    assert checkpoint["algorithm"] == name
    checkpoint["history"].pop()  # 7 was the last step of the shorter run, and evaluated
    torch.save(checkpoint, part / "checkpoint.pt")
    run(script, "--resume", part, "--gradient-steps", 12)
    assert_same_state(whole, part)
    values, _ = scalars(part)
    assert losses_of(whole) == losses_of(part)
    steps = list(range(2, 13, 2)) if name == "td3_bc" else list(range(1, 13))
    assert [step for step, _ in values["losses/actor_loss"]] == steps

    expected = {"losses/actor_loss", "charts/SPS", "charts/score"}
    if name != "bc":
        expected |= METRICS[name] | {"losses/critic_loss", "losses/q_values", "losses/q_min"}
        expected |= {"losses/q_std", "uncertainty/random_std"}
    assert expected <= set(values) and "charts/beta" not in values
    if name == "iql":
        rates = [1.5e-4 * (1 + math.cos(math.pi * step / 12)) for step in range(12)]
        assert [rate for _, rate in values["charts/actor_lr"]] == pytest.approx(rates)


def test_the_actor_of_iql_learns_with_its_own_rate(run):
    """With --lr-decay-steps 1 its rate is 0 from the second step on; the critics go on."""
    decay = ["--lr-decay-steps", "1"]
    first, last = (run("baselines/iql", *settings("iql", n), *decay)[1] for n in (1, 3))
    first, last = load(first)["agent"], load(last)["agent"]
    changed = {key.split(".")[0] for key in first if not torch.equal(first[key], last[key])}
    assert changed == {"critics", "critics_target", "value"}


def test_a_baseline_is_run_by_its_path(tmp_path):
    """The bundled dataset, of D4RL's kind, needs d4rl_tasks.py, which is in the root."""
    options = ["--gradient-steps", "2", "--eval-episodes", "0", "--batch-size", "8"]
    options += ["--runs-dir", tmp_path, "--run-name", "r"]
    command = [sys.executable, "baselines/iql.py", *options]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    result = json.loads((tmp_path / "r/result.json").read_text())
    assert (result["algorithm"], result["status"], result["step"]) == ("iql", "finished", 2)


# --- Arguments ---

DEFAULTS = {
    ("td3_bc", "antmaze-large-play-v0"): dict(
        alpha=2.5, reward_transform="antmaze", eval_episodes=100, critic_init="torch"
    ),
    ("td3_bc", "hopper-medium-v2"): dict(alpha=2.5, num_critics=2, eval_episodes=10),
    ("edac", "hopper-medium-v2"): dict(num_critics=50, eta=1.0, gradient_steps=3_000_000),
    ("edac", "halfcheetah-medium-v2"): dict(num_critics=10, eta=1.0, independent_targets=False),
    ("edac", "halfcheetah-medium-expert-v2"): dict(num_critics=10, eta=5.0),
    ("edac", "walker2d-medium-expert-v2"): dict(num_critics=10, eta=5.0),
    ("edac", "maze2d-large-v1"): dict(num_critics=10, eta=0.1, eval_episodes=100),
    ("edac", "antmaze-umaze-v2"): dict(num_critics=10, eta=1.0, independent_targets=False),
    ("edac", "pen-human-v1"): dict(num_critics=20, eta=1000.0, reward_transform="standardize"),
    ("edac", "D4RL/pen/cloned-v2"): dict(num_critics=20, eta=10.0),
    ("edac", "door-cloned-v1"): dict(num_critics=50, eta=200.0),
    ("msg", "antmaze-large-diverse-v0"): dict(
        num_critics=64, beta_lcb=-8.0, alpha_prime=0.1, reward_transform="antmaze"
    ),
    ("msg", "walker2d-medium-v2"): dict(num_critics=4, beta_lcb=-4.0, independent_targets=True),
    ("cql", "hopper-medium-v2"): dict(alpha_prime=5.0, num_samples=10, num_critics=2),
    ("cql", "pen-human-v1"): dict(reward_transform="standardize", critic_init="torch"),
    ("iql", "hopper-medium-v2"): dict(expectile=0.7, temperature=3.0, reward_transform="raw"),
    ("iql", "antmaze-medium-play-v2"): dict(
        expectile=0.9, temperature=10.0, reward_transform="minus_one", eval_episodes=100
    ),
    ("iql", "D4RL/door/human-v2"): dict(
        expectile=0.7, temperature=0.5, reward_transform="standardize"
    ),
    ("bc", "maze2d-umaze-v1"): dict(eval_episodes=100),
}


@pytest.mark.parametrize(("name", "env_id"), DEFAULTS, ids=map("-".join, DEFAULTS))
def test_the_defaults_are_the_published_settings_of_the_task(name, env_id, monkeypatch):
    monkeypatch.setattr(sys, "argv", [name, "--env-id", env_id])
    args = vars(importlib.import_module(f"baselines.{name}").parse_args()[0])
    published = DEFAULTS[name, env_id]
    assert {argument: args[argument] for argument in published} == published


@pytest.mark.parametrize("script", SCRIPTS, ids=NAMES)
def test_without_arguments_a_short_run_on_the_bundled_dataset(script, monkeypatch):
    monkeypatch.setattr(sys, "argv", [script.ALGORITHM])
    args = vars(script.parse_args()[0])
    assert args["env_id"] == "tiny-maze2d-umaze-v0"
    assert {name: args[name] for name in script.TINY} == script.TINY
    assert not {"beta", "bc_form", "bc_inflation"} & set(args)


def test_impossible_settings_are_one_clear_line():
    process = run_script("baselines/iql", "--expectile", 7)
    assert (process.returncode, process.stderr) == (1, "expectile must be from 0 to 1, not 7.0")
    process = run_script("baselines/msg", "--alpha-prime", -1)
    assert "alpha_prime must be from 0" in process.stderr


def test_iql_subtracts_one_from_rewards_of_antmaze():
    args, rewards = iql.Args(reward_transform="minus_one"), np.array([0.0, 1.0], dtype="f4")
    agent = iql.Agent(1, 1, args)
    data = iql.Transitions(*(rewards.reshape(2, 1),) * 2, rewards, rewards.reshape(2, 1), rewards)
    iql.set_statistics(agent, data, args)
    assert agent.preprocess(data).rewards.tolist() == [-1.0, 0.0]
