"""The prepared data of a run, and its manifest: whatever is edited in it, it is refused."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from fuzz_samples import Reader, prepare_data, read_data_with
from messages import refused

from titanlite.config.schema import DataConfig, SourceConfig
from titanlite.data.prepared import PreparedData, is_prepared, open_prepared
from titanlite.data.prepared_manifest import read_manifest
from titanlite.data.verification import RECORD
from titanlite.runtime.errors import LAUNCHED, ConfigError
from titanlite.tokenizer.tokenizer import Tokenizer
from titanlite.tools.prepare.cache import prepare
from train import prepared_folders

ROOT = Path(__file__).parents[2]


def test_a_process_of_the_launcher_looks_for_no_text(tmp_path, monkeypatch):
    folders = [tmp_path / "a:b", tmp_path / "c"]
    monkeypatch.setenv(LAUNCHED, json.dumps([str(folder) for folder in folders]))
    section = DataConfig(path=str(tmp_path / "there is no such text"))
    assert prepared_folders(section, Tokenizer()) == folders


def test_without_the_launcher_each_source_is_found(tmp_path, monkeypatch):
    monkeypatch.delenv(LAUNCHED, raising=False)
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text(f"{name}\n" * 100)
    cache, paths = str(tmp_path / "cache"), [str(tmp_path / name) for name in ("a.txt", "b.txt")]
    folders = [prepare(DataConfig(path=path, cache=cache), Tokenizer(), print) for path in paths]
    assert prepared_folders(DataConfig(path=paths[0], cache=cache), Tokenizer()) == folders[:1]
    sources = tuple(SourceConfig(path) for path in paths)
    assert prepared_folders(DataConfig(sources=sources, cache=cache), Tokenizer()) == folders


WITHOUT_TOOLS = """
import sys

sys.modules["titanlite.tools"] = None  # every import of it fails, as if the folder were deleted

from titanlite.config.schema import Config, DataConfig, SourceConfig
from titanlite.data.prepared import load_sources
from titanlite.tokenizer.tokenizer import Tokenizer
from train import prepared_folders

paths = sys.argv[1:]
for section in (DataConfig(path=paths[0]), DataConfig(sources=tuple(map(SourceConfig, paths)))):
    folders = prepared_folders(section, Tokenizer())
    assert [str(folder) for folder in folders] == paths[: len(folders)]
    data = load_sources(section, folders, Tokenizer())
    assert all(len(part.tokens("train")) for part in data)
