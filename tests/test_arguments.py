"""The command line: the paper's table, resolved from --env-id before parsing."""

import re
import subprocess
import sys

import pytest
from conftest import ROOT

import sac_bc_n
import td3_bc_n

#                    targets       TD3 beta  SAC form and beta  reward    episodes
TABLE = {
    "halfcheetah-medium-v2": (False, 0.04, "ll", 0.0, "raw", 10),
    "hopper-medium-replay-v2": (False, 0.03, "ll", 0.0025, "raw", 10),
    "walker2d-expert-v2": (False, 0.03, "ll", 0.0025, "raw", 10),
    "maze2d-umaze-v1": (False, 0.02, "mse", 0.02, "raw", 100),
    "maze2d-medium-v1": (False, 0.2, "mse", 0.05, "raw", 100),
    "maze2d-large-v1": (False, 0.2, "mse", 0.05, "raw", 100),
    "antmaze-umaze-v0": (True, 0.1, "mse", 0.1, "antmaze", 100),
    "antmaze-umaze-diverse-v2": (True, 0.1, "mse", 0.1, "antmaze", 100),
    "antmaze-medium-play-v0": (True, 0.02, "mse", 0.02, "antmaze", 100),
    "antmaze-large-diverse-v0": (True, 0.02, "mse", 0.01, "antmaze", 100),
    "pen-human-v1": (True, 10.0, "mse", 10.0, "standardize", 100),
    "hammer-cloned-v1": (True, 10.0, "mse", 10.0, "standardize", 100),
    "door-expert-v1": (True, 10.0, "mse", 10.0, "standardize", 100),
    "relocate-human-v1": (True, 10.0, "mse", 10.0, "standardize", 100),
    # The same tasks by their Minari names
    "mujoco/halfcheetah/expert-v0": (False, 0.04, "ll", 0.0, "raw", 10),
    "mujoco/hopper/medium-v0,mujoco/hopper/expert-v0": (False, 0.03, "ll", 0.0025, "raw", 10),
    "D4RL/pointmaze/medium-v2": (False, 0.2, "mse", 0.05, "raw", 100),
    "D4RL/antmaze/large-play-v1": (True, 0.02, "mse", 0.01, "antmaze", 100),
    "D4RL/door/human-v2": (True, 10.0, "mse", 10.0, "standardize", 100),
}


