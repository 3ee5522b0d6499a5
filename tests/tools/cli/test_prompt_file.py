"""The rows of `titanlite generate --prompts`: what is refused, how they are divided, what is
written.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path

import pytest
from fuzz_samples import RANKS, TEXT, Reader, given, json_lines
from messages import refused

from titanlite.model.generate import Row
from titanlite.tokenizer.tokenizer import Tokenizer
from titanlite.tools.cli.json_rows import JsonRow
from titanlite.tools.cli.prompt_file import (
    batches_of,
    read_prompts,
    require_target,
    rows_to_continue,
    write_texts,
)


def test_a_row_with_a_text_is_refused(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "a", "id": 1}\n')
    assert read_prompts(path) == [JsonRow(1, {"prompt": "a", "id": 1})]
    path.write_text('{"prompt": "a", "text": "b"}\n')
    with refused(f"{path}:1: has a `text`"):
        read_prompts(path)


def test_each_row_has_the_room_that_training_or_the_option_gives(tmp_path):
    tokenizer = Tokenizer()
    path = tmp_path / "rows.txt"
    rows = [JsonRow(3, {"prompt": "def"}), JsonRow(5, {"prompt": "def f(x): return x + 1"})]
    lengths = [1 + len(tokenizer.encode(row.values["prompt"])) for row in rows]
    found = rows_to_continue(path, rows, tokenizer, 100, 0, seed=4)
    assert [len(row.prompt) for row in found] == lengths
    assert [row.prompt[0] for row in found] == [tokenizer.bos] * 2
    assert [row.max_new_tokens for row in found] == [100 - length for length in lengths]
    assert [row.seed for row in found] == [4, 5]
    found = rows_to_continue(path, rows, tokenizer, 0, 9, seed=4)
    assert [row.max_new_tokens for row in found] == [9, 9]
    longest = lengths[1]
    rows_to_continue(path, rows, tokenizer, longest + 1, 0, seed=4)
    with refused(f"{path}:5: the prompt has {longest} tokens", f"at most {longest - 1}"):
        rows_to_continue(path, rows, tokenizer, longest, 0, seed=4)


def test_batches_have_prompts_of_similar_lengths():
    rows = [Row([1] * length, 1, 0) for length in (3, 9, 1, 9, 4)]
    assert batches_of(rows, 2) == [[1, 3], [4, 0], [2]]
    assert batches_of(rows, 9) == [[1, 3, 4, 0, 2]]


def test_rows_are_written_as_they_are_with_their_texts(tmp_path, capsys):
    rows = [JsonRow(1, {"id": "\ud800", "prompt": "a"}), JsonRow(2, {"prompt": "b"})]
    texts = {1: "two\n", 0: "one\u2028"}
    write_texts(tmp_path / "out.jsonl", rows, texts)
    written = (tmp_path / "out.jsonl").read_text()
    assert [json.loads(line) for line in written.splitlines()] == [
        {"id": "\ud800", "prompt": "a", "text": "one\u2028"},
        {"prompt": "b", "text": "two\n"},
    ]
    write_texts(None, rows, texts)
    assert capsys.readouterr().out == written
    # They are not lost where a file can no longer be written
    with refused("--out /dev/full/out.jsonl", "on standard output"):
        write_texts(Path("/dev/full/out.jsonl"), rows, texts)
    assert capsys.readouterr().out == written


@pytest.mark.parametrize(
    ("name", "message"), [("", "is a folder"), ("none/out.jsonl", "folder does not exist")]
)
def test_where_no_file_can_be_written_is_refused(tmp_path, name, message):
    with refused(f"--out {tmp_path / name}", message):
        require_target(tmp_path / name, tmp_path / "prompts.txt")


def test_prompts_are_not_overwritten(tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_text("a\n")
    with refused(str(path), "the file of --prompts"):
        require_target(path, path)
    require_target(tmp_path / "other", path)


def read_and_write(name: str, folder: Path, data: bytes) -> None:
    """Reads, encodes and writes prompts as `titanlite generate` does."""
    (folder / name).write_bytes(data)
    rows = read_prompts(folder / name)
    for row in rows_to_continue(folder / name, rows, Tokenizer("", RANKS), 64, 0, 0):
        assert 1 <= row.max_new_tokens < 64
    write_texts(folder / "texts.jsonl", rows, dict.fromkeys(range(len(rows)), TEXT))


PROMPTS = [{"id": i, "prompt": f"def f_{i}(", "tags": ["é", None]} for i in range(4)]
FUZZED = {
    "prompts, rows": Reader(
        "text", given(json_lines(PROMPTS)), functools.partial(read_and_write, "prompts.jsonl")
    ),
    "prompts, text": Reader(
        "text",
        given(b"def\n\nclass A:\r\n"),
        functools.partial(read_and_write, "prompts.txt"),
    ),
}
