"""Online fine-tuning: beta schedule, replay buffer, restored agent, acting and whole runs."""

import json
import math
import time
import types

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import write_d4rl_file
from test_runs import scalars

import d4rl_tasks
import finetune_sac_bc_n
import finetune_td3_bc_n
import td3_bc_n
from finetune_td3_bc_n import ReplayBuffer, Transitions, beta_schedule

ALGORITHMS = ["td3_bc_n", "sac_bc_n"]
HOPPER = ["--env-id", "mujoco/hopper/medium-v0"]
OFFLINE = ["--gradient-steps", 4, "--num-critics", 3, "--eval-episodes", 1, "--batch-size", 16]
SHORT = ["--env-steps", 6, "--learning-starts", 5, "--offline-transitions", 7]
SHORT += ["--eval-frequency", 3, "--log-frequency", 1, "--eval-episodes", 2]


def load(run_dir):
    return torch.load(run_dir / "checkpoint.pt", weights_only=True)


def schedule(start, end, steps, decay_steps):
    args = types.SimpleNamespace(beta_start=start, beta_end=end, beta_decay_steps=decay_steps)
    return [beta_schedule(step, args) for step in range(1, steps + 1)]


@pytest.mark.parametrize(("start", "end"), [(0.03, 0.02), (0.04, 1e-12), (10.0, 2.0), (0.1, 0.1)])
def test_beta_decays_exponentially_to_its_end(start, end):
    betas = schedule(start, end, 150, decay_steps=100)
    kappa, beta = math.exp(math.log(end / start) / 100), start
    for value in betas:  # the rule of the paper, update by update
        assert value == pytest.approx(beta, rel=1e-9)
        beta = max(end, kappa * beta)
    assert betas[0] == start
    assert betas[100] == pytest.approx(end, abs=1e-6)
    assert betas[-1] == end


def test_beta_never_increases_stays_zero_and_can_drop_at_once():
    assert schedule(0.01, 0.02, 300_000, 50_000)[::50_000] == [0.01] * 6
    assert schedule(0.0, 0.0, 5, 100) == [0.0] * 5
    assert schedule(0.03, 0.02, 4, 1) == [0.03, 0.02, 0.02, 0.02]
    assert schedule(0.03, 0.0, 3, 100) == [0.03, 0.0, 0.0]


def rows(*values):
    """Transitions in which all numbers are equal, one per value."""
    column = torch.tensor(values, dtype=torch.float32)
    wide = column[:, None].expand(-1, 2)
    return Transitions(wide, wide[:, :1], column, wide, column)


def test_the_replay_buffer_grows_in_place():
    buffer = ReplayBuffer(5, rows(0), torch.device("cpu"))
    addresses = [column.data_ptr() for column in buffer.data]
    buffer.add(rows(1, 2, 3))
    assert buffer.size == 3
    buffer.add(rows(4))
    assert buffer.size == 4
    for column in buffer.contents():
        assert column.reshape(4, -1)[:, 0].tolist() == [1, 2, 3, 4]
    assert [column.data_ptr() for column in buffer.data] == addresses, "the tensors never move"


def test_batches_are_whole_transitions_from_the_filled_part_of_the_buffer():
    buffer = ReplayBuffer(100, rows(0), torch.device("cpu"))
    buffer.add(rows(3, 4, 5))
    torch.manual_seed(0)
    batch = buffer.sample(500)
    assert set(batch.rewards.tolist()) == {3, 4, 5}
    for column in (batch.obs[:, 0], batch.obs[:, 1], batch.actions[:, 0], batch.dones):
        assert torch.equal(column, batch.rewards)
    assert torch.equal(batch.next_obs[:, 1], batch.rewards)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("env_id", ["mujoco/hopper/medium-v0", "D4RL/pointmaze/umaze-v2"])
