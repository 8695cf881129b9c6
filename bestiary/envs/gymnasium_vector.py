"""Gymnasium vector environments returned by a user's function: `my_env.py:make`.

    def make(num_envs, *, size=9):
        return gymnasium.make_vec("Maze-v0", num_envs, size=size, vector_kwargs={"autoreset_mode": "SameStep"})

The user's vector environment decides how its environments are stepped, for example in separate processes.
"""

from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode

from bestiary.envs.gymnasium_info import measure_name
from bestiary.utils.errors import RunError, UserError


class SameStepVectorEnv:
    """A user's Gymnasium vector environment, in which finished episodes are reset in the same step.

    Environments with AutoresetMode.SAME_STEP are used without a change. With AutoresetMode.DISABLED, `step` resets the
    finished episodes. AutoresetMode.NEXT_STEP is refused, because the step after an episode would ignore the action of
    the agent.

    Of the user's `info`, `step` returns only the arrays [N] of numbers, by measure name. If an episode ended, it adds
    `final_obs` (the final observations) and `final_info` (the numbers of the final step).
    """

    def __init__(self, env: Any, name: str, num_envs: int):
        """Check the vector environment `env`.

        `name` is its name in messages, `num_envs` the expected number of environments.
        """
        self.name = name
        if not isinstance(env, gymnasium.vector.VectorEnv):
            raise UserError(
                f"{name}: returned an object of type {type(env).__name__}; expected a gymnasium.vector.VectorEnv"
            )
        if env.num_envs != num_envs:
            raise UserError(
                f"{name}: returned {env.num_envs} environments instead of {num_envs}; "
                "use the first argument as the number of environments"
            )
        mode = env.metadata.get("autoreset_mode")
        if mode not in (AutoresetMode.SAME_STEP, AutoresetMode.DISABLED):
            found = "missing" if mode is None else str(mode)
            raise UserError(
                f"{name}: metadata['autoreset_mode'] is {found}; supported: AutoresetMode.SAME_STEP and DISABLED (with "
                "gymnasium.make_vec: vector_kwargs={'autoreset_mode': AutoresetMode.SAME_STEP})"
            )
        self.env = env
        self.resets_itself = mode == AutoresetMode.SAME_STEP
        self.num_envs = num_envs
        self.single_observation_space = env.single_observation_space
        self.single_action_space = env.single_action_space
        self.action_space = env.action_space
        self.unwrapped = env.unwrapped
        self.steps = 0

    def reset(self, seed: int | None = None) -> tuple[Any, dict[str, Any]]:
        observation, _ = self.env.reset(seed=seed)
        self._check(observation)
        return observation, {}

    def step(self, actions: np.ndarray) -> tuple[Any, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        observation, reward, terminated, truncated, info = self.env.step(actions)
        self.steps += 1
        self._check(observation)
        for what, array in (("reward", reward), ("terminated", terminated), ("truncated", truncated)):
            if np.shape(array) != (self.num_envs,):
                raise self._error(f"{what} should have the shape [{self.num_envs}], got {list(np.shape(array))}")
        terminated, truncated = np.array(terminated, bool), np.array(truncated, bool)
        done = terminated | truncated
        numbers = self._numbers_in(info)
        if self.resets_itself:
            if done.any():
                if truncated.any() and "final_obs" not in info:
                    raise self._error("info has no final_obs, although a time limit ended an episode")
                final_info = self._numbers_in(info.get("final_info", {}))
                numbers |= {"final_obs": info.get("final_obs"), "final_info": final_info}
        elif done.any():
            final = self._rows(observation)
            observation, _ = self.env.reset(options={"reset_mask": done})
            self._check(observation)
            numbers = {"final_obs": final, "final_info": numbers, **numbers}
        return observation, reward, terminated, truncated, numbers

    def render(self) -> Any:
        return self.env.render()

    def close(self, timeout: float | None = None) -> None:
        self.env.close()

    def _numbers_in(self, info: dict[str, Any]) -> dict[str, Any]:
        """Return the arrays [N] of numbers in the `info` of a vector environment, by measure name."""
        return {
            measure_name(key): value.copy()
            for key, value in info.items()
            if not key.startswith("_")
            and isinstance(value, np.ndarray)
            and value.shape == (self.num_envs,)
            and value.dtype.kind in "biuf"
        }

    def _rows(self, observation: Any) -> np.ndarray:
        """Return copies of the observations of all environments in the format of Gymnasium's `final_obs`.

        This format is an array of objects [N].
        """
        rows = np.full(self.num_envs, None, object)
        for i in range(self.num_envs):
            if isinstance(observation, dict):
                rows[i] = {key: np.array(array[i]) for key, array in observation.items()}
            else:
                rows[i] = np.array(observation[i])
        return rows

    def _check(self, observation: Any) -> None:
        """Raise RunError if observations do not have the shape and type of the observation space."""
        space = self.single_observation_space
        parts = space.spaces.items() if isinstance(space, gymnasium.spaces.Dict) else [(None, space)]
        for key, part in parts:
            array = np.asarray(observation if key is None else observation[key])
            if array.shape != (self.num_envs, *part.shape) or not np.can_cast(array.dtype, part.dtype, "same_kind"):
                what = "the observation" if key is None else f"the observation {key}"
                expected = f"{part.dtype}{[self.num_envs, *part.shape]}"
                raise self._error(f"{what} should be {expected}, got {array.dtype}{list(array.shape)}")

    def _error(self, problem: str) -> RunError:
        return RunError(f"{self.name}: after step {self.steps}, {problem}")
