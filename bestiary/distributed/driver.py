"""The cluster runtime: training in Ray processes on one or more nodes.

    rollout workers     Processes that collect rollouts. Each process owns some vector environments. Each vector
                        environment has its own `Actor` with its own copy of the agent.
    inference server    An optional process that runs the agent for all rollout workers.
    learner workers     Processes that compute the updates with a `Learner`. If there are several, each of them computes
                        the gradient of a part of each batch, and the gradients are summed.
    driver              The process of `bestiary train`, in which this module runs. It schedules all calls, writes the
                        run folder and replaces lost processes.

Rollouts and weights do not pass through the driver. The driver handles only references to objects in Ray's object
store. A rollout worker puts a rollout into the object store, and the learner workers fetch it from there. Weights are
passed in the same way from the learner workers to the rollout workers or the inference server.

The number of rollouts that are being collected or are waiting for the learners is limited (see `RolloutQueue`). This
bounds the memory use and the policy lag. The driver keeps up to two learn calls scheduled, so that the learners can
start the next call without waiting for the driver.
"""

import time
from collections import deque
from dataclasses import dataclass
from typing import Any

import torch

from bestiary.config.derived_options import learn_sizes
from bestiary.distributed.actor_manager import ActorHandle, ActorManager, EnvSlot
from bestiary.distributed.faults import RestartCounter, error_summary, unwrap_task_error
from bestiary.distributed.learner_group import LearnerGroup, RemoteWeights
from bestiary.distributed.learner_worker import UpdateResult
from bestiary.distributed.pending_calls import PendingCalls
from bestiary.distributed.placement import gpus_per_process
from bestiary.distributed.rollout_worker import RolloutReport
from bestiary.distributed.shipped_config import ShippedConfig
from bestiary.rollout import collect_episodes
from bestiary.training.factory import max_rollouts_in_flight
from bestiary.training.learner import Learner
from bestiary.training.rollout_queue import RolloutQueue
from bestiary.training.session import Session
from bestiary.training.utilisation import Utilisation

MAX_LEARN_CALLS = 2  # maximum number of learn calls that are running or scheduled
UTILISATION_INTERVAL = 3.0  # the logged time fractions are averages over at least this many seconds


@dataclass(frozen=True)
class RolloutCall:
    """A remote call in which a slot (one vector environment of a remote actor) collects a rollout."""

    rollout_id: int
    attempt: int  # 1 for the first attempt to collect this rollout
    actor: ActorHandle
    incarnation: int  # incarnation of the actor when the call started, to detect whether the actor was replaced later
    slot: EnvSlot
    shards: list[Any]  # for each learner, the object reference of its part of the rollout


@dataclass(frozen=True)
class ReceivedRollout:
    """A rollout that has arrived: each learner has fetched its part of it."""

    rollout_id: int
    report: RolloutReport


@dataclass
class LearnCall:
    """A call of `learn`: the learners compute updates from some rollouts."""

    rollouts: list[ReceivedRollout]
    results: list[Any]  # object references of UpdateResults, one per learner
    finished: bool = False


