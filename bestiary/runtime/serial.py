"""The serial runtime: one thread that plays, learns, and plays again. The reference that the others are compared with.

Same seed, same bytes on one machine and version; and where the environments can be saved, a run that was stopped and resumed
is the run that was never stopped.
"""

from bestiary.rollout import Rollout, episodes_of
from bestiary.runtime.actor import Actor
from bestiary.runtime.learner import Learner
from bestiary.runtime.session import Session


def train(actor: Actor, learner: Learner, session: Session) -> None:
    """Until the run is done or asked to stop: play a while, learn from it, write down how it went."""
    while not session.done:
        rollouts = play(actor, learner)
        metrics = learner.learn(rollouts)
        actor.version = learner.version
        session.record(metrics, episodes_of(rollouts))
        session.attend()


def play(actor: Actor, learner: Learner) -> list[Rollout]:
    """As many rollouts, one after the other, as the algorithm learns from at once."""
    return [actor.collect() for _ in range(learner.algorithm.rollouts(actor.pool.num_envs, pools=1))]
