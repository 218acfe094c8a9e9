"""tools.import_data: real files become Minari datasets with exactly their transitions."""

import itertools
import os
import signal
import tracemalloc

import gymnasium as gym
import h5py
import minari
import numpy as np
import pytest
import tyro
from conftest import run_script
from minari.dataset._storages import hdf5_storage

from td3_bc_n import Transitions, load_data
from tools import import_data

SHORT = ["--gradient-steps", 2, "--eval-frequency", 2, "--num-critics", 2, "--batch-size", 16]
BOUNDS = ["--action-low", -1, "--action-high", 1]
COLUMNS = {"rewards": "reward", "terminals": "terminal", "timeouts": "timeout"}
PREFIXES = {"observations": "obs", "actions": "action", "next_observations": "next_obs"}
numbers = itertools.count()


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(import_data, "CHUNK", 5)


def make_data(rows=24, obs_dim=3, action_dim=2, seed=0, **changes):
    """Arrays in D4RL's layout; a key that is changed to None is left out.

    Ends: terminal (row 3), timeout (8), both (12), two of a single row (13 terminal, 14 timeout).
    Rows 15 to the last are an episode that is cut off.
    """
    rng = np.random.default_rng(seed)
    data = {
        "observations": rng.normal(size=(rows, obs_dim)),
        # Multiples of 1/64: rescaling by powers of two is exact
        "actions": rng.integers(-64, 65, size=(rows, action_dim)) / 64,
        "rewards": rng.normal(size=rows),
        "terminals": np.isin(np.arange(rows), (3, 12, 13)),
        "timeouts": np.isin(np.arange(rows), (8, 12, 14)),
    } | changes
    return {key: value for key, value in data.items() if value is not None}


def next_observations(data, gaps=()):
    """As a log would have them: the next row, except at the ends and at gaps."""
    obs = data["observations"]
    next_obs = np.roll(obs, -1, axis=0)
    rows = np.flatnonzero(data["terminals"] | data["timeouts"]).tolist()
    for row in [*rows, *gaps, len(obs) - 1]:
        next_obs[row] = 100 + obs[row]
    return next_obs


def write(path, data):
    """Writes a file of the type of its suffix; `.c.npz` is compressed."""
    if path.name.endswith(".c.npz"):
        np.savez_compressed(path, **data)
    elif path.suffix == ".npz":
        np.savez(path, **data)
    elif path.suffix == ".csv":
        header, columns = [], []
        for key, value in data.items():
            value = np.asarray(value).reshape(len(value), -1)
            prefix = PREFIXES.get(key)
            header += [f"{prefix}_{i}" for i in range(value.shape[1])] if prefix else []
            header += [] if prefix else [COLUMNS.get(key, key)]
            columns.append(value.astype(np.float64))
        lines = [",".join(map(repr, row)) for row in np.hstack(columns).tolist()]
        path.write_text("\n".join([",".join(header), *lines]) + "\n")
    else:
        with h5py.File(path, "w") as file:
            for key, value in data.items():
                file[key] = value
    return path


def transitions_of(data):
    """The transitions of a file, row by row."""
    rows, transitions = len(data["observations"]), []
    flags = [data.get(key, np.zeros(rows)) for key in ("terminals", "timeouts")]
    episode = data.get("episode", np.zeros(rows))
    for row in range(rows):
        terminal = bool(flags[0][row])
        ends = terminal or flags[1][row] or row == rows - 1 or episode[row] != episode[row + 1]
        if "next_observations" in data:
            next_obs = data["next_observations"][row]
        elif not ends:
            next_obs = data["observations"][row + 1]
        elif terminal:
            next_obs = data["observations"][row]
        else:
            continue
        columns = (data[key][row] for key in ("observations", "actions", "rewards"))
        transitions.append((*columns, next_obs, terminal))
    return Transitions(*(np.array(column, np.float32) for column in zip(*transitions, strict=True)))


