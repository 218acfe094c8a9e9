"""Online fine-tuning of SAC-BC-N: an offline agent goes on learning in its environment.

Beeson & Montana, "Balancing policy constraint and ensemble size in uncertainty-based offline
reinforcement learning", section 4.3. All networks, targets and alpha come from sac_bc_n.py's
checkpoint. The buffer starts with the data's last transitions; after K steps of acting, each step
in the environment is followed by one update, and the weight of cloning decays, so that nothing
collapses.

    a       ~ pi(s)
    beta    = max(beta_end, kappa beta) after every update,
              kappa = exp(log(beta_end / beta_start) / beta_decay_steps)
    critics   minimise (Q_i(s, a) - y)^2,  a' ~ pi(s')
              with y = r + gamma (1 - d) (min_i Q'_i(s', a') - alpha log pi(a'|s'))   (1) shared
              or   y_i = r + gamma (1 - d) (Q'_i(s', a') - alpha log pi(a'|s'))  (2) independent
    policy    maximises Q / mean|Q| - beta (tanh(mu(s)) - a)^2          (3) --bc-form mse
              or        Q / mean|Q| + beta log pi(a|s)                  (4) --bc-form ll
              with Q = min_i Q_i(s, a_p) - alpha log pi(a_p|s),  a_p ~ pi(s)
    alpha     minimises - log alpha (log pi(a_p|s) + H)                 (5)

Run it:
    python finetune_sac_bc_n.py --checkpoint runs/RUN/checkpoint.pt
    python finetune_sac_bc_n.py --checkpoint runs/RUN --beta-end 0.01 --env-steps 100000
    python finetune_sac_bc_n.py --from-scratch --env-id Hopper-v5 --save-dataset my/hopper-v0
"""

import copy
import ctypes
import difflib
import json
import math
import os
import re
import signal
import sys
import time
from collections import Counter
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from functools import partial
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Literal, NamedTuple

import gymnasium as gym
import h5py
import minari
import numpy as np
import torch
import torch.nn.functional as F
import tyro
from minari.data_collector.episode_buffer import EpisodeBuffer
from minari.dataset.minari_dataset import parse_dataset_id
from torch import nn
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm


@dataclass
class Args:
    # The run
    checkpoint: str | None = None  # the agent to start from: checkpoint.pt, or its run's directory
    from_scratch: bool = False  # start from nothing instead; --env-id may be any of Gymnasium's
    env_id: str = ""  # a D4RL name, or Minari data set ids joined by commas (the checkpoint's)
    dataset_path: str | None = None  # a file of D4RL's to use, wherever it is
    seed: int = 1  # of the networks, the batches and the evaluation episodes
    env_steps: int = 250_000  # steps in the environment, with an update each (paper: 250000)
    learning_starts: int = 2_500  # K, steps before them without updates (paper: 2500)
    offline_transitions: int = 2_500  # how many of the data's last start the buffer (paper: 2500)
    buffer_size: int = 1_000_000  # transitions that the buffer holds before it forgets
    save_dataset: str | None = None  # write what was collected as a Minari data set of this name
    resume: str | None = None  # go on with a run: its checkpoint.pt, or its directory
    cuda: bool = True  # train on the GPU if there is one
    cudagraphs: bool = True  # on a GPU, replay each step as one CUDA graph
    compile: bool = False  # compile the losses and their gradients (torch.compile)
    tf32: bool = False  # on a GPU, multiply in TF32: faster, with 10 bits of mantissa for 23
    torch_deterministic: bool = True  # use deterministic algorithms
    runs_dir: str = "runs"  # the run writes to RUNS_DIR/ENV__SCRIPT__SEED__TIME
    track: bool = False  # log to Weights & Biases too (needs: pip install wandb)
    wandb_project_name: str = "bc-n"  # the project there
    wandb_entity: str | None = None  # the team there
    # The method
    num_critics: int = 10  # N, the size of the ensemble (paper: 10)
    beta_start: float = 0.0025  # weight of behavioural cloning at first (paper: the offline one)
    beta_end: float = 0.001  # weight that it decays to (paper: by task)
    beta_decay_steps: int = 50_000  # S, updates until it is there (paper: 50000)
    bc_form: Literal["mse", "ll"] = "ll"  # squared error or log-likelihood (paper: by task)
    independent_targets: bool = False  # every critic learns from its own target (paper: by task)
    critic_init: Literal["paper", "torch"] = "paper"  # the paper's spreads critics 12 times as wide
    normalize_states: bool = True  # standardise states by the data's statistics (paper: yes)
    # r for raw, 4(r - 0.5) for antmaze, (r - mean)/std for standardize (paper: by task)
    reward_transform: Literal["raw", "antmaze", "standardize"] = "raw"
    batch_size: int = 256  # transitions per gradient step (paper: 256)
    learning_rate: float = 3e-4  # of Adam, for every network (paper: 3e-4)
    gamma: float = 0.99  # discount factor (paper: 0.99)
    tau: float = 0.005  # how fast target networks follow (paper: 0.005)
    target_entropy: float | None = None  # H, what alpha holds the entropy at (paper: -dim(A))
    # Evaluation and logging
    eval_frequency: int = 5_000  # steps between evaluations (paper: 5000)
    eval_episodes: int = 10  # episodes of an evaluation (paper: 10 or 100, by task)
    final_eval_episodes: int = 10  # episodes of the last one (paper: 10 or 100, by task)
    log_frequency: int = 1_000  # steps between entries of losses
    capture_video: bool = False  # film the first episode of each evaluation


class Task(NamedTuple):
    beta_start: float  # the paper's, for any data of the task
    beta_end: float
    bc_form: str
    independent_targets: bool
    reward_transform: str
    eval_episodes: int
    horizon: int  # time limit of an evaluation episode
    random_return: float  # D4RL's references: the return of a normalised score of 0 ...
    expert_return: float  # ... and of 100


