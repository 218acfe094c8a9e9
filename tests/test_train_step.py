"""The train step: no host synchronization, no needless gradients, torch.compile, CUDA graphs."""

import copy
import ctypes
import shutil
import sys
from functools import partial
from types import SimpleNamespace

import pytest
import tape
import torch
from reference import make_optimizers
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import finetune_sac_bc_n
import finetune_td3_bc_n
import sac_bc_n
import td3_bc_n

N, B, S, A = 4, 32, 5, 2
SCRIPTS = [td3_bc_n, sac_bc_n, finetune_td3_bc_n, finetune_sac_bc_n]
ALL = pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)


def transitions(script, rows, device="cpu"):
    generator = torch.Generator().manual_seed(0)
    shapes = ((S,), (A,), (), (S,), ())
    data = [torch.rand(rows, *shape, generator=generator) * 2 - 1 for shape in shapes]
    data[4] = (data[4] < -0.8).float()
    return script.Transitions(*(column.to(device) for column in data))


class Learner:
    """The parts of a script, put together as in its main program."""

    def __init__(self, script, device="cpu", **arguments):
        torch.manual_seed(0)
        self.script, self.args = script, script.Args(num_critics=N, batch_size=B, **arguments)
        self.agent = script.Agent(S, A, self.args).to(device)
        self.optimizers = make_optimizers(self.agent, self.args)
        for optimizer in self.optimizers.values():
            optimizer.param_groups[0]["capturable"] = device == "cuda"
        self.beta = torch.tensor(0.3, device=device)
        self.dataset, self.device, self.buffer = transitions(script, 500, device), device, None
        if hasattr(script, "ReplayBuffer"):
            self.buffer = script.ReplayBuffer(900, self.dataset, torch.device(device))
            self.buffer.add(self.dataset)
        delayed = "td3" in script.__name__
        kinds = [(False,), (True,)] if delayed else [()]
        self.steps = [partial(self.train_step, *kind) for kind in kinds]

    def batch(self):
        if self.buffer:
            return self.buffer.sample(B)
        index = torch.randint(len(self.dataset.obs), (B,), device=self.device)
        return self.script.Transitions(*(column[index] for column in self.dataset))

    def train_step(self, *update_actor):
        arguments = self.agent, self.optimizers, self.batch(), self.beta, *update_actor, self.args
        return self.script.update(*arguments)

    def train(self, steps, functions=None):
        """Losses of these steps, while beta and the replay buffer change."""
        functions, losses = functions or self.steps, []
        for step in range(1, steps + 1):
            self.beta.fill_(0.3 / step)
            if self.buffer:
                more = transitions(self.script, 20, self.device)
                self.buffer.add(self.script.Transitions(*(column + step for column in more)))
            outputs = functions[step % len(functions) == 0 if len(functions) == 2 else 0]()
            losses.append({name: loss.clone() for name, loss in outputs.items()})
        return losses


@ALL
def test_an_update_has_no_host_synchronization(script):
    """A fake tensor has no value: .item(), or a branch on a value, is an error."""
    for step in Learner(script).steps:
        with FakeTensorMode(allow_non_fake_inputs=True):
            losses = step()
            assert losses["losses/critic_loss"].shape == ()
            with pytest.raises(Exception, match="_local_scalar_dense"):
                losses["losses/critic_loss"].item()


