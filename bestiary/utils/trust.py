"""Trust in plug-ins: the decision which user files may be executed.

`plugins.load` executes only content that is registered in this module. Content is registered in one of these cases:

    the user names the file on the command line or in Python          `trust_named`
    the user has trusted the same content before                      `trust_known`
    the user gave --trust-code                                        `trust_content` with `announce`
    the driver of a cluster run sent the content to this worker       `trust_content`, without `remember`

The hashes of trusted content are stored in trusted.json (`user_store.py`), never in a run folder. A file is executed
only if a function of this module has accepted its content; its name alone is never sufficient.

Trust includes the name of the class or function. Otherwise a run of another person could call any function of a file
that the user has used, for example a function that writes files, with arguments of this person's choice.
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

# Absolute path of a file -> (content that may be executed, names of the classes and functions that may be used).
# The name "" stands for all names.
_registered: dict[Path, tuple[PluginSource, frozenset[str]]] = {}
# Description of the file from which the arguments of this command come, or "" if the user has given them.
_file_of_arguments = ""


def registered(path: Path) -> PluginSource | None:
    """Return the trusted content of a file, or None if the user has not trusted this file.

    Only this content may be executed, even if the file on disk has changed since.
    """
    found = _registered.get(Path.cwd() / path)
    return None if found is None else found[0]


def may_use(ref: PluginRef) -> bool:
    """Return whether the user has trusted the content of this file, and the use of this class or function in it."""
    found = _registered.get(Path.cwd() / ref.path)
    return found is not None and not found[1].isdisjoint(("", ref.attribute))


def is_known(sha256: str, attribute: str) -> bool:
    """Return whether the user has trusted this class or function of the content with this hash before."""
    return attribute in TRUSTED.read().get(sha256, {}).get("names", [])


def trust_content(
    path: Path, source: PluginSource, attribute: str = "", *, remember: bool = True, announce: bool = False
) -> None:
    """Allow this process to execute the content of a file.

    Args:
        path: path of the file.
        source: its content.
        attribute: name of the class or function that may be used; "": all names, only without `remember`.
        remember: whether to store the hash, so that later commands of the user may also execute this content.
        announce: whether to print which files are executed, and a command with which the user can read them.
    """
    if announce:
        # The name of the file may come from another person. Quote it, so that the shell executes no part of it.
        command = f"less {shlex.quote(str(path))}"
        note(f"--trust-code: this command executes {path}{_describe_modules(source)}; to read it: {command}")
    resolved = path.resolve()
    _register(path, source, attribute)
    if not remember:
        return
    assert attribute, "the name of the class or function is stored"

    def change(record: dict[str, Any]) -> dict[str, Any]:
        paths = [other for other in record.get("paths", []) if other != str(resolved)]
        now = time.strftime("%Y-%m-%d %H:%M:%S")
        return {
            "paths": [*paths, str(resolved)][-MAX_PATHS:],
            "names": sorted({*record.get("names", []), attribute}),
            "modules": sorted(source.modules),
            "time": now,
        }

    record = TRUSTED.read().get(source.sha256, {})
    if str(resolved) not in record.get("paths", []) or attribute not in record.get("names", []):
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
    trust_content(ref.path, source, ref.attribute)


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
        trust_content(ref.path, source, ref.attribute, announce=not is_known(source.sha256, ref.attribute))
    elif is_known(source.sha256, ref.attribute):
        trust_content(ref.path, source, ref.attribute)
    else:
        raise UserError(
            f"{where} names {ref}, and you have not used this version of it before. It would be executed: "
            f"read {ref.path}{_describe_modules(source)}, then add --trust-code"
        )


def trust_known(ref: PluginRef, sha256: str) -> bool:
    """Trust a plug-in if its file has the hash `sha256`, and the user has used it with this content and path before.

    Return whether the plug-in is now trusted. If the user has not used this content at this path, do not read the file.
    """
    record = TRUSTED.read().get(sha256, {})
    if str(ref.path) not in record.get("paths", []) or not is_known(sha256, ref.attribute):
        return False
    try:
        source = read_listed(ref.path, ref.path.parent, record.get("modules", []), read_user_file)
    except OSError:
        return False
    if source.sha256 != sha256:
        return False
    _register(ref.path, source, ref.attribute)
    return True


def _register(path: Path, source: PluginSource, attribute: str) -> None:
    for absolute in (Path.cwd() / path, path.resolve()):
        found = _registered.get(absolute)
        names = found[1] if found is not None and found[0].sha256 == source.sha256 else frozenset()
        _registered[absolute] = (source, names | {attribute})


def _describe_modules(source: PluginSource) -> str:
    names: Sequence[str] = sorted(source.modules)
    return f" and {', '.join(names)} in its folder" if names else ""
