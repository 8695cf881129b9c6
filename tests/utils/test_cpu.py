"""Number of CPU cores available to a process."""

import os
import subprocess
import sys

import pytest

from bestiary.utils.cpu import num_cores

PRINT_CORES = "from bestiary.utils.cpu import num_cores; print(num_cores())"


def test_num_cores_follows_the_affinity_of_the_process() -> None:
    assert num_cores() == len(os.sched_getaffinity(0))
    pinned_to_one_core = f"import os; os.sched_setaffinity(0, {{{min(os.sched_getaffinity(0))}}}); {PRINT_CORES}"
    assert subprocess.run([sys.executable, "-c", pinned_to_one_core], capture_output=True, text=True).stdout == "1\n"


@pytest.mark.parametrize(("value", "expected"), [("3", 3), ("0", None), ("", None), ("many", None)])
def test_environment_variable_overrides_the_affinity(
    value: str, expected: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("BESTIARY_CORES", raising=False)
    default = num_cores()
    monkeypatch.setenv("BESTIARY_CORES", value)
    assert num_cores() == (default if expected is None else expected)
