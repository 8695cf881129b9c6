"""The networks of the original programs: tables that map the names of their tensors to names of Bestiary.

A network consists of a torso, a memory and two heads. For each of these parts there is a table, a tuple of `Row`. The
layouts are equal except for the differences below, so an imported network computes the same outputs as the original.

    layer               original                                 Bestiary
    images              uint8, divided by 255                    the same (option `subtract_mean` off)
    flattening          channels, rows, columns                  the same
    last reward         clamped to [-1,1]; PopArt fork with      option `clamp_reward`
                        unclipped rewards: not clamped
    last action         MonoBeast: one-hot, after the reward     the same
    first step of an    reward and action of the previous        option `reset_inputs` off
    episode             episode are kept
    LSTM                gates in the order of PyTorch, two       the same
                        biases, state zero when an episode starts
    PopArt              float32 mu and sigma                     float64 mu, sigma and nu = sigma^2 + mu^2
    SRWM                weights [1,H,E,columns]; unused layer    weights [H,E,columns]; no layer norm
                        norm

Letters of shapes: A actions, K tasks, H heads, E features per head.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor

Weights = Mapping[str, Tensor]


class UnknownNetwork(Exception):
    """The tensors belong to no network that can be imported; the message is the reason."""


@dataclass(frozen=True)
class Row:
    """One row of a table: names of the original, and the names of the same tensors in Bestiary.

    In `original`, # stands for a number n, and * for any word. In `own`, # stands for the number first + factor * n.
    `original` and `own` are names of tensors, or of modules. Inside these modules, tensors have the same names.
    """

    original: str
    own: str | None  # None: the original has this tensor, but does not use it
    factor: int = 1
    first: int = 0
    convert: Callable[[Tensor], Tensor] = lambda tensor: tensor  # original tensor -> tensor with the shape in Bestiary

    def match(self, name: str) -> str | None:
        """Return the name in Bestiary of the original tensor `name`.

        Return "" if the original does not use the tensor. Return None if the row does not describe the tensor.
        """
        pattern = re.escape(self.original).replace(r"\#", "#").replace("#", r"(?P<n>[0-9]{1,3})").replace(r"\*", r"\w+")
        found = re.fullmatch(pattern + r"(?P<rest>\.\w+)?", name)
        if found is None:
            return None
        if self.own is None:
            return ""
        number = self.first + self.factor * int(found.groupdict().get("n") or 0)
        return self.own.replace("#", str(number)) + (found["rest"] or "")


def _without_first_axis(tensor: Tensor) -> Tensor:
    return tensor.squeeze(0)


SHALLOW = (
    Row("conv#", "torso.convolutions.#", factor=2, first=-2),  # conv1, conv2, conv3 -> 0, 2, 4
    Row("fc", "torso.layers.0"),
    Row("fc.#", "torso.layers.#", factor=2),  # reward-misspecification fork: several layers
)
RESNET = (
    Row("feat_convs.#.0", "torso.convolutions.#", factor=4),
    Row("resnet1.#.1", "torso.convolutions.#.first", factor=4, first=2),
    Row("resnet1.#.3", "torso.convolutions.#.second", factor=4, first=2),
    Row("resnet2.#.1", "torso.convolutions.#.first", factor=4, first=3),
    Row("resnet2.#.3", "torso.convolutions.#.second", factor=4, first=3),
    Row("fc", "torso.layers.0"),
)
HEADS = (
    Row("policy", "policy"),
    Row("baseline", "critic"),
)
LSTM = (Row("core", "memory.core"),)
FAST_WEIGHTS = (
    Row("core.input_proj", "memory.input"),
    Row("core.ff_layers.#.layer_norm", "memory.feedforwards.#.norm"),
    Row("core.ff_layers.#.ff_layers.0", "memory.feedforwards.#.layers.0"),
    Row("core.ff_layers.#.ff_layers.3", "memory.feedforwards.#.layers.2"),
    Row("core.*.#.out_linear", "memory.mixers.#.project"),
)
DELTA = (
    *FAST_WEIGHTS,
    Row("core.*.#.slow_net", "memory.mixers.#.slow"),
    Row("core.*.#.layer_norm", "memory.mixers.#.norm"),
)
FAKE_SR = (
    *FAST_WEIGHTS,
    Row("core.*.#.W_y", "memory.mixers.#.weight", convert=_without_first_axis),
    Row("core.*.#.layer_norm", None),
)
SRWM = (
    *FAST_WEIGHTS,
    *(
        Row(f"core.*.#.{name}", f"memory.mixers.#.matrix.base.{block}", convert=_without_first_axis)
        for block, name in enumerate(("W_y", "W_q", "W_k", "w_b"))
    ),
    Row("core.*.#.layer_norm", None),
)


@dataclass(frozen=True)
class Network:
    """The network of a checkpoint."""

    description: str
    rows: tuple[Row, ...]
    options: dict[str, Any]  # options of Bestiary for torso, memory and critic
    num_actions: int
    num_values: int  # number of value heads
    channels: int  # channels of the images

    @property
    def critic(self) -> str:
        """The critic: popart or shared."""
        return str(self.options["critic"])

    def translate(self, name: str) -> Row | None:
        """Return the row that describes the original tensor `name`, or None if there is no such row."""
        return next((row for row in self.rows if row.match(name) is not None), None)


def identify(weights: Weights, uses_popart: bool, resets_every_step: bool) -> Network:
    """Find out from the names and shapes of the tensors which network a checkpoint contains.

    Args:
        weights: the tensors by their original names.
        uses_popart: whether the flags say that PopArt normalises the value heads. PopArt is also assumed if the stored
            statistics differ from their initial values (mu 0, sigma 1).
        resets_every_step: whether the SRWM is reset in each step (flag use_no_carry_sr).

    Raises:
        UnknownNetwork: no network has these tensors.
    """
    for name in ("policy.weight", "baseline.weight"):
        if name not in weights or weights[name].dim() != 2:
            raise UnknownNetwork(f"it has no {name}, so it is no network of TorchBeast that can be imported")
    torso_rows, torso, torso_text = _find_torso(weights)
    memory_rows, memory, memory_text = _find_memory(weights, resets_every_step)
    mu, sigma = weights.get("baseline.mu"), weights.get("baseline.sigma")
    if mu is not None and sigma is not None:
        uses_popart = uses_popart or bool((mu != 0).any() or (sigma != 1).any())
    else:
        uses_popart = False
    num_values = weights["baseline.weight"].shape[0]
    rows = (*torso_rows, *memory_rows, *HEADS)
    if not uses_popart:
        rows = (Row("baseline.mu", None), Row("baseline.sigma", None), *rows)
        if num_values > 1:
            raise UnknownNetwork(f"it has {num_values} value heads without PopArt statistics")
    critic = {"critic": "popart" if uses_popart else "shared"}
    network = Network(
        description=", ".join([torso_text, memory_text, "PopArt"] if uses_popart else [torso_text, memory_text]),
        rows=rows,
        options={**torso, "torso.subtract_mean": False, **memory, **critic},
        num_actions=weights["policy.weight"].shape[0],
        num_values=num_values,
        channels=weights["conv1.weight" if "conv1.weight" in weights else "feat_convs.0.0.weight"].shape[1],
    )
    unknown = [name for name in weights if network.translate(name) is None]
    if unknown:
        raise UnknownNetwork(f"no network that can be imported has the tensors {', '.join(unknown[:4])}")
    return network


def _find_torso(weights: Weights) -> tuple[tuple[Row, ...], dict[str, Any], str]:
    """Return three things for the torso: the table of its tensor names, its options, and a description."""
    if "conv1.weight" in weights:
        layers = [name for name in weights if re.fullmatch(r"fc\.(\d+\.)?weight", name)]
        width = _axis(weights, layers[0] if layers else "fc.weight", 0)
        options = {"torso": "shallow", "torso.width": width, "torso.depth": len(layers)}
        return SHALLOW, options, f"shallow torso ({len(layers)} x {width})"
    sections = _count(weights, r"feat_convs\.(\d+)\.0\.weight")
    if not sections:
        raise UnknownNetwork("it has neither conv1 nor feat_convs, so its torso is not known")
    channels = [_axis(weights, f"feat_convs.{n}.0.weight", 0) for n in range(sections)]
    return (
        RESNET,
        {"torso": "resnet", "torso.width": _axis(weights, "fc.weight", 0), "torso.channels": channels},
        "ResNet",
    )


def _find_memory(weights: Weights, resets_every_step: bool) -> tuple[tuple[Row, ...], dict[str, Any], str]:
    """Return three things for the memory: the table of its tensor names, its options, and a description."""
    if not any(name.startswith("core.") for name in weights):
        return (), {"memory": "none"}, "no memory"
    if layers := _count(weights, r"core\.weight_ih_l(\d+)"):
        hidden = _axis(weights, "core.weight_hh_l0", 1)
        options = {"memory": "lstm", "memory.hidden": hidden, "memory.layers": layers}
        return LSTM, options, f"LSTM ({layers} x {hidden})"
    name, rows, heads, size = _find_mixer(weights)
    if name == "srwm" and resets_every_step:
        name = "srwm-no-carry"  # this memory contains an SRWM with the name `inner`
        rows = tuple(replace(row, own=row.own and row.own.replace("memory.", "memory.inner.")) for row in rows)
    layers = _count(weights, r"core\.\w+\.(\d+)\.out_linear\.weight")
    sizes = {
        "hidden": _axis(weights, "core.input_proj.weight", 0),
        "layers": layers,
        "heads": heads,
        "head_size": size,
        "ff": _axis(weights, "core.ff_layers.0.ff_layers.0.weight", 0),
    }
    options = {"memory": name, **{f"memory.{key}": value for key, value in sizes.items()}}
    if name != "fake-sr":
        options["memory.truncate"] = "step"  # the originals do not propagate gradients from step to step
    if name == "srwm-no-carry":
        options["memory.reset_interval"] = 1
    return rows, options, f"memory {name} ({layers} x {heads} heads of {size})"


def _find_mixer(weights: Weights) -> tuple[str, tuple[Row, ...], int, int]:
    """Recognise a memory with fast weights by the names and shapes of its tensors.

    Return the name of the memory in Bestiary, the table of its tensor names, the number of heads, and the number of
    features per head.
    """
    find = partial(_find, weights)
    if (slow := find(r"core\.\w+\.0\.slow_net\.weight")) is not None:
        # The weight of slow_net has H (3 E + 1) rows. Each head has E rows for queries, E for keys, E for values, and 1
        # for the learning rate. The weight of out_linear has H E columns.
        width = _axis(weights, _find(weights, r"core\.\w+\.0\.out_linear\.weight") or "out_linear", 1)
        heads = _axis(weights, slow, 0) - 3 * width
        if heads <= 0 or width % heads or find(r"core\.\w+\.0\.R_\w") is not None:
            raise UnknownNetwork("its memory is a linear transformer or a recurrent delta network, not a DeltaNet")
        return "delta", DELTA, heads, width // heads
    output = find(r"core\.\w+\.0\.W_y")
    if output is None or weights[output].dim() != 4:
        raise UnknownNetwork("its core is not known; LSTM, DeltaNet, SRWM, Fake SR and SR-Delta can be imported")
    _, heads, size, columns = weights[output].shape
    if find(r"core\.\w+\.0\.w_b") is None:
        return "fake-sr", FAKE_SR, heads, size
    return ("srwm" if columns == size else "sr-delta"), SRWM, heads, size


def _find(weights: Weights, pattern: str) -> str | None:
    """Return the first name that matches a pattern."""
    return next((name for name in weights if re.fullmatch(pattern, name)), None)


def _count(weights: Weights, pattern: str) -> int:
    return sum(re.fullmatch(pattern, name) is not None for name in weights)


def _axis(weights: Weights, name: str, axis: int) -> int:
    """Return the length of an axis of a tensor. Raise UnknownNetwork if there is no such axis."""
    if name not in weights or weights[name].dim() <= axis:
        raise UnknownNetwork(f"its tensor {name} is missing or has the wrong shape")
    return weights[name].shape[axis]
