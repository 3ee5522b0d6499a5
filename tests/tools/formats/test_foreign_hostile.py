"""Stock DCP folders made to do harm: none runs, writes, hangs or fills the memory; each is one
ConfigError.
"""

from __future__ import annotations

import io
import os
import pickle
import re
import resource
import struct
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from fuzz_samples import of_format
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex

from titanlite.runtime import limited_child
from titanlite.runtime.errors import ConfigError
from titanlite.tools.formats import pickle_reader
from titanlite.tools.formats.detect_format import open_full_state
from titanlite.tools.formats.load_weights import fill
from titanlite.tools.formats.pickle_reader import LARGEST, UnsafeName

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

WATCHED = (
    "pickle.find_class",
    "os.system",
    "os.exec",
    "os.posix_spawn",
    "os.fork",
    "subprocess.Popen",
)
READER = limited_child.command(pickle_reader.main, ())[5]  # the program of the process with limits
events: list[str] | None = None


def watch(event: str, arguments: tuple[Any, ...]) -> None:
    """Notes what could be code of the file's, and each file that is opened for writing."""
    if events is not None:
        writes = event == "open" and set(arguments[1] or "r") & set("wax+")
        # No module that is imported
        executes = event == "exec" and arguments[0].co_filename.startswith("<")
        reader = event == "subprocess.Popen" and READER in arguments[1]
        if (event in WATCHED or writes or executes) and not reader:
            events.append(f"{event} {arguments!r:.100}")


sys.addaudithook(watch)


class Evil:
    """Pickles as a call."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> Any:
        return self.call


CANARY = Path(f"/tmp/titanlite-canary-{os.getpid()}")
TOUCH = f"touch {CANARY}"
PYTHON = f"__import__('os').system({TOUCH!r})"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An honest folder, for each case to spoil. Its reader has a second."""
    monkeypatch.setattr(pickle_reader, "SECONDS", 1)
    tensors = {"a": torch.arange(12.0).reshape(4, 3), "b": torch.ones(5), "note": {"step": 3}}
    dcp.save(tensors, checkpoint_id=tmp_path / "saved", no_dist=True)
    (tmp_path / "secret").write_bytes(b"secret" * 1000)
    CANARY.unlink(missing_ok=True)
    return tmp_path / "saved"


def read_stock(folder: Path, state: dict[str, torch.Tensor]) -> None:
    fill(open_full_state(folder), state)


def memory() -> tuple[int, int]:
    """kB: the most that this process, and one of those that it started and that ended, has had."""
    return tuple(
        resource.getrusage(who).ru_maxrss
        for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    )


def refused(folder: Path, *names: str) -> str:
    """The one error that reading gives, after a look at what else it did."""
    global events
    before, started = memory(), time.monotonic()
    events = []
    try:
        with pytest.raises(ConfigError) as caught:
            read_stock(folder, {name: torch.zeros(4, 3) for name in names or ["a"]})
        noted = events
    finally:
        events = None
    assert not noted
    assert not CANARY.exists()
    assert time.monotonic() - started < 20
    assert memory()[0] - before[0] < 500_000
    # Linux counts a process from the size of its parent
    assert memory()[1] <= max(1 << 20, before[1], memory()[0])
    assert len(caught.value.problems) == 1
    assert str(folder) in str(caught.value)
    assert "Traceback" not in str(caught.value)
    assert len(str(caught.value)) < 1000
    return str(caught.value)


def index(folder: Path) -> Metadata:
    return dcp.FileSystemReader(folder).read_metadata()


def write(folder: Path, value: Any) -> None:
    (folder / ".metadata").write_bytes(
        value if isinstance(value, bytes) else pickle.dumps(value, protocol=4)
    )


CODE = {
    "os.system": (Evil(os.system, TOUCH), "posix.system"),
    "eval": (Evil(eval, PYTHON), "builtins.eval"),
    "exec": (Evil(exec, PYTHON), "builtins.exec"),
    "getattr": (Evil(getattr, "a path", "__class__"), "getattr"),
    "Popen": (Evil(subprocess.Popen, ["touch", str(CANARY)]), "subprocess.Popen"),
    "partial": (partial(os.system, TOUCH), "functools.partial"),
    "torch.load": (Evil(torch.load, "payload.pt"), "torch.serialization.load"),
    "import": (Evil(__import__, "os"), "builtins.__import__"),
    "open": (Evil(open, str(CANARY), "w"), "io.open"),
}


