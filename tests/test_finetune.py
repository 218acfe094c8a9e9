"""Online fine-tuning: beta's decay, the buffer, what is restored, and whole runs."""

import json
import math
import types

import gymnasium as gym
import minari
import numpy as np
import pytest
import torch
from conftest import write_d4rl_file
from test_runs import scalars

import finetune_sac_bc_n
import finetune_td3_bc_n
import td3_bc_n
from finetune_td3_bc_n import ReplayBuffer, beta_at, stability

SCRIPTS = [finetune_td3_bc_n, finetune_sac_bc_n]
OFFLINE = ["--gradient-steps", 4, "--num-critics", 3, "--eval-episodes", 1]
OFFLINE += ["--final-eval-episodes", 1]
SHORT = ["--env-steps", 6, "--learning-starts", 5, "--offline-transitions", 7]
SHORT += ["--eval-frequency", 3, "--log-frequency", 1, "--eval-episodes", 2]
SHORT += ["--final-eval-episodes", 3]

#              task: TD3 beta_start, beta_end; SAC beta_start, beta_end
BETAS = {
    "halfcheetah-medium-v2": (0.04, 1e-12, 0.0, 0.0),
    "hopper-medium-v2": (0.03, 0.02, 0.0025, 0.001),
    "walker2d-medium-v2": (0.03, 1e-10, 0.0025, 1e-10),
    "maze2d-umaze-v1": (0.2, 0.02, 0.2, 0.02),
    "maze2d-medium-v1": (0.2, 0.02, 0.05, 0.01),
    "maze2d-large-v1": (0.2, 0.02, 0.05, 0.01),
    "antmaze-umaze-diverse-v0": (0.1, 0.1, 0.1, 0.05),
    "antmaze-medium-play-v0": (0.02, 0.01, 0.02, 0.02),
    "antmaze-large-play-v0": (0.02, 0.005, 0.01, 0.005),
    "pen-human-v1": (10, 2, 10, 2),
    "hammer-human-v1": (10, 2, 10, 2),
    "door-cloned-v1": (10, 2, 10, 2),
    "relocate-expert-v1": (10, 2, 10, 2),
}


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("env_id", BETAS)
def test_beta_start_and_end_are_the_papers(script, env_id, monkeypatch):
    start, end = BETAS[env_id][:2] if script is finetune_td3_bc_n else BETAS[env_id][2:]
    monkeypatch.setattr("sys.argv", ["finetune.py", "--from-scratch", "--env-id", env_id])
    args, *_ = script.parse_args()
    assert (args.beta_start, args.beta_end) == (start, end)
    assert (args.env_steps, args.learning_starts) == (250_000, 2_500)
    assert (args.offline_transitions, args.beta_decay_steps) == (2_500, 50_000)
    assert args.eval_frequency == 5_000


def schedule(start, end, steps, decay_steps):
    args = types.SimpleNamespace(beta_start=start, beta_end=end, beta_decay_steps=decay_steps)
    return [beta_at(step, args) for step in range(1, steps + 1)]


@pytest.mark.parametrize(("start", "end"), [(0.03, 0.02), (0.04, 1e-12), (10.0, 2.0), (0.1, 0.1)])
def test_beta_decays_exponentially_to_its_floor(start, end):
    betas = schedule(start, end, 150, decay_steps=100)
    kappa, beta = math.exp(math.log(end / start) / 100), start
    for value in betas:  # the paper's rule, update by update
        assert value == pytest.approx(beta, rel=1e-9)
        beta = max(end, kappa * beta)
    assert betas[0] == start
    assert betas[100] == pytest.approx(end, abs=1e-6)
    assert betas[-1] == end
    assert all(value >= end for value in betas)


def test_beta_never_grows():
    assert schedule(0.01, 0.02, 300_000, 50_000)[::50_000] == [0.01] * 6


def test_beta_of_zero_stays_zero():
    assert schedule(0.0, 0.0, 5, 100) == [0.0] * 5


def test_beta_dropped_at_once():
    assert schedule(0.03, 0.02, 4, 1) == [0.03, 0.02, 0.02, 0.02]


