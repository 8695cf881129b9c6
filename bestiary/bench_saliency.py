"""`bestiary bench --config saliency`: a frame's saliency in batches, against the way of the published code.

That way asks the network about one patch after the other, each time filtering its mask and blurring the frames anew, and goes
through all patches once for the policy and once for the value, with pictures and weights in PyTorch's usual memory order. A few
of its patches are timed, and all are as many times that. Both on the same frame of Pong, at density 2; the batches use all
cores, as a user's do, and one.
"""

import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import scipy.ndimage
import torch
from rich.table import Table

from bestiary.agents.agent import Agent, State
from bestiary.analysis.saliency import Method, Saliency
from bestiary.console import note, stdout
from bestiary.kernels.bench import medians
from bestiary.resolve import resolve
from bestiary.rollout import Inputs

NETS: dict[str, dict[str, Any]] = {
    "shallow": {"torso": "shallow"},
    "resnet": {"torso": "resnet"},
    "resnet, lstm": {"torso": "resnet", "memory": "lstm"},
}
SAMPLE = 20  # patches of the sequential way that are timed


def bench_saliency(repeats: int, method: Method = Method()) -> dict[str, Any]:
    """A row for each net: milliseconds a frame, and how many times faster batches are."""
    rows = []
    for name, parts in NETS.items():
        note(f"saliency: {name}")
        config = resolve({"env": "atari/Pong", "torso.center": False, **parts})
        pool = config.make_pool(1, 0)
        agent, step = config.make_agent(pool), pool.reset()
        pool.close()
        inputs, state = Inputs.of(step, np.zeros(1, np.int64)), agent.initial_state(1)
        lens = Saliency(agent, pool.observation_spec, method)
        alone = Saliency(agent, pool.observation_spec, method)
        alone.threads = ThreadPoolExecutor(1)
        asks = 2 * len(lens.centres)
        rivals: dict[str, Callable[[], Any]] = {
            "batches": partial(lens, inputs, state),
            "one core": partial(alone, inputs, state),
            "sequential": partial(sequential, published(agent), lens, inputs, state, SAMPLE),
        }
        times = medians(rivals, repeats, 0.0)
        times["sequential"] *= asks / (SAMPLE + 1)  # and one of the frame as it is
        speedups = {f"{key}_speedup": times["sequential"] / times[key] for key in ("batches", "one core")}
        rows.append({"name": name, "asks": asks, **{f"{key}_ms": ms for key, ms in times.items()}, **speedups})
    return {"config": "saliency", "density": lens.density, "radius": lens.radius, "nets": rows}


def published(agent: Any) -> Any:
    """The same agent, channels first in memory."""
    agent = copy.deepcopy(agent)
    layers = agent.torso.convolutions.to(memory_format=torch.contiguous_format)
    agent.torso.look = lambda observation: layers(observation["image"].contiguous().float() / 255)
    return agent


@torch.no_grad()
def sequential(agent: Agent, lens: Saliency, inputs: Inputs, state: State, patches: int) -> np.ndarray:
    """Policy scores of the first patches, one by one, in bytes."""
    frame = inputs.observation["image"][0, 0].numpy() / 255  # [C,H,W]
    before = agent(inputs, state)[0].distribution.logits[0, 0]
    scores = []
    for y, x in lens.centres[:patches].tolist():
        cross = np.zeros((lens.height, lens.width))
        cross[max(0, y - 1) : y + 2, x] = cross[y, max(0, x - 1) : x + 2] = 1
        mask = scipy.ndimage.gaussian_filter(cross, lens.radius)
        mask /= mask.max()
        blurred = np.stack([scipy.ndimage.gaussian_filter(one, lens.blur) for one in frame])
        image = torch.from_numpy((255 * (frame * (1 - mask) + blurred * mask)).astype(np.uint8))
        changed = Inputs({"image": image[None, None]}, inputs.reward, inputs.done, inputs.last_action, inputs.task)
        after = agent(changed, state)[0].distribution.logits[0, 0]
        scores.append(0.5 * float((after - before).square().sum()))
    return np.array(scores)


def show(result: dict[str, Any]) -> None:
    title = f"saliency of a frame of Pong, density {result['density']}, policy and value: milliseconds, medians"
    table = Table("", title=title)
    for column in ("asked", "one by one", "batches, one core", "x", "batches, all cores", "x"):
        table.add_column(column, justify="right")
    for row in result["nets"]:
        numbers = (
            f"{row[f'{key}{what}']:,.{d}f}"
            for key in ("one core", "batches")
            for what, d in (("_ms", 0), ("_speedup", 1))
        )
        table.add_row(row["name"], f"{row['asks']:,}", f"{row['sequential_ms']:,.0f}", *numbers)
    stdout.print(table)