def run_import(path, *arguments, dataset_id=None):
    """Imports in this process. Returns the id of the dataset."""
    dataset_id = dataset_id or f"imported/data{next(numbers)}-v0"
    argv = [path, "--dataset-id", dataset_id, *arguments]
    import_data.main(tyro.cli(import_data.Args, args=[*map(str, argv)]))
    return dataset_id


def assert_imported(dataset_id, data):
    """The scripts see the transitions of the file, exactly. Actions are in [-1, 1]."""
    found, expected = load_data(dataset_id)[0], transitions_of(data)
    for name, column in expected._asdict().items():
        np.testing.assert_array_equal(getattr(found, name), column, err_msg=name)


# --- Transitions ---


SUFFIXES = [".npz", ".c.npz", ".hdf5", ".h5", ".csv"]


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_the_transitions_are_those_of_the_file(suffix, tmp_path, capsys):
    data = make_data()
    dataset_id = run_import(write(tmp_path / f"robot{suffix}", data), *BOUNDS)
    output = capsys.readouterr()
    assert output.err == "", "nothing to warn about"
    assert_imported(dataset_id, data)
    dataset = minari.load_dataset(dataset_id)
    lengths = [len(episode.actions) for episode in dataset]
    assert lengths == [4, 4, 4, 1, 8], "the last rows of 9 and 24, and the single timeout, dropped"
    for episode in dataset:
        ends = episode.terminations | episode.truncations
        assert ends.tolist() == [False] * (len(ends) - 1) + [True]
        assert not (episode.terminations & episode.truncations).any()
        assert len(episode.observations) == len(ends) + 1
        assert episode.observations.dtype == episode.actions.dtype == np.float32
    mean_return = transitions_of(data).rewards.sum() / 5
    assert output.out.splitlines() == [
        f"{dataset_id}: 24 rows, 21 transitions, 5 episodes (3 terminated)",
        f"  mean return {mean_return:.6g}, action bounds [-1, 1], [-1, 1]",
        "  3 rows dropped: last of an episode, without a next observation",
        "  0 episodes split: the next row is not the next observation",
        "Train on it:",
        f"  python td3_bc_n.py --env-id {dataset_id}",
    ]


@pytest.mark.parametrize("suffix", [".npz", ".hdf5", ".csv"])
def test_next_observations_of_the_file_are_used_and_episodes_split_at_gaps(
    suffix, tmp_path, capsys
):
    data = make_data()
    data["next_observations"] = next_observations(data, gaps=(1, 12, 17, 20))  # 12 is an end
    dataset_id = run_import(write(tmp_path / f"robot{suffix}", data), *BOUNDS)
    assert_imported(dataset_id, data)
    lengths = [len(episode.actions) for episode in minari.load_dataset(dataset_id)]
    assert lengths == [2, 2, 5, 4, 1, 1, 3, 3, 3]
    output = capsys.readouterr().out
    assert "24 rows, 24 transitions, 9 episodes (3 terminated)" in output
    assert "  0 rows dropped" in output and "  3 episodes split" in output


@pytest.mark.parametrize("suffix", [".npz", ".hdf5", ".csv"])
@pytest.mark.parametrize("with_terminals", [True, False])
def test_an_episode_column_replaces_terminals_and_timeouts(suffix, with_terminals, tmp_path):
    # Numbers that float32 cannot tell apart, in any order
    episode = np.repeat([7, 2**24 + 1, 2**24, 3], [4, 5, 12, 3])
    data = make_data(timeouts=None, episode=episode)
    if not with_terminals:
        del data["terminals"]
    dataset_id = run_import(write(tmp_path / f"robot{suffix}", data), *BOUNDS)
    assert_imported(dataset_id, data)
    assert load_data(dataset_id)[0].dones.sum() == 3 * with_terminals
    assert len(minari.load_dataset(dataset_id)) == (6 if with_terminals else 4)


