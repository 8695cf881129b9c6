"""Trust in plug-ins: the decision which user files may be executed.

`plugins.load` executes only content that is registered in this module. Content is registered in one of these cases:

    the user names the file on the command line or in Python          `trust_named`
    the user has trusted the same content before                      `trust_known`
    the user gave --trust-code                                        `trust_content` with `announce`
    the driver of a cluster run sent the content to this worker       `trust_content`, without `remember`

The hashes of trusted content are stored in trusted.json (`user_store.py`), never in a run folder. A file is executed
only if a function of this module has accepted its content; its name alone is never sufficient.
"""

import shlex
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bestiary.utils.console import note
from bestiary.utils.errors import UserError
from bestiary.utils.plugin_names import PluginRef, parse_name
from bestiary.utils.plugin_sources import PluginSource, read_listed, read_source, read_user_file
from bestiary.utils.user_store import UserStore

TRUSTED = UserStore("trusted.json", max_records=10_000)
MAX_PATHS = 20  # maximum number of paths that are stored for one hash

_registered: dict[Path, PluginSource] = {}  # content that may be executed, by absolute path of the file
# Description of the file from which the arguments of this command come, or "" if the user has given them.
_file_of_arguments = ""


def registered(path: Path) -> PluginSource | None:
    """Return the trusted content of a file, or None if the user has not trusted this file.

    Only this content may be executed, even if the file on disk has changed since.
    """
    return _registered.get(Path.cwd() / path)


def is_known(sha256: str) -> bool:
    """Return whether the user has trusted the content with this hash before."""
    return sha256 in TRUSTED.read()


def trust_content(path: Path, source: PluginSource, *, remember: bool = True, announce: bool = False) -> None:
    """Allow this process to execute the content of a file.

    Args:
        path: path of the file.
        source: its content.
        remember: whether to store the hash, so that later commands of the user may also execute this content.
        announce: whether to print which files are executed, and a command with which the user can read them.
    """
    if announce:
        # The name of the file may come from another person. Quote it, so that the shell executes no part of it.
        command = f"less {shlex.quote(str(path))}"
        note(f"--trust-code: this command executes {path}{_describe_modules(source)}; to read it: {command}")
    resolved = path.resolve()
    _register(path, source)
    if not remember:
        return

    def change(record: dict[str, Any]) -> dict[str, Any]:
        paths = [other for other in record.get("paths", []) if other != str(resolved)]
        now = time.strftime("%Y-%m-%d %H:%M:%S")
        return {"paths": [*paths, str(resolved)][-MAX_PATHS:], "modules": sorted(source.modules), "time": now}

    record = TRUSTED.read().get(source.sha256)
    if record is None or str(resolved) not in record.get("paths", []):
        TRUSTED.update(source.sha256, change)


def read_arguments_from(file: str) -> None:
    """Treat plug-ins in the arguments of this command as named by a file, not by the user.

    A study calls this function in the processes of its commands: their arguments contain names from the study file.
    `file` is a description of the file, for messages.
    """
    global _file_of_arguments
    _file_of_arguments = file


def trust_named(ref: PluginRef) -> None:
    """Trust a plug-in that the user names on the command line or in Python.

    If the file is missing, do nothing: `plugins.load` reports it.
    """
    if _file_of_arguments:
        return trust_in_file(ref, _file_of_arguments, trust_code=False)
    try:
        source = read_source(ref.path)
    except OSError:
        return
    trust_content(ref.path, source)


def named_by_user(name: str) -> str:
    """Parse a component name that the user gives on the command line or in Python. If it is a plug-in, trust it."""
    parsed = parse_name(name)
    if isinstance(parsed, PluginRef):
        trust_named(parsed)
    return parsed


def trust_in_file(ref: PluginRef, where: str, trust_code: bool) -> None:
    """Trust a plug-in given in a config or study file, if its content is known or `trust_code` is true.

    Otherwise raise UserError with a message that contains `where`, a description of the config or study file. If the
    plug-in file is missing, do nothing: `plugins.load` reports it.
    """
    try:
        source = read_source(ref.path)
    except OSError:
        return
    if trust_code:
        trust_content(ref.path, source, announce=not is_known(source.sha256))
    elif is_known(source.sha256):
        trust_content(ref.path, source)
    else:
        raise UserError(
            f"{where} names {ref.path}, and you have not used this version of the file before. It would be executed: "
            f"read {ref.path}{_describe_modules(source)}, then add --trust-code"
        )


def trust_known(path: Path, sha256: str) -> bool:
    """Trust a file if its content has the hash `sha256` and the user has used this content at this path before.

    Return whether the file is now trusted. If the user has not used this content at this path, do not read the file.
    """
    record = TRUSTED.read().get(sha256, {})
    names = record.get("modules", [])
    if str(path) not in record.get("paths", []):
        return False
    try:
        source = read_listed(path, path.parent, names, read_user_file)
    except OSError:
        return False
    if source.sha256 != sha256:
        return False
    _register(path, source)
    return True


def _register(path: Path, source: PluginSource) -> None:
    _registered[Path.cwd() / path] = source
    _registered[path.resolve()] = source


def _describe_modules(source: PluginSource) -> str:
    names: Sequence[str] = sorted(source.modules)
    return f" and {', '.join(names)} in its folder" if names else ""
