"""ProcGen (Cobbe et al. 2020): 16 games with generated levels, for example `procgen/starpilot:easy`.

Each episode is one level, which is drawn at random from the range `--levels`. Agents are usually trained on `0:200`,
which means levels 0 to 199; their return on other levels then measures generalisation. The mode (easy, hard, ...)
defines how levels are generated. Not every game has every mode.

When an episode ends, ProcGen itself draws the next level. EnvPool then requires a reset, which draws another level.
This module performs this reset in the same step, and only in environments whose episode ended. The level that ProcGen
drew at the end of the episode is therefore never played.
"""

import ctypes
import importlib.util
import sys
from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np

from bestiary.envs.envpool_backend import EnvPoolBackend
from bestiary.envs.levels import LevelOptions, parse_levels
from bestiary.envs.vector_env import EnvInterface, VectorEnv, check_actions, initial_step, spawn_seeds
from bestiary.step import ActionSpec, ArraySpec, Step
from bestiary.utils.errors import UserError
from bestiary.utils.options import option, suggest

ACTIONS = "LEFTDOWN LEFT LEFTUP DOWN NOOP UP RIGHTDOWN RIGHT RIGHTUP D A W S Q E".split()


class Game(NamedTuple):
    """The modes of a game, and the constants with which its return is normalised."""

    modes: str  # separated by spaces
    easy: tuple[float, float]  # mode easy: the returns whose normalised values are 0 and 1
    hard: tuple[float, float]  # mode hard: the returns whose normalised values are 0 and 1


