"""The restart counter: what it counts as one restart, and when it stops a run."""

import pytest

from bestiary.distributed import faults
from bestiary.distributed.faults import NODE_LOSS_WINDOW, RESTART_WINDOW, RestartCounter, error_summary
from bestiary.utils.errors import RunError


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Replace the clock of the restart counter by a number that the test sets."""
    now = [1000.0]
    monkeypatch.setattr(faults.time, "monotonic", lambda: now[0])
    return now


def test_all_actors_of_a_lost_node_count_as_one_restart(clock: list[float]) -> None:
    restarts = RestartCounter(max_restarts=2)
    for actor in range(16):
        clock[0] += NODE_LOSS_WINDOW / 20
        restarts.record(f"actor {actor} was lost", node_id="a")
    assert restarts.total == 1
    restarts.record("actor 16 was lost", node_id="b")
    assert restarts.total == 2
    clock[0] += NODE_LOSS_WINDOW
    with pytest.raises(RunError, match=r"restart 3 within 10 minutes.*--max-restarts 2"):
        restarts.record("actor 0 was lost", node_id="a")


def test_restarts_before_the_window_do_not_count_towards_the_limit(clock: list[float]) -> None:
    restarts = RestartCounter(max_restarts=1, previous_total=7)
    for _ in range(3):
        restarts.record("an environment raised an exception")
        clock[0] += RESTART_WINDOW + 1
    assert restarts.total == 10
    restarts.record("an environment raised an exception")
    with pytest.raises(RunError):
        restarts.record("an environment raised an exception")


def test_an_error_is_summarised_in_one_line() -> None:
    assert error_summary(RunError("first\nsecond")) == "first"
    assert error_summary(OSError("\nfirst\nsecond")) == "OSError: first"
    assert error_summary(ValueError()) == "ValueError"
