"""Evaluation: exact number of episodes, seeded, without effect on training."""

import numpy as np
import pytest
import torch

import sac_bc_n
import td3_bc_n

SCRIPTS = [td3_bc_n, sac_bc_n]


def hopper(script, seed=0):
    data, metadata, make_env = script.load_data("mujoco/hopper/medium-v0")
    torch.manual_seed(seed)
    agent = script.Agent(11, 3, script.Args())
    script.set_statistics(agent, data, script.Args())
    return agent, metadata, make_env


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize(("num_envs", "num_episodes"), [(3, 7), (10, 4), (1, 2)])
def test_parallel_episodes_equal_episodes_one_by_one(script, num_envs, num_episodes):
    agent, metadata, make_env = hopper(script)
    envs = [make_env() for _ in range(num_envs)]
    metrics, returns = script.evaluate(agent, envs, num_episodes, [1, 2], metadata)
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
    agent, metadata, make_env = hopper(td3_bc_n)
    metrics, returns = td3_bc_n.evaluate(agent, [make_env()], 5, [0], metadata)
    scores = [100 * (r + 20.272305) / (3234.3 + 20.272305) for r in returns]
    assert metrics["score"] == pytest.approx(np.mean(scores))
    assert metrics["score_worst"] == pytest.approx(min(scores))
    assert metrics["score_stderr"] == pytest.approx(np.std(scores, ddof=1) / np.sqrt(5))
    assert metrics["eval_return"] == pytest.approx(np.mean(returns))


def test_same_seed_same_episodes_other_seed_other_episodes():
    agent, metadata, make_env = hopper(td3_bc_n)
    envs = [make_env() for _ in range(2)]
    first, again, other = (
        td3_bc_n.evaluate(agent, envs, 3, s, metadata)[1] for s in ([1], [1], [2])
    )
    assert first == again
    assert not set(first) & set(other)


@pytest.mark.parametrize("script", SCRIPTS)
def test_evaluation_and_ensemble_statistics_do_not_use_the_training_random_stream(script):
    agent, metadata, make_env = hopper(script)
    dataset = script.Transitions(torch.randn(50, 11), torch.rand(50, 3) * 2 - 1, None, None, None)
    np.random.seed(0)
    torch_state, numpy_state = torch.get_rng_state(), np.random.get_state()[1].copy()
    script.evaluate(agent, [make_env()], 2, [0], metadata)
    script.ensemble_statistics(agent, dataset, seed=1)
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert (np.random.get_state()[1] == numpy_state).all()


@pytest.mark.parametrize("script", SCRIPTS)
def test_ensemble_statistics_are_std_clip_penalty_and_minimum_of_the_critics(script):
    agent, _, _ = hopper(script)
    obs, actions = torch.randn(1, 11), torch.rand(1, 3) * 2 - 1  # one state: no sampling of states
    dataset = script.Transitions(obs, actions, None, None, None)
    statistics = script.ensemble_statistics(agent, dataset, seed=1)
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
