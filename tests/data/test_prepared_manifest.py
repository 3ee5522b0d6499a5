"""The manifest of prepared data: whatever is edited in it, it is refused."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable

import pytest
from fuzz_samples import Reader, prepare_data, read_data_with
from messages import refused

from titanlite.data.prepared_manifest import read_manifest
from titanlite.runtime.errors import ConfigError
from titanlite.tokenizer.tokenizer import Tokenizer
from titanlite.tools.prepare.cache import prepare

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
        "no roots": lambda: manifest.pop("roots"),
        "roots a text": lambda: manifest.update(roots="/data"),
        "a root that is not a text": lambda: manifest.update(roots=[None]),
        "a tokenizer without a file": lambda: manifest["tokenizer"].pop("file"),
        "no tokenizer": lambda: manifest.update(tokenizer=None),
    }


def test_the_report_of_a_filter_is_passed_over(section, folder):
    """Earlier versions wrote what their filters had dropped, and no number of duplicates."""
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    del manifest["duplicates"]
    manifest["filters"] = {"documents": 0, "bytes": 0, "rules": {}}
    path.write_text(json.dumps(manifest))
    assert read_manifest(folder) == manifest


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
