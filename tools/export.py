"""Writes the policy of a run as an ONNX file: raw observation in, action of the environment out.

    python -m tools.export runs/RUN                             (writes runs/RUN/policy.onnx)
    python -m tools.export runs/RUN --out hopper.onnx

The normalization of observations and the range of actions are inside the model, and the action is
the deterministic one of evaluation. Before the file is written, onnxruntime compares the model with
the agent, on observations of the dataset if it is on this machine, otherwise on random ones.
The file needs neither this project nor PyTorch. To play it:

    import json
    import gymnasium as gym, numpy as np, onnxruntime

    policy = onnxruntime.InferenceSession("policy.onnx")
    metadata = policy.get_modelmeta().custom_metadata_map
    keys = json.loads(metadata["observation_keys"])  # of a dict, in their order; otherwise []
    env = gym.make(metadata["environment"])
    obs, done, episode_return = env.reset(seed=1)[0], False, 0.0
    while not done:
        flat = np.concatenate([obs[key].ravel() for key in keys]) if keys else obs.ravel()
        action = policy.run(None, {"obs": flat[None].astype(np.float32)})[0][0]
        obs, reward, terminated, truncated, _ = env.step(action)
        done, episode_return = terminated or truncated, episode_return + reward

Input: obs, float32, (batch, obs_dim). Output: action, float32, (batch, action_dim). The metadata of
the file are strings, lists in JSON: algorithm, dataset, environment, step, score and score_step
(last evaluation), observation_keys, obs_dim, action_low, action_high; what a run lacks is left out.
"""

import contextlib
import io
import json
import os
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import tyro
from minari.storage.datasets_root_dir import get_dataset_path
from torch import nn

import d4rl_tasks
from tools import runs

try:
    import onnx
    import onnxruntime
except ModuleNotFoundError:
    onnx = None  # optional packages: main says what to install


@dataclass
class Args:
    run: tyro.conf.Positional[str]  # run directory or checkpoint.pt
    out: str | None = None  # file to write, .onnx (default: policy.onnx in the run directory)


class Policy(nn.Module):
    """(B, obs_dim) observations -> (B, action_dim) actions, both as the environment has them."""

    def __init__(self, agent, low, high):
        super().__init__()
        self.actor, self.obs_mean, self.obs_std = agent.actor, agent.obs_mean, agent.obs_std
        self.low, self.high = (torch.as_tensor(x, dtype=torch.float32) for x in (low, high))

    def forward(self, obs):
        actions = self.actor((obs - self.obs_mean) / self.obs_std)
        actions = self.low + (actions + 1) / 2 * (self.high - self.low)
        return actions.clamp(self.low, self.high)  # rounding can leave the range


def to_onnx(policy, properties):
    """The model as bytes. The same policy gives the same bytes."""
    file, batch = io.BytesIO(), {0: "batch"}
    with warnings.catch_warnings():
        # The newer exporter, dynamo=True, takes 8 s, needs onnxscript too, and writes the paths of
        # the code into the file.
        warnings.simplefilter("ignore", DeprecationWarning)
        torch.onnx.export(
            policy,
            (policy.obs_mean[None],),
            file,
            input_names=["obs"],
            output_names=["action"],
            dynamic_axes={"obs": batch, "action": batch},
            dynamo=False,
        )
    model = onnx.load_from_string(file.getvalue())
    for key, value in properties.items():
        if value is not None:
            value = value if isinstance(value, str) else json.dumps(value)
            model.metadata_props.add(key=key, value=value)
    onnx.checker.check_model(model)
    return model.SerializeToString(deterministic=True)


def sample_observations(args, settings, agent, metadata, num=1000):
    """Observations to check the model on, and in words what they are."""
    rng, env_id = np.random.default_rng(0), settings.env_id
    path_of = get_dataset_path if "/" in env_id else d4rl_tasks.file_path
    if metadata["dataset"] is None:
        reason = "the run has no dataset"
    elif not all(path_of(name).exists() for name in env_id.split(",")):
        reason = "the dataset is not on this machine"  # no download for a check
    else:
        try:
            obs = runs.load_run(args.run, needs_env=False)[3].obs
            return obs[rng.integers(len(obs), size=num)], f"{num:,} observations of {env_id}"
        except SystemExit as error:  # it is damaged, or other data than the run was trained on
            reason = error
    obs = rng.normal(agent.obs_mean, agent.obs_std, (num, len(agent.obs_mean)))
    return obs.astype(np.float32), f"{num:,} random observations N(obs_mean, obs_std) ({reason})"


def main(args):
    run_dir = Path(args.run) if Path(args.run).is_dir() else Path(args.run).parent
    out = Path(args.out or run_dir / "policy.onnx")
    if onnx is None:
        sys.exit("tools.export needs onnx and onnxruntime: pip install onnx onnxruntime")
    if out.suffix != ".onnx" or not out.parent.is_dir():
        sys.exit(f"{out}: expected an .onnx file in a directory that exists")
    try:
        checkpoint = runs.load_checkpoint(args.run)
        _, settings, agent = runs.load_agent(args.run)
        metadata, history = checkpoint["metadata"], checkpoint["history"]
        low, high = np.array(metadata["action_low"]), np.array(metadata["action_high"])
    except ValueError as error:
        sys.exit(str(error))
    except (KeyError, TypeError, RuntimeError) as error:  # other arguments, networks or metadata
        sys.exit(f"{args.run}: written by another version of this project ({error!r:.100})")
    with contextlib.suppress(ValueError):  # the checkpoint may be without its result.json
        if runs.read_run(run_dir).status == "diverged":
            sys.exit(f"{args.run}: the run diverged, its policy is not exported")

    properties = {"algorithm": checkpoint["algorithm"], "step": checkpoint["step"]}
    for key in ("dataset", "environment", "observation_keys", "action_low", "action_high"):
        properties[key] = metadata[key]
    properties["obs_dim"] = len(agent.obs_mean)
    if history and "score" in history[-1]:  # online, it can be of an earlier step
        properties |= {"score": history[-1]["score"], "score_step": history[-1]["step"]}
    model = to_onnx(Policy(agent, low, high), properties)

    # Sums in another order change float32 actions by 1e-7 to 5e-5 of their range, most if weights
    # are large; a mistake changes them by more than 1e-4. rtol: for bounds such as [10000, 10001].
    obs, words = sample_observations(args, settings, agent, metadata)
    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    batches = (obs, obs[:1], obs[:7])
    actions = np.concatenate([session.run(None, {"obs": batch})[0] for batch in batches])
    expected = low + (high - low) * (agent.act(np.concatenate(batches)) + 1) / 2
    difference = np.max(np.abs(actions - expected) / (high - low))
    comparison = f"differs from the agent by {difference:.0e} of the action range, on {words}"
    if not np.allclose(actions, expected, rtol=1e-6, atol=1e-4 * (high - low)):
        sys.exit(f"{out}: not written, {comparison}")

    temporary = out.with_suffix(".tmp")
    try:
        temporary.write_bytes(model)
        os.replace(temporary, out)
    except OSError as error:
        sys.exit(f"{out}: cannot be written ({error})")
    finally:
        with contextlib.suppress(OSError):  # it is not there, or the disk is read-only
            temporary.unlink()
    print(f"{out}: obs_dim {len(agent.obs_mean)}, action_dim {len(low)}, {len(model):,} bytes")
    print(comparison)


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
