"""What the scripts share is the same text, so that their diffs show only the algorithms."""

import ast
import difflib

import pytest
from conftest import ROOT

# What differs between TD3-BC-N and SAC-BC-N ...
ALGORITHM = {"Args", "Task", "TASKS", "Policy", "sample", "log_prob", "Agent", "critic_loss"}
ALGORITHM |= {"policy_loss", "alpha_loss", "make_optimizers", "update", "explore"}
# ... and between offline and online. Everything else is the same, byte for byte.
ONLINE = {
    "Args",
    "Task",
    "TASKS",
    "TINY_RUN",
    "restore",
    "parse_args",
    "explore",
    "beta_at",
    "collect",
    "sample_batch",
}
ONLINE |= {"ReplayBuffer", "Recorder", "stability", "load_data", "no_data"}
ONLINE |= {"env_state", "set_env_state", "resume_online"}
ONLINE |= {"from dataclasses import dataclass", "from dataclasses import dataclass, replace"}
ONLINE |= {"from minari.data_collector.episode_buffer import EpisodeBuffer"}
ONLINE |= {"from minari.dataset.minari_dataset import parse_dataset_id"}
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
        name = getattr(node, "name", None) or ast.unparse(getattr(node, "targets", [node])[0])
        name = "__main__" if isinstance(node, ast.If) else name.splitlines()[0]
        name = name if end else "__doc__"
        assert name not in found
        found[name] = "\n".join(lines[end : node.end_lineno])
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
def test_the_main_programs_differ_in_the_policys_turn_and_the_target_entropy(one, other):
    changed = changed_lines(blocks(one)["__main__"], blocks(other)["__main__"])
    assert [line for line in changed if line[0] == "-"] == [
        "- def learn(policy_turn):",
        "- return update(agent, optimizers, batch, beta, policy_turn, args)",
        "- losses |= learn(step % args.policy_frequency == 0)",
    ]
    assert [line for line in changed if line[0] == "+"] == [
        "+ if args.target_entropy is None:",
        "+ args.target_entropy = -float(data[1].shape[1])",
        "+ def learn():",
        "+ return update(agent, optimizers, batch, beta, args)",
        "+ losses |= learn()",
    ]


@pytest.mark.parametrize(("one", "other"), [pair[:2] for pair in PAIRS[2:]])
def test_the_main_programs_of_offline_and_online_share_most_lines(one, other):
    offline, online = blocks(one)["__main__"], blocks(other)["__main__"]
    removed = [line for line in changed_lines(offline, online) if line[0] == "-"]
    assert len(removed) < len(offline.splitlines()) / 4


@pytest.mark.parametrize("block", ["Args", "Task", "Agent", "critic_loss"])
def test_inside_the_algorithm_too_most_lines_are_shared(block):
    td3, sac = blocks("td3_bc_n")[block], blocks("sac_bc_n")[block]
    assert len(changed_lines(td3, sac)) <= 12
