"""EDAC: offline reinforcement learning with a diversified critic ensemble.

An et al., "Uncertainty-based offline reinforcement learning with diversified Q-ensemble". SAC-N,
whose actor maximizes the minimum of N critics, with a term that makes the gradients of the critics
differ. They then disagree more about actions outside the data, and fewer critics suffice. Not as in
the original: critic_init, normalized observations, one learning rate (there 3e-5 for pen-human).

    critic loss   mean (Q_i(s, a) - y)^2 + eta / N D, with one of two targets and a' ~ pi(s')
                    y   = r + gamma (1 - d) (min_i Q'_i(s', a') - alpha log pi(a'|s'))   (1) shared
                    y_i = r + gamma (1 - d) (Q'_i(s', a') - alpha log pi(a'|s'))    (2) independent
                    D   = mean sum_i!=j cos(grad_a Q_i(s, a), grad_a Q_j(s, a)) / (N - 1)       (3)
    actor loss    - mean Q                                              (4)
                  with Q = min_i Q_i(s, a_p) - alpha log pi(a_p|s),  a_p ~ pi(s)
    alpha loss    - log alpha mean (log pi(a_p|s) + H),  H = -action_dim        (5)

Usage:
    python baselines/edac.py                         (bundled dataset, a few minutes on a CPU)
    python baselines/edac.py --env-id hopper-medium-expert-v2
    python baselines/edac.py --env-id my/robot-v0 --eta 5 --num-critics 20  (any Minari dataset)
"""

import argparse
import copy
import ctypes
import json
import math
import os
import re
import signal
import sys
import time
from collections import namedtuple
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Literal

import gymnasium as gym
import minari
import numpy as np
import torch
import torch.nn.functional as F
import tyro
from torch import nn
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

sys.path.append(str(Path(__file__).resolve().parent.parent))  # where d4rl_tasks.py is

try:
    import d4rl_tasks  # D4RL datasets, and the mazes of Minari
except ModuleNotFoundError:
    d4rl_tasks = None  # this script was copied alone: it trains on all other Minari datasets

ALGORITHM = "edac"  # in checkpoints and names of runs, also if this file is renamed
CHECKPOINT_FORMAT = 3  # a checkpoint of another format is refused
DEFAULT_REFERENCES = {"ref_min_score": 0.0, "ref_max_score": 100.0}  # the score is then the return
# Entry points of environments that may be executed: classes, and OGBench's function for its mazes
TRUSTED = r"(gymnasium|gymnasium_robotics|d4rl_tasks|ogbench)(\.\w+)*:([A-Z]\w*|make_maze_env)"


# The defaults are the publication's. Those that depend on the task are in TASK_DEFAULTS.
@dataclass
class Args:
    # Experiment
    env_id: str = "tiny-maze2d-umaze-v0"  # D4RL dataset name, or Minari ids separated by commas
    seed: int = 1  # random seed for networks, batches and evaluation
    gradient_steps: int = 3_000_000  # number of critic updates
    run_name: str | None = None  # name of the run directory (default: ENV__ALGORITHM__SEED__TIME)
    runs_dir: str = "runs"  # directory for all runs
    resume: str | None = None  # run directory or checkpoint.pt of the run to resume
    trust_env: bool = False  # execute environments of any package that a Minari dataset names
    cuda: bool = True  # use the GPU if there is one
    cudagraphs: bool = True  # capture the train step in a CUDA graph
    compile: bool = False  # compile the losses with torch.compile
    # precision of float32 matmuls; high: TF32 on a GPU, medium: bfloat16 on CPUs that have it
    matmul_precision: Literal["highest", "high", "medium"] = "highest"
    track: bool = False  # log to W&B (pip install wandb; set WANDB_PROJECT and WANDB_ENTITY)
    # Algorithm
    num_critics: int = 10  # N, size of the critic ensemble
    eta: float = 1.0  # weight of the diversity term (by dataset)
    alpha_start: float = 1.0  # initial entropy coefficient alpha
    independent_targets: bool = False  # use a separate target per critic
    critic_init: Literal["paper", "torch"] = "paper"  # initialization of the critics
    # raw: r, antmaze: 4 (r - 0.5), standardize: (r - mean) / std (by task)
    reward_transform: Literal["raw", "antmaze", "standardize"] = "raw"
    batch_size: int = 256  # batch size
    learning_rate: float = 3e-4  # learning rate of all optimizers
    gamma: float = 0.99  # discount factor
    tau: float = 0.005  # Polyak coefficient of the target networks
    # Evaluation and logging
    eval_frequency: int = 10_000  # steps between evaluations
    eval_episodes: int = 10  # episodes per evaluation (paper: 10 or 100, by task); 0: no evaluation
    log_frequency: int = 1_000  # steps between log entries


