"""A trained agent playing, outside of any training."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from bestiary.agents.agent import Agent, Output, State
from bestiary.envs.pool import Pool
from bestiary.rollout import Inputs, Step


@dataclass
class Moment:
    """A step of a pool, and all that an agent had when it came: enough to ask what it would have made of another one."""

    step: Step
    inputs: Inputs  # [1,N]
    state: State  # of the memory, before
    output: Output


class Player:
    """An agent in front of a pool: it carries its memory and decides. What is then done may be decided by others."""

    def __init__(
        self, agent: Agent, num_envs: int, *, greedy: bool, seed: int, task: int = 0, carry: int | None = None
    ):
        """`task` is what the pool's first task was in the training; with `carry`, the memory begins anew after so many
        steps."""
        self.agent, self.num_envs, self.greedy, self.task, self.carry = agent, num_envs, greedy, task, carry
        self.generator = torch.Generator().manual_seed(seed)
        self.state = agent.initial_state(num_envs)
        self.actions = np.zeros(num_envs, np.int64)  # the last ones
        self.seen = 0

    @torch.no_grad()
    def see(self, step: Step) -> Moment:
        if self.carry is not None and self.seen % self.carry == 0:
            self.state = self.agent.initial_state(self.num_envs)
        self.seen += 1
        inputs = Inputs.of(step, self.actions)
        inputs.task = inputs.task + self.task
        before = self.state
        output, self.state = self.agent(inputs, before)
        return Moment(step, inputs, before, output)

    def decide(self, output: Output) -> np.ndarray:
        chosen = output.distribution.mode() if self.greedy else output.distribution.sample(self.generator)
        return chosen[0].numpy()

    def act(self, pool: Pool, actions: np.ndarray) -> Step:
        self.actions = actions
        pool.send(actions)
        return pool.recv()


def moments(
    agent: Agent, pool: Pool, *, greedy: bool, seed: int, task: int = 0, carry: int | None = None
) -> Iterator[tuple[Moment, np.ndarray]]:
    """The moments of a pool under an agent, forever, the opening one first; and what it then does, int64 [N].

    Memory is carried and reset as in training; with `carry`, it begins anew after so many steps, too. `task` is what the
    pool's first task was in the training."""
    player = Player(agent, pool.num_envs, greedy=greedy, seed=seed, task=task, carry=carry)
    step = pool.reset()
    while True:
        moment = player.see(step)
        actions = player.decide(moment.output)
        yield moment, actions
        step = player.act(pool, actions)


def play(
    agent: Agent, pool: Pool, *, greedy: bool, seed: int, task: int = 0, carry: int | None = None
) -> Iterator[tuple[Step, Output]]:
    """The steps of a pool under an agent, as `moments` has them, and what the agent makes of each."""
    for moment, _ in moments(agent, pool, greedy=greedy, seed=seed, task=task, carry=carry):
        yield moment.step, moment.output
