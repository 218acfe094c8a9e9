"""TD3-BC-N online: fine-tunes an agent of td3_bc_n.py in its environment.

Beeson & Montana, "Balancing policy constraint and ensemble size in uncertainty-based offline
reinforcement learning". All networks and target networks come from the offline checkpoint, and the
replay buffer starts with the last transitions of the dataset. After learning_starts steps without
updates, each environment step is followed by one update. The weight of behavioural cloning (BC)
decays exponentially, so that the policy leaves the data gradually.

    action        a = clip(pi(s) + N(0, exploration_noise), -1, 1)
    BC weight     beta <- max(beta_end, kappa beta) after each update,
                  kappa = exp(log(beta_end / beta_start) / beta_decay_steps)
    next action   a' = clip(pi'(s') + clip(N(0, policy_noise), -noise_clip, noise_clip), -1, 1)
    critic loss   mean (Q_i(s, a) - y)^2, with one of two targets
                      y   = r + gamma (1 - d) min_i Q'_i(s', a')        (1) shared
                      y_i = r + gamma (1 - d) Q'_i(s', a')              (2) independent
    actor loss    - mean Q / mean|Q| + beta mean (pi(s) - a)^2          (3)
                  with Q = min_i Q_i(s, pi(s))

Usage:
    python finetune_td3_bc_n.py --checkpoint runs/RUN
    python finetune_td3_bc_n.py --checkpoint runs/RUN --beta-end 0.01 --env-steps 100000
    python finetune_td3_bc_n.py --env-id Hopper-v5 --num-critics 2            (TD3 from scratch)
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
from itertools import chain, pairwise
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

try:
    import d4rl_tasks  # D4RL datasets, and the mazes of Minari
except ModuleNotFoundError:
    d4rl_tasks = None  # this script was copied alone: it trains on all other Minari datasets


@dataclass
class Args:
    # Experiment
    checkpoint: str | None = None  # offline run to fine-tune: run directory or checkpoint.pt
    env_id: str = ""  # environment to train from scratch (with --checkpoint: its dataset)
    seed: int = 1  # random seed for networks, batches and evaluation
    env_steps: int = 250_000  # number of environment steps with updates (paper: 250000)
    learning_starts: int = 2_500  # number of steps before the first update (paper: 2500)
    offline_transitions: int = 2_500  # last dataset transitions in the buffer (paper: 2500)
    buffer_size: int = 1_000_000  # capacity of the replay buffer
    run_name: str | None = None  # name of the run directory (default: ENV__SCRIPT__SEED__TIME)
    runs_dir: str = "runs"  # directory for all runs
    resume: str | None = None  # run directory or checkpoint.pt of the run to resume
    cuda: bool = True  # use the GPU if there is one
    cudagraphs: bool = True  # capture the train step in a CUDA graph
    compile: bool = False  # compile the losses with torch.compile
    matmul_precision: Literal["highest", "high", "medium"] = "highest"  # high: TF32 on a GPU
    track: bool = False  # log to W&B (pip install wandb; set WANDB_PROJECT and WANDB_ENTITY)
    # Algorithm
    num_critics: int = 10  # N, size of the critic ensemble (paper: 10)
    beta_start: float = 0.0  # initial weight of the BC term (paper: the offline beta)
    beta_end: float = 0.02  # final weight of the BC term (paper: by task)
    beta_decay_steps: int = 50_000  # number of updates from beta_start to beta_end (paper: 50000)
    independent_targets: bool = False  # use a separate target per critic (paper: by task)
    critic_init: Literal["paper", "torch"] = "paper"  # initialization of the critics
    batch_size: int = 256  # batch size (paper: 256)
    learning_rate: float = 3e-4  # learning rate of all optimizers (paper: 3e-4)
    gamma: float = 0.99  # discount factor (paper: 0.99)
    tau: float = 0.005  # Polyak coefficient of the target networks (paper: 0.005)
    policy_noise: float = 0.2  # std of target policy smoothing noise (paper: 0.2)
    noise_clip: float = 0.5  # clipping range of target policy smoothing noise (paper: 0.5)
    exploration_noise: float = 0.1  # std of exploration noise (paper: 0.1)
    policy_frequency: int = 2  # number of critic updates per actor update (paper: 2)
    # Evaluation and logging
    eval_frequency: int = 5_000  # steps between evaluations (paper: 5000)
    eval_episodes: int = 10  # episodes per evaluation (paper: 10 or 100, by task)
    log_frequency: int = 1_000  # steps between log entries


# The paper's hyperparameters by task. beta_start and INHERITED come from the offline run.
TINY = dict(env_steps=20_000, eval_frequency=2_500, eval_episodes=20)
TASK_DEFAULTS = {
    "halfcheetah": dict(beta_end=1e-12),
    "hopper": dict(beta_end=0.02),
    "walker2d": dict(beta_end=1e-10),
    "maze2d-umaze": dict(beta_start=0.2, beta_end=0.02, eval_episodes=100),
    "maze2d-medium": dict(beta_end=0.02, eval_episodes=100),
    "maze2d-large": dict(beta_end=0.02, eval_episodes=100),
    "antmaze-umaze": dict(beta_end=0.1, eval_episodes=100),
    "antmaze-medium": dict(beta_end=0.01, eval_episodes=100),
    "antmaze-large": dict(beta_end=0.005, eval_episodes=100),
    **{
        task: dict(beta_end=2.0, eval_episodes=100)
        for task in ("pen", "hammer", "door", "relocate")
    },
    "tiny-maze2d-umaze": dict(beta_start=0.2, beta_end=0.02, **TINY),
}
INHERITED = ("seed", "num_critics", "independent_targets", "critic_init")
INHERITED += ("batch_size", "learning_rate", "gamma", "tau")
INHERITED += ("policy_noise", "noise_clip", "policy_frequency")


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
    """Deterministic policy: (B, obs_dim) -> (B, action_dim) in [-1, 1]."""

    def __init__(self, obs_dim, action_dim):
        super().__init__()
        layers = [nn.Linear(obs_dim, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU()]
        self.hidden = nn.Sequential(*layers, nn.Linear(256, 256), nn.ReLU())
        self.mean = nn.Linear(256, action_dim)

    def forward(self, obs):
        return torch.tanh(self.mean(self.hidden(obs)))


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
        self.actor_target = copy.deepcopy(self.actor).requires_grad_(False)

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


def critic_loss(agent, batch, args):
    with torch.no_grad():
        noise = torch.randn_like(batch.actions) * args.policy_noise
        noise = noise.clamp(-args.noise_clip, args.noise_clip)
        next_actions = (agent.actor_target(batch.next_obs) + noise).clamp(-1, 1)
        next_q = agent.critics_target(batch.next_obs, next_actions)
        if not args.independent_targets:
            next_q = next_q.amin(dim=0, keepdim=True)
        # (1) with shape (1, B), or (2) with shape (N, B)
        targets = batch.rewards + args.gamma * (1 - batch.dones) * next_q
    q = agent.critics(batch.obs, batch.actions)
    return F.mse_loss(q, targets.expand_as(q))


def actor_loss(agent, batch, beta):
    actions = agent.actor(batch.obs)
    q = agent.critics(batch.obs, actions).amin(dim=0)  # the minimum, also with independent targets
    bc = F.mse_loss(actions, batch.actions)
    return -q.mean() / q.abs().mean().detach() + beta * bc  # (3)


def optimizer_step(optimizer, loss):
    optimizer.zero_grad()
    loss.backward(inputs=optimizer.param_groups[0]["params"])  # no gradients for other networks
    optimizer.step()


@torch.no_grad()
def polyak_update(target, network, tau):
    for target_parameter, parameter in zip(target.parameters(), network.parameters(), strict=True):
        target_parameter.lerp_(parameter, tau)


def update(agent, optimizers, batch, beta, update_actor, args):
    """One gradient step. The losses stay on the device: there is no host synchronization."""
    losses = {"critic": critic_loss(agent, batch, args)}
    optimizer_step(optimizers["critics"], losses["critic"])
    if update_actor:  # every policy_frequency steps
        losses["actor"] = actor_loss(agent, batch, beta)
        optimizer_step(optimizers["actor"], losses["actor"])
        polyak_update(agent.critics_target, agent.critics, args.tau)
        polyak_update(agent.actor_target, agent.actor, args.tau)
    return {name: loss.detach() for name, loss in losses.items()}


def beta_schedule(step, args):
    """beta of update `step`: beta_start, times kappa after each update, at least beta_end."""
    if args.beta_start == 0:
        return 0.0
    end = min(args.beta_end, args.beta_start)  # beta never increases
    kappa = (end / args.beta_start) ** (1 / args.beta_decay_steps)
    return max(end, args.beta_start * kappa ** (step - 1))


class ReplayBuffer:
    """A ring buffer on the device. Its tensors never move, so CUDA graphs can read them."""

    def __init__(self, capacity, dataset, device):
        shapes = [(capacity, *column.shape[1:]) for column in dataset]
        self.data = Transitions(*(torch.zeros(shape, device=device) for shape in shapes))
        self.capacity, self.added = capacity, 0
        self.size = torch.zeros((), dtype=torch.float64, device=device)

    def add(self, transitions):
        index = torch.arange(self.added, self.added + len(transitions.obs)) % self.capacity
        for column, values in zip(self.data, transitions, strict=True):
            column[index.to(column.device)] = values
        self.added += len(index)
        self.size.fill_(min(self.added, self.capacity))

    def sample(self, batch_size):
        uniform = torch.rand(batch_size, dtype=torch.float64, device=self.size.device)
        index = (uniform * self.size).long()
        return Transitions(*(column[index] for column in self.data))


# --- Data and evaluation ---


def load_dataset(env_id):
    """Returns transitions, a dict of metadata, and a function that makes an environment."""
    if "/" in env_id:
        data, metadata, make_env = load_minari(env_id)
    elif d4rl_tasks is None:
        sys.exit(f"{env_id}: D4RL datasets need d4rl_tasks.py next to this script, h5py and mujoco")
    else:
        data, metadata, make_env = d4rl_tasks.load_dataset(env_id, load_minari)
    data = Transitions(*(np.asarray(column, dtype=np.float32) for column in data))
    if len(set(map(len, data))) > 1 or not all(np.isfinite(column).all() for column in data):
        sys.exit(f"{env_id}: the dataset has columns of different lengths or non-finite values")
    data = data._replace(actions=data.actions.clip(-1, 1))
    env = wrap_env(make_env())
    if env.observation_space.shape != data.obs.shape[1:]:
        sys.exit(f"{env_id}: {env.spec.id} has other observations, {env.observation_space.shape}")
    return data, metadata, lambda **kwargs: wrap_env(make_env(**kwargs))


def wrap_env(env):
    """Flat observations, and actions in [-1, 1]."""
    env = gym.wrappers.FlattenObservation(env)
    return gym.wrappers.RescaleAction(env, np.float32(-1), np.float32(1))


def load_minari(ids):
    """Loads Minari datasets of one environment. Downloads those that are not found locally."""
    episodes = []
    try:
        datasets = [minari.load_dataset(dataset_id, download=True) for dataset_id in ids.split(",")]
        if len(env_ids := {dataset.env_spec.id for dataset in datasets}) > 1:
            raise ValueError(f"datasets of different environments: {env_ids}")
        space = datasets[0].recover_environment(max_episode_steps=1).observation_space
        for episode in tqdm(chain(*datasets), "Loading", sum(map(len, datasets)), disable=None):
            obs = episode.observations
            if isinstance(obs, dict):  # concatenated in the order of FlattenObservation
                obs = np.hstack([obs[key].reshape(len(obs[key]), -1) for key in space])
            obs = obs.reshape(len(obs), -1)
            dones = episode.terminations  # not truncations: a time limit is not a done
            columns = obs[:-1], episode.actions, episode.rewards, obs[1:], dones
            episodes.append(Transitions(*columns))
        data = Transitions(*map(np.concatenate, zip(*episodes, strict=True)))
        low, high = datasets[0].action_space.low, datasets[0].action_space.high
        data = data._replace(actions=2 * (data.actions - low) / (high - low) - 1)
    except Exception as error:  # the download client has its own exception classes
        local = ", ".join(minari.list_local_datasets()) or "none"
        sys.exit(f"{ids}: cannot be loaded ({error!r}). Local Minari datasets: {local}")
    dataset, env_spec = datasets[0], datasets[0].env_spec
    metadata = {"dataset": ids, "source": "minari", "comparable_with_paper": False}
    metadata |= {"transitions": len(data.obs), "episodes": len(episodes)}
    metadata["mean_return"] = float(np.mean([episode.rewards.sum() for episode in episodes]))
    metadata["ref_min_score"] = dataset.storage.metadata.get("ref_min_score", 0.0)
    metadata["ref_max_score"] = dataset.storage.metadata.get("ref_max_score", 100.0)
    metadata["environment"] = env_spec.id
    env_kwargs = {"eval_env": True, "max_episode_steps": int(env_spec.max_episode_steps or 1000)}
    if d4rl_tasks is not None:  # for the tasks of D4RL: its score references, the goals of mazes
        data = d4rl_tasks.adapt_minari(data, metadata, env_kwargs)
    elif env_spec.id.startswith(("PointMaze_", "AntMaze_")):
        sys.exit(f"{ids}: Minari mazes need d4rl_tasks.py next to this script")
    return data, metadata, partial(dataset.recover_environment, **env_kwargs)


def load_env(env_id):
    """From scratch: any Gymnasium environment, and a dataset without transitions."""
    try:
        env = wrap_env(gym.make(env_id))
    except Exception as error:  # gym.make and the wrappers raise many kinds of exceptions
        sys.exit(f"{env_id}: expected an environment with bounded continuous actions ({error})")
    obs, action = env.observation_space.shape, env.action_space.shape
    data = Transitions(*(np.zeros((0, *shape)) for shape in (obs, action, (), obs, ())))
    metadata = {"dataset": None, "source": None, "transitions": 0, "environment": env.spec.id}
    metadata |= {"ref_min_score": 0.0, "ref_max_score": 100.0}
    if d4rl_tasks is not None and env.spec.id in d4rl_tasks.TASKS:
        metadata |= d4rl_tasks.env_metadata(env.spec.id)
    make_env = partial(gym.make, env_id, max_episode_steps=env.spec.max_episode_steps or 1000)
    return data, metadata, lambda **kwargs: wrap_env(make_env(**kwargs))


def evaluate(agent, envs, num_episodes, seed, metadata):
    """Plays exactly num_episodes episodes with their own seeds, len(envs) at a time."""
    seeds = np.random.SeedSequence(seed).generate_state(num_episodes).tolist()
    returns = np.zeros(num_episodes)
    for first in range(0, num_episodes, len(envs)):
        playing = dict(zip(range(first, num_episodes), envs, strict=False))
        obs = {episode: env.reset(seed=seeds[episode])[0] for episode, env in playing.items()}
        while obs:
            actions = agent.act(np.stack(list(obs.values())))
            for episode, action in zip(list(obs), actions, strict=True):
                obs[episode], reward, terminated, truncated, _ = playing[episode].step(action)
                returns[episode] += reward
                if terminated or truncated:
                    del obs[episode]
    low, high = metadata["ref_min_score"], metadata["ref_max_score"]
    scores = 100 * (returns - low) / (high - low)
    stderr = scores.std() / math.sqrt(max(1, num_episodes - 1))
    metrics = {"score": scores.mean(), "score_stderr": stderr, "score_worst": scores.min()}
    return {name: float(value) for name, value in metrics.items()}, returns.tolist()


# --- Arguments, checkpoints, CUDA graphs ---


def task_defaults(env_id):
    """Defaults of hopper for hopper-medium-v2 and mujoco/hopper/medium-v0; {} for other tasks."""
    name = re.sub(r"^(?:D4RL|mujoco)/(\w+)/", r"\1-", env_id).replace("pointmaze-", "maze2d-")
    if "/" in name.split(",")[0] or "-dense-" in name:  # another namespace, or another reward
        return {}
    return next((TASK_DEFAULTS[task] for task in TASK_DEFAULTS if name.startswith(f"{task}-")), {})


def parse_args():
    """Looks ahead for the checkpoint, so that --help shows the defaults of this run."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--env-id", "--env_id", default=Args.env_id)
    parser.add_argument("--checkpoint")
    parser.add_argument("--resume")
    known, _ = parser.parse_known_args()
    script, checkpoint = Path(__file__).stem, None
    if known.resume is not None:
        checkpoint = load_checkpoint(known.resume, script)
        defaults = checkpoint["args"]
    elif known.checkpoint is not None:
        checkpoint = load_checkpoint(known.checkpoint, script.removeprefix("finetune_"))
        offline = checkpoint["args"]
        defaults = {"env_id": offline["env_id"], "beta_start": offline["beta"]}
        defaults |= task_defaults(offline["env_id"]) | {name: offline[name] for name in INHERITED}
    else:  # from scratch, without BC
        defaults = {"env_id": known.env_id, **task_defaults(known.env_id), "beta_start": 0.0}
    args = tyro.cli(Args, default=Args(**defaults), description=__doc__)
    may_change = {"resume", "env_steps", "cuda", "cudagraphs", "compile", "matmul_precision"}
    for name, value in vars(args).items():
        minimum = 0 if name in ("seed", "offline_transitions") else 1
        if (type(value) is int and value < minimum) or (type(value) is float and value < 0):
            sys.exit(f"{name} is too small: {value}")
        if args.resume and value != defaults[name] and name not in may_change:
            sys.exit(f"{name} cannot change from {defaults[name]} to {value} when a run is resumed")
    if args.resume and checkpoint["step"] >= args.env_steps:
        sys.exit(f"{args.resume}: finished at step {checkpoint['step']}, raise --env-steps")
    if not args.env_id:
        sys.exit("--checkpoint RUN fine-tunes an offline run, --env-id ENV trains from scratch")
    return args, checkpoint


