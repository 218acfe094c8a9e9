"""What the scripts share is the same text, so that their diffs show only the algorithms."""

import difflib
import shutil

import common_blocks
import pytest
from common_blocks import PAIRS, blocks, common, merged
from conftest import ROOT

PAIR = pytest.mark.parametrize(("source", "script", "own"), PAIRS, ids=[pair[1] for pair in PAIRS])
LINES = {  # that differ at most: in the whole files, and in the main programs
    ("td3_bc_n", "sac_bc_n"): (134, 13),
    ("td3_bc_n", "finetune_td3_bc_n"): (251, 97),
    ("sac_bc_n", "finetune_sac_bc_n"): (253, 93),
    ("finetune_td3_bc_n", "finetune_sac_bc_n"): (124, 15),
    ("td3_bc_n", "baselines/td3_bc"): (89, 12),
    ("sac_bc_n", "baselines/edac"): (109, 12),
    ("sac_bc_n", "baselines/msg"): (108, 12),
    ("sac_bc_n", "baselines/cql"): (118, 12),
    ("sac_bc_n", "baselines/iql"): (188, 20),
    ("td3_bc_n", "baselines/bc"): (198, 31),
}


def changed_lines(one, other):
    """As diff counts them: without autojunk, lines that are frequent are compared, too."""
    one, other = one.splitlines(), other.splitlines()
    matcher = difflib.SequenceMatcher(None, one, other, autojunk=False)
    same = sum(match.size for match in matcher.get_matching_blocks())
    return len(one) + len(other) - 2 * same


def test_every_baseline_is_compared():
    scripts = {f"baselines/{path.stem}" for path in (ROOT / "baselines").glob("[a-z]*.py")}
    assert {script for _, script, _ in PAIRS if "/" in script} == scripts


@PAIR
def test_common_blocks_are_identical_and_in_the_same_order(source, script, own):
    assert merged(source, script, own) == (ROOT / f"{script}.py").read_text()
    assert len(common(source, own)) > 30


@PAIR
def test_a_diff_shows_little_more_than_the_algorithm(source, script, own):
    limit, main_limit = LINES[source, script]
    one, other = ((ROOT / f"{name}.py").read_text() for name in (source, script))
    assert changed_lines(one, other) <= limit
    assert changed_lines(blocks(source)["__main__"], blocks(script)["__main__"]) <= main_limit


def test_a_changed_block_is_named_and_written_into_the_other_scripts(tmp_path, monkeypatch, capsys):
    (tmp_path / "baselines").mkdir()
    for name in {name for pair in PAIRS for name in pair[:2]}:
        shutil.copy(ROOT / f"{name}.py", tmp_path / f"{name}.py")
    monkeypatch.setattr(common_blocks, "ROOT", tmp_path)
    source = tmp_path / "td3_bc_n.py"
    old, new = "def wrap_env(env):", "def wrap_env(env):  # changed"
    source.write_text(source.read_text().replace(old, new))
    with pytest.raises(SystemExit):
        common_blocks.main(write=False)
    assert "sac_bc_n.py: wrap_env (from td3_bc_n.py)" in capsys.readouterr().out
    assert "changed" not in (tmp_path / "sac_bc_n.py").read_text()
    common_blocks.main(write=True)
    for path in tmp_path.rglob("*.py"):
        original = (ROOT / path.relative_to(tmp_path)).read_text()
        assert path.read_text() == original.replace(old, new)
    common_blocks.main(write=False)  # nothing is left to do: no exit code 1
