"""Measures of Gymnasium environments: numbers in the `info` of a step, for example `success`.

Measures are numbers that an environment reports in each step in addition to the reward. The set of measures must be
known before training starts. `find_measures` therefore makes one step in a separate environment. Each number in the
`info` of this step becomes a measure. Keys given by the user (`--info-measures`, or the attribute `info_measures` of a
class) become further measures. In a step whose `info` does not contain the key of a measure, the measure is 0.
"""

import contextlib
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from bestiary.envs.rewards.components import COMMON_COMPONENTS
from bestiary.utils.errors import UserError

# Names that are already used for columns of episodes.csv, rewards or reward components. A measure with one of these
# names gets the prefix `info_`.
RESERVED_NAMES = re.compile(
    "|".join(["step|task|return|length|game_.*|env|level|training|training_.*|true|true_.*", *COMMON_COMPONENTS])
)


def numbers_in(info: dict[str, Any]) -> dict[str, float]:
    """Return {measure name: value} for all numeric entries of the `info` of one environment.

    Numeric entries are bools, ints, floats and arrays of shape (). `measure_name` turns keys into measure names.
    """
    numbers = {}
    for key, value in info.items():
        array = np.asarray(value) if isinstance(value, bool | int | float | np.generic | np.ndarray) else None
        if array is not None and array.shape == () and array.dtype.kind in "biuf":
            numbers[measure_name(str(key))] = float(array)
    return numbers


def measure_name(key: str) -> str:
    """Return the name of the measure for a key of `info`: `is success` -> `is_success`, `return` -> `info_return`."""
    name = re.sub(r"\W", "_", key)
    return f"info_{name}" if RESERVED_NAMES.fullmatch(name) or not name.isidentifier() else name


def find_measures(probe: Any, keys: Sequence[str]) -> list[str]:
    """Return the names of the measures of an environment.

    `probe` is a separate environment, or vector environment, whose `info` contains only numbers (`numbers_in`). This
    function makes one step in `probe`, reads `info` and closes `probe`. `keys` are further keys of `info` that become
    measures.

    Raises:
        UserError: the attribute `info_measures` of the environment is not a tuple of names.
    """
    numbers: dict[str, float] = {}
    # Ignore errors of the environment here. They occur again in training and are reported there.
    with contextlib.suppress(Exception):
        probe.action_space.seed(0)
        probe.reset(seed=0)
        numbers = probe.step(probe.action_space.sample())[-1]
    declared = getattr(probe.unwrapped, "info_measures", ())
    probe.close()
    if not isinstance(declared, tuple | list) or not all(isinstance(key, str) for key in declared):
        raise UserError(
            f"{probe.name}: info_measures is {declared!r}; expected a tuple of names, for example ('success',)"
        )
    # If the episode ended in this step, `numbers` also contains the entries `final_obs` and `final_info`.
    found = [name for name in numbers if name not in ("final_obs", "final_info")]
    return list(dict.fromkeys([*found, *map(measure_name, (*declared, *keys))]))
