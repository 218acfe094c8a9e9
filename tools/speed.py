"""Time of a train step: the offline methods of this project, compared with TD3-BC-N.

    python -m tools.speed                                  (all methods, N as in their scripts)
    python -m tools.speed sac_bc_n sac_bc_n:50 edac:10     (these, SCRIPT or SCRIPT:N)
    python -m tools.speed iql --task pen-human-v1 --seconds 20
    python -m tools.speed --json speed.json                (for studies.efficiency)

All methods take turns in one process, so that other load on the machine affects all alike. Numbers
are medians over 20 rounds, or fewer if the steps are slow (at least 3). td3_bc_n with N = 10 is
always measured: its time is 1. The paper's numbers are from its table, on an RTX 2080 Ti.

A step samples a batch and updates the networks, with the script's own code, on random data; on a
GPU as a CUDA graph. There is no evaluation. Fine-tuning scripts have the same update; they also act
in the environment.
"""

import ctypes
import inspect
import json
import os
import re
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

from d4rl_tasks import TASKS
from tools.paper import SECONDS
from tools.runs import BASELINES, OFFLINE, import_script

METHODS = OFFLINE + BASELINES
REFERENCE = "td3_bc_n:10"


@dataclass
class Args:
    # methods to measure, SCRIPT or SCRIPT:N; the default of N, the number of critics, is by task
    methods: tyro.conf.Positional[tuple[str, ...]] = METHODS
    task: str = "hopper-medium-v2"  # D4RL task, for its dimensions and the settings of the methods
    cuda: bool = True  # use the GPU if there is one
    seconds: float = 60.0  # time for all methods together, after the warm-up
    # precision of float32 matmuls; high: TF32 on a GPU, medium: bfloat16 on CPUs that have it
    matmul_precision: Literal["highest", "high", "medium"] = "highest"
    json: str | None = None  # file to write the rows to, for studies.efficiency


def parse_method(text, task):
    """Script and settings of "edac:50"."""
    match = re.fullmatch(r"(\w+)(?::([1-9]\d*))?", text)
    if not match or match[1] not in METHODS or text.startswith("bc:"):  # BC has no critics
        names = ", ".join(METHODS)
        sys.exit(f"{text}: expected SCRIPT or SCRIPT:N, N from 1, with {names} (bc without N)")
    script = import_script(match[1])
    num_critics = {"num_critics": int(match[2])} if match[2] else {}
    return script, script.Args(**{"env_id": task, **script.task_defaults(task), **num_critics})


def make_steps(script, settings, dataset):
    """A function that does two train steps: TD3 updates the actor in every second one."""
    device = dataset[0].device
    on_gpu = device.type == "cuda"  # the steps are then captured in a CUDA graph
    agent = script.Agent(dataset[0].shape[1], dataset[1].shape[1], settings).to(device)
    adam = partial(torch.optim.Adam, lr=settings.learning_rate, fused=True, capturable=on_gpu)
    parts = {name: getattr(agent, name, None) for name in ("critics", "actor", "value")}
    optimizers = {name: adam(part.parameters()) for name, part in parts.items() if part is not None}
    if hasattr(agent, "log_alpha"):
        optimizers["alpha"] = adam([agent.log_alpha])
    if hasattr(agent, "value"):  # IQL: the learning rate of the actor is not constant
        optimizers["actor"].param_groups[0]["lr"] = torch.tensor(settings.learning_rate).to(device)
    parameters = inspect.signature(script.update).parameters
    more = {"beta": torch.tensor(0.3, device=device)} if "beta" in parameters else {}
    kinds = [{"update_actor": x} if "update_actor" in parameters else {} for x in (False, True)]

    def two_steps():
        for kind in kinds:
            index = torch.randint(len(dataset[0]), (settings.batch_size,), device=device)
            batch = script.Transitions(*(column[index] for column in dataset))
            script.update(agent, optimizers, batch, args=settings, **more, **kind)

    return two_steps


