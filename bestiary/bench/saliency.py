"""Measure saliency maps (`bestiary bench --config saliency`): batched computation against a sequential procedure.

A saliency map shows how much the agent's output changes if a small patch of the frame is blurred. Bestiary evaluates
the patches in batches. The sequential procedure comes from the published multi-task fork of TorchBeast. It evaluates
one patch after the other. For each patch, it computes the mask and blurs the whole frame again. It processes all
patches twice: first for the policy, then for the value. It uses the channels-first memory format for images and
weights. The benchmark measures the sequential procedure on SAMPLE_SIZE patches and extrapolates to all patches.

Both procedures use the same frame of Pong. The batched computation is measured on all cores and on one core.
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
from bestiary.bench.kernels import median_times
from bestiary.config.resolve import resolve
from bestiary.interpretability.saliency import Saliency, SaliencyOptions
from bestiary.rollout import Inputs
from bestiary.utils.console import note, stdout

NETWORKS: dict[str, dict[str, Any]] = {
    "shallow": {"torso": "shallow"},
    "resnet": {"torso": "resnet"},
    "resnet, lstm": {"torso": "resnet", "memory": "lstm"},
}
SAMPLE_SIZE = 20  # number of patches on which the sequential procedure is measured


def bench_saliency(repeats: int, method: SaliencyOptions = SaliencyOptions()) -> dict[str, Any]:
    """Measure each network. The result has one row per network: times per frame (ms) and speedups of batching."""
    rows = []
    for name, components in NETWORKS.items():
        note(f"saliency: measuring network {name}")
        config = resolve({"env": "atari/Pong", "torso.subtract_mean": False, **components})
        pool = config.make_vector_env(1, 0)
        agent = config.make_agent(pool)
        step = pool.reset()
        pool.close()
        inputs = Inputs.from_step(step, np.zeros(1, np.int64))
        state = agent.initial_state(1)
        saliency = Saliency(agent, pool.observation_spec, method)
        single_core = Saliency(agent, pool.observation_spec, method)
        single_core.threads = ThreadPoolExecutor(1)
        forward_passes = 2 * len(saliency.centres)
        procedures: dict[str, Callable[[], Any]] = {
            "batched": partial(saliency, inputs, state),
            "batched_one_core": partial(single_core, inputs, state),
            "sequential": partial(score_sequentially, channels_first(agent), saliency, inputs, state, SAMPLE_SIZE),
        }
        times = median_times(procedures, repeats, 0.0)
        # The measured call makes SAMPLE_SIZE + 1 forward passes: one for each patch, and one for the unchanged frame.
        times["sequential"] *= forward_passes / (SAMPLE_SIZE + 1)
        row: dict[str, Any] = {"name": name, "forward_passes": forward_passes}
        row |= {f"{key}_ms": ms for key, ms in times.items()}
        row |= {f"{key}_speedup": times["sequential"] / times[key] for key in ("batched", "batched_one_core")}
        rows.append(row)
    return {"config": "saliency", "density": saliency.density, "radius": saliency.radius, "networks": rows}


def channels_first(agent: Any) -> Any:
    """Return a copy of the agent whose torso uses the channels-first memory format."""
    agent = copy.deepcopy(agent)
    layers = agent.torso.convolutions.to(memory_format=torch.contiguous_format)
    agent.torso.encode = lambda observation: layers(observation["image"].contiguous().float() / 255)
    return agent


@torch.no_grad()
def score_sequentially(agent: Agent, saliency: Saliency, inputs: Inputs, state: State, num_patches: int) -> np.ndarray:
    """Return the policy scores of the first `num_patches` patches, computed one by one (see the module docstring)."""
    frame = inputs.observation["image"][0, 0].numpy() / 255  # [C,H,W]
    before = agent(inputs, state)[0].distribution.logits[0, 0]
    scores = []
    for y, x in saliency.centres[:num_patches].tolist():
        cross = np.zeros((saliency.height, saliency.width))
        cross[max(0, y - 1) : y + 2, x] = cross[y, max(0, x - 1) : x + 2] = 1
        mask = scipy.ndimage.gaussian_filter(cross, saliency.radius)
        mask /= mask.max()
        blurred = np.stack([scipy.ndimage.gaussian_filter(channel, saliency.blur) for channel in frame])
        image = torch.from_numpy((255 * (frame * (1 - mask) + blurred * mask)).astype(np.uint8))
        perturbed = Inputs({"image": image[None, None]}, inputs.reward, inputs.done, inputs.last_action, inputs.task)
        after = agent(perturbed, state)[0].distribution.logits[0, 0]
        scores.append(0.5 * float((after - before).square().sum()))
    return np.array(scores)


def print_saliency(result: dict[str, Any]) -> None:
    """Print the result of `bench_saliency` as a table."""
    title = f"saliency of one Pong frame, density {result['density']}, policy and value: median milliseconds"
    table = Table("network", title=title)
    for column in ("forward passes", "sequential", "batched, 1 core", "speedup", "batched, all cores", "speedup"):
        table.add_column(column, justify="right")
    for row in result["networks"]:
        table.add_row(
            row["name"],
            f"{row['forward_passes']:,}",
            f"{row['sequential_ms']:,.0f}",
            f"{row['batched_one_core_ms']:,.0f}",
            f"{row['batched_one_core_speedup']:,.1f}",
            f"{row['batched_ms']:,.0f}",
            f"{row['batched_speedup']:,.1f}",
        )
    stdout.print(table)
