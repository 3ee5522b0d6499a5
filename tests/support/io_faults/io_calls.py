"""Counts, records or fails the file operations of a process below one folder (by `io_calls.c`)."""

from __future__ import annotations

import ctypes
import errno
import importlib
import json
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
WRITING = ("open", "write", "mkdir", "rename", "link", "fsync")
INTERRUPTIBLE = ("open", "write", "truncate", "fsync")  # those that POSIX lets a signal interrupt
# Kind of fault -> what the call returns, and calls that can have it
KINDS: dict[str, tuple[int, tuple[str, ...]]] = {
    "ENOSPC": (errno.ENOSPC, WRITING),
    "EIO": (errno.EIO, (*WRITING, "truncate", "unlink")),
    "EINTR": (errno.EINTR, INTERRUPTIBLE),
    "short": (-1, ("write",)),  # half of it is written
    "full": (errno.ENOSPC, WRITING),  # this call and all later ones, until the process ends
}
HARMLESS = ("EINTR", "short")  # the program must go on as if nothing had happened
HOOK = ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.c_int,
    *[ctypes.c_char_p] * 3,
    ctypes.c_long,
    ctypes.c_void_p,
    ctypes.c_long,
)


class Call(NamedTuple):
    """An operation that has succeeded. `number`: flags, the offset of a write, or a new size."""

    name: str
    path: str
    other: str = ""
    number: int = 0
    data: bytes = b""


class Watch:
    """Watches this process's operations below a folder. The `at`-th that `kind` applies to fails."""

    def __init__(self, kind: str = "", at: int = 0) -> None:
        self.tried: list[str] = []  # names
        self.calls: list[Call] = []  # those that have succeeded
        self.struck = False  # whether one has failed
        self._kind, self._left = kind, at

    def open(self, folder: Path) -> None:
        """Watches the folder until the process ends."""
        self._hook = HOOK(self._called)  # must live as long as it can be called
        ctypes.CDLL(None).watch(os.fsencode(os.path.realpath(folder)), self._hook)

    def _called(
        self, done: int, name: bytes, path: bytes, other: bytes, number: int, data: Any, size: int
    ) -> int:
        call = name.decode()
        if done:
            content = ctypes.string_at(data, size) if data else b""
            self.calls.append(Call(call, os.fsdecode(path), os.fsdecode(other), number, content))
            return 0
        self.tried.append(call)
        result, applies = KINDS.get(self._kind, (0, ()))
        if call not in applies:
            return 0
        left = self._left = self._left - 1  # read once: several threads call this
        fails = left == 0 or (left < 0 and self._kind == "full")
        self.struck |= fails
        return result if fails else 0


def preloaded(module: str, function: str, *arguments: Any, timeout: float = 3600) -> Any:
    """Calls a function of a module of this folder in a new process with the library; arguments and
    result are JSON.

    Skips the test where the library cannot be built.
    """
    import pytest

    compiler = shutil.which("cc")
    if compiler is None or not sys.platform.startswith("linux") or sys.maxsize < 1 << 32:
        pytest.skip("needs a C compiler (cc) and 64-bit Linux, to intercept file operations")
    code = "import sys, json, io_calls; io_calls.answer(*json.loads(sys.argv[1]))"
    paths = os.pathsep.join(map(str, (HERE, HERE.parent, HERE.parents[2])))
    with tempfile.TemporaryDirectory() as folder:
        library = f"{folder}/io_calls.so"
        subprocess.run(
            [compiler, "-O1", "-shared", "-fPIC", "-o", library, HERE / "io_calls.c"], check=True
        )
        variables = {
            "LD_PRELOAD": library,
            "PYTHONPATH": paths,
            "LOG_RANK": "0",
            "OMP_NUM_THREADS": "1",
        }
        result = subprocess.run(
            [sys.executable, "-c", code, json.dumps([module, function, arguments])],
            env={**os.environ, **variables},
            capture_output=True,
            text=True,
            timeout=timeout,
        )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


def answer(module: str, function: str, arguments: list[Any]) -> None:
    """The process that `preloaded` starts."""
    del os.environ["LD_PRELOAD"]
    print(json.dumps(getattr(importlib.import_module(module), function)(*arguments)), flush=True)
    os._exit(0)  # gloo's threads can abort an orderly exit


class Outcome(NamedTuple):
    code: int
    output: str
    result: Any


def forked(function: Callable[[], int], after: Callable[[], Any] = lambda: None) -> Outcome:
    """Calls `function` in a forked process, then `after` for the result.

    An exception that leaves it is code 99.
    """
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as result:
        if not (pid := os.fork()):
            for number in (1, 2):
                os.dup2(output.fileno(), number)
            code = 99
            try:
                code = function()
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os.write(result.fileno(), pickle.dumps(after()))
                os._exit(code)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        text, returned = (os.pread(file.fileno(), 1 << 27, 0) for file in (output, result))
    return Outcome(code, text.decode("utf-8", "replace"), pickle.loads(returned))
