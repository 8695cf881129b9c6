"""The cluster runtime: the very Actor and Learner of the others, in processes of Ray's, on as many machines as it has.

    players (Ray actors)      a process each: pools and a copy of the agent, or none where an oracle decides for them
    students (Ray actors)     learn; several share every batch out and add up their gradients
    the driver (this)         hands references around: this rollout to the students, those weights to that player; writes
                              the run folder, and replaces what dies

Rollouts and weights never pass through the driver. It begins a rollout only while few enough are in flight, so memory is
bounded wherever they are; and it keeps one lesson waiting behind the one that is being learnt from.
"""

import tempfile
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bestiary.algorithms.algorithm import updates
from bestiary.config import Config
from bestiary.console import warn
from bestiary.errors import RunError, UserError
from bestiary.rollout import episodes_of
from bestiary.runtime.bundle import Bundle
from bestiary.runtime.exchange import Exchange
from bestiary.runtime.learner import Learner
from bestiary.runtime.load import Clock, Load
from bestiary.runtime.local import PATIENCE
from bestiary.runtime.restarts import LearnersLost, Restarts, first_line
from bestiary.runtime.session import Session
from bestiary.runtime.train import rollouts_in_flight
from bestiary.runtime.wire import pack_state, unpack_state
from bestiary.runtime.workers import Lesson, Oracle, Played, Player, Student

LESSONS = 2  # that are given to the students at a time: one learnt from, one waiting
SPAN = 3.0  # seconds that shares of time are taken over: players tell what they did a rollout at a time
MEETING = 120.0  # seconds that students wait for each other, at the start and in every update


@dataclass
class Seat:
    """A pool of a player's, as the driver sees it."""

    index: int  # among all pools of the run
    number: int  # among those of its player
    clock: Clock
    playing: int | None = None  # which rollout
    decisions: int = -1  # that it had made when it was last asked, and ...
    moved: float = 0.0  # ... when that was last news


@dataclass
class Hand:
    """A player, as the driver sees it."""

    index: int
    seats: list[Seat]
    handle: Any = None
    life: int = 0
    ready: bool = False
    machine: str = ""
    asked: bool = False  # how far it is


@dataclass
class Arrived:
    """A rollout that all students have."""

    number: int
    played: Played


