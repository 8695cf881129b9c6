"""The serial runtime: one thread that plays, learns, and plays again. The reference that the others are compared with.

Same seed, same bytes on one machine and version; and where the environments can be saved, a run that was stopped and resumed
is the run that was never stopped.
"""

from collections.abc import Iterator

from bestiary.rollout import Rollout, concatenate
from bestiary.runtime.actor import Actor
from bestiary.runtime.learner import Learner
from bestiary.runtime.session import Session


def train(actor: Actor, learner: Learner, session: Session, batch_size: int) -> None:
    """Until the run is done or asked to stop: play a while, learn from it, write down how it went."""
    while not session.done:
        metrics, episodes = [], []
        for batch in play(actor, batch_size):
            metrics.append(learner.update(batch))
            episodes += batch.episodes
        actor.version = learner.version
        session.record(metrics, episodes)


def play(actor: Actor, batch_size: int) -> Iterator[Rollout]:
    """Batches of B trajectories: several rollouts side by side where the actor has fewer, pieces of one where it has more."""
    n = actor.pool.num_envs
    if batch_size >= n:
        yield concatenate([actor.collect() for _ in range(batch_size // n)])
        return
    rollout = actor.collect()
    for index, batch in enumerate(rollout.groups(batch_size)):
        batch.episodes = rollout.episodes if index == 0 else []
        yield batch
