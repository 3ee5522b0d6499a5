"""The prepared data of a run: from the launcher, or else found by the process itself."""

from __future__ import annotations

import json

from messages import refused

from titanlite.config.schema import DataConfig, SourceConfig
from titanlite.data.prepared import PreparedData
from titanlite.data.tokenizer import Tokenizer
from titanlite.runtime.errors import LAUNCHED
from titanlite.tools.prepare.cache import prepare
from train import prepared_folders


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


def test_data_of_another_tokenizer_is_refused(folder):
    manifest = folder / "manifest.json"
    manifest.write_text(manifest.read_text().replace(Tokenizer().sha256, "0" * 64))
    with refused(str(folder), "00000000", Tokenizer().sha256[:8], "data.tokenizer"):
        PreparedData(folder, Tokenizer())
