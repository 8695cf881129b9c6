"""Play a game to a step, apply interventions at this step, and play on.

    branch = open_branch(run, PlaybackOptions(seed=3))
    branch.play_to(120)                       # the game that `bestiary video` shows with this seed
    effect = branch.intervene(interventions)  # change the observation, the action or the game at this step
    continuation = branch.play_on(100)        # play on with the agent

A second branch with the same options plays the same game, and samples actions with the same random numbers. The two
continuations therefore differ only because of the intervention.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from bestiary.agents.agent import Output
from bestiary.agents.policy_runner import PolicyRunner, StepRecord
from bestiary.envs import ram_labels
from bestiary.envs.ale_backend import AleBackend
from bestiary.envs.atari import AtariVectorEnv
from bestiary.envs.vector_env import EnvInterface, action_index
from bestiary.evaluation.playback import PlaybackOptions, Viewer, open_game
from bestiary.interpretability.interventions import (
    Effect,
    Intervention,
    apply_to_inputs,
    check_interventions,
    effect_between,
)
from bestiary.rollout import Inputs, Step
from bestiary.runs.run import Run
from bestiary.utils.errors import RunError, UserError


@dataclass
class Continuation:
    """The steps of a game after an intervention. Step 0 is the step of the intervention."""

    values: list[float] = field(default_factory=list)  # value of the agent at each step
    actions: list[str] = field(default_factory=list)  # action taken at each step
    rewards: list[float] = field(default_factory=list)  # reward of each action
    screens: list[np.ndarray] = field(default_factory=list)  # screen at each step, if they were asked for
    game_over: bool = False  # whether the game ended within the continuation

    @property
    def game_return(self) -> float:
        """The sum of the rewards."""
        return float(sum(self.rewards))


class GameBranch:
    """A game that a run's agent plays step by step. It ends with the first game over.

    The attribute `record` has the observation, the recurrent state and the agent's output at the current step `t`.
    """

    def __init__(self, viewer: Viewer, greedy: bool, ale: AleBackend | None = None):
        """Start the game. `ale` is the emulator of the viewer's environment if its RAM can be changed, else None."""
        self.viewer = viewer
        self.greedy = greedy
        self.ale = ale
        self.runner = PolicyRunner(viewer.agent, 1, greedy=greedy, seed=viewer.action_seed, task=viewer.task)
        self.t = 0
        self.actions: list[str] = []  # actions taken so far
        self.rewards: list[float] = []
        self.game_over = False
        self.chosen_action: str | None = None  # action that the agent chooses at this step; None: not drawn yet
        self.forced_action: str | None = None  # action that an intervention takes at this step instead
        self.snapshots: list[Any] = []  # emulator states of the stacked frames, newest last; only with `ale`
        self.redrawn_screen: np.ndarray | None = None  # the screen after labelled quantities were set; only with `ale`
        # The agent's inputs without the intervention, after `intervene`. If labelled quantities of an Atari game were
        # set, the image is redrawn like the changed image (see `_redraw`).
        self.compared_inputs: Inputs | None = None
        self.first_step = viewer.first_step or viewer.pool.reset()
        self.record: StepRecord
        self._observe(self.first_step)

    @property
    def interface(self) -> EnvInterface:
        return self.viewer.pool.interface

    @property
    def screen(self) -> np.ndarray:
        """The rendered screen of the current step, uint8 [H,W,3]."""
        return self.viewer.pool.render()[0] if self.redrawn_screen is None else self.redrawn_screen

    def labels(self) -> dict[str, float]:
        """Return the labels of the current state of the game, for example `ball_y`: name -> value.

        See `VectorEnv.read_labels`.
        """
        return {name: float(values[0]) for name, values in self.viewer.pool.read_labels().items()}

    def next_action(self) -> str:
        """Return the action that will be taken at this step. It is drawn only once per step."""
        if self.chosen_action is None:
            index = int(self.runner.select_actions(self.record.output)[0])
            self.chosen_action = self.viewer.pool.action_spec.names[index]
        return self.forced_action or self.chosen_action

    def peek_action(self) -> str:
        """Return the action that will be taken at this step, without consuming random numbers."""
        state = self.runner.generator.get_state()
        action = self.next_action()
        self.runner.generator.set_state(state)
        self.chosen_action = None
        return action

    def advance(self, action: str | None = None) -> None:
        """Take an action (default: the action of the agent), and run the agent on the next observation.

        Even if `action` is given, the agent samples its own action. Later samples therefore use the same random numbers
        as in a game without `action`.
        """
        if self.game_over:
            raise RunError(f"the game ended after {self.t} steps")
        chosen = self.next_action()
        action = action or chosen
        pool = self.viewer.pool
        step = self.runner.act(pool, np.array([action_index(action, pool, self.viewer.run.path)]))
        self.t += 1
        self.actions.append(action)
        self.rewards.append(float(step.reward[0]))
        self.game_over = bool(step.game_over[0])
        self.chosen_action = self.forced_action = None
        self.redrawn_screen = None
        self._observe(step)

    def play_to(self, step: int, actions: Mapping[int, str] | None = None) -> None:
        """Let the agent play until `step`. Raise UserError if the game ends before this step.

        `actions` is {step: action that is taken there instead of that of the agent}.
        """
        while self.t < step:
            self.advance((actions or {}).get(self.t))
            if self.game_over:
                self.close()
                raise UserError(f"--step {step}: the game ended after {self.t} steps; choose a step below {self.t}")

    def intervene(self, interventions: Sequence[Intervention]) -> Effect:
        """Apply interventions at the current step, and return their effect on the agent's output.

        From now on, `record` has the changed observation and output. Labelled quantities of Atari games need a branch
        made by `repeat_branch` with `settable`. Their effect is measured between two redrawn observations (`_redraw`).
        """
        check_interventions(interventions, self.interface)
        before = self.record.output
        inputs = self.compared_inputs = self.record.inputs
        values = {one.label: one.value for one in interventions if one.kind == "set"}
        if values:
            before, inputs = self._set_labels(values)
        inputs = apply_to_inputs(interventions, inputs, self.interface)
        output = self._rerun(inputs)
        for one in interventions:
            if one.kind == "action":
                self.forced_action = one.action
        return effect_between(before, output)

    def play_on(self, steps: int, screens: bool = False) -> Continuation:
        """Play at most `steps` steps, or to the end of the game, and return what happens."""
        continuation = Continuation()
        for _ in range(steps):
            continuation.values.append(float(self.record.output.value[0, 0]))
            if screens:
                continuation.screens.append(self.screen)
            self.advance()
            continuation.actions.append(self.actions[-1])
            continuation.rewards.append(self.rewards[-1])
            if self.game_over:
                break
        continuation.game_over = self.game_over
        return continuation

    def close(self) -> None:
        self.viewer.pool.close()

    def _observe(self, step: Step) -> None:
        self.record = self.runner.observe(step)
        if self.ale is not None:
            depth = self.viewer.pool.unwrapped.options.frame_stack
            earlier = [] if step.done[0] else self.snapshots
            self.snapshots = [*earlier, self.ale.snapshot()][-depth:]

    @torch.no_grad()
    def _rerun(self, inputs: Inputs) -> Output:
        """Run the agent on changed inputs of the current step.

        The new recurrent state is the state after these inputs.
        """
        if self.chosen_action is not None:
            raise RunError("an intervention must come before the action of its step is chosen")
        output, self.runner.state = self.viewer.agent(inputs, self.record.state)
        self.record = StepRecord(self.record.step, inputs, self.record.state, output)
        return output

    def _set_labels(self, values: dict[str, float]) -> tuple[Output, Inputs]:
        """Set labelled quantities of the game. Return the agent's output without the change, and the changed inputs."""
        pool = self.viewer.pool
        if not isinstance(pool.unwrapped, AtariVectorEnv):
            ((kind, array),) = pool.set_labels(values).items()
            return self.record.output, _with_array(self.record.inputs, kind, array)
        if self.ale is None:
            raise UserError("--set: EnvPool cannot change the RAM of a game; use repeat_branch(settable=True)")
        game = pool.unwrapped.game
        before = self.labels()
        control, _ = self._redraw(dict.fromkeys(values, 0.0))
        changed, self.redrawn_screen = self._redraw({name: value - before[name] for name, value in values.items()})
        self.ale.write_ram(ram_labels.ram_bytes(game, values))
        pool.unwrapped.ram = self.ale.ale.getRAM()[None].copy()
        pool.unwrapped.stack.frames = np.ascontiguousarray(np.moveaxis(changed, 0, -1))[None]
        self.compared_inputs = _with_array(self.record.inputs, "image", control[None])
        with torch.no_grad():
            output, _ = self.viewer.agent(self.compared_inputs, self.record.state)
        return output, _with_array(self.record.inputs, "image", changed[None])

    def _redraw(self, differences: dict[str, float]) -> tuple[np.ndarray, np.ndarray]:
        """Return the stacked image [C,H,W] and the screen with labelled quantities changed by `differences`.

        All stacked frames are drawn again, and the quantities are changed by the same differences in each of them. So
        an object that is set to another place has the same velocity as before. Redrawing alone can change an image
        slightly. Therefore a changed image is not compared with the observation, but with the image that this method
        returns if all differences are zero.
        """
        assert self.ale is not None
        pool = self.viewer.pool.unwrapped
        limits = pool.labels
        frames = []
        for snapshot in self.snapshots:
            now = ram_labels.read_labels(pool.game, self.ale.ram_of(snapshot)[None])
            values = {
                name: float(np.clip(now[name][0] + change, limits[name].low, limits[name].high))
                for name, change in differences.items()
            }
            frame, screen = self.ale.redraw(snapshot, ram_labels.ram_bytes(pool.game, values))
            frames.append(frame[0])
        missing = pool.options.frame_stack - len(frames)
        return np.concatenate([frames[0]] * missing + frames), screen


