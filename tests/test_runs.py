"""Offline runs from start to end: run directory, logs, result, reproducibility, divergence."""

import json

import pytest
import torch
from conftest import run_script
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

SCRIPTS = ["td3_bc_n", "sac_bc_n"]
HOPPER = ["--env-id", "mujoco/hopper/medium-v0"]
SHORT = ["--gradient-steps", 6, "--eval-frequency", 3, "--log-frequency", 1]
SHORT += ["--eval-episodes", 2, "--num-critics", 3, "--batch-size", 16]


def scalars(run_dir):
    events = EventAccumulator(str(run_dir), size_guidance={"scalars": 0})
    events.Reload()
    tags = events.Tags()
    values = {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in tags["scalars"]}
    return values, tags["tensors"]


def weights(run_dir):
    return torch.load(run_dir / "checkpoint.pt", weights_only=True)["agent"]


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize(
    "env_id",
    [
        "mujoco/hopper/medium-v0,mujoco/hopper/expert-v0",
        "D4RL/pointmaze/umaze-v2",
        "D4RL/antmaze/umaze-v1",
    ],
)
def test_a_run_writes_logs_a_result_and_a_checkpoint(script, env_id, run):
    process, run_dir = run(script, "--env-id", env_id, *SHORT, "--seed", 3)
    printed = process.stdout
    assert f"dataset: {env_id}" in printed and "comparable_with_paper: False" in printed
    assert "\r" not in printed and printed.count("\nstep ") == 2, "no progress bar in a file"

    result = json.loads((run_dir / "result.json").read_text())
    assert (result["algorithm"], result["status"], result["step"]) == (script, "finished", 6)
    assert result["args"]["env_id"] == result["metadata"]["dataset"] == env_id
    assert [entry["step"] for entry in result["history"]] == [3, 6]
    assert {"score", "score_stderr", "score_worst", "steps_per_second"} <= set(result)
    assert result["eval_return"] == pytest.approx(sum(result["returns"]) / 2)
    assert len(result["metadata"]["action_low"]) == len(result["metadata"]["action_high"]) > 1
    low, high = result["metadata"]["ref_min_score"], result["metadata"]["ref_max_score"]
    assert len(result["returns"]) == 2
    mean = sum(result["returns"]) / 2
    assert result["score"] == pytest.approx(100 * (mean - low) / (high - low))

    checkpoint = torch.load(run_dir / "checkpoint.pt", weights_only=True)
    assert checkpoint["step"] == 6 and checkpoint["args"] == result["args"]
    networks = {key.split(".")[0] for key in checkpoint["agent"]}
    extra = {"actor_target"} if script == "td3_bc_n" else {"log_alpha"}
    statistics = {"obs_mean", "obs_std", "reward_shift", "reward_scale"}
    assert networks == {"actor", "critics", "critics_target"} | extra | statistics

    values, texts = scalars(run_dir)
    assert [step for step, _ in values["losses/critic_loss"]] == [1, 2, 3, 4, 5, 6]
    assert {"losses/actor_loss", "losses/q_term", "losses/bc", "charts/SPS", "charts/beta"} <= set(
        values
    )
    for tag in ("charts/score", "charts/eval_length", "uncertainty/random_std"):
        assert [step for step, _ in values[tag]] == [3, 6]
    assert len([tag for tag in values if tag.startswith("uncertainty/")]) == 9
    assert any("hyperparameters" in tag for tag in texts)


def test_the_run_directory_is_named_by_default_and_by_run_name(run, tmp_path):
    run_dir = run("td3_bc_n", *HOPPER, *SHORT)[1]
    again, _ = run("td3_bc_n", *HOPPER, *SHORT, "--run-name", run_dir.name, check=False)
    assert again.returncode == 1 and f"--resume {run_dir}" in again.stderr
    run_script("td3_bc_n", "--runs-dir", tmp_path / "other", *HOPPER, *SHORT)
    (default,) = (tmp_path / "other").iterdir()
    assert default.name.startswith("mujoco-hopper-medium-v0__td3_bc_n__1__20")


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_seed_determines_the_run(script, run):
    arguments = [script, *HOPPER, *SHORT]
    first, again = run(*arguments, "--seed", 1)[1], run(*arguments, "--seed", 1)[1]
    other = run(*arguments, "--seed", 2)[1]
    watched = run(*arguments, "--seed", 1, "--eval-frequency", 1)[1]
    for key, value in weights(first).items():
        assert torch.equal(value, weights(again)[key])
        assert torch.equal(value, weights(watched)[key]), "evaluations change nothing"
    assert not torch.equal(weights(first)["actor.mean.weight"], weights(other)["actor.mean.weight"])
    results = [json.loads((d / "result.json").read_text()) for d in (first, again, other)]
    assert results[0]["returns"] == results[1]["returns"] != results[2]["returns"]


def test_batches_are_drawn_from_the_whole_dataset(run, monkeypatch):
    """The rows of every batch, as the main program draws them."""
    seen, randint = [], torch.randint

    def spy(high, size, **kwargs):
        index = randint(high, size, **kwargs)
        if size == (500,):
            seen.append((high, index))
        return index

    monkeypatch.setattr(torch, "randint", spy)
    process, _ = run("td3_bc_n", *HOPPER, *SHORT, "--batch-size", 500)
    transitions = int(process.stdout.split("transitions: ")[1].split()[0])
    assert [high for high, _ in seen] == [transitions] * 6
    rows = torch.cat([index for _, index in seen])
    assert not torch.equal(seen[0][1], seen[1][1])
    assert len(rows.unique()) > 0.95 * transitions


def test_beta_is_inflated_up_to_its_step_and_not_beyond(run):
    arguments = [*HOPPER, *SHORT, "--bc-inflation-steps", 4]
    values, _ = scalars(run("td3_bc_n", *arguments, "--beta", 0.5, "--bc-inflation", 8)[1])
    assert [round(value, 5) for _, value in values["charts/beta"]] == [4, 4, 4, 4, 0.5, 0.5]


@pytest.mark.parametrize(("script", "rate"), [("sac_bc_n", 10), ("td3_bc_n", 1e9)])
def test_a_run_that_diverges_stops_with_exit_code_3(script, rate, run):
    arguments = [*HOPPER, *SHORT, "--gradient-steps", 5000]
    arguments += ["--log-frequency", 50, "--eval-frequency", 1000, "--num-critics", 2]
    process, run_dir = run(script, *arguments, "--learning-rate", rate, check=False)
    assert process.returncode == 3 and "not finite, try a larger beta" in process.stderr
    assert "losses/" in process.stderr and "charts/SPS" not in process.stderr, "what is not finite"
    result = json.loads((run_dir / "result.json").read_text())
    assert result["status"] == "diverged"
    assert result["message"] == process.stderr.strip().splitlines()[-1]
