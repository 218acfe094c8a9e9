"""Slow or separate versions of the scripts' code, for comparison."""

from functools import partial

import torch
from torch import nn


def separate_critics(critics):
    """The same ensemble as N nn.Sequentials of nn.Linear."""
    copies = []
    for i in range(len(critics.weights[0])):
        layers = []
        for weight, bias in zip(critics.weights, critics.biases, strict=True):
            linear = nn.Linear(weight.shape[1], weight.shape[2])
            with torch.no_grad():
                linear.weight.copy_(weight[i].T)
                linear.bias.copy_(bias[i, 0])
            layers += [linear, nn.ReLU()]
        copies.append(nn.Sequential(*layers[:-1]))
    return copies


def make_optimizers(agent, args):
    """The optimizers of a script's main program."""
    parameters = {"critics": agent.critics.parameters(), "actor": agent.actor.parameters()}
    if hasattr(agent, "log_alpha"):
        parameters["alpha"] = [agent.log_alpha]
    adam = partial(torch.optim.Adam, lr=args.learning_rate, fused=True)
    return {name: adam(part) for name, part in parameters.items()}
