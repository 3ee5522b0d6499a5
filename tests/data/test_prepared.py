"""The prepared data of a run: from the launcher, or else found by the process itself."""

from __future__ import annotations

from titanlite.config.schema import LAUNCHED, DataConfig
from titanlite.data.prepare import prepare
from titanlite.data.prepared import prepared_folder
from titanlite.data.tokenizer import Tokenizer


def test_a_process_of_the_launcher_looks_for_no_text(tmp_path, monkeypatch):
    monkeypatch.setenv(LAUNCHED, str(tmp_path / "prepared"))
    section = DataConfig(path=str(tmp_path / "there is no such text"))
    assert prepared_folder(section, Tokenizer(), print) == tmp_path / "prepared"


def test_without_the_launcher_the_text_is_found(tmp_path, monkeypatch):
    monkeypatch.delenv(LAUNCHED, raising=False)
    (tmp_path / "a.txt").write_text("one\n" * 100)
    section = DataConfig(path=str(tmp_path / "a.txt"), cache=str(tmp_path / "cache"))
    assert prepared_folder(section, Tokenizer(), print) == prepare(section, Tokenizer(), print)
