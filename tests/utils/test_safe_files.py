"""Access to files in run folders: links, pipes, paths outside the folder and large files are refused."""

import os
from pathlib import Path

import pytest

from bestiary.utils import safe_files


def test_regular_files_are_read_and_written() -> None:
    root = Path("run")
    root.mkdir()
    safe_files.make_folder(root / "a" / "b", root)
    safe_files.write_text(root / "a" / "b" / "x.txt", "first", root)
    safe_files.append_text(root / "a" / "b" / "x.txt", " second", root)
    assert safe_files.read_text(root / "a" / "b" / "x.txt", root) == "first second"
    assert [path.name for path in safe_files.list_files(root / "a" / "b", root)] == ["x.txt"]


def test_links_are_not_followed() -> None:
    root, secret = Path("run"), Path("secret.txt")
    root.mkdir()
    secret.write_text("private")
    Path("elsewhere").mkdir()
    (root / "file").symlink_to(secret.absolute())
    (root / "folder").symlink_to(Path("elsewhere").absolute())
    with pytest.raises(OSError, match="symbolic link"):
        safe_files.read_bytes(root / "file")
    with pytest.raises(OSError, match="symbolic link"):
        safe_files.append_text(root / "file", "x")
    with pytest.raises(OSError, match="symbolic link"):
        safe_files.write_text(root / "folder" / "x", "x", root)
    with pytest.raises(OSError, match="symbolic link"):
        safe_files.make_folder(root / "folder" / "x", root)
    safe_files.write_text(root / "file", "new")  # the link itself is replaced
    assert secret.read_text() == "private"
    assert list(Path("elsewhere").iterdir()) == []
    assert safe_files.list_files(root / "folder", root) == []


def test_files_with_a_second_name_are_not_changed_in_place() -> None:
    Path("secret").write_text("private")
    Path("run").mkdir()
    Path("run/x").hardlink_to("secret")
    with pytest.raises(OSError, match="hard link"):
        safe_files.append_text(Path("run/x"), "new")
    assert safe_files.read_text(Path("run/x")) == "private"
    safe_files.write_text(Path("run/x"), "new")
    assert Path("secret").read_text() == "private"


def test_root_may_be_a_link() -> None:
    Path("run").mkdir()
    Path("latest").symlink_to("run")
    safe_files.write_text(Path("latest/x"), "text")
    assert Path("run/x").read_text() == "text"


@pytest.mark.parametrize("path", ["run/../secret", "secret", "run", "/etc/hostname"])
def test_paths_outside_the_folder_are_refused(path: str) -> None:
    Path("run").mkdir()
    Path("secret").write_text("private")
    with pytest.raises(OSError, match="not inside"):
        safe_files.read_bytes(Path(path), Path("run"))


def test_pipes_devices_and_large_files_are_refused() -> None:
    os.mkfifo("pipe")
    with pytest.raises(OSError, match="not a regular file"):
        safe_files.read_bytes(Path("pipe"))
    with pytest.raises(OSError, match="not a regular file"):
        safe_files.read_bytes(Path("/dev/zero"))
    Path("large").write_bytes(bytes(100))
    with pytest.raises(OSError, match="100 bytes"):
        safe_files.read_bytes(Path("large"), max_bytes=99)