TASKS = {
    "halfcheetah": Task(0.0, 0.0, "ll", False, "raw", 10, 1000, -280.178953, 12135.0),
    "hopper": Task(0.0025, 0.001, "ll", False, "raw", 10, 1000, -20.272305, 3234.3),
    "walker2d": Task(0.0025, 1e-10, "ll", False, "raw", 10, 1000, 1.629008, 4592.3),
    "maze2d-umaze": Task(0.2, 0.02, "mse", False, "raw", 100, 300, 23.85, 161.86),
    "maze2d-medium": Task(0.05, 0.01, "mse", False, "raw", 100, 600, 13.13, 277.39),
    "maze2d-large": Task(0.05, 0.01, "mse", False, "raw", 100, 800, 6.7, 273.99),
    "antmaze-umaze": Task(0.1, 0.05, "mse", True, "antmaze", 100, 700, 0.0, 1.0),
    "antmaze-medium": Task(0.02, 0.02, "mse", True, "antmaze", 100, 1000, 0.0, 1.0),
    "antmaze-large": Task(0.01, 0.005, "mse", True, "antmaze", 100, 1000, 0.0, 1.0),
    "pen": Task(10, 2, "mse", True, "standardize", 100, 100, 96.262799, 3076.8331017826877),
    "hammer": Task(
        10.0, 2.0, "mse", True, "standardize", 100, 200, -274.856578, 12794.134825156867
    ),
    "door": Task(10, 2, "mse", True, "standardize", 100, 200, -56.512833, 2880.5693087298737),
    "relocate": Task(10, 2, "mse", True, "standardize", 100, 200, -6.425911, 4233.877797728884),
}


# The data set that comes along is small, and so is a run on it: a few minutes on two cores.
TINY_RUN = {
    "env_steps": 5_000,
    "eval_frequency": 1_000,
    "eval_episodes": 20,
    "final_eval_episodes": 50,
}


def task_of(env_id):
    """The row of TASKS that a data set's name points to, or None."""
    name = "-" + re.sub("[/,]", "-", env_id.lower().replace("pointmaze", "maze2d")) + "-"
    known = (row for task, row in TASKS.items() if f"-{task}-" in name and "-dense-" not in name)
    return next(known, None)


class Critics(nn.Module):
    """N critics, a batched matmul a layer: states (B, S), actions (B, A) -> values (N, B)."""

    def __init__(self, num_critics, obs_dim, action_dim, init):
        super().__init__()
        self.weights, self.biases = nn.ParameterList(), nn.ParameterList()
        for fan_in, fan_out in pairwise([obs_dim + action_dim, 256, 256, 256, 1]):
            # "paper": the authors' Kaiming rule takes `out` of (N, in, out) for the fan-in. So the
            # output layer starts in +-1, not +-1/16: 12 times the spread of torch's ensemble.
            bound = 1 / math.sqrt(fan_out if init == "paper" else fan_in)
            self.weights.append(torch.empty(num_critics, fan_in, fan_out).uniform_(-bound, bound))
            self.biases.append(torch.empty(num_critics, 1, fan_out).uniform_(-bound, bound))

    def forward(self, obs, actions):
        x = torch.cat([obs, actions], dim=-1).expand(len(self.weights[0]), -1, -1)
        for weight, bias in zip(self.weights[:-1], self.biases[:-1], strict=True):
            x = torch.baddbmm(bias, x, weight).relu_()
        return torch.baddbmm(self.biases[-1], x, self.weights[-1]).squeeze(-1)


