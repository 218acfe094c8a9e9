"""Speed of a train step, compared with the time of its matrix products alone.

    python -m tools.speed                                       (all rows, half an hour)
    python -m tools.speed --script td3_bc_n --num-critics 10 --json speed.json
    python -m tools.speed --device cuda                         (with the paper's seconds)
    python -m tools.speed --loops                               (evaluation and fine-tuning)

A step is that of the script: sample a batch, update, and online also act in the environment. Its
matrix products are recorded from a real step and repeated alone, into memory that is allocated
already: a lower bound for the time of a step. The column "matmuls" is their part of a step's time.
Step and products are timed alternately in one process per row. All numbers are medians, so that
other load on the machine affects both alike.
"""

import contextlib
import ctypes
import importlib
import json
import multiprocessing
import os
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import gymnasium as gym
import numpy as np
import torch
import tyro
from torch.utils._python_dispatch import TorchDispatchMode

from tools.paper import SCRIPT_COSTS
from tools.runs import SCRIPTS

try:
    import resource
except ModuleNotFoundError:
    resource = None  # on Windows, memory is only measured on a GPU

TASKS = {  # dimensions of observations and actions
    "hopper-medium-v2": (11, 3),
    "halfcheetah-medium-v2": (17, 6),
    "walker2d-medium-v2": (17, 6),
    "maze2d-umaze-v1": (4, 2),
    "antmaze-umaze-v0": (29, 8),
    "pen-human-v1": (45, 24),
    "hammer-human-v1": (46, 26),
    "door-human-v1": (39, 28),
    "relocate-human-v1": (39, 30),
}


@dataclass
class Args:
    # script to measure
    script: Literal["all", "td3_bc_n", "sac_bc_n", "finetune_td3_bc_n", "finetune_sac_bc_n"] = "all"
    num_critics: tuple[int, ...] = (2, 10, 50)  # sizes of the critic ensemble
    task: str = "all"  # D4RL task, for its dimensions and its environment
    device: Literal["cpu", "cuda"] = "cpu"  # device to measure on
    seconds: float = 10.0  # time per row, after the warm-up
    cudagraphs: bool = True  # capture the train step in a CUDA graph
    compile: bool = False  # compile the losses with torch.compile
    matmul_precision: Literal["highest", "high", "medium"] = "highest"  # "high" is TF32 on a GPU
    json: str | None = None  # file to write the rows to, as JSON
    loops: bool = False  # compare evaluation and online steps with their parts instead


class MatrixProducts(TorchDispatchMode):
    """Records the matrix products of the code that runs under it."""

    def __init__(self):
        super().__init__()
        self.operands = []

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        name = operation.overloadpacket.__name__
        if name in ("mm", "bmm", "addmm", "baddbmm"):
            operands = args[:2] if name in ("mm", "bmm") else args[1:3]
            self.device = operands[0].device
            # Shapes and strides only: the tensors would count as memory of the step.
            shapes = [(x.shape, x.stride()) for x in operands]
            self.operands.append([torch.empty_strided(*x, device="meta") for x in shapes])
        return operation(*args, **(kwargs or {}))

    def gflop(self):
        return sum(2 * a.numel() * b.shape[-1] for a, b in self.operands) / 1e9

    def replay(self):
        """A function that computes the same products with as little memory as possible."""
        memory = {}

        def allocate(role, shape, stride):
            key = role, shape, stride
            if key not in memory:
                memory[key] = torch.empty_strided(shape, stride, device=self.device).normal_()
            return memory[key]

        products = []
        for a, b in self.operands:
            if 0 in a.stride():  # observations and actions, the same for all critics
                first = allocate("a", a.shape[1:], a.stride()[1:]).expand(a.shape)
            else:
                first = allocate("a", a.shape, a.stride())
            shape = torch.Size([*a.shape[:-1], b.shape[-1]])
            out = allocate("out", shape, torch.empty(shape, device="meta").stride())
            function = torch.bmm if a.ndim == 3 else torch.mm
            products.append((function, first, allocate("b", b.shape, b.stride()), out))

        def run():
            for function, a, b, out in products:
                function(a, b, out=out)

        return run


