"""Publishing a conversion's output: what another program adds at any moment is in its place."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from titanlite.runtime.errors import ConfigError
from titanlite.tools.formats import output_path
from titanlite.tools.formats.output_path import lock_target, publish, remove, temporary_path


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


def add_by_name(target: Path) -> None:
    """As a program that opens target/mine, and makes the folder if it is not there."""
    target.mkdir(exist_ok=True)
    (target / "mine").write_text("mine")


def appear(target: Path) -> None:
    """As a program that makes the target if it is not there."""
    with target.open("x") as file:
        file.write("mine")


def link(target: Path) -> None:
    """As a program that makes a link there."""
    target.symlink_to("away")


def publish_with(
    folder: Path, kind: str, act: Callable[[Path], Any], number: int, unit: str
) -> tuple[int, bool, str]:
    """Publishes an output while `act` happens.

    How many moments there were before its end, whether the act succeeded, and the error.
    """
    folder.mkdir()
    target, temporary = folder / "there", temporary_path(folder / "there")
    fill(temporary, "new", kind == "folder")
    acted = []

    def try_to_act() -> None:
        with contextlib.suppress(OSError):  # the other program sees the error
            act(target)
            acted.append(True)

    message, seen = "", [0]
    try:
        with at_moment(number, unit, try_to_act) as seen:
            try:
                publish(temporary, target)
            finally:
                remove(temporary)  # as `_write` does
    except ConfigError as error:
        message = str(error)
    return seen[0], bool(acted), message


def content(path: Path) -> set[str]:
    return {file.read_text() for file in ([path] if path.is_file() else path.iterdir())}


@pytest.mark.parametrize("unit", ["line", pytest.param("opcode", marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["folder", "file"])
@pytest.mark.parametrize("act", [add_by_name, appear, link], ids=lambda act: act.__name__)
def test_nothing_that_is_added_at_any_moment_is_lost(tmp_path, monkeypatch, kind, act, unit):
    # Some ms, hundreds of times
    monkeypatch.setattr(output_path, "sync_folder", lambda folder: None)
    moments = number = 0
    while number <= moments:  # the last one is after the end
        number += 1
        folder = tmp_path / str(number)
        seen, acted, message = publish_with(folder, kind, act, number, unit)
        moments = max(moments, seen)
        target = folder / "there"
        assert os.listdir(folder) == ["there"], number
        if message:
            assert acted
            assert "appeared while it was written" in message
            assert target.is_symlink() or content(target) == {"mine"}, number
        else:
            added = {"mine"} if acted and act is add_by_name else set()
            assert content(target) == {"new"} | added, number
            assert not target.is_symlink()
    assert number > 5  # the moments were found


def test_what_a_killed_conversion_left_is_removed(tmp_path):
    target = tmp_path / "there"
    fill(target, "new", folder=True)
    fill(left := temporary_path(target), "old", folder=True)
    (left / output_path.temporary_path(Path("scratch")).name).write_text("ours")
    fill(temporary_path(target), "a file", folder=False)
    with lock_target(target, tmp_path / "source"):
        pass
    assert os.listdir(tmp_path) == ["there"]
    assert content(target) == {"new"}
