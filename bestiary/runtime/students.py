"""The processes that learn on a cluster, as the driver sees them: one group, which is lost as a whole where one of them is."""

from collections.abc import Callable
from typing import Any

from bestiary.config import Training
from bestiary.errors import RunError, UserError
from bestiary.runtime.answers import first_line, plain
from bestiary.runtime.learner import Learner
from bestiary.runtime.restarts import LearnersLost
from bestiary.runtime.room import FOUND_WITHIN, here, no_room
from bestiary.runtime.wire import pack_state, unpack_state
from bestiary.runtime.workers import Parted, Student

MEETING = 120.0  # seconds that students wait for each other, at the start and in every update


class Students:
    def __init__(self, ray: Any, bundle: Any, training: Training, gpus: float):
        self.ray, self.bundle, self.training, self.gpus = ray, bundle, training, gpus
        self.handles: list[Any] = []
        self.machines: list[str] = []  # their addresses

    def find_room(self) -> None:
        """Have a process for each."""
        ray, count = self.ray, self.training.learners
        options: dict[str, Any] = {
            "num_cpus": self.training.workers,  # none: it shares its machine's cores, behind the players
            "num_gpus": self.gpus,
            "scheduling_strategy": "SPREAD" if count > 1 else here(ray),
        }
        student = ray.remote(concurrency_groups={"io": 1})(_with_io(ray, Student))
        self.handles = [student.options(**options).remote() for _ in range(count)]
        try:
            self.machines = self.ask(lambda: ray.get([s.where.remote() for s in self.handles], timeout=FOUND_WITHIN))
        except ray.exceptions.GetTimeoutError:
            wanted = f"{self.training.workers} CPUs" + (f" and {self.gpus:g} GPUs" if self.gpus else "")
            raise no_room(f"{count} learner{'s' * (count > 1)} of {wanted}") from None

    def start(self, learner: Learner) -> Any:
        """Make them what the driver's learner is; returns a reference to its weights."""
        ray, count, machines = self.ray, self.training.learners, self.machines
        self._all(
            s.prepare.remote(self.bundle, rank, self.gpus > 0, machines.count(machines[rank]))
            for rank, s in enumerate(self.handles)
        )
        if count > 1:
            together = len(set(machines)) == 1
            meeting = self.ask(lambda: ray.get(self.handles[0].choose_meeting.remote(together)))
            shared = 0 < self.gpus < 1  # nccl wants a GPU for each
            self._all(s.join.remote(meeting, count, together, shared, MEETING) for s in self.handles)
        state, counters = ray.put(pack_state(learner.save())), learner.counters()
        self._all(s.load.remote(state, counters) for s in self.handles)
        return self.ask(lambda: ray.get(self.handles[0].weights.remote()))

    def _all(self, answers: Any) -> None:
        asked = list(answers)
        self.ask(lambda: self.ray.get(asked))

    def end(self) -> None:
        for handle in self.handles:
            self.ray.kill(handle)

    def fetch(self, number: int, shares: list[Any]) -> list[Any]:
        """Have each bring its share of a rollout to itself; a reference each."""
        return [s.fetch.remote(number, [share]) for s, share in zip(self.handles, shares, strict=True)]

    def forget(self, number: int) -> None:
        for student in self.handles:
            student.forget.remote(number)

    def learn(self, numbers: list[int]) -> list[Any]:
        """A reference each; the first one's Lesson has the weights."""
        return [student.learn.remote(numbers) for student in self.handles]

    def copy_into(self, learner: Learner) -> None:
        """Make a learner what they are."""
        state, counters = self.ask(lambda: self.ray.get(self.handles[0].save.remote()))
        learner.load(unpack_state(state), counters)

    def ask(self, answer: Callable[[], Any]) -> Any:
        """What a student answers; where one of them is gone, all are."""
        try:
            return answer()
        except self.ray.exceptions.RayTaskError as error:
            cause = error.cause
            if isinstance(cause, RunError | UserError):
                raise plain(error) from error
            if isinstance(cause, Parted):
                raise LearnersLost(f"a learner lost the others ({cause})") from error
            raise
        except self.ray.exceptions.GetTimeoutError:
            raise
        except self.ray.exceptions.RayError as error:
            raise LearnersLost(f"a learner is gone ({first_line(error)})") from error


def _with_io(ray: Any, student: type) -> type:
    """Fetching goes on beside learning: in a thread of its own."""
    for name in ("fetch", "forget"):
        setattr(student, name, ray.method(concurrency_group="io")(getattr(student, name)))
    return student
