"""Validation: now and then during a training, how good is the agent where it does not learn?

A copy of the agent plays whole games in pools of its own, on levels of its own, with the same seeds every time; nothing of the
training is touched but the clock. Rows go to validation.csv, and the checkpoint with the best score so far is kept as `best`.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from bestiary.agents.agent import Agent
from bestiary.analysis.evaluation import Part
from bestiary.analysis.games import play_games
from bestiary.config import Config, make_pool
from bestiary.console import note, warn
from bestiary.envs.mixture import task_name
from bestiary.envs.procgen import normalised, overlap, with_levels, with_mode
from bestiary.envs.rewards import PLAIN, Rewards

USUAL = 1_000_000  # steps between validations, where only their levels were given
MAX_STEPS = 27_000


@dataclass
class Validator:
    names: tuple[str, ...]
    options: Any  # of the environments
    every: int
    episodes: int
    greedy: bool
    seed: int
    rewards: Rewards = PLAIN

    def validate(self, agent: Agent, steps: int, stop: Callable[[], bool]) -> tuple[list[dict[str, Any]], float | None]:
        """A row for each task, and the score: the mean over the tasks where returns can be compared, else None.

        Raises Stopped where `stop` says so."""
        frozen = copy.deepcopy(agent).to(torch.device("cpu"))
        parts = []
        for task, name in enumerate(self.names):
            streams = np.random.SeedSequence([self.seed, 3, task]).spawn(2)
            pool = make_pool([name], self.options, min(32, self.episodes), streams[0], rewards=self.rewards)
            draws = int(streams[1].generate_state(1)[0])
            played, given_up = play_games(
                frozen,
                pool,
                self.episodes,
                MAX_STEPS,
                greedy=self.greedy,
                seed=draws,
                task=task,
                doing=f"validating on {task_name(name)}",
                stop=stop,
            )
            parts.append(Part(task_name(name), played, steps, getattr(self.options, "levels", None), given_up=given_up))
        return [_row(steps, part) for part in parts], _score(parts)


def make_validator(config: Config) -> Validator | None:
    training = config.training
    wanted = training.valid_levels is not None or training.valid_mode is not None
    every = training.valid_every or (USUAL if wanted else 0)
    if not every:
        return None
    options, levels = config.env_options, training.valid_levels
    return Validator(
        tuple(with_mode(name, training.valid_mode) for name in config.envs),
        options if levels is None else with_levels(config.envs[0], options, levels, "--valid-levels"),
        every,
        training.valid_episodes,
        training.valid_greedy,
        training.seed,
        config.rewards,
    )


def check_validation(config: Config) -> None:
    """Refuse what cannot be validated, and warn of levels that are also trained on, before any work starts. Another mode has
    other levels of the same numbers."""
    validator = make_validator(config)
    if validator is None:
        return
    for name in validator.names:
        make_pool([name], validator.options, 1, 0, rewards=config.rewards).close()
    if not has_score(validator.names):
        note("note: these tasks' returns have no common scale, so validation keeps no checkpoint as `best`")
    trained = getattr(config.env_options, "levels", None)
    if trained is None or set(validator.names).isdisjoint(config.envs):
        return
    if overlap(trained, validator.options.levels):
        chosen = config.training.valid_levels
        what = f"--valid-levels {chosen} overlaps" if chosen else "without --valid-levels, validation plays"
        warn(f"{what} the levels of the training, {trained}: it will flatter the agent")


def _row(steps: int, part: Part) -> dict[str, Any]:
    game, share = part.statistics["game"], part.statistics.get("normalised")
    return {
        "step": steps,
        "task": part.task,
        "levels": part.levels or "",
        "games": int(game["n"]),
        "return": game["mean"],
        "ci_low": game["ci_low"],
        "ci_high": game["ci_high"],
        "normalised": share["mean"] if share else "",
    }


def has_score(names: Sequence[str]) -> bool:
    """Whether returns of these tasks can be put on one scale: there is one task, or constants for all."""
    return len(names) == 1 or all(n.startswith("procgen/") and normalised(n, 0) is not None for n in names)


def _score(parts: list[Part]) -> float | None:
    if not has_score([part.task for part in parts]):
        return None
    means = [part.statistics.get("normalised", part.statistics["game"])["mean"] for part in parts]
    return float(np.mean(means))
