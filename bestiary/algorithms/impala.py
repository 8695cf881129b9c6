"""IMPALA: actor-critic with V-trace correction of the actors' policy lag (Espeholt et al. 2018).

The loss is a sum over all steps of a batch, not a mean. The gradients of micro-batches of any size therefore add up to
the gradient of the batch. The paper also uses sums, so its learning rates can be used unchanged.
"""

from dataclasses import dataclass

from bestiary.agents.agent import Agent, Output
from bestiary.algorithms.actor_critic_loss import actor_critic_loss, rewards_and_discounts
from bestiary.algorithms.base import Algorithm, Loss
from bestiary.algorithms.vtrace import vtrace
from bestiary.rollout import Rollout
from bestiary.utils.options import option


class Impala(Algorithm):
    """The algorithm IMPALA.

    Of all options that were compared, the default options learned Pong fastest on two CPU cores (docs/results/pong.md).
    The presets `impala-shallow`, `impala-deep` (Espeholt et al. 2018) and `torchbeast` have the published options.
    """

    @dataclass(frozen=True)
    class Options(Algorithm.Options):
        rho_bar: float = option(1.0, "upper bound of the importance weights in the value targets", above=0)
        pg_rho_bar: float = option(1.0, "upper bound of the importance weights in the policy gradient", above=0)

    def loss(self, agent: Agent, rollout: Rollout, progress: float = 0.0) -> Loss:
        """Return the summed loss of a rollout [T,B].

        V-trace computes its targets with values in units of the rewards. If the critic normalises values, the policy
        loss and the value loss use normalised values.
        """
        output, _ = agent(rollout.inputs(), rollout.state)
        return self.vtrace_loss(output, rollout)

    def vtrace_loss(self, output: Output, rollout: Rollout) -> Loss:
        """Return the summed loss of a rollout [T,B], given the output of the agent for the T+1 entries of the rollout.

        The output for the last entry is used only for bootstrapping: its value is the bootstrap value.
        """
        o = self.options
        policy = output.distribution[:-1]
        estimate = output.value_estimate[:-1]
        values = output.value.detach()
        log_probs = policy.log_prob(rollout.action)
        log_rhos = log_probs - rollout.log_prob

        transformed, rewards, discounts = rewards_and_discounts(rollout, o)
        targets, advantages = vtrace(
            log_rhos.detach(),
            rewards,
            discounts,
            values[:-1],
            values[-1],
            rho_bar=o.rho_bar,
            pg_rho_bar=o.pg_rho_bar,
            lam=o.lam,
        )
        policy_loss = -(log_probs * estimate.normalise_difference(advantages)).sum()
        value_loss = estimate.loss(targets).sum()
        return actor_critic_loss(
            output,
            policy_loss,
            value_loss,
            policy.entropy().sum(),
            targets,
            o,
            value=values[:-1].sum(),
            transformed_reward=transformed.sum(),
            rho=log_rhos.exp().sum(),
            abs_log_ratio=log_rhos.abs().sum(),
        )
