"""Plug-ins of a run: their copies in the run folder, and the choice of the file that a later command executes.

    plugins/HASH/NAME.py           content of the user's file NAME.py; HASH is the start of its hash
    plugins/HASH/...               modules of the same folder that the file imports

The copy has the same file name as the original, because names of tasks and run folders contain the file name.

The table [plugins] of `config.toml` contains the hash of each plug-in. This hash only says with which content the run
was trained. `utils/trust.py` decides whether this content may be executed, without using files of the run folder.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bestiary.config.plugin_options import map_plugins
from bestiary.config.toml import flatten_options, read_tables
from bestiary.utils import safe_files, trust
from bestiary.utils.console import note
from bestiary.utils.errors import UserError
from bestiary.utils.plugin_names import PluginRef
from bestiary.utils.plugin_sources import MAX_FILE_BYTES, MAX_MODULES, PluginSource, read_listed

if TYPE_CHECKING:
    from bestiary.config.config import Config

FOLDER = "plugins"


def copy_name(path: Path, sha256: str) -> str:
    """Return the path of the copy of a plug-in file, relative to the folder of all copies."""
    return f"{sha256[:8]}/{path.name}"


def write_copies(config: "Config", run_path: Path) -> None:
    """Copy the content of the plug-ins of a config into the run folder."""
    for file, sha256 in config.plugin_hashes.items():
        source = trust.registered(Path(file))
        assert source is not None, "a Config contains only trusted plug-ins"
        copy = run_path / FOLDER / copy_name(Path(file), sha256)
        files = {copy: source.content}
        files |= {copy.parent / name: content for name, content in source.modules.items()}
        for path, content in files.items():
            safe_files.make_folder(path.parent, run_path)
            safe_files.write_bytes(path, content, run_path)


def read_hashes(run_path: Path) -> dict[str, str]:
    """Read config.toml of a run. Return a dict: path of each plug-in file -> hash of its content."""
    path = run_path / "config.toml"
    return _hashes(read_tables(path, in_run_folder=True), path)


def _hashes(tables: Mapping[str, Any], path: Path) -> dict[str, str]:
    """Return the table [plugins] of a config file."""
    hashes = tables.get("plugins", {})
    if not isinstance(hashes, dict) or not all(isinstance(value, str) for value in hashes.values()):
        raise UserError(f"{path}: the table [plugins] must contain the hash of each plug-in file as text")
    return hashes


def trust_options(options: Mapping[str, Any], run_path: Path, trust_code: bool) -> dict[str, Any]:
    """Return the options of a run, in which each plug-in refers to a file that may be executed.

    The original file is used if the user has used its content at this path before, and the file still has this content.
    Otherwise the copy in the run folder is used. If the user has never trusted the content, the copy is used only if
    `trust_code` is true.

    Raises:
        UserError: a plug-in is not trusted, or its copy is missing or was changed.
    """
    hashes = read_hashes(run_path)
    return map_plugins(options, lambda ref: _trust(ref, hashes.get(str(ref.path)), run_path, trust_code))


def trust_config(path: Path, trust_code: bool) -> dict[str, Any]:
    """Read a config file. Return its options, in which each plug-in refers to a file that may be executed.

    If the file is the config.toml of a run, and the run folder has a copy of a plug-in, the file that is executed is
    chosen as in `trust_options`. So the config of a run can be used after its plug-ins were changed or moved, and on
    other machines.

    Raises:
        UserError: a plug-in is not trusted, or its copy was changed.
    """
    tables = read_tables(path)
    hashes = _hashes(tables, path)

    def trust_ref(ref: PluginRef) -> PluginRef:
        sha256 = hashes.get(str(ref.path))
        if sha256 is not None and (path.parent / FOLDER / copy_name(ref.path, sha256)).exists():
            return _trust(ref, sha256, path.parent, trust_code)
        trust.trust_in_file(ref, f"--config {path}", trust_code)
        return ref

    return map_plugins(flatten_options(tables), trust_ref)


def shown_options(options: Mapping[str, Any], run_path: Path) -> dict[str, Any]:
    """Return the options of a run with short plug-in names, for example `net.py:Torso@1a2b3c4d`. Execute nothing.

    The short name consists of the file name, the class name and the start of the hash. So it is the same in all runs.
    """
    hashes = read_hashes(run_path)
    return map_plugins(options, lambda r: f"{r.path.name}:{r.attribute}@{hashes.get(str(r.path), '')[:8]}")


def _trust(ref: PluginRef, sha256: str | None, run_path: Path, trust_code: bool) -> PluginRef:
    if sha256 is None:
        raise UserError(f"{ref.path}: config.toml of the run has no hash of this file, so the file is not executed")
    if trust.trust_known(ref, sha256):
        return ref
    copy = run_path / FOLDER / copy_name(ref.path, sha256)
    source = _read_copy(copy, run_path)
    if source is None or source.sha256 != sha256:
        raise UserError(
            f"{ref.path} is not executed: the file is missing, has changed since the run was created, or is not "
            f"trusted because you have not used it before. Its copy {copy} cannot replace it, because the copy is "
            "missing or altered; restore the copy and the other files in its folder"
        )
    known = trust.is_known(sha256, ref.attribute)
    if not known and not trust_code:
        raise UserError(
            f"the run uses the plug-in {ref.path.name}:{ref.attribute}, and you have not used this version of it "
            f"before. The run folder has a copy: read {copy}{_modules_text(source)}, then add --trust-code to execute "
            "it"
        )
    # The config.toml of a model card names the copy itself. No note is then needed.
    if known and copy != run_path / ref.path:
        note(
            f"note: the copy {copy} is used instead of {ref.path}: this file is missing, has changed since the run was "
            "created, or you have not used its content at this path before"
        )
    trust.trust_content(copy, source, ref.attribute, announce=not known)
    return PluginRef(copy, ref.attribute)


def _modules_text(source: PluginSource) -> str:
    return " and the other files in its folder" if source.modules else ""


def _read_copy(copy: Path, run_path: Path) -> PluginSource | None:
    """Return the content of a copy, or None if it cannot be read. Only regular files in the run folder are read."""
    names: list[str] = []
    pending = [copy.parent]
    try:
        while pending:
            folder = pending.pop()
            files = [path for path in safe_files.list_files(folder, run_path) if path != copy]
            names += [path.relative_to(copy.parent).as_posix() for path in files]
            # Leave out __pycache__: compiled code in the copy, written by older versions, is never executed.
            pending += [path for path in safe_files.list_folders(folder, run_path) if path.name != "__pycache__"]
            if len(names) > MAX_MODULES or len(pending) > MAX_MODULES:
                return None
        return read_listed(
            copy, copy.parent, names, lambda path: safe_files.read_bytes(path, run_path, max_bytes=MAX_FILE_BYTES)
        )
    except (OSError, ValueError):
        return None
