"""The serial runtime: one thread alternates between collecting rollouts and learning.

The tests compare the other runtimes with the serial runtime.

Runs with the same config, seed, machine and package versions are identical bit for bit. If the state of the
environments can be saved, a run that was interrupted and resumed is identical to an uninterrupted run.
"""

from bestiary.rollout import Rollout, collect_episodes
from bestiary.training.actor import Actor
from bestiary.training.learner import Learner
from bestiary.training.session import Session


def train(actor: Actor, learner: Learner, session: Session) -> None:
    """Train until `session.done` is true."""
    while not session.done:
        # Collect
        rollouts = collect_rollouts(actor, learner)
        # Learn
        metrics = learner.learn(rollouts)
        # Publish: actor and learner use the same agent, so only the version number must be passed to the actor.
        actor.version = learner.version
        # Log
        session.log(metrics, collect_episodes(rollouts))
        # Save (and validate), if due
        session.run_due_tasks()


def collect_rollouts(actor: Actor, learner: Learner) -> list[Rollout]:
    """Collect and return as many rollouts as the algorithm needs for one call of `Learner.learn`."""
    return [actor.collect() for _ in range(learner.algorithm.rollouts_per_learn(actor.pool.num_envs, pools=1))]
