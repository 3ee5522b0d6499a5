"""Conversations in rows: the shapes of data sets, what is a target, and bad rows."""

from __future__ import annotations

import dataclasses
import itertools
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
    chat = ChatConfig(MARKED, "<s>", "</s>", ("<s>", "</s>"))
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


ANSWERS = [*MESSAGES[:3], {"role": "assistant", "content": "drei"}]
PAIR = TEXT + TEXT.replace("zwei", "drei")
PAIRS = [
    {"chosen": MESSAGES, "rejected": ANSWERS},
    {"chosen": MESSAGES, "rejected": MESSAGES},
    {"chosen": MESSAGES},
    {"chosen": MESSAGES, "rejected": MESSAGES[:1]},
    {"chosen": MESSAGES, "rejected": MESSAGES[2:]},
]


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_pairs_of_answers(tmp_path, kind):
    path = tmp_path / f"a.{kind}"

    def found(table: list[dict], prompt: str = "") -> list[str]:
        if kind == "parquet":
            pq.write_table(pa.Table.from_pylist(table), path)
        else:
            path.write_text("".join(json.dumps(row) + "\n" for row in table))
        job = chat_job(path, kind, "chosen", prompt)
        job = dataclasses.replace(job, chat=dataclasses.replace(job.chat, pairs=True))
        return [text for _, text in read(job, [])]

    pair, same, absent, no_answer, other_prompt = found(PAIRS)
    assert packed(pair) == PAIR
    assert "the same" in same
    assert "'rejected'" in absent
    assert "'rejected': no message is the assistant's" in no_answer
    assert "another prompt" in other_prompt
    # The prompt in a column of its own, as messages or as text
    rows = [{"q": MESSAGES[:3], "chosen": MESSAGES[3:], "rejected": ANSWERS[3:]}]
    assert [packed(text) for text in found(rows, "q")] == [PAIR]
    rows = [{"q": "one", "chosen": "eins", "rejected": "zwei"}]
    (text,) = found(rows, "q")
    assert packed(text) == "<s>[U]one[A]eins</s><s>[U]one[A]zwei</s>"
    # Or both there and in the answers
    named = [{**MESSAGES[0], "name": "x"}]
    rows = [{"q": "one", "chosen": [*named, *MESSAGES[1:]], "rejected": ANSWERS}]
    assert [packed(text) for text in found(rows, "q")] == [PAIR]
    # An empty text is neither a prompt nor an answer
    empty = [("", "eins", "zwei"), ("one", "", "zwei"), ("one", "eins", " ")]
    rows = [dict(zip(("q", "chosen", "rejected"), row, strict=True)) for row in empty]
    problems = found(rows, "q")
    assert "message 1 (user) is empty" in problems[0]
    assert "'chosen' with 'q': message 1 (assistant) is empty" in problems[1]
    assert "'rejected' with 'q': message 1 (assistant) is empty" in problems[2]
    if kind == "jsonl":  # a Parquet file without a column is refused as a whole
        (problem,) = found([{"chosen": "eins", "rejected": "zwei"}], "q")
        assert "no field 'q'" in problem


def test_a_pair_is_two_documents(tmp_path, capsys):
    path = tmp_path / "a.jsonl"
    path.write_text((json.dumps(PAIRS[0]) + "\n") * 3)
    (tmp_path / "t.jinja").write_text(MARKED)
    out = tmp_path / "data"
    command = ["prepare", str(path), "--chat", "--pairs", "--template", str(tmp_path / "t.jinja")]
    held_out = tmp_path / "b.jsonl"
    held_out.write_text(path.read_text())
    assert main([*command, "--validation", str(held_out), "--out", str(out)]) == 0
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["pairs"] is True
    assert main(["prepare", "--inspect", str(out)]) == 0
    assert "the chosen answer and the rejected one" in capsys.readouterr().out
    tokens = Tokens(out, manifest, "train")
    starts = [*tokens.document_starts(0, len(tokens)).tolist(), len(tokens)]
    assert len(starts) == 7
    texts = []
    for begin, end in itertools.pairwise(starts[:3]):
        ids = np.asarray(tokens.read(begin, end - begin))
        texts.append(Tokenizer().decode(ids[tokens.targets(begin, end - begin)].tolist()))
    assert texts == [" zwei<|end_of_text|>", " drei<|end_of_text|>"], "the last answers only"


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
        (["--pairs"], ["--pairs", "--chat"]),
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
