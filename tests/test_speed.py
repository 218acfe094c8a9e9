"""What makes a step fast: no reading back, no needless gradients, compiled losses, CUDA graphs."""

import copy
import json
import shutil
import subprocess
import sys
from collections import Counter
from types import SimpleNamespace

import pytest
import tape
import torch
from conftest import ROOT
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import finetune_sac_bc_n
import finetune_td3_bc_n
import sac_bc_n
import td3_bc_n

N, B, S, A = 4, 32, 5, 2
SCRIPTS = [td3_bc_n, sac_bc_n, finetune_td3_bc_n, finetune_sac_bc_n]
KINDS = [(s, kind) for s in SCRIPTS for kind in ([(False,), (True,)] if "td3" in str(s) else [()])]
ALL = pytest.mark.parametrize("script", SCRIPTS)
ALL_KINDS = pytest.mark.parametrize(("script", "kind"), KINDS)


def settings(script, **others):
    entropy = {} if "td3" in script.__name__ else {"target_entropy": -2.0}
    return script.Args(num_critics=N, batch_size=B, **entropy, **others)


def transitions(rows, device="cpu"):
    random = torch.Generator().manual_seed(0)
    draw = [torch.rand(rows, *shape, generator=random) for shape in ((S,), (A,), (), (S,), ())]
    return [
        x.to(device) * 2 - 1 if i < 4 else (x < 0.1).to(device).float() for i, x in enumerate(draw)
    ]


class Learner:
    """A script's own parts, put together as its main program does it."""

    def __init__(self, script, device="cpu", **others):
        torch.manual_seed(0)
        self.script, self.args = script, settings(script, **others)
        self.agent = script.Agent(S, A, self.args).to(device)
        self.optimizers = script.make_optimizers(self.agent, self.args)
        self.beta = torch.tensor(0.3, device=device)
        rows, self.buffer = transitions(500, device), None
        if hasattr(script, "ReplayBuffer"):
            self.buffer = script.ReplayBuffer(600, S, A, torch.device(device))
            self.buffer.add(*rows)
            self.batch = lambda: self.buffer.sample(B)
        else:
            self.batch = lambda: script.sample_batch(rows, B)

    def learn(self, *kind):
        arguments = self.agent, self.optimizers, self.batch(), self.beta, *kind, self.args
        return self.script.update(*arguments)

    def state(self):
        return copy.deepcopy(self.agent.state_dict())


def turns(script, steps):
    """The kinds of so many steps."""
    if "td3" not in script.__name__:
        return [()] * steps
    return [(step % 2 == 0,) for step in range(1, steps + 1)]


@ALL_KINDS
def test_an_update_reads_nothing_back_from_the_device(script, kind):
    """A fake tensor has no value: .item(), or a branch on a value, is an error."""
    learner = Learner(script)
    with FakeTensorMode(allow_non_fake_inputs=True):
        losses = learner.learn(*kind)
        assert losses["critic"].shape == ()
        with pytest.raises(Exception, match="_local_scalar_dense"):
            losses["critic"].item()


@pytest.mark.parametrize("script", [td3_bc_n, sac_bc_n])
def test_a_batch_is_whole_transitions_drawn_alike_from_all_of_the_data(script):
    row = torch.arange(10.0)
    data = [row[:, None].expand(-1, 3), row, row, row[:, None], row]
    torch.manual_seed(0)
    batch, other = (script.sample_batch(data, 10_000) for _ in range(2))
    assert not torch.equal(batch[1], other[1])
    for column in batch:
        assert torch.equal(column.reshape(10_000, -1)[:, 0], batch[1])
    counts = torch.bincount(batch[1].long(), minlength=10)
    assert counts.min() > 850 and counts.max() < 1150


class Matmuls(TorchDispatchMode):
    """Counts the batched matmuls, which are the ensemble's."""

    def __init__(self):
        super().__init__()
        self.shapes = []

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        if operation.overloadpacket in (torch.ops.aten.bmm, torch.ops.aten.baddbmm):
            self.shapes.append(tuple(args[-1].shape))
        return operation(*args, **(kwargs or {}))


@ALL
def test_the_policys_step_computes_no_gradient_of_a_critics_weights(script):
    learner = Learner(script)
    batch, beta, args = learner.batch(), learner.beta, learner.args
    alpha = () if "td3" in script.__name__ else (torch.tensor(0.7),)
    rest = () if "td3" in script.__name__ else (args,)
    with Matmuls() as count:
        loss = script.policy_loss(learner.agent, batch, *alpha, beta, *rest)
        script.descend(learner.optimizers["policy"], loss[0] if rest else loss)
    # Four layers forward, and the gradients of four layers' inputs; no gradients of weights.
    assert len(count.shapes) == 8
    assert all(p.grad is None for p in learner.agent.critics.parameters())


