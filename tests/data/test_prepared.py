"""The prepared data of a run: from the launcher, or else found by the process itself."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from messages import refused

from titanlite.config.schema import DataConfig, SourceConfig
from titanlite.data.prepared import PreparedData, is_prepared, open_prepared
from titanlite.data.verification import RECORD
from titanlite.runtime.errors import LAUNCHED
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


def test_pairs_of_answers_of_an_earlier_version_are_refused(folder):
    manifest = folder / "manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"pairs": True}))
    with refused(str(folder), "pairs of answers", "TRL"):
        PreparedData(folder, Tokenizer())
