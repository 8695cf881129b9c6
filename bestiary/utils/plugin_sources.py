"""Content of plug-ins: the bytes of a user's file, and of the modules that it imports from its own folder.

Each file is read once. Its hash is computed from the bytes that were read. The same bytes are copied, sent to other
machines and executed (see `plugins.py`).
"""

import ast
import hashlib
import json
import os
import stat
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path, PurePosixPath
from types import CodeType

MAX_FILE_BYTES = 4 * 2**20  # maximum size of a file with Python code
MAX_MODULES = 200  # maximum number of modules that a plug-in imports from its own folder

Read = Callable[[Path], bytes]


@dataclass(frozen=True)
class PluginSource:
    """The content of a plug-in."""

    content: bytes  # content of the user's file
    # Modules that the file imports from its own folder: relative path, for example "parts/net.py" -> content.
    modules: Mapping[str, bytes] = field(default_factory=dict)

    @cached_property
    def sha256(self) -> str:
        """The SHA-256 hash of the content, in hexadecimal digits.

        If the file imports no modules of its folder, this is the hash of the file. Otherwise it is the hash of a text
        that contains the hashes of all files.
        """
        own = hashlib.sha256(self.content).hexdigest()
        if not self.modules:
            return own
        hashes = {name: hashlib.sha256(content).hexdigest() for name, content in self.modules.items()}
        return hashlib.sha256(f"bestiary plug-in {json.dumps([own, hashes], sort_keys=True)}".encode()).hexdigest()

    @cached_property
    def local_names(self) -> frozenset[str]:
        """The top-level names of `modules`, for example "parts" for the module "parts/net.py"."""
        return frozenset(PurePosixPath(name).parts[0].removesuffix(".py") for name in self.modules)


def read_user_file(path: Path) -> bytes:
    """Return the content of a file. Follow links. Raise OSError if it is not a regular file or is too large."""
    # Without O_NONBLOCK, opening a pipe would wait for its other end.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_FILE_BYTES:
            raise OSError(f"{path} is not a regular file of at most {MAX_FILE_BYTES} bytes")
        with os.fdopen(os.dup(descriptor), "rb") as file:
            return file.read()
    finally:
        os.close(descriptor)


def read_source(path: Path) -> PluginSource:
    """Read a user's file and the modules that it imports from its folder. Raise OSError if the file cannot be read."""
    folder = path.resolve().parent
    content = read_user_file(path)
    modules: dict[str, bytes] = {}
    pending = [("", content)]
    while pending:
        package, text = pending.pop()
        for file in _candidates(text, package, folder):
            if file in modules or len(modules) == MAX_MODULES:
                continue
            try:
                modules[file] = read_user_file(folder / file)
            except OSError:
                continue
            pending.append((str(PurePosixPath(file).parent).replace("/", ".").strip("."), modules[file]))
    return PluginSource(content, dict(sorted(modules.items())))


def read_listed(path: Path, folder: Path, names: Iterable[str], read: Read) -> PluginSource:
    """Read a plug-in's file and the modules `names` in `folder`. Raise OSError if one of them cannot be read."""
    return PluginSource(read(path), {name: read(folder / name) for name in sorted(names)})


# --- imports ---


def is_installed(name: str, folder: Path) -> bool:
    """Return whether a top-level module belongs to the standard library or to an installed package.

    Modules in the folder of the plug-in, in the working directory and in the folder of the running script do not count
    as installed.
    """
    if name in sys.stdlib_module_names or name == "bestiary":
        return True
    script = getattr(sys.modules["__main__"], "__file__", None)
    skipped = {folder, Path.cwd(), *([Path(script).resolve().parent] if script else [])}
    entries = [entry for entry in sys.path if Path(entry).resolve() not in skipped]
    for finder in sys.meta_path:
        spec = finder.find_spec(name, entries)
        # A spec without origin belongs to a folder without __init__.py. Such a folder does not count as installed, so
        # that a module of the plug-in with the same name is imported instead.
        if spec is not None and spec.origin is not None and Path(spec.origin).parent not in skipped:
            return True
    return False


def compile_module(content: bytes, file: str, package: str, source: PluginSource, folder: Path) -> CodeType:
    """Compile a module of a plug-in. Turn its imports of other modules of the plug-in into relative imports.

    Args:
        content: content of the module.
        file: path of the module, for tracebacks.
        package: folder of the module, relative to the folder of the plug-in, with dots, for example "parts.heads". It
            is "" if the module is directly in the folder of the plug-in.
        source: content of the plug-in.
        folder: folder of the plug-in.
    """
    local = frozenset(name for name in source.local_names if not is_installed(name, folder))
    tree = _LocalImports(local, 1 + len(package.split(".")) if package else 1).visit(ast.parse(content, file))
    return compile(ast.fix_missing_locations(tree), file, "exec", dont_inherit=True)


class _LocalImports(ast.NodeTransformer):
    """Turns absolute imports of the modules beside a plug-in into relative imports.

    The set `local` contains the names of these modules and packages.
    """

    def __init__(self, local: frozenset[str], level: int):
        self.local = local
        self.level = level  # number of leading dots of a relative import that leads to the plug-in's folder

    def visit_Import(self, node: ast.Import) -> list[ast.stmt]:
        statements: list[ast.stmt] = []
        for alias in node.names:
            top, _, rest = alias.name.partition(".")
            if top not in self.local:
                statements.append(ast.Import([alias]))
                continue
            parent, _, last = alias.name.rpartition(".")
            if rest:  # `import a.b` imports the module a.b, but defines only the name `a`
                statements.append(self._relative(parent, last, alias.asname or "_bestiary_import"))
            if not rest or alias.asname is None:
                statements.append(self._relative(None, top, None if rest else alias.asname))
        return [ast.copy_location(statement, node) for statement in statements]

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.ImportFrom:
        if node.level == 0 and (node.module or "").partition(".")[0] in self.local:
            node.level = self.level
        return node

    def _relative(self, module: str | None, name: str, asname: str | None) -> ast.stmt:
        return ast.ImportFrom(module, [ast.alias(name, asname)], self.level)


def _candidates(content: bytes, package: str, folder: Path) -> Iterator[str]:
    """Yield the possible paths of the modules that a file imports, relative to `folder`, the folder of the plug-in.

    `content` is the content of the file. `package` is its folder relative to `folder`, as in `compile_module`.
    """
    try:
        tree = ast.parse(content)
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # reported when the file is imported
        return
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".") if package and node.level else []
            base = [*parts[: len(parts) - node.level + 1], *(node.module.split(".") if node.module else [])]
            names |= {".".join(base), *(".".join([*base, alias.name]) for alias in node.names)}
    installed = {top: is_installed(top, folder) for top in {name.partition(".")[0] for name in names} if top}
    for name in sorted(name for name in names if not installed.get(name.partition(".")[0], True)):
        parts = name.split(".")
        for length in range(1, len(parts) + 1):
            path = "/".join(parts[:length])
            yield f"{path}/__init__.py"
            yield f"{path}.py"


def find_module(name: str, modules: Mapping[str, bytes]) -> tuple[str | None, bool] | None:
    """Return (path of the file of a module, whether the module is a package).

    The path is None if the package is a folder without __init__.py. Return None if the plug-in has no such module.
    """
    path = name.replace(".", "/")
    if f"{path}/__init__.py" in modules:
        return f"{path}/__init__.py", True
    if f"{path}.py" in modules:
        return f"{path}.py", False
    return (None, True) if any(file.startswith(f"{path}/") for file in modules) else None
