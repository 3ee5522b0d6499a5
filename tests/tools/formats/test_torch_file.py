"""Files of torch.save: every flipped bit of what is used is found, and tensors that are views."""

from __future__ import annotations

import errno
import functools
import io
import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from fuzz_samples import Reader, read_file, torch_file
from model_builder import SMALL, small_model

from titanlite.checkpoint.manifest import CorruptCheckpoint
from titanlite.runtime.errors import ConfigError
from titanlite.tools.formats import full_state
from titanlite.tools.formats import load_weights as load
from titanlite.tools.formats.convert import convert, load_full_state
from titanlite.tools.formats.intact import require_intact
from titanlite.tools.formats.load_weights import read_weights


@pytest.fixture
def path(tmp_path) -> Path:
    """A file with three storages."""
    torch.manual_seed(0)
    tensors = {"a": torch.randn(5, 3), "b": torch.arange(7), "c": torch.ones(2).bfloat16()}
    torch.save(tensors, tmp_path / "a.pt")
    return tmp_path / "a.pt"


def test_an_empty_tensor_has_any_number_of_rows(tmp_path):
    """Without a read for each of them, also if its rows seem to be far apart."""
    torch.save({"a": torch.empty_strided((1 << 60, 0), (1 << 20, 1))}, tmp_path / "a.pt")
    assert load_full_state(tmp_path / "a.pt")["a"].shape == (1 << 60, 0)


def test_a_file_saved_without_crc_is_read(path):
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"a": torch.arange(7.0)}, path)
    finally:
        torch.serialization.set_crc32_options(True)
    with zipfile.ZipFile(path) as archive:
        assert not any(info.CRC for info in archive.infolist())
    full = load_full_state(path)
    require_intact(full)
    assert torch.equal(full["a"], torch.arange(7.0))


def test_an_expanded_tensor_is_refused_with_advice(path):
    torch.save({"a": torch.ones(1).expand(2**20)}, path)
    with pytest.raises(
        CorruptCheckpoint, match=r"more elements than its storage; save tensor\.contiguous\(\)"
    ):
        load_full_state(path)


def changed(path: Path, name: str, content: bytes, renamed: bool = False, **options: Any) -> None:
    """Writes the archive again with other content in a record, or with other names."""
    with zipfile.ZipFile(path) as archive:
        records = {info.filename: archive.read(info) for info in archive.infolist()}
    with zipfile.ZipFile(path, "w", **options) as archive:
        for record, old in records.items():
            archive.writestr(
                f"{record}-" if renamed else record, content if record.endswith(name) else old
            )


def added(path: Path, name: str, content: bytes = b"", times: int = 1) -> None:
    """Adds a record, and names it so many times in the archive's directory."""
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr(name, content)
        archive.filelist += archive.filelist[-1:] * (times - 1)


def moved(path: Path) -> None:
    """Damages the header of the first storage."""
    (record,) = (record for record in load_full_state(path).records if record.name == "0")
    content = bytearray(path.read_bytes())
    at = content.rindex(b"PK\x03\x04", 0, record.begin)
    content[at] ^= 1
    path.write_bytes(content)


def shortened(path: Path) -> None:
    """Leaves out the middle of the file: the directory then names storages after its end."""
    torch.save({"a": torch.zeros(100_000)}, path)
    content = path.read_bytes()
    path.write_bytes(content[:1000] + content[-1000:])


DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "compressed": (lambda p: changed(p, "?", b"", compression=zipfile.ZIP_DEFLATED), "compressed"),
    "big-endian": (lambda p: changed(p, "byteorder", b"big"), "big-endian"),
    "no description": (lambda p: changed(p, "", b"", renamed=True), r"has no data\.pkl"),
    "a description with a flipped bit": (
        lambda p: p.write_bytes(p.read_bytes().replace(b"FloatStorage", b"FloatStorags")),
        "CRC-32 of its data.pkl",
    ),
    "a damaged header of a record": (moved, "wrong position of a record"),
    "cut in the middle": (shortened, "cannot be read"),
    "nested": (
        lambda p: torch.save(functools.reduce(lambda x, _: {"a": x}, range(150), {}), p),
        "too deep",
    ),
    "a negated view": (
        lambda p: torch.save({"a": torch._neg_view(torch.arange(3.0))}, p),
        "resolve_neg",
    ),
    "1 and '1'": (lambda p: torch.save({"a": {1: 2, "1": 3}}, p), "both 1 and '1' as keys"),
    "a storage that is not there": (
        lambda p: changed(
            p, "data.pkl", description(p).replace(b"\x01\x00\x00\x000q", b"\x01\x00\x00\x009q")
        ),
        "cannot be read",
    ),
    "a second description": (
        lambda p: added(p, "b/data.pkl", description(p)),
        "two records of the same name",
    ),
    "a directory of 20 MB": (
        lambda p: added(p, "a/data/9", times=400_000),
        "its description has more than 16777216 bytes",
    ),
    "code": (
        lambda p: torch.save({"a": torch.ones(1), "b": Code()}, p),
        r"names 'posix\.system', which is not needed for tensors .* nothing was run\. Save the model",
    ),
    "a name that torch.load allows": (
        lambda p: torch.save({"a": bytearray(3)}, p),
        r"names '__builtin__\.bytearray'",
    ),
    "another dtype": (
        lambda p: torch.save({"a": torch.ones(1, dtype=torch.complex64)}, p),
        r"another dtype \(torch\.ComplexFloatStorage\); allowed: float32, bfloat16",
    ),
    "float8": (
        lambda p: torch.save({"a": torch.ones(1).to(torch.float8_e4m3fn)}, p),
        r"another dtype \(torch\._utils\._rebuild_tensor_v3\); allowed: float32, bfloat16",
    ),
    "uint16": (
        lambda p: torch.save({"a": torch.ones(1).to(torch.uint16)}, p),
        r"holds a tensor of another dtype .*; allowed: float32, bfloat16",
    ),
    "a sparse tensor": (
        lambda p: torch.save({"a": torch.eye(3).to_sparse()}, p),
        r"names 'torch\._utils\._rebuild_sparse_tensor'",
    ),
    "a tensor alone": (lambda p: torch.save(torch.ones(3), p), "holds no dict"),
    "another protocol": (
        lambda p: torch.save({"a": torch.ones(3)}, p, pickle_protocol=4),
        "its pickle has protocol 4; torch.load reads torch.save's default, 2",
    ),
    "an empty tensor beyond its storage": (
        lambda p: torch.save({"a": Far()}, p),
        "beyond its storage",
    ),
}


def description(path: Path) -> bytes:
    with zipfile.ZipFile(path) as archive:
        return archive.read(next(name for name in archive.namelist() if name.endswith("data.pkl")))


class Code:
    def __reduce__(self) -> Any:
        return os.system, ("touch executed",)


class Far:
    """Pickles as an empty tensor that begins 2^60 elements after its storage."""

    def __reduce__(self) -> Any:
        function, arguments = torch.zeros(0).__reduce_ex__(2)
        return function, (arguments[0], 2**60, *arguments[2:])


@pytest.mark.parametrize(("damage", "message"), DAMAGES.values(), ids=DAMAGES)
def test_what_cannot_be_read_is_one_error(path, monkeypatch, damage, message):
    monkeypatch.chdir(path.parent)
    damage(path)
    with pytest.raises(ConfigError, match=message) as caught:
        load_full_state(path)
    assert len(caught.value.problems) == 1
    assert "a.pt" in str(caught.value)
    assert "weights_only" not in str(caught.value)
    assert not Path("executed").exists()


def test_other_values_are_left_out(path):
    beside = {
        "dtype": torch.float8_e4m3fn,
        "size": torch.Size([1]),
        "device": torch.device("cpu"),
        "bytes": b"abc",
    }
    odd = {"set": {1, 2}, "keys": {None: 1, 0.5: 2, (1, 2): torch.ones(1)}, "list": [torch.ones(1)]}
    parameter = torch.nn.Parameter(torch.arange(3.0))
    parameter.tensor_model_parallel = True  # as Megatron does
    torch.save({"a": parameter, **beside, **odd}, path)
    full = load_full_state(path)
    assert list(full.tensors) == ["a"]
    assert torch.equal(full["a"], torch.arange(3.0))


