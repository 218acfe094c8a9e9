"""Datasets of users: without an environment, with unusual spaces, with code of unknown packages."""

import json
import os
import shutil
import signal

import gymnasium as gym
import minari
import numpy as np
import pytest
import torch
from conftest import collect, create
from minari.data_collector.episode_buffer import EpisodeBuffer
from test_runs import scalars

from td3_bc_n import load_data

Box, Dict = gym.spaces.Box, gym.spaces.Dict
SHORT = ["--gradient-steps", 6, "--eval-frequency", 3, "--log-frequency", 1]
SHORT += ["--num-critics", 2, "--batch-size", 16]


def episode(obs_space, action_space, length=5, seed=0):
    rng = np.random.default_rng(seed)

    def column(space, rows):
        if isinstance(space, Dict):
            return {key: column(part, rows) for key, part in space.items()}
        if isinstance(space, Box):
            return rng.normal(size=(rows, *space.shape)).clip(-1, 1).astype(space.dtype)
        return np.zeros(rows, dtype=int)

    rewards, dones = rng.normal(size=length), np.zeros((2, length), dtype=bool)
    dones[1, -1] = True
    columns = column(obs_space, length + 1), column(action_space, length), rewards, *dones
    return EpisodeBuffer(seed, None, None, *columns)


def record(dataset_id, obs_space, action_space, **kwargs):
    """A Minari dataset of arrays, without an environment."""
    episodes = [episode(obs_space, action_space, seed=seed) for seed in range(4)]
    minari.create_dataset_from_buffers(
        dataset_id,
        episodes,
        observation_space=obs_space,
        action_space=action_space,
        **kwargs,
    )


@pytest.fixture(scope="module", autouse=True)
def arrays(datasets):
    """A robot's log: actions in [-2, 2], no environment."""
    with pytest.warns(UserWarning):
        record("robot/log-v0", Box(-9, 9, (3,)), Box(-2, 2, (2,)))


@pytest.mark.parametrize("script", ["td3_bc_n", "sac_bc_n"])
def test_a_dataset_without_environment_trains_and_says_so(script, run):
    process, run_dir = run(script, "--env-id", "robot/log-v0", *SHORT)
    (line,) = process.stderr.strip().splitlines()
    assert line.startswith("robot/log-v0: no evaluation, the environment cannot be made")
    assert "step 6: no score" in process.stdout and "python -m tools.fqe" in process.stdout
    result = json.loads((run_dir / "result.json").read_text())
    assert (result["status"], result["returns"], "score" in result) == ("finished", [], False)
    assert [entry["step"] for entry in result["history"]] == [3, 6]
    assert result["metadata"]["environment"] is None
    assert result["metadata"]["action_low"] == [-2.0, -2.0]
    values, _ = scalars(run_dir)
    for tag in ("losses/bc", "losses/q_term", "losses/q_min", "losses/q_std", "losses/q_values"):
        assert tag in values
    assert [step for step, _ in values["uncertainty/policy_std"]] == [3, 6]
    assert "charts/score" not in values


def hang_up(monkeypatch):
    """SIGHUP during the training, as when an ssh connection ends."""
    forward, calls = torch.nn.Sequential.forward, []

    def spy(self, *inputs):
        calls.append(0)
        if len(calls) == 6:
            os.kill(os.getpid(), signal.SIGHUP)
        return forward(self, *inputs)

    monkeypatch.setattr(torch.nn.Sequential, "forward", spy)


def test_without_environment_a_stopped_run_is_resumed_exactly(run, monkeypatch):
    whole = run("td3_bc_n", "--env-id", "robot/log-v0", *SHORT)[1]
    hang_up(monkeypatch)
    process, stopped = run("td3_bc_n", "--env-id", "robot/log-v0", *SHORT, check=False)
    assert process.returncode == 128 + signal.SIGHUP and "--resume" in process.stdout
    assert json.loads((stopped / "result.json").read_text())["status"] == "running"
    run("td3_bc_n", "--resume", stopped)
    one, other = (torch.load(d / "checkpoint.pt", weights_only=True) for d in (whole, stopped))
    assert other["step"] == 6
    assert all(torch.equal(value, other["agent"][key]) for key, value in one["agent"].items())


