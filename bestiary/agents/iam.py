"""Influence-aware memory (IAM, Suau et al. 2022): a memory that receives only a subset of the observation, the d-set.

    x_t = torso(o_t)                   features of the whole current observation o_t
    m_t = memory(m_{t-1}, dset(o_t))   output of the memory, which receives only the d-set of the observation
    policy and value are linear in [x_t, m_t]; with --agent.policy-layers and --agent.value-layers, fully connected
    layers precede the two heads

Information that matters only at the current step bypasses the memory, so the memory does not have to store it. The
option `dset` selects how the d-set is computed:

    an index list   the inputs with these indices: `49:73`, `0,49:73`, or the name of an index list that the environment
                    defines (`items` in the warehouse)
    static          a learned linear layer over all inputs; for an image, over each cell of the feature map
    all             all inputs; for an image, the whole feature map
    attention       softmax attention over the inputs, or over the cells of the feature map; the queries are computed
                    from the memory's output at the previous step

The attention at step t needs the memory's output at step t-1. With attention, the agent therefore processes sequences
step by step, and gradients pass through both attention and memory. In the first step of an episode, zeros replace the
memory's output at the previous step.

Letters of shapes: T steps of B environments; D inputs of a vector; C channels, h rows and w columns of a feature map,
which has R = h*w cells; U units of an attention head; H outputs of the memory.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn as nn
from torch import Tensor

from bestiary.agents.agent import (
    HeadOptions,
    Output,
    apply_heads,
    flatten_time,
    init_orthogonal,
    make_head_layers,
    run_memory,
    to_float32,
)
from bestiary.agents.component_defaults import AgentDefaults
from bestiary.agents.critics import SharedCritic
from bestiary.agents.memories import GRU, State
from bestiary.agents.torsos import MLP, flatten_observation
from bestiary.rollout import ActionSpec, Inputs, ObservationSpec
from bestiary.utils.errors import UserError
from bestiary.utils.options import option, suggest

DSET_KINDS = ("static", "all", "attention")  # values of --agent.dset other than auto and index lists


class IAMAgent(nn.Module, AgentDefaults):
    """Agent whose torso receives the whole observation and whose memory receives only a part, the d-set."""

    components: ClassVar[tuple[str, ...]] = ("torso", "memory", "critic")
    config_defaults: ClassVar[dict[str, str]] = {"memory": "gru"}
    uses_last_reward = False

    @dataclass(frozen=True)
    class Options(HeadOptions):
        dset: str = option(
            "auto",
            "inputs of the memory: static, all, attention, an index list such as 49:73, or the name of an index list "
            "defined by the environment (auto: attention with a convolutional torso; otherwise the environment's "
            "index list if it has one, else all)",
        )
        predictors: int | None = option(
            None,
            "only with --agent.dset static: number of outputs of the linear layer that computes the inputs of the "
            "memory; for images, the layer is applied to each cell of the feature map and has this number of outputs "
            "per cell (default: 16)",
            low=1,
        )
        heads: int | None = option(
            None, "only with --agent.dset attention: number of heads (default: 1)", low=1, high=64
        )
        units: int | None = option(
            None, "only with --agent.dset attention: number of units per head (default: 128)", low=1
        )
        attention_bias: bool = option(
            False, "only with --agent.dset attention: add biases to the linear layers of keys and queries"
        )

    def __init__(
        self,
        observation: ObservationSpec,
        action: ActionSpec,
        options: Options = Options(),
        *,
        torso: Callable[[ObservationSpec], Any] = MLP,
        memory: Callable[[int], Any] = GRU,
        critic: Callable[[int], Any] = SharedCritic,
    ):
        """Build the agent.

        `torso`, `memory` and `critic` are functions that create the parts of the agent. The argument of `torso` is the
        specification of the observations. The argument of `memory` and `critic` is their number of inputs.
        """
        super().__init__()
        self.torso = torso(observation)
        self.dset = make_dset(observation, self.torso, options)
        self.memory = memory(self.dset.output_size)
        if isinstance(self.dset, Attention):
            self.dset.make_query_layer(self.memory.output_size)
        num_features = self.torso.output_size + self.memory.output_size
        self.policy_mlp, size = make_head_layers(num_features, options.policy_layers, options)
        self.policy = nn.Linear(size, action.n)
        self.value_mlp, size = make_head_layers(num_features, options.value_layers, options)
        self.critic = critic(size)
        for module in (self.torso, self.policy_mlp, self.value_mlp):
            init_orthogonal(module, gain=2**0.5)
        init_orthogonal(self.policy, gain=0.01)
        init_orthogonal(self.critic, gain=1.0)

    @property
    def has_attention(self) -> bool:
        return isinstance(self.dset, Attention)

    def initial_state(self, batch_size: int) -> State:
        """Return the initial state of the memory.

        With attention, the state has one more tensor [B,H]: the memory's output at the previous step, initially zero.
        """
        state = self.memory.initial_state(batch_size)
        if not self.has_attention:
            return state
        return *state, self.policy.weight.new_zeros(batch_size, self.memory.output_size)

    def forward(self, inputs: Inputs, state: State) -> tuple[Output, State]:
        T, B = inputs.done.shape
        observation = {kind: flatten_time(array) for kind, array in inputs.observation.items()}
        if self.torso.has_encoder:
            encoded = self.torso.encode(observation)  # feature map [T*B,C,h,w] or inputs [T*B,D]
            features = self.torso.project(encoded, observation)  # [T*B,F]
        else:
            encoded = flatten_observation(observation)
            features = self.torso(observation)
        extras: dict[str, Tensor] = {}
        metrics: dict[str, Tensor] = {}
        if isinstance(self.dset, Attention):
            memory_output, state, extras["attention"] = self._attend(encoded, inputs.done, state)
        else:
            memory_input = self.dset(encoded).view(T, B, -1)
            memory_output, state, metrics = run_memory(self.memory, memory_input, inputs.done, state)
        x = torch.cat([features.view(T, B, -1), memory_output], dim=-1)
        output = apply_heads(
            self.policy, self.critic, x, inputs.task, policy_mlp=self.policy_mlp, value_mlp=self.value_mlp, **extras
        )
        output.metrics = metrics
        return output, tuple(map(to_float32, state))

    def _attend(self, encoded: Tensor, done: Tensor, state: State) -> tuple[Tensor, State, Tensor]:
        """Run attention and memory step by step over `encoded`, feature maps [T*B,C,h,w] or inputs [T*B,D].

        Return the memory's outputs [T,B,H], the new state, and the attention weights. The weights are [T,B,heads,R] for
        feature maps with R = h*w cells, and [T,B,heads,D] for D inputs.
        """
        assert isinstance(self.dset, Attention)
        T, B = done.shape
        # Values and keys do not depend on the memory, so they are computed for all steps at once.
        values, keys = self.dset.values_and_keys(encoded)
        values = values.view(T, B, *values.shape[1:])
        keys = keys.view(T, B, *keys.shape[1:])
        *memory_state, last_output = state
        outputs, all_weights = [], []
        for t in range(T):
            last_output = torch.where(done[t].unsqueeze(-1), 0.0, last_output)
            attended, weights = self.dset(values[t], keys[t], last_output)
            output, memory_state = self.memory(attended.unsqueeze(0), done[t : t + 1], tuple(memory_state))
            last_output = output[0]
            outputs.append(last_output)
            all_weights.append(weights)
        return torch.stack(outputs), (*memory_state, last_output), torch.stack(all_weights)


class IndexSelection(nn.Module):
    """Computes the d-set (the input of the memory): the inputs with the given indices, [B,D] -> [B,output_size]."""

    def __init__(self, indices: tuple[int, ...]):
        super().__init__()
        self.indices: Tensor
        self.register_buffer("indices", torch.tensor(indices), persistent=False)
        self.output_size = len(indices)

    def forward(self, x: Tensor) -> Tensor:
        return x.index_select(1, self.indices)


class AllInputs(nn.Module):
    """Computes the d-set (the input of the memory): all inputs [B,D], or the flattened feature map [B,C,h,w]."""

    def __init__(self, size: int):
        super().__init__()
        self.output_size = size

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(1)


class Static(nn.Module):
    """Computes the d-set (the input of the memory) with a linear layer.

    The layer is applied to all inputs [B,D], or to each cell of a feature map [B,C,h,w].
    """

    def __init__(self, inputs: int, cells: int, predictors: int):
        super().__init__()
        self.linear = nn.Linear(inputs, predictors, bias=False)
        self.output_size = predictors * cells

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.flatten(2).transpose(1, 2) if x.dim() == 4 else x).flatten(1)


class Attention(nn.Module):
    """Computes the d-set (the input of the memory) with softmax attention.

    The attention is over the cells of a feature map [B,C,h,w], or over the elements of a vector of inputs [B,D]. For a
    feature map, each head outputs the weighted sum of the cells, followed by the attention weights. From the weights,
    the memory knows which cells were attended to. For a vector, each head outputs one number, the weighted sum of the
    inputs.
    """

    def __init__(self, inputs: int, cells: int, heads: int, units: int, bias: bool = False):
        """Build the layer.

        For a feature map, `inputs` is the number of channels and `cells` the number of cells. For a vector, `inputs` is
        the size of the vector and `cells` is 0. If `bias` is True, the linear layers of keys and queries have biases.
        """
        super().__init__()
        self.heads = heads
        self.units = units
        self.spatial = cells > 0
        self.bias = bias
        self.key = nn.Linear(inputs, heads * units, bias=bias)
        self.score = nn.Parameter(torch.empty(heads, units) if cells else torch.empty(heads, inputs, units))
        nn.init.normal_(self.score, std=units**-0.5)
        self.output_size = heads * (inputs + cells) if cells else heads

    def make_query_layer(self, memory_size: int) -> None:
        """Create the linear layer from the memory's output to the queries.

        The constructor cannot create this layer, because the memory is created later, and its output size is the input
        size of the layer. Call this method after the memory has been created.
        """
        self.query = nn.Linear(memory_size, self.heads * self.units, bias=self.bias)

    def values_and_keys(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the values and the keys of the attention over x, a feature map [B,C,h,w] or a vector [B,D].

        For a feature map with R = h*w cells, the values are [B,R,C] and the keys [B,R,heads,units]. For a vector, the
        values are [B,D] and the keys [B,heads,units].
        """
        values = x.flatten(2).transpose(1, 2) if self.spatial else x
        return values, self.key(values).unflatten(-1, (self.heads, self.units))

    def forward(self, values: Tensor, keys: Tensor, last_output: Tensor) -> tuple[Tensor, Tensor]:
        """Return the input of the memory, [B,output_size], and the attention weights.

        The weights are [B,heads,R] for a feature map with R cells, and [B,heads,D] for a vector of D inputs. `values`
        and `keys` are the results of `values_and_keys`. The queries are computed from `last_output`, the memory's
        output at the previous step.
        """
        query = self.query(last_output).unflatten(-1, (self.heads, self.units))  # [B,heads,U]
        if self.spatial:
            context = torch.tanh(keys + query.unsqueeze(1))  # [B,R,heads,U]
            weights = (context * self.score).sum(-1).transpose(1, 2).softmax(-1)  # [B,heads,R]
            patches = weights @ values  # [B,heads,C]
            return torch.cat([patches, weights], dim=-1).flatten(1), weights
        context = torch.tanh(keys + query)  # [B,heads,U]
        weights = torch.einsum("bhu,hdu->bhd", context, self.score).softmax(-1)  # [B,heads,D]
        return (weights @ values.unsqueeze(-1)).squeeze(-1), weights


