"""The actor: it steps one vector environment with an agent and collects rollouts.

`act` runs the agent and sends the next actions to the environments. `receive` waits for the results of these actions
and, after each T steps, returns a rollout. The serial runtime calls the two methods in turn. A runtime with threads
alternates between several actors: while one vector environment steps, the agent computes actions for another vector
environment.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from bestiary.agents.agent import Agent, Output
from bestiary.algorithms.return_statistics import DISCOUNTED_RETURN
from bestiary.envs.episode_stats import EpisodeTracker
from bestiary.envs.step_checks import final_problems, is_well_formed, step_problems
from bestiary.envs.vector_env import VectorEnv, find_nonfinite
from bestiary.rollout import Arrays, Inputs, Rollout, Step
from bestiary.training.devices import autocast
from bestiary.utils import plugins
from bestiary.utils.errors import RunError, UserError

CPU = torch.device("cpu")
CPU_GENERATOR_BYTES = 5056  # size of the state of a CPU generator of PyTorch
MT19937_WORDS = 624  # number of words in the state of such a generator
# Starts of the names of saved arrays whose values must be finite. Measures of an environment may be infinite or nan.
FINITE_ARRAYS = (
    "state.",
    "step.",
    "observation.",
    "discounted_returns",
    *(f"episode_tracker.{name}" for name in ("return", "length", "game_return", "game_length")),
)


class EnvCall(NamedTuple):
    """A call of the vector environment that has not returned yet."""

    start: float  # time of the call
    thread: int  # identifier of the thread that waits for the result


class Actor:
    """Owns a vector environment, the agent's recurrent state, a random generator for actions, and the current rollout.

    Args:
        agent: agent that chooses the actions. In the serial runtime, actor and learner use the same agent object.
        pool: vector environment of N environments.
        rollout_length: number of steps T per rollout.
        seed: seed for the sampling of actions.
        device: device of the agent.
        precision: floating-point precision of the network: float32 or bfloat16.
        return_discount: discount factor of the returns that are stored in the rollouts for reward normalisation; None:
            no returns are stored (see `algorithms/return_statistics.py`).
        first_env: index, among all environments of the run, of the first environment of `pool`. Environment i of `pool`
            has the index `first_env` + i.
    """

    def __init__(
        self,
        agent: Agent,
        pool: VectorEnv,
        rollout_length: int,
        seed: int,
        device: torch.device = CPU,
        precision: str = "float32",
        first_env: int = 0,
        return_discount: float | None = None,
    ):
        self.agent = agent
        self.pool = pool
        self.rollout_length = rollout_length
        self.device = device
        self.precision = precision
        self.generator = torch.Generator(device).manual_seed(seed)
        self.episode_tracker = EpisodeTracker(pool.num_envs, pool.tasks, pool.measures_spec, first_env)
        self.version = 0  # version of the agent's weights
        self.steps = 0  # steps so far, summed over all environments of this actor
        self.env_call: EnvCall | None = None  # None while the actor does not wait for its environments
        # Text that describes the environments in messages.
        self.env_names = f"{', '.join(pool.tasks)} (environments {first_env} to {first_env + pool.num_envs - 1})"
        self.state: tuple[Tensor, ...] = agent.initial_state(pool.num_envs)
        self.last_actions = np.zeros(pool.num_envs, np.int64)
        self.last_step: Step | None = None
        self.return_discount = return_discount
        self.discounted_returns = np.zeros(pool.num_envs)  # [N], float64: discounted sum of rewards of each episode

    def start(self) -> None:
        """Reset the environments and start the first rollout. Call `start` or `load` before `act` and `receive`."""
        with self._env_call():
            step = self.pool.reset()
        self._start_rollout(step)

    def collect(self) -> Rollout:
        """Step the environments until a rollout is complete, and return this rollout."""
        while True:
            self.act()
            rollout = self.receive()
            if rollout is not None:
                return rollout

    @torch.no_grad()
    def act(self) -> None:
        """Sample the next actions from the policy and send them to the environments.

        Raises:
            RunError: the agent's output is not finite.
        """
        assert self.last_step is not None, "call start or load first"
        output, self.state = self._infer(Inputs.from_step(self.last_step, self.last_actions), self.state)
        if not (output.distribution.is_finite() and bool(torch.isfinite(output.value).all())):
            raise RunError(f"the agent's output is not finite after step {self.steps} of the actor; try a smaller --lr")
        action = output.distribution.sample(self.generator)  # [1,N]: one time step of N environments
        self.rollout.log_prob[self.t] = output.distribution.log_prob(action)[0]
        self.rollout.value[self.t] = output.value[0]
        self.rollout.version[self.t] = self.version
        self.last_actions = action[0].cpu().numpy()
        with self._env_call():
            self.pool.send(self.last_actions.copy())  # the environment may write into its arguments

    def receive(self) -> Rollout | None:
        """Wait for the results of the last actions and store them. Return the rollout if it is complete, else None.

        Raises:
            RunError: the environment failed or returned values of a wrong shape or values that are not finite.
        """
        with self._env_call():
            step = self.pool.recv()
        self.steps += self.pool.num_envs
        # Without this check, NumPy and torch would convert wrong types, and copy one row to all environments.
        if not is_well_formed(step, self.pool) and (problems := step_problems(step, self.pool, "recv")):
            raise self._step_error(problems[0])
        try:
            self._store(step)
        except RunError:
            raise
        except Exception as error:
            if problems := step_problems(step, self.pool, "recv"):
                raise self._step_error(problems[0]) from error
            raise
        if self.t < self.rollout_length:
            return None
        complete = self.rollout
        self._start_rollout(step)
        return complete

    def _store(self, step: Step) -> None:
        """Store the result of the last actions as the next entry of the rollout."""
        if (problem := find_nonfinite(step, self.pool.tasks)) is not None:
            raise RunError(f"{problem} (at step {self.steps} of the actor)")
        if step.truncated.any():
            self._store_bootstrap_values(step)
        if self.return_discount is not None:
            assert self.last_step is not None
            kept = np.where(self.last_step.done, 0.0, self.discounted_returns)
            self.discounted_returns = step.reward + self.return_discount * kept
            self.rollout.extras[DISCOUNTED_RETURN][self.t] = torch.from_numpy(self.discounted_returns)
        self.t += 1
        self.rollout.episodes += self.episode_tracker.add(step, self.t * self.pool.num_envs)
        self.rollout.set_entry(self.t, step, self.last_actions)
        self.last_step = step

    def _step_error(self, problem: str) -> RunError:
        return RunError(f"{', '.join(self.pool.tasks)}: {problem} (at step {self.steps} of the actor)")

    @contextmanager
    def _env_call(self) -> Iterator[None]:
        """Context for a call of the vector environment. It sets `env_call` and turns exceptions into RunError.

        UserError and KeyboardInterrupt are raised unchanged. SystemExit is turned into RunError, because otherwise
        `sys.exit(0)` in an environment would end the run without a message and with the exit status 0.
        """
        self.env_call = EnvCall(time.monotonic(), threading.get_ident())
        try:
            yield
        except (UserError, KeyboardInterrupt):
            raise
        except RunError as error:
            raise RunError(f"{error} (after step {self.steps} of the actor)") from error
        except BaseException as error:
            cause = plugins.describe_error(error) or f"{type(error).__name__}: {error}"
            raise RunError(f"the environment failed after step {self.steps} of the actor: {cause}") from error
        finally:
            self.env_call = None

    @torch.no_grad()
    def _store_bootstrap_values(self, step: Step) -> None:
        """Compute and store the values of the final observations of truncated episodes.

        The learner bootstraps from these values.

        Raises:
            RunError: the environment did not return the final observations.
        """
        if problems := final_problems(step, self.pool, "recv"):
            raise self._step_error(problems[0])
        rows = torch.from_numpy(np.flatnonzero(step.truncated))
        inputs = Inputs(
            {kind: torch.from_numpy(array)[None] for kind, array in step.final.items()},
            torch.from_numpy(step.reward)[rows][None],
            torch.zeros(1, len(rows), dtype=torch.bool),
            torch.from_numpy(self.last_actions)[rows][None],
            torch.from_numpy(step.task)[rows][None],
        )
        output, _ = self._infer(inputs, tuple(s[rows.to(self.device)] for s in self.state))
        self.rollout.bootstrap[self.t, rows] = output.value[0].cpu()

    def _infer(self, inputs: Inputs, state: tuple[Tensor, ...]) -> tuple[Output, tuple[Tensor, ...]]:
        """Run the agent on the actor's device with the configured precision."""
        with autocast(self.device, self.precision):
            return self.agent(inputs.to(self.device), state)

    def _start_rollout(self, step: Step) -> None:
        """Start a rollout with `step` as entry 0. This step is also the last entry of the previous rollout."""
        self.rollout = Rollout.empty(
            self.rollout_length,
            self.pool.num_envs,
            self.pool.observation_spec,
            self.pool.measures_spec,
            tuple(s.clone() for s in self.state),
            self.device.type == "cuda",
        )
        if self.return_discount is not None:
            self.rollout.extras[DISCOUNTED_RETURN] = torch.zeros(self.rollout_length, self.pool.num_envs)
        self.rollout.set_entry(0, step, self.last_actions)
        self.last_step = step
        self.t = 0  # number of steps in the current rollout

    def save(self) -> Arrays:
        """Return the state of the actor and its environments as arrays. Call this method only between two rollouts."""
        assert self.last_step is not None
        assert self.t == 0, "an actor is saved between rollouts"
        step = self.last_step
        arrays = {
            "generator": self.generator.get_state().numpy(),
            "last_actions": self.last_actions,
            "step.reward": step.reward,
            "step.done": step.done,
            "step.truncated": step.truncated,
            "step.task": step.task,
            **{f"state.{i}": s.cpu().numpy() for i, s in enumerate(self.state)},
            **{f"episode_tracker.{name}": array for name, array in self.episode_tracker.sums.items()},
            **{f"observation.{kind}": array for kind, array in step.observation.items()},
            **{f"measures.{name}": array for name, array in step.measures.items()},
            **{f"pool.{name}": array for name, array in self.pool.save().items()},
        }
        if self.return_discount is not None:
            arrays["discounted_returns"] = self.discounted_returns
        # Copy all arrays, because training may change them before they are written to a file.
        return {name: np.array(array, order="C") for name, array in arrays.items()}

    def load(self, arrays: Arrays, steps: int) -> None:
        """Restore a state returned by `save`. `steps` is the number of steps of the actor when the state was saved.

        Environments whose state cannot be saved start new episodes with an initial recurrent state.

        Raises:
            UserError: the arrays do not fit this actor and its environments. Without this check, native code of the
                environments could access memory outside of the arrays.
        """
        self._check_arrays(arrays)
        self.steps = steps
        try:
            check_generator_state(arrays["generator"])
            self.generator.set_state(torch.from_numpy(arrays["generator"]))
        except (RuntimeError, ValueError) as error:
            problem = plugins.error_line(error)
            raise UserError(f"actor.safetensors does not fit this run: generator: {problem}") from error
        if not self.pool.saveable:
            return self.start()

        def with_prefix(prefix: str) -> Arrays:
            return {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}

        try:
            self.pool.load(with_prefix("pool."))
        except (KeyError, ValueError, TypeError, IndexError, OverflowError) as error:
            raise UserError(f"actor.safetensors does not fit the environments: {plugins.error_line(error)}") from error
        self.state = tuple(torch.from_numpy(arrays[f"state.{i}"]).to(self.device) for i in range(len(self.state)))
        self.last_actions = arrays["last_actions"]
        if self.return_discount is not None:
            self.discounted_returns = arrays["discounted_returns"]
        self.episode_tracker.sums |= {name: array.copy() for name, array in with_prefix("episode_tracker.").items()}
        reward, done, truncated, task = (arrays[f"step.{name}"] for name in ("reward", "done", "truncated", "task"))
        step = Step(with_prefix("observation."), reward, done, truncated, done, task, with_prefix("measures."))
        self._start_rollout(step)

    def _check_arrays(self, arrays: Arrays) -> None:
        """Raise UserError unless the arrays have the names, types and shapes that `save` returns, and valid values.

        The arrays of the environments (names that begin with "pool.") are not checked here. Their shapes may depend on
        the state of the vector environment, so its method `load` checks them.
        """
        n = self.pool.num_envs
        expected: dict[str, tuple[str, tuple[int, ...]]] = {
            "generator": ("uint8", tuple(self.generator.get_state().shape))
        }
        if self.pool.saveable:
            expected |= {
                "last_actions": ("int64", (n,)),
                "step.reward": ("float32", (n,)),
                "step.done": ("bool", (n,)),
                "step.truncated": ("bool", (n,)),
                "step.task": ("int64", (n,)),
            }
            if self.return_discount is not None:
                expected["discounted_returns"] = ("float64", (n,))
            for i, tensor in enumerate(self.state):
                expected[f"state.{i}"] = (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
            for name, sums in self.episode_tracker.sums.items():
                expected[f"episode_tracker.{name}"] = (str(sums.dtype), sums.shape)
            for prefix, specs in (("observation", self.pool.observation_spec), ("measures", self.pool.measures_spec)):
                for name, spec in specs.items():
                    expected[f"{prefix}.{name}"] = (spec.dtype, (n, *spec.shape))
        problems = []
        for name, (dtype, shape) in expected.items():
            array = arrays.get(name)
            found = "missing" if array is None else f"{array.dtype} {array.shape}"
            if found != f"{dtype} {shape}":
                problems.append(f"{name}: {found} in the checkpoint, {dtype} {shape} expected")
            elif name.startswith(FINITE_ARRAYS) and not _is_finite(arrays[name]):
                problems.append(f"{name}: the values are not finite")
        if not problems and self.pool.saveable:
            for name, high in (("last_actions", self.pool.action_spec.n), ("step.task", len(self.pool.tasks))):
                if not ((arrays[name] >= 0) & (arrays[name] < high)).all():
                    problems.append(f"{name}: the values must be in 0..{high - 1}")
        if problems:
            raise UserError("actor.safetensors in the checkpoint does not fit this run:", *problems[:8])


def check_generator_state(state: np.ndarray) -> None:
    """Raise ValueError if native code of PyTorch would read outside of an array because of this state of a generator.

    A CPU generator (MT19937) has 624 words. The state contains the number of words that are left (int32, byte 8) and
    the index of the next word (uint64, byte 16). PyTorch checks each of the two numbers, but not their sum.
    """
    if len(state) != CPU_GENERATOR_BYTES:  # the state of another device
        return
    left = int(state[8:12].view(np.int32)[0])
    following = int(state[16:24].view(np.uint64)[0])
    if not (1 <= left <= MT19937_WORDS and following + left <= MT19937_WORDS + 1):
        raise ValueError(f"the next word has the index {following} and {left} words are left, of {MT19937_WORDS} words")


def _is_finite(array: np.ndarray) -> bool:
    return array.dtype.kind != "f" or bool(np.isfinite(array).all())