def test_arrays_of_other_shapes_types_and_orders(tmp_path):
    data = make_data(action_dim=1, observations=np.arange(24))
    data["actions"] = data["actions"][:, 0]  # one column: without its axis
    stored = data | {"rewards": data["rewards"][:, None].astype(">f8")}
    stored["observations"] = data["observations"].astype(np.int16)
    stored["terminals"] = data["terminals"].astype(int)
    for suffix in (".npz", ".hdf5"):
        dataset_id = run_import(write(tmp_path / f"robot{suffix}", stored), *BOUNDS)
        vectors = {key: data[key].reshape(24, 1) for key in ("observations", "actions")}
        assert_imported(dataset_id, data | vectors)


@pytest.mark.parametrize("rows", [1, 2, 24])
def test_fortran_order(rows, tmp_path):
    data = make_data(rows, terminals=np.arange(rows) == rows - 1)
    stored = data | {key: np.asfortranarray(data[key]) for key in ("observations", "actions")}
    dataset_id = run_import(write(tmp_path / "robot.npz", stored), *BOUNDS)
    assert_imported(dataset_id, data)


# --- CSV ---


def test_columns_have_the_order_of_the_header(tmp_path):
    header = "reward,obs_2,obs_10,action_b,obs_1,action_a,terminal,timeout,comment"
    path = tmp_path / "robot.csv"
    path.write_text(f"{header}\n1,2,10,.5,1,.25,0,0,#\n5,6,7,.75,8,-.5,1,0,text\n")
    data = load_data(run_import(path, *BOUNDS))[0]
    np.testing.assert_array_equal(data.obs, [[2, 10, 1], [6, 7, 8]])
    np.testing.assert_array_equal(data.actions, [[0.5, 0.25], [0.75, -0.5]])
    np.testing.assert_array_equal(data.next_obs[0], [6, 7, 8])
    np.testing.assert_array_equal(data.rewards, [1, 5])


def test_columns_by_arguments(tmp_path):
    path = tmp_path / "robot.csv"
    header = "angle,speed,torque,gain,done,cut,trial,angle2,speed2,obs_0,terminal"
    rows = ["1,2,.5,3,0,0,8,3,4,9,9", "3,4,-.5,5,0,1,8,5,6,9,9", "0,0,0,1,1,0,9,7,7,9,9"]
    path.write_text("\n".join([header, *rows]))
    arguments = ["--obs-columns", "speed", "angle", "--action-columns", "torque"]
    arguments += ["--reward-column", "gain", "--terminal-column", "done", "--timeout-column", "cut"]
    next_obs = ["--next-obs-columns", "speed2", "angle2"]
    data = load_data(run_import(path, *arguments, *next_obs, *BOUNDS))[0]
    np.testing.assert_array_equal(data.obs, [[2, 1], [4, 3], [0, 0]])
    np.testing.assert_array_equal(data.next_obs, [[4, 3], [6, 5], [7, 7]])
    np.testing.assert_array_equal(data.actions[:, 0], [0.5, -0.5, 0])
    np.testing.assert_array_equal(data.rewards, [3, 5, 1])
    np.testing.assert_array_equal(data.dones, [0, 0, 1])
    arguments[-2:] = ["--episode-column", "trial"]  # instead of the timeouts
    data = load_data(run_import(path, *arguments, *BOUNDS))[0]
    np.testing.assert_array_equal(data.obs, [[2, 1], [0, 0]])
    np.testing.assert_array_equal(data.next_obs[0], [4, 3])