# Hyperparameters by task, the same for all datasets of a task.
# N and eta are those of CORL's configs, eta in part by dataset; the publication has no mazes.
ANTMAZE = dict(reward_transform="antmaze", eval_episodes=100)
ADROIT = dict(reward_transform="standardize", eval_episodes=100)
TINY = dict(gradient_steps=8_000, batch_size=64, gamma=0.98)
TINY |= dict(eval_frequency=2_000, eval_episodes=20)
TASK_DEFAULTS = {
    "halfcheetah-medium-expert": dict(eta=5.0),
    "hopper": dict(num_critics=50),
    "walker2d-medium-expert": dict(eta=5.0),
    "maze2d": dict(eta=0.1, eval_episodes=100),
    "antmaze": ANTMAZE,
    "pen-human": dict(num_critics=20, eta=1000.0, **ADROIT),
    "pen": dict(num_critics=20, eta=10.0, **ADROIT),
    **{task: dict(num_critics=50, eta=200.0, **ADROIT) for task in ("hammer", "door", "relocate")},
    "tiny-maze2d-umaze": dict(eta=0.1, alpha_start=0.05, tau=0.01, **TINY),
}


# A dataset or a batch. dones are terminations: a time limit is not a done.
Transitions = namedtuple("Transitions", "obs actions rewards next_obs dones")


class CriticEnsemble(nn.Module):
    """N critics as one batched matmul per layer: (B, obs_dim), (B, action_dim) -> (N, B)."""

    def __init__(self, num_critics, obs_dim, action_dim, init):
        super().__init__()
        self.weights, self.biases = nn.ParameterList(), nn.ParameterList()
        for fan_in, fan_out in pairwise([obs_dim + action_dim, 256, 256, 256, 1]):
            # "paper": the authors' Kaiming rule reads `out` of (N, in, out) as the fan-in. The
            # output layer is then U(-1, 1) instead of U(-1/16, 1/16), which spreads the ensemble.
            bound = 1 / math.sqrt(fan_out if init == "paper" else fan_in)
            self.weights.append(torch.empty(num_critics, fan_in, fan_out).uniform_(-bound, bound))
            self.biases.append(torch.empty(num_critics, 1, fan_out).uniform_(-bound, bound))

    def forward(self, obs, actions):
        x = torch.cat([obs, actions], dim=-1).expand(len(self.weights[0]), -1, -1)  # (N, B, in)
        for weight, bias in zip(self.weights[:-1], self.biases[:-1], strict=True):
            x = torch.baddbmm(bias, x, weight).relu_()
        return torch.baddbmm(self.biases[-1], x, self.weights[-1]).squeeze(-1)


class Actor(nn.Module):
    """Gaussian policy squashed by tanh. Called directly, it returns the mode, in [-1, 1]."""

    def __init__(self, obs_dim, action_dim):
        super().__init__()
        self.hidden = nn.Sequential(
            nn.Linear(obs_dim, 256),
            nn.ReLU(),
            nn.Linear(256, 256),
            nn.ReLU(),
            nn.Linear(256, 256),
            nn.ReLU(),
        )
        self.mean = nn.Linear(256, action_dim)
        self.log_std = nn.Linear(256, action_dim)

    def forward(self, obs):
        return torch.tanh(self.mean(self.hidden(obs)))

    def gaussian(self, obs):
        hidden = self.hidden(obs)
        return self.mean(hidden), self.log_std(hidden).clamp(-20, 2)

    def sample(self, obs):
        """Actions tanh(u) with u ~ N(mean, std), their log-probabilities, mean and log std."""
        mean, log_std = self.gaussian(obs)
        u = mean + log_std.exp() * torch.randn_like(mean)
        return torch.tanh(u), self.log_prob(u, mean, log_std), mean, log_std

    def log_prob(self, u, mean, log_std):
        """log pi(tanh(u)). log(1 - tanh(u)^2) is written in a form that is finite for all u."""
        normal = -0.5 * ((u - mean) / log_std.exp()) ** 2 - log_std - 0.5 * math.log(2 * math.pi)
        return (normal - 2 * (math.log(2) - u - F.softplus(-2 * u))).sum(dim=-1)


