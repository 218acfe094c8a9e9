"""Slow or separate versions of the scripts' code, for comparison, and their parts put together."""

import inspect
from functools import partial

import torch
from torch import nn

N, B, S, A = 4, 32, 5, 2


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
    """The optimizers of the main programs. IQL's actor has a tensor as its learning rate."""
    parts = {name: getattr(agent, name, None) for name in ("critics", "actor", "value")}
    parameters = {name: part.parameters() for name, part in parts.items() if part is not None}
    if hasattr(agent, "log_alpha"):
        parameters["alpha"] = [agent.log_alpha]
    on_gpu = agent.obs_mean.is_cuda
    adam = partial(torch.optim.Adam, lr=args.learning_rate, fused=True, capturable=on_gpu)
    optimizers = {name: adam(part) for name, part in parameters.items()}
    if hasattr(agent, "value"):
        lr = agent.obs_mean.new_tensor(args.learning_rate)
        optimizers["actor"].param_groups[0]["lr"] = lr
    return optimizers


def set_learning_rate(script, optimizers, step, args):
    """In the main program of IQL, before every step."""
    if hasattr(script, "actor_learning_rate"):
        lr = script.actor_learning_rate(step, args)
        optimizers["actor"].param_groups[0]["lr"].fill_(lr)


def transitions(script, rows, device):
    generator = torch.Generator().manual_seed(0)
    shapes = ((S,), (A,), (), (S,), ())
    data = [torch.rand(rows, *shape, generator=generator) * 2 - 1 for shape in shapes]
    data[4] = (data[4] < -0.8).float()
    return script.Transitions(*(column.to(device) for column in data))


class Learner:
    """The parts of a script, put together as in its main program."""

    def __init__(self, script, device="cpu"):
        torch.manual_seed(0)
        args = {"num_critics": N, "batch_size": B, "gradient_steps": 20}
        args = {name: value for name, value in args.items() if hasattr(script.Args, name)}
        self.script, self.device, self.args = script, device, script.Args(**args)
        self.agent = script.Agent(S, A, self.args).to(device)
        self.optimizers = make_optimizers(self.agent, self.args)
        self.beta = torch.tensor(0.3, device=device)
        self.dataset, self.buffer = transitions(script, 500, device), None
        if hasattr(script, "ReplayBuffer"):
            self.buffer = script.ReplayBuffer(900, self.dataset, torch.device(device))
            self.buffer.add(self.dataset)
        self.inputs = inspect.signature(script.update).parameters
        kinds = [False, True] if "update_actor" in self.inputs else [True]
        self.steps = [partial(self.train_step, kind) for kind in kinds]

    def batch(self):
        if self.buffer:
            return self.buffer.sample(B)
        index = torch.randint(len(self.dataset.obs), (B,), device=self.device)
        return self.script.Transitions(*(column[index] for column in self.dataset))

    def train_step(self, update_actor):
        values = {"agent": self.agent, "optimizers": self.optimizers, "args": self.args}
        values |= {"batch": self.batch(), "beta": self.beta, "update_actor": update_actor}
        return self.script.update(**{name: values[name] for name in self.inputs})

    def train(self, steps, functions):
        """Metrics of these steps. Meanwhile beta, IQL's learning rate and the buffer change."""
        metrics = []
        for step in range(1, steps + 1):
            self.beta.fill_(0.3 / step)
            set_learning_rate(self.script, self.optimizers, step, self.args)
            if self.buffer:
                more = transitions(self.script, 20, self.device)
                self.buffer.add(self.script.Transitions(*(column + step for column in more)))
            outputs = functions[-1 if step % 2 == 0 else 0]()
            metrics.append({name: value.clone() for name, value in outputs.items()})
        return metrics
