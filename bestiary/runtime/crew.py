"""The players of a run on a cluster, as the driver sees them: who is free, who is stuck, who replaces those that go."""

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from bestiary.config import Training
from bestiary.console import warn
from bestiary.runtime.answers import Answers, first_line, plain
from bestiary.runtime.load import Clock
from bestiary.runtime.local import PATIENCE
from bestiary.runtime.restarts import Restarts
from bestiary.runtime.room import FOUND_WITHIN, elsewhere, here, no_room
from bestiary.runtime.workers import Oracle, Player


@dataclass
class Seat:
    """A pool of a player's."""

    index: int  # among all pools of the run
    number: int  # among those of its player
    clock: Clock
    playing: int | None = None  # which rollout
    decisions: int = -1  # that it had made when it was last asked, and ...
    moved: float = 0.0  # ... when that was last news


@dataclass
class Hand:
    """A player."""

    index: int
    seats: list[Seat]
    handle: Any = None
    life: int = 0
    node: str = ""  # where it is, or was, before it was replaced
    machine: str = ""
    placed: float = 0.0  # since when
    ready: bool = False
    asked: bool = False  # how far it is

    @property
    def name(self) -> str:
        return f"actor {self.index} on {self.machine}" if self.machine else f"actor {self.index}"


class Crew:
    """Players, and where one process decides for all of them, that one."""

    def __init__(
        self, ray: Any, training: Training, bundle: Any, answers: Answers, restarts: Restarts, at_step: int, gpus: float
    ):
        self.ray, self.training, self.bundle, self.answers = ray, training, bundle, answers
        self.restarts, self.at_step, self.gpus = restarts, at_step, gpus
        self.player: Any = ray.remote(Player)
        self.oracle: Any = None
        pools = self.training.pools
        self.hands = [
            Hand(k, [Seat(k * pools + n, n, Clock(f"actor {k}, pool {n}")) for n in range(pools)])
            for k in range(self.training.actors)
        ]
        self.turns = deque((hand, hand.seats[n]) for n in range(pools) for hand in self.hands)
        self.unfit: set[str] = set()  # nodes that cannot play
        self.played = False  # somebody could
        self.heard = self.said = time.monotonic()

    def start(self) -> None:
        self._start_oracle()
        for hand in self.hands:
            self._start(hand)

    def end(self) -> None:
        for handle in [*(hand.handle for hand in self.hands), self.oracle]:
            if handle is not None:
                self.ray.kill(handle)

    @property
    def clocks(self) -> list[Clock]:
        return [seat.clock for hand in self.hands for seat in hand.seats]

    # --- playing ---

    def free(self) -> Iterator[tuple[Hand, Seat]]:
        """Whoever could begin a rollout, those first that have waited longest."""
        for _ in range(len(self.turns)):
            hand, seat = self.turns[0]
            self.turns.rotate(-1)
            if hand.ready and seat.playing is None:
                yield hand, seat

    def play(self, hand: Hand, seat: Seat, number: int, weights: tuple[int, Any], batch_size: int) -> tuple[Any, Any]:
        """References to what is told of the rollout, and to each learner's share of it."""
        version, reference = weights
        seat.playing, seat.moved = number, time.monotonic()
        play = hand.handle.play.options(num_returns=1 + self.training.learners)
        arguments = [] if self.oracle is not None else reference
        played, *shares = play.remote(seat.number, version, arguments, batch_size)
        return played, shares

    def _start(self, hand: Hand) -> None:
        options = {"num_cpus": 1, "max_concurrency": self.training.pools + 2}
        hand.handle = self.player.options(**options, scheduling_strategy=elsewhere(self.unfit)).remote()
        hand.machine, hand.placed, hand.ready, hand.asked = "", 0.0, False, False
        for seat in hand.seats:
            seat.playing = None
        life = hand.life
        self.answers.expect(hand.handle.where.remote(), lambda found: self._placed(hand, life, found))
        prepared = hand.handle.prepare.remote(self.bundle, hand.index, self.at_step, life, self.oracle)
        self.answers.expect(prepared, lambda found: self._prepared(hand, life, found))

    def _placed(self, hand: Hand, life: int, reference: Any) -> None:
        """There was room for it."""
        if life != hand.life:
            return
        try:
            hand.node, hand.machine = self.ray.get(reference)
        except self.ray.exceptions.RayError as error:
            return self.replace(hand, life, f"{hand.name} ended before it began ({first_line(error)})")
        hand.placed = time.monotonic()

    def _prepared(self, hand: Hand, life: int, reference: Any) -> None:
        if life != hand.life:
            return
        try:
            self.ray.get(reference)
        except self.ray.exceptions.RayTaskError as error:
            if not self.played:
                raise plain(error) from error
            return self._avoid(hand, first_line(error.cause))
        except self.ray.exceptions.RayError as error:
            return self.replace(hand, life, f"{hand.name} ended while it was made ({first_line(error)})")
        hand.ready = self.played = True

    def _avoid(self, hand: Hand, why: str) -> None:
        """What others can do, it cannot where it is, on a machine that joined late perhaps: nobody is sent there any more."""
        if not hand.node:
            return self.replace(hand, hand.life, f"{hand.name}: {why}")
        if hand.node not in self.unfit:
            warn(f"{hand.name}: {why}; no actor will be on that machine")
            self.unfit.add(hand.node)
        self._renew(hand)

    def replace(self, hand: Hand, life: int, why: str) -> None:
        """A player is gone: another takes its seats, with fresh environments and the newest weights."""
        if life != hand.life:
            return  # already done
        self.restarts.add(why, machine=hand.node)
        self._renew(hand)

    def _renew(self, hand: Hand) -> None:
        self.ray.kill(hand.handle)
        hand.life += 1
        self._start(hand)

    def look_after(self, learning: bool) -> None:
        """Ask those that play how far they are, and replace those that have not moved for long; tell the user what stalls."""
        now, timeout = time.monotonic(), self.training.actor_timeout
        for hand in self.hands:
            if hand.placed and not hand.ready and now - hand.placed > max(timeout, FOUND_WITHIN):
                self.replace(hand, hand.life, f"{hand.name} was not ready after {now - hand.placed:.0f} s")
            if not hand.ready:
                continue
            still = max((now - seat.moved for seat in hand.seats if seat.playing is not None), default=0.0)
            if still > timeout:
                self.replace(hand, hand.life, f"{hand.name} has not decided anything for {still:.0f} s")
            elif not hand.asked and still > min(timeout / 4, 10.0):
                hand.asked = True
                self.answers.expect(hand.handle.progress.remote(), self._hear_of(hand, hand.life))
        if learning:
            self.heard = now
        if now - self.heard > PATIENCE and now - self.said > PATIENCE:
            self.said = now
            absent = [hand.index for hand in self.hands if not hand.placed]
            wait = f"; actors {', '.join(map(str, absent[:8]))} wait for room on the cluster" if absent else ""
            warn(f"no rollout for {now - self.heard:.0f} s{wait}")

    def _hear_of(self, hand: Hand, life: int) -> Any:
        def told(reference: Any) -> None:
            if life != hand.life:
                return
            hand.asked = False
            try:
                decisions = self.ray.get(reference)
            except self.ray.exceptions.RayError:
                return  # its rollouts will say so
            for seat, made in zip(hand.seats, decisions, strict=True):
                if made != seat.decisions:
                    seat.decisions, seat.moved = made, time.monotonic()

        return told

    # --- deciding in one place ---

    def _start_oracle(self) -> None:
        if self.training.inference != "central":
            return
        options = {"num_cpus": 0, "num_gpus": self.gpus, "max_concurrency": self.training.all_pools + 4}
        errors = self.ray.exceptions
        while True:
            self.oracle = self.ray.remote(Oracle).options(**options, scheduling_strategy=here(self.ray)).remote()
            try:
                return self.ray.get(self.oracle.prepare.remote(self.bundle, self.gpus > 0), timeout=FOUND_WITHIN)
            except errors.RayTaskError as error:
                raise plain(error) from error
            except errors.GetTimeoutError:
                raise no_room(f"the process that decides for all actors, with {self.gpus:g} GPUs,") from None
            except errors.RayError as error:
                self.restarts.add(
                    f"the process that decides for all actors ended while it was made ({first_line(error)})"
                )

    def publish(self, weights: tuple[int, Any]) -> None:
        """Players get the newest weights with every rollout; who decides for them gets them here."""
        if self.oracle is not None:
            self.oracle.take.remote(*weights)

    def replace_oracle(self, hand: Hand, life: int, weights: tuple[int, Any]) -> None:
        """It is gone, a player says: another, and with it all players, who knew only the old one."""
        if life != hand.life:
            return
        self.restarts.add("the process that decides for all actors is gone")
        self.ray.kill(self.oracle)
        self._start_oracle()
        self.publish(weights)
        for other in self.hands:
            self._renew(other)
