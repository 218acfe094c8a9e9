"""What the scripts share is the same text, so that their diff shows only the algorithms."""

import ast
import difflib

import pytest
from conftest import ROOT

# What may differ between the two algorithms; everything else is the same to the letter.
ALGORITHM = {
    "Args",
    "Task",
    "TASKS",
    "Policy",
    "sample",
    "log_prob",
    "Agent",
    "critic_loss",
    "policy_loss",
    "alpha_loss",
    "make_optimizers",
    "update",
}


def blocks(script):
    """The top-level statements of a script, by name, with the comments above them."""
    text = (ROOT / f"{script}.py").read_text()
    lines, found, end = text.splitlines(), {}, 0
    for node in ast.parse(text).body:
        name = getattr(node, "name", None) or ast.unparse(getattr(node, "targets", [node])[0])
        name = "__main__" if isinstance(node, ast.If) else name.splitlines()[0]
        assert name not in found
        found[name] = "\n".join(lines[end : node.end_lineno])
        end = node.end_lineno
    return found


def changed_lines(a, b):
    diff = difflib.ndiff(a.splitlines(), b.splitlines())
    return [line for line in diff if line[0] in "+-"]


def test_common_blocks_are_identical_and_in_the_same_order():
    td3, sac = blocks("td3_bc_n"), blocks("sac_bc_n")
    for found in (td3, sac):
        del found[next(iter(found))]  # the docstring, with each algorithm's own equations
    common = [name for name in td3 if name in sac]
    assert common == [name for name in sac if name in td3]
    assert set(td3) ^ set(sac) <= ALGORITHM
    for name in common:
        if name not in ALGORITHM | {"__main__"}:
            assert td3[name] == sac[name], f"{name} differs"
    assert len(common) > 30


def test_the_main_programs_differ_in_the_update_and_the_target_entropy():
    changed = changed_lines(blocks("td3_bc_n")["__main__"], blocks("sac_bc_n")["__main__"])
    call = "losses |= update(agent, optimizers, [column[index] for column in data], beta"
    assert [" ".join(line.split()) for line in changed] == [
        "+ if args.target_entropy is None:",
        "+ args.target_entropy = -float(data[1].shape[1])",
        f"- {call}, step, args)",
        f"+ {call}, args)",
    ]


@pytest.mark.parametrize("block", ["Args", "Task", "Agent", "critic_loss"])
def test_inside_the_algorithm_too_most_lines_are_shared(block):
    td3, sac = blocks("td3_bc_n")[block], blocks("sac_bc_n")[block]
    assert len(changed_lines(td3, sac)) <= 12
