"""Recordings: every decision of a pool, so that any of its games can be played again exactly.

    recordings/NAME.json      what the pool was: environments, options, rewards, seed, actions by name
    recordings/NAME.actions   one byte (or two) a decision, row after row: [T,N], N environments
    recordings/NAME.csv       a row a game: which environment, from which decision on, how long, what it earned

A game is the environment's seed and all that was done in it since it was made: random streams go on from game to game. So a
replay makes one environment with the same seed, goes through what came before without looking, and shows the game.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bestiary import __version__, plugins
from bestiary.config import make_pool
from bestiary.envs import lookup
from bestiary.envs.pool import Pool, place_of
from bestiary.envs.rewards import PLAIN, Rewards
from bestiary.errors import UserError
from bestiary.options import parse_options
from bestiary.rollout import Step
from bestiary.runs.checkpoints import unused
from bestiary.runs.tables import Table, read_columns

# options of how a game is seen and its actions are counted, not of what is played: a replay may have others
SEEN = ("frame_size", "frame_stack", "gray", "flicker", "flicker_mode", "noise", "observation", "full_actions")


class RecordingPool:
    """A pool that writes down what is sent to it, and which games came of it."""

    def __init__(self, pool: Pool, path: Path, about: dict[str, Any], rows: int = 0):
        """`path` is the JSON file; of an older recording there, the first `rows` decisions of each environment are kept."""
        self.pool, self.num_envs = pool, pool.num_envs
        self.dtype = np.dtype("u1" if pool.action_spec.n <= 256 else "<u2")
        path.parent.mkdir(parents=True, exist_ok=True)
        about = {"bestiary": __version__, **about, "num_envs": pool.num_envs, "bytes": self.dtype.itemsize}
        path.write_text(json.dumps({**about, "actions": list(pool.action_spec.names)}, indent=1) + "\n")
        self.file = path.with_suffix(".actions").open("r+b" if rows else "wb")
        self.file.truncate(rows * self.num_envs * self.dtype.itemsize)
        self.file.seek(0, 2)
        self.count = rows
        games = read_columns(path.with_suffix(".csv")) if rows else {}
        kept = int((games["first"] + games["length"] <= rows).sum()) if games else 0
        self.games = Table(path.with_suffix(".csv"), kept)
        self.first = np.zeros(self.num_envs, np.int64)
        for k in range(kept):
            self.first[int(games["env"][k])] = int(games["first"][k] + games["length"][k])
        self.earned = np.where(
            self.first < rows, np.nan, 0.0
        )  # of games under way, what was earned before is not known

    def __getattr__(self, name: str) -> Any:
        return getattr(self.pool, name)

    def send(self, actions: np.ndarray) -> None:
        self.file.write(actions.astype(self.dtype).tobytes())
        self.count += 1
        self.pool.send(actions)

    def recv(self) -> Step:
        step = self.pool.recv()
        self.earned += step.reward
        if step.game_over.any():
            over = np.flatnonzero(step.game_over)
            self.file.flush()
            self.games.write([self._row(i) for i in over.tolist()])
            self.first[over], self.earned[over] = self.count, 0
        return step

    def _row(self, env: int) -> dict[str, Any]:
        first = int(self.first[env])
        return {"env": env, "first": first, "length": self.count - first, "return": float(self.earned[env])}

    def close(self) -> None:
        self.file.close()
        self.pool.close()


def seed_of(sequence: np.random.SeedSequence) -> dict[str, Any]:
    """A seed as text."""
    return {"entropy": np.asarray(sequence.entropy).tolist(), "spawn_key": list(sequence.spawn_key)}


class _Child(np.random.SeedSequence):
    """A seed whose first child is the one that another seed has at a later place."""

    def __init__(self, entropy: Any, spawn_key: tuple[int, ...], place: int):
        super().__init__(entropy, spawn_key=spawn_key)
        self.place = place

    def spawn(self, n_children: int) -> Any:
        assert n_children == 1
        return [np.random.SeedSequence(self.entropy, spawn_key=(*self.spawn_key, self.place))]


@dataclass(frozen=True)
class Game:
    """A line of a recording's CSV."""

    env: int
    first: int
    length: int
    earned: float