class Agent(nn.Module):
    """All networks and the normalization statistics, in one state_dict."""

    def __init__(self, obs_dim, action_dim, args):
        super().__init__()
        self.register_buffer("obs_mean", torch.zeros(obs_dim))
        self.register_buffer("obs_std", torch.ones(obs_dim))
        self.register_buffer("reward_shift", torch.zeros(()))
        self.register_buffer("reward_scale", torch.ones(()))
        self.critics = CriticEnsemble(args.num_critics, obs_dim, action_dim, args.critic_init)
        self.critics_target = copy.deepcopy(self.critics).requires_grad_(False)
        self.actor = Actor(obs_dim, action_dim)
        self.log_alpha = nn.Parameter(torch.tensor(max(args.alpha_start, 1e-8)).log())

    def to_tensor(self, array):
        return torch.as_tensor(array, dtype=torch.float32, device=self.obs_mean.device)

    def normalize(self, obs):
        return (self.to_tensor(obs) - self.obs_mean) / self.obs_std

    def preprocess(self, transitions):
        """Moves to the device, normalizes the observations and transforms the rewards."""
        obs, actions, rewards, next_obs, dones = map(self.to_tensor, transitions)
        rewards = (rewards - self.reward_shift) * self.reward_scale
        return Transitions(self.normalize(obs), actions, rewards, self.normalize(next_obs), dones)

    @torch.no_grad()
    def act(self, obs):
        """Deterministic actions for evaluation, in [-1, 1]."""
        return self.actor(self.normalize(obs)).cpu().numpy()


def critic_loss(agent, batch, alpha, args):
    with torch.no_grad():
        next_actions, next_log_pi, _, _ = agent.actor.sample(batch.next_obs)
        next_q = agent.critics_target(batch.next_obs, next_actions)
        if not args.independent_targets:
            next_q = next_q.amin(dim=0, keepdim=True)
        next_q = next_q - alpha * next_log_pi
        # (1) with shape (1, B), or (2) with shape (N, B)
        targets = batch.rewards + args.gamma * (1 - batch.dones) * next_q
    # grad_a Q_i(s, a) for all critics, by torch.func: --compile cannot trace torch.autograd.grad
    obs, actions = (x.expand(args.num_critics, -1, -1) for x in (batch.obs, batch.actions))
    q, pullback = torch.func.vjp(partial(agent.critics, obs), actions)
    (gradients,) = pullback(torch.ones_like(q))  # (N, B, action_dim)
    unit = gradients / (gradients.norm(dim=-1, keepdim=True) + 1e-10)
    cosines = (unit.sum(dim=0) ** 2).sum(dim=-1) - (unit**2).sum(dim=(0, 2))  # of all pairs i != j
    diversity = cosines.mean() / max(1, len(q) - 1)  # (3)
    bellman = F.mse_loss(q, targets.expand_as(q))
    return bellman + args.eta / len(q) * diversity, q.detach(), diversity


def actor_loss(agent, batch, alpha):
    actions, log_pi, _, _ = agent.actor.sample(batch.obs)
    q = agent.critics(batch.obs, actions).amin(dim=0)  # the minimum, also with independent targets
    q = q - alpha * log_pi
    return -q.mean(), log_pi.detach()  # (4)


def alpha_loss(agent, log_pi, target_entropy):
    return -(agent.log_alpha * (log_pi + target_entropy)).mean()  # (5)


def optimizer_step(optimizer, loss):
    optimizer.zero_grad()
    loss.backward(inputs=optimizer.param_groups[0]["params"])  # no gradients for other networks
    optimizer.step()


@torch.no_grad()
def polyak_update(target, network, tau):
    for target_parameter, parameter in zip(target.parameters(), network.parameters(), strict=True):
        target_parameter.lerp_(parameter, tau)


