"""Check observations that a user's program passes to an agent, and convert them to the arrays that agents read."""

from typing import Any

import numpy as np

from bestiary.envs.vector_env import EnvInterface
from bestiary.step import Arrays, ArraySpec
from bestiary.utils.errors import UserError


class ObservationReader:
    """Converts observations to arrays [N,...] by name, as in `Step.observation`.

    Two formats are accepted. One is the format of `EnvInterface.observation_spec`. If the agent was trained on a
    Gymnasium environment, the format of this environment is also accepted (`EnvInterface.gymnasium_space`).
    """

    def __init__(self, interface: EnvInterface):
        self.spec = interface.observation_spec
        self.space = interface.gymnasium_space
        self.converters: dict[str, tuple[str | None, Any]] = {}
        if self.space is not None:
            from bestiary.envs.gymnasium_env import make_converters  # here, because importing Gymnasium is slow

            self.converters = make_converters(self.space, interface.tasks[0])

    def read(self, observation: Any) -> tuple[Arrays, bool]:
        """Return the arrays, and whether the observation has a batch axis.

        An observation without a batch axis is from a single environment.

        Raises:
            UserError: the observation has the wrong names, shapes or types. The message contains the expected format.
        """
        if self.space is not None:
            is_batch = self._is_gymnasium_batch(observation)
            if is_batch is not None:
                return self._convert(observation, is_batch), is_batch
        given = observation if isinstance(observation, dict) else {next(iter(self.spec)): observation}
        if set(given) != set(self.spec):
            raise self._error(", ".join(map(str, given)) if isinstance(observation, dict) else "one array")
        arrays, batched = {}, set()
        for name, spec in self.spec.items():
            array = np.asarray(given[name])
            if array.shape[-len(spec.shape) :] != spec.shape or array.ndim - len(spec.shape) not in (0, 1):
                raise self._error(f"{name} {array.dtype}{list(array.shape)}")
            if not np.can_cast(array.dtype, spec.dtype, "same_kind"):
                raise self._error(f"{name} {array.dtype}{list(array.shape)}")
            is_batch = array.ndim > len(spec.shape)
            batched.add(is_batch)
            # Copy the array, because the program may reuse it, and because `torch.from_numpy` needs a writable array.
            arrays[name] = np.array(array if is_batch else array[None], spec.dtype)
        if len(batched) > 1 or len({len(array) for array in arrays.values()}) > 1:
            raise self._error("arrays with different numbers of environments")
        return arrays, batched.pop()

    def _is_gymnasium_batch(self, observation: Any) -> bool | None:
        """Return whether an observation in the Gymnasium format has a batch axis; None: it is not in this format."""
        is_batch = None
        for key, space in self._parts():
            try:
                array = np.asarray(observation if key is None else _part(observation, key))
            except (KeyError, IndexError, TypeError, ValueError):
                return None
            if not np.can_cast(array.dtype, space.dtype, "same_kind"):
                return None
            if array.shape[array.ndim - len(space.shape) :] != space.shape:
                return None
            extra = array.ndim - len(space.shape)
            if extra not in (0, 1) or is_batch not in (None, extra == 1):
                return None
            is_batch = extra == 1
        return is_batch

    def _parts(self) -> list[tuple[str | None, Any]]:
        """Return (key, space) of each part of a Dict space, or (None, space) of any other space."""
        return [(key, self.space if key is None else self.space[key]) for key, _ in self.converters.values()]

    def _convert(self, observation: Any, is_batch: bool) -> Arrays:
        arrays = {}
        for name, (key, converter) in self.converters.items():
            array = np.asarray(observation if key is None else _part(observation, key))
            arrays[name] = converter.convert(array if is_batch else array[None]).copy()
        return arrays

    def _error(self, found: str) -> UserError:
        expected = " and ".join(_describe(name, spec) for name, spec in self.spec.items())
        also = "" if self.space is None else f", or {' '.join(str(self.space).split())}"
        return UserError(f"act: the observation is {found}; expected {expected}{also}")


def _part(observation: Any, key: str) -> Any:
    """Return one entry of a dict, or of a tuple whose entries have the keys "0", "1", ..."""
    return observation[key] if isinstance(observation, dict) else observation[int(key)]


def _describe(name: str, spec: ArraySpec) -> str:
    return f"{name} {spec.dtype}[N, {', '.join(map(str, spec.shape))}]"
