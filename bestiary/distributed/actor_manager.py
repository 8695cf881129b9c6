"""Management of the remote actors by the driver.

A remote actor is a Ray process that runs several vector environments. Each of these vector environments is called a
slot of the actor. The driver starts the actors, tells idle slots to collect rollouts, and replaces actors that are lost
or make no progress.

The incarnation of an actor is the number of times that its process was replaced. A result from an earlier incarnation
is ignored.
"""

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from bestiary.config.training_options import Training
from bestiary.distributed.faults import RestartCounter, error_summary, unwrap_task_error
from bestiary.distributed.health_check import HealthCheck
from bestiary.distributed.inference_server import InferenceServer
from bestiary.distributed.learner_group import RemoteWeights
from bestiary.distributed.pending_calls import PendingCalls
from bestiary.distributed.placement import PLACEMENT_TIMEOUT, avoid_nodes, placement_error, prefer_driver_node
from bestiary.distributed.rollout_worker import RolloutWorker
from bestiary.training.stall_monitor import STALL_WARNING_SECONDS
from bestiary.training.utilisation import PhaseTimer
from bestiary.utils.console import warn

MAX_CHECK_INTERVAL = 1.0  # if the driver pauses, at most this many seconds count as time without progress
MAX_POLL_DELAY = 10.0  # an actor without known progress for this time (in seconds) is asked for its step counts


@dataclass
class EnvSlot:
    """A slot: one vector environment of a remote actor. A slot collects at most one rollout at a time."""

    index: int  # index among all slots of the run
    local_index: int  # index among the slots of its actor
    timer: PhaseTimer  # time that the slot has spent in each phase, as reported by the actor
    rollout_id: int | None = None  # ID of the rollout being collected; None if the slot is idle
    last_step_count: int = -1  # step count in the last report of the actor
    last_progress_time: float = 0.0  # time of the last known step; at first, the time when the rollout was started


@dataclass
class ActorHandle:
    """A remote actor and its status. If its process is lost, a new process takes its place in the same handle."""

    index: int
    slots: list[EnvSlot]
    worker: Any = None  # Ray handle of the RolloutWorker process
    incarnation: int = 0  # how often the process was replaced
    node_id: str = ""  # ID of the node that runs the process; during a restart, the node of the previous process
    hostname: str = ""  # host name of the node; empty until Ray has placed the process on a node
    placed_at: float = 0.0  # time when Ray had placed the process on a node; 0 until then
    ready: bool = False  # whether the process has created its environments
    poll_pending: bool = False  # whether a request for the step counts is not answered yet

    @property
    def name(self) -> str:
        """Return the name of the actor in messages, with the host name if it is known."""
        return f"actor {self.index} on {self.hostname}" if self.hostname else f"actor {self.index}"


