"""Publishing a conversion's output: what another program adds at any moment is in its place, or its
place is named.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from messages import refused
from model_builder import SMALL, make_file

from titanlite.runtime.errors import ConfigError
from titanlite.tools.formats import output_path
from titanlite.tools.formats.convert import Options, convert
from titanlite.tools.formats.output_path import lock_target, publish, remove, temporary_path
from titanlite.tools.formats.targets import TARGETS


def quiet(text: str) -> None:
    pass


@pytest.fixture(params=["renameat2", "rename"])
def renames(request, monkeypatch):
    """With the system call that exchanges two names, and where it is missing."""
    if request.param == "rename":
        monkeypatch.setattr(output_path, "_renameat2", lambda path, target, flag: False)


@contextlib.contextmanager
def at_moment(number: int, unit: str, act: Callable[[], Any]) -> Iterator[list[int]]:
    """Calls `act` before the line, or the opcode, `number` of output_path.py in this block; yields
    how many there were.

    A kernel can let another process run at each of them.
    """
    seen = [0]

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        if frame.f_code.co_filename != output_path.__file__:
            return None
        frame.f_trace_opcodes = unit == "opcode"
        if event == unit:
            seen[0] += 1
            if seen[0] == number:
                sys.settrace(None)
                act()
        return trace if seen[0] < number else None

    sys.settrace(trace)
    try:
        yield seen
    finally:
        sys.settrace(None)


def fill(path: Path, text: str, folder: bool) -> None:
    if folder:
        path.mkdir()
        for name in ("config.json", "model.safetensors"):
            (path / name).write_text(text)
    else:
        path.write_text(text)


def add_by_name(target: Path, opened: int) -> None:
    """As a program that opens target/mine, and makes the folder if it is not there."""
    target.mkdir(exist_ok=True)
    (target / "mine").write_text("mine")


def add_in_opened(target: Path, opened: int) -> None:
    """As a program whose current folder the target was when the conversion began."""
    file = os.open("mine", os.O_WRONLY | os.O_CREAT | os.O_EXCL, dir_fd=opened)
    os.write(file, b"mine")
    os.close(file)


def appear(target: Path, opened: int) -> None:
    """As a program that makes the target if it is not there."""
    with target.open("x") as file:
        file.write("mine")


def link(target: Path, opened: int) -> None:
    """As a program that moves the target away, and leaves a link."""
    (target if target.is_symlink() else target.rename(target.with_name("away"))).exists()
    target.symlink_to("away")


def publish_with(
    folder: Path, kind: str, act: Callable[..., Any], number: int, unit: str
) -> tuple[int, bool, str]:
    """One replacement during which `act` happens.

    How many moments there were before its end, whether the act succeeded, and the error that ended
    the replacement.
    """
    folder.mkdir()
    target, temporary = folder / "there", temporary_path(folder / "there")
    fill(target, "old", kind == "folder")
    fill(temporary, "new", kind == "folder")
    opened = os.open(target, os.O_RDONLY)
    acted = []

    def try_to_act() -> None:
        with contextlib.suppress(OSError):  # the other program sees the error
            act(target, opened)
            acted.append(True)

    message, seen = "", [0]
    try:
        with at_moment(number, unit, try_to_act) as seen:
            try:
                publish(temporary, target, force=True)
            finally:
                remove(temporary)  # as `_write` does
    except (ConfigError, OSError) as error:
        message = str(error)
    finally:
        os.close(opened)
    return seen[0], bool(acted), message


def content(path: Path) -> set[str]:
    return {file.read_text() for file in ([path] if path.is_file() else path.iterdir())}


ACTS = [add_by_name, add_in_opened, appear, link]


@pytest.mark.usefixtures("renames")
@pytest.mark.parametrize("unit", ["line", pytest.param("opcode", marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["folder", "file"])
@pytest.mark.parametrize("act", ACTS, ids=lambda act: act.__name__)
def test_nothing_that_is_added_at_any_moment_is_lost(
    tmp_path, monkeypatch, caplog, kind, act, unit
):
    # Some ms, hundreds of times
    monkeypatch.setattr(output_path, "sync_folder", lambda folder: None)
    moments = number = 0
    while number <= moments:  # the last one is after the end
        number += 1
        caplog.clear()
        folder = tmp_path / str(number)
        seen, acted, message = publish_with(folder, kind, act, number, unit)
        moments = max(moments, seen)
        told = message + caplog.text
        mine = [path for path in folder.rglob("*") if path.is_file() and path.read_text() == "mine"]
        assert len(mine) == (acted and act is not link), (number, told)
        assert content(folder / "there") - {"mine"} in ({"old"}, {"new"}, set()), number
        for path in folder.iterdir():
            assert path.name in ("there", "away") or str(path) in told, (number, path, told)
            # a later conversion would remove it
            assert "titanlite-tmp" not in path.name, (number, path)
        assert not acted or act is not link or content(folder / "away") in ({"old"}, {"new"})
    assert number > 20  # the moments were found


@pytest.mark.parametrize("to", [name for name in TARGETS if name != "peft"])  # needs adapters
def test_what_is_added_around_the_exchange_is_kept_in_every_format(
    tmp_path, monkeypatch, caplog, to
):
    """In each folder that convert writes; where it writes one file, in a folder that has taken its
    place.
    """
    make_file(tmp_path / "a.pt", SMALL)
    target = tmp_path / ("there.pt" if to == "torch" else "there")
    check, calls, late = output_path.require_replaceable, 0, 0

    def check_and_add(path: Path, named: Path) -> list[str]:
        nonlocal calls
        names = check(path, named)
        calls += 1  # 1 and 2: before the writing; 3: before the exchange; 4: after it
        if calls == late:
            if path.is_file():
                path.unlink()
            path.mkdir(exist_ok=True)
            (path / "mine").write_text("mine")
        return names

    def replace() -> None:
        nonlocal calls
        calls = 0
        convert(tmp_path / "a.pt", target, Options(to, verify=False, force=True), log=quiet)

    monkeypatch.setattr(output_path, "require_replaceable", check_and_add)
    replace()
    before = sorted(target.iterdir()) if target.is_dir() else []
    late = 3
    with refused(str(target), "holds mine"):
        replace()
    assert sorted(target.iterdir()) == sorted([*before, target / "mine"])
    (target / "mine").unlink()
    if not before:
        target.rmdir()
        target.write_text("old")
    late = 4
    replace()
    assert calls == 4
    (kept,) = (path for path in tmp_path.iterdir() if "titanlite-kept" in path.name)
    assert [path.name for path in kept.iterdir()] == ["mine"]
    assert f"mine in {kept}" in caplog.text
    assert sorted(tmp_path.iterdir()) == sorted([tmp_path / "a.pt", target, kept])


def test_what_a_killed_conversion_left_is_removed_but_not_what_others_have_added(tmp_path, caplog):
    """Killed right after the exchange: under the temporary name is what was at the target."""
    target = tmp_path / "there"
    fill(target, "new", folder=True)
    fill(temporary_path(target), "old", folder=True)
    fill(left := temporary_path(target), "old", folder=True)
    (left / "mine").write_text("mine")
    (left / output_path.temporary_path(Path("scratch")).name).write_text("ours")
    with lock_target(target, tmp_path / "source"):
        pass
    (kept,) = set(tmp_path.iterdir()) - {target}
    assert [path.name for path in kept.iterdir()] == ["mine"]
    assert f"mine in {kept}" in caplog.text
    with lock_target(target, tmp_path / "source"):
        pass
    assert kept.exists()