def test_under_nohup_a_run_goes_on_when_the_terminal_closes(run, monkeypatch):
    hang_up(monkeypatch)
    handler = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        run_dir = run("td3_bc_n", "--env-id", "robot/log-v0", *SHORT)[1]
    finally:
        signal.signal(signal.SIGHUP, handler)
    assert json.loads((run_dir / "result.json").read_text())["status"] == "finished"


def test_eval_episodes_0_never_plays(run, monkeypatch):
    monkeypatch.setattr(gym.wrappers.RescaleAction, "step", None)  # it must not be called
    arguments = ["--env-id", "mujoco/hopper/medium-v0", *SHORT, "--eval-episodes", 0]
    process, run_dir = run("td3_bc_n", *arguments)
    assert "no score" in process.stdout and "tools.fqe" in process.stdout
    assert json.loads((run_dir / "result.json").read_text())["returns"] == []


def test_fine_tuning_needs_the_environment(run):
    offline = run("td3_bc_n", "--env-id", "robot/log-v0", *SHORT)[1]
    process, run_dir = run("finetune_td3_bc_n", "--checkpoint", offline, check=False)
    assert (process.returncode, run_dir) == (1, None)
    assert process.stderr.endswith("robot/log-v0: fine-tuning needs the environment")


def test_an_environment_that_is_not_installed_is_no_obstacle(datasets, capsys):
    shutil.copytree(datasets / "mujoco/hopper/medium-v0", datasets / "tests/gone-v0")
    path = datasets / "tests/gone-v0/data/metadata.json"
    path.write_text(path.read_text().replace("hopper_v5:HopperEnv", "no_such_module:Env"))
    data, metadata, make_env = load_data("tests/gone-v0")
    assert make_env is None and metadata["environment"] == "Hopper-v5" and len(data.obs) > 100
    assert "no_such_module" in capsys.readouterr().err


# --- Code that a dataset names ---


@pytest.mark.parametrize("place", ["env_spec", "eval_env_spec", "wrapper", "escaped", "make"])
def test_code_of_unknown_packages_is_executed_only_with_trust_env(
    place, datasets, tmp_path, monkeypatch
):
    """The entry point of an environment can be any function, with any arguments."""
    name, witness = f"tests/evil-{place.replace('_', '-')}-v0", tmp_path / "executed"
    shutil.copytree(datasets / "mujoco/hopper/medium-v0", datasets / name)
    path = datasets / name / "data/metadata.json"
    metadata = json.loads(path.read_text())
    spec = json.loads(metadata["env_spec"])
    code = {"entry_point": "subprocess:run", "kwargs": {"args": ["touch", str(witness)]}}
    if place == "wrapper":
        spec["additional_wrappers"] = [{"name": "Evil", **code}]
    else:
        spec |= code
    if place == "make":  # a known package, but this function imports any module
        (tmp_path / "evil_module.py").write_text(f"open({str(witness)!r}, 'w')")
        monkeypatch.syspath_prepend(tmp_path)
        spec |= {"entry_point": "gymnasium:make", "kwargs": {"id": "evil_module:Env-v0"}}
    text = json.dumps(spec)
    if place == "escaped":
        text = text.replace("subprocess", "\\u0073ubprocess")
    metadata["eval_env_spec" if place == "eval_env_spec" else "env_spec"] = text
    path.write_text(json.dumps(metadata))
    data, _, make_env = load_data(name)
    assert make_env is None and len(data.obs) > 100 and not witness.exists()
    if place == "eval_env_spec":  # this one is used first
        load_data(name, trust_env=True)
        assert witness.exists()


# --- Spaces ---


