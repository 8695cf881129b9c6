"""Atari 2600 games, emulated by EnvPool in C++ threads: `atari/Pong`.

EnvPool steps the emulators. This module adds frame stacking, the end of the episode when a life is lost, the time
limit, and hidden steps. A hidden step is an emulator step without an action of the agent: a no-op or FIRE at the start
of a game, or FIRE after a lost life. `recv` does not return hidden steps. In a step in which a life was lost, `recv`
adds the reward of FIRE to the reward of this step, and returns the image after FIRE.

After `enable_components` was called, `Step.measures` also contains the reward components. In all games, these are the
score, presses of FIRE and lives. In River Raid, further components are read from the RAM of the game (see
`riverraid_rewards.py`).

The state can be saved if sticky actions are off, because the emulators then draw no random numbers during a game. A
game is then determined by the seed of the environment, the index of the game and the actions. `load` starts the same
game again and repeats its actions.
"""

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

import numpy as np

from bestiary.envs import ram_labels
from bestiary.envs.ale_backend import AleBackend
from bestiary.envs.atari_games import action_names
from bestiary.envs.envpool_backend import EnvPoolBackend
from bestiary.envs.observation_transforms import Flicker, FrameStack, Noise
from bestiary.envs.rewards.components import SCALAR, RewardComponent
from bestiary.envs.riverraid_rewards import COMPONENTS as RIVERRAID_COMPONENTS
from bestiary.envs.riverraid_rewards import HALTED, WAITING
from bestiary.envs.riverraid_rewards import compute_components as compute_riverraid_components
from bestiary.envs.vector_env import (
    EnvInterface,
    VectorEnv,
    check_actions,
    check_saved_arrays,
    initial_step,
    spawn_seeds,
)
from bestiary.step import ActionSpec, Arrays, ArraySpec, Step
from bestiary.utils.errors import RunError, UserError
from bestiary.utils.options import option

# Typical numbers of points that are scored in one step.
TYPICAL_SCORES = (-1000, -100, -10, -5, -3, -2, -1, 0, 1, 2, 3, 5, 10, 100, 1000)
# Reward components that all games have.
COMPONENTS = {
    "reward": RewardComponent(
        "reward of the environment: the points scored in the step", TYPICAL_SCORES, "score", open=True
    ),
    "score": RewardComponent("points scored in the step", TYPICAL_SCORES, open=True),
    "lives": RewardComponent("lives left after the step, as the emulator counts them", (0, 1, 2, 3, 4, 5)),
    "fire": RewardComponent("1 if FIRE was pressed, alone or with a direction", (0, 1)),
    "lives_lost": RewardComponent("1 if a life was lost, including the last one", (0, 1)),
}


def with_full_actions(options: "AtariVectorEnv.Options") -> "AtariVectorEnv.Options":
    """Return the options with `full_actions` on. All games then have the same 18 actions."""
    return replace(options, full_actions=True)


# Largest accepted value of `games_started` in a saved state. `load` starts each of these games again, so a larger value
# (of a damaged checkpoint) would block the program.
MAX_SAVED_GAMES = 1_000_000


