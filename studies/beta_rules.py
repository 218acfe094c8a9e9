"""Rules that choose beta during the training of TD3-BC-N (docs/choosing-beta.md).

    python -m studies.beta_rules fixed dual aspc --seeds 1 2 3
    python -m studies.beta_rules dual --env-id maze2d-umaze-v1 --checkpoint runs/RUN --steps 80000
    python -m tools.plot runs/beta-rules

A rule changes beta after each actor update. Times are in units of the time constant of the values,
policy_frequency / (tau (1 - gamma)).

    fixed   beta_start
    paper   beta_start up to time 1.25, then a tenth of it
    decay   exponential decay from beta_start at time 0.625 to a tenth at 3.75
    dual    log beta += rate (BC / epsilon - 1), where BC is the BC term of the batch, and epsilon
            is kappa times that of a policy that was cloned with clone_updates
    gap     log beta += rate clip(gain / (delta mean|Q|) - 1, -1, 1), where the gain is the minimum
            of the critics for the policy's actions minus that for the dataset's
    aspc    Adam on log beta, every tenth actor update, with the first-order meta-gradient of
            F = actor loss + (relative change of mean Q)^2, on another batch, through the last
            actor update (after Jing et al., arXiv 2508.19900; the learning rate falls to a
            hundredth)

log beta stays in [-7, 4]. Everything else is td3_bc_n.py, with its defaults for the dataset.
--checkpoint continues a run of td3_bc_n.py whose beta was beta_start up to its end.
"""

import math
import re
import sys
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
import tyro
from tqdm import tqdm

import td3_bc_n
from td3_bc_n import Transitions
from tools.runs import INCIDENTAL

RULES = Literal["fixed", "paper", "decay", "dual", "gap", "aspc"]


@dataclass
class Args:
    rules: tyro.conf.Positional[tuple[RULES, ...]]  # rules to train with, in turn
    env_id: str = td3_bc_n.Args.env_id  # as in td3_bc_n.py
    seeds: tuple[int, ...] = (1,)  # random seeds
    checkpoint: str | None = None  # run to continue, directory or checkpoint.pt
    steps: int = 16_000  # last step
    beta_start: float = 0.2  # beta of the first update
    kappa: float = 1.5  # dual: the BC term aimed at, relative to that of a cloned policy
    clone_updates: int = 2_000  # dual: number of updates of the cloned policy
    delta: float = 0.03  # gap: the gain aimed at, relative to mean|Q|
    rate: float = 0.01  # dual and gap: step size of log beta
    aspc_steps: int | None = None  # aspc: steps in which its learning rate falls (default: steps)
    eval_frequency: int = 1_000  # steps between evaluations
    eval_episodes: int = 20  # episodes per evaluation
    # precision of float32 matmuls; high: TF32 on a GPU, medium: bfloat16 on CPUs that have it
    matmul_precision: Literal["highest", "high", "medium"] = "highest"
    runs_dir: str = "runs/beta-rules"  # directory for all runs


def cloning_error(dataset, updates):
    """BC term of a policy after these updates by cloning (batch size 256): mean of the last 200."""
    actor = td3_bc_n.Actor(dataset.obs.shape[1], dataset.actions.shape[1])
    optimizer, errors = torch.optim.Adam(actor.parameters(), lr=3e-4), []
    for _ in range(updates):
        index = torch.randint(len(dataset.obs), (256,))
        loss = F.mse_loss(actor(dataset.obs[index]), dataset.actions[index])
        td3_bc_n.optimizer_step(optimizer, loss)
        errors.append(loss.item())
    return float(np.mean(errors[-200:]))


