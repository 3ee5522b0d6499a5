"""Files of rows: what is read, and that a mistake is named with its line."""

from __future__ import annotations

import pytest
from messages import refused

from titanlite.tools.cli.json_rows import SHOWN, JsonRow, read_rows, text_problem


def problem_of(values):
    return text_problem(values, "prompt")


def test_rows_keep_their_fields_and_blank_lines_are_left_out(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(
        b'\xef\xbb\xbf{"prompt": "a\\u2028", "id": 7}\r\n\n  \n{"x": [1, null], "prompt": ""}'
    )
    assert read_rows(path, problem_of) == [
        JsonRow(1, {"prompt": "a\u2028", "id": 7}),
        JsonRow(4, {"x": [1, None], "prompt": ""}),
    ]


def test_each_line_of_a_text_file_is_a_row(tmp_path):
    path = tmp_path / "rows.txt"
    path.write_bytes('one \u2028 line\r\n\n {"prompt": 1}\n'.encode())
    assert read_rows(path, problem_of, text_field="prompt") == [
        JsonRow(1, {"prompt": "one \u2028 line"}),
        JsonRow(3, {"prompt": ' {"prompt": 1}'}),
    ]
    with refused(f"{path}:1: not JSON"):  # without a name for the field
        read_rows(path, problem_of)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"prompt": "a\xff"}', "byte 14 of the line is not UTF-8"),
        (b'{"prompt": "a"', "not JSON: Expecting ',' delimiter, at character 15"),
        (b'["prompt"]', "expected a JSON object, found list"),
        (b'{"text": "a"}', "has no `prompt`"),
        (b'{"prompt": ["a"]}', "`prompt`: expected a text, found list"),
        (b'{"prompt": ' + b"9" * 5000 + b"}", "expected a text, found float"),
        (b"[" * 200_000, "not JSON"),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, message):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"prompt": "good"}\n' + line + b"\n")
    with refused(f"{path}:2: ", message):
        read_rows(path, problem_of)


def test_many_bad_lines_are_counted(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("1\n" * (SHOWN + 3))
    with refused(f"{path}:{SHOWN}: ", "and 3 more lines"):
        read_rows(path, problem_of)


def test_a_file_without_rows_or_that_is_none_is_refused(tmp_path):
    (tmp_path / "empty.jsonl").write_text("\n \n")
    with refused("empty.jsonl: has no rows"):
        read_rows(tmp_path / "empty.jsonl", problem_of)
    with refused("absent.jsonl: No such file"):
        read_rows(tmp_path / "absent.jsonl", problem_of)
    with refused("Is a directory", "expected a file of rows"):
        read_rows(tmp_path, problem_of)
