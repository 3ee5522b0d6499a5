"""The file of `validation.questions`: JSON lines with `prompt` and `answer`.

Why it is a file of its own: the launcher reads it too, before torch is imported, so that a mistake
is reported at once.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from titanlite.data.json_rows import read_rows, text_problem


class Question(NamedTuple):
    """A question, the number of its line, and the answers of which each is right."""

    line: int
    prompt: str
    answers: list[str]


def read_questions(path: Path) -> list[Question]:
    """The questions of a file. Raises ConfigError with the lines that are none."""
    questions = []
    for row in read_rows(path, _problem_of):
        answers = row.values["answer"]
        if isinstance(answers, str):
            answers = [answers]
        questions.append(Question(row.line, row.values["prompt"], answers))
    return questions


def _problem_of(values: dict[str, Any]) -> str:
    problem = text_problem(values, "prompt")
    if problem:
        return problem
    answers = values.get("answer")
    if isinstance(answers, str):
        return ""
    if not isinstance(answers, list) or not answers:
        return "`answer`: expected a text, or a list with at least one"
    if not all(isinstance(answer, str) for answer in answers):
        return "`answer`: expected a list of texts only"
    return ""