def update(agent, optimizers, batch, args):
    """One gradient step. The metrics stay on the device: there is no host synchronization."""
    alpha = agent.log_alpha.detach().exp()  # the same alpha in both losses
    loss, q, diversity = critic_loss(agent, batch, alpha, args)
    optimizer_step(optimizers["critics"], loss)
    metrics = {"losses/critic_loss": loss, "losses/q_values": q.mean()}
    metrics["losses/q_min"] = q.amin(dim=0).mean()
    metrics["losses/q_std"] = q.std(dim=0, correction=min(1, len(q) - 1)).mean()  # N = 1: 0
    loss, log_pi = actor_loss(agent, batch, alpha)
    optimizer_step(optimizers["actor"], loss)
    metrics |= {"losses/actor_loss": loss, "losses/diversity": diversity}
    loss = alpha_loss(agent, log_pi, target_entropy=-batch.actions.shape[1])
    optimizer_step(optimizers["alpha"], loss)
    metrics |= {"losses/alpha_loss": loss, "charts/alpha": alpha, "charts/entropy": -log_pi.mean()}
    polyak_update(agent.critics_target, agent.critics, args.tau)
    return {name: value.detach() for name, value in metrics.items()}


# --- Data and evaluation (at a first reading, skip to the training loop at the end) ---


def load_data(env_id, trust_env=False):
    """Returns transitions, metadata, and a function that makes an environment, or None."""
    try:
        if "/" in env_id:
            data, metadata, make_env = load_minari(env_id, trust_env)
        elif d4rl_tasks is None:
            raise ValueError("D4RL datasets need d4rl_tasks.py next to this script")
        elif path := d4rl_tasks.find(env_id):
            data, metadata = d4rl_tasks.load(env_id, path)
            data = data.values()
            make_env = partial(gym.make, gym.spec(env_id))  # by its spec, without a warning
        else:  # no download works (find has warned), and Minari has a similar dataset
            data, metadata, make_env = load_minari(d4rl_tasks.TASKS[env_id].minari, trust_env)
    except Exception as error:  # of Minari, HDF5 and the download clients
        sys.exit(f"{env_id}: cannot be loaded ({error!r:.500})")
    data = Transitions(*(np.asarray(column, dtype=np.float32) for column in data))
    if len(set(map(len, data))) > 1 or not all(np.isfinite(column).all() for column in data):
        sys.exit(f"{env_id}: the dataset has columns of different lengths or non-finite values")
    data = data._replace(actions=data.actions.clip(-1, 1))
    if make_env is None:
        return data, metadata, None
    env = wrap_env(make_env())
    if env.observation_space.shape != data.obs.shape[1:]:
        sys.exit(f"{env_id}: {env.spec.id} has other observations, {env.observation_space.shape}")
    return data, metadata, lambda **kwargs: wrap_env(make_env(**kwargs))


def wrap_env(env):
    """Flat observations, and actions in [-1, 1]."""
    env = gym.wrappers.FlattenObservation(env)
    return gym.wrappers.RescaleAction(env, np.float32(-1), np.float32(1))


def check_spaces(obs_space, action_space):
    """Raises ValueError if the agent cannot have them. Returns their metadata."""
    box = gym.spaces.Box
    keys = list(obs_space) if isinstance(obs_space, gym.spaces.Dict) else []
    for part in [obs_space[key] for key in keys] or [obs_space]:
        if not isinstance(part, box) or part.dtype == np.uint8 or len(part.shape) > 2:
            raise ValueError(f"observations must be vectors (Box, or a Dict of Box), not {part}")
    is_vector = isinstance(action_space, box) and len(action_space.shape) == 1
    if not is_vector or action_space.dtype.kind != "f" or not action_space.is_bounded():
        raise ValueError(f"actions must be a vector of bounded real numbers, not {action_space}")
    if not (action_space.low < action_space.high).all():
        raise ValueError(f"the lower bounds of actions must be below the upper: {action_space}")
    bounds = {"action_low": action_space.low.tolist(), "action_high": action_space.high.tolist()}
    return {**bounds, "observation_keys": keys}


