"""A real Ray of several nodes on one machine, for tests."""

from typing import Any


class Nodes:
    """A Ray of one node, to which others are added and from which they are lost."""

    def __init__(self, **head: Any) -> None:
        from ray.cluster_utils import Cluster

        arguments = {"num_cpus": 2, "include_dashboard": False, "include_log_monitor": False, **head}
        self.cluster = Cluster(initialize_head=True, head_node_args=arguments, shutdown_at_exit=False)
        self.address = self.cluster.address
        self.others: list[Any] = []

    def add(self, **arguments: Any) -> None:
        self.others.append(self.cluster.add_node(num_cpus=2, include_dashboard=False, **arguments))

    def lose(self) -> None:
        """The last one that was added: all of its processes at once."""
        self.cluster.remove_node(self.others.pop(), allow_graceful=False)
