"""Checks of vector environments against the interface in `vector_env.py`: attributes, and shapes and types of steps.

Functions whose names end in `_problems` return a list of messages. Before training, `check_first_steps` calls these
functions for the first steps of a user's environment. `bestiary.testing` calls them for many steps.
"""

import os
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from bestiary.envs.vector_env import VectorEnv, find_nonfinite
from bestiary.step import ActionSpec, ArraySpec, Step
from bestiary.utils import plugins
from bestiary.utils.errors import RunError, UserError

REQUIRED_ATTRIBUTES = ("num_envs", "observation_spec", "action_spec", "measures_spec", "tasks")
# The fields of a Step with one number per environment, and their types.
ROW_FIELDS = {
    "reward": "float32",
    "done": "bool",
    "truncated": "bool",
    "game_over": "bool",
    "task": "int64",
}
ROW_DTYPES = {name: np.dtype(dtype) for name, dtype in ROW_FIELDS.items()}


def check_first_steps(name: str, build: Callable[[np.random.SeedSequence], VectorEnv]) -> None:
    """Build a vector environment with two environments, reset it, step it once, save it, and check the results.

    With one environment, arrays with a wrong number of rows would not be found.

    Args:
        name: name of the environment in messages.
        build: function that builds the vector environment with two environments, given a seed.

    Raises:
        UserError: the environment fails, or violates the interface of vector environments.
    """
    stage = "its constructor, with a np.random.SeedSequence as seed"
    working_directory = Path.cwd()
    try:
        with closing(build(np.random.SeedSequence(0))) as pool:
            stage = "its first step"
            problems = interface_problems(pool, 2)
            if not problems:
                problems += step_problems(pool.reset(), pool, "reset")
            if not problems:
                pool.send(np.zeros(2, np.int64))
                problems += step_problems(pool.recv(), pool, "recv")
            if not problems and pool.saveable:
                stage = "save"
                problems += state_problems(pool.save())
    except (UserError, RunError) as error:
        raise UserError(str(error)) from error
    except (Exception, SystemExit) as error:
        cause = plugins.describe_error(error) or plugins.error_line(error)
        raise UserError(f"the environment failed in {stage}: {cause}") from error
    finally:
        os.chdir(working_directory)  # undo a change of directory by the environment
    if problems:
        raise UserError(*(f"{name}: {problem}" for problem in problems))


def interface_problems(pool: Any, num_envs: int) -> list[str]:
    """Return a message for each invalid attribute of a vector environment.

    `num_envs` is the expected number of environments.
    """
    missing = [name for name in REQUIRED_ATTRIBUTES if not hasattr(pool, name)]
    if missing:
        return [f"attribute {name} is missing; the constructor must set self.{name}" for name in missing]
    problems = []
    if pool.num_envs != num_envs:
        problems.append(f"num_envs is {pool.num_envs!r}; the constructor was called with num_envs={num_envs}")
    if not isinstance(pool.action_spec, ActionSpec) or not _is_tuple_of_text(pool.action_spec.names):
        problems.append(
            f"action_spec is {pool.action_spec!r}; expected bestiary.rollout.ActionSpec(names) with a tuple of names, "
            "for example ('left', 'right')"
        )
    if not _is_tuple_of_text(pool.tasks):
        problems.append(f"tasks is {pool.tasks!r}; expected a tuple with at least one name")
    inherited = [name for name in ("save", "load") if getattr(type(pool), name) is getattr(VectorEnv, name)]
    if pool.saveable and inherited:
        verb = "are" if len(inherited) > 1 else "is"
        problems.append(f"saveable is True, but {' and '.join(inherited)} {verb} missing")
    for attribute in ("observation_spec", "measures_spec"):
        problems += _spec_problems(attribute, getattr(pool, attribute))
    if not pool.observation_spec:
        problems.append("observation_spec is empty; expected at least one observation, for example image or vector")
    return problems


def _is_tuple_of_text(value: Any) -> bool:
    return isinstance(value, tuple) and bool(value) and all(isinstance(item, str) for item in value)


def _spec_problems(attribute: str, specs: Any) -> list[str]:
    expected = 'a dict of bestiary.rollout.ArraySpec, for example {"vector": ArraySpec((4,), "float32")}'
    if not isinstance(specs, dict) or not all(isinstance(spec, ArraySpec) for spec in specs.values()):
        return [f"{attribute} is {specs!r}; expected {expected}"]
    if attribute == "measures_spec":
        return []
    problems = []
    for kind, spec in specs.items():
        if spec.dtype not in ("uint8", "float32"):
            problems.append(f"{attribute}[{kind!r}] has the dtype {spec.dtype!r}; expected 'uint8' or 'float32'")
        if kind == "image" and (spec.dtype != "uint8" or len(spec.shape) != 3):
            problems.append(
                f"{attribute}['image'] is {spec.dtype}{list(spec.shape)}; an image is uint8 [C,H,W], channels first"
            )
    return problems


