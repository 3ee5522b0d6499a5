"""`titanlite learn`: lays out the exercises of the course and grades them.

Only `check` of a program imports torch.
"""

from __future__ import annotations

import shlex
from pathlib import Path

from titanlite.config.mistakes import suggestion
from titanlite.runtime.errors import ConfigError
from titanlite.runtime.shell_command import titanlite_command
from titanlite.tools.cli.options import StrictParser, at_least
from titanlite.tools.learn.exercise import course, find_lesson, lay_out, lesson_of
from titanlite.tools.learn.lessons import LESSONS, Lesson
from titanlite.tools.learn.problems import check_answers
from titanlite.tools.learn.progress import note_passed, passed_lessons

USAGE = """usage: titanlite learn                              list the lessons, which were passed
       titanlite learn start LESSON [--folder DIR]  lay out the exercise of a lesson
       titanlite learn check [FOLDER] [--timeout S] run it and grade it"""
ACTIONS = ("start", "check")


def run(argv: list[str]) -> int:
    """Runs the command. Returns 1 if an exercise is not right yet. Raises ConfigError."""
    if argv and argv[0] in ("-h", "--help"):
        print(USAGE)
        return 0
    if not argv:
        return _list()
    if argv[0] not in ACTIONS:
        hint = suggestion(argv[0], list(ACTIONS))
        raise ConfigError(
            f"titanlite learn: unknown action {argv[0]!r}{hint}; expected start or check"
        )
    if argv[0] == "start":
        return _start(argv[1:])
    return _check(argv[1:])


def _list() -> int:
    passed = passed_lessons()
    for number, lesson in enumerate(LESSONS, start=1):
        mark = "passed" if lesson.name in passed else ""
        print(f"{number:2}  {lesson.name:<16} {mark:<7} {lesson.title}")
    print(f"\n{course()}/README.md has three routes through them.")
    print(f"{titanlite_command(Path.cwd())} learn start LESSON lays out an exercise.")
    return 0


def _start(argv: list[str]) -> int:
    parser = StrictParser(
        prog="titanlite learn start", usage="titanlite learn start LESSON [--folder DIR]"
    )
    parser.add_argument("lesson", help="name or number")
    parser.add_argument("--folder", type=Path, help="default: learn-<lesson>, here")
    options = parser.parse_args(argv)
    lesson = find_lesson(options.lesson)
    folder = options.folder or Path(f"learn-{lesson.name}")
    lay_out(lesson, folder)
    edited = f"{lesson.step}.py" if lesson.step else "answers.toml"
    print(f"{lesson.title}\n\n  {folder}/README.md  what to know, what to do, questions")
    print(f"  {folder}/{edited}  what to complete")
    print(f"\nthen: {titanlite_command(Path.cwd())} learn check {shlex.quote(str(folder))}")
    return 0


def _check(argv: list[str]) -> int:
    parser = StrictParser(
        prog="titanlite learn check", usage="titanlite learn check [FOLDER] [--timeout SECONDS]"
    )
    parser.add_argument(
        "folder", nargs="?", type=Path, default=Path(), help="of an exercise; default: here"
    )
    parser.add_argument(
        "--timeout",
        type=at_least(float, 1, 3600),
        default=60,
        help="seconds after which a program that has not finished is ended (default 60)",
    )
    options = parser.parse_args(argv)
    folder: Path = options.folder
    lesson = lesson_of(folder)
    print(f"{lesson.name}: {lesson.title}", flush=True)
    if lesson.step:
        passed, lines = _check_program(lesson, folder, options.timeout)
    else:
        passed, lines = check_answers(lesson.name, folder / "answers.toml")
    print("\n".join(lines))
    if not passed:
        return 1
    note_passed(lesson.name)
    number = LESSONS.index(lesson) + 1
    if number < len(LESSONS):
        command = titanlite_command(Path.cwd())
        print(f"\npassed; next: {command} learn start {LESSONS[number].name}")
    else:
        print("\npassed")
    return 0


def _check_program(lesson: Lesson, folder: Path, timeout: float) -> tuple[bool, list[str]]:
    # These import torch, which the other actions do not need
    from titanlite.tools.learn.check import check_program
    from titanlite.tools.verify.pool import Pool

    pool = Pool(["titanlite.tools.learn.measure"])
    grade = check_program(lesson, folder, pool, timeout)
    return grade.passed, grade.lines
