"""A training that is measured in turns: it stands still in between, and goes on from there."""

import threading
import time
from contextlib import ExitStack

import numpy as np
import pytest

from bestiary.bench import configured
from bestiary.bench_whole import Whole, _Halting
from bestiary.envs import make
from bestiary.errors import RunError
from bestiary.rollout import Step


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


def test_steps_are_not_to_be_had_while_all_stands_still() -> None:
    pool, going, received = make("toy/catch", num_envs=2), threading.Event(), list[Step]()
    halting = _Halting(pool, going)
    halting.reset()
    halting.send(np.zeros(2, np.int64))
    thread = threading.Thread(target=lambda: received.append(halting.recv()), daemon=True)
    thread.start()
    thread.join(timeout=0.2)
    assert not received
    going.set()
    thread.join(timeout=10)
    assert len(received) == 1


def test_a_training_that_is_over_says_so() -> None:
    with ExitStack() as stack:
        whole = Whole(configured("toy", group_size=8, steps=2_000), stack)
        for _ in range(2):
            with pytest.raises(RunError, match="is over"):
                whole.measure(5.0)


def test_what_goes_wrong_in_it_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RunError("the disk is full")

    with ExitStack() as stack:
        whole = Whole(configured("toy", group_size=8), stack)
        monkeypatch.setattr(whole.session, "attend", fail)
        with pytest.raises(RunError, match="the disk is full"):
            whole.measure(0.1)
