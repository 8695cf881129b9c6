"""Gymnasium's interface for the vector environments of Bestiary: `make_vec` returns a `gymnasium.vector.VectorEnv`."""

from collections.abc import Callable
from typing import Any

import numpy as np
from gymnasium import Space
from gymnasium.spaces import Box, Dict, Discrete
from gymnasium.vector import AutoresetMode
from gymnasium.vector import VectorEnv as GymnasiumVectorEnv
from gymnasium.vector.utils import batch_space

from bestiary.envs.vector_env import VectorEnv, check_actions
from bestiary.step import Arrays, ArraySpec, ObservationSpec, Step
from bestiary.utils.errors import UserError


class GymnasiumAdapter(GymnasiumVectorEnv[Any, Any, np.ndarray]):
    """A `gymnasium.vector.VectorEnv` that steps a vector environment of Bestiary (`pool`).

    Observations are arrays [N,...], or a dict of arrays if an environment has several observations. Images are uint8
    [N,C,H,W], vectors float32 [N,D]. The action i is the action `pool.action_spec.names[i]`.

    Finished episodes are reset in the same step (AutoresetMode.SAME_STEP). `info["final_obs"][i]` is the final
    observation of row i if a time limit ended its episode. Other final observations are not available: an algorithm
    does not need them, and ProcGen does not return them. `info` also contains all measures, `game_over` (whether the
    whole game ended, not only an episode) and `task` (index of the task).

    The environments are seeded when they are created. `reset(seed=...)` creates the environments again, with the new
    seed.
    """

    def __init__(
        self,
        build: Callable[[int | np.random.SeedSequence], VectorEnv],
        seed: int | np.random.SeedSequence,
        render_mode: str | None = None,
    ):
        """Create the environments: `build(seed)` returns the vector environment."""
        if render_mode not in (None, "rgb_array"):
            raise UserError(f"render_mode={render_mode!r}: expected 'rgb_array' or None")
        self.build = build
        self.pool = build(seed)
        self.was_reset = False
        self.num_envs = self.pool.num_envs
        self.render_mode = render_mode
        self.metadata = {"autoreset_mode": AutoresetMode.SAME_STEP, "render_modes": ["rgb_array"]}
        self.single_observation_space = make_space(self.pool.observation_spec)
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.single_action_space = Discrete(self.pool.action_spec.n)
        self.action_space = batch_space(self.single_action_space, self.num_envs)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Start a new episode in all environments. If `seed` is given, first create them again with this seed.

        `options` are ignored: the options of Bestiary's environments are set when they are created.
        """
        super().reset(seed=seed)
        if seed is not None:
            self.pool.close()
            self.pool = self.build(seed)
        step = self.pool.reset()
        self.was_reset = True
        return self._join(step.observation), self._make_info(step)

    def step(self, actions: Any) -> tuple[Any, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        if not self.was_reset:
            raise UserError("step: call reset first")
        self.pool.send(check_actions(np.asarray(actions), self.pool.action_spec, self.num_envs).astype(np.int64))
        step = self.pool.recv()
        info = self._make_info(step)
        if step.truncated.any():
            final = np.full(self.num_envs, None, object)
            for k, row in enumerate(np.flatnonzero(step.truncated)):
                final[row] = self._join({name: array[k] for name, array in step.final.items()})
            info |= {"final_obs": final, "_final_obs": step.truncated.copy()}
        terminated = step.done & ~step.truncated
        return self._join(step.observation), step.reward, terminated, step.truncated, info

    def render(self) -> tuple[np.ndarray, ...] | None:
        """Return one RGB image uint8 [H,W,3] per environment, or None if `render_mode` is None."""
        return None if self.render_mode is None else tuple(self.pool.render())

    def close_extras(self, **kwargs: Any) -> None:
        self.pool.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(self.pool.tasks)}, num_envs={self.num_envs})"

    def _join(self, observation: Arrays) -> Any:
        """Return an observation in Gymnasium's format: a dict of arrays, or the array itself if there is only one."""
        if isinstance(self.single_observation_space, Dict):
            return dict(observation)
        (array,) = observation.values()
        return array

    def _make_info(self, step: Step) -> dict[str, Any]:
        """Return the `info` of a step. As in Gymnasium, the mask `_NAME` [N] says which rows of `NAME` are valid."""
        info = {**step.measures, "game_over": step.game_over, "task": step.task}
        all_rows = np.ones(self.num_envs, bool)
        return info | {f"_{name}": all_rows for name in info}


def make_space(spec: ObservationSpec) -> Space:
    spaces = {name: _make_box(array) for name, array in spec.items()}
    return next(iter(spaces.values())) if len(spaces) == 1 else Dict(spaces)


def _make_box(spec: ArraySpec) -> Box:
    if spec.dtype == "uint8":
        return Box(0, 255, spec.shape, np.uint8)
    return Box(-np.inf, np.inf, spec.shape, np.dtype(spec.dtype).type)