class Overriding:
    """Pickles as a parameter whose attributes have the names of methods."""

    def __reduce__(self) -> Any:
        parameter = torch.nn.Parameter(torch.arange(3.0))
        for name in ("stride", "storage_offset", "untyped_storage", "is_neg", "detach"):
            setattr(parameter, name, torch.float64)
        return parameter.__reduce_ex__(2)


def test_attributes_of_a_parameter_are_not_used(path):
    torch.save({"a": Overriding()}, path)
    assert torch.equal(load_full_state(path)["a"], torch.arange(3.0))


@pytest.mark.parametrize("alignment", [b"0", b"1", b"-1", b"x"])
def test_an_archive_may_be_written_by_other_software(path, alignment):
    """Its storages lie where its directory says.

    Given the archive itself, torch.load divides by the alignment, on meta, and the process ends.
    """
    torch.save({"a": torch.arange(3.0), "b": torch.ones(2)}, path)
    changed(path, ".storage_alignment", alignment)
    full = load_full_state(path)
    require_intact(full)
    assert torch.equal(full["a"], torch.arange(3.0))
    assert torch.equal(full["b"], torch.ones(2))


def test_no_storage_is_read_before_it_is_used(path):
    """A file that is cut meanwhile is an error; as a map it would end the process."""
    torch.save({"a": torch.zeros(1), "b": torch.ones(2)}, path)
    content = path.read_bytes()
    full = load_full_state(path)
    path.write_bytes(content[: full.records[1].begin])
    assert torch.equal(full["a"], torch.zeros(1))
    with pytest.raises(CorruptCheckpoint, match="ends 8 bytes before a tensor does"):
        full["b"].sum()


def test_records_that_are_written_later_have_no_crc(path):
    with torch.serialization.skip_data():
        torch.save({"a": torch.arange(7.0)}, path)
    full = load_full_state(path)
    (record,) = full.records
    with path.open("r+b") as file:
        file.seek(record.begin)
        file.write(torch.arange(7.0).numpy().tobytes())
    require_intact(full)
    assert torch.equal(full["a"], torch.arange(7.0))


def test_a_small_part_of_a_large_storage_is_read_alone(path, monkeypatch):
    large = torch.arange(3_000_000.0).reshape(1000, 3, 1000)
    torch.save(
        {"column": large[:, 1, 5:7], "row": large[7:8, :, 999], "number": large[-1, -1, -1]}, path
    )
    monkeypatch.setattr(full_state, "BLOCK", 1000)
    full = load_full_state(path)
    for name, value in {
        "column": large[:, 1, 5:7],
        "row": large[7:8, :, 999],
        "number": large[-1, -1, -1],
    }.items():
        assert torch.equal(full[name], value)
    sizes = []
    original = torch.empty
    monkeypatch.setattr(
        torch, "empty", lambda *size, **options: sizes.append(size) or original(*size, **options)
    )
    assert torch.equal(full.tensors["column"].read(500, 510), large[500:510, 1, 5:7])
    assert max(size[0] for size in sizes) < 100


def test_rows_of_a_transposed_tensor_are_read_at_once(path, monkeypatch):
    torch.save({"t": torch.arange(90_000.0).reshape(300, 300).t()}, path)
    monkeypatch.setattr(full_state, "BLOCK", 64)
    monkeypatch.setattr(full_state.Part, "_one_row", None)
    tensor = load_full_state(path).tensors["t"]
    assert torch.equal(tensor.read(7, 9), torch.arange(90_000.0).reshape(300, 300).t()[7:9])
    assert tensor.read(5, 5).shape == (0, 300)


