"""The methods that the paper compares with: golden figures, resuming, command lines, train steps.

golden/baselines.json holds losses and final weights of twenty updates by the code of the authors of
TD3-BC-N, as updates.json does for their own methods (test_golden.py).
"""

import copy
import difflib
import importlib
import json
import math
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import tape
import torch
from common_blocks import PAIRS, blocks, merged
from conftest import ROOT, run_script
from test_golden import ROWS, critic_parameters, fill, fill_network, summary
from test_resume import arguments, assert_same_state, load, losses_of
from test_runs import scalars
from torch._subclasses.fake_tensor import FakeTensorMode

import sac_bc_n
from baselines import bc, cql, edac, iql, msg, td3_bc

GOLDEN = json.loads((Path(__file__).parent / "golden/baselines.json").read_text())
SCRIPTS = [td3_bc, edac, msg, cql, iql, bc]
NAMES = [script.ALGORITHM for script in SCRIPTS]
ALL = pytest.mark.parametrize("script", SCRIPTS, ids=NAMES)
S, A, N, B = 5, 2, 3, 32


def make_optimizers(agent, args, dtype=torch.float32):
    """The optimizers of the main programs. IQL's actor has a tensor as its learning rate."""
    parts = {name: getattr(agent, name, None) for name in ("critics", "actor", "value")}
    parameters = {name: part.parameters() for name, part in parts.items() if part is not None}
    if hasattr(agent, "log_alpha"):
        parameters["alpha"] = [agent.log_alpha]
    adam = partial(torch.optim.Adam, lr=args.learning_rate, fused=True)
    optimizers = {name: adam(part) for name, part in parameters.items()}
    if hasattr(agent, "value"):
        optimizers["actor"].param_groups[0]["lr"] = torch.tensor(args.learning_rate, dtype=dtype)
    return optimizers


def set_learning_rate(script, optimizers, step, args):
    if script is iql:
        lr = iql.actor_learning_rate(step, args)
        optimizers["actor"].param_groups[0]["lr"].fill_(lr)


def update_actor(script, step):
    """TD3+BC alone updates its actor every second step."""
    return (step % 2 == 0,) if script is td3_bc else ()


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
    optimizers = make_optimizers(agent, args, dtype=torch.float64)

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
        beta = (0.0,) if name == "sac_n" else ()
        more = *beta, *update_actor(script, step)
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


@pytest.mark.slow
def test_three_ways_of_running(tmp_path):
    """From the root by its path and as a module, and a copy of the file alone."""
    short = ["--gradient-steps", "2", "--eval-episodes", "0", "--batch-size", "8"]
    tiny = [*short, "--runs-dir", tmp_path / "runs"]  # the bundled dataset, of D4RL's kind
    shutil.copy(ROOT / "baselines/iql.py", tmp_path)
    alone = [*short, "--env-id", "mujoco/hopper/medium-v0", "--run-name", "r"]
    for command, options, directory in (
        (["baselines/iql.py"], [*tiny, "--run-name", "path"], ROOT),
        (["-m", "baselines.iql"], [*tiny, "--run-name", "module"], ROOT),
        (["iql.py"], alone, tmp_path),
    ):
        command = [sys.executable, *command, *options]
        process = subprocess.run(command, cwd=directory, capture_output=True, text=True)
        assert process.returncode == 0, process.stderr
    results = [tmp_path / "runs/path", tmp_path / "runs/module", tmp_path / "runs/r"]
    for run_dir in results:
        result = json.loads((run_dir / "result.json").read_text())
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
def test_help_shows_the_published_settings_of_the_task(name, env_id):
    process = run_script(f"baselines/{name}", "--env-id", env_id, "--help")
    assert process.returncode == 0
    text = " ".join(process.stdout.replace("│", " ").split())
    for argument, value in DEFAULTS[name, env_id].items():
        option = argument.replace("_", "-")
        if isinstance(value, bool):
            option += f", --no-{option}"
        shown = text.split(f" --{option} ")[-1].split("(default: ")[1].split(")")[0]
        assert shown == str(value), argument


@ALL
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


def test_beta_lcb_may_be_negative(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["msg", "--beta-lcb", "-6.5"])
    assert msg.parse_args()[0].beta_lcb == -6.5


def test_iql_subtracts_one_from_rewards_of_antmaze():
    args, rewards = iql.Args(reward_transform="minus_one"), np.array([0.0, 1.0], dtype="f4")
    agent = iql.Agent(1, 1, args)
    data = iql.Transitions(*(rewards.reshape(2, 1),) * 2, rewards, rewards.reshape(2, 1), rewards)
    iql.set_statistics(agent, data, args)
    assert agent.preprocess(data).rewards.tolist() == [-1.0, 0.0]


# --- The train step ---


