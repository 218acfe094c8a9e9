"""tools.record: datasets of the policies of real short runs."""

import itertools

import gymnasium as gym
import minari
import numpy as np
import pytest
import torch
from conftest import run_script

import td3_bc_n
from tools import record, runs

SHORT = ["--num-critics", 2, "--batch-size", 16, "--eval-episodes", 1, "--eval-frequency", 4]
OFFLINE = ["--gradient-steps", 4, *SHORT]
ONLINE = ["--env-steps", 4, "--learning-starts", 10, *SHORT]
TRAINED = {  # a run of each kind of environment: rescaled actions, dict observations, D4RL's
    "swing": ["td3_bc_n", "--env-id", "tests/swing-v0", *OFFLINE],
    "swing-2": ["td3_bc_n", "--env-id", "tests/swing-v0", *OFFLINE, "--seed", 2],
    "swing-sac": ["sac_bc_n", "--env-id", "tests/swing-v0", *OFFLINE],
    "pointmaze": ["td3_bc_n", "--env-id", "D4RL/pointmaze/umaze-v2", *OFFLINE],
    "maze2d": ["td3_bc_n", *OFFLINE],
    "hopper": ["finetune_td3_bc_n", "--env-id", "Hopper-v5", *ONLINE, "--exploration-noise", 0.5],
}
numbers = itertools.count()


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    directory = tmp_path_factory.mktemp("record")
    for name, (script, *arguments) in TRAINED.items():
        names = ["--runs-dir", directory, "--run-name", name]
        process = run_script(script, *arguments, *names)
        assert process.returncode == 0, process.stderr
    return directory


@pytest.fixture
def recorded(trained):
    """Records runs by their names; returns the dataset."""

    def make(*names, steps=100, **kwargs):
        dataset_id = f"record/data{next(numbers)}-v0"
        paths = tuple(str(trained / name) for name in names)
        record.main(record.Args(paths, dataset_id, steps=steps, **kwargs))
        return minari.load_dataset(dataset_id)

    return make


def seeds(dataset):
    return [int(one["seed"]) for one in dataset.storage.get_episode_metadata(range(len(dataset)))]


def actions_of(dataset):
    return np.concatenate([episode.actions for episode in dataset])


@pytest.mark.parametrize("name", ["swing", "pointmaze", "maze2d", "hopper"])
def test_recorded_actions_lead_to_the_recorded_observations_and_rewards_again(name, recorded):
    dataset = recorded(name, explore=True)
    assert dataset.total_steps == 100
    env = dataset.recover_environment(eval_env=True)
    assert dataset.action_space == env.action_space
    for episode, seed in zip(dataset, seeds(dataset), strict=True):
        all_obs = [env.reset(seed=seed)[0]]
        for t, action in enumerate(episode.actions):
            assert dataset.action_space.contains(action)
            obs, reward, terminated, _, _ = env.step(action)
            all_obs.append(obs)
            assert reward == episode.rewards[t] and terminated == episode.terminations[t]
        if isinstance(obs, dict):
            assert episode.observations.keys() == obs.keys() == {*dataset.observation_space}
            for key, value in episode.observations.items():
                np.testing.assert_array_equal(value, [one[key] for one in all_obs])
        else:
            np.testing.assert_array_equal(episode.observations, all_obs)


def test_exploration_is_gaussian_noise_for_td3_and_a_sample_for_sac(recorded, trained):
    def exploration(name, max_action):
        _, _, agent = runs.load_agent(trained / name)
        noise = [
            episode.actions / max_action - agent.act(episode.observations[:-1])
            for episode in recorded(name, steps=400, explore=True)
        ]
        return np.concatenate(noise), agent

    noise, _ = exploration("swing", max_action=2)
    assert noise.std() == pytest.approx(0.1, rel=0.2), "the default: offline runs have no argument"
    noise, _ = exploration("hopper", max_action=1)
    assert 0.3 < noise.std() < 0.55, "exploration_noise of the run is 0.5, less the clipping"
    noise, agent = exploration("swing-sac", max_action=2)
    with torch.no_grad():
        samples, *_ = agent.actor.sample(torch.zeros(1000, 3))
    assert noise.std() == pytest.approx(samples.std().item(), rel=0.3) and noise.std() > 0.3


def test_the_same_seed_records_the_same_dataset_and_another_seed_another(recorded):
    one, same, other = (recorded("hopper", explore=True, seed=seed) for seed in (1, 1, 2))
    np.testing.assert_array_equal(actions_of(one), actions_of(same))
    assert not np.array_equal(actions_of(one)[:5], actions_of(other)[:5])
    assert len(set(seeds(one))) == len(one) > 1, "every episode has its own start"


def test_several_runs_are_recorded_in_turn(recorded, trained, capsys):
    dataset = recorded("swing", "swing-2", "swing-sac", steps=50)
    assert [len(episode.actions) for episode in dataset] == [40, 10] * 3
    for i, name in enumerate(("swing", "swing-2", "swing-sac")):
        _, _, agent = runs.load_agent(trained / name)
        for episode in list(dataset)[2 * i : 2 * i + 2]:
            expected = 2 * agent.act(episode.observations[:-1])
            np.testing.assert_allclose(episode.actions, expected, atol=1e-5)
    assert dataset.storage.metadata["algorithm_name"] == "td3_bc_n, sac_bc_n"
    lines = capsys.readouterr().out.splitlines()
    returns = [episode.rewards.sum() for episode in dataset]
    assert f"swing-2: 2 episodes, mean return {np.mean(returns[2:4]):.1f}" in lines[1]
    summary = f"150 steps, 6 episodes, mean return {np.mean(returns):.1f}."
    assert summary in lines[3] and lines[4] == f"  python td3_bc_n.py --env-id {dataset.id}"


