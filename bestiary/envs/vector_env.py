"""The interface of vector environments: N environments that step together. A variable `pool` is a vector environment.

All environment families implement this interface, and all callers run the same loop:

    step = pool.reset()                  # `done` is set in all rows: each environment starts its first episode
    while True:
        pool.send(actions)               # int64 [N]; starts the step and usually returns before it has finished
        step = pool.recv()               # waits for the step; row i of each array is always environment i

A vector environment itself starts the next episode when an episode ends. If `step.done[i]` is set, the observation of
row i is already the first observation of the next episode. If a time limit ended the episode, `step.truncated[i]` is
set and `step.final` contains the last observation of the old episode. Steps that the agent did not choose (resets, FIRE
presses) are never returned.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np

from bestiary.envs.labelled_quantities import Label
from bestiary.envs.rewards.components import SCALAR, RewardComponent
from bestiary.step import ActionSpec, Arrays, ArraySpec, ObservationSpec, Step
from bestiary.utils.errors import UserError


@dataclass(frozen=True)
class EnvInterface:
    """The properties of a vector environment that follow from its name and options.

    The interface of a built-in environment can be computed without creating the environment (`EnvSpec.interface`).
    """

    tasks: tuple[str, ...]  # names of the tasks; `Step.task` contains indices into this tuple
    observation_spec: ObservationSpec
    action_spec: ActionSpec
    # Shape and type of each measure. A measure is a number or array that the environment reports at every step in
    # addition to the reward (`Step.measures`).
    measures_spec: Mapping[str, ArraySpec] = field(default_factory=dict)
    components: Mapping[str, RewardComponent] = field(default_factory=dict)  # reward components; see enable_components
    labels: Mapping[str, Label] = field(default_factory=dict)  # labelled quantities of the state; see read_labels
    frames_per_step: int = 1  # emulator frames per step
    saveable: bool = False  # True if `load` restores exactly the state that `save` returned
    has_lives: bool = True  # False if each game has only one life
    max_game_steps: int = 0  # maximum length of a game in steps; 0: unknown or unlimited
    # Name of an image observation -> number of frames that are stacked in it. The cluster runtime sends each frame of
    # such an observation only once. The environment must therefore guarantee two things: (1) each image is the previous
    # image without its oldest frame, plus one new frame; (2) the first image of an episode repeats one frame (see
    # `FrameStack`).
    frame_stacks: Mapping[str, int] = field(default_factory=dict)
    observes_whole_screen: bool = False  # True if the rendered image and the observation show the same area
    # int64 [D,2]: row and column of the grid cell that belongs to each of the D entries of the observation. None if the
    # entries do not belong to cells of a grid.
    input_cells: np.ndarray | None = None
    # Only for Gymnasium environments: the observation space, before observations are converted to images and vectors.
    gymnasium_space: Any = None


class VectorEnv:
    """Base class of vector environments.

    A subclass must define the methods `reset`, `send` and `recv` and all attributes that have no default here. The
    other attributes and methods are optional. A user's class need not be a subclass: if it has these three methods,
    `make_env` adds the defaults of this class.
    """

    num_envs: int
    # The following attributes are explained in EnvInterface. A user's class may set them directly; the built-in classes
    # call `set_interface`.
    tasks: tuple[str, ...]
    observation_spec: ObservationSpec
    action_spec: ActionSpec
    measures_spec: Mapping[str, ArraySpec]
    components: Mapping[str, RewardComponent] = MappingProxyType({})
    labels: Mapping[str, Label] = MappingProxyType({})
    frames_per_step: int = 1
    saveable: bool = False
    has_lives: bool = True
    max_game_steps: int = 0
    frame_stacks: Mapping[str, int] = MappingProxyType({})
    observes_whole_screen: bool = False
    input_cells: np.ndarray | None = None
    gymnasium_space: Any = None

    default_steps: ClassVar[int] = 500_000  # number of training steps if --steps is not given
    # Defaults of training and algorithm options that suit this environment (see EnvSpec.defaults).
    defaults: ClassVar[Mapping[str, Mapping[str, Any]]] = MappingProxyType({})
    # Further defaults, of the same form, that are used only if all observations are vectors.
    vector_defaults: ClassVar[Mapping[str, Mapping[str, Any]]] = MappingProxyType({})
    # True if each episode is one of many levels. The class then has the attributes and methods `level`,
    # `set_level_quota`, `in_quota` and `quota_left` of `ProcgenVectorEnv`.
    has_levels: ClassVar[bool] = False
    components_enabled: bool = False  # True after `enable_components`: `Step.measures` contains all reward components

    @property
    def interface(self) -> EnvInterface:
        """The interface of this vector environment."""
        return EnvInterface(**{f.name: getattr(self, f.name) for f in fields(EnvInterface)})

    def set_interface(self, interface: EnvInterface) -> None:
        """Copy all attributes of an interface to this vector environment."""
        for f in fields(EnvInterface):
            setattr(self, f.name, getattr(interface, f.name))

    def enable_components(self) -> None:
        """From the next reset on, compute all `components` in each step and return them in `Step.measures`.

        Some components are expensive to compute. They are therefore computed only if a `RewardWrapper` needs them.
        """
        self.components_enabled = True
        computed = {name: SCALAR for name in self.components if name != "reward"}
        self.measures_spec = {**self.measures_spec, **computed}

    def reset(self) -> Step:
        """Start a new episode in all environments and return their first observations."""
        raise NotImplementedError

    def send(self, actions: np.ndarray) -> None:
        """Start a step. `actions` has one action per environment, int64 [N]."""
        raise NotImplementedError

    def recv(self) -> Step:
        """Wait for the step started by `send`, and return the step."""
        raise NotImplementedError

    def render(self) -> list[np.ndarray]:
        """Return one RGB image uint8 [H,W,3] per environment. The environments must be made with `render=True`."""
        raise UserError(f"{self.tasks[0]} cannot be rendered: its class has no render method")

    def read_labels(self) -> Arrays:
        """Return the values of all `labels` in the current state, float32 [N] by name.

        Call this method after `reset` or `recv` and before the next `send`.
        """
        return {}

    def set_labels(self, values: Mapping[str, float]) -> Arrays:
        """Change labelled quantities of the current state in all environments.

        Return the observations of the changed state [N,...] by name.
        """
        raise UserError(f"{self.tasks[0]} has no labelled quantities that can be set")

    def save(self) -> Arrays:
        """Return the complete state as arrays, or an empty dict if `saveable` is False.

        Call this method after `recv` and before the next `send`.
        """
        return {}

    def load(self, state: Arrays) -> None:
        """Restore a saved state. Call this method instead of `reset`.

        The environment must have been made with the same name, options and seed as the saved environment.
        """
        raise NotImplementedError(f"the state of {self.tasks[0]} cannot be restored")

    def close(self) -> None:
        """Free the resources of the environments."""

    @property
    def unwrapped(self) -> Any:
        """The vector environment inside all wrappers, or this object itself if it is not a wrapper."""
        return self


class VectorEnvWrapper(VectorEnv):
    """Base class of wrappers. It forwards all methods and attributes to the wrapped vector environment `pool`.

    Additional attributes of `pool`, which the class `VectorEnv` does not have, are also forwarded.
    """

    def __init__(self, pool: VectorEnv):
        self.pool = pool
        self.num_envs = pool.num_envs
        self.set_interface(pool.interface)

    def __getattr__(self, name: str) -> Any:
        if name == "pool":  # `pool` is not set yet; without this check, the last line would recurse for ever
            raise AttributeError(name)
        return getattr(self.pool, name)

    def enable_components(self) -> None:
        self.pool.enable_components()
        self.components_enabled = True
        self.measures_spec = self.pool.measures_spec

    def reset(self) -> Step:
        return self.pool.reset()

    def send(self, actions: np.ndarray) -> None:
        self.pool.send(actions)

    def recv(self) -> Step:
        return self.pool.recv()

    def render(self) -> list[np.ndarray]:
        return self.pool.render()

    def read_labels(self) -> Arrays:
        return self.pool.read_labels()

    def set_labels(self, values: Mapping[str, float]) -> Arrays:
        return self.pool.set_labels(values)

    def save(self) -> Arrays:
        return self.pool.save()

    def load(self, state: Arrays) -> None:
        self.pool.load(state)

    def close(self) -> None:
        self.pool.close()

    @property
    def unwrapped(self) -> Any:
        return self.pool.unwrapped


def initial_step(observation: Arrays, measures: Arrays) -> Step:
    """Return the Step that the method `reset` must return: in all rows, `done` is True and the reward is zero."""
    n = len(next(iter(observation.values())))
    return Step(
        observation=observation,
        reward=np.zeros(n, np.float32),
        done=np.ones(n, bool),
        truncated=np.zeros(n, bool),
        game_over=np.zeros(n, bool),
        task=np.zeros(n, np.int64),
        measures=measures,
    )


def spawn_seeds(seed: int | np.random.SeedSequence, count: int) -> list[int]:
    """Return one independent 31-bit seed for each of `count` environments."""
    sequence = seed if isinstance(seed, np.random.SeedSequence) else np.random.SeedSequence(seed)
    return [int(child.generate_state(1)[0] >> 1) for child in sequence.spawn(count)]


def check_actions(actions: np.ndarray, spec: ActionSpec, num_envs: int) -> np.ndarray:
    """Return the actions unchanged. Raise ValueError if they are not `num_envs` integers from 0 to `spec.n` - 1.

    Without this check, EnvPool would accept invalid actions silently.
    """
    is_valid_type = actions.dtype.kind in "iu" and actions.shape == (num_envs,)
    if not is_valid_type or actions.min(initial=0) < 0 or actions.max(initial=0) >= spec.n:
        raise ValueError(f"actions must be {num_envs} integers in 0..{spec.n - 1}, got {actions!r}")
    return actions


def check_saved_arrays(found: Arrays, expected: Arrays, ranges: Mapping[str, tuple[int, int]] | None = None) -> None:
    """Raise ValueError if `found` does not have the names, shapes and types of `expected`, or a value is out of range.

    `ranges` maps the name of an array to the smallest and the largest allowed value. Compiled code uses some of these
    values as indices without a check. With an index from a damaged checkpoint, this code would write outside of its
    arrays.
    """
    for name, array in expected.items():
        if name not in found:
            raise ValueError(f"the array {name} is missing")
        if found[name].shape != array.shape or found[name].dtype != array.dtype:
            raise ValueError(f"{name} is {found[name].dtype} {found[name].shape}; expected {array.dtype} {array.shape}")
    for name, (low, high) in (ranges or {}).items():
        if found[name].size and not (low <= found[name].min() and found[name].max() <= high):
            raise ValueError(f"the values of {name} must be in {low}..{high}")


def action_index(action: str, pool: VectorEnv, user: object) -> int:
    """Return the index of the action with this name; raise UserError if the environment has no such action.

    `user` is the run or recording that needs the action. The error message starts with `str(user)`.
    """
    names = pool.action_spec.names
    if action not in names:
        raise UserError(f"{user}: {pool.tasks[0]} has no action {action}; its actions are {', '.join(names)}")
    return names.index(action)


def find_nonfinite(step: Step, names: Sequence[str]) -> str | None:
    """Return a message about the first reward or observation of a step that is not finite; None if all are finite.

    `names` are the names of the tasks.
    """
    all_rows = np.arange(len(step.reward))
    truncated_rows = np.flatnonzero(step.truncated)
    checked = [("a reward", step.reward, all_rows)]
    checked += [(f"an observation {kind}", array, all_rows) for kind, array in step.observation.items()]
    checked += [(f"a final observation {kind}", array, truncated_rows) for kind, array in step.final.items()]
    for what, array, rows in checked:
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            row = int(rows[np.argwhere(~np.isfinite(array))[0][0]])
            return f"environment {row} ({names[int(step.task[row])]}) returned {what} that is not finite"
    return None
