"""Where actors and the learner meet: numbered rollouts, and the rule that bounds how old a decision can be.

Every rollout gets a number before it is played, and rollouts are learnt from in the order of their numbers. A rollout may
begin only while fewer than `in_flight` rollouts are being played or waiting. So memory is bounded, nothing is ever dropped,
and between a rollout's first decision and its update lie at most `in_flight` - 1 other rollouts: that bounds the lag.
Actors take turns in beginning rollouts.

With a fixed lag L, rollout k is played from start to end with the weights that learnt from rollouts 0 .. k-L-1 and no others,
whatever the threads' speeds: the run is asynchronous and yet reproducible. An algorithm that learns only from its newest
weights has lag 0 and takes rollouts in blocks: all of a block are played with the weights that learnt from all blocks before.

Where actors are on many machines, one of them may be slow, or gone. Then (`in_order` false) whoever is free begins, and
rollouts are learnt from in the order in which they arrive; a rollout that will not come (`lose`) makes room for another. In
order, a lost rollout is owed by its actor, with all that it played in the same block, which would not go on from there.
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

Weights = TypeVar("Weights")  # a Snapshot, or where one is to be found
Played = TypeVar("Played")  # a Rollout, or what is known of one that is elsewhere


class Exchange(Generic[Weights, Played]):
    def __init__(
        self,
        first: Weights,
        actors: int,
        in_flight: int,
        fixed_lag: int | None = None,
        block: int = 1,
        in_order: bool = True,
    ):
        self.actors, self.in_flight, self.fixed_lag, self.block = actors, in_flight, fixed_lag, block
        self.in_order = in_order or fixed_lag is not None
        self.changed = threading.Condition()
        self.begun = 0  # rollouts that are learnt from, waiting or being played
        self.numbered = 0  # rollouts numbered so far; more than begun where some were lost
        self.learnt = 0  # rollouts learnt from so far
        self.arrived = 0  # rollouts handed over so far
        self.ready: dict[int, Played] = {}  # played, by number, or by the order of their arrival
        self.owed: dict[int, deque[int]] = {actor: deque() for actor in range(actors)}  # lost, to be played again
        self.snapshots = deque([first], maxlen=(fixed_lag or 0) + 1)  # one a rollout learnt from; the newest is last
        self.failure: BaseException | None = None
        self.closed = False

    # --- for actors ---

    def newest(self) -> Weights:
        return self.snapshots[-1]

    def try_begin(self, actor: int) -> tuple[int, Weights] | None:
        """A number for a new rollout and the weights to begin it with; None while this actor has to wait."""
        with self.changed:
            if self.owed[actor]:
                number = self.owed[actor].popleft()
                snapshot = self._weights_for(number)
                assert snapshot is not None
                return number, snapshot
            if self.in_order and self.begun % self.actors != actor:
                return None  # the actors take turns, so that it is no matter of speed who plays what
            if (snapshot := self._weights_for(self.begun)) is None:
                return None
            number = self.numbered
            self.numbered += 1
            self.begun += 1
            self.changed.notify_all()
            return number, snapshot

    def _weights_for(self, number: int) -> Weights | None:
        if self.fixed_lag is None:
            return None if number - self.learnt >= self.in_flight else self.snapshots[-1]
        first_of_block = number // self.block * self.block
        wanted = max(0, first_of_block - self.fixed_lag)  # rollouts that the weights must have learnt from
        return None if self.learnt < wanted else self.snapshots[wanted - self.learnt - 1]

    def hand_over(self, number: int, rollout: Played) -> None:
        with self.changed:
            self.ready[number if self.in_order else self.arrived] = rollout
            self.arrived += 1
            self.changed.notify_all()

    def lose(self, number: int) -> list[int]:
        """A rollout that began will not be handed over; returns the numbers of all that are played anew for it."""
        with self.changed:
            if not self.in_order:
                self.begun -= 1
                return [number]
            first_of_block, actor = number // self.block * self.block, number % self.actors
            again = [n for n in range(first_of_block, number + 1) if n % self.actors == actor]
            self.arrived -= sum(self.ready.pop(n, None) is not None for n in again)
            self.owed[actor] = deque(sorted({*self.owed[actor], *again}))
            return again

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
    ) -> Played | None:
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

    def look(self, ahead: int) -> Played | None:
        """What `take` would give, if it would give it at once."""
        return self.ready.get(self.learnt + ahead)

    def publish(self, snapshot: Weights, rollouts: int = 1) -> None:
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