@ALL
def test_steps_leave_no_gradients_to_add_to(script):
    """Twice the same step, from the same state, gives the same gradients: none is accumulated."""
    learner, seen = Learner(script), []
    start = copy.deepcopy((learner.agent.state_dict(), torch.get_rng_state()))
    for _ in range(2):
        learner.agent.load_state_dict(start[0])
        torch.set_rng_state(start[1])
        learner.learn(*turns(script, 2)[1])
        seen.append([p.grad.clone() for p in learner.agent.critics.parameters()])
    for first, second in zip(*seen, strict=True):
        assert torch.equal(first, second)


# --- torch.compile ---


compiler = pytest.mark.skipif(not shutil.which("g++"), reason="torch.compile needs a C++ compiler")


@compiler
@pytest.mark.parametrize("script", [td3_bc_n, sac_bc_n])
@pytest.mark.parametrize("independent", [False, True])
def test_compiled_and_eager_updates_agree(script, independent, monkeypatch):
    """One batch, the same random numbers: losses and gradients to 1e-5, in one whole graph."""
    forms = {} if script is td3_bc_n else {"bc_form": "mse" if independent else "ll"}
    eager, compiled = (Learner(script, independent_targets=independent, **forms) for _ in range(2))
    kind = turns(script, 2)[1]
    torch.manual_seed(5)
    expected = eager.learn(*kind)
    for name in ("critic_loss", "policy_loss"):
        options = {"fullgraph": True, "options": {"fallback_random": True}}
        monkeypatch.setattr(script, name, torch.compile(getattr(script, name), **options))
    torch.manual_seed(5)
    losses = compiled.learn(*kind)
    for name, loss in expected.items():
        torch.testing.assert_close(losses[name], loss, atol=1e-5, rtol=1e-5)
    pairs = zip(eager.agent.named_parameters(), compiled.agent.parameters(), strict=True)
    for (name, one), other in pairs:
        if one.grad is not None:
            torch.testing.assert_close(other.grad, one.grad, atol=1e-5, rtol=1e-5, msg=name)


@compiler
@pytest.mark.parametrize("script", ["td3_bc_n", "finetune_sac_bc_n"])
def test_a_compiled_run_is_the_eager_run(script, run):
    common = ["--num-critics", 2, "--batch-size", 16, "--log-frequency", 1]
    common += ["--eval-episodes", 1, "--final-eval-episodes", 1]
    arguments = ["--env-id", "tests/hopper/random-v0", "--gradient-steps", 4, *common]
    if script == "finetune_sac_bc_n":
        arguments = ["--from-scratch", "--env-id", "Hopper-v5", "--env-steps", 4, *common]
        arguments += ["--learning-starts", 40]
    results = []
    for extra in ([], ["--compile"]):
        run_dir = run(script, *arguments, *extra)[1]
        results.append(torch.load(run_dir / "checkpoint.pt", weights_only=True)["losses"])
    for name, loss in results[0].items():
        torch.testing.assert_close(results[1][name], loss, atol=1e-4, rtol=1e-4)


# --- CUDA graphs ---


@ALL
def test_replayed_steps_are_the_eager_steps(script, monkeypatch):
    """Bit for bit, through warm-up, recording and replays, while beta and the buffer change."""
    tape.on_the_cpu(monkeypatch)
    results = []
    for graphs in (False, True):
        learner, losses = Learner(script), []
        learn = script.CudaGraphs(learner.learn) if graphs else learner.learn
        torch.manual_seed(7)
        for step, kind in enumerate(turns(script, 14)):
            learner.beta.fill_(0.3 / (step + 1))
            if learner.buffer:
                learner.buffer.add(*[column + step for column in transitions(20)])
            losses.append({name: loss.clone() for name, loss in learn(*kind).items()})
        results.append((learner.state(), losses, torch.get_rng_state()))
    (eager, eager_losses, eager_random), (replayed, replayed_losses, random) = results
    for name, value in eager.items():
        assert torch.equal(value, replayed[name]), name
    assert eager_losses == replayed_losses
    assert torch.equal(eager_random, random)
    assert [made.replays for made in tape.Tape.made] == [14 // len(learn.recorded) - 3] * len(
        learn.recorded
    )


@ALL
def test_two_replays_draw_different_random_numbers(script, monkeypatch):
    tape.on_the_cpu(monkeypatch)
    learner = Learner(script, learning_rate=0.0)  # so that only the batch and the noise differ
    learn, kind = script.CudaGraphs(learner.learn), turns(script, 2)[1]
    losses = [learn(*kind)["critic"].item() for _ in range(8)]
    assert len(learn.recorded) == 1 and tape.Tape.made[0].replays == 5
    assert len(set(losses)) == 8


def test_the_warm_up_on_its_stream_waits_and_is_waited_for(monkeypatch):
    tape.on_the_cpu(monkeypatch)
    graphs = td3_bc_n.CudaGraphs(dict)
    for _ in range(5):
        graphs()
    before, after = (graphs.stream, tape.Stream.default), (tape.Stream.default, graphs.stream)
    assert tape.Stream.waits == [before, "work", after] * 3


