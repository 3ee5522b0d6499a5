"""Reads the index of a stock DCP folder, a pickle, without running it, in a process with limits.

What it is: a pickle is a program. GLOBAL fetches any function, REDUCE calls it. Here an unpickler
gets, for each name on a list, a stand-in that records its arguments (`Made`), and for any other
name an error. It works in a process that can open no file, and that ends at a limit of memory or
time (`runtime/limited_child.py`).
Why it is here: torch has no safe way to read this index. DCP unpickles it, and the classes in it
are not on the list of `torch.load(weights_only=True)`. Without running anything, a pickle of a few
hundred bytes can still allocate 4 GB (a large memo index), nest shared lists so that they expand
exponentially, or have keys that take hours to hash. A limit stops all of these. The JSON may not be
longer than the pickle: shared parts would be written many times, and the parent has no limits.
What it costs: 25 ms for the process; torch is not imported there. 2 s for an index of 250,000
chunks.
"""

from __future__ import annotations

import gc
import io
import json
import os
import pickle
import re
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any, BinaryIO

from titanlite.runtime import limited_child

MEMORY = max(1 << 30, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 16)  # bytes
LARGEST = MEMORY // 16  # bytes of a pickle
SECONDS = 5  # CPU time for each 64 MB of an index; 250,000 chunks are 43 MB and take 2

# Names in the index: found by saving FSDP2, AdamW, generators, numbers and nested lists.
NAMES = re.compile(
    r"torch\.distributed\.checkpoint\.(metadata\.(Metadata|TensorStorageMetadata|TensorProperties|_MEM_FORMAT_ENCODING"
    r"|ChunkStorageMetadata|BytesStorageMetadata|MetadataIndex|StorageMeta)|filesystem\._StorageInfo)"
    # Up to torch 2.3
    r"|torch\.distributed\._shard\.sharded_tensor\.metadata\.(TensorProperties|MEM_FORMAT_ENCODING)"
    r"|torch\.(Size|serialization\._get_layout|bool|(bfloat|bits|complex|float|q?u?int)\d[a-z0-9_]*)"
    r"|pathlib\.(_local\.)?(Posix|Windows)Path"  # where it was saved; `_local` in Python 3.13
)


class UnreadablePickle(ValueError):
    """The pickle is damaged, has another structure, or exceeds a limit."""


class UnsafeName(UnreadablePickle):
    """The pickle refers to a name that is not on the list."""


def read_pickle(path: Path) -> dict[str, Any]:
    """Runs `read_dcp` on a regular file, in a process with limits, and returns its result.

    Raises UnreadablePickle; UnsafeName if it refers to anything that is not on the list; OSError.
    """
    with path.open("rb") as file:
        seconds = SECONDS * (1 + (os.fstat(file.fileno()).st_size >> 26))
        program = limited_child.command(main, (), seconds)
        ended = subprocess.run(
            program, stdin=file, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=False
        )
    if ended.returncode:
        raise UnreadablePickle(
            f"reading it took more than {seconds} s of CPU time, or ended the process that read it"
        )
    answer = json.loads(ended.stdout)
    name = answer.get("unsafe")
    if name:
        raise UnsafeName(name)
    if "error" in answer:
        raise UnreadablePickle(answer["error"])
    return answer["value"]


class Made:
    """A recorded call: its `arguments`, and the `state` for its result.

    Compared and hashed by identity.
    """

    __slots__ = ("arguments", "state")
    arguments: tuple[Any, ...]
    state: Any
    name = ""

    def __new__(cls, *arguments: Any) -> Made:
        made = object.__new__(cls)
        made.arguments = arguments
        made.state = None
        return made

    def __init__(self, *arguments: Any) -> None: ...

    def __setstate__(self, state: Any) -> None:
        self.state = state


class Member(Made):
    """A member of an enumeration, as Python 3.11.0 to 3.11.3 pickle it: getattr(class, name)."""

    __slots__ = ()

    def __init__(self, of: Any, member: Any) -> None:
        if not (isinstance(of, type) and issubclass(of, Made) and type(member) is str):
            raise UnsafeName("builtins.getattr")


class Unpickler(pickle.Unpickler):
    """Builds plain data; calls become `Made`."""

    def __init__(self, file: Any) -> None:
        super().__init__(file)
        self.classes: dict[str, type] = {}  # by name, as they occur

    def find_class(self, module: str, name: str) -> Any:
        full = f"{module}.{name}"
        if full == "builtins.getattr":
            return Member
        if full not in self.classes:
            if not NAMES.fullmatch(full):
                raise UnsafeName(full if len(full) < 100 else full[:100] + "...")
            self.classes[full] = type("Made", (Made,), {"__slots__": (), "name": full})
        return self.classes[full]


