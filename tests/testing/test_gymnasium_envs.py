"""check_env with Gymnasium environments: a correct one passes, and each kind of mistake gets its own line."""

from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete

from bestiary.testing import check_env
from tests.testing.helpers import assert_one_problem, find_problems


class Walk(gymnasium.Env):
    """A correct environment: a random walk to one of two ends. The tests below break it in one place each."""

    def __init__(self, render_mode: str | None = None, *, size: int = 5):
        self.render_mode = render_mode
        self.size = size
        self.observation_space: Any = Box(0, size, (2,), np.float32)
        self.action_space: Any = Discrete(2)

    def observe(self) -> Any:
        return np.array([self.cell, self.size], np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.cell = int(self.np_random.integers(1, self.size))
        self.count = 0
        return self.observe(), {}

    def step(self, action: int) -> Any:
        self.cell += 2 * int(action) - 1
        self.count += 1
        return self.observe(), float(action), self.cell in (0, self.size), self.count == 6, {}

    def render(self) -> Any:
        return np.full((2, self.size, 3), self.cell, np.uint8)


def test_correct_gymnasium_environment_passes() -> None:
    check_env(Walk)
    check_env(Walk, size=7)


class OldReset(Walk):
    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        return super().reset(seed=seed)[0]


class OldStep(Walk):
    def step(self, action: int) -> Any:
        observation, reward, terminated, _, info = super().step(action)
        return observation, reward, terminated, info


class NoSeed(Walk):
    def reset(self) -> Any:  # type: ignore[override]
        return super().reset()


class Unseeded(Walk):
    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.cell = int(np.random.default_rng().integers(1, 1000)) % (self.size - 1) + 1
        return np.array([self.cell, np.random.default_rng().random()], np.float32), {}


class ContinuousActions(Walk):
    def __init__(self) -> None:
        super().__init__()
        self.action_space = Box(-1, 1, (1,))


class NoSpace(Walk):
    def __init__(self) -> None:
        super().__init__()
        self.observation_space = None


class MatrixObservations(Walk):
    def __init__(self) -> None:
        super().__init__()
        self.observation_space = Box(0, 1, (2, 3), np.float32)


class WrongShape(Walk):
    def observe(self) -> Any:
        return np.zeros(3, np.float32)


class WrongType(Walk):
    def observe(self) -> Any:
        return np.array(["a", "b"])


class OutOfRange(Walk):
    def observe(self) -> Any:
        return np.array([self.cell, -2.5], np.float32)


class NotFinite(Walk):
    def observe(self) -> Any:
        return np.array([self.cell, np.nan], np.float32)


class BeyondDiscrete(Walk):
    def __init__(self) -> None:
        super().__init__()
        self.observation_space = Discrete(3)

    def observe(self) -> Any:
        return 3


class WrongKeys(Walk):
    def __init__(self) -> None:
        super().__init__()
        self.observation_space = Dict({"position": Box(0, 5, (2,)), "speed": Box(0, 5, (2,))})

    def observe(self) -> Any:
        return {"position": super().observe()}


class InfiniteReward(Walk):
    def step(self, action: int) -> Any:
        observation, _, terminated, truncated, info = super().step(action)
        return observation, float("inf"), terminated, truncated, info


class ArrayReward(Walk):
    def step(self, action: int) -> Any:
        observation, reward, terminated, truncated, info = super().step(action)
        return observation, np.array([reward]), terminated, truncated, info


class TextTruncated(Walk):
    def step(self, action: int) -> Any:
        observation, reward, terminated, _, info = super().step(action)
        return observation, reward, terminated, "no", info


class NoInfo(Walk):
    def step(self, action: int) -> Any:
        return (*super().step(action)[:4], None)


class FailsLater(Walk):
    def step(self, action: int) -> Any:
        if self.count == 3:
            raise ZeroDivisionError("simulation failed")
        return super().step(action)


class GreyImages(Walk):
    def render(self) -> Any:
        return np.zeros((4, 4), np.uint8)


class NotAnEnv:
    def reset(self, seed: int | None = None) -> None: ...

    def step(self, action: int) -> None: ...


class PositionalOption(Walk):
    def __init__(self, size: int = 5):
        super().__init__(size=size)


class RequiredArgument(Walk):
    def __init__(self, size: int):
        super().__init__(size=size)


WRONG_GYMNASIUM: list[tuple[type, tuple[str, ...]]] = [
    (OldReset, ("reset returned one object of type ndarray", "(observation, info)", "old Gym")),
    (OldStep, ("step returned 4 values (ndarray, float, bool, dict)", "terminated, truncated", "old Gym")),
    (NoSeed, ("reset does not accept a seed", "super().reset(seed=seed)")),
    (Unseeded, ("reset(seed=1)", "observation after reset", "self.np_random")),
    (ContinuousActions, ("action space Box", "not supported", "Discrete")),
    (NoSpace, ("observation_space is None",)),
    (MatrixObservations, ("observation space Box", "not supported")),
    (WrongShape, ("observation after reset is float32[3]", "float32[2]")),
    (WrongType, ("observation after reset is <U1[2]", "float32[2]")),
    (OutOfRange, ("observation after reset has the value -2.5", "[0.0, 5.0]")),
    (NotFinite, ("observation after reset is not finite: nan",)),
    (BeyondDiscrete, ("observation after reset is 3", "Discrete(3)")),
    (WrongKeys, ("the keys ['position']", "['position', 'speed']")),
    (InfiniteReward, ("the reward of step 1 is inf", "finite")),
    (ArrayReward, ("step returned reward", "shape [1]", "a number")),
    (TextTruncated, ("step returned truncated", "str", "True or False")),
    (NoInfo, ("step returned 5 values (ndarray, float, bool, bool, NoneType)", "dict")),
    (FailsLater, ("ZeroDivisionError: simulation failed", f"{__file__}, line ")),
    (GreyImages, ("render", "uint8[4, 4]", "uint8 [H,W,3]")),
    (NotAnEnv, ("NotAnEnv is not a subclass of gymnasium.Env",)),
    (PositionalOption, ("argument size of the constructor", "keyword-only arguments with a default", "*, size=")),
    (RequiredArgument, ("missing a required argument: 'size'", "keyword-only arguments with a default", "*, size=")),
]


@pytest.mark.parametrize(("env", "facts"), WRONG_GYMNASIUM, ids=[env.__name__ for env, _ in WRONG_GYMNASIUM])
def test_each_mistake_in_a_gymnasium_environment_has_its_line(env: type, facts: tuple[str, ...]) -> None:
    assert_one_problem(find_problems(check_env, env), f"{env.__name__}: ", *facts)


def test_several_problems_of_a_gymnasium_environment_are_reported_together() -> None:
    class Several(GreyImages, InfiniteReward):
        pass

    assert len(find_problems(check_env, Several)) == 2