def test_the_last_episode_is_cut_off_as_truncated_and_others_end_as_in_the_environment(recorded):
    *others, last = recorded("hopper", steps=100)
    assert others and sum(len(episode.actions) for episode in [*others, last]) == 100
    for episode in others:
        assert episode.terminations.tolist() == [False] * (len(episode.actions) - 1) + [True]
        assert not episode.truncations.any(), "a hopper that falls"
    assert not last.terminations.any() and last.truncations.sum() == last.truncations[-1] == 1
    *others, last = recorded("swing", steps=90)
    for episode in others:
        assert len(episode.actions) == 40 and episode.truncations[-1], "the time limit"


def test_a_fall_at_the_last_step_is_a_termination_and_not_a_truncation(recorded):
    first = recorded("hopper", steps=100)[0]
    (only,) = recorded("hopper", steps=len(first.actions))
    assert only.terminations[-1] and not only.truncations[-1]


@pytest.mark.parametrize("name", ["swing", "pointmaze", "maze2d", "hopper"])
def test_a_script_loads_the_recorded_transitions(name, recorded):
    dataset = recorded(name, steps=90)
    data, metadata, make_env = td3_bc_n.load_data(dataset.id)
    assert metadata["transitions"] == 90 and np.abs(data.actions).max() <= 1
    assert metadata["episodes"] == len(dataset)
    rewards = np.concatenate([episode.rewards for episode in dataset])
    np.testing.assert_allclose(data.rewards, rewards, rtol=1e-6)
    if name != "pointmaze":  # its observations are a dict
        next_obs = np.concatenate([episode.observations[1:] for episode in dataset])
        np.testing.assert_allclose(data.next_obs, next_obs, rtol=1e-6)
    assert data.obs.shape[1:] == make_env().observation_space.shape


@pytest.mark.parametrize(
    ("environment", "references", "expected"),
    [
        ("Hopper-v5", (0.0, 100.0), (-20.272305, 3234.3)),
        ("HalfCheetah-v4", (0.0, 100.0), (-280.178953, 12135.0)),
        ("walker2d-medium-v2", (1.629008, 4592.3), (1.629008, 4592.3)),
        ("HopperBulletEnv-v0", (0.0, 100.0), None),
        ("Pendulum-v1", (-400.0, 0.0), (-400.0, 0.0)),
        ("Pendulum-v1", (0.0, 100.0), None),
    ],
)
def test_score_references_are_those_of_d4rl_or_of_the_run(environment, references, expected):
    metadata = {"environment": environment}
    metadata["ref_min_score"], metadata["ref_max_score"] = references
    found = record.score_references(metadata)
    assert (tuple(found.values()) or None) == expected


@pytest.mark.parametrize("names", [("swing", "scratch"), ("scratch", "swing")])
def test_score_references_do_not_depend_on_the_order_of_the_runs(names, recorded, monkeypatch):
    """From scratch, a run has no references."""
    load_run = record.load_run

    def load(path):
        *loaded, metadata, make_env = load_run(path.replace("scratch", "swing"))
        references = {"ref_min_score": 0.0, "ref_max_score": 100.0} if "scratch" in path else {}
        return *loaded, metadata | references, make_env

    monkeypatch.setattr(record, "load_run", load)
    stored = recorded(*names, steps=10).storage.metadata
    assert (stored["ref_min_score"], stored["ref_max_score"]) == (-400.0, 0.0)


def test_one_environment_under_two_names_is_the_same_and_other_settings_are_another():
    def make(env_id, **kwargs):
        return td3_bc_n.wrap_env(gym.make(gym.spec(env_id), **kwargs))

    hopper = make("hopper-medium-v2")
    assert record.same_environment(hopper, make("hopper-expert-v2"))
    assert not record.same_environment(hopper, make("walker2d-expert-v2"))
    assert not record.same_environment(hopper, make("hopper-expert-v2", max_episode_steps=7))


@pytest.mark.parametrize(
    ("names", "changes", "message"),
    [
        (["swing"], {"dataset_id": "swing-v0"}, "not a dataset id of the form namespace/name-v0"),
        (["swing"], {"dataset_id": "my/swing"}, "not a dataset id of the form namespace/name-v0"),
        (["swing"], {"dataset_id": "a/swing-v0"}, "not a dataset id of the form namespace/name"),
        (["swing"], {"dataset_id": "tests/swing-v0"}, "this Minari dataset exists"),
        (["swing"], {"steps": 0}, "--steps must be at least 1"),
        (["nowhere"], {}, "nowhere/checkpoint.pt: not a checkpoint|nowhere: not a checkpoint"),
        (["swing", "hopper"], {}, "hopper: not the same environment as .*swing"),
        ([], {}, "expected at least one run"),
    ],
)
def test_mistakes_are_one_line_before_the_work_starts(
    names, changes, message, trained, monkeypatch, datasets
):
    monkeypatch.setattr(record, "record_episode", None)  # it must not be called
    paths = tuple(str(trained / name) for name in names)
    with pytest.raises(SystemExit, match=message) as error:
        record.main(record.Args(paths, **{"dataset_id": "my/new-v0", **changes}))
    assert "\n" not in error.value.code
    assert not (datasets / "my").exists(), "nothing is written"
