"""What the scripts share is the same text, so that their diffs show only the algorithms."""

import ast
import difflib

import pytest
from conftest import ROOT

# What differs between TD3-BC-N and SAC-BC-N ...
ALGORITHM = {"Args", "TASK_DEFAULTS", "INHERITED", "Actor", "Agent", "critic_loss", "actor_loss"}
ALGORITHM |= {"alpha_loss", "update"}
# ... and between offline and online. All other blocks are the same, byte for byte.
ONLINE = {"Args", "ANTMAZE", "ADROIT", "TINY", "TASK_DEFAULTS", "INHERITED", "beta_schedule"}
ONLINE |= {"ReplayBuffer", "load_env", "set_statistics", "ensemble_statistics", "parse_args"}
PAIRS = [
    ("td3_bc_n", "sac_bc_n", ALGORITHM),
    ("finetune_td3_bc_n", "finetune_sac_bc_n", ALGORITHM),
    ("td3_bc_n", "finetune_td3_bc_n", ONLINE),
    ("sac_bc_n", "finetune_sac_bc_n", ONLINE),
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
        found[name] = found.get(name, "") + "\n".join(lines[end : node.end_lineno])
        end = node.end_lineno
    return found


def changed_lines(a, b):
    diff = difflib.ndiff(a.splitlines(), b.splitlines())
    return [" ".join(line.split()) for line in diff if line[0] in "+-"]


@pytest.mark.parametrize(("one", "other", "different"), PAIRS)
def test_common_blocks_are_identical_and_in_the_same_order(one, other, different):
    a, b = blocks(one), blocks(other)
    common = [name for name in a if name in b]
    assert common == [name for name in b if name in a]
    assert set(a) ^ set(b) <= different
    for name in common:
        if name not in different | {"__main__", "__doc__"}:
            assert a[name] == b[name], f"{name} differs"
    assert len(set(common) - different) > 30


@pytest.mark.parametrize(("one", "other"), [pair[:2] for pair in PAIRS[:2]])
def test_the_main_programs_of_td3_and_sac_differ_in_a_few_lines(one, other):
    """Delayed actor updates in TD3, the optimizer of alpha and the sampled action in SAC."""
    changed = changed_lines(blocks(one)["__main__"], blocks(other)["__main__"])
    assert len(changed) <= 20


@pytest.mark.parametrize(
    ("one", "other", "limit"),
    [
        ("td3_bc_n", "sac_bc_n", 130),
        ("finetune_td3_bc_n", "finetune_sac_bc_n", 130),
        ("td3_bc_n", "finetune_td3_bc_n", 240),
        ("sac_bc_n", "finetune_sac_bc_n", 240),
    ],
)
def test_a_diff_of_two_scripts_is_short(one, other, limit):
    a, b = ((ROOT / f"{script}.py").read_text().splitlines() for script in (one, other))
    diff = list(difflib.unified_diff(a, b, n=0))[2:]
    assert sum(line[0] in "+-" for line in diff) <= limit


@pytest.mark.parametrize("block", ["Args", "Agent", "critic_loss"])
def test_inside_the_algorithm_too_most_lines_are_shared(block):
    td3, sac = blocks("td3_bc_n")[block], blocks("sac_bc_n")[block]
    assert len(changed_lines(td3, sac)) <= 12