def aspc_gradient(agent, before, optimizer, batch, new_batch, beta, old_q):
    """d F / d log beta, and the mean of Q.

    `before` are the actor's weights before its last update, `batch` is that of this update. F is of
    another batch: the noise of one batch in both gradients would always ask for a larger beta.
    """
    parameters = list(agent.actor.parameters())
    loss, _, _ = td3_bc_n.actor_loss(agent, new_batch, beta)
    q = agent.critics(new_batch.obs, agent.actor(new_batch.obs)).amin(dim=0)
    old_q = q.mean().detach() if old_q is None else old_q
    change = (q.mean() - old_q) / q.abs().mean().detach()
    gradients = torch.autograd.grad(loss + change**2, parameters)
    actions = torch.func.functional_call(agent.actor, before, batch.obs)
    bc_gradients = torch.autograd.grad(F.mse_loss(actions, batch.actions), before.values())
    product = 0.0  # with Adam's diagonal preconditioner
    for parameter, gradient, bc_gradient in zip(parameters, gradients, bc_gradients, strict=True):
        state = optimizer.state[parameter]
        scale = (state["exp_avg_sq"] / (1 - 0.999 ** state["step"])).sqrt() + 1e-8
        product += (gradient * bc_gradient / scale).sum()
    learning_rate = optimizer.param_groups[0]["lr"]
    return -learning_rate * beta * product, q.mean().detach()


