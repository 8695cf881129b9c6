"""ProcGen: sixteen games whose levels are generated, `procgen/starpilot:easy` (Cobbe et al. 2020).

Every episode is one level, drawn from `--levels`, half open: `0:200` are the two hundred that an agent may be trained on, and
what it is worth on others says what it has learnt. A mode (easy, hard, ...) says how levels are made; not every game has all.

EnvPool's game draws its next level within the step that ends one, and EnvPool then resets it once more. The pool does that at
once and for exactly the rows that ended, so the level in between is never seen, played or counted.
"""

import ctypes
import importlib.util
import sys
from collections import Counter
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np

from bestiary.envs.emulators import Emulators
from bestiary.envs.pool import check_actions, first_step, spawn_seeds
from bestiary.errors import UserError
from bestiary.options import option, suggest
from bestiary.rollout import ActionSpec, Arrays, ArraySpec, Step

ACTIONS = "LEFTDOWN LEFT LEFTUP DOWN NOOP UP RIGHTDOWN RIGHT RIGHTUP D A W S Q E".split()
LEVELS = 2**31 - 1  # that there are, of each game and mode


class Game(NamedTuple):
    modes: str
    easy: tuple[float, float]  # return that counts as 0, and as 1
    hard: tuple[float, float]


GAMES = {  # the constants are those of the appendix of Cobbe et al. 2020; there are none for the other modes
    "bigfish": Game("easy hard", (1, 40), (0, 40)),
    "bossfight": Game("easy hard", (0.5, 13), (0.5, 13)),
    "caveflyer": Game("easy hard memory exploration", (3.5, 12), (2, 13.4)),
    "chaser": Game("easy hard extreme", (0.5, 13), (0.5, 14.2)),
    "climber": Game("easy hard exploration", (2, 12.6), (1, 12.6)),
    "coinrun": Game("easy hard exploration", (5, 10), (5, 10)),
    "dodgeball": Game("easy hard extreme memory", (1.5, 19), (1.5, 19)),
    "fruitbot": Game("easy hard", (-1.5, 32.4), (-0.5, 27.2)),
    "heist": Game("easy hard memory exploration", (3.5, 10), (2, 10)),
    "jumper": Game("easy hard memory exploration", (3, 10), (1, 10)),
    "leaper": Game("easy hard extreme exploration", (3, 10), (1.5, 10)),
    "maze": Game("easy hard memory exploration", (5, 10), (4, 10)),
    "miner": Game("easy hard memory", (1.5, 13), (1.5, 20)),
    "ninja": Game("easy hard exploration", (3.5, 10), (2, 10)),
    "plunder": Game("easy hard", (4.5, 30), (3, 30)),
    "starpilot": Game("easy hard extreme", (2.5, 64), (1.5, 35)),
}
DEFAULT_MODE = "hard"  # ProcGen's own


def split(name: str) -> tuple[str, str]:
    """`starpilot:easy` -> game and mode, or what is wrong with it."""
    game, colon, mode = name.partition(":")
    if game not in GAMES:
        raise UserError(f"procgen/{game}: there is no such game{suggest(game, GAMES)} (bestiary list envs procgen)")
    mode, modes = mode if colon else DEFAULT_MODE, GAMES[game].modes.split()
    if mode not in modes:
        raise UserError(f"procgen/{name}: {game} has the modes {', '.join(modes)}{suggest(mode, modes)}")
    return game, mode


def normalised(task: str, value: float) -> float | None:
    """A return as a share of the way from a trivial agent's to a perfect one's; None where no such constants are known."""
    game, mode = split(task.removeprefix("procgen/"))
    if mode not in ("easy", "hard"):
        return None
    low, high = getattr(GAMES[game], mode)
    return (value - low) / (high - low)


def parse_levels(text: str) -> tuple[int, int]:
    """`0:200` -> (0, 200); `all` -> (0, LEVELS)."""
    if text == "all":
        return 0, LEVELS
    start, colon, stop = (word.strip() for word in text.partition(":"))
    if not (colon and start.isdecimal() and stop.isdecimal()):
        raise ValueError(f"--levels {text}: expected a range such as 0:200 (200 is not in it), or all")
    first, last = int(start), int(stop)
    if last > LEVELS:
        raise ValueError(f"--levels {text}: levels are numbered 0 to {LEVELS - 1}")
    if first == last:
        raise ValueError(f"--levels {text}: that is no level; 0:{max(1, last)} has {max(1, last)}")
    if first > last:
        raise ValueError(f"--levels {text}: upside down; did you mean {last}:{first}?")
    return first, last


def with_levels(env: str, options: Any, levels: str, flag: str = "--levels") -> Any:
    """The options of an environment, with other levels."""
    if not hasattr(options, "levels"):
        raise UserError(f"{flag} {levels}: {env} has no levels")
    try:
        return replace(options, levels=levels)
    except ValueError as error:
        raise UserError(str(error).replace("--levels", flag)) from error


def with_mode(name: str, mode: str | None, flag: str = "--valid-mode") -> str:
    """The same game in another mode, where there is one."""
    if mode is None:
        return name
    if not name.startswith("procgen/"):
        raise UserError(f"{flag} {mode}: {name} has no modes")
    return f"{name.partition(':')[0]}:{mode}"


def overlap(one: str, other: str) -> bool:
    """Whether two ranges have a level in common."""
    (start, stop), (first, last) = parse_levels(one), parse_levels(other)
    return max(start, first) < min(stop, last)


