"""A trained agent playing, outside of any training."""

from collections.abc import Iterator

import numpy as np
import torch
import torch.nn as nn

from bestiary.envs.pool import Pool
from bestiary.rollout import Inputs, Step


@torch.no_grad()
def play(agent: nn.Module, pool: Pool, *, greedy: bool, seed: int) -> Iterator[Step]:
    """The steps of a pool under an agent, forever, the opening one first. Memory is carried and reset as in training."""
    generator = torch.Generator().manual_seed(seed)
    state = agent.initial_state(pool.num_envs)  # type: ignore[operator]
    actions = np.zeros(pool.num_envs, np.int64)
    step = pool.reset()
    while True:
        yield step
        inputs = Inputs(
            {kind: torch.from_numpy(array)[None] for kind, array in step.observation.items()},
            torch.from_numpy(step.reward)[None],
            torch.from_numpy(step.done)[None],
            torch.from_numpy(actions)[None],
            torch.from_numpy(step.task)[None],
        )
        output, state = agent(inputs, state)
        chosen = output.distribution.mode() if greedy else output.distribution.sample(generator)
        actions = chosen[0].numpy()
        pool.send(actions)
        step = pool.recv()