class Driver:
    """The driver of a run. It schedules the calls of remote actors and learners, and logs and saves their results.

    Args:
        ray: the connected Ray module.
        shipped_config: configuration for the remote processes.
        learner: the driver's learner. It computes no updates. The state of the remote learners is copied into it before
            each validation and checkpoint, and at the end of training.
        session: object that logs and saves the run.
        restarts: counter of the restarts of remote processes.
        start_step: step at which the run is started or resumed.
    """

    def __init__(
        self,
        ray: Any,
        shipped_config: ShippedConfig,
        learner: Learner,
        session: Session,
        restarts: RestartCounter,
        start_step: int,
    ):
        self.ray = ray
        self.training = session.config.training
        self.learner = learner
        self.session = session
        self.restarts = restarts
        self.calls = PendingCalls(ray)
        config_reference = ray.put(shipped_config)
        gpus = gpus_per_process(ray, self.training)
        self.learner_group = LearnerGroup(ray, config_reference, self.training, gpus)
        self.actor_manager = ActorManager(ray, config_reference, self.training, gpus, self.calls, restarts, start_step)
        self.learn_calls: deque[LearnCall] = deque()
        # Rollout ID -> number of the current attempt to collect the rollout. Results of earlier attempts are ignored.
        self.attempts: dict[int, int] = {}
        # Number of rollouts that were dropped because their policy lag would have exceeded --max-lag.
        self.dropped = session.runtime_counters.get("dropped", 0)
        self.utilisation = Utilisation(self.actor_manager.timers)
        self.time_fractions: dict[str, float] = {}

        algorithm = learner.algorithm
        self.sizes = learn_sizes(algorithm, self.training)
        self.batch_size = self.sizes.batch_size
        self.rollouts_per_learn = self.sizes.rollouts
        # Number of steps in a rollout of the smallest vector environment (pool).
        self.steps_per_rollout = algorithm.sequence_length * self.sizes.pool_size

    def run(self) -> None:
        """Train until `session.done` is true. Then copy the state of the remote learners into the driver's learner."""
        try:
            self.queue = self._start_processes()
            while self.learn_calls or not self.session.done:
                self._schedule_rollouts()
                self._schedule_learning()
                self._receive()
                while self.learn_calls and self.learn_calls[0].finished:
                    call = self.learn_calls.popleft()
                    result: UpdateResult = self.learner_group.get(call.results[0])
                    self._publish(result, call.rollouts)
                    self._log(result, call.rollouts)
                self.learner_group.check_health()
                self.actor_manager.check_health(learner_is_busy=bool(self.learn_calls))
                self._save_if_due()
            self.learner_group.copy_state_to(self.learner)
        finally:
            self.learner_group.stop()
            self.actor_manager.stop()

    def _start_processes(self) -> RolloutQueue[RemoteWeights, ReceivedRollout]:
        """Start learners and actors, publish the initial weights, and return an empty rollout queue."""
        # Place the learners first: if the actors came first, they could take all CPUs.
        self.learner_group.place()
        self.actor_manager.start()
        weights = self.learner_group.start(self.learner)
        self.actor_manager.publish(weights)
        on_policy = self.learner.algorithm.on_policy
        return RolloutQueue(
            weights,
            self.training.total_pools,
            max_rollouts_in_flight(self.learner.algorithm, self.training),
            fixed_lag=0 if on_policy else self.training.lag,
            block_size=self.rollouts_per_learn if on_policy else 1,
            in_order=False,
        )

    # --- schedule rollouts ---

    def _schedule_rollouts(self) -> None:
        """Let each idle slot (vector environment of an actor) start to collect a rollout, if the queue allows it.

        Start no rollout if the run is done, or if a checkpoint or validation is due. Also start none if the rollouts in
        flight (being collected or waiting) are enough to complete the run.
        """
        if self.session.done or self.session.has_due_tasks or self._enough_in_flight():
            return
        for actor, slot in self.actor_manager.idle_slots():
            started = self.queue.try_start(slot.index)
            if started is not None:
                rollout_id, weights = started
                self._start_rollout(actor, slot, rollout_id, weights)

    def _enough_in_flight(self) -> bool:
        """Return whether the rollouts that have been started are enough for the remaining steps of the run."""
        assert self.training.steps is not None
        in_flight = self.queue.num_started - self.queue.num_consumed
        remaining_steps = self.training.steps - self.learner.steps
        learn_calls = -(-remaining_steps // (self.steps_per_rollout * self.rollouts_per_learn))  # rounded up
        return in_flight >= learn_calls * self.rollouts_per_learn and not any(self.queue.to_retry.values())

    def _start_rollout(self, actor: ActorHandle, slot: EnvSlot, rollout_id: int, weights: RemoteWeights) -> None:
        """Let a slot start to collect a rollout. When the rollout is collected, `_on_collected` is called."""
        attempt = self.attempts.get(rollout_id, 0) + 1
        self.attempts[rollout_id] = attempt
        report, shards = self.actor_manager.start_rollout(actor, slot, rollout_id, weights, self.batch_size)
        call = RolloutCall(rollout_id, attempt, actor, actor.incarnation, slot, shards)
        self.calls.on_done(report, lambda reference: self._on_collected(call, reference))

    # --- receive rollouts ---

    def _receive(self) -> None:
        """Wait for remote calls and run the callbacks of finished calls.

        When a rollout has been collected, the learners fetch it. When all learners have their parts, the rollout is put
        into the queue. When a learn call has finished, its `LearnCall.finished` is set.
        """
        self.calls.poll()

    def _on_collected(self, call: RolloutCall, reference: Any) -> None:
        """Let the learners fetch a collected rollout. If its collection has failed, handle the error."""
        if call.slot.rollout_id == call.rollout_id and call.incarnation == call.actor.incarnation:
            call.slot.rollout_id = None
        try:
            report: RolloutReport = self.ray.get(reference)
        except self.ray.exceptions.RayError as error:
            self._discard(call.rollout_id, call.attempt)
            self._handle_actor_error(call, error)
            return
        self.actor_manager.last_rollout_time = time.monotonic()
        for phase, seconds in report.seconds.items():
            call.slot.timer.seconds[phase] += seconds
        if call.attempt != self.attempts.get(call.rollout_id):
            return
        transfers = self.learner_group.fetch_rollout(call.rollout_id, call.shards)
        unfinished = set(transfers)

        def on_fetched(reference: Any) -> None:
            unfinished.discard(reference)
            self._on_fetched(call, report, reference, complete=not unfinished)

        for transfer in transfers:
            self.calls.on_done(transfer, on_fetched)

    def _handle_actor_error(self, call: RolloutCall, error: Any) -> None:
        """Handle the `error` of a failed call of `RolloutWorker.collect`.

        If the actor or the inference server was lost, replace it. If an environment or the agent raised an exception,
        only count a restart, because the actor has already built the vector environment again.
        """
        errors = self.ray.exceptions
        actor = call.actor
        # Test for RayTaskError first: a RayTaskError whose cause is an ObjectLostError may be an instance of both
        # classes.
        if isinstance(error, errors.RayTaskError):
            if isinstance(error.cause, errors.ObjectLostError):
                return  # the weights were lost together with a learner; `LearnerGroup.get` handles the lost learner
            if isinstance(error.cause, errors.RayError) and self.actor_manager.inference_server is not None:
                self.actor_manager.on_lost_inference_server(actor, call.incarnation)
                return
            self.restarts.record(f"{actor.name}: {error_summary(error.cause)}")
        # An ObjectLostError means that the RolloutReport was lost with the node that stored it. The actor still runs.
        elif not isinstance(error, errors.ObjectLostError):
            self.actor_manager.replace(actor, call.incarnation, f"{actor.name} was lost ({error_summary(error)})")

    def _on_fetched(self, call: RolloutCall, report: RolloutReport, reference: Any, complete: bool) -> None:
        """Handle the end of a call of `fetch_rollout`, in which one learner fetched its part of a rollout.

        If this part was lost, discard the rollout. If all learners have their parts (`complete`), put the rollout into
        the queue, or drop it if its policy lag would exceed --max-lag.
        """
        try:
            self.learner_group.get(reference)
        except self.ray.exceptions.RayTaskError as error:
            if not isinstance(error.cause, self.ray.exceptions.ObjectLostError):
                raise unwrap_task_error(error) from error
            self._discard(call.rollout_id, call.attempt)  # a part of the rollout was on a node that was lost
        if not complete or self.attempts.get(call.rollout_id) != call.attempt:
            return
        if self._is_too_old(report):
            self.dropped += 1
            self._discard(call.rollout_id, call.attempt)
        else:
            self.queue.put(call.rollout_id, ReceivedRollout(call.rollout_id, report))

    def _is_too_old(self, report: RolloutReport) -> bool:
        """Return whether the policy lag of a rollout would exceed --max-lag.

        The policy lag differs between the steps of a rollout and between the updates that use it. The largest lag is
        compared with --max-lag: the lag of the first step in the last of these updates.
        """
        if self.queue.in_order:
            return False
        assert self.training.max_lag is not None
        learn_calls_ahead = (self.queue.num_received - self.queue.num_consumed) // self.rollouts_per_learn
        last_version = self.learner.version + self.sizes.max_policy_lag(learn_calls_ahead + 1)
        return last_version - report.first_version > self.training.max_lag

    def _discard(self, rollout_id: int, attempt: int) -> None:
        """Discard the result of an attempt to collect a rollout. The rollout is then collected again or replaced.

        Do nothing if a newer attempt has already started, or if the rollout was already discarded.
        """
        if self.attempts.get(rollout_id) != attempt:
            return
        for discarded in self.queue.discard(rollout_id):
            if self.queue.in_order:
                # The rollout is collected again with the same ID. A larger attempt number makes the driver ignore late
                # results of the earlier attempt.
                self.attempts[discarded] = self.attempts.get(discarded, 0) + 1
            else:
                del self.attempts[discarded]
            self.learner_group.discard_rollout(discarded)

    # --- learn ---

    def _schedule_learning(self) -> None:
        """Start learn calls with the next rollouts of the queue, until MAX_LEARN_CALLS are scheduled."""
        assert self.training.steps is not None
        while len(self.learn_calls) < MAX_LEARN_CALLS and not self.session.has_due_tasks:
            scheduled = len(self.learn_calls) * self.rollouts_per_learn  # number of rollouts used by scheduled calls
            steps = sum(rollout.report.num_steps for call in self.learn_calls for rollout in call.rollouts)
            if self.session.done or self.learner.steps + steps >= self.training.steps:
                return
            candidates = [self.queue.peek(scheduled + k) for k in range(self.rollouts_per_learn)]
            rollouts = [rollout for rollout in candidates if rollout is not None]
            if len(rollouts) < self.rollouts_per_learn:
                return
            self._start_learn_call(rollouts)

    def _start_learn_call(self, rollouts: list[ReceivedRollout]) -> None:
        """Let the learners start to compute updates from these rollouts, and append the call to `learn_calls`."""
        results = self.learner_group.learn([rollout.rollout_id for rollout in rollouts])
        call = LearnCall(rollouts, results)
        self.learn_calls.append(call)

        def on_learnt(reference: Any) -> None:
            call.finished = True

        self.calls.on_done(results[0], on_learnt)
        for other in results[1:]:
            self.calls.on_done(other, self.learner_group.get)  # raises the error of the call if it has failed

    # --- publish, log, save ---

    def _publish(self, result: UpdateResult, rollouts: list[ReceivedRollout]) -> None:
        """Copy counters and the statistics of the critic to the driver's learner. Publish the new weights."""
        learner = self.learner
        learner.steps = result.counters["steps"]
        learner.version = result.counters["version"]
        learner.skipped_updates = result.counters["skipped_updates"]
        learner.consecutive_skips = result.consecutive_skips
        for name, array in result.critic_statistics.items():
            getattr(learner.popart, name).copy_(torch.tensor(array))
        weights = RemoteWeights(learner.version, result.weights)
        self.queue.publish(weights, self.rollouts_per_learn)
        self.actor_manager.publish(weights)
        for rollout in rollouts:
            del self.attempts[rollout.rollout_id]

    def _log(self, result: UpdateResult, rollouts: list[ReceivedRollout]) -> None:
        """Log the metrics of a learn call, the episodes that ended in its rollouts, and how the time was spent."""
        self.utilisation.learner_wait_seconds += result.wait_seconds
        if not self.time_fractions or self.utilisation.seconds_since_last_call > UTILISATION_INTERVAL:
            self.time_fractions = self.utilisation.time_fractions()
        self.session.runtime_counters = {"restarts": self.restarts.total, "dropped": self.dropped}
        episodes = collect_episodes([rollout.report for rollout in rollouts])
        load = {**self.time_fractions, "max_queue": len(self.queue.completed)}
        self.session.log(result.metrics, episodes, load)

    def _save_if_due(self) -> None:
        """Run a due validation or checkpoint, but only if no learn call is running or scheduled."""
        if self.session.has_due_tasks and not self.learn_calls:
            self.learner_group.copy_state_to(self.learner)
            self.session.run_due_tasks()
