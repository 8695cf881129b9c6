"""The function `check_env`, which checks a Gymnasium class, a Gymnasium vector environment or a vector environment."""

import inspect
from typing import Any

from gymnasium.vector import VectorEnv as GymnasiumVectorEnv

from bestiary import envs
from bestiary.envs.registry import class_spec, function_spec
from bestiary.testing.gymnasium_checks import check_gymnasium
from bestiary.testing.problem_report import (
    Component,
    ComponentError,
    Report,
    component_name,
    load_class,
    parse,
    positional_problems,
    source_files,
)
from bestiary.testing.vector_env_checks import check_vector_env
from bestiary.utils import plugins
from bestiary.utils.errors import UserError
from bestiary.utils.plugin_names import PluginRef, parse_name


def check_env(component: Any, /, **options: Any) -> None:
    """Check an environment by playing random actions.

    All environments: equal seeds must give equal results, and rendered images must have the right form.

    Gymnasium environments: also check the spaces and the return values of `reset` and `step`. Observations must be in
    the observation space, and rewards must be finite.

    Gymnasium vector environments (a function or a class): also check the shapes and types of the results.

    Vector environments: also check the attributes, the shapes and types of all fields of `Step`, and the steps at which
    episodes end. An action must affect only its own environment. `load` must restore the state that `save` returned.

    Args:
        component: class, function that returns a `gymnasium.vector.VectorEnv`, `path/to/file.py:Name`, or name of a
            built-in environment.
        options: options of the environment.

    Raises:
        ComponentError: the environment breaks a rule. The message lists all problems, one line each.
    """
    spec, report = find_env(component)
    parsed = parse(report, spec.options, options)
    cls = env_class(component)
    if cls is not None:
        report.add(*positional_problems(cls, num_arguments(cls)))
        if is_gymnasium_class(cls):
            report.run(lambda: check_gymnasium(Component(cls, parsed, report)))
    if not report.problems:
        can_render = cls is None or bool({"render", "render_mode"} & inspect.signature(cls).parameters.keys())
        check_vector_env(report, spec, parsed, can_render)
    report.finish()


def find_env(component: Any) -> tuple[envs.EnvSpec, Report]:
    """Return the spec of an environment, and a new Report. Raise ComponentError if there is no such environment."""
    cls = env_class(component)
    if cls is None:
        try:
            return envs.lookup_env(component), Report(component, set())
        except UserError as error:
            raise ComponentError(*error.problems) from error
    name = component_name(component)
    make_spec = function_spec if inspect.isfunction(cls) else class_spec
    return make_spec(cls, name), Report(name, source_files(cls))


def env_class(component: Any) -> Any:
    """Return the user's class or function, or None if the component is the name of a built-in environment."""
    if isinstance(component, str) and not isinstance(parse_name(component), PluginRef):
        return None
    cls = load_class(component, lambda name: plugins.load(name, "environment"), ())
    if inspect.isfunction(cls):
        return cls
    missing = [name for name in ("reset",) if not hasattr(cls, name)]
    if not hasattr(cls, "recv") and not hasattr(cls, "step"):
        missing.append("step (Gymnasium) or send and recv (vector environment)")
    if missing:
        raise ComponentError(f"{component_name(component)}: lacks {', '.join(missing)}; see docs/extending.md")
    return cls


def is_gymnasium_class(cls: Any) -> bool:
    """Return True if an object of the class is a single Gymnasium environment."""
    return inspect.isclass(cls) and not hasattr(cls, "recv") and not issubclass(cls, GymnasiumVectorEnv)


def num_arguments(cls: Any) -> int:
    """Return the number of positional arguments that Bestiary passes to the constructor or function of a user."""
    if is_gymnasium_class(cls):
        return 0
    return 2 if hasattr(cls, "recv") else 1  # num_envs and seed; Gymnasium vector environments: only num_envs
