"""The configuration of a run in the form that is sent to other nodes.

It contains the config as TOML tables, the user's plug-in files, and the package versions of the driver. Bestiary itself
is not sent. The same version of Bestiary must be installed on each node.
"""

import atexit
import importlib.metadata
import os
import platform
import shutil
import socket
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bestiary import __version__
from bestiary.config.config import Config
from bestiary.config.resolve import resolve
from bestiary.config.toml import flatten
from bestiary.utils import plugins
from bestiary.utils.errors import UserError
from bestiary.utils.temp_dirs import make_temp_dir


@dataclass(frozen=True)
class ShippedConfig:
    """Everything that a remote process needs to build the components of a run."""

    tables: dict[str, Any]  # the config, as in config.toml
    # Absolute path of each plug-in file -> contents of this file and of the modules that it imports from its folder.
    # The contents are a dict: path relative to the folder of the plug-in file -> content.
    files: dict[str, dict[str, bytes]]
    versions: dict[str, str]  # package versions of the driver

    @classmethod
    def from_config(cls, config: Config) -> "ShippedConfig":
        """Return a ShippedConfig with the values of a config and the contents of its plug-in files."""
        files = {path: _read_with_imports(Path(path)) for path in config.plugin_hashes}
        return cls(config.tables(), files, package_versions())

    def load(self) -> Config:
        """Return the config in a remote process.

        If this node has a plug-in file with the same path and content, that file is used. Otherwise the content that
        was sent is written to a temporary folder and imported from there.

        Raises:
            UserError: a package has different versions on this node and on the driver's node.
        """
        if problems := version_mismatches(self.versions):
            raise UserError(*problems)
        local_paths = {path: self._local_path(path) for path in self.files}
        return resolve(
            plugins.replace_names(flatten(self.tables), lambda path, name: f"{local_paths[str(path)]}:{name}")
        )

    def _local_path(self, path: str) -> str:
        """Return the path of a plug-in file on this node. If the file is missing or differs, write a temporary copy."""
        contents = self.files[path]
        original = Path(path)
        if all(_read(original.parent / name) == content for name, content in contents.items()):
            return path
        folder = make_temp_dir("bestiary-plugins-")
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        for name, content in contents.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)
        return str(folder / original.name)


def package_versions() -> dict[str, str]:
    """Return the versions that must be the same on all nodes of a run."""
    return {"bestiary": __version__, "Python": platform.python_version(), "torch": importlib.metadata.version("torch")}


def version_mismatches(expected: dict[str, str]) -> list[str]:
    """Return a message for each package whose version on this node differs from the driver's version (`expected`)."""
    found = package_versions()
    hostname = socket.gethostname()
    return [
        f"{hostname} has {name} {found[name]}, but the driver has {version}; install the same version on both"
        for name, version in expected.items()
        if found[name] != version
    ]


def _read_with_imports(path: Path) -> dict[str, bytes]:
    """Return the contents of a plug-in file and of all imported modules in its folder, by relative path."""
    loaded = [getattr(module, "__file__", None) for module in list(sys.modules.values())]
    modules = {Path(file).resolve() for file in loaded if file is not None}
    libraries = Path(os.__file__).resolve().parent, Path(__file__).resolve().parents[1]
    imported = {
        file
        for file in modules
        if file.suffix == ".py"
        and file.is_relative_to(path.parent)
        and "site-packages" not in file.parts
        and not any(file.is_relative_to(library) for library in libraries)
    }
    return {str(file.relative_to(path.parent)): file.read_bytes() for file in imported | {path} if file.is_file()}


def _read(path: Path) -> bytes | None:
    """Return the content of a file, or None if it cannot be read."""
    try:
        return path.read_bytes()
    except OSError:
        return None
