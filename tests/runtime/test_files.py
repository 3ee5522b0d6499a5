"""Files: what is read within limits, what is written, synced and replaced, and locks."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pytest

from titanlite.runtime import files
from titanlite.runtime import lock_file as module
from titanlite.runtime.errors import ConfigError
from titanlite.runtime.lock_file import lock_file


@pytest.fixture
def synced(monkeypatch) -> list[str]:
    """The paths of files and folders that were synced."""
    found: list[str] = []
    fsync = os.fsync

    def note(descriptor: int) -> None:
        found.append(
            os.readlink(f"/proc/self/fd/{descriptor}") if Path("/proc/self/fd").exists() else ""
        )
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", note)
    return found


def test_a_new_file_is_synced_and_none_is_replaced(tmp_path, synced):
    files.write_synced(tmp_path / "a", b"content")
    assert (tmp_path / "a").read_bytes() == b"content"
    assert synced in ([str(tmp_path / "a")], [""])
    with pytest.raises(FileExistsError):
        files.write_synced(tmp_path / "a", b"other")


def test_each_new_folder_is_synced_into_its_parent(tmp_path, synced):
    files.make_folder(tmp_path / "a/b/c")
    assert (tmp_path / "a/b/c").is_dir()
    assert synced in ([str(tmp_path), str(tmp_path / "a"), str(tmp_path / "a/b")], [""] * 3)
    files.make_folder(tmp_path / "a/b/c")
    assert len(synced) == 3


def test_a_file_is_replaced_as_a_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "a"
    files.replace_file(path, b"old")
    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space left") as caught:
        patch.setattr(
            files,
            "write_synced",
            lambda path, content: (_ for _ in ()).throw(OSError(28, "No space left")),
        )
        files.replace_file(path, b"old")  # nothing to write
        files.replace_file(path, b"new")
    assert caught.value.filename == str(path)
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["a"]
    (tmp_path / "folder").mkdir()
    with pytest.raises(IsADirectoryError):
        files.replace_file(tmp_path / "folder", b"")


def test_a_file_that_another_process_replaces_meanwhile(tmp_path, monkeypatch):
    path, rename = tmp_path / "a", Path.replace

    def other_first(temporary: Path, target: Path) -> Path:
        monkeypatch.setattr(Path, "replace", rename)
        files.replace_file(path, b"of the other process", shared=True)
        return rename(temporary, target)

    monkeypatch.setattr(Path, "replace", other_first)
    files.replace_file(path, b"of this one", shared=True)
    assert path.read_bytes() == b"of this one"
    assert os.listdir(tmp_path) == ["a"]


def test_what_is_no_regular_file_or_too_long_is_not_read(tmp_path):
    """Without waiting for the writer of a pipe. `test_fuzz.py` tries the same on every reader."""
    (tmp_path / "file").write_bytes(b"12345")
    assert files.read_bounded(tmp_path / "file", 5) == b"12345"
    with pytest.raises(OSError, match="expected a regular file of at most 4 bytes"):
        files.read_bounded(tmp_path / "file", 4)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zero").symlink_to("/dev/zero")
    for name in ("pipe", "zero"):
        with pytest.raises(OSError, match=f"expected a regular file .*{name}"):
            files.read_bounded(tmp_path / name)
    with pytest.raises(IsADirectoryError) as caught:
        files.read_bounded(tmp_path)
    assert caught.value.filename == str(tmp_path)


@pytest.mark.parametrize("existing", [False, True])
@pytest.mark.parametrize("fails_at", [1, 2, 3])
def test_new_files_are_written_all_or_none(tmp_path, monkeypatch, existing, fails_at):
    folder = tmp_path / "a/b"
    if existing:
        folder.mkdir(parents=True)
    contents = {"1": b"x", "c/2": b"y", "3": b"z"}
    calls = []

    def write_synced(path: Path, content: bytes) -> None:
        calls.append(path)
        path.write_bytes(content[:0])
        if len(calls) == fails_at:
            raise OSError(28, "No space left on device")
        path.write_bytes(content)

    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space left") as caught:
        patch.setattr(files, "write_synced", write_synced)
        files.write_new_files(folder, contents)
    assert caught.value.filename == str(folder / [*contents][fails_at - 1])
    assert os.listdir(tmp_path) == ["a"] * existing
    assert not existing or os.listdir(folder) == []
    files.write_new_files(folder, contents)
    assert {name: (folder / name).read_bytes() for name in contents} == contents
    with pytest.raises(FileExistsError) as caught:
        files.write_new_files(folder, {"new": b"", "3": b"other"})
    assert caught.value.filename == str(folder / "3")
    assert sorted(os.listdir(folder)) == ["1", "3", "c"]
    assert (folder / "3").read_bytes() == b"z"


def test_a_second_one_is_refused_or_waits(tmp_path):
    path = tmp_path / ".lock"
    waiting = threading.Event()
    order = []

    def wait() -> None:
        waiting.set()
        with lock_file(path, "busy", wait=True):
            order.append("second")

    with lock_file(path, "busy"):
        with pytest.raises(ConfigError, match="busy"), lock_file(path, "busy"):
            pass
        thread = threading.Thread(target=wait)
        thread.start()
        waiting.wait()
        order.append("first")
    thread.join()
    assert order == ["first", "second"]
    assert not path.exists()


def test_a_lock_on_a_file_that_was_removed_meanwhile_does_not_count(tmp_path, monkeypatch):
    path = tmp_path / ".lock"
    opened = []

    def open_and_lose(name: object, *arguments: int) -> int:
        opened.append(os_open(name, *arguments))
        if len(opened) == 1:
            path.unlink()
        return opened[-1]

    os_open = os.open
    monkeypatch.setattr(module.os, "open", open_and_lose)
    with lock_file(path, "busy"):
        assert len(opened) == 2
        assert os.path.samestat(os.fstat(opened[1]), path.stat())


def test_without_locks_there_is_a_warning(tmp_path, monkeypatch, caplog):
    def flock(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(module.fcntl, "flock", flock)
    with lock_file(tmp_path / ".lock", "busy"):
        pass
    assert "the file system has no locks" in caplog.text
