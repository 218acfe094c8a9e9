"""Each script end to end, as a user runs it."""

import json

import numpy as np
import pytest
import torch
from conftest import write_d4rl_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

SCRIPTS = ["td3_bc_n", "sac_bc_n"]
SHORT = [
    "--gradient-steps",
    "6",
    "--eval-frequency",
    "3",
    "--log-frequency",
    "1",
    "--eval-episodes",
    "2",
]
SHORT += ["--final-eval-episodes", "3", "--num-critics", "3"]


def scalars(run_dir):
    events = EventAccumulator(str(run_dir), size_guidance={"scalars": 0})
    events.Reload()
    values = {
        tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]
    }
    return values, events.Tags()["tensors"]


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize(
    "env_id",
    [
        "tests/hopper/random-v0,tests/hopper/more-v0",
        "tests/pointmaze/umaze-v0",
        "tests/antmaze/umaze-v0",
    ],
)
def test_a_run_leaves_logs_a_result_and_a_checkpoint(script, env_id, run):
    process, run_dir = run(script, "--env-id", env_id, *SHORT, "--seed", 3)
    assert run_dir.name.startswith(env_id.replace("/", "-").replace(",", "-") + f"__{script}__3__")
    printed = process.stdout
    assert f"dataset: {env_id}" in printed and "comparable_with_the_paper: no" in printed
    assert "\r" not in printed and printed.count("\nstep ") == 2, "no bar without a terminal"

    result = json.loads((run_dir / "result.json").read_text())
    assert result["args"]["env_id"] == result["facts"]["dataset"] == env_id
    assert len(result["returns"]) == len(result["lengths"]) == 3
    assert [entry["step"] for entry in result["history"]] == [3, 6]
    assert {"score", "score_stderr", "score_worst", "steps_per_second", "versions"} <= set(result)
    assert ("success_rate" in result) == ("maze" in env_id)
    low, high = result["facts"]["random_return"], result["facts"]["expert_return"]
    mean = sum(result["returns"]) / 3
    assert result["score"] == pytest.approx(100 * (mean - low) / (high - low))

    checkpoint = torch.load(run_dir / "checkpoint.pt", weights_only=True)
    assert checkpoint["step"] == 6 and checkpoint["args"] == result["args"]
    networks = {key.split(".")[0] for key in checkpoint["agent"]}
    targets = {"policy_target"} if script == "td3_bc_n" else {"log_alpha"}
    statistics = {"obs_mean", "obs_std", "reward_shift", "reward_scale"}
    assert networks == {"policy", "critics", "critics_target"} | targets | statistics

    values, texts = scalars(run_dir)
    assert [step for step, _ in values["losses/critic"]] == [1, 2, 3, 4, 5, 6]
    assert {"losses/policy", "charts/SPS", "charts/beta"} <= set(values)
    for tag in ("charts/score", "charts/return", "charts/score_worst", "uncertainty/random_std"):
        assert [step for step, _ in values[tag]] == [3, 6]
    assert len([tag for tag in values if tag.startswith("uncertainty/")]) == 9
    assert any("hyperparameters" in tag for tag in texts)


def test_a_run_on_a_file_of_d4rls(run, tmp_path):
    observations = 0.01 * np.random.default_rng(0).normal(size=(40, 29))
    write_d4rl_file(tmp_path / "ant.hdf5", 40, observations=observations, action_size=8)
    arguments = ["--env-id", "antmaze-medium-play-v0", "--dataset-path", tmp_path / "ant.hdf5"]
    process, run_dir = run("sac_bc_n", *arguments, *SHORT)
    assert f"source: {tmp_path / 'ant.hdf5'}" in process.stdout
    result = json.loads((run_dir / "result.json").read_text())
    assert result["success_rate"] == 0 and result["lengths"] == [1000, 1000, 1000]
    agent = weights(run_dir)
    assert (agent["reward_shift"], agent["reward_scale"]) == (0.5, 4.0)


def weights(run_dir):
    return torch.load(run_dir / "checkpoint.pt", weights_only=True)["agent"]


