"""Token files of datatrove: each document once, whatever encloses it, and one error for each damage."""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
import pytest
from fuzz_samples import Reader, build_data
from messages import refused
from preparing import TOKENIZER, write_datatrove

from titanlite.tools.prepare import datatrove_files
from titanlite.tools.prepare.datatrove_files import datatrove_documents
from titanlite.tools.prepare.job import File
from titanlite.tools.prepare.sources import Source

BOS, EOS = TOKENIZER.bos, TOKENIZER.eos
RANDOM = np.random.default_rng(0)
DOCUMENTS = [RANDOM.integers(0, 4000, size).tolist() for size in RANDOM.integers(1, 60, 300)]
# What datatrove writes around a document: nothing, with `eos_token=`, and by a post-processor
ENCLOSURES = {"nothing": ([], []), "eos": ([], [EOS]), "bos": ([BOS], []), "both": ([BOS], [EOS])}


def file_of(path: Path) -> File:
    return File(str(path), path.name, path.stat().st_size, "", "datatrove", "", "hash")


def read(path: Path) -> list[list[int]]:
    documents = list(datatrove_documents(file_of(path), TOKENIZER))
    assert all(document.enclosed for document in documents)
    contents = [np.concatenate(list(document.ids)).tolist() for document in documents]
    assert [document.length for document in documents] == list(map(len, contents))
    return contents


@pytest.mark.parametrize("dtype", ["<u2", "<u4"])
@pytest.mark.parametrize("metadata", [False, True])
@pytest.mark.parametrize("enclosure", ENCLOSURES)
def test_documents_are_those_of_the_index(tmp_path, monkeypatch, dtype, metadata, enclosure):
    monkeypatch.setattr(datatrove_files, "DOCUMENTS", 7)
    before, after = ENCLOSURES[enclosure]
    path = tmp_path / "a.ds"
    write_datatrove(path, [[*before, *ids, *after] for ids in DOCUMENTS], dtype, metadata)
    assert read(path) == DOCUMENTS


def test_ids_within_a_document_stay(tmp_path):
    """A text may contain the names of special tokens, which datatrove's tokenizers find there."""
    path = tmp_path / "a.ds"
    write_datatrove(path, [[1, EOS, 2, BOS, 3], [BOS, EOS, 4, BOS, EOS], [EOS], [BOS, EOS], []])
    assert read(path) == [[1, EOS, 2, BOS, 3], [EOS, 4, BOS]]


def test_a_document_is_longer_than_a_block(tmp_path, monkeypatch):
    monkeypatch.setattr(datatrove_files, "BLOCK", 10)
    path = tmp_path / "a.ds"
    write_datatrove(path, [[BOS, *range(1, 35), EOS], [BOS, *range(1, 10), EOS], [BOS] * 8])
    assert read(path) == [list(range(1, 35)), list(range(1, 10))]


def test_without_a_document(tmp_path):
    write_datatrove(tmp_path / "a.ds", [[], [EOS]])
    assert read(tmp_path / "a.ds") == []


def edit(path: Path, at: int, dtype: str, value: int) -> None:
    data = bytearray(path.read_bytes())
    new = np.array([value], dtype).tobytes()
    data[at : at + len(new)] = new
    path.write_bytes(bytes(data))


def cut(path: Path, count: int) -> None:
    path.write_bytes(path.read_bytes()[:-count])


