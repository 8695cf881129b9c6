"""Atari 2600 games, emulated in EnvPool's C++ threads: `atari/Pong`.

EnvPool steps the emulator; the rest is done here, on whole batches: stacking frames, ending learning's episodes at lost
lives, counting the time limit, and merging the steps nobody decided (a new game after a game over, FIRE after a lost life)
into the step before them, so that an agent never sees one.

Asked to `watch`, it also measures what rewards are made of: what was pressed, lives, and what a game's RAM tells of it.

A pool can be saved when the emulator draws no random numbers while playing (no sticky actions): a game is then its start
(the environment's seed, the how-manyeth game) and the actions since, and loading replays those.
"""

import importlib.util
import os
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from bestiary.envs import riverraid
from bestiary.envs.emulators import Emulators
from bestiary.envs.observations import Flicker, FrameStack, Noise
from bestiary.envs.pool import check_actions, first_step, spawn_seeds
from bestiary.envs.weightings import SCALAR, Component
from bestiary.errors import RunError, UserError
from bestiary.options import option, suggest
from bestiary.rollout import ActionSpec, Arrays, ArraySpec, Step

ACTIONS = (
    "NOOP FIRE UP RIGHT LEFT DOWN UPRIGHT UPLEFT DOWNRIGHT DOWNLEFT UPFIRE RIGHTFIRE LEFTFIRE DOWNFIRE "
    "UPRIGHTFIRE UPLEFTFIRE DOWNRIGHTFIRE DOWNLEFTFIRE"
).split()

# Which actions of ACTIONS a game knows, as the emulator says; games that are not here know all eighteen.
MINIMAL_ACTIONS = {
    (0, 1, 3, 4, 11, 12): "AirRaid Carnival DemonAttack Galaxian NameThisGame Pong SirLancelot SpaceInvaders",
    (0, 2, 3, 4, 5, 6, 7, 8, 9): "Asterix CrazyClimber Koolaid LostLuggage MsPacman",
    (0, 1, 2, 3, 4, 5, 10, 11, 12, 13): "Amidar MrDo TimePilot WizardOfWor",
    (0, 1, 2, 3, 4, 5): "BasicMath KingKong Qbert",
    (0, 1, 2, 5, 10, 13): "Bowling Pooyan UpNDown",
    (0, 2, 3, 4, 5): "Frogger Pacman Surround",
    (0, 1, 2, 3, 4, 5, 6, 7, 8, 9): "Othello TicTacToe3d VideoChess",
    (0, 1, 11, 12): "Atlantis Atlantis2",
    (0, 1, 2, 5): "Blackjack Casino",
    (0, 1, 3, 4): "Breakout Kaboom",
    (0, 1, 2, 3, 4, 11, 12): "Assault",
    (0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12, 13, 14, 15): "Asteroids",
    (1, 3, 4): "Backgammon",
    (0, 1, 2, 3, 4, 6, 7, 11, 12): "BeamRider",
    (0, 1, 3, 4, 5, 8, 9, 11, 12): "Enduro",
    (0, 2, 5): "Freeway",
    (0, 1, 2, 3, 4, 10, 11, 12): "Gopher",
    (0, 2, 3, 4, 5, 6, 7, 8, 9, 11, 12, 13, 14, 15, 16, 17): "JourneyEscape",
    (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13): "KeystoneKapers",
    (0, 2, 3, 4, 5, 8, 9, 11, 12, 13, 14, 15, 16, 17): "KungFuMaster",
    (0, 1, 3, 4, 5, 11, 12, 13): "Phoenix",
    (0, 3, 4): "Skiing",
    (0, 1, 3, 4, 5): "Tetris",
    (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 12): "Turmoil",
    (0, 2, 3, 4, 5, 10, 11, 12): "Tutankham",
    (1, 6, 7, 8, 9): "VideoCheckers",
    (0, 1, 2, 3, 4, 5, 10, 11, 12): "VideoPinball",
}