def make_dset(observation: ObservationSpec, torso: Any, options: IAMAgent.Options) -> Any:
    """Return the module that computes the d-set, the input of the memory.

    Raise UserError if the options do not fit the observation.
    """
    map_shape = torso.map_shape  # (C, h, w); None: the torso has no convolutions
    dset = _default_dset(observation, map_shape is not None) if options.dset == "auto" else options.dset
    for name, kind in (("predictors", "static"), ("heads", "attention"), ("units", "attention")):
        if getattr(options, name) is not None and dset != kind:
            raise UserError(f"--agent.{name}: only for --agent.dset {kind}, not {dset}; remove --agent.{name}")
    if options.attention_bias and dset != "attention":
        raise UserError(f"--agent.attention-bias on: only for --agent.dset attention, not {dset}; remove it")
    if map_shape is not None:
        channels, cells = map_shape[0], map_shape[1] * map_shape[2]
        if dset not in DSET_KINDS:
            raise UserError(f"--agent.dset {dset}: for images, expected one of {', '.join(DSET_KINDS)}")
    else:
        channels, cells = sum(torch.Size(spec.shape).numel() for spec in observation.values()), 0
    if dset == "attention":
        return Attention(channels, cells, options.heads or 1, options.units or 128, options.attention_bias)
    if dset == "static":
        return Static(channels, max(1, cells), options.predictors or 16)
    if dset == "all":
        return AllInputs(channels * max(1, cells))
    return IndexSelection(_parse_indices(dset, observation, channels))