def rows(*values):
    """Transitions whose every number is the same, one per value."""
    column = torch.tensor(values, dtype=torch.float32)
    wide = column[:, None].expand(-1, 2)
    return wide, wide[:, :1], column, wide, column


def test_the_buffer_is_a_ring():
    buffer = ReplayBuffer(5, 2, 1, torch.device("cpu"))
    addresses = [column.data_ptr() for column in buffer.columns]
    buffer.add(*rows(1, 2, 3))
    assert len(buffer) == 3
    assert buffer.columns[2][:3].tolist() == [1, 2, 3]
    for value in (4, 5, 6, 7):
        buffer.add(*rows(value))
    assert len(buffer) == 5
    for column in buffer.columns:  # 1 and 2 are overwritten, in their places
        assert column.reshape(5, -1)[:, 0].tolist() == [6, 7, 3, 4, 5]
    buffer.add(*rows(8, 9, 10, 11))
    assert buffer.columns[2].tolist() == [11, 7, 8, 9, 10]
    assert [column.data_ptr() for column in buffer.columns] == addresses, "never allocated anew"


def test_samples_are_whole_transitions_of_what_was_added():
    buffer = ReplayBuffer(100, 2, 1, torch.device("cpu"))
    buffer.add(*rows(3, 4, 5))
    torch.manual_seed(0)
    obs, actions, rewards, next_obs, terminals = buffer.sample(500)
    assert set(rewards.tolist()) == {3, 4, 5}, "nothing of the empty part"
    for column in (obs[:, 0], obs[:, 1], actions[:, 0], next_obs[:, 1], terminals):
        assert torch.equal(column, rewards)


def history(*scores):
    return [{"step": 10 * i, "score": score} for i, score in enumerate(scores)]


def test_stability_figures():
    figures = stability(history(50.0, 40.0, 20.0, 49.0, 55.0, 30.0))
    assert figures["score_before"] == 50 and figures["largest_drop"] == 30
    assert figures["recovery_step"] == 40
    assert figures["last_10_mean"] == pytest.approx(194 / 5), "without the score before"
    assert stability(history(50.0, 40.0))["recovery_step"] is None
    assert stability(history(50.0, 60.0)) | {} == {
        "score_before": 50.0,
        "largest_drop": 0.0,
        "recovery_step": 0,
        "last_10_mean": 60.0,
    }
    assert stability(history(*range(20)))["last_10_mean"] == 14.5


def test_td3_explores_with_clipped_noise_and_sac_samples():
    td3 = td3_bc_n.Agent(4, 2, td3_bc_n.Args())
    observation = np.ones(4)
    args = finetune_td3_bc_n.Args(exploration_noise=0.1)
    mode = td3.act(observation)
    torch.manual_seed(0)
    actions = np.stack([finetune_td3_bc_n.explore(td3, observation, args) for _ in range(3000)])
    np.testing.assert_allclose(actions.mean(0), mode, atol=0.01)
    np.testing.assert_allclose(actions.std(0), 0.1, atol=0.01)
    wild = finetune_td3_bc_n.Args(exploration_noise=10.0)
    assert np.abs(finetune_td3_bc_n.explore(td3, observation, wild)).max() <= 1
    sac = finetune_sac_bc_n.Agent(4, 2, finetune_sac_bc_n.Args())
    args = finetune_sac_bc_n.Args()
    torch.manual_seed(0)
    actions = np.stack([finetune_sac_bc_n.explore(sac, observation, args) for _ in range(3000)])
    mean, log_std = sac.policy.gaussian(sac.normalize(observation))
    u = np.arctanh(actions.clip(-1 + 1e-6, 1 - 1e-6))
    np.testing.assert_allclose(u.mean(0), mean.detach(), atol=0.07)
    np.testing.assert_allclose(u.std(0), log_std.exp().detach(), atol=0.07)


# --- Whole runs ---


def agent_of(run_dir):
    return torch.load(run_dir / "checkpoint.pt", weights_only=True)["agent"]


