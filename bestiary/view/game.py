"""A game that is played in the browser. All its steps are kept, and it can be continued from any of them.

    game = WatchedGame(run, PlaybackOptions(seed=3))
    game.advance()                # the agent's action
    game.steps[0].png             # the picture of step 0; all earlier steps are kept
    game.rewind(40)               # make step 40 the newest step again
    game.advance("LEFT")          # take another action at step 40

The game is the same as that of `bestiary video` with the same options. A rewind plays the game again from its start
with the same actions, so it is exact for all environments, and raises RunError if the game differs.
"""

import io
from dataclasses import dataclass, field

import numpy as np
from PIL import Image

from bestiary.agents.policy_runner import StepRecord
from bestiary.evaluation.playback import Frame, PlaybackOptions, newest_frame, open_game
from bestiary.interpretability.game_branch import GameBranch, repeat_branch
from bestiary.runs.run import Run
from bestiary.utils.errors import RunError, UserError
from bestiary.utils.images import enlarge

MAX_RECORD_BYTES = 2**28  # memory for the observations and recurrent states of earlier steps


@dataclass
class AgentStep:
    """The output of one agent at one step."""

    probabilities: list[float]
    value: float
    state_norm: float | None  # Euclidean norm of the recurrent state before this step; None: the agent has no memory


@dataclass
class WatchedStep:
    """One step of the game."""

    png: bytes  # picture of the game
    agents: list[AgentStep]
    choice: str  # the action that the first agent chooses at this step
    measures: dict[str, float]  # measures that the environment reported when it reached this step
    labels: dict[str, float]  # value of each labelled quantity, for example ball_y
    action: str | None = None  # the action that was taken at this step; None: it is the newest step
    reward: float | None = None  # the reward of this action


@dataclass
class GameSetup:
    """The choices that determine a game."""

    run: Run
    options: PlaybackOptions
    others: list[tuple[Run, int | None]] = field(default_factory=list)  # runs of further agents, and their checkpoints


