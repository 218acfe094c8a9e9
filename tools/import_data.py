"""Turns NumPy, HDF5 and CSV files into a Minari dataset that all scripts train on.

    python -m tools.import_data robot.npz --dataset-id my/robot-v0
    python -m tools.import_data robot.hdf5 --dataset-id my/robot-v0 --action-low -1 --action-high 1
    python -m tools.import_data swing.npz --dataset-id my/swing-v0 --env-id Pendulum-v1
    python -m tools.import_data log.csv --dataset-id my/log-v0 --obs-columns angle speed
        --action-columns torque --reward-column gain --episode-column trial

One row is one step: the observation, the action, the reward, and whether the episode ends.

    .npz, .hdf5, .h5   arrays with D4RL's names: observations, actions, rewards, terminals,
                       timeouts, and if you have them next_observations and episode
    .csv               columns obs_*, action_*, reward, terminal, timeout, and if you have them
                       next_obs_* and episode, in the order of the header; or other names, by
                       arguments

A terminal (0 or 1) ends the task: its value is not bootstrapped. A timeout (0 or 1) is any other
end, such as a time limit. An episode number in every row can replace both: all episodes are
then truncated, except where terminals are given too.

If next observations are not given, they are taken from the next row. The last row of an episode
then has none, and is dropped unless it is terminal. If they are given, an episode is split where
the next row has another observation (a gap in a log), so that all transitions are those of the
file.

In training, actions are rescaled to [-1, 1] by bounds in the dataset: those that you give, or those
of the environment, or the smallest and largest action of the file. The environment is needed only
for scores and for fine-tuning. Data are stored as float32, in $MINARI_DATASETS_PATH or
~/.minari/datasets. A mistake is one line on stderr, and nothing is written.
"""

import csv
import re
import signal
import sys
import zipfile
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path

import gymnasium as gym
import h5py
import numpy as np
import tyro
from gymnasium.spaces import Box, flatdim
from minari.data_collector.episode_buffer import EpisodeBuffer
from tqdm import tqdm

from td3_bc_n import TRUSTED, check_spaces
from tools.record import check_dataset_id, write_dataset

CHUNK = 20_000  # rows that are converted at a time: the file is in memory once, as float32
VECTORS = ("observations", "actions", "next_observations")
KEYS = (*VECTORS, "rewards", "terminals", "timeouts", "episode")


@dataclass
class Args:
    file: tyro.conf.Positional[str]  # file to import: .npz, .hdf5, .h5 or .csv
    dataset_id: str  # id of the new Minari dataset, namespace/name-v0
    env_id: str | None = None  # Gymnasium environment of the data, for scores and fine-tuning
    action_low: tuple[float, ...] = ()  # lower bounds of the actions: one for all, or one each
    action_high: tuple[float, ...] = ()  # upper bounds of the actions: one for all, or one each
    # Columns of a CSV file
    obs_columns: tuple[str, ...] = ()  # columns of the observations, if they are not obs_*
    action_columns: tuple[str, ...] = ()  # columns of the actions, if they are not action_*
    next_obs_columns: tuple[str, ...] = ()  # of the next observations, if they are not next_obs_*
    reward_column: str = "reward"  # column of the rewards
    terminal_column: str = "terminal"  # column of the terminals
    timeout_column: str = "timeout"  # column of the timeouts
    episode_column: str = "episode"  # column of the episode numbers


def warn(message):
    print(f"warning: {message}", file=sys.stderr)


# --- Files: a reader returns arrays of shape (rows, columns) by KEYS, and names of the columns ---


