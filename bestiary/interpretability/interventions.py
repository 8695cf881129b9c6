"""Interventions: change what an agent observes or does at one step, and measure how its policy and value change.

    changed = apply_to_inputs(interventions, inputs, interface)     # new inputs; the old ones are not changed
    effect = measure_effect(agent, inputs, changed, state)          # probabilities and values before and after

There are six kinds of interventions. `erase`, `blur`, `move` and `copy` edit a rectangle of the observation. `set`
changes a labelled quantity of the game, for example the position of the ball. `action` takes another action. `set` and
`action` change the game itself (see `game_branch.py`).

A saliency map is a guess about what the agent uses. An intervention tests such a guess (Atrey et al. 2020).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from bestiary.agents.agent import Agent, Output, State
from bestiary.envs.vector_env import EnvInterface
from bestiary.interpretability import image_edits
from bestiary.interpretability.image_edits import Rectangle
from bestiary.rollout import Inputs
from bestiary.utils.errors import UserError
from bestiary.utils.options import suggest

# Format of the value of each command-line option: --erase X,Y,WIDTH,HEIGHT.
FORMATS = {
    "erase": "X,Y,WIDTH,HEIGHT",
    "blur": "X,Y,WIDTH,HEIGHT",
    "move": "X,Y,WIDTH,HEIGHT,TO_X,TO_Y",
    "copy": "X,Y,WIDTH,HEIGHT,TO_X,TO_Y",
    "set": "LABEL=VALUE",
    "action": "NAME",
}
EXAMPLES = {
    "erase": "30,40,8,8",
    "blur": "30,40,8,8",
    "move": "30,40,8,8,50,40",
    "copy": "30,40,8,8,50,40",
    "set": "ball_x=100",
    "action": "NOOP",
}
OBSERVATION_KINDS = ("erase", "blur", "move", "copy")


@dataclass(frozen=True)
class Intervention:
    """One change at one step of a game. Only the fields that its kind needs are used."""

    kind: str  # a key of FORMATS
    rectangle: Rectangle | None = None  # erase, blur, move, copy
    to: tuple[int, int] | None = None  # move, copy: x and y of the new place of the upper left pixel
    label: str = ""  # set: name of a labelled quantity
    value: float = 0.0  # set: new value of the quantity
    action: str = ""  # action: name of the action that is taken instead of the agent's action

    @property
    def changes_observation(self) -> bool:
        """Whether the intervention edits only the observation, and not the game."""
        return self.kind in OBSERVATION_KINDS

    @property
    def option(self) -> str:
        """The command-line option of `bestiary intervene` for this intervention, for example `--erase 30,40,8,8`."""
        if self.kind == "set":
            return f"--set {self.label}={self.value:g}"
        if self.kind == "action":
            return f"--action {self.action}"
        assert self.rectangle is not None
        r = self.rectangle
        numbers = (r.x, r.y, r.width, r.height, *(self.to or ()))
        return f"--{self.kind} {','.join(map(str, numbers))}"


def parse_intervention(kind: str, text: str) -> Intervention:
    """Return the intervention described by `text`, the value of the command-line option `--KIND`.

    Raise UserError if the text does not have the format in FORMATS.
    """
    problem = UserError(f"--{kind} {text}: expected {FORMATS[kind]}, for example --{kind} {EXAMPLES[kind]}")
    if kind == "action":
        return Intervention(kind, action=text)
    if kind == "set":
        label, equals, number = text.partition("=")
        try:
            value = float(number)
        except ValueError:
            raise problem from None
        if not label or not equals or not np.isfinite(value):
            raise problem
        return Intervention(kind, label=label.strip().replace("-", "_"), value=value)
    try:
        x, y, width, height, *to = (int(word) for word in text.split(","))
    except ValueError:
        raise problem from None
    if len(to) != (2 if kind in ("move", "copy") else 0):
        raise problem
    return Intervention(kind, Rectangle(x, y, width, height), (to[0], to[1]) if to else None)


def check_interventions(interventions: Sequence[Intervention], interface: EnvInterface) -> None:
    """Raise UserError if an intervention is not possible with this environment. All problems are reported together."""
    problems = [_find_problem(intervention, interface) for intervention in interventions]
    actions = [intervention for intervention in interventions if intervention.kind == "action"]
    if len(actions) > 1:
        problems.append(f"{' '.join(one.option for one in actions)}: only one action can be taken; remove the others")
    found = [problem for problem in problems if problem]
    if found:
        raise UserError(*found)


def _find_problem(intervention: Intervention, interface: EnvInterface) -> str | None:
    option = intervention.option
    if intervention.kind == "action":
        names = interface.action_spec.names
        if intervention.action in names:
            return None
        hint = suggest(intervention.action, names)
        return f"{option}: {interface.tasks[0]} has no such action; expected one of {', '.join(names)}{hint}"
    if intervention.kind == "set":
        label = interface.labels.get(intervention.label)
        if not interface.labels:
            return (
                f"{option}: {interface.tasks[0]} has no labelled quantities; edit the observation, for example --erase"
            )
        if label is None:
            names = tuple(interface.labels)
            shown = ", ".join(names if len(names) <= 20 else (*names[:10], "..."))
            hint = suggest(intervention.label, names)
            return f"{option}: {interface.tasks[0]} has no such quantity; expected one of {shown}{hint}"
        if not label.low <= intervention.value <= label.high:
            nearest = min(max(intervention.value, label.low), label.high)
            return f"{option}: must be between {label.low:g} and {label.high:g}; the nearest value is {nearest:g}"
        if intervention.value != round(intervention.value):
            return f"{option}: must be a whole number; the nearest value is {round(intervention.value)}"
        if not label.settable:
            return f"{option}: {label.why_not_settable}"
        return None
    size = observed_size(interface)
    if size is None:
        return (
            f"{option}: the agent observes {', '.join(interface.observation_spec)} without positions; only --set and "
            "--action are possible"
        )
    if "image" not in interface.observation_spec and intervention.kind != "erase":
        return f"{option}: the agent observes no images; only --erase, --set and --action are possible"
    assert intervention.rectangle is not None
    height, width = size
    if not intervention.rectangle.fits(size):
        nearest_option = replace(intervention, rectangle=_nearest_rectangle(intervention.rectangle, size)).option
        return (
            f"{option}: the rectangle is not inside the observation of {width}x{height} (width x height); the nearest "
            f"rectangle is {nearest_option}"
        )
    if intervention.to is not None:
        x, y = intervention.to
        if not (0 <= x < width and 0 <= y < height):
            return f"{option}: the target {x},{y} is outside of the observation; use 0,0 to {width - 1},{height - 1}"
    return None


def _nearest_rectangle(rectangle: Rectangle, size: tuple[int, int]) -> Rectangle:
    """Return the nearest rectangle inside an image of the size (H, W). A rectangle that is too large is shrunk."""
    height, width = size
    new_width, new_height = min(max(rectangle.width, 1), width), min(max(rectangle.height, 1), height)
    x = min(max(rectangle.x, 0), width - new_width)
    y = min(max(rectangle.y, 0), height - new_height)
    return Rectangle(x, y, new_width, new_height)


def observed_size(interface: EnvInterface) -> tuple[int, int] | None:
    """Return the height and width of the observation: of the image in pixels, or of the grid that a vector describes.

    Return None if the observation has no positions.
    """
    if "image" in interface.observation_spec:
        _, height, width = interface.observation_spec["image"].shape
        return height, width
    if interface.input_cells is not None and len(interface.observation_spec) == 1:
        rows, columns = interface.input_cells.max(axis=0) + 1
        return int(rows), int(columns)
    return None


def apply_to_image(interventions: Sequence[Intervention], image: np.ndarray) -> np.ndarray:
    """Apply the interventions that edit the observation to an image [C,H,W], in order, and return the new image."""
    for one in interventions:
        if not one.changes_observation:
            continue
        assert one.rectangle is not None
        if one.kind == "erase":
            image = image_edits.erase(image, one.rectangle)
        elif one.kind == "blur":
            image = image_edits.blur(image, one.rectangle)
        else:
            assert one.to is not None
            edit = image_edits.move if one.kind == "move" else image_edits.copy
            image = edit(image, one.rectangle, *one.to)
    return image


def apply_to_inputs(interventions: Sequence[Intervention], inputs: Inputs, interface: EnvInterface) -> Inputs:
    """Return new inputs [1,1,...] with the edits of the observation. Interventions of other kinds are ignored.

    In a vector observation, the entries inside the rectangle are set to 0.
    """
    if not any(one.changes_observation for one in interventions):
        return inputs
    if "image" in inputs.observation:
        image = inputs.observation["image"][0, 0].numpy()
        return with_observation(inputs, "image", apply_to_image(interventions, image))
    ((kind, vector),) = inputs.observation.items()
    assert interface.input_cells is not None
    edited = vector[0, 0].numpy().copy()
    for one in interventions:
        if one.changes_observation:
            assert one.rectangle is not None
            edited[_entries_inside(interface.input_cells, one.rectangle)] = 0
    return with_observation(inputs, kind, edited)


def _entries_inside(input_cells: np.ndarray, rectangle: Rectangle) -> np.ndarray:
    """Return a bool [D]: True for entries of a vector observation that describe a cell inside the rectangle."""
    row, column = input_cells.T
    in_rows = (row >= rectangle.y) & (row < rectangle.y + rectangle.height)
    return in_rows & (column >= rectangle.x) & (column < rectangle.x + rectangle.width)


def with_observation(inputs: Inputs, kind: str, array: np.ndarray) -> Inputs:
    """Return the inputs [1,1,...] with the observation `kind` replaced by an array without the first two axes."""
    observation = {**inputs.observation, kind: torch.from_numpy(np.ascontiguousarray(array))[None, None]}
    return replace(inputs, observation=observation)


# --- effect on policy and value ---


@dataclass(frozen=True)
class Effect:
    """How an intervention changes the output of an agent at one step."""

    logits_before: np.ndarray  # [A]
    logits_after: np.ndarray  # [A]
    value_before: float  # in units of the reward
    value_after: float

    @property
    def before(self) -> np.ndarray:
        """Probabilities of the actions before the intervention, [A]."""
        return _softmax(self.logits_before)

    @property
    def after(self) -> np.ndarray:
        """Probabilities of the actions after the intervention, [A]."""
        return _softmax(self.logits_after)

    @property
    def kl(self) -> float:
        """KL divergence KL(before || after) of the policies, in nats."""
        log_before, log_after = _log_softmax(self.logits_before), _log_softmax(self.logits_after)
        return max(0.0, float((np.exp(log_before) * (log_before - log_after)).sum()))

    @property
    def policy_score(self) -> float:
        """Half the squared change of the logits: the unit of the policy's saliency."""
        return 0.5 * float(np.square(self.logits_after - self.logits_before).sum())

    @property
    def value_change(self) -> float:
        """Value after minus value before."""
        return self.value_after - self.value_before

    @property
    def value_score(self) -> float:
        """Half the squared change of the value: the unit of the value's saliency."""
        return 0.5 * self.value_change**2

    def probability_change(self, action: int) -> float:
        """Return the probability of an action after minus before the intervention."""
        return float(self.after[action] - self.before[action])


