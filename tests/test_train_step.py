"""The train step: no host synchronization, no needless gradients, torch.compile, CUDA graphs."""

import copy
import ctypes
import shutil
import sys
from types import SimpleNamespace

import pytest
import tape
import torch
from reference import Learner
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import finetune_sac_bc_n
import finetune_td3_bc_n
import sac_bc_n
import td3_bc_n
from baselines import bc, cql, edac, iql, msg, td3_bc

SCRIPTS = [td3_bc_n, sac_bc_n, finetune_td3_bc_n, finetune_sac_bc_n]
SCRIPTS += [td3_bc, edac, msg, cql, iql, bc]
ALL = pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
SHORT = ["--env-id", "mujoco/hopper/medium-v0", "--gradient-steps", 2]
SHORT += ["--num-critics", 2, "--eval-episodes", 1]


@ALL
def test_an_update_has_no_host_synchronization(script):
    """A fake tensor has no value: .item(), or a branch on a value, is an error."""
    for step in Learner(script).steps:
        with FakeTensorMode(allow_non_fake_inputs=True):
            for value in step().values():
                assert value.shape == () and not value.requires_grad
            with pytest.raises(Exception, match="_local_scalar_dense"):
                value.item()


class Matmuls(TorchDispatchMode):
    """Counts batched matmuls, which only the critic ensemble has."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        if operation.overloadpacket in (torch.ops.aten.bmm, torch.ops.aten.baddbmm):
            self.count += 1
        return operation(*args, **(kwargs or {}))


@pytest.mark.parametrize("script", [td3_bc_n, sac_bc_n])
def test_the_actor_step_computes_no_gradients_of_critic_weights(script):
    learner = Learner(script)
    sac = "sac" in script.__name__
    alpha, args = ((torch.tensor(0.7),), (learner.args,)) if sac else ((), ())
    with Matmuls() as matmuls:
        loss, *_ = script.actor_loss(learner.agent, learner.batch(), *alpha, learner.beta, *args)
        script.optimizer_step(learner.optimizers["actor"], loss)
    assert matmuls.count == 8, "four layers forward, and the gradients of their inputs"
    assert all(p.grad is None for p in learner.agent.critics.parameters())


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


def test_compile_is_used_by_the_main_program(run, monkeypatch):
    compiled = []
    monkeypatch.setattr(
        torch, "compile", lambda f, **options: compiled.append((f.__name__, options)) or f
    )
    run("td3_bc_n", *SHORT, "--compile")
    assert [name for name, _ in compiled] == ["critic_loss", "actor_loss"]
    assert all(o == {"fullgraph": True, "options": {"fallback_random": True}} for _, o in compiled)


def test_matmul_precision_is_set(run):
    try:
        run("td3_bc_n", *SHORT, "--matmul-precision", "medium")
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision("highest")


@pytest.mark.skipif(sys.platform != "linux", reason="mallopt is a function of glibc")
def test_glibc_keeps_freed_memory(run, monkeypatch):
    calls, library = [], SimpleNamespace(mallopt=lambda *options: calls.append(options))
    monkeypatch.setattr(ctypes, "CDLL", lambda name: library)
    run("td3_bc_n", *SHORT)
    assert calls == [(-1, 2**30), (-3, 2**30)], "M_TRIM_THRESHOLD and M_MMAP_THRESHOLD"


# --- CUDA graphs, captured and replayed on a CPU (tape.py) ---


@ALL
def test_replayed_steps_equal_eager_steps(script, monkeypatch):
    """Bit for bit from warm-up to replays, while beta, IQL's rate and the buffer change."""
    tape.capture_on_the_cpu(monkeypatch)
    results = []
    for graphs in (False, True):
        learner = Learner(script)
        functions = list(map(script.CudaGraph, learner.steps)) if graphs else learner.steps
        torch.manual_seed(7)
        metrics = learner.train(14, functions)
        results.append((copy.deepcopy(learner.agent.state_dict()), metrics, torch.get_rng_state()))
    (eager, eager_metrics, eager_rng), (replayed, replayed_metrics, rng) = results
    for name, value in eager.items():
        assert torch.equal(value, replayed[name]), name
    assert eager_metrics == replayed_metrics
    assert torch.equal(eager_rng, rng)
    kinds = len(learner.steps)
    assert [graph.replays for graph in tape.Tape.captured] == [14 // kinds - 3] * kinds