def test_offline_training_then_fine_tuning(algorithm, env_id, run):
    offline = run(algorithm, "--env-id", env_id, *OFFLINE, "--beta", 0.5)[1]
    process, online = run(f"finetune_{algorithm}", "--checkpoint", offline, *SHORT)
    assert process.stdout.count("\nstep ") == 3, "before the first update, and every 3 steps"
    result = json.loads((online / "result.json").read_text())
    assert [entry["step"] for entry in result["history"]] == [0, 3, 6]
    args = result["args"]
    beta = 0.2 if "maze" in env_id else 0.5
    assert (args["env_id"], args["num_critics"], args["beta_start"]) == (env_id, 3, beta)
    values, _ = scalars(online)
    assert [step for step, _ in values["losses/critic_loss"]] == [1, 2, 3, 4, 5, 6]
    assert values["charts/beta"][0] == (0, pytest.approx(beta)), "that of the first update"
    assert values["charts/SPS"][0][1] == 0, "there is no update up to step 0"
    assert [step for step, _ in values["uncertainty/policy_std"]] == [0, 3, 6]
    # The normalization statistics are those of the offline run.
    for name in ("obs_mean", "obs_std", "reward_shift", "reward_scale"):
        assert torch.equal(load(offline)["agent"][name], load(online)["agent"][name])


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_first_update_starts_from_the_offline_agent_with_new_optimizers(algorithm, run):
    """With a learning rate and tau of almost 0, the saved agent is the loaded one."""
    offline = run(algorithm, *HOPPER, *OFFLINE)[1]
    still = [*SHORT, "--env-steps", 1, "--learning-rate", 1e-30, "--tau", 1e-30]
    online = run(f"finetune_{algorithm}", "--checkpoint", offline, *still)[1]
    before, after = load(offline)["agent"], load(online)["agent"]
    assert before.keys() == after.keys()
    for name, value in before.items():
        assert torch.equal(value, after[name]), name
    assert not torch.equal(before["critics_target.weights.0"], before["critics.weights.0"])
    if algorithm == "sac_bc_n":
        assert before["log_alpha"] != 0
    steps = {state["step"].item() for state in load(online)["optimizers"]["critics"].values()}
    assert steps == {1}, "offline there were four"


def test_the_buffer_starts_with_the_last_transitions_of_the_dataset(run):
    offline = run("td3_bc_n", *HOPPER, *OFFLINE)[1]
    online = run("finetune_td3_bc_n", "--checkpoint", offline, *SHORT)[1]
    agent = td3_bc_n.Agent(11, 3, td3_bc_n.Args(num_critics=3))
    agent.load_state_dict(load(offline)["agent"])
    dataset = td3_bc_n.load_data("mujoco/hopper/medium-v0")[0]
    last = agent.preprocess(td3_bc_n.Transitions(*(column[-7:] for column in dataset)))
    for column, expected in zip(load(online)["buffer"], last, strict=True):
        assert torch.equal(column[:7], expected)
        assert len(column) == 7 + 5 + 6


def replay(run_dir, make_env):
    """The episodes in a saved buffer, played again in a new environment."""
    checkpoint, args = load(run_dir), load(run_dir)["args"]
    data = td3_bc_n.Transitions(*checkpoint["buffer"])
    agent, env = checkpoint["agent"], make_env()
    seed, step = 10_000_000 * args["seed"] + args["learning_starts"], -args["learning_starts"]
    env.reset(seed=args["seed"])
    obs, ends = env.reset(seed=seed + step)[0], []
    for i in range(args.get("skip", 0), len(data.obs)):
        step += 1
        expected = (torch.as_tensor(obs) - agent["obs_mean"]) / agent["obs_std"]
        torch.testing.assert_close(data.obs[i].double(), expected.double(), atol=1e-4, rtol=1e-4)
        next_obs, reward, terminated, truncated, _ = env.step(data.actions[i].numpy())
        expected = (torch.as_tensor(next_obs) - agent["obs_mean"]) / agent["obs_std"]
        torch.testing.assert_close(
            data.next_obs[i].double(), expected.double(), atol=1e-4, rtol=1e-4
        )
        reward = (reward - agent["reward_shift"].item()) * agent["reward_scale"].item()
        assert data.rewards[i].item() == pytest.approx(reward, abs=1e-4)
        assert data.dones[i].item() == float(terminated)
        ends += ["terminated"] * terminated + ["truncated"] * truncated
        obs = env.reset(seed=seed + step)[0] if terminated or truncated else next_obs
    return ends


@pytest.mark.parametrize("script", [finetune_td3_bc_n, finetune_sac_bc_n])
def test_the_buffer_holds_what_the_environment_returned(script, run):
    """A termination is a done, a time limit is not; next_obs is never that of a reset."""
    gym.register(
        "ShortHopper-v0", "gymnasium.envs.mujoco.hopper_v5:HopperEnv", max_episode_steps=18
    )
    steps = ["--learning-starts", 300, "--env-steps", 20, "--eval-frequency", 100]
    arguments = ["--env-id", "ShortHopper-v0", "--num-critics", 2, "--batch-size", 16, *steps]
    run_dir = run(script.__name__, *arguments, "--eval-episodes", 1)[1]
    ends = replay(run_dir, lambda: script.wrap_env(gym.make("ShortHopper-v0")))
    assert ends.count("terminated") > 3 and ends.count("truncated") > 3


def test_a_point_at_its_goal_is_done_in_the_buffer_as_in_the_data(run, monkeypatch):
    from gymnasium_robotics.envs.maze.point_maze import PointMazeEnv

    monkeypatch.setattr(PointMazeEnv, "compute_reward", lambda *_: 1.0)
    offline = run("td3_bc_n", "--env-id", "D4RL/pointmaze/umaze-v2", *OFFLINE)[1]
    online = run("finetune_td3_bc_n", "--checkpoint", offline, *SHORT)[1]
    assert (load(online)["buffer"][4][7:] == 1).all()


