"""Functions that the losses of actor-critic algorithms share: rewards, discounts, and the sum of the loss terms."""

from torch import Tensor

from bestiary.agents.agent import Output
from bestiary.algorithms.actor_critic_options import ActorCriticOptions
from bestiary.algorithms.base import Loss
from bestiary.algorithms.return_statistics import NORMALISED_REWARD
from bestiary.algorithms.reward_transform import transform_reward
from bestiary.rollout import Rollout


def learner_rewards(rollout: Rollout, options: ActorCriticOptions) -> Tensor:
    """Return the rewards [T,N] that the learner uses: scaled and clipped, or normalised (return_std)."""
    if options.reward_clipping == "return_std":
        # Auto-tuning uses rollouts without normalised rewards. It measures only the time of an update, so the rewards
        # do not matter.
        return rollout.extras.get(NORMALISED_REWARD, rollout.reward[1:])
    return transform_reward(rollout.reward[1:], options.reward_clipping, options.reward_scale)


def rewards_and_discounts(rollout: Rollout, options: ActorCriticOptions) -> tuple[Tensor, Tensor, Tensor]:
    """Return three tensors [T,N] with one entry per action: rewards, bootstrapped rewards and discounts.

    N is the number of environments. The rewards are those of `learner_rewards`. The bootstrapped rewards are equal to
    the rewards, with one exception: if a time limit ended an episode, the reward of the last action is increased by the
    discounted value of the final observation (`rollout.bootstrap`). The reason is that a time limit is not a terminal
    state. The discount is zero if the action ended the episode.
    """
    transformed = learner_rewards(rollout, options)
    discounts = options.discount * (~rollout.done[1:]).float()
    return transformed, transformed + options.discount * rollout.bootstrap, discounts


def actor_critic_loss(
    output: Output,
    policy_loss: Tensor,
    value_loss: Tensor,
    entropy: Tensor,
    targets: Tensor,
    options: ActorCriticOptions,
    **sums: Tensor,
) -> Loss:
    """Combine policy loss, value loss and entropy, all summed over the batch, into the Loss of the batch.

    `output` is the output of the agent. Its metrics are added to the metrics of the loss. `targets` are the value
    targets [T,B]. `sums` are further metrics, also summed over the batch.
    """
    total = policy_loss + options.value_coef * value_loss - options.entropy_coef * entropy
    sums = {"policy_loss": policy_loss, "value_loss": value_loss, "entropy": entropy, **sums}
    # The agent's metrics are means over the batch, but the learner expects sums.
    sums |= {name: mean * targets.numel() for name, mean in output.metrics.items()}
    sums |= output.value_estimate[: len(targets)].metrics(targets)
    return Loss(total, {name: value.detach() for name, value in sums.items()}, targets)
