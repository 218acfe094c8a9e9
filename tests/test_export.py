"""tools.export: ONNX files of the policies of real short runs."""

import json
import runpy
import shutil
import sys
import textwrap
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import ROOT, collect, create, run_script

import td3_bc_n
from tools import enjoy, export, runs

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")

NEVER_PLAY = ["--batch-size", 8, "--eval-episodes", 0]
OFFLINE = ["--gradient-steps", 2, *NEVER_PLAY]
ONLINE = ["--env-steps", 2, "--learning-starts", 10, *NEVER_PLAY]
SWING = ["--env-id", "tests/swing-v0"]  # Pendulum, with actions in [-2, 2]
ARGUMENTS = {
    "finetune_td3_bc_n": [*ONLINE, "--checkpoint", "td3_bc_n"],
    "finetune_sac_bc_n": [*ONLINE, "--env-id", "Pendulum-v1"],
    "bundled": OFFLINE,
    "pointmaze": [*OFFLINE, "--env-id", "D4RL/pointmaze/umaze-v2"],
    "bounds": [*OFFLINE, "--env-id", "export/bounds-v0"],
    "played": [*OFFLINE, *SWING, "--eval-episodes", 1],
}
LOW, HIGH = np.float32([0, -1, 10000]), np.float32([5, 3, 10000.5])  # of export/bounds-v0


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Trains a run when a test asks for it: a script on Pendulum, or a name of ARGUMENTS."""
    directory = tmp_path_factory.mktemp("export")

    def train(name):
        if not (directory / name).exists():
            script = name if name in runs.ALGORITHMS else "td3_bc_n"
            arguments = [*ARGUMENTS.get(name, [*OFFLINE, *SWING])]
            if "--checkpoint" in arguments:
                arguments[-1] = train(arguments[-1])
            elif script != "bc":
                arguments += ["--num-critics", 2]
            names = ["--runs-dir", directory, "--run-name", name]
            path = runs.script_path(script).removesuffix(".py")
            process = run_script(path, *arguments, *names)
            assert process.returncode == 0, process.stderr
        return directory / name

    return train


@pytest.fixture
def copied(trained, tmp_path):
    """A copy of a run, with changes in its checkpoint."""

    def copy(name, change=lambda checkpoint: None):
        path = Path(shutil.copytree(trained(name), tmp_path / name))
        checkpoint = torch.load(path / "checkpoint.pt", weights_only=True)
        change(checkpoint)
        torch.save(checkpoint, path / "checkpoint.pt")
        return path

    return copy


@pytest.fixture
def exported(trained, tmp_path):
    """Exports a run by its name; returns the session and the agent."""

    def make(name):
        out = tmp_path / f"{name}.onnx"
        export.main(export.Args(str(trained(name)), out=str(out)))
        _, _, agent = runs.load_agent(trained(name))
        return onnxruntime.InferenceSession(out), agent

    return make


def actions_of(session, obs):
    return session.run(["action"], {"obs": np.asarray(obs, dtype=np.float32)})[0]


def properties(path):
    return {entry.key: entry.value for entry in onnx.load(path).metadata_props}


@pytest.fixture(scope="module")
def bounds_env(datasets):
    """A hopper with another range for every action, and a dataset of it without environment."""
    env = gym.wrappers.RescaleAction(gym.make("Hopper-v5", max_episode_steps=18), LOW, HIGH)
    spaces = {"observation_space": env.observation_space, "action_space": env.action_space}
    create("export/bounds-v0", collect(env, 3, seed=0), None, **spaces)
    return env


@pytest.mark.parametrize("name", runs.ALGORITHMS)
def test_the_file_gives_the_actions_of_the_agent_for_every_script(name, exported):
    session, agent = exported(name)
    obs = td3_bc_n.load_data("tests/swing-v0")[0].obs
    actions = actions_of(session, obs)
    assert actions.dtype == np.float32 and actions.std() > 1e-3
    np.testing.assert_allclose(actions, 2 * agent.act(obs), atol=1e-5)
    assert session.get_modelmeta().custom_metadata_map["algorithm"] == name


def test_actions_are_in_the_range_that_the_environment_has_for_each(bounds_env, exported):
    session, agent = exported("bounds")
    obs = np.concatenate([episode.observations for episode in collect(bounds_env, 3, seed=9)])
    rescale = td3_bc_n.wrap_env(bounds_env)
    expected = np.stack([rescale.action(action) for action in agent.act(obs)])
    actions = actions_of(session, obs)
    assert (np.abs(actions - expected) < 2e-5 * (HIGH - LOW) + 1e-6 * np.abs(HIGH)).all()
    assert not np.allclose(actions, 2 * agent.act(obs), atol=0.1)


def test_no_action_leaves_the_range_by_rounding():
    """low + (high - low) is above high for about half of these bounds, in float32."""
    rng = np.random.default_rng(0)
    low, high = (rng.uniform(*ends, 2000).astype(np.float32) for ends in ((-10, -1), (0, 1)))
    agent = td3_bc_n.Agent(1, len(low), td3_bc_n.Args(num_critics=1))
    for end, bias in ((high, 100.0), (low, -100.0)):
        torch.nn.init.constant_(agent.actor.mean.bias, bias)  # actions of 1 and -1
        with torch.no_grad():
            actions = export.Policy(agent, low, high)(torch.zeros(1, 1))[0].numpy()
        assert (low <= actions).all() and (actions <= high).all()
        np.testing.assert_allclose(actions, end, atol=1e-5)


def test_large_weights_are_no_reason_to_refuse_the_file(copied):
    """They enlarge the rounding errors of float32: here to about 1e-5 of the range."""

    def change(checkpoint):
        for name, weight in checkpoint["agent"].items():
            if name.startswith("actor."):
                weight.mul_(6)

    path = copied("bundled", change)
    export.main(export.Args(str(path)))
    assert (path / "policy.onnx").exists()


@pytest.mark.parametrize("name", ["finetune_sac_bc_n", "pointmaze"])
def test_the_snippet_of_the_docstring_plays_as_the_agent_does(
    name, exported, tmp_path, monkeypatch
):
    """Pendulum with a vector as observation, PointMaze with a dict."""
    _, agent = exported(name)
    snippet = export.__doc__[export.__doc__.index("    import json") :]
    snippet = textwrap.dedent(snippet[: snippet.index("\nInput:")])
    shutil.move(tmp_path / f"{name}.onnx", tmp_path / "policy.onnx")
    monkeypatch.chdir(tmp_path)
    played = {}
    exec(snippet, played)
    env = td3_bc_n.wrap_env(gym.make(played["env"].spec.id))
    episode_return, observations, _ = enjoy.play(agent, env, seed=1)
    assert played["episode_return"] == pytest.approx(episode_return, rel=1e-3)
    last = gym.spaces.flatten(played["env"].observation_space, played["obs"])
    np.testing.assert_allclose(last, observations[-1], atol=1e-3)
    moved = np.abs(observations[-1] - observations[0]).max()
    assert moved > 0.05, "otherwise the last observation says nothing about the actions"


def test_metadata_of_the_file(copied):
    """Online, a checkpoint is written some steps after the evaluation that has the score."""
    path = copied("played", lambda checkpoint: checkpoint.update(step=30))
    export.main(export.Args(str(path)))
    result = json.loads((path / "result.json").read_text())
    assert result["history"][-1]["step"] == 2
    assert properties(path / "policy.onnx") == {
        "algorithm": "td3_bc_n",
        "dataset": "tests/swing-v0",
        "environment": "Pendulum-v1",
        "step": "30",
        "score": json.dumps(result["score"]),
        "score_step": "2",
        "observation_keys": "[]",
        "obs_dim": "3",
        "action_low": "[-2.0]",
        "action_high": "[2.0]",
    }


def test_what_a_run_lacks_is_left_out_of_the_metadata(copied, bounds_env):
    for name, missing in (("finetune_sac_bc_n", "dataset"), ("bounds", "environment")):
        path = copied(name)
        export.main(export.Args(str(path)))
        found = properties(path / "policy.onnx")
        assert missing not in found and "score" not in found and "score_step" not in found
        assert len(found) == 7


@pytest.mark.parametrize("name", ["td3_bc_n", "finetune_td3_bc_n"])
def test_observations_are_those_of_the_dataset(name, trained):
    _, settings, agent = runs.load_agent(trained(name))
    args = export.Args(str(trained(name)))
    obs, words = export.sample_observations(args, settings, agent, {"dataset": "tests/swing-v0"})
    data = td3_bc_n.load_data("tests/swing-v0")[0].obs
    assert obs.shape == (1000, 3) and obs.dtype == np.float32
    assert {row.tobytes() for row in obs} <= {row.tobytes() for row in data}
    assert len({row.tobytes() for row in obs}) > 300
    assert words == "1,000 observations of tests/swing-v0"


def test_a_dataset_that_is_gone_is_neither_needed_nor_downloaded(
    copied, capsys, monkeypatch, tmp_path
):
    path = copied("td3_bc_n")
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "empty"))
    monkeypatch.setattr(runs, "load_data", None)  # it must not be called
    export.main(export.Args(str(path)))
    words = "random observations N(obs_mean, obs_std) (the dataset is not on this machine)"
    assert words in capsys.readouterr().out
    assert (path / "policy.onnx").exists()


def test_random_observations_have_the_statistics_of_the_dataset(trained):
    _, settings, agent = runs.load_agent(trained("td3_bc_n"))
    agent.obs_mean.copy_(torch.tensor([10.0, 0.0, -5.0]))
    agent.obs_std.copy_(torch.tensor([0.1, 1.0, 20.0]))
    obs, words = export.sample_observations(export.Args(""), settings, agent, {"dataset": None})
    assert obs.shape == (1000, 3) and obs.dtype == np.float32
    np.testing.assert_allclose(obs.mean(axis=0), agent.obs_mean, atol=2)
    np.testing.assert_allclose(obs.std(axis=0), agent.obs_std, rtol=0.1)
    assert words.endswith("random observations N(obs_mean, obs_std) (the run has no dataset)")


def test_other_data_than_in_training_are_not_used(copied, capsys):
    path = copied("td3_bc_n", lambda checkpoint: checkpoint["metadata"].update(transitions=7))
    export.main(export.Args(str(path)))
    out = capsys.readouterr().out
    assert f"random observations N(obs_mean, obs_std) ({path}: transitions was 7" in out


def test_the_same_run_gives_the_same_bytes_without_paths(copied, capsys):
    path = copied("td3_bc_n")
    export.main(export.Args(str(path)))
    content = (path / "policy.onnx").read_bytes()
    assert str(ROOT).encode() not in content and b"site-packages" not in content
    capsys.readouterr()
    export.main(export.Args(str(path / "checkpoint.pt")))
    assert (path / "policy.onnx").read_bytes() == content
    written = {file.name for file in path.iterdir() if "tfevents" not in file.name}
    assert written == {"checkpoint.pt", "lock", "policy.onnx", "result.json"}
    (first, second), error = (text.splitlines() for text in capsys.readouterr())
    size = f"obs_dim 3, action_dim 1, {len(content):,} bytes"
    assert (first, error) == (f"{path}/policy.onnx: {size}", [])
    assert second.endswith("of the action range, on 1,000 observations of tests/swing-v0")


# --- Mistakes ---


def error_of(*arguments, **kwargs):
    """The one line of an export that fails."""
    with pytest.raises(SystemExit) as error:
        export.main(export.Args(*map(str, arguments), **kwargs))
    assert isinstance(error.value.code, str) and "\n" not in error.value.code
    return error.value.code


FAULTS = {
    "normalization": lambda self, obs: self.rescale(self.actor(obs)),
    "statistics": lambda self, obs: self.rescale(self.actor((obs - self.obs_mean) * self.obs_std)),
    "range": lambda self, obs: self.actor((obs - self.obs_mean) / self.obs_std),
    "small": lambda self, obs: self.correct(obs) + 2e-3,  # 5e-4 of the range
    "nan": lambda self, obs: self.actor.mean.bias.data.fill_(np.nan) + self.correct(obs),  # both
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_file_that_differs_from_the_agent_is_not_written(fault, copied, monkeypatch):
    path = copied("td3_bc_n")
    (path / "policy.onnx").write_text("an older file")
    before = sorted(path.iterdir())
    monkeypatch.setattr(export.Policy, "correct", export.Policy.forward, raising=False)
    monkeypatch.setattr(export.Policy, "rescale", lambda self, x: 2 * x, raising=False)
    monkeypatch.setattr(export.Policy, "forward", FAULTS[fault])
    message = error_of(path)
    assert message.startswith(f"{path}/policy.onnx: not written, differs from the agent by ")
    assert sorted(path.iterdir()) == before
    assert (path / "policy.onnx").read_text() == "an older file"


@pytest.mark.parametrize("package", ["onnx", "onnxruntime"])
def test_missing_packages_are_one_line(package, trained, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)  # its import fails
    monkeypatch.delitem(sys.modules, "tools.export")
    monkeypatch.setattr(sys, "argv", ["export.py", str(trained("td3_bc_n"))])
    with pytest.raises(SystemExit) as error:
        runpy.run_module("tools.export", run_name="__main__")
    expected = "tools.export needs onnx and onnxruntime: pip install onnx onnxruntime"
    assert error.value.code == expected


def test_wrong_paths_are_one_line(trained, tmp_path):
    path = trained("td3_bc_n")
    assert error_of(tmp_path / "nowhere").startswith(f"{tmp_path}/nowhere: not a checkpoint")
    assert "checkpoint.pt: not a checkpoint" in error_of(tmp_path), "a directory without a run"
    assert "result.json: not a checkpoint" in error_of(path / "result.json")
    expected = "expected an .onnx file in a directory that exists"
    for out in (tmp_path / "nowhere/policy.onnx", tmp_path / "policy.pt", tmp_path / "policy"):
        assert error_of(path, out=str(out)) == f"{out}: {expected}"
    (tmp_path / "full.onnx").mkdir()
    assert "full.onnx: cannot be written" in error_of(path, out=str(tmp_path / "full.onnx"))
    assert [file.name for file in tmp_path.iterdir()] == ["full.onnx"]


def test_a_diverged_run_is_not_exported(copied):
    path = copied("td3_bc_n")
    result = json.loads((path / "result.json").read_text())
    (path / "result.json").write_text(json.dumps(result | {"status": "diverged"}))
    for run in (path, path / "checkpoint.pt"):
        assert error_of(run) == f"{run}: the run diverged, its policy is not exported"
    assert not (path / "policy.onnx").exists()
    (path / "result.json").unlink()
    export.main(export.Args(str(path)))
    assert (path / "policy.onnx").exists(), "a checkpoint alone is enough"


@pytest.mark.parametrize("key", ["action_low", "action_high"])
def test_a_checkpoint_without_the_range_of_actions_is_one_line(key, copied):
    path = copied("td3_bc_n", lambda checkpoint: checkpoint["metadata"].pop(key))
    expected = f"{path}: written by another version of this project (KeyError('{key}'))"
    assert error_of(path) == expected
