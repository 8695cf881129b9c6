"""Where actors and the learner meet: numbered rollouts, and the rule that bounds how old a decision can be.

Every rollout gets a number before it is played, and rollouts are learnt from in the order of their numbers. A rollout may
begin only while fewer than `in_flight` rollouts are being played or waiting. So memory is bounded, nothing is ever dropped,
and between a rollout's first decision and its update lie at most `in_flight` - 1 other rollouts: that bounds the lag.
Actors take turns in beginning rollouts.

With a fixed lag L, rollout k is played from start to end with the weights that learnt from rollouts 0 .. k-L-1 and no others,
whatever the threads' speeds: the run is asynchronous and yet reproducible. An algorithm that learns only from its newest
weights has lag 0 and takes rollouts in blocks: all of a block are played with the weights that learnt from all blocks before.
"""

import threading
import time
from collections import deque
from collections.abc import Callable

from bestiary.rollout import Rollout
from bestiary.runtime.snapshots import Snapshot


class Exchange:
    def __init__(self, first: Snapshot, actors: int, in_flight: int, fixed_lag: int | None = None, block: int = 1):
        self.actors, self.in_flight, self.fixed_lag, self.block = actors, in_flight, fixed_lag, block
        self.changed = threading.Condition()
        self.begun = 0  # rollouts numbered so far
        self.learnt = 0  # rollouts learnt from so far
        self.ready: dict[int, Rollout] = {}  # played, by number
        self.snapshots = deque([first], maxlen=(fixed_lag or 0) + 1)  # one a rollout learnt from; the newest is last
        self.failure: BaseException | None = None
        self.closed = False

    # --- for actors ---

    def newest(self) -> Snapshot:
        return self.snapshots[-1]

    def try_begin(self, actor: int) -> tuple[int, Snapshot] | None:
        """A number for a new rollout and the weights to begin it with; None while this actor has to wait."""
        with self.changed:
            number = self.begun
            if number % self.actors != actor:
                return None  # the actors take turns, so that it is no matter of speed who plays what
            if self.fixed_lag is None:
                if number - self.learnt >= self.in_flight:
                    return None
                snapshot = self.snapshots[-1]
            else:
                first_of_block = number // self.block * self.block
                wanted = max(0, first_of_block - self.fixed_lag)  # rollouts that the weights must have learnt from
                if self.learnt < wanted:
                    return None
                snapshot = self.snapshots[wanted - self.learnt - 1]
            self.begun += 1
            self.changed.notify_all()
            return number, snapshot

    def hand_over(self, number: int, rollout: Rollout) -> None:
        with self.changed:
            self.ready[number] = rollout
            self.changed.notify_all()

    def wait(self, seen: tuple[int, int]) -> None:
        """Until more rollouts have begun or been learnt from than `progress` said, or the exchange closed."""
        with self.changed:
            self.changed.wait_for(lambda: self.progress() != seen or self.closed)

    def progress(self) -> tuple[int, int]:
        return self.begun, self.learnt

    def fail(self, error: BaseException) -> None:
        """An actor died: the learner hears of it where it waits for rollouts."""
        with self.changed:
            self.failure = error
            self.changed.notify_all()

    # --- for the learner ---

    def take(
        self,
        ahead: int,
        stalled: Callable[[float], None],
        patience: float,
        stop: Callable[[], bool] = lambda: False,
    ) -> Rollout | None:
        """The next rollout in order, or the one `ahead` after it; it stays in flight until it is learnt from (`publish`).

        Calls `stalled(seconds)` whenever none came for `patience` seconds. None where `stop` says so, looked at often."""
        began = said = time.monotonic()
        with self.changed:
            number = self.learnt + ahead
            while number not in self.ready:
                if self.failure is not None:
                    raise self.failure
                if stop():
                    return None
                self.changed.wait(timeout=min(patience, 0.5))
                now = time.monotonic()
                if number not in self.ready and now - said >= patience:
                    said = now
                    stalled(now - began)
            return self.ready[number]

    def publish(self, snapshot: Snapshot, rollouts: int = 1) -> None:
        """So many more rollouts have been learnt from, and these are the weights now."""
        with self.changed:
            for _ in range(rollouts - 1):
                self.snapshots.append(self.snapshots[-1])
            self.snapshots.append(snapshot)
            for number in range(self.learnt, self.learnt + rollouts):
                del self.ready[number]
            self.learnt += rollouts
            self.changed.notify_all()

    def close(self) -> None:
        with self.changed:
            self.closed = True
            self.changed.notify_all()
