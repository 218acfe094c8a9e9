"""The command line: the paper's hyperparameters, resolved from --env-id before parsing."""

import re
import sys

import pytest
import torch
from conftest import run_script

import finetune_sac_bc_n
import finetune_td3_bc_n
import sac_bc_n
import td3_bc_n

#            independent, TD3 beta and beta_end, SAC form, beta and beta_end, reward, episodes
TABLE = {
    "halfcheetah-medium-v2": (False, 0.04, 1e-12, "ll", 0.0, 0.0, "raw", 10),
    "hopper-medium-replay-v2": (False, 0.03, 0.02, "ll", 0.0025, 0.001, "raw", 10),
    "walker2d-expert-v2": (False, 0.03, 1e-10, "ll", 0.0025, 1e-10, "raw", 10),
    "maze2d-umaze-v1": (False, 0.02, 0.02, "mse", 0.02, 0.02, "raw", 100),
    "maze2d-medium-v1": (False, 0.2, 0.02, "mse", 0.05, 0.01, "raw", 100),
    "maze2d-large-v1": (False, 0.2, 0.02, "mse", 0.05, 0.01, "raw", 100),
    "antmaze-umaze-v0": (True, 0.1, 0.1, "mse", 0.1, 0.05, "antmaze", 100),
    "antmaze-umaze-diverse-v2": (True, 0.1, 0.1, "mse", 0.1, 0.05, "antmaze", 100),
    "antmaze-medium-play-v0": (True, 0.02, 0.01, "mse", 0.02, 0.02, "antmaze", 100),
    "antmaze-large-diverse-v0": (True, 0.02, 0.005, "mse", 0.01, 0.005, "antmaze", 100),
    "pen-human-v1": (True, 10.0, 2.0, "mse", 10.0, 2.0, "standardize", 100),
    "hammer-cloned-v1": (True, 10.0, 2.0, "mse", 10.0, 2.0, "standardize", 100),
    "door-expert-v1": (True, 10.0, 2.0, "mse", 10.0, 2.0, "standardize", 100),
    "relocate-human-v1": (True, 10.0, 2.0, "mse", 10.0, 2.0, "standardize", 100),
    # The same tasks by their Minari names
    "mujoco/halfcheetah/expert-v0": (False, 0.04, 1e-12, "ll", 0.0, 0.0, "raw", 10),
    "mujoco/hopper/medium-v0,mujoco/hopper/expert-v0": (
        *(False, 0.03, 0.02),
        *("ll", 0.0025, 0.001, "raw", 10),
    ),
    "D4RL/pointmaze/medium-v2": (False, 0.2, 0.02, "mse", 0.05, 0.01, "raw", 100),
    "D4RL/antmaze/large-play-v1": (True, 0.02, 0.005, "mse", 0.01, 0.005, "antmaze", 100),
    "D4RL/door/human-v2": (True, 10.0, 2.0, "mse", 10.0, 2.0, "standardize", 100),
}