def test_quotes_words_blank_lines_and_line_ends(tmp_path):
    path = tmp_path / "ROBOT.CSV"
    lines = ['"obs_0", action_0,reward,terminal,timeout,note', '"1", 0.5 ,1e0,False,FALSE,"a, b"']
    lines += ["", "2,-0.5,2,false,false,", "  ", "3,0,3,TRUE,False,x", ""]
    path.write_bytes(b"\xef\xbb\xbf" + "\r\n".join(lines).encode())
    data = load_data(run_import(path, *BOUNDS))[0]
    np.testing.assert_array_equal(data.obs[:, 0], [1, 2, 3])
    np.testing.assert_array_equal(data.actions[:, 0], [0.5, -0.5, 0])
    np.testing.assert_array_equal(data.rewards, [1, 2, 3])
    np.testing.assert_array_equal(data.dones, [0, 0, 1])


# --- Action bounds and environments ---


def spaces_of(dataset_id):
    dataset = minari.load_dataset(dataset_id)
    return dataset.observation_space, dataset.action_space


@pytest.mark.parametrize(
    ("arguments", "low", "high"),
    [
        (["--action-low", -3, "--action-high", 2], [-3, -3], [2, 2]),
        (["--action-low", -3, "-1.5e0", "--action-high", 2, 4], [-3, -1.5], [2, 4]),
        (["--action-high", 2], None, [2, 2]),
        ([], None, None),
    ],
)
def test_action_bounds_are_those_given_or_of_the_data(arguments, low, high, tmp_path, capsys):
    data = make_data()
    actions = data["actions"].astype(np.float32)
    dataset_id = run_import(write(tmp_path / "robot.npz", data), *arguments)
    error, low_expected = capsys.readouterr().err, actions.min(axis=0) if low is None else low
    high_expected = actions.max(axis=0) if high is None else high
    _, space = spaces_of(dataset_id)
    assert space == gym.spaces.Box(np.float32(low_expected), np.float32(high_expected))
    rescaled = 2 * (actions - space.low) / (space.high - space.low) - 1
    found = load_data(dataset_id)[0].actions
    np.testing.assert_allclose(found, np.delete(rescaled, [8, 14, 23], axis=0), atol=1e-6)
    if low is None:
        (line,) = error.splitlines()
        assert line.startswith("warning: action bounds are from the data")
        assert line.endswith(
            f"[{space.low[0]:g}, {space.high[0]:g}], [{space.low[1]:g}, {space.high[1]:g}]"
        )
    else:
        assert error == ""


def test_actions_outside_the_bounds_are_counted_and_clipped_in_training(tmp_path, capsys):
    data = make_data()
    data["actions"][[0, 2, 5]] = [[1.5, 0], [-2, 2], [1, -1]]  # the last is on the bounds
    dataset_id = run_import(write(tmp_path / "robot.npz", data), *BOUNDS)
    warning = "warning: 2 rows with actions outside [-1, 1], [-1, 1]: kept, but clipped in training"
    assert capsys.readouterr().err == f"{warning}\n"
    assert_imported(dataset_id, data | {"actions": data["actions"].clip(-1, 1)})
    stored = minari.load_dataset(dataset_id)[0].actions
    np.testing.assert_array_equal(stored, data["actions"][:4].astype(np.float32))


def test_an_environment_gives_its_spaces_and_plays(tmp_path, run, capsys):
    data = make_data(action_dim=1)
    dataset_id = run_import(write(tmp_path / "swing.npz", data), "--env-id", "Pendulum-v1")
    output = capsys.readouterr()
    assert output.err == "" and "action bounds [-2, 2]" in output.out
    env = gym.make("Pendulum-v1")
    assert spaces_of(dataset_id) == (env.observation_space, env.action_space)
    assert_imported(dataset_id, data | {"actions": data["actions"] / 2})
    process, _ = run("td3_bc_n", "--env-id", dataset_id, *SHORT, "--eval-episodes", 1)
    assert "step 2: score -" in process.stdout and process.stderr == ""


def test_actions_in_other_units_than_the_environment_are_rescaled_with_a_warning(tmp_path, capsys):
    data = make_data(action_dim=1)
    path = write(tmp_path / "swing.npz", data)
    dataset_id = run_import(path, "--env-id", "Pendulum-v1", *BOUNDS)
    warning = "warning: actions are rescaled from [-1, 1] to the other bounds of Pendulum-v1\n"
    assert capsys.readouterr().err == warning
    assert_imported(dataset_id, data)