def test_td3_explores_with_gaussian_noise_and_sac_samples(run):
    """Actions of many steps in almost the same state, by an actor that is hardly updated."""
    still = ["--learning-starts", 1, "--env-steps", 400, "--learning-rate", 1e-30, "--tau", 1e-30]
    still += ["--eval-frequency", 1000, "--eval-episodes", 1, "--batch-size", 2, "--num-critics", 2]
    for script in (finetune_td3_bc_n, finetune_sac_bc_n):
        run_dir = run(script.__name__, "--env-id", "Pendulum-v1", *still)[1]
        args = script.Args(**load(run_dir)["args"])
        agent = script.Agent(3, 1, args)
        agent.load_state_dict(load(run_dir)["agent"])
        obs, actions = (column[1:] for column in load(run_dir)["buffer"][:2])
        with torch.no_grad():
            if script is finetune_td3_bc_n:
                noise = actions - agent.actor(obs)
                inside = actions.abs() < 1
                assert noise[inside].std().item() == pytest.approx(0.1, rel=0.15)
            else:
                mean, log_std = agent.actor.gaussian(obs)
                noise = (torch.atanh(actions.clamp(-0.99999, 0.99999)) - mean) / log_std.exp()
                assert noise.std().item() == pytest.approx(1.0, rel=0.15)
        assert abs(noise.mean().item()) < 0.1 and actions.abs().max() <= 1


def test_in_antmaze_training_keeps_one_goal_and_evaluation_draws_one_per_episode():
    def goals(**kwargs):
        env = gym.make(gym.spec("antmaze-umaze-v0"), **kwargs)
        found = []
        for seed in range(5):
            env.reset(seed=seed)
            found.append(tuple(env.unwrapped.goal))
        return found

    assert len(set(goals(fixed_goal=True))) == 1
    assert len(set(goals())) == 5
    assert goals(fixed_goal=True) == goals(fixed_goal=True)


def test_fine_tuning_in_antmaze_transforms_the_rewards_and_keeps_one_goal(
    run, tmp_path, monkeypatch
):
    made, init = [], d4rl_tasks.AntMazeEnv.__init__

    def spy(self, *args, fixed_goal=False, **kwargs):
        made.append(fixed_goal)
        init(self, *args, fixed_goal=fixed_goal, **kwargs)

    monkeypatch.setattr(d4rl_tasks.AntMazeEnv, "__init__", spy)
    monkeypatch.setenv("D4RL_DATASET_DIR", str(tmp_path))
    name = "Ant_maze_u-maze_noisy_multistart_False_multigoal_False_sparse.hdf5"
    observations = 0.01 * np.random.default_rng(0).normal(size=(40, 29))
    write_d4rl_file(tmp_path / name, 40, observations=observations, action_dim=8)
    offline = run("td3_bc_n", "--env-id", "antmaze-umaze-v0", *OFFLINE)[1]
    made.clear()
    online = run("finetune_td3_bc_n", "--checkpoint", offline, *SHORT)[1]
    assert (load(online)["buffer"][2][7:] == -2).all(), "4 (0 - 0.5), as offline"
    assert made.count(True) == 1 and made.count(False) >= 10
    made.clear()
    run("finetune_td3_bc_n", "--env-id", "antmaze-umaze-v0", "--num-critics", 2, *SHORT)
    assert made.count(True) == 1 and made.count(False) >= 10, "from scratch, too"


class NumpyBools(gym.Wrapper):
    """Gymnasium allows NumPy's bools; the expression obs[0] > 1 of an environment is one."""

    def step(self, action):
        obs, reward, _, _, info = self.env.step(action)
        return obs, reward, np.bool_(True), np.bool_(False), info


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_checkpoints_of_environments_with_numpy_bools_can_be_loaded(algorithm, run):
    gym.register("NumpyBools-v0", lambda: NumpyBools(gym.make("Pendulum-v1")), max_episode_steps=9)
    arguments = ["--env-id", "NumpyBools-v0", "--num-critics", 2, *SHORT]
    run_dir = run(f"finetune_{algorithm}", *arguments)[1]
    assert load(run_dir)["episode_ended"] is True  # weights_only: no NumPy scalars in the file


@pytest.mark.parametrize("script", ["finetune_td3_bc_n", "finetune_sac_bc_n"])
def test_the_beta_of_a_run_follows_its_schedule(script, run):
    arguments = ["--env-id", "Pendulum-v1", *SHORT, "--beta-start", 10, "--beta-end", 2]
    run_dir = run(script, *arguments, "--beta-decay-steps", 4, "--num-critics", 2)[1]
    values = [value for step, value in scalars(run_dir)[0]["charts/beta"] if step > 0]
    assert values == pytest.approx([10 * 0.2 ** (i / 4) for i in (0, 1, 2, 3, 4, 4)], rel=1e-6)