class Policy(nn.Module):
    """A Gaussian squashed by tanh; called, it gives its mode: states (B, S) -> actions (B, A)."""

    def __init__(self, obs_dim, action_dim):
        super().__init__()
        layers = [nn.Linear(obs_dim, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU()]
        self.hidden = nn.Sequential(*layers, nn.Linear(256, 256), nn.ReLU())
        self.mean = nn.Linear(256, action_dim)
        self.log_std = nn.Linear(256, action_dim)

    def forward(self, obs):
        return torch.tanh(self.mean(self.hidden(obs)))

    def gaussian(self, obs):
        hidden = self.hidden(obs)
        return self.mean(hidden), self.log_std(hidden).clamp(-20, 2)


def sample(mean, log_std):
    """Actions a = tanh(u), u ~ N(mean, std), and their log-probabilities."""
    u = mean + log_std.exp() * torch.randn_like(mean)
    return torch.tanh(u), log_prob(u, mean, log_std)


def log_prob(u, mean, log_std):
    """log pi(tanh(u)). Its term log(1 - tanh(u)^2) is written so that it is finite for any u."""
    gaussian = -0.5 * ((u - mean) / log_std.exp()) ** 2 - log_std - 0.5 * math.log(2 * math.pi)
    return (gaussian - 2 * (math.log(2) - u - F.softplus(-2 * u))).sum(dim=-1)


class Agent(nn.Module):
    """All that is learned, and the data's statistics, in one state_dict."""

    def __init__(self, obs_dim, action_dim, args):
        super().__init__()
        self.register_buffer("obs_mean", torch.zeros(obs_dim))
        self.register_buffer("obs_std", torch.ones(obs_dim))
        self.register_buffer("reward_shift", torch.zeros(()))
        self.register_buffer("reward_scale", torch.ones(()))
        self.critics = Critics(args.num_critics, obs_dim, action_dim, args.critic_init)
        self.critics_target = copy.deepcopy(self.critics).requires_grad_(False)
        self.policy = Policy(obs_dim, action_dim)
        self.log_alpha = nn.Parameter(torch.tensor(0.0))

    def fit_statistics(self, observations, rewards, args):
        """Of the whole data set, in double precision: a million float32 rows do not add up."""
        fitted = {"obs_mean": 0.0, "obs_std": 1.0, "reward_shift": 0.0, "reward_scale": 1.0}
        if args.normalize_states:
            fitted["obs_mean"] = observations.mean(0, dtype=np.float64)
            fitted["obs_std"] = observations.std(0, dtype=np.float64) + 1e-3
        if args.reward_transform == "antmaze":
            fitted |= {"reward_shift": 0.5, "reward_scale": 4.0}
        if args.reward_transform == "standardize":
            fitted["reward_shift"] = rewards.mean(dtype=np.float64)
            fitted["reward_scale"] = 1 / (rewards.std(dtype=np.float64) or 1.0)
        for name, value in fitted.items():
            getattr(self, name).copy_(torch.as_tensor(value))

    def normalize(self, observations):
        obs = torch.as_tensor(observations, dtype=torch.float32, device=self.obs_mean.device)
        return (obs - self.obs_mean) / self.obs_std

    def to_tensors(self, observations, actions, rewards, next_observations, terminals):
        """Transitions as the networks see them: on the device, states and rewards transformed."""
        obs, next_obs = self.normalize(observations), self.normalize(next_observations)
        others = (torch.as_tensor(x).to(obs) for x in (actions, rewards, terminals))
        actions, rewards, terminals = others
        rewards = (rewards - self.reward_shift) * self.reward_scale
        return [obs, actions, rewards, next_obs, terminals]

    @torch.no_grad()
    def act(self, observations):
        """What an evaluation does: the policy's actions for the environments' observations."""
        return self.policy(self.normalize(observations)).cpu().numpy()


def critic_loss(agent, batch, alpha, args):
    obs, actions, rewards, next_obs, terminals = batch
    with torch.no_grad():
        next_actions, next_log_pi = sample(*agent.policy.gaussian(next_obs))
        next_q = agent.critics_target(next_obs, next_actions)
        if not args.independent_targets:
            next_q = next_q.amin(dim=0, keepdim=True)
        next_q = next_q - alpha * next_log_pi
        targets = rewards + args.gamma * (1 - terminals) * next_q  # (1) as (1, B) or (2) as (N, B)
    q = agent.critics(obs, actions)
    return F.mse_loss(q, targets.expand_as(q))


def policy_loss(agent, batch, alpha, beta, args):
    obs, actions = batch[:2]
    mean, log_std = agent.policy.gaussian(obs)
    policy_actions, log_pi = sample(mean, log_std)
    q = agent.critics(obs, policy_actions).amin(dim=0)  # the minimum with either kind of target
    q = q - alpha * log_pi
    if args.bc_form == "mse":
        bc = F.mse_loss(torch.tanh(mean), actions)  # (3)
    else:
        u = torch.atanh(actions.clamp(-1 + 1e-6, 1 - 1e-6))  # atanh of +-1 is infinite
        bc = -log_prob(u, mean, log_std).mean()  # (4)
    return -q.mean() / q.abs().mean().detach() + beta * bc, log_pi.detach()


def alpha_loss(agent, log_pi, args):
    return -(agent.log_alpha * (log_pi + args.target_entropy)).mean()  # (5)


def make_optimizers(agent, args):
    parameters = {"critics": agent.critics.parameters(), "policy": agent.policy.parameters()}
    parameters["alpha"] = [agent.log_alpha]
    adam = partial(torch.optim.Adam, lr=args.learning_rate, fused=True)
    on_gpu = agent.obs_mean.is_cuda  # only there can, and must, Adam be fit for a CUDA graph
    return {name: adam(part, capturable=on_gpu) for name, part in parameters.items()}


def update(agent, optimizers, batch, beta, args):
    """One gradient step, on tensors only: nothing here waits for the device or leaves it."""
    alpha = agent.log_alpha.detach().exp()  # of the start of the step, for both losses
    losses = {"critic": critic_loss(agent, batch, alpha, args)}
    descend(optimizers["critics"], losses["critic"])
    losses["policy"], log_pi = policy_loss(agent, batch, alpha, beta, args)
    descend(optimizers["policy"], losses["policy"])
    losses["alpha"] = alpha_loss(agent, log_pi, args)
    descend(optimizers["alpha"], losses["alpha"])
    polyak(agent.critics_target, agent.critics, args.tau)
    losses |= {"alpha_value": alpha, "entropy": -log_pi.mean()}
    return {name: loss.detach() for name, loss in losses.items()}


def descend(optimizer, loss):
    """One step of the optimizer; gradients are computed for its own parameters only."""
    parameters = optimizer.param_groups[0]["params"]
    gradients = torch.autograd.grad(loss, parameters)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    optimizer.step()


@torch.no_grad()
def polyak(target, network, tau):
    torch._foreach_lerp_(list(target.parameters()), list(network.parameters()), tau)


@torch.no_grad()
def explore(agent, observation, args):
    """An action for one observation, sampled from the policy."""
    return sample(*agent.policy.gaussian(agent.normalize(observation)))[0].cpu().numpy()


def beta_at(step, args):
    """beta of an update: beta <- max(beta_end, kappa beta) after every one before it."""
    if args.beta_start == 0:
        return 0.0
    end = min(args.beta_end, args.beta_start)  # it never grows
    kappa = (end / args.beta_start) ** (1 / args.beta_decay_steps)
    return max(end, args.beta_start * kappa ** (step - 1))


def collect(agent, env, observation, action, buffer, facts):
    """One step in the environment, to the buffer; returns the observation to go on from."""
    successor, reward, terminated, truncated, _ = env.step(action)
    # A time limit is no terminal, here as in the data.
    terminal = terminated or (reward > 0 and facts.get("goal_is_terminal", False))
    transition = observation, action, reward, successor, terminal
    buffer.add(*agent.to_tensors(*(np.asarray(x)[None] for x in transition)))
    return env.reset()[0] if terminated or truncated else successor


class ReplayBuffer:
    """A ring of transitions, in tensors that are on the device from the start."""

    def __init__(self, size, obs_dim, action_dim, device):
        shapes = [(obs_dim,), (action_dim,), (), (obs_dim,), ()]
        self.columns = [torch.zeros((size, *shape), device=device) for shape in shapes]
        self.capacity, self.added = size, 0
        self.filled = torch.zeros((), dtype=torch.float64, device=device)  # for a recorded sample

    def __len__(self):
        return min(self.added, self.capacity)

    def add(self, *transitions):
        index = torch.arange(self.added, self.added + len(transitions[0])) % self.capacity
        for column, values in zip(self.columns, transitions, strict=True):
            column[index.to(column.device)] = values
        self.added += len(index)
        self.filled.fill_(len(self))

    def sample(self, batch_size):
        uniform = torch.rand(batch_size, dtype=torch.float64, device=self.filled.device)
        index = (uniform * self.filled).long()
        return [column[index] for column in self.columns]


# --- The method ends here; the rest is speed, arguments, data, evaluation and survival. ---


class CudaGraphs:
    """A function's kernels, recorded once for each of its arguments and then replayed by the GPU.

    What changes from call to call is in tensors that stay where they are. The calls before a
    recording are real ones, which warm up what must not happen in it.
    """

    def __init__(self, function):
        self.function, self.calls, self.recorded = function, Counter(), {}
        self.stream = torch.cuda.Stream()  # not the default one, which cannot be recorded

    def __call__(self, *kind):
        self.calls[kind] += 1
        if self.calls[kind] <= 3:
            self.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.stream):
                results = self.function(*kind)
            torch.cuda.current_stream().wait_stream(self.stream)
            return results
        if kind not in self.recorded:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=self.stream):
                results = self.function(*kind)  # recorded only: the replay below is what runs it
            self.recorded[kind] = graph, results
        graph, results = self.recorded[kind]
        graph.replay()
        return results


