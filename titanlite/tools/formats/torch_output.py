"""Writes what torch.save and DCP write, without the tensors in memory.

What it is: under `torch.serialization.skip_data` torch writes a complete file, with gaps for the
numbers, from tensors whose memory is never touched. The file's own reader finds the gaps. They are
filled block by block, and the CRC-32 of each is set.
Why it is here: torch.save takes whole tensors, and DCP holds those of a file until its end.
What it costs: a few kB for each tensor; each byte is written once, and its CRC-32 computed.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import warnings
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future
from torch.serialization import skip_data

from titanlite.tools.formats import stock
from titanlite.tools.formats.export import Outgoing
from titanlite.tools.formats.full_state import FullTensor
from titanlite.tools.formats.in_place import NOTHING, Region, blocks_of, fill
from titanlite.tools.formats.torch_file import DESCRIPTION, Archive, Slice, read_tree
from titanlite.tools.torch_private import storage_info

FILE = "__0_0.distcp"  # of the first process, as FileSystemWriter names it


class Place(NamedTuple):
    """Bytes of a file that are an archive of torch.save."""

    begin: int
    length: int


def save_file(path: Path, tree: dict[str, Any], hashes: Mapping[Path, str] = NOTHING) -> None:
    """Writes a file as torch.save does; an Outgoing in the tree is saved as its tensor.

    `hashes`: as in `blocks_of`.

    Raises OSError, and what reading the source raises.
    """
    tensors = dict(_leaves(tree, Outgoing))
    with path.open("xb") as file, skip_data(), torch_errors():
        torch.save(_blanks(tree), file)
    laid_out, _ = read_tree(path)
    begins = {name: saved.parts[0].begin for name, saved in _leaves(laid_out, FullTensor)}
    places = [Place(0, path.stat().st_size)]
    _fill(path, blocks_of(tensors, hashes), begins, places)


def save_folder(
    folder: Path, tensors: Mapping[str, Outgoing], hashes: Mapping[Path, str] = NOTHING
) -> None:
    """Writes a folder with one file of tensors as DCP does. `hashes`: as in `blocks_of`.

    Raises OSError, and what reading the source raises.
    """
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    writer = _Writer(folder)
    with warnings.catch_warnings(), skip_data(), torch_errors():
        # That there is one process is meant
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        dcp.save(_blanks(tensors), storage_writer=writer, planner=planner, no_dist=True)
    begins: dict[str, int] = {}
    places = []
    for name, saved in stock.read_folder(folder).items():
        for part in saved.parts:  # one, none of an empty tensor
            assert isinstance(part, stock.StockPart)
            with part.file.open("rb", buffering=0) as file:
                begins[name], _ = part.locate(file)
            places.append(Place(part.begin, part.length))
    filled = {name: tensors[name] for name in begins}
    _fill(folder / FILE, blocks_of(filled, hashes), begins, places)


class _Writer(FileSystemWriter):
    """Writes the plan of one process into one file.

    The file that FileSystemWriter gives to torch.save cannot seek, so it has no gaps.
    """

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        results = []
        with (Path(self.path) / FILE).open("xb") as file:
            for item in plan.items:
                begin = file.tell()
                torch.save(planner.resolve_data(item), file)
                length = file.tell() - begin
                place = storage_info(FILE, begin, length)
                results.append(WriteResult(item.index, length, place))
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future


def _leaves(tree: Mapping[str, Any], kind: type, above: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _leaves(value, kind, f"{above}{key}/")
        elif isinstance(value, kind):
            yield f"{above}{key}", value


def _blanks(tree: Mapping[str, Any]) -> dict[str, Any]:
    """The tree with a tensor for each Outgoing, whose memory is reserved and not used."""
    blanks: dict[str, Any] = {}
    for key, value in tree.items():
        blanks[key] = value
        if isinstance(value, dict):
            blanks[key] = _blanks(value)
        elif isinstance(value, Outgoing):
            blanks[key] = _blank(value)
    return blanks


def _blank(tensor: Outgoing) -> Tensor:
    if not tensor.nbytes:
        return torch.empty(tensor.shape, dtype=tensor.dtype)
    # torch.empty would touch a page of each, which can be one of 2 MB
    memory = mmap.mmap(-1, tensor.nbytes, mmap.MAP_PRIVATE)
    return torch.frombuffer(memory, dtype=tensor.dtype).reshape(tensor.shape)


@contextlib.contextmanager
def torch_errors() -> Iterator[None]:
    """Raises the error or signal that made torch's writing fail, in place of torch's own error.

    torch.save reports a failed write as "unexpected pos".
    """
    try:
        yield
    except (RuntimeError, CheckpointException) as error:  # the latter is a BaseException
        cause: BaseException = error
        if isinstance(error, CheckpointException):
            cause, _ = next(iter(error.failures.values()))
        while not isinstance(cause, (OSError, SystemExit, KeyboardInterrupt)) and cause.__context__:
            cause = cause.__context__
        raise cause from None


def _fill(
    path: Path,
    blocks: Iterable[tuple[str, Tensor]],
    begins: Mapping[str, int],
    places: Iterable[Place],
) -> None:
    """Writes the tensors at the bytes where they begin, sets their CRC-32, and syncs the file."""
    crcs = dict.fromkeys(begins.values(), 0)

    def add(name: str, data: memoryview) -> None:
        crcs[begins[name]] = zlib.crc32(data, crcs[begins[name]])

    with path.open("r+b", buffering=0) as file:
        regions = {name: Region(file.fileno(), begin) for name, begin in begins.items()}
        fill(regions, blocks, add)
        for begin, length in places:
            archive = Slice(file, begin, length, DESCRIPTION)
            for at, crc in _crc_fields(archive, {key - begin: crcs[key] for key in crcs}):
                Region(file.fileno(), begin + at).append(memoryview(crc.to_bytes(4, "little")))
        os.fsync(file.fileno())


def _crc_fields(file: Slice, crcs: Mapping[int, int]) -> Iterator[tuple[int, int]]:
    """The bytes of an archive where CRC-32 stand, and the values for them.

    Each stands behind its record and in the directory at the end. `crcs`: by the record's first
    byte.
    """
    records = Archive(file)
    with zipfile.ZipFile(file) as archive:
        entry = archive.start_dir
        listed = archive.infolist()
    for info in listed:
        begin, length, _ = records.place(info.filename.partition("/")[2])
        if length and begin in crcs:
            yield begin + length + 4, crcs[begin]  # after the signature of the data descriptor
            yield entry + 16, crcs[begin]
        file.seek(entry + 28)
        lengths = file.read(6)  # of name, extra field and comment
        entry += 46 + sum(int.from_bytes(lengths[i : i + 2], "little") for i in (0, 2, 4))
