"""Recordings: files with all actions of a vector environment. With these files, each game can be replayed exactly.

    recordings/NAME.json      names, options, rewards, seed and action names of the environments
    recordings/NAME.actions   action indices [T,N], 1 byte each (2 bytes each if there are more than 256 actions)
    recordings/NAME.csv       one row per finished game: environment, first step, length, return

The random generators of an environment are not reset between games. Therefore a game depends on the seed of its
environment and on all actions since the environment was created. A replay has three parts: create the environment with
the same seed, step it with all actions before the game, and then play the game.
"""

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from bestiary import __version__
from bestiary.config.config import make_vector_env
from bestiary.envs import lookup_env
from bestiary.envs.rewards.wrapper import DEFAULT_REWARDS, RewardConfig
from bestiary.envs.vector_env import VectorEnv, VectorEnvWrapper, action_index
from bestiary.runs.checkpoints import unused_path
from bestiary.runs.csv_tables import CsvTable, describe_damage, read_columns
from bestiary.step import Arrays, Step
from bestiary.utils import safe_files
from bestiary.utils.console import warn
from bestiary.utils.errors import UserError
from bestiary.utils.options import parse_options

# Environment options that determine what the agent observes and how actions are numbered. They do not change the game
# itself, so a replay may use other values than the recording.
INTERFACE_OPTIONS = (
    "frame_size",
    "frame_stack",
    "gray",
    "flicker",
    "flicker_mode",
    "noise",
    "observation",
    "full_actions",
)

BUFFER_BYTES = 2**16  # buffered actions are written when they have this size, and after each game


class RecordingWrapper(VectorEnvWrapper):
    """Wrapper of a vector environment. It writes all actions, and one row per finished game, to a recording."""

    def __init__(self, pool: VectorEnv, path: Path, metadata: dict[str, Any], num_steps: int = 0):
        """Create the files of a recording or, if `num_steps` is not 0, continue an existing recording.

        `path` is the path of the JSON file. If an existing recording is continued, its first `num_steps` steps are
        kept. Later steps, and games that ended in later steps, are removed.
        """
        super().__init__(pool)
        self.dtype = np.dtype("u1" if pool.action_spec.n <= 256 else "<u2")
        path = path.absolute()
        path.parent.parent.mkdir(parents=True, exist_ok=True)
        root = path.parent.parent
        safe_files.make_folder(path.parent, root)
        metadata = {
            "bestiary": __version__,
            **metadata,
            "num_envs": pool.num_envs,
            "bytes_per_action": self.dtype.itemsize,
            "action_names": list(pool.action_spec.names),
        }
        safe_files.write_text(path, json.dumps(metadata, indent=1) + "\n", root)
        actions_path = path.with_suffix(".actions")
        if not num_steps:
            safe_files.write_bytes(actions_path, b"", root)
        self.actions_file = os.fdopen(safe_files.open_file(actions_path, os.O_RDWR, root), "r+b", buffering=0)
        num_bytes = num_steps * self.num_envs * self.dtype.itemsize
        if (missing := num_bytes - os.fstat(self.actions_file.fileno()).st_size) > 0:
            warn(
                f"{actions_path} lacks the last {missing} bytes before step {num_steps}: later games cannot be replayed"
            )
        self.actions_file.truncate(num_bytes)
        self.actions_file.seek(0, 2)
        self.unwritten = bytearray()  # actions that are not in the file yet
        self.warned = False  # whether the user was warned that the recording cannot be written
        self.step_count = num_steps
        games = _read_games(path.with_suffix(".csv")) if num_steps else []
        if not all(0 <= game.env < pool.num_envs and game.first_step >= 0 and game.length > 0 for game in games):
            raise UserError(
                f"{path.with_suffix('.csv')} is damaged: the column env must contain indices from 0 to "
                f"{pool.num_envs - 1}, first_step at least 0 and length at least 1"
            )
        games = [game for game in games if game.first_step + game.length <= num_steps]
        self.games = CsvTable(path.with_suffix(".csv"), len(games), root)
        self.first_steps = np.zeros(self.num_envs, np.int64)  # [N] first step of the current game of each environment
        for game in games:
            self.first_steps[game.env] = game.first_step + game.length
        # [N] return so far of the current game of each environment; nan if the game began before `num_steps`
        self.game_returns = np.where(self.first_steps < num_steps, np.nan, 0.0)

    def send(self, actions: np.ndarray) -> None:
        self.unwritten += actions.astype(self.dtype).tobytes()
        if len(self.unwritten) >= BUFFER_BYTES:
            self._write([])
        self.step_count += 1
        self.pool.send(actions)

    def recv(self) -> Step:
        step = self.pool.recv()
        self.game_returns += step.reward
        if step.game_over.any():
            finished = np.flatnonzero(step.game_over)
            self._write([self._game_row(env) for env in finished.tolist()])
            self.first_steps[finished] = self.step_count
            self.game_returns[finished] = 0
        return step

    def _write(self, game_rows: list[dict[str, Any]]) -> None:
        """Write the buffered actions and these rows of finished games.

        If this fails, for example because the disk is full, warn once. Actions and rows then stay in memory until
        the next call.
        """
        try:
            while self.unwritten:
                del self.unwritten[: self.actions_file.write(self.unwritten)]
            self.games.write(game_rows)
        except OSError as error:
            self.games.pending += [row for row in game_rows if row not in self.games.pending]
            if not self.warned:
                reason = error.strerror or error
                warn(f"{reason}: the recording cannot be written now; the run continues, and writing is tried again")
            self.warned = True

    def _game_row(self, env: int) -> dict[str, Any]:
        first_step = int(self.first_steps[env])
        return {
            "env": env,
            "first_step": first_step,
            "length": self.step_count - first_step,
            "return": float(self.game_returns[env]),
        }

    def save(self) -> Arrays:
        """Write the buffered actions, so that the recording reaches at least to the checkpoint. Save the environments.

        A resumed run continues the recording after the checkpoint, also if the process was killed.
        """
        self._write([])
        return self.pool.save()

    def close(self) -> None:
        self._write([])
        self.actions_file.close()
        self.pool.close()


