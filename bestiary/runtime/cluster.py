"""The cluster runtime: the very Actor and Learner of the others, in processes of Ray's, on as many machines as it has.

    players (Ray actors)      a process each: pools and a copy of the agent, or none where an oracle decides for them
    students (Ray actors)     learn; several share every batch out and add up their gradients
    the driver (this)         hands references around: this rollout to the students, those weights to that player; writes
                              the run folder, and replaces what dies

Rollouts and weights never pass through the driver. It begins a rollout only while few enough are in flight, so memory is
bounded wherever they are; and it keeps one lesson waiting behind the one that is being learnt from.
"""

import time
from collections import deque
from dataclasses import dataclass
from typing import Any

from bestiary.algorithms.algorithm import updates
from bestiary.rollout import episodes_of
from bestiary.runtime.answers import Answers, first_line, plain
from bestiary.runtime.build import rollouts_in_flight
from bestiary.runtime.bundle import Bundle
from bestiary.runtime.crew import Crew, Hand, Seat
from bestiary.runtime.exchange import Exchange
from bestiary.runtime.learner import Learner
from bestiary.runtime.load import Load
from bestiary.runtime.restarts import Restarts
from bestiary.runtime.room import gpus_each
from bestiary.runtime.session import Session
from bestiary.runtime.students import Students
from bestiary.runtime.wire import unpack_state
from bestiary.runtime.workers import Lesson, Played

LESSONS = 2  # that are given to the students at a time: one learnt from, one waiting
SPAN = 3.0  # seconds that shares of time are taken over: players tell what they did a rollout at a time


def train(ray: Any, bundle: Bundle, learner: Learner, session: Session, restarts: Restarts, at_step: int) -> None:
    """Until the run is done or asked to stop. `learner` is the driver's own, brought up to date when it is looked at."""
    Driver(ray, bundle, learner, session, restarts, at_step).run()


@dataclass
class Arrived:
    """A rollout that all students have."""

    number: int
    played: Played


