"""The interface of agents, and the basic agent: torso -> memory -> policy head and critic.

    state = agent.initial_state(B)
    output, state = agent(inputs, state)    # inputs [T,B]: T steps of B environments

The argument `state` is the recurrent state before step 0. The returned state is the recurrent state after step T-1.

An actor calls the agent with T = 1, a learner calls it with a whole rollout. Both calls compute the same outputs,
because the memory resets its state at the start of each episode, even if an episode starts in the middle of a rollout.
`inputs.done[t,b]` is True if step t of environment b is the first step of an episode. The last reward and the last
action of this step belong to the previous episode, so the agent replaces them by zeros by default (option
`reset_inputs`).
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from bestiary.agents.component_defaults import AgentDefaults
from bestiary.agents.critics import SharedCritic, ValueEstimate
from bestiary.agents.distributions import Categorical
from bestiary.agents.memories.base import NoMemory, State
from bestiary.agents.torsos import Shallow
from bestiary.rollout import ActionSpec, Inputs, ObservationSpec
from bestiary.utils.options import option


@dataclass
class Output:
    """The output of an agent for inputs [T,B]."""

    distribution: Categorical  # [T,B], the policy
    value: Tensor  # [T,B], the values in units of the rewards
    extras: dict[str, Tensor] = field(default_factory=dict)  # outputs for interpretability tools, for example attention
    estimate: ValueEstimate | None = None  # the output of the critic; None: `value` is not normalised
    metrics: dict[str, Tensor] = field(default_factory=dict)  # scalars for metrics.csv; each is a mean over the batch

    @property
    def value_estimate(self) -> ValueEstimate:
        """The value estimate that the losses use.

        If `estimate` is None, the estimate consists of `value`, which is then not normalised (mean 0, scale 1).
        """
        return ValueEstimate(self.value) if self.estimate is None else self.estimate


class Agent(Protocol):
    """Interface of agents. Any `nn.Module` with `forward` and `initial_state` is an agent.

    The class `component_defaults.AgentDefaults` defines the optional attributes and their default values.
    """

    def __call__(self, inputs: Inputs, state: State) -> tuple[Output, State]: ...

    def initial_state(self, batch_size: int) -> State: ...

    # Every nn.Module already has the following methods.
    def parameters(self) -> Iterator[nn.Parameter]: ...
    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]: ...
    def to(self, device: torch.device) -> "Agent": ...
    def modules(self) -> Iterator[nn.Module]: ...
    def named_children(self) -> Iterator[tuple[str, nn.Module]]: ...
    def state_dict(self, *, keep_vars: bool = False) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> Any: ...


ACTIVATIONS: dict[str, type[nn.Module]] = {"tanh": nn.Tanh, "relu": nn.ReLU, "none": nn.Identity}


@dataclass(frozen=True, kw_only=True)
class HeadOptions:
    """Options of the fully connected layers that may precede the policy head and the critic."""

    policy_layers: tuple[int, ...] | None = option(
        None,
        "number of units of each fully connected layer before the policy head, for example 64,64 (default: no layer)",
        low=1,
    )
    value_layers: tuple[int, ...] | None = option(
        None,
        "number of units of each fully connected layer before the critic, for example 64,64 (default: no layer)",
        low=1,
    )
    head_activation: str = option(
        "tanh",
        "activation after each of the layers of --agent.policy-layers and --agent.value-layers",
        choices=tuple(ACTIVATIONS),
    )


class BasicAgent(nn.Module, AgentDefaults):
    """Agent that consists of any torso, any memory, a policy head and any critic.

    The policy head is linear. Fully connected layers may precede the policy head and the critic (`HeadOptions`).
    """

    components: ClassVar[tuple[str, ...]] = ("torso", "memory", "critic")

    @dataclass(frozen=True)
    class Options(HeadOptions):
        extra_inputs: str = option(
            "auto",
            "inputs of the memory in addition to the features of the torso: the last reward, the last action, both or "
            "none (auto: both; with --torso resnet or impoola only the reward, as in TorchBeast)",
            choices=("auto", "reward+action", "reward", "action", "none"),
        )
        clamp_reward: bool = option(True, "clamp the last reward to [-1,1] before it is an input of the memory")
        reset_inputs: bool = option(
            True,
            "set the last reward and the last action to zero in the first step of an episode (off: use the last "
            "reward and action of the previous episode, as in TorchBeast)",
        )
        init: str = option(
            "orthogonal",
            "initialisation of torso and heads (orthogonal: the policy starts nearly uniform; torch: the default of "
            "PyTorch)",
            choices=("orthogonal", "torch"),
        )

    def __init__(
        self,
        observation: ObservationSpec,
        action: ActionSpec,
        options: Options = Options(),
        *,
        torso: Callable[[ObservationSpec], Any] = Shallow,
        memory: Callable[[int], Any] = NoMemory,
        critic: Callable[[int], Any] = SharedCritic,
    ):
        """Build the agent.

        `torso`, `memory` and `critic` are functions that create the parts of the agent. The argument of `torso` is the
        specification of the observations. The argument of `memory` and `critic` is their number of inputs.
        """
        super().__init__()
        self.torso = torso(observation)
        extra_inputs: Any = options.extra_inputs
        if extra_inputs == "auto":
            extra_inputs = self.torso.extra_inputs
        self.num_actions = action.n
        self.clamps_last_reward = options.clamp_reward
        self.reset_inputs = options.reset_inputs
        self.uses_last_reward = "reward" in extra_inputs
        self.uses_last_action = "action" in extra_inputs
        num_features = self.torso.output_size + int(self.uses_last_reward)
        num_features += action.n if self.uses_last_action else 0
        self.memory = memory(num_features)
        self.policy_mlp, size = make_head_layers(self.memory.output_size, options.policy_layers, options)
        self.policy = nn.Linear(size, action.n)
        self.value_mlp, size = make_head_layers(self.memory.output_size, options.value_layers, options)
        self.critic = critic(size)
        if options.init == "orthogonal":
            for module in (self.torso, self.policy_mlp, self.value_mlp):
                init_orthogonal(module, gain=math.sqrt(2))
            init_orthogonal(self.policy, gain=0.01)
            init_orthogonal(self.critic, gain=1.0)

    def initial_state(self, batch_size: int) -> State:
        return self.memory.initial_state(batch_size)

    def forward(self, inputs: Inputs, state: State) -> tuple[Output, State]:
        T, B = inputs.done.shape
        x = self.torso({kind: flatten_time(array) for kind, array in inputs.observation.items()})  # [T*B,F]
        features = [x.view(T, B, -1)]
        num_actions = self.num_actions if self.uses_last_action else 0
        features += last_step_features(
            inputs, self.uses_last_reward, num_actions, self.clamps_last_reward, self.reset_inputs
        )
        x = torch.cat(features, dim=-1) if len(features) > 1 else features[0]
        x, state, metrics = run_memory(self.memory, x, inputs.done, state)
        output = apply_heads(
            self.policy, self.critic, x, inputs.task, policy_mlp=self.policy_mlp, value_mlp=self.value_mlp
        )
        output.metrics = metrics
        return output, tuple(map(to_float32, state))


def last_step_features(
    inputs: Inputs, use_reward: bool, num_actions: int, clamp_reward: bool = True, reset: bool = True
) -> list[Tensor]:
    """Return a list of features: the last reward [T,B,1] and the one-hot last action [T,B,A].

    The list contains the reward only if `use_reward` is True, and the action only if `num_actions` (A) is not 0. If
    `clamp_reward` is True, the reward is clamped to [-1,1]. If `reset` is True, both features are zero at the first
    step of an episode.
    """
    is_used = (~inputs.done if reset else torch.ones_like(inputs.done)).unsqueeze(-1)  # [T,B,1]
    features = []
    if use_reward:
        reward = inputs.reward.clamp(-1, 1) if clamp_reward else inputs.reward
        features.append(reward.unsqueeze(-1) * is_used)
    if num_actions:
        features.append(F.one_hot(inputs.last_action, num_actions) * is_used)
    return features


def run_memory(memory: Any, x: Tensor, done: Tensor, state: State) -> tuple[Tensor, State, dict[str, Tensor]]:
    """Run a memory over its inputs x [T,B,D]; D is the number of inputs per step.

    Return the outputs of the memory, its new state and its metrics by name. If gradients are disabled
    (`torch.no_grad`), metrics are not computed, and the dict of metrics is empty.
    """
    if torch.is_grad_enabled():
        return memory.forward_with_metrics(x, done, state)
    return *memory(x, done, state), {}


def make_head_layers(
    inputs: int, sizes: tuple[int, ...] | None, options: HeadOptions
) -> tuple[nn.Sequential | None, int]:
    """Return the fully connected layers before a head, and the number of their outputs.

    `inputs` is the number of inputs, `sizes` the number of units of each layer. If `sizes` is empty or None, there are
    no layers: return (None, `inputs`).
    """
    if not sizes:
        return None, inputs
    layers: list[nn.Module] = []
    for before, units in zip((inputs, *sizes), sizes, strict=False):
        layers += [nn.Linear(before, units), ACTIVATIONS[options.head_activation]()]
    return nn.Sequential(*layers), sizes[-1]


def apply_heads(
    policy: nn.Module,
    critic: nn.Module,
    x: Tensor,
    task: Tensor,
    *,
    policy_mlp: nn.Module | None = None,
    value_mlp: nn.Module | None = None,
    **extras: Tensor,
) -> Output:
    """Apply the policy head and the critic to the features x [T,B,F], and return the output of the agent.

    `policy_mlp` are the layers before the policy head, or None. `value_mlp` are the layers before the critic, or None.
    `extras` are further outputs for interpretability tools, which are stored in `Output.extras`.
    """
    estimate = critic(x if value_mlp is None else value_mlp(x), task)
    estimate.normalised = to_float32(estimate.normalised)
    logits = policy(x if policy_mlp is None else policy_mlp(x))
    return Output(Categorical(to_float32(logits)), estimate.value, extras, estimate)


def init_orthogonal(module: nn.Module | None, gain: float) -> None:
    """Initialise all linear and convolutional layers of a module with orthogonal weights and zero biases.

    The orthogonal weights are multiplied by `gain`. Gain 1 preserves the scale of activations. If a ReLU follows the
    layer, gain sqrt(2) compensates for the activations that the ReLU sets to zero. If `module` is None, do nothing.
    """
    for layer in () if module is None else module.modules():
        if isinstance(layer, nn.Linear | nn.Conv2d):
            # Draw the weights in a contiguous tensor, so that they do not depend on the layer's memory format.
            weight = torch.empty(layer.weight.shape)
            layer.weight.data.copy_(nn.init.orthogonal_(weight, gain))
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)


def flatten_time(x: Tensor) -> Tensor:
    """Merge the axes for time and batch: [T,B,...] -> [T*B,...]. Return images in channels-last memory format."""
    if x.dim() != 5:
        return x.flatten(0, 1)
    return x.permute(0, 1, 3, 4, 2).flatten(0, 1).permute(0, 3, 1, 2)


def to_float32(x: Tensor) -> Tensor:
    """Convert a half-precision tensor (an output under autocast) to float32. Return other tensors unchanged."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def count_parameters(module: nn.Module | Agent) -> int:
    """Return the number of parameters of a module."""
    return sum(parameter.numel() for parameter in module.parameters())


def count_fc_parameters(agent: Agent) -> int:
    """Return the number of parameters in the fully connected layers of an agent's torso.

    Return 0 if the agent has no torso, or if the torso has no fully connected layers. Pan et al. (2022) report this
    number as the size of an agent.
    """
    torso = find_child(agent, "torso")
    layers = find_child(torso, "layers") if torso is not None else None
    return count_parameters(layers) if layers is not None else 0


def find_child(module: nn.Module | Agent, name: str) -> Any:
    """Return the direct submodule with this name, or None if the module has no such submodule."""
    return dict(module.named_children()).get(name)
