"""RewardWrapper: replaces the reward of a vector environment by the training reward, and computes the true rewards.

The training reward (`--reward`) is the reward that the agent is trained on. True rewards (`--true-reward`) are only
logged: neither the agent nor the learner sees them.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from bestiary.envs.rewards.components import COMMON_COMPONENTS, SCALAR, RewardComponent
from bestiary.envs.rewards.parser import make_reward
from bestiary.envs.rewards.reward_functions import CustomReward, Reward, WeightedReward
from bestiary.envs.vector_env import EnvInterface, VectorEnv, VectorEnvWrapper, check_saved_arrays
from bestiary.step import Arrays, Step
from bestiary.utils import plugins
from bestiary.utils.errors import RunError, UserError
from bestiary.utils.plugin_names import split_rewards


@dataclass(frozen=True)
class RewardConfig:
    """The values of `--reward` and `--true-reward`, as the user wrote them. None means the environment's own reward."""

    training: str | None = None
    true: str | None = None  # one or more specifications, separated by semicolons

    @property
    def is_default(self) -> bool:
        """True if the user gave neither --reward nor --true-reward. Then the environments have no RewardWrapper."""
        return self.training is None and self.true is None

    @property
    def true_rewards(self) -> list[str | None]:
        """The specification of each true reward. None means the environment's own reward."""
        return [None] if self.true is None else [*split_rewards(self.true)]

    @property
    def channels(self) -> tuple[str, ...]:
        """The names of the true rewards in `Step.measures`: `true`, `true_2`, ...

        The tuple is empty if the user gave neither --reward nor --true-reward.
        """
        if self.is_default:
            return ()
        return tuple("true" if k == 0 else f"true_{k + 1}" for k in range(len(self.true_rewards)))


DEFAULT_REWARDS = RewardConfig()


def list_components(interface: EnvInterface) -> dict[str, RewardComponent]:
    """Return all reward components of an environment.

    These are COMMON_COMPONENTS, the scalar measures of the environment, and its own components
    (`interface.components`).
    """
    scalars = [name for name, spec in interface.measures_spec.items() if not spec.shape]
    measured = {name: RewardComponent("measure of the environment") for name in scalars}
    return {**COMMON_COMPONENTS, **measured, **interface.components}


@dataclass(frozen=True)
class ParsedRewards:
    """The rewards of a RewardConfig, as functions for one environment."""

    training: Reward
    true: dict[str, Reward]  # by name in `Step.measures`: true, true_2, ...
    components: Mapping[str, RewardComponent]  # all reward components of the environment

    @property
    def has_custom(self) -> bool:
        """True if one of the rewards is a function from a user's file."""
        return any(isinstance(reward, CustomReward) for reward in (self.training, *self.true.values()))


def parse_rewards(rewards: RewardConfig, interface: EnvInterface) -> ParsedRewards:
    """Parse the training reward and the true rewards. If a reward is invalid, raise UserError with all problems."""
    components = list_components(interface)
    parsed: list[Reward] = []
    problems: list[str] = []
    true_rewards = [("--true-reward", text) for text in rewards.true_rewards]
    for flag, text in [("--reward", rewards.training), *true_rewards]:
        try:
            parsed.append(make_reward(text, components, interface.tasks[0], flag))
            problems += [f"{flag} {text}: {message}" for message in find_inactive_terms(parsed[-1], interface)]
        except UserError as error:
            problems += error.problems
    if problems:
        raise UserError(*dict.fromkeys(problems))
    training, *true = parsed
    return ParsedRewards(training, dict(zip(rewards.channels, true, strict=False)), components)


def find_inactive_terms(reward: Reward, interface: EnvInterface) -> list[str]:
    """Return a message for each term of a reward whose scope contains no step of any game.

    An example is the scope `@life=2` in a game with one life: the term would have no effect.
    """
    max_steps = interface.max_game_steps or math.inf
    messages = []
    for term in reward.terms if isinstance(reward, WeightedReward) else ():
        scope = term.scope
        if scope.life > 1 and not interface.has_lives:
            messages.append(f"{term} never counts: {interface.tasks[0]} has one life")
        elif scope.first >= max_steps or scope.every > max_steps:
            messages.append(f"{term} never counts: a game of {interface.tasks[0]} has at most {max_steps} steps")
    return messages


