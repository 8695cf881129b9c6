"""How fast a cluster would be, from what `bestiary bench` measured on one machine: a small model, and what it leaves out.

    one actor       plays with one core:               p = 1 / (c/env + c/inference)      c: cores of the measured machine
    the learners    learn with all cores of a machine each:   l = learners x learn
    the network     carries b bytes a step into a learner's machine:   n = learners x bandwidth / b
    N actors        min(N p, l, n) steps a second

It assumes that every machine is like the measured one, that cores do not slow each other down, that actors and learners do not
share machines, that learners' adding up and the driver cost nothing, and that weights are few beside rollouts (it says how
many bytes they are). Each of these makes the truth slower: take it as the most that can be had.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from bestiary.config import Config
from bestiary.console import note, stdout
from bestiary.errors import UserError
from bestiary.rollout import Rollout
from bestiary.runtime.wire import arrays_in, pack


@dataclass(frozen=True)
class Machine:
    """What one machine does alone, in decisions a second on all of its cores."""

    cores: float
    env: float
    inference: float
    learn: float

    @property
    def actor(self) -> float:
        """Decisions a second that one actor plays."""
        return 1 / (self.cores / self.env + self.cores / self.inference)


@dataclass(frozen=True)
class Prediction:
    actors: int
    steps: float  # a second
    bound: str


def predict(machine: Machine, actors: int, learners: int, bytes_per_step: float, gigabits: float) -> Prediction:
    limits = {
        "actors": actors * machine.actor,
        "learners": learners * machine.learn,
        "network": learners * gigabits * 1e9 / 8 / bytes_per_step,
    }
    bound = min(limits, key=limits.__getitem__)
    return Prediction(actors, limits[bound], bound)


def bytes_per_step(config: Config) -> tuple[float, int]:
    """What a decision costs on its way to a learner, and what the weights are on theirs to an actor."""
    pool, algorithm = config.make_pool(2, 0), config.make_algorithm()
    pool.close()
    agent = config.make_agent(pool)
    state = tuple(torch.zeros_like(s) for s in agent.initial_state(2))
    rollout = Rollout.empty(algorithm.unroll_length, 2, pool.observation_spec, pool.measures_spec, state)
    sent = sum(array.nbytes for array in arrays_in(pack(rollout, getattr(pool, "stacked", {}))))
    weights = sum(tensor.numel() * tensor.element_size() for tensor in agent.state_dict().values())
    return sent / (algorithm.unroll_length * 2), weights


def read_machine(path: Path, name: str) -> Machine:
    """From the file that `bestiary bench --json` wrote."""
    try:
        results: list[dict[str, Any]] = json.loads(path.read_text())
        found = {result["config"]: result for result in results if "config" in result}
        if name not in found:
            raise UserError(f"--results {path}: {name} was not measured there; it has {', '.join(found) or 'nothing'}")
        result = found[name]
        return Machine(*(float(result[piece]) for piece in ("cores", "env", "inference", "learn")))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"--results {path}: not a file that bestiary bench --json wrote ({error})") from error


def show_predictions(
    name: str, config: Config, machine: Machine, actors: list[int], learners: int, gigabits: float
) -> None:
    each, weights = bytes_per_step(config)
    table = Table(title=f"{name}: predicted, at most; {learners} learner{'s' * (learners != 1)}, {gigabits:g} Gbit/s")
    for column in ("actors", "steps/s", "bound by", "MB/s"):
        table.add_column(column, justify="left" if column == "bound by" else "right")
    for count in actors:
        found = predict(machine, count, learners, each, gigabits)
        table.add_row(f"{count:,}", f"{found.steps:,.0f}", found.bound, f"{found.steps * each / 1e6:,.1f}")
    stdout.print(table)
    note(
        f"{name}: one actor plays {machine.actor:,.0f} steps/s and sends {machine.actor * each / 1e6:.2f} MB/s; a learner "
        f"learns {machine.learn:,.0f}; weights are {weights / 1e6:.1f} MB a version"
    )
