"""Fitted Q evaluation: estimates the returns of runs from their dataset, without an environment.

    python -m tools.fqe runs/RUN1 runs/RUN2                     (or a directory with many runs)
    python -m tools.fqe runs --gradient-steps 50000 --csv fqe.csv

The policy of each run is frozen, and a new ensemble of critics learns its values from the dataset:

    y = r + gamma (1 - d) mean_i Q'_i(s', pi(s'))

The mean, not the minimum: the critics of a run are pessimistic, so that the actor stays near the
data, and how much depends on N and beta. Here nothing is maximized. Next values are clipped to what
is possible, the smallest and largest reward at every step. The policy is deterministic, as in
evaluation and in tools.export: the mode of a Gaussian, not its samples.

The table is ordered by V(s0), the mean of Q(s0, pi(s0)) over the first states of all episodes, with
a 95 % interval (bootstrap over first states and critics). It is a discounted return in rewards of
the dataset. The interval does not contain the errors that all critics share: values of actions
that are not in the dataset are guesses here, too. So three kinds of runs are below the others, with
a warning: those with a V(s0) above the largest possible return, those with more than one percent of
impossible next values (above the largest return, by a tenth of the range), and those with more than
twice the smallest distance to the data (BC). The columns:

    BC       mean squared distance of the policy to the actions of the dataset, in [-1, 1]
    min Q    V(s0) by the critics of the run itself, their minimum (in transformed rewards)
    score    the last evaluation of the run, if it has an environment

--csv also writes the share of impossible next values, the step of the run, and the doubt about it.

Results are stored in fqe.json of the run directory, and used again by the same command.
"""

import copy
import csv
import json
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
import tyro
from tqdm import tqdm

from baselines.td3_bc import CriticEnsemble, optimizer_step, polyak_update  # two hidden layers
from tools.runs import (
    DATA,
    FINETUNE,
    import_script,
    load_agent,
    load_checkpoint,
    load_data,
    read_runs,
)

COLUMNS = ("run", "v", "v_low", "v_high", "impossible", "bc", "min_q", "score", "step", "doubt")
SETTINGS = ("gradient_steps", "num_critics", "seed")
TAU, BATCH_SIZE, LEARNING_RATE = 0.05, 256, 1e-3


@dataclass
class Args:
    runs: tyro.conf.Positional[tuple[str, ...]]  # run directories, or parents of them
    gradient_steps: int = 10_000  # number of gradient steps per run
    num_critics: int = 3  # number of critics
    gamma: float | None = None  # discount factor (default: that of the runs)
    seed: int = 1  # random seed for critics, batches and bootstrap
    cuda: bool = True  # use the GPU if there is one
    csv: str | None = None  # file to write the table to, as CSV


def choose_runs(args):
    """The runs, the steps of their checkpoints, their common discount factor and dataset."""
    runs = []
    for run in read_runs(args.runs):
        if run.path.is_file():
            sys.exit(f"{run.path}: a CSV file has no policies, expected run directories")
        if run.status == "diverged":
            reason = "diverged"
        elif run.script in FINETUNE and not run.args["checkpoint"]:
            reason = "was trained from scratch, without a dataset"
        elif not Path(run.path, "checkpoint.pt").exists():
            reason = "has no checkpoint yet"
        else:
            runs.append(run)
            continue
        print(f"left out: {run.path.name} {reason}", file=sys.stderr)
    if not runs:
        sys.exit("no run is left")
    for run in runs:
        for key in DATA:
            if run.metadata[key] != runs[0].metadata[key]:
                names = f"{runs[0].path.name}: {runs[0].metadata[key]}, {run.path.name}"
                sys.exit(f"the runs differ in their {key} ({names}: {run.metadata[key]})")
    gammas = {run.args["gamma"] for run in runs if "gamma" in run.args} or {0.99}  # BC has none
    if args.gamma is None and len(gammas) > 1:
        sys.exit(f"the runs have different discount factors {sorted(gammas)}, choose one: --gamma")
    gamma = gammas.pop() if args.gamma is None else args.gamma
    if gamma == 1:
        sys.exit("the runs have gamma 1, fitted Q evaluation needs less: choose one with --gamma")
    try:
        steps = [load_checkpoint(run.path)["step"] for run in runs]
    except ValueError as error:
        sys.exit(str(error))
    script = import_script(runs[0].script)
    dataset, metadata, _ = load_data(script, script.Args(**runs[0].args))
    if metadata["transitions"] != runs[0].metadata["transitions"]:
        sys.exit(f"{runs[0].path}: the dataset has changed since the run")
    return runs, steps, gamma, dataset


