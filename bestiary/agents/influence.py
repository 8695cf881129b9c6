"""Influence-aware memory (Suau et al. 2022): remember only what influences what cannot be seen.

    x_t = FNN(o_t)                     the present, all of it: the torso
    d_t = RNN(d_{t-1}, D(o_t))         the memory, fed with what D lets through
    policy and value are linear in [x_t, d_t]

What is needed only now does not have to pass through the memory, and does not get in its way. D is one of

    an index list   some of the inputs: `49:73`, `0,49:73`, or a name that the environment gives to such a list (`items`)
    static          one learnt linear layer, of all inputs or of each cell of a picture's map
    all             everything
    attention       a softmax over inputs or cells, asked by what the memory gave out one step before

Attention at t needs the memory's output at t-1, so acting and learning alike go through time step by step, and gradients go
back through both. At a reset, that output is zero before attention asks with it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn as nn
from torch import Tensor

from bestiary.agents.agent import Output, State, decide, merge, orthogonal, remember, whole
from bestiary.agents.critics import Shared
from bestiary.agents.memories import GRU
from bestiary.agents.torsos import MLP, flatten_all
from bestiary.errors import UserError
from bestiary.options import option, suggest
from bestiary.rollout import ActionSpec, Inputs, ObservationSpec

FLAVOURS = ("static", "all", "attention")


class InfluenceAgent(nn.Module):
    """A torso that sees the present, and beside it a memory that sees only what it needs to."""

    parts: ClassVar[tuple[str, ...]] = ("torso", "memory", "critic")
    defaults: ClassVar[dict[str, str]] = {"memory": "gru"}
    sees_reward: ClassVar[bool] = False

    @dataclass(frozen=True)
    class Options:
        dset: str = option(
            "auto",
            "what the memory sees: static, all, attention, a list of inputs such as 49:73, or a name the environment gives "
            "to one (auto: the environment's own list; attention where there are convolutions; else all)",
        )
        predictors: int | None = option(
            None, "static: outputs of the linear layer, for pictures of each cell (none: 16)", low=1
        )
        heads: int | None = option(None, "attention: how many look at once (none: 1)", low=1, high=64)
        units: int | None = option(None, "attention: units of a head (none: 128)", low=1)

    def __init__(
        self,
        observation: ObservationSpec,
        action: ActionSpec,
        options: Options = Options(),
        *,
        torso: Callable[[ObservationSpec], Any] = MLP,
        memory: Callable[[int], Any] = GRU,
        critic: Callable[[int], Any] = Shared,
    ):
        super().__init__()
        self.torso = torso(observation)
        self.dset = make_dset(observation, self.torso, options)
        self.memory = memory(self.dset.output_size)
        if isinstance(self.dset, Attention):
            self.dset.listen_to(self.memory.output_size)
        self.policy = nn.Linear(self.torso.output_size + self.memory.output_size, action.n)
        self.critic = critic(self.torso.output_size + self.memory.output_size)
        orthogonal(self.torso, gain=2**0.5)
        orthogonal(self.policy, gain=0.01)
        orthogonal(self.critic, gain=1.0)

    @property
    def attends(self) -> bool:
        return isinstance(self.dset, Attention)

    def initial_state(self, batch_size: int) -> State:
        """The memory's, and, where attention asks with it, the memory's last output."""
        state = self.memory.initial_state(batch_size)
        if not self.attends:
            return state
        return *state, self.policy.weight.new_zeros(batch_size, self.memory.output_size)

    def forward(self, inputs: Inputs, state: State) -> tuple[Output, State]:
        T, B = inputs.done.shape
        observation = {kind: merge(array) for kind, array in inputs.observation.items()}
        if hasattr(self.torso, "look"):
            seen = self.torso.look(observation)  # a map of cells [T*B,C,h,w], or all inputs [T*B,D]
            features = self.torso.digest(seen, observation)  # [T*B,F]
        else:
            seen, features = flatten_all(observation), self.torso(observation)
        extras, measures = dict[str, Tensor](), dict[str, Tensor]()
        if isinstance(self.dset, Attention):
            remembered, state, extras["attention"] = self._attend(seen, inputs.done, state)
        else:
            remembered, state, measures = remember(self.memory, self.dset(seen).view(T, B, -1), inputs.done, state)
        x = torch.cat([features.view(T, B, -1), remembered], dim=-1)
        output = decide(self.policy, self.critic, x, inputs.task, **extras)
        output.measures = measures
        return output, tuple(map(whole, state))

    def _attend(self, seen: Tensor, done: Tensor, state: State) -> tuple[Tensor, State, Tensor]:
        """The memory's outputs [T,B,H], the state after, and where each head looked [T,B,heads,cells]."""
        assert isinstance(self.dset, Attention)
        T, B = done.shape
        values, keys = self.dset.prepare(seen)  # of all steps at once: they do not depend on the memory
        values, keys = values.view(T, B, *values.shape[1:]), keys.view(T, B, *keys.shape[1:])
        *carried, last = state
        outputs, maps = [], []
        for t in range(T):
            last = torch.where(done[t].unsqueeze(-1), 0.0, last)
            let_through, weights = self.dset(values[t], keys[t], last)
            output, carried = self.memory(let_through.unsqueeze(0), done[t : t + 1], tuple(carried))
            last = output[0]
            outputs.append(last)
            maps.append(weights)
        return torch.stack(outputs), (*carried, last), torch.stack(maps)


