"""How fast a gradient step is, and how close to the time of its matrix products alone.

    python benchmarks/speed.py                                      (all of it: half an hour)
    python benchmarks/speed.py --script td3_bc_n --num-critics 10 --json speed.json
    python benchmarks/speed.py --device cuda                        (with the paper's seconds)
    python benchmarks/speed.py --loops                              (evaluation and fine-tuning)

A step is what the script does: a batch, an update, and online a step in the environment. Its matrix
products are recorded from a real step and repeated without anything else, writing into memory that
is there already: what no step of this method can be faster than. Both are timed in turns in one
process, a process a row; figures are medians over the turns, so a noisy machine hits both alike.
"""

import contextlib
import importlib
import json
import multiprocessing
import os
import resource
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import tyro
from torch.utils._python_dispatch import TorchDispatchMode

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
SCRIPTS = ("td3_bc_n", "sac_bc_n", "finetune_td3_bc_n", "finetune_sac_bc_n")
TASKS = {  # observation and action sizes of D4RL's tasks
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
# Seconds for 10,000 steps on an RTX 2080 Ti, of the paper's own code.
PAPER = {("td3_bc_n", 10): 31, ("sac_bc_n", 10): 62}


@dataclass
class Args:
    script: Literal["all", "td3_bc_n", "sac_bc_n", "finetune_td3_bc_n", "finetune_sac_bc_n"] = "all"
    num_critics: tuple[int, ...] = (2, 10, 50)  # sizes of the ensemble
    task: str = "all"  # one of D4RL's names, or all sizes of its tasks
    device: Literal["cpu", "cuda"] = "cpu"  # where to measure
    seconds: float = 10.0  # for each row, after its warm-up
    cudagraphs: bool = True  # on a GPU, as the scripts do
    compile: bool = False  # as the scripts' flag
    tf32: bool = False  # as the scripts' flag
    json: str | None = None  # write the rows to this file too
    loops: bool = False  # time evaluation and fine-tuning against their parts instead


class Products(TorchDispatchMode):
    """Notes the matrix products of what runs under it."""

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

    def alone(self):
        """The same products again, from and into as little memory as possible."""
        memory = {}

        def like(role, shape, stride):
            key = role, shape, stride
            if key not in memory:
                memory[key] = torch.empty_strided(shape, stride, device=self.device)
                memory[key].normal_()
            return memory[key]

        products = []
        for a, b in self.operands:
            if 0 in a.stride():  # the states and actions, which the critics share
                first = like("a", a.shape[1:], a.stride()[1:]).expand(a.shape)
            else:
                first = like("a", a.shape, a.stride())
            shape = torch.Size([*a.shape[:-1], b.shape[-1]])
            result = torch.empty(shape, device="meta")
            out = like("out", shape, result.stride())
            product = torch.bmm if a.ndim == 3 else torch.mm
            products.append((product, first, like("b", b.shape, b.stride()), out))

        def run():
            for product, a, b, out in products:
                product(a, b, out=out)

        return run


def learner(name, num_critics, task, args):
    """A script's own step, as its main program makes it; also its parts."""
    script, (obs_dim, action_dim) = importlib.import_module(name), TASKS[task]
    device, online = torch.device(args.device), name.startswith("finetune")
    settings = script.Args(num_critics=num_critics, independent_targets=False)
    if hasattr(settings, "target_entropy"):
        settings.target_entropy = -float(action_dim)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.backends.cuda.matmul.fp32_precision = "tf32" if args.tf32 else "ieee"
    torch.manual_seed(0)
    agent = script.Agent(obs_dim, action_dim, settings).to(device)
    optimizers = script.make_optimizers(agent, settings)
    shapes = (obs_dim,), (action_dim,), (), (obs_dim,), ()
    data = [torch.rand(100_000, *shape, device=device) * 2 - 1 for shape in shapes]
    data[4] = (data[4] > 0.99).float()
    beta = torch.tensor(0.3, device=device)
    env = observation = None
    if online:
        import gymnasium as gym

        buffer = script.ReplayBuffer(200_000, obs_dim, action_dim, device)
        buffer.add(*data)
        env = script.wrap(gym.make(f"d4rl_tasks:{task}"))
        observation, _ = env.reset(seed=0)

    def learn(*kind):
        rows = settings.batch_size
        batch = buffer.sample(rows) if online else script.sample_batch(data, rows)
        return script.update(agent, optimizers, batch, beta, *kind, settings)

    every = 2 if "td3" in name else 1
    with Products() as products:  # of eager losses: nothing can be watched in compiled ones
        for i in range(every):
            learn(*((i % 2 == 0,) if every == 2 else ()))
    if args.compile:
        options = {"fullgraph": True, "options": {"fallback_random": True}}
        script.critic_loss = torch.compile(script.critic_loss, **options)
        script.policy_loss = torch.compile(script.policy_loss, **options)
    graphs = args.device == "cuda" and args.cudagraphs
    fast = script.CudaGraphs(learn) if graphs else learn

    def kind(i):
        return (i % 2 == 0,) if every == 2 else ()

    def act():
        nonlocal observation
        action = script.explore(agent, observation, settings)
        observation = script.collect(agent, env, observation, action, buffer, {})

    def steps():
        """As many steps as there are critic updates to a policy update."""
        for i in range(every):
            if online:
                act()
            fast(*kind(i))

    def updates():
        for i in range(every):
            learn(*kind(i))

    script.keep_freed_memory()
    return steps, updates, env, every, products


def wait(device):
    if device == "cuda":
        torch.cuda.synchronize()


def timed(functions, seconds, device):
    """Seconds a call of each function, taken in turns; one row a turn."""
    turns, end = [], time.perf_counter() + seconds
    while time.perf_counter() < end or len(turns) < 3:
        turn = []
        for function in functions:
            wait(device)
            started = time.perf_counter()
            function()
            wait(device)
            turn.append(time.perf_counter() - started)
        turns.append(turn)
    return np.array(turns)


def measure(name, num_critics, task, args):
    steps, _, _, every, products = learner(name, num_critics, task, args)
    for _ in range(8):  # warm-up; on a GPU, the recording too
        steps()
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    if args.device == "cuda":
        memory = torch.cuda.max_memory_allocated() / 2**20
    alone = products.alone()
    if args.device == "cuda" and args.cudagraphs:
        alone = importlib.import_module(name).CudaGraphs(alone)
    for _ in range(8):
        alone()
    turns = timed([steps, alone], args.seconds, args.device)
    return {
        "script": name,
        "num_critics": num_critics,
        "task": task,
        "device": args.device,
        "steps_per_second": every / float(np.median(turns[:, 0])),
        "gflop_per_step": products.gflop() / every,
        "matmul_ratio": float(np.median(turns[:, 1] / turns[:, 0])),
        "peak_memory_mb": memory,
    }


def measure_loops(args):
    """Ten episodes at once against one by one; a step of fine-tuning against its two parts."""
    import gymnasium as gym

    import td3_bc_n

    facts = {"random_return": 0.0, "expert_return": 1.0}
    torch.manual_seed(0)
    agent = td3_bc_n.Agent(11, 3, td3_bc_n.Args()).to(args.device)
    # An untrained hopper falls; one that stands still is evaluated for as long as a trained one.
    envs = [td3_bc_n.wrap(gym.make("Hopper-v5", terminate_when_unhealthy=False)) for _ in range(10)]
    at_once = lambda: td3_bc_n.evaluate(agent, envs, 10, [1], facts)  # noqa: E731
    one_by_one = lambda: td3_bc_n.evaluate(agent, envs[:1], 10, [1], facts)  # noqa: E731
    turns = timed([at_once, one_by_one], 6 * args.seconds, args.device)
    print(f"10 hopper episodes at once: {np.median(turns[:, 1] / turns[:, 0]):.2f} times as fast")
    for name in SCRIPTS[2:]:
        steps, updates, env, every, _ = learner(name, 10, "hopper-medium-v2", args)
        action = env.action_space.sample()

        def parts(updates=updates, env=env, every=every, action=action):
            updates()
            for _ in range(every):
                if any(env.step(action)[2:4]):
                    env.reset()

        steps(), parts()
        turns = timed([steps, parts], 2 * args.seconds, args.device)
        ratio = np.median(turns[:, 0] / turns[:, 1])
        print(f"{name}: a step takes {ratio:.2f} of the time of an update and a step of the hopper")


def main(args):
    if args.device == "cuda" and not torch.cuda.is_available():
        sys.exit("--device cuda: here is no GPU")
    if args.task != "all" and args.task not in TASKS:
        sys.exit(f"--task {args.task}: one of {', '.join(TASKS)}")
    if args.loops:
        return measure_loops(args)
    print("| script | N | task | steps/s | s / 10,000 steps | the paper's | GFLOP | matmuls | MB |")
    print("|---|---|---|---|---|---|---|---|---|")
    rows = []
    for name in SCRIPTS if args.script == "all" else [args.script]:
        for task in TASKS if args.task == "all" else [args.task]:
            for num_critics in args.num_critics:
                # A process of its own, for its peak of memory.
                with multiprocessing.get_context("spawn").Pool(1) as pool:
                    row = pool.apply(measure, (name, num_critics, task, args))
                rows.append(row)
                speed, paper = row["steps_per_second"], PAPER.get((name, num_critics), "")
                print(
                    f"| {name} | {num_critics} | {task} | {speed:.1f} | {10_000 / speed:.0f} "
                    f"| {paper if args.device == 'cuda' else ''} | {row['gflop_per_step']:.2f} "
                    f"| {row['matmul_ratio']:.2f} | {row['peak_memory_mb']:.0f} |",
                    flush=True,
                )
    if args.json:
        Path(args.json).write_text(json.dumps(rows, indent=2))


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main(tyro.cli(Args, description=__doc__))
