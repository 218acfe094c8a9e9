"""The documents are true: every command runs, every link and line is there."""

import importlib.util
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import tyro
from conftest import ROOT

import d4rl_tasks

DOCUMENTS = ["README.md", "docs/walkthrough.md"]
FILES = [*DOCUMENTS, *(f"{p}bc_n.py" for p in ("td3_", "sac_", "finetune_td3_", "finetune_sac_"))]
FILES += ["plot.py", "enjoy.py", "benchmarks/speed.py", "datasets/make_maze2d.py"]
FILES += ["docs/figures.py"]


def commands():
    """Every command in the documents, and in the docstrings of the scripts."""
    found = []
    for name in FILES:
        text = (ROOT / name).read_text()
        if name.endswith(".py"):
            text = text.split('"""')[1]
        lines = re.findall(r"^(?:    )?((?:pip|python|tensorboard) .*)$", text, flags=re.MULTILINE)
        lines += re.findall(r"`((?:python|tensorboard) [^`]*)`", text)
        found += [re.sub(r"\s+\([a-z].*\)$|\s+\(1M .*\)$", "", line) for line in lines]
    return sorted({part.strip() for line in found for part in line.split("&&")})


SHORT = {
    "td3_bc_n.py": "--gradient-steps 2 --num-critics 2 --eval-episodes 1 --final-eval-episodes 1",
    "finetune_td3_bc_n.py": "--env-steps 2 --learning-starts 20 --eval-episodes 1"
    " --final-eval-episodes 1",
    "plot.py": "--out plots",
    "enjoy.py": "--episodes 1",
    "benchmarks/speed.py": "--seconds 0.1 --task maze2d-umaze-v1 --num-critics 2",
    "datasets/make_maze2d.py": "--steps 700 --out made.hdf5",
    "docs/figures.py": "--out .",
}
SHORT["sac_bc_n.py"] = SHORT["td3_bc_n.py"]
SHORT["finetune_sac_bc_n.py"] = SHORT["finetune_td3_bc_n.py"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A copy of the project, with a run of each algorithm in it."""
    root = tmp_path_factory.mktemp("readme") / "project"
    shutil.copytree(ROOT, root, ignore=shutil.ignore_patterns(".*", "runs", "__pycache__"))
    return root, {name: offline_run(root, name) for name in ("td3_bc_n", "sac_bc_n")}


def offline_run(root, name):
    folder = f"runs-{name}"
    command = [sys.executable, f"{name}.py", *SHORT["td3_bc_n.py"].split(), "--runs-dir", folder]
    subprocess.run(command, cwd=root, check=True, capture_output=True)
    return next((root / folder).iterdir())


def args_of(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module.Args


def shortened(script, words, runs):
    """The arguments of a command as a test can run it."""
    own = "sac_bc_n" if "sac" in script else "td3_bc_n"
    words = [re.sub(r"^runs/RUN\d?", str(runs[own]), word) for word in words]
    words = ["runs-td3_bc_n" if word == "runs" else word for word in words]
    if "--help" in words:
        return words
    if "--minari" in words:
        return [*words, "--steps", "700"]
    if "--resume" in words:
        return [*words, "--gradient-steps", "3"]
    words += SHORT[script].split()
    if "speed.py" in script and "--script" not in words:
        words += ["--script", "td3_bc_n"]
    if "--save-dataset" in words:
        words[words.index("--save-dataset") + 1] = f"tests/of-{own.replace('_', '-')}/hopper-v0"
        words += ["--num-critics", "2"]
    return words


@pytest.mark.parametrize("command", commands())
def test_every_command_of_the_documents_runs(command, folder, monkeypatch):
    root, runs = folder
    program, script, *words = shlex.split(command)
    if program == "pip" or script == "-m":
        return  # CI installs and tests by these very commands
    if program == "tensorboard":
        assert Path(sys.executable).with_name("tensorboard").exists()
        return
    if "--env-id" in words and not {"--from-scratch", "--help"} & set(words):
        # Its data is not on this machine: that it would be understood is what can be seen.
        monkeypatch.setattr(sys, "argv", [script, *words])
        args, *_ = importlib.import_module(script.removesuffix(".py")).parse_args()
        assert args.env_id in d4rl_tasks.TASKS or "/" in args.env_id
        return
    if {"--loops", "--device", "--window"} & set(words):  # minutes, a GPU, a screen
        tyro.cli(args_of(root / script), args=words)
        return
    short = shortened(script, words, runs)
    (root / "made.hdf5").unlink(missing_ok=True)
    done = subprocess.run(
        [sys.executable, script, *short], cwd=root, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


def test_the_first_command_is_the_one_without_arguments_and_ci_runs_the_second():
    blocks = re.findall(r"^```\n(.*)\n```$", (ROOT / "README.md").read_text(), flags=re.MULTILINE)
    assert blocks[:2] == [
        "pip install -r requirements.txt && python td3_bc_n.py",
        "pip install -r requirements.txt && python -m pytest tests",
    ]


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_link_and_line_of_the_documents_is_there(document):
    text = (ROOT / document).read_text()
    headings = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    anchors = {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}
    links = re.findall(r"\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)", text)
    assert len(links) > 15
    for label, target in links:
        if target.startswith("http"):
            continue
        name, _, anchor = target.partition("#")
        file = (ROOT / document).parent / name if name else ROOT / document
        assert file.exists(), target
        if anchor.startswith("L"):
            lines, code = file.read_text().splitlines(), label.strip("`")
            there = [i + 1 for i, line in enumerate(lines) if code in line]
            assert int(anchor[1:]) in there, f"{code} is in lines {there} of {name}, not {anchor}"
        elif anchor:
            assert anchor in anchors, target


def test_the_table_of_the_papers_results_is_that_of_plot():
    import plot

    rows = re.findall(
        r"^\| (\S+-v\d) \| ([\d.]+) \| ([\d.]+) \| `(.*)` \| `(.*)` \|$",
        (ROOT / "README.md").read_text(),
        flags=re.MULTILINE,
    )
    assert {name: (float(a), float(b)) for name, a, b, _, _ in rows} == plot.PAPER
    for name, _, _, td3, sac in rows:
        assert td3 == f"python td3_bc_n.py --env-id {name}"
        assert sac == f"python sac_bc_n.py --env-id {name}"
