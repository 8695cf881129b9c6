"""A trained agent playing, outside of any training."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from bestiary.agents.agent import Agent, Output
from bestiary.envs.pool import Pool
from bestiary.rollout import Inputs, Step


@dataclass
class Moment:
    """A step of a pool, what the agent saw and made of it, and what it then did."""

    step: Step
    inputs: Inputs  # [1,N]
    output: Output  # [1,N]
    action: Tensor  # [1,N]


@torch.no_grad()
def moments(
    agent: Agent, pool: Pool, *, greedy: bool, seed: int, task: int = 0, carry: int | None = None
) -> Iterator[Moment]:
    """The moments of a pool under an agent, forever, the opening one first.

    Memory is carried and reset as in training; with `carry`, it begins anew after so many steps, too. `task` is what the
    pool's first task was in the training."""
    generator = torch.Generator().manual_seed(seed)
    state = agent.initial_state(pool.num_envs)
    actions = np.zeros(pool.num_envs, np.int64)
    step = pool.reset()
    for t in itertools.count():
        if carry is not None and t % carry == 0:
            state = agent.initial_state(pool.num_envs)
        inputs = Inputs.of(step, actions)
        inputs.task = inputs.task + task
        output, state = agent(inputs, state)
        chosen = output.distribution.mode() if greedy else output.distribution.sample(generator)
        yield Moment(step, inputs, output, chosen)
        actions = chosen[0].numpy()
        pool.send(actions)
        step = pool.recv()


def play(
    agent: Agent, pool: Pool, *, greedy: bool, seed: int, task: int = 0, carry: int | None = None
) -> Iterator[tuple[Step, Output]]:
    """The steps of a pool under an agent, as `moments` has them, and what the agent makes of each."""
    for moment in moments(agent, pool, greedy=greedy, seed=seed, task=task, carry=carry):
        yield moment.step, moment.output
