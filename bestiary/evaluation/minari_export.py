"""Export episodes of a trained agent as a Minari dataset. `minari.load_dataset(ID)` opens the dataset.

An episode of T steps has these arrays:

    observations               T+1 entries
    actions                    T entries, int64
    rewards                    T entries: the training reward
    terminations, truncations  T entries, all False before the last one. In the last one, `terminations` is True if the
                               episode ended by itself, and `truncations` is True if a time limit ended it
    infos                      a dict of arrays with T entries, which belong to the actions: `training`, `true` and
                               `true_2` ... (training reward and true rewards), all measures and reward components of
                               the environment, `game_over`, and `value` and `log_prob` of the agent

Environments do not return the last observation of an episode that terminated. The last entry of `observations` then
repeats its predecessor. If a time limit ended the episode, the last entry is the real last observation.
"""

import json
import re
import shutil
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch

from bestiary import __version__
from bestiary.agents.policy_runner import StepRecord, run_policy
from bestiary.config.config import env_slug, make_vector_env
from bestiary.envs.rewards.wrapper import RewardConfig
from bestiary.envs.vector_env import VectorEnv
from bestiary.runs import checkpoints
from bestiary.runs.run import Run
from bestiary.step import Arrays, Step
from bestiary.utils.console import note, progress_bar
from bestiary.utils.errors import UserError

MAX_ENVS = 16  # episodes are played in at most this number of environments


def export_minari(
    run: Run,
    *,
    dataset: str | None = None,
    episodes: int = 100,
    checkpoint: int | None = None,
    greedy: bool = False,
    seed: int = 0,
    env: str | None = None,
    overwrite: bool = False,
) -> str:
    """Play whole episodes, write them as a Minari dataset, and return the ID of the dataset.

    Minari stores datasets in ~/.minari/datasets, or in the folder in the environment variable MINARI_DATASETS_PATH. If
    `dataset` is None, the ID is bestiary/RUN/ENVIRONMENT-STEPS-POLICY-vN, where N is the first unused version. `env`
    names one of the run's tasks; the default is the first task.
    """
    minari = _import_minari()
    config = run.config
    task = config.task_index(env)
    chosen = checkpoints.choose(run.path, checkpoint)
    policy = "greedy" if greedy else "sampled"
    name = config.envs[task]
    if dataset is None:
        dataset = _free_id(f"bestiary/{_slug(run.name)}/{_slug(env_slug(name))}-{chosen.steps}-{policy}")
    else:
        _check_id(dataset, overwrite)
    streams = np.random.SeedSequence([config.training.seed, 5, seed]).spawn(2)
    rewards = RewardConfig(config.rewards.training, config.rewards.true or "reward=1")
    num_envs = min(episodes, MAX_ENVS)
    pool = make_vector_env([name], config.env_options, num_envs, streams[0], rewards=rewards)
    agent = run.agent(chosen)
    records = run_policy(agent, pool, greedy=greedy, seed=int(streams[1].generate_state(1)[0]), task=task)
    metadata = {
        "algorithm_name": config.components["algo"].name,
        "author": "bestiary",
        "description": f"{episodes} episodes of {name}, played by the agent of the run {run.name} "
        f"({chosen.steps} steps, {policy} actions).",
        "requirements": [f"bestiary=={__version__}"],
    }
    protocol = {
        "environment_options": config.tables()["env"],
        "rewards": asdict(rewards),
        "action_names": list(pool.action_spec.names),
        "seed": seed,
        "training_seed": config.training.seed,
    }
    try:
        if overwrite:
            shutil.rmtree(_dataset_path(dataset), ignore_errors=True)
        written: Any = None
        finished = _play_episodes(records, pool, episodes)
        for episode in progress_bar(finished, "playing episodes", episodes):
            if written is None:
                written = _create(minari, dataset, [episode], pool, metadata)
                written.storage.update_metadata({"bestiary": json.dumps(protocol)})
            else:
                written.update_dataset_from_buffer([episode])
    except BaseException:
        shutil.rmtree(_dataset_path(dataset), ignore_errors=True)
        raise
    finally:
        pool.close()
    note(f"the dataset has {written.total_episodes} episodes with {written.total_steps} steps")
    return dataset


@dataclass
class _EpisodeColumns:
    """The steps of a running episode of one environment."""

    observations: dict[str, list[np.ndarray]] = field(default_factory=dict)
    actions: list[int] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    infos: dict[str, list[Any]] = field(default_factory=dict)

    def add(self, values: dict[str, Any]) -> None:
        for name, value in values.items():
            self.infos.setdefault(name, []).append(value)


