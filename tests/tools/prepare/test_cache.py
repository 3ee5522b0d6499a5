"""Text -> shards: nothing lost, held-out text apart, and mistakes named."""

from __future__ import annotations

import errno
import fcntl
import os
import threading

import pytest
from messages import refused
from preparing import TOKENIZER, text_of, write_megatron

from titanlite.config.schema import DataConfig, SourceConfig
from titanlite.data.prepared_manifest import read_manifest
from titanlite.data.shards import Tokens
from titanlite.tools.prepare.cache import find_text, prepare
from titanlite.tools.prepare.shard_writer import ShardWriter


def quiet(message: str) -> None:
    pass


def test_a_single_file_is_cut_at_a_line_near_its_last_twentieth(tmp_path):
    path = tmp_path / "one.txt"
    text = "".join(f"line {i} 한국어\n" for i in range(3000))
    path.write_text(text)
    folder = prepare(DataConfig(path=str(path), cache=str(tmp_path / "cache")), TOKENIZER, quiet)
    train, held_out = (text_of(folder, split) for split in ("train", "validation"))
    train, held_out = (
        t.removeprefix("<|begin_of_text|>").removesuffix("<|end_of_text|>")
        for t in (train, held_out)
    )
    assert train + held_out == text
    assert train.endswith("\n")
    assert len(held_out) == pytest.approx(len(text) / 20, rel=0.02)
    manifest = read_manifest(folder)
    assert manifest["splits"]["train"]["bytes"] == len(train.encode())
    assert manifest["splits"]["validation"]["documents"] == 1


def test_a_folder_holds_out_whole_files_by_the_hash_of_their_path(tmp_path):
    source = tmp_path / "src"
    (source / "deep").mkdir(parents=True)
    for i in range(100):
        (source / ("deep" if i % 2 else ".") / f"{i}.txt").write_text(f"document {i}\n")
    (source / ".hidden").write_text("secret")
    folder = prepare(DataConfig(path=str(source), cache=str(tmp_path / "cache")), TOKENIZER, quiet)
    entry = read_manifest(folder)["splits"]
    assert entry["train"]["documents"] + entry["validation"]["documents"] == 100
    assert 1 <= entry["validation"]["documents"] <= 12
    documents = (text_of(folder, "train") + text_of(folder, "validation")).split(
        "<|begin_of_text|>"
    )[1:]
    assert sorted(documents) == sorted(f"document {i}\n<|end_of_text|>" for i in range(100))
    only = prepare(
        DataConfig(path=str(source), pattern="deep/*.txt", cache=str(tmp_path / "cache")),
        TOKENIZER,
        quiet,
    )
    assert sum(split["documents"] for split in read_manifest(only)["splits"].values()) == 50


def test_prepared_once_and_again_when_the_text_changes(tmp_path):
    path, messages = tmp_path / "one.txt", []
    path.write_text("x = 1\n" * 100)
    section = DataConfig(path=str(path), cache=str(tmp_path / "cache"))
    first = prepare(section, TOKENIZER, messages.append)
    said = len(messages)
    assert prepare(section, TOKENIZER, messages.append) == first
    assert len(messages) == said > 1
    path.write_text("x = 2\n" * 100)
    second = prepare(section, TOKENIZER, messages.append)
    assert read_manifest(first)["fingerprint"] != read_manifest(second)["fingerprint"]


@pytest.mark.parametrize("path", ["ids.bin", "."])
def test_prepared_again_when_an_index_changes_beside_its_ids(tmp_path, path):
    (tmp_path / "text").mkdir()
    ids, folders = tmp_path / "text/ids", []
    section = DataConfig(
        path=str(tmp_path / "text" / path), pattern="*.bin", cache=str(tmp_path / "cache")
    )
    for documents in ([[1, 2, 3], [4]], [[1, 2], [3, 4]], [[1, 2], [3, 4]]):
        write_megatron(ids, documents)
        os.utime(ids.with_suffix(".bin"), ns=(7, 7))
        os.utime(ids.with_suffix(".idx"), ns=(len(documents[0]),) * 2)
        folders.append(prepare(section, TOKENIZER, quiet))
    assert folders[0] != folders[1] == folders[2]
    tokens = [Tokens(folder, read_manifest(folder), "train") for folder in folders]
    starts = [sorted(shards.document_starts(0, len(shards)).tolist()) for shards in tokens]
    assert starts[0] != starts[1]