class ProcgenPool:
    """N environments of one game; the last frame of an episode is not to be had, so that its ends are all true ends."""

    @dataclass(frozen=True)
    class Options:
        levels: str = option("all", "levels to play, such as 0:200 (200 is not in it), or all")
        backgrounds: bool = option(True, "pictures behind the game, not black")
        monochrome: bool = option(False, "plain rectangles instead of drawn assets")
        centered: bool = option(True, "the view follows the agent, where the game has such a view")

        def __post_init__(self) -> None:
            parse_levels(self.levels)

    default_steps: ClassVar[int] = 25_000_000
    whole_screen: ClassVar[bool] = True

    def __init__(
        self, name: str, num_envs: int, seed: int | np.random.SeedSequence, options: Options, render: bool = False
    ):
        game, mode = split(name)
        self.num_envs, self.options, self.mode = num_envs, options, mode
        self.tasks: tuple[str, ...] = (f"procgen/{game}:{mode}",)
        self.frames_per_step = 1
        self.action_spec = ActionSpec(tuple(ACTIONS))
        self.observation_spec = {"image": ArraySpec((3, 64, 64), "uint8")}
        self.measures_spec: dict[str, ArraySpec] = {}
        self.saveable = self.has_lives = False
        self.level = np.zeros(num_envs, np.int64)  # that each environment plays
        self.owed: int | None = None  # episodes
        self.dealt = Counter[int]()  # how often each level was
        self.counts = np.ones(num_envs, bool)  # whether its running episode is one that was owed
        self.rng = np.random.default_rng(seed)
        start, stop = parse_levels(options.levels)
        if mode == "exploration" and options.levels != "all":
            raise UserError(f"procgen/{name}: exploration is one level; leave --levels out")
        load_qt()
        self.ids = np.arange(num_envs, dtype=np.int32)
        self.env = Emulators(
            f"{game.capitalize()}{mode.capitalize()}-v0",
            spawn_seeds(seed, num_envs),
            render,
            start_level=start,
            num_levels=0 if options.levels == "all" else stop - start,
            use_backgrounds=options.backgrounds,
            use_monochrome_assets=options.monochrome,
            center_agent=options.centered,
        )

    def reset(self) -> Step:
        return first_step({"image": self._start(self.ids)}, {})

    def send(self, actions: np.ndarray) -> None:
        self.env.send(check_actions(actions, self.action_spec, self.num_envs), self.ids)

    def recv(self) -> Step:
        # a time limit of the game's own looks like any other end, and counts as one
        image, reward, done, _ = self.env.recv()
        if done.any():
            rows = self.ids[done]
            image[rows] = self._start(rows)
        return Step(
            observation={"image": image},
            reward=reward.astype(np.float32),
            done=done,
            truncated=np.zeros(self.num_envs, bool),
            game_over=done.copy(),
            task=np.zeros(self.num_envs, np.int64),
        )

    def _start(self, rows: np.ndarray) -> np.ndarray:
        """A new level for some rows: their first frames. Where levels are owed, one of those, for as long as there are any."""
        image, info = self.env.reset(rows)
        level = info["level_seed"].astype(np.int64)
        if self.owed is not None:
            counted = self._pay(level)
            while self.owed and not counted.all():
                again = np.flatnonzero(~counted)
                image[again], info = self.env.reset(rows[again])
                level[again] = info["level_seed"]
                counted[again] = self._pay(level[again])
            self.counts[rows] = counted
        self.level[rows] = level
        return image

    def owe(self, episodes: int) -> None:
        """From the next reset on, play every level of the range equally often, `episodes` in all; where that does not come out
        even, once more those that chance picks, and so no level twice where there are more of them than episodes. `counts` then
        says which environments play one that was owed."""
        start, stop = parse_levels(self.options.levels)
        count = 1 if self.mode == "exploration" else stop - start
        self.owed, self.each = episodes, episodes // count
        more = episodes % count if self.each else 0  # of more levels than episodes, whichever come first
        self.lucky = set(self.rng.choice(np.arange(start, stop), more, replace=False).tolist()) if more else set()
        self.dealt.clear()

    def _pay(self, levels: np.ndarray) -> np.ndarray:
        """Which of these levels are owed; they are from now on owed once less."""
        assert self.owed is not None
        paid = np.zeros(len(levels), bool)
        for k, level in enumerate(levels.tolist()):
            paid[k] = self.owed and self.dealt[level] < max(1, self.each + (level in self.lucky))
            self.dealt[level] += int(paid[k])
            self.owed -= int(paid[k])
        return paid

    def render(self) -> list[np.ndarray]:
        return self.env.render()

    def save(self) -> Arrays:
        return {}

    def load(self, state: Arrays) -> None:
        raise NotImplementedError("ProcGen's games cannot be saved")

    def close(self) -> None:
        self.env.close()


@cache
def load_qt() -> None:
    """EnvPool's ProcGen draws with Qt 5, which on Linux is not in its wheel; the wheel PyQt5-Qt5 has the libraries alone."""
    if sys.platform != "linux":
        return
    found = importlib.util.find_spec("PyQt5")
    folders = [Path(place) / "Qt5" / "lib" for place in (found.submodule_search_locations or ())] if found else []
    for name in ("libQt5Core.so.5", "libQt5Gui.so.5"):
        places: list[Any] = [folder / name for folder in folders if (folder / name).exists()] or [name]
        try:
            ctypes.CDLL(str(places[0]), mode=ctypes.RTLD_GLOBAL)
        except OSError as error:
            raise UserError(f"ProcGen needs {name}: run pip install PyQt5-Qt5 ({error})") from error
    module = sys.modules.get("envpool.procgen")
    if getattr(module, "_PROCGEN_IMPORT_ERROR", None) is not None:  # EnvPool was imported, for others, before
        assert module is not None
        importlib.reload(module)