def expect(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise UnreadablePickle(f"expected {kind.__name__}, found {type(value).__name__}")
    return value


def counts(value: Any) -> list[int]:
    """A tuple of at most 64 integers from 0 to 2**62 - 1.

    Their product is checked by those who use it.
    """
    numbers = list(expect(value, tuple))
    valid = all(type(number) is int and 0 <= number < 1 << 62 for number in numbers)
    if not valid or len(numbers) > 64:
        raise UnreadablePickle("a shape that no tensor can have")
    return numbers


def fields(made: Any, name: str) -> dict[str, Any]:
    """The attributes of a recorded instance of DCP's class `name`."""
    if not isinstance(made, Made) or made.name.rpartition(".")[2] != name:
        raise UnreadablePickle(
            f"expected {name}, found {getattr(made, 'name', type(made).__name__)}"
        )
    return expect({} if made.state is None else made.state, dict)


def size(made: Any) -> list[int]:
    if not isinstance(made, Made) or made.name != "torch.Size" or len(made.arguments) != 1:
        raise UnreadablePickle("a shape was expected")
    return counts(made.arguments[0])


def read_dcp(file: BinaryIO) -> dict[str, Any]:
    """Reads the index of a stock DCP folder.

    tensor name -> [dtype, shape, [[offsets, sizes, file, first byte, bytes], ...]]; other entries
    are left out.
    """
    data = file.read(LARGEST + 1)
    if len(data) > LARGEST:
        raise UnreadablePickle(f"it has more than {LARGEST} bytes")
    index = fields(Unpickler(io.BytesIO(data)).load(), "Metadata")
    places: dict[tuple[str, str], list[Any]] = {}
    for key, value in expect(index["storage_data"], dict).items():
        at = fields(key, "MetadataIndex")
        info = fields(value, "_StorageInfo")
        name = expect(at["fqn"], str)
        offset = at.get("offset")
        if info.get("transform_descriptors"):
            raise UnreadablePickle(f"{name[:200]!r} is compressed, which cannot be read")
        place = [
            expect(info["relative_path"], str),
            expect(info["offset"], int),
            expect(info["length"], int),
        ]
        places[name, "" if offset is None else str(size(offset))] = place
    tensors = {}
    for name, entry in expect(index["state_dict_metadata"], dict).items():
        if isinstance(entry, Made) and entry.name.endswith(".BytesStorageMetadata"):
            continue
        of = fields(entry, "TensorStorageMetadata")
        properties = of["properties"]
        if not isinstance(properties, Made) or not isinstance(properties.state, tuple):
            raise UnreadablePickle("the properties of a tensor were expected")
        dtype = expect(properties.state[0], type).name
        chunks = []
        for chunk in expect(of["chunks"], list):
            box = fields(chunk, "ChunkStorageMetadata")
            offsets = size(box["offsets"])
            sizes = size(box["sizes"])
            if 0 in sizes:
                continue  # saved by a process that has no part of the tensor
            where = places.get((expect(name, str), str(offsets)))
            if where is None:
                raise UnreadablePickle(
                    f"the index has no file for the part of {name[:200]!r} at {offsets}"
                )
            chunks.append([offsets, sizes, *where])
        tensors[expect(name, str)] = [dtype, size(of["size"]), chunks]
    return bounded(tensors, len(data))


def bounded(value: dict[str, Any], length: int) -> dict[str, Any]:
    """Returns the value if its JSON is not longer than the pickle, whose `length` is in bytes."""
    if len(json.dumps(value)) > length + 10_000:
        raise UnreadablePickle(
            "with shared parts written out, its contents would be longer than the file"
        )
    return value


def answer_of(file: BinaryIO) -> str:
    """The JSON that goes to `read_pickle`."""
    try:
        return json.dumps({"value": read_dcp(file)}, check_circular=False)
    except UnsafeName as error:
        return json.dumps({"unsafe": str(error)})
    except MemoryError:
        return json.dumps({"error": f"reading it takes more than {MEMORY >> 20} MB"})
    except Exception as error:  # whatever it is, the file is the cause
        return json.dumps({"error": str(error)[:400] or type(error).__name__})


def main(seconds: str) -> None:
    """Reads standard input and prints JSON."""
    gc.disable()  # a third of the time; the process ends soon
    limited_child.limit({resource.RLIMIT_AS: MEMORY, resource.RLIMIT_CPU: int(seconds)})
    limited_child.forbid(resource.RLIMIT_NOFILE, resource.RLIMIT_NPROC, resource.RLIMIT_FSIZE)
    sys.stdout.write(answer_of(sys.stdin.buffer))