def keep_freed_memory():
    """Have glibc reuse what tensors free, instead of paging it in anew at every step."""
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    if hasattr(libc, "mallopt"):
        libc.mallopt(-1, 2**30)  # M_TRIM_THRESHOLD: give nothing below this back to the system
        libc.mallopt(-3, 2**30)  # M_MMAP_THRESHOLD: take nothing below this from it directly


def load_checkpoint(path):
    """A checkpoint, or that of a run's directory; nothing in a file is ever executed."""
    path = Path(path, "checkpoint.pt") if Path(path).is_dir() else Path(path)
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
        checkpoint["agent"], checkpoint["args"]
    except Exception as error:  # torch.load has many ways to fail on a file that is not its own
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        sys.exit(f"{path}: not a checkpoint of these scripts ({reason})")
    return checkpoint


def resumed_args(path):
    """The arguments of the run to go on with. What shapes its learning cannot change."""
    checkpoint, script = load_checkpoint(path), Path(__file__).stem
    if checkpoint.get("script") != script:
        sys.exit(f"{path}: a checkpoint of {checkpoint.get('script')}, not of {script}")
    if checkpoint["args"].get("save_dataset"):
        sys.exit(f"{path}: a run with --save-dataset cannot be resumed")
    args = tyro.cli(Args, default=Args(**checkpoint["args"]), description=__doc__)
    may_change = {"resume", "gradient_steps", "env_steps", "cuda", "runs_dir", "track"}
    may_change |= {"cudagraphs", "compile", "tf32"}
    may_change |= {"wandb_project_name", "wandb_entity", "eval_frequency", "eval_episodes"}
    may_change |= {"final_eval_episodes", "log_frequency", "capture_video"}
    for name, old in checkpoint["args"].items():
        if (new := getattr(args, name)) != old and name not in may_change:
            sys.exit(f"--{name.replace('_', '-')} {new} contradicts the checkpoint's {old}")
    total = vars(args).get("gradient_steps") or vars(args).get("env_steps")
    if checkpoint["step"] >= total:
        sys.exit(f"{path}: finished already, at step {checkpoint['step']}")
    return args, checkpoint


def parse_args():
    """Look up checkpoint and task before parsing, so that --help shows the numbers of the run."""
    options = r"--(env[-_]id|checkpoint|resume)[=\0]([^\0]+)"
    given = dict(re.findall(options, "\0".join(sys.argv[1:])))
    if "resume" in given:
        return *resumed_args(given["resume"]), True
    checkpoint = load_checkpoint(given["checkpoint"]) if "checkpoint" in given else None
    found = checkpoint["args"] if checkpoint else {}
    env_id = given.get("env-id") or given.get("env_id") or found.get("env_id", "")
    values, task = {"env_id": env_id}, task_of(env_id)
    if task:
        values |= task._asdict() | {"final_eval_episodes": task.eval_episodes}
    if checkpoint:
        own = {"env_id", "checkpoint", "from_scratch", "save_dataset", "runs_dir"}
        own |= {"eval_frequency", "track", "capture_video"}
        values |= {name: value for name, value in found.items() if name not in own}
        if env_id.startswith("tiny-"):
            values |= TINY_RUN
        if "beta" in checkpoint:  # it was fine-tuned before
            values["beta_start"] = checkpoint["beta"]
        elif task is not TASKS["maze2d-umaze"]:  # where the paper starts higher than offline
            values["beta_start"] = found["beta"]
    defaults = Args()
    for name in values.keys() & vars(defaults).keys():
        setattr(defaults, name, values[name])
    args = tyro.cli(Args, default=defaults, description=__doc__)
    zero = ("seed", "env_steps", "learning_starts", "offline_transitions")
    for name, value in vars(args).items():
        if type(value) is int and value < (name not in zero):
            sys.exit(f"--{name.replace('_', '-')} {value}: too small")
    if args.from_scratch == bool(args.checkpoint):
        sys.exit("give the agent to start from (--checkpoint FILE), or say --from-scratch")
    if args.from_scratch:
        args.normalize_states = False  # there is no data to take statistics of
        args.reward_transform = "antmaze" if args.reward_transform == "antmaze" else "raw"
    if args.save_dataset:  # better to know of a bad name before the run than after it
        try:
            parse_dataset_id(args.save_dataset)
        except (TypeError, ValueError):
            sys.exit(f"--save-dataset: {args.save_dataset} is not of the form namespace/name-v0")
        if args.save_dataset in minari.list_local_datasets():
            sys.exit(f"--save-dataset: there is a data set {args.save_dataset} already")
    return args, checkpoint, False


def restore(agent, checkpoint, facts, args):
    """All networks, targets and statistics; of the critics the first N."""
    found, old = checkpoint["args"], checkpoint.get("facts", facts)["environment"]
    if args.env_id == found["env_id"] and old != facts["environment"]:
        sys.exit(f"{args.checkpoint}: learned in {old}, but here is {facts['environment']}")
    inflated = checkpoint.get("step", 0) < found.get("bc_inflation_steps", 0)
    if inflated and (beta := found["beta"] * found["bc_inflation"]) > args.beta_start:
        print(f"beta was {beta:g} offline to the end, inflated: it now falls, the score may too")
    n, weights = args.num_critics, checkpoint["agent"].items()
    try:
        agent.load_state_dict({k: x[:n] if k.startswith("critics") else x for k, x in weights})
    except RuntimeError as error:
        sys.exit(f"{args.checkpoint}: the agent of another algorithm, task or size ({error})")


# Minari's counterparts of D4RL's data sets: other data, and for the mazes other physics.
COUNTERPARTS = {
    r"(hopper|halfcheetah|walker2d)-(medium|expert)-v2": r"mujoco/\1/\2-v0",
    r"(hopper|halfcheetah|walker2d)-medium-expert-v2": r"mujoco/\1/medium-v0,mujoco/\1/expert-v0",
    r"maze2d-(umaze|medium|large)-v1": r"D4RL/pointmaze/\1-v2",
    r"antmaze-(umaze(-diverse)?|(medium|large)-(play|diverse))-v[02]": r"D4RL/antmaze/\1-v1",
    r"(pen|hammer|door|relocate)-(human|cloned|expert)-v1": r"D4RL/\1/\2-v2",
}