def train(rule, seed, args, settings):
    """One run, as in td3_bc_n.py, with result.json only."""
    torch.manual_seed(seed)
    dataset, metadata, make_env = td3_bc_n.load_data(args.env_id)
    if make_env is None:
        sys.exit(f"{args.env_id}: there is no environment to evaluate in")
    envs = [make_env() for _ in range(10)]
    agent = td3_bc_n.Agent(dataset.obs.shape[1], dataset.actions.shape[1], settings)
    td3_bc_n.set_statistics(agent, dataset, settings)
    dataset = agent.preprocess(dataset)
    adam = partial(torch.optim.Adam, lr=settings.learning_rate, fused=True)
    optimizers = {"critics": adam(agent.critics.parameters())}
    optimizers["actor"] = adam(agent.actor.parameters())
    label = {"dual": f"dual-{args.kappa:g}", "gap": f"gap-{args.delta:g}"}.get(rule, rule)
    values = {"seed": seed, "gradient_steps": args.steps, "beta_rule": label}
    for name in ("eval_frequency", "eval_episodes", "matmul_precision"):
        values[name] = getattr(args, name)
    for name in ("beta_start", "rate", "clone_updates", "aspc_steps"):
        if getattr(args, name) != getattr(Args, name):
            values[name] = getattr(args, name)
    state = {"step": 0, "args": asdict(settings) | values, "metadata": metadata, "history": []}
    if args.checkpoint:
        checkpoint = td3_bc_n.load_checkpoint(args.checkpoint, "td3_bc_n")
        may_differ = {"beta", "bc_inflation", "bc_inflation_steps", "gradient_steps"}
        for name in (checkpoint["args"].keys() - INCIDENTAL - may_differ) | {"seed"}:
            old, new = checkpoint["args"][name], state["args"][name]
            if old != new:  # its random stream goes on, so another seed would be the same run
                sys.exit(f"{args.checkpoint}: {name} is {old}, not {new}")
        for name in ("source", "transitions"):
            old, new = checkpoint["metadata"][name], metadata[name]
            if old != new:
                sys.exit(f"{args.checkpoint}: {name} of the dataset is {old}, not {new}")
        td3_bc_n.restore_checkpoint(checkpoint, agent, optimizers)
        state["step"] = checkpoint["step"]
    if args.steps <= state["step"]:
        sys.exit(f"--steps must be larger than {state['step']}")
    run_dir = Path(args.runs_dir, f"{re.sub('[/,]', '-', args.env_id)}__{label}__{seed}")
    run_dir.mkdir(parents=True)
    start_step, start_time = state["step"], time.monotonic()

    if rule == "dual":
        rng_state = torch.get_rng_state()
        epsilon = args.kappa * cloning_error(dataset, args.clone_updates)
        print(f"{run_dir.name}: target of the BC term {epsilon:.4g}")
        torch.set_rng_state(rng_state)
    log_beta, old_q = torch.tensor(math.log(args.beta_start)), None
    beta_optimizer = torch.optim.Adam([log_beta], lr=2e-3)
    time_constant = settings.policy_frequency / (settings.tau * (1 - settings.gamma))
    aspc_steps = args.aspc_steps or args.steps
    beta, bc_error = torch.zeros(()), math.nan
    for step in tqdm(range(start_step + 1, args.steps + 1), run_dir.name, disable=None):
        age = step / time_constant
        if rule == "paper":
            log_beta.fill_(math.log(args.beta_start / (1 if age <= 1.25 else 10)))
        elif rule == "decay":
            share = min(1, max(0, (age - 0.625) / (3.75 - 0.625)))
            log_beta.fill_(math.log(args.beta_start) - share * math.log(10))
        beta.copy_(log_beta.exp())
        update_actor = step % settings.policy_frequency == 0
        aspc_due = rule == "aspc" and step % (10 * settings.policy_frequency) == 0
        if aspc_due:
            actor = agent.actor.named_parameters()
            before = {name: p.detach().clone().requires_grad_() for name, p in actor}
        index = torch.randint(len(dataset.obs), (settings.batch_size,))
        batch = Transitions(*(column[index] for column in dataset))
        metrics = td3_bc_n.update(agent, optimizers, batch, beta, update_actor, settings)
        if update_actor:
            bc_error = metrics["losses/bc"].item()
        if update_actor and rule == "dual":
            log_beta.add_(args.rate * (metrics["losses/bc"] / epsilon - 1))
        elif update_actor and rule == "gap":
            with torch.no_grad():
                q = agent.critics(batch.obs, agent.actor(batch.obs)).amin(dim=0)
                gain = q.mean() - agent.critics(batch.obs, batch.actions).amin(dim=0).mean()
            ratio = gain / (args.delta * q.abs().mean())
            log_beta.add_(args.rate * (ratio - 1).clamp(-1, 1))
        elif aspc_due:
            index = torch.randint(len(dataset.obs), (settings.batch_size,))
            new_batch = Transitions(*(column[index] for column in dataset))
            log_beta.grad, q = aspc_gradient(
                agent, before, optimizers["actor"], batch, new_batch, beta, old_q
            )
            old_q = q if old_q is None else old_q.lerp(q, 0.05)
            beta_optimizer.param_groups[0]["lr"] = 2e-3 * 0.01 ** (step / aspc_steps)
            beta_optimizer.step()
        log_beta.clamp_(-7, 4)

        if step % args.eval_frequency == 0 or step == args.steps:
            sps = (step - start_step) / (time.monotonic() - start_time)
            state |= {"step": step, "returns": [], "steps_per_second": sps}
            if not all(weight.isfinite().all() for weight in [log_beta, *agent.parameters()]):
                message = f"step {step}: weights or beta not finite"
                td3_bc_n.write_result(run_dir, state, "diverged", message=message)
                print(f"{run_dir.name}: {message}", file=sys.stderr)
                return
            scores, state["returns"] = td3_bc_n.evaluate(
                agent, envs, args.eval_episodes, [seed, step], metadata
            )
            scores |= {"beta": beta.item(), "bc": bc_error}
            state["history"].append({"step": step, **scores})
            td3_bc_n.write_result(run_dir, state, "finished" if step == args.steps else "running")
            score = "score {score:.1f} +/- {score_stderr:.1f}, beta {beta:.3g}".format(**scores)
            tqdm.write(f"{run_dir.name}: step {step:,}, {score}")


def main(args):
    if not args.rules or min(args.seeds, default=-1) < 0:
        sys.exit("expected a rule, and --seeds of at least 0")
    for name in ("beta_start", "clone_updates", "eval_episodes", "eval_frequency"):
        if not getattr(args, name) > 0:  # also nan
            sys.exit(f"--{name.replace('_', '-')} must be above 0")
    torch.set_float32_matmul_precision(args.matmul_precision)
    torch.use_deterministic_algorithms(True)
    defaults = td3_bc_n.task_defaults(args.env_id)
    settings = td3_bc_n.Args(**{"env_id": args.env_id, **defaults})
    for rule in args.rules:
        for seed in args.seeds:
            try:
                train(rule, seed, args, settings)
            except OSError as error:
                sys.exit(f"{error}: choose another --runs-dir")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
