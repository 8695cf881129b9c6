"""What a process elsewhere needs to build the parts of a run: the config as text, the user's own files, and the versions that
they are meant for. Nothing in it is code of ours: every machine has its own Bestiary, and it must be the same one."""

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

from bestiary import __version__, plugins
from bestiary.config import Config
from bestiary.envs.pool import Interface, Pool
from bestiary.errors import UserError
from bestiary.resolve import resolve
from bestiary.temporary import make_folder
from bestiary.textconfig import flatten


@dataclass(frozen=True)
class Bundle:
    tables: dict[str, Any]  # the config, as config.toml has it
    files: dict[
        str, dict[str, bytes]
    ]  # of each file that a part is named by: the file, and those beside it that it imported
    versions: dict[str, str]
    interface: Interface  # of the run's environments, for who has none

    @classmethod
    def of(cls, config: Config, pool: Pool) -> "Bundle":
        files = {path: _with_neighbours(Path(path)) for path in config.plugin_hashes}
        return cls(config.tables(), files, versions(), Interface.of(pool))

    def config(self) -> Config:
        """The config, here: the user's own files are taken where they are, or else from what was sent along."""
        if problems := unlike(self.versions):
            raise UserError(*problems)
        here = {path: self._place(path) for path in self.files}
        return resolve(plugins.renamed(flatten(self.tables), lambda path, name: f"{here[str(path)]}:{name}"))

    def _place(self, path: str) -> str:
        sent = self.files[path]
        original = Path(path)
        if all(_read(original.parent / name) == content for name, content in sent.items()):
            return path
        folder = make_folder("bestiary-parts-")
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        for name, content in sent.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)
        return str(folder / original.name)


def versions() -> dict[str, str]:
    """What has to be the same on all machines of a run."""
    return {"bestiary": __version__, "Python": platform.python_version(), "torch": importlib.metadata.version("torch")}


def unlike(wanted: dict[str, str]) -> list[str]:
    """How this machine differs from the one that has the `wanted` versions."""
    found, here = versions(), socket.gethostname()
    return [
        f"{here} has {name} {found[name]}, and {version} is what this is started with: make them the same"
        for name, version in wanted.items()
        if found[name] != version
    ]


def _with_neighbours(path: Path) -> dict[str, bytes]:
    """A user's file and the modules it imported from its own folder, by their names below that folder."""
    loaded = [getattr(module, "__file__", None) for module in list(sys.modules.values())]
    beside = {Path(file).resolve() for file in loaded if file is not None}
    packages = Path(os.__file__).resolve().parent, Path(__file__).resolve().parents[1]
    own = {
        file
        for file in beside
        if file.suffix == ".py"
        and file.is_relative_to(path.parent)
        and "site-packages" not in file.parts
        and not any(file.is_relative_to(package) for package in packages)
    }
    return {str(file.relative_to(path.parent)): file.read_bytes() for file in own | {path} if file.is_file()}


def _read(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except OSError:
        return None