def _with_array(inputs: Inputs, kind: str, array: np.ndarray) -> Inputs:
    """Return inputs [1,1,...] with the observation `kind` replaced by an array [1,...]."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))[None]
    return replace(inputs, observation={**inputs.observation, kind: tensor})


def open_branch(run: Run, options: PlaybackOptions) -> GameBranch:
    """Start the game that `bestiary video` plays with the same options.

    If `options` contain a recorded game, the branch starts like this game, but the agent chooses the actions. To repeat
    the recorded game, pass its actions to `advance`.
    """
    viewer, _ = open_game(run, options)
    return GameBranch(viewer, options.greedy)


def repeat_branch(
    run: Run, options: PlaybackOptions, branch: GameBranch, settable: bool = False, step: int | None = None
) -> GameBranch:
    """Return a second branch that has taken the same actions as `branch` and is at the same step.

    If `settable` is True, labelled quantities can be set in it. Atari games are then emulated by ale-py. If `step` is
    given, only the actions before this step are taken.

    Raises:
        UserError: ale-py is not installed, or the game has random events that cannot be repeated.
        RunError: the second game differs from the first game.
    """
    viewer, _ = open_game(run, options)
    ale = None
    if settable and isinstance(viewer.pool.unwrapped, AtariVectorEnv):
        if options.replay is not None:
            viewer.pool.close()
            raise UserError("--set: the RAM of a recorded game cannot be changed; choose a new game")
        ale = viewer.pool.unwrapped.use_ale()
        _find_noops(viewer, ale, branch.first_step)
    copy = GameBranch(viewer, options.greedy, ale)
    for action in branch.actions[:step]:
        copy.advance(action)
    if step is None or step == branch.t:
        for kind, array in branch.record.step.observation.items():
            if not np.array_equal(array, copy.record.step.observation[kind]):
                raise RunError(f"{viewer.pool.tasks[0]}: the game could not be repeated up to step {branch.t}")
    return copy


def _find_noops(viewer: Viewer, ale: AleBackend, first_step: Step) -> None:
    """Set `ale.noops` such that the emulator's game starts with `first_step`. Raise RunError if this is impossible."""
    for ale.noops in range(viewer.pool.unwrapped.options.noop_max + 1):
        if np.array_equal(viewer.pool.reset().measures["ram"], first_step.measures["ram"]):
            return
    raise RunError(f"{viewer.pool.tasks[0]}: ale-py cannot repeat the start of the game, so its RAM cannot be changed")