class Matmuls(TorchDispatchMode):
    """Counts batched matmuls, which only the critic ensemble has."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        if operation.overloadpacket in (torch.ops.aten.bmm, torch.ops.aten.baddbmm):
            self.count += 1
        return operation(*args, **(kwargs or {}))


@ALL
def test_the_actor_step_computes_no_gradients_of_critic_weights(script):
    learner = Learner(script)
    sac = "sac" in script.__name__
    alpha, args = ((torch.tensor(0.7),), (learner.args,)) if sac else ((), ())
    with Matmuls() as matmuls:
        loss, *_ = script.actor_loss(learner.agent, learner.batch(), *alpha, learner.beta, *args)
        script.optimizer_step(learner.optimizers["actor"], loss)
    assert matmuls.count == 8, "four layers forward, and the gradients of their inputs"
    assert all(p.grad is None for p in learner.agent.critics.parameters())


@ALL
def test_gradients_do_not_accumulate(script):
    """The same step twice from the same state has the same gradients."""
    learner, seen = Learner(script), []
    start = copy.deepcopy((learner.agent.state_dict(), torch.get_rng_state()))
    for _ in range(2):
        learner.agent.load_state_dict(start[0])
        torch.set_rng_state(start[1])
        learner.steps[-1]()
        seen.append([p.grad.clone() for p in learner.agent.critics.parameters()])
    for first, second in zip(*seen, strict=True):
        assert torch.equal(first, second)


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("g++"), reason="torch.compile needs a C++ compiler")
@pytest.mark.parametrize("script", [td3_bc_n, sac_bc_n])
def test_compiled_and_eager_updates_agree(script, monkeypatch):
    """Same batch, same random numbers: losses and gradients to 1e-5, without graph breaks."""
    eager, compiled = Learner(script), Learner(script)
    torch.manual_seed(5)
    expected = eager.steps[-1]()
    for name in ("critic_loss", "actor_loss"):
        options = {"fullgraph": True, "options": {"fallback_random": True}}
        monkeypatch.setattr(script, name, torch.compile(getattr(script, name), **options))
    torch.manual_seed(5)
    losses = compiled.steps[-1]()
    for name, loss in expected.items():
        torch.testing.assert_close(losses[name], loss, atol=1e-5, rtol=1e-5)
    pairs = zip(eager.agent.named_parameters(), compiled.agent.parameters(), strict=True)
    for (name, one), other in pairs:
        if one.grad is not None:
            torch.testing.assert_close(other.grad, one.grad, atol=1e-5, rtol=1e-5, msg=name)


@pytest.mark.skipif(not shutil.which("g++"), reason="torch.compile needs a C++ compiler")
def test_compile_is_used_by_the_main_program(run, monkeypatch):
    compiled = []
    monkeypatch.setattr(
        torch, "compile", lambda f, **options: compiled.append((f.__name__, options)) or f
    )
    short = ["--gradient-steps", 2, "--num-critics", 2, "--eval-episodes", 1]
    run("td3_bc_n", "--env-id", "mujoco/hopper/medium-v0", *short, "--compile")
    assert [name for name, _ in compiled] == ["critic_loss", "actor_loss"]
    assert all(o == {"fullgraph": True, "options": {"fallback_random": True}} for _, o in compiled)


@pytest.mark.parametrize("precision", ["highest", "medium"])
def test_matmul_precision_is_set(precision, run):
    short = ["--gradient-steps", 2, "--num-critics", 2, "--eval-episodes", 1]
    arguments = ["--env-id", "mujoco/hopper/medium-v0", *short, "--matmul-precision", precision]
    try:
        run("td3_bc_n", *arguments)
        assert torch.get_float32_matmul_precision() == precision
    finally:
        torch.set_float32_matmul_precision("highest")


@pytest.mark.skipif(sys.platform != "linux", reason="mallopt is a function of glibc")
def test_glibc_keeps_freed_memory(run, monkeypatch):
    calls, library = [], SimpleNamespace(mallopt=lambda *options: calls.append(options))
    monkeypatch.setattr(ctypes, "CDLL", lambda name: library)
    short = ["--gradient-steps", 2, "--num-critics", 2, "--eval-episodes", 1]
    run("td3_bc_n", "--env-id", "mujoco/hopper/medium-v0", *short)
    assert calls == [(-1, 2**30), (-3, 2**30)], "M_TRIM_THRESHOLD and M_MMAP_THRESHOLD"


# --- CUDA graphs, captured and replayed on a CPU (tape.py) ---


@ALL
def test_replayed_steps_equal_eager_steps(script, monkeypatch):
    """Bit for bit through warm-up, capture and replays, while beta and the buffer change."""
    tape.capture_on_the_cpu(monkeypatch)
    results = []
    for graphs in (False, True):
        learner = Learner(script)
        functions = [script.CudaGraph(step) for step in learner.steps] if graphs else None
        torch.manual_seed(7)
        losses = learner.train(14, functions)
        results.append((copy.deepcopy(learner.agent.state_dict()), losses, torch.get_rng_state()))
    (eager, eager_losses, eager_rng), (replayed, replayed_losses, rng) = results
    for name, value in eager.items():
        assert torch.equal(value, replayed[name]), name
    assert eager_losses == replayed_losses
    assert torch.equal(eager_rng, rng)
    kinds = len(learner.steps)
    assert [graph.replays for graph in tape.Tape.captured] == [14 // kinds - 3] * kinds


@ALL
def test_replays_draw_new_random_numbers(script, monkeypatch):
    tape.capture_on_the_cpu(monkeypatch)
    learner = Learner(script, learning_rate=0.0)  # only the batch and the noise differ
    step = script.CudaGraph(learner.steps[-1])
    losses = [step()["losses/critic_loss"].item() for _ in range(8)]
    assert tape.Tape.captured[0].replays == 5
    assert len(set(losses)) == 8


def test_a_capture_with_a_host_synchronization_fails(monkeypatch):
    tape.capture_on_the_cpu(monkeypatch)
    x = torch.ones(())
    step = td3_bc_n.CudaGraph(lambda: {"loss": x * x.item()})
    for _ in range(3):
        step()
    with pytest.raises(RuntimeError, match="host synchronization"):
        step()