def first_states(dataset, name):
    """True where an episode begins: the observation is not the next one of the row before."""
    begins = (dataset.obs[1:] != dataset.next_obs[:-1]).any(axis=1)
    if "/" not in name and "maze" not in name:
        # In D4RL's files, the row after a terminal is its next observation. Mazes go on at a goal.
        begins |= dataset.dones[:-1] > 0
    return np.concatenate([[True], begins])


@torch.no_grad()
def actions_of(agent, obs):
    """Actions of the policy in [-1, 1]. In parts: a dataset may be large."""
    return torch.cat([agent.actor(agent.normalize(part)) for part in obs.split(2**16)])


def evaluate_policy(agent, dataset, starts, gamma, args, bar):
    """Trains critics for the frozen policy. Returns one row of the table."""
    torch.manual_seed(args.seed)
    next_actions = actions_of(agent, dataset.next_obs)
    obs, next_obs = agent.normalize(dataset.obs), agent.normalize(dataset.next_obs)
    scale = dataset.rewards.std().clamp(min=1e-3)  # the learning rate fits values of any size
    rewards = dataset.rewards / scale
    low, high = rewards.min().clamp(max=0) / (1 - gamma), rewards.max().clamp(min=0) / (1 - gamma)
    sizes = args.num_critics, obs.shape[1], next_actions.shape[1]
    critics = CriticEnsemble(*sizes, "torch").to(obs.device)
    target = copy.deepcopy(critics).requires_grad_(False)
    optimizer = torch.optim.Adam(critics.parameters(), LEARNING_RATE, fused=True)
    for _ in range(args.gradient_steps):
        i = torch.randint(len(obs), (BATCH_SIZE,), device=obs.device)
        with torch.no_grad():
            next_q = target(next_obs[i], next_actions[i]).mean(dim=0)
            y = rewards[i] + gamma * (1 - dataset.dones[i]) * next_q.clamp(low, high)
        q = critics(obs[i], dataset.actions[i])
        optimizer_step(optimizer, len(q) * F.mse_loss(q, y.expand_as(q)))
        polyak_update(target, critics, TAU)
        bar.update()

    with torch.no_grad():
        start_actions = actions_of(agent, dataset.obs[starts])
        v = (target(obs[starts], start_actions) * scale).cpu().numpy()
        i = torch.randint(len(obs), (10_000,), device=obs.device)
        next_q = target(next_obs[i], next_actions[i]).mean(dim=0)
        impossible = (next_q > high + 0.1 * (high - low)).float().mean().item()
        distance = F.mse_loss(actions_of(agent, dataset.obs), dataset.actions)
        min_q = None
        if hasattr(agent, "critics"):  # BC has none
            min_q = agent.critics(obs[starts], start_actions).amin(dim=0).mean().item()
    rng, means = np.random.default_rng(args.seed), []
    for _ in range(1_000):
        members, states = (rng.integers(size, size=size) for size in v.shape)
        means.append(v[np.ix_(members, states)].mean())
    v_low, v_high = np.percentile(means, [2.5, 97.5]).tolist()
    row = {"v": float(v.mean()), "v_low": v_low, "v_high": v_high}
    return row | {"bc": distance.item(), "min_q": min_q, "impossible": impossible}


def rank_correlation(a, b):
    """Spearman's. Equal values have the mean of their ranks."""
    a, b = np.asarray(a), np.asarray(b)
    return np.corrcoef(*((x > x[:, None]).sum(0) + (x >= x[:, None]).sum(0) for x in (a, b)))[0, 1]