@pytest.mark.parametrize(("value", "name"), CODE.values(), ids=CODE)
@pytest.mark.parametrize("where", ["all", "planner_data", "modules", "key"])
def test_code_in_the_index_is_named_and_not_run(folder, value, name, where):
    metadata = index(folder)
    if where == "planner_data":
        metadata.planner_data = {"a": [("a", value)]}
    elif where == "modules":
        metadata.storage_meta.modules = [value]
    elif where == "key":
        metadata.state_dict_metadata = {value: None}
    write(folder, value if where == "all" else metadata)
    assert name in refused(folder)


def test_stock_dcp_runs_it(folder):
    """The corpus bites: what is refused above is run by `pickle.load`."""
    write(folder, CODE["os.system"][0])
    pickle.loads((folder / ".metadata").read_bytes())
    assert CANARY.exists()
    CANARY.unlink()


META = "torch.distributed.checkpoint.metadata"


def named(module: str, name: str) -> bytes:
    return b"c" + module.encode() + b"\n" + name.encode() + b"\n"


def texts(*words: str) -> bytes:
    return b"".join(b"X" + struct.pack("<I", len(word)) + word.encode() for word in words)


def deep_objects(count: int) -> bytes:
    """Size((Size((Size( ...: first all functions, then the innermost arguments, then the calls."""
    return named("torch", "Size") + b"\x94" + b"h\x00" * count + b")" + b"R\x85" * count + b"R."


HARMFUL = {  # raw programs
    "posix": named("posix", "system") + texts(TOUCH) + b"\x85R.",
    "instance (protocol 0)": b"(S'" + TOUCH.encode() + b"'\nios\nsystem\n.",
    "object (protocol 1)": b"(" + named("os", "system") + texts(TOUCH) + b"o.",
    "extension registry": b"\x82\x01.",
    "persistent id": b"Pos.system\n.",
    "keyword arguments": named(META, "Metadata") + b")}\x92.",
    "attribute of an allowed class": texts("torch", "Size.__new__") + b"\x93)R.",
    "attribute of an allowed module": texts(META, "dataclass") + b"\x93)R.",
    "module that is a path": texts("torch.distributed", "checkpoint.os.system")
    + b"\x93"
    + texts(TOUCH)
    + b"\x85R.",
    "a call of what a call made": named("torch", "Size") + b")R)R.",
    "state of a class": named(META, "Metadata") + b"}" + texts("__reduce__", TOUCH) + b"sb.",
    "state with a class": named(META, "Metadata")
    + b")\x81}"
    + texts("__class__")
    + named("torch", "Size")
    + b"sb.",
    "state with __setstate__": named(META, "Metadata")
    + b")\x81}"
    + texts("__setstate__", TOUCH)
    + b"sb.",
    "items into an object": named(META, "Metadata") + b")\x81" + texts("a", "b") + b"s.",
    "absurd allocation": named("torch", "Size") + b"\x8a\x08" + b"\xff" * 7 + b"\x7f\x85R.",
    "path": named("pathlib", "PosixPath") + texts(str(CANARY)) + b"\x85R.",
    "memo of 4 GB": b"Nr\x00\x00\x00\x10.",
    "memo that grows": b"N" + b"\x94" * 3_000_000 + b".",
    "deep key": b"})" + b"\x85" * 1_000_000 + b"Ns.",
    "exponential key": b"})\x94"
    + b"".join(b"h" + bytes([i]) + b"\x86\x94" for i in range(200))
    + b"Ns.",
    "deep objects": deep_objects(300_000),
    "deep lists": b"]" * 1_000_000 + b"a" * 999_999 + b".",
    "many lists": b"(" + b"]" * 1_000_000 + b"t.",
    "text of 8 EB": b"\x8d" + b"\xff" * 7 + b"\x7f.",
    "text of 4 GB": b"X\xff\xff\xff\xff.",
    "bytes of 4 GB": b"B\xff\xff\xff\xff.",
    "byte array of 8 EB": b"\x96" + b"\xff" * 7 + b"\x7f.",
    "integer of 2 GB": b"\x8b\xff\xff\xff\x7f.",
    "frame of 8 EB": b"\x95" + b"\xff" * 7 + b"\x7f.",
    "decimal integer": b"L" + b"9" * 1_000_000 + b"L\n.",
    "empty stack": b"R.",
    "mark without values": b"t.",
    "pop below a mark": b"(0000.",
    "no end": b"N",
    "nothing": b"",
    "no pickle": b"\x00" * 1000,
    "another object": pickle.dumps([1, 2]),
    "a long name": named("x" * 1_000_000, "y") + b".",
}