def test_an_environment_with_dict_observations_takes_flat_ones(tmp_path):
    data = make_data(obs_dim=8)
    path = write(tmp_path / "maze.npz", data)
    dataset_id = run_import(path, "--env-id", "gymnasium_robotics:PointMaze_UMazeDense-v3")
    assert_imported(dataset_id, data)
    *_, metadata, make_env = load_data(dataset_id)
    assert metadata["environment"] == "PointMaze_UMazeDense-v3"
    assert make_env().observation_space.shape == (8,)


def test_an_environment_of_another_package_needs_trust_env_in_training(
    tmp_path, capsys, monkeypatch
):
    source = "from gymnasium.envs.classic_control import PendulumEnv\nimport gymnasium as gym\n"
    source += "class Env(PendulumEnv): pass\n"
    source += "gym.register('Swing-v0', 'my_swing:Env', max_episode_steps=9)\n"
    (tmp_path / "my_swing.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    path = write(tmp_path / "swing.npz", make_data(action_dim=1))
    dataset_id = run_import(path, "--env-id", "my_swing:Swing-v0")
    command = f"  python td3_bc_n.py --env-id {dataset_id} --trust-env"
    assert capsys.readouterr().out.splitlines()[-1] == command
    assert load_data(dataset_id)[2] is None and load_data(dataset_id, trust_env=True)[2]
    gym.registry.pop("Swing-v0")


def test_a_constant_action_is_a_warning_if_its_bounds_are_known(tmp_path, capsys):
    data = make_data()
    data["actions"][:, 1] = 0.5
    dataset_id = run_import(write(tmp_path / "robot.npz", data), *BOUNDS)
    assert "column 'actions[:, 1]' is constant (0.5)" in capsys.readouterr().err
    assert_imported(dataset_id, data)


def test_a_single_episode_is_a_warning(tmp_path, capsys):
    data = make_data(terminals=np.arange(24) == 23, timeouts=np.zeros(24))
    data["next_observations"] = next_observations(
        data | {"timeouts": np.zeros(24, dtype=bool)}, gaps=[4]
    )
    dataset_id = run_import(write(tmp_path / "robot.npz", data), *BOUNDS)
    assert capsys.readouterr().err.strip().endswith("robot.npz: there is only one episode")
    assert_imported(dataset_id, data)


# --- Mistakes ---


def changed(column, index, value, **changes):
    """Data with another value at one place."""
    data = make_data(**changes)
    data[column] = data[column].astype(np.float64)
    data[column][index] = value
    return data


ZEROS, RETURNING = np.zeros(24), np.repeat([4, 5, 4], 8)
ARRAYS = {  # what is wrong with the data, and the message for .npz; rows are counted from 0
    "no-actions": (make_data(actions=None), "no column 'actions' .found: .*rewards"),
    "no-observations": (make_data(observations=None), "no column 'observations'"),
    "no-rewards": (make_data(rewards=None), "no column 'rewards'"),
    "no-terminals": (make_data(terminals=None), r"no column 'terminals' .*, nor 'episode'"),
    "lengths": (make_data(rewards=ZEROS[:9]), "'rewards' has 9 rows, 'observations' has 24"),
    "nan": (
        changed("observations", (17, 2), np.nan),
        r"column 'observations\[:, 2\]', row 17: nan is not a finite",
    ),
    "too-large": (changed("rewards", 8, 1e60), "column 'rewards', row 8: inf is not a finite"),
    "flag": (changed("terminals", 9, 2), r"column 'terminals', row 9: 2.0 is not 0 or 1"),
    "constant": (
        changed("actions", (slice(None), 1), 0.25),
        r"'actions\[:, 1\]' is constant .0.25.: leave it out, or give --action-low",
    ),
    "no-ends": (
        make_data(terminals=ZEROS, timeouts=ZEROS),
        "no episode ends: set 'terminals' or 'timeouts' in last rows, or add a column 'episode'",
    ),
    "returning": (
        make_data(episode=RETURNING),
        "column 'episode', row 16: episode 4 is not contiguous: it appears again after",
    ),
    "single-rows": (
        make_data(terminals=None, timeouts=None, episode=np.arange(24)),
        "no transitions, every episode has a single row",
    ),
    "next-width": (
        make_data(next_observations=np.zeros((24, 2))),
        "3 columns of observations, but 2 of the next ones",
    ),
    "no-rows": (make_data(0), "there are no rows"),
    "text": (make_data(rewards=np.array(["good"] * 24, "S4")), "'rewards' has no numbers but .S4"),
    "images": (make_data(observations=np.zeros((24, 8, 8))), "'observations' must be vectors, not"),
    "bytes": (make_data(observations=np.zeros((24, 8), np.uint8)), "must be vectors, not images"),
    "discrete": (make_data(actions=np.arange(24) % 4), "'actions' .* discrete actions are not"),
    "two-rewards": (make_data(rewards=np.zeros((24, 2))), r"'rewards' has shape .24, 2."),
    "no-width": (make_data(observations=np.zeros((24, 0))), r"'observations' has shape .24, 0."),
    "scalar": (make_data(rewards=np.float64(1)), r"'rewards' has shape .., which"),
}


def assert_refused(message, datasets, path, *arguments):
    """One line, and nothing is written."""
    with pytest.raises(SystemExit, match=message) as error:
        run_import(path, *arguments, dataset_id="wrong/robot-v0")
    assert "\n" not in error.value.code
    assert not (datasets / "wrong").exists(), "nothing is written"


@pytest.mark.parametrize("suffix", [".npz", ".hdf5"])
@pytest.mark.parametrize("name", ARRAYS)
def test_mistakes_in_arrays_are_one_line(name, suffix, tmp_path, datasets):
    data, message = ARRAYS[name]
    assert_refused(message, datasets, write(tmp_path / f"robot{suffix}", data))


CSV_HEADER = "obs_0,obs_1,action_0,reward,terminal,timeout"
CSV_ROWS = [
    "1,2,.3,4,0,0",
    "2,3,.4,5,0,1",
    "",
    "3,4,.5,6,0,0",
    "4,5,.6,7,1,0",
    *["4,5,.6,7,1,0"] * 4,
]
MISTAKES_IN_CSV = {  # a line (the first is the header) with other text; lines are counted from 1
    "no-reward": (1, CSV_HEADER.replace("reward", "r"), "no column 'reward' .found: obs_0, obs_1"),
    "no-actions": (1, CSV_HEADER.replace("action_0", "a"), r"no column 'action_\*'"),
    "no-terminal": (
        1,
        CSV_HEADER.replace("terminal", "t"),
        "no column 'terminal' .* nor 'episode'",
    ),
    "no-timeout": (1, CSV_HEADER.replace("timeout", "t"), "no column 'timeout' .* nor 'episode'"),
    "same-name": (1, CSV_HEADER.replace("obs_1", "obs_0"), "2 columns have the name 'obs_0'"),
    "semicolons": (1, CSV_HEADER.replace(",", ";"), "cells must be separated by commas"),
    "tabs": (1, CSV_HEADER.replace(",", "\t"), "cells must be separated by commas"),
    "text": (5, "3,4,.5,bad,0,0", "column 'reward', line 5: 'bad' is not a number"),
    "empty-cell": (9, "3,,.5,1,0,0", "column 'obs_1', line 9: '' is not a number"),
    "nan": (6, "3,4,nan,1,0,0", "column 'action_0', line 6: nan is not a finite"),
    "flag": (10, "3,4,0,1,0,3", "column 'timeout', line 10: 3.0 is not 0 or 1"),
    "too-many": (7, "3,4,.5,1,0,0,0", "line 7 has 7 cells, the header has 6"),
    "too-few": (7, "3,4,.5,1,0", "line 7 has 5 cells, the header has 6"),
    "line-break": (2, '1,2,.3,"4\n",0,0', "line 2 has a line break in quotes"),
}


@pytest.mark.parametrize("name", MISTAKES_IN_CSV)
def test_mistakes_in_csv_are_one_line(name, tmp_path, datasets):
    line, text, message = MISTAKES_IN_CSV[name]
    lines = [CSV_HEADER, *CSV_ROWS]
    lines[line - 1] = text
    (tmp_path / "robot.csv").write_text("\n".join(lines))
    assert_refused(message, datasets, tmp_path / "robot.csv")


def test_a_quoted_comma_does_not_hide_a_missing_cell(tmp_path, datasets):
    path = tmp_path / "robot.csv"
    path.write_text(f'place,note,{CSV_HEADER}\na,b,{CSV_ROWS[0]}\n"a,b",{CSV_ROWS[4]}\n')
    assert_refused("line 3 has 7 cells, the header has 8", datasets, path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--obs-columns", "obs_0", "speed"], "no column 'speed'"),
        (["--next-obs-columns", "speed"], "no column 'speed'"),
        (["--episode-column", "trial"], "no column 'trial'"),
        (["--next-obs-columns", "obs_0"], "2 columns of observations, but 1 of the next ones"),
        (["--episode-column", "obs_0"], "column 'obs_0', line 10: episode 4 is not contig"),
    ],
)
def test_wrong_names_of_columns_are_one_line(arguments, message, tmp_path, datasets):
    lines = [CSV_HEADER, *CSV_ROWS]
    lines[7] = lines[7].replace("4,5", "9,9")
    lines[8] = lines[8].replace("4,5", "9,9")
    (tmp_path / "robot.csv").write_text("\n".join(lines))
    assert_refused(message, datasets, tmp_path / "robot.csv", *arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--action-low", 1, "--action-high", 1], r"must be below the upper, .*: \[1, 1\]"),
        (["--action-low", 2, "--action-high", 1], r"must be below the upper, .*: \[2, 1\]"),
        (["--action-low", "nan", "--action-high", 1], "must be below the upper"),
        (["--action-low", -1, "--action-high", "inf"], "must be below the upper, and finite"),
        (["--action-low", -1, -1, -1], "--action-low and --action-high need one number, or 2"),
        (["--env-id", "Pendulum-v1"], r"have 3 and 2 columns, in Pendulum-v1 \(3, 1\)"),
        (["--env-id", "NoSuch-v0"], "NoSuch-v0: not an environment for the scripts .*NoSuch"),
        (["--env-id", "no_such_module:Env-v0"], "no_such_module:Env-v0: not an environment"),
        (["--env-id", "CartPole-v1"], "CartPole-v1: not an environment .*bounded real numbers"),
        (["--reward-column", "gain"], "--reward-column is only for CSV files"),
        (["--obs-columns", "angle"], "--obs-columns is only for CSV files"),
    ],
)
def test_wrong_arguments_are_one_line(arguments, message, tmp_path, datasets):
    path = write(tmp_path / "robot.npz", make_data())
    assert_refused(message, datasets, path, *arguments)