class RewardWrapper(VectorEnvWrapper):
    """A vector environment whose reward is the training reward.

    `Step.measures` additionally contains all reward components, the training reward under the name `training`, and the
    true rewards under the names `true`, `true_2`, ...
    """

    components: Mapping[str, RewardComponent]

    def __init__(self, pool: VectorEnv, rewards: RewardConfig):
        try:
            parsed = parse_rewards(rewards, pool.interface)
        except UserError:
            pool.close()
            raise
        pool.enable_components()
        super().__init__(pool)
        self.rewards = rewards
        self.components = parsed.components
        self.training_reward = parsed.training
        self.true_rewards = parsed.true
        added = [*self.components, "training", *self.true_rewards]
        self.measures_spec = {**pool.measures_spec, **dict.fromkeys(added, SCALAR)}
        self.clock = np.zeros(self.num_envs, np.int64)  # steps since the start of the game
        self.life = np.ones(self.num_envs, np.int64)  # index of the current life of the game; the first life is 1
        self.last_action = np.full(self.num_envs, -1, np.int64)  # previous action of the episode; -1: none
        self.sent = np.zeros(self.num_envs, np.int64)

    def add_reward(self, channel: str, text: str | None) -> None:
        """Add a true reward, which is computed in each step and returned in `Step.measures[channel]`.

        `text` is the specification of the reward; None means the environment's own reward. Call this method before the
        first reset.
        """
        self.true_rewards[channel] = make_reward(text, self.components, self.tasks[0])
        self.measures_spec = {**self.measures_spec, channel: SCALAR}

    def reset(self) -> Step:
        step = self.pool.reset()
        self.clock[:] = 0
        self.life[:] = 1
        self.last_action[:] = -1
        zeros = {name: np.zeros(self.num_envs, np.float32) for name in self.measures_spec}
        return replace(step, measures={**zeros, **step.measures})

    def send(self, actions: np.ndarray) -> None:
        self.pool.send(actions)
        self.sent = np.array(actions, np.int64)

    def recv(self) -> Step:
        step = self.pool.recv()
        measures: Arrays = {
            **step.measures,
            "reward": step.reward,
            "alive": np.ones(self.num_envs, np.float32),
            "changed": ((self.sent != self.last_action) & (self.last_action >= 0)).astype(np.float32),
        }
        rewards = {"training": self._compute(self.training_reward, measures, "--reward")}
        for name, reward in self.true_rewards.items():
            rewards[name] = self._compute(reward, measures, "--true-reward")
        lost = measures["lives_lost"] if "lives_lost" in measures else step.done & ~step.game_over
        self.clock = np.where(step.game_over, 0, self.clock + 1)
        self.life = np.where(step.game_over, 1, self.life + lost.astype(np.int64))
        self.last_action = np.where(step.done, -1, self.sent)
        return replace(step, reward=rewards["training"].copy(), measures={**measures, **rewards})

    def _compute(self, reward: Reward, measures: Arrays, flag: str) -> np.ndarray:
        """Return the values of a reward, [N]. Raise RunError if the reward function fails or a value is not finite.

        `flag` is the command-line option with which the error message starts.
        """
        try:
            values = reward(measures, self.clock, self.life)
        except RunError as error:
            raise RunError(f"{flag} {reward} {error}") from error
        except (Exception, SystemExit) as error:
            cause = plugins.describe_error(error) or f"{type(error).__name__}: {error}"
            if isinstance(error, KeyError):
                cause += f"; the measures of {self.tasks[0]} are {', '.join(measures)}"
            raise RunError(f"{flag} {reward} failed: {cause}") from error
        if not np.isfinite(values).all():
            row = int(np.flatnonzero(~np.isfinite(values))[0])
            raise RunError(
                f"{flag} {reward} is {values[row]} in step {self.clock[row] + 1} of a game of environment {row}; "
                "rewards must be finite"
            )
        return values

    def save(self) -> Arrays:
        if not self.saveable:
            return {}
        own = {"clock": self.clock, "life": self.life, "last_action": self.last_action}
        return {**self.pool.save(), **{f"reward.{name}": array.copy() for name, array in own.items()}}

    def load(self, state: Arrays) -> None:
        own = {"clock": self.clock, "life": self.life, "last_action": self.last_action}
        check_saved_arrays(state, {f"reward.{name}": array for name, array in own.items()})
        self.clock = state["reward.clock"].copy()
        self.life = state["reward.life"].copy()
        self.last_action = state["reward.last_action"].copy()
        self.pool.load({name: array for name, array in state.items() if not name.startswith("reward.")})


def check_custom_rewards(pool: RewardWrapper) -> None:
    """Test rewards that are functions from a user's file: reset the environments and make one step.

    Raise UserError if a function fails, or returns a wrong shape or values that are not finite.
    """
    pool.reset()
    pool.send(np.zeros(pool.num_envs, np.int64))
    try:
        pool.recv()
    except RunError as error:
        raise UserError(str(error)) from error
