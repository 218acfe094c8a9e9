"""Evaluation: the number of episodes, their seeds, the scores; statistics of the ensemble."""

import numpy as np
import pytest
import torch

import td3_bc_n


def hopper():
    data, metadata, make_env = td3_bc_n.load_data("mujoco/hopper/medium-v0")
    torch.manual_seed(0)
    agent = td3_bc_n.Agent(11, 3, td3_bc_n.Args())
    td3_bc_n.set_statistics(agent, data, td3_bc_n.Args())
    return agent, metadata, make_env


@pytest.mark.parametrize(("num_envs", "num_episodes"), [(3, 7), (10, 4), (1, 2)])
def test_parallel_episodes_equal_episodes_one_by_one(num_envs, num_episodes):
    agent, metadata, make_env = hopper()
    envs = [make_env() for _ in range(num_envs)]
    metrics, returns = td3_bc_n.evaluate(agent, envs, num_episodes, [1, 2], metadata)
    seeds = np.random.SeedSequence([1, 2]).generate_state(num_episodes).tolist()
    env, expected, steps = make_env(), [], 0
    for seed in seeds:
        obs, done, total = env.reset(seed=seed)[0], False, 0.0
        while not done:
            obs, reward, terminated, truncated, _ = env.step(agent.act(obs[None])[0])
            total += reward
            steps += 1
            done = terminated or truncated
        expected.append(total)
    np.testing.assert_allclose(returns, expected, rtol=1e-4)
    assert metrics["eval_length"] == pytest.approx(steps / num_episodes, rel=0.01)


def test_scores_are_normalized_by_the_references_of_d4rl():
    agent, metadata, make_env = hopper()
    metrics, returns = td3_bc_n.evaluate(agent, [make_env()], 5, [0], metadata)
    scores = [100 * (r + 20.272305) / (3234.3 + 20.272305) for r in returns]
    assert metrics["score"] == pytest.approx(np.mean(scores))
    assert metrics["score_worst"] == pytest.approx(min(scores))
    assert metrics["score_stderr"] == pytest.approx(np.std(scores, ddof=1) / np.sqrt(5))
    assert metrics["eval_return"] == pytest.approx(np.mean(returns))


def test_ensemble_statistics_are_std_clip_penalty_and_minimum_of_the_critics():
    agent, _, _ = hopper()
    obs, actions = torch.randn(1, 11), torch.rand(1, 3) * 2 - 1  # one state: no sampling of states
    dataset = td3_bc_n.Transitions(obs, actions, None, None, None)
    statistics = td3_bc_n.ensemble_statistics(agent, dataset, seed=1)
    with torch.no_grad():
        for name, a in (("data", actions), ("policy", agent.actor(obs))):
            q = agent.critics(obs, a)[:, 0]
            assert q.std() > 0
            expected = {"std": q.std(), "clip_penalty": q.mean() - q.min(), "min": q.min()}
            for key, value in expected.items():
                actual = statistics[f"uncertainty/{name}_{key}"]
                assert actual == pytest.approx(value.item(), rel=1e-4)
    names = [f"{name}_{key}" for name in ("data", "policy", "random") for key in expected]
    assert set(statistics) == {f"uncertainty/{name}" for name in names}