def load_minari(ids, trust_env):
    """Loads Minari datasets of one environment. Downloads those that are not found locally."""
    datasets = [minari.load_dataset(dataset_id, download=True) for dataset_id in ids.split(",")]
    env_spec, obs_space = datasets[0].env_spec, datasets[0].observation_space
    for dataset in datasets:
        check_spaces(dataset.observation_space, dataset.action_space)
        if (dataset.env_spec, dataset.observation_space) != (env_spec, obs_space):
            raise ValueError("datasets of different environments")

    stored = datasets[0].storage.metadata
    metadata = {"dataset": ids, "source": "minari", "comparable_with_paper": False}
    metadata |= {key: stored.get(key, default) for key, default in DEFAULT_REFERENCES.items()}
    metadata["environment"] = env_spec.id if env_spec else None
    env_kwargs = {"eval_env": True}
    if env_spec is not None:
        env_kwargs["max_episode_steps"] = int(env_spec.max_episode_steps or 1000)
        if d4rl_tasks is not None:  # for D4RL's tasks: its score references, the goals of mazes
            more_metadata, more_kwargs = d4rl_tasks.minari_task(ids, env_spec)
            metadata, env_kwargs = metadata | more_metadata, env_kwargs | more_kwargs
        elif env_spec.id.startswith(("PointMaze_", "AntMaze_")):
            raise ValueError("Minari mazes need d4rl_tasks.py next to this script")
    if not metadata["ref_min_score"] < metadata["ref_max_score"]:
        raise ValueError("ref_min_score must be smaller than ref_max_score")
    try:
        # A dataset can name any code as its environment, also in wrappers: search the whole spec.
        specs = [json.loads(stored.get(key) or "{}") for key in ("env_spec", "eval_env_spec")]
        for entry_point in re.findall(r'"entry_point": "([^"]*)', json.dumps(specs)):
            if not trust_env and not re.fullmatch(TRUSTED, entry_point):
                raise ValueError(f"--trust-env executes {entry_point}")
        make_env = partial(datasets[0].recover_environment, **env_kwargs)
        obs_space = make_env().observation_space  # a dict has the order of the environment's keys
    except Exception as error:  # environments raise many kinds of exceptions
        print(f"{ids}: no evaluation, the environment cannot be made ({error})", file=sys.stderr)
        make_env = None

    episodes = []
    for dataset in datasets:
        low, high = dataset.action_space.low, dataset.action_space.high
        for episode in tqdm(dataset, "Loading", disable=None):
            obs = episode.observations
            if isinstance(obs, dict):
                obs = np.hstack([obs[key].reshape(len(obs[key]), -1) for key in obs_space])
            obs = obs.reshape(len(obs), -1)
            actions = 2 * (episode.actions - low) / (high - low) - 1
            dones = episode.terminations  # not truncations: a time limit is not a done
            if metadata.get("goal_is_terminal"):
                dones = episode.rewards > 0
            episodes.append(Transitions(obs[:-1], actions, episode.rewards, obs[1:], dones))
    data = Transitions(*map(np.concatenate, zip(*episodes, strict=True)))
    metadata |= {"transitions": len(data.obs), "episodes": len(episodes)}
    metadata["mean_return"] = float(np.mean([episode.rewards.sum() for episode in episodes]))
    metadata |= check_spaces(obs_space, datasets[0].action_space)
    return data, metadata, make_env


def set_statistics(agent, dataset, args):
    """Normalization statistics of the dataset. float64 avoids accumulation error."""
    agent.obs_mean.copy_(torch.as_tensor(dataset.obs.mean(axis=0, dtype=np.float64)))
    agent.obs_std.copy_(torch.as_tensor(dataset.obs.std(axis=0, dtype=np.float64) + 1e-3))
    if args.reward_transform == "antmaze":
        agent.reward_shift.fill_(0.5)
        agent.reward_scale.fill_(4.0)
    elif args.reward_transform == "standardize":
        agent.reward_shift.fill_(dataset.rewards.mean(dtype=np.float64))
        agent.reward_scale.fill_(1 / (dataset.rewards.std(dtype=np.float64) or 1.0))


def evaluate(agent, envs, num_episodes, seed, metadata):
    """Plays num_episodes episodes, each with its own seed, len(envs) at a time."""
    if not envs:
        return {}, []
    seeds = np.random.SeedSequence(seed).generate_state(num_episodes).tolist()
    returns, lengths = np.zeros(num_episodes), np.zeros(num_episodes)
    for first in range(0, num_episodes, len(envs)):
        group = list(zip(range(first, num_episodes), envs, strict=False))
        obs = np.stack([env.reset(seed=seeds[episode])[0] for episode, env in group])
        running = np.ones(len(group), dtype=bool)
        while running.any():
            actions = agent.act(obs)
            for i in np.flatnonzero(running):
                episode, env = group[i]
                obs[i], reward, terminated, truncated, _ = env.step(actions[i])
                returns[episode] += reward
                lengths[episode] += 1
                running[i] = not (terminated or truncated)
    low, high = metadata["ref_min_score"], metadata["ref_max_score"]
    scores = 100 * (returns - low) / (high - low)
    stderr = scores.std() / math.sqrt(max(1, num_episodes - 1))
    metrics = {"score": scores.mean(), "score_stderr": stderr, "score_worst": scores.min()}
    metrics |= {"eval_return": returns.mean(), "eval_length": lengths.mean()}
    return {name: float(value) for name, value in metrics.items()}, returns.tolist()


