"""Act with a trained agent in a vector environment, without learning."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from bestiary.agents.agent import Agent, Output, State
from bestiary.envs.vector_env import VectorEnv
from bestiary.rollout import Inputs, Step
from bestiary.utils.errors import RunError


@dataclass
class StepRecord:
    """One step of a vector environment, and the agent's inputs, recurrent state and output at this step."""

    step: Step
    inputs: Inputs  # all tensors are [1,N,...]: one step of N environments
    state: State  # recurrent state before this step
    output: Output  # all tensors are [1,N,...]


class PolicyRunner:
    """Runs an agent in a vector environment. Owns the recurrent state, the last actions and a random generator.

    The caller may pass any actions to `act`: the result of `select_actions` or, for example, recorded actions.
    """

    def __init__(
        self,
        agent: Agent,
        num_envs: int,
        *,
        greedy: bool,
        seed: int,
        task: int = 0,
        reset_state_every: int | None = None,
    ):
        """Create the runner.

        `task` is the index of the environment's task among the tasks that the agent was trained on. If
        `reset_state_every` is given, the recurrent state is reset every `reset_state_every` steps, even in the middle
        of an episode.
        """
        self.agent = agent
        self.num_envs = num_envs
        self.greedy = greedy
        self.task = task
        self.reset_state_every = reset_state_every
        self.generator = torch.Generator().manual_seed(seed)
        self.state = agent.initial_state(num_envs)
        self.last_actions = np.zeros(num_envs, np.int64)
        self.step_count = 0

    @torch.no_grad()
    def observe(self, step: Step) -> StepRecord:
        """Compute the agent's output for a step of the environment, and update the recurrent state."""
        if self.reset_state_every is not None and self.step_count % self.reset_state_every == 0:
            self.state = self.agent.initial_state(self.num_envs)
        self.step_count += 1
        inputs = Inputs.from_step(step, self.last_actions)
        inputs.task = inputs.task + self.task
        state_before = self.state
        output, self.state = self.agent(inputs, state_before)
        return StepRecord(step, inputs, state_before, output)

    def select_actions(self, output: Output) -> np.ndarray:
        """Return actions int64 [N]: the most probable actions if `greedy` is set, otherwise samples.

        Raises:
            RunError: the agent's output is not finite, for example because its weights are too large.
        """
        if not output.distribution.is_finite():
            raise RunError(f"the agent's output is not finite after {self.step_count} steps; use another checkpoint")
        chosen = output.distribution.mode() if self.greedy else output.distribution.sample(self.generator)
        return chosen[0].numpy()

    def act(self, pool: VectorEnv, actions: np.ndarray) -> Step:
        """Take the actions in the vector environment and return its next step.

        The actions are also stored, because they are inputs of the agent at the next step.
        """
        self.last_actions = actions
        pool.send(actions)
        return pool.recv()


def run_policy(
    agent: Agent, pool: VectorEnv, *, greedy: bool, seed: int, task: int = 0, reset_state_every: int | None = None
) -> Iterator[tuple[StepRecord, np.ndarray]]:
    """Reset the vector environment and run the agent in it. For each step, yield a record and the selected actions.

    The iterator never ends. The actions are int64 [N]. The recurrent state is reset at the start of each episode, as
    in training. See `PolicyRunner` for the arguments.
    """
    runner = PolicyRunner(
        agent, pool.num_envs, greedy=greedy, seed=seed, task=task, reset_state_every=reset_state_every
    )
    step = pool.reset()
    while True:
        record = runner.observe(step)
        actions = runner.select_actions(record.output)
        yield record, actions
        step = runner.act(pool, actions)
