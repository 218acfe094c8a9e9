"""Evaluation: exact, seeded, and with no effect on training."""

import numpy as np
import pytest
import torch

import sac_bc_n
import td3_bc_n

SCRIPTS = [td3_bc_n, sac_bc_n]


def hopper(script, seed=0):
    data, facts, make_env = script.load_data("tests/hopper/random-v0")
    torch.manual_seed(seed)
    agent = script.Agent(11, 3, script.Args())
    agent.fit_statistics(data[0], data[2], script.Args())
    return agent, facts, make_env


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize(("num_envs", "num_episodes"), [(3, 7), (10, 4), (1, 2)])
def test_episodes_in_parallel_are_the_episodes_one_by_one(script, num_envs, num_episodes):
    agent, facts, make_env = hopper(script)
    envs = [make_env() for _ in range(num_envs)]
    _, returns, lengths = script.evaluate(agent, envs, num_episodes, [1, 2], facts)
    seeds = np.random.SeedSequence([1, 2]).generate_state(num_episodes).tolist()
    env, expected_returns, expected_lengths = make_env(), [], []
    for seed in seeds:
        observation, done, rewards = env.reset(seed=seed)[0], False, []
        while not done:
            observation, reward, terminated, truncated, _ = env.step(
                agent.act(observation[None])[0]
            )
            rewards.append(reward)
            done = terminated or truncated
        expected_returns.append(sum(rewards))
        expected_lengths.append(len(rewards))
    np.testing.assert_allclose(returns, expected_returns, rtol=1e-4)
    assert lengths == expected_lengths


def test_scores_are_normalised_by_d4rls_references_and_the_worst_is_the_worst():
    agent, facts, make_env = hopper(td3_bc_n)
    figures, returns, _ = td3_bc_n.evaluate(agent, [make_env()], 5, [0], facts)
    scores = [100 * (r + 20.272305) / (3234.3 + 20.272305) for r in returns]
    assert figures["score"] == pytest.approx(np.mean(scores))
    assert figures["score_worst"] == pytest.approx(min(scores))
    assert figures["score_stderr"] == pytest.approx(np.std(scores, ddof=1) / np.sqrt(5))
    assert figures["return"] == pytest.approx(np.mean(returns))
    assert figures["return_worst"] == min(returns)
    assert "success_rate" not in figures, "a hopper has no goal"


def test_same_seed_same_episodes_other_seed_other_episodes():
    agent, facts, make_env = hopper(td3_bc_n)
    envs = [make_env() for _ in range(2)]
    first, again, other = (td3_bc_n.evaluate(agent, envs, 3, s, facts)[1] for s in ([1], [1], [2]))
    assert first == again
    assert not set(first) & set(other)


def test_success_rate_counts_episodes_that_reached_the_goal_once(monkeypatch):
    data, facts, make_env = td3_bc_n.load_data("tests/pointmaze/umaze-v0")
    torch.manual_seed(0)
    agent = td3_bc_n.Agent(data[0].shape[1], 2, td3_bc_n.Args())
    env = make_env()
    goals = iter([True, False, True, False])
    reset = env.unwrapped.reset

    def reset_on_or_far_from_the_goal(**kwargs):
        observation, info = reset(**kwargs)
        offset = 0.0 if next(goals) else 100.0
        env.unwrapped.goal = env.unwrapped.point_env.data.qpos[:2] + offset
        return observation, info

    monkeypatch.setattr(env.unwrapped, "reset", reset_on_or_far_from_the_goal)
    figures, returns, _ = td3_bc_n.evaluate(agent, [env], 4, [0], facts)
    assert figures["success_rate"] == 0.5
    assert [r > 0 for r in returns] == [True, False, True, False]


@pytest.mark.parametrize("script", SCRIPTS)
def test_evaluation_and_uncertainty_take_nothing_from_the_training_stream(script):
    agent, facts, make_env = hopper(script)
    obs, actions = torch.randn(50, 11), torch.rand(50, 3) * 2 - 1
    np.random.seed(0)
    torch_state, numpy_state = torch.get_rng_state(), np.random.get_state()[1].copy()
    script.evaluate(agent, [make_env()], 2, [0], facts)
    script.uncertainty(agent, obs, actions, seed=1)
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert (np.random.get_state()[1] == numpy_state).all()


@pytest.mark.parametrize("script", SCRIPTS)
def test_uncertainty_is_deviation_clip_penalty_and_minimum_of_raw_values(script):
    agent, _, _ = hopper(script)
    obs, actions = torch.randn(1, 11), torch.rand(1, 3) * 2 - 1  # one state, so no sampling of them
    figures = script.uncertainty(agent, obs, actions, seed=1)
    with torch.no_grad():
        for kind, kind_actions in (("data", actions), ("policy", agent.policy(obs))):
            q = agent.critics(obs, kind_actions)[:, 0]
            assert figures[f"{kind}_std"].item() == pytest.approx(q.std().item(), rel=1e-4)
            assert q.std() > 0
            penalty = q.mean() - q.min()
            assert figures[f"{kind}_clip_penalty"].item() == pytest.approx(penalty.item(), rel=1e-4)
            assert figures[f"{kind}_min"].item() == pytest.approx(q.min().item(), rel=1e-4)
    assert set(figures) == {
        f"{kind}_{figure}"
        for kind in ("data", "policy", "random")
        for figure in ("std", "clip_penalty", "min")
    }
