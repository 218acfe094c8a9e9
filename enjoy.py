"""Watch what a run has learned: a video or a window, and the score of every episode.

python enjoy.py runs/RUN                          (writes runs/RUN/enjoy.mp4)
python enjoy.py runs/RUN --episodes 5 --out ant.gif
python enjoy.py runs/RUN --window
"""

import importlib
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import gymnasium as gym
import imageio
import minari
import torch
import tyro

SCRIPTS = ("td3_bc_n", "sac_bc_n", "finetune_td3_bc_n", "finetune_sac_bc_n")


@dataclass
class Args:
    run: tyro.conf.Positional[str]  # a run's directory, or its checkpoint.pt
    episodes: int = 3  # how many to play
    seed: int = 1  # of the first episode; the others have the next ones
    out: str | None = None  # a .mp4 or .gif file to write (enjoy.mp4 in the run's directory)
    window: bool = False  # show it in a window instead
    size: int = 320  # of the video, in pixels
    fps: int = 25  # of the video; a faster environment is shown every few steps


def make_env(script, args, facts, **render):
    """The environment in which the run was evaluated."""
    if facts.get("source", "").startswith("Minari"):
        dataset = minari.load_dataset(facts["dataset"].split(",")[0])
        return script.make_minari_env(dataset, script.task_of(args.env_id), **render)
    import d4rl_tasks  # it registers D4RL's names

    # By its spec, one of D4RL's is made without Gymnasium's word that there is a newer version.
    name = gym.spec(args.env_id) if args.env_id in d4rl_tasks.TASKS else args.env_id
    return script.wrap(gym.make(name, **render))


def play(agent, env, seed, every):
    """One episode: its return, and every so many steps a frame."""
    observation, _ = env.reset(seed=seed)
    total, frames, step, over = 0.0, [], 0, False
    while not over:
        if step % every == 0:
            frames.append(env.render())
        observation, reward, terminated, truncated, _ = env.step(agent.act(observation[None])[0])
        total, step, over = total + reward, step + 1, terminated or truncated
    return total, frames


def main(args):
    if not args.window and sys.platform == "linux" and "DISPLAY" not in os.environ:
        os.environ.setdefault("MUJOCO_GL", "egl")  # pictures without a screen
    path = Path(args.run, "checkpoint.pt") if Path(args.run).is_dir() else Path(args.run)
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
        name, facts = checkpoint["script"], checkpoint["facts"]
    except Exception as error:  # torch.load has many ways to fail on a file that is not its own
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        sys.exit(f"{path}: not a checkpoint of these scripts ({reason})")
    if name not in SCRIPTS:
        sys.exit(f"{path}: a checkpoint of {name}, which is none of {', '.join(SCRIPTS)}")
    out = Path(args.out or path.with_name("enjoy.mp4"))
    if out.suffix not in (".mp4", ".gif") or not out.parent.is_dir():
        sys.exit(f"--out {out}: a .mp4 or .gif file in a folder that exists, please")
    if min(args.episodes, args.fps, args.size) < 1:
        sys.exit("--episodes, --fps and --size are at least 1")

    script = importlib.import_module(name)
    settings = script.Args(**checkpoint["args"])
    mode = {"render_mode": "human" if args.window else "rgb_array"}
    size = {} if args.window else {"width": args.size, "height": args.size}
    try:
        try:
            env = make_env(script, settings, facts, **mode, **size)
        except TypeError:  # only MuJoCo's environments have a size
            env = make_env(script, settings, facts, **mode)
        env.reset(seed=args.seed)
        env.render()
    except Exception as error:  # the data set, the environment or a renderer is not there
        sys.exit(f"{settings.env_id}: its environment cannot be made here ({error})")
    weights = checkpoint["agent"]
    agent = script.Agent(weights["obs_mean"].shape[0], env.action_space.shape[0], settings)
    agent.load_state_dict(weights)

    speed = env.metadata.get("render_fps", args.fps)
    every = max(1, round(speed / args.fps))
    low, high = facts["random_return"], facts["expert_return"]
    frames = []
    for episode in range(args.episodes):
        total, seen = play(agent, env, args.seed + episode, every)
        frames += seen
        score = 100 * (total - low) / (high - low)
        print(f"episode {episode + 1}: return {total:.1f}, normalised score {score:.1f}")
    env.close()
    if not args.window:
        rate = {"duration": 1000 * every / speed, "loop": 0}
        imageio.mimsave(out, frames, **(rate if out.suffix == ".gif" else {"fps": speed / every}))
        print(f"{out}: {len(frames)} frames")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