def set_up(args):
    """The settings of the scripts' main programs."""
    torch.manual_seed(0)
    torch.set_float32_matmul_precision(args.matmul_precision)
    if sys.platform == "linux":  # as in the scripts
        for option in (-1, -3):  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD
            ctypes.CDLL("libc.so.6").mallopt(option, 2**30)
    torch.use_deterministic_algorithms(True)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if args.device == "cuda":
        torch.cuda.set_stream(torch.cuda.Stream())


def make_steps(name, num_critics, task, args):
    """Functions for one period of the script's loop, made as in its main program.

    A period has one actor update: two steps for TD3, one for SAC. Returns the steps, the eager
    updates without acting, the environment, the length of a period and its matrix products.
    """
    script, (obs_dim, action_dim) = importlib.import_module(name), TASKS[task]
    device, online, td3 = torch.device(args.device), name.startswith("finetune"), "td3" in name
    set_up(args)
    settings = script.Args(num_critics=num_critics, independent_targets=False)
    agent = script.Agent(obs_dim, action_dim, settings).to(device)
    on_gpu = device.type == "cuda"
    adam = partial(torch.optim.Adam, lr=settings.learning_rate, fused=True, capturable=on_gpu)
    optimizers = {"critics": adam(agent.critics.parameters())}
    optimizers["actor"] = adam(agent.actor.parameters())
    if not td3:
        optimizers["alpha"] = adam([agent.log_alpha])
    shapes = (obs_dim,), (action_dim,), (), (obs_dim,), ()
    columns = [torch.rand(100_000, *shape, device=device) * 2 - 1 for shape in shapes]
    dataset = script.Transitions(*columns[:4], (columns[4] > 0.98).float())
    beta = torch.tensor(0.3, device=device)
    buffer = env = obs = None
    if online:
        import d4rl_tasks  # noqa: F401  (registers the tasks)

        buffer = script.ReplayBuffer(200_000, dataset, device)
        buffer.add(dataset)
        env = script.wrap_env(gym.make(gym.spec(task)))
        obs, _ = env.reset(seed=0)

    def train_step(*update_actor):
        if online:
            batch = buffer.sample(settings.batch_size)
        else:
            index = torch.randint(len(dataset.obs), (settings.batch_size,), device=device)
            batch = script.Transitions(*(column[index] for column in dataset))
        return script.update(agent, optimizers, batch, beta, *update_actor, settings)

    def act():
        nonlocal obs
        with torch.no_grad():
            if td3:
                action = agent.actor(agent.normalize(obs))
                noise = settings.exploration_noise * torch.randn_like(action)
                action = (action + noise).clamp(-1, 1).cpu()
            else:
                action = agent.actor.sample(agent.normalize(obs))[0].cpu()
        next_obs, reward, terminated, truncated, _ = env.step(action.numpy())
        transition = script.Transitions(obs, action, reward, next_obs, terminated)
        transition = script.Transitions(*(np.asarray(x)[None] for x in transition))
        buffer.add(agent.preprocess(transition))
        obs = env.reset()[0] if terminated or truncated else next_obs

    train_steps = [train_step]
    if td3:  # policy_frequency is 2
        train_steps = [partial(train_step, False), partial(train_step, True)]
    with MatrixProducts() as products:  # before torch.compile, which hides them
        for function in train_steps:
            function()
    if args.compile:
        compile_loss = partial(torch.compile, fullgraph=True, options={"fallback_random": True})
        script.critic_loss = compile_loss(script.critic_loss)
        script.actor_loss = compile_loss(script.actor_loss)
    fast = train_steps
    if on_gpu and args.cudagraphs:
        fast = [script.CudaGraph(function) for function in train_steps]

    def steps():
        for function in fast:
            if online:
                act()
            function()

    def updates():
        for function in train_steps:
            function()

    return steps, updates, env, len(train_steps), products


def synchronize(device):
    if device == "cuda":
        torch.cuda.synchronize()


def time_alternately(functions, seconds, device):
    """Seconds per call: a row per repetition, a column per function."""
    rows, end = [], time.perf_counter() + seconds
    while time.perf_counter() < end or len(rows) < 3:
        row = []
        for function in functions:
            synchronize(device)
            start = time.perf_counter()
            function()
            synchronize(device)
            row.append(time.perf_counter() - start)
        rows.append(row)
    return np.array(rows)