@pytest.mark.parametrize("script", SCRIPTS)
def test_one_seed_is_one_run_and_two_seeds_are_two(script, run):
    arguments = [script, "--env-id", "tests/hopper/random-v0", *SHORT]
    first, again = run(*arguments, "--seed", 1)[1], run(*arguments, "--seed", 1)[1]
    other = run(*arguments, "--seed", 2)[1]
    # More evaluations in between change nothing of what is learned.
    watched = run(*arguments, "--seed", 1, "--eval-frequency", 1)[1]
    for key, value in weights(first).items():
        assert torch.equal(value, weights(again)[key])
        assert torch.equal(value, weights(watched)[key])
    assert not torch.equal(
        weights(first)["policy.mean.weight"], weights(other)["policy.mean.weight"]
    )
    results = [json.loads((d / "result.json").read_text()) for d in (first, again, other)]
    assert results[0]["returns"] == results[1]["returns"] != results[2]["returns"]


def test_beta_is_inflated_up_to_its_step_and_not_beyond(run):
    arguments = ["--env-id", "tests/hopper/random-v0", *SHORT, "--bc-inflation-steps", 4]
    values, _ = scalars(run("td3_bc_n", *arguments, "--beta", 0.5, "--bc-inflation", 8)[1])
    assert [round(value, 5) for _, value in values["charts/beta"]] == [4, 4, 4, 4, 0.5, 0.5]


def test_sac_resolves_its_target_entropy_to_minus_the_size_of_the_action(run):
    _, run_dir = run("sac_bc_n", "--env-id", "tests/hopper/random-v0", *SHORT)
    assert json.loads((run_dir / "result.json").read_text())["args"]["target_entropy"] == -3.0


def test_a_video_is_made_of_every_evaluation(run):
    arguments = ["--env-id", "tests/hopper/random-v0", *SHORT, "--capture-video"]
    videos = sorted((run("td3_bc_n", *arguments)[1] / "videos").glob("*.mp4"))
    assert [video.name for video in videos] == ["step-3-episode-0.mp4", "step-6-episode-0.mp4"]
    assert all(video.stat().st_size > 1000 for video in videos)


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_data_set_that_is_not_there_is_one_clear_line(script, run):
    process, run_dir = run(script, "--env-id", "tests/nowhere-v0", check=False)
    assert process.returncode == 1 and run_dir is None
    assert "tests/nowhere-v0: no Minari data set here" in process.stderr
    assert "Traceback" not in process.stderr


def test_tracking_without_its_package_is_one_clear_line(run):
    process, _ = run("td3_bc_n", "--env-id", "tests/hopper/random-v0", "--track", check=False)
    assert process.returncode == 1 and "pip install wandb" in process.stderr
    assert "Traceback" not in process.stderr


@pytest.mark.parametrize(("script", "rate"), [("sac_bc_n", 10), ("td3_bc_n", 1e30)])
def test_a_run_that_diverges_stops_with_a_reason(script, rate, run):
    arguments = ["--env-id", "tests/hopper/random-v0", *SHORT, "--gradient-steps", 5000]
    arguments += ["--log-frequency", 50, "--eval-frequency", 1000, "--batch-size", 16]
    process, run_dir = run(script, *arguments, "--learning-rate", rate, check=False)
    assert process.returncode == 3 and "not finite, and before" in process.stderr
    assert not (run_dir / "result.json").exists()
    assert "--num-critics" in process.stderr and "Traceback" not in process.stderr


def test_divergence_leaves_the_last_good_checkpoint(run):
    arguments = ["--env-id", "tests/hopper/random-v0", *SHORT, "--batch-size", 16]
    run_dir = run("td3_bc_n", *arguments)[1]
    good = weights(run_dir)
    checkpoint = torch.load(run_dir / "checkpoint.pt", weights_only=True)
    checkpoint["args"]["learning_rate"] = 1e30  # the run goes on, and diverges
    for optimizer in checkpoint["optimizers"].values():
        optimizer["param_groups"][0]["lr"] = 1e30
    torch.save(checkpoint, run_dir / "checkpoint.pt")
    more = ["--gradient-steps", 5000, "--eval-frequency", 5000]
    process, _ = run("td3_bc_n", "--resume", run_dir, *more, check=False)
    assert process.returncode == 3
    assert all(torch.equal(value, good[name]) for name, value in weights(run_dir).items())