@torch.no_grad()
def ensemble_statistics(agent, dataset, seed):
    """Disagreement of the critics about data, policy and random actions (paper, section 5.3)."""
    generator = torch.Generator().manual_seed(seed)  # not the training random stream
    index = torch.randint(len(dataset.obs), (1024,), generator=generator)  # a sample suffices
    obs, data_actions = (x[index.to(x.device)] for x in (dataset.obs, dataset.actions))
    random_actions = torch.rand(data_actions.shape, generator=generator).to(obs.device) * 2 - 1
    kinds = {"data": data_actions, "policy": agent.actor(obs), "random": random_actions}
    statistics = {}
    for kind, actions in kinds.items():
        q = agent.critics(obs, actions)
        statistics[f"{kind}_std"] = q.std(dim=0, correction=min(1, len(q) - 1)).mean()
        statistics[f"{kind}_clip_penalty"] = (q.mean(dim=0) - q.amin(dim=0)).mean()
        statistics[f"{kind}_min"] = q.amin(dim=0).mean()
    return {f"uncertainty/{name}": value.item() for name, value in statistics.items()}


# --- Arguments, checkpoints, CUDA graphs ---


def task_defaults(env_id):
    """Defaults of hopper for hopper-medium-v2 and mujoco/hopper/medium-v0; {} for other tasks."""
    name = re.sub(r"^(?:D4RL|mujoco)/(\w+)/", r"\1-", env_id).replace("pointmaze-", "maze2d-")
    if "/" in name.split(",")[0] or "-dense-" in name:  # another namespace, or another reward
        return {}
    return next((TASK_DEFAULTS[task] for task in TASK_DEFAULTS if name.startswith(f"{task}-")), {})


