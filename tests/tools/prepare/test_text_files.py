"""Text files, compressed ones too: every byte once, in blocks and pieces that end between characters,
in little memory, or an error.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import tracemalloc
from pathlib import Path

import pytest
import zstandard
from fuzz_samples import TEXT, Reader, given, json_lines, of_source, read_source
from messages import refused

from titanlite.runtime.errors import ConfigError
from titanlite.tools.prepare import compressed, documents, plan_job, text_files
from titanlite.tools.prepare.compressed import damaged, open_file
from titanlite.tools.prepare.documents import BadRow, Document
from titanlite.tools.prepare.job import File, Piece
from titanlite.tools.prepare.sources import Source, find
from titanlite.tools.prepare.text_files import read_texts, text_documents

LINES = "".join(f"line {i} 한국어 {'x' * (i % 50)}\n" for i in range(3000))
LONG = "가나다" * 5000
DATA = b"".join(b"line %d\n" % i for i in range(50_000))
COMPRESS = {"gzip": gzip.compress, "zstd": zstandard.compress}


def file_of(path: Path, split: str, compression: str = "") -> File:
    return File(str(path), path.name, path.stat().st_size, "", "text", compression, split)


def read(file: File, cuts: list[int]) -> list[Document]:
    """The documents of all pieces between these places, their text joined."""
    found = []
    for begin, end in zip([0, *cuts], [*cuts, file.size], strict=True):
        for document in text_documents(Piece(file, begin, end), joined=False):
            found.append(document._replace(blocks=["".join(document.blocks)]))
    return found


@pytest.mark.parametrize("text", [LINES, LONG])
@pytest.mark.parametrize("split", ["train", "validation", "tail"])
def test_pieces_are_the_whole(tmp_path, monkeypatch, text, split):
    # Many blocks, each of which splits three-byte characters
    monkeypatch.setattr(text_files, "BLOCK", 1000)
    path = tmp_path / "a.txt"
    path.write_text(text)
    size = path.stat().st_size
    whole = read(file_of(path, split), [])
    assert "".join(document.blocks[0] for document in whole) == text
    assert len(whole) == 1 + (split == "tail")
    for cuts in ([size // 2], [1, 2, 3], [size * i // 7 for i in range(1, 7)], [size - 1]):
        pieces = read(file_of(path, split), cuts)
        assert (
            [d.begins for d in pieces].count(True)
            == [d.ends for d in pieces].count(True)
            == len(whole)
        )
        for kind in ("train", "validation"):
            joined = [
                "".join(d.blocks[0] for d in found if d.split == kind) for found in (pieces, whole)
            ]
            assert joined[0] == joined[1]


@pytest.mark.parametrize("name", COMPRESS)
def test_compressed_text_is_the_same(tmp_path, name):
    data, path = LINES.encode(), tmp_path / "a"
    path.write_bytes(COMPRESS[name](data))
    plain = tmp_path / "b"
    plain.write_bytes(data)
    found, expected = (read(file_of(p, "tail", c), []) for p, c in ((path, name), (plain, "")))
    assert [d.blocks for d in found] == [d.blocks for d in expected]


@pytest.mark.parametrize("name", COMPRESS)
def test_text_that_expands_too_far_is_refused(tmp_path, monkeypatch, name):
    monkeypatch.setattr(compressed, "FREE", 1 << 20)
    path = tmp_path / "a"
    path.write_bytes(COMPRESS[name](b"\n" * (1 << 25)))
    with refused(str(path), "expands to more than", "unpack it"):
        read(file_of(path, "tail", name), [])


@pytest.mark.parametrize("split", ["train", "validation", "tail"])
@pytest.mark.parametrize("compression", ["", "gzip"])
def test_a_byte_order_mark_is_removed_at_the_start_only(tmp_path, split, compression):
    path, text = tmp_path / "a", "one\n\ufefftwo\n" + "three\n" * 40
    data = f"\ufeff{text}".encode()
    path.write_bytes(gzip.compress(data) if compression else data)
    file = file_of(path, split, compression)
    for cuts in ([], [1], [2, 3], [4], [7]) if not compression else ([],):
        found = read(file, cuts)
        assert "".join(document.blocks[0] for document in found) == text
        assert (
            [d.begins for d in found].count(True)
            == [d.ends for d in found].count(True)
            == 1 + (split == "tail")
        )
    assert "".join(read_texts([file])) == text
    path.write_bytes(data[:3])
    assert read(file_of(path, split), []) == []


@pytest.mark.parametrize(
    ("content", "problem"), [(b"good\n" * 200_000 + b"\xff", "UTF-8"), (b"a\0b", "NUL")]
)
def test_a_file_that_is_not_text_is_a_bad_row(tmp_path, content, problem):
    path = tmp_path / "a"
    path.write_bytes(content)
    file = file_of(path, "train")
    (found,) = text_documents(Piece(file, 0, file.size), joined=False)
    assert isinstance(found, BadRow)
    assert problem in found.problem
    # a large one that is cut: another part may be written already
    with refused(str(path), problem):
        read(file, [1])


def test_a_document_that_must_be_in_memory_has_a_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(text_files, "MAX_DOCUMENT", 100)
    assert documents.MAX_DOCUMENT > 100
    path = tmp_path / "a"
    path.write_text("word " * 21)
    file = file_of(path, "train")
    (found,) = text_documents(Piece(file, 0, file.size), joined=True)
    assert "105 bytes" in found.problem
    (found,) = text_documents(Piece(file, 0, file.size), joined=False)
    assert "".join(found.blocks) == "word " * 21


@pytest.mark.parametrize("name", COMPRESS)
def test_frames_follow_each_other(tmp_path, name):
    (tmp_path / "a").write_bytes(COMPRESS[name](DATA) + COMPRESS[name](b"more"))
    with open_file(tmp_path / "a", name) as file:
        assert file.read() == DATA + b"more"


@pytest.mark.parametrize("name", COMPRESS)
@pytest.mark.parametrize(
    "change", [lambda d: d[:-9], lambda d: d[:30] + b"zzzz" + d[34:], lambda d: d + b"garbage"]
)
def test_damage_is_an_error(tmp_path, name, change):
    (tmp_path / "a").write_bytes(change(COMPRESS[name](DATA)))
    with pytest.raises(damaged()), open_file(tmp_path / "a", name) as file:
        while file.read(10_000):
            pass


@pytest.mark.parametrize("name", COMPRESS)
def test_what_expands_is_read_in_little_memory(tmp_path, name):
    (tmp_path / "a").write_bytes(COMPRESS[name](bytes(1 << 27)))
    tracemalloc.start()
    with open_file(tmp_path / "a", name) as file:
        assert (
            sum(len(block) for block in iter(lambda: file.read(io.DEFAULT_BUFFER_SIZE), b""))
            == 1 << 27
        )
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 26


@pytest.mark.parametrize("name", COMPRESS)
def test_a_file_may_not_expand_further_than_its_size_allows(tmp_path, monkeypatch, name):
    monkeypatch.setattr(compressed, "FREE", 1 << 20)
    path = tmp_path / "a"
    path.write_bytes(COMPRESS[name](bytes(1 << 26)))
    assert path.stat().st_size * 200 < 1 << 25
    with (
        open_file(path, name) as file,
        pytest.raises(compressed.ExpandsTooFar, match="expands to more than"),
    ):
        while file.read(100_000):
            pass
    path.write_bytes(COMPRESS[name](DATA))
    monkeypatch.setattr(compressed, "FREE", 0)
    with open_file(path, name) as file:
        assert file.read() == DATA


def read_text(folder: Path, data: bytes) -> None:
    (folder / "text").write_bytes(data)
    source = Source(str(folder / "text"))
    with contextlib.suppress(ConfigError):
        sum(map(len, read_texts(plan_job.text_files(source, find(source)))))
    read_source("text", folder, data)


ROWS = json_lines([{"text": f"row {i} é"} for i in range(30)])
FUZZED = {
    "text": Reader("bytes", given(TEXT.encode(), "é😀\r\n".encode() * 9), read_text),
    "gzip": of_source("bytes", "rows.jsonl.gz", gzip.compress(ROWS)),
    "gzip text": of_source("bytes", "text.gz", gzip.compress(TEXT.encode())),
    "zstd": of_source("bytes", "rows.jsonl.zst", zstandard.compress(ROWS)),
    "zstd text": of_source("bytes", "text.zst", zstandard.compress(TEXT.encode())),
}