def _default_dset(observation: ObservationSpec, has_map: bool) -> str:
    """Return the value that replaces `--agent.dset auto`. `has_map` is True if the torso returns a feature map."""
    if has_map:
        return "attention"
    names = [name for spec in observation.values() for name, _ in spec.sets]
    return names[0] if names else "all"


def _parse_indices(text: str, observation: ObservationSpec, size: int) -> tuple[int, ...]:
    """Return the indices selected by the value of `--agent.dset`.

    `text` is an index list such as `49:73` or `0,49:73`, or the name of an index list defined by the environment. The
    end of a range is not included. `size` is the number of inputs. Raise UserError if the text is not such a list or
    name, or if an index is not below `size`.
    """
    named: dict[str, tuple[int, ...]] = {}
    offset = 0
    for _, spec in sorted(observation.items()):  # the order of `flatten_observation`
        named |= {name: tuple(offset + index for index in indices) for name, indices in spec.sets}
        offset += torch.Size(spec.shape).numel()
    if text in named:
        return named[text]
    indices: list[int] = []
    for piece in text.split(","):
        start, colon, stop = piece.strip().partition(":")
        if not start.isdecimal() or (colon and not stop.isdecimal()):
            known = [*DSET_KINDS, *named]
            raise UserError(
                f"--agent.dset {text}: expected {', '.join(known)}, or indices such as 0,49:73 (49:73: inputs 49 to 72)"
                f"{suggest(text, known)}"
            )
        first = int(start)
        end = int(stop) if colon else first + 1
        if first >= end:
            raise UserError(f"--agent.dset {text}: the range {piece.strip()} is empty (49:73 are the inputs 49 to 72)")
        if end > size:
            raise UserError(f"--agent.dset {text}: this environment has only the inputs 0 to {size - 1}")
        indices += range(first, end)
    return tuple(dict.fromkeys(indices))