def test_members_of_enumerations_may_be_fetched_by_name(folder):
    """As Python 3.11.2 pickles them; of listed classes only, and nothing else of them."""
    enumeration = named(META, "_MEM_FORMAT_ENCODING")
    by_value = re.compile(re.escape(enumeration) + rb"(q.)K\x00\x85(q.)R")
    plain = pickle.dumps(index(folder), protocol=2)
    expected = pickle_reader.read_dcp(io.BytesIO(plain))

    def fetched(what: bytes) -> bytes:
        changed, count = by_value.subn(
            lambda m: named("builtins", "getattr") + what + m[2] + b"R", plain, count=1
        )
        assert count == 1
        return changed

    assert (
        pickle_reader.read_dcp(io.BytesIO(fetched(enumeration + texts("CONTIGUOUS") + b"\x86")))
        == expected
    )
    for bad in (
        texts("path", "join") + b"\x86",
        named(META, "Evil") + texts("X") + b"\x86",
        enumeration + texts("X", "Y") + b"\x87",
    ):
        with pytest.raises((UnsafeName, TypeError)):
            pickle_reader.read_dcp(io.BytesIO(fetched(bad)))


@pytest.mark.parametrize("program", HARMFUL.values(), ids=HARMFUL)
def test_harmful_programs(folder, program):
    write(folder, b"\x80\x04" + program)
    assert ".metadata" in refused(folder)


