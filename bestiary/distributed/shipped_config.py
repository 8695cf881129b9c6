"""The configuration of a run, in a form that can be sent to other nodes.

It contains the config as TOML tables, the user's plug-in files, and the package versions of the driver. Bestiary itself
is not sent. The same version of Bestiary must be installed on each node.
"""

import importlib.metadata
import platform
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bestiary import __version__
from bestiary.config.config import Config
from bestiary.config.plugin_options import map_plugins
from bestiary.config.resolve import resolve
from bestiary.config.toml import flatten
from bestiary.utils import trust
from bestiary.utils.errors import UserError
from bestiary.utils.plugin_names import PluginRef
from bestiary.utils.plugin_sources import PluginSource


@dataclass(frozen=True)
class ShippedConfig:
    """Everything that a remote process needs to build the components of a run."""

    tables: dict[str, Any]  # the config, as in config.toml
    files: dict[str, PluginSource]  # absolute path of each plug-in file -> content
    versions: dict[str, str]  # package versions of the driver

    @classmethod
    def from_config(cls, config: Config) -> "ShippedConfig":
        """Return a ShippedConfig with the values of a config and the contents of its plug-in files."""
        return cls(config.tables(), plugin_contents(config), package_versions())

    def load(self) -> Config:
        """Build the config again in a remote process.

        Plug-ins are executed from the content that the driver sent, not from files of this node.

        Raises:
            UserError: a package has different versions on this node and on the driver's node.
        """
        if problems := version_mismatches(self.versions):
            raise UserError(*problems)
        for path, source in self.files.items():
            trust.trust_content(Path(path), source, remember=False)
        return resolve(flatten(self.tables))


def plugin_contents(config: Config) -> dict[str, PluginSource]:
    """Return a dict that maps the absolute path of each plug-in file of a config to its content."""
    sources = {path: trust.registered(Path(path)) for path in config.plugin_hashes}
    return {path: source for path, source in sources.items() if source is not None}


def plugin_refs(config: Config) -> list[PluginRef]:
    """Return all plug-ins of a config."""
    refs: list[PluginRef] = []

    def collect(ref: PluginRef) -> str:
        refs.append(ref)
        return ref

    map_plugins(flatten(config.tables()), collect)
    return refs


def package_versions() -> dict[str, str]:
    """Return the versions that must be the same on all nodes of a run."""
    return {"bestiary": __version__, "Python": platform.python_version(), "torch": importlib.metadata.version("torch")}


def version_mismatches(expected: dict[str, str]) -> list[str]:
    """Return a message for each package whose version on this node differs from the driver's version (`expected`)."""
    found = package_versions()
    hostname = socket.gethostname()
    return [
        f"{hostname} has {name} {found[name]}, but the driver has {version}; install the same version on both nodes"
        for name, version in expected.items()
        if found[name] != version
    ]
