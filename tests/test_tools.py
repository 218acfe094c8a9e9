"""plot.py, enjoy.py and docs/figures.py, on real short runs; and what a run says at its end."""

import json
import subprocess
import sys

import imageio.v3 as imageio
import numpy as np
import pytest
import torch
from conftest import ROOT
from matplotlib.image import imread

import plot

SHORT = ["--num-critics", 2, "--batch-size", 16, "--eval-episodes", 2, "--final-eval-episodes", 2]
OFFLINE = ["--gradient-steps", 4, "--eval-frequency", 2, *SHORT]
ONLINE = ["--env-steps", 4, "--learning-starts", 10, "--eval-frequency", 2, *SHORT[4:]]


def python(*command, check=True, cwd=None):
    done = subprocess.run(
        [sys.executable, *map(str, command)], capture_output=True, text=True, cwd=cwd
    )
    assert not check or done.returncode == 0, done.stdout + done.stderr
    return done


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Offline with two seeds, online from the first; by the commands that a run prints."""
    folder = tmp_path_factory.mktemp("tools") / "runs"
    printed = {}
    for seed in (1, 2):
        done = python(ROOT / "td3_bc_n.py", *OFFLINE, "--runs-dir", folder, "--seed", seed)
        printed[seed] = [line.split() for line in done.stdout.splitlines() if line[:2] == "  "]
    (finetune,) = [words for words in printed[1] if words[1].endswith("finetune_td3_bc_n.py")]
    done = python(*finetune[1:], *ONLINE, "--runs-dir", folder)
    return folder, printed[1], done.stdout


def test_a_run_without_arguments_prints_its_data_and_what_to_do_next(runs):
    folder, commands, finetuned = runs
    offline = sorted(folder.glob("tiny-maze2d-umaze-v0__td3_bc_n__1__*"))[0]
    scripts = [words[1].rsplit("/")[-1] for words in commands]
    assert scripts == ["--logdir", "plot.py", "enjoy.py", "finetune_td3_bc_n.py"]
    assert all(words[-1] == str(offline) for words in commands[1:])
    after = finetuned.splitlines()[-4:]
    assert "the data's own score is -1.7" in finetuned
    assert not any("finetune_finetune" in line for line in after)
    result = json.loads((offline / "result.json").read_text())
    assert result["facts"]["dataset"] == "tiny-maze2d-umaze-v0"


def test_a_script_copied_alone_suggests_no_scripts_that_are_not_there(run, tmp_path):
    (tmp_path / "td3_bc_n.py").write_text((ROOT / "td3_bc_n.py").read_text())
    arguments = ["--env-id", "tests/hopper/random-v0", *OFFLINE, "--runs-dir", tmp_path / "alone"]
    done = python(tmp_path / "td3_bc_n.py", *arguments, cwd=tmp_path)
    assert "  tensorboard" in done.stdout and "enjoy.py" not in done.stdout
    done = python(tmp_path / "td3_bc_n.py", cwd=tmp_path, check=False)
    assert done.returncode == 1 and "need d4rl_tasks.py here" in done.stderr


def blank(path):
    return imread(path)[..., :3].std() < 0.02


def test_plots_are_drawn_from_runs_and_the_table_is_right(runs, tmp_path):
    done = python(ROOT / "plot.py", runs[0], "--out", tmp_path)
    offline, online = (tmp_path / f"tiny-maze2d-umaze-v0_{k}.png" for k in ("offline", "online"))
    assert not blank(offline) and not blank(online)
    table = (tmp_path / "table.md").read_text()
    assert table in done.stdout
    rows = [line.split("|") for line in table.splitlines()]
    (td3,) = [row for row in rows if row[1:2] == [" td3_bc_n, tiny-maze2d-umaze-v0 "]]
    results = [json.loads(f.read_text()) for f in runs[0].glob("*__td3_bc_n__*/result.json")]
    scores = np.concatenate([plot.episode_scores(result) for result in results])
    assert td3[2:4] == [" 2 ", " 4 "]
    mean, stderr = td3[4].split(" ± ")
    assert float(mean) == pytest.approx(scores.mean(), abs=0.06)
    assert float(stderr) == pytest.approx(scores.std(ddof=1) / 2, abs=0.06)
    assert td3[7] == "  ", "the paper has no figure for it"
    assert any(row[1:2] == [" finetune_td3_bc_n, tiny-maze2d-umaze-v0 "] for row in rows)
    assert "| fine-tuning | before |" in table


def test_curves_are_means_and_standard_errors_over_seeds_of_common_steps():
    history = [[{"step": 1, "score": 2.0}, {"step": 2, "score": 5.0}], [{"step": 1, "score": 6.0}]]
    steps, mean, stderr = plot.curve([{"history": h} for h in history])
    assert (steps, mean.tolist(), stderr.tolist()) == ([1], [4.0], [2.0])


def test_interquartile_mean_takes_the_middle_half():
    assert plot.interquartile_mean([1, 2, 3, 4, 5, 6, 7, 800]) == pytest.approx(4.5)
    # Of five, the second and the fourth count by three quarters.
    expected = (0.75 * 2 + 3 + 0.75 * 4) / 2.5
    assert plot.interquartile_mean([-100, 2, 3, 4, 9]) == pytest.approx(expected)
    assert plot.interquartile_mean([7.0]) == 7.0


def test_the_bootstrap_interval_covers_and_widens_with_the_spread_between_seeds():
    random = np.random.default_rng(1)
    alike = [random.normal(50, 5, size=20) for _ in range(5)]
    apart = [scores + shift for scores, shift in zip(alike, (-20, -10, 0, 10, 20), strict=True)]
    low, high = plot.bootstrap(alike, np.mean, repeats=500)
    assert low < np.mean(alike) < high and 1 < high - low < 5
    wide = np.diff(plot.bootstrap(apart, np.mean, repeats=500))[0]
    assert wide > 4 * (high - low)


def result(env_id, returns, comparable="yes, if the file is D4RL's own", **args):
    facts = {"random_return": 0.0, "expert_return": 100.0, "comparable_with_the_paper": comparable}
    settings = {"env_id": env_id, "seed": 1, "beta": 0.1, **args}
    history = [{"step": 1, "score": float(np.mean(returns))}]
    return {"args": settings, "facts": facts, "returns": returns, "history": history}


def test_the_papers_figure_stands_beside_runs_on_d4rls_data_only():
    yes, no = result("hopper-medium-v2", [90.0, 110.0]), result("hopper-medium-v2", [1.0], "no: x")
    table = plot.table({"td3_bc_n, a": [yes], "sac_bc_n, b": [yes], "td3_bc_n, c": [no]})
    ends = [line.split("|")[-2].strip() for line in table.splitlines()[2:]]
    assert ends == ["101.5", "101.2", ""]
    assert "| 10% |" in table, "(100 - 90) / 100"


def test_experiments_are_named_by_what_differs_and_seeds_are_put_together():
    runs = [result("a-v0", [1.0], seed=s, beta=b) for b in (0.1, 0.2) for s in (2, 1)]
    groups = plot.group([("td3_bc_n", r) for r in runs])
    assert list(groups) == ["td3_bc_n, a-v0, beta 0.1", "td3_bc_n, a-v0, beta 0.2"]
    assert [r["args"]["seed"] for r in groups["td3_bc_n, a-v0, beta 0.1"]] == [1, 2]


def test_runs_on_other_data_are_not_seeds_of_one_experiment_and_a_seed_counts_once(capsys):
    ours, theirs = result("a-v0", [1.0]), result("a-v0", [5.0], comparable="nearly: x", seed=2)
    again = result("a-v0", [2.0])
    groups = plot.group([("td3_bc_n", r) for r in (ours, theirs, again)])
    assert [len(results) for results in groups.values()] == [1, 1] and len(groups) == 2
    assert [r[0]["returns"] for r in groups.values()] == [[2.0], [5.0]], "the newer one"
    assert "seed 1 twice, the newer run counts" in capsys.readouterr().out
    newer = result("a-v0", [1.0], new_argument=3)
    assert len(plot.group([("td3_bc_n", ours), ("td3_bc_n", newer)])) == 2


def test_a_figure_of_the_paper_beside_data_by_its_recipe_says_so():
    near = result("maze2d-umaze-v1", [1.0], "nearly: not D4RL's own file, but made by its recipe")
    assert plot.table({"td3_bc_n, a": [near]}).endswith("| 153.1 (not D4RL's file) |\n")


def test_an_unfinished_run_has_a_curve_and_no_figures(runs, tmp_path):
    (source,) = runs[0].glob("*__td3_bc_n__1__*")
    (tmp_path / "cut").mkdir()
    (tmp_path / "cut/checkpoint.pt").write_bytes((source / "checkpoint.pt").read_bytes())
    done = python(ROOT / "plot.py", tmp_path, "--out", tmp_path / "plots")
    assert "| td3_bc_n, tiny-maze2d-umaze-v0 | not finished |" in done.stdout
    assert not blank(tmp_path / "plots/tiny-maze2d-umaze-v0_offline.png")
    # A run that was stopped before its first evaluation is left out, and takes no other with it.
    checkpoint = torch.load(source / "checkpoint.pt", weights_only=True)
    (tmp_path / "young").mkdir()
    torch.save(checkpoint | {"history": []}, tmp_path / "young/checkpoint.pt")
    done = python(ROOT / "plot.py", tmp_path, "--out", tmp_path / "plots")
    assert "young: no evaluation yet, left out" in done.stdout


@pytest.mark.parametrize("suffix", [".mp4", ".gif"])
def test_a_video_has_frames_that_differ_and_episodes_have_scores(runs, tmp_path, suffix):
    (run,) = runs[0].glob("*__td3_bc_n__1__*")
    out = tmp_path / f"agent{suffix}"
    done = python(ROOT / "enjoy.py", run, "--episodes", 2, "--out", out)
    lines = done.stdout.splitlines()
    assert [line.split(":")[0] for line in lines[:2]] == ["episode 1", "episode 2"]
    total, score = (float(part.split()[-1]) for part in lines[0].split(", "))
    assert score == pytest.approx(100 * (total - 23.85) / (161.86 - 23.85), abs=0.1)
    frames = imageio.imread(out).astype(int)
    assert len(frames) == 150, "300 steps at 100 a second, shown 25 times a second, twice"
    assert frames[0].std() > 10, "not blank"
    assert np.abs(frames[0] - frames[60]).max() > 50, "the ball moves"


MAZE = "gymnasium_robotics:PointMaze_UMaze-v3"


@pytest.mark.parametrize("env_id", ["tests/hopper/random-v0", MAZE])
def test_runs_on_minaris_data_and_from_scratch_can_be_watched_too(env_id, run):
    if env_id == MAZE:
        run_dir = run("finetune_sac_bc_n", "--from-scratch", "--env-id", env_id, *ONLINE)[1]
    else:
        run_dir = run("sac_bc_n", "--env-id", env_id, *OFFLINE)[1]
    python(ROOT / "enjoy.py", run_dir, "--episodes", 1)
    assert len(imageio.imread(run_dir / "enjoy.mp4")) > 3


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["enjoy.py", "nowhere"], "nowhere: not a checkpoint of these scripts"),
        (["enjoy.py", "other.pt"], "a checkpoint of os, which is none of"),
        (["enjoy.py", "RUN", "--out", "x.avi"], "a .mp4 or .gif file in a folder that exists"),
        (["enjoy.py", "RUN", "--out", "none/x.gif"], "a .mp4 or .gif file in a folder that exists"),
        (["enjoy.py", "RUN", "--fps", "0"], "are at least 1"),
        (["plot.py", "nowhere"], "nowhere: no such directory"),
        (["plot.py", "."], "checkpoint.pt: not of these scripts"),
        (["plot.py", "empty"], "no runs in empty"),
        (["docs/figures.py"], "name a run"),
        (["docs/figures.py", "--maze", "nowhere"], "nowhere: no run of these scripts"),
        (["datasets/make_maze2d.py", "--minari", "x"], "not of the form namespace/name-v0"),
        (["datasets/make_maze2d.py", "--minari", "tests/swing-v0"], "there already"),
        (["datasets/make_maze2d.py", "--tiny", "--maze", "large"], "--tiny is a file of umaze"),
    ],
)
def test_mistakes_are_one_clear_line(command, message, runs, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken/checkpoint.pt").write_text("not a checkpoint")
    torch.save({"script": "os", "facts": {}, "args": {}}, tmp_path / "other.pt")
    (run,) = runs[0].glob("*__td3_bc_n__1__*")
    script, *rest = [str(run) if word == "RUN" else word for word in command]
    done = python(ROOT / script, *rest, check=False, cwd=tmp_path)
    assert done.returncode == 1 and message in done.stderr and "Traceback" not in done.stderr


def test_the_figures_of_the_documents_are_drawn_from_runs(runs, tmp_path):
    first, second = sorted(runs[0].glob("*__td3_bc_n__*"))[:2]
    arguments = ["--maze", first, "--uncertainty", first, second, "--out", tmp_path]
    done = python(ROOT / "docs/figures.py", *arguments)
    assert not blank(tmp_path / "maze.png") and not blank(tmp_path / "uncertainty.png")
    assert done.stdout.count("N = 2, β = 0.2: standard deviation") == 2