class _ChildSeed(np.random.SeedSequence):
    """Seed sequence for a replay: the replayed environment gets the seed that environment `index` had in the recording.

    A vector environment spawns one child seed per environment, and a replay has only one environment. The only child of
    this sequence is child number `index` of the recorded sequence.
    """

    def __init__(self, entropy: Any, spawn_key: tuple[int, ...], index: int):
        super().__init__(entropy, spawn_key=spawn_key)
        self.index = index

    def spawn(self, n_children: int) -> Any:
        assert n_children == 1
        return [np.random.SeedSequence(self.entropy, spawn_key=(*self.spawn_key, self.index))]


@dataclass(frozen=True)
class RecordedGame:
    """A finished game: the content of one row of a recording's CSV file."""

    env: int  # index of the environment in the vector environment
    first_step: int  # number of steps of the environment before this game
    length: int  # number of steps
    game_return: float


def _read_games(path: Path) -> list[RecordedGame]:
    """Read the CSV file of a recording. Raise UserError if it is damaged. Return [] if it does not exist."""
    columns = read_columns(path)
    if not columns:
        return []
    try:
        rows = zip(*(columns[name] for name in ("env", "first_step", "length", "return")), strict=True)
        return [RecordedGame(int(env), int(first), int(length), float(value)) for env, first, length, value in rows]
    except (KeyError, ValueError, OverflowError) as error:
        raise UserError(f"{path} is not the CSV file of a recording: {error}") from error