# The constants are from the appendix of Cobbe et al. 2020, which has constants only for the modes easy and hard.
GAMES = {
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
DEFAULT_MODE = "hard"  # as in ProcGen


def parse_name(name: str) -> tuple[str, str]:
    """Parse `starpilot:easy` and return game and mode. Raise UserError if the game or the mode does not exist."""
    game, colon, mode = name.partition(":")
    if game not in GAMES:
        raise UserError(f"procgen/{game}: unknown game{suggest(game, GAMES)} (see bestiary list envs procgen)")
    mode = mode if colon else DEFAULT_MODE
    modes = GAMES[game].modes.split()
    if mode not in modes:
        raise UserError(f"procgen/{name}: unknown mode; {game} has the modes {', '.join(modes)}{suggest(mode, modes)}")
    return game, mode


def return_limits(game: str, mode: str) -> tuple[float, float] | None:
    """Return the limits of normalisation, the returns with the normalised values 0 and 1. None: the mode has none."""
    limits = {"easy": GAMES[game].easy, "hard": GAMES[game].hard}
    return limits.get(mode)


class ProcgenVectorEnv(VectorEnv):
    """N environments of one game.

    ProcGen does not provide the last observation of an episode, so the learner cannot bootstrap from its value.
    Therefore each end of an episode counts as a termination, even if a time limit caused it.
    """

    @dataclass(frozen=True)
    class Options(LevelOptions):
        backgrounds: bool = option(True, "draw background images (off: black background)")
        monochrome: bool = option(False, "draw objects as plain rectangles (off: as images)")
        center_agent: bool = option(True, "let the view follow the agent, in games whose view can move")

    default_steps: ClassVar[int] = 25_000_000
    has_levels: ClassVar[bool] = True

    def __init__(
        self, name: str, num_envs: int, seed: int | np.random.SeedSequence, options: Options, render: bool = False
    ):
        self.set_interface(self.make_interface(name, options))
        game, mode = parse_name(name)
        start, stop = parse_levels(options.levels)
        self.num_envs = num_envs
        self.options = options
        self.mode = mode
        self.level = np.zeros(num_envs, np.int64)  # current level of each environment
        self.rng = np.random.default_rng(seed)
        # The quota limits how many episodes of each level are played, see `set_level_quota`.
        self.quota_left: int | None = None  # number of episodes of the quota that have not started yet; None: no quota
        self.quota_per_level = 0
        self.extra_levels: set[int] = set()  # levels that are played once more than `quota_per_level`
        self.level_counts = Counter[int]()  # level -> number of episodes of the quota that have started in it
        self.in_quota = np.ones(num_envs, bool)  # whether the current episode of each environment is part of the quota
        load_qt()
        self.ids = np.arange(num_envs, dtype=np.int32)
        self.env = EnvPoolBackend(
            f"{game.capitalize()}{mode.capitalize()}-v0",
            spawn_seeds(seed, num_envs),
            render,
            start_level=start,
            num_levels=0 if options.levels == "all" else stop - start,
            use_backgrounds=options.backgrounds,
            use_monochrome_assets=options.monochrome,
            center_agent=options.center_agent,
        )

    @staticmethod
    def make_interface(name: str, options: Options) -> EnvInterface:
        """Return the interface of a game. Raise UserError if the mode does not support the options."""
        game, mode = parse_name(name)
        if mode == "exploration" and options.levels != "all":
            raise UserError(f"procgen/{name}: mode exploration has a single level; remove --levels")
        return EnvInterface(
            tasks=(f"procgen/{game}:{mode}",),
            observation_spec={"image": ArraySpec((3, 64, 64), "uint8")},
            action_spec=ActionSpec(tuple(ACTIONS)),
            has_lives=False,
            observes_whole_screen=True,
        )

    def reset(self) -> Step:
        return initial_step({"image": self._start_levels(self.ids)}, {})

    def send(self, actions: np.ndarray) -> None:
        self.env.send(check_actions(actions, self.action_spec, self.num_envs), self.ids)

    def recv(self) -> Step:
        # `done` does not show whether a time limit of the game ended the episode, so all ends count as terminations.
        image, reward, done, _ = self.env.recv()
        if done.any():
            rows = self.ids[done]
            image[rows] = self._start_levels(rows)
        return Step(
            observation={"image": image},
            reward=reward.astype(np.float32),
            done=done,
            truncated=np.zeros(self.num_envs, bool),
            game_over=done.copy(),
            task=np.zeros(self.num_envs, np.int64),
        )

    def _start_levels(self, rows: np.ndarray) -> np.ndarray:
        """Start new levels in the environments with the indices `rows`, and return the first images of these levels.

        While a quota (see `set_level_quota`) has episodes left, start only levels that the quota still allows.
        """
        image, info = self.env.reset(rows)
        level = info["level_seed"].astype(np.int64)
        if self.quota_left is not None:
            in_quota = self._use_quota(level)
            # EnvPool draws levels at random: reset until it draws a level that still has episodes left in the quota.
            while self.quota_left and not in_quota.all():
                again = np.flatnonzero(~in_quota)
                image[again], info = self.env.reset(rows[again])
                level[again] = info["level_seed"]
                in_quota[again] = self._use_quota(level[again])
            self.in_quota[rows] = in_quota
        self.level[rows] = level
        return image

    def set_level_quota(self, episodes: int) -> None:
        """Set a quota: from the next reset on, play `episodes` episodes, spread evenly over all levels of the range.

        If `episodes` is not a multiple of the number of levels, some levels, chosen at random, are played once more
        than the others. If there are more levels than episodes, no level is played twice. The attribute `in_quota`,
        bool [N], shows which environments are playing an episode of the quota.
        """
        start, stop = parse_levels(self.options.levels)
        num_levels = 1 if self.mode == "exploration" else stop - start
        self.quota_left = episodes
        self.quota_per_level = episodes // num_levels
        # If there are more levels than episodes, `quota_per_level` is 0. Each level that EnvPool draws is then
        # played at most once, until `quota_left` is 0.
        num_extra = episodes % num_levels if self.quota_per_level else 0
        self.extra_levels = set()
        if num_extra:
            self.extra_levels = set(self.rng.choice(np.arange(start, stop), num_extra, replace=False).tolist())
        self.level_counts.clear()

    def _use_quota(self, levels: np.ndarray) -> np.ndarray:
        """Decide for each drawn level whether its episode belongs to the quota, and update the quota.

        An episode belongs to the quota if more episodes are needed, both in total and of its level.

        Return a bool for each entry of `levels`: True if its episode belongs to the quota.
        """
        assert self.quota_left is not None
        used = np.zeros(len(levels), bool)
        for k, level in enumerate(levels.tolist()):
            quota = max(1, self.quota_per_level + (level in self.extra_levels))
            used[k] = self.quota_left and self.level_counts[level] < quota
            self.level_counts[level] += int(used[k])
            self.quota_left -= int(used[k])
        return used

    def render(self) -> list[np.ndarray]:
        return self.env.render()

    def close(self) -> None:
        self.env.close()


@cache
def load_qt() -> None:
    """Load the Qt 5 libraries, with which ProcGen draws its images.

    EnvPool's wheel for Linux does not contain these libraries. The wheel PyQt5-Qt5 contains only these libraries.
    """
    if sys.platform != "linux":
        return
    spec = importlib.util.find_spec("PyQt5")
    folders = [Path(base) / "Qt5" / "lib" for base in (spec.submodule_search_locations or ())] if spec else []
    for name in ("libQt5Core.so.5", "libQt5Gui.so.5"):
        paths: list[Any] = [folder / name for folder in folders if (folder / name).exists()] or [name]
        try:
            ctypes.CDLL(str(paths[0]), mode=ctypes.RTLD_GLOBAL)
        except OSError as error:
            raise UserError(f"ProcGen needs {name}; run: pip install PyQt5-Qt5 ({error})") from error
    module = sys.modules.get("envpool.procgen")
    if getattr(module, "_PROCGEN_IMPORT_ERROR", None) is not None:  # EnvPool was imported before Qt was loaded
        assert module is not None
        importlib.reload(module)