class Select(nn.Module):
    """Some inputs, by index."""

    def __init__(self, indices: tuple[int, ...]):
        super().__init__()
        self.indices: Tensor
        self.register_buffer("indices", torch.tensor(indices), persistent=False)
        self.output_size = len(indices)

    def forward(self, x: Tensor) -> Tensor:
        return x.index_select(1, self.indices)


class Everything(nn.Module):
    def __init__(self, size: int):
        super().__init__()
        self.output_size = size

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(1)


class Static(nn.Module):
    """One linear layer: of the whole vector, or of each cell of a map [B,C,h,w]."""

    def __init__(self, inputs: int, cells: int, predictors: int):
        super().__init__()
        self.linear = nn.Linear(inputs, predictors, bias=False)
        self.output_size = predictors * cells

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.flatten(2).transpose(1, 2) if x.dim() == 4 else x).flatten(1)


class Attention(nn.Module):
    """Softmaxes over the cells of a map [B,C,h,w], or over the inputs of a vector [B,D].

    Cells: a head gives the memory its weighted sum of cells and the weights themselves, which say where it looked.
    Inputs: a head gives its weighted sum of inputs, one number."""

    def __init__(self, inputs: int, cells: int, heads: int, units: int):
        """`cells` is 0 for a vector of `inputs` numbers."""
        super().__init__()
        self.heads, self.units, self.spatial = heads, units, cells > 0
        self.key = nn.Linear(inputs, heads * units, bias=False)
        self.score = nn.Parameter(torch.empty(heads, units) if cells else torch.empty(heads, inputs, units))
        nn.init.normal_(self.score, std=units**-0.5)
        self.output_size = heads * (inputs + cells) if cells else heads

    def listen_to(self, size: int) -> None:
        """Make the layer that turns the memory's output into queries."""
        self.query = nn.Linear(size, self.heads * self.units, bias=False)

    def prepare(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """What does not depend on the memory: values [B,R,C] or [B,D], and keys [B,R,heads,units] or [B,heads,units]."""
        values = x.flatten(2).transpose(1, 2) if self.spatial else x
        return values, self.key(values).unflatten(-1, (self.heads, self.units))

    def forward(self, values: Tensor, keys: Tensor, last: Tensor) -> tuple[Tensor, Tensor]:
        """What goes to the memory [B,output_size], and the weights [B,heads,R]."""
        query = self.query(last).unflatten(-1, (self.heads, self.units))  # [B,H,U]
        if self.spatial:
            context = torch.tanh(keys + query.unsqueeze(1))  # [B,R,H,U]
            weights = (context * self.score).sum(-1).transpose(1, 2).softmax(-1)  # [B,H,R]
            patches = weights @ values  # [B,H,C]
            return torch.cat([patches, weights], dim=-1).flatten(1), weights
        context = torch.tanh(keys + query)  # [B,H,U]
        weights = torch.einsum("bhu,hdu->bhd", context, self.score).softmax(-1)  # [B,H,D]
        return (weights @ values.unsqueeze(-1)).squeeze(-1), weights


def make_dset(observation: ObservationSpec, torso: Any, options: InfluenceAgent.Options) -> Any:
    map_shape = getattr(torso, "map_shape", None)  # [C,h,w] of what `torso.look` sees
    chosen = _default(observation, map_shape is not None) if options.dset == "auto" else options.dset
    for name, flavour in (("predictors", "static"), ("heads", "attention"), ("units", "attention")):
        if getattr(options, name) is not None and chosen != flavour:
            raise UserError(f"--agent.{name} is for --agent.dset {flavour}; here it is {chosen}")
    if map_shape is not None:
        channels, cells = map_shape[0], map_shape[1] * map_shape[2]
        if chosen not in FLAVOURS:
            raise UserError(f"--agent.dset {chosen}: of a picture, the memory sees {', '.join(FLAVOURS)}")
    else:
        channels, cells = sum(torch.Size(spec.shape).numel() for spec in observation.values()), 0
    if chosen == "attention":
        return Attention(channels, cells, options.heads or 1, options.units or 128)
    if chosen == "static":
        return Static(channels, max(1, cells), options.predictors or 16)
    if chosen == "all":
        return Everything(channels * max(1, cells))
    return Select(_indices(chosen, observation, channels))


def _default(observation: ObservationSpec, has_map: bool) -> str:
    if has_map:
        return "attention"
    named = [name for spec in observation.values() for name, _ in spec.sets]
    return named[0] if named else "all"


def _indices(text: str, observation: ObservationSpec, size: int) -> tuple[int, ...]:
    """`49:73`, `0,49:73` or a name; ranges are half open."""
    named: dict[str, tuple[int, ...]] = {}
    before = 0
    for _, spec in sorted(observation.items()):  # as `flatten_all` puts them side by side
        named |= {name: tuple(before + index for index in indices) for name, indices in spec.sets}
        before += torch.Size(spec.shape).numel()
    if text in named:
        return named[text]
    found: list[int] = []
    for piece in text.split(","):
        start, colon, stop = piece.strip().partition(":")
        if not start.isdecimal() or (colon and not stop.isdecimal()):
            known = [*FLAVOURS, *named]
            raise UserError(
                f"--agent.dset {text}: expected {', '.join(known)}, or a list of inputs such as 49:73{suggest(text, known)}"
            )
        first, end = int(start), int(stop) if colon else int(start) + 1
        if first >= end:
            raise UserError(f"--agent.dset {text}: there is nothing in {piece.strip()} (49:73 are the inputs 49 to 72)")
        if end > size:
            raise UserError(f"--agent.dset {text}: this environment has inputs 0 to {size - 1}")
        found += range(first, end)
    return tuple(dict.fromkeys(found))
