"""The local runtime: one machine, all its cores.

    actor threads        each goes round its actors (a pool and a copy of the agent each): takes what one pool's C++ threads
                         have stepped, decides, sends, and turns to the next while those step
    exchange             numbered rollouts one way, immutable snapshots of the weights the other (`exchange.py`)
    main thread          learns: hands groups of trajectories to the gradient workers, adds their gradients in order, updates
    gradient workers     one thread a core, each computing one group's gradient at a time

The very Actor and Learner of `serial` do the work; here is only who runs when.
"""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from bestiary.rollout import Rollout, episodes_of
from bestiary.runtime.actor import Actor
from bestiary.runtime.exchange import Exchange
from bestiary.runtime.learner import Learner
from bestiary.runtime.load import Clock, Load
from bestiary.runtime.session import Session
from bestiary.runtime.snapshots import Snapshot

PATIENCE = 30.0  # seconds without a rollout before the user is told what stalls
STUCK = 5.0  # seconds in one step of an environment after which a run that ends does not wait for it any more


@dataclass(frozen=True)
class Layout:
    threads: int  # that play
    workers: int  # that compute gradients
    in_flight: int  # rollouts being played or waiting
    fixed_lag: int | None  # in rollouts; None: whatever comes, within in_flight


def train(actors: list[Actor], learner: Learner, session: Session, layout: Layout) -> None:
    """Until the run is done or asked to stop: take the next rollouts, learn from them, publish the weights."""
    device = actors[0].device
    first = Snapshot.of(learner.agent, learner.version, device)
    joined = learner.algorithm.rollouts(actors[0].pool.num_envs, len(actors))  # rollouts that are learnt from at once
    block = joined if learner.algorithm.on_policy else 1
    exchange: Exchange[Snapshot, Rollout] = Exchange(first, len(actors), layout.in_flight, layout.fixed_lag, block)
    crew = [ActorThread(index, actors, layout.threads, exchange) for index in range(layout.threads)]
    load = Load([thread.clock for thread in crew])
    for actor in actors:
        actor.version = -1  # so that whatever the learner begins with, it takes
    with ThreadPoolExecutor(layout.workers, "gradients", torch.set_num_threads, (1,)) as gradients:
        learner.map = gradients.map
        try:
            for thread in crew:
                thread.start()
            while not session.done:
                with load.learner_waits():
                    taken = [exchange.take(k, load.stalled, PATIENCE, lambda: session.done) for k in range(joined)]
                rollouts = [rollout for rollout in taken if rollout is not None]
                if len(rollouts) < joined:
                    break  # asked to stop while there was nothing to learn from
                metrics = learner.learn(rollouts)
                exchange.publish(Snapshot.of(learner.agent, learner.version, device), joined)
                session.record(metrics, episodes_of(rollouts), load.shares())
                session.attend()
        finally:
            learner.map = map
            exchange.close()
            for thread in crew:
                stuck = time.monotonic() - thread.clock.since > STUCK  # it may never end; it dies with the process
                thread.join(timeout=1 if stuck else PATIENCE)


class ActorThread(threading.Thread):
    """Goes round every `threads`-th actor until the exchange closes; what goes wrong here is the learner's to raise."""

    def __init__(self, index: int, actors: list[Actor], threads: int, exchange: Exchange[Snapshot, Rollout]):
        super().__init__(name=f"actor-{index}", daemon=True)
        self.actors = {number: actors[number] for number in range(index, len(actors), threads)}
        self.exchange = exchange
        self.playing: dict[int, int] = {}  # which actor plays which rollout
        self.clock = Clock(self.name)

    def run(self) -> None:
        torch.set_num_threads(1)
        try:
            for actor in self.actors.values():
                actor.start()
            while not self.exchange.closed:
                seen = self.exchange.progress()
                moved = [self._advance(number, actor) for number, actor in self.actors.items()]
                if not any(moved):
                    with self.clock.during("waiting"):
                        self.exchange.wait(seen)
        except BaseException as error:
            self.exchange.fail(error)

    def _advance(self, number: int, actor: Actor) -> bool:
        """One decision of one actor; False where it has to wait before it may begin a rollout."""
        if number in self.playing:
            with self.clock.during("environment"):
                rollout = actor.receive()
            if rollout is not None:
                self.exchange.hand_over(self.playing.pop(number), rollout)
        if number not in self.playing:
            begun = self.exchange.try_begin(number)
            if begun is None:
                return False
            self.playing[number], snapshot = begun
        elif self.exchange.fixed_lag is None:
            snapshot = self.exchange.newest()
        else:
            snapshot = None
        with self.clock.during("inference"):
            if snapshot is not None and snapshot.version != actor.version:
                snapshot.put_into(actor.agent)
                actor.version = snapshot.version
            actor.act()
        return True
