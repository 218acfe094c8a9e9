"""td3_bc_n.py against a slow reference: every critic an nn.Sequential, every equation by hand."""

import copy

import pytest
import torch
from reference import make_optimizers, separate_critics

from td3_bc_n import Agent, Args, Transitions, actor_loss, critic_loss, update

N, B, S, A = 4, 32, 5, 2
CLOSE = {"atol": 1e-5, "rtol": 1e-5}


@pytest.fixture
def agent():
    torch.manual_seed(0)
    agent = Agent(S, A, Args(num_critics=N))
    for network in (agent.critics_target, agent.actor_target):  # targets that differ from networks
        for parameter in network.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    agent.actor_target.mean.bias.add_(1.0)  # near the bounds, where noise would leave them
    return agent


@pytest.fixture
def batch():
    torch.manual_seed(1)
    obs, actions, next_obs = torch.randn(B, S), torch.rand(B, A) * 2 - 1, torch.randn(B, S)
    return Transitions(obs, actions, torch.randn(B), next_obs, (torch.rand(B) < 0.3).float())


def reference_targets(agent, batch, args, noise):
    """y for every critic and transition, in plain Python loops."""
    _, _, rewards, next_obs, dones = batch
    targets = torch.zeros(N, B)
    members = separate_critics(agent.critics_target)
    for b in range(B):
        clipped = noise[b].clamp(-args.noise_clip, args.noise_clip)
        next_action = (agent.actor_target(next_obs[b]) + clipped).clamp(-1, 1)
        values = [member(torch.cat([next_obs[b], next_action])).item() for member in members]
        for i in range(N):
            value = values[i] if args.independent_targets else min(values)
            targets[i, b] = rewards[b] + args.gamma * (1 - dones[b]) * value
    return targets


@pytest.mark.parametrize("independent", [False, True])
@pytest.mark.parametrize("policy_noise", [0.2, 3.0])  # at 3.0, clipping is most of the noise
def test_critic_loss_and_gradients_equal_the_reference(agent, batch, independent, policy_noise):
    args = Args(num_critics=N, independent_targets=independent, policy_noise=policy_noise)
    torch.manual_seed(2)
    noise = torch.randn(B, A) * policy_noise
    targets = reference_targets(agent, batch, args, noise)
    members = separate_critics(agent.critics)
    x = torch.cat(batch[:2], dim=1)
    expected = sum(
        ((m(x).squeeze(1) - y) ** 2).mean() for m, y in zip(members, targets, strict=True)
    )
    (expected / N).backward()

    torch.manual_seed(2)
    loss, _ = critic_loss(agent, batch, args)
    loss.backward()
    torch.testing.assert_close(loss, expected / N, **CLOSE)
    for layer, weight in enumerate(agent.critics.weights):
        for i, member in enumerate(members):
            torch.testing.assert_close(weight.grad[i], member[2 * layer].weight.grad.T, **CLOSE)
    assert all(p.grad is None for p in agent.critics_target.parameters())
    assert all(p.grad is None for p in agent.actor_target.parameters())


def reference_actor_loss(agent, batch, beta):
    obs, actions = batch[:2]
    actor_actions = agent.actor(obs)
    x = torch.cat([obs, actor_actions], dim=1)
    values = torch.stack([member(x).squeeze(1) for member in separate_critics(agent.critics)])
    q = values.min(dim=0).values
    normaliser = q.abs().mean().item()  # a number: no gradient
    return -q.mean() / normaliser + beta * ((actor_actions - actions) ** 2).mean()


@pytest.mark.parametrize("beta", [0.0, 0.3])
def test_actor_loss_takes_the_minimum_and_a_detached_normaliser(agent, batch, beta):
    parameters = list(agent.actor.parameters())
    expected = reference_actor_loss(agent, batch, beta)
    expected_gradients = torch.autograd.grad(expected, parameters)
    loss, q_term, bc = actor_loss(agent, batch, beta)
    assert loss.item() == pytest.approx((q_term + beta * bc).item())
    assert bc.item() == pytest.approx(((agent.actor(batch.obs) - batch.actions) ** 2).mean().item())
    torch.testing.assert_close(loss, expected, **CLOSE)
    for gradient, by_hand in zip(
        torch.autograd.grad(loss, parameters), expected_gradients, strict=True
    ):
        torch.testing.assert_close(gradient, by_hand, **CLOSE)


def test_actor_and_targets_move_only_with_update_actor(agent, batch):
    args = Args(num_critics=N)
    optimizers = make_optimizers(agent, args)
    moved = []
    for update_actor in [False, True] * 3:
        before = copy.deepcopy(agent.state_dict())
        update(agent, optimizers, batch, 0.3, update_actor, args)
        changed = {
            key.split(".")[0] for key, x in agent.state_dict().items() if x.ne(before[key]).any()
        }
        moved.append(changed)
    everything = {"critics", "actor", "critics_target", "actor_target"}
    assert moved == [{"critics"}, everything] * 3


def test_targets_start_as_copies_without_gradient():
    agent = Agent(S, A, Args())
    for target, network in (("critics_target", "critics"), ("actor_target", "actor")):
        pairs = zip(
            getattr(agent, target).parameters(), getattr(agent, network).parameters(), strict=True
        )
        for copied, parameter in pairs:
            assert torch.equal(copied, parameter) and copied is not parameter
            assert parameter.requires_grad and not copied.requires_grad