@pytest.mark.parametrize("algorithm", ["td3_bc_n", "sac_bc_n"])
@pytest.mark.parametrize("env_id", ["tests/hopper/random-v0", "tests/pointmaze/umaze-v0"])
def test_offline_then_online_then_online_again(algorithm, env_id, run):
    offline = run(algorithm, "--env-id", env_id, *OFFLINE, "--beta", 0.5)[1]
    process, online = run(f"finetune_{algorithm}", "--checkpoint", offline, *SHORT)
    assert process.stdout.count("\nstep ") == 3, "before the first step, and every 3"
    # Offline 4 steps of 50000 were made, all inflated.
    assert "beta was 5 offline to the end, inflated: it now falls" in process.stdout
    command = ["--checkpoint", offline, *SHORT, "--env-steps", 0, "--beta-start", 5]
    assert "inflated" not in run(f"finetune_{algorithm}", *command)[0].stdout
    result = json.loads((online / "result.json").read_text())
    assert [entry["step"] for entry in result["history"]] == [0, 3, 6]
    assert result["stability"]["score_before"] == result["history"][0]["score"]
    args = result["args"]
    assert (args["env_id"], args["num_critics"], args["beta_start"]) == (
        env_id,
        3,
        0.2 if "maze" in env_id else 0.5,
    )
    values, _ = scalars(online)
    assert [step for step, _ in values["losses/critic"]] == [1, 2, 3, 4, 5, 6]
    before = result["history"][0]["score"]
    assert [value for _, value in values["charts/score_before"]] == pytest.approx([before] * 3)
    # The statistics of the offline data serve online too, unchanged.
    for name in ("obs_mean", "obs_std", "reward_shift", "reward_scale"):
        assert torch.equal(agent_of(offline)[name], agent_of(online)[name])
    # A fine-tuned agent can be fine-tuned again, from the beta where it stopped.
    again = run(f"finetune_{algorithm}", "--checkpoint", online / "checkpoint.pt", *SHORT)[1]
    final_beta = torch.load(online / "checkpoint.pt", weights_only=True)["beta"]
    assert json.loads((again / "result.json").read_text())["args"]["beta_start"] == final_beta


@pytest.mark.parametrize("algorithm", ["td3_bc_n", "sac_bc_n"])
def test_the_agent_is_restored_whole_and_not_updated_before_its_first_step(algorithm, run):
    """With no step to make, what is saved is what was loaded: targets and alpha are not rebuilt."""
    offline = run(algorithm, "--env-id", "tests/hopper/random-v0", *OFFLINE)[1]
    arguments = [*SHORT, "--env-steps", 0, "--learning-starts", 40]
    online = run(f"finetune_{algorithm}", "--checkpoint", offline, *arguments)[1]
    before, after = agent_of(offline), agent_of(online)
    assert before.keys() == after.keys()
    for name, value in before.items():
        assert torch.equal(value, after[name]), name
    assert not torch.equal(before["critics_target.weights.0"], before["critics.weights.0"])
    if algorithm == "sac_bc_n":
        assert before["log_alpha"] != 0
    first = json.loads((online / "result.json").read_text())["history"][0]
    assert first["step"] == 0


@pytest.mark.parametrize("algorithm", ["td3_bc_n", "sac_bc_n"])
def test_from_scratch_makes_data_that_the_offline_script_reads(algorithm, run):
    dataset_id = f"tests/made-by-{algorithm.replace('_', '-')}/hopper-v0"
    arguments = ["--from-scratch", "--env-id", "Hopper-v5", "--num-critics", 2, "--beta-start", 0]
    arguments += [*SHORT, "--env-steps", 30, "--eval-frequency", 30, "--learning-starts", 60]
    run(f"finetune_{algorithm}", *arguments, "--save-dataset", dataset_id)
    dataset = minari.load_dataset(dataset_id)
    assert dataset.total_steps == 90 and dataset.env_spec.id == "Hopper-v5"
    metadata = dataset.storage.metadata
    assert (metadata["ref_min_score"], metadata["ref_max_score"]) == (-20.272305, 3234.3)
    data, facts, _ = td3_bc_n.load_data(dataset_id)
    assert facts["transitions"] == 90
    env = gym.make("Hopper-v5")
    first = env.reset(seed=1)[0]
    np.testing.assert_allclose(data[0][0], first, rtol=1e-5)
    _, reward, terminated, *_ = env.step(data[1][0])
    assert data[2][0] == pytest.approx(reward, rel=1e-4) and data[4][0] == terminated
    assert data[4].sum() >= 1, "an untrained hopper falls"
    run(algorithm, "--env-id", dataset_id, *OFFLINE)
    process, _ = run(f"finetune_{algorithm}", *arguments, "--save-dataset", dataset_id, check=False)
    assert process.returncode == 1 and "there is a data set" in process.stderr


