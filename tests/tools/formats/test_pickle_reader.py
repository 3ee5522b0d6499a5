"""Files of up to 220 kB that take gigabytes or hours to read: one error each, within the limits of
the reader.
"""

from __future__ import annotations

import collections
import copy
import io
import pickle
import resource
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from titanlite.runtime.errors import ConfigError
from titanlite.tools.formats import pickle_reader
from titanlite.tools.formats.detect_format import open_full_state
from titanlite.tools.formats.pickle_reader import LARGEST, MEMORY, UnreadablePickle, read_pickle


class Strided:
    """Pickles as a tensor over the storage "0", which has 12 numbers."""

    def __init__(self, shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
        self.shape, self.strides = shape, strides

    def __reduce__(self) -> Any:
        arguments = (Storage(), 0, self.shape, self.strides, False, collections.OrderedDict())
        return torch._utils._rebuild_tensor_v2, arguments


class Storage:
    pass


class Pickler(pickle.Pickler):
    def persistent_id(self, value: Any) -> Any:
        return (
            ("storage", torch.FloatStorage, "0", "cpu", 12) if isinstance(value, Storage) else None
        )


def saved(path: Path, tree: Any) -> Path:
    """A file of torch.save with this tree, or this pickle, and a storage of 48 bytes."""
    buffer = io.BytesIO(tree if isinstance(tree, bytes) else b"")
    if not isinstance(tree, bytes):
        Pickler(buffer, protocol=2).dump(tree)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", buffer.getvalue())
        archive.writestr("archive/data/0", bytes(48))
    return path


def grown(start: Any, make: Any, levels: int) -> Any:
    for _ in range(levels):
        start = make(start)
    return start


def overlapping(path: Path) -> Path:
    """An archive whose directory names one storage 300 times."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps({}, protocol=2))
        archive.writestr("archive/data/0", bytes(100_000))
        for i in range(1, 300):
            archive.filelist.append(copy.copy(archive.getinfo("archive/data/0")))
            archive.filelist[-1].filename = f"archive/data/{i}"
    return path


def folder_with(folder: Path, names: int, file: str, placed: str, size: int = 1) -> Path:
    """A stock DCP folder: 1,000 chunks that lie in `file`, and all of them in each of `names`
    tensors.
    """
    chunks = [ChunkStorageMetadata(torch.Size([i]), torch.Size([size])) for i in range(1000)]
    entry = TensorStorageMetadata(TensorProperties(dtype=torch.float32), torch.Size([1000]), chunks)
    places = {MetadataIndex(placed, chunk.offsets): _StorageInfo(file, 0, 4) for chunk in chunks}
    folder.mkdir()
    (folder / ".metadata").write_bytes(
        pickle.dumps(
            Metadata({f"{i}": entry for i in range(names)}, storage_data=places), protocol=4
        )
    )
    return folder


PAIRS = b"".join(b"q%ch%c\x86" % (i, i) for i in range(60))  # each is twice in the next
LATIN1 = b"X\x06\x00\x00\x00latin1\x86R"  # with a text and _codecs.encode on the stack, calls it
HEX = b"X\x03\x00\x00\x00hex\x86R"

BOMBS = {
    "lists in lists": lambda p: saved(p, {"a": grown([], lambda x: [x] * 10, 30)}),
    "dicts in dicts": lambda p: saved(p, {"a": grown({}, lambda x: {"a": x, "b": x}, 60)}),
    "a memo of 4 GB": lambda p: saved(p, b"\x80\x02}r\x00\x00\x00\x10."),
    "numbers that share bytes": lambda p: saved(p, {"a": Strided((2**16, 2**16), (0, 0))}),
    "2^80 numbers": lambda p: saved(p, {"a": Strided((2**40, 2**40), (0, 0))}),
    "beyond 63 bits": lambda p: saved(p, {"a": Strided((2**63,), (0,))}),
    "empty, by 2^122": lambda p: saved(p, {"a": Strided((2**61, 2**61, 0), (1, 1, 1))}),
    "65 dimensions": lambda p: saved(p, {"a": Strided((1,) * 65, (1,) * 65)}),
    "a list of chunks for 3,000 names, one with places": lambda p: folder_with(
        p, 3000, "__0_0.distcp", "0"
    ),
    "a long text a thousand times": lambda p: folder_with(p, 1, "x" * 100_000, "0"),
    "1,300 names with empty chunks only": lambda p: folder_with(
        p, 1300, "__0_0.distcp", "0", size=0
    ),
    "a tensor in dicts in dicts": lambda p: saved(
        p, {"a": grown({"t": Strided((4, 3), (3, 1))}, lambda x: {"a": x, "b": x}, 12)}
    ),
    "300 storages at one place": overlapping,
    "a key that takes years to hash": lambda p: saved(p, b"\x80\x02})" + PAIRS + b"K\x01s."),
    "a key of 100,000 tuples in tuples": lambda p: saved(
        p, b"\x80\x02})" + b"\x85" * 100_000 + b"K\x01s."
    ),
    "bytes doubled 39 times": lambda p: saved(
        p, b"\x80\x02}U\x01a" + b"c_codecs\nencode\n" * 40 + b"U\x01b" + LATIN1 + HEX * 39 + b"s."
    ),
    "an array of 8 GB": lambda p: saved(
        p, b"\x80\x02}U\x01acbuiltins\nbytearray\n\x8a\x05\x00\x00\x00\x00\x02\x85Rs."
    ),
}


@pytest.mark.parametrize("make", BOMBS.values(), ids=BOMBS)
def test_a_bomb_is_one_error(tmp_path, monkeypatch, make):
    monkeypatch.setattr(pickle_reader, "SECONDS", 1)
    path = make(tmp_path / "bomb")
    content = path / ".metadata" if path.is_dir() else path
    assert content.stat().st_size < 1 << 20
    before, own = (
        resource.getrusage(resource.RUSAGE_CHILDREN),
        resource.getrusage(resource.RUSAGE_SELF),
    )
    started = time.process_time()
    with pytest.raises(ConfigError) as caught:
        open_full_state(path)
    assert str(path) in str(caught.value)
    assert len(str(caught.value)) < 1000
    assert time.process_time() - started < 2
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 2
    assert after.ru_maxrss <= max(MEMORY >> 10, before.ru_maxrss)  # kB
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - own.ru_maxrss < 200_000


def test_the_process_has_limits(tmp_path):
    """It cannot open files or start processes, and ends at a limit, whatever its input makes it do."""
    program = (
        "import resource, sys, time; from titanlite.tools.formats import pickle_reader as m;  "
        "m.read_dcp = lambda file: eval(sys.argv[1]); m.main(1)"
    )
    for expression, answer in {
        "open('/etc/passwd').read()": b"Too many open files",
        "__import__('subprocess').run(['true'])": b"Too many open files",
        "len(bytes(m.MEMORY))": b"takes more than",
        "[0 for _ in iter(int, 1)]": b"",
        "sum(1 for _ in range(1000))": b"1000",
    }.items():
        ended = subprocess.run(
            [sys.executable, "-c", program, expression],
            capture_output=True,
            env={"PYTHONPATH": str(Path(pickle_reader.__file__).parents[3])},
            timeout=60,
        )
        assert answer in ended.stdout
        assert bool(ended.returncode) == (answer == b"")


def test_an_index_of_many_chunks_is_read(tmp_path):
    """A valid index of 32,000 chunks, 2.7 MB."""
    folder = tmp_path
    chunks = [ChunkStorageMetadata(torch.Size([i, 0]), torch.Size([1, 8])) for i in range(64)]
    entries, places = {}, {}
    for tensor in range(500):
        name = f"layers.{tensor}.weight"
        entries[name] = TensorStorageMetadata(
            TensorProperties(dtype=torch.bfloat16), torch.Size([64, 8]), chunks
        )
        for chunk in chunks:
            places[MetadataIndex(name, chunk.offsets)] = _StorageInfo("__0_0.distcp", 0, 2000)
    (folder / ".metadata").write_bytes(
        pickle.dumps(Metadata(entries, storage_data=places), protocol=4)
    )
    found = read_pickle(folder / ".metadata")
    assert len(found) == 500
    assert found["layers.7.weight"][:2] == ["torch.bfloat16", [64, 8]]
    assert found["layers.7.weight"][2][63] == [[63, 0], [1, 8], "__0_0.distcp", 0, 2000]


def test_too_large_a_pickle_is_not_read(tmp_path):
    with (tmp_path / "a").open("wb") as file:
        file.truncate(LARGEST + 1)
    with pytest.raises(UnreadablePickle, match=f"more than {LARGEST} bytes"):
        read_pickle(tmp_path / "a")
