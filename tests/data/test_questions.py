"""The file of questions: what is read of it, and what is refused."""

from __future__ import annotations

import pytest
from messages import refused

from titanlite.config.load import load_config
from titanlite.data.questions import Question, read_questions
from titanlite.tools.cli.launch import prepare_data


def test_questions_are_read(tmp_path):
    path = tmp_path / "questions.jsonl"
    path.write_text(
        '{"prompt": "2+2=", "answer": "4", "id": 9}\n\n{"prompt": "", "answer": ["a", "b"]}\n'
    )
    assert read_questions(path) == [Question(1, "2+2=", ["4"]), Question(3, "", ["a", "b"])]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ('{"answer": "4"}', "has no `prompt`"),
        ('{"prompt": "2"}', "`answer`: expected a text, or a list"),
        ('{"prompt": "2", "answer": []}', "`answer`: expected a text, or a list"),
        ('{"prompt": "2", "answer": ["4", 4]}', "`answer`: expected a list of texts only"),
    ],
)
def test_bad_questions_are_refused(tmp_path, row, message):
    path = tmp_path / "questions.txt"  # .txt too has JSON lines
    path.write_text('{"prompt": "2+2=", "answer": "4"}\n' + row)
    with refused(f"{path}:2: {message}"):
        read_questions(path)


def test_the_launcher_refuses_them_before_it_prepares_data(tmp_path):
    path = tmp_path / "questions.jsonl"
    path.write_text("1")
    with refused(f"{path}:1: expected a JSON object", "no such file"):
        prepare_data(
            load_config(["debug", f"--validation.questions={path}", "--data.path=/nowhere"]), 1
        )