def test_from_scratch_saves_dictionaries_of_a_maze(run):
    name = "gymnasium_robotics:PointMaze_UMaze-v3"
    arguments = ["--from-scratch", "--env-id", name, "--num-critics", 2, *SHORT]
    run("finetune_td3_bc_n", *arguments, "--save-dataset", "tests/made/pointmaze/umaze-v0")
    data, _, _ = td3_bc_n.load_data("tests/made/pointmaze/umaze-v0")
    assert data[0].shape == (11, 8)


@pytest.mark.parametrize("script", ["finetune_td3_bc_n", "finetune_sac_bc_n"])
def test_betas_between_whole_numbers_stay_so(script, run):
    """The hand's beta goes from 10 to 2, which Python takes for whole numbers."""
    arguments = ["--from-scratch", "--env-id", "pen-human-v1", *SHORT, "--beta-decay-steps", 4]
    run_dir = run(script, *arguments)[1]
    betas = [value for _, value in scalars(run_dir)[0]["charts/beta"]]
    assert betas == pytest.approx([10 * 0.2 ** (i / 4) for i in (0, 1, 2, 3, 4, 4)], rel=1e-6)


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_fall_is_terminal_in_the_buffer_and_a_time_limit_is_not(script):
    data = script.load_data("tests/hopper/random-v0")[0]
    agent = script.Agent(11, 3, script.Args())
    agent.fit_statistics(data[0], data[2], script.Args(reward_transform="antmaze"))
    buffer = script.ReplayBuffer(400, 11, 3, torch.device("cpu"))
    env = script.wrap(gym.make("Hopper-v5", max_episode_steps=18))
    env.action_space.seed(0)
    seen, step = [], env.step
    env.step = lambda action: seen.append(step(action)) or seen[-1]
    observation, observations = env.reset(seed=0)[0], []
    for _ in range(400):
        observations.append(observation)
        action = env.action_space.sample()
        observation = script.collect(agent, env, observation, action, buffer, {})
    obs, actions, rewards, next_obs, terminals = buffer.columns
    assert terminals.tolist() == [float(terminated) for _, _, terminated, _, _ in seen]
    cut_off = [truncated and not terminated for _, _, terminated, truncated, _ in seen]
    assert terminals.sum() > 5 and sum(cut_off) > 5
    # States and rewards go in as the data's did; the successor of a last step is not the reset's.
    np.testing.assert_allclose(obs, agent.normalize(np.stack(observations)), atol=1e-5)
    successors = np.stack([successor for successor, *_ in seen])
    np.testing.assert_allclose(next_obs, agent.normalize(successors), atol=1e-5)
    raw = np.array([reward for _, reward, *_ in seen])
    np.testing.assert_allclose(rewards, 4 * (raw - 0.5), atol=1e-4)
    np.testing.assert_allclose(actions[-1], action)
    for i in np.flatnonzero(cut_off)[:-1]:
        assert np.abs(observations[i + 1] - successors[i]).max() > 1e-3, "a new episode began"


def test_a_point_at_its_goal_is_terminal_in_the_buffer_as_in_minaris_data():
    _, facts, make_env = td3_bc_n.load_data("tests/pointmaze/umaze-v0")
    agent = finetune_td3_bc_n.Agent(8, 2, finetune_td3_bc_n.Args())
    buffer, env = ReplayBuffer(2, 8, 2, torch.device("cpu")), make_env()
    observation = env.reset(seed=0)[0]
    action = np.zeros(2, dtype=np.float32)
    env.unwrapped.goal = env.unwrapped.point_env.data.qpos[:2].copy()
    observation = finetune_td3_bc_n.collect(agent, env, observation, action, buffer, facts)
    env.unwrapped.goal = env.unwrapped.goal + 100
    finetune_td3_bc_n.collect(agent, env, observation, action, buffer, facts)
    assert buffer.columns[4].tolist() == [1, 0]


