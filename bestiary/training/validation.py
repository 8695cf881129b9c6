"""Validation during training: a copy of the agent plays whole games, for example in other levels than in training.

A validation uses its own environments, so it does not affect training. All validations of a run use the same seeds. The
results are written to validation.csv, and the link `best` points to the checkpoint with the best score.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from bestiary.agents.agent import Agent
from bestiary.config.config import Config, make_vector_env, task_interfaces
from bestiary.envs import lookup_score_range, with_mode
from bestiary.envs.levels import levels_of, levels_overlap, with_levels
from bestiary.envs.multitask import task_name
from bestiary.envs.rewards.wrapper import DEFAULT_REWARDS, RewardConfig, parse_rewards
from bestiary.evaluation.game_runner import play_games
from bestiary.evaluation.results import TaskResult
from bestiary.utils.console import note, warn

# Number of steps between validations if --valid-levels or --valid-mode is given but --valid-every is not.
DEFAULT_INTERVAL = 1_000_000
MAX_STEPS = 27_000  # maximum number of steps of a validation game


@dataclass
class Validator:
    """Plays the validation games of a run."""

    names: tuple[str, ...]  # names of the environments, one per task
    options: Any  # options of the environments
    interval: int  # number of steps between validations
    episodes: int  # number of games per task in each validation
    greedy: bool  # whether to choose the most probable action instead of sampling
    seed: int  # seed of the run
    rewards: RewardConfig = DEFAULT_REWARDS

    def validate(
        self, agent: Agent, steps: int, should_stop: Callable[[], bool]
    ) -> tuple[list[dict[str, Any]], float | None]:
        """Play the validation games. Return one row of validation.csv per task, and the score.

        The score is the mean return over the tasks. Normalised returns are used for tasks whose score range is known.
        If the returns of the tasks are not comparable (see `are_comparable`), the score is None.

        Raises:
            bestiary.evaluation.game_runner.EvaluationInterrupted: `should_stop()` became true.
        """
        frozen_agent = copy.deepcopy(agent).to(torch.device("cpu"))
        results = []
        for task, name in enumerate(self.names):
            env_seed, action_seed = np.random.SeedSequence([self.seed, 3, task]).spawn(2)
            pool = make_vector_env([name], self.options, min(32, self.episodes), env_seed, rewards=self.rewards)
            games, unfinished = play_games(
                frozen_agent,
                pool,
                self.episodes,
                MAX_STEPS,
                greedy=self.greedy,
                seed=int(action_seed.generate_state(1)[0]),
                task=task,
                description=f"validating on {task_name(name)}",
                should_stop=should_stop,
            )
            levels = levels_of(self.options)
            results.append(TaskResult(task_name(name), games, steps, levels, unfinished=unfinished))
        return [_make_row(steps, result) for result in results], _compute_score(results)


def make_validator(config: Config) -> Validator | None:
    """Return the validator of a run, or None if the run has no validation."""
    training = config.training
    levels = training.valid_levels
    wanted = levels is not None or training.valid_mode is not None
    interval = training.valid_every or (DEFAULT_INTERVAL if wanted else 0)
    if not interval:
        return None
    options = config.env_options
    if levels is not None:
        options = with_levels(config.envs[0], options, levels, "--valid-levels")
    return Validator(
        tuple(with_mode(name, training.valid_mode) for name in config.envs),
        options,
        interval,
        training.valid_episodes,
        training.valid_greedy,
        training.seed,
        config.rewards,
    )


def check_validation(config: Config) -> None:
    """Check the options of the validation environments. Warn if validation and training levels overlap.

    Levels are compared only if training and validation use the same mode, because a level number stands for different
    levels in different modes.

    Raises:
        UserError: the validation environments do not support their options.
    """
    validator = make_validator(config)
    if validator is None:
        return
    for interface in task_interfaces(validator.names, validator.options):
        parse_rewards(config.rewards, interface)
    if not are_comparable(validator.names):
        note("note: the returns of these tasks are not comparable, so validation does not keep a `best` checkpoint")
    training_levels = levels_of(config.env_options)
    if training_levels is None or set(validator.names).isdisjoint(config.envs):
        return
    if levels_overlap(training_levels, validator.options.levels):
        levels = config.training.valid_levels
        cause = f"--valid-levels {levels} overlaps" if levels else "without --valid-levels, validation uses"
        warn(f"{cause} the training levels {training_levels}; validation returns do not measure generalisation")


def _make_row(steps: int, result: TaskResult) -> dict[str, Any]:
    """Return the row of validation.csv for one task."""
    game_return = result.statistics["game_return"]
    normalised = result.statistics.get("normalised_return")
    return {
        "step": steps,
        "task": result.task,
        "levels": result.levels or "",
        "games": int(game_return["n"]),
        "return": game_return["mean"],
        "ci_low": game_return["ci_low"],
        "ci_high": game_return["ci_high"],
        "interval": f"{game_return['interval']}, over games",
        "normalised_return": normalised["mean"] if normalised else "",
    }


def are_comparable(names: Sequence[str]) -> bool:
    """Return whether a mean over tasks is useful: there is only one task, or all returns can be normalised."""
    return len(names) == 1 or all(lookup_score_range(name) is not None for name in names)


def _compute_score(results: list[TaskResult]) -> float | None:
    """Return the score (see `Validator.validate`), or None if the returns of the tasks are not comparable."""
    if not are_comparable([result.task for result in results]):
        return None
    means = [result.statistics.get("normalised_return", result.statistics["game_return"])["mean"] for result in results]
    return float(np.mean(means))
