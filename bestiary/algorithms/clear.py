"""CLEAR: IMPALA with experience replay and behaviour cloning, which reduce forgetting (Rolnick et al. 2019).

Each batch has new trajectories, and `replay_ratio` times as many replayed trajectories. The replayed trajectories are
drawn from a buffer, which is a uniform sample of all trajectories of the run. V-trace corrects the policy lag of new
and replayed trajectories. The buffer also stores an old policy mu and old values V_old for each step. On replayed
steps, two further terms of the loss keep the current policy pi close to mu, and the current values V close to V_old:

    L = L_V-trace(new and replayed) + policy_cloning_coef * sum KL(mu || pi) + value_cloning_coef * sum (V - V_old)^2

The actor computes V_old when it collects the trajectory. The learner computes mu when it receives the trajectory. At
this time, the learner's weights are newer than the actor's weights: the difference is the policy lag. The new
trajectories of a batch are added to the buffer after the update, so they are not replayed in the same update.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from bestiary.agents.agent import Agent
from bestiary.agents.distributions import Categorical
from bestiary.algorithms.base import Batch, Batches, LearnContext, Loss
from bestiary.algorithms.impala import Impala
from bestiary.algorithms.replay_buffer import ReservoirBuffer
from bestiary.rollout import Rollout, Tensors, concatenate
from bestiary.utils.console import note
from bestiary.utils.options import option


class Clear(Impala):
    """IMPALA with a replay buffer and behaviour cloning."""

    @dataclass(frozen=True)
    class Options(Impala.Options):
        buffer_size: int = option(
            1000, "capacity of the replay buffer, in trajectories of --rollout-length steps", low=1, high=10_000_000
        )
        replay_ratio: float = option(
            1.0,
            "number of replayed trajectories per new trajectory in a batch (1: half of each batch is replayed)",
            low=0,
            high=100,
        )
        policy_cloning_coef: float = option(
            0.01, "coefficient of KL(stored policy || policy), replayed steps only", low=0
        )
        value_cloning_coef: float = option(0.005, "coefficient of (value - stored value)^2, replayed steps only", low=0)
        inherit_buffer: bool = option(
            True, "start with the replay buffer of the run given by --init-from, if it was trained with CLEAR"
        )
        save_buffer: bool = option(
            True, "save the replay buffer in checkpoints (off: a resumed run starts with an empty buffer)"
        )

    def __init__(self, options: Options | None = None):
        super().__init__(options)
        self.buffer = ReservoirBuffer(self.options.buffer_size)

    def shard(self, learners: int) -> None:
        """Return None, because CLEAR supports only one learner.

        Each learner would need its own replay buffer, but a checkpoint contains only one buffer.
        """

    def batches(self, rollouts: Sequence[Rollout], context: LearnContext) -> Batches:
        """Yield batches of new trajectories, in the order of collection, followed by replayed trajectories."""
        o = self.options
        trajectories = _with_stored_policy(concatenate(rollouts), context)
        for epoch in range(o.reuse):
            for new in trajectories.split(o.batch_size):
                num_replayed = round(o.replay_ratio * new.num_envs) if len(self.buffer) else 0
                batch = new
                if num_replayed:
                    replayed = self.buffer.sample(num_replayed, context.generator).to(new.reward.device)
                    replayed.extras["replayed"].fill_(1.0)
                    batch = concatenate([new, replayed])
                # Weights for metrics that count only new steps. The weight of a replayed step is 0. The weight of a new
                # step is (all trajectories / new trajectories). The mean of weight * metric over the batch is then the
                # mean of the metric over the new steps.
                new_weight = (1 - batch.extras["replayed"]) * batch.num_envs / new.num_envs
                yield Batch(batch.with_extras(new_weight=new_weight), self.loss, num_new=new.num_envs)
                if epoch == 0:
                    self.buffer.add(new.to(torch.device("cpu")), context.generator)

    def loss(self, agent: Agent, rollout: Rollout, progress: float = 0.0) -> Loss:
        """Return the summed loss of a batch: the loss of IMPALA on all steps, and cloning losses on replayed steps."""
        o = self.options
        output, _ = agent(rollout.inputs(), rollout.state)
        loss = self.vtrace_loss(output, rollout)
        if "replayed" not in rollout.extras:  # a batch of `dummy_batch`, used only to measure the time of an update
            return loss
        replayed = rollout.extras["replayed"]  # [T,B]: 1 if the step is replayed, else 0
        stored_policy = Categorical(rollout.extras["stored_logits"])
        estimate = output.value_estimate[:-1]
        value_change = estimate.normalised - estimate.normalise(rollout.value)
        policy_cloning = (replayed * stored_policy.kl_divergence(output.distribution[:-1])).sum()
        value_cloning = (replayed * value_change.square()).sum()
        loss.total = loss.total + o.policy_cloning_coef * policy_cloning + o.value_cloning_coef * value_cloning
        loss.sums["policy_cloning"] = policy_cloning.detach()
        loss.sums["value_cloning"] = value_cloning.detach()
        loss.sums["replayed"] = replayed.sum()
        # The metric `abs_log_ratio` shows whether actor and learner compute the same policy. Count only new steps,
        # because the actions of replayed steps were chosen by old policies.
        log_ratio = output.distribution[:-1].log_prob(rollout.action).detach() - rollout.log_prob
        loss.sums["abs_log_ratio"] = (rollout.extras["new_weight"] * log_ratio.abs()).sum()
        return loss

    def save(self) -> Tensors:
        """Return the replay buffer as tensors by name, for a checkpoint.

        If the option `save_buffer` is off, return only the number of trajectories that the buffer has received.
        """
        if self.options.save_buffer:
            return self.buffer.save()
        return {"num_seen": torch.tensor(self.buffer.num_seen)}

    def load(self, tensors: Tensors) -> None:
        """Restore the replay buffer. If the checkpoint has no buffer, start with an empty buffer and print a note."""
        self.buffer.load(tensors)
        if self.buffer.num_seen and not len(self.buffer):
            note("note: the checkpoint has no replay buffer (--algo.save-buffer off); starting with an empty buffer")
            self.buffer = ReservoirBuffer(self.options.buffer_size)

    def stored_extras(self, num_actions: int) -> dict[str, tuple[int, ...]]:
        return {"stored_logits": (num_actions,), "replayed": (), **self.normalised_extras()}

    @property
    def inherits_state(self) -> bool:
        return self.options.inherit_buffer

    def load_pretrained(self, tensors: Tensors, task_indices: Sequence[int]) -> str:
        """Load the replay buffer of another run, so that the agent does not forget the tasks of that run.

        `task_indices[k]` is the index, in this run, of task k of the other run, or -1 if this run does not have this
        task. If the index is -1, the trajectories of task k get the task index 0. This is correct only if the critic
        ignores the task index. Return a text that describes what was loaded.
        """
        self.buffer.load(tensors)
        if not len(self.buffer):
            return "no replay buffer, because the other run did not save it (--algo.save-buffer off)"
        mapped = torch.tensor(task_indices).clamp(min=0)
        for trajectory in self.buffer.trajectories:
            trajectory.task = mapped[trajectory.task]
        self.buffer.shrink()
        return f"replay buffer with {len(self.buffer)} trajectories"


def _with_stored_policy(rollout: Rollout, context: LearnContext) -> Rollout:
    """Return a copy of a rollout with two more extras.

    `stored_logits` are the logits of the current policy. `replayed` is zero, because the rollout is new.
    """
    output, _ = context.infer(rollout.inputs(), rollout.state)
    return rollout.with_extras(
        stored_logits=output.distribution.logits[:-1].float(), replayed=torch.zeros_like(rollout.value)
    )