def load_data(env_id, dataset_path=None, from_scratch=False):
    """Transitions as five arrays, what there is to say of them, and a maker of environments."""
    try:
        import d4rl_tasks
    except ModuleNotFoundError:  # a script copied out alone knows Minari's data only
        d4rl_tasks = None
    if dataset_path and not d4rl_tasks:
        sys.exit("--dataset-path needs d4rl_tasks.py beside this script")
    path = dataset_path or (d4rl_tasks and d4rl_tasks.find(env_id))
    if from_scratch:
        data, returns, facts, new_env = no_data(env_id)
    elif path:
        data, returns, facts, new_env = load_d4rl(env_id, path, d4rl_tasks)
    else:
        data, returns, facts, new_env = load_minari(env_id, d4rl_tasks)
    env, task, name = new_env(), task_of(env_id), facts["dataset"]
    for space, column in zip((env.observation_space, env.action_space), data, strict=False):
        if space.shape != column.shape[1:]:
            sys.exit(f"{name}: shape {column.shape[1:]}, where {env.spec.id} has {space.shape}")
    for key, column in zip(("observation", "action", "reward", "successor"), data, strict=False):
        if len(bad := np.unique(np.argwhere(~np.isfinite(column))[:, 0])):
            sys.exit(f"{name}: {key} {bad[0]} is not finite (of {len(bad)} such)")
    outside = int((np.abs(data[1]) > 1 + 1e-6).any(axis=1).sum())
    data[1] = data[1].clip(-1, 1)
    facts |= {
        "transitions": len(data[0]),
        "episodes": len(returns),
        "mean_return": float(np.mean(returns)),
        "clipped_actions": outside,
        "environment": f"{env.spec.id}, {env.spec.max_episode_steps} steps",
        "task": "the paper's" if task else "not one of the paper's: generic defaults",
    }
    if task:
        facts |= {"random_return": task.random_return, "expert_return": task.expert_return}
    low, high = facts["random_return"], facts["expert_return"]
    if not from_scratch:
        facts["data_score"] = 100 * (facts["mean_return"] - low) / (high - low)
    return data, facts, new_env


def no_data(env_id):
    """For --from-scratch: no transitions, and any environment of D4RL's or of Gymnasium's."""
    try:
        env = wrap(gym.make(env_id))
    except (gym.error.Error, ImportError) as error:
        sys.exit(f"{env_id}: Gymnasium cannot make this environment ({error})")
    obs, action = env.observation_space.shape, env.action_space.shape
    data = [np.zeros((0, *shape), np.float32) for shape in (obs, action, (), obs, ())]
    facts = {"dataset": "none", "random_return": 0.0, "expert_return": 100.0}
    return data, [0.0], facts, lambda **render: wrap(gym.make(env_id, **render))


def load_d4rl(env_id, path, d4rl_tasks):
    """D4RL's own file of a data set, and D4RL's environment."""
    try:
        *data, returns = d4rl_tasks.load(env_id, path, clip=False).values()
    except (OSError, ValueError) as error:
        sys.exit(str(error))
    comparable = "yes, if the file is D4RL's own"
    if env_id == d4rl_tasks.TINY:
        comparable = "no: a small data set of our own"
    elif env_id.startswith("antmaze") and env_id.endswith("-v2"):
        comparable = "no: its antmaze is -v0"
    elif maker := d4rl_tasks.made_by(path):
        comparable = f"nearly: not D4RL's own file, but made by its recipe with {maker}"
    facts = {"dataset": env_id, "source": str(path), "comparable_with_the_paper": comparable}
    return data, returns, facts, lambda **render: wrap(gym.make(gym.spec(env_id), **render))


def load_minari(env_id, d4rl_tasks):
    """Minari's data of an id, or of the counterparts of a D4RL name."""
    matches = [(re.fullmatch(pattern, env_id), ids) for pattern, ids in COUNTERPARTS.items()]
    ids = next((match.expand(ids) for match, ids in matches if match), env_id)
    if d4rl_tasks and ids in d4rl_tasks.TASKS:  # it has no counterpart
        sys.exit(d4rl_tasks.missing(env_id))
    datasets = []
    for dataset_id in ids.split(","):
        try:
            hosted = "/" in dataset_id  # there is no other kind on the hub
            datasets.append(minari.load_dataset(dataset_id, download=hosted))
        except Exception as error:  # the hub's client has exceptions of its own, not OSError
            names = [*minari.list_local_datasets(), *(d4rl_tasks.TASKS if d4rl_tasks else ())]
            near = ", ".join(difflib.get_close_matches(env_id, names, cutoff=0))
            alone = "  (D4RL's names, and the data that comes along, need d4rl_tasks.py here)"
            sys.exit(
                f"{dataset_id}: no Minari data set here, and none to download ({error})\n  nearest "
                f"names: {near}\n  with a network: minari download {dataset_id}\n  or your own: "
                f"https://minari.farama.org\n{d4rl_tasks.missing(env_id) if d4rl_tasks else alone}"
            )
    names = {dataset.env_spec.id if dataset.env_spec else "unknown" for dataset in datasets}
    if len(names) > 1 or "unknown" in names:
        sys.exit(f"{ids}: not of one known environment, but of {', '.join(sorted(names))}")
    new_env = partial(make_minari_env, datasets[0], task_of(env_id))
    env, metadata = new_env(), datasets[0].storage.metadata
    try:
        episodes = [episode for dataset in datasets for episode in read_minari(dataset, env)]
        data = [np.concatenate(column).astype(np.float32) for column in zip(*episodes, strict=True)]
    except (OSError, KeyError, ValueError) as error:
        sys.exit(f"{ids}: its data file cannot be read ({error})")
    if not data:
        sys.exit(f"{ids}: no episodes in it")
    low, high = env.unwrapped.action_space.low, env.unwrapped.action_space.high
    data[1] = 2 * (data[1] - low) / (high - low) - 1
    facts = {
        "dataset": ids,
        "source": "Minari, " + ", ".join(str(dataset.storage.data_path) for dataset in datasets),
        "random_return": metadata.get("ref_min_score", 0.0),
        "expert_return": metadata.get("ref_max_score", 100.0),
        "goal_is_terminal": has_goal(env),
        "comparable_with_the_paper": "no: its scores are of D4RL's own files and environments",
    }
    return data, [episode[2].sum() for episode in episodes], facts, new_env


