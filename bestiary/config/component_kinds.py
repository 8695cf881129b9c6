"""The kinds of components of a run, for example "torso", with the default name and the flag description of each kind.

The classes of each kind are in `components.py`. This module does not import torch, so commands that need only the names
start fast.
"""

# Default component name of each kind. An agent class can replace these defaults (attribute `config_defaults`).
DEFAULT_COMPONENTS = {"algo": "impala", "agent": "basic", "torso": "auto", "memory": "none", "critic": "shared"}

# Descriptions of the flags --algo, --agent ..., which choose a component.
COMPONENT_TITLES = {
    "algo": "algorithm",
    "agent": "agent",
    "torso": "torso, the network before the memory",
    "memory": "memory, the recurrent part of the network",
    "critic": "critic, the value head",
}