class AtariVectorEnv(VectorEnv):
    """N emulators of one game.

    The default preprocessing is the same as in DQN: 4 frames per step, and 4 stacked grey images of 84x84 pixels.
    """

    @dataclass(frozen=True)
    class Options:
        frame_size: tuple[int, int] = option(
            (84, 84), "height and width of the scaled screen, in pixels", low=8, high=512
        )
        frame_stack: int = option(4, "number of stacked frames in an observation", low=1, high=64)
        frame_skip: int = option(
            4,
            "number of emulator frames per step; the image is the pixel-wise maximum of the last two frames",
            low=1,
            high=64,
        )
        gray: bool = option(True, "grey images (off: colour images)")
        sticky: float = option(
            0.0, "probability that the emulator repeats the previous action (sticky actions)", low=0, high=1
        )
        full_actions: bool = option(False, "use all 18 actions (off: only the actions that the game needs)")
        noop_max: int = option(30, "maximum number of no-op frames at the start of a game", low=1, high=1000)
        noop_mode: str = option(
            "random",
            "number of no-op frames at the start of a game (random: from 1 to --noop-max; fixed: 1, plus --noop-max "
            "rounded down to a multiple of --frame-skip)",
            choices=("random", "fixed"),
        )
        episodic_life: bool = option(True, "end the episode when a life is lost (the game continues)")
        fire: bool = option(True, "press FIRE at the start of each game and life, in games that have this action")
        flicker: float = option(0.0, "probability that an image is replaced by zeros", low=0, high=1)
        flicker_mode: str = option(
            "frame",
            "what flicker replaces by zeros (frame: the newest frame; stack: all stacked frames)",
            choices=("frame", "stack"),
        )
        noise: float = option(
            0.0, "standard deviation of the normal noise on each pixel, in grey levels (0 to 255)", low=0, high=256
        )
        time_limit: int = option(27_000, "maximum length of a game, in steps", low=1)
        force_start: bool = option(
            False, "Riverraid: start each game with the plane already flying (off: the game waits for an action)"
        )
        stall: int = option(
            0,
            "end a game after this number of successive steps without progress (0: never); progress means that the "
            "score changes, or in Riverraid that the plane flies",
            low=0,
        )

    default_steps: ClassVar[int] = 10_000_000

    def __init__(
        self, name: str, num_envs: int, seed: int | np.random.SeedSequence, options: Options, render: bool = False
    ):
        self.set_interface(self.make_interface(name, options))
        self.game = name
        self.num_envs = num_envs
        self.options = options
        self.render_enabled = render
        self._set_start_actions()

        self.ids = np.arange(num_envs, dtype=np.int32)
        self.seeds = spawn_seeds(seed, num_envs)
        self.stack = FrameStack(options.frame_stack)
        self.noise = Noise(options.noise, self.seeds)
        self.flicker = Flicker(options.flicker, options.flicker_mode, self.seeds)

        self.sent = np.zeros(num_envs, np.int64)  # the agent's actions in the current step
        self.is_fire = np.array(["FIRE" in action for action in self.action_spec.names])  # [A]
        self.lives = np.zeros(num_envs, np.int32)
        self.ram = np.zeros((num_envs, 128), np.uint8)  # RAM after the last step
        self.games_started = np.zeros(num_envs, np.int64)
        self.game_steps = np.zeros(num_envs, np.int64)  # number of steps of the current game that the agent chose
        self.stalled_steps = np.zeros(num_envs, np.int64)  # number of successive steps without progress
        self.action_history = np.zeros((num_envs, 4096), np.uint8)  # actions of the current game; enlarged if necessary
        self.history_length = np.zeros(num_envs, np.int64)  # number of actions in each row of `action_history`

    @staticmethod
    def make_interface(name: str, options: Options) -> EnvInterface:
        """Return the interface of a game. Raise UserError if the game does not support the options."""
        actions = action_names(name, options.full_actions)
        if options.force_start and name != "Riverraid":
            raise UserError(f"--force-start: only for Riverraid; {name} does not wait for an action")
        if options.noop_mode == "fixed" and "NOOP" not in actions:
            raise UserError(f"--noop-mode fixed: {name} has no action NOOP; add --full-actions")
        channels = options.frame_stack * (1 if options.gray else 3)
        measures = {"score": SCALAR, "ram": ArraySpec((128,), "uint8")}
        if options.flicker:
            measures["blank"] = SCALAR
        # `EnvInterface.frame_stacks` requires that each image contains the newest frames of the previous image. If
        # flicker replaces whole stacks by zeros, this is not the case, so `frame_stacks` is empty.
        keeps_frames = options.flicker == 0 or options.flicker_mode == "frame"
        return EnvInterface(
            tasks=(f"atari/{name}",),
            observation_spec={"image": ArraySpec((channels, *options.frame_size), "uint8")},
            action_spec=ActionSpec(actions),
            measures_spec=measures,
            components={**COMPONENTS, **(RIVERRAID_COMPONENTS if name == "Riverraid" else {})},
            frames_per_step=options.frame_skip,
            saveable=options.sticky == 0,
            max_game_steps=options.time_limit,
            frame_stacks={"image": options.frame_stack} if keeps_frames else {},
            observes_whole_screen=True,
            labels=ram_labels.make_labels(name),
        )

    def _set_start_actions(self) -> None:
        """Set the actions of hidden steps: no-ops and FIRE at the start of a game, and FIRE after a lost life."""
        names, options = self.action_spec.names, self.options
        uses_fire = options.fire and "FIRE" in action_names(self.game, full=False)
        self.fire_action = names.index("FIRE") if uses_fire else None
        self.noop_action = names.index("NOOP") if "NOOP" in names else 0
        self.fixed_noops = options.noop_max // options.frame_skip if options.noop_mode == "fixed" else 0

    @cached_property
    def env(self) -> EnvPoolBackend | AleBackend:
        """The emulators. Creating them takes almost 1 s, so they are created at the first access.

        A process that needs only the interface of the environment never creates them.
        """
        options = self.options
        random_noops = options.noop_mode == "random"
        return EnvPoolBackend(
            f"{self.game}-v5",
            self.seeds,
            self.render_enabled,
            stack_num=1,
            frame_skip=options.frame_skip,
            img_height=options.frame_size[0],
            img_width=options.frame_size[1],
            gray_scale=options.gray,
            full_action_space=options.full_actions,
            repeat_action_probability=options.sticky,
            noop_max=options.noop_max if random_noops else 1,
            # If True, EnvPool sends FIRE at the start of a game. In mode `fixed`, `_start_games` sends FIRE instead.
            use_fire_reset=options.fire and random_noops,
            max_episode_steps=2**30,  # no limit; this class itself ends games at `time_limit`
            episodic_life=False,
            reward_clip=False,
        )

    def reset(self) -> Step:
        frame, info = self._start_games(self.ids)
        self.lives = info["lives"].copy()
        self.ram = info["ram"]
        image, blank = self._observe(frame, np.ones(self.num_envs, bool))
        scalars = [name for name, spec in self.measures_spec.items() if not spec.shape]
        zeros = {name: np.zeros(self.num_envs, np.float32) for name in scalars}
        return initial_step({"image": image}, {**zeros, "ram": info["ram"], **blank})

    def _observe(self, frame: np.ndarray, first: np.ndarray) -> tuple[np.ndarray, Arrays]:
        """Add the new frames of all environments to the stacks. Return the images [N,C,H,W] and a dict of measures.

        If flicker is on, the dict contains the measure `blank` [N], which is 1 if the image was replaced by zeros. If
        flicker is off, the dict is empty. `first`, bool [N], is True in environments in which an episode starts.
        """
        blank = self.flicker.draw()
        frame = self.flicker.blank_frames(self.noise.add_to(frame, self.ids), blank)
        image = self.flicker.blank_stacks(self.stack.push(frame, first), blank)
        return image, {"blank": blank.astype(np.float32)} if "blank" in self.measures_spec else {}

    def _observe_final(self, rows: np.ndarray, frame: np.ndarray) -> np.ndarray:
        """Return the final images of truncated games. The stored frame stacks do not change.

        `rows` [M] are the indices of the environments, and `frame` [M,C,H,W] contains the last frames of their games.
        """
        blank = self.flicker.draw(np.isin(self.ids, rows))[rows]
        frame = self.flicker.blank_frames(self.noise.add_to(frame, rows), blank)
        return self.flicker.blank_stacks(self.stack.peek(rows, frame), blank)

    def send(self, actions: np.ndarray) -> None:
        self.sent = check_actions(actions, self.action_spec, self.num_envs)
        self._send(self.sent, self.ids)

    def recv(self) -> Step:
        frame, reward, _, info = self.env.recv()
        self.game_steps += 1
        over = info["terminated"].astype(bool)
        lost = (info["lives"] < self.lives) & ~over
        at_limit = self.game_steps == self.options.time_limit
        # The components describe the result of the agent's action. Compute them before FIRE or a new game
        # changes `reward` and `info`.
        components = self._compute_components(reward, info, over | lost) if self.components_enabled else {}
        if self.options.stall:
            over |= self._find_stalled(reward, info["ram"], lost)
        new_life = lost & ~at_limit & ~over
        if self.fire_action is not None and new_life.any():
            self._press_fire(np.flatnonzero(new_life), frame, reward, over, info)
        ended = over | lost if self.options.episodic_life else over
        truncated = at_limit & ~ended  # an episode that also ends by itself in this step is not truncated
        final = {"image": self._observe_final(np.flatnonzero(truncated), frame[truncated])} if truncated.any() else {}
        game_over = over | at_limit
        if game_over.any():
            rows = np.flatnonzero(game_over)
            frame[rows], first_info = self._start_games(rows)
            info["lives"][rows] = first_info["lives"]
            info["ram"][rows] = first_info["ram"]
        self.lives = info["lives"].copy()
        self.ram = info["ram"]
        score = reward.astype(np.float32)
        done = game_over | ended
        image, blank = self._observe(frame, done)
        return Step(
            observation={"image": image},
            reward=score,
            done=done,
            truncated=truncated,
            game_over=game_over,
            task=np.zeros(self.num_envs, np.int64),
            measures={**components, "score": score.copy(), "ram": info["ram"], **blank},
            final=final,
        )

    def _compute_components(self, reward: np.ndarray, info: Any, lost: np.ndarray) -> Arrays:
        """Return the reward components of Atari games in this step by name, except `reward` and `score`.

        `recv` adds `score`. RewardWrapper adds the components that all environments have, for example `reward`. `lost`,
        bool [N], is True if a life was lost, including the last life.
        """
        components = {
            "lives": info["lives"].astype(np.float32),
            "fire": self.is_fire[self.sent].astype(np.float32),
            "lives_lost": lost.astype(np.float32),
        }
        if self.game == "Riverraid":
            components |= compute_riverraid_components(self.ram, info["ram"], reward, lost)
        return components

    def _find_stalled(self, reward: np.ndarray, ram: np.ndarray, lost: np.ndarray) -> np.ndarray:
        """Return a bool [N]: True if a game made no progress in the last `stall` steps.

        A stalled game counts as terminated. If it counted as truncated, the learner would bootstrap from the value of
        the last observation, and stalling would cost the agent nothing.
        """
        if self.game == "Riverraid":
            still = (ram[:, WAITING] == HALTED) & ~lost  # a crash also halts the river
        else:
            still = reward == 0
        self.stalled_steps = np.where(still, self.stalled_steps + 1, 0)
        return self.stalled_steps >= self.options.stall

    def _send(self, actions: np.ndarray, ids: np.ndarray) -> None:
        """Send actions to the emulators with the indices `ids`, and append them to the action history."""
        if self.history_length.max() == self.action_history.shape[1]:
            self.action_history = np.concatenate([self.action_history, np.zeros_like(self.action_history)], axis=1)
        self.action_history[ids, self.history_length[ids]] = actions
        self.history_length[ids] += 1
        self.env.send(actions, ids)

    def _press_fire(self, rows: np.ndarray, frame: np.ndarray, reward: np.ndarray, over: np.ndarray, info: Any) -> None:
        """Press FIRE for one emulator step in the environments `rows` (indices), in which a life was lost.

        Add the reward of this step to `reward`, and write the other results into `frame`, `over` and `info`.
        """
        self._send(np.full(len(rows), self.fire_action), rows)
        frame[rows], more_reward, _, new_info = self.env.recv()
        reward[rows] += more_reward
        over[rows] = new_info["terminated"].astype(bool)
        info["lives"][rows] = new_info["lives"]
        info["ram"][rows] = new_info["ram"]

    def _start_games(self, rows: np.ndarray) -> tuple[np.ndarray, Any]:
        """Start new games in the environments with the indices `rows`. Return the first frames and EnvPool's infos."""
        frame, info = self.env.reset(rows)
        self.games_started[rows] += 1
        self.game_steps[rows] = 0
        self.stalled_steps[rows] = 0
        self.history_length[rows] = 0
        start_actions = [self.noop_action] * self.fixed_noops
        if self.fixed_noops and self.fire_action is not None:
            start_actions.append(self.fire_action)
        for action in start_actions:
            lives = info["lives"]
            self._send(np.full(len(rows), action), rows)
            frame, _, _, info = self.env.recv()
            if info["terminated"].any() or (info["lives"] < lives).any():
                raise RunError(
                    f"{self.tasks[0]}: --noop-max {self.options.noop_max}: a life was lost during the no-op frames at "
                    "the start of a game; use a smaller --noop-max"
                )
        if self.options.force_start:
            self._start_flying(rows, frame, info)
        return frame, info

    def _start_flying(self, rows: np.ndarray, frame: np.ndarray, info: Any) -> None:
        """Start River Raid: send no-ops until the game waits for an action, then press FIRE.

        `rows` are the indices of the environments. Overwrite `frame` and `info` with the results of the last step of
        each environment.
        """
        waiting = np.flatnonzero(info["ram"][:, WAITING])
        for _ in range(100):
            if not len(waiting):
                return
            halted = info["ram"][waiting, WAITING] == HALTED
            self._send(np.where(halted, self.action_spec.names.index("FIRE"), self.noop_action), rows[waiting])
            frame[waiting], _, _, new_info = self.env.recv()
            info["lives"][waiting] = new_info["lives"]
            info["ram"][waiting] = new_info["ram"]
            waiting = waiting[new_info["ram"][:, WAITING] != 0]
        raise RunError(
            f"{self.tasks[0]}: --force-start: the plane did not start to fly within 100 steps; use --force-start off"
        )

    def render(self) -> list[np.ndarray]:
        return self.env.render()

    def read_labels(self) -> Arrays:
        return ram_labels.read_labels(self.game, self.ram)

    def use_ale(self) -> AleBackend:
        """Replace EnvPool by one emulator of ale-py, whose RAM can be changed. Call this method before `reset`.

        To repeat a game of EnvPool, set `noops` of the emulator to the number of no-op frames in that game, and send
        the same actions. Raise UserError if ale-py is not installed, or if the environment has a random option (sticky
        actions, flicker, noise): ale-py cannot repeat the random numbers.
        """
        options = self.options
        for flag in ("sticky", "flicker", "noise"):
            if getattr(options, flag):
                raise UserError(
                    f"--set: the game cannot be repeated with --{flag} {getattr(options, flag):g}; use --{flag} 0"
                )
        backend = AleBackend(
            self.game,
            frame_skip=options.frame_skip,
            frame_size=options.frame_size,
            gray=options.gray,
            full_actions=options.full_actions,
            fire=options.fire and options.noop_mode == "random",
        )
        self.env = backend
        return backend

    def save(self) -> Arrays:
        if not self.saveable:
            return {}
        assert self.stack.frames is not None
        return {
            "games_started": self.games_started.copy(),
            "game_steps": self.game_steps.copy(),
            "stalled_steps": self.stalled_steps.copy(),
            "history_length": self.history_length.copy(),
            "actions": np.concatenate([self.action_history[i, : self.history_length[i]] for i in self.ids]),
            "lives": self.lives.copy(),
            "ram": self.ram.copy(),
            "stack": self.stack.frames.copy(),
            "flicker": self.flicker.streams.state.copy(),
            "noise": self.noise.count.copy(),
        }

    def load(self, state: Arrays) -> None:
        self._check_saved(state)
        self.env.reset(self.ids)
        # Each reset draws the number of no-ops from the emulator's random stream. Repeat all resets, so that the last
        # reset draws the same number as before.
        for game in range(1, int(state["games_started"].max())):
            self.env.reset(self.ids[state["games_started"] > game])
        lengths = state["history_length"]
        starts = np.concatenate([[0], np.cumsum(lengths)[:-1]])
        self.history_length = np.zeros(self.num_envs, np.int64)
        for t in range(int(lengths.max())):
            rows = self.ids[lengths > t]
            self._send(state["actions"][starts[rows] + t], rows)
            self.env.recv()
        self.games_started = state["games_started"].copy()
        self.game_steps = state["game_steps"].copy()
        self.stalled_steps = state["stalled_steps"].copy()
        self.lives = state["lives"].copy()
        self.ram = state["ram"].copy()
        self.stack.frames = state["stack"].copy()
        self.flicker.streams.state = state["flicker"].copy()
        self.noise.count = state["noise"].copy()

    def _check_saved(self, state: Arrays) -> None:
        """Raise ValueError if a saved state is not valid."""
        names = ("games_started", "game_steps", "stalled_steps", "history_length", "lives", "ram")
        expected = {name: getattr(self, name) for name in names}
        expected |= {"flicker": self.flicker.streams.state, "noise": self.noise.count}
        largest = int(np.iinfo(np.int32).max)
        ranges = {
            "games_started": (1, MAX_SAVED_GAMES),
            "history_length": (0, largest),
            "game_steps": (0, largest),
        }
        check_saved_arrays(state, expected, ranges)
        actions = state["actions"]
        if actions.ndim != 1 or actions.dtype != self.action_history.dtype:
            raise ValueError(
                f"the array actions is {actions.dtype} {actions.shape}; expected {self.action_history.dtype} (T,)"
            )
        if len(actions) != state["history_length"].sum() or actions.max(initial=0) >= self.action_spec.n:
            count = state["history_length"].sum()
            raise ValueError(f"the array actions must contain {count} actions from 0 to {self.action_spec.n - 1}")
        spec = self.observation_spec["image"]
        if state["stack"].dtype != spec.dtype or state["stack"].size != self.num_envs * math.prod(spec.shape):
            found = f"{state['stack'].dtype} {state['stack'].shape}"
            raise ValueError(f"the array stack is {found}; images are {spec.dtype} {(self.num_envs, *spec.shape)}")

    def close(self) -> None:
        if "env" in vars(self):
            self.env.close()
