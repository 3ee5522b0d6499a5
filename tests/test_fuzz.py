"""The fuzzer: what it once found does not fail again, new inputs give a value or an error, planted
faults are found.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fuzz
import pytest
import torch
from fuzz import READERS
from fuzz_samples import RANKS, SHAPE, TOML, Reader, read_any, read_data, read_run

from titanlite.checkpoint import manifest, retention
from titanlite.checkpoint.divergence import read_record
from titanlite.checkpoint.folders import RECORD as DIVERGED
from titanlite.checkpoint.retention import PROVEN, read_proof
from titanlite.config import load
from titanlite.config.load import load_config
from titanlite.observe.logging import log_to_file
from titanlite.observe.metrics_file import truncate_after
from titanlite.tokenizer.tokenizer import Tokenizer
from titanlite.tools.formats import safetensors_files
from titanlite.tools.formats.detect_format import read_model
from titanlite.tools.formats.full_state import About, FullState

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/statm").exists(), reason="limits of memory need Linux"
)
FOLDERS = ("safetensors index", "model.json", "config.json", "DCP index")


@pytest.fixture
def folder():
    with tempfile.TemporaryDirectory(dir=fuzz.MEMORY_DISK) as path:
        yield Path(path)


def failures(readers: list[fuzz.Campaign]) -> list[tuple[str, str, bytes]]:
    return [
        (f.reader, f.what, f.data[:1000]) for reader in readers for f in reader.findings.values()
    ]


def test_no_file_with_readers_is_left_out():
    tests = fuzz.ROOT / "tests"
    files = (str(path.relative_to(tests)) for path in sorted(tests.rglob("test_*.py")))
    assert tuple(f for f in files if "\nFUZZED = " in (tests / f).read_text()) == fuzz.TESTS


@pytest.mark.slow
def test_corpus_and_new_inputs(folder):
    """In each batch come first the valid samples and the corpus, then mutations."""
    readers = fuzz.fuzz(list(READERS), 2.0, 0, folder)
    assert not failures(readers)
    for reader in readers:
        assert reader.executions >= len(reader.samples) + len(fuzz.corpus(reader.name)), reader.name


def test_valid_samples_are_read(folder):
    """Without an error: mutations of samples that are refused at the first line would find nothing."""
    for name, reader in READERS.items():
        where = folder / fuzz.slug(name)
        where.mkdir()
        for sample in reader.prepare(where):
            reader.read(where, sample)


def test_the_corpus_is_small_and_belongs_to_readers():
    paths = [path for path in fuzz.CORPUS.rglob("*") if path.is_file()]
    assert paths
    assert {path.parent.name for path in paths} <= {fuzz.slug(name) for name in READERS}
    assert all(path.stat().st_size < 10_000 for path in paths)


PLANTED = {  # reader -> a check that is taken away
    "manifest, sealed": (manifest, "require", lambda condition, problem: None),
    "TOML": (load, "convert", lambda value, key: (value, "")),
    "safetensors header": (safetensors_files, "SafetensorError", KeyboardInterrupt),
    ".proven": (retention, "typed", lambda kind, fields: kind(**fields)),
}


QUICK = (".proven",)  # one shows that the fuzzer finds a check that is gone


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in PLANTED],
)
def test_a_planted_fault_is_found(folder, monkeypatch, name):
    """Within 6,000 inputs; without the fault none is found."""
    monkeypatch.setattr(*PLANTED[name])
    reader = fuzz.Campaign(name, folder)
    while not reader.findings:
        assert reader.executions < 6000
        reader.run(0.5)


FAULTS: dict[bytes, tuple[Callable[[], Any], str]] = {
    b"hang": (lambda: [None for _ in iter(int, 1)], "hang"),
    b"memory": (lambda: bytearray(2 * fuzz.MEMORY), "MemoryError"),
    b"code": (lambda: exec("1"), "runs code"),
    b"command": (lambda: os.system("true"), "os.system"),
    b"write": (lambda: Path("../elsewhere").write_bytes(b""), "open outside the folder"),
    b"read": (lambda: Path("/etc/hostname").read_bytes(), "open outside the folder"),
    b"crash": (os.abort, "signal 6"),
    b"exit": (lambda: sys.exit(0), "SystemExit"),
}


@pytest.mark.slow
def test_every_kind_of_failure_is_found(folder, monkeypatch):
    monkeypatch.setattr(fuzz, "SECONDS", 2)
    faulty = Reader("bytes", lambda folder: [b""], lambda folder, data: FAULTS[data][0]())
    monkeypatch.setitem(READERS, "faulty", faulty)
    reader = fuzz.Campaign("faulty", folder)
    for fault, (_, kind) in FAULTS.items():
        reader.findings.clear()
        reader.run(5.0, iter([fault]))
        assert any(what.startswith(kind) for what in reader.findings), (
            fault,
            list(reader.findings),
        )


def test_what_the_interpreter_does_itself_is_no_failure(folder, monkeypatch):
    """A module that is imported by a reader, of which there is no .pyc file, and threads that a
    fork has ended.
    """
    installed = folder / "site-packages"
    installed.mkdir()
    (installed / "imported_late.py").write_text("")
    monkeypatch.syspath_prepend(installed)
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    monkeypatch.setattr(fuzz, "READABLE", (str(installed), *fuzz.READABLE))
    monkeypatch.setattr(fuzz, "SECONDS", 5)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    torch.ones(1 << 20).add_(1)  # starts OpenMP's threads

    def read(folder: Path, data: bytes) -> None:
        importlib.import_module("imported_late")
        torch.ones(1 << 20).add_(1)

    monkeypatch.setitem(READERS, "late", Reader("bytes", lambda folder: [b""], read))
    reader = fuzz.Campaign("late", folder)
    reader.run(60.0, iter([b""]))
    torch.set_num_threads(before)
    assert not failures([reader])


NOTHING = FullState(Path(), About(""), {})
# What makes a folder, and what reads it
FILES: dict[str, tuple[Callable[[Path], Any], Callable[[Path], Any]]] = {
    **{name: (READERS[name].prepare, lambda f: read_any(f / "x")) for name in FOLDERS},
    "run": (READERS["manifest"].prepare, read_run),
    "data": (READERS["prepared manifest"].prepare, lambda f: read_data(f / "data")),
    "safetensors": (READERS["safetensors"].prepare, lambda f: read_any(f / "x.safetensors")),
    "torch.save": (lambda f: (f / "x.pt").write_bytes(b""), lambda f: read_any(f / "x.pt")),
    "rank file": (lambda f: (f / "x").write_bytes(RANKS), lambda f: Tokenizer(f / "x")),
    "TOML": (lambda f: (f / "x").write_bytes(TOML), lambda f: load_config([str(f / "x")])),
    "--model": (
        lambda f: (f / "x").write_bytes(SHAPE),
        lambda f: read_model(str(f / "x"), NOTHING),
    ),
    "metrics.jsonl": (lambda f: (f / "x").write_bytes(b""), lambda f: truncate_after(f / "x", 3)),
    ".proven": (lambda f: (f / PROVEN).write_bytes(b"{}"), read_proof),
    DIVERGED: (lambda f: (f / DIVERGED).write_bytes(b'{"rollbacks": []}'), read_record),
    "log.txt": (lambda f: (f / "x").write_bytes(b""), lambda f: log_to_file(f / "x")),
}
KINDS: dict[str, Callable[[Path], Any]] = {
    "a pipe": os.mkfifo,
    "an endless device": lambda path: path.symlink_to("/dev/zero"),
    "a link to itself": lambda path: path.symlink_to(path.name),
    "a folder": os.mkdir,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_pipes_devices_and_folders_in_place_of_files(folder, monkeypatch, name):
    """Each is an error, or ignored; none is waited for, or read without end."""
    prepare, read = FILES[name]

    def replace(folder: Path, data: bytes) -> None:
        path, kind = data.decode().split("|")
        (folder / "kept").unlink(missing_ok=True)
        (folder / path).rename(folder / "kept")
        try:
            KINDS[kind](folder / path)
            with contextlib.suppress(OSError):  # the commands print it in one line
                read(folder)
        finally:
            (os.rmdir if kind == "a folder" else os.unlink)(folder / path)
            (folder / "kept").rename(folder / path)

    monkeypatch.setattr(fuzz, "SECONDS", 5)
    monkeypatch.setitem(READERS, "special", Reader("bytes", lambda f: [prepare(f)][:0], replace))
    reader = fuzz.Campaign("special", folder)
    files = folder / "special/files"
    inputs = [
        f"{p.relative_to(files)}|{kind}".encode()
        for p in files.rglob("*")
        if p.is_file()
        for kind in KINDS
    ]
    reader.run(60.0, iter(inputs))
    assert not failures([reader])
    assert reader.executions == len(inputs) > 0


@pytest.mark.slow
def test_fuzz_for_five_minutes():
    """Two and a half for each half of the readers at a time. Findings are stored in the corpus."""
    names = list(READERS)
    command = [sys.executable, fuzz.__file__, "--seconds", "150", "--seed", "1"]
    halves = [[f"--reader={name}" for name in half] for half in (names[::2], names[1::2])]
    processes = [
        subprocess.Popen([*command, *half], stdout=subprocess.PIPE, text=True) for half in halves
    ]
    outputs = [process.communicate()[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], "\n".join(outputs)