class ActorManager:
    """Starts remote actors, lets their idle vector environments (slots) collect rollouts, and replaces lost actors.

    An actor that makes no progress is also replaced. With central inference, the manager also starts and replaces the
    inference server.
    """

    def __init__(
        self,
        ray: Any,
        shipped_config: Any,
        training: Training,
        gpus: float,
        calls: PendingCalls,
        restarts: RestartCounter,
        start_step: int,
    ):
        self.ray = ray
        self.shipped_config = shipped_config  # object reference of the ShippedConfig
        self.training = training
        self.gpus = gpus  # number of GPUs of the inference server
        self.calls = calls
        self.restarts = restarts
        self.start_step = start_step
        self.worker_class: Any = ray.remote(RolloutWorker)
        self.inference_server: Any = None  # Ray handle; None without central inference
        self.server_health: HealthCheck | None = None  # None without central inference
        self.newest_weights: RemoteWeights | None = None  # None until the first call of `publish`
        self.actors = [self._make_handle(index) for index in range(training.actors)]
        # Order in which `idle_slots` examines slots: slot 0 of each actor, then slot 1 of each actor, and so on. After
        # the last slot, the order starts again with the first slot.
        self.slot_order = deque(
            (actor, actor.slots[local_index]) for local_index in range(training.pools) for actor in self.actors
        )
        self.excluded_nodes: set[str] = set()  # IDs of nodes on which the setup of an actor has failed
        self.any_ready = False  # whether the setup of at least one actor has succeeded
        self.last_rollout_time = time.monotonic()
        self.last_warning_time = time.monotonic()
        self.last_check_time = time.monotonic()

    def _make_handle(self, index: int) -> ActorHandle:
        """Return the handle of an actor whose process is not started yet."""
        pools = self.training.pools
        slots = [EnvSlot(index * pools + k, k, PhaseTimer(f"actor {index}, pool {k}")) for k in range(pools)]
        return ActorHandle(index, slots)

    def start(self) -> None:
        """Start the inference server, if there is one, and all actors."""
        self._start_inference_server()
        for actor in self.actors:
            self._start_worker(actor)

    def stop(self) -> None:
        """End the processes of the actors and of the inference server."""
        for handle in [*(actor.worker for actor in self.actors), self.inference_server]:
            if handle is not None:
                self.ray.kill(handle)

    @property
    def timers(self) -> list[PhaseTimer]:
        """Return the timers of all slots of all actors."""
        return [slot.timer for actor in self.actors for slot in actor.slots]

    # --- rollouts ---

    def idle_slots(self) -> Iterator[tuple[ActorHandle, EnvSlot]]:
        """Yield (actor, slot) for each idle slot (vector environment) of all actors that are ready.

        The slots are examined in a circle: each call continues after the last slot that the previous call examined.
        """
        for _ in range(len(self.slot_order)):
            actor, slot = self.slot_order[0]
            self.slot_order.rotate(-1)
            if actor.ready and slot.rollout_id is None:
                yield actor, slot

    def start_rollout(
        self, actor: ActorHandle, slot: EnvSlot, rollout_id: int, weights: RemoteWeights, batch_size: int
    ) -> tuple[Any, list[Any]]:
        """Let a slot (vector environment of an actor) start to collect a rollout.

        Return the object reference of the `RolloutReport`, and a list with the object references of the parts (shards)
        of the rollout, one per learner.
        """
        slot.rollout_id = rollout_id
        slot.last_progress_time = time.monotonic()
        collect = actor.worker.collect.options(num_returns=1 + self.training.learners)
        arrays = [] if self.inference_server is not None else weights.reference
        report, *shards = collect.remote(slot.local_index, weights.version, arrays, batch_size)
        return report, shards

    # --- start and replacement ---

    def _start_worker(self, actor: ActorHandle) -> None:
        """Start a new process for an actor. Ray places it as soon as a node has a free CPU."""
        options = {"num_cpus": 1, "max_concurrency": self.training.pools + 2}
        strategy = avoid_nodes(self.excluded_nodes)
        actor.worker = self.worker_class.options(**options, scheduling_strategy=strategy).remote()
        actor.hostname = ""
        actor.placed_at = 0.0
        actor.ready = False
        actor.poll_pending = False
        for slot in actor.slots:
            slot.rollout_id = None
        incarnation = actor.incarnation
        location = actor.worker.location.remote()
        self.calls.on_done(location, lambda reference: self._on_placed(actor, incarnation, reference))
        setup = actor.worker.setup.remote(
            self.shipped_config, actor.index, self.start_step, incarnation, self.inference_server
        )
        self.calls.on_done(setup, lambda reference: self._on_setup(actor, incarnation, reference))

    def _on_placed(self, actor: ActorHandle, incarnation: int, reference: Any) -> None:
        """Store the node on which Ray has placed the process of an actor. Replace the actor if its process was lost."""
        if incarnation != actor.incarnation:
            return
        try:
            actor.node_id, actor.hostname = self.ray.get(reference)
        except self.ray.exceptions.RayError as error:
            self.replace(actor, incarnation, f"{actor.name} was lost before it started ({error_summary(error)})")
            return
        actor.placed_at = time.monotonic()

    def _on_setup(self, actor: ActorHandle, incarnation: int, reference: Any) -> None:
        """Mark an actor as ready after its setup, or handle the failure of the setup.

        If no actor has been ready before, an exception during the setup ends the run.
        """
        if incarnation != actor.incarnation:
            return
        try:
            self.ray.get(reference)
        except self.ray.exceptions.RayTaskError as error:
            if not self.any_ready:
                raise unwrap_task_error(error) from error
            self._exclude_node(actor, error_summary(error.cause))
            return
        except self.ray.exceptions.RayError as error:
            self.replace(actor, incarnation, f"{actor.name} was lost during its setup ({error_summary(error)})")
            return
        actor.ready = True
        self.any_ready = True

    def _exclude_node(self, actor: ActorHandle, reason: str) -> None:
        """Restart an actor on another node, and do not place any actor on its current node again.

        This method is called if the setup of this actor failed after the setup of another actor has succeeded. The node
        is then the probable cause: for example, a file is missing on a node that joined the cluster later.
        """
        if not actor.node_id:
            self.replace(actor, actor.incarnation, f"{actor.name}: {reason}")
            return
        if actor.node_id not in self.excluded_nodes:
            warn(f"{actor.name}: {reason}; this node will not be used for actors")
            self.excluded_nodes.add(actor.node_id)
        self._restart(actor)

    def replace(self, actor: ActorHandle, incarnation: int, reason: str) -> None:
        """Count a restart, and replace the process of an actor by a new process with new environments.

        Do nothing if the actor no longer has this `incarnation`, because then its process was already replaced.
        """
        if incarnation != actor.incarnation:
            return
        self.restarts.record(reason, actor.node_id)
        self._restart(actor)

    def _restart(self, actor: ActorHandle) -> None:
        """Kill the process of an actor and start a new one."""
        self.ray.kill(actor.worker)
        actor.incarnation += 1
        self._start_worker(actor)

    # --- progress checks ---

    def check_health(self, learner_is_busy: bool) -> None:
        """Replace each actor that has made no progress for more than --actor-timeout seconds.

        Also replace the inference server if it has not answered for this time. Warn the user if no rollout has arrived
        for STALL_WARNING_SECONDS although the learners are idle.
        """
        now = time.monotonic()
        timeout = self.training.actor_timeout
        # While the driver was validating or was stopped, it did not ask the actors for their progress. Only the first
        # MAX_CHECK_INTERVAL seconds of such a pause count as time without progress.
        not_checked = max(0.0, now - self.last_check_time - MAX_CHECK_INTERVAL)
        self.last_check_time = now
        for actor in self.actors:
            actor.placed_at += not_checked * bool(actor.placed_at)
            for slot in actor.slots:
                slot.last_progress_time += not_checked
        self.last_rollout_time += not_checked
        if self.server_health is not None and (seconds := self.server_health.silent_seconds()):
            self._replace_inference_server(f"the inference server has not answered for {seconds:.0f} s")
        for actor in self.actors:
            if actor.placed_at and not actor.ready and now - actor.placed_at > max(timeout, PLACEMENT_TIMEOUT):
                seconds = now - actor.placed_at
                self.replace(actor, actor.incarnation, f"{actor.name} was not ready after {seconds:.0f} s")
            if not actor.ready:
                continue
            busy = [slot for slot in actor.slots if slot.rollout_id is not None]
            # The longest time, in seconds, that a busy slot has made no progress.
            stalled = max((now - slot.last_progress_time for slot in busy), default=0.0)
            if stalled > timeout:
                self.replace(actor, actor.incarnation, f"{actor.name} has made no step for {stalled:.0f} s")
            elif not actor.poll_pending and stalled > min(timeout / 4, MAX_POLL_DELAY):
                self._poll_progress(actor)
        if learner_is_busy:
            self.last_rollout_time = now
        if min(now - self.last_rollout_time, now - self.last_warning_time) > STALL_WARNING_SECONDS:
            self.last_warning_time = now
            self._warn_stalled(now - self.last_rollout_time)

    def _poll_progress(self, actor: ActorHandle) -> None:
        """Ask an actor for the step counts of its slots. Store each changed count, and the time at which it arrived."""
        actor.poll_pending = True
        incarnation = actor.incarnation

        def on_counts(reference: Any) -> None:
            if incarnation != actor.incarnation:
                return
            actor.poll_pending = False
            try:
                step_counts = self.ray.get(reference)
            except self.ray.exceptions.RayError:
                return  # the process was lost: its `collect` call also fails, and the driver then replaces the actor
            for slot, step_count in zip(actor.slots, step_counts, strict=True):
                if step_count != slot.last_step_count:
                    slot.last_step_count = step_count
                    slot.last_progress_time = time.monotonic()

        self.calls.on_done(actor.worker.step_counts.remote(), on_counts)

    def _warn_stalled(self, seconds: float) -> None:
        """Warn the user that no rollout has arrived for some seconds, and list actors that wait for a CPU."""
        unplaced = [str(actor.index) for actor in self.actors if not actor.placed_at]
        text = f"; these actors wait for a free CPU of the cluster: {', '.join(unplaced[:8])}" if unplaced else ""
        warn(f"no rollout has arrived for {seconds:.0f} s{text}")

    # --- central inference ---

    def _start_inference_server(self) -> None:
        """With --inference central, start the inference server and wait until it is ready. Otherwise do nothing."""
        if self.training.inference != "central":
            return
        options = {"num_cpus": 0, "num_gpus": self.gpus, "max_concurrency": self.training.total_pools + 4}
        server_class = self.ray.remote(InferenceServer)
        errors = self.ray.exceptions
        while True:
            strategy = prefer_driver_node(self.ray)
            self.inference_server = server_class.options(**options, scheduling_strategy=strategy).remote()
            setup = self.inference_server.setup.remote(self.shipped_config, self.gpus > 0)
            try:
                self.ray.get(setup, timeout=PLACEMENT_TIMEOUT)
                self.server_health = HealthCheck(self.ray, self.inference_server, self.training.actor_timeout)
                return
            except errors.RayTaskError as error:
                raise unwrap_task_error(error) from error
            except errors.GetTimeoutError:
                raise placement_error(f"the inference server with {self.gpus:g} GPUs") from None
            except errors.RayError as error:
                self.restarts.record(f"the inference server was lost during its setup ({error_summary(error)})")

    def publish(self, weights: RemoteWeights) -> None:
        """Send new weights to the inference server.

        Without a server, `start_rollout` sends the weights to the actors.
        """
        self.newest_weights = weights
        if self.inference_server is not None:
            self.inference_server.set_weights.remote(weights.version, weights.reference)

    def on_lost_inference_server(self, actor: ActorHandle, incarnation: int) -> None:
        """Replace the inference server after `actor` has reported that the server was lost.

        `incarnation` is the incarnation of the actor at that time. If the actor now has another incarnation, do
        nothing: the server was already replaced, and the actor was restarted with the new server.
        """
        if incarnation == actor.incarnation:
            self._replace_inference_server("the inference server was lost")

    def _replace_inference_server(self, reason: str) -> None:
        """Start a new inference server. Restart all actors too, because they have the handle of the old server."""
        self.restarts.record(reason)
        self.ray.kill(self.inference_server)
        self._start_inference_server()
        assert self.newest_weights is not None
        self.publish(self.newest_weights)
        for actor in self.actors:
            self._restart(actor)