def effect_between(before: Output, after: Output) -> Effect:
    """Return the effect of an intervention, given the outputs [1,1] without and with it."""
    return Effect(
        before.distribution.logits[0, 0].double().numpy(),
        after.distribution.logits[0, 0].double().numpy(),
        float(before.value[0, 0]),
        float(after.value[0, 0]),
    )


@torch.no_grad()
def measure_effect(agent: Agent, inputs: Inputs, changed: Inputs, state: State) -> Effect:
    """Run the agent on inputs [1,1,...] and on changed inputs with the same recurrent state, and return the effect."""
    return effect_between(agent(inputs, state)[0], agent(changed, state)[0])


@torch.no_grad()
def measure_effects(agent: Agent, inputs: Inputs, changed: Sequence[Inputs], state: State) -> list[Effect]:
    """Measure the effects of K changes of the same inputs in one call of the agent. See `measure_effect`."""
    everything = [inputs, *changed]
    count = len(everything)
    observation = {kind: torch.cat([one.observation[kind] for one in everything], dim=1) for kind in inputs.observation}
    rest = (getattr(inputs, name).expand(1, count) for name in ("reward", "done", "last_action", "task"))
    states = tuple(s.expand(count, *s.shape[1:]).contiguous() for s in state)
    output, _ = agent(Inputs(observation, *rest), states)
    logits, values = output.distribution.logits[0].double().numpy(), output.value[0].numpy()
    return [Effect(logits[0], logits[k], float(values[0]), float(values[k])) for k in range(1, count)]


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max()
    return shifted - np.log(np.exp(shifted).sum())


def _softmax(logits: np.ndarray) -> np.ndarray:
    return np.exp(_log_softmax(logits))