def test_flipped_bits_of_storages_are_found(path):
    content = path.read_bytes()
    full = load_full_state(path)
    require_intact(full)
    assert {record.length for record in full.records} == {60, 56, 4}
    for record in full.records:
        for bit in range(0, record.length * 8, 5):
            changed = bytearray(content)
            changed[record.begin + bit // 8] ^= 1 << bit % 8
            path.write_bytes(changed)
            with pytest.raises(
                CorruptCheckpoint, match=rf"a\.pt: '{record.name}' is damaged: its CRC-32"
            ):
                require_intact(full)


def test_a_damaged_source_is_not_converted(tmp_path):
    torch.save(small_model().state_dict(), tmp_path / "a.pt")
    content = bytearray((tmp_path / "a.pt").read_bytes())
    content[len(content) // 2] ^= 1
    (tmp_path / "a.pt").write_bytes(content)
    with pytest.raises(CorruptCheckpoint, match="CRC-32"):
        convert(tmp_path / "a.pt", tmp_path / "there.safetensors")
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.pt"]


def test_a_share_of_the_storages_may_be_compared(path):
    full = load_full_state(path)
    (last,) = (record for record in full.records if record.name == "2")
    content = bytearray(path.read_bytes())
    content[last.begin] ^= 1
    path.write_bytes(content)
    require_intact(full, share=slice(0, None, 3))
    require_intact(full, share=slice(1, None, 3))
    with pytest.raises(CorruptCheckpoint, match="'2' is damaged"):
        require_intact(full, share=slice(2, None, 3))


def test_training_state_is_compared_only_if_it_is_used(tmp_path):
    path = tmp_path / "a.pt"
    torch.save({"model": {"a": torch.ones(5)}, "training": {"optimizer.a": torch.ones(7)}}, path)
    full = load_full_state(path)
    assert list(full.others) == ["optimizer.a"]
    content = bytearray(path.read_bytes())
    content[next(record.begin for record in full.records if record.length == 28)] ^= 1
    path.write_bytes(content)
    require_intact(full)
    with pytest.raises(CorruptCheckpoint, match="CRC-32"):
        require_intact(full, everything=True)
    content[next(record.begin for record in full.records if record.length == 20)] ^= 1
    path.write_bytes(content)
    with pytest.raises(CorruptCheckpoint, match="CRC-32"):
        require_intact(full)


def test_a_failing_disk_names_the_source(path, monkeypatch):
    full = load_full_state(path)
    monkeypatch.setattr(
        full_state.zlib, "crc32", mock.Mock(side_effect=OSError(errno.EIO, "Input/output error"))
    )
    with pytest.raises(CorruptCheckpoint, match=r"a\.pt: .* is damaged: Input/output error"):
        require_intact(full)


def read_on_all(folder: Path) -> str:
    """The error on this rank, which compares the CRC-32 of every second storage only."""
    os.environ |= {"LOCAL_RANK": str(dist.get_rank()), "LOCAL_WORLD_SIZE": "2"}
    state = {name: torch.zeros(5) for name in ("a", "b", "c")}
    with pytest.MonkeyPatch.context() as patch:
        # The file holds no model
        patch.setattr(load, "require_same_model", lambda *arguments: None)
        try:
            read_weights(folder / "a.pt", state, SMALL, b"")
        except ConfigError as error:
            return str(error)
    return ""


@pytest.mark.slow
@pytest.mark.parametrize("damaged", [*(pytest.param(i, marks=pytest.mark.slow) for i in (0, 1)), 2])
def test_a_flipped_bit_is_an_error_on_all_ranks(pool, tmp_path, damaged):
    torch.save({name: torch.ones(5) for name in ("a", "b", "c")}, tmp_path / "a.pt")
    assert pool.run(2, read_on_all, tmp_path) == ["", ""]
    content = bytearray((tmp_path / "a.pt").read_bytes())
    content[load_full_state(tmp_path / "a.pt").records[damaged].begin] ^= 1
    (tmp_path / "a.pt").write_bytes(content)
    first, second = pool.run(2, read_on_all, tmp_path)
    assert first == second
    assert f"'{damaged}' is damaged: its CRC-32" in first


def is_program(name: str) -> bool:
    return name.endswith("/data.pkl")


def program(folder: Path) -> list[bytes]:
    """The pickle in a file of torch.save."""
    with zipfile.ZipFile(io.BytesIO(torch_file())) as archive:
        return [archive.read(name) for name in archive.namelist() if is_program(name)]


def read_program(folder: Path, data: bytes) -> None:
    """Reads a file of torch.save with another pickle."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(torch_file())) as old, zipfile.ZipFile(buffer, "w") as new:
        for name in old.namelist():
            new.writestr(name, data if is_program(name) else old.read(name))
    read_file("x.pt", folder, buffer.getvalue())


FUZZED = {
    "torch.save": Reader(
        "bytes", lambda folder: [torch_file()], functools.partial(read_file, "x.pt")
    ),
    "torch.save pickle": Reader("pickle", program, read_program),
}
