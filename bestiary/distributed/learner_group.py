"""Control of the remote learners by the driver. If a learner is lost, `LearnerGroup.get` raises LearnersLostError."""

from collections.abc import Iterable
from typing import Any, NamedTuple

from bestiary.config.training_options import Training
from bestiary.distributed.faults import GroupSplitError, LearnersLostError, error_summary, unwrap_task_error
from bestiary.distributed.health_check import HealthCheck
from bestiary.distributed.learner_worker import LearnerWorker
from bestiary.distributed.placement import PLACEMENT_TIMEOUT, placement_error, prefer_driver_node
from bestiary.distributed.serialisation import pack_state, unpack_state
from bestiary.training.learner import Learner
from bestiary.utils.errors import RunError, UserError

COLLECTIVE_TIMEOUT = 120.0  # maximum time in seconds that learners wait for each other, at the start and in each update
HEALTH_INTERVAL = 0.5  # time between two checks whether the learners answer, in seconds


class RemoteWeights(NamedTuple):
    """A version of the weights, stored in Ray's object store."""

    version: int
    reference: Any  # object reference of the weights, which are stored as a list of arrays


class LearnerGroup:
    """The remote learners of a run.

    All learners have the same weights. Each learner computes the gradient of its part of each batch.
    """

    def __init__(self, ray: Any, shipped_config: Any, training: Training, gpus: float):
        self.ray = ray
        self.shipped_config = shipped_config  # object reference of the ShippedConfig
        self.training = training
        self.gpus = gpus  # number of GPUs of each learner
        self.workers: list[Any] = []  # Ray handles of the LearnerWorker processes, in the order of their ranks
        self.addresses: list[str] = []  # IP addresses of the workers' nodes, in the same order
        self.health_checks: list[HealthCheck] = []  # one per worker, in the same order

    def place(self) -> None:
        """Start the learner processes and wait until Ray has placed all of them on nodes.

        Raises:
            RunError: the cluster had no free resources for the learners within PLACEMENT_TIMEOUT.
        """
        ray = self.ray
        count = self.training.learners
        options: dict[str, Any] = {
            # If --learner-threads is 0, Ray reserves no CPU for a learner, so the learner shares the cores of its node
            # with actors.
            "num_cpus": self.training.learner_threads,
            "num_gpus": self.gpus,
            "scheduling_strategy": "SPREAD" if count > 1 else prefer_driver_node(ray),
        }
        # Separate threads fetch rollouts and answer the health check while `learn` runs.
        for name, group in (("fetch_rollout", "io"), ("discard_rollout", "io"), ("answer", "health")):
            setattr(LearnerWorker, name, ray.method(concurrency_group=group)(getattr(LearnerWorker, name)))
        worker_class = ray.remote(concurrency_groups={"io": 1, "health": 1})(LearnerWorker)
        self.workers = [worker_class.options(**options).remote() for _ in range(count)]
        self.health_checks = [HealthCheck(ray, worker, self.training.learner_timeout) for worker in self.workers]
        try:
            self.addresses = self.get([w.node_address.remote() for w in self.workers], PLACEMENT_TIMEOUT)
        except ray.exceptions.GetTimeoutError:
            resources = f"{self.training.learner_threads} CPUs" + (f" and {self.gpus:g} GPUs" if self.gpus else "")
            raise placement_error(f"{count} learner{'s' * (count > 1)} with {resources} each") from None

    def start(self, learner: Learner) -> RemoteWeights:
        """Set up the learners, connect them, and load the state of `learner` into each. Return the initial weights."""
        count = self.training.learners
        self._wait(
            worker.setup.remote(self.shipped_config, rank, self.gpus > 0, self.addresses.count(self.addresses[rank]))
            for rank, worker in enumerate(self.workers)
        )
        if count > 1:
            same_node = len(set(self.addresses)) == 1
            shared_gpu = 0 < self.gpus < 1
            rendezvous = self.get(self.workers[0].choose_rendezvous.remote(same_node))
            self._wait(
                worker.join_group.remote(rendezvous, count, same_node, shared_gpu, COLLECTIVE_TIMEOUT)
                for worker in self.workers
            )
        state = self.ray.put(pack_state(learner.save()))
        counters = learner.counters()
        self._wait(worker.load_state.remote(state, counters) for worker in self.workers)
        return RemoteWeights(learner.version, self.get(self.workers[0].put_weights.remote()))

    def stop(self) -> None:
        """End the learner processes."""
        for worker in self.workers:
            self.ray.kill(worker)

    def check_health(self) -> None:
        """Raise LearnersLostError if a learner has not answered for --learner-timeout seconds."""
        for rank, health_check in enumerate(self.health_checks):
            if seconds := health_check.silent_seconds():
                host = f" on {self.addresses[rank]}" if self.addresses else ""
                raise LearnersLostError(f"learner {rank}{host} has not answered for {seconds:.0f} s")

    def fetch_rollout(self, rollout_id: int, shards: list[Any]) -> list[Any]:
        """Let each learner fetch its part of a rollout. Return the object reference of each learner's call.

        `shards[rank]` is the object reference of the part for the learner with this rank.
        """
        return [
            worker.fetch_rollout.remote(rollout_id, [shard]) for worker, shard in zip(self.workers, shards, strict=True)
        ]

    def discard_rollout(self, rollout_id: int) -> None:
        """Let each learner delete its part of a rollout, if the learner has fetched it."""
        for worker in self.workers:
            worker.discard_rollout.remote(rollout_id)

    def learn(self, rollout_ids: list[int]) -> list[Any]:
        """Let the learners compute updates from rollouts that they have fetched.

        Return the object reference of an `UpdateResult` for each learner.
        """
        return [worker.learn.remote(rollout_ids) for worker in self.workers]

    def copy_state_to(self, learner: Learner) -> None:
        """Copy the state of the remote learners into a local learner. All remote learners have the same state."""
        state, counters = self.get(self.workers[0].save_state.remote())
        learner.load(unpack_state(state), counters)

    def get(self, references: Any, timeout: float | None = None) -> Any:
        """Wait for calls to learners and return their results.

        Raises:
            LearnersLostError: a learner was lost, does not answer, or lost its connection to the other learners.
            UserError, RunError: a learner raised an error of this type.
            ray.exceptions.RayTaskError: a learner raised another exception.
            ray.exceptions.GetTimeoutError: a result was not available after `timeout` seconds.
        """
        errors = self.ray.exceptions
        try:
            waiting = references if isinstance(references, list) else [references]
            while waiting and timeout is None:
                finished, waiting = self.ray.wait(waiting, num_returns=len(waiting), timeout=HEALTH_INTERVAL)
                if waiting:
                    self.ray.get(finished)  # raises the error of a failed call before the other calls finish
                    self.check_health()
            return self.ray.get(references, timeout=timeout)
        except errors.RayTaskError as error:
            cause = error.cause
            if isinstance(cause, RunError | UserError):
                raise unwrap_task_error(error) from error
            if isinstance(cause, GroupSplitError):
                raise LearnersLostError(f"a learner lost its connection to the other learners ({cause})") from error
            raise
        except errors.GetTimeoutError:
            raise
        except errors.RayError as error:
            raise LearnersLostError(f"a learner was lost ({error_summary(error)})") from error

    def _wait(self, references: Iterable[Any]) -> None:
        """Wait until all of these calls to learners have finished."""
        self.get(list(references))
