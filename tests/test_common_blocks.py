"""What the scripts share is the same text, so that their diffs show only the algorithms."""

import difflib

import pytest
from common_blocks import PAIRS, blocks, common, merged
from conftest import ROOT


def changed_lines(a, b):
    diff = difflib.ndiff(a.splitlines(), b.splitlines())
    return [" ".join(line.split()) for line in diff if line[0] in "+-"]


@pytest.mark.parametrize(("source", "script", "own"), PAIRS)
def test_common_blocks_are_identical_and_in_the_same_order(source, script, own):
    assert merged(source, script, own) == (ROOT / f"{script}.py").read_text()
    assert len(common(source, script, own)) > 30


@pytest.mark.parametrize(
    ("one", "other"), [("td3_bc_n", "sac_bc_n"), ("finetune_td3_bc_n", "finetune_sac_bc_n")]
)
def test_the_main_programs_of_td3_and_sac_differ_in_a_few_lines(one, other):
    """Delayed actor updates in TD3, the optimizer of alpha and the sampled action in SAC."""
    changed = changed_lines(blocks(one)["__main__"], blocks(other)["__main__"])
    assert len(changed) <= 20


@pytest.mark.parametrize(
    ("one", "other", "limit"),
    [
        ("td3_bc_n", "sac_bc_n", 135),
        ("finetune_td3_bc_n", "finetune_sac_bc_n", 130),
        ("td3_bc_n", "finetune_td3_bc_n", 265),
        ("sac_bc_n", "finetune_sac_bc_n", 265),
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