def step_problems(step: Any, pool: VectorEnv, method: str) -> list[str]:
    """Return a message for each problem of a Step returned by the `method` (reset or recv) of a vector environment."""
    if not isinstance(step, Step):
        return [f"{method} returned {_describe(step)}; it must return a bestiary.rollout.Step"]
    n = pool.num_envs
    problems = []
    for name, dtype in ROW_FIELDS.items():
        problems += _array_problems(f"{method}: {name}", getattr(step, name), (n,), dtype)
    problems += _dict_problems(f"{method}: observation", step.observation, pool.observation_spec, n)
    problems += _dict_problems(f"{method}: measures", step.measures, pool.measures_spec, n)
    if problems:
        return problems
    problems += final_problems(step, pool, method)
    for name in ("truncated", "game_over"):
        rows = np.flatnonzero(getattr(step, name) & ~step.done)
        if len(rows):
            problems.append(f"{method}: {name} is set without done in row {rows[0]}; set done, too")
    if step.task.min() < 0 or step.task.max() >= len(pool.tasks):
        problems.append(
            f"{method}: task contains the indices {step.task.min()} to {step.task.max()}; expected indices into tasks, "
            f"0 to {len(pool.tasks) - 1}"
        )
    elif (nonfinite := find_nonfinite(step, pool.tasks)) is not None:
        problems.append(f"{method}: {nonfinite}")
    if method == "reset":
        if not step.done.all():
            problems.append(
                f"reset: done is {_short(step.done)}; expected True in all rows (use vector_env.initial_step)"
            )
        if step.reward.any() or step.truncated.any():
            problems.append(
                "reset: reward must be 0 and truncated must be False in all rows (use vector_env.initial_step)"
            )
    return problems


def is_well_formed(step: Any, pool: VectorEnv) -> bool:
    """Return whether the rows and observations of a Step have the right types and shapes, and valid task indices.

    This function is fast enough to be called in every step. `step_problems` finds more problems and describes them.
    """
    if not isinstance(step, Step) or not isinstance(step.observation, dict):
        return False
    if step.observation.keys() != pool.observation_spec.keys():
        return False
    n = pool.num_envs
    arrays: list[tuple[Any, tuple[int, ...], Any]]  # arrays with their expected shapes and types
    arrays = [(getattr(step, name), (n,), dtype) for name, dtype in ROW_DTYPES.items()]
    arrays += [(step.observation[kind], (n, *spec.shape), spec.dtype) for kind, spec in pool.observation_spec.items()]
    return (
        all(isinstance(a, np.ndarray) and a.shape == shape and a.dtype == dtype for a, shape, dtype in arrays)
        and 0 <= step.task.min() <= step.task.max() < len(pool.tasks)
        and not (step.truncated & ~step.done).any()
    )


def final_problems(step: Step, pool: VectorEnv, method: str) -> list[str]:
    """Return a message for each problem of `Step.final`. If no episode was truncated, `final` may be empty."""
    count = int(step.truncated.sum())
    if not step.final and not count:
        return []
    meaning = "one row per truncated environment"
    if step.final == {}:
        keys = ", ".join(pool.observation_spec)
        return [f"{method}: final is empty, but truncated is set in {count} rows; expected {keys}, with {meaning}"]
    return _dict_problems(f"{method}: final", step.final, pool.observation_spec, count, meaning)


def state_problems(state: Any) -> list[str]:
    """Check that the result of `save` of a vector environment can be stored in a checkpoint.

    Return a list with one message if it cannot be stored, otherwise an empty list.
    """
    rule = "save must return a dict of NumPy arrays of numbers, because saveable is True"
    if not isinstance(state, dict):
        return [f"save returned {_describe(state)}; {rule}"]
    for name, value in state.items():
        if not isinstance(value, np.ndarray) or value.dtype.kind not in "biuf":
            return [f"save: the entry {name!r} is {_describe(value)}; {rule}"]
    return []


def _dict_problems(
    what: str, arrays: Any, specs: Mapping[str, ArraySpec], rows: int, meaning: str = "one row per environment"
) -> list[str]:
    if not isinstance(arrays, dict) or arrays.keys() != specs.keys():
        found = f"the keys {sorted(arrays)}" if isinstance(arrays, dict) else _describe(arrays)
        return [f"{what} has {found}; expected a dict with the keys {sorted(specs)}"]
    problems = []
    for name, spec in specs.items():
        problems += _array_problems(f"{what}[{name!r}]", arrays[name], (rows, *spec.shape), spec.dtype, meaning)
    return problems


def _array_problems(what: str, array: Any, shape: tuple[int, ...], dtype: str, meaning: str = "") -> list[str]:
    if isinstance(array, np.ndarray) and array.shape == shape and array.dtype == dtype:
        if min(array.strides, default=0) < 0:
            return [f"{what} has a negative stride, for example because of [::-1]; return a copy of the array"]
        return []
    explained = f", {meaning}" if meaning and np.shape(array)[:1] != shape[:1] else ""
    return [f"{what} is {_describe(array)}; expected an array {dtype}{list(shape)}{explained}"]


def _describe(value: Any) -> str:
    """Return a text: the dtype and shape if `value` is an array, otherwise its type."""
    if isinstance(value, np.ndarray):
        return f"{value.dtype}{list(value.shape)}"
    return "None" if value is None else f"an object of type {type(value).__name__}"


def _short(array: np.ndarray) -> str:
    return str(array.tolist() if len(array) <= 8 else [*array[:8].tolist(), "..."])
