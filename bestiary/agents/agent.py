"""The agent: torso -> memory -> policy and critic.

    output, state = agent(inputs, state)       # inputs [T,B], state before entry 0 -> output [T,B], state after entry T-1
    state = agent.initial_state(B)

The actor calls it with T=1, the learner with a whole rollout; both are the same mathematics, because the memory handles the
resets inside a sequence. `inputs.done[t]` marks the first entry of an episode: last reward and last action belong to the
episode before and are masked there.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from bestiary.agents.critics import Shared, Worth
from bestiary.agents.heads import Categorical
from bestiary.agents.memories import NoMemory
from bestiary.agents.torsos import Shallow
from bestiary.options import option
from bestiary.rollout import ActionSpec, Inputs, ObservationSpec

State = tuple[Tensor, ...]


@dataclass
class Output:
    distribution: Categorical  # over actions, [T,B]
    value: Tensor  # [T,B], in the units of the rewards
    extras: dict[str, Tensor] = field(default_factory=dict)  # what a lens may want to see
    scaled: Worth | None = None  # the value as the network gives it, where a critic normalises it
    measures: dict[str, Tensor] = field(
        default_factory=dict
    )  # means that are worth logging, of parts that watch themselves

    @property
    def worth(self) -> Worth:
        """The value, to learn from."""
        return Worth(self.value) if self.scaled is None else self.scaled


class Agent(Protocol):
    """What actors, learners and lenses need of an agent; any `nn.Module` with these two is one."""

    def __call__(self, inputs: Inputs, state: State) -> tuple[Output, State]: ...

    def initial_state(self, batch_size: int) -> State: ...

    # of every nn.Module:
    def parameters(self) -> Iterator[nn.Parameter]: ...
    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]: ...
    def to(self, device: torch.device) -> "Agent": ...
    def modules(self) -> Iterator[nn.Module]: ...
    def named_children(self) -> Iterator[tuple[str, nn.Module]]: ...
    def state_dict(self, *, keep_vars: bool = False) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> Any: ...


class BasicAgent(nn.Module):
    """Any torso, then any memory, then a linear policy and any critic."""

    parts: ClassVar[tuple[str, ...]] = ("torso", "memory", "critic")  # what this recipe is composed of

    @dataclass(frozen=True)
    class Options:
        inputs: str = option(
            "auto",
            "what memory and heads see besides the torso's features: the last reward, clamped to [-1,1], the last action "
            "(auto: as the torso's published net)",
            choices=("auto", "reward+action", "reward", "action", "none"),
        )
        init: str = option(
            "orthogonal",
            "first weights of torso and heads: orthogonal, a nearly uniform policy; or as PyTorch draws them",
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
        critic: Callable[[int], Any] = Shared,
    ):
        """`torso`, `memory` and `critic` are constructors, their own options already in them."""
        super().__init__()
        self.torso = torso(observation)
        chosen = getattr(self.torso, "inputs", ("reward", "action")) if options.inputs == "auto" else options.inputs
        self.num_actions, self.sees_reward, self.sees_action = action.n, "reward" in chosen, "action" in chosen
        features = self.torso.output_size + int(self.sees_reward) + (action.n if self.sees_action else 0)
        self.memory = memory(features)
        self.policy = nn.Linear(self.memory.output_size, action.n)
        self.critic = critic(self.memory.output_size)
        if options.init == "orthogonal":
            orthogonal(self.torso, gain=math.sqrt(2))
            orthogonal(self.policy, gain=0.01)
            orthogonal(self.critic, gain=1.0)

    def initial_state(self, batch_size: int) -> State:
        return self.memory.initial_state(batch_size)

    def forward(self, inputs: Inputs, state: State) -> tuple[Output, State]:
        T, B = inputs.done.shape
        x = self.torso({kind: merge(array) for kind, array in inputs.observation.items()})  # [T*B,F]
        features = [x.view(T, B, -1)]
        going_on = (~inputs.done).unsqueeze(-1)  # [T,B,1]
        if self.sees_reward:
            features.append(inputs.reward.clamp(-1, 1).unsqueeze(-1) * going_on)
        if self.sees_action:
            features.append(F.one_hot(inputs.last_action, self.num_actions) * going_on)
        x = torch.cat(features, dim=-1) if len(features) > 1 else features[0]
        x, state, measures = remember(self.memory, x, inputs.done, state)
        output = decide(self.policy, self.critic, x, inputs.task)
        output.measures = measures
        return output, tuple(map(whole, state))


def remember(memory: Any, x: Tensor, done: Tensor, state: State) -> tuple[Tensor, State, dict[str, Tensor]]:
    """What a memory makes of x [T,B,D]; and, where it learns, what it has to tell of itself."""
    if torch.is_grad_enabled() and hasattr(memory, "watch"):
        return memory.watch(x, done, state)
    return *memory(x, done, state), {}


def decide(policy: nn.Module, critic: nn.Module, x: Tensor, task: Tensor, **extras: Tensor) -> Output:
    """What policy and critic make of features x [T,B,F]."""
    worth = critic(x, task)
    worth.normalised = whole(worth.normalised)
    return Output(Categorical(whole(policy(x))), worth.value, extras, worth)


def orthogonal(module: nn.Module, gain: float) -> None:
    """Weights that keep the size of what passes through (the gain makes up for ReLUs), biases zero."""
    for part in module.modules():
        if isinstance(part, nn.Linear | nn.Conv2d):
            weight = torch.empty(part.weight.shape)  # in plain memory order, whatever the layer's own
            part.weight.data.copy_(nn.init.orthogonal_(weight, gain))
            if part.bias is not None:
                nn.init.zeros_(part.bias)


def merge(x: Tensor) -> Tensor:
    """[T,B,...] -> [T*B,...]; images [T,B,C,H,W] get, or keep, their channels last in memory."""
    if x.dim() != 5:
        return x.flatten(0, 1)
    return x.permute(0, 1, 3, 4, 2).flatten(0, 1).permute(0, 3, 1, 2)


def whole(x: Tensor) -> Tensor:
    """What leaves the network is never in half precision, whatever it computed in."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def count_parameters(module: nn.Module | Agent) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def fully_connected(agent: Agent) -> int:
    """Parameters of the torso's fully connected layers: what width and depth change, and what published sizes count."""
    layers = getattr(getattr(agent, "torso", None), "layers", None)
    return count_parameters(layers) if layers is not None else 0
