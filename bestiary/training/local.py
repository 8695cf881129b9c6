"""The local runtime: asynchronous training with threads on one machine.

    actor threads       Each thread runs several actors in turn. An actor owns a vector environment and a copy of the
                        agent. For each actor, the thread receives the result of a step, computes the next actions and
                        sends them. While the vector environment steps in its own threads, the actor thread runs the
                        next actor.
    rollout queue       It passes rollouts from the actors to the learner, and weights from the learner to the actors.
    main thread         It runs the learner: it distributes micro-batches to the learner threads, adds their gradients
                        in a fixed order and updates the weights.
    learner threads     Each thread computes the gradient of one micro-batch at a time. By default, there is one thread
                        per core.

The serial runtime uses the same classes Actor and Learner. This module only decides when actors and learner run.
"""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from bestiary.rollout import Rollout, collect_episodes
from bestiary.training.actor import Actor
from bestiary.training.learner import Learner
from bestiary.training.rollout_queue import RolloutQueue
from bestiary.training.session import Session
from bestiary.training.stall_monitor import STALL_WARNING_SECONDS
from bestiary.training.utilisation import PhaseTimer, Utilisation
from bestiary.training.weights import Weights

STUCK_SECONDS = 5.0  # at the end of a run, an actor thread counts as stuck if its phase has lasted longer than this
JOIN_SECONDS = 30.0  # maximum time to wait for the end of an actor thread that is not stuck


@dataclass(frozen=True)
class ThreadLayout:
    """The numbers of actor and learner threads of a local run, and its limits on the policy lag."""

    actor_threads: int
    learner_threads: int
    max_in_flight: int  # maximum number of rollouts that are being collected or are waiting for the learner
    fixed_lag: int | None  # exact policy lag, in rollouts; None if the lag varies and only max_in_flight limits it


def train(actors: list[Actor], learner: Learner, session: Session, layout: ThreadLayout) -> None:
    """Train until `session.done` is true."""
    device = actors[0].device
    pool_size = min(actor.pool.num_envs for actor in actors)
    num_rollouts = learner.algorithm.rollouts_per_learn(pool_size, len(actors))
    queue: RolloutQueue[Weights, Rollout] = RolloutQueue(
        Weights.from_agent(learner.agent, learner.version, device),
        len(actors),
        layout.max_in_flight,
        layout.fixed_lag,
        block_size=num_rollouts if learner.algorithm.on_policy else 1,
    )
    actor_threads = [ActorThread(index, actors, layout.actor_threads, queue) for index in range(layout.actor_threads)]
    utilisation = Utilisation([thread.timer for thread in actor_threads])
    for actor in actors:
        actor.version = -1  # lower than any published version, so that the actor loads the first published weights
    with ThreadPoolExecutor(layout.learner_threads, "gradients", torch.set_num_threads, (1,)) as learner_threads:
        learner.parallel_map = learner_threads.map
        try:
            for thread in actor_threads:
                thread.start()
            while not session.done:
                # Collect
                with utilisation.measure_learner_wait():
                    rollouts = _wait_for_rollouts(queue, num_rollouts, session, utilisation)
                if rollouts is None:
                    break
                # Learn
                metrics = learner.learn(rollouts)
                # Publish
                queue.publish(Weights.from_agent(learner.agent, learner.version, device), num_rollouts)
                # Log
                session.log(metrics, collect_episodes(rollouts), utilisation.time_fractions())
                # Save (and validate), if due
                session.run_due_tasks()
        finally:
            learner.parallel_map = map
            queue.close()
            for thread in actor_threads:
                # A stuck thread waits for an environment that may never return. Actor threads are daemon threads, so a
                # stuck thread cannot keep the process alive.
                stuck = time.monotonic() - thread.timer.phase_start > STUCK_SECONDS
                thread.join(timeout=1 if stuck else JOIN_SECONDS)


def _wait_for_rollouts(
    queue: RolloutQueue[Weights, Rollout], num_rollouts: int, session: Session, utilisation: Utilisation
) -> list[Rollout] | None:
    """Wait until the next rollouts have arrived and return them. Return None if the session is done before that."""
    rollouts = []
    for offset in range(num_rollouts):
        rollout = queue.get(offset, utilisation.warn_stalled, STALL_WARNING_SECONDS, lambda: session.done)
        if rollout is None:
            return None
        rollouts.append(rollout)
    return rollouts


class ActorThread(threading.Thread):
    """Thread that runs the actors `index`, `index + num_threads`, ... until the queue is closed.

    If the thread fails, it passes the exception to the queue, and the main thread raises it.
    """

    def __init__(self, index: int, actors: list[Actor], num_threads: int, queue: RolloutQueue[Weights, Rollout]):
        super().__init__(name=f"actor-{index}", daemon=True)
        self.actors = {actor_index: actors[actor_index] for actor_index in range(index, len(actors), num_threads)}
        self.queue = queue
        self.rollout_ids: dict[int, int] = {}  # actor index -> ID of the rollout being collected
        self.timer = PhaseTimer(self.name)

    def run(self) -> None:
        """Start the actors of this thread, and then step them in turn until the queue is closed."""
        torch.set_num_threads(1)
        try:
            for actor in self.actors.values():
                actor.start()
            while not self.queue.closed:
                progress = self.queue.progress()
                advanced = [self._advance(actor_index, actor) for actor_index, actor in self.actors.items()]
                if not any(advanced):
                    with self.timer.measure("waiting"):
                        self.queue.wait_for_progress(progress)
        except BaseException as error:
            self.queue.fail(error)

    def _advance(self, actor_index: int, actor: Actor) -> bool:
        """Perform one step of an actor. Return False if the actor must wait before it may start its next rollout."""
        if actor_index in self.rollout_ids:
            with self.timer.measure("environment"):
                rollout = actor.receive()
            if rollout is not None:
                self.queue.put(self.rollout_ids.pop(actor_index), rollout)
        weights: Weights | None
        if actor_index not in self.rollout_ids:
            started = self.queue.try_start(actor_index)
            if started is None:
                return False
            self.rollout_ids[actor_index], weights = started
        elif self.queue.fixed_lag is None:
            weights = self.queue.latest_weights()
        else:
            weights = None  # with a fixed lag, the weights do not change during a rollout
        with self.timer.measure("inference"):
            if weights is not None and weights.version != actor.version:
                weights.load_into(actor.agent)
                actor.version = weights.version
            actor.act()
        return True