def read_minari(dataset, env):
    """Its episodes, each as five arrays; with h5py, as Minari's own way takes twice as long."""
    with h5py.File(dataset.storage.data_path / "main_data.hdf5") as file:
        for index in dataset.episode_indices:
            episode = file[f"episode_{index}"]
            observations = flatten(episode["observations"], env.unwrapped.observation_space)
            actions, rewards = episode["actions"][()], episode["rewards"][()]
            # A time limit is no terminal: the state after it has a value, and the last of the
            # T + 1 observations is that state.
            terminals = episode["terminations"][()]
            if len({len(observations) - 1, len(actions), len(rewards), len(terminals)}) > 1:
                raise ValueError(f"episode {index} has not one observation more than actions")
            if has_goal(env):  # the collector did not end there, but a policy is done
                terminals = rewards > 0
            yield observations[:-1], actions, rewards, observations[1:], terminals


def has_goal(env):
    """Whether a reward means that a maze's goal was reached."""
    return "Maze_" in env.spec.id and "Dense" not in env.spec.id


def flatten(observations, space):
    """One row a step, in the order of gym.wrappers.FlattenObservation."""
    if isinstance(space, gym.spaces.Dict):
        return np.hstack([flatten(observations[key], part) for key, part in space.items()])
    return np.reshape(observations[()], (len(observations), -1))


def make_minari_env(dataset, task, **render):
    spec = dataset.env_spec
    # Minari's time limit for pointmaze is a float, and as long as the whole data set.
    limit = task.horizon if task else min(int(spec.max_episode_steps or 1000), 10_000)
    # Minari's evaluation map of the ant's u-maze is not the data's maze.
    kwargs = {"max_episode_steps": limit, "eval_env": not spec.id.startswith("AntMaze_UMaze")}
    if "Maze_" in spec.id:
        # As in D4RL: at the goal an ant's episode ends, and a point goes on collecting reward.
        kwargs |= {"continuing_task": spec.id.startswith("PointMaze"), "reset_target": False}
    return wrap(dataset.recover_environment(**kwargs, **render))


def wrap(env):
    """What the policy sees of an environment: flat observations, and actions in [-1, 1]."""
    if not np.isfinite(getattr(env.action_space, "high", np.inf)).all():
        sys.exit(f"{env.spec.id}: its actions are not numbers between bounds")
    env = gym.wrappers.FlattenObservation(env)
    return gym.wrappers.RescaleAction(env, np.float32(-1), np.float32(1))


def evaluate(agent, envs, num_episodes, seed, facts):
    """Exactly `num_episodes` seeded episodes, len(envs) at a time in one batched forward pass."""
    seeds = np.random.SeedSequence(seed).generate_state(num_episodes).tolist()
    returns, lengths, successes = np.zeros((3, num_episodes))
    idle, playing, started = list(envs), {}, 0
    while started < num_episodes or playing:
        while idle and started < num_episodes:
            env = idle.pop(0)
            playing[started] = env, env.reset(seed=seeds[started])[0]
            started += 1
        actions = agent.act(np.stack([observation for _, observation in playing.values()]))
        for (episode, (env, _)), action in zip(list(playing.items()), actions, strict=True):
            observation, reward, terminated, truncated, info = env.step(action)
            playing[episode] = env, observation
            returns[episode] += reward
            lengths[episode] += 1
            successes[episode] = max(successes[episode], info.get("success", 0))
            if terminated or truncated:
                idle.append(env)
                del playing[episode]
    low, high = facts["random_return"], facts["expert_return"]
    scores = 100 * (returns - low) / (high - low)
    stderr = scores.std() / math.sqrt(max(1, num_episodes - 1))
    figures = {"score": scores.mean(), "score_stderr": stderr, "score_worst": scores.min()}
    figures |= {"return": returns.mean(), "return_worst": returns.min()}
    if "success" in info:
        figures["success_rate"] = successes.mean()
    return {name: float(x) for name, x in figures.items()}, returns.tolist(), lengths.tolist()


@torch.no_grad()
def uncertainty(agent, obs, actions, seed):
    """Section 5.3 of the paper: how far the critics disagree, near the data and away from it."""
    generator = torch.Generator().manual_seed(seed)  # not the random stream of the training
    rows = torch.randint(len(obs), (1024,), generator=generator).to(obs.device)
    obs, actions = obs[rows], actions[rows]
    uniform = torch.rand(actions.shape, generator=generator).to(obs.device) * 2 - 1
    figures = {}
    for kind, a in {"data": actions, "policy": agent.policy(obs), "random": uniform}.items():
        q = agent.critics(obs, a)
        figures[f"{kind}_std"] = q.std(dim=0, correction=min(1, len(q) - 1)).mean()
        figures[f"{kind}_clip_penalty"] = (q.mean(dim=0) - q.amin(dim=0)).mean()
        figures[f"{kind}_min"] = q.amin(dim=0).mean()
    return figures


def start_run(args, facts, resumed):
    """The run's directory, new or that of the run to go on with, and its TensorBoard log."""
    name = f"{re.sub('[/,]', '-', args.env_id)}__{Path(__file__).stem}__{args.seed}"
    run_dir = Path(args.runs_dir) / f"{name}__{datetime.now():%Y%m%d-%H%M%S-%f}"
    if resumed:
        run_dir = Path(args.resume) if Path(args.resume).is_dir() else Path(args.resume).parent
    try:
        run_dir.mkdir(parents=True, exist_ok=bool(resumed))
    except OSError as error:
        sys.exit(f"{run_dir}: cannot be made ({error})")
    facts["run"] = str(run_dir)
    told = vars(args) | facts
    print("\n".join(f"{key}: {value}" for key, value in told.items()))
    if args.track:
        try:
            import wandb
        except ImportError:
            sys.exit("--track needs Weights & Biases: pip install wandb")
        project, entity = args.wandb_project_name, args.wandb_entity
        wandb.init(project=project, entity=entity, config=vars(args), sync_tensorboard=True)
    # What was logged after the checkpoint will be logged again.
    writer = SummaryWriter(run_dir, purge_step=resumed["step"] + 1 if resumed else None)
    table = "".join(f"\n|{key}|{value}|" for key, value in told.items())
    writer.add_text("hyperparameters", "|name|value|\n|-|-|" + table)
    return run_dir, writer


def run_state(agent, optimizers, step, losses, history, args, facts):
    """All that it takes to go on as if nothing had happened."""
    random_on_gpu = [torch.cuda.get_rng_state()] if agent.obs_mean.is_cuda else []
    return {
        "script": Path(__file__).stem,
        "step": step,
        "agent": agent.state_dict(),
        "optimizers": {name: optimizer.state_dict() for name, optimizer in optimizers.items()},
        "random": [torch.get_rng_state(), *random_on_gpu],
        "losses": losses,
        "history": history,
        "args": vars(args),
        "facts": facts,
    }