def print_table(rows):
    print("| run | V(s0) | 95 % interval | BC | min Q | score |\n" + "|---" * 6 + "|")
    for row in rows:
        numbers = ("-" if row[key] is None else f"{row[key]:.1f}" for key in ("min_q", "score"))
        interval = f"{row['v_low']:.1f} to {row['v_high']:.1f}"
        cells = row["run"], f"{row['v']:.1f}", interval, f"{row['bc']:.3f}", *numbers
        print(f"| {' | '.join(cells)} |")
    for key, name in (("v", "V(s0)"), ("min_q", "min Q")):
        known = [(row[key], row["score"]) for row in rows if None not in (row[key], row["score"])]
        if len(known) > 2:
            correlation = rank_correlation(*zip(*known, strict=True))
            print(f"rank correlation of {name} with the score: {correlation:.2f}")


def main(args):
    if min(args.gradient_steps, args.num_critics) < 1 or args.seed < 0:
        sys.exit("--gradient-steps and --num-critics must be at least 1, --seed at least 0")
    if not 0 <= (args.gamma or 0) < 1:
        sys.exit("--gamma must be from 0 to below 1")
    if args.csv and (Path(args.csv).is_dir() or not Path(args.csv).parent.is_dir()):
        sys.exit(f"--csv {args.csv}: not a file in an existing directory")
    runs, steps, gamma, data = choose_runs(args)
    device = torch.device("cuda" if args.cuda and torch.cuda.is_available() else "cpu")
    dataset = type(data)(*(torch.as_tensor(column, device=device) for column in data))
    starts = torch.as_tensor(first_states(data, runs[0].metadata["dataset"]), device=device)

    rows = []
    settings = {name: getattr(args, name) for name in SETTINGS} | {"gamma": gamma}
    bar = tqdm(total=len(runs) * args.gradient_steps, unit="step", disable=None)
    for run, step in zip(runs, steps, strict=True):
        file, key = run.path / "fqe.json", settings | {"step": step}
        try:
            row = json.loads(file.read_text())
        except (OSError, ValueError):  # there is none, or it cannot be read
            row = {}
        if row.get("settings") == key:
            bar.update(args.gradient_steps)
        else:
            agent = load_agent(run.path)[2].to(device)
            row = evaluate_policy(agent, dataset, starts, gamma, args, bar) | {"settings": key}
            try:
                file.write_text(json.dumps(row, indent=2))
            except OSError as error:
                print(f"not stored: {error}", file=sys.stderr)
        score = run.history[-1].get("score") if run.history else None
        rows.append({"run": run.path.name} | row | {"score": score, "step": step})
    bar.close()
    largest, closest = max(0, data.rewards.max()) / (1 - gamma), min(row["bc"] for row in rows)
    for row in rows:
        row["doubt"] = ""
        if not row["v"] <= largest:  # also NaN
            row["doubt"] = f"it exceeds the largest possible return, {largest:.1f}"
        elif row["impossible"] > 0.01:
            share = f"{row['impossible']:.0%} of the next values"
            row["doubt"] = f"{share} exceed the largest possible return, {largest:.1f}"
        elif row["bc"] > 2 * closest:
            row["doubt"] = f"BC {row['bc']:.3f} is more than twice the smallest, {closest:.3f}"
    rows.sort(key=lambda row: (row["doubt"] != "", -row["v"]))
    print_table(rows)
    for row in rows:
        if row["doubt"]:
            text = f"{row['doubt']}: its actions are too far from the data"
            print(f"{row['run']}: do not trust V(s0), {text}", file=sys.stderr)
    if args.csv:
        try:
            with open(args.csv, "w", newline="") as output:
                writer = csv.DictWriter(output, COLUMNS, extrasaction="ignore")
                writer.writeheader()
                writer.writerows(rows)
        except OSError as error:
            sys.exit(f"--csv {args.csv}: cannot be written ({error})")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
