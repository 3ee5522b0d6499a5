"""Conversations in rows: their shapes, what is a target, bad rows, and the command that is proposed
where they are given as text.
"""

from __future__ import annotations

import csv
import dataclasses
import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from chats import MARKED
from messages import refused
from preparing import TOKENIZER, documents_of, prepared
from row_jobs import job_of, read

from titanlite.config.schema import DataConfig
from titanlite.data.shards import Tokens
from titanlite.runtime.errors import ConfigError
from titanlite.tokenizer.tokenizer import Tokenizer
from titanlite.tools.cli.main import main
from titanlite.tools.cli.prepare_command import run
from titanlite.tools.prepare.cache import prepare
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


TEXTS = ["plain", 'with "quotes", and commas', "two\nlines", "\ttab é"]
TURNS = [[("user", f"question {i}"), ("assistant", f"answer {i}")] for i in range(30)]


def problem_of(path: Path, **keys: str) -> str:
    """What training says of a file."""
    section = DataConfig(path=str(path), cache=str(path.parent / "cache"), **keys)
    with pytest.raises(ConfigError) as caught:
        prepare(section, TOKENIZER, lambda text: None)
    return "\n".join(caught.value.problems)


@pytest.mark.parametrize(("name", "delimiter"), [("a b.csv", ","), ("a.tsv", "\t")])
def test_a_table_is_refused_with_a_command_that_converts_it(tmp_path, name, delimiter):
    with (tmp_path / name).open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, delimiter=delimiter)
        writer.writerows([["id", "text"], *enumerate(TEXTS)])
    problem = problem_of(tmp_path / name)
    assert problem.startswith(f"{tmp_path / name}: is a table")
    command = "python" + problem.partition(": python")[2]
    command = command.replace("python", sys.executable, 1)
    subprocess.run(command, shell=True, check=True, cwd=tmp_path)
    made = prepared(tmp_path / "made", tmp_path / f"{Path(name).stem}.jsonl")
    assert sorted(documents_of(made)) == sorted(TEXTS)


def messages(shape: str) -> list[list[dict[str, str]]]:
    if shape == "messages":
        return [[{"role": r, "content": c} for r, c in turns] for turns in TURNS]
    names = {"user": "human", "assistant": "gpt"}
    return [[{"from": names[r], "value": c} for r, c in turns] for turns in TURNS]


@pytest.mark.parametrize("shape", ["messages", "conversations"])
@pytest.mark.parametrize("name", ["a.jsonl", "a", "a.parquet"])
def test_conversations_are_refused_with_the_command_that_prepares_them(tmp_path, shape, name):
    rows = [{"id": i, shape: turns} for i, turns in enumerate(messages(shape))]
    path = tmp_path / name
    if name == "a.parquet":
        pa = pytest.importorskip("pyarrow")
        import pyarrow.parquet as pq

        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    problem = problem_of(path)
    command = "titanlite" + problem.partition(": titanlite")[2].partition(" FOLDER")[0]
    _, _, *arguments = command.split()
    assert run([*arguments, str(tmp_path / "made")]) == 0
    texts = documents_of(tmp_path / "made")
    assert len(texts) == len(TURNS)
    assert all("question" in text and "answer" in text for text in texts)
    # Nor are they texts of a field
    assert "--chat" in problem_of(path, field=shape)


@pytest.mark.parametrize("value", [json.dumps(turns) for turns in messages("messages")[:1]])
def test_a_conversation_in_a_text_is_not_prose(tmp_path, value):
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": value}) + "\n")
    with refused("a.jsonl:1", "--chat"):
        run([str(tmp_path / "a.jsonl"), "--field=messages", "--out", str(tmp_path / "b")])


def test_rows_of_ids_are_refused_with_the_way_to_write_them(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"input_ids": [1, 2], "labels": [1, 2]}\n' * 9)
    assert "numpy.save('ids.npy'" in problem_of(tmp_path / "a.jsonl")


def test_questions_and_answers_are_refused_with_the_command_that_prepares_them(tmp_path):
    """The answers are targets, and nothing else."""
    rows = [{"instruction": f"ask {i}", "input": "", "output": f"answer {i}"} for i in range(30)]
    path = tmp_path / "alpaca.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    problem = problem_of(path)
    command = problem.partition("titanlite prepare ")[2].partition(", then")[0]
    assert run([word.replace("FOLDER", f"{tmp_path / 'made'}") for word in command.split()]) == 0
    texts = documents_of(tmp_path / "made")
    assert sorted(texts) == sorted(row["instruction"] + row["output"] for row in rows)


@pytest.mark.parametrize("indent", [None, 1])
def test_a_file_of_sharegpt_is_refused_with_commands_that_prepare_it(tmp_path, indent):
    rows = [{"id": "1", "conversations": turns} for turns in messages("conversations")]
    (tmp_path / "share.json").write_text(json.dumps(rows, indent=indent))
    problem = problem_of(tmp_path / "share.json")
    assert "jq -c '.[]'" in problem
    assert "titanlite prepare share.jsonl --chat --field conversations" in problem
    if shutil.which("jq"):
        command = problem.partition("per line: ")[2].partition(", then")[0]
        subprocess.run(command, shell=True, check=True, cwd=tmp_path)
        lines = (tmp_path / "share.jsonl").read_text().splitlines()
        assert [json.loads(line) for line in lines] == rows


def test_a_single_conversation_over_several_lines_is_refused(tmp_path):
    one = {"messages": messages("messages")[0]}
    (tmp_path / "one.json").write_text(json.dumps(one, indent=2))
    assert "jq -c '.'" in problem_of(tmp_path / "one.json")