class WatchedGame:
    """A game with one or several agents. The first agent, a recording or the user chooses the actions."""

    def __init__(self, setup: GameSetup):
        self.setup = setup
        self.steps: list[WatchedStep] = []
        self.records: dict[int, list[StepRecord]] = {}  # recent step -> inputs, state and output of each agent
        self.record_bytes = 0
        self.is_changed = False  # whether the user has changed an action of the agent or the recording
        self.recorded: list[str] | None = None  # actions of the recorded game; None: the game is not a recording
        self.branches = self._open()
        self._add_step()

    @property
    def main(self) -> GameBranch:
        """The branch of the first agent."""
        return self.branches[0]

    @property
    def is_over(self) -> bool:
        """Whether the game has ended: the newest step is the last one."""
        return self.main.game_over

    @property
    def action_names(self) -> tuple[str, ...]:
        """The names of the actions."""
        return self.main.interface.action_spec.names

    @property
    def frame_rate(self) -> float:
        """Frame rate at which the game has about its normal speed: 60 emulator frames or 10 steps per second."""
        frames = self.main.viewer.pool.frames_per_step
        return 60 / frames if frames > 1 else 10

    def advance(self, action: str | None = None) -> None:
        """Take an action: the given one, that of the recording, or the choice of the first agent."""
        step = self.steps[-1]
        played = step.choice
        if self.recorded is not None and not self.is_changed:
            played = self.recorded[self.main.t] if self.main.t < len(self.recorded) else played
        self.is_changed |= action is not None and action != played
        step.action = action or played
        for branch in self.branches:
            branch.advance(step.action)
        step.reward = self.main.rewards[-1]
        if not self.is_over:
            self._add_step()

    def rewind(self, t: int) -> None:
        """Make step `t` the newest step, and play the game again up to this step."""
        actions = self.main.actions[:t]
        expected = self.steps[t]
        self.close()
        self.branches = self._open()
        for action in actions:
            for branch in self.branches:
                branch.advance(action)
        del self.steps[t:]
        for later in [key for key in self.records if key >= t]:
            self._drop_record(later)
        self._add_step()
        if self.steps[t].png != expected.png or self.steps[t].agents[0] != expected.agents[0]:
            raise RunError("the environment does not repeat the game exactly, so earlier steps cannot be changed")
        self.is_changed = bool(self.changed_actions(t))

    def changed_actions(self, t: int) -> dict[int, str]:
        """Return {step: action} of the steps before `t` at which the user has chosen another action.

        In a changed recorded game, this includes all steps at which the action is not that of the recording.
        """
        played = [step.choice for step in self.steps[:t]]
        if self.recorded is not None:
            played[: len(self.recorded)] = self.recorded[:t]
        return {k: str(self.steps[k].action) for k in range(t) if self.steps[k].action != played[k]}

    def branch_at(self, t: int, settable: bool = False) -> GameBranch:
        """Return a second game of the first agent at step `t`, for an intervention. The caller closes it.

        If `settable` is True, labelled quantities can be set in this game.
        """
        return repeat_branch(self.setup.run, self.setup.options, self.main, settable, step=t)

    def records_at(self, t: int) -> list[StepRecord]:
        """Return the inputs, recurrent state and output of each agent at a step.

        If they are not in memory any more, the game is played again up to this step.
        """
        if t in self.records:
            return self.records[t]
        branches = self._open()
        try:
            for action in self.main.actions[:t]:
                for branch in branches:
                    branch.advance(action)
            return [branch.record for branch in branches]
        finally:
            for branch in branches:
                branch.viewer.pool.close()

    def canvas(self, t: int, agent: int = 0) -> np.ndarray:
        """Return the image on which saliency and attention of a step are drawn (see `playback.Frame.canvas`)."""
        image = self.records_at(t)[agent].step.observation.get("image")
        if image is None or self.branches[agent].viewer.screen_is_observation:
            return np.asarray(Image.open(io.BytesIO(self.steps[t].png)))
        return enlarge(newest_frame(image[0]))

    def close(self) -> None:
        """Close the environments."""
        for branch in self.branches:
            branch.close()

    def _open(self) -> list[GameBranch]:
        """Start the game for each agent. The environments compute all their reward components."""
        setup = self.setup
        branches = []
        try:
            for number, (run, checkpoint) in enumerate([(setup.run, setup.options.checkpoint), *setup.others]):
                options = setup.options
                if number:
                    options = PlaybackOptions(**{**vars(options), "checkpoint": checkpoint})
                viewer, recorded = open_game(run, options, like=setup.run if number else None)
                if not number:
                    self.recorded = recorded
                if viewer.first_step is None and not viewer.pool.components_enabled and viewer.pool.components:
                    viewer.pool.enable_components()
                branches.append(GameBranch(viewer, options.greedy))
        except BaseException:
            for branch in branches:
                branch.close()
            raise
        return branches

    def _add_step(self) -> None:
        t = len(self.steps)
        screens = [branch.screen for branch in self.branches]
        for branch, screen in zip(self.branches[1:], screens[1:], strict=True):
            if not np.array_equal(screen, screens[0]):
                raise UserError(
                    f"{branch.viewer.run.path}: its screen differs from that of {self.setup.run.path} after the same "
                    "actions; choose runs with the same environment options (--noop-max, --frame-skip, --sticky ...)"
                )
        choice = self.main.next_action()
        for branch in self.branches[1:]:
            branch.next_action()
        record = self.main.record
        shown = Frame(record, screens[0], choice, self.main.viewer.screen_is_observation).display_image
        measures = {name: float(values[0]) for name, values in record.step.measures.items() if np.ndim(values) == 1}
        agents = [_agent_step(branch.record) for branch in self.branches]
        labels = self.main.labels() if self.main.interface.labels else {}
        self.steps.append(WatchedStep(encode_png(shown), agents, choice, measures, labels))
        self.records[t] = [branch.record for branch in self.branches]
        self.record_bytes += sum(map(_size_of, self.records[t]))
        while self.record_bytes > MAX_RECORD_BYTES and len(self.records) > 1:
            self._drop_record(next(iter(self.records)))

    def _drop_record(self, t: int) -> None:
        self.record_bytes -= sum(map(_size_of, self.records.pop(t)))


def _agent_step(record: StepRecord) -> AgentStep:
    probabilities = record.output.distribution.log_probs[0, 0].exp().tolist()
    floats = [part for part in record.state if part.dtype.is_floating_point and part.numel()]
    norm = float(sum(float(part.double().square().sum()) for part in floats) ** 0.5) if floats else None
    return AgentStep(probabilities, float(record.output.value[0, 0]), norm)


def _size_of(record: StepRecord) -> int:
    tensors = [*record.inputs.observation.values(), *record.state]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def encode_png(image: np.ndarray) -> bytes:
    """Return an RGB image as a PNG file. Small images are enlarged by `enlarge`."""
    buffer = io.BytesIO()
    Image.fromarray(enlarge(image)).save(buffer, "PNG", compress_level=1)
    return buffer.getvalue()