def resume_run(checkpoint, agent, optimizers):
    agent.load_state_dict(checkpoint["agent"])
    for name, optimizer in optimizers.items():
        here = optimizer.param_groups[0]["capturable"]
        optimizer.load_state_dict(checkpoint["optimizers"][name])
        optimizer.param_groups[0]["capturable"] = here  # not that of the checkpoint's device
    on_cpu, *on_gpu = checkpoint["random"]
    torch.set_rng_state(on_cpu)
    if agent.obs_mean.is_cuda and on_gpu:
        torch.cuda.set_rng_state(on_gpu[0])
    return checkpoint["step"], checkpoint["losses"], checkpoint["history"]


def save_checkpoint(checkpoint, path):
    """Whole or not at all: the old one stays until the new one is on the disk."""
    temporary = path.with_suffix(".tmp")
    try:
        with open(temporary, "wb") as file:
            torch.save(checkpoint, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except (OSError, RuntimeError) as error:
        temporary.unlink(missing_ok=True)
        sys.exit(f"{path}: cannot be written, so the one before it stays ({error})")


def env_state(env):
    """What it takes to go on within an episode; None where only a new one can be begun."""
    import mujoco
    from gymnasium.envs.mujoco import MujocoEnv

    core = env.unwrapped
    if not isinstance(core, MujocoEnv):
        return None
    physics = np.empty(mujoco.mj_stateSize(core.model, mujoco.mjtState.mjSTATE_INTEGRATION))
    mujoco.mj_getState(core.model, core.data, physics, mujoco.mjtState.mjSTATE_INTEGRATION)
    model = {name: getattr(core.model, name) for name in ("body_pos", "body_quat", "site_pos")}
    arrays = {"physics": physics, "goal": getattr(core, "goal", np.zeros(0)), **model}
    state = {name: torch.tensor(array) for name, array in arrays.items()}
    random, elapsed = core.np_random.bit_generator.state, env.get_wrapper_attr("_elapsed_steps")
    return state | {"random": random, "elapsed": elapsed}


def resume_online(checkpoint, env, buffer):
    for column, saved in zip(buffer.columns, checkpoint["buffer"], strict=True):
        column[: len(saved)] = saved.to(column.device)
    buffer.added = checkpoint["added"]
    if checkpoint["env"] is None:
        print("the environment cannot go on within an episode: a new one begins")
        return env.reset(seed=checkpoint["step"])[0]
    set_env_state(env, checkpoint["env"])
    return checkpoint["observation"].numpy()


def set_env_state(env, state):
    import mujoco

    env.reset()
    core, physics = env.unwrapped, state["physics"].numpy()
    for name in ("body_pos", "body_quat", "site_pos"):
        getattr(core.model, name)[:] = state[name].numpy()
    if hasattr(core, "goal"):
        core.goal = state["goal"].numpy()
    mujoco.mj_setState(core.model, core.data, physics, mujoco.mjtState.mjSTATE_INTEGRATION)
    mujoco.mj_forward(core.model, core.data)  # derives the rest, and spoils the warm start
    mujoco.mj_setState(core.model, core.data, physics, mujoco.mjtState.mjSTATE_INTEGRATION)
    core.np_random.bit_generator.state = state["random"]
    env.set_wrapper_attr("_elapsed_steps", state["elapsed"])


class Recorder(gym.Wrapper):
    """Keeps whole episodes, as the environment gave them, for --save-dataset."""

    def __init__(self, env):
        super().__init__(env)
        self.episodes = []

    def reset(self, **kwargs):
        observation, info = self.env.reset(**kwargs)
        self.episodes.append(EpisodeBuffer(observations=[observation], actions=[]))
        return observation, info

    def step(self, action):
        observation, reward, terminated, truncated, info = self.env.step(action)
        episode = self.episodes[-1]
        episode.observations.append(observation)
        episode.actions.append(action)
        episode.rewards.append(float(reward))
        episode.terminations.append(bool(terminated))
        episode.truncations.append(bool(truncated))
        return observation, reward, terminated, truncated, info

    def save(self, dataset_id, facts):
        episodes = [episode for episode in self.episodes if episode.rewards]
        episodes[-1].truncations[-1] = not episodes[-1].terminations[-1]  # cut off by the run's end
        if isinstance(self.env.observation_space, gym.spaces.Dict):
            for i, episode in enumerate(episodes):
                keys, rows = episode.observations[0], episode.observations
                by_key = {key: np.stack([row[key] for row in rows]) for key in keys}
                episodes[i] = replace(episode, observations=by_key)
        minari.create_dataset_from_buffers(
            dataset_id,
            episodes,
            env=self.env,
            eval_env=self.env,
            algorithm_name=Path(__file__).stem,
            ref_min_score=facts["random_return"],
            ref_max_score=facts["expert_return"],
        )


def stability(history):
    """How far the score fell below that before fine-tuning, when it was back, where it ended."""
    before, scores = history[0]["score"], [entry["score"] for entry in history]
    worst = int(np.argmin(scores))
    recovered = (e["step"] for e in history[worst:] if e["score"] >= before)
    return {
        "score_before": before,
        "largest_drop": before - scores[worst],
        "recovery_step": next(recovered, None),
        "last_10_mean": float(np.mean(scores[1:][-10:] or scores)),
    }


def suggest(run_dir):
    """What to do next, as far as the scripts for it are here."""
    print(f"What to do next:\n  tensorboard --logdir {run_dir.parent}")
    script = Path(sys.argv[0])
    for name, words in {
        "plot.py": f"{run_dir}",
        "enjoy.py": f"{run_dir}",
        f"finetune_{script.name}": f"--checkpoint {run_dir}",
    }.items():
        if script.with_name(name).exists():
            print(f"  python {script.with_name(name)} {words}")


if __name__ == "__main__":
    args, checkpoint, resuming = parse_args()
    resumed = checkpoint if resuming else None
    if args.capture_video and sys.platform == "linux" and "DISPLAY" not in os.environ:
        os.environ.setdefault("MUJOCO_GL", "egl")  # videos without a screen
    device = torch.device("cuda" if args.cuda and torch.cuda.is_available() else "cpu")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # deterministic matmuls on CUDA
    torch.use_deterministic_algorithms(args.torch_deterministic)
    torch.backends.cuda.matmul.fp32_precision = "tf32" if args.tf32 else "ieee"
    torch.manual_seed(args.seed)

    data, facts, new_env = load_data(args.env_id, args.dataset_path, args.from_scratch)
    envs, env = [new_env() for _ in range(10)], new_env()
    if args.save_dataset:
        env = wrap(recorder := Recorder(env.env.env))  # below the two wrappers of wrap()
    agent = Agent(data[0].shape[1], data[1].shape[1], args)
    if args.target_entropy is None:
        args.target_entropy = -float(data[1].shape[1])
    if checkpoint:
        restore(agent, checkpoint, facts, args)
    fitted = ("normalize_states", "reward_transform")
    if not checkpoint or any(getattr(args, name) != checkpoint["args"][name] for name in fitted):
        agent.fit_statistics(data[0], data[2], args)
    agent.to(device)
    optimizers = make_optimizers(agent, args)
    first = max(0, len(data[0]) - args.offline_transitions)
    most = len(data[0]) - first + args.learning_starts + args.env_steps
    size = min(args.buffer_size, most)
    buffer = ReplayBuffer(size, data[0].shape[1], data[1].shape[1], device)
    buffer.add(*agent.to_tensors(*(column[first:] for column in data)))

    facts["device"] = str(device)
    run_dir, writer = start_run(args, facts, resumed)

    losses, figures, history = {}, {"score": math.nan}, []
    paused, speed = 0.0, 0.0
    # A tensor, for a recorded step to see it change.
    beta = torch.zeros((), device=device).fill_(args.beta_start)
    env.action_space.seed(args.seed)
    observation, _ = env.reset(seed=args.seed)
    if resumed:
        begun, losses, history = resume_run(resumed, agent, optimizers)
        observation = resume_online(resumed, env, buffer)
    else:
        begun = -1
        for _ in range(args.learning_starts):  # K steps without updates
            scratch = args.from_scratch
            action = env.action_space.sample() if scratch else explore(agent, observation, args)
            observation = collect(agent, env, observation, action, buffer, facts)

    def learn():
        batch = buffer.sample(args.batch_size)
        return update(agent, optimizers, batch, beta, args)

    keep_freed_memory()
    if args.compile:  # with eager's random numbers, so that a run does not depend on it
        fast = partial(torch.compile, fullgraph=True, options={"fallback_random": True})
        critic_loss, policy_loss = fast(critic_loss), fast(policy_loss)
    if device.type == "cuda" and args.cudagraphs:
        learn = CudaGraphs(learn)

    logged, stopped = {}, []  # by a signal, which waits until the step is done and saved
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: stopped.append(number))
    started = time.monotonic()
    progress = tqdm(total=args.env_steps, initial=max(0, begun), disable=None)  # on terminals only
    for step in range(begun + 1, args.env_steps + 1):  # step 0 evaluates the agent as it came
        if step > 0:
            action = explore(agent, observation, args)
            observation = collect(agent, env, observation, action, buffer, facts)
            beta.fill_(beta_at(step, args))
            losses |= learn()
            progress.update()

        last = step == args.env_steps
        evaluating = step % args.eval_frequency == 0 or last
        logging = step > 0 and (step % args.log_frequency == 0 or evaluating)
        if logging or stopped:
            values = {f"losses/{key}": loss.item() for key, loss in losses.items()}
            if not all(map(math.isfinite, values.values())):
                advice = "a larger beta or --num-critics, or --independent-targets"
                told = f"{values} not finite, and before {logged or 'nothing'}"
                progress.write(f"step {step:,}: {told}. The paper's way on: {advice}", sys.stderr)
                sys.exit(3)
        if logging:
            speed = (step - begun) / (time.monotonic() - started - paused)
            logged = {"charts/SPS": speed, "charts/beta": beta.item(), **values}
            for key, value in logged.items():
                writer.add_scalar(key, value, step)
            progress.set_postfix(loss=logged["losses/critic"], score=figures["score"])

        if evaluating:
            pause = time.monotonic()
            num_episodes = args.final_eval_episodes if last else args.eval_episodes
            seed = [args.seed, step]
            figures, returns, lengths = evaluate(agent, envs, num_episodes, seed, facts)
            history.append({"step": step, **figures})
            line = {"score_before": history[0]["score"]}  # the dashed line of the paper's figure
            for key, value in (figures | line).items():
                writer.add_scalar(f"charts/{key}", value, step)
            known = [column[: max(1, len(buffer))] for column in buffer.columns[:2]]
            for key, value in uncertainty(agent, *known, args.seed).items():
                writer.add_scalar(f"uncertainty/{key}", value.item(), step)
            if args.capture_video:
                film, folder = new_env(render_mode="rgb_array"), str(run_dir / "videos")
                film = gym.wrappers.RecordVideo(film, folder, name_prefix=f"step-{step}")
                evaluate(agent, [film], 1, seed, facts)
                film.close()
            paused += time.monotonic() - pause
            left = (time.monotonic() - started) / (step - begun) * (args.env_steps - step)
            progress.write(
                f"step {step:,}: score {figures['score']:.1f} +- {figures['score_stderr']:.1f}, "
                f"return {figures['return']:.1f} (worst {figures['return_worst']:.1f}), "
                f"beta {beta:.3g}, {timedelta(seconds=int(left))} left"
            )

        if evaluating or stopped:
            state = run_state(agent, optimizers, step, losses, history, args, facts)
            known = env_state(env)
            state |= {"buffer": [column[: len(buffer)] for column in buffer.columns]}
            state["beta"] = beta_at(max(1, step), args)
            state |= {"added": buffer.added, "observation": torch.tensor(observation), "env": known}
            save_checkpoint(state, run_dir / "checkpoint.pt")
        if stopped and not last:
            progress.close()
            if args.save_dataset:
                recorder.save(args.save_dataset, facts)
                sys.exit(128 + stopped[0])
            print(f"stopped after step {step}; to go on: python {sys.argv[0]} --resume {run_dir}")
            sys.exit(128 + stopped[0])

    progress.close()
    if args.save_dataset:
        recorder.save(args.save_dataset, facts)
    writer.close()
    packages = ("torch", "gymnasium", "minari", "mujoco", "numpy")
    result = {"args": vars(args), "facts": facts, **figures, "steps_per_second": speed}
    result |= {"versions": {package: version(package) for package in packages}, "history": history}
    result |= {"returns": returns, "lengths": lengths, "stability": stability(history)}
    (run_dir / "result.json").write_text(json.dumps(result, indent=2))
    print(f"score {figures['score']:.1f} over {num_episodes} episodes, all in {run_dir}")
    if "data_score" in facts:
        print(f"the data's own score is {facts['data_score']:.1f}")
    suggest(run_dir)
