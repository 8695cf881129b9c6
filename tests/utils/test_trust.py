"""Files in which trust is stored: mode, owner, links, damaged content, concurrent writers; lookups of known content."""

import json
import multiprocessing
import os
from pathlib import Path

import pytest

from bestiary.utils import plugins, trust, user_store
from bestiary.utils.errors import UserError
from bestiary.utils.plugin_names import PluginRef
from bestiary.utils.plugin_sources import PluginSource, read_source
from bestiary.utils.user_store import UserStore


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> UserStore:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setattr(trust, "_registered", {})
    user_store._warn_once.cache_clear()
    return trust.TRUSTED


def write_plugin(text: str = "class Net: ...\n") -> tuple[PluginRef, str]:
    Path("net.py").write_text(text)
    return PluginRef(Path("net.py"), "Net"), read_source(Path("net.py")).sha256


def test_store_is_private_and_has_the_hash_and_path_of_trusted_content(store: UserStore) -> None:
    before = os.umask(0)
    try:
        ref, sha256 = write_plugin()
        trust.trust_named(ref)
    finally:
        os.umask(before)
    assert store.path.stat().st_mode & 0o777 == 0o600
    assert store.path.parent.stat().st_mode & 0o777 == 0o700
    assert store.path.with_suffix(".lock").stat().st_mode & 0o777 == 0o600
    assert [path.name for path in store.path.parent.iterdir() if path.name.startswith(".tmp")] == []
    assert store.read()[sha256]["paths"] == [str(Path("net.py").resolve())]
    assert trust.is_known(sha256, "Net")


def test_relative_folder_of_the_environment_variable_is_ignored(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The XDG specification says so. Otherwise the working directory would decide what is trusted."""
    monkeypatch.setenv("XDG_CONFIG_HOME", "config")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert user_store.store_folder() == tmp_path / "home" / ".config" / "bestiary"


UNSAFE = {
    "file writable by the group": ("chmod", 0o620, "other users can write to"),
    "file writable by all": ("chmod", 0o602, "other users can write to"),
    "folder writable by all": ("chmod folder", 0o702, "other users can write to"),
    "link": ("link", 0, "it is a link"),
    "folder instead of a file": ("folder", 0, "not a regular file"),
    "pipe": ("pipe", 0, "not a regular file"),
    "damaged": ("text", 0, "not a valid JSON file"),
    "other content": ("list", 0, "not written by Bestiary"),
}


@pytest.mark.parametrize("how", UNSAFE)
def test_unsafe_file_is_ignored_and_not_changed(store: UserStore, how: str, capsys: pytest.CaptureFixture[str]) -> None:
    change, mode, message = UNSAFE[how]
    ref, sha256 = write_plugin()
    trust.trust_named(ref)
    content = store.path.read_bytes()
    if change == "chmod":
        store.path.chmod(mode)
    elif change == "chmod folder":
        store.path.parent.chmod(mode)
    elif change in ("text", "list"):
        content = b"[1]" if change == "list" else content[:-5]
        store.path.write_bytes(content)
    else:
        moved = store.path.rename(store.path.with_name("moved.json"))
        if change == "link":
            store.path.symlink_to(moved)
        elif change == "pipe":
            os.mkfifo(store.path)
        else:
            store.path.mkdir()
    assert not trust.is_known(sha256, "Net")
    other, _ = write_plugin("class Net:\n    other = True\n")
    trust.trust_named(other)  # the user may use it now, but it is not stored
    assert trust.registered(other.path) is not None
    assert message in " ".join(capsys.readouterr().err.split())
    if change in ("chmod", "chmod folder", "text", "list", "link"):
        assert store.path.read_bytes() == content


def test_file_of_another_user_is_ignored(store: UserStore, monkeypatch: pytest.MonkeyPatch) -> None:
    ref, sha256 = write_plugin()
    trust.trust_named(ref)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert not trust.is_known(sha256, "Net")


def _add(number: int) -> None:
    trust.TRUSTED.update(f"{number}", lambda record: {"number": number})


def test_concurrent_writers_lose_no_record(store: UserStore) -> None:
    with multiprocessing.get_context("fork").Pool(8) as pool:
        pool.map(_add, range(40))
    assert sorted(record["number"] for record in store.read().values()) == list(range(40))


def test_oldest_records_are_removed(store: UserStore) -> None:
    small = UserStore("small.json", max_records=3)
    for key in "abcad":
        small.update(key, lambda record: {"count": record.get("count", 0) + 1})
    assert small.read() == {"c": {"count": 1}, "a": {"count": 2}, "d": {"count": 1}}


def test_known_content_is_read_only_at_a_path_that_the_user_has_used(store: UserStore, tmp_path: Path) -> None:
    ref, sha256 = write_plugin()
    trust.trust_named(ref)
    Path("copy.py").write_bytes(Path("net.py").read_bytes())
    assert trust.trust_known(PluginRef(tmp_path / "net.py", "Net"), sha256)
    assert not trust.trust_known(PluginRef(tmp_path / "copy.py", "Net"), sha256)
    Path("net.py").write_text("changed")
    assert not trust.trust_known(PluginRef(tmp_path / "net.py", "Net"), sha256)
    Path("net.py").unlink()
    os.mkfifo("net.py")
    assert not trust.trust_known(PluginRef(tmp_path / "net.py", "Net"), sha256)


def test_known_content_is_trusted_only_with_a_name_that_the_user_has_used(store: UserStore, tmp_path: Path) -> None:
    ref, sha256 = write_plugin()
    trust.trust_named(ref)
    other = PluginRef(tmp_path / "net.py", "wipe")
    assert not trust.may_use(other)
    assert not trust.trust_known(other, sha256)
    with pytest.raises(UserError, match="wipe, and you have not used this version"):
        trust.trust_in_file(other, "study.toml", trust_code=False)
    with pytest.raises(UserError, match="is not executed"):
        plugins.load(other, "environment")
    trust.trust_named(other)
    assert trust.may_use(other)
    assert trust.may_use(ref)
    assert store.read()[sha256]["names"] == ["Net", "wipe"]


def test_plugin_in_a_file_needs_known_content(store: UserStore) -> None:
    ref, _ = write_plugin()
    with pytest.raises(UserError, match=r"study.toml names net.py.*add --trust-code"):
        trust.trust_in_file(ref, "study.toml", trust_code=False)
    assert trust.registered(ref.path) is None
    trust.trust_in_file(ref, "study.toml", trust_code=True)
    trust.trust_in_file(ref, "study.toml", trust_code=False)
    assert trust.registered(ref.path) is not None


def test_content_of_another_process_is_not_stored(store: UserStore) -> None:
    trust.trust_content(Path("sent.py"), PluginSource(b"class Net: ..."), remember=False)
    assert trust.registered(Path("sent.py")) is not None
    assert store.read() == {}


def test_hash_depends_on_names_and_contents_of_all_files() -> None:
    sources = [
        PluginSource(b"a"),
        PluginSource(b"b"),
        PluginSource(b"a", {"m.py": b"1"}),
        PluginSource(b"a", {"m.py": b"2"}),
        PluginSource(b"a", {"n.py": b"1"}),
        PluginSource(b"a", {"m.py": b"1", "n.py": b""}),
    ]
    assert len({source.sha256 for source in sources}) == len(sources)
    assert json.dumps(sorted(PluginSource(b"", {"b.py": b"", "a/c.py": b""}).local_names)) == '["a", "b"]'