class Driver:
    def __init__(self, ray: Any, config: Config, learner: Learner, session: Session, restarts: Restarts, at_step: int):
        self.ray, self.config, self.training = ray, config, config.training
        self.learner, self.session, self.restarts, self.at_step = learner, session, restarts, at_step
        self.bundle, self.player = ray.put(Bundle.of(config)), ray.remote(Player)
        self.pending: dict[Any, Callable[[Any], None]] = {}  # what Ray is to answer, and what then
        self.lessons: deque[tuple[list[Arrived], list[Any]]] = deque()
        self.dropped = session.counts.get("dropped", 0)  # rollouts that came too late to be learnt from
        self.attempts: dict[int, int] = {}  # how often each rollout was begun
        training, algorithm = self.training, learner.algorithm
        pools, size = training.all_pools, training.pool_size
        self.joined, self.made = algorithm.rollouts(size, pools), updates(algorithm, size, pools)
        self.batch_size = algorithm.batch_size(size, pools)
        crew = range(training.actors)
        self.hands = [
            Hand(k, [Seat(k * training.pools + n, n, Clock(f"actor {k}, pool {n}")) for n in range(training.pools)])
            for k in crew
        ]
        self.seats = deque(
            (hand, seat) for n in range(training.pools) for hand in self.hands for seat in [hand.seats[n]]
        )
        self.load = Load([seat.clock for hand in self.hands for seat in hand.seats])
        self.shares: dict[str, float] = {}
        self.oracle: Any = None
        self.students: list[Any] = []
        self.heard = self.said = time.monotonic()

    # --- the loop ---

    def run(self) -> None:
        try:
            self.gpus = self._gpus()
            self._start_oracle()
            for hand in self.hands:
                self._start_player(hand)
            self.exchange = self._start_students()
            while not (self.session.done and not self.lessons):
                self._begin_rollouts()
                self._begin_lessons()
                self._hear()
                self._look_after_players()
                if self.session.due and not self.lessons:
                    self.bring_up_to_date()
                    self.session.attend()
            self.bring_up_to_date()
        finally:
            for handle in [*self.students, *(hand.handle for hand in self.hands), self.oracle]:
                if handle is not None:
                    self.ray.kill(handle)

    def _hear(self) -> None:
        """Wait until something has happened, and see to all that has."""
        if not (waiting := list(self.pending)):
            return time.sleep(0.01)
        some, _ = self.ray.wait(waiting, num_returns=1, timeout=0.5)
        if some:
            some, _ = self.ray.wait(waiting, num_returns=len(waiting), timeout=0)
        for reference in some:
            self.pending.pop(reference)(reference)

    def bring_up_to_date(self) -> None:
        """Make the driver's learner what the students' are, to be saved or validated."""
        state, counters = self._of_students(lambda: self.ray.get(self.students[0].save.remote()))
        self.learner.load(unpack_state(state), counters)

    # --- playing ---

    def _start_player(self, hand: Hand) -> None:
        options = {"num_cpus": 1, "max_concurrency": self.training.pools + 2, "scheduling_strategy": "SPREAD"}
        hand.handle = self.player.options(**options).remote()
        hand.ready, life = False, hand.life
        prepared = hand.handle.prepare.remote(self.bundle, hand.index, self.at_step, life, self.oracle)
        self.pending[prepared] = lambda reference: self._player_ready(hand, life, reference)

    def _player_ready(self, hand: Hand, life: int, reference: Any) -> None:
        if life != hand.life:
            return
        try:
            hand.machine = self.ray.get(reference)
        except self.ray.exceptions.RayTaskError as error:
            raise _plain(error) if life == 0 else RunError(first_line(error.cause)) from error
        except self.ray.exceptions.RayActorError as error:
            return self._replace(hand, f"actor {hand.index} ended while it was made ({first_line(error)})")
        hand.ready = True

    def _begin_rollouts(self) -> None:
        """Whoever is free begins one, those first that have waited longest."""
        if self.session.done or self._enough() or self.session.due:
            return
        for _ in range(len(self.seats)):
            hand, seat = self.seats[0]
            self.seats.rotate(-1)
            if hand.ready and seat.playing is None and (begun := self.exchange.try_begin(seat.index)) is not None:
                self._play(hand, seat, *begun)

    def _enough(self) -> bool:
        """What is on its way brings the run to its end."""
        assert self.training.steps is not None
        waiting = self.exchange.begun - self.exchange.learnt
        each = self.learner.algorithm.unroll_length * self.training.pool_size
        whole = -(-(self.training.steps - self.learner.steps) // (each * self.joined)) * self.joined
        return waiting >= whole and not any(self.exchange.owed.values())

    def _play(self, hand: Hand, seat: Seat, number: int, weights: tuple[int, Any]) -> None:
        version, reference = weights
        seat.playing, seat.moved = number, time.monotonic()
        attempt = self.attempts[number] = self.attempts.get(number, 0) + 1
        play = hand.handle.play.options(num_returns=1 + self.training.learners)
        arguments = [] if self.oracle is not None else reference
        played, *shares = play.remote(seat.number, version, arguments, self.batch_size)
        life = hand.life
        self.pending[played] = lambda found: self._played(hand, seat, life, number, attempt, found, shares)

    def _played(
        self, hand: Hand, seat: Seat, life: int, number: int, attempt: int, reference: Any, shares: list[Any]
    ) -> None:
        if seat.playing == number and life == hand.life:
            seat.playing = None
        try:
            played: Played = self.ray.get(reference)
        except self.ray.exceptions.RayTaskError as error:  # first, because it may be of the other kinds, too
            self._lose(number, attempt)
            if isinstance(error.cause, self.ray.exceptions.RayActorError) and self.oracle is not None:
                return self._replace_oracle(life, hand)
            return self.restarts.add(f"actor {hand.index} on {hand.machine}: {first_line(error.cause)}")
        except self.ray.exceptions.RayActorError as error:
            self._lose(number, attempt)
            return self._replace(hand, f"actor {hand.index} on {hand.machine} is gone ({first_line(error)})", life)
        except self.ray.exceptions.RayError:  # its machine went before its answer came
            return self._lose(number, attempt)
        self.heard = time.monotonic()
        for phase, seconds in played.seconds.items():
            seat.clock.seconds[phase] += seconds
        if attempt != self.attempts.get(number):
            return
        fetched = [student.fetch.remote(number, [share]) for student, share in zip(self.students, shares, strict=True)]
        left = set(fetched)

        def arrived(reference: Any) -> None:
            left.discard(reference)
            self._fetched(Arrived(number, played), attempt, reference, whole=not left)

        self.pending |= dict.fromkeys(fetched, arrived)

    def _too_old(self, played: Played) -> bool:
        """Whether more updates than --max-lag would lie between its first decision and the last update made of it."""
        if self.exchange.in_order:
            return False
        assert self.training.max_lag is not None
        ahead = (self.exchange.arrived - self.exchange.learnt) // self.joined  # lessons before the one it will be in
        return self.learner.version + (ahead + 1) * self.made - 1 - played.first_version > self.training.max_lag

    def _fetched(self, arrived: Arrived, attempt: int, reference: Any, whole: bool) -> None:
        try:
            self._of_students(lambda: self.ray.get(reference))
        except self.ray.exceptions.RayTaskError:  # it was on a machine that is gone
            self._lose(arrived.number, attempt)
        if not whole or self.attempts.get(arrived.number) != attempt:
            return
        if self._too_old(arrived.played):
            self.dropped += 1
            self._lose(arrived.number, attempt)
        else:
            self.exchange.hand_over(arrived.number, arrived)

    def _lose(self, number: int, attempt: int) -> None:
        """A rollout will not come, or not whole: others take its place."""
        if self.attempts.get(number) != attempt:
            return
        for again in self.exchange.lose(number):
            self.attempts[again] = self.attempts.get(again, 0) + 1  # what is still on its way is not waited for
            for student in self.students:
                student.forget.remote(again)

    def _replace(self, hand: Hand, why: str, life: int | None = None) -> None:
        """A player is gone: another takes its seats, with fresh environments and the newest weights."""
        if life is not None and life != hand.life:
            return  # already done
        self.ray.kill(hand.handle)
        hand.life, hand.asked = hand.life + 1, False
        for seat in hand.seats:
            seat.playing = None
        self.restarts.add(why)
        self._start_player(hand)

    def _look_after_players(self) -> None:
        """Ask those that play how far they are, and replace those that have not moved for long; tell the user what stalls."""
        now, timeout = time.monotonic(), self.training.actor_timeout
        for hand in self.hands:
            still = max((now - seat.moved for seat in hand.seats if seat.playing is not None), default=0.0)
            if not hand.ready:
                continue
            if still > timeout:
                self._replace(hand, f"actor {hand.index} on {hand.machine} has not decided anything for {still:.0f} s")
            elif not hand.asked and still > min(timeout / 4, 10.0):
                hand.asked = True
                progress, life = hand.handle.progress.remote(), hand.life
                self.pending[progress] = lambda found, hand=hand, life=life: self._told(hand, life, found)  # type: ignore[misc]
        if self.lessons:
            self.heard = now
        if now - self.heard > PATIENCE and now - self.said > PATIENCE:
            self.said = now
            absent = [hand.index for hand in self.hands if not hand.ready]
            wait = f"; actors {', '.join(map(str, absent[:8]))} wait for room on the cluster" if absent else ""
            warn(f"no rollout for {now - self.heard:.0f} s{wait}")

    def _told(self, hand: Hand, life: int, reference: Any) -> None:
        hand.asked = False
        try:
            decisions = self.ray.get(reference)
        except self.ray.exceptions.RayError:
            return  # its rollouts will say so
        for seat, made in zip(hand.seats, decisions, strict=True):
            if life == hand.life and made != seat.decisions:
                seat.decisions, seat.moved = made, time.monotonic()

    # --- learning ---

    def _start_students(self) -> Exchange[tuple[int, Any], Arrived]:
        ray, count = self.ray, self.training.learners
        options: dict[str, Any] = {
            "num_cpus": self.training.workers,  # none: it shares its machine's cores, behind the players
            "num_gpus": self.gpus,
            "scheduling_strategy": "SPREAD" if count > 1 else _here(ray),
        }
        student = ray.remote(concurrency_groups={"io": 1})(_with_io(ray, Student))
        self.students = [student.options(**options).remote() for _ in range(count)]
        places = self._of_students(lambda: ray.get([s.where.remote() for s in self.students]))
        machines = [address for address, _ in places]
        ready = [
            s.prepare.remote(self.bundle, rank, self.gpus > 0, machines.count(machines[rank]))
            for rank, s in enumerate(self.students)
        ]
        self._of_students(lambda: ray.get(ready))
        if count > 1:
            self._introduce(places)
        state, counters = ray.put(pack_state(self.learner.save())), self.learner.counters()
        self._of_students(lambda: ray.get([s.load.remote(state, counters) for s in self.students]))
        first = self._of_students(lambda: ray.get(self.students[0].weights.remote()))
        algorithm, training = self.learner.algorithm, self.training
        self._publish_to_oracle(self.learner.version, first)
        return Exchange(
            (self.learner.version, first),
            training.all_pools,
            rollouts_in_flight(algorithm, training),
            0 if algorithm.on_policy else training.lag,
            self.joined if algorithm.on_policy else 1,
            in_order=False,
        )

    def _introduce(self, places: list[tuple[str, str]]) -> None:
        """Have the students meet: through a file on one machine, over the network where they are on several."""
        if len({address for address, _ in places}) == 1:
            folder = tempfile.TemporaryDirectory(prefix="bestiary-meeting-")
            meeting, interface = f"file://{Path(folder.name) / 'students'}", "lo"
        else:
            folder, (address, port) = None, places[0]
            meeting, interface = f"tcp://{address}:{port}", None
        met = [s.join.remote(meeting, len(places), interface, MEETING) for s in self.students]
        self._of_students(lambda: self.ray.get(met))
        if folder is not None:
            folder.cleanup()

    def _begin_lessons(self) -> None:
        assert self.training.steps is not None
        given = len(self.lessons) * self.joined
        each = self.learner.algorithm.unroll_length * self.training.pool_size
        while len(self.lessons) < LESSONS and not self.session.due:
            if self.session.done or self.learner.steps + given * each >= self.training.steps:
                return
            found = [self.exchange.look(given + k) for k in range(self.joined)]
            arrived = [one for one in found if one is not None]
            if len(arrived) < self.joined:
                return
            numbers = [one.number for one in arrived]
            taught = [student.learn.remote(numbers) for student in self.students]
            self.lessons.append((arrived, taught))
            self.pending[taught[0]] = lambda reference: self._learnt()
            self.pending |= dict.fromkeys(
                taught[1:], lambda reference: self._of_students(lambda: self.ray.get(reference))
            )
            given += self.joined

    def _learnt(self) -> None:
        arrived, taught = self.lessons.popleft()
        lesson: Lesson = self._of_students(lambda: self.ray.get(taught[0]))
        learner = self.learner
        learner.steps, learner.version, learner.skipped = (lesson.counters[k] for k in ("steps", "version", "skipped"))
        learner.skipped_in_a_row = lesson.skipped_in_a_row
        for name, array in lesson.statistics.items():
            getattr(learner.adaptive, name).copy_(unpack_state({"": {"": array}})[""][""])
        (weights,) = lesson.weights
        self.exchange.publish((learner.version, weights), self.joined)
        self._publish_to_oracle(learner.version, weights)
        for one in arrived:
            del self.attempts[one.number]
        self.load.waited += lesson.waited
        self.session.counts = {"restarts": self.restarts.total, "dropped": self.dropped}
        episodes = episodes_of([one.played for one in arrived])
        if not self.shares or time.monotonic() - self.load.last["clock"] > SPAN:
            self.shares = self.load.shares()
        self.session.record(lesson.metrics, episodes, {**self.shares, "max_queue": len(self.exchange.ready)})

    def _of_students(self, ask: Callable[[], Any]) -> Any:
        """What a student answers; where one of them is gone, all are."""
        try:
            return ask()
        except self.ray.exceptions.RayTaskError as error:
            cause = error.cause
            if isinstance(cause, RunError | UserError):
                raise _plain(error) from error
            if isinstance(cause, RuntimeError) and self.training.learners > 1:
                raise LearnersLost(f"a learner lost the others ({first_line(cause)})") from error
            raise
        except self.ray.exceptions.RayActorError as error:
            raise LearnersLost(f"a learner is gone ({first_line(error)})") from error

    # --- deciding in one place ---

    def _gpus(self) -> float:
        """GPUs for each student and the oracle: a whole one, half of one, or none."""
        have = self.ray.cluster_resources().get("GPU", 0)
        wanted = self.training.learners + (self.training.inference == "central")
        if self.training.device == "cpu" or (self.training.device == "auto" and have == 0):
            return 0
        if 2 * have < wanted:
            raise UserError(
                f"--device {self.training.device}: {wanted} processes want a GPU, the cluster has {have:.0f}; --device cpu"
            )
        return 1 if have >= wanted else 0.5

    def _start_oracle(self) -> None:
        if self.training.inference != "central":
            return
        options = {"num_cpus": 0, "num_gpus": self.gpus, "max_concurrency": self.training.all_pools + 4}
        self.oracle = self.ray.remote(Oracle).options(**options, scheduling_strategy=_here(self.ray)).remote()
        try:
            self.ray.get(self.oracle.prepare.remote(self.bundle, self.gpus > 0))
        except self.ray.exceptions.RayTaskError as error:
            raise _plain(error) from error

    def _publish_to_oracle(self, version: int, weights: Any) -> None:
        if self.oracle is not None:
            self.oracle.take.remote(version, weights)

    def _replace_oracle(self, life: int, hand: Hand) -> None:
        """It is gone: another, and with it all players, who knew only the old one."""
        if life != hand.life:
            return
        self.restarts.add("the process that decides for all actors is gone")
        self.ray.kill(self.oracle)
        self._start_oracle()
        self._publish_to_oracle(*self.exchange.newest())
        for other in self.hands:
            self.ray.kill(other.handle)
            other.life, other.asked = other.life + 1, False
            for seat in other.seats:
                seat.playing = None
            self._start_player(other)


def train(ray: Any, config: Config, learner: Learner, session: Session, restarts: Restarts, at_step: int) -> None:
    """Until the run is done or asked to stop. `learner` is the driver's own, brought up to date when it is looked at."""
    Driver(ray, config, learner, session, restarts, at_step).run()


def _with_io(ray: Any, student: type) -> type:
    """Fetching goes on beside learning: in a thread of its own."""
    for name in ("fetch", "forget"):
        setattr(student, name, ray.method(concurrency_group="io")(getattr(student, name)))
    return student


def _here(ray: Any) -> Any:
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)


def _plain(error: Any) -> Exception:
    """A mistake or a failure of ours, out of Ray's wrapping."""
    cause = error.cause
    if isinstance(cause, UserError):
        return UserError(*cause.problems)
    return RunError(first_line(cause))