def test_processes_that_start_together_prepare_once(tmp_path):
    path, messages, folders = tmp_path / "one.txt", [], []
    path.write_text("x = 1\n" * 20_000)
    section = DataConfig(path=str(path), cache=str(tmp_path / "cache"))
    threads = [
        threading.Thread(
            target=lambda: folders.append(prepare(section, TOKENIZER, messages.append))
        )
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(folders)) == 1
    assert sum(message.startswith("prepared") for message in messages) == 1


def test_an_interrupted_preparation_leaves_nothing_that_counts(tmp_path, monkeypatch):
    path = tmp_path / "one.txt"
    path.write_text("x = 1\n" * 100)
    section = DataConfig(path=str(path), cache=str(tmp_path / "cache"))
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(ShardWriter, "finish", lambda self: (_ for _ in ()).throw(KeyboardInterrupt))
        prepare(section, TOKENIZER, quiet)
    assert not list((tmp_path / "cache").iterdir())  # no part was complete
    assert text_of(prepare(section, TOKENIZER, quiet), "train").startswith(
        "<|begin_of_text|>x = 1\n"
    )


def test_a_text_that_vanishes_is_named(tmp_path, monkeypatch):
    path = tmp_path / "one.txt"
    path.write_text("x = 1\n" * 100)
    section = DataConfig(path=str(path), cache=str(tmp_path / "cache"))
    found = find_text(section)
    path.unlink()
    with refused(str(path), "No such file"):
        prepare(section, TOKENIZER, quiet, found)


@pytest.mark.parametrize("pattern", ["", "/abs/*"])
def test_bad_patterns_are_named(tmp_path, pattern):
    with refused("data.pattern = ", repr(pattern)):
        prepare(
            DataConfig(path=str(tmp_path), pattern=pattern, cache=str(tmp_path / "cache")),
            TOKENIZER,
            quiet,
        )


def test_a_name_that_is_no_utf8_is_no_obstacle(tmp_path):
    source = tmp_path / "src"
    source.mkdir()
    (source / "\udcff.txt").write_text("x = 1\n" * 100)
    folder = prepare(DataConfig(path=str(source), cache=str(tmp_path / "cache")), TOKENIZER, quiet)
    assert text_of(folder, "train").startswith("<|begin_of_text|>x = 1\n")


def test_the_launcher_looks_for_text_once(tmp_path, monkeypatch):
    (tmp_path / "text").mkdir()
    (tmp_path / "text/a.txt").write_text("one\n" * 100)
    section = DataConfig(path=str(tmp_path / "text"), cache=str(tmp_path / "cache"))
    found, looked = find_text(section), []
    monkeypatch.setattr("titanlite.tools.prepare.cache.find", looked.append)
    assert prepare(section, TOKENIZER, quiet, found).is_dir()
    assert not looked


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK])
def test_a_file_system_without_locks_is_no_obstacle(tmp_path, monkeypatch, number):
    def refuse(file, operation):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    (tmp_path / "a.txt").write_text("one\n" * 100)
    assert prepare(
        DataConfig(path=str(tmp_path / "a.txt"), cache=str(tmp_path / "cache")), TOKENIZER, quiet
    ).is_dir()


def test_settings_without_effect_on_a_prepared_folder_are_refused(tmp_path):
    (tmp_path / "a.txt").write_text("one\n" * 100)
    folder = prepare(
        DataConfig(path=str(tmp_path / "a.txt"), cache=str(tmp_path / "cache")), TOKENIZER, quiet
    )
    section = DataConfig(sources=(SourceConfig(path=str(folder), name="mine", ids="uint16"),))
    with refused("mine: ids", "'uint16'", str(folder)):
        find_text(section)


def test_validation_files_that_the_pattern_of_training_does_not_match(tmp_path):
    for name, text in {"train/a.txt": "one\n", "held/b.md": "two\n"}.items():
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(text)
    source = SourceConfig(
        path=str(tmp_path / "train"), pattern="*.txt", validation=str(tmp_path / "held")
    )
    section = DataConfig(sources=(source,), cache=str(tmp_path / "cache"))
    first = prepare(section, TOKENIZER, quiet)
    assert text_of(first, "validation") == "<|begin_of_text|>two\n<|end_of_text|>"
    (tmp_path / "held/b.md").write_text("other\n")
    assert prepare(section, TOKENIZER, quiet) != first