def test_an_id_that_exists_is_refused(tmp_path):
    with pytest.raises(SystemExit, match="tests/swing-v0: this Minari dataset exists"):
        run_import(tmp_path / "nowhere.npz", dataset_id="tests/swing-v0")


@pytest.mark.parametrize("suffix", [".npz", ".hdf5", ".csv"])
def test_unreadable_files_are_one_line(suffix, tmp_path, datasets):
    path = tmp_path / f"robot{suffix}"
    assert_refused("cannot be read .FileNotFoundError", datasets, path)
    path.touch()
    assert_refused("the file is empty", datasets, path)
    path.write_bytes(b"\x00\xff rubbish" * 100)
    assert_refused("no column 'reward'" if suffix == ".csv" else "cannot be read", datasets, path)
    path.unlink()
    path.mkdir()
    assert_refused("cannot be read", datasets, path)


@pytest.mark.parametrize("suffix", [".npz", ".c.npz"])
@pytest.mark.parametrize("place", [0.3, 0.999])
def test_a_changed_byte_is_one_line(suffix, place, tmp_path, datasets):
    """The checksum of an array is read at its end."""
    path = write(tmp_path / f"robot{suffix}", make_data(1000))
    content = bytearray(path.read_bytes())
    start, stop = content.find(b"observations.npy"), content.find(b"actions.npy")
    content[int(start + 200 + place * (stop - start - 300))] ^= 1
    path.write_bytes(content)
    assert_refused("cannot be read", datasets, path)


