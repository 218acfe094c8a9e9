"""On a GPU: graphs against eager steps, --compile, resume and whole runs. pytest -k cuda"""

import copy

import pytest
import torch
from reference import Learner
from test_resume import assert_same_state
from test_train_step import ALL

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
HOPPER = ["--env-id", "mujoco/hopper/medium-v0"]
SHORT = ["--gradient-steps", 30, "--eval-frequency", 10, "--eval-episodes", 1]
SHORT += ["--num-critics", 4, "--batch-size", 32, "--log-frequency", 5]
ONLINE = ["--env-steps", 30, "--learning-starts", 40, "--eval-frequency", 10]
ONLINE += ["--eval-episodes", 1, "--log-frequency", 5]


@pytest.fixture(autouse=True)
def deterministic(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.cuda.set_stream(torch.cuda.Stream())


@ALL
def test_cuda_replayed_steps_equal_eager_steps_bit_for_bit(script):
    """While beta, IQL's learning rate and the replay buffer change between the replays."""
    results = []
    for graphs in (False, True):
        learner = Learner(script, device="cuda")
        functions = list(map(script.CudaGraph, learner.steps)) if graphs else learner.steps
        torch.manual_seed(7)
        losses = learner.train(20, functions)
        results.append((copy.deepcopy(learner.agent.state_dict()), losses))
    (eager, eager_losses), (replayed, replayed_losses) = results
    for one, other in zip(eager_losses, replayed_losses, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)
    for name, value in eager.items():
        assert torch.equal(value, replayed[name]), name


@pytest.mark.parametrize("script", ["td3_bc_n", "sac_bc_n"])
def test_cuda_runs_with_and_without_graphs_are_equal(script, run):
    with_graphs = run(script, *HOPPER, *SHORT)[1]
    without = run(script, *HOPPER, *SHORT, "--no-cudagraphs")[1]
    assert_same_state(with_graphs, without)


@pytest.mark.parametrize("script", ["td3_bc_n", "sac_bc_n"])
def test_cuda_compile_with_graphs_learns_the_same(script, run):
    eager = run(script, *HOPPER, *SHORT)[1]
    compiled = run(script, *HOPPER, *SHORT, "--compile")[1]
    a, b = (torch.load(d / "checkpoint.pt", weights_only=True)["agent"] for d in (eager, compiled))
    for name, value in a.items():
        torch.testing.assert_close(b[name], value, atol=1e-3, rtol=1e-3, msg=name)


@pytest.mark.parametrize("script", ["td3_bc_n", "sac_bc_n"])
def test_cuda_a_resumed_run_equals_a_run_without_interruption(script, run):
    whole = run(script, *HOPPER, *SHORT)[1]
    part = run(script, *HOPPER, *SHORT, "--gradient-steps", 20)[1]
    run(script, "--resume", part, "--gradient-steps", 30)
    assert_same_state(whole, part)


@pytest.mark.parametrize("algorithm", ["td3_bc_n", "sac_bc_n"])
def test_cuda_a_cpu_checkpoint_is_resumed_and_fine_tuned_on_the_gpu(algorithm, run):
    offline = run(algorithm, *HOPPER, *SHORT, "--no-cuda", "--gradient-steps", 20)[1]
    process, _ = run(algorithm, "--resume", offline, "--cuda", "--gradient-steps", 30)
    assert "device: cuda" in process.stdout
    process, online = run(f"finetune_{algorithm}", "--checkpoint", offline, *ONLINE)
    assert "device: cuda" in process.stdout and (online / "result.json").exists()
