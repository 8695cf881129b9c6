"""PPG: phasic policy gradient (Cobbe et al. 2021), for example for ProcGen.

Policy phase. The following is repeated `aux_interval` times: collect a rollout, update the policy with the loss of PPO,
and update the values with the same minibatches. The gradient of the value loss does not change the parameters of the
policy.

Auxiliary phase. All rollouts of the policy phase are used again, for `aux_epochs` epochs. The agent's value head is
trained with gradients through the whole agent, so that the torso and the memory also learn from the value targets. A KL
term keeps the policy close to the policy at the start of the phase. V_aux is the output of the agent's value head:

    L_joint = 0.5 (V_aux - target)^2 + clone_coef KL(policy at the start of the phase || policy)

There are two variants (`value_network`):

    shared     The agent's value head is the value function. In the policy phase, the value loss trains only this head.
    separate   A second network, a copy of the agent, is the value function. It is trained in both phases. The agent's
               value head is trained only in the auxiliary phase. Exception: if a time limit ends an episode, the
               value of the final observation comes from the agent's value head. The actor computes this value, and it
               has no copy of the second network.

Each kind of update has its own optimizer (`policy`, `value`, `aux`), which contains only the parameters that this kind
of update may change.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from bestiary.agents.agent import Agent, Output, State, find_child
from bestiary.agents.critics import PopArt
from bestiary.agents.distributions import Categorical
from bestiary.algorithms.base import Batch, Batches, LearnContext, Loss
from bestiary.algorithms.optimizers import make_adam
from bestiary.algorithms.ppo import PPO
from bestiary.algorithms.replay_buffer import pack_trajectories, unpack_trajectories
from bestiary.rollout import Inputs, Rollout, Tensors, concatenate
from bestiary.utils.errors import UserError
from bestiary.utils.options import option

CPU = torch.device("cpu")


class PPG(PPO):
    """Phasic policy gradient."""

    @dataclass(frozen=True)
    class Options(PPO.Options):
        rollout_length: int = option(
            256,
            "number of steps per environment that are collected before each series of policy updates",
            low=1,
            high=100_000,
            unprefixed=True,
        )
        lr: float = option(5e-4, "initial learning rate of all optimizers", above=0, unprefixed=True)
        discount: float = option(0.999, "discount factor gamma", low=0, high=1)
        epochs: int = option(1, "number of epochs over each rollout in the policy phase", low=1, high=1000)
        minibatches: int = option(8, "number of minibatches per epoch of the policy phase", low=1)
        clip: float = option(
            0.2, "clipping range: the probability ratio of new to old policy is clipped to [1-clip, 1+clip]", above=0
        )
        aux_interval: int = option(32, "number of rollouts in each policy phase", low=1)
        aux_epochs: int = option(
            6, "number of epochs in each auxiliary phase, over all rollouts since the previous auxiliary phase", low=1
        )
        aux_batch_size: int = option(
            64, "number of sequences of --algo.sequence-length steps in each update of the auxiliary phase", low=1
        )
        clone_coef: float = option(
            1.0,
            "coefficient of KL(old policy || policy); the old policy is the policy at the start of the auxiliary phase",
            low=0,
        )
        value_network: str = option(
            "separate",
            "value function (shared: the agent's value head; separate: a second network)",
            choices=("shared", "separate"),
        )

    def __init__(self, options: Any = None):
        super().__init__(options)
        self.value_agent: Any = None  # the separate value network; None if the value head is shared
        self.stored: list[Rollout] = []  # for each rollout of this policy phase: its sequences, with value targets

    # --- parameters, optimizers and state ---

    def setup(self, agent: Any) -> None:
        critic = find_child(agent, "critic")
        if critic is None:
            raise UserError("--algo ppg: the agent must have a value head, a module with the name critic")
        if isinstance(critic, PopArt):
            raise UserError("--critic popart: not supported by --algo ppg; use --critic shared or per-task")
        self.agent = agent
        self.device = next(agent.parameters()).device
        if self.options.value_network == "separate":
            if agent.initial_state(1):
                raise UserError(
                    "--algo.value-network separate: not supported with a memory; use --algo.value-network shared"
                )
            self.value_agent = copy.deepcopy(agent)

    def parameters(self) -> dict[str, nn.Parameter]:
        return dict(self.value_agent.named_parameters()) if self.value_agent is not None else {}

    def make_optimizers(self, parameters: list[nn.Parameter]) -> dict[str, torch.optim.Optimizer]:
        o = self.options
        # Layers before the critic (--agent.value-layers) belong to the value head.
        heads = [head for name in ("value_mlp", "critic") if (head := find_child(self.agent, name)) is not None]
        critic = [parameter for head in heads for parameter in head.parameters() if parameter.requires_grad]
        in_critic = {id(parameter) for parameter in critic}
        agent = [parameter for parameter in self.agent.parameters() if parameter.requires_grad]
        policy = [parameter for parameter in agent if id(parameter) not in in_critic]
        own = [parameter for parameter in self.parameters().values() if parameter.requires_grad]
        groups = {"policy": policy, "value": own or critic, "aux": agent}
        return {name: make_adam(group, o.lr, o.eps) for name, group in groups.items()}

    def save(self) -> Tensors:
        """Return the rollouts of the current policy phase as tensors by name, for a checkpoint."""
        stored = pack_trajectories(concatenate(self.stored)) if self.stored else {}
        return {"num_stored": torch.tensor(len(self.stored)), **stored}

    def load(self, tensors: Tensors) -> None:
        self.stored = []
        count = int(tensors["num_stored"])
        if count:
            everything = unpack_trajectories(tensors)
            if not 0 < count <= everything.num_envs:
                raise ValueError(f"{everything.num_envs} trajectories cannot belong to {count} rollouts")
            self.stored = list(everything.split(everything.num_envs // count))

    def stored_extras(self, num_actions: int) -> dict[str, tuple[int, ...]]:
        return {"target": (), "advantage": (), **self.normalised_extras()}

    def validate(self, num_envs: int, pools: int) -> list[str]:
        unsupported = {"--algo.value-clip": self.options.value_clip, "--algo.target-kl": self.options.target_kl}
        problems = [f"{flag}: not supported by --algo ppg; remove it" for flag, value in unsupported.items() if value]
        return problems + super().validate(num_envs, pools)

    def shard(self, learners: int) -> None:
        """Return None: PPG cannot be split among several learners.

        Each learner would store its own rollouts, but a checkpoint can contain the rollouts of only one learner.
        """

    # --- batches ---

    def batches(self, rollouts: Sequence[Rollout], context: LearnContext) -> Batches:
        """Yield the batches of the policy phase.

        Each `aux_interval`-th call also yields the batches of an auxiliary phase.
        """
        o = self.options
        if self.value_agent is not None:
            context = replace(context, infer=self._infer_value)
            rollouts = [replace(rollout, value=self._values(rollout)) for rollout in rollouts]
        sequences = self.prepare(rollouts, context)
        for _ in range(o.epochs):
            order = torch.randperm(sequences.num_envs, generator=context.generator)
            for columns in order.tensor_split(o.minibatches):
                minibatch = sequences.select(columns)
                yield Batch(minibatch, self.loss, optimizer="policy")
                yield Batch(minibatch, self.value_loss, optimizer="value")
        self.stored.append(replace(sequences.to(CPU), episodes=[]))
        if len(self.stored) == o.aux_interval:
            yield from self._auxiliary_batches(context.generator)
            self.stored = []

    def _auxiliary_batches(self, generator: torch.Generator) -> Batches:
        """Yield batches of the auxiliary phase.

        Before the first batch, compute the logits of the current policy for all stored rollouts. `joint_loss` keeps the
        policy close to these logits.
        """
        o = self.options
        stored = concatenate([self._with_policy(rollout) for rollout in self.stored])
        for _ in range(o.aux_epochs):
            order = torch.randperm(stored.num_envs, generator=generator)
            for columns in order.split(o.aux_batch_size):
                batch = stored.select(columns).to(self.device)
                yield Batch(batch, self.joint_loss, optimizer="aux")
                if self.value_agent is not None:
                    yield Batch(batch, self.value_loss, optimizer="value")

    @torch.no_grad()
    def _infer_value(self, inputs: Inputs, state: State) -> tuple[Output, State]:
        """Return the output and the new state of the separate value network."""
        return self.value_agent(inputs, state)

    def _values(self, rollout: Rollout) -> Tensor:
        """Return the values [T,N] that the separate value network computes for a rollout."""
        output, _ = self._infer_value(rollout.inputs()[: rollout.length], ())
        return output.value

    @torch.no_grad()
    def _with_policy(self, rollout: Rollout) -> Rollout:
        """Return a copy of a rollout on the CPU, with the logits of the current policy as the extra `old_logits`."""
        on_device = rollout.to(self.device)
        output, _ = self.agent(on_device.inputs()[: rollout.length], on_device.state)
        return rollout.with_extras(old_logits=output.distribution.logits.float().to(CPU))

    def dummy_batch(self, rollout: Rollout) -> Batch:
        return replace(super().dummy_batch(rollout), optimizer="policy")

    # --- losses ---

    def loss(self, agent: Agent, batch: Rollout, progress: float) -> Loss:
        """Return the summed loss of the policy phase: the policy loss of PPO and the entropy bonus."""
        output, _ = agent(batch.inputs()[: batch.length], batch.state)
        terms = self.policy_terms(output, batch, progress)
        return Loss(
            terms["policy_loss"] - self.options.entropy_coef * terms["entropy"],
            {name: term.detach() for name, term in terms.items()},
        )

    def value_loss(self, agent: Agent, batch: Rollout, progress: float) -> Loss:
        """Return the summed value loss of the separate network, or of the agent if there is no separate network."""
        network = self.value_agent or agent
        output, _ = network(batch.inputs()[: batch.length], batch.state)
        estimate = output.value_estimate
        value_loss = estimate.loss(batch.extras["target"]).sum()
        sums = {"value_loss": value_loss.detach(), "value": output.value.detach().sum()}
        sums |= estimate.metrics(batch.extras["target"])
        return Loss(self.options.value_coef * value_loss, sums)

    def joint_loss(self, agent: Agent, batch: Rollout, progress: float) -> Loss:
        """Return the summed loss of the auxiliary phase: value loss of the agent, plus KL(old policy || policy)."""
        output, _ = agent(batch.inputs()[: batch.length], batch.state)
        aux_value_loss = output.value_estimate.loss(batch.extras["target"]).sum()
        policy_cloning = Categorical(batch.extras["old_logits"]).kl_divergence(output.distribution).sum()
        sums = {"aux_value_loss": aux_value_loss.detach(), "policy_cloning": policy_cloning.detach()}
        return Loss(aux_value_loss + self.options.clone_coef * policy_cloning, sums)
