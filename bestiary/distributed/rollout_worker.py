"""The remote process that steps environments and collects rollouts (a remote actor)."""

import socket
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from bestiary.distributed.inference_server import RemotePolicy
from bestiary.distributed.serialisation import pack_rollout, shard, to_tensors
from bestiary.distributed.shipped_config import ShippedConfig
from bestiary.rollout import Episode, Rollout
from bestiary.training.actor import Actor
from bestiary.training.factory import make_actors, make_vector_envs
from bestiary.training.utilisation import PhaseTimer
from bestiary.training.weights import Weights

CPU = torch.device("cpu")
# The seeds of a vector environment depend on a number, its incarnation. This number increases by 1 when the driver
# replaces the whole worker, and by LOCAL_RESTART when the worker creates only this vector environment again. The two
# kinds of restart therefore lead to different seeds.
LOCAL_RESTART = 1000


@dataclass
class RolloutReport:
    """Summary of a collected rollout for the driver. The rollout itself is sent to the learners."""

    first_version: int  # version of the weights that chose the first actions
    num_steps: int
    episodes: list[Episode]  # episodes that ended in the rollout
    seconds: dict[str, float]  # phase of PhaseTimer -> seconds spent in it since the previous report


class RolloutWorker:
    """Ray process that collects rollouts in some of the run's vector environments.

    Each vector environment of a worker is called a slot and has its own `Actor`. Ray runs the calls of `collect` for
    different slots in different threads. So one vector environment can step while the agent computes actions for
    another vector environment.
    """

    def location(self) -> tuple[str, str]:
        """Return the ID and the host name of the Ray node that runs this process."""
        import ray

        return ray.get_runtime_context().get_node_id(), socket.gethostname()

    def setup(
        self,
        shipped_config: ShippedConfig,
        index: int,
        start_step: int,
        incarnation: int,
        inference_server: Any = None,
    ) -> None:
        """Build the vector environments and their actors.

        Args:
            shipped_config: configuration of the run.
            index: index of this worker among all workers of the run.
            start_step: step at which the run was started or resumed. The seeds of the environments depend on this step.
            incarnation: number of times that the driver has replaced this worker. The seeds of the environments depend
                on this number, so that a new worker does not repeat the episodes of the replaced worker.
            inference_server: handle of the `InferenceServer`, or None to run inference in this process.
        """
        torch.set_num_threads(1)
        self.config = shipped_config.load()
        self.start_step = start_step
        self.inference_server = inference_server
        num_slots = self.config.training.pools
        # Indices of this worker's vector environments among all vector environments of the run.
        self.pool_indices = range(index * num_slots, (index + 1) * num_slots)
        self.incarnations = [incarnation] * num_slots  # incarnation of each slot (see LOCAL_RESTART)
        self.actors = [self._make_actor(slot) for slot in range(num_slots)]
        self.timers = [PhaseTimer(f"actor {index}, pool {slot}") for slot in range(num_slots)]
        self.reported_seconds = [dict(timer.seconds) for timer in self.timers]

    def _make_actor(self, slot: int) -> Actor:
        """Build the vector environment with index `slot` in this worker, and return an actor for it."""
        indices = range(self.pool_indices[slot], self.pool_indices[slot] + 1)
        incarnation = self.incarnations[slot]
        (pool,) = make_vector_envs(self.config, indices, self.start_step, incarnation)
        agent: Any = self.config.make_agent(pool)
        if self.inference_server is not None:
            agent = RemotePolicy(agent, self.inference_server)
        (actor,) = make_actors(self.config, [pool], [agent], indices, CPU, self.start_step, incarnation)
        if isinstance(agent, RemotePolicy):
            agent.actor = actor
        actor.version = -1  # lower than any published version, so that the actor loads the first published weights
        return actor

    def collect(self, slot: int, version: int, weights: list[np.ndarray], batch_size: int) -> Any:
        """Collect one rollout with the given weights.

        If an environment or the agent raises an exception, create the vector environment again with new seeds, and then
        raise the exception.

        Args:
            slot: index of the vector environment in this worker.
            version: version of `weights`. An inference server uses weights of this version or of a newer version.
            weights: tensors of the agent as arrays; not used if there is an inference server.
            batch_size: number of trajectories per update. The split of the rollout among the learners depends on this
                number.

        Returns:
            A `RolloutReport`, followed by one `Payload` per learner.
        """
        torch.set_num_threads(1)
        actor = self.actors[slot]
        timer = self.timers[slot]
        if timer.phase == "waiting":
            timer.seconds["waiting"] += time.monotonic() - timer.phase_start
        try:
            rollout = self._collect_rollout(actor, timer, version, weights)
        except BaseException:
            self.incarnations[slot] += LOCAL_RESTART
            actor.pool.close()
            self.actors[slot] = self._make_actor(slot)
            raise
        finally:
            timer.phase = "waiting"
            timer.phase_start = time.monotonic()
        frame_stacks = actor.pool.frame_stacks
        learners = self.config.training.learners
        shards = [pack_rollout(shard(rollout, rank, learners, batch_size), frame_stacks) for rank in range(learners)]
        first_version = int(rollout.version[0, 0])
        report = RolloutReport(first_version, rollout.num_steps, rollout.episodes, self._seconds_since_report(slot))
        return report, *shards

    def _collect_rollout(self, actor: Actor, timer: PhaseTimer, version: int, weights: list[np.ndarray]) -> Rollout:
        """Load the weights into the actor's agent.

        Then act and step until a rollout is complete, and return this rollout.
        """
        if actor.last_step is None:
            actor.start()
        if isinstance(actor.agent, RemotePolicy):
            actor.agent.min_version = version
        elif version != actor.version:
            Weights(version, to_tensors(weights)).load_into(actor.agent)
            actor.version = version
        rollout = None
        while rollout is None:
            with timer.measure("inference"):
                actor.act()
            with timer.measure("environment"):
                rollout = actor.receive()
        return rollout

    def _seconds_since_report(self, slot: int) -> dict[str, float]:
        """Return the seconds that a slot (vector environment) has spent in each phase since its previous report."""
        previous = self.reported_seconds[slot]
        self.reported_seconds[slot] = dict(self.timers[slot].seconds)
        return {phase: self.reported_seconds[slot][phase] - previous[phase] for phase in previous}

    def step_counts(self) -> list[int]:
        """Return the number of steps of each vector environment so far."""
        return [actor.steps for actor in self.actors]
