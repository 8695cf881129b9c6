"""Several tasks as one pool: environment i plays task i mod K.

The pools of the tasks step side by side, each in its own threads; whoever plays sees one batch of all of them. Neighbouring
rows play different tasks, so that a batch cut out of the rows has some of each.
"""

from collections.abc import Callable, Sequence

import numpy as np

from bestiary import plugins
from bestiary.envs.pool import Pool
from bestiary.errors import UserError
from bestiary.rollout import Arrays, Step

Build = Callable[[int, np.random.SeedSequence], Pool]  # so many environments of one task


class MixturePool:
    def __init__(
        self, names: Sequence[str], builds: Sequence[Build], num_envs: int, seed: int | np.random.SeedSequence
    ):
        """Tasks that no row is left for are not built, and are tasks all the same."""
        sequence = seed if isinstance(seed, np.random.SeedSequence) else np.random.SeedSequence(seed)
        count = len(builds)
        self.num_envs, self.tasks = num_envs, tuple(map(task_name, names))
        self.rows = [np.arange(k, num_envs, count) for k in range(min(count, num_envs))]
        seeds = sequence.spawn(count)
        self.pools = [builds[k](len(rows), seeds[k]) for k, rows in enumerate(self.rows)]
        self.task = np.arange(num_envs) % count
        first = self.pools[0]
        self.observation_spec, self.action_spec = first.observation_spec, first.action_spec
        self.frames_per_step = first.frames_per_step
        self.measures_spec = {  # what all of them measure
            name: spec
            for name, spec in first.measures_spec.items()
            if all(pool.measures_spec.get(name) == spec for pool in self.pools)
        }
        check_alike(self.tasks, self.pools)
        self.saveable = all(pool.saveable for pool in self.pools)
        self.stacked: dict[str, int] = getattr(first, "stacked", {})

    def reset(self) -> Step:
        return self._join([pool.reset() for pool in self.pools])

    def send(self, actions: np.ndarray) -> None:
        for pool, rows in zip(self.pools, self.rows, strict=True):
            pool.send(actions[rows])

    def recv(self) -> Step:
        return self._join([pool.recv() for pool in self.pools])

    def _join(self, steps: list[Step]) -> Step:
        return Step(
            observation={
                kind: self._rows([step.observation[kind] for step in steps]) for kind in self.observation_spec
            },
            reward=self._rows([step.reward for step in steps]),
            done=self._rows([step.done for step in steps]),
            truncated=self._rows([step.truncated for step in steps]),
            game_over=self._rows([step.game_over for step in steps]),
            task=self.task,
            measures={name: self._rows([step.measures[name] for step in steps]) for name in self.measures_spec},
            final=self._join_final(steps),
        )

    def _rows(self, parts: list[np.ndarray]) -> np.ndarray:
        """The rows of all pools in their places; pictures [N,C,H,W] keep their channels last in memory."""
        shape = parts[0].shape[1:]
        if len(shape) == 3:
            joined = np.empty((self.num_envs, *shape[1:], shape[0]), parts[0].dtype).transpose(0, 3, 1, 2)
        else:
            joined = np.empty((self.num_envs, *shape), parts[0].dtype)
        for rows, part in zip(self.rows, parts, strict=True):
            joined[rows[0] :: len(self.tasks)] = part
        return joined

    def _join_final(self, steps: list[Step]) -> Arrays:
        cut = [rows[step.truncated] for rows, step in zip(self.rows, steps, strict=True)]
        if not any(map(len, cut)):
            return {}
        order = np.concatenate(cut).argsort()
        ended = [step for step in steps if step.truncated.any()]
        return {kind: np.concatenate([step.final[kind] for step in ended])[order] for kind in self.observation_spec}

    def render(self) -> list[np.ndarray]:
        pictures: list[np.ndarray] = [np.zeros(0)] * self.num_envs
        for pool, rows in zip(self.pools, self.rows, strict=True):
            for row, picture in zip(rows, pool.render(), strict=True):
                pictures[row] = picture
        return pictures

    def save(self) -> Arrays:
        if not self.saveable:
            return {}
        return {f"{k}.{name}": array for k, pool in enumerate(self.pools) for name, array in pool.save().items()}

    def load(self, state: Arrays) -> None:
        for k, pool in enumerate(self.pools):
            mine = {name.partition(".")[2]: array for name, array in state.items() if name.startswith(f"{k}.")}
            pool.load(mine)

    def close(self) -> None:
        for pool in self.pools:
            pool.close()


def task_name(name: str) -> str:
    """A user's own file without its folder: `my_env.py:Maze`."""
    return name.rsplit("/", 1)[-1] if plugins.is_plugin(name) else name


def check_alike(tasks: Sequence[str], pools: Sequence[Pool]) -> None:
    """One agent plays all tasks of a run, so it must see and do the same kinds of things in all of them."""
    first = pools[0]
    for name, pool in zip(tasks[1:], pools[1:], strict=False):
        if pool.observation_spec != first.observation_spec:
            raise UserError(
                f"{tasks[0]} and {name} cannot be played by one agent: it would see {shapes(first)} in the one and "
                f"{shapes(pool)} in the other"
            )
        if pool.action_spec != first.action_spec:
            raise UserError(
                f"{tasks[0]} and {name} cannot be played by one agent: the one has the actions "
                f"{' '.join(first.action_spec.names)}, the other {' '.join(pool.action_spec.names)}"
            )
        if pool.frames_per_step != first.frames_per_step:
            raise UserError(f"{tasks[0]} and {name} count frames differently: they cannot be one run")


def shapes(pool: Pool) -> str:
    """What an agent sees there, in a few words."""
    return ", ".join(f"{kind} {spec.dtype}{list(spec.shape)}" for kind, spec in pool.observation_spec.items())
