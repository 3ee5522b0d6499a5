"""Lays out an exercise: a copy of a step with a gap, and what it needs to run.

What it is: the lines between `# gap:` and `# end of gap` belong to functions. Each keeps its
signature and docstring, which say what it has to do; its body is replaced by an exception.
Why it is here: the solution is the step itself, so it can't be out of date.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

from titanlite.config.mistakes import suggestion
from titanlite.runtime.errors import ConfigError
from titanlite.runtime.files import read_bounded, write_new_files
from titanlite.runtime.shell_command import python_command, titanlite_command
from titanlite.tools.learn.lessons import LESSONS, Lesson
from titanlite.tools.learn.problems import open_answers

COURSE = Path(__file__).parents[3] / "learn"
OPEN = "the gap is open: write this function"
MARK = "lesson.txt"  # in the folder of an exercise: the lesson's name
SHARED = ("common.py", "llama.py", "rows.txt")


def course() -> Path:
    """The folder `learn/` of the repository. Raises ConfigError where there is none."""
    if not (COURSE / "steps").is_dir():
        raise ConfigError(
            f"titanlite learn: {COURSE} does not exist; the course is in the repository, not in "
            "the installed package: expected to be run from a clone (pip install -e .)"
        )
    return COURSE


def text_of(lesson: Lesson) -> Path:
    """The file with the lesson's text."""
    number = LESSONS.index(lesson) + 1
    return course() / "lessons" / f"{number:02}_{lesson.name}.md"


def gap_lines(source: str) -> tuple[int, int]:
    """The first and the last line of the gap, counted from 1, without the markers."""
    lines = source.splitlines()
    first = next(i for i, line in enumerate(lines) if line.strip().startswith("# gap:"))
    last = next(i for i, line in enumerate(lines) if line.strip() == "# end of gap")
    return first + 2, last


def with_gap(source: str) -> str:
    """The program with the functions of its gap open."""
    lines = source.splitlines()
    first, last = gap_lines(source)
    functions = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
    for function in sorted(functions, key=lambda node: node.lineno, reverse=True):
        body = [node for node in function.body if not _is_docstring(node)]
        if first <= body[0].lineno <= last:
            begin = body[0].lineno
            if len(body) < len(function.body):
                begin = (function.body[0].end_lineno or 0) + 1  # comments before the first line
            indent = " " * body[0].col_offset
            lines[begin - 1 : function.end_lineno] = [
                f'{indent}raise NotImplementedError("{OPEN}")'
            ]
    kept = [line for line in lines if line.strip() != "# end of gap"]
    return "\n".join(line for line in kept if not line.strip().startswith("# gap:")) + "\n"


def with_commands(text: str, folder: Path) -> str:
    """The lesson's text, whose commands a shell in `folder` finds where nothing is installed."""
    folder = folder.absolute()
    words = {"titanlite": titanlite_command(folder), "python": python_command(folder)}
    # At the start of a line and in backticks
    return re.sub(
        r"(^|`)(titanlite|python)(?= )", lambda match: match[1] + words[match[2]], text, flags=re.M
    )


def _is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def lesson_of(folder: Path) -> Lesson:
    """The lesson whose exercise is in a folder. Raises ConfigError."""
    try:
        name = read_bounded(folder / MARK, 1 << 10).decode(errors="replace").strip()
    except OSError:
        raise ConfigError(
            f"{folder}: no {MARK}; expected a folder of `titanlite learn start`"
        ) from None
    return find_lesson(name)


def find_lesson(name: str) -> Lesson:
    """Finds a lesson by name or number. Raises ConfigError."""
    for number, lesson in enumerate(LESSONS, start=1):
        if name in (lesson.name, str(number)):
            return lesson
    names = [lesson.name for lesson in LESSONS]
    raise ConfigError(
        f"unknown lesson {name!r}{suggestion(name, names)}; expected one of {', '.join(names)}"
    )


def lay_out(lesson: Lesson, folder: Path) -> None:
    """Writes the exercise into a new or empty folder. Raises ConfigError if it has files."""
    steps = course() / "steps"
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(
            f"--folder {folder}: exists and is not empty; expected a new or an empty folder"
        )
    contents = {
        "README.md": with_commands(text_of(lesson).read_text("utf-8"), folder).encode(),
        MARK: f"{lesson.name}\n".encode(),
    }
    if lesson.step:
        for name in (*SHARED, *(f"{needed}.py" for needed in lesson.needs)):
            contents[name] = (steps / name).read_bytes()
        source = (steps / f"{lesson.step}.py").read_text()
        contents[f"{lesson.step}.py"] = with_gap(source).encode()
    else:
        contents["answers.toml"] = open_answers(lesson.name).encode()
    try:
        write_new_files(folder, contents)
    except OSError as error:
        raise ConfigError(
            f"{error.filename or folder}: {error.strerror or error}; nothing was laid out"
        ) from None