def test_a_checkpoint_on_d4rls_data_brings_its_file_along(run, tmp_path):
    write_d4rl_file(tmp_path / "hopper.hdf5", 40)
    arguments = ["--env-id", "hopper-medium-v2", "--dataset-path", tmp_path / "hopper.hdf5"]
    offline = run("td3_bc_n", *arguments, *OFFLINE)[1]
    process, _ = run("finetune_td3_bc_n", "--checkpoint", offline, *SHORT)
    assert f"source: {tmp_path / 'hopper.hdf5'}" in process.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--checkpoint FILE"),
        (["--from-scratch", "--checkpoint", "OFFLINE"], "--checkpoint FILE"),
        (["--checkpoint", "nowhere.pt"], "nowhere.pt: not a checkpoint"),
        (["--checkpoint", "TEXT"], "text.pt: not a checkpoint"),
        (["--checkpoint", "OFFLINE", "--num-critics", "7"], "another algorithm, task or size"),
        (["--checkpoint", "ELSEWHERE"], "learned in Hopper-v4, 1000 steps, but here is Hopper-v5"),
        (["--checkpoint", "OTHER"], "another algorithm, task or size"),
        (["--from-scratch", "--env-id", "Hoper-v5"], "Gymnasium cannot make this environment"),
        (["--from-scratch", "--env-id", "Hopper-v5", "--save-dataset", "a b"], "not of the form"),
    ],
)
def test_mistakes_are_one_clear_line(arguments, message, offline_runs, run):
    arguments = [offline_runs.get(argument, argument) for argument in arguments]
    process, run_dir = run("finetune_td3_bc_n", *arguments, *SHORT, check=False)
    assert process.returncode == 1 and run_dir is None
    assert message in process.stderr and "Traceback" not in process.stderr


@pytest.fixture(scope="module")
def offline_runs(tmp_path_factory):
    """Checkpoints as the offline scripts write them, and a text file named like one."""
    import sac_bc_n

    root, found = tmp_path_factory.mktemp("runs"), {}
    for key, script in (("OFFLINE", td3_bc_n), ("OTHER", sac_bc_n)):
        args = script.Args(env_id="tests/hopper/random-v0", num_critics=3)
        agent = script.Agent(11, 3, args).state_dict()
        torch.save({"agent": agent, "args": vars(args)}, root / f"{key}.pt")
        found[key] = root / f"{key}.pt"
    there = torch.load(found["OFFLINE"], weights_only=True)
    there["facts"] = {"environment": "Hopper-v4, 1000 steps"}
    torch.save(there, root / "elsewhere.pt")
    found["ELSEWHERE"] = root / "elsewhere.pt"
    (root / "text.pt").write_text("not a checkpoint")
    return found | {"TEXT": root / "text.pt"}


def test_fewer_critics_are_the_first_of_the_checkpoint(offline_runs, run):
    arguments = ["--checkpoint", offline_runs["OFFLINE"], *SHORT, "--env-steps", 0]
    after = agent_of(run("finetune_td3_bc_n", *arguments, "--num-critics", 2)[1])
    before = torch.load(offline_runs["OFFLINE"], weights_only=True)["agent"]
    for name in ("critics.weights.0", "critics_target.biases.3"):
        assert torch.equal(after[name], before[name][:2])


def test_overriding_the_reward_transform_refits_it(offline_runs, run):
    arguments = ["--checkpoint", offline_runs["OFFLINE"], *SHORT]
    run_dir = run("finetune_td3_bc_n", *arguments, "--reward-transform", "antmaze")[1]
    assert (agent_of(run_dir)["reward_shift"], agent_of(run_dir)["reward_scale"]) == (0.5, 4.0)