def parse_args():
    """Looks ahead for --env-id and --resume, so that --help shows the defaults of this run."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--env-id", "--env_id", default=Args.env_id)
    parser.add_argument("--resume")
    given, _ = parser.parse_known_args()
    checkpoint = None
    if given.resume is not None:
        checkpoint = load_checkpoint(given.resume, ALGORITHM)
        defaults = checkpoint["args"]
    else:
        defaults = {"env_id": given.env_id, **task_defaults(given.env_id)}
    args = tyro.cli(Args, default=Args(**defaults), description=__doc__)
    may_change = {"resume", "gradient_steps", "cuda", "cudagraphs", "compile", "matmul_precision"}
    may_be_zero = {"seed", "bc_inflation_steps", "eval_episodes"}
    for name, value in vars(args).items():
        low = 0 if isinstance(value, float) or name in may_be_zero else 1
        high = 1 if name in ("gamma", "tau") else 2**32
        if type(value) in (int, float) and not low <= value <= high:  # not bool; nan fails
            sys.exit(f"{name} must be from {low} to {high}, not {value}")
        if args.resume and value != defaults[name] and name not in may_change:
            sys.exit(f"{name} cannot change from {defaults[name]} to {value} when a run is resumed")
    if args.resume and args.gradient_steps < checkpoint["step"]:
        sys.exit(f"{args.resume}: already at step {checkpoint['step']}")
    return args, checkpoint


def load_checkpoint(path, algorithm):
    """Loads a checkpoint, also by its run directory. No code in the file is executed."""
    path = Path(path, "checkpoint.pt") if Path(path).is_dir() else Path(path)
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
        if checkpoint.get("format") != CHECKPOINT_FORMAT:
            raise ValueError("written by another version of this project")
        if checkpoint["algorithm"] != algorithm:
            raise ValueError(f"written by {checkpoint['algorithm']}.py")
    except Exception as error:  # torch.load raises many kinds of exceptions
        sys.exit(f"{path}: not a checkpoint of {algorithm}.py ({error!r:.100})")
    return checkpoint


def save_checkpoint(path, agent, optimizers, state):
    """Saves all that an exact resume needs. The old file stays until the new one is complete."""
    state = state | {"algorithm": ALGORITHM, "format": CHECKPOINT_FORMAT}
    state["agent"] = agent.state_dict()
    # Only the state: param_groups has capturable, which depends on the device.
    state["optimizers"] = {name: opt.state_dict()["state"] for name, opt in optimizers.items()}
    state["rng_state"] = torch.get_rng_state()
    state["cuda_rng_state"] = torch.cuda.get_rng_state() if agent.obs_mean.is_cuda else None
    temporary = path.with_suffix(".tmp")
    try:
        torch.save(state, temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)  # an incomplete one, if the disk is full


def restore_checkpoint(checkpoint, agent, optimizers):
    agent.load_state_dict(checkpoint["agent"])
    for name, opt in optimizers.items():
        opt.load_state_dict(opt.state_dict() | {"state": checkpoint["optimizers"][name]})
    torch.set_rng_state(checkpoint["rng_state"])
    if agent.obs_mean.is_cuda and checkpoint["cuda_rng_state"] is not None:
        torch.cuda.set_rng_state(checkpoint["cuda_rng_state"])


def write_result(run_dir, state, status, **more):
    """Writes result.json for the tools: status (running, finished, diverged) and all scores."""
    last = state["history"][-1] if state["history"] else {}
    result = {"algorithm": ALGORITHM, "status": status, **more, **last, **state}
    (run_dir / "result.tmp").write_text(json.dumps(result, indent=2))
    os.replace(run_dir / "result.tmp", run_dir / "result.json")


class CudaGraph:
    """Calls a function three times to warm up, then captures it once and replays the graph."""

    def __init__(self, function):
        self.function, self.calls = function, 0

    def __call__(self):
        self.calls += 1
        if self.calls <= 3:
            return self.function()
        if self.calls == 4:
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.outputs = self.function()  # captured, not run: the replay below runs it
        self.graph.replay()
        return self.outputs


if __name__ == "__main__":
    args, checkpoint = parse_args()
    if args.track:
        try:
            import wandb
        except ModuleNotFoundError:
            sys.exit("--track needs wandb: pip install wandb")
    device = torch.device("cuda" if args.cuda and torch.cuda.is_available() else "cpu")
    on_gpu = device.type == "cuda"
    use_graphs = on_gpu and args.cudagraphs
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision(args.matmul_precision)
    torch.use_deterministic_algorithms(True)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # deterministic matmuls on a GPU
    if sys.platform == "linux":  # let glibc keep freed memory: 6 % faster on a CPU
        for option in (-1, -3):  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD
            ctypes.CDLL("libc.so.6").mallopt(option, 2**30)
    if on_gpu:
        torch.cuda.set_stream(torch.cuda.Stream())  # CUDA graphs: no warm-up on the default stream

    # --- Dataset, agent, optimizers ---
    dataset, metadata, make_env = load_data(args.env_id, args.trust_env)
    envs = [make_env() for _ in range(10)] if make_env and args.eval_episodes else []
    agent = Agent(dataset.obs.shape[1], dataset.actions.shape[1], args)
    set_statistics(agent, dataset, args)
    agent.to(device)
    dataset = agent.preprocess(dataset)
    adam = partial(torch.optim.Adam, lr=args.learning_rate, fused=True, capturable=use_graphs)
    optimizers = {"critics": adam(agent.critics.parameters())}
    optimizers["actor"] = adam(agent.actor.parameters())
    optimizers["alpha"] = adam([agent.log_alpha])
    state = {"step": 0, "args": vars(args), "metadata": metadata, "history": [], "returns": []}
    for key in ("dataset", "source", "transitions", "environment"):
        if checkpoint and metadata[key] != checkpoint["metadata"][key]:
            sys.exit(f"{key} is {metadata[key]}, in the checkpoint {checkpoint['metadata'][key]}")
    if args.resume:
        restore_checkpoint(checkpoint, agent, optimizers)
        for key in ("step", "history", "returns", "steps_per_second"):
            state[key] = checkpoint[key]
    start_step = state["step"]

    # --- Run directory and logging ---
    run_name = f"{re.sub('[/,]', '-', args.env_id)}__{ALGORITHM}__{args.seed}"
    run_name = args.run_name or f"{run_name}__{time.strftime('%Y%m%d-%H%M%S')}"
    run_dir = Path(args.runs_dir, run_name)
    if args.resume:
        run_dir = Path(args.resume) if Path(args.resume).is_dir() else Path(args.resume).parent
    try:
        run_dir.mkdir(parents=True, exist_ok=bool(args.resume))
    except OSError as error:
        sys.exit(f"{error}. If it is a run: --resume {run_dir}, or choose another --run-name")
    lock = open(run_dir / "lock", "w")  # noqa: SIM115 (locked until the process ends)
    try:
        import fcntl

        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except ModuleNotFoundError:
        pass  # on Windows, nothing keeps a second process from resuming the same run
    except BlockingIOError:
        sys.exit(f"{run_dir}: another process is running it")
    if args.track:
        wandb.init(config=vars(args), name=run_dir.name, sync_tensorboard=True)
    writer = SummaryWriter(run_dir, purge_step=start_step + 1)
    config = vars(args) | metadata | {"device": str(device), "run": str(run_dir)}
    rate = args.tau * (1 - args.gamma)  # 1 / time constant of the values
    config["convergence"] = f"{1 - math.exp(-rate * args.gradient_steps):.0%} at the last step"
    print(*(f"{key}: {value}" for key, value in config.items()), sep="\n")
    rows = "\n".join(f"|{key}|{value}|" for key, value in config.items())
    writer.add_text("hyperparameters", f"|param|value|\n|-|-|\n{rows}")

    # --- Train step ---
    def train_step():
        index = torch.randint(len(dataset.obs), (args.batch_size,), device=device)
        batch = Transitions(*(column[index] for column in dataset))
        return update(agent, optimizers, batch, args)

    if args.compile:  # update() then calls the compiled losses; same random numbers as eager
        compile_loss = partial(torch.compile, fullgraph=True, options={"fallback_random": True})
        critic_loss, actor_loss = compile_loss(critic_loss), compile_loss(actor_loss)
    if use_graphs:
        train_step = CudaGraph(train_step)

    # --- Training loop ---
    signals = []  # on one of these signals, the loop finishes its step, saves and stops
    for name in {"SIGINT", "SIGTERM", "SIGHUP"} & set(dir(signal)):  # Windows: no SIGHUP
        if signal.getsignal(getattr(signal, name)) != signal.SIG_IGN:  # nohup ignores SIGHUP
            signal.signal(getattr(signal, name), lambda signum, _: signals.append(signum))
    start_time = time.monotonic()
    for step in tqdm(range(start_step + 1, args.gradient_steps + 1), disable=None):
        metrics = train_step()

        evaluation_due = step % args.eval_frequency == 0 or step == args.gradient_steps
        stopping = bool(signals)  # read once: a signal that comes later stops the next step
        if step % args.log_frequency == 0 or evaluation_due or stopping:
            scalars = {name: value.item() for name, value in metrics.items()}
            sps = (step - start_step) / (time.monotonic() - start_time)
            scalars["charts/SPS"] = sps
            state |= {"step": step, "steps_per_second": sps}
            bad = [name for name, value in scalars.items() if not math.isfinite(value)]
            if not all(weight.isfinite().all() for weight in agent.parameters()):
                bad.append("weights")
            if bad:
                message = f"step {step}: {', '.join(bad)} not finite"
                write_result(run_dir, state, "diverged", message=message)
                print(message, file=sys.stderr)
                sys.exit(3)
            if evaluation_due:
                eval_seed = [args.seed, step]  # not the training random stream
                scores, returns = evaluate(agent, envs, args.eval_episodes, eval_seed, metadata)
                state["returns"] = returns
                state["history"].append({"step": step, **scores})
                scalars |= {f"charts/{name}": value for name, value in scores.items()}
                scalars |= ensemble_statistics(agent, dataset, args.seed)
            for name, value in scalars.items():
                writer.add_scalar(name, value, step)

        if evaluation_due or stopping:
            save_checkpoint(run_dir / "checkpoint.pt", agent, optimizers, state)
            write_result(run_dir, state, "running")
        if evaluation_due:  # print after saving: it fails if nobody reads the output any more
            score = "score {score:.1f} +/- {score_stderr:.1f}" if scores else "no score"
            tqdm.write(f"step {step:,}: {score.format(**scores)}, {sps:.0f} steps/s")
        if stopping and step < args.gradient_steps:
            print(f'stopped at step {step}, resume: python "{sys.argv[0]}" --resume "{run_dir}"')
            sys.exit(128 + signals[0])

    writer.close()
    write_result(run_dir, state, "finished")  # also if a finished run is resumed
    if envs:
        print(f"results in {run_dir}")
    else:
        print(f'results in {run_dir}, estimate its return: python -m tools.fqe "{run_dir}"')
