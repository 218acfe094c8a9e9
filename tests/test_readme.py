"""The documents are true: commands run, links and lines exist."""

import importlib
import re
import shlex
import sys

import pytest
import tyro
from conftest import ROOT

import d4rl_tasks

DOCUMENTS = ["README.md", *(f"docs/{p.name}" for p in sorted((ROOT / "docs").glob("*.md")))]
SCRIPTS = [f"{p}bc_n.py" for p in ("td3_", "sac_", "finetune_td3_", "finetune_sac_")]
SCRIPTS += [f"baselines/{p.name}" for p in sorted((ROOT / "baselines").glob("[a-z]*.py"))]
MODULES = sorted(
    str(path.relative_to(ROOT))
    for folder in ("tools", "studies")
    for path in (ROOT / folder).glob("*.py")
    if '__name__ == "__main__"' in path.read_text()
)


def commands():
    """Every command in the documents, and in the docstrings of scripts, tools and studies."""
    found = []
    for name in [*DOCUMENTS, *SCRIPTS, *MODULES]:
        text = (ROOT / name).read_text()
        if name.endswith(".py"):
            text = text.split('"""')[1]
        lines = re.findall(r"^(?:    )?((?:pip|python|tensorboard) .*)$", text, flags=re.MULTILINE)
        lines += re.findall(r"`((?:python|tensorboard) [^`]*)`", text)
        comment = r"\s+(#.*|\([^()]*(?:\([^()]*\))?[^()]*\))$"
        found += [re.sub(comment, "", line) for line in lines]
    return sorted({part.strip() for line in found for part in line.split("&&")})


def parse(module, arguments, monkeypatch):
    """Parses a command as its program does, without running it."""
    if module.startswith("tools.sweep"):
        return importlib.import_module(module)  # its own tests run its commands
    monkeypatch.setattr(sys, "argv", [module, *arguments])
    program = importlib.import_module(module)
    if "--help" in arguments:
        with pytest.raises(SystemExit) as stop:
            program.parse_args() if hasattr(program, "parse_args") else tyro.cli(program.Args)
        assert stop.value.code in (0, None)
        return None
    if hasattr(program, "parse_args"):
        return program.parse_args()[0]
    return tyro.cli(program.Args, args=arguments)


@pytest.mark.parametrize("command", commands())
def test_every_command_is_understood(command, monkeypatch, offline_runs, capsys):
    program, *words = shlex.split(command)
    if program in ("pip", "tensorboard") or words[:2] == ["-m", "pytest"]:
        return  # CI installs and tests with these commands
    if words[0] == "-c":
        compile(words[1], command, "exec")
        return
    module = words[1] if words[0] == "-m" else words[0].removesuffix(".py").replace("/", ".")
    words = words[2:] if words[0] == "-m" else words[1:]
    algorithm = "sac_bc_n" if "sac" in module else "td3_bc_n"
    words = [
        re.sub(r"^runs/(RUN\w*|hopper-\w+-bc-n)$", str(offline_runs[algorithm]), word)
        for word in words
    ]
    if "--resume" in words and "--gradient-steps" not in words:
        words += ["--gradient-steps", "3"]  # the run of this test is finished
    args = parse(module, words, monkeypatch)
    env_id = getattr(args, "env_id", None)
    if env_id and "finetune" not in module and module != "tools.import_data":
        assert env_id in d4rl_tasks.TASKS or "/" in env_id


@pytest.fixture(scope="module")
def offline_runs(tmp_path_factory):
    from conftest import run_script

    root = tmp_path_factory.mktemp("readme")
    short = ["--gradient-steps", 2, "--num-critics", 10, "--eval-episodes", 1, "--runs-dir", root]
    for script in ("td3_bc_n", "sac_bc_n"):
        done = run_script(script, *short, "--run-name", script)
        assert done.returncode == 0, done.stderr
    return {script: root / script for script in ("td3_bc_n", "sac_bc_n")}


def test_the_first_two_blocks_are_the_two_commands():
    blocks = re.findall(r"^```\n(.*)\n```$", (ROOT / "README.md").read_text(), flags=re.MULTILINE)
    assert blocks[:2] == [
        "pip install -r requirements.txt && python td3_bc_n.py",
        "pip install -r requirements.txt && python -m pytest tests",
    ]


def test_the_fine_tuning_command_that_a_run_prints_works(offline_runs, run):
    printed = run("td3_bc_n", "--gradient-steps", 2, "--num-critics", 2, "--eval-episodes", 1)
    command = printed[0].stdout.splitlines()[-1].split("fine-tune: ")[1]
    program, script, *arguments = shlex.split(command)
    assert (program, script) == ("python", str(ROOT / "finetune_td3_bc_n.py")), "with its path"
    short = ["--env-steps", 2, "--learning-starts", 20, "--eval-episodes", 1]
    run("finetune_td3_bc_n", *arguments, *short)


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_link_and_line_exists(document):
    text = (ROOT / document).read_text()
    links = re.findall(r"\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)", text)
    for label, target in links:
        if target.startswith("http"):
            continue
        name, _, anchor = target.partition("#")
        file = (ROOT / document).parent / name if name else ROOT / document
        assert file.exists(), target
        if anchor and file.suffix == ".md":
            found = re.findall("^#+ (.*)$", file.read_text(), flags=re.MULTILINE)
            headings = [re.sub(r"[^\w\- ]", "", x.lower()).replace(" ", "-") for x in found]
            assert anchor in headings, target
        if anchor.startswith("L"):
            lines, code = file.read_text().splitlines(), label.strip("`")
            found = [i + 1 for i, line in enumerate(lines) if code in line]
            assert int(anchor[1:]) in found, f"{code} is in lines {found} of {name}, not {anchor}"


def test_the_hyperparameters_of_the_readme_are_those_of_the_scripts():
    import finetune_sac_bc_n
    import finetune_td3_bc_n
    import sac_bc_n
    import td3_bc_n

    rows = re.findall(r"^\| (.*→.*) \|$", (ROOT / "README.md").read_text(), flags=re.MULTILINE)
    rows = {row.split(" | ")[0]: row.split(" | ")[1:] for row in rows[1:]}  # without the header
    tasks = {
        "maze2d-medium, -large": "maze2d-large",
        "antmaze-umaze, -umaze-diverse": "antmaze-umaze",
    }
    tasks |= {"antmaze-medium-*": "antmaze-medium", "antmaze-large-*": "antmaze-large"}
    tasks["pen, hammer, door, relocate"] = "pen"
    assert len(rows) == 10
    for label, (targets, td3, sac, _, episodes) in rows.items():
        defaults = []
        for script in (td3_bc_n, sac_bc_n, finetune_td3_bc_n, finetune_sac_bc_n):
            task = script.TASK_DEFAULTS.get(tasks.get(label, label), {})
            defaults.append(script.Args(**task))
        offline_td3, offline_sac, online_td3, online_sac = defaults
        assert (targets == "independent") is offline_td3.independent_targets
        assert float(td3.split(" → ")[0]) == offline_td3.beta
        assert float(td3.split(" → ")[1]) == online_td3.beta_end
        form, betas = sac.split(", ")
        assert form == offline_sac.bc_form
        assert float(betas.split(" → ")[0]) == offline_sac.beta
        assert float(betas.split(" → ")[1]) == online_sac.beta_end
        assert int(episodes) == offline_sac.eval_episodes