def load_checkpoint(path, script):
    """Loads a checkpoint, also by its run directory. No code in the file is executed."""
    path = Path(path, "checkpoint.pt") if Path(path).is_dir() else Path(path)
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
        if checkpoint["script"] != script:
            raise ValueError(f"written by {checkpoint['script']}.py")
    except Exception as error:  # torch.load raises many kinds of exceptions
        sys.exit(f"{path}: not a checkpoint of {script}.py ({error!r:.100})")
    return checkpoint


def save_checkpoint(path, agent, optimizers, state):
    """Saves all that an exact resume needs. The old file stays until the new one is complete."""
    state |= {"script": Path(__file__).stem, "agent": agent.state_dict()}
    state["optimizers"] = {name: opt.state_dict()["state"] for name, opt in optimizers.items()}
    state["rng_state"] = torch.get_rng_state()
    state["cuda_rng_state"] = torch.cuda.get_rng_state() if agent.obs_mean.is_cuda else None
    torch.save(state, path.with_suffix(".tmp"))
    os.replace(path.with_suffix(".tmp"), path)


def restore_checkpoint(checkpoint, agent, optimizers):
    agent.load_state_dict(checkpoint["agent"])
    for name, opt in optimizers.items():
        opt.load_state_dict(opt.state_dict() | {"state": checkpoint["optimizers"][name]})
    torch.set_rng_state(checkpoint["rng_state"])
    if agent.obs_mean.is_cuda and checkpoint["cuda_rng_state"] is not None:
        torch.cuda.set_rng_state(checkpoint["cuda_rng_state"])
    return checkpoint["step"], checkpoint["history"]


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
        import wandb  # before the run directory is created
    device = torch.device("cuda" if args.cuda and torch.cuda.is_available() else "cpu")
    on_gpu = device.type == "cuda"
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
    load = load_dataset if args.checkpoint else load_env
    dataset, metadata, make_env = load(args.env_id)
    envs = [make_env() for _ in range(10)]
    agent = Agent(dataset.obs.shape[1], dataset.actions.shape[1], args)
    agent.to(device)
    adam = partial(torch.optim.Adam, lr=args.learning_rate, fused=True, capturable=on_gpu)
    optimizers = {"critics": adam(agent.critics.parameters())}
    optimizers["actor"] = adam(agent.actor.parameters())
    capacity = args.offline_transitions + args.learning_starts + args.env_steps
    buffer = ReplayBuffer(min(args.buffer_size, capacity), dataset, device)
    start_step, history = -args.learning_starts, []  # there are no updates up to step 0
    for key in ("dataset", "source", "transitions", "environment"):
        if checkpoint and metadata[key] != checkpoint["metadata"][key]:
            sys.exit(f"{key} is {metadata[key]}, in the checkpoint {checkpoint['metadata'][key]}")
    if args.resume:
        start_step, history = restore_checkpoint(checkpoint, agent, optimizers)
        buffer.add(Transitions(*checkpoint["buffer"]))
        buffer.added = checkpoint["buffer_added"]
        if not checkpoint["episode_ended"]:
            print("the run was stopped within an episode: a new episode begins")
    elif args.checkpoint:
        if args.num_critics != checkpoint["args"]["num_critics"]:
            sys.exit(f"the checkpoint has {checkpoint['args']['num_critics']} critics")
        agent.load_state_dict(checkpoint["agent"])
        first = max(0, len(dataset.obs) - args.offline_transitions)
        buffer.add(agent.preprocess(Transitions(*(column[first:] for column in dataset))))

    # --- Run directory and logging ---
    name = f"{re.sub('[/,]', '-', args.env_id)}__{Path(__file__).stem}__{args.seed}"
    run_dir = Path(args.runs_dir, args.run_name or f"{name}__{time.strftime('%Y%m%d-%H%M%S')}")
    if args.resume:
        run_dir = Path(args.resume) if Path(args.resume).is_dir() else Path(args.resume).parent
    try:
        run_dir.mkdir(parents=True, exist_ok=bool(args.resume))
    except OSError as error:
        sys.exit(f"{error}. If it is a run: --resume {run_dir}, or choose another --run-name")
    if args.track:
        wandb.init(config=vars(args), name=run_dir.name, sync_tensorboard=True)
    writer = SummaryWriter(run_dir, purge_step=start_step + 1)
    config = vars(args) | metadata | {"device": str(device), "run": str(run_dir)}
    print(*(f"{key}: {value}" for key, value in config.items()), sep="\n")
    rows = "\n".join(f"|{key}|{value}|" for key, value in config.items())
    writer.add_text("hyperparameters", f"|param|value|\n|-|-|\n{rows}")

    # --- Train step ---
    beta = torch.zeros((), device=device)  # a tensor, so that replayed CUDA graphs see it change

    def train_step(update_actor):
        batch = buffer.sample(args.batch_size)
        return update(agent, optimizers, batch, beta, update_actor, args)

    if args.compile:  # update() then calls the compiled losses; same random numbers as eager
        compile_loss = partial(torch.compile, fullgraph=True, options={"fallback_random": True})
        critic_loss, actor_loss = compile_loss(critic_loss), compile_loss(actor_loss)
    train_steps = [partial(train_step, False), partial(train_step, True)]
    if on_gpu and args.cudagraphs:
        train_steps = [CudaGraph(function) for function in train_steps]

    # --- Training loop ---
    signals = []  # on SIGINT or SIGTERM, the loop finishes its step, saves and stops
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda signum, _: signals.append(signum))
    losses, save_due, start_time = {}, False, time.monotonic()
    env = make_env(**metadata.get("train_env_kwargs", {}))
    env.reset(seed=args.seed)  # in antmaze, this draws the goal of all training episodes
    env_seed = 10_000_000 * args.seed + args.learning_starts  # plus the step: seed of an episode
    obs, _ = env.reset(seed=env_seed + start_step)
    for step in tqdm(range(start_step + 1, args.env_steps + 1), disable=None):
        # --- Act ---
        if step <= 0 and not args.checkpoint:  # from scratch: random actions first
            action = torch.rand(dataset.actions.shape[1]) * 2 - 1
        else:
            with torch.no_grad():
                action = agent.actor(agent.normalize(obs))
                noise = args.exploration_noise * torch.randn_like(action)
                action = (action + noise).clamp(-1, 1).cpu()
        next_obs, reward, terminated, truncated, _ = env.step(action.numpy())
        done = terminated or (reward > 0 and metadata.get("goal_is_terminal", False))
        transition = Transitions(obs, action, reward, next_obs, done)
        buffer.add(agent.preprocess(Transitions(*(np.asarray(x)[None] for x in transition))))
        episode_ended = bool(terminated or truncated)
        obs = env.reset(seed=env_seed + step)[0] if episode_ended else next_obs

        # --- Train ---
        if step > 0:
            beta.fill_(beta_schedule(step, args))
            losses = train_steps[step % args.policy_frequency == 0]()  # True: with the actor

        # --- Log, evaluate, save (at the end of an episode, for an exact resume) ---
        evaluation_due = step >= 0 and (step % args.eval_frequency == 0 or step == args.env_steps)
        if (step > 0 and step % args.log_frequency == 0) or evaluation_due or signals:
            scalars = {f"losses/{name}": loss.item() for name, loss in losses.items()}
            if not all(map(math.isfinite, scalars.values())):
                message = f"step {step}: losses are not finite, try a larger beta: {scalars}"
                (run_dir / "diverged").write_text(message)
                print(message, file=sys.stderr)
                sys.exit(3)
            sps = (step - start_step) / (time.monotonic() - start_time)
            scalars |= {"charts/SPS": sps, "charts/beta": beta.item()}
            if evaluation_due:
                seed = [args.seed, step]  # evaluation does not use the training random stream
                metrics, returns = evaluate(agent, envs, args.eval_episodes, seed, metadata)
                history.append({"step": step, **metrics})
                scalars |= {f"charts/{name}": value for name, value in metrics.items()}
                score = f"{metrics['score']:.1f} ± {metrics['score_stderr']:.1f}"
                tqdm.write(f"step {step:,}: score {score}, {sps:.0f} steps/s")
            for name, value in scalars.items():
                writer.add_scalar(name, value, step)

        save_due = (save_due or evaluation_due) and all(map(torch.isfinite, losses.values()))
        if signals or step == args.env_steps or (save_due and episode_ended):
            state = {"step": step, "history": history, "args": vars(args), "metadata": metadata}
            state["buffer"] = [column[: buffer.added].clone() for column in buffer.data]
            state |= {"buffer_added": buffer.added, "episode_ended": episode_ended}
            save_checkpoint(run_dir / "checkpoint.pt", agent, optimizers, state)
            save_due = False
        if signals and step < args.env_steps:
            print(f'stopped at step {step}, resume: python "{sys.argv[0]}" --resume "{run_dir}"')
            sys.exit(128 + signals[0])

    writer.close()
    result = {"args": vars(args), "metadata": metadata, "steps_per_second": sps, **metrics}
    result |= {"returns": returns, "history": history}
    (run_dir / "result.tmp").write_text(json.dumps(result, indent=2))
    os.replace(run_dir / "result.tmp", run_dir / "result.json")
    print(f"results in {run_dir}")
