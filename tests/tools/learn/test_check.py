"""Exercises: each can be solved, and known-wrong answers are refused with their hint."""

from pathlib import Path

import pytest
import tomllib

from titanlite.runtime.errors import ConfigError
from titanlite.tools.learn import check, exercise
from titanlite.tools.learn.check import check_program, expected_losses, failure_lines
from titanlite.tools.learn.exercise import COURSE, lay_out, text_of
from titanlite.tools.learn.lessons import LESSONS

PROGRAMS = [lesson for lesson in LESSONS if lesson.step]
QUICK = ("ddp",)
LESSONS_TO_RUN = [
    lesson if lesson.name in QUICK else pytest.param(lesson, marks=pytest.mark.slow)
    for lesson in PROGRAMS
]


def wrong_answers(lesson) -> dict[str, list[dict[str, str]]]:
    return tomllib.loads(text_of(lesson).with_suffix(".wrong.toml").read_text())


def answered(lesson, folder: Path, changes=()) -> Path:
    """The folder of an exercise whose gap has the solution, with these changes of it."""
    lay_out(lesson, folder)
    program = (COURSE / f"steps/{lesson.step}.py").read_text()
    for change in changes:
        assert program.count(change["replace"]) == 1
        program = program.replace(change["replace"], change["with"])
    (folder / f"{lesson.step}.py").write_text(program)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("lesson", LESSONS_TO_RUN, ids=lambda lesson: lesson.name)
def test_the_solution_passes(pool, lesson, tmp_path):
    grade = check_program(lesson, answered(lesson, tmp_path / "exercise"), pool, 120)
    assert grade.passed, grade.lines
    # The limit of the memory is that of the program, so it is told when the program changes
    (line,) = [line for line in grade.lines if "at its fullest" in line]
    own, limit = (int(word.replace(",", "")) for word in line.split() if word[0].isdigit())
    assert abs(own - limit) < 0.02 * limit


ALL_WRONG = [(lesson, name) for lesson in PROGRAMS for name in wrong_answers(lesson)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lesson", "name"),
    [
        pair if pair[1] == "averaged" else pytest.param(*pair, marks=pytest.mark.slow)
        for pair in ALL_WRONG
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_a_known_wrong_answer_is_refused_with_its_hint(pool, lesson, name, tmp_path, monkeypatch):
    folder = answered(lesson, tmp_path / "exercise", wrong_answers(lesson)[name])
    if lesson.name != "checkpoint":  # the others show in a few steps
        common = folder / "common.py"
        common.write_text(common.read_text().replace("STEPS = 20", "STEPS = 4"))
        first = tuple(values[:4] for values in expected_losses(lesson.losses))
        monkeypatch.setattr(check, "expected_losses", lambda name: first)
    grade = check_program(lesson, folder, pool, 120)
    assert not grade.passed
    assert grade.mistakes == [name], grade.lines
    (mistake,) = [mistake for mistake in lesson.mistakes if mistake.name == name]
    assert f"hint: {mistake.hint}" in grade.lines


def test_a_program_that_fails_shows_its_own_traceback(pool, tmp_path):
    lesson = PROGRAMS[1]
    lay_out(lesson, tmp_path / "open")  # the gap is not filled
    grade = check_program(lesson, tmp_path / "open", pool, 60)
    text = "\n".join(grade.lines)
    assert not grade.passed
    assert "NotImplementedError: the gap is open" in text
    assert "in start_step" in text
    assert "pool.py" not in text, "our part of the traceback"
    assert "measure.py" not in text


WAITS_FOR_ITSELF = """
import torch.distributed as dist

def train():
    if dist.get_rank() == 0:
        dist.barrier()
    while True:
        pass
"""


def test_a_hang_ends_with_the_line_that_each_rank_is_at(pool, tmp_path):
    lesson = PROGRAMS[1]
    lay_out(lesson, tmp_path / "hangs")
    (tmp_path / "hangs/2_ddp.py").write_text(WAITS_FOR_ITSELF)
    grade = check_program(lesson, tmp_path / "hangs", pool, 2)
    assert not grade.passed
    assert "did not finish within 2 s" in grade.lines[0]
    assert "       rank 0: 2_ddp.py, line 6, in train" in grade.lines
    assert "       rank 1: 2_ddp.py, line 8, in train" in grade.lines or any(
        line.startswith("       rank 1: 2_ddp.py, line 7") for line in grade.lines
    )


def test_what_a_program_lacks_is_one_line(tmp_path):
    error = "rank 0:\nTraceback ...\ntitanlite.tools.learn.measure.ProgramError: no `train`"
    assert failure_lines(error, tmp_path, 1) == ["WRONG  no `train`"]


def test_a_long_traceback_is_cut(tmp_path):
    error = "rank 0:\n" + "".join(f'  File "{tmp_path}/x.py", line {i}\n' for i in range(50))
    lines = failure_lines(error, tmp_path, 1)
    assert len(lines) == 15
    assert lines[-1].endswith("line 49")


def test_without_the_repository_there_is_one_clear_error(monkeypatch, tmp_path):
    monkeypatch.setattr(exercise, "COURSE", tmp_path / "learn")
    with pytest.raises(ConfigError, match="the course is in the repository"):
        exercise.course()


COPIED = """
import torch

def train():
    torch.ones(1000) + 1
    return {losses}
"""


@pytest.mark.parametrize(("operation", "words"), [(True, "does not train"), (False, "no tensor")])
def test_the_published_losses_alone_pass_no_lesson(pool, tmp_path, operation, words):
    lesson = PROGRAMS[0]
    lay_out(lesson, tmp_path / "copied")
    program = COPIED.format(losses=expected_losses("losses.txt")[0])
    if not operation:
        program = program.replace("    torch.ones(1000) + 1\n", "")
    (tmp_path / "copied/1_loop.py").write_text(program)
    grade = check_program(lesson, tmp_path / "copied", pool, 60)
    assert not grade.passed
    assert any(line.startswith("WRONG") and words in line for line in grade.lines), grade.lines
    assert "Traceback" not in "".join(grade.lines)


def test_what_a_learner_s_exception_says_is_printable(tmp_path):
    error = f'rank 0:\n  File "{tmp_path}/x.py", line 1\nValueError: \x1b[2J\x9b1A\tx'
    assert failure_lines(error, tmp_path, 1)[-1].strip() == "ValueError: \\x1b[2J\\x9b1A\tx"