def parse(script, monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", [f"{script.__name__}.py", *arguments])
    return script.parse_args()[0]


@pytest.mark.parametrize("env_id", TABLE)
def test_every_row_of_the_papers_table_is_the_default_of_its_task(env_id, monkeypatch):
    independent, td3_beta, form, sac_beta, reward, episodes = TABLE[env_id]
    for script, beta in ((td3_bc_n, td3_beta), (sac_bc_n, sac_beta)):
        args = parse(script, monkeypatch, "--env-id", env_id)
        assert args.independent_targets is independent
        assert args.beta == beta
        assert args.reward_transform == reward
        assert args.eval_episodes == args.final_eval_episodes == episodes
    assert args.bc_form == form


def test_shared_hyperparameters_are_the_papers(monkeypatch):
    for script in (td3_bc_n, sac_bc_n):
        args = parse(script, monkeypatch, "--env-id", "maze2d-umaze-v1")
        assert (args.learning_rate, args.batch_size, args.gamma, args.tau) == (
            3e-4,
            256,
            0.99,
            0.005,
        )
        assert (args.num_critics, args.gradient_steps, args.critic_init) == (10, 1_000_000, "paper")
        assert (args.bc_inflation, args.bc_inflation_steps) == (10, 50_000)
        assert args.normalize_states
    args = parse(td3_bc_n, monkeypatch, "--env-id", "maze2d-umaze-v1")
    assert (args.policy_noise, args.noise_clip, args.policy_frequency) == (0.2, 0.5, 2)


def test_without_arguments_a_run_takes_minutes_and_the_data_that_comes_along(monkeypatch):
    for script in (td3_bc_n, sac_bc_n):
        args, paper = (
            parse(script, monkeypatch, *a) for a in ((), ("--env-id", "maze2d-umaze-v1"))
        )
        assert args.env_id == "tiny-maze2d-umaze-v0"
        changed = {name for name, value in vars(args).items() if value != getattr(paper, name)}
        assert changed == {*script.TINY_RUN, "env_id"}
        assert all(getattr(args, name) == value for name, value in script.TINY_RUN.items())
        given = parse(script, monkeypatch, "--gradient-steps", "7", "--batch-size", "8")
        assert (given.gradient_steps, given.batch_size) == (7, 8)


def test_d4rls_reference_returns():
    references = {
        "halfcheetah": (-280.178953, 12135.0),
        "hopper": (-20.272305, 3234.3),
        "walker2d": (1.629008, 4592.3),
        "maze2d-umaze": (23.85, 161.86),
        "maze2d-medium": (13.13, 277.39),
        "maze2d-large": (6.7, 273.99),
        "antmaze-umaze": (0, 1),
        "antmaze-medium": (0, 1),
        "antmaze-large": (0, 1),
        "pen": (96.262799, 3076.8331017826877),
        "hammer": (-274.856578, 12794.134825156867),
        "door": (-56.512833, 2880.5693087298737),
        "relocate": (-6.425911, 4233.877797728884),
    }
    horizons = [1000, 1000, 1000, 300, 600, 800, 700, 1000, 1000, 100, 200, 200, 200]
    for script in (td3_bc_n, sac_bc_n):
        rows = script.TASKS.items()
        assert {name: (row.random_return, row.expert_return) for name, row in rows} == references
        assert [row.horizon for _, row in rows] == horizons


@pytest.mark.parametrize("spelling", ["--env-id {}", "--env-id={}", "--env_id {}", "--env_id={}"])
def test_every_spelling_of_env_id_is_understood(spelling, monkeypatch):
    args = parse(td3_bc_n, monkeypatch, *spelling.format("antmaze-large-play-v2").split())
    assert (args.env_id, args.beta, args.independent_targets) == (
        "antmaze-large-play-v2",
        0.02,
        True,
    )


def test_flags_are_plain_and_beat_the_table(monkeypatch):
    antmaze = ("--env-id", "antmaze-umaze-v2")
    assert parse(td3_bc_n, monkeypatch, *antmaze, "--independent-targets").independent_targets
    assert not parse(
        td3_bc_n, monkeypatch, *antmaze, "--no-independent-targets"
    ).independent_targets
    assert parse(td3_bc_n, monkeypatch, "--independent-targets").independent_targets
    assert parse(sac_bc_n, monkeypatch, *antmaze, "--bc-form", "ll", "--beta", "3").bc_form == "ll"
    with pytest.raises(SystemExit):
        parse(td3_bc_n, monkeypatch, "--independent-targets", "False")


@pytest.mark.parametrize("env_id", ["tests/swing-v0", "my/open-drawer-v0", "my/hopperlike/x-v1"])
def test_other_tasks_get_the_generic_defaults(env_id, monkeypatch):
    assert td3_bc_n.task_of(env_id) is None
    args = parse(td3_bc_n, monkeypatch, "--env-id", env_id)
    assert vars(args) == vars(td3_bc_n.Args(env_id=env_id))


def test_the_last_env_id_counts(monkeypatch):
    args = parse(td3_bc_n, monkeypatch, "--env-id", "pen-human-v1", "--env-id", "maze2d-large-v1")
    assert (args.env_id, args.beta) == ("maze2d-large-v1", 0.2)


@pytest.mark.parametrize(
    "argument",
    ["gradient-steps", "eval-frequency", "log-frequency", "eval-episodes", "num-critics"],
)
def test_numbers_that_are_too_small_are_refused(argument, monkeypatch):
    with pytest.raises(SystemExit, match=f"--{argument} 0: too small"):
        parse(td3_bc_n, monkeypatch, f"--{argument}", "0")
    with pytest.raises(SystemExit, match="--seed -1: too small"):
        parse(td3_bc_n, monkeypatch, "--seed", "-1")


@pytest.mark.parametrize("script", ["td3_bc_n", "sac_bc_n"])
def test_help_is_a_manual_with_the_numbers_of_the_task(script):
    command = [
        sys.executable,
        ROOT / f"{script}.py",
        "--env-id",
        "antmaze-large-diverse-v0",
        "--help",
    ]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    flat = " ".join(text.replace("│", " ").split())
    beta = "0.02" if script == "td3_bc_n" else "0.01"
    assert f"weight of behavioural cloning (paper: by task) (default: {beta})" in flat
    assert "(paper: by task) (default: True)" in flat
    assert "--independent-targets, --no-independent-targets" in flat
    assert "Run it:" in text
    option = r"--[\w-]+(?:, --no-[\w-]+)?(?: [A-Z]+| \{[^}]*\}(?:\|[A-Z]+)?)? \(default"
    assert not re.findall(option, flat), "every argument is documented"