POINTS = (-1000, -100, -10, -5, -3, -2, -1, 0, 1, 2, 3, 5, 10, 100, 1000)  # some that a step may score
COMPONENTS = {  # of every game
    "reward": Component("the environment's own reward: the score", POINTS, "score", open=True),
    "score": Component("points scored in the step", POINTS, open=True),
    "lives": Component("lives left after the step, as the emulator counts them", (0, 1, 2, 3, 4, 5)),
    "fire": Component("1 where FIRE was pressed, alone or with a direction", (0, 1)),
    "lives_lost": Component("1 where a life was lost, the last one included", (0, 1)),
}


def games() -> list[str]:
    """The names of all games whose ROM is there."""
    found = sorted(path.stem for path in _roms().iterdir())
    return ["".join(word.capitalize() for word in game.split("_")) for game in found]


@cache
def _roms() -> Path:
    """Where EnvPool keeps them; looked for without it, because importing it takes a second or two."""
    for package in ("envpool", "envpool_assets"):
        spec = importlib.util.find_spec(package)
        for base in (spec.submodule_search_locations or []) if spec else []:
            if (folder := Path(base) / "atari" / "roms").is_dir() and "ENVPOOL_ASSETS_PATH" not in os.environ:
                return folder
    from envpool.atari.registration import atari_rom_path

    return Path(atari_rom_path)


def action_names(game: str, full: bool) -> tuple[str, ...]:
    minimal = {name: actions for actions, names in MINIMAL_ACTIONS.items() for name in names.split()}
    return tuple(ACTIONS[a] for a in (range(18) if full else minimal.get(game, range(18))))


def with_all_actions(options: "AtariPool.Options") -> "AtariPool.Options":
    return replace(options, full_actions=True)