@dataclass
class Recording:
    path: Path
    about: dict[str, Any]

    @property
    def actions(self) -> np.ndarray:
        """[T,N]; a last row that was cut off is left out."""
        n, dtype = self.about["num_envs"], np.dtype("u1" if self.about["bytes"] == 1 else "<u2")
        flat = np.fromfile(self.path.with_suffix(".actions"), dtype)
        return flat[: len(flat) // n * n].reshape(-1, n)

    @property
    def games(self) -> list[Game]:
        columns = read_columns(self.path.with_suffix(".csv"))
        if not columns:
            return []
        try:
            rows = zip(*(columns[name] for name in ("env", "first", "length", "return")), strict=True)
            return [Game(int(env), int(first), int(length), float(earned)) for env, first, length, earned in rows]
        except (KeyError, ValueError) as error:
            raise UserError(f"{self.path.with_suffix('.csv')}: not the games of a recording: {error}") from error

    def game(self, number: int) -> Game:
        games = self.games
        if not 0 <= number < len(games):
            raise UserError(f"--game {number}: {self.path} has {len(games)} whole games, from 0 on")
        game, (rows, envs) = games[number], self.actions.shape
        if not (0 <= game.env < envs and 0 <= game.first < game.first + game.length <= rows):
            raise UserError(f"--game {number}: what was done in it is not in {self.path.with_suffix('.actions')}")
        return game

    def environment(self, game: Game) -> str:
        names = self.about["environments"]
        return names[game.env % len(names)]

    def pool(
        self,
        game: Game,
        render: bool = False,
        seen: Mapping[str, Any] | None = None,
        rewards: Rewards | None = None,
        trusted: Sequence[str] = (),
    ) -> Pool:
        """The environment of a game alone, as it was made; `seen` are options that change only how it is seen, `rewards` what
        it pays where that is not what it paid then.

        A user's own environment or reward is imported only where it is one of the `trusted`: the recording may be a
        stranger's."""
        names, seed = self.about["environments"], self.about["seed"]
        problems: list[str] = []
        name, key, place = self.environment(game), tuple(seed["spawn_key"]), game.env
        if plugins.is_plugin(name) and name not in trusted:
            raise UserError(f"{self.path}: was recorded in {name}, which is not the run's own environment")
        if rewards is None:
            rewards = Rewards(**self.about["rewards"])
            for text in (rewards.trained, *rewards.objectives):
                if text is not None and plugins.is_plugin(text) and text not in trusted:
                    raise UserError(f"{self.path}: was recorded under {text}, which is not the run's own reward")
        options = parse_options(lookup(name).options, {**self.about["options"], **(seen or {})}, "env", problems)
        if problems:
            raise UserError(f"{self.path}: {problems[0]}")
        if len(names) > 1:  # as a mixture deals its rows and seeds out
            key, place = (*key, game.env % len(names)), game.env // len(names)
        return make_pool([name], options, 1, _Child(seed["entropy"], key, place), render, rewards)

    def script(self, game: Game) -> list[str]:
        """What was done in a game, by name."""
        return self._done(game.env, game.first, game.first + game.length)

    def _done(self, env: int, first: int, last: int) -> list[str]:
        names = self.about["actions"]
        return [names[a] for a in self.actions[first:last, env]]

    def replay(self, game: Game, trusted: Sequence[str] = ()) -> Iterator[Step]:
        """The steps of a game again, the opening one first; the last is the opening one of what came next."""
        pool = self.pool(game, trusted=trusted)
        try:
            step = self.rewind(game, pool)
            yield step
            for action in self.actions[game.first : game.first + game.length, game.env]:
                pool.send(np.array([action], np.int64))
                yield pool.recv()
        finally:
            pool.close()

    def rewind(self, game: Game, pool: Pool, who: Path | None = None) -> Step:
        """Bring a pool that was just made (`who`'s) to the beginning of a game; it may have other actions than the recorded."""
        step = pool.reset()
        for action in self._done(game.env, 0, game.first):
            pool.send(np.array([place_of(action, pool, who or self.path)]))
            step = pool.recv()
        return step


def open_recording(path: str | Path) -> Recording:
    found = Path(path).expanduser()
    try:
        about = json.loads(found.read_text())
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise UserError(f"{path}: not a recording: {error}") from error
    try:
        for key in ("environments", "options", "num_envs", "actions", "bytes"):
            about[key]
        Rewards(**about["rewards"])
        np.random.SeedSequence(about["seed"]["entropy"], spawn_key=about["seed"]["spawn_key"])
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path}: not a recording (bestiary eval --record makes one): {error}") from error
    if not found.with_suffix(".actions").is_file():
        raise UserError(f"{path}: {found.with_suffix('.actions').name} is missing beside it")
    return Recording(found, about)


def record(
    pool: Pool,
    path: Path,
    names: list[str],
    options: Any,
    seed: np.random.SeedSequence,
    rewards: Rewards = PLAIN,
    rows: int = 0,
    **about: Any,
) -> Any:
    """The pool, recorded. `seed` is what it was made with."""
    plain = {k: v for k, v in asdict(options).items() if v is not None}
    about = {**about, "environments": names, "options": plain, "rewards": asdict(rewards), "seed": seed_of(seed)}
    return RecordingPool(pool, path if rows else unused(path), about, rows)
