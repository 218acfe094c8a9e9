"""sac_bc_n.py against a slow reference: every critic an nn.Sequential, every equation by hand."""

import pytest
import torch
from reference import separate_critics
from torch.distributions import Normal, TanhTransform, TransformedDistribution

import sac_bc_n
from baselines import cql, edac, msg
from sac_bc_n import Actor, Agent, Args, Transitions, actor_loss, critic_loss

N, B, S, A = 4, 32, 5, 2
CLOSE = {"atol": 1e-5, "rtol": 1e-5}
ALPHA = torch.tensor(0.7)


@pytest.fixture
def agent():
    torch.manual_seed(0)
    agent = Agent(S, A, Args(num_critics=N))
    for parameter in agent.critics_target.parameters():  # targets that differ from the critics
        parameter.add_(0.05 * torch.randn_like(parameter))
    return agent


@pytest.mark.parametrize("script", [sac_bc_n, edac, msg, cql])
def test_alpha_starts_where_it_is_told_and_0_is_finite(script):
    for start in (0.0, 0.05, 1.0):
        log_alpha = script.Agent(S, A, script.Args(alpha_start=start)).log_alpha
        assert log_alpha.isfinite() and log_alpha.exp().item() == pytest.approx(start, abs=2e-8)


@pytest.fixture
def batch():
    torch.manual_seed(1)
    obs, actions, next_obs = torch.randn(B, S), torch.rand(B, A) * 2 - 1, torch.randn(B, S)
    actions[0] = torch.tensor([1.0, -1.0])  # data has actions at the very bounds
    return Transitions(obs, actions, torch.randn(B), next_obs, (torch.rand(B) < 0.3).float())


def distribution(mean, log_std):
    return TransformedDistribution(Normal(mean, log_std.exp()), TanhTransform(cache_size=1))


def reference_sample(actor, obs):
    """Reparametrised samples and log-probabilities by torch.distributions, from the same noise."""
    mean, log_std = actor.gaussian(obs)
    squashed = distribution(mean, log_std)
    actions = squashed.rsample()
    return actions, squashed.log_prob(actions).sum(dim=1)


@pytest.mark.parametrize("independent", [False, True])
def test_critic_loss_and_gradients_equal_the_reference(agent, batch, independent):
    args = Args(num_critics=N, independent_targets=independent)
    obs, actions, rewards, next_obs, dones = batch
    torch.manual_seed(2)
    next_actions, next_log_pi = reference_sample(agent.actor, next_obs)
    values = [
        member(torch.cat([next_obs, next_actions], dim=1)).squeeze(1)
        for member in separate_critics(agent.critics_target)
    ]
    members, expected = separate_critics(agent.critics), 0.0
    for i, member in enumerate(members):
        value = values[i] if independent else torch.stack(values).min(dim=0).values
        # The entropy is part of the next state's value: discounted, and gone at a terminal.
        y = rewards + args.gamma * (1 - dones) * (value - ALPHA * next_log_pi)
        q = member(torch.cat([obs, actions], dim=1)).squeeze(1)
        expected = expected + ((q - y.detach()) ** 2).mean() / N
    expected.backward()

    torch.manual_seed(2)
    loss, _ = critic_loss(agent, batch, ALPHA, args)
    loss.backward()
    torch.testing.assert_close(loss, expected, **CLOSE)
    for layer, weight in enumerate(agent.critics.weights):
        for i, member in enumerate(members):
            torch.testing.assert_close(weight.grad[i], member[2 * layer].weight.grad.T, **CLOSE)
    assert all(p.grad is None for p in agent.actor.parameters())
    assert all(p.grad is None for p in agent.critics_target.parameters())


@pytest.mark.parametrize("bc_form", ["mse", "ll"])
@pytest.mark.parametrize("beta", [0.0, 0.3])
def test_actor_loss_and_gradients_equal_the_reference(agent, batch, bc_form, beta):
    obs, actions = batch[:2]
    parameters = list(agent.actor.parameters())
    torch.manual_seed(2)
    actor_actions, log_pi = reference_sample(agent.actor, obs)
    x = torch.cat([obs, actor_actions], dim=1)
    values = torch.stack([member(x).squeeze(1) for member in separate_critics(agent.critics)])
    q = values.min(dim=0).values - ALPHA * log_pi
    normaliser = q.abs().mean().item()  # with the entropy in it, and without gradient
    mean, log_std = agent.actor.gaussian(obs)
    if bc_form == "mse":
        bc = ((torch.tanh(mean) - actions) ** 2).mean()  # of the mode, not of the sample
    else:
        inside = actions.clamp(-1 + 1e-6, 1 - 1e-6)
        bc = -distribution(mean, log_std).log_prob(inside).sum(dim=1).mean()
    expected = -q.mean() / normaliser + beta * bc
    expected_gradients = torch.autograd.grad(expected, parameters, allow_unused=True)

    torch.manual_seed(2)
    args = Args(bc_form=bc_form)
    loss, q_term, returned_bc, returned_log_pi = actor_loss(agent, batch, ALPHA, beta, args)
    torch.testing.assert_close(loss, expected, **CLOSE)
    torch.testing.assert_close(q_term, -q.mean() / normaliser, **CLOSE)
    torch.testing.assert_close(returned_bc, bc, **CLOSE)
    torch.testing.assert_close(returned_log_pi, log_pi.detach(), **CLOSE)
    for gradient, by_hand in zip(
        torch.autograd.grad(loss, parameters), expected_gradients, strict=True
    ):
        torch.testing.assert_close(gradient, by_hand, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("mean", "log_std"), [(0.0, 0.0), (0.5, -1.0), (-1.0, 0.5)])
def test_density_integrates_to_one_in_one_dimension(mean, log_std):
    actions = torch.linspace(-1, 1, 2_000_001, dtype=torch.double)[1:-1]
    mean, log_std = torch.tensor([mean]).double(), torch.tensor([log_std]).double()
    density = Actor(S, A).log_prob(torch.atanh(actions)[:, None], mean, log_std).exp()
    assert torch.trapezoid(density, actions).item() == pytest.approx(1.0, abs=1e-3)


def test_log_prob_is_finite_far_out():
    u = torch.tensor([[-50.0], [50.0]], requires_grad=True)
    value = Actor(S, A).log_prob(u, torch.zeros(1), torch.zeros(1))
    value.sum().backward()
    assert value.isfinite().all() and u.grad.isfinite().all()


def test_log_std_is_clamped(agent):
    with torch.no_grad():
        agent.actor.log_std.bias.fill_(100.0)
        assert agent.actor.gaussian(torch.zeros(1, S))[1].eq(2).all()
        agent.actor.log_std.bias.fill_(-100.0)
        assert agent.actor.gaussian(torch.zeros(1, S))[1].eq(-20).all()