class AtariPool:
    """N emulators of one game, as DeepMind's agents see it: 4 frames a step, gray 84x84, the last 4 stacked."""

    @dataclass(frozen=True)
    class Options:
        frame_size: tuple[int, int] = option((84, 84), "height x width that the screen is scaled to", low=8, high=512)
        frame_stack: int = option(4, "how many of the last frames the agent sees at once", low=1, high=64)
        frame_skip: int = option(4, "emulator frames that an action lasts; the last two are merged", low=1, high=64)
        gray: bool = option(True, "gray frames rather than colour")
        sticky: float = option(0.0, "probability that the emulator repeats the last action instead", low=0, high=1)
        full_actions: bool = option(False, "all 18 actions, not only those the game knows")
        noops: int = option(30, "a game starts after up to this many idle emulator frames", low=1, high=1000)
        noop_mode: str = option("random", "1 to NOOPS frames, or NOOPS in whole decisions", choices=("random", "fixed"))
        life_ends: bool = option(True, "a lost life ends learning's episode (the game goes on)")
        fire: bool = option(True, "press FIRE where a game or life needs it to start")
        flicker: float = option(0.0, "probability that a frame is blank", low=0, high=1)
        flicker_mode: str = option(
            "frame", "what is blank: the newest frame, or all that is seen", choices=("frame", "stack")
        )
        noise: float = option(0.0, "deviation of the noise on every pixel, in steps of its 256", low=0, high=256)
        time_limit: int = option(27_000, "decisions after which a game is cut off", low=1)
        force_start: bool = option(False, "Riverraid: the plane flies when a game begins, not once the player acts")
        stall: int = option(
            0,
            "decisions without a score (Riverraid: with a halted plane) after which a game is over (0: never)",
            low=0,
        )

    default_steps: ClassVar[int] = 10_000_000
    whole_screen: ClassVar[bool] = True

    def __init__(
        self, name: str, num_envs: int, seed: int | np.random.SeedSequence, options: Options, render: bool = False
    ):
        self.num_envs, self.options, self.game, self.renders = num_envs, options, name, render
        self.tasks: tuple[str, ...] = (f"atari/{name}",)
        self.longest_game = options.time_limit
        self.frames_per_step = options.frame_skip
        if options.force_start and name != "Riverraid":
            raise UserError(f"--force-start: is for Riverraid; {name} does not wait for its player")
        self.action_spec = ActionSpec(action_names(name, options.full_actions))
        channels = options.frame_stack * (1 if options.gray else 3)
        self.observation_spec = {"image": ArraySpec((channels, *options.frame_size), "uint8")}
        self.measures_spec = {"score": ArraySpec((), "float32"), "ram": ArraySpec((128,), "uint8")}
        if options.flicker:
            self.measures_spec["blank"] = ArraySpec((), "float32")
        self.saveable = options.sticky == 0
        self.ids = np.arange(num_envs, dtype=np.int32)
        knows_fire = "FIRE" in action_names(name, full=False)
        self.fire = self.action_spec.names.index("FIRE") if options.fire and knows_fire else None
        if options.noop_mode == "fixed" and "NOOP" not in self.action_spec.names:
            raise UserError(f"--noop-mode fixed: {name} has no NOOP; add --full-actions")
        self.noop = self.action_spec.names.index("NOOP") if "NOOP" in self.action_spec.names else 0
        self.fixed_noops = options.noops // options.frame_skip if options.noop_mode == "fixed" else 0
        self.stack = FrameStack(options.frame_stack)
        whole = options.flicker == 0 or options.flicker_mode == "frame"
        self.stacked = {"image": options.frame_stack} if whole else {}
        self.lives = np.zeros(num_envs, np.int32)
        self.games = np.zeros(num_envs, np.int64)  # started so far
        self.age = np.zeros(num_envs, np.int64)  # decisions in the running game
        self.idle = np.zeros(num_envs, np.int64)  # decisions without progress
        self.components: dict[str, Component] = {}  # what is measured for rewards, once somebody watches
        self.presses_fire = np.array(["FIRE" in action for action in self.action_spec.names])
        self.pressed = np.zeros(num_envs, np.int64)  # the last actions
        self.ram = np.zeros((num_envs, 128), np.uint8)  # after the last decisions
        self.played = np.zeros(num_envs, np.int64)  # actions in the running game, those nobody decided included
        self.actions = np.zeros((num_envs, 4096), np.uint8)  # of the running game; grows
        self.seeds = spawn_seeds(seed, num_envs)
        self.noise = Noise(options.noise, self.seeds)
        self.flicker = Flicker(options.flicker, options.flicker_mode, self.seeds)

    @cached_property
    def env(self) -> Emulators:
        """The emulators. They take most of a second to make, and what a pool shows and takes is known without them."""
        options, random = self.options, self.options.noop_mode == "random"
        return Emulators(
            f"{self.game}-v5",
            self.seeds,
            self.renders,
            stack_num=1,
            frame_skip=options.frame_skip,
            img_height=options.frame_size[0],
            img_width=options.frame_size[1],
            gray_scale=options.gray,
            full_action_space=options.full_actions,
            repeat_action_probability=options.sticky,
            noop_max=options.noops if random else 1,
            use_fire_reset=options.fire and random,  # fixed no-ops come before FIRE, and from here
            max_episode_steps=2**30,  # decisions are counted here: EnvPool would count the steps nobody decided too
            episodic_life=False,
            reward_clip=False,
        )

    def watch(self) -> None:
        """From the next reset on, measure what rewards are made of, too."""
        self.components = {**COMPONENTS, **(riverraid.COMPONENTS if self.game == "Riverraid" else {})}
        self.measures_spec |= {name: SCALAR for name in self.components if name != "reward"}

    def reset(self) -> Step:
        frame, info = self._start_games(self.ids)
        self.lives, self.ram = info["lives"].copy(), info["ram"]
        everyone = np.ones(self.num_envs, bool)
        image, blank = self._see(frame, everyone)
        nothing = {
            name: np.zeros(self.num_envs, np.float32) for name, spec in self.measures_spec.items() if not spec.shape
        }
        return first_step({"image": image}, {**nothing, "ram": info["ram"], **blank})

    def _see(self, frame: np.ndarray, first: np.ndarray) -> tuple[np.ndarray, Arrays]:
        """What the agent sees of new frames, and which are blank, where any can be."""
        blank, frame = self.flicker.draw(), self.noise.frame(frame, self.ids)
        image = self.flicker.stack(self.stack.push(self.flicker.frame(frame, blank), first), blank)
        return image, {"blank": blank.astype(np.float32)} if "blank" in self.measures_spec else {}

    def _foresee(self, rows: np.ndarray, frame: np.ndarray) -> np.ndarray:
        """What the agent would have seen next of games that are cut off."""
        blank, frame = self.flicker.draw(np.isin(self.ids, rows))[rows], self.noise.frame(frame, rows)
        return self.flicker.stack(self.stack.peek(rows, self.flicker.frame(frame, blank)), blank)

    def send(self, actions: np.ndarray) -> None:
        self.pressed = check_actions(actions, self.action_spec, self.num_envs)
        self._send(self.pressed, self.ids)

    def recv(self) -> Step:
        frame, reward, _, info = self.env.recv()
        self.age += 1
        over = info["terminated"].astype(bool)
        lost = (info["lives"] < self.lives) & ~over
        at_limit = self.age == self.options.time_limit
        watched = self._measure(reward, info, over | lost) if self.components else {}
        if self.options.stall:
            over |= self._stalled(reward, info["ram"], lost)
        starts = lost & ~at_limit & ~over  # a life, in a game that goes on
        if self.fire is not None and starts.any():
            self._press_fire(np.flatnonzero(starts), frame, reward, over, info)
        ended = over | lost if self.options.life_ends else over
        cut = at_limit & ~ended  # a true end in the same step, of a life or a game, wins over the time limit
        final = {"image": self._foresee(np.flatnonzero(cut), frame[cut])} if cut.any() else {}
        game_over = over | at_limit
        if game_over.any():
            rows = np.flatnonzero(game_over)
            frame[rows], first = self._start_games(rows)
            info["lives"][rows], info["ram"][rows] = first["lives"], first["ram"]
        self.lives, self.ram = info["lives"].copy(), info["ram"]
        score, done = reward.astype(np.float32), game_over | ended
        image, blank = self._see(frame, done)
        return Step(
            observation={"image": image},
            reward=score,
            done=done,
            truncated=cut,
            game_over=game_over,
            task=np.zeros(self.num_envs, np.int64),
            measures={**watched, "score": score.copy(), "ram": info["ram"], **blank},
            final=final,
        )

    def _measure(self, reward: np.ndarray, info: Any, lost: np.ndarray) -> Arrays:
        """The components of a decision, before any step that nobody decided follows it."""
        found = {
            "lives": info["lives"].astype(np.float32),
            "fire": self.presses_fire[self.pressed].astype(np.float32),
            "lives_lost": lost.astype(np.float32),
        }
        if self.game == "Riverraid":
            found |= riverraid.measure(self.ram, info["ram"], reward, lost)
        return found

    def _stalled(self, reward: np.ndarray, ram: np.ndarray, lost: np.ndarray) -> np.ndarray:
        """Which games have made no progress for too long. That is an end, not a time limit: were the value of what comes next
        credited, as it is there, standing still would be worth as much as without."""
        if self.game == "Riverraid":
            still = (ram[:, riverraid.WAITING] == riverraid.HALTED) & ~lost  # a crash halts the river, too
        else:
            still = reward == 0
        self.idle = np.where(still, self.idle + 1, 0)
        return self.idle >= self.options.stall

    def _send(self, actions: np.ndarray, ids: np.ndarray) -> None:
        if self.played.max() == self.actions.shape[1]:
            self.actions = np.concatenate([self.actions, np.zeros_like(self.actions)], axis=1)
        self.actions[ids, self.played[ids]] = actions
        self.played[ids] += 1
        self.env.send(actions, ids)

    def _press_fire(self, rows: np.ndarray, frame: np.ndarray, reward: np.ndarray, over: np.ndarray, info: Any) -> None:
        """One step of FIRE for the rows that lost a life, merged into the step that lost it."""
        self._send(np.full(len(rows), self.fire), rows)
        frame[rows], more, _, after = self.env.recv()
        reward[rows] += more
        over[rows] = after["terminated"].astype(bool)
        info["lives"][rows], info["ram"][rows] = after["lives"], after["ram"]

    def _start_games(self, rows: np.ndarray) -> tuple[np.ndarray, Any]:
        """A new game for some rows: their first frames, and what is known of them."""
        frame, info = self.env.reset(rows)
        self.games[rows] += 1
        self.age[rows] = self.played[rows] = self.idle[rows] = 0
        opening = [self.noop] * self.fixed_noops
        if self.fixed_noops and self.fire is not None:
            opening.append(self.fire)
        for action in opening:
            lives = info["lives"]
            self._send(np.full(len(rows), action), rows)
            frame, _, _, info = self.env.recv()
            if info["terminated"].any() or (info["lives"] < lives).any():
                raise RunError(
                    f"{self.tasks[0]}: a life was lost during {self.options.noops} no-ops; use fewer --noops"
                )
        if self.options.force_start:
            self._fly(rows, frame, info)
        return frame, info

    def _fly(self, rows: np.ndarray, frame: np.ndarray, info: Any) -> None:
        """River Raid scrolls its first picture in, then waits: no-ops until it waits, then one step of FIRE."""
        waiting = np.flatnonzero(info["ram"][:, riverraid.WAITING])
        for _ in range(100):
            if not len(waiting):
                return
            halted = info["ram"][waiting, riverraid.WAITING] == riverraid.HALTED
            self._send(np.where(halted, self.action_spec.names.index("FIRE"), self.noop), rows[waiting])
            frame[waiting], _, _, after = self.env.recv()
            info["lives"][waiting], info["ram"][waiting] = after["lives"], after["ram"]
            waiting = waiting[after["ram"][:, riverraid.WAITING] != 0]
        raise RunError(f"{self.tasks[0]}: the plane could not be made to fly (--force-start)")

    def render(self) -> list[np.ndarray]:
        return self.env.render()

    def save(self) -> Arrays:
        if not self.saveable:
            return {}
        assert self.stack.frames is not None
        running = np.concatenate([self.actions[i, : self.played[i]] for i in self.ids])
        return {
            "games": self.games.copy(),
            "played": self.played.copy(),
            "age": self.age.copy(),
            "actions": running,
            "lives": self.lives.copy(),
            "stack": self.stack.frames.copy(),
            "flicker": self.flicker.streams.state.copy(),
            "noise": self.noise.count.copy(),
            "idle": self.idle.copy(),
            "ram": self.ram.copy(),
        }

    def load(self, state: Arrays) -> None:
        self.env.reset(self.ids)
        for game in range(1, int(state["games"].max())):  # each start draws its no-ops from the environment's stream
            self.env.reset(self.ids[state["games"] > game])
        starts = np.concatenate([[0], np.cumsum(state["played"])[:-1]])
        self.games, self.played = state["games"].copy(), np.zeros(self.num_envs, np.int64)
        for t in range(int(state["played"].max())):
            rows = self.ids[state["played"] > t]
            self._send(state["actions"][starts[rows] + t], rows)
            self.env.recv()
        self.age, self.lives, self.stack.frames = (state[name].copy() for name in ("age", "lives", "stack"))
        if "ram" in state:  # not in runs of before there were components
            self.idle, self.ram, self.noise.count = (state[name].copy() for name in ("idle", "ram", "noise"))
        self.flicker.streams.state = state["flicker"].copy()

    def close(self) -> None:
        if "env" in vars(self):
            self.env.close()


def check_game(game: str) -> None:
    if game not in games():
        raise UserError(f"atari/{game}: there is no such game{suggest(game, games())} (bestiary list envs atari)")
