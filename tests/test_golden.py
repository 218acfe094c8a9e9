"""Twenty updates equal those of the authors' published code, in double precision.

golden/updates.json holds losses and final weights of their repository at commit 3d736c0, for six
variants. Inputs are sines of the element numbers, so that both codes start from the same tensors.
"""

import json
import math
from pathlib import Path

import pytest
import torch
from reference import make_optimizers

import finetune_sac_bc_n
import finetune_td3_bc_n
import sac_bc_n
import td3_bc_n

GOLDEN = json.loads((Path(__file__).parent / "golden/updates.json").read_text())
SCRIPTS = {
    "td3": [td3_bc_n, finetune_td3_bc_n],
    "sac": [sac_bc_n, finetune_sac_bc_n],
}
CASES = [(script, name) for name in GOLDEN for script in SCRIPTS[name[:3]]]
S, A, N, B, ROWS = 5, 2, 3, 32, 512


def fill(key, shape, scale):
    n = math.prod(shape)
    return scale * torch.sin(0.7 * torch.arange(n, dtype=torch.float64) + key).reshape(shape)


def fill_network(parameters, net):
    """Weight, bias, weight, bias, ...: the scale is 1 / sqrt(in) of the weight's layer."""
    for i, parameter in enumerate(parameters):
        layer, is_bias = divmod(i, 2)
        fan_in = S + (A if net < 2 else 0) if layer == 0 else 256
        parameter.data = fill(100 * net + 10 * layer + is_bias, parameter.shape, fan_in**-0.5)


def critic_parameters(critics):
    pairs = zip(critics.weights, critics.biases, strict=True)
    return [parameter for pair in pairs for parameter in pair]


def summary(parameters):
    parameters = [p.detach() for p in parameters]
    return [[p.sum(), p.abs().sum(), p.flatten()[p.numel() // 2]] for p in parameters]


@pytest.mark.parametrize(
    ("script", "name"), CASES, ids=[f"{script.__name__}-{name}" for script, name in CASES]
)
def test_twenty_updates_equal_the_authors_code(script, name):
    golden = GOLDEN[name]
    args = script.Args(num_critics=N, independent_targets="independent" in name)
    if "sac" in name:
        args.bc_form = name.split("-")[1]
    agent = script.Agent(S, A, args).double()
    networks = {
        "critics": critic_parameters(agent.critics),
        "critics_target": critic_parameters(agent.critics_target),
        "policy": list(agent.actor.parameters()),
    }
    if "td3" in name:
        networks["policy_target"] = list(agent.actor_target.parameters())
    for net, parameters in enumerate(networks.values()):
        fill_network(parameters, net)
    optimizers = make_optimizers(agent, args)

    obs, actions = fill(500, (ROWS, S), 1), fill(501, (ROWS, A), 1)
    rewards, next_obs = fill(502, (ROWS,), 1), fill(503, (ROWS, S), 1)
    dones = (torch.arange(ROWS) % 7 == 0).double()
    torch.manual_seed(7)
    losses = {"critic_loss": [], "policy_loss": [], "alpha_loss": []}
    for step in range(1, 21):
        rows = torch.randint(0, ROWS, (B,))
        batch = script.Transitions(*(x[rows] for x in (obs, actions, rewards, next_obs, dones)))
        update_actor = (step % args.policy_frequency == 0,) if "td3" in name else ()
        metrics = script.update(agent, optimizers, batch, golden["beta"], *update_actor, args)
        names = {
            "critic_loss": "critic_loss",
            "policy_loss": "actor_loss",
            "alpha_loss": "alpha_loss",
        }
        for key, metric in names.items():
            if f"losses/{metric}" in metrics:
                losses[key].append(metrics[f"losses/{metric}"].item())

    for key, values in losses.items():
        assert values == pytest.approx(golden.get(key, []), rel=1e-9, abs=1e-9), key
    for key, parameters in networks.items():
        actual = torch.tensor(summary(parameters), dtype=torch.float64)
        expected = torch.tensor(golden[key], dtype=torch.float64)
        torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9, msg=key)
    if "sac" in name:
        assert agent.log_alpha.item() == pytest.approx(golden["log_alpha"], rel=1e-9)
