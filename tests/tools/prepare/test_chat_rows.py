"""Conversations in rows: the shapes of data sets, what is a target, and bad rows."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from chats import MARKED
from row_jobs import job_of, read

from titanlite.data.shards import Tokens
from titanlite.tokenizer.tokenizer import Tokenizer
from titanlite.tools.cli.main import main
from titanlite.tools.prepare.job import ChatConfig, Job

MESSAGES = [
    {"role": "user", "content": "one"},
    {"role": "assistant", "content": "eins"},
    {"role": "user", "content": "two"},
    {"role": "assistant", "content": "zwei"},
]
SHAREGPT = [{"from": "human", "value": "one"}, {"from": "gpt", "value": "eins"}]
TEXT = "<s>[U]one[A]eins</s>[U]two[A]zwei</s>"


def packed(text: str) -> str:
    """Without white space."""
    return "".join(text.split())


def chat_job(path: Path, kind: str, field: str = "messages", prompt: str = "") -> Job:
    special = ("<s>", "</s>")
    chat = ChatConfig(MARKED, *special, special, special)
    return dataclasses.replace(job_of(path, kind, prompt=prompt), field=field, chat=chat)


def test_shapes_of_rows(tmp_path):
    path = tmp_path / "a.jsonl"
    rows = [
        {"messages": MESSAGES},
        {"messages": json.dumps(MESSAGES)},
        {"messages": SHAREGPT},
        {"messages": [{"role": "user", "content": "alone"}]},
        {"messages": "no list"},
        {"text": "none"},
        {"messages": [{"role": "nobody", "content": "x"}]},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = dict(read(chat_job(path, "jsonl"), []))
    assert found[1] == found[2]
    assert packed(found[1]) == TEXT
    assert packed(found[3]) == "<s>[U]one[A]eins</s>"
    assert "no message is the assistant's" in found[4]
    assert "found a text" in found[5]
    assert "no field 'messages'" in found[6]
    assert "'nobody'" in found[7]


def test_parquet_with_messages_or_columns(tmp_path):
    path = tmp_path / "a.parquet"
    pq.write_table(
        pa.table({"messages": [MESSAGES, SHAREGPT[:0]], "q": ["a", "b"], "a": ["1", "2"]}), path
    )
    found = dict(read(chat_job(path, "parquet"), []))
    assert packed(found[1]) == TEXT
    assert "list of messages" in found[2]
    pairs = dict(read(chat_job(path, "parquet", "a", "q"), []))
    assert packed(pairs[2]) == "<s>[U]b[A]2</s>"


@pytest.mark.parametrize("last", [False, True])
def test_targets_in_the_prepared_data(tmp_path, last, capsys):
    path = tmp_path / "a.jsonl"
    path.write_text((json.dumps({"messages": MESSAGES}) + "\n") * 30)
    held_out = tmp_path / "b.jsonl"
    held_out.write_text(path.read_text())
    template = tmp_path / "t.jinja"
    template.write_text(MARKED)
    out = tmp_path / "data"
    command = ["prepare", str(path), "--chat", "--template", str(template), "--out", str(out)]
    assert (
        main([*command, "--validation", str(held_out), *(["--last-answer"] if last else [])]) == 0
    )
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["chat_template"] == MARKED
    tokens = Tokens(out, manifest, "train")
    tokenizer = Tokenizer()
    end = int(tokens.document_starts(0, len(tokens))[1])
    ids = np.asarray(tokens.read(0, end))
    targets = tokens.targets(0, end)
    expected = " zwei<|end_of_text|>"
    if not last:
        expected = " eins<|end_of_text|>" + expected
    assert tokenizer.decode(ids[targets].tolist()) == expected
    assert main(["prepare", "--inspect", str(out)]) == 0
    assert "not a target" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--template=x"], ["--template", "--chat"]),
        (["--last-answer"], ["--last-answer", "--chat"]),
        (["--chat", "--template=/no/such"], ["/no/such", "chat template"]),
        (["--chat"], ["--chat", "rows"]),
    ],
)
def test_wrong_options_are_reported(tmp_path, options, words, capsys):
    (tmp_path / "a.txt").write_text("text\n" * 100)
    assert main(["prepare", str(tmp_path / "a.txt"), "--out", str(tmp_path / "o"), *options]) == 2
    error = capsys.readouterr().err
    assert all(word in error for word in words)


def test_a_broken_template_is_one_error(tmp_path, capsys):
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": MESSAGES}) + "\n")
    command = ["prepare", str(tmp_path / "a.jsonl"), "--chat", "--out", str(tmp_path / "o")]
    command += ["--template", str(tmp_path / "t.jinja")]
    for template, problem in (
        ("{% for m in messages %}{{ m.content ", "the chat template cannot render"),
        ("\n", "t.jinja: the file is empty"),
    ):
        (tmp_path / "t.jinja").write_text(template)
        assert main(command) == 2
        assert problem in capsys.readouterr().err
