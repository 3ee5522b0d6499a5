"""`titanlite prepare --inspect`: the manifest, a verification of all bytes, and samples."""

from __future__ import annotations

import json

import pytest
from messages import refused
from preparing import TOKENIZER, prepared

from titanlite.data.prepared_manifest import read_manifest
from titanlite.data.shards import Tokens
from titanlite.runtime.errors import ConfigError
from titanlite.tools.cli.main import main
from titanlite.tools.prepare import inspect as module
from titanlite.tools.prepare.inspect import inspect, samples


def test_what_is_printed(tmp_path, capsys):
    rows = [{"text": f"answer {i}\x1b[2J", "prompt": f"question {i}"} for i in range(100)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    folder = prepared(tmp_path / "out", tmp_path / "a.jsonl", "--prompt-field", "prompt")
    capsys.readouterr()
    assert main(["prepare", "--inspect", str(folder)]) == 0
    shown = capsys.readouterr().out
    for part in (
        "4,112 ids",
        TOKENIZER.sha256[:16],
        "prompts are not targets",
        "verified 6 files",
        "format 2",
    ):
        assert part in shown
    assert (
        "train token 0: [not a target: <|begin_of_text|>question 0]answer 0\\x1b[2J<|end_of_text|>"
        in shown
    )
    assert "\x1b" not in shown
    assert "validation token 0" in shown


def test_damage_is_found_though_the_file_was_verified(tmp_path):
    (tmp_path / "a.txt").write_text("x = 1\n" * 100)
    folder = prepared(tmp_path / "out", tmp_path / "a.txt")
    shard = folder / "train-00000.bin"
    shard.write_bytes(bytes(shard.stat().st_size))
    with refused(str(shard), "SHA-256 has changed"):
        inspect(folder, "")


def test_samples_need_the_tokenizer(tmp_path, capsys, folder):
    other = tmp_path / "other.model"
    other.write_bytes(TOKENIZER.path.read_bytes()[:-1])
    with refused("--tokenizer", str(other)):
        inspect(folder, str(other))


@pytest.mark.parametrize("span", [1, 7, 1 << 20])
def test_samples_are_the_first_the_middle_and_the_last_document(tmp_path, monkeypatch, span):
    monkeypatch.setattr(module, "SPAN", span)
    texts = ["first", "x" * 50, "middle " + "y" * 1000, "z" * 50, "last"]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    (tmp_path / "held_out.jsonl").write_text('{"text": "held out"}\n')
    folder = prepared(
        tmp_path / "out", tmp_path / "a.jsonl", "--validation", tmp_path / "held_out.jsonl"
    )
    train, validation = (
        Tokens(folder, read_manifest(folder), split) for split in ("train", "validation")
    )
    begins = [line.partition(": <|begin_of_text|>")[2][:5] for line in samples(train, TOKENIZER)]
    assert begins == ["first", "middl", "last<"]
    assert len(samples(validation, TOKENIZER)) == 1


def test_an_empty_split_has_no_samples(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n')
    folder = prepared(tmp_path / "out", tmp_path / "a.jsonl")
    found = [
        samples(Tokens(folder, read_manifest(folder), split), TOKENIZER)
        for split in ("train", "validation")
    ]
    assert sorted(map(len, found)) == [0, 1]


@pytest.mark.parametrize("names", [["a.txt"], ["a.txt", "manifest.json"]])
def test_texts_are_not_to_be_deleted(tmp_path, names):
    for name in names:
        (tmp_path / name).write_text("{}")
    with pytest.raises(ConfigError) as caught:
        inspect(tmp_path, "")
    assert "not a prepared folder" in str(caught.value)
    assert "delete" not in str(caught.value)
