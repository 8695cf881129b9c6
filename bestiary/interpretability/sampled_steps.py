"""Play games with an agent, and keep the inputs, recurrent states and labels of some steps for a later analysis.

All games are played with the same agent. Other agents may observe the same games: their recurrent states are kept, too.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from bestiary.agents.agent import Agent, State
from bestiary.agents.policy_runner import PolicyRunner
from bestiary.config.config import make_vector_env
from bestiary.envs import ram_labels
from bestiary.envs.atari import AtariVectorEnv
from bestiary.envs.vector_env import EnvInterface, VectorEnv
from bestiary.rollout import Inputs
from bestiary.runs.run import Run, evaluation_seeds
from bestiary.utils.console import note, warn
from bestiary.utils.errors import RunError

Box = tuple[int, int, int, int]  # x, y, width and height on the screen
# At every FRAME_EVERY-th step, the newest frame of each environment's frame stack is kept. The median of the kept
# frames is the background.
FRAME_EVERY = 10
MAX_FRAMES = 400  # maximum number of kept frames


@dataclass(frozen=True)
class SamplingOptions:
    """Which games are played, and which of their steps are kept."""

    episodes: int = 20  # number of games
    # In each game, every `every`-th step is kept. The first kept step is drawn at random from the first `every` steps.
    every: int = 25
    greedy: bool = False
    seed: int = 0
    num_envs: int = 16
    max_steps: int = 27_000  # longer games are cut off


@dataclass
class SampledStep:
    """One step of a game."""

    game: int  # index of the game
    step: int  # step within the game
    inputs: Inputs  # [1,1,...]
    states: tuple[State, ...]  # recurrent state before the step, one for each agent; batch size 1
    labels: dict[str, float]  # labelled quantities
    action: int  # action that was taken
    # {name of a visible object: its place}, one dict for each stacked frame, oldest frame first. Empty dicts: unknown.
    boxes: list[dict[str, Box]]


@dataclass
class Samples:
    """The kept steps of all games."""

    steps: list[SampledStep]
    frames: np.ndarray | None  # newest observed frames of some steps, uint8 [n,C,H,W]; None: no images
    interface: EnvInterface

    @property
    def games(self) -> np.ndarray:
        """The index of the game of each step, int64 [n]."""
        return np.array([step.game for step in self.steps])


def play_and_sample(
    run: Run, agents: Sequence[Agent], options: SamplingOptions, env: str | None = None, description: str = "playing"
) -> Samples:
    """Play `options.episodes` games of one task, and return the kept steps. `agents[0]` selects the actions.

    Each environment plays equally many games, or one more. The games are those of an evaluation with the same seed and
    number of environments. Raise RunError if no step is kept.
    """
    config = run.config
    task = config.task_index(env)
    num_envs = min(options.num_envs, options.episodes)
    env_seed, action_seed = evaluation_seeds(config, options.seed)
    pool = make_vector_env([config.envs[task]], config.env_options, num_envs, env_seed, rewards=config.rewards)
    try:
        return _play(pool, agents, options, task, action_seed, description)
    finally:
        pool.close()


def _play(
    pool: VectorEnv, agents: Sequence[Agent], options: SamplingOptions, task: int, action_seed: int, description: str
) -> Samples:
    n = pool.num_envs
    runners = [PolicyRunner(agent, n, greedy=options.greedy, seed=action_seed, task=task) for agent in agents]
    quota = np.full(n, options.episodes // n) + (np.arange(n) < options.episodes % n)
    first_game = np.cumsum(quota) - quota  # index of the first game of each environment
    played, age = np.zeros(n, np.int64), np.zeros(n, np.int64)
    waiting = np.zeros(n, bool)  # environments whose game was cut off and has not ended yet
    rng = np.random.default_rng(options.seed)
    offset = rng.integers(options.every, size=n)
    depth = pool.frame_stacks.get("image", 1)
    objects = [deque[dict[str, Box]](maxlen=depth) for _ in range(n)]
    steps: list[SampledStep] = []
    frames: list[np.ndarray] = []
    cut_off = 0
    step = pool.reset()
    t = 0
    while (played < quota).any():
        labels = pool.read_labels()
        records = [runner.observe(step) for runner in runners]
        actions = runners[0].select_actions(records[0].output)
        for row in map(int, np.flatnonzero((played < quota) & ~waiting)):
            boxes = _object_boxes(pool, row)
            if age[row] == 0 or step.done[row]:
                objects[row].extend([boxes] * depth)
            objects[row].append(boxes)
            if age[row] % options.every == offset[row]:
                inputs = _row_of(records[0].inputs, row)
                states = tuple(tuple(s[row : row + 1].clone() for s in record.state) for record in records)
                steps.append(
                    SampledStep(
                        int(first_game[row] + played[row]),
                        int(age[row]),
                        inputs,
                        states,
                        {name: float(values[row]) for name, values in labels.items()},
                        int(actions[row]),
                        list(objects[row]),
                    )
                )
            if "image" in step.observation and t % FRAME_EVERY == 0 and len(frames) < MAX_FRAMES:
                channels = step.observation["image"].shape[1] // depth
                frames.append(step.observation["image"][row, -channels:].copy())
        for runner in runners[1:]:
            runner.last_actions = actions
        step = runners[0].act(pool, actions)
        age += 1
        t += 1
        too_long = (age == options.max_steps) & ~step.game_over & ~waiting
        cut_off += int((too_long & (played < quota)).sum())
        played += (step.game_over & ~waiting) | too_long
        waiting = (waiting | too_long) & ~step.game_over
        age[step.game_over] = 0
        offset[step.game_over] = rng.integers(options.every, size=int(step.game_over.sum()))
        if t % 1000 == 0:
            ended = int(np.minimum(played, quota).sum())
            note(f"{description}: {ended} of {options.episodes} games, {len(steps)} steps kept")
    if cut_off:
        warn(f"{cut_off} games were cut off after {options.max_steps} steps")
    if not steps:
        raise RunError(f"--every {options.every}: no step was kept, because all games are too short; reduce the number")
    return Samples(steps, np.stack(frames) if frames else None, pool.interface)


def _object_boxes(pool: VectorEnv, row: int) -> dict[str, Box]:
    env = pool.unwrapped
    return ram_labels.object_boxes(env.game, env.ram[row]) if isinstance(env, AtariVectorEnv) else {}


def _row_of(inputs: Inputs, row: int) -> Inputs:
    """Return a copy of the inputs [1,1,...] of one environment."""
    observation = {kind: x[:, row : row + 1].clone() for kind, x in inputs.observation.items()}
    rest = (x[:, row : row + 1].clone() for x in (inputs.reward, inputs.done, inputs.last_action, inputs.task))
    return Inputs(observation, *rest)


def join_inputs(steps: Sequence[SampledStep], agent: int = 0) -> tuple[Inputs, State]:
    """Return the inputs [1,K,...] of K steps, and the recurrent states [K,...] of one of the agents."""
    one = [step.inputs for step in steps]
    observation = {kind: torch.cat([x.observation[kind] for x in one], dim=1) for kind in one[0].observation}
    rest = (torch.cat([getattr(x, name) for x in one], dim=1) for name in ("reward", "done", "last_action", "task"))
    states = tuple(torch.cat(tensors) for tensors in zip(*(step.states[agent] for step in steps), strict=True))
    return Inputs(observation, *rest), states
