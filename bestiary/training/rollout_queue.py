"""The queue between actors and the learner. It orders rollouts and bounds the policy lag.

Each rollout gets an ID (0, 1, 2, ...) when an actor starts to collect it. Unless `in_order` is False (see below), the
actors take turns to start rollouts, and the learner consumes rollouts in the order of their IDs. A rollout is in flight
while it is being collected or waits for the learner. An actor may start a rollout only if fewer than `max_in_flight`
rollouts are in flight. Therefore the learner consumes at most `max_in_flight` - 1 other rollouts between the start of a
rollout and the update that uses it. This bounds the memory use and the policy lag, and no rollout is dropped.

With a fixed lag L, rollout k is collected entirely with the weights that were trained on exactly the rollouts
0 .. k-L-1. The result does not depend on the speed of the threads, so the run is asynchronous and reproducible. An
on-policy algorithm has lag 0 and consumes rollouts in blocks: all rollouts of a block are collected with the weights
that were trained on all previous blocks.

On a cluster, a rollout can be lost, for example because its actor crashed or made no progress and was replaced. Such a
rollout is discarded.

    in_order=False    Any idle actor may start the next rollout, and the learner consumes rollouts in the order in which
                      they arrive. A discarded rollout is replaced by a new rollout of any idle actor.
    in_order=True     The actor with the same index collects the discarded rollout again. It starts with new
                      environments, so the new rollout does not continue the rollouts that this actor has already
                      collected for the same block. These rollouts are therefore discarded and collected again, too.
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

WeightsT = TypeVar("WeightsT")  # Weights; on a cluster, a reference to weights that another process holds
RolloutT = TypeVar("RolloutT")  # Rollout; on a cluster, a report about a rollout that another process holds


class RolloutQueue(Generic[WeightsT, RolloutT]):
    """Thread-safe queue that passes rollouts from several actors to one learner, and weights in the other direction.

    Args:
        initial_weights: weights with which the first rollouts are collected.
        num_actors: number of actors, which are identified by the indices 0 .. num_actors - 1.
        max_in_flight: maximum number of rollouts that are being collected or are waiting for the learner.
        fixed_lag: exact policy lag, in rollouts; None if the lag varies and only `max_in_flight` limits it.
        block_size: number of rollouts that an on-policy algorithm consumes together; 1 for other algorithms.
        in_order: whether actors take turns and the learner consumes rollouts in the order of their IDs. This is always
            the case with a fixed lag.
    """

    def __init__(
        self,
        initial_weights: WeightsT,
        num_actors: int,
        max_in_flight: int,
        fixed_lag: int | None = None,
        block_size: int = 1,
        in_order: bool = True,
    ):
        self.num_actors = num_actors
        self.max_in_flight = max_in_flight
        self.fixed_lag = fixed_lag
        self.block_size = block_size
        self.in_order = in_order or fixed_lag is not None
        self.changed = threading.Condition()
        self.next_rollout_id = 0  # ID that the next new rollout gets
        # Number of rollouts that actors have started. With in_order=False, discarded rollouts are subtracted.
        self.num_started = 0
        self.num_received = 0  # number of rollouts received from actors, without discarded rollouts
        self.num_consumed = 0  # number of rollouts that the learner has consumed
        # Rollouts that were received but not yet consumed. The key is the ID or, if not in_order, the position in the
        # order of arrival.
        self.completed: dict[int, RolloutT] = {}
        # For each actor, the IDs of discarded rollouts that it must collect again (only if in_order).
        self.to_retry: dict[int, deque[int]] = {actor: deque() for actor in range(num_actors)}
        # The weights after each of the most recently consumed rollouts; the last entry is the newest. With a fixed lag
        # L there are at most L + 1 entries, otherwise 1.
        self.weights_history = deque([initial_weights], maxlen=(fixed_lag or 0) + 1)
        self.failure: BaseException | None = None
        self.closed = False

    # --- methods for actors ---

    def latest_weights(self) -> WeightsT:
        """Return the newest published weights."""
        return self.weights_history[-1]

    def try_start(self, actor: int) -> tuple[int, WeightsT] | None:
        """Return the ID of the actor's next rollout and the weights to start with, or None if the actor must wait."""
        with self.changed:
            if self.to_retry[actor]:
                rollout_id = self.to_retry[actor].popleft()
                weights = self._weights_for(rollout_id)
                assert weights is not None
                return rollout_id, weights
            # The actors take turns, so that their speed does not affect which actor collects which rollout.
            if self.in_order and self.num_started % self.num_actors != actor:
                return None
            if (weights := self._weights_for(self.num_started)) is None:
                return None
            rollout_id = self.next_rollout_id
            self.next_rollout_id += 1
            self.num_started += 1
            self.changed.notify_all()
            return rollout_id, weights

    def _weights_for(self, rollout_id: int) -> WeightsT | None:
        """Return the weights to start a rollout with, or None if the rollout must not start yet."""
        if self.fixed_lag is None:
            if rollout_id - self.num_consumed >= self.max_in_flight:
                return None
            return self.weights_history[-1]
        first_of_block = rollout_id // self.block_size * self.block_size
        required = max(0, first_of_block - self.fixed_lag)  # the rollout starts when this many rollouts are consumed
        if self.num_consumed < required:
            return None
        # weights_history[-1] are the weights after num_consumed rollouts, weights_history[-2] are the weights after
        # num_consumed - 1 rollouts, and so on.
        return self.weights_history[required - self.num_consumed - 1]

    def put(self, rollout_id: int, rollout: RolloutT) -> None:
        """Add a completed rollout."""
        with self.changed:
            self.completed[rollout_id if self.in_order else self.num_received] = rollout
            self.num_received += 1
            self.changed.notify_all()

    def discard(self, rollout_id: int) -> list[int]:
        """Discard a started rollout and return the IDs of all rollouts that are discarded with it.

        These are the rollout itself and, if `in_order`, the earlier rollouts of the same actor and block (see the start
        of this file).
        """
        with self.changed:
            if not self.in_order:
                self.num_started -= 1
                return [rollout_id]
            first_of_block = rollout_id // self.block_size * self.block_size
            actor = rollout_id % self.num_actors
            invalid = [n for n in range(first_of_block, rollout_id + 1) if n % self.num_actors == actor]
            self.num_received -= sum(self.completed.pop(n, None) is not None for n in invalid)
            self.to_retry[actor] = deque(sorted({*self.to_retry[actor], *invalid}))
            return invalid

    def progress(self) -> tuple[int, int]:
        """Return the numbers of started and of consumed rollouts."""
        return self.num_started, self.num_consumed

    def wait_for_progress(self, last_progress: tuple[int, int]) -> None:
        """Block until `progress()` differs from `last_progress` or the queue is closed."""
        with self.changed:
            self.changed.wait_for(lambda: self.progress() != last_progress or self.closed)

    def fail(self, error: BaseException) -> None:
        """Store the exception of an actor. The next call of `get`, in the learner's thread, raises it."""
        with self.changed:
            self.failure = error
            self.changed.notify_all()

    # --- methods for the learner ---

    def get(
        self,
        offset: int,
        on_stall: Callable[[float], None],
        stall_seconds: float,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> RolloutT | None:
        """Wait for a rollout and return it, or return None as soon as `should_stop()` is true.

        Offset 0 is the next rollout that the learner will consume, offset 1 is the rollout after this rollout, and so
        on. The rollout stays in the queue until `publish` removes it. While this method waits, it calls `should_stop`
        at least twice per second, and every `stall_seconds` it calls `on_stall(seconds)` with the time waited so far.
        """
        start = last_warning = time.monotonic()
        with self.changed:
            rollout_id = self.num_consumed + offset
            while rollout_id not in self.completed:
                if self.failure is not None:
                    raise self.failure
                if should_stop():
                    return None
                self.changed.wait(timeout=min(stall_seconds, 0.5))
                now = time.monotonic()
                if rollout_id not in self.completed and now - last_warning >= stall_seconds:
                    last_warning = now
                    on_stall(now - start)
            return self.completed[rollout_id]

    def peek(self, offset: int) -> RolloutT | None:
        """Return the rollout that `get(offset)` would return, or None if it has not arrived."""
        return self.completed.get(self.num_consumed + offset)

    def publish(self, weights: WeightsT, num_rollouts: int = 1) -> None:
        """Make new weights available to the actors. Remove the next `num_rollouts` rollouts, which are now consumed."""
        with self.changed:
            for _ in range(num_rollouts - 1):
                self.weights_history.append(self.weights_history[-1])
            self.weights_history.append(weights)
            for rollout_id in range(self.num_consumed, self.num_consumed + num_rollouts):
                del self.completed[rollout_id]
            self.num_consumed += num_rollouts
            self.changed.notify_all()

    def close(self) -> None:
        """Wake up all waiting actors and tell them to stop."""
        with self.changed:
            self.closed = True
            self.changed.notify_all()
