"""Plug-ins: components that a user has written in a Python file. Their names have the form `path/to/file.py:Name`.

A plug-in name can be used wherever the name of a built-in component can be used, also inside lists and inside texts
that are separated by semicolons. A run folder stores a copy and a hash of each plug-in file of the run. Commands that
open the run later import the original file if it has not changed. The copy in a run folder may have been written by
another person, so it is imported only with `--trust-code`.
"""

import hashlib
import importlib.util
import sys
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from bestiary.utils.errors import UserError
from bestiary.utils.options import suggest

MODULE_PREFIX = "bestiary_plugin_"  # the module names of imported plug-in files begin with this prefix


def is_plugin(name: str) -> bool:
    """Return whether a component name has the form `path/to/file.py:Name`."""
    path, colon, attribute = name.rpartition(":")
    return bool(colon) and path.endswith(".py") and attribute.isidentifier() and ";" not in name


def split_name(name: str) -> tuple[Path, str]:
    """Split the plug-in name `path/to/file.py:Name` into the path and the attribute `Name`."""
    path, _, attribute = name.rpartition(":")
    return Path(path).expanduser(), attribute


def absolute_name(name: str) -> str:
    """Return the plug-in name with an absolute path. It is then valid in every working directory."""
    path, attribute = split_name(name)
    return f"{path.resolve()}:{attribute}"


def replace_names(settings: Mapping[str, Any], new_name: Callable[[Path, str], str]) -> dict[str, Any]:
    """Return a copy of the settings in which each plug-in name is replaced by `new_name(path, attribute)`."""

    def replace(value: Any) -> Any:
        if isinstance(value, list):
            return [replace(item) for item in value]
        if isinstance(value, str) and ";" in value and find_names(value):
            return "; ".join(replace(item.strip()) for item in value.split(";"))
        return new_name(*split_name(value)) if isinstance(value, str) and is_plugin(value) else value

    return {key: replace(value) for key, value in settings.items()}


def find_names(text: str) -> list[str]:
    """Return the plug-in names in a text whose items are separated by semicolons."""
    return [name for item in text.split(";") if is_plugin(name := item.strip())]


def file_sha256(path: Path) -> str:
    """Return the SHA-256 hash of a file in hexadecimal digits."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def load(name: str, kind: str, required: Sequence[str] = ()) -> Any:
    """Import the component `file.py:Name` and check that it is callable and has the required attributes.

    Args:
        name: the plug-in name.
        kind: kind of the component for error messages, for example "memory".
        required: names of the attributes that the component must have.

    Raises:
        UserError: the file is missing or cannot be imported, or the component is not usable.
    """
    path, attribute = split_name(name)
    if not path.is_file():
        raise UserError(f"{name}: file {path} does not exist")
    module = _import(path)
    if not hasattr(module, attribute):
        public = [attr for attr in vars(module) if not attr.startswith("_")]
        raise UserError(f"{name}: {path.name} has no {attribute}{suggest(attribute, public)}")
    component = getattr(module, attribute)
    missing = [attr for attr in required if not hasattr(component, attr)]
    if not callable(component) or missing:
        fault = f"lacks {', '.join(missing)}" if missing else "is not a class or function"
        raise UserError(f"{name}: not a usable {kind}: {attribute} {fault} (see the example in docs/extending.md)")
    return component


def _import(path: Path) -> Any:
    """Import a plug-in file. The module name contains the hash of the file, so a changed file is imported again."""
    name = f"{MODULE_PREFIX}{file_sha256(path)[:16]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    sys.path.insert(0, str(path.resolve().parent))  # so the file can import modules of its own folder
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]
        if isinstance(error, KeyboardInterrupt):
            raise
        line = f", line {error.lineno}" if isinstance(error, SyntaxError) else ""
        raise UserError(f"{path}{line}: cannot be imported: {type(error).__name__}: {error}") from error
    finally:
        sys.path.remove(str(path.resolve().parent))
    return module


def resolve_trusted(name: str, copies: Path, hashes: dict[str, str], trust_code: bool) -> str:
    """Return the name `file.py:Name` from which a plug-in of a run may be imported.

    If the original file has not changed, this is the original name. If it has changed or is missing, and `trust_code`
    is set, this is the name of the copy in the run folder.

    Args:
        name: plug-in name in the config of the run.
        copies: directory in the run folder that contains the copies of the plug-in files.
        hashes: path of each plug-in file of the run -> its SHA-256 hash.
        trust_code: whether the copy may be imported if the original is missing or has changed.

    Raises:
        UserError: neither the original nor the copy may be imported.
    """
    path, attribute = split_name(name)
    expected = hashes.get(str(path))
    if expected is None:
        raise UserError(f"{path}: config.toml of the run has no hash of this file, so the file is not imported")
    # A file inside the run folder is not trusted as the original: the author of the run folder could have written both
    # the file and its hash.
    is_local = path.is_absolute() and not path.resolve().is_relative_to(copies.parent.resolve())
    if is_local and path.is_file() and file_sha256(path) == expected:
        return name
    copy = copies / copy_name(path, expected)
    if trust_code and copy.is_file() and file_sha256(copy) == expected:
        return f"{copy}:{attribute}"
    if not path.is_file():
        state = "no longer exists"
    elif is_local:
        state = "has changed since the run was created"
    else:
        state = "is part of the run folder"
    if trust_code:
        raise UserError(f"{path} {state}, and its copy {copy} in the run folder is missing or altered")
    raise UserError(f"{path} {state}. The run folder has a copy: review {copy}, then add --trust-code to run it")


def describe_error(error: BaseException) -> str | None:
    """Return `file.py, line 12: ZeroDivisionError: ...` if a plug-in file raised the error, otherwise None."""
    location = error_location(error, plugin_files())
    return None if location is None else f"{location}: {error_line(error)}"


def plugin_files() -> set[str]:
    """Return the paths of all imported plug-in files, and of the modules in their folders that are imported."""
    modules = {name: getattr(module, "__file__", None) for name, module in list(sys.modules.items())}
    folders = {Path(file).parent for name, file in modules.items() if file and name.startswith(MODULE_PREFIX)}
    return {file for file in modules.values() if file and Path(file).parent in folders}


def error_location(error: BaseException, files: Collection[str]) -> str | None:
    """Return `file.py, line 12`: the innermost traceback line in one of these files. Return None if there is none."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename in files]
    return f"{frames[-1].filename}, line {frames[-1].lineno}" if frames else None


def error_line(error: BaseException) -> str:
    """Return the type of an error and the first line of its message."""
    first_line = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {first_line}".rstrip(": ")


def copy_name(path: Path, sha256: str) -> str:
    """Return the file name that the copy of a plug-in file has in a run folder."""
    return f"{path.stem}-{sha256[:8]}.py"
