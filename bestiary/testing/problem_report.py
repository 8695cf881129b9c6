"""Functions that all checkers use: find a component, collect its problems, and describe exceptions that it raises."""

import inspect
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bestiary.config.components import REQUIRED_ATTRIBUTES, lookup_component
from bestiary.utils import plugins, trust
from bestiary.utils.errors import RunError, UserError
from bestiary.utils.options import OPTIONS_RULE, options_class, parse_keywords
from bestiary.utils.plugin_names import PluginRef, parse_name

# Base classes from these packages are not part of the user's component.
LIBRARIES = ("bestiary", "torch", "gymnasium", "builtins", "typing", "abc")
# Constructor arguments that Bestiary sets itself.
RENDERING = ("render", "render_mode")


class ComponentError(UserError):
    """A component breaks a rule of docs/extending.md. The message lists all problems, one line each (`problems`)."""


class StageFailed(Exception):
    """Raised if a part of a check cannot continue. The problem has already been added to the Report."""


@dataclass
class Report:
    """The problems that the checks of one component found."""

    name: str  # name of the component in messages
    files: set[str]  # source files of the component
    problems: list[str] = field(default_factory=list)
    rules: set[str] = field(default_factory=set)  # rules for which `add_once` has added a problem

    def add(self, *problems: str) -> None:
        """Add problems, each as one line, unless they are already in the list."""
        lines = [" ".join(problem.split()) for problem in problems]
        self.problems += [line for line in lines if line not in self.problems]

    def add_once(self, rule: str, problem: str) -> None:
        """Add a problem, unless `add_once` has already added a problem with the same `rule`.

        Problems that differ only in their numbers are thus reported once.
        """
        if rule not in self.rules:
            self.rules.add(rule)
            self.add(problem)

    def require(self, *problems: str) -> None:
        """Add problems. If at least one is given, end this part of the check by raising StageFailed."""
        self.add(*problems)
        if problems:
            raise StageFailed

    @contextmanager
    def errors_of(self, what: str) -> Iterator[None]:
        """Context manager for a call of the component, described by `what`, for example "the constructor".

        If the call raises an exception, add the problem "WHAT failed: ..." and end this part of the check by raising
        StageFailed.
        """
        try:
            yield
        except StageFailed:
            raise
        except UserError as error:
            self.require(*(f"{what} failed: {problem}" for problem in error.problems))
        except (Exception, SystemExit) as error:
            self.require(f"{what} failed: {self.describe(error)}")

    def describe(self, error: BaseException) -> str:
        """Return a one-line description of an error. If the component raised it, include the file and line number."""
        if isinstance(error, RunError):
            return " ".join(str(error).split())
        location = plugins.error_location(error, self.files)
        return f"{plugins.error_line(error)}{'' if location is None else f' ({location})'}"

    def run(self, *stages: Callable[[], None]) -> None:
        """Run the parts of a check in order. If a part fails, continue with the next part."""
        for stage in stages:
            try:
                stage()
            except StageFailed:
                continue
            except Exception as error:
                # A check itself can raise an exception if the user's code returns an object that it does not expect.
                self.add(f"a check could not be finished: {self.describe(error)}")

    def finish(self) -> None:
        """Raise ComponentError if there are problems."""
        if self.problems:
            raise ComponentError(*(f"{self.name}: {problem}" for problem in self.problems))


@dataclass(frozen=True)
class Component:
    """A component to check: its class, its options object, and the Report that collects its problems."""

    cls: Any
    options: Any
    report: Report


def find_component(kind: str, component: Any, options: dict[str, Any], num_arguments: int) -> Component:
    """Return a component that is given as a class, a plug-in name or the name of a built-in component.

    Args:
        kind: "algo", "agent", "torso", "memory" or "critic".
        component: the class or name.
        options: values of options by name.
        num_arguments: number of positional arguments of the constructor.

    Raises:
        ComponentError: the component does not exist, lacks a method, or does not have these options.
    """
    cls = load_class(component, lambda name: lookup_component(kind, name), REQUIRED_ATTRIBUTES[kind])
    report = Report(component_name(component), source_files(cls))
    report.add(*positional_problems(cls, num_arguments))
    return Component(cls, parse(report, options_class(cls), options), report)


def parse(report: Report, schema: type, options: dict[str, Any]) -> Any:
    """Return an options object. Raise ComponentError if options are unknown or invalid."""
    try:
        return parse_keywords(schema, options, report.name)
    except UserError as error:
        raise ComponentError(*error.problems) from error


def load_class(component: Any, lookup: Callable[[Any], Any], required: Iterable[str]) -> Any:
    """Return the class of a component. Raise ComponentError if it does not exist or lacks an attribute.

    If `component` names a user's file, the file is executed without asking whether the user trusts it, because the user
    has just given its name.
    """
    if isinstance(component, str):
        try:
            return lookup(trust.named_by_user(component))
        except UserError as error:
            raise ComponentError(*error.problems) from error
    if not callable(component) or not isinstance(component, type | types.FunctionType):
        raise ComponentError(
            f"{type(component).__name__}: expected a class or path/to/file.py:Name, got an object of this type; "
            "pass the class, not an instance"
        )
    missing = [name for name in required if not hasattr(component, name)] if isinstance(component, type) else []
    if missing:
        raise ComponentError(f"{component.__name__}: lacks {', '.join(missing)} (see docs/extending.md)")
    return component


def component_name(component: Any) -> str:
    """Return the name to use in messages: for a plug-in, `my_env.py:Maze` without the folder; for a class, its name."""
    if not isinstance(component, str):
        return component.__name__
    return Path(component).name if isinstance(parse_name(component), PluginRef) else component


def source_files(cls: Any) -> set[str]:
    """Return the source files of a class, of its base classes (without those from LIBRARIES) and of all plug-ins."""
    own = (
        [c for c in inspect.getmro(cls) if c.__module__.split(".")[0] not in LIBRARIES] if inspect.isclass(cls) else []
    )
    files = plugins.plugin_files()
    for owner in own or [cls]:
        for member in [owner, *vars(owner).values()]:
            function = inspect.unwrap(getattr(member, "fget", None) or getattr(member, "__func__", member))
            if (code := getattr(function, "__code__", None)) is not None:
                files.add(code.co_filename)
    return files


def positional_problems(cls: Any, num_arguments: int) -> list[str]:
    """Return a problem for each constructor argument that has a default but is not keyword-only.

    Only keyword-only arguments become options. The first `num_arguments` arguments are not checked, because Bestiary
    sets them. If the class has an inner class `Options`, return no problems.
    """
    if hasattr(cls, "Options"):
        return []
    return [
        f"argument {name} of the constructor cannot be set by an option: {OPTIONS_RULE.format(name=name)}"
        for name, parameter in list(inspect.signature(cls).parameters.items())[num_arguments:]
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD
        and parameter.default is not parameter.empty
        and name not in RENDERING
    ]
