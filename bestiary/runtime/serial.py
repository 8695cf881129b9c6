"""The serial runtime: one thread that plays, learns, and plays again. The reference that the others are compared with.

Same seed, same bytes on one machine and version; and where the environments can be saved, a run that was stopped and resumed
is the run that was never stopped.
"""

from bestiary.rollout import Rollout, concatenate
from bestiary.runtime.actor import Actor
from bestiary.runtime.learner import Learner
from bestiary.runtime.session import Session


def train(actor: Actor, learner: Learner, session: Session, batch_size: int) -> None:
    """Until the run is done or asked to stop: play a while, learn from it, write down how it went."""
    while not session.done:
        rollout = play(actor, batch_size)
        metrics = learner.learn(rollout, batch_size)
        actor.version = learner.version
        session.record(metrics, rollout.episodes)


def play(actor: Actor, batch_size: int) -> Rollout:
    """A rollout of the actor's environments, or, where a batch is larger, so many of them side by side."""
    return concatenate([actor.collect() for _ in range(max(1, batch_size // actor.pool.num_envs))])
