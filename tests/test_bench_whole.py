"""A training that is measured in turns: it stands still in between, and goes on from there."""

import time
from contextlib import ExitStack

import pytest

from bestiary.bench import configured
from bestiary.bench_whole import Whole
from bestiary.errors import RunError


@pytest.mark.parametrize("name", ["toy", "warehouse-fnn"])  # IMPALA, and PPO, which plays and learns in turn
def test_it_stands_still_between_turns(name: str) -> None:
    config = configured(name, group_size=8)
    with ExitStack() as stack:
        whole = Whole(config, stack)
        assert whole.learner.steps == 0
        counts = []
        for _ in range(3):
            found = whole.measure(0.1)
            assert found["whole"] > 0
            counts.append((whole.learner.steps, *(actor.steps for actor in whole.actors)))
            time.sleep(0.1)
            assert counts[-1] == (whole.learner.steps, *(actor.steps for actor in whole.actors))
        assert counts[0] < counts[1] < counts[2]
    assert not whole.thread.is_alive()


def test_what_goes_wrong_in_it_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RunError("the disk is full")

    with ExitStack() as stack:
        whole = Whole(configured("toy", group_size=8), stack)
        monkeypatch.setattr(whole.session, "attend", fail)
        with pytest.raises(RunError, match="the disk is full"):
            whole.measure(0.1)
