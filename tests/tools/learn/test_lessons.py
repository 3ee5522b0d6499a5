"""The lessons as data: their formulas are those of the programs; and the gap of an exercise."""

from __future__ import annotations

import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import tomllib
from messages import refused

from titanlite.runtime import files
from titanlite.runtime.errors import ConfigError
from titanlite.tools.faults.catalogue import FAULTS
from titanlite.tools.learn.exercise import (
    COURSE,
    OPEN,
    find_lesson,
    lay_out,
    lesson_of,
    text_of,
    with_gap,
)
from titanlite.tools.learn.lessons import LESSONS, SIZES, Count, N, Result
from titanlite.tools.learn.measure import Measured

PROGRAMS = [lesson for lesson in LESSONS if lesson.step]


@pytest.mark.parametrize("lesson", PROGRAMS, ids=lambda lesson: lesson.name)
def test_every_exercise_has_two_wrong_answers_and_each_hint_has_one(lesson):
    names = list(tomllib.loads(text_of(lesson).with_suffix(".wrong.toml").read_text()))
    assert sorted(names) == sorted(mistake.name for mistake in lesson.mistakes)
    assert len(names) >= 2


def test_there_are_thirteen_lessons_with_a_text_each():
    assert len(LESSONS) == 13
    texts = sorted(path.name for path in (COURSE / "lessons").glob("*.md"))
    assert texts == [text_of(lesson).name for lesson in LESSONS]


def test_the_sizes_are_those_of_the_model(monkeypatch):
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    model = runpy.run_path(str(COURSE / "steps/llama.py"))["Llama"]()
    assert [parameter.numel() for parameter in model.parameters()] == SIZES
    assert N == sum(SIZES) == 182_848
    assert f"N = {N:,} parameters, {4 * N:,} bytes" in Path(COURSE / "steps/llama.py").read_text()


def test_a_result_is_compared_with_what_was_expected():
    lesson = PROGRAMS[1]
    expected = lesson.expected(0)["all_reduce"]
    assert expected == Count(2, 2 * (4 * N + 4))._replace(calls=expected.calls)
    own = Measured([6.0, 5.0, float("nan")], [1.5], {"all_reduce": 2 * expected.calls}, {}, 17 * N)
    result = Result([own], [6.0, 5.00001, 4.0], [3.0], lesson)
    assert result.first_off == 3
    assert result.norm_ratio == 0.5
    assert result.calls("all_reduce") == 2
    assert result.calls("send") == 0
    assert result.too_much_held == N


@pytest.mark.parametrize("lesson", PROGRAMS, ids=lambda lesson: lesson.name)
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_signs_bear_what_is_not_finite_and_a_right_answer_has_none(lesson, value):
    for loss in (value, 6.0):
        counts = [lesson.expected(rank) for rank in range(lesson.processes)]
        ranks = [
            Measured(
                [loss] * 20,
                [loss] * 20,
                {kind: count.calls for kind, count in count_by_kind.items()},
                {kind: count.bytes for kind, count in count_by_kind.items()},
                lesson.held(rank),
                lesson.peak,
            )
            for rank, count_by_kind in enumerate(counts)
        ]
        result = Result(ranks, [6.0] * 20, [6.0] * 20, lesson)
        signs = [mistake.name for mistake in lesson.mistakes if mistake.sign(result)]
        assert loss != 6.0 or signs == []


def commands() -> list[str]:
    """Those of titanlite in the texts of the lessons, but for the grader's, which other tests run."""
    found = set()
    for lesson in LESSONS:
        text = text_of(lesson).read_text().replace("\\\n", " ")
        for line in text.splitlines():
            for command in re.findall(r"^titanlite .*|`(titanlite [^`]*)`", line):
                found.add(command or line)
    return sorted(command for command in found if "titanlite learn" not in command)


def test_planted_faults_that_a_lesson_names_exist():
    """They are planted by tests/tools/faults."""
    names = [command.split()[2] for command in commands() if command.startswith("titanlite break")]
    assert len(names) >= 8
    assert {*names} <= {fault.name for fault in FAULTS}


@pytest.mark.slow
@pytest.mark.parametrize("command", [one for one in commands() if " break " not in one])
def test_the_commands_of_the_lessons_run(command):
    words = shlex.split(command, comments=True)
    done = subprocess.run(
        [sys.executable, "-m", *words],
        cwd=COURSE.parent,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout


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