def parse(script, monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", [f"{script.__name__}.py", *map(str, arguments)])
    return script.parse_args()[0]


def offline_checkpoint(script, path, monkeypatch, *arguments):
    """A checkpoint as far as the parser of the online script reads it."""
    args = parse(script, monkeypatch, *arguments)
    checkpoint = {"algorithm": script.__name__, "format": script.CHECKPOINT_FORMAT}
    torch.save(checkpoint | {"args": vars(args)}, path)
    return path


@pytest.mark.parametrize("env_id", TABLE)
def test_every_task_has_the_hyperparameters_of_the_paper(env_id, monkeypatch):
    independent, td3_beta, _, form, sac_beta, _, reward, episodes = TABLE[env_id]
    for script, beta in ((td3_bc_n, td3_beta), (sac_bc_n, sac_beta)):
        args = parse(script, monkeypatch, "--env-id", env_id)
        assert args.independent_targets is independent
        assert args.beta == beta
        assert args.reward_transform == reward
        assert args.eval_episodes == episodes
    assert args.bc_form == form


@pytest.mark.parametrize("env_id", TABLE)
def test_fine_tuning_decays_beta_as_in_the_paper(env_id, monkeypatch, tmp_path):
    independent, td3_beta, td3_end, form, sac_beta, sac_end, _, episodes = TABLE[env_id]
    pairs = [(td3_bc_n, finetune_td3_bc_n, td3_beta, td3_end)]
    pairs += [(sac_bc_n, finetune_sac_bc_n, sac_beta, sac_end)]
    for offline, online, beta, beta_end in pairs:
        path = offline_checkpoint(offline, tmp_path / "c.pt", monkeypatch, "--env-id", env_id)
        args = parse(online, monkeypatch, "--checkpoint", path)
        beta = 0.2 if env_id == "maze2d-umaze-v1" else beta
        assert (args.beta_start, args.beta_end, args.env_id) == (beta, beta_end, env_id)
        assert (args.independent_targets, args.eval_episodes) == (independent, episodes)
    assert args.bc_form == form
    assert (args.env_steps, args.learning_starts, args.offline_transitions) == (250_000, 2500, 2500)
    assert (args.beta_decay_steps, args.eval_frequency) == (50_000, 5_000)


def test_fine_tuning_inherits_the_algorithm_of_the_offline_run(monkeypatch, tmp_path):
    changed = ["--env-id", "hopper-medium-v2", "--num-critics", 3, "--gamma", 0.9, "--seed", 7]
    changed += ["--beta", 0.5, "--batch-size", 8, "--learning-rate", 0.1, "--tau", 0.1]
    changed += ["--critic-init", "torch", "--independent-targets", "--policy-noise", 0.3]
    path = offline_checkpoint(td3_bc_n, tmp_path / "c.pt", monkeypatch, *changed)
    args = parse(finetune_td3_bc_n, monkeypatch, "--checkpoint", path)
    assert (args.num_critics, args.gamma, args.seed, args.beta_start) == (3, 0.9, 7, 0.5)
    assert (args.batch_size, args.learning_rate, args.tau) == (8, 0.1, 0.1)
    assert (args.critic_init, args.independent_targets, args.policy_noise) == ("torch", True, 0.3)
    assert parse(finetune_td3_bc_n, monkeypatch, "--checkpoint", path, "--seed", 2).seed == 2
    path = offline_checkpoint(td3_bc_n, tmp_path / "tiny.pt", monkeypatch, "--beta", 0.7)
    assert parse(finetune_td3_bc_n, monkeypatch, "--checkpoint", path).beta_start == 0.7


def test_from_scratch_is_without_behavioural_cloning(monkeypatch):
    for env_id in ("Hopper-v5", "maze2d-umaze-v1"):
        args = parse(finetune_sac_bc_n, monkeypatch, "--env-id", env_id)
        assert (args.beta_start, args.checkpoint) == (0.0, None)


def test_shared_hyperparameters_are_those_of_the_paper(monkeypatch):
    for script in (td3_bc_n, sac_bc_n):
        args = parse(script, monkeypatch, "--env-id", "maze2d-umaze-v1")
        assert (args.learning_rate, args.batch_size, args.gamma) == (3e-4, 256, 0.99)
        assert (args.tau, args.critic_init) == (0.005, "paper")
        assert (args.num_critics, args.gradient_steps) == (10, 1_000_000)
        assert (args.bc_inflation, args.bc_inflation_steps) == (10, 50_000)
    args = parse(td3_bc_n, monkeypatch, "--env-id", "maze2d-umaze-v1")
    assert (args.policy_noise, args.noise_clip, args.policy_frequency) == (0.2, 0.5, 2)
    assert finetune_td3_bc_n.Args().exploration_noise == 0.1


def test_without_arguments_a_short_run_on_the_bundled_dataset(monkeypatch):
    for script in (td3_bc_n, sac_bc_n):
        args = parse(script, monkeypatch)
        paper = parse(script, monkeypatch, "--env-id", "maze2d-umaze-v1")
        assert args.env_id == "tiny-maze2d-umaze-v0"
        changed = {name for name, value in vars(args).items() if value != getattr(paper, name)}
        tiny = script.TASK_DEFAULTS["tiny-maze2d-umaze"]
        assert changed == {"env_id", *tiny} - {"bc_form"}
        assert (args.beta, args.bc_inflation, args.gamma) == (0.2, 1.0, 0.98)
        given = parse(script, monkeypatch, "--gradient-steps", "7", "--batch-size", "8")
        assert (given.gradient_steps, given.batch_size) == (7, 8)


@pytest.mark.parametrize("spelling", ["--env-id {}", "--env-id={}", "--env_id {}", "--env_id={}"])
def test_every_spelling_of_env_id_is_understood(spelling, monkeypatch):
    args = parse(td3_bc_n, monkeypatch, *spelling.format("antmaze-large-play-v2").split())
    assert (args.env_id, args.beta) == ("antmaze-large-play-v2", 0.02)
    assert args.independent_targets is True


def test_flags_override_the_task_defaults(monkeypatch):
    antmaze = ("--env-id", "antmaze-umaze-v2")
    args = parse(td3_bc_n, monkeypatch, *antmaze, "--no-independent-targets")
    assert not args.independent_targets
    assert parse(td3_bc_n, monkeypatch, "--independent-targets").independent_targets
    assert parse(sac_bc_n, monkeypatch, *antmaze, "--bc-form", "ll", "--beta", "3").bc_form == "ll"
    with pytest.raises(SystemExit):
        parse(td3_bc_n, monkeypatch, "--independent-targets", "False")


@pytest.mark.parametrize(
    "env_id",
    [
        *("tests/swing-v0", "my/open-door-v0", "my/hopper/medium-v0", "my/D4RL/pen/human-v2"),
        *("hopper/medium-v0", "D4RL/pointmaze/umaze-dense-v2", "D4RL/kitchen/mixed-v2"),
    ],
)
def test_tasks_are_matched_exactly_and_others_get_the_generic_defaults(env_id, monkeypatch):
    assert td3_bc_n.task_defaults(env_id) == {}
    args = parse(td3_bc_n, monkeypatch, "--env-id", env_id)
    assert vars(args) == vars(td3_bc_n.Args(env_id=env_id))


def test_the_last_env_id_counts(monkeypatch):
    args = parse(td3_bc_n, monkeypatch, "--env-id", "pen-human-v1", "--env-id", "maze2d-large-v1")
    assert (args.env_id, args.beta) == ("maze2d-large-v1", 0.2)


REFUSED = {
    td3_bc_n: [
        *((name, "0") for name in ("gradient-steps", "eval-frequency", "num-critics")),
        *(("seed", "-1"), ("seed", "12345678901234567890123"), ("eval-episodes", "-1")),
        *(("beta", "nan"), ("beta", "inf"), ("beta", "-0.1"), ("learning-rate", "nan")),
        *(("gamma", "nan"), ("gamma", "1.5"), ("tau", "2"), ("bc-inflation", "inf")),
    ],
    finetune_td3_bc_n: [
        *(("env-steps", "0"), ("learning-starts", "0"), ("offline-transitions", "-1")),
        *(("beta-start", "nan"), ("gamma", "1.5"), ("tau", "2")),
    ],
}


@pytest.mark.parametrize(
    ("script", "argument", "value"),
    [(script, *row) for script, rows in REFUSED.items() for row in rows],
)
def test_numbers_out_of_range_are_refused(script, argument, value, monkeypatch):
    with pytest.raises(SystemExit, match=f"{argument.replace('-', '_')} must be from") as error:
        parse(script, monkeypatch, f"--{argument}", value)
    assert "\n" not in error.value.code


def test_numbers_at_the_ends_of_their_range_are_accepted(monkeypatch):
    args = parse(td3_bc_n, monkeypatch, "--bc-inflation-steps", 0, "--eval-episodes", 0)
    assert (args.bc_inflation_steps, args.eval_episodes) == (0, 0)
    args = parse(td3_bc_n, monkeypatch, "--gamma", 1, "--tau", 1, "--beta", 0, "--seed", 0)
    assert (args.gamma, args.tau, args.beta, args.seed) == (1, 1, 0, 0)
    scratch = ["--env-id", "Hopper-v5", "--offline-transitions", 0]
    assert parse(finetune_td3_bc_n, monkeypatch, *scratch).offline_transitions == 0


def test_tracking_without_wandb_is_one_line(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)  # import raises ModuleNotFoundError
    process, run_dir = run("td3_bc_n", "--track", check=False)
    assert (process.returncode, run_dir) == (1, None)
    assert process.stderr == "--track needs wandb: pip install wandb"


def test_fine_tuning_needs_a_checkpoint_or_an_environment(monkeypatch):
    with pytest.raises(SystemExit, match="--checkpoint RUN fine-tunes an offline run, --env-id"):
        parse(finetune_td3_bc_n, monkeypatch)


@pytest.mark.parametrize("script", ["td3_bc_n", "finetune_sac_bc_n"])
def test_help_documents_every_argument_with_the_defaults_of_the_task(script):
    process = run_script(script, "--env-id", "antmaze-large-diverse-v0", "--help")
    assert process.returncode == 0
    text = process.stdout
    flat = " ".join(text.replace("│", " ").split())
    if script == "td3_bc_n":
        assert "weight of the BC term (by task) (default: 0.02)" in flat
        assert "(by task) (default: True)" in flat
    else:
        assert "final weight of the BC term (by task) (default: 0.005)" in flat
    assert "--independent-targets, --no-independent-targets" in flat
    assert "Usage:" in text
    option = r"--[\w-]+(?:, --no-[\w-]+)?(?: [A-Z]+| \{[^}]*\}(?:\|[A-Z]+)?)? \(default"
    assert not re.findall(option, flat), "every argument is documented"