BAD_OBSERVATIONS = {
    "image": Box(0, 1, (8, 8, 3)),
    "gray": Box(0, 255, (8, 8), np.uint8),
    "nested": Dict({"a": Dict({"b": Box(-1, 1, (2,))})}),
    "discrete-in-dict": Dict({"a": Box(-1, 1, (2,)), "b": gym.spaces.Discrete(3)}),
    "discrete": gym.spaces.Discrete(3),
}
BAD_ACTIONS = {
    "matrix": Box(-1, 1, (2, 2)),
    "choice": gym.spaces.Discrete(3),
    "unbounded": Box(-np.inf, np.inf, (2,)),
    "half-bounded": Box(np.array([-np.inf, -1], "f4"), np.ones(2, "f4")),
    "integer": Box(-3, 3, (2,), np.int64),
    "no-range": Box(np.array([-1, 1], "f4"), np.ones(2, "f4")),
}


@pytest.mark.parametrize("kind", [*BAD_OBSERVATIONS, *BAD_ACTIONS])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_spaces_that_do_not_fit_are_one_line_before_anything_else(kind, run):
    obs_space = BAD_OBSERVATIONS.get(kind, Box(-1, 1, (3,)))
    action_space = BAD_ACTIONS.get(kind, Box(-1, 1, (2,)))
    record(f"spaces/{kind}-v0", obs_space, action_space)
    process, run_dir = run("td3_bc_n", "--env-id", f"spaces/{kind}-v0", *SHORT, check=False)
    assert (process.returncode, run_dir) == (1, None)
    expected = "observations must be vectors" if kind in BAD_OBSERVATIONS else "actions"
    assert f"spaces/{kind}-v0: cannot be loaded (ValueError" in process.stderr
    assert expected in process.stderr and "\n" not in process.stderr.strip()


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_dict_without_environment_has_its_keys_in_the_metadata():
    record("spaces/dict-v0", Dict({"b": Box(-1, 1, (2,)), "a": Box(-1, 1, ())}), Box(-1, 1, (2,)))
    data, metadata, _ = load_data("spaces/dict-v0")
    stored = next(iter(minari.load_dataset("spaces/dict-v0"))).observations
    keys = metadata["observation_keys"]
    assert sorted(keys) == ["a", "b"] and data.obs.shape == (20, 3)
    expected = np.hstack([stored[key].reshape(6, -1) for key in keys])
    np.testing.assert_allclose(data.obs[:5], expected[:5], rtol=1e-6)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_each_dataset_is_rescaled_by_its_own_bounds():
    record("robot/small-v0", Box(-9, 9, (3,)), Box(-1, 1, (2,)))
    small, large = (load_data(f"robot/{name}-v0")[0] for name in ("small", "log"))
    both, metadata, _ = load_data("robot/small-v0,robot/log-v0")
    np.testing.assert_array_equal(both.actions, np.concatenate([small.actions, large.actions]))
    np.testing.assert_allclose(small.actions, 2 * large.actions, atol=1e-6)  # the same raw actions
    assert metadata["action_high"] == [1.0, 1.0], "of the first"


def test_datasets_whose_environments_differ_in_an_argument_do_not_mix():
    for name, weight in (("one", 1.0), ("two", 2.0)):
        env = gym.make("Hopper-v5", max_episode_steps=5, forward_reward_weight=weight)
        create(f"tests/weight-{name}-v0", collect(env, 1, seed=0), env)
    with pytest.raises(SystemExit, match="datasets of different environments"):
        load_data("tests/weight-one-v0,tests/weight-two-v0")


def test_equal_score_references_are_refused():
    env = gym.make("Pendulum-v1", max_episode_steps=5)
    references = {"ref_min_score": 3.0, "ref_max_score": 3.0}
    create("tests/flat-scores-v0", collect(env, 1, seed=0), env, **references)
    with pytest.raises(SystemExit, match="ref_min_score must be smaller than ref_max_score"):
        load_data("tests/flat-scores-v0")


def test_a_home_that_cannot_be_written_is_one_line(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "file" / "below"))
    with pytest.raises(SystemExit, match="robot/log-v0: cannot be loaded") as error:
        load_data("robot/log-v0")
    assert "\n" not in error.value.code
