"""Log of a trial: the reason why the last command failed, if it did."""

from pathlib import Path

import pytest

from bestiary.studies.run_log import close_log, failure_reason, last_output, open_log

LOG = Path("logs/a.log")


def log_command(output: str, status: int | None) -> None:
    with open_log(LOG, ["resume", "a"]) as log:
        log.write(output)
    close_log(LOG, status)


@pytest.mark.parametrize(
    ("output", "status", "reason"),
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
        ("bestiary: on its way out\n", None, ""),  # stopped by the study
    ],
)
def test_reason_is_the_last_error_line_of_the_last_command(output: str, status: int | None, reason: str) -> None:
    log_command("bestiary: an earlier failure\n", 1)
    log_command(output, status)
    assert failure_reason(LOG) == reason


def test_command_without_footer_has_no_failure_reason() -> None:
    assert failure_reason(LOG) == ""
    log_command("bestiary: an earlier failure\n", 1)
    open_log(LOG, ["resume", "a"]).close()
    assert failure_reason(LOG) == ""
    assert last_output(LOG) == []