def test_objects_in_a_file_are_not_unpickled(tmp_path, datasets):
    data = make_data(rewards=np.array([None] * 24, dtype=object))
    path = write(tmp_path / "robot.npz", data)
    assert_refused("'rewards' has no numbers but object", datasets, path)


@pytest.mark.parametrize("name", ["robot.txt", "robot.npy", "robot"])
def test_other_types_of_files_are_one_line(name, tmp_path, datasets):
    assert_refused("expected a file of type .npz, .hdf5, .h5, .csv", datasets, tmp_path / name)


def test_a_place_that_cannot_be_written_is_one_line(tmp_path, monkeypatch, datasets):
    (tmp_path / "file").touch()
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "file" / "below"))
    path = write(tmp_path / "robot.npz", make_data())
    assert_refused("wrong/robot-v0: cannot be written", datasets, path)


# --- Interruption, memory ---


@pytest.mark.parametrize("event", ["SIGINT", "SIGTERM", "SIGHUP", "full"])
def test_an_interrupted_import_leaves_nothing_behind(event, tmp_path, datasets, monkeypatch):
    add, calls = hdf5_storage._add_episode_to_group, []

    def interrupt(*arguments, **kwargs):
        add(*arguments, **kwargs)
        calls.append((datasets / "imported/half-v0/data/main_data.hdf5").stat().st_size)
        if len(calls) == 2 and event == "full":
            raise OSError("Can't write\n(No space left on device)")  # HDF5 has several lines
        if len(calls) == 2:
            os.kill(os.getpid(), getattr(signal, event))

    monkeypatch.setattr(hdf5_storage, "_add_episode_to_group", interrupt)
    path = write(tmp_path / "robot.npz", make_data())
    process = run_script("tools/import_data", path, "--dataset-id", "imported/half-v0", *BOUNDS)
    assert len(calls) == 2 and not (datasets / "imported/half-v0").exists()
    if event == "full":
        assert process.returncode == 1
        assert process.stderr.startswith("imported/half-v0: cannot be written (")
        assert "No space left" in process.stderr and "\n" not in process.stderr
    else:
        assert process.returncode == 128 + getattr(signal, event) and process.stderr == ""


@pytest.mark.parametrize("suffix", [".npz", ".c.npz", ".hdf5", ".csv"])
def test_the_memory_is_less_than_twice_the_data(suffix, tmp_path, monkeypatch):
    rows = 10_000
    data = make_data(rows, obs_dim=20, action_dim=5, timeouts=np.arange(rows) % 1000 == 999)
    path, size = write(tmp_path / f"robot{suffix}", data), 4 * rows * 26
    monkeypatch.setattr(import_data, "CHUNK", 500)
    args = import_data.Args(str(path), f"imported/data{next(numbers)}-v0", None, (-1,), (1,))
    tracemalloc.start()
    try:
        import_data.main(args)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert size < peak < 2 * size, "float64, or a second copy, would need twice the memory"