# (what is done to the folder of a.ds, the words of the error); each document has three ids of 5
DAMAGE = {
    "no index": (lambda f: (f / "a.ds.index").unlink(), "without a.ds.index"),
    "an empty index": (lambda f: (f / "a.ds.index").write_bytes(b""), "ends after 0 ids"),
    "an index that is cut within an end": (lambda f: cut(f / "a.ds.index", 3), "77 bytes, not a"),
    "an index that is cut": (lambda f: cut(f / "a.ds.index", 8), "60 bytes, but a.ds.index ends"),
    "an index that is not sorted": (
        lambda f: edit(f / "a.ds.index", 8, "<u8", 1),
        "document 1 ends after 1 ids, at byte 8; expected 3 to 30",
    ),
    "an end beyond the file": (
        lambda f: edit(f / "a.ds.index", 16, "<u8", 31),
        "document 2 ends after 31 ids, at byte 16; expected 6 to 30",
    ),
    "a last end beyond the file": (
        lambda f: edit(f / "a.ds.index", 72, "<u8", 1 << 62),
        f"60 bytes, but a.ds.index ends after {1 << 62} ids",
    ),
    "an odd size": (lambda f: cut(f / "a.ds", 1), "59 bytes, but a.ds.index ends after 30 ids"),
    "ids that are cut": (lambda f: cut(f / "a.ds", 2), "expected 60 or 120 bytes"),
    "an id beyond the vocabulary": (
        lambda f: edit(f / "a.ds", 8, "<u2", 5000),
        "id 5000 at byte 8, read as uint16; expected ids below 4112",
    ),
    "the same, by its metadata": (
        lambda f: edit(f / "a.ds", 8, "<u2", 5000),
        "its metadata names a tokenizer",
    ),
    "metadata of another width": (
        lambda f: (f / "a.ds.metadata").write_text("gpt2|4\n30\n30 T"),
        "a.ds.metadata: says 30 ids of 4 bytes, but the file has 30 of 2",
    ),
    "metadata of another length": (
        lambda f: (f / "a.ds.metadata").write_text("gpt2|2\n31\n31 T"),
        "a.ds.metadata: says 31 ids",
    ),
    "metadata without a number": (
        lambda f: (f / "a.ds.metadata").write_text("gpt2\n"),
        "a.ds.metadata: expected NAME|BYTES",
    ),
    "metadata that is not text": (
        lambda f: (f / "a.ds.metadata").write_bytes(b"\xff|2\n30\n"),
        "a.ds.metadata: expected NAME|BYTES",
    ),
    "metadata that is a folder": (
        lambda f: ((f / "a.ds.metadata").unlink(), (f / "a.ds.metadata").mkdir()),
        "a.ds.metadata: ",
    ),
    "a loss mask": (
        lambda f: (f / "a.ds.loss").write_bytes(b"\1" * 30),
        "a.ds.loss: a loss mask of datatrove, which is not read",
    ),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_damage_is_one_error(tmp_path, what):
    write_datatrove(tmp_path / "a.ds", [[5, 5, 5]] * 10)
    assert len(read(tmp_path / "a.ds")) == 10
    damage, problem = DAMAGE[what]
    damage(tmp_path)
    with refused(str(tmp_path / "a.ds"), problem):
        read(tmp_path / "a.ds")


def test_a_name_of_a_tokenizer_may_contain_the_separator(tmp_path):
    """Without a name, datatrove writes `Unknown Tokenizer|2|2`."""
    write_datatrove(tmp_path / "a.ds", [[5, 5000]])
    (tmp_path / "a.ds.metadata").write_text("Unknown Tokenizer|2|2\n2\n2 T")
    with refused("a.ds: id 5000", "names Unknown Tokenizer|2)?"):
        read(tmp_path / "a.ds")


# datatrove itself


@pytest.fixture
def texts() -> list[str]:
    return [f"document {i} of the corpus\n" * (1 + i % 5) for i in range(40)]


def written(folder: Path, texts: list[str], **options) -> list[list[int]]:
    """The documents of all files that datatrove's DocumentTokenizer makes of these texts."""
    data = pytest.importorskip("datatrove.data")
    tokens = pytest.importorskip("datatrove.pipeline.tokens")
    from titanlite.tools.formats.huggingface_tokenizer import to_files

    (folder / "tokenizer.json").write_bytes(to_files(TOKENIZER, 0)["tokenizer.json"])
    step = tokens.DocumentTokenizer(
        str(folder / "tokens"), str(folder / "tokenizer.json"), seed=1, **options
    )
    step.run(data.Document(text=text, id=str(i)) for i, text in enumerate(texts))
    return [ids for path in sorted((folder / "tokens").glob("*.ds")) for ids in read(path)]


@pytest.mark.parametrize("eos", [None, "<|end_of_text|>"])
@pytest.mark.parametrize("metadata", [False, True])
def test_files_of_datatrove(tmp_path, texts, eos, metadata):
    options = {"eos_token": eos, "save_final_metadata": metadata, "shuffle_documents": False}
    expected = [TOKENIZER.encode(text) for text in texts]
    assert written(tmp_path, texts, **options) == expected
    ids = np.fromfile(tmp_path / "tokens/00000_unshuffled.ds", "<u2")
    # The trap: with `eos_token=`, the bos that the tokenizer adds is not there
    assert ids[0] == (TOKENIZER.bos if eos is None else expected[0][0])


def test_shuffled_and_merged_files_of_datatrove(tmp_path, texts):
    expected = sorted(TOKENIZER.encode(text) for text in texts)
    found = written(tmp_path, texts, eos_token="<|end_of_text|>", max_tokens_per_file=300)
    assert len(list((tmp_path / "tokens").glob("*.ds"))) > 1
    assert found != expected
    assert sorted(found) == expected
    from datatrove.pipeline.tokens import DocumentTokenizerMerger

    merger = DocumentTokenizerMerger(
        str(tmp_path / "tokens"), str(tmp_path / "merged"), "all", seed=2, progress=False
    )
    merger.run()
    assert sorted(read(tmp_path / "merged/000_all.ds")) == expected
    assert (tmp_path / "merged/all.ds.metadata").exists()  # which belongs to no file


def test_wide_ids_of_datatrove(tmp_path):
    tokenizer = pytest.importorskip("datatrove.pipeline.tokens.tokenizer")
    file = tokenizer.TokenizedFile(str(tmp_path), "a.ds", save_final_metadata=True, token_size=4)
    for ids in DOCUMENTS:
        file.write([*ids, EOS], None)
    file.close()
    assert (tmp_path / "a.ds").stat().st_size == 4 * sum(len(ids) + 1 for ids in DOCUMENTS)
    assert read(tmp_path / "a.ds") == DOCUMENTS


def three_files(folder: Path, name: str, dtype: str) -> list[bytes]:
    """Writes ids and what datatrove's tokenizers may add; returns the file `name`."""
    write_datatrove(folder / "ids.ds", [[1, 2, 3], [270, 4, 5, 271], [6] * 20, [], [7, 271]], dtype)
    return [(folder / name).read_bytes()]


def read_ids_with(name: str, folder: Path, data: bytes) -> None:
    """Prepares the file of ids with other bytes in one of its files."""
    (folder / name).write_bytes(data)
    build_data(Source(str(folder / "ids.ds")), folder / "made")


def one_of_three(kind: str, name: str, dtype: str = "<u2") -> Reader:
    prepare = functools.partial(three_files, name=name, dtype=dtype)
    return Reader(kind, prepare, functools.partial(read_ids_with, name))


FUZZED = {
    "datatrove ids": one_of_three("bytes", "ids.ds"),
    "datatrove ids, 32 bits": one_of_three("bytes", "ids.ds", "<u4"),
    "datatrove index": one_of_three("bytes", "ids.ds.index"),
    "datatrove metadata": one_of_three("text", "ids.ds.metadata"),
}