"""


@pytest.mark.slow
def test_prepared_folders_are_opened_and_verified_without_tools(tmp_path):
    folders = []
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text(f"{name}\n" * 100)
        section = DataConfig(path=str(tmp_path / name), cache=str(tmp_path / "cache"))
        folders.append(prepare(section, Tokenizer(), print))
    command = [sys.executable, "-c", WITHOUT_TOOLS, *map(str, folders)]
    for folder in folders:
        (folder / RECORD).unlink()
    subprocess.run(command, cwd=ROOT, check=True)
    assert all((folder / RECORD).exists() for folder in folders)

    (shard,) = folders[0].glob("train-*[0-9].bin")
    shard.write_bytes(bytes(shard.stat().st_size))
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert f"{shard}: its SHA-256 has changed" in result.stderr


def test_a_source_of_text_is_no_prepared_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert open_prepared(DataConfig(path="hf:name")) is None
    (tmp_path / "manifest.json").write_text("{}")
    assert not is_prepared(tmp_path)
    (tmp_path / "train-00000.bin").write_bytes(b"")
    assert is_prepared(tmp_path)
    assert open_prepared(DataConfig()) is None  # the standard library, not the current folder


@pytest.mark.parametrize(
    ("name", "value"),
    [("pattern", "*.txt"), ("field", "content"), ("ids", "uint16"), ("validation", "held")],
)
def test_settings_of_text_are_refused(folder, name, value):
    source = SourceConfig(path=str(folder), name="mine", **{name: value})
    with refused(f"data.sources: mine: {name} = {value!r}", str(folder)):
        open_prepared(DataConfig(sources=(source,)))


def test_data_of_another_tokenizer_is_refused(folder):
    manifest = folder / "manifest.json"
    manifest.write_text(manifest.read_text().replace(Tokenizer().sha256, "0" * 64))
    with refused(str(folder), "00000000", Tokenizer().sha256[:8], "data.tokenizer"):
        PreparedData(folder, Tokenizer())


TOKENIZER = Tokenizer()


def quiet(message: str) -> None:
    pass


def edits(manifest: dict) -> dict[str, Callable[[], object]]:
    """Changes of a manifest after which it must be refused."""
    split, shard = manifest["splits"]["train"], manifest["splits"]["train"]["shards"][0]
    return {
        "no splits": lambda: manifest.pop("splits"),
        "no validation": lambda: manifest["splits"].pop("validation"),
        "splits a list": lambda: manifest.update(splits=[]),
        "shards a text": lambda: split.update(shards="train-00000.bin"),
        "a shard elsewhere": lambda: shard.update(file="../train-00000.bin"),
        "starts elsewhere": lambda: shard["starts"].update(file="/etc/passwd"),
        "starts in the file of the ids": lambda: shard["starts"].update(file=shard["file"]),
        "no starts": lambda: shard.pop("starts"),
        "a mask without a file": lambda: shard.update(mask={"sha256": "0" * 64}),
        "other documents": lambda: shard.update(documents=2),
        "a shard of no name": lambda: shard.update(file=None),
        "other tokens": lambda: shard.update(tokens=shard["tokens"] - 1),
        "tokens below 0": lambda: (shard.update(tokens=-1), split.update(tokens=-1)),
        "tokens no integer": lambda: (shard.update(tokens=1.0), split.update(tokens=1.0)),
        "tokens beyond 64 bits": lambda: (shard.update(tokens=10**40), split.update(tokens=10**40)),
        "no hash": lambda: shard.update(sha256=""),
        "another format": lambda: manifest.update(format=99),
        "another dtype": lambda: manifest.update(dtype="<u4"),
        "no dtype": lambda: manifest.update(dtype="object"),
        "a name that moves the cursor": lambda: manifest.update(name="\x1b[2J"),
        "no rows": lambda: manifest.pop("rows"),
        "rows a number": lambda: manifest.update(rows=5),
        "bad rows a text": lambda: manifest["rows"].update(bad="none"),
        "an example that is not a text": lambda: manifest["rows"].update(examples=[5]),
        "duplicates a text": lambda: manifest.update(duplicates="5"),
        "no duplicates": lambda: manifest.pop("duplicates"),
        "no roots": lambda: manifest.pop("roots"),
        "roots a text": lambda: manifest.update(roots="/data"),
        "a root that is not a text": lambda: manifest.update(roots=[None]),
        "a tokenizer without a file": lambda: manifest["tokenizer"].pop("file"),
        "no tokenizer": lambda: manifest.update(tokenizer=None),
    }


EDITS = list(edits({"splits": {"train": {"shards": [{"tokens": 0}]}}}))


@pytest.mark.parametrize("edit", EDITS)
def test_an_edited_manifest_is_refused(section, folder, edit):
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    edits(manifest)[edit]()
    path.write_text(json.dumps(manifest))
    with refused(str(folder), "delete the folder"):
        prepare(section, TOKENIZER, quiet)


@pytest.mark.parametrize("text", ["{", "[" * 100_000, "5", "\udcff", ""])
def test_what_is_no_manifest_is_refused(section, folder, text):
    (folder / "manifest.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    with refused("manifest.json", "delete the folder"):
        prepare(section, TOKENIZER, quiet)


def test_a_folder_that_was_not_prepared_is_not_to_be_deleted(tmp_path):
    (tmp_path / "a.txt").write_text("the only copy of a text")
    for folder in (tmp_path, tmp_path / "a.txt", tmp_path / "absent"):
        with pytest.raises(ConfigError) as caught:
            read_manifest(folder)
        assert "not a prepared folder" in str(caught.value)
        assert "delete" not in str(caught.value)


def test_a_manifest_that_cannot_be_read_is_not_to_be_deleted(tmp_path):
    # Unlike a mode without permissions, it cannot be read by root either
    (tmp_path / "manifest.json").mkdir()
    with pytest.raises(ConfigError) as caught:
        read_manifest(tmp_path)
    assert "manifest.json: " in str(caught.value)
    assert "delete" not in str(caught.value)


FUZZED = {
    "prepared manifest": Reader(
        "text", prepare_data, functools.partial(read_data_with, "manifest.json")
    ),
}