def _play_episodes(records: Iterator[tuple[StepRecord, np.ndarray]], pool: VectorEnv, episodes: int) -> Iterator[Any]:
    """Yield `episodes` whole episodes. Each environment plays a fixed number of episodes.

    If instead the first episodes to end were taken, most of them would be short.
    """
    n = pool.num_envs
    quota = np.full(n, episodes // n) + (np.arange(n) < episodes % n)
    columns = [_EpisodeColumns() for _ in range(n)]
    record, actions = next(records)
    while quota.any():
        following, next_actions = next(records)
        step = following.step
        outputs = {
            "value": record.output.value[0].numpy(),
            "log_prob": record.output.distribution.log_prob(torch.from_numpy(actions)[None])[0].numpy(),
        }
        for row in np.flatnonzero(quota):
            episode = columns[row]
            observation = {kind: array[row] for kind, array in record.step.observation.items()}
            for kind, array in observation.items():
                episode.observations.setdefault(kind, []).append(array.copy())
            episode.actions.append(int(actions[row]))
            episode.rewards.append(float(step.reward[row]))
            episode.add({kind: array[row].copy() for kind, array in step.measures.items()})
            episode.add({"game_over": bool(step.game_over[row])})
            episode.add({name: array[row].copy() for name, array in outputs.items()})
            if step.done[row]:
                yield _make_buffer(episode, _last_observation(step, int(row), observation), bool(step.truncated[row]))
                columns[row] = _EpisodeColumns()
                quota[row] -= 1
        record, actions = following, next_actions


def _last_observation(step: Step, row: int, before: Arrays) -> Arrays:
    """Return the observation after the last action of an episode, or `before` if the environment does not return it."""
    if not step.truncated[row] or not step.final:
        return before
    index = int(step.truncated[:row].sum())
    return {kind: array[index] for kind, array in step.final.items()}


def _make_buffer(episode: _EpisodeColumns, last: Arrays, truncated: bool) -> Any:
    from minari.data_collector import EpisodeBuffer

    observations: Any = {kind: np.stack([*arrays, last[kind]]) for kind, arrays in episode.observations.items()}
    if len(observations) == 1:
        (observations,) = observations.values()
    ends = [False] * (len(episode.actions) - 1)
    return EpisodeBuffer(
        observations=observations,
        actions=np.array(episode.actions, np.int64),
        rewards=episode.rewards,
        terminations=[*ends, not truncated],
        truncations=[*ends, truncated],
        infos={name: np.stack(values) for name, values in episode.infos.items()},
    )


def _create(minari: Any, dataset: str, buffers: list[Any], pool: VectorEnv, metadata: dict[str, Any]) -> Any:
    """Create the dataset with its first episodes."""
    from gymnasium.spaces import Discrete

    from bestiary.envs.as_gymnasium import make_space

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # missing metadata, for example the author's e-mail address
        return minari.create_dataset_from_buffers(
            dataset,
            buffers,
            observation_space=make_space(pool.observation_spec),
            action_space=Discrete(pool.action_spec.n),
            jpeg_encoding=False,  # JPEG would change the observations
            **metadata,
        )


def _import_minari() -> Any:
    try:
        import h5py  # noqa: F401  # Minari's default storage
        import minari
    except ImportError as error:
        raise UserError(
            f"--format minari: {error.name} is not installed; run: pip install 'bestiary[minari]'"
        ) from error
    return minari


def _slug(text: str) -> str:
    """Return the text with hyphens instead of characters that Minari does not allow in IDs."""
    return re.sub(r"[^\w-]+", "-", text)


def _dataset_path(dataset: str) -> Any:
    from minari.storage import get_dataset_path

    return get_dataset_path(dataset)


def _free_id(stem: str) -> str:
    """Return the first of STEM-v0, STEM-v1, ... that is not the ID of a dataset."""
    version = 0
    while _dataset_path(f"{stem}-v{version}").exists():
        version += 1
    return f"{stem}-v{version}"


def _check_id(dataset: str, overwrite: bool) -> None:
    """Raise UserError if a dataset cannot have this ID, or if it exists and may not be overwritten."""
    from minari.dataset.minari_dataset import parse_dataset_id

    try:
        parse_dataset_id(dataset)
    except (ValueError, TypeError):  # TypeError: the version is missing
        raise UserError(
            f"--dataset {dataset}: expected NAME-vVERSION or GROUP/NAME-vVERSION with letters, digits, _ and -, and at "
            "least two characters in GROUP; for example: pong/expert-v0"
        ) from None
    if _dataset_path(dataset).exists() and not overwrite:
        raise UserError(f"--dataset {dataset} exists; choose another name or version, or add --overwrite")
