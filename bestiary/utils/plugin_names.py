"""Names of plug-ins. A plug-in is a component that a user has written in a Python file: `path/to/file.py:Name`.

`parse_name` is the only function that recognises such a name. It turns the text into a PluginRef, and all later code
(trust, import, copies, config.toml) uses this object.
"""

from pathlib import Path
from typing import Any

from bestiary.utils.errors import UserError


class PluginRef(str):
    """A reference to a component in a user's file. It is immutable.

    It is a subclass of `str` with the value `path/to/file.py:Name`, so that it can stand in lists of names and in
    config.toml. Methods of `str`, for example `strip`, return a plain `str`, which is no longer a reference.
    """

    __slots__ = ("attribute", "path")

    path: Path  # path of the file; it may be relative
    attribute: str  # name of the class or function in the file

    def __new__(cls, path: Path, attribute: str) -> "PluginRef":
        reference = super().__new__(cls, f"{path}:{attribute}")
        object.__setattr__(reference, "path", path)
        object.__setattr__(reference, "attribute", attribute)
        return reference

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"a PluginRef is immutable; {name} cannot be set")

    def __reduce__(self) -> tuple[type["PluginRef"], tuple[Path, str]]:
        return PluginRef, (self.path, self.attribute)

    def absolute(self) -> "PluginRef":
        """Return the reference with the absolute path of the file, without symbolic links.

        Raise UserError if the path contains one of the characters `{};`, which have a special meaning in config.toml.
        """
        path = self.path.resolve()
        for character in "{};":
            if character in str(path):
                raise UserError(f"{path}: a plug-in path must not contain {character}; rename the file or folder")
        return PluginRef(path, self.attribute)


def parse_name(name: str) -> str:
    """Remove surrounding white space from the name of a component. If it names a user's file, return a PluginRef.

    This function does not check whether the file exists. It replaces `~` by the home folder.
    """
    if isinstance(name, PluginRef):
        return name
    text = name.strip()
    file, colon, attribute = text.rpartition(":")
    if not (colon and file.endswith(".py") and attribute.isidentifier()) or not {";", "\0"}.isdisjoint(file):
        return text
    try:
        return PluginRef(Path(file).expanduser(), attribute)
    except RuntimeError:  # the home folder of ~USER is unknown
        return PluginRef(Path(file), attribute)


def split_rewards(text: str) -> list[str]:
    """Split the value of --true-reward at its semicolons, and return the specifications of the rewards."""
    return [text] if isinstance(text, PluginRef) else [parse_name(part) for part in text.split(";")]