@dataclass
class Recording:
    """An existing recording, which can be replayed."""

    path: Path  # the JSON file
    metadata: dict[str, Any]  # content of the JSON file

    @cached_property
    def actions(self) -> np.ndarray:
        """All action indices [T,N]. If the last step in the file is incomplete, it is left out."""
        n = self.metadata["num_envs"]
        dtype = np.dtype("u1" if self.metadata["bytes_per_action"] == 1 else "<u2")
        path = self.path.with_suffix(".actions")
        with describe_damage(path):
            content = safe_files.read_bytes(path, max_bytes=safe_files.MAX_TENSOR_BYTES)
        num_steps = len(content) // (n * dtype.itemsize)
        return np.frombuffer(content, dtype, num_steps * n).reshape(-1, n)

    @property
    def games(self) -> list[RecordedGame]:
        """All finished games, in the order in which they ended."""
        return _read_games(self.path.with_suffix(".csv"))

    def game(self, number: int) -> RecordedGame:
        """Return the game in row `number` of the CSV file. Raise UserError if the row or its actions do not exist."""
        games = self.games
        if not 0 <= number < len(games):
            advice = f"{len(games)} finished games; choose 0 to {len(games) - 1}" if games else "no finished game"
            raise UserError(f"--game {number}: {self.path} has {advice}")
        game = games[number]
        num_steps, num_envs = self.actions.shape
        if not (0 <= game.env < num_envs and 0 <= game.first_step < game.first_step + game.length <= num_steps):
            raise UserError(
                f"--game {number}: the actions of this game are missing in {self.path.with_suffix('.actions')}"
            )
        return game

    def env_name(self, game: RecordedGame) -> str:
        """Return the name of the environment in which a game was played."""
        names = self.metadata["environments"]
        return names[self._task_index(game)]

    def _task_index(self, game: RecordedGame) -> int:
        """Return the index of a game's task. With K tasks, environment i plays task i mod K.

        The index i is counted over all vector environments of the run: i = `first_env` + row of the environment.
        """
        return int((self.metadata.get("first_env", 0) + game.env) % len(self.metadata["environments"]))

    def make_env(
        self,
        game: RecordedGame,
        render: bool = False,
        interface_options: Mapping[str, Any] | None = None,
        rewards: RewardConfig | None = None,
    ) -> VectorEnv:
        """Create the environment of a game with its recorded seed, as a vector environment of size 1.

        `interface_options` are values that replace recorded options (see INTERFACE_OPTIONS). `rewards`, if given,
        replaces the rewards in the recording.

        A recording may come from another person. Therefore a plug-in (an environment or reward in a user's file) is
        executed only if this process has already trusted it, for example when the process opened the run.
        """
        names = self.metadata["environments"]
        name = self.env_name(game)
        if rewards is None:
            rewards = RewardConfig(**self.metadata["rewards"])
        problems: list[str] = []
        recorded_options = self.metadata["environment_options"]
        options = parse_options(
            lookup_env(name).options, {**recorded_options, **(interface_options or {})}, "env", problems
        )
        if problems:
            raise UserError(f"{self.path}: {problems[0]}")
        entropy = self.metadata["seed"]["entropy"]
        spawn_key = tuple(self.metadata["seed"]["spawn_key"])
        index = game.env
        if len(names) > 1:
            # Each task has its own seed.
            spawn_key = (*spawn_key, self._task_index(game))
            index = game.env // len(names)
        return make_vector_env([name], options, 1, _ChildSeed(entropy, spawn_key, index), render, rewards)

    def game_actions(self, game: RecordedGame) -> list[str]:
        """Return the name of the action in each step of a game."""
        return self._action_names(game.env, game.first_step, game.first_step + game.length)

    def _action_names(self, env: int, first: int, last: int) -> list[str]:
        """Return the names of the actions of an environment in the steps `first` to `last` - 1."""
        names = self.metadata["action_names"]
        actions = self.actions[first:last, env]
        if actions.max(initial=0) >= len(names):
            raise UserError(
                f"{self.path.with_suffix('.actions')} is damaged: it contains the action {int(actions.max())}, but the "
                f"actions are numbered 0 to {len(names) - 1}"
            )
        return [names[action] for action in actions]

    def replay(self, game: RecordedGame) -> Iterator[Step]:
        """Replay a game and yield its steps.

        In the last step, `game_over` is True, and the observation is the first observation of the next game.
        """
        pool = self.make_env(game)
        try:
            yield self.fast_forward(game, pool)
            for action in self.game_actions(game):
                pool.send(np.array([action_index(action, pool, self.path)]))
                yield pool.recv()
        finally:
            pool.close()

    def fast_forward(self, game: RecordedGame, pool: VectorEnv, run_path: Path | None = None) -> Step:
        """Step a new environment with all recorded actions before a game. Return the first step of the game.

        Actions are looked up by name, because the environment may number them differently from the recording.
        Error messages name `run_path` or, if it is None, the recording.
        """
        step = pool.reset()
        for action in self._action_names(game.env, 0, game.first_step):
            pool.send(np.array([action_index(action, pool, run_path or self.path)]))
            step = pool.recv()
        return step


