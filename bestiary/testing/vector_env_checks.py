"""Check vector environments, including Gymnasium environments inside `GymnasiumVectorEnv`."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import fields
from functools import partial
from typing import Any

import numpy as np

from bestiary.envs.registry import EnvSpec
from bestiary.envs.step_checks import interface_problems, state_problems, step_problems
from bestiary.envs.vector_env import VectorEnv
from bestiary.rollout import Arrays, Step
from bestiary.testing.problem_report import Report
from bestiary.utils.errors import UserError

NUM_ENVS = 4
NUM_STEPS = 200
NUM_SAVED_STEPS = 40  # number of steps for which a saved and a loaded environment are compared
NUM_ROW_STEPS = 10  # number of steps for which `check_rows` compares the rows of two vector environments
SAMPLE_SEEDS = range(10, 18)  # seeds of environments whose first observations are collected
MIN_EPISODES = 3  # first observations are checked only if at least this many games have ended
MIN_TRUNCATIONS = 8  # final observations are checked only if at least this many episodes were truncated
SEED_ADVICE = "draw all random numbers from generators that the constructor seeds with its argument seed"
MAX_FALSE_ALARM = 1e-3  # maximum probability that `check_first_observations` reports a correct environment


def check_vector_env(report: Report, spec: EnvSpec, options: Any, can_render: bool) -> None:
    """Play vector environments with random actions and report all problems. Check images only if `can_render`."""
    checks = VectorEnvChecks(report, spec, options)
    report.run(checks.check_one_env)
    if report.problems:
        return
    with ExitStack() as stack:
        report.run(partial(checks.check_play, stack))
    report.run(checks.check_ends)
    if can_render:
        report.run(checks.check_render)


class VectorEnvChecks:
    """The checks of one class of vector environments. The object stores the steps that several checks use."""

    def __init__(self, report: Report, spec: EnvSpec, options: Any):
        self.report = report
        self.spec = spec
        self.options = options
        self.rng = np.random.default_rng(0)
        # Steps that `check_play` recorded from the first of its two vector environments. The step that `reset` returned
        # is not included.
        self.steps: list[Step] = []

    def build(self, num_envs: int, seed: Any, render: bool = False) -> VectorEnv:
        """Build a vector environment. Report a problem if the constructor fails."""
        shown = seed if isinstance(seed, int) else f"np.random.SeedSequence({seed.entropy})"
        with self.report.errors_of(f"the constructor with num_envs={num_envs} and seed={shown}"):
            pool = self.spec.build(num_envs, seed, self.options, render)
        return pool

    @contextmanager
    def opened(self, num_envs: int, seed: Any, render: bool = False) -> Iterator[VectorEnv]:
        """Build a vector environment, yield it, and close it at the end."""
        pool = self.build(num_envs, seed, render)
        try:
            yield pool
        finally:
            with self.report.errors_of("close"):
                pool.close()

    def reset(self, pool: VectorEnv) -> Step:
        """Call `reset` and return the step. Report a problem if the call fails or the step is not valid."""
        with self.report.errors_of("reset"):
            step = pool.reset()
        self.report.require(*step_problems(step, pool, "reset"))
        return step

    def step(self, pool: VectorEnv, actions: np.ndarray) -> Step:
        """Call `send` and `recv` and return the step. Report a problem if a call fails or the step is not valid."""
        sent = actions.copy()
        with self.report.errors_of("send"):
            pool.send(sent)
        if not np.array_equal(sent, actions):
            self.report.require("send changes the array of actions, which the actor stores; copy it first")
        with self.report.errors_of("recv"):
            step = pool.recv()
        self.report.require(*step_problems(step, pool, "recv"))
        return step

    def random_actions(self, pool: VectorEnv) -> np.ndarray:
        return self.rng.integers(pool.action_spec.n, size=pool.num_envs)

    # --- checks ---

    def check_one_env(self) -> None:
        """Check attributes and a few steps with one environment and an integer seed.

        Bestiary builds an environment in this way before training, to read its interface.
        """
        with self.opened(1, 0) as pool:
            self.report.require(*interface_problems(pool, 1))
            self.reset(pool)
            for _ in range(3):
                self.step(pool, self.random_actions(pool))

    def check_play(self, stack: ExitStack) -> None:
        """Play two vector environments with equal seeds and actions, and compare their steps.

        Then check `save` and `load`, and that an action affects only its own row. `stack` closes the environments.
        """
        seed = np.random.SeedSequence(1)
        first, second = (stack.enter_context(self.opened(NUM_ENVS, np.random.SeedSequence(1))) for _ in range(2))
        self.report.require(*interface_problems(first, NUM_ENVS))
        self.compare(self.reset(first), self.reset(second), "reset", "with equal seeds")
        self.steps = []
        last = None
        for t in range(NUM_STEPS):
            actions = self.random_actions(first)
            step = self.step(first, actions)
            self.compare(step, self.step(second, actions), f"step {t + 1}", "with equal seeds and actions")
            self.check_lives(first, step)
            self.check_frame_stacks(first, last, step)
            self.steps.append(step)
            last = step
        if first.saveable:
            restored = stack.enter_context(self.opened(NUM_ENVS, seed))
            self.report.run(partial(self.check_save, first, restored, second))
        self.check_rows(first, second)

    def compare(self, first: Step, second: Step, where: str, condition: str, advice: str = SEED_ADVICE) -> None:
        """Require that two steps are equal bit for bit. `where`, `condition` and `advice` are parts of the message."""
        if (difference := step_difference(first, second, range(len(first.reward)))) is not None:
            self.report.require(f"two vector environments {condition} differ: {difference} after {where}; {advice}")

    def check_lives(self, pool: VectorEnv, step: Step) -> None:
        """Check that each end of an episode also ends the game, if the attribute `has_lives` is False."""
        rows = np.flatnonzero(step.done & ~step.game_over)
        if not pool.has_lives and len(rows):
            self.report.require(
                f"recv: has_lives is False, but row {rows[0]} has done without game_over; set game_over, too"
            )

    def check_frame_stacks(self, pool: VectorEnv, last: Step | None, step: Step) -> None:
        """Check the rule of `VectorEnv.frame_stacks`: each image is the previous image, shifted by one frame.

        In the first image of an episode, all frames must be equal.
        """
        for kind, depth in pool.frame_stacks.items():
            image = step.observation[kind]
            channels = image.shape[1] // depth
            frames = image.reshape(len(image), depth, channels, *image.shape[2:])
            is_wrong = step.done & (frames != frames[:, :1]).any(axis=(1, 2, 3, 4))
            if last is not None:
                shifted = (last.observation[kind][:, channels:] != image[:, :-channels]).any(axis=(1, 2, 3))
                is_wrong |= ~step.done & shifted
            if is_wrong.any():
                row = np.flatnonzero(is_wrong)[0]
                self.report.require(
                    f"recv: frame_stacks declares {depth} frames in {kind!r}, but row {row} is not the previous image "
                    "shifted by one frame (or, if done is set, one repeated frame)"
                )

    def check_save(self, pool: VectorEnv, restored: VectorEnv, twin: VectorEnv) -> None:
        """Check that `save` does not change an environment, and that `load` restores the state in a new environment.

        Args:
            pool: vector environment whose state is saved.
            restored: new vector environment, into which the state is loaded.
            twin: vector environment in the same state as `pool`, whose method `save` is not called.
        """
        with self.report.errors_of("save"):
            state = pool.save()
        self.report.require(*state_problems(state))
        copies = {name: array.copy() for name, array in state.items()}
        with self.report.errors_of("load"):
            restored.load({name: array.copy() for name, array in state.items()})
        for t in range(NUM_SAVED_STEPS):
            actions = self.random_actions(pool)
            expected = self.step(pool, actions)
            found = self.step(restored, actions)
            where, condition = f"step {t + 1} after save", "of which only one was saved"
            self.compare(expected, self.step(twin, actions), where, condition, "save must not change the environment")
            if (difference := step_difference(expected, found, range(NUM_ENVS))) is not None:
                self.report.require(
                    f"load does not restore the saved state: {difference} after step {t + 1}; save must return "
                    "everything that changes, also random generators"
                )
        changed = [name for name, array in state.items() if not np.array_equal(array, copies[name])]
        if changed:
            self.report.require(f"save: the array {changed[0]!r} changes in later steps; return copies")

    def check_rows(self, first: VectorEnv, second: VectorEnv) -> None:
        """Check that an action affects only its own row.

        `first` and `second` must be in the same state. They get the same actions, with one exception: in the first
        step, row 0 of `second` gets another action.
        """
        n = first.action_spec.n
        if n == 1:
            return
        for t in range(NUM_ROW_STEPS):
            actions = self.random_actions(first)
            changed = actions.copy()
            changed[0] = (actions[0] + (1 if t == 0 else 0)) % n
            steps = self.step(first, actions), self.step(second, changed)
            # All rows may share one random generator. If the episode of row 0 ends in only one of the two vector
            # environments, only this vector environment draws random numbers for a new episode. Then other rows may
            # differ, too.
            if steps[0].done[0] != steps[1].done[0]:
                return
            if (difference := step_difference(*steps, range(1, NUM_ENVS))) is not None:
                self.report.require(
                    f"recv: only the action of row 0 was changed, but other rows changed: {difference}; row i must "
                    "always be environment i and depend only on action i"
                )

    def check_ends(self) -> None:
        """Check the observations at the ends of episodes."""
        self.check_first_observations()
        self.check_final()

    def check_first_observations(self) -> None:
        """Check that observations returned with `done` look like observations after `reset`.

        An observation with `done` must already be the first observation of the next game. A wrong environment returns
        the last observation of the old game. A correct environment can give an unusual first observation by chance, so
        a problem is reported only if all n observations with `done` are unusual:

        1. Reset environments with several seeds. For each element of the observation, this gives a range of values. An
           observation is unusual if an element is far outside its range.
        2. Estimate the probability p that a first observation of a correct environment is unusual: for each seed, count
           the observations after `reset` that are far outside the range of the other seeds.
        3. In a correct environment, all n observations are unusual with probability p^n. Report a problem if p^n is
           less than MAX_FALSE_ALARM.
        """
        after_done = [step.observation for step in self.steps]
        rows = [step.done & step.game_over & ~step.truncated for step in self.steps]
        kinds = self.steps[0].observation if self.steps else {}
        ended = {kind: np.concatenate([o[kind][r] for o, r in zip(after_done, rows, strict=True)]) for kind in kinds}
        if not kinds or len(next(iter(ended.values()))) < MIN_EPISODES:
            return
        samples: dict[str, list[np.ndarray]] = {kind: [] for kind in kinds}
        for seed in SAMPLE_SEEDS:
            with self.opened(NUM_ENVS, seed) as pool:
                observation = self.reset(pool).observation
            for kind, array in observation.items():
                samples[kind].append(array)
        left_out = 0  # number of observations after `reset` that are far outside the range of the other seeds
        for k in range(len(SAMPLE_SEEDS)):
            others = {kind: arrays[:k] + arrays[k + 1 :] for kind, arrays in samples.items()}
            left_out += int(_are_outside(others, {kind: arrays[k] for kind, arrays in samples.items()}).sum())
        probability = (left_out + 1) / (len(SAMPLE_SEEDS) * NUM_ENVS + 2)
        outside = _are_outside(samples, ended)
        if outside.all() and probability ** len(outside) < MAX_FALSE_ALARM:
            self.report.require(
                f"recv: none of the {len(outside)} observations after a terminal state (done) resembles an "
                "observation after reset; if done is set, observation must be the first observation of the next episode"
            )

    def check_final(self) -> None:
        """Check that `final` is the last observation of the old episode, not the first of the next episode."""
        pairs = [
            (step.final[kind], step.observation[kind][step.truncated])
            for step in self.steps
            if step.truncated.any()
            for kind in step.observation
        ]
        count = sum(int(step.truncated.sum()) for step in self.steps)
        if count < MIN_TRUNCATIONS or not all(np.array_equal(final, first) for final, first in pairs):
            return
        first_step = self.steps[0].observation
        varies = any(not np.array_equal(step.observation[k], first_step[k]) for step in self.steps for k in first_step)
        if varies:
            self.report.require(
                f"recv: final equals observation in all {count} truncated rows; final must be the last observation of "
                "the old episode, and observation the first observation of the next episode"
            )

    def check_render(self) -> None:
        """Check the rendered images, if the environment can be rendered."""
        try:
            pool = self.spec.build(NUM_ENVS, 0, self.options, True)
        except UserError:
            return
        except Exception as error:
            self.report.require(f"the constructor for rendering failed: {self.report.describe(error)}")
        with closing(pool):
            self.reset(pool)
            try:
                images: Any = pool.render()
            except UserError:
                return
            except Exception as error:
                self.report.require(f"render failed: {self.report.describe(error)}")
        if not isinstance(images, Sequence) or len(images) != NUM_ENVS:
            found = f"{len(images)} images" if isinstance(images, Sequence) else f"a {type(images).__name__}"
            self.report.require(f"render returned {found}; expected a list of {NUM_ENVS} images, one per environment")
        for image in images:
            if not isinstance(image, np.ndarray) or image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3:
                found = f"{image.dtype}{list(image.shape)}" if isinstance(image, np.ndarray) else type(image).__name__
                self.report.require(f"render returned an image {found}; expected uint8 [H,W,3]")


def step_difference(first: Step, second: Step, rows: Sequence[int]) -> str | None:
    """Compare the given rows of two steps. Return a description of the first difference, or None if they are equal."""
    index = np.asarray(rows)
    for field in fields(Step):
        a, b = getattr(first, field.name), getattr(second, field.name)
        if field.name == "final":
            a, b = _final_rows(first), _final_rows(second)
        for key in a if isinstance(a, dict) else [None]:
            x, y = (a, b) if key is None else (a[key], b[key])
            equal = (x[index] == y[index]) | ((x[index] != x[index]) & (y[index] != y[index]))  # NaN equals NaN
            if not equal.all():
                row = index[int(np.argwhere(~equal)[0][0])]
                name = field.name if key is None else f"{field.name}[{key!r}]"
                values = f" is {x[row]} and {y[row]}" if np.size(x[row]) == 1 else " differs"
                return f"{name} of row {row}{values}"
    return None


def _final_rows(step: Step) -> Arrays:
    """Return the final observations, one row per environment. Rows whose episode was not truncated are zero."""
    rows = {}
    for kind, array in step.observation.items():
        rows[kind] = np.zeros_like(array)
        if step.truncated.any():
            rows[kind][step.truncated] = step.final[kind]
    return rows


def _are_outside(samples: dict[str, list[np.ndarray]], observations: Arrays) -> np.ndarray:
    """Return bool [N]: for each of N observations, whether an element is far outside the range of the samples.

    "Far outside" means that the distance to the range is more than half of the width of the range.
    """
    result = np.zeros(len(next(iter(observations.values()))), bool)
    for kind, array in observations.items():
        sample = np.concatenate(samples[kind]).astype(np.float64)
        low, high = sample.min(0), sample.max(0)
        slack = 0.5 * (high - low)
        outside = (array < low - slack) | (array > high + slack)
        result |= outside.reshape(len(array), -1).any(axis=1)
    return result
