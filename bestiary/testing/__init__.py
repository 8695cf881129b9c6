"""Checkers for components that users write in their own files.

    from bestiary.testing import check_memory

    check_memory("my_memory.py:Ema", max_decay=0.9)     # or check_memory(Ema, max_decay=0.9)

The first argument of each checker is a class, `path/to/file.py:Name`, or the name of a built-in component. Keyword
arguments are options of the component. A checker returns None if it finds no problem. Otherwise it raises
`ComponentError`, which lists all problems that were found, one line each. The rules for components are in
docs/extending.md.
"""

from bestiary.testing.algorithms import check_algorithm
from bestiary.testing.critics import check_critic
from bestiary.testing.envs import check_env
from bestiary.testing.networks import check_agent, check_memory, check_torso
from bestiary.testing.problem_report import ComponentError

__all__ = [
    "ComponentError",
    "check_agent",
    "check_algorithm",
    "check_critic",
    "check_env",
    "check_memory",
    "check_torso",
]
