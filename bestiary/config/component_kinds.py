"""The kinds of components of which a run consists. `components.py` has the classes of each kind, and imports torch."""

# Name of the component of each kind if the user chooses none.
DEFAULT_COMPONENTS = {"algo": "impala", "agent": "basic", "torso": "auto", "memory": "none", "critic": "shared"}

# Descriptions of the flags --algo, --agent ..., which choose a component.
COMPONENT_TITLES = {
    "algo": "algorithm",
    "agent": "agent",
    "torso": "torso, the network before the memory",
    "memory": "memory, the recurrent part of the network",
    "critic": "critic, the value head",
}
