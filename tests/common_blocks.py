"""What the scripts share is the same text, so that their diffs show only the algorithms.

    python -m tests.common_blocks              (names the blocks that differ)
    python -m tests.common_blocks --write      (copies changed blocks into the other scripts)

A block is a top-level statement (an import, a constant, a function, a class) with the comments
above it. The first script of a pair is the source. Blocks named in the third column are the
algorithm: the second script has its own. The docstring and the main program are never copied.
"""

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
OWN = {"__doc__", "__main__", "ALGORITHM"}
# What differs between TD3-BC-N and SAC-BC-N ...
SAC = {"Args", "TASK_DEFAULTS", "INHERITED", "Actor", "Agent", "critic_loss", "actor_loss"}
SAC |= {"alpha_loss", "update"}
# ... and between offline and online.
ONLINE = {"Args", "ANTMAZE", "ADROIT", "TINY", "TASK_DEFAULTS", "INHERITED", "beta_schedule"}
ONLINE |= {"ReplayBuffer", "load_env", "set_statistics", "parse_args"}
# The methods to compare with: what nearly all of them change, networks of two layers, ...
BASELINE = {"Args", "ANTMAZE", "ADROIT", "TASK_DEFAULTS", "critic_loss", "actor_loss", "update"}
TWO_LAYERS = {"CriticEnsemble", "Actor"}
# ... what IQL has instead of the entropy, and all that cloning does not need.
IQL = {"Agent", "alpha_loss", "set_statistics", "parse_args"}
NO_CRITICS = {"import copy", "from itertools import pairwise", "Agent", "polyak_update"}
NO_CRITICS |= {"TINY", "set_statistics", "ensemble_statistics"}
PAIRS = [  # (source, script, blocks of its own)
    ("td3_bc_n", "sac_bc_n", SAC),
    ("td3_bc_n", "finetune_td3_bc_n", ONLINE),
    ("sac_bc_n", "finetune_sac_bc_n", ONLINE),
    ("finetune_td3_bc_n", "finetune_sac_bc_n", SAC),
    ("td3_bc_n", "baselines/td3_bc", BASELINE | TWO_LAYERS),
    ("sac_bc_n", "baselines/edac", BASELINE),
    ("sac_bc_n", "baselines/msg", BASELINE - {"ANTMAZE", "ADROIT"} | {"parse_args"}),
    ("sac_bc_n", "baselines/cql", BASELINE),
    ("sac_bc_n", "baselines/iql", BASELINE | TWO_LAYERS | IQL),
    ("td3_bc_n", "baselines/bc", BASELINE | TWO_LAYERS | NO_CRITICS),
]


def blocks(script):
    """The top-level statements of a script by name, with the comments above them."""
    text = (ROOT / f"{script}.py").read_text()
    lines, found, end = text.splitlines(), {}, 0
    for node in ast.parse(text).body:
        target = getattr(node, "targets", [getattr(node, "target", node)])[0]
        name = getattr(node, "name", None) or ast.unparse(target)
        name = "__main__" if isinstance(node, ast.If) else name.splitlines()[0]
        name = name if end else "__doc__"
        found[name] = found.get(name, "") + "\n".join(lines[end : node.end_lineno]) + "\n"
        end = node.end_lineno
    return found


def common(source, own):
    """Names of the blocks that both must have, in the order of the source."""
    return [name for name in blocks(source) if name not in own | OWN]


def merged(source, script, own):
    """The text that the script should have: its own blocks, and the common ones of the source."""
    theirs, ours = blocks(source), blocks(script)
    only_ours, previous = {}, None
    for name in ours:  # blocks that the source does not have stay behind their predecessor
        if name in theirs:
            previous = name
        else:
            only_ours.setdefault(previous, []).append(name)
    text = ""
    for name in theirs:
        if name in own | OWN:
            text += ours.get(name, "")
        else:
            text += theirs[name]
        text += "".join(ours[other] for other in only_ours.get(name, []))
    return text


def main(write):
    changed = False
    for source, script, own in PAIRS:
        path, text = ROOT / f"{script}.py", merged(source, script, own)
        if text == path.read_text():
            continue
        changed = True
        ours, theirs = blocks(script), blocks(source)
        names = [n for n in common(source, own) if ours.get(n) != theirs[n]]
        print(f"{script}.py: {', '.join(names) or 'order of blocks'} (from {source}.py)")
        if write:
            path.write_text(text)
    if changed and not write:
        sys.exit(1)


if __name__ == "__main__":
    main("--write" in sys.argv)