@pytest.mark.slow
@pytest.mark.parametrize("count", [40, pytest.param(400, marks=pytest.mark.slow)])
def test_an_index_cut_short_or_changed_anywhere(folder, count):
    data = (folder / ".metadata").read_bytes()
    for i in range(count // 5):
        write(folder, data[: len(data) * i // (count // 5)])
        refused(folder)
    generator = torch.Generator().manual_seed(1)
    for at, value in torch.randint(2**31, (count, 2), generator=generator).tolist():
        changed = bytearray(data)
        changed[at % len(data)] = value % 256
        write(folder, bytes(changed))
        target = torch.zeros(4, 3)
        try:
            read_stock(folder, {"a": target})
        except ConfigError:
            assert True
        else:  # the byte was of no consequence
            assert torch.equal(target, torch.arange(12.0).reshape(4, 3))


def move(folder: Path, **changes: Any) -> None:
    """Says in the index that "a" lies elsewhere."""
    metadata = index(folder)
    info = metadata.storage_data[MetadataIndex("a", [0, 0])]
    for key, value in changes.items():
        setattr(info, key, value)
    write(folder, metadata)


def link(folder: Path, to: str) -> None:
    (folder / "link.distcp").symlink_to(to)
    move(folder, relative_path="link.distcp")


def replace_by(folder: Path, name: str, make: Callable[[Path], Any]) -> None:
    (folder / name).unlink()
    make(folder / name)


def reshape(folder: Path, size: Any, *chunks: tuple[Any, Any]) -> None:
    metadata = index(folder)
    entry = metadata.state_dict_metadata["a"]
    entry.size = torch.Size(size)
    entry.chunks = [
        ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in chunks
    ]
    (place,) = (info for key, info in metadata.storage_data.items() if key.fqn == "a")
    metadata.storage_data |= {MetadataIndex("a", chunk.offsets): place for chunk in entry.chunks}
    write(folder, metadata)


def drop(folder: Path) -> None:
    metadata = index(folder)
    metadata.storage_data = {
        key: info for key, info in metadata.storage_data.items() if key.fqn != "a"
    }
    write(folder, metadata)


def overlap(folder: Path) -> None:
    """Says in the index that eleven tensors lie where "a" does."""
    metadata = index(folder)
    places = {key.fqn: key for key in metadata.storage_data}
    metadata.storage_data[places["b"]] = metadata.storage_data[places["a"]]
    entry = metadata.state_dict_metadata["a"]
    for name in "bcdefghijk":
        metadata.state_dict_metadata[name] = entry
        metadata.storage_data[MetadataIndex(name, [0, 0])] = metadata.storage_data[places["a"]]
    write(folder, metadata)


def rename_dtype(folder: Path) -> None:
    """Gives the index a class of a dtype that does not exist."""
    content = (folder / ".metadata").read_bytes()
    assert content.count(b"float32") == 1
    write(folder, content.replace(b"float32", b"float33"))


# name -> (how the folder is spoiled, words of the message)
INDICES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "too large an index": (
        lambda f: os.truncate(f / ".metadata", LARGEST + 1),
        f"more than {LARGEST} bytes",
    ),
    "upwards": (partial(move, relative_path="../../secret"), "only files of the folder itself"),
    "one up": (partial(move, relative_path="../secret"), "only files of the folder itself"),
    "absolute": (partial(move, relative_path="/etc/passwd"), "only files of the folder itself"),
    "a sub-folder": (partial(move, relative_path="x/y"), "only files of the folder itself"),
    "the folder": (partial(move, relative_path="."), "only files of the folder itself"),
    "no name": (partial(move, relative_path=""), "only files of the folder itself"),
    "a zero byte": (partial(move, relative_path="a\0b"), "only files of the folder itself"),
    "a long name": (partial(move, relative_path="x" * 100_000), "only files of the folder itself"),
    "a surrogate": (partial(move, relative_path="\ud800"), "only files of the folder itself"),
    "two lines": (partial(move, relative_path="a\nb"), "only files of the folder itself"),
    "an escape sequence": (
        partial(move, relative_path="a\x1b[2Jb"),
        "only files of the folder itself",
    ),
    "a path object": (partial(move, relative_path=Path("x")), "expected str"),
    "nowhere": (partial(move, relative_path="gone"), "No such file"),
    "a link out": (partial(link, to="/etc/passwd"), "not a regular file"),
    "a link up": (partial(link, to="../secret"), "not a regular file"),
    "a link in": (partial(link, to="__0_0.distcp"), "not a regular file"),
    "the index is a link": (
        lambda f: replace_by(f, ".metadata", lambda p: p.symlink_to("/etc/passwd")),
        "not a regular file",
    ),
    "the index is a pipe": (lambda f: replace_by(f, ".metadata", os.mkfifo), "not a regular file"),
    "a pipe": (lambda f: replace_by(f, "__0_0.distcp", os.mkfifo), "not a regular file"),
    "a folder": (lambda f: replace_by(f, "__0_0.distcp", os.mkdir), "not a regular file"),
    "negative offset": (partial(move, offset=-1), "truncated"),
    "negative length": (partial(move, length=-5), "truncated"),
    "offset behind the end": (partial(move, offset=2**62), "truncated"),
    "length behind the end": (partial(move, length=10**6), "truncated"),
    "too short for its shape": (partial(move, length=47), "gives it 47"),
    "no numbers": (partial(move, offset="0"), "expected int"),
    "another's place": (partial(move, offset=1), "expected one tensor"),
    "compressed": (partial(move, transform_descriptors=["stream.zstd/1"]), "compressed"),
    "an absurd shape": (partial(reshape, size=(2**31, 2**31)), "do not make up its shape"),
    "an absurd chunk": (
        lambda f: reshape(f, (2**31, 2**31), ((0, 0), (2**31, 2**31))),
        "the index gives it",
    ),
    "beyond 64 bits": (
        lambda f: reshape(f, (2**62, 2**62), ((0, 0), (2**62, 2**62))),
        "no tensor can have",
    ),
    "negative shape": (lambda f: reshape(f, (-4, -3), ((0, 0), (-4, -3))), "no tensor can have"),
    "negative chunk": (lambda f: reshape(f, (4, 3), ((0, 0), (-4, -3))), "no tensor can have"),
    "chunk outside": (lambda f: reshape(f, (4, 3), ((1, 0), (4, 3))), "do not make up"),
    "a hole": (lambda f: reshape(f, (4, 3), ((0, 0), (2, 3))), "do not make up"),
    "an overlap": (
        lambda f: reshape(f, (4, 3), ((0, 0), (3, 3)), ((2, 0), (1, 3))),
        "do not make up",
    ),
    "twice the same": (
        lambda f: reshape(f, (4, 3), ((0, 0), (2, 3)), ((0, 0), (2, 3))),
        "do not make up",
    ),
    "other dimensions": (lambda f: reshape(f, (4, 3), ((0,), (12,))), "do not make up"),
    "nowhere in a file": (
        lambda f: reshape(f, (4, 3), ((0, 0), (4, 3))) or drop(f),
        "has no file for the part",
    ),
    "tensors at one place": (overlap, "parts of tensors overlap in '__0_0.distcp'"),
    "an unknown dtype": (rename_dtype, "torch.float33, which torch does not have"),
}


@pytest.mark.parametrize(("spoil", "message"), INDICES.values(), ids=INDICES)
def test_places_shapes_and_dtypes_that_cannot_be(folder, spoil, message):
    spoil(folder)
    assert message in refused(folder)


def zipped(program: bytes, values: bytes = b"\x00" * 48, **more: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, content in {"data.pkl": program, "data/0": values, **more}.items():
            archive.writestr(f"archive/{name}", content)
    return buffer.getvalue()


def bomb(files: dict[str, bytes], name: str, byte: bytes) -> bytes:
    """A zip file with 256 MiB of one byte, which this process never holds."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for other, content in files.items():
            archive.writestr(f"archive/{other}", content)
        with archive.open(f"archive/{name}", "w") as file:
            for _ in range(256):
                file.write(byte * 2**20)
    return buffer.getvalue()


def tensor_program(
    storage: bytes = texts("storage")
    + named("torch", "FloatStorage")
    + texts("0", "cpu")
    + b"K\x0c",
    layout: bytes = b"K\x00(K\x04K\x03t(K\x03K\x01t",
    function: bytes = named("torch._utils", "_rebuild_tensor_v2"),
) -> bytes:
    hooks = named("collections", "OrderedDict") + b")R"
    return b"\x80\x02" + function + b"((" + storage + b"tQ" + layout + b"\x89" + hooks + b"tR."


def saved(value: Any, **options: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer, **options)
    return buffer.getvalue()


EVIL = Evil(os.system, TOUCH)
PAYLOADS: dict[str, bytes | Callable[[], bytes]] = {
    "code, zipped": saved(EVIL),
    "code, of old": saved(EVIL, _use_new_zipfile_serialization=False),
    "code beside the tensor": saved([torch.zeros(4, 3), EVIL]),
    "a pickle": pickle.dumps(EVIL),
    "code as the storage": zipped(
        tensor_program(storage=texts("storage") + named("os", "system") + texts("0", "c") + b"N")
    ),
    "code as the rebuild": zipped(tensor_program(function=named("posix", "system"))),
    "a hash that does not end": zipped(
        b"\x80\x02)q\x00"
        + b"".join(b"h" + bytes([i]) + b"\x86q" + bytes([i + 1]) for i in range(200))
        + b"}q\xc9Ns."
    ),
    "a deep storage kind": zipped(
        tensor_program(storage=texts("s") + b")" + b"\x85" * 300_000 + texts("0", "cpu") + b"N")
    ),
    "an old-style tensor": saved(torch.zeros(4, 3), _use_new_zipfile_serialization=False),
    "no tensor": saved({"a": 1}),
    "another shape": saved(torch.zeros(3, 4)),
    "another dtype": saved(torch.zeros(4, 3, dtype=torch.float64)),
    "strides beyond the storage": zipped(tensor_program(layout=b"K\x00(K\x04K\x03t(K\xffK\x01t")),
    "negative strides": zipped(tensor_program(layout=b"K\x00(K\x04K\x03t(J\xff\xff\xff\xffK\x01t")),
    "offset beyond the storage": zipped(
        tensor_program(layout=b"J\xff\xff\xff\x7f(K\x04K\x03t(K\x03K\x01t")
    ),
    "too little storage": zipped(tensor_program(), b"\x00" * 44),
    # Half a second each
    "a zip bomb": lambda: bomb({"data.pkl": tensor_program()}, "data/0", b"\x00"),
    "a zip bomb as the pickle": lambda: bomb({"data/0": b"\x00" * 48}, "data.pkl", b"N"),
    "big-endian": zipped(tensor_program(), byteorder=b"big"),
    "no storage": zipped(
        tensor_program(
            storage=texts("storage") + named("torch", "FloatStorage") + texts("9", "c") + b"N"
        )
    ),
    "a storage outside": zipped(
        tensor_program(
            storage=texts("storage")
            + named("torch", "FloatStorage")
            + texts("../../secret", "c")
            + b"N"
        )
    ),
    "safetensors": struct.pack("<Q", 60)
    + b'{"a":{"dtype":"F32","shape":[4,3],"data_offsets":[0,48]}}   '
    + b"\x00" * 48,
    "nothing but zeros": b"\x00" * 4000,
}


def put(folder: Path, payload: bytes) -> None:
    (folder / "evil.distcp").write_bytes(payload)
    move(folder, relative_path="evil.distcp", offset=0, length=len(payload))


@pytest.mark.parametrize("payload", PAYLOADS.values(), ids=PAYLOADS)
def test_payloads_that_are_no_tensor(folder, payload):
    payload = payload() if callable(payload) else payload
    put(folder, payload)
    assert "evil.distcp" in refused(folder) or len(payload) < 48


def test_the_hand_made_tensor_is_one(folder):
    """What the payloads above are variations of is read."""
    put(folder, zipped(tensor_program(), torch.arange(12.0).neg().numpy().tobytes()))
    target = torch.zeros(4, 3)
    read_stock(folder, {"a": target})
    assert torch.equal(target, -torch.arange(12.0).reshape(4, 3))


@pytest.mark.slow
def test_a_flipped_bit_is_found(folder):
    data = bytearray((folder / "__0_0.distcp").read_bytes())
    at = data.index(torch.arange(12.0).numpy().tobytes())
    for bit in range(0, 48 * 8, 7):
        changed = bytearray(data)
        changed[at + bit // 8] ^= 1 << bit % 8
        (folder / "__0_0.distcp").write_bytes(changed)
        assert "CRC-32" in refused(folder)


def test_entries_that_are_no_tensor_are_not_read(folder):
    assert "has no 'note.step'" in refused(folder, "note.step")
    reader = dcp.FileSystemReader(folder)
    assert "note.step" in reader.read_metadata().state_dict_metadata
    assert "note.step" not in open_full_state(folder).tensors


def with_records(length: int, count: int) -> bytes:
    """A tensor whose storage has `length` bytes, and `count` more records."""
    records = {f"extra/{i}": b"" for i in range(count)}
    return zipped(tensor_program(), b"\x00" * length, **records)


def test_an_archive_with_many_records_is_not_read(folder):
    put(folder, with_records(48, 1000))
    assert "its description has more than" in refused(folder)


def test_a_storage_that_is_longer_than_its_part_is_not_read(folder):
    content = with_records(4000, 0).replace(
        struct.pack("<II", 4000, 4000), struct.pack("<II", 1 << 30, 1 << 30)
    )
    put(folder, content)
    with (folder / "evil.distcp").open("r+b") as file:
        file.truncate(1 << 31)  # a hole
    assert "its storage ends after it" in refused(folder)


def test_empty_chunks_may_have_any_shape(folder):
    """They are dropped, as those of processes that have no part of a tensor."""
    metadata = index(folder)
    metadata.state_dict_metadata["a"].chunks.insert(
        0, ChunkStorageMetadata(torch.Size([]), torch.Size([0]))
    )
    write(folder, metadata)
    target = torch.zeros(4, 3)
    read_stock(folder, {"a": target})
    assert torch.equal(target, torch.arange(12.0).reshape(4, 3))


FUZZED = {
    "DCP index": of_format("pickle", "dcp", ".metadata"),
    "DCP data": of_format("bytes", "dcp", "__0_0.distcp"),
}
