"""Check Gymnasium environments from users' files."""

import inspect
from typing import Any

import gymnasium
import numpy as np

from bestiary.envs.gymnasium_env import (
    check_spaces,
    interface_problem,
    reset_problem,
    step_problem,
)
from bestiary.testing.problem_report import Component, Report
from bestiary.utils.errors import UserError
from bestiary.utils.options import construct

NUM_STEPS = 300
SEED = 1


def check_gymnasium(found: Component) -> None:
    """Play a Gymnasium environment with random actions and report all problems."""
    report = found.report
    first, second = (make(found) for _ in range(2))
    report.require(*filter(None, [interface_problem(first)]))
    try:
        check_spaces(first, report.name)
    except UserError as error:
        report.require(*(problem.removeprefix(f"{report.name}: ") for problem in error.problems))
    report.run(
        lambda: play(report, first, second),
        lambda: check_render(found),
    )
    for env in (first, second):
        with report.errors_of("close"):
            env.close()


def make(found: Component, **rendering: Any) -> Any:
    """Construct and return an environment. `rendering` contains keyword arguments such as `render_mode`."""
    with found.report.errors_of("the constructor"):
        return construct(found.cls, options=found.options, **rendering)


def play(report: Report, first: Any, second: Any) -> None:
    """Play two environments with equal seeds and actions.

    Check the results of the first environment, and check that the second environment returns the same results.
    """
    rng = np.random.default_rng(0)
    actions = first.action_space
    seed: int | None = SEED
    where = "reset"
    results = [reset(report, env, seed) for env in (first, second)]
    ended = False
    for t in range(NUM_STEPS):
        check_observation(report, results[0][0], first.observation_space, where)
        if (what := first_difference(*results)) is not None:
            report.require(
                f"two environments with reset(seed={SEED}) and equal actions differ: {what} after {where}; draw random "
                "numbers only from self.np_random, which super().reset(seed=seed) seeds"
            )
        if ended:
            where = "reset"
            results = [reset(report, env, None) for env in (first, second)]
            ended = False
            continue
        action = int(actions.start + (t if t < actions.n else rng.integers(actions.n)))
        where = f"step {t + 1}"
        results = [step(report, env, action, where) for env in (first, second)]
        check_step(report, results[0], where)
        ended = bool(results[0][2] or results[0][3])


def reset(report: Report, env: Any, seed: int | None) -> tuple[Any, ...]:
    """Call `reset` of an environment and return the result. Report a problem if the result has the wrong form."""
    with report.errors_of(f"reset(seed={seed})"):
        result = env.reset(seed=seed)
    report.require(*filter(None, [reset_problem(result)]))
    return result


def step(report: Report, env: Any, action: int, where: str) -> tuple[Any, ...]:
    """Call `step` of an environment and return the result. Report a problem if the result has the wrong form."""
    with report.errors_of(f"{where} with action {action}"):
        result = env.step(action)
    report.require(*filter(None, [step_problem(result)]))
    return result


def check_step(report: Report, result: tuple[Any, ...], where: str) -> None:
    """Check the reward, `terminated` and `truncated` that a step returned."""
    _, reward, terminated, truncated, _ = result
    if np.ndim(reward) or not isinstance(reward, int | float | np.number):
        report.require(f"the reward of {where} is {reward!r} of type {type(reward).__name__}; expected one number")
    if not np.isfinite(reward):
        report.require(f"the reward of {where} is {reward}; rewards must be finite")
    for name, value in (("terminated", terminated), ("truncated", truncated)):
        if not isinstance(value, bool | np.bool_):
            report.require(f"{name} of {where} is {value!r} of type {type(value).__name__}; expected a bool")


def check_observation(report: Report, observation: Any, space: Any, where: str, name: str = "observation") -> None:
    """Check shape, type and range of an observation. Check the parts of a tuple or dict one by one.

    Args:
        report: collects the problems.
        observation: observation of the environment.
        space: Gymnasium space of the observation.
        where: text for messages that says when the observation was returned, for example "step 3".
        name: text for messages that names the observation or its part, for example "observation['image']".
    """
    if isinstance(space, gymnasium.spaces.Tuple):
        if not isinstance(observation, tuple) or len(observation) != len(space.spaces):
            report.require(f"{name} after {where} is a {type(observation).__name__}; expected a tuple like the space")
        for index, (item, inner) in enumerate(zip(observation, space.spaces, strict=True)):
            check_observation(report, item, inner, where, f"{name}[{index}]")
        return
    if isinstance(space, gymnasium.spaces.Dict):
        if not isinstance(observation, dict) or observation.keys() != space.spaces.keys():
            found = f"the keys {sorted(observation)}" if isinstance(observation, dict) else type(observation).__name__
            report.require(f"{name} after {where} has {found}; expected a dict with the keys {sorted(space.spaces)}")
        for key, inner in space.spaces.items():
            check_observation(report, observation[key], inner, where, f"{name}[{key!r}]")
        return
    array = np.asarray(observation)
    if array.shape != space.shape or not np.can_cast(array.dtype, space.dtype, "same_kind"):
        report.require(
            f"{name} after {where} is {array.dtype}{list(array.shape)}; its space is {space.dtype}{list(space.shape)}"
        )
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        report.require(f"{name} after {where} is not finite: {array.ravel()[~np.isfinite(array.ravel())][0]}")
    if isinstance(space, gymnasium.spaces.Box):
        outside = (array < space.low) | (array > space.high)
        if outside.any():
            value, low, high = (x[outside].flat[0] for x in (array, space.low, space.high))
            report.require(f"{name} after {where} has the value {value}; its space has the range [{low}, {high}] there")
    elif not space.contains(array.astype(space.dtype)[()]):
        report.require(f"{name} after {where} is {observation!r}; its space is {space}")


def first_difference(first: tuple[Any, ...], second: tuple[Any, ...]) -> str | None:
    """Compare two results of `reset` or `step`. Describe the first element that differs, or return None.

    The dict `info` is not compared.
    """
    names = ("observation", "reward", "terminated", "truncated") if len(first) == 5 else ("observation",)
    for name, a, b in zip(names, first, second, strict=False):
        if not _equal(a, b):
            return f"{name} {_short(a)} and {_short(b)}" if np.size(a) == 1 and not isinstance(a, dict) else name
    return None


def _equal(a: Any, b: Any) -> bool:
    """Return whether two observations are equal. NaN equals NaN. Dicts and tuples may be nested."""
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(_equal(a[key], b[key]) for key in a)
    if isinstance(a, tuple):
        return isinstance(b, tuple) and len(a) == len(b) and all(map(_equal, a, b))
    return np.array_equal(a, b, equal_nan=np.asarray(a).dtype.kind == "f")


def _short(value: Any) -> str:
    return f"{np.asarray(value).item():.6g}" if np.asarray(value).dtype.kind == "f" else str(value)


def check_render(found: Component) -> None:
    """Check the image that `render` returns, if the constructor has a parameter `render_mode`."""
    report = found.report
    if "render_mode" not in inspect.signature(found.cls).parameters:
        return
    env = make(found, render_mode="rgb_array")
    reset(report, env, SEED)
    with report.errors_of("render with render_mode='rgb_array'"):
        image = env.render()
        env.close()
    if not isinstance(image, np.ndarray) or image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3:
        shape = f"{image.dtype}{list(image.shape)}" if isinstance(image, np.ndarray) else type(image).__name__
        report.require(f"render with render_mode='rgb_array' returned {shape}; expected an array uint8 [H,W,3]")