def test_from_scratch_an_environment_without_time_limit_gets_one():
    gym.register("EndlessPendulum-v0", "gymnasium.envs.classic_control.pendulum:PendulumEnv")
    _, metadata, make_env = finetune_td3_bc_n.load_env("EndlessPendulum-v0")
    assert make_env().spec.max_episode_steps == 1000
    assert (metadata["dataset"], metadata["transitions"]) == (None, 0)
    env = finetune_td3_bc_n.load_env("gymnasium_robotics:PointMaze_UMaze-v3")[2]()
    assert env.observation_space.shape == (8,), "flat"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--checkpoint", "nowhere.pt"], "nowhere.pt: not a checkpoint of td3_bc_n.py"),
        (["--checkpoint", "TEXT"], "text.pt: not a checkpoint of td3_bc_n.py"),
        (["--checkpoint", "SAC"], "written by sac_bc_n.py"),
        (["--checkpoint", "TD3", "--num-critics", "7"], "the checkpoint has 3 critics"),
        (["--checkpoint", "OTHER"], "environment is Hopper-v5, in the checkpoint Hopper-v4"),
        (["--env-id", "Hoper-v5"], "Hoper-v5: not an environment to train in"),
        (
            ["--env-id", "CartPole-v1"],
            "CartPole-v1: not an environment to train in (actions must be",
        ),
    ],
)
def test_mistakes_are_one_clear_line(arguments, message, run, tmp_path):
    word, paths = arguments[1], {"TEXT": tmp_path / "text.pt"}
    paths["TEXT"].write_text("not a checkpoint")
    if word in ("SAC", "TD3", "OTHER"):
        paths[word] = run("sac_bc_n" if word == "SAC" else "td3_bc_n", *HOPPER, *OFFLINE)[1]
    if word == "OTHER":
        checkpoint = load(paths[word])
        checkpoint["metadata"]["environment"] = "Hopper-v4"
        torch.save(checkpoint, paths[word] / "checkpoint.pt")
    arguments = [paths.get(argument, argument) for argument in arguments]
    process, run_dir = run("finetune_td3_bc_n", *arguments, *SHORT, check=False)
    assert process.returncode == 1 and run_dir is None
    assert message in process.stderr and "\n" not in process.stderr.strip()


@pytest.mark.parametrize("script", ["finetune_td3_bc_n", "finetune_sac_bc_n"])
def test_a_run_that_diverges_leaves_no_checkpoint_with_nan(script, run):
    """The checkpoint of step 0 is due at step 100, the end of its episode."""
    arguments = ["--env-id", "Pendulum-v1", "--num-critics", 2, "--batch-size", 16]
    arguments += ["--env-steps", 400, "--learning-starts", 100, "--log-frequency", 300]
    arguments += ["--eval-episodes", 1, "--learning-rate", 1e9]
    process, run_dir = run(script, *arguments, check=False)
    assert process.returncode == 3 and "not finite" in process.stderr
    assert not (run_dir / "checkpoint.pt").exists()


def test_returns_and_lengths_of_training_episodes_are_logged(run):
    arguments = ["--env-id", "Pendulum-v1", "--num-critics", 2, "--batch-size", 16]
    arguments += ["--learning-starts", 200, "--env-steps", 401, "--eval-episodes", 0]
    run_dir = run("finetune_sac_bc_n", *arguments, "--log-frequency", 1000)[1]
    values, _ = scalars(run_dir)
    assert values["charts/episodic_length"] == [(0, 200), (200, 200), (400, 200)]
    rewards = load(run_dir)["buffer"][2]
    expected = [rewards[first : first + 200].sum().item() for first in (0, 200, 400)]
    assert [value for _, value in values["charts/episodic_return"]] == pytest.approx(expected, 1e-3)


def test_steps_per_second_count_from_the_first_update(run, monkeypatch):
    """The 40 steps before it take a minute here, each update a second."""
    clock, step_env = [0.0], gym.wrappers.RescaleAction.step

    def slow(self, action):
        clock[0] += 1.0 if steps.pop(0) > 0 else 60.0
        return step_env(self, action)

    steps = list(range(-39, 5))
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(gym.wrappers.RescaleAction, "step", slow)
    arguments = ["--env-id", "Pendulum-v1", "--num-critics", 2, "--batch-size", 16]
    arguments += ["--learning-starts", 40, "--env-steps", 4, "--eval-episodes", 0]
    run_dir = run("finetune_td3_bc_n", *arguments)[1]
    result = json.loads((run_dir / "result.json").read_text())
    assert result["steps_per_second"] == pytest.approx(4 / 3), "from the end of its acting on"
