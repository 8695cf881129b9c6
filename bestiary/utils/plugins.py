"""Plug-ins: components that a user has written in a Python file. Their names have the form `path/to/file.py:Name`.

A plug-in name can be used wherever the name of a built-in component can be used. `plugin_names.py` recognises these
names, and `trust.py` decides which files may be executed. `load` executes exactly the bytes that `trust.py` has
accepted, and does not read the file again.

If the file imports modules of its own folder, these modules are part of the plug-in (`plugin_sources.py`). They are
imported as parts of a private package, so that they cannot replace installed modules of the same name. The folder
itself is not added to `sys.path`.
"""

import importlib.util
import sys
import traceback
from collections.abc import Collection, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path, PurePosixPath
from types import ModuleType
from typing import Any

from bestiary.utils import numba_cache, trust
from bestiary.utils.errors import UserError
from bestiary.utils.options import suggest
from bestiary.utils.plugin_names import PluginRef
from bestiary.utils.plugin_sources import PluginSource, compile_module, find_module

MODULE_PREFIX = "bestiary_plugin_"  # the module names of imported plug-in files begin with this prefix


def load(ref: PluginRef, kind: str, required: Sequence[str] = ()) -> Any:
    """Import a component from a user's file and check that it is callable and has the required attributes.

    Args:
        ref: the plug-in.
        kind: kind of the component for error messages, for example "memory".
        required: names of the attributes that the component must have.

    Raises:
        UserError: the file is missing, not trusted or cannot be imported, or the component is not usable.
    """
    source = trust.registered(ref.path)
    if source is None and not ref.path.is_file():
        raise UserError(f"{ref}: file {ref.path} does not exist")
    if source is None or not trust.may_use(ref):
        raise UserError(
            f"{ref}: {ref.path} is not executed, because you have not named it yourself and its content is not trusted "
            "(see docs/security.md)"
        )
    module = _import(ref.path, source)
    if not hasattr(module, ref.attribute):
        public = [attr for attr in vars(module) if not attr.startswith("_")]
        raise UserError(f"{ref}: {ref.path.name} has no {ref.attribute}{suggest(ref.attribute, public)}")
    component = getattr(module, ref.attribute)
    missing = [attr for attr in required if not hasattr(component, attr)]
    if not callable(component) or missing:
        fault = f"lacks {', '.join(missing)}" if missing else "is not a class or function"
        raise UserError(f"{ref}: not a usable {kind}: {ref.attribute} {fault} (see the example in docs/extending.md)")
    return component


def content_hash(ref: PluginRef) -> str:
    """Return the hash of the trusted content of a plug-in. Raise UserError if the plug-in is not trusted."""
    source = trust.registered(ref.path)
    if source is None:
        raise UserError(f"{ref}: {ref.path} is not trusted (see docs/security.md)")
    return source.sha256


def _import(path: Path, source: PluginSource) -> ModuleType:
    """Import a plug-in. The module name contains the hash of the content, so a changed file is imported again."""
    name = f"{MODULE_PREFIX}{source.sha256[:32]}"
    if name in sys.modules:
        return sys.modules[name]
    if any(b"numba" in content for content in (source.content, *source.modules.values())):
        numba_cache.use_private_folder()
    finder = _PluginFinder(name, path.resolve(), source)
    # Append the finder. Python then asks it last, but no other finder can find modules of the private package.
    sys.meta_path.append(finder)
    spec = finder.find_spec(name)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        sys.meta_path.remove(finder)
        for other in [other for other in sys.modules if other == name or other.startswith(f"{name}.")]:
            del sys.modules[other]
        if isinstance(error, KeyboardInterrupt):
            raise
        line = f", line {error.lineno}" if isinstance(error, SyntaxError) else ""
        raise UserError(f"{path}{line}: cannot be imported: {type(error).__name__}: {error}") from error
    return module


class _PluginFinder(MetaPathFinder):
    """Finds the modules of one plug-in, which form a private package. It does not access files."""

    def __init__(self, package: str, path: Path, source: PluginSource):
        self.package = package
        self.path = path
        self.source = source

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Return the spec of the plug-in's private package or of a module in this package, else None.

        The code of the package is the user's file.
        """
        if fullname == self.package:
            return self._spec(fullname, self.path, self.source.content, "", is_package=True)
        if not fullname.startswith(f"{self.package}."):
            return None
        found = find_module(fullname.removeprefix(f"{self.package}."), self.source.modules)
        if found is None:
            return None
        file, is_package = found
        if file is None:
            return importlib.util.spec_from_loader(fullname, _PluginLoader(None), is_package=True)
        package = ".".join(PurePosixPath(file).parts[:-1])
        return self._spec(fullname, self.path.parent / file, self.source.modules[file], package, is_package)

    def _spec(self, name: str, file: Path, content: bytes, package: str, is_package: bool) -> ModuleSpec:
        loader = _PluginLoader((content, str(file), package, self.source, self.path.parent))
        # For a package, `is_package` sets an empty `__path__`, so that no other finder searches a folder for modules of
        # the package.
        spec = ModuleSpec(name, loader, origin=str(file), is_package=is_package)
        spec.has_location = True  # sets __file__
        return spec


class _PluginLoader(Loader):
    """Executes a module. `arguments` are the arguments of `compile_module`, or None for a package without code."""

    def __init__(self, arguments: tuple[bytes, str, str, PluginSource, Path] | None):
        self.arguments = arguments

    def exec_module(self, module: ModuleType) -> None:
        if self.arguments is not None:
            exec(compile_module(*self.arguments), vars(module))


def describe_error(error: BaseException) -> str | None:
    """Return `file.py, line 12: ZeroDivisionError: ...` if a plug-in file raised the error, otherwise None."""
    location = error_location(error, plugin_files())
    return None if location is None else f"{location}: {error_line(error)}"


def plugin_files() -> set[str]:
    """Return the paths of all imported plug-in files, and of the modules that they import from their folders."""
    modules = list(sys.modules.items())
    files = {getattr(module, "__file__", None) for name, module in modules if name.startswith(MODULE_PREFIX)}
    return {file for file in files if file is not None}


def error_location(error: BaseException, files: Collection[str]) -> str | None:
    """Return the last line of the traceback that is in one of `files`, as `file.py, line 12`; None if there is none."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename in files]
    return f"{frames[-1].filename}, line {frames[-1].lineno}" if frames else None


def error_line(error: BaseException) -> str:
    """Return the type of an error and the first line of its message."""
    first_line = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {first_line}".rstrip(": ")
