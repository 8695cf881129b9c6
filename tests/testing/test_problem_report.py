"""What all checkers share: names, options, constructor arguments, and errors of the user's code."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.nn as nn

import bestiary
from bestiary.testing import check_agent, check_algorithm, check_critic, check_env, check_memory, check_torso
from bestiary.utils.errors import UserError
from tests.testing.helpers import assert_one_problem, find_problems

MISSPELT = [
    (check_agent, "basci"),
    (check_algorithm, "impalla"),
    (check_critic, "popert"),
    (check_env, "toy/cach"),
    (check_memory, "lstn"),
    (check_torso, "resnot"),
]
CHECKERS = [check_agent, check_algorithm, check_critic, check_env, check_memory, check_torso]
MEMORY = """
import torch
from torch import nn


class Copy(nn.Module):
    def __init__(self, input_size, {arguments}):
        super().__init__()
        self.output_size = input_size

    def initial_state(self, batch_size):
        return ()

    def forward(self, x, done, state):
        {statement}
        return x, state
"""


def write(arguments: str = "*, size: int = 3", statement: str = "pass") -> str:
    Path("mine.py").write_text(MEMORY.format(arguments=arguments, statement=statement))
    return "mine.py:Copy"


def test_module_is_an_attribute_of_the_package() -> None:
    assert bestiary.testing.check_env is check_env
    assert issubclass(bestiary.testing.ComponentError, UserError)


def test_component_in_a_file_passes() -> None:
    check_memory(write())
    check_memory(write(), 5, size="4")


@pytest.mark.parametrize(("check", "wrong"), MISSPELT)
def test_unknown_names_have_a_suggestion(check: Callable[..., None], wrong: str) -> None:
    assert_one_problem(find_problems(check, wrong), wrong, "did you mean")


@pytest.mark.parametrize("check", CHECKERS)
def test_missing_files_and_missing_classes_are_reported(check: Callable[..., None]) -> None:
    assert_one_problem(find_problems(check, "missing.py:Name"), "missing.py:Name", "does not exist")
    write()
    assert_one_problem(find_problems(check, "mine.py:Copi"), "mine.py has no Copi; did you mean Copy?")


@pytest.mark.parametrize("check", CHECKERS)
def test_an_instance_is_not_accepted(check: Callable[..., None]) -> None:
    assert_one_problem(find_problems(check, nn.Linear(2, 2)), "Linear", "pass the class, not an instance")


@pytest.mark.parametrize("check", [check_agent, check_env, check_memory, check_torso])
def test_missing_methods_are_reported(check: Callable[..., None]) -> None:
    class Empty:
        pass

    assert_one_problem(find_problems(check, Empty), "Empty: lacks ")


def test_unknown_and_invalid_options_are_reported_together() -> None:
    problems = find_problems(check_memory, write(), sise=3, size="large")
    assert len(problems) == 2
    assert any("unknown option sise; did you mean size?" in problem for problem in problems)
    assert any("size large: expected a number" in problem for problem in problems)


def test_arguments_that_are_not_keyword_only_are_explained() -> None:
    name = write(arguments="size=3")
    rule = "keyword-only arguments with a default: write *, size=..."
    assert_one_problem(find_problems(check_memory, name), "mine.py:Copy: argument size", rule)
    assert_one_problem(find_problems(check_memory, name, size=4), "unknown option size", "not keyword-only", rule)
    assert_one_problem(
        find_problems(check_memory, write(arguments="size")), "missing a required argument: 'size'", rule
    )


@pytest.mark.parametrize("statement", ["x / undefined", "raise ValueError('one\\ntwo')", "raise SystemExit(3)"])
def test_exception_is_one_line_with_file_and_line(statement: str) -> None:
    name = write(statement=statement)
    line = Path("mine.py").read_text().splitlines().index(f"        {statement}") + 1
    (problem,) = find_problems(check_memory, name)
    assert f"{Path('mine.py')}, line {line}" in problem
    assert any(kind in problem for kind in ("NameError: ", "ValueError: one", "SystemExit: 3"))


def test_exception_in_a_function_of_another_file_names_the_line_that_calls_it(monkeypatch: pytest.MonkeyPatch) -> None:
    # The module name is unique: modules that other tests imported stay loaded in this process.
    Path("failing_library.py").write_text("def fail():\n    raise ValueError('deep')\n")
    name = write(statement="import failing_library; failing_library.fail()")
    monkeypatch.syspath_prepend(Path().resolve())
    (problem,) = find_problems(check_memory, name)
    assert "ValueError: deep" in problem
    assert "mine.py, line 15" in problem


def test_class_without_a_source_file_is_accepted() -> None:
    namespace: dict[str, Any] = {"__name__": "notebook"}
    exec(MEMORY.format(arguments="*, size=3", statement="1 / 0"), namespace)
    assert_one_problem(find_problems(check_memory, namespace["Copy"]), "ZeroDivisionError", "<string>, line 15")