def time_alternately(functions, seconds, on_gpu):
    """Seconds per call: a row per round, a column per function."""
    synchronize = torch.cuda.synchronize if on_gpu else lambda: None

    def time_calls(function, calls):
        synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            function()
        synchronize()
        return (time.perf_counter() - start) / calls

    for function in functions:
        time_calls(function, 5)  # warm-up, compilation and capture
    # Turns of equal length: other processes then interrupt short and long steps alike.
    length = seconds / 20 / len(functions)
    turns = [(function, max(1, round(length / time_calls(function, 1)))) for function in functions]
    rows, end = [], time.perf_counter() + seconds
    while time.perf_counter() < end or len(rows) < 3:
        rows.append([time_calls(*turn) for turn in turns])
    return np.array(rows)


def measure(methods, device, args):
    """Times of all methods relative to the first, as rows of the table."""
    # As in the main programs of the scripts
    on_gpu = device == "cuda"
    torch.manual_seed(0)
    torch.set_float32_matmul_precision(args.matmul_precision)
    torch.use_deterministic_algorithms(True)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if sys.platform == "linux":
        for option in (-1, -3):  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD
            ctypes.CDLL("libc.so.6").mallopt(option, 2**30)
    if on_gpu:
        torch.cuda.set_stream(torch.cuda.Stream())

    env = gym.make(gym.spec(args.task))
    shapes = env.observation_space.shape, env.action_space.shape, (), env.observation_space.shape
    dataset = [torch.rand(1_000_000, *shape, device=device) * 2 - 1 for shape in shapes]
    dataset.append((dataset[2] > 0.98).float())  # dones
    functions = []
    for script, settings in methods:
        steps = make_steps(script, settings, dataset)
        functions.append(script.CudaGraph(steps) if on_gpu else steps)
    times = time_alternately(functions, args.seconds, on_gpu)
    return [
        {
            "script": script.ALGORITHM,
            "num_critics": getattr(settings, "num_critics", 0),
            "task": args.task,
            "device": device,
            "steps_per_second": 2 / float(np.median(times[:, i])),
            "relative_time": float(np.median(times[:, i] / times[:, 0])),
        }
        for i, (script, settings) in enumerate(methods)
    ]


def main(args):
    device = "cuda" if args.cuda and torch.cuda.is_available() else "cpu"
    if args.task not in TASKS:
        sys.exit(f"--task {args.task}: expected one of {', '.join(TASKS)}")
    if not args.seconds > 0:
        sys.exit(f"--seconds {args.seconds}: expected a positive number")
    methods = {}  # each once, TD3-BC-N first
    for text in (REFERENCE, *args.methods):
        script, settings = parse_method(text, args.task)
        methods[script, getattr(settings, "num_critics", 0)] = script, settings
    if args.json and not Path(args.json).parent.is_dir():
        sys.exit(f"--json {args.json}: cannot be written, there is no such directory")

    where = f"{device}, CPU threads: {torch.get_num_threads()}, torch {torch.__version__}"
    print(f"{args.task}, {where}; {args.seconds:g} s after the warm-up\n", flush=True)
    rows = measure(list(methods.values()), device, args)
    header = ["script", "N", "steps/s", "s / 10,000 steps", "time"]
    header += ["paper (RTX 2080 Ti): s / 10,000 steps", "paper: time"]
    print(f"| {' | '.join(header)} |", "|---" * len(header) + "|", sep="\n")
    for row in rows:
        method, speed = (row["script"], row["num_critics"]), row["steps_per_second"]
        cells = [*method, f"{speed:.1f}", f"{10_000 / speed:.0f}", f"{row['relative_time']:.2f}"]
        paper, reference = SECONDS.get(method), SECONDS["td3_bc_n", 10]
        cells += [paper, f"{paper / reference:.2f}"] if paper else ["-", "-"]
        print(f"| {' | '.join(map(str, cells))} |")
    if args.json:
        Path(args.json).write_text(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
