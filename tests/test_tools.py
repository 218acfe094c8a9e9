"""tools.plot and tools.enjoy, on real short runs."""

import csv
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import gymnasium as gym
import imageio.v3 as imageio
import numpy as np
import pytest
import torch
from conftest import ROOT, collect, create, run_script

from td3_bc_n import CHECKPOINT_FORMAT
from tools import enjoy, plot, runs

SHORT = ["--batch-size", 16, "--eval-episodes", 2, "--eval-frequency", 2]
OFFLINE = ["--gradient-steps", 4, "--num-critics", 2, *SHORT]
ONLINE = ["--env-steps", 4, "--learning-starts", 10, *SHORT]


def train(script, *arguments):
    process = run_script(script, *arguments)
    assert process.returncode == 0, process.stderr


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Runs of the bundled dataset: two seeds offline, and the first of them fine-tuned."""
    directory = tmp_path_factory.mktemp("tools")
    for seed in (1, 2):
        names = ["--runs-dir", directory, "--run-name", f"offline{seed}"]
        train("td3_bc_n", *OFFLINE, *names, "--seed", seed)
    names = ["--runs-dir", directory, "--run-name", "online"]
    train("finetune_td3_bc_n", "--checkpoint", directory / "offline1", *ONLINE, *names)
    return directory


@pytest.fixture(scope="module")
def without_env(tmp_path_factory):
    """A run on a dataset of logged data, without an environment."""
    directory, env = tmp_path_factory.mktemp("without-env"), gym.make("Pendulum-v1")
    spaces = {"observation_space": env.observation_space, "action_space": env.action_space}
    create("tools/logged-v0", collect(env, 2, seed=0), None, **spaces)
    names = ["--runs-dir", directory, "--run-name", "run"]
    train("td3_bc_n", "--env-id", "tools/logged-v0", *OFFLINE, *names)
    return directory / "run"


def make_run(scores, script="td3_bc_n", history=None, path="run", status="finished", **changes):
    """A Run. Changes are arguments, or metadata if they are known as such."""
    metadata = {"dataset": "data", "source": "d4rl", "transitions": 10, "environment": "env-v0"}
    metadata |= {"comparable_with_paper": True, "ref_min_score": 0.0, "ref_max_score": 100.0}
    args = {"env_id": "a-v0", "seed": 1, "beta": 0.1}
    for key, value in changes.items():
        (metadata if key in metadata else args)[key] = value
    history = history or [{"step": 1, "score": float(np.mean(scores))}]
    return runs.Run(Path(path), script, args, metadata, history, 1.0, status)


def change_result(path, **changes):
    file = Path(path, "result.json")
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def cells(table):
    return [[cell.strip() for cell in row.split("|")[1:-1]] for row in table.splitlines()]


# --- runs ---


@pytest.mark.parametrize("module", ["tools.sweep", "studies.efficiency"])
def test_scores_are_read_without_torch_and_by_the_sweep_without_matplotlib(module):
    code = f"import sys, {module}; print(*{{'torch', 'matplotlib'}} & set(sys.modules))"
    process = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    expected = [] if module == "tools.sweep" else ["matplotlib"]
    assert process.stdout.split() == expected, process.stderr


def test_the_data_of_a_run_are_loaded_with_its_trust_env():
    loaded = []
    script = SimpleNamespace(ALGORITHM="td3_bc_n", load_data=lambda *args: loaded.append(args))
    runs.load_data(script, SimpleNamespace(env_id="my/robot-v0", trust_env=True))
    assert loaded == [("my/robot-v0", True)]


# --- plot ---


def test_curves_and_table_of_real_runs(trained, tmp_path, capsys):
    plot.main(plot.Args((str(trained),), out=str(tmp_path / "plots")))
    assert (tmp_path / "plots/tiny-maze2d-umaze-v0.png").exists()
    table = (tmp_path / "plots/table.md").read_text()
    assert table in capsys.readouterr().out
    rows = {row[0]: row for row in cells(table) if row}
    row = rows["td3_bc_n, tiny-maze2d-umaze-v0"]
    results = [json.loads((trained / f"offline{i}/result.json").read_text()) for i in (1, 2)]
    returns = np.array([result["returns"] for result in results])
    scores = 100 * (returns - 23.85) / (161.86 - 23.85)
    stderr = scores.mean(axis=1).std(ddof=1) / np.sqrt(2)
    worst = f"{scores.min():.1f}"
    assert row[1:] == ["2", f"{scores.mean():.1f} ± {stderr:.1f}", "seeds", worst, ""]
    history = json.loads((trained / "online/result.json").read_text())["history"]
    assert [entry["step"] for entry in history] == [0, 2, 4]
    last = f"{np.mean([history[1]['score'], history[2]['score']]):.1f}"
    online = rows["finetune_td3_bc_n, tiny-maze2d-umaze-v0"]  # the last such row: stability
    assert [online[1], online[4]] == [f"{history[0]['score']:.1f}", last]


def test_the_curve_is_mean_and_standard_error_at_the_steps_of_all_seeds():
    long = [{"step": 1, "score": 2.0}, {"step": 2, "score": 5.0}]
    short = [{"step": 1, "score": 6.0}]
    steps, mean, stderr = plot.curve([make_run([1.0], history=h) for h in (long, short)])
    assert (steps, mean.tolist(), stderr.tolist()) == ([1], [4.0], [2.0])


def test_the_curve_of_finished_seeds_is_not_shortened_by_an_unfinished_one(monkeypatch, tmp_path):
    drawn = []
    monkeypatch.setattr(plot, "curve", lambda runs: drawn.append(runs) or ([1], *np.ones((2, 1))))
    done, young = make_run([1.0]), make_run([0.0], status="running")
    broken = young._replace(status="diverged")
    plot.draw({"a": [done, young, broken], "b": [young, broken], "c": [broken]}, tmp_path / "a.png")
    assert drawn == [[done], [young], [broken]]


def test_the_picture_says_which_runs_are_not_finished_and_what_the_score_is(monkeypatch, tmp_path):
    """Offline and online are side by side."""
    pictures = []
    monkeypatch.setattr(plot.plt, "close", pictures.append)
    young, online = make_run([0.0], status="running"), make_run([1.0], "finetune_td3_bc_n")
    runs = {"d": [online], "a": [make_run([1.0])], "b": [young]}
    plot.draw(runs | {"c": [young._replace(status="diverged")]}, tmp_path / "a.png")
    axes, (legend,) = pictures[0].axes, pictures[0].legends
    assert [ax.get_xlabel() for ax in axes] == ["gradient steps", "environment steps"]
    assert axes[0].get_ylabel() == "return", "references 0 and 100: there are none"
    labels = [text.get_text() for text in legend.get_texts()]
    expected = ["a (1 seed)", "b, not finished (1 seed)", "c, diverged (1 seed)", "d (1 seed)"]
    assert labels == expected
    plot.draw({"a": [make_run([1.0], ref_max_score=200.0)]}, tmp_path / "a.png")
    assert pictures[1].axes[0].get_ylabel() == "normalized score"


def test_twenty_curves_differ_in_color_or_line(monkeypatch, tmp_path):
    pictures = []
    monkeypatch.setattr(plot.plt, "close", pictures.append)
    plot.draw({str(n): [make_run([1.0])] for n in range(20)}, tmp_path / "a.png")
    lines = pictures[0].axes[0].lines
    assert len({(line.get_color(), line.get_linestyle()) for line in lines}) == 20


def test_the_line_of_the_dataset_is_its_normalized_mean_return(monkeypatch, tmp_path):
    lines, axhline = [], plot.plt.Axes.axhline
    monkeypatch.setattr(
        plot.plt.Axes, "axhline", lambda self, y, **kw: lines.append(y) or axhline(self, y, **kw)
    )
    run = make_run([1.0], ref_min_score=20.0, ref_max_score=40.0)
    assert runs.dataset_return(run) is None, "from scratch there is no dataset"
    run.metadata["mean_return"] = 30.0
    plot.draw({"a": [run]}, tmp_path / "a.png")
    assert lines == [50.0], "100 (30 - 20) / (40 - 20)"
    run.metadata["train_env_kwargs"] = {"eval_env": False}
    assert runs.dataset_return(run) is None, "OGBench: other rewards than in the evaluation"
    runs.write_csv([run], tmp_path / "a.csv")
    assert runs.dataset_return(runs.read_csv(tmp_path / "a.csv")[0]) is None


def test_the_error_is_over_seeds_and_of_one_seed_over_its_episodes():
    history = [{"step": 1, "score": 10.0, "score_stderr": 3.0, "score_worst": 1.0}]
    seeds = [make_run([1.0], history=[history[0] | {"score": score}]) for score in (10.0, 20.0)]
    rows = cells(plot.table({"one": seeds[:1], "two": seeds}))[2:]
    assert rows[0] == ["one", "1", "10.0 ± 3.0", "episodes", "1.0", ""]
    assert rows[1] == ["two", "2", "15.0 ± 5.0", "seeds", "1.0", ""]
    assert [x[0] for x in plot.curve(seeds[:1])] == [1, 10.0, 3.0]
    assert [x[0] for x in plot.curve(seeds)] == [1, 15.0, 5.0]


def test_a_csv_file_has_all_that_pictures_and_tables_need(trained, tmp_path, capsys):
    """One row per evaluation; read again, it gives the same table and the same experiments."""
    file = tmp_path / "results.csv"
    plot.main(plot.Args((str(trained),), out=str(tmp_path / "a"), csv=str(file)))
    plot.main(plot.Args((str(file),), out=str(tmp_path / "b")))
    first, second = ((tmp_path / name / "table.md").read_text() for name in "ab")
    assert first == second and "finetune_td3_bc_n" in first
    with open(file) as lines:
        rows = list(csv.DictReader(lines))
    assert len(rows) == 2 + 2 + 3  # the fine-tuning run begins with an evaluation
    result = json.loads((trained / "offline2/result.json").read_text())
    expected = {"num_critics": 2, "batch_size": 16, "gradient_steps": 4}
    assert json.loads(rows[3]["arguments"]) == expected
    assert rows[3]["seed"] == "2" and float(rows[3]["score"]) == result["score"]
    assert float(rows[3]["seconds"]) == round(4 / result["steps_per_second"], 1)
    for one, other in zip(runs.read_runs([trained]), runs.read_runs([file]), strict=True):
        assert runs.experiment_settings(one) == runs.experiment_settings(other)


def test_runs_on_other_data_are_other_experiments_in_a_csv_file_too(tmp_path):
    """Also from scratch and fine-tuned with the same arguments: from scratch, there are no data."""
    online = {"script": "finetune_td3_bc_n", "seed": 2}
    written = [make_run([1.0]), make_run([1.0], source="minari")]
    written += [make_run([1.0], **online), make_run([1.0], **online, dataset=None)]
    written[1:3] = [written[1]._replace(status="running"), written[2]._replace(status="diverged")]
    runs.write_csv(written, tmp_path / "a.csv")
    again = runs.read_csv(tmp_path / "a.csv")
    assert [run.metadata["source"] for run in again] == ["d4rl", "minari", "d4rl", "d4rl"]
    assert len(plot.group(written)) == 4 and list(plot.group(again)) == list(plot.group(written))
    assert plot.table(plot.group(again)) == plot.table(plot.group(written))


@pytest.mark.parametrize("name", ["beta-rules", "bundled", "maze2d-umaze", "methods", "ogbench"])
def test_the_documented_results_can_be_read(name):
    """Those of hopper.csv are below; fqe-tiny.csv is of tools.fqe."""
    read = runs.read_csv(ROOT / f"docs/results/{name}.csv")
    assert sum(map(len, plot.group(read).values())) == len(read), "no run is left out"


def test_values_that_a_csv_file_does_not_have_are_left_out(tmp_path):
    plot.main(plot.Args((str(ROOT / "docs/results/hopper.csv"),), out=str(tmp_path)))
    rows = cells((tmp_path / "table.md").read_text())
    assert "nan" not in str(rows) and rows[2][2] == "104.9", "without an error"
    assert (tmp_path / "my-hopper-medium-v0-my-hopper-expert-v0.png").exists()


@pytest.mark.parametrize("text", ["", "a,b\n1,2\n", "script,env_id,arguments,seed\nos,a,{},1\n"])
def test_other_csv_files_are_one_line(text, tmp_path, capsys):
    (tmp_path / "other.csv").write_text(text)
    with pytest.raises(SystemExit, match=r"other\.csv"):
        plot.main(plot.Args((str(tmp_path / "other.csv"),), out=str(tmp_path)))


@pytest.mark.parametrize(
    ("script", "env_id", "beta", "expected"),
    [
        ("td3_bc_n", "hopper-medium-v2", 0.03, "101.5"),
        ("td3_bc_n", "hopper-medium-v2", 0.3, ""),  # another setting
        ("sac_bc_n", "hopper-medium-v2", 0.0025, "101.2"),
        ("sac_bc_n", "hopper-medium-v2", 0.0, "100.3"),  # SAC-N
        ("sac_bc_n", "halfcheetah-medium-v2", 0.0, "65.6"),  # beta is 0 in SAC-BC-N, too
        ("td3_bc", "hopper-medium-v2", None, "59.3"),
        ("edac", "hopper-medium-v2", None, "101.6"),
        ("msg", "antmaze-large-play-v0", None, "72.6"),
        ("msg", "hopper-medium-v2", None, ""),
        ("iql", "hopper-medium-v2", None, ""),
        ("finetune_td3_bc_n", "hopper-medium-v2", None, ""),
    ],
)
def test_the_score_of_the_paper_is_that_of_the_same_method(script, env_id, beta, expected):
    run = make_run([1.0], script=script, env_id=env_id, beta=beta, gradient_steps=100)
    assert plot.paper_score(run) == expected


def test_the_score_of_the_paper_is_shown_for_comparable_or_regenerated_data():
    def shown(**changes):
        return plot.paper_score(make_run([1.0], beta=0.02, **changes))

    assert shown(env_id="maze2d-umaze-v1") == "153.1"
    assert shown(env_id="maze2d-umaze-v1", beta_rule="dual") == "", "not an argument of the script"
    other = {"comparable_with_paper": False, "source": "tools.make_maze2d"}
    assert shown(env_id="maze2d-umaze-v1", **other) == "153.1 (regenerated data)"
    assert shown(env_id="maze2d-umaze-v1", **other | {"source": "minari"}) == ""
    assert shown(env_id="tiny-maze2d-umaze-v0", **other) == ""


def test_experiments_are_named_by_their_differences_and_have_all_seeds():
    seeds = [make_run([1.0], seed=s, beta=b) for b in (0.1, 0.2) for s in (2, 1)]
    experiments = plot.group(seeds)
    assert list(experiments) == ["td3_bc_n, a-v0, beta 0.1", "td3_bc_n, a-v0, beta 0.2"]
    for members in experiments.values():
        assert [run.args["seed"] for run in members] == [1, 2]


@pytest.mark.parametrize("key", ["dataset", "source", "transitions", "environment", "beta"])
def test_runs_on_other_data_or_with_other_settings_are_other_experiments(key):
    first, second = make_run([1.0]), make_run([1.0], seed=2, **{key: "other"})
    assert len(plot.group([first, make_run([1.0], seed=2)])) == 1
    assert sorted(map(len, plot.group([first, second]).values())) == [1, 1]


def test_runs_from_scratch_are_named_without_all_their_differences():
    names = {"script": "finetune_td3_bc_n"}
    experiments = [make_run([1.0], **names), make_run([1.0], **names, dataset=None, beta=0.0)]
    name = "finetune_td3_bc_n, a-v0"
    assert list(plot.group(experiments)) == [name, f"{name}, from scratch"]


def test_fine_tuning_of_different_offline_runs_is_not_one_experiment(tmp_path):
    """Their own arguments are the same; those of the offline runs are in their results."""
    online = []
    for steps, seed in ((10, 1), (10, 2), (20, 1), (20, 2)):
        name = f"offline{steps}-{seed}"
        (tmp_path / name).mkdir()
        args = {"seed": seed, "gradient_steps": steps, "beta": 0.1}
        result = {"algorithm": "td3_bc_n", "status": "finished", "args": args, "metadata": {}}
        result |= {"history": [], "returns": [], "steps_per_second": 1.0, "step": 10}
        (tmp_path / name / "result.json").write_text(json.dumps(result))
        path = f"elsewhere/{name}" + ("/checkpoint.pt" if seed == 2 else "")
        settings = {"path": tmp_path / "online", "checkpoint": path, "seed": seed}
        online.append(make_run([1.0], script="finetune_td3_bc_n", **settings))
    names = [f"finetune_td3_bc_n, a-v0, offline gradient_steps {steps}" for steps in (10, 20)]
    groups = plot.group(online)
    assert list(groups) == names and all(len(seeds) == 2 for seeds in groups.values())
    for file in tmp_path.glob("offline*/result.json"):
        file.write_bytes(b"")
    assert list(plot.group(online)) == ["finetune_td3_bc_n, a-v0"], "not known any more"


def test_settings_that_do_not_change_the_algorithm_do_not_make_an_experiment():
    names = "run_name runs_dir resume checkpoint track log_frequency trust_env cuda cudagraphs"
    names += " compile matmul_precision eval_frequency eval_episodes"
    other = make_run([1.0], seed=2, **dict.fromkeys(names.split(), "other"))
    assert len(plot.group([make_run([1.0]), other])) == 1


def test_arguments_of_the_scripts_that_are_incidental_exist():
    import finetune_td3_bc_n

    assert vars(finetune_td3_bc_n.Args()).keys() >= runs.INCIDENTAL


def test_of_two_runs_with_one_seed_the_newer_counts_but_a_finished_one_first(capsys):
    old, new = make_run([1.0], path="old"), make_run([2.0], path="new")
    assert list(plot.group([old, new]).values()) == [[new]]
    assert "left out: old (same experiment and seed as new)" in capsys.readouterr().err
    unfinished = make_run([1.0], status="running", path="unfinished")
    assert list(plot.group([old, unfinished]).values()) == [[old]]
    assert "left out: unfinished" in capsys.readouterr().err
    assert list(plot.group([unfinished, new]).values()) == [[new]]
    younger = make_run([1.0], status="running", path="younger")
    assert list(plot.group([unfinished, younger]).values()) == [[younger]]


def test_diverged_and_unfinished_runs_are_counted_but_not_averaged():
    done, unfinished = make_run([50.0]), make_run([1.0], status="running")
    diverged = unfinished._replace(status="diverged")
    early = diverged._replace(history=[])  # before its first evaluation
    experiments = {"all": [done, diverged, unfinished], "none": [diverged], "young": [unfinished]}
    experiments |= plot.group([early])
    rows = cells(plot.table(experiments))[2:]
    assert rows[0][1:4] == ["1, 1 diverged, 1 not finished", "50.0", "episodes"]
    assert [row[1] for row in rows[1:]] == ["1 diverged", "1 not finished", "1 diverged"]


def test_stability_of_fine_tuning_is_computed_from_the_history():
    scores = [50.0, 60.0, 20.0, 40.0, 55.0, 30.0]
    history = [{"step": 10 * i, "score": score} for i, score in enumerate(scores)]
    expected = {"before": 50.0, "largest_drop": 30.0, "recovery_step": 40, "last_ten": 41.0}
    assert plot.stability(history) == expected
    assert plot.stability(history[:4])["recovery_step"] is None
    long = [{"step": i, "score": float(i)} for i in range(30)]
    assert plot.stability(long)["last_ten"] == pytest.approx(np.mean(range(20, 30)))
    run = make_run([1.0], script="finetune_sac_bc_n", history=history[:4])
    assert cells(plot.table({"x": [run]}))[-1] == ["x", "50.0", "30.0", "never", "40.0"]
    run.metadata["dataset"] = None
    assert "fine-tuning" not in plot.table({"x": [run]}), "from scratch"


def test_unreadable_and_young_runs_are_left_out_and_the_others_are_shown(trained, tmp_path, capsys):
    for name in ("unfinished", "young", "old", "other", "broken"):
        shutil.copytree(trained / "offline1", tmp_path / name)
    change_result(tmp_path / "unfinished", status="running")
    change_result(tmp_path / "young", status="running", history=[], returns=[])
    change_result(tmp_path / "other", algorithm="os")
    (tmp_path / "old/result.json").write_text('{"script": "td3_bc_n", "history": []}')
    (tmp_path / "broken/result.json").write_text("{")
    plot.main(plot.Args((str(tmp_path),), out=str(tmp_path / "plots")))
    out, err = capsys.readouterr()
    assert "| td3_bc_n, tiny-maze2d-umaze-v0 | 1 not finished |" in out
    assert f"left out: {tmp_path}/young (no evaluation yet)" in err
    assert f"left out: {tmp_path}/old/result.json: written by another version" in err
    assert f"left out: {tmp_path}/other/result.json: cannot be read (it is of os.py)" in err
    assert f"left out: {tmp_path}/broken/result.json: cannot be read" in err
    assert (tmp_path / "plots/tiny-maze2d-umaze-v0.png").exists()


def test_a_run_that_diverged_before_its_first_score_is_drawn_without_a_curve(tmp_path):
    for script in ("td3_bc_n", "finetune_td3_bc_n"):
        for history in ([], [{"step": 1}]):
            run = make_run([0.0], script, status="diverged")._replace(history=history)
            plot.draw(plot.group([run]), tmp_path / "a.png")


# --- enjoy ---


@pytest.mark.parametrize("suffix", [".mp4", ".gif"])
def test_a_video_shows_the_episodes_and_their_scores_are_printed(
    trained, tmp_path, monkeypatch, capsys, suffix
):
    monkeypatch.setattr(enjoy, "FPS", 5)
    out = tmp_path / f"agent{suffix}"
    enjoy.main(enjoy.Args(str(trained / "offline1"), episodes=2, out=str(out)))
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines[:2]] == ["episode 1", "episode 2"]
    episode_return, score = (float(part.split()[-1]) for part in lines[0].split(", "))
    assert score == pytest.approx(100 * (episode_return - 23.85) / (161.86 - 23.85), abs=0.1)
    frames = imageio.imread(out)
    assert len(frames) == 30, "2 episodes of 300 steps, 100 steps/s at 5 frames/s"


def test_runs_on_minari_datasets_and_from_scratch_can_be_watched(tmp_path):
    names = ["--runs-dir", tmp_path, "--run-name"]
    train("sac_bc_n", "--env-id", "mujoco/hopper/medium-v0", *OFFLINE, *names, "minari")
    maze = ["--env-id", "gymnasium_robotics:PointMaze_UMaze-v3", "--num-critics", 2]
    train("finetune_sac_bc_n", *maze, *ONLINE, *names, "scratch")
    for name in ("minari", "scratch"):
        enjoy.main(enjoy.Args(str(tmp_path / name), episodes=1))
        assert len(imageio.imread(tmp_path / name / "enjoy.mp4")) > 3


def test_the_picture_has_the_paths_of_dataset_and_agent(trained, tmp_path, monkeypatch, capsys):
    drawn, plot_line = [], enjoy.plt.Axes.plot
    monkeypatch.setattr(
        enjoy.plt.Axes, "plot", lambda *a, **k: drawn.append(a) or plot_line(*a, **k)
    )
    path = tmp_path / "maze.png"
    enjoy.main(enjoy.Args(str(trained / "online"), picture=str(path)))
    assert path.exists() and "maze.png: mean return of the agent" in capsys.readouterr().out
    (_, x, _), *agent = (line[:3] for line in drawn)
    assert len(x) >= 6000
    assert len(agent) == 2 * 20 and all(len(x) == 301 for _, x, _ in agent[::2])
    assert len({start[1:] for start in agent[1::2]}) == 20, "all starts differ"
    assert not list(tmp_path.glob("*.mp4")) and not (trained / "online/enjoy.mp4").exists()


def test_a_run_is_not_played_in_another_environment_than_it_was_trained_in(trained, tmp_path):
    checkpoint = runs.load_checkpoint(trained / "offline1")
    checkpoint["metadata"]["source"] = "d4rl"
    torch.save(checkpoint, tmp_path / "checkpoint.pt")
    with pytest.raises(SystemExit, match="source was d4rl in training"):
        enjoy.main(enjoy.Args(str(tmp_path)))


def test_a_run_without_an_environment_cannot_be_played(without_env, tmp_path):
    for arguments in ({}, {"picture": str(tmp_path / "x.png")}):
        with pytest.raises(SystemExit) as error:
            enjoy.main(enjoy.Args(str(without_env), **arguments))
        assert error.value.code == f"{without_env}: the run has no environment to play in"
    *_, make_env = runs.load_run(without_env, needs_env=False)
    assert make_env is None


# --- Mistakes ---


@pytest.mark.parametrize(
    ("tool", "arguments", "message"),
    [
        (enjoy, {"run": "nowhere"}, "nowhere: not a checkpoint of this project"),
        (enjoy, {"run": "other.pt"}, "it is of os.py"),
        (enjoy, {"run": "old.pt"}, "written by another version of this project"),
        (enjoy, {"run": "RUN", "out": "x.avi"}, "expected a .mp4 or .gif file"),
        (enjoy, {"run": "RUN", "out": "none/x.gif"}, "in a directory that exists"),
        (enjoy, {"run": "RUN", "picture": "x.jpg"}, "expected a .png file"),
        (enjoy, {"run": "RUN", "episodes": 0}, "must be at least 1"),
        (enjoy, {"run": "RUN", "window": True}, "--window: there is no display"),
        (plot, {"runs": ("nowhere",)}, "nowhere: no such directory"),
        (plot, {"runs": ("empty",)}, "no runs in empty"),
        (plot, {"runs": ("RUN",), "out": "other.pt"}, "--out other.pt: not a directory"),
    ],
)
def test_mistakes_are_one_clear_line(tool, arguments, message, trained, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    os.mkdir("empty")
    torch.save({"algorithm": "os", "format": CHECKPOINT_FORMAT}, "other.pt")
    torch.save({"script": "td3_bc_n"}, "old.pt")
    run = str(trained / "offline1")
    real = {"RUN": run, ("RUN",): (run,)}
    arguments = {key: real.get(value, value) for key, value in arguments.items()}
    with pytest.raises(SystemExit) as error:
        tool.main(tool.Args(**arguments))
    assert message in error.value.code and "\n" not in error.value.code


def test_a_picture_needs_a_maze2d_dataset(tmp_path):
    names = ["--runs-dir", tmp_path, "--run-name"]
    train("td3_bc_n", "--env-id", "tests/swing-v0", *OFFLINE, *names, "swing")
    scratch = ["--env-id", "maze2d-umaze-v1", "--num-critics", 2]
    train("finetune_td3_bc_n", *scratch, *ONLINE, *names, "scratch")
    for name in ("swing", "scratch"):
        with pytest.raises(SystemExit, match="needs a run on a maze2d dataset"):
            enjoy.main(enjoy.Args(str(tmp_path / name), picture=str(tmp_path / "x.png")))