def parse_earlier_actions(text: str) -> dict[int, str]:
    """Return {step: action} for a text such as "120:LEFT,130-145:RIGHT". Raise UserError if it has another format."""
    actions: dict[int, str] = {}
    for part in text.split(","):
        steps, colon, name = part.partition(":")
        first, _, last = steps.partition("-")
        if not (colon and name and first.isdecimal() and (last or first).isdecimal()) or int(last or first) < int(
            first
        ):
            raise UserError(
                f"--earlier-actions {part}: expected STEP:ACTION or FIRST-LAST:ACTION, for example "
                "120:LEFT,130-145:RIGHT"
            )
        actions |= dict.fromkeys(range(int(first), int(last or first) + 1), name)
    return actions


def format_earlier_actions(actions: Mapping[int, str]) -> str:
    """Return the text from which `parse_earlier_actions` returns these actions.

    Equal actions at consecutive steps become one part, for example "120:LEFT,130-145:RIGHT".
    """
    parts: list[tuple[int, int, str]] = []
    for step, name in sorted(actions.items()):
        if parts and parts[-1][1:] == (step - 1, name):
            parts[-1] = (parts[-1][0], step, name)
        else:
            parts.append((step, step, name))
    return ",".join(f"{first}:{name}" if first == last else f"{first}-{last}:{name}" for first, last, name in parts)