def measure(name, num_critics, task, args):
    steps, _, _, period, products = make_steps(name, num_critics, task, args)
    for _ in range(8):  # warm-up and capture
        steps()
    memory = None
    if args.device == "cuda":
        memory = torch.cuda.max_memory_allocated() / 2**20
    elif resource:
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    alone = products.replay()
    if args.device == "cuda" and args.cudagraphs:
        alone = importlib.import_module(name).CudaGraph(alone)
    for _ in range(8):
        alone()
    times = time_alternately([steps, alone], args.seconds, args.device)
    return {
        "script": name,
        "num_critics": num_critics,
        "task": task,
        "device": args.device,
        "steps_per_second": period / float(np.median(times[:, 0])),
        "gflop_per_step": products.gflop() / period,
        "matmul_ratio": float(np.median(times[:, 1] / times[:, 0])),
        "peak_memory_mb": memory,
    }


def measure_loops(args):
    """Ten episodes at once compared with one by one; an online step compared with its parts."""
    import td3_bc_n

    set_up(args)
    metadata = {"ref_min_score": 0.0, "ref_max_score": 1.0}
    agent = td3_bc_n.Agent(11, 3, td3_bc_n.Args()).to(args.device)
    # An untrained hopper falls at once. Without terminations, its episodes are of full length.
    kwargs = {"terminate_when_unhealthy": False}
    envs = [td3_bc_n.wrap_env(gym.make("Hopper-v5", **kwargs)) for _ in range(10)]
    at_once = partial(td3_bc_n.evaluate, agent, envs, 10, [1], metadata)
    one_by_one = partial(td3_bc_n.evaluate, agent, envs[:1], 10, [1], metadata)
    times = time_alternately([at_once, one_by_one], 6 * args.seconds, args.device)
    print(f"10 hopper episodes at once: {np.median(times[:, 1] / times[:, 0]):.2f} times as fast")
    for name in SCRIPTS[2:]:
        steps, updates, env, period, _ = make_steps(name, 10, "hopper-medium-v2", args)
        action = env.action_space.sample()

        def parts(updates=updates, env=env, period=period, action=action):
            updates()
            for _ in range(period):
                if any(env.step(action)[2:4]):
                    env.reset()

        steps()
        parts()
        times = time_alternately([steps, parts], 2 * args.seconds, args.device)
        ratio = np.median(times[:, 0] / times[:, 1])
        print(f"{name}: a step takes {ratio:.2f} of the time of an update and a hopper step")


def main(args):
    if args.device == "cuda" and not torch.cuda.is_available():
        sys.exit("--device cuda: no GPU found")
    if args.task != "all" and args.task not in TASKS:
        sys.exit(f"--task {args.task}: expected one of {', '.join(TASKS)}")
    if min(args.num_critics, default=0) < 1:
        sys.exit("--num-critics must be at least 1")
    if args.json and (Path(args.json).is_dir() or not Path(args.json).parent.is_dir()):
        sys.exit(f"--json {args.json}: not a file in an existing directory")
    if args.loops:
        return measure_loops(args)
    header = "script", "N", "task", "steps/s", "s / 10,000 steps", "paper", "GFLOP", "matmuls", "MB"
    print(f"| {' | '.join(header)} |")
    print("|---" * len(header) + "|")
    rows = []
    for name in SCRIPTS if args.script == "all" else [args.script]:
        for task in TASKS if args.task == "all" else [args.task]:
            for num_critics in args.num_critics:
                # A process per row, to measure its peak memory
                with multiprocessing.get_context("spawn").Pool(1) as pool:
                    row = pool.apply(measure, (name, num_critics, task, args))
                rows.append(row)
                speed = row["steps_per_second"]
                costs = SCRIPT_COSTS.get((name, num_critics)) if args.device == "cuda" else None
                paper = costs[0] if costs else ""
                cells = [name, num_critics, task, f"{speed:.1f}", f"{10_000 / speed:.0f}", paper]
                cells += [f"{row['gflop_per_step']:.2f}", f"{row['matmul_ratio']:.2f}"]
                memory = row["peak_memory_mb"]
                cells += ["-" if memory is None else f"{memory:.0f}"]
                print(f"| {' | '.join(map(str, cells))} |", flush=True)
                if args.json:
                    Path(args.json).write_text(json.dumps(rows, indent=2))


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main(tyro.cli(Args, description=__doc__))
