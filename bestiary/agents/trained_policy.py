"""Use a trained agent in your own loop: NumPy arrays in, NumPy arrays out.

run = bestiary.load("zoo/pong")
policy = run.policy(greedy=True)
env = run.make_vec(num_envs=8)                        # or any other environment with the same observations
observation, _ = env.reset()
reward = done = None
while True:
    action = policy.act(observation, reward=reward, done=done)
    observation, reward, terminated, truncated, _ = env.step(action)
    done = terminated | truncated
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from bestiary.agents.agent import Agent
from bestiary.agents.policy_runner import PolicyRunner
from bestiary.envs.observation_reader import ObservationReader
from bestiary.envs.vector_env import EnvInterface
from bestiary.step import Step
from bestiary.utils.console import warn
from bestiary.utils.errors import UserError


class Policy:
    """A trained agent with its recurrent state, its last actions, and a random generator for sampling.

    The first call of `act` determines the number of environments. After `reset()`, the number may change.
    """

    def __init__(
        self, agent: Agent, interface: EnvInterface, *, greedy: bool = False, seed: int = 0, task: int = 0, name: str
    ):
        """Create the policy.

        Args:
            agent: the trained agent.
            interface: interface of the environments on which the agent was trained.
            greedy: take the most probable action instead of sampling an action.
            seed: seed of the generator with which actions are sampled.
            task: index of the task that the agent plays, in `interface.tasks`.
            name: name of the run, for messages.
        """
        self.agent: Any = agent  # `Agent` does not declare the optional attributes of AgentDefaults
        self.greedy = greedy
        self.seed = seed
        self.task = task
        self.name = name
        self.task_name = interface.tasks[task]
        self.action_names = interface.action_spec.names  # action i has the name action_names[i]
        self.reader = ObservationReader(interface)
        self.runner: PolicyRunner | None = None  # created by the first call of `act`
        self.starts_episode = np.zeros(0, bool)  # bool [N]; True: the next observation is the first of an episode
        self.missing_reward_warned = False

    def __repr__(self) -> str:
        kind = "greedy" if self.greedy else "sampled"
        return f"Policy({self.name}: {self.task_name}, {len(self.action_names)} actions, {kind})"

    def act(self, observation: Any, *, reward: Any = None, done: Any = None) -> np.ndarray:
        """Return the actions for the observations of N environments, int64 [N], and update the recurrent state.

        The observation of a single environment is accepted, too: an array without batch axis. The action is then one
        number, an array of shape ().

        Args:
            observation: observations of N environments, in the format of `bestiary.make_vec`: an array [N,...], or a
                dict of arrays if there are several observations. The format of the Gymnasium environment on which the
                agent was trained is accepted, too.
            reward: rewards of the previous actions [N], an input of most agents. If the agent has this input and
                `reward` is None, 0 is used and a warning is printed. The first call does not need rewards.
            done: bool [N], whether the observation is the first observation of a new episode. The default is False,
                except in the first call and after `reset`. With Gymnasium's NEXT_STEP autoreset, an environment returns
                the first observation of an episode one step after `terminated | truncated` was True. With such
                environments, pass `terminated | truncated` of the previous step.

        Raises:
            UserError: an array has the wrong shape or type.
        """
        arrays, is_batch = self.reader.read(observation)
        num_envs = len(next(iter(arrays.values())))
        if self.runner is None:
            self.runner = PolicyRunner(self.agent, num_envs, greedy=self.greedy, seed=self.seed, task=self.task)
            self.starts_episode = np.ones(num_envs, bool)
        if num_envs != self.runner.num_envs:
            raise UserError(
                f"act: {num_envs} observations, but earlier calls had those of {self.runner.num_envs} environments; "
                "call reset() before the number of environments changes"
            )
        starts = self.starts_episode | _read_rows("done", done, num_envs, bool, default=False)
        if reward is None and self.agent.uses_last_reward and not starts.all() and not self.missing_reward_warned:
            self.missing_reward_warned = True
            warn(
                f"{self.name}: the last reward is an input of the agent, but act() was called without reward=; 0 is "
                "used, so the actions can differ from those of `bestiary eval`"
            )
        step = Step(
            observation=arrays,
            reward=_read_rows("reward", reward, num_envs, np.float32, default=0),
            done=starts,
            truncated=np.zeros(num_envs, bool),
            game_over=starts,
            task=np.zeros(num_envs, np.int64),
        )
        actions = self.runner.select_actions(self.runner.observe(step).output)
        self.runner.last_actions = actions
        self.starts_episode = np.zeros(num_envs, bool)
        return actions if is_batch else actions[0, ...]

    def reset(self, rows: int | Sequence[int] | np.ndarray | None = None) -> None:
        """Start new episodes in some environments. `rows` contains their indices, or is a mask, bool [N].

        The recurrent state of these environments is reset in the next call of `act`. If `rows` is None, the policy
        starts again as after its construction: the random generator starts from the seed, and the next call of `act`
        may have another number of environments.
        """
        if rows is None:
            self.runner = None
        elif self.runner is not None:
            try:
                self.starts_episode[rows] = True
            except IndexError as error:
                raise UserError(
                    f"reset: there are {self.runner.num_envs} environments, so rows is not valid: {error}"
                ) from error


def _read_rows(name: str, values: Any, num_envs: int, dtype: Any, default: Any) -> np.ndarray:
    """Return one value per environment, [N]. A single number is accepted if there is one environment.

    If `values` is None, return N times `default`. Raise UserError if `values` is anything other than N numbers.
    """
    if values is None:
        return np.full(num_envs, default, dtype)
    array = np.asarray(values)
    if array.size != num_envs or array.ndim > 1 or array.dtype.kind not in "biuf":
        raise UserError(
            f"act: {name} must contain {num_envs} numbers or booleans, one per environment, but it has the shape "
            f"{list(array.shape)} and the type {array.dtype}"
        )
    return array.reshape(num_envs).astype(dtype)
