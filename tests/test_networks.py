"""Networks: the batched ensemble equals N separate critics, initialised as in the paper."""

import math

import pytest
import torch
import torch.nn.functional as F
from reference import separate_critics
from torch import nn

import sac_bc_n
import td3_bc_n

SCRIPTS = [td3_bc_n, sac_bc_n]


@pytest.mark.parametrize("script", SCRIPTS)
def test_batched_ensemble_equals_separate_critics_in_values_and_gradients(script):
    torch.manual_seed(0)
    critics = script.CriticEnsemble(7, 11, 3, "paper")
    obs, actions, targets = torch.randn(32, 11), torch.rand(32, 3) * 2 - 1, torch.randn(7, 32)
    q = critics(obs, actions)
    F.mse_loss(q, targets).backward()
    copies = separate_critics(critics)
    q_copies = torch.stack([c(torch.cat([obs, actions], 1)).squeeze(1) for c in copies])
    F.mse_loss(q_copies, targets).backward()
    torch.testing.assert_close(q, q_copies, atol=1e-5, rtol=1e-5)
    for layer, (weight, bias) in enumerate(zip(critics.weights, critics.biases, strict=True)):
        for i, copy in enumerate(copies):
            linear = copy[2 * layer]
            torch.testing.assert_close(weight.grad[i], linear.weight.grad.T, atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(bias.grad[i, 0], linear.bias.grad, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("script", SCRIPTS)
def test_critics_have_three_hidden_layers_of_256(script):
    shapes = [tuple(w.shape) for w in script.CriticEnsemble(10, 11, 3, "paper").weights]
    assert shapes == [(10, 14, 256), (10, 256, 256), (10, 256, 256), (10, 256, 1)]


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize(
    ("init", "bounds"),
    [
        ("paper", [1 / 16, 1 / 16, 1 / 16, 1]),
        ("torch", [1 / math.sqrt(14), 1 / 16, 1 / 16, 1 / 16]),
    ],
)
def test_initial_range_of_every_layer(script, init, bounds):
    torch.manual_seed(0)
    critics = script.CriticEnsemble(50, 11, 3, init)
    for weight, bias, bound in zip(critics.weights, critics.biases, bounds, strict=True):
        for parameter in (weight, bias):
            assert parameter.abs().max() <= bound
            assert parameter.abs().max() > 0.9 * bound
            assert abs(parameter.mean()) < 0.2 * bound
    assert critics.weights[1][0].ne(critics.weights[1][1]).any(), "members start differently"


@pytest.mark.parametrize("script", SCRIPTS)
def test_paper_init_has_twelve_times_the_ensemble_std(script):
    torch.manual_seed(0)
    obs, actions = torch.randn(1000, 11), torch.rand(1000, 3) * 2 - 1
    spread = {
        init: script.CriticEnsemble(200, 11, 3, init)(obs, actions).std(dim=0).mean().item()
        for init in ("paper", "torch")
    }
    assert spread["paper"] == pytest.approx(0.61, rel=0.1)
    assert spread["torch"] == pytest.approx(0.053, rel=0.1)


@pytest.mark.parametrize("script", SCRIPTS)
def test_actor_is_linear_layers_with_default_init_and_tanh(script):
    torch.manual_seed(0)
    actor = script.Actor(11, 3)
    linears = [m for m in actor.hidden if isinstance(m, nn.Linear)]
    assert [(m.in_features, m.out_features) for m in linears] == [(11, 256), (256, 256), (256, 256)]
    obs = torch.randn(5, 11)
    x = obs
    for linear in linears:
        assert linear.weight.abs().max() <= 1 / math.sqrt(linear.in_features)
        x = torch.relu(x @ linear.weight.T + linear.bias)
    expected = torch.tanh(x @ actor.mean.weight.T + actor.mean.bias)
    torch.testing.assert_close(actor(obs), expected)
