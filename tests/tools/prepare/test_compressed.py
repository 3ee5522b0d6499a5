"""Compressed files: all of their bytes, in little memory, or an error."""

from __future__ import annotations

import gzip
import io
import tracemalloc

import pytest
import zstandard
from fuzz_samples import TEXT, json_lines, of_source

from titanlite.tools.prepare import compressed
from titanlite.tools.prepare.compressed import damaged, open_file

DATA = b"".join(b"line %d\n" % i for i in range(50_000))
COMPRESS = {"gzip": gzip.compress, "zstd": lambda data: zstandard.ZstdCompressor().compress(data)}


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


ROWS = json_lines([{"text": f"row {i} é"} for i in range(30)])
FUZZED = {
    "gzip": of_source("bytes", "rows.jsonl.gz", gzip.compress(ROWS)),
    "gzip text": of_source("bytes", "text.gz", gzip.compress(TEXT.encode())),
    "zstd": of_source("bytes", "rows.jsonl.zst", zstandard.compress(ROWS)),
    "zstd text": of_source("bytes", "text.zst", zstandard.compress(TEXT.encode())),
}