def open_recording(path: str | Path) -> Recording:
    """Open a recording, given the path of its JSON file. Raise UserError if the file is not a recording."""
    json_path = Path(path).expanduser()
    try:
        metadata = json.loads(safe_files.read_text(json_path))
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not a recording: {error}") from error
    try:
        _check_metadata(metadata)
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"{path} is not a recording ({error}); create one with bestiary eval --record (version 0.2 or later)"
        ) from error
    if not json_path.with_suffix(".actions").is_file():
        raise UserError(f"{path}: the file {json_path.with_suffix('.actions').name} is missing in the same folder")
    return Recording(json_path, metadata)


def _check_metadata(metadata: Any) -> None:
    """Raise KeyError, TypeError or ValueError if `metadata`, the content of a recording's JSON file, is damaged."""
    for key in ("environments", "action_names"):
        names = metadata[key]
        if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
            raise ValueError(f"{key} must be a list of names")
    if not isinstance(metadata["environment_options"], dict):
        raise ValueError("environment_options must be a table")
    num_envs = metadata["num_envs"]
    if type(num_envs) is not int or not 1 <= num_envs <= 1_000_000:
        raise ValueError("num_envs must be an integer of at least 1")
    first_env = metadata.get("first_env", 0)
    if type(first_env) is not int or not 0 <= first_env < 2**62:
        raise ValueError("first_env must be an integer of at least 0")
    if metadata["bytes_per_action"] not in (1, 2):
        raise ValueError("bytes_per_action must be 1 or 2")
    rewards = RewardConfig(**metadata["rewards"])
    if not all(text is None or isinstance(text, str) for text in (rewards.training, rewards.true)):
        raise ValueError("rewards must be text")
    np.random.SeedSequence(metadata["seed"]["entropy"], spawn_key=metadata["seed"]["spawn_key"])


def make_recording_wrapper(
    pool: VectorEnv,
    path: Path,
    names: list[str],
    options: Any,
    seed: np.random.SeedSequence,
    rewards: RewardConfig = DEFAULT_REWARDS,
    num_steps: int = 0,
    **metadata: Any,
) -> Any:
    """Wrap a vector environment so that its actions are recorded.

    `names`, `options`, `seed` and `rewards` are the arguments with which the vector environment was created. If
    `num_steps` is not 0, the existing recording at `path` is continued after its first `num_steps` steps. `metadata` is
    added to the JSON file.
    """
    metadata = {
        **metadata,
        "environments": names,
        "environment_options": {key: value for key, value in asdict(options).items() if value is not None},
        "rewards": asdict(rewards),
        "seed": {"entropy": np.asarray(seed.entropy).tolist(), "spawn_key": list(seed.spawn_key)},
    }
    return RecordingWrapper(pool, path if num_steps else unused_path(path), metadata, num_steps)