def read_npz(path, _):
    """Converts arrays while they are unpacked: np.load needs twice the memory for float64."""
    data, npy = {}, np.lib.format
    with zipfile.ZipFile(path) as file:
        found = [name.removesuffix(".npy") for name in file.namelist()]
        check_keys(path, found, found)
        for key in (key for key in KEYS if key in found):
            with file.open(f"{key}.npy") as stream:
                is_old = npy.read_magic(stream) == (1, 0)
                read_header = npy.read_array_header_1_0 if is_old else npy.read_array_header_2_0
                shape, fortran_order, dtype = read_header(stream)
                data[key] = allocate(path, key, shape, dtype)
                out = data[key].T if fortran_order else data[key]  # in the order of the file
                step = max(1, CHUNK * data[key].shape[1] // max(1, out.shape[1]))
                for i in tqdm(range(0, len(out), step), f"Reading {key}", disable=None):
                    part = out[i : i + step]
                    values = np.frombuffer(stream.read(part.size * dtype.itemsize), dtype)
                    part[:] = values.reshape(part.shape)
    return data, array_names(data)


def read_hdf5(path, _):
    data = {}
    with h5py.File(path) as file:
        found = [key for key in file if isinstance(file[key], h5py.Dataset)]
        check_keys(path, found, found)
        for key in (key for key in KEYS if key in found):
            data[key] = allocate(path, key, file[key].shape, file[key].dtype)
            for i in tqdm(range(0, len(data[key]), CHUNK), f"Reading {key}", disable=None):
                part = data[key][i : i + CHUNK]
                part[:] = file[key][i : i + CHUNK].reshape(part.shape)
    return data, array_names(data)


def array_names(data):
    """Names of columns as in NumPy, such as actions[:, 2]."""
    return {
        key: [f"{key}[:, {i}]" if key in VECTORS else key for i in range(array.shape[1])]
        for key, array in data.items()
    }


def read_csv(path, args):
    with open(path, encoding="utf-8-sig", errors="replace") as file:
        num_lines = sum(1 for _ in file)  # to allocate the arrays once
        file.seek(0)
        header = [name.strip() for name in next(csv.reader([file.readline()]))]
        if len(header) == 1 and re.search("[;\t]", header[0]):
            sys.exit(f"{path}: cells must be separated by commas")
        names = csv_names(path, header, args)
        used = [header.index(name) for name in chain(*names.values())]
        widths = {key: len(columns) for key, columns in names.items()}
        data = {
            key: allocate(path, key, (num_lines, n), np.dtype(float)) for key, n in widths.items()
        }
        rows, borders = 0, np.cumsum([*widths.values()])[:-1]
        with tqdm(total=num_lines - 1, desc="Reading", unit="row", disable=None) as bar:
            while lines := list(islice(file, CHUNK)):
                bar.update(len(lines))
                if lines := [line for line in lines if not line.isspace()]:
                    values = parse_lines(path, lines, header, used, rows)
                    parts = np.split(values, borders, axis=1)
                    for array, part in zip(data.values(), parts, strict=True):
                        array[rows : rows + len(lines)] = part
                    rows += len(lines)
    return {key: array[:rows] for key, array in data.items()}, names


def csv_names(path, header, args):
    """Names of the columns by KEYS, without those that are not in the file."""

    def starting_with(prefix):
        return [name for name in header if name.startswith(prefix)]

    names = {
        "observations": args.obs_columns or starting_with("obs_"),
        "actions": args.action_columns or starting_with("action_"),
        "next_observations": args.next_obs_columns or starting_with("next_obs_"),
        "rewards": [args.reward_column],
        "terminals": [args.terminal_column],
        "timeouts": [args.timeout_column],
        "episode": [args.episode_column],
    }
    may_be_missing = Args.terminal_column, Args.timeout_column, Args.episode_column
    for name in chain(*names.values()):
        if name not in header and name not in may_be_missing:
            sys.exit(f"{path}: no column '{name}' (found: {', '.join(header):.300})")
        if header.count(name) > 1:
            sys.exit(f"{path}: {header.count(name)} columns have the name '{name}'")
    names = {key: columns for key, columns in names.items() if columns and columns[0] in header}
    labels = {"observations": "obs_*", "actions": "action_*", "episode": args.episode_column}
    labels |= {"terminals": args.terminal_column, "timeouts": args.timeout_column}
    check_keys(path, names, header, labels)
    return names


def parse_lines(path, lines, header, used, first_row):
    """Numbers of the used columns. Exits at the first cell that is not a number."""
    if all(line.count(",") == len(header) - 1 and '"' not in line for line in lines):
        try:  # twice as fast as the loop below
            return np.loadtxt(lines, delimiter=",", comments=None, usecols=used, ndmin=2)
        except ValueError:  # text, or True and False
            pass
    values, reader = np.empty((len(lines), len(used))), csv.reader(lines)
    for i, cells in enumerate(reader):
        if len(cells) != len(header):
            where = position(path, first_row + i)
            sys.exit(f"{path}: {where} has {len(cells)} cells, the header has {len(header)}")
        if reader.line_num != i + 1:
            sys.exit(f"{path}: {position(path, first_row + i)} has a line break in quotes")
        for j, column in enumerate(used):
            cell = cells[column].strip()
            try:
                values[i, j] = {"true": 1, "false": 0}.get(cell.lower(), cell)
            except ValueError:
                where = f"column '{header[column]}', {position(path, first_row + i)}"
                sys.exit(f"{path}: {where}: {cell!r:.50} is not a number")
    return values


def position(path, row):
    """Where to find a row: its line in a CSV file, else its index."""
    if path.suffix.lower() != ".csv":
        return f"row {row}"
    with open(path, encoding="utf-8-sig", errors="replace") as file:
        numbers = (number for number, line in enumerate(file, 1) if not line.isspace())
        return f"line {next(islice(numbers, int(row) + 1, None))}"


def check_keys(path, keys, found, labels=None):
    """Exits if a needed key is missing. labels: what the file calls the keys."""
    labels = labels or {key: key for key in KEYS}
    for key in ("observations", "actions", "rewards", "terminals", "timeouts"):
        is_flag = key in ("terminals", "timeouts")
        if key not in keys and not (is_flag and "episode" in keys):
            or_episode = f" (0 or 1 in every row), nor '{labels['episode']}'" if is_flag else ""
            columns = f"found: {', '.join(found) or 'none':.300}"
            sys.exit(f"{path}: no column '{labels[key]}'{or_episode} ({columns})")


def allocate(path, key, shape, dtype):
    """An array for this key. Exits if the file does not have one vector or number per row."""
    if key in VECTORS and (len(shape) > 2 or dtype == np.uint8):
        sys.exit(f"{path}: '{key}' must be vectors, not images (shape {shape}, {dtype})")
    if key == "actions" and dtype.kind in "biu":
        sys.exit(f"{path}: 'actions' has {dtype}: discrete actions are not supported, floats are")
    if dtype.kind not in "biuf":
        sys.exit(f"{path}: '{key}' has no numbers but {dtype}")
    width = shape[1] if len(shape) == 2 else 1
    if not 1 <= len(shape) <= 2 or width == 0 or (width > 1 and key not in VECTORS):
        sys.exit(f"{path}: '{key}' has shape {shape}, which is not one entry per row")
    return np.empty((shape[0], width), np.float64 if key == "episode" else np.float32)


# --- Checks, bounds and episodes ---


def check_values(path, data, names):
    """Exits if arrays do not fit together, or at the first value that is not allowed."""
    obs = data["observations"]
    if len(obs) == 0:
        sys.exit(f"{path}: there are no rows")
    for key, array in data.items():
        if len(array) != len(obs):
            sys.exit(f"{path}: '{key}' has {len(array)} rows, 'observations' has {len(obs)}")
        is_good, problem = np.isfinite(array), "is not a finite float32"
        if is_good.all() and key in ("terminals", "timeouts"):
            is_good, problem = (array == 0) | (array == 1), "is not 0 or 1"
        if not is_good.all():
            row, column = np.argwhere(~is_good)[0]
            where = f"column '{names[key][column]}', {position(path, row)}"
            sys.exit(f"{path}: {where}: {array[row, column]} {problem}")
    width = data.get("next_observations", obs).shape[1]
    if width != obs.shape[1]:
        sys.exit(f"{path}: {obs.shape[1]} columns of observations, but {width} of the next ones")


def make_env(env_id):
    try:
        env = gym.make(env_id)
        check_spaces(env.observation_space, env.action_space)
        env.spec.to_json()  # Minari stores it
    except Exception as error:  # environments raise many kinds of exceptions
        sys.exit(f"{env_id}: not an environment for the scripts ({error!r:.300})")
    return env


def action_bounds(path, args, actions, names, env):
    """The bounds that are given, or of the environment, or of the data."""
    low, high = data_low, data_high = actions.min(axis=0), actions.max(axis=0)
    if env:
        low, high = env_bounds = env.action_space.low, env.action_space.high
    try:
        low = np.broadcast_to(np.float32(args.action_low or low), data_low.shape)
        high = np.broadcast_to(np.float32(args.action_high or high), data_high.shape)
    except ValueError:
        sys.exit(f"--action-low and --action-high need one number, or {len(names)}")
    text = ", ".join(f"[{a:g}, {b:g}]" for a, b in zip(low, high, strict=True))
    from_data = not env and not (args.action_low and args.action_high)
    for column in np.flatnonzero(data_low == data_high):
        message = f"{path}: column '{names[column]}' is constant ({data_low[column]:g})"
        if from_data:
            sys.exit(f"{message}: leave it out, or give --action-low and --action-high")
        warn(message)
    if not np.isfinite([low, high]).all() or not (low < high).all():
        sys.exit(f"lower bounds of actions must be below the upper, and finite: {text}")
    if from_data:
        warn(f"action bounds are from the data, or give --action-low and --action-high: {text}")
    if env and not np.array_equal(env_bounds, (low, high)):
        warn(f"actions are rescaled from {text} to the other bounds of {args.env_id}")
    if outside := int(((actions < low) | (actions > high)).any(axis=1).sum()):
        warn(f"{outside:,} rows with actions outside {text}: kept, but clipped in training")
    return low, high, text


def find_episodes(path, data, names):
    """Returns first rows and ends of episodes, whether they terminate, and the number of splits."""
    rows = len(data["observations"])
    terminals = data["terminals"][:, 0] == 1 if "terminals" in data else np.zeros(rows, dtype=bool)
    ends, splits = terminals.copy(), 0
    if "timeouts" in data:
        ends |= data["timeouts"][:, 0] == 1
    if "episode" in data:
        numbers = data["episode"][:, 0]
        changes = np.flatnonzero(numbers[1:] != numbers[:-1])
        ends[changes] = True
        first_rows = np.concatenate([[0], changes + 1])
        is_new = np.zeros(len(first_rows), dtype=bool)
        is_new[np.unique(numbers[first_rows], return_index=True)[1]] = True
        if not is_new.all():
            row = first_rows[is_new.argmin()]
            where = f"column '{names['episode'][0]}', {position(path, row)}"
            problem = "is not contiguous: it appears again after another one"
            sys.exit(f"{path}: {where}: episode {numbers[row]:.15g} {problem}")
    elif not ends.any():
        flags = f"'{names['terminals'][0]}' or '{names['timeouts'][0]}'"
        sys.exit(f"{path}: no episode ends: set {flags} in last rows, or add a column 'episode'")
    ends[-1] = True
    if "next_observations" in data:
        is_gap = (data["next_observations"][:-1] != data["observations"][1:]).any(axis=1)
        splits = int((is_gap & ~ends[:-1]).sum())
        ends[:-1] |= is_gap
    stops = np.flatnonzero(ends) + 1
    return np.concatenate([[0], stops[:-1]]), stops, terminals[stops - 1], splits


def episode_buffers(data, starts, stops, terminated, returns):
    """Episodes of T + 1 observations, one at a time. Appends to returns."""
    obs, next_obs = data["observations"], data.get("next_observations")
    with tqdm(total=len(obs), desc="Writing", unit="row", unit_scale=True, disable=None) as bar:
        for start, stop, is_terminated in zip(starts, stops, terminated, strict=True):
            bar.update(stop - start)
            if next_obs is not None:
                episode_obs = np.concatenate([obs[start:stop], next_obs[stop - 1 : stop]])
            elif is_terminated:  # nothing bootstraps from its next observation: any will do
                episode_obs = np.concatenate([obs[start:stop], obs[stop - 1 : stop]])
            else:  # the last row is only the next observation of the row before
                episode_obs, stop = obs[start:stop], stop - 1
            if start == stop:
                continue
            terminations, truncations = np.zeros((2, stop - start), dtype=bool)
            terminations[-1], truncations[-1] = is_terminated, not is_terminated
            rewards = data["rewards"][start:stop, 0]
            returns.append(rewards.sum(dtype=np.float64))
            yield EpisodeBuffer(
                observations=episode_obs,
                actions=data["actions"][start:stop],
                rewards=rewards,
                terminations=terminations,
                truncations=truncations,
            )


def main(args):
    path, readers = Path(args.file), {".npz": read_npz, ".hdf5": read_hdf5, ".h5": read_hdf5}
    readers[".csv"] = read_csv
    suffix = path.suffix.lower()
    if suffix not in readers:
        sys.exit(f"{path}: expected a file of type {', '.join(readers)}")
    for name, value in vars(args).items():
        if "column" in name and value != getattr(Args, name) and suffix != ".csv":
            sys.exit(f"{path}: --{name.replace('_', '-')} is only for CSV files")
    check_dataset_id(args.dataset_id)
    env = make_env(args.env_id) if args.env_id else None
    try:
        if path.stat().st_size == 0:
            sys.exit(f"{path}: the file is empty")
        with np.errstate(over="ignore"):  # check_values finds what is too large for float32
            data, names = readers[suffix](path, args)
    except Exception as error:  # zipfile, zlib and h5py raise many kinds of exceptions
        sys.exit(f"{path}: cannot be read ({error!r:.300})")

    check_values(path, data, names)
    obs, actions = data["observations"], data["actions"]
    space, options = Box(-np.inf, np.inf, obs.shape[1:]), ""
    if env:
        dims = flatdim(env.observation_space), flatdim(env.action_space)
        if dims != (obs.shape[1], actions.shape[1]):
            found = f"{obs.shape[1]} and {actions.shape[1]} columns"
            sys.exit(f"{path}: observations and actions have {found}, in {args.env_id} {dims}")
        if env.observation_space.shape == obs.shape[1:]:  # others are flattened, as in the scripts
            space = env.observation_space
        entry_points = re.findall(r'"entry_point": "([^"]*)', env.spec.to_json())
        if not all(re.fullmatch(TRUSTED, entry_point) for entry_point in entry_points):
            options = " --trust-env"
    low, high, bounds = action_bounds(path, args, actions, names["actions"], env)
    starts, stops, terminated, splits = find_episodes(path, data, names)
    dropped = 0 if "next_observations" in data else int((~terminated).sum())
    if dropped == len(obs):
        sys.exit(f"{path}: no transitions, every episode has a single row without next observation")
    if len(stops) - splits == 1:
        warn(f"{path}: there is only one episode")

    returns = []
    write_dataset(
        args.dataset_id,
        episode_buffers(data, starts, stops, terminated, returns),
        env,
        observation_space=space,
        action_space=Box(low, high),
        description=f"made by tools.import_data from {path.name}",
    )
    episodes = f"{len(returns):,} episodes ({terminated.sum():,} terminated)"
    print(f"{args.dataset_id}: {len(obs):,} rows, {len(obs) - dropped:,} transitions, {episodes}")
    print(f"  mean return {np.mean(returns):.6g}, action bounds {bounds}")
    print(f"  {dropped:,} rows dropped: last of an episode, without a next observation")
    print(f"  {splits:,} episodes split: the next row is not the next observation")
    print(f"Train on it:\n  python td3_bc_n.py --env-id {args.dataset_id}{options}")


if __name__ == "__main__":
    for name in {"SIGINT", "SIGTERM", "SIGHUP"} & set(dir(signal)):  # Windows has no SIGHUP
        # An exception, so that an incomplete dataset is deleted
        if signal.getsignal(getattr(signal, name)) != signal.SIG_IGN:  # nohup ignores SIGHUP
            signal.signal(getattr(signal, name), lambda signum, _: sys.exit(128 + signum))
    main(tyro.cli(Args, description=__doc__))