class Driver:
    def __init__(self, ray: Any, bundle: Bundle, learner: Learner, session: Session, restarts: Restarts, at_step: int):
        self.ray, self.training, self.learner, self.session = ray, session.config.training, learner, session
        self.restarts, self.answers = restarts, Answers(ray)
        sent, gpus = ray.put(bundle), gpus_each(ray, self.training)
        self.students = Students(ray, sent, self.training, gpus)
        self.crew = Crew(ray, self.training, sent, self.answers, restarts, at_step, gpus)
        self.lessons: deque[tuple[list[Arrived], list[Any]]] = deque()
        self.attempts: dict[int, int] = {}  # how often each rollout was begun, of those that are waited for
        self.dropped = session.counts.get("dropped", 0)  # rollouts that came too late to be learnt from
        size, pools, algorithm = self.training.pool_size, self.training.all_pools, learner.algorithm
        self.joined, self.made = algorithm.rollouts(size, pools), updates(algorithm, size, pools)
        self.batch_size = algorithm.batch_size(size, pools)
        self.load = Load(self.crew.clocks)
        self.shares: dict[str, float] = {}

    def run(self) -> None:
        try:
            self.exchange = self._start()
            while not (self.session.done and not self.lessons):
                self._begin_rollouts()
                self._begin_lessons()
                self.answers.hear()
                self.crew.look_after(learning=bool(self.lessons))
                if self.session.due and not self.lessons:
                    self.students.copy_into(self.learner)
                    self.session.attend()
            self.students.copy_into(self.learner)
        finally:
            self.students.end()
            self.crew.end()

    def _start(self) -> Exchange[tuple[int, Any], Arrived]:
        """Learners have their place first: they are few, and without them there is nothing to play for."""
        self.students.find_room()
        self.crew.start()
        first = self.learner.version, self.students.start(self.learner)
        self.crew.publish(first)
        algorithm, training = self.learner.algorithm, self.training
        return Exchange(
            first,
            training.all_pools,
            rollouts_in_flight(algorithm, training),
            0 if algorithm.on_policy else training.lag,
            self.joined if algorithm.on_policy else 1,
            in_order=False,
        )

    # --- rollouts ---

    def _begin_rollouts(self) -> None:
        if self.session.done or self._enough() or self.session.due:
            return
        for hand, seat in self.crew.free():
            if (begun := self.exchange.try_begin(seat.index)) is not None:
                self._play(hand, seat, *begun)

    def _enough(self) -> bool:
        """What is on its way brings the run to its end."""
        assert self.training.steps is not None
        waiting = self.exchange.begun - self.exchange.learnt
        each = self.learner.algorithm.unroll_length * self.training.pool_size
        whole = -(-(self.training.steps - self.learner.steps) // (each * self.joined)) * self.joined
        return waiting >= whole and not any(self.exchange.owed.values())

    def _play(self, hand: Hand, seat: Seat, number: int, weights: tuple[int, Any]) -> None:
        attempt = self.attempts[number] = self.attempts.get(number, 0) + 1
        played, shares = self.crew.play(hand, seat, number, weights, self.batch_size)
        life = hand.life
        self.answers.expect(played, lambda found: self._played(hand, seat, life, number, attempt, found, shares))

    def _played(
        self, hand: Hand, seat: Seat, life: int, number: int, attempt: int, reference: Any, shares: list[Any]
    ) -> None:
        if seat.playing == number and life == hand.life:
            seat.playing = None
        errors = self.ray.exceptions
        try:
            played: Played = self.ray.get(reference)
        except errors.RayTaskError as error:  # first, because it may be of the other kinds, too
            self._lose(number, attempt)
            if isinstance(error.cause, errors.ObjectLostError):
                return  # its weights went with a learner, who will say so
            if isinstance(error.cause, errors.RayError) and self.crew.oracle is not None:
                return self.crew.replace_oracle(hand, life, self.exchange.newest())
            return self.restarts.add(f"{hand.name}: {first_line(error.cause)}")
        except errors.ObjectLostError:  # its machine went before its answer came
            return self._lose(number, attempt)
        except errors.RayError as error:
            self._lose(number, attempt)
            return self.crew.replace(hand, life, f"{hand.name} is gone ({first_line(error)})")
        self.crew.heard = time.monotonic()
        for phase, seconds in played.seconds.items():
            seat.clock.seconds[phase] += seconds
        if attempt != self.attempts.get(number):
            return
        fetched = self.students.fetch(number, shares)
        left = set(fetched)

        def arrived(reference: Any) -> None:
            left.discard(reference)
            self._fetched(Arrived(number, played), attempt, reference, whole=not left)

        for one in fetched:
            self.answers.expect(one, arrived)

    def _fetched(self, arrived: Arrived, attempt: int, reference: Any, whole: bool) -> None:
        try:
            self.students.ask(lambda: self.ray.get(reference))
        except self.ray.exceptions.RayTaskError as error:
            if not isinstance(error.cause, self.ray.exceptions.ObjectLostError):
                raise plain(error) from error
            self._lose(arrived.number, attempt)  # it was on a machine that is gone
        if not whole or self.attempts.get(arrived.number) != attempt:
            return
        if self._too_old(arrived.played):
            self.dropped += 1
            self._lose(arrived.number, attempt)
        else:
            self.exchange.hand_over(arrived.number, arrived)

    def _too_old(self, played: Played) -> bool:
        """Whether more updates than --max-lag would lie between its first decision and the last update made of it."""
        if self.exchange.in_order:
            return False
        assert self.training.max_lag is not None
        ahead = (self.exchange.arrived - self.exchange.learnt) // self.joined  # lessons before the one it will be in
        return self.learner.version + (ahead + 1) * self.made - 1 - played.first_version > self.training.max_lag

    def _lose(self, number: int, attempt: int) -> None:
        """A rollout will not come, or not whole: others take its place, and what is still on its way is not waited for."""
        if self.attempts.get(number) != attempt:
            return
        for again in self.exchange.lose(number):
            if self.exchange.in_order:
                self.attempts[again] = self.attempts.get(again, 0) + 1
            else:
                del self.attempts[again]  # a number of which nothing is heard again
            self.students.forget(again)

    # --- lessons ---

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
            taught = self.students.learn([one.number for one in arrived])
            self.lessons.append((arrived, taught))
            self.answers.expect(taught[0], lambda reference: self._learnt())
            for other in taught[1:]:
                self.answers.expect(other, lambda reference: self.students.ask(lambda: self.ray.get(reference)))
            given += self.joined

    def _learnt(self) -> None:
        arrived, taught = self.lessons.popleft()
        lesson: Lesson = self.students.ask(lambda: self.ray.get(taught[0]))
        learner = self.learner
        learner.steps, learner.version, learner.skipped = (lesson.counters[k] for k in ("steps", "version", "skipped"))
        learner.skipped_in_a_row = lesson.skipped_in_a_row
        for name, array in lesson.statistics.items():
            getattr(learner.adaptive, name).copy_(unpack_state({"": {"": array}})[""][""])
        newest = learner.version, lesson.weights[0]
        self.exchange.publish(newest, self.joined)
        self.crew.publish(newest)
        for one in arrived:
            del self.attempts[one.number]
        self.load.waited += lesson.waited
        self.session.counts = {"restarts": self.restarts.total, "dropped": self.dropped}
        episodes = episodes_of([one.played for one in arrived])
        if not self.shares or time.monotonic() - self.load.last["clock"] > SPAN:
            self.shares = self.load.shares()
        self.session.record(lesson.metrics, episodes, {**self.shares, "max_queue": len(self.exchange.ready)})
