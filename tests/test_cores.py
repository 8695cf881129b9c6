"""How many cores a process may use."""

import os
import subprocess
import sys

import pytest

from bestiary.cores import cores

COUNT = [sys.executable, "-c", "from bestiary.cores import cores; print(cores())"]


def test_as_many_as_the_process_may_run_on() -> None:
    assert cores() == len(os.sched_getaffinity(0))
    one = f"import os; os.sched_setaffinity(0, {{{min(os.sched_getaffinity(0))}}}); {COUNT[2]}"
    assert subprocess.run([sys.executable, "-c", one], capture_output=True, text=True).stdout == "1\n"


@pytest.mark.parametrize(("given", "expected"), [("3", 3), ("0", None), ("", None), ("many", None)])
def test_as_many_as_it_was_given(given: str, expected: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BESTIARY_CORES", raising=False)
    usual = cores()
    monkeypatch.setenv("BESTIARY_CORES", given)
    assert cores() == (usual if expected is None else expected)
