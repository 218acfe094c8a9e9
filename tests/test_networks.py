"""Networks: the layers of the actor, the initial weights of the critics."""

import math

import pytest
import torch
from torch import nn

import sac_bc_n
import td3_bc_n


@pytest.mark.parametrize(
    ("init", "bounds"),
    [
        ("paper", [1 / 16, 1 / 16, 1 / 16, 1]),
        ("torch", [1 / math.sqrt(14), 1 / 16, 1 / 16, 1 / 16]),
    ],
)
def test_initial_range_of_every_layer(init, bounds):
    torch.manual_seed(0)
    critics = td3_bc_n.CriticEnsemble(50, 11, 3, init)
    for weight, bias, bound in zip(critics.weights, critics.biases, bounds, strict=True):
        for parameter in (weight, bias):
            assert parameter.abs().max() <= bound
            assert parameter.abs().max() > 0.9 * bound
            assert abs(parameter.mean()) < 0.2 * bound
    assert critics.weights[1][0].ne(critics.weights[1][1]).any(), "members start differently"


def test_paper_init_has_twelve_times_the_ensemble_std():
    torch.manual_seed(0)
    obs, actions = torch.randn(1000, 11), torch.rand(1000, 3) * 2 - 1
    spread = {
        init: td3_bc_n.CriticEnsemble(200, 11, 3, init)(obs, actions).std(dim=0).mean().item()
        for init in ("paper", "torch")
    }
    assert spread["paper"] == pytest.approx(0.61, rel=0.1)
    assert spread["torch"] == pytest.approx(0.053, rel=0.1)


@pytest.mark.parametrize("script", [td3_bc_n, sac_bc_n])
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
