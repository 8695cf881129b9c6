"""check_env with vector environments: built-in ones pass, and each kind of mistake gets its own line."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from bestiary.envs.toy import TOY_GAMES
from bestiary.envs.vector_env import VectorEnv, initial_step
from bestiary.rollout import ActionSpec, Arrays, ArraySpec, Step
from bestiary.testing import check_env
from tests.testing.helpers import assert_one_problem, find_problems


@pytest.mark.parametrize("game", TOY_GAMES)
def test_toy_environments_pass(game: str) -> None:
    check_env(f"toy/{game}")


def test_environments_with_options_pass() -> None:
    check_env("toy/catch", size=6, time_limit=3)
    check_env("gymnasium/CartPole-v1")


class Line(VectorEnv):
    """A correct vector environment: N walks on a line, with a time limit. Each row has its own generator."""

    saveable = True
    has_lives = False

    def __init__(self, num_envs: int, seed: Any, *, size: int = 6, time_limit: int = 7, render: bool = False):
        sequence = seed if isinstance(seed, np.random.SeedSequence) else np.random.SeedSequence(seed)
        self.generators = [np.random.default_rng(child) for child in sequence.spawn(num_envs)]
        self.num_envs = num_envs
        self.size = size
        self.time_limit = time_limit
        self.observation_spec = {"vector": ArraySpec((size + 1,), "float32")}
        self.action_spec = ActionSpec(("left", "right"))
        self.measures_spec = {"cell": ArraySpec((), "float32")}
        self.tasks = ("line",)
        self.cell = np.zeros(num_envs, np.int64)
        self.clock = np.zeros(num_envs, np.int64)

    def start(self, rows: np.ndarray) -> None:
        self.cell = self.cell.copy()
        for row in np.flatnonzero(rows):
            self.cell[row] = self.generators[row].integers(2, self.size - 1)
        self.clock = np.where(rows, 0, self.clock)

    def observe(self) -> Arrays:
        return {"vector": np.eye(self.size + 1, dtype=np.float32)[self.cell]}

    def reset(self) -> Any:
        self.start(np.ones(self.num_envs, bool))
        return initial_step(self.observe(), {"cell": self.cell.astype(np.float32)})

    def send(self, actions: np.ndarray) -> None:
        self.sent = actions.copy()

    def recv(self) -> Any:
        self.cell = self.cell + 2 * self.sent - 1
        self.clock = self.clock + 1
        terminated = (self.cell == 0) | (self.cell == self.size)
        truncated = ~terminated & (self.clock == self.time_limit)
        reward = (self.cell == self.size).astype(np.float32)
        last = self.observe()
        final = {"vector": last["vector"][truncated]} if truncated.any() else {}
        done = terminated | truncated
        self.start(done)
        task = np.zeros(self.num_envs, np.int64)
        measures = {"cell": self.cell.astype(np.float32)}
        return Step(self.observe(), reward, done, truncated, done.copy(), task, measures, final)

    def save(self) -> Any:
        words = [list(_words(generator)) for generator in self.generators]
        return {"cell": self.cell.copy(), "clock": self.clock.copy(), "generators": np.array(words, np.uint64)}

    def load(self, state: Arrays) -> None:
        self.cell = state["cell"].copy()
        self.clock = state["clock"].copy()
        for generator, words in zip(self.generators, state["generators"], strict=True):
            _set_words(generator, words)

    def render(self) -> Any:
        return [np.full((3, self.size, 3), cell, np.uint8) for cell in self.cell]


def _words(generator: np.random.Generator) -> list[int]:
    state = generator.bit_generator.state
    low = (1 << 64) - 1
    numbers = state["state"]["state"], state["state"]["inc"]
    return [part for number in numbers for part in (number & low, number >> 64)] + [
        state["has_uint32"],
        state["uinteger"],
    ]


def _set_words(generator: np.random.Generator, words: np.ndarray) -> None:
    a, b, c, d, has_uint32, uinteger = map(int, words)
    numbers = {"state": a | b << 64, "inc": c | d << 64}
    generator.bit_generator.state = {
        "bit_generator": "PCG64",
        "state": numbers,
        "has_uint32": has_uint32,
        "uinteger": uinteger,
    }


def test_correct_vector_environment_passes() -> None:
    check_env(Line)
    check_env(Line, size=8, time_limit=3)


def changed(**fields: Callable[[Any, Step], Any]) -> type[Line]:
    """Return a class whose `recv` replaces fields of the step. A function gets the environment and the step."""

    class Changed(Line):
        def recv(self) -> Any:
            step = super().recv()
            return replace(step, **{name: function(self, step) for name, function in fields.items()})

    return Changed


def with_attributes(**attributes: Any) -> type[Line]:
    """Return a class whose constructor sets other attributes."""

    class WithAttributes(Line):
        def __init__(self, num_envs: int, seed: Any):
            super().__init__(num_envs, seed)
            for name, value in attributes.items():
                setattr(self, name, value)

    return WithAttributes


class NoMeasuresSpec(Line):
    def __init__(self, num_envs: int, seed: Any):
        super().__init__(num_envs, seed)
        del self.measures_spec


class NotDoneAtReset(Line):
    def reset(self) -> Any:
        step = super().reset()
        return replace(step, done=np.zeros(self.num_envs, bool))


class TupleAtReset(Line):
    def reset(self) -> Any:
        return super().reset().observation, {}


class UnseededVector(Line):
    def __init__(self, num_envs: int, seed: Any):
        super().__init__(num_envs, None)


class LegacySeed(Line):
    def __init__(self, num_envs: int, seed: Any):
        super().__init__(num_envs, seed)
        np.random.RandomState(seed)


class TerminalObservation(Line):
    """Returns the last observation of the old episode at `done`, like Gymnasium without autoreset in the same step."""

    def start(self, rows: np.ndarray) -> None:
        self.last = np.eye(self.size + 1, dtype=np.float32)[self.cell]
        super().start(rows)

    def recv(self) -> Any:
        step = super().recv()
        observation = np.where(step.done[:, None], self.last, step.observation["vector"])
        return replace(step, observation={"vector": observation})


class ReversedRows(Line):
    def send(self, actions: np.ndarray) -> None:
        super().send(actions[::-1])


class ChangesActions(Line):
    def send(self, actions: np.ndarray) -> None:
        super().send(actions)
        actions[:] = 0


class ForgetsGenerators(Line):
    def load(self, state: Arrays) -> None:
        self.cell, self.clock = state["cell"].copy(), state["clock"].copy()


class SavesViews(Line):
    def start(self, rows: np.ndarray) -> None:
        super().start(rows)
        self.total = getattr(self, "total", np.zeros(self.num_envs))
        self.total += 1

    def save(self) -> Any:
        return {**super().save(), "total": self.total}


class SavesObjects(Line):
    def save(self) -> Any:
        return {"cell": self.cell.tolist()}


class MovesInSave(Line):
    def save(self) -> Any:
        state = super().save()
        self.start(np.ones(self.num_envs, bool))
        return state


class OneImage(Line):
    def render(self) -> Any:
        return super().render()[0]


class FloatImages(Line):
    def render(self) -> Any:
        return [image / 255 for image in super().render()]


class FailsInRecv(Line):
    def recv(self) -> Any:
        raise IndexError("row 9")


class FailsInClose(Line):
    def close(self) -> None:
        raise OSError("still in use")


WRONG_VECTOR_ENVS: dict[str, tuple[type, tuple[str, ...]]] = {
    "num_envs": (with_attributes(num_envs=5), ("num_envs is 5", "num_envs=1")),
    "tasks": (with_attributes(tasks="line"), ("tasks is 'line'", "tuple")),
    "action_spec": (with_attributes(action_spec=2), ("action_spec is 2", "ActionSpec")),
    "observation_spec": (with_attributes(observation_spec={"vector": (7,)}), ("observation_spec is", "ArraySpec")),
    "dtype": (
        with_attributes(observation_spec={"vector": ArraySpec((7,), "float64")}),
        ("dtype 'float64'", "'uint8' or 'float32'"),
    ),
    "image": (
        with_attributes(observation_spec={"image": ArraySpec((4, 4), "uint8")}),
        ("observation_spec['image'] is uint8[4, 4]", "[C,H,W]"),
    ),
    "measures_spec": (NoMeasuresSpec, ("attribute measures_spec is missing",)),
    "reset without done": (NotDoneAtReset, ("reset: done is [False]", "True in all rows")),
    "reset returns a tuple": (TupleAtReset, ("reset returned an object of type tuple", "Step")),
    "reward dtype": (
        changed(reward=lambda env, step: step.reward.astype(np.float64)),
        ("recv: reward is float64[1]", "float32[1]"),
    ),
    "observation shape": (
        changed(observation=lambda env, step: {"vector": step.observation["vector"][:, :-1]}),
        ("recv: observation['vector'] is float32[1, 6]", "float32[1, 7]"),
    ),
    "observation names": (
        changed(observation=lambda env, step: {"state": step.observation["vector"]}),
        ("the keys ['state']", "['vector']"),
    ),
    "measures": (changed(measures=lambda env, step: {}), ("recv: measures has the keys []", "['cell']")),
    "task": (changed(task=lambda env, step: step.task + 1), ("task contains the indices 1 to 1", "0 to 0")),
    "not finite": (changed(reward=lambda env, step: step.reward + np.float32(np.inf)), ("reward that is not finite",)),
    "truncated without done": (
        changed(
            done=lambda env, step: step.done & ~step.truncated, game_over=lambda env, step: step.done & ~step.truncated
        ),
        ("truncated is set without done",),
    ),
    "game_over without done": (
        changed(game_over=lambda env, step: np.ones(env.num_envs, bool)),
        ("game_over is set without done in row 0",),
    ),
    "done without game_over": (
        changed(game_over=lambda env, step: step.done & False),
        ("has_lives is False", "done without game_over"),
    ),
    "missing final": (
        changed(final=lambda env, step: {}),
        ("final is empty, but truncated is set in", "expected vector"),
    ),
    "final of all rows": (
        changed(final=lambda env, step: step.observation),
        ("recv: final['vector'] is float32[", "one row per truncated environment"),
    ),
    "final of the next episode": (
        changed(final=lambda env, step: {"vector": step.observation["vector"][step.truncated]}),
        ("final equals observation in all", "last observation of the old episode"),
    ),
    "terminal observation": (TerminalObservation, ("none of the", "first observation of the next episode")),
    "save changes the environment": (MovesInSave, ("after save; save must not change the environment",)),
    "unseeded": (UnseededVector, ("with equal seeds", " differ: ", " of row ", "argument seed")),
    "SeedSequence": (LegacySeed, ("seed=np.random.SeedSequence(1)", "failed", f"{__file__}, line ")),
    "row order": (ReversedRows, ("only the action of row 0 was changed", "of row 3", "environment i")),
    "changed actions": (ChangesActions, ("send changes the array of actions",)),
    "load": (ForgetsGenerators, ("load does not restore the saved state", "random generators")),
    "views": (SavesViews, ("save: the array 'total' changes in later steps", "copies")),
    "objects": (SavesObjects, ("the entry 'cell' is", "save must return a dict of NumPy arrays")),
    "one image": (OneImage, ("render returned a ndarray", "list of 4 images")),
    "float images": (FloatImages, ("image float64[3, 6, 3]", "uint8 [H,W,3]")),
    "close": (FailsInClose, ("close failed: OSError: still in use", f"{__file__}, line ")),
    "exception": (FailsInRecv, ("recv failed: IndexError: row 9", f"{__file__}, line ")),
}


@pytest.mark.parametrize("mistake", WRONG_VECTOR_ENVS)
def test_each_mistake_in_a_vector_environment_has_its_line(mistake: str) -> None:
    env, facts = WRONG_VECTOR_ENVS[mistake]
    assert_one_problem(find_problems(check_env, env), f"{env.__name__}: ", *facts)


class Stacked(Line):
    """Two stacked frames, newest last. The observation is an image whose brightness is the cell."""

    frame_stacks = {"image": 2}
    saveable = False
    repeats_first = True

    def __init__(self, num_envs: int, seed: Any):
        super().__init__(num_envs, seed)
        self.observation_spec = {"image": ArraySpec((2, 3, 3), "uint8")}

    def reset(self) -> Any:
        step = super().reset()
        self.frames = np.stack([self.cell, self.cell], axis=1)
        return replace(step, observation=self.images(self.frames))

    def images(self, frames: np.ndarray) -> Arrays:
        return {"image": np.broadcast_to(frames[:, :, None, None], (len(frames), 2, 3, 3)).astype(np.uint8)}

    def recv(self) -> Any:
        before = self.frames
        step = super().recv()
        self.frames = np.stack([before[:, 1], self.cell], axis=1)
        if self.repeats_first:
            self.frames[step.done] = self.cell[step.done, None]
        final = self.images(before[step.truncated]) if step.truncated.any() else {}
        return replace(step, observation=self.images(self.frames), final=final)


class DoesNotRepeatFirst(Stacked):
    repeats_first = False


def test_guarantee_of_frame_stacks_is_checked() -> None:
    check_env(Stacked)
    assert_one_problem(find_problems(check_env, DoesNotRepeatFirst), "frame_stacks declares 2 frames in 'image'")