class Learner:
    """The parts of a script, put together as in its main program."""

    def __init__(self, script):
        torch.manual_seed(0)
        self.script, self.args = script, script.Args(batch_size=B, gradient_steps=20)
        if script in (edac, msg):
            self.args.num_critics = N
        self.agent = script.Agent(S, A, self.args)
        self.optimizers = make_optimizers(self.agent, self.args)
        shapes = ((S,), (A,), (), (S,), ())
        columns = [torch.rand(200, *shape) * 2 - 1 for shape in shapes]
        columns[4] = (columns[4] < -0.8).float()
        self.dataset = script.Transitions(*columns)
        kinds = [(False,), (True,)] if script is td3_bc else [()]
        self.steps = [partial(self.train_step, *kind) for kind in kinds]

    def train_step(self, *update_actor):
        index = torch.randint(len(self.dataset.obs), (B,))
        batch = self.script.Transitions(*(column[index] for column in self.dataset))
        return self.script.update(self.agent, self.optimizers, batch, *update_actor, self.args)

    def train(self, steps, functions):
        metrics = []
        for step in range(1, steps + 1):
            set_learning_rate(self.script, self.optimizers, step, self.args)
            outputs = functions[step % 2 == 0 if len(functions) == 2 else 0]()
            metrics.append({name: value.clone() for name, value in outputs.items()})
        return metrics


@ALL
def test_an_update_has_no_host_synchronization(script):
    """A fake tensor has no value: .item(), or a branch on a value, is an error."""
    for step in Learner(script).steps:
        with FakeTensorMode(allow_non_fake_inputs=True):
            metrics = step()
            for value in metrics.values():
                assert value.shape == () and not value.requires_grad
            with pytest.raises(Exception, match="_local_scalar_dense"):
                value.item()


@ALL
def test_replayed_steps_equal_eager_steps(script, monkeypatch):
    """Bit for bit through warm-up, capture and replays, while IQL's learning rate falls."""
    tape.capture_on_the_cpu(monkeypatch)
    results = []
    for graphs in (False, True):
        learner = Learner(script)
        functions = list(map(script.CudaGraph, learner.steps)) if graphs else learner.steps
        torch.manual_seed(7)
        metrics = learner.train(14, functions)
        results.append((copy.deepcopy(learner.agent.state_dict()), metrics))
    (eager, eager_metrics), (replayed, replayed_metrics) = results
    for name, value in eager.items():
        assert torch.equal(value, replayed[name]), name
    assert eager_metrics == replayed_metrics
    kinds = len(learner.steps)
    assert [graph.replays for graph in tape.Tape.captured] == [14 // kinds - 3] * kinds


def test_the_gradients_of_edac_can_be_compiled(monkeypatch):
    """As --compile does it, without graph breaks, except for the slow generation of C++ code."""
    eager, compiled = Learner(edac), Learner(edac)
    torch.manual_seed(5)
    expected = eager.steps[-1]()
    loss = torch.compile(edac.critic_loss, fullgraph=True, backend="aot_eager")
    monkeypatch.setattr(edac, "critic_loss", loss)
    torch.manual_seed(5)
    metrics = compiled.steps[-1]()
    torch.testing.assert_close(metrics, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(
        dict(eager.agent.named_parameters()), dict(compiled.agent.named_parameters())
    )


# --- The same text as in the root ---

BASELINES = {pair[1]: pair for pair in PAIRS if pair[1].startswith("baselines/")}
# Lines that differ: in all, and in the main program (no beta, no fine-tuning; IQL's learning rate)
LINES = {"td3_bc": (90, 12), "edac": (110, 12), "msg": (110, 12), "cql": (120, 12)}
LINES |= {"iql": (190, 20)}


def changed_lines(source, script, block=None):
    """As diff counts them: without autojunk, lines that are frequent are compared, too."""
    one, other = ((ROOT / f"{name}.py").read_text() for name in (source, script))
    if block is not None:
        one, other = (blocks(name)[block] for name in (source, script))
    one, other = one.splitlines(), other.splitlines()
    matcher = difflib.SequenceMatcher(None, one, other, autojunk=False)
    same = sum(match.size for match in matcher.get_matching_blocks())
    return len(one) + len(other) - 2 * same


def test_every_baseline_is_compared():
    scripts = {f"baselines/{path.stem}" for path in (ROOT / "baselines").glob("[a-z]*.py")}
    assert set(BASELINES) == scripts


@pytest.mark.parametrize("script", BASELINES)
def test_common_blocks_are_identical_to_those_of_the_source(script):
    assert merged(*BASELINES[script]) == (ROOT / f"{script}.py").read_text()


@pytest.mark.parametrize("name", LINES)
def test_a_diff_shows_little_more_than_the_method(name):
    (source, script, _), (limit, main_limit) = BASELINES[f"baselines/{name}"], LINES[name]
    assert changed_lines(source, script) <= limit
    assert changed_lines(source, script, "__main__") <= main_limit


def test_their_own_parsers_differ_in_one_line():
    """beta_lcb may be negative, expectile is at most 1."""
    assert changed_lines("sac_bc_n", "baselines/msg", "parse_args") == 1
    assert changed_lines("sac_bc_n", "baselines/iql", "parse_args") == 2