@ALL
def test_on_a_gpu_adam_is_fit_for_a_graph_and_on_a_cpu_it_need_not_be(script):
    for device in ("cpu", "cuda:0"):
        with FakeTensorMode():  # a GPU's tensors without a GPU
            weight = torch.nn.Parameter(torch.empty(1, device=device))
            network = torch.nn.ParameterList([weight])
            agent = SimpleNamespace(obs_mean=weight, critics=network, policy=network)
            agent.log_alpha = weight
            for optimizer in script.make_optimizers(agent, script.Args()).values():
                (parameters,) = optimizer.param_groups
                assert parameters["capturable"] == (device == "cuda:0") and parameters["fused"]


def test_a_recording_that_reads_a_number_back_fails(monkeypatch):
    """So that the tests above can fail for that reason too."""
    tape.on_the_cpu(monkeypatch)
    x = torch.ones(())
    graphs = td3_bc_n.CudaGraphs(lambda: {"loss": x * x.item()})
    for _ in range(3):
        graphs()
    with pytest.raises(RuntimeError, match="read from the device"):
        graphs()


cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU, and here is none")


@cuda
@ALL
def test_on_a_gpu_replayed_steps_are_the_eager_steps(script):
    results = []
    for graphs in (False, True):
        learner = Learner(script, device="cuda")
        learn = script.CudaGraphs(learner.learn) if graphs else learner.learn
        torch.manual_seed(7)
        losses = [learn(*kind)["critic"].item() for kind in turns(script, 14)]
        results.append((learner.state(), losses))
    assert len(set(results[1][1])) == 14
    for name, value in results[0][0].items():
        torch.testing.assert_close(results[1][0][name], value, atol=1e-5, rtol=1e-5, msg=name)


@pytest.mark.parametrize("script", [td3_bc_n, sac_bc_n])
def test_a_checkpoint_from_another_device_leaves_adam_fit_for_this_one(script):
    learner = Learner(script)
    learner.learn(*turns(script, 1)[0])
    states = {name: copy.deepcopy(o.state_dict()) for name, o in learner.optimizers.items()}
    for state in states.values():
        state["param_groups"][0]["capturable"] = True  # as a GPU's Adam has it
    checkpoint = {"agent": learner.state(), "optimizers": states, "random": [torch.get_rng_state()]}
    checkpoint |= {"step": 1, "losses": {}, "history": []}
    script.resume_run(checkpoint, learner.agent, learner.optimizers)
    assert not any(o.param_groups[0]["capturable"] for o in learner.optimizers.values())


# --- Memory ---

FAULTS = """
import resource, sys, torch, td3_bc_n
args = td3_bc_n.Args()
agent = td3_bc_n.Agent(11, 3, args)
optimizers = td3_bc_n.make_optimizers(agent, args)
batch = [torch.rand(256, *shape) for shape in ((11,), (3,), (), (11,), ())]
if sys.argv[1] == "keep":
    td3_bc_n.keep_freed_memory()
def pages(steps):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for step in range(steps):
        td3_bc_n.update(agent, optimizers, batch, 0.3, step % 2 == 0, args)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
pages(30)
print(pages(10))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="it sets glibc's allocator")
def test_freed_memory_is_kept_and_not_paged_in_again():
    faults = Counter()
    for kind in ("keep", "default"):
        command = [sys.executable, "-c", FAULTS, kind]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        faults[kind] = int(done.stdout)
    assert 3 * faults["keep"] < faults["default"]


def test_the_benchmark_writes_its_rows(tmp_path):
    command = [sys.executable, ROOT / "benchmarks/speed.py", "--script", "td3_bc_n"]
    command += ["--num-critics", "10", "--task", "hopper-medium-v2", "--seconds", "0.1"]
    subprocess.run([*command, "--json", tmp_path / "speed.json"], check=True)
    (row,) = json.loads((tmp_path / "speed.json").read_text())
    assert list(row) == [
        *("script", "num_critics", "task", "device", "steps_per_second", "gflop_per_step"),
        *("matmul_ratio", "peak_memory_mb"),
    ]
    # Multiplications and additions by hand: layers of critics and policy, batches of 256.
    layers = 14 * 256 + 2 * 256 * 256 + 256
    inputs, policy = 2 * 256 * 256 + 256, 11 * 256 + 2 * 256 * 256 + 256 * 3
    critics = 2 * layers + inputs + layers  # targets, forward, gradients of inputs and weights
    turn = 2 * layers  # forward, gradients of all inputs
    policies = policy + (policy + policy + 2 * 256 * 256 + 256 * 3) / 2
    flop = 2 * 256 * (10 * (critics + turn / 2) + policies)
    assert row["gflop_per_step"] == pytest.approx(flop / 1e9, rel=1e-6)
    assert row["matmul_ratio"] > 0 and row["steps_per_second"] > 0 and row["peak_memory_mb"] > 100


def test_the_benchmark_without_a_gpu_says_so():
    if torch.cuda.is_available():
        pytest.skip("here is a GPU")
    command = [sys.executable, ROOT / "benchmarks/speed.py", "--device", "cuda"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.strip() == "--device cuda: here is no GPU"
