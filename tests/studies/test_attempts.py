"""Logs: why the last attempt failed, in one line, or that it did not."""

from pathlib import Path

import pytest

from bestiary.studies.attempts import close_log, failure, last_attempt, open_log

LOG = Path("logs/a.log")


def attempt(printed: str, status: int | None) -> None:
    with open_log(LOG, ["resume", "a"]) as log:
        log.write(printed)
    close_log(LOG, status)


@pytest.mark.parametrize(
    ("printed", "status", "reason"),
    [
        ("1k of 2k steps\nbestiary: it diverged\nbye\n", 1, "it diverged"),
        (
            "Traceback (most recent call last):\n  File ...\nZeroDivisionError: by zero\n",
            1,
            "ZeroDivisionError: by zero",
        ),
        ("1k of 2k steps\n", -9, "killed by SIGKILL"),
        ("", 3, "exit status 3"),
        ("bestiary: not really\n", 0, ""),
        ("bestiary: on its way out\n", None, ""),  # the study itself stopped it
    ],
)
def test_the_reason_is_the_last_error_line_of_the_last_attempt(printed: str, status: int | None, reason: str) -> None:
    attempt("bestiary: an earlier failure\n", 1)
    attempt(printed, status)
    assert failure(LOG) == reason


def test_an_attempt_without_an_end_was_killed_with_its_study() -> None:
    assert failure(LOG) == ""
    attempt("bestiary: an earlier failure\n", 1)
    open_log(LOG, ["resume", "a"]).close()
    assert failure(LOG) == ""
    assert last_attempt(LOG) == []
