"""How losses are counted: one by one, a machine's at once as one, and too many as the end."""

import pytest

from bestiary.errors import RunError
from bestiary.runtime import restarts
from bestiary.runtime.restarts import TOGETHER, WINDOW, Restarts


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr(restarts.time, "monotonic", lambda: now[0])
    return now


def test_a_lost_machine_is_one_restart_however_many_players_it_had(clock: list[float]) -> None:
    counted = Restarts(most=2)
    for player in range(16):
        clock[0] += TOGETHER / 20
        counted.add(f"actor {player} is gone", machine="a")
    assert counted.total == 1
    counted.add("actor 16 is gone", machine="b")
    assert counted.total == 2
    clock[0] += TOGETHER
    with pytest.raises(RunError, match="restart 3 within ten minutes"):
        counted.add("actor 0 is gone", machine="a")


def test_those_of_long_ago_do_not_count_towards_too_many(clock: list[float]) -> None:
    counted = Restarts(most=1, before=7)
    for _ in range(3):
        counted.add("an environment raised")
        clock[0] += WINDOW + 1
    assert counted.total == 10
    counted.add("an environment raised")
    with pytest.raises(RunError):
        counted.add("an environment raised")
