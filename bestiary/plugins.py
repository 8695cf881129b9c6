"""Parts from the user's own files: wherever a name goes, `path/to/file.py:Name` goes too, also in a list or between semicolons.

A run folder keeps a copy and a hash of every such file. A later command imports the original only while it is
unchanged; the copy in the run folder, which may come from a stranger, is imported only with `--trust-code`.
"""

import hashlib
import importlib.util
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bestiary.errors import UserError
from bestiary.options import suggest

PREFIX = "bestiary_plugin_"  # of the modules that users' files become


def is_plugin(name: str) -> bool:
    path, colon, attribute = name.rpartition(":")
    return bool(colon) and path.endswith(".py") and attribute.isidentifier() and ";" not in name


def split(name: str) -> tuple[Path, str]:
    path, _, attribute = name.rpartition(":")
    return Path(path).expanduser(), attribute


def absolute(name: str) -> str:
    """The same name with an absolute path, so that a run folder can be opened from anywhere."""
    path, attribute = split(name)
    return f"{path.resolve()}:{attribute}"


def renamed(settings: Mapping[str, Any], name: Callable[[Path, str], str]) -> dict[str, Any]:
    """Settings in which every own part is called what `name(path, attribute)` says."""

    def new(value: Any) -> Any:
        if isinstance(value, list):
            return [new(item) for item in value]
        if isinstance(value, str) and ";" in value and named_in(value):
            return "; ".join(new(part.strip()) for part in value.split(";"))
        return name(*split(value)) if isinstance(value, str) and is_plugin(value) else value

    return {key: new(value) for key, value in settings.items()}


def named_in(text: str) -> list[str]:
    """The own parts that a setting names."""
    return [part for each in text.split(";") if is_plugin(part := each.strip())]


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def load(name: str, kind: str, needs: Sequence[str] = ()) -> Any:
    """Import the part that `file.py:Name` names, checking that it has the attributes its contract asks for."""
    path, attribute = split(name)
    if not path.is_file():
        raise UserError(f"{name}: there is no file {path}")
    module = _import(path)
    if not hasattr(module, attribute):
        public = [n for n in vars(module) if not n.startswith("_")]
        raise UserError(f"{name}: {path.name} has no {attribute}{suggest(attribute, public)}")
    part = getattr(module, attribute)
    missing = [need for need in needs if not hasattr(part, need)]
    if not callable(part) or missing:
        lack = f"lacks {', '.join(missing)}" if missing else "is not a class or function"
        raise UserError(f"{name}: not a usable {kind}: {attribute} {lack} (docs/extending.md shows one)")
    return part


def _import(path: Path) -> Any:
    name = f"{PREFIX}{digest(path)[:16]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    sys.path.insert(0, str(path.resolve().parent))  # as for a script: files beside it can be imported
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]
        if isinstance(error, KeyboardInterrupt):
            raise
        line = f", line {error.lineno}" if isinstance(error, SyntaxError) else ""
        raise UserError(f"{path}{line}: does not import: {type(error).__name__}: {error}") from error
    finally:
        sys.path.remove(str(path.resolve().parent))
    return module


def resolve_trusted(name: str, copies: Path, known: dict[str, str], trust_code: bool) -> str:
    """The name to import for a plug-in that a run folder refers to: the unchanged original, or the trusted copy."""
    path, attribute = split(name)
    expected = known.get(str(path))
    if expected is None:
        raise UserError(f"{path}: the run folder has no record of this file")
    # Whoever made the folder wrote the hash too: a file that came with it proves nothing.
    own = path.is_absolute() and not path.resolve().is_relative_to(copies.parent.resolve())
    if own and path.is_file() and digest(path) == expected:
        return name
    copy = copies / copy_name(path, expected)
    if trust_code and copy.is_file() and digest(copy) == expected:
        return f"{copy}:{attribute}"
    state = (
        "is no longer there"
        if not path.is_file()
        else "has changed since the run was made"
        if own
        else "came with the run"
    )
    if trust_code:
        raise UserError(f"{path} {state}, and the run folder's copy {copy.name} is missing or altered")
    raise UserError(f"{path} {state}. The run folder has a copy: read {copy}, then add --trust-code to run it")


def blame(error: BaseException) -> str | None:
    """`file.py, line 12: ZeroDivisionError: ...` where an error came out of a user's own file; else None."""
    files = {getattr(m, "__file__", None) for name, m in list(sys.modules.items()) if name.startswith(PREFIX)}
    own = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename in files]
    return f"{own[-1].filename}, line {own[-1].lineno}: {type(error).__name__}: {error}" if own else None


def copy_name(path: Path, sha256: str) -> str:
    return f"{path.stem}-{sha256[:8]}.py"
