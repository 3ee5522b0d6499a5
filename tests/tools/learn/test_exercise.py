"""The gap of an exercise."""

from pathlib import Path

import pytest
from messages import refused

from titanlite.runtime import files
from titanlite.runtime.errors import ConfigError
from titanlite.tools.learn.exercise import OPEN, find_lesson, lay_out, lesson_of, with_gap

PROGRAM = '''\
def first(x):
    """Adds one."""
    # gap: two functions
    y = x + 1
    return y


def second(x):
    return x
    # end of gap


def third(x):
    return x
'''


def test_a_gap_leaves_signatures_and_docstrings():
    text = with_gap(PROGRAM)
    assert (
        text
        == f'''\
def first(x):
    """Adds one."""
    raise NotImplementedError("{OPEN}")


def second(x):
    raise NotImplementedError("{OPEN}")


def third(x):
    return x
'''
    )


def test_a_folder_knows_its_lesson_and_is_not_overwritten(tmp_path):
    lesson = find_lesson("6")
    assert lesson is find_lesson("fsdp_tp")
    lay_out(lesson, tmp_path / "exercise")
    assert lesson_of(tmp_path / "exercise") is lesson
    names = {path.name for path in (tmp_path / "exercise").iterdir()}
    assert {"6_fsdp_tp.py", "4_fsdp.py", "5_tensor_parallel.py", "llama.py", "README.md"} <= names
    with pytest.raises(ConfigError, match="not empty"):
        lay_out(lesson, tmp_path / "exercise")
    with pytest.raises(ConfigError, match="titanlite learn start"):
        lesson_of(tmp_path)


def test_an_unknown_lesson_is_refused_with_the_nearest():
    with pytest.raises(ConfigError, match="did you mean pipeline"):
        find_lesson("pipelin")


def test_a_full_disk_leaves_nothing_and_names_the_file(tmp_path, monkeypatch):
    lesson = find_lesson("1")
    written: list[Path] = []

    def write_synced(path: Path, content: bytes) -> None:
        if len(written) == 2:
            raise OSError(28, "No space left on device")
        written.append(path)
        path.write_bytes(content)

    with monkeypatch.context() as patch, refused(str(tmp_path / "a/common.py"), "No space left"):
        patch.setattr(files, "write_synced", write_synced)
        lay_out(lesson, tmp_path / "a")
    assert not (tmp_path / "a").exists()
    lay_out(lesson, tmp_path / "a")
