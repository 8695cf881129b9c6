"""A function that returns the problems that a checker of `bestiary.testing` reports."""

from collections.abc import Callable
from typing import Any

import pytest

from bestiary.testing import ComponentError


def find_problems(check: Callable[..., None], *args: Any, **options: Any) -> list[str]:
    """Call a checker that must find problems. Return them, after checking that each of them is one line."""
    with pytest.raises(ComponentError) as error:
        check(*args, **options)
    problems = list(error.value.problems)
    assert str(error.value).splitlines() == problems
    return problems


def assert_one_problem(problems: list[str], *facts: str) -> None:
    """Check that there is one problem and that it contains all facts."""
    assert len(problems) == 1, problems
    for fact in facts:
        assert fact in problems[0], problems[0]
