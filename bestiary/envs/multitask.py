"""Multi-task training: combine the vector environments of K tasks into one. Environment i plays task i mod K.

A run may have several of these vector environments. The index i is counted over all environments of the run.
`send` starts the steps of all tasks before `recv` waits for them, so emulators of different tasks run in parallel.
Environments with successive indices play different tasks, so any K successive environments contain each task once.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from bestiary.envs.vector_env import EnvInterface, VectorEnv
from bestiary.step import Arrays, Step
from bestiary.utils.errors import UserError
from bestiary.utils.plugin_names import PluginRef, parse_name

Build = Callable[[int, np.random.SeedSequence], VectorEnv]  # (num_envs, seed) -> the vector environment of one task


class MultiTaskVectorEnv(VectorEnv):
    """A vector environment that combines K vector environments, one per task."""

    def __init__(
        self,
        names: Sequence[str],
        builds: Sequence[Build],
        num_envs: int,
        seed: int | np.random.SeedSequence,
        first_env: int = 0,
    ):
        """Build the vector environments of the tasks. Raise UserError if one agent cannot play all tasks.

        `builds` are functions that create the vector environments, one per task. `first_env` is the index of the first
        environment among all environments of the run, so row i plays task (first_env + i) mod K. If `num_envs` is
        smaller than the number of tasks, `first_env` must be 0. The last tasks then have no environment but are still
        in `tasks`.
        """
        sequence = seed if isinstance(seed, np.random.SeedSequence) else np.random.SeedSequence(seed)
        num_tasks = len(builds)
        self.num_envs = num_envs
        self.task = (first_env + np.arange(num_envs)) % num_tasks
        # For each task, the rows of its environments.
        self.rows = [np.flatnonzero(self.task == k) for k in range(min(num_tasks, num_envs))]
        seeds = sequence.spawn(num_tasks)
        self.pools = [builds[k](len(rows), seeds[k]) for k, rows in enumerate(self.rows)]
        self.set_interface(combine_interfaces(names, [pool.interface for pool in self.pools]))

    def reset(self) -> Step:
        return self._join([pool.reset() for pool in self.pools])

    def send(self, actions: np.ndarray) -> None:
        for pool, rows in zip(self.pools, self.rows, strict=True):
            pool.send(actions[rows])

    def recv(self) -> Step:
        return self._join([pool.recv() for pool in self.pools])

    def _join(self, steps: list[Step]) -> Step:
        """Return the steps of all tasks as one step."""
        return Step(
            observation={
                kind: self._join_rows([step.observation[kind] for step in steps]) for kind in self.observation_spec
            },
            reward=self._join_rows([step.reward for step in steps]),
            done=self._join_rows([step.done for step in steps]),
            truncated=self._join_rows([step.truncated for step in steps]),
            game_over=self._join_rows([step.game_over for step in steps]),
            task=self.task,
            measures={name: self._join_rows([step.measures[name] for step in steps]) for name in self.measures_spec},
            final=self._join_final(steps),
        )

    def _join_rows(self, arrays: list[np.ndarray]) -> np.ndarray:
        """Return the rows of all tasks in one array, in the order of the environments.

        Images [N,C,H,W] are returned in channels-last memory format.
        """
        shape = arrays[0].shape[1:]
        if len(shape) == 3:
            joined = np.empty((self.num_envs, *shape[1:], shape[0]), arrays[0].dtype).transpose(0, 3, 1, 2)
        else:
            joined = np.empty((self.num_envs, *shape), arrays[0].dtype)
        for rows, array in zip(self.rows, arrays, strict=True):
            joined[rows[0] :: len(self.tasks)] = array
        return joined

    def _join_final(self, steps: list[Step]) -> Arrays:
        truncated = [rows[step.truncated] for rows, step in zip(self.rows, steps, strict=True)]
        if not any(map(len, truncated)):
            return {}
        order = np.concatenate(truncated).argsort()
        ended = [step for step in steps if step.truncated.any()]
        return {kind: np.concatenate([step.final[kind] for step in ended])[order] for kind in self.observation_spec}

    def render(self) -> list[np.ndarray]:
        images: list[np.ndarray] = [np.zeros(0)] * self.num_envs
        for pool, rows in zip(self.pools, self.rows, strict=True):
            for row, image in zip(rows, pool.render(), strict=True):
                images[row] = image
        return images

    def save(self) -> Arrays:
        if not self.saveable:
            return {}
        return {f"{k}.{name}": array for k, pool in enumerate(self.pools) for name, array in pool.save().items()}

    def load(self, state: Arrays) -> None:
        for k, pool in enumerate(self.pools):
            own = {name.partition(".")[2]: array for name, array in state.items() if name.startswith(f"{k}.")}
            pool.load(own)

    def close(self) -> None:
        for pool in self.pools:
            pool.close()


def task_name(name: str) -> str:
    """Return the task name of an environment: its name, or `my_env.py:Maze` (without folder) for a user's file."""
    return name.rsplit("/", 1)[-1] if isinstance(parse_name(name), PluginRef) else name


def combine_interfaces(names: Sequence[str], interfaces: Sequence[EnvInterface]) -> EnvInterface:
    """Return the interface of the vector environment that combines these tasks.

    `names` are the names of all tasks. `interfaces` may be shorter, because the last tasks may have no environment.
    One agent plays all tasks. Therefore, raise UserError if they differ in observations, actions or frames per step.
    """
    first = interfaces[0]
    check_compatible(names, interfaces)
    limits = [interface.max_game_steps for interface in interfaces]
    return replace(
        first,
        tasks=tuple(map(task_name, names)),
        measures_spec={  # only the measures that all tasks have
            name: spec
            for name, spec in first.measures_spec.items()
            if all(interface.measures_spec.get(name) == spec for interface in interfaces)
        },
        saveable=all(interface.saveable for interface in interfaces),
        has_lives=any(interface.has_lives for interface in interfaces),
        max_game_steps=0 if 0 in limits else max(limits),
    )


def check_compatible(names: Sequence[str], interfaces: Sequence[EnvInterface]) -> None:
    """Raise UserError if the tasks differ in observations, actions or frames per step."""
    first = interfaces[0]
    for name, other in zip(names[1:], interfaces[1:], strict=False):
        if other.observation_spec != first.observation_spec:
            raise UserError(
                f"one agent cannot play both {names[0]} and {name}: their observations differ, "
                f"{describe_observations(first)} and {describe_observations(other)}"
            )
        if other.action_spec != first.action_spec:
            raise UserError(
                f"one agent cannot play both {names[0]} and {name}: their actions differ, "
                f"{' '.join(first.action_spec.names)} and {' '.join(other.action_spec.names)}"
            )
        if other.frames_per_step != first.frames_per_step:
            raise UserError(
                f"one run cannot have both {names[0]} and {name}: their frames per step differ, "
                f"{first.frames_per_step} and {other.frames_per_step}"
            )


def describe_observations(interface: EnvInterface) -> str:
    """Return the names, types and shapes of the observations as text, for example `image uint8[4, 84, 84]`."""
    return ", ".join(f"{kind} {spec.dtype}{list(spec.shape)}" for kind, spec in interface.observation_spec.items())
