"""A fuzzer: gives mutated files and messages to every reader of titanlite.

    python tests/support/fuzz.py --seconds 3600 [--reader NAME ...] [--seed N]

What it is: mutates valid samples (`fuzz_mutations.py`) and gives them to the readers, which stand in
the test files of `TESTS` under the name `FUZZED`. Inputs that reach a new line of titanlite are
mutated further. Each must give a value, or a ConfigError of short printable lines. Findings are:
another exception, code that is run, a file opened outside the folder, more than 10 s or 1 GB, a
crash. They are shortened and stored in tests/corpus/<reader>/, which `test_fuzz.py` replays; those
above 8 kB with zlib.
Why it is not Hypothesis: that builds values from strategies. What finds faults here are small
changes of valid files, feedback from the lines they reach, and limits of time and memory, which it
does not have.
What it costs: a forked process with limits per batch of inputs, and a tracer of lines for every
eighth input.
Limit: files that the safetensors library opens itself are not noticed.
"""

from __future__ import annotations

import argparse
import faulthandler
import importlib
import itertools
import mmap
import os
import random
import re
import resource
import signal
import struct
import sys
import tempfile
import time
import traceback
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests/support")]

import torch  # noqa: E402
from fuzz_mutations import LARGEST, mutate  # noqa: E402
from fuzz_samples import Reader  # noqa: E402

from titanlite.runtime import limited_child  # noqa: E402
from titanlite.runtime.errors import ConfigError  # noqa: E402
from titanlite.tokenizer import tokenizer_probe  # noqa: E402
from titanlite.tools.chat import template  # noqa: E402
from titanlite.tools.formats import pickle_reader  # noqa: E402
from titanlite.tools.prepare import parquet_reader  # noqa: E402

CORPUS = ROOT / "tests/corpus"
# Limits of one execution: time, bytes beyond those at the start
SECONDS, MEMORY = 10, 1 << 30
MEMORY_DISK = "/dev/shm" if os.path.isdir("/dev/shm") else None  # some readers sync what they write
PLAIN = 8000  # bytes of a corpus file; larger ones are compressed


# Test files that have readers in `FUZZED`
TESTS = (
    "checkpoint/test_divergence.py",
    "checkpoint/test_manifest.py",
    "checkpoint/test_resume.py",
    "checkpoint/test_retention.py",
    "checkpoint/test_storage.py",
    "config/test_load.py",
    "data/test_prepared.py",
    "data/test_shards.py",
    "data/test_verification.py",
    "distributed/test_agreement.py",
    "distributed/test_hang_diagnosis.py",
    "observe/test_metrics_file.py",
    "tokenizer/test_tokenizer.py",
    "tokenizer/test_tokenizer_json.py",
    "tools/chat/test_template.py",
    "tools/formats/test_convert_limits.py",
    "tools/formats/test_dcp_safetensors.py",
    "tools/formats/test_foreign_hostile.py",
    "tools/formats/test_peft.py",
    "tools/formats/test_same_model.py",
    "tools/formats/test_torch_file.py",
    "tools/plan/test_machines.py",
    "tools/prepare/test_build.py",
    "tools/prepare/test_datatrove_files.py",
    "tools/prepare/test_parquet_reader.py",
    "tools/prepare/test_rows.py",
    "tools/prepare/test_text_files.py",
    "tools/prepare/test_token_files.py",
    "tools/report/test_run_data.py",
)


def collect() -> dict[str, Reader]:
    """The readers of all test files."""
    readers: dict[str, Reader] = {}
    for file in TESTS:
        module = importlib.import_module("tests." + file.removesuffix(".py").replace("/", "."))
        assert not readers.keys() & module.FUZZED.keys(), f"{file}: the name exists"
        readers |= module.FUZZED
    return readers


READERS = collect()


class Finding(NamedTuple):
    reader: str
    what: str  # the kind of failure, and where
    data: bytes

    def store(self) -> Path:
        folder = CORPUS / slug(self.reader)
        folder.mkdir(parents=True, exist_ok=True)
        small = len(self.data) <= PLAIN
        path = folder / (slug(self.what) + ("" if small else ".zlib"))
        path.write_bytes(self.data if small else zlib.compress(self.data, 9))
        return path


def slug(text: str) -> str:
    return re.sub(r"[^\w.-]+", "-", text).strip("-.")[:80]


def corpus(reader: str) -> list[bytes]:
    """The stored inputs of a reader, which have failed once."""
    found = []
    for path in sorted((CORPUS / slug(reader)).glob("*")):
        found.append(
            zlib.decompress(path.read_bytes()) if path.suffix == ".zlib" else path.read_bytes()
        )
    return found


RUNS = (
    "pickle.find_class",
    "subprocess.Popen",
    "os.system",
    "os.exec",
    "os.posix_spawn",
    "os.fork",
    "socket.connect",
)
# Programs of processes with limits, which may be started
LIMITED = {
    limited_child.command(module.main, packages)[5]
    for module, packages in (
        (pickle_reader, ()),
        (parquet_reader, parquet_reader.PACKAGES),
        (template, template.PACKAGES),
        (tokenizer_probe, ("tokenizers",)),
    )
}
CHANGES = tuple(
    f"os.{name}"
    for name in ("remove", "rename", "mkdir", "rmdir", "link", "symlink", "truncate", "chmod")
)
EVALUATES = ("typing", "dataclasses", "collections")  # annotations, and the methods of classes
READABLE = (
    sys.prefix,
    sys.base_prefix,
    f"{ROOT}/titanlite",
    f"{ROOT}/train_configs",
    "/proc",
    os.devnull,
)


class Child:
    """Executes inputs, in a forked process with limits.

    `shared` holds their number and the current one.
    """

    def __init__(self, reader: Reader, folder: Path, shared: mmap.mmap) -> None:
        self.reader = reader
        self.shared = shared
        self.folder = folder / "files"
        self.queue = folder / "queue"
        self.found = folder / "found"
        self.reached: set[Any] = set()
        self.events: list[str] | None = None
        self.count = 0
        sys.stdin = sys.stdout = sys.stderr = open(os.devnull, "r+")  # noqa: SIM115
        for stream in (0, 1, 2):
            os.dup2(sys.stdin.fileno(), stream)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the parent
        # The interpreter would write the .pyc files of modules that a reader imports first, where
        # none are installed.
        sys.dont_write_bytecode = True
        # OpenMP's threads do not survive a fork: an operation would wait for them for ever
        torch.set_num_threads(1)
        faulthandler.disable()  # the parent reports crashes
        faulthandler.register(signal.SIGUSR1, (folder / "stack").open("w"), all_threads=True)
        os.chdir(self.folder)
        sys.addaudithook(self.watch)
        size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY,) * 2)
        resource.setrlimit(resource.RLIMIT_FSIZE, (MEMORY,) * 2)

    def watch(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Records events that mean that code is run, and files outside the folder."""
        if self.events is None:
            return
        if event == "exec":
            if (
                arguments[0].co_filename == "<string>"
                and sys._getframe(1).f_globals["__name__"] not in EVALUATES
            ):
                self.events.append("runs code")
        elif event == "open" or event in CHANGES:
            path = arguments[event == "os.symlink"]
            place = path if type(path) is int else os.path.abspath(os.fsdecode(path))
            reads = (
                event == "open"
                and arguments[1] in ("r", "rb", None)
                and not arguments[2] & os.O_ACCMODE
            )
            allowed = (str(self.folder), *(READABLE if reads else READABLE[-1:]))
            # A descriptor has been opened before
            named = self.reader.names_files or type(place) is int
            if not named and not place.startswith(allowed):
                self.events.append(f"{event} outside the folder: {ascii(place)[1:-1][:200]}")
        elif event in RUNS and not (event == "subprocess.Popen" and LIMITED & set(arguments[1])):
            self.events.append(event)

    def trace(self, frame: Any, event: str, argument: Any) -> Any:
        return self.line if frame.f_code.co_filename.startswith(str(ROOT / "titanlite")) else None

    def line(self, frame: Any, event: str, argument: Any) -> Any:
        self.reached.add((frame.f_code, frame.f_lineno))
        return self.line

    def execute(self, data: bytes) -> str:
        """Reads one input; returns the kind of failure, or nothing."""
        self.count += 1
        self.shared[: 16 + len(data)] = struct.pack("<QQ", self.count, len(data)) + data
        self.events, what = [], ""
        # Not always: it is slow
        sys.settrace(self.trace if self.count < 10 or self.count % 8 == 0 else None)
        try:
            self.reader.read(self.folder, data)
        except ConfigError as error:
            sys.settrace(None)
            # How long a message can be is the affair of ConfigError, which has a test
            if not str(error).replace("\n", "").isprintable() or "Traceback" in str(error):
                what = "an unprintable message, or a traceback in it"
        except BaseException as error:
            sys.settrace(None)
            what = (
                f"{type(error).__name__} in {innermost(traceback.extract_tb(error.__traceback__))}"
            )
        sys.settrace(None)
        events, self.events = self.events, None
        return what or (events[0] if events else "")

    def run(self, inputs: Iterator[bytes], seconds: float, fixed: int) -> None:
        """Executes the first `fixed` inputs, then others for some seconds."""
        until = time.monotonic() + seconds
        for data in inputs:
            before = len(self.reached)
            if what := self.execute(data):
                self.report(what, data)
            elif len(self.reached) > before and len(data) < 20_000:
                (self.queue / f"{zlib.crc32(data):08x}").write_bytes(data)
            if self.count <= fixed:
                until = time.monotonic() + seconds
            elif time.monotonic() > until:
                return

    def report(self, what: str, data: bytes) -> None:
        """Shortens an input that failed and stores it, unless this kind of failure is known."""
        path = self.found / slug(what)
        if path.exists():
            return
        size, until = len(data) // 2, time.monotonic() + SECONDS / 3
        while size and time.monotonic() < until:
            at = 0
            while at < len(data) and time.monotonic() < until:
                shorter = data[:at] + data[at + size :]
                if self.execute(shorter) == what:
                    data = shorter
                else:
                    at += size
            size //= 2
        path.write_bytes(what.encode() + b"\n" + data)


def innermost(stack: Any) -> str:
    """The last function of titanlite in a stack."""
    names = [
        f"{Path(f.filename).stem}.{f.name}"
        for f in stack
        if f.filename.startswith(str(ROOT / "titanlite"))
    ]
    return names[-1] if names else "the reader"


class Campaign:
    """Runs inputs of one reader, and counts its executions and findings."""

    def __init__(self, name: str, folder: Path, seed: int = 0) -> None:
        self.name = name
        self.reader = READERS[name]
        self.seed = seed
        self.folder = folder / slug(name)
        for part in ("files", "queue", "found"):
            (self.folder / part).mkdir(parents=True)
        self.samples = self.reader.prepare(self.folder / "files")
        self.shared = mmap.mmap(-1, 16 + LARGEST + 1000)
        self.findings: dict[str, Finding] = {}
        self.executions, self.seconds, self.batches = 0, 0.0, 0

    def mutations(self, pool: list[bytes]) -> Iterator[bytes]:
        """Mutates the samples, and inputs that reached new lines, without end."""
        chance = random.Random(f"{self.seed} {self.name} {self.batches}")
        while True:
            yield mutate(
                chance.choice(chance.choice((pool, self.samples))), self.reader.kind, pool, chance
            )

    def run(self, seconds: float, inputs: Iterator[bytes] | None = None) -> None:
        """Runs one batch: inputs until the time is over or one ends the process."""
        started = time.monotonic()
        pool = self.samples + [
            path.read_bytes() for path in sorted((self.folder / "queue").glob("*"))
        ]
        known = [] if inputs else pool + ([] if self.batches else corpus(self.name))
        self.batches += 1
        inputs = inputs or itertools.chain(known, self.mutations(pool))
        self.shared[:16] = bytes(16)
        process = os.fork()
        if process == 0:
            try:
                Child(self.reader, self.folder, self.shared).run(inputs, seconds, len(known))
                os._exit(0)
            except BaseException:
                (self.folder / "stack").write_text(traceback.format_exc())
            os._exit(1)
        count, since, used = -1, started, 0.0
        hung = False
        while (done := os.waitpid(process, os.WNOHANG))[0] == 0:
            time.sleep(0.01)
            now = struct.unpack("<Q", self.shared[:8])[0]
            if now != count:
                count, since, used = now, time.monotonic(), _cpu_seconds(process)
            elif (
                _cpu_seconds(process) > used + SECONDS  # others may use the cores too
                or time.monotonic() > since + 10 * SECONDS
            ):
                os.kill(process, signal.SIGUSR1)  # writes the stack
                time.sleep(0.3)
                os.kill(process, signal.SIGKILL)
                hung = True
        status = done[1]
        count, length = struct.unpack("<QQ", self.shared[:16])
        self.executions += count
        self.seconds += time.monotonic() - started
        if status:
            stack = re.findall(
                r'File "(\S+)", line \d+ in (\S+)', (self.folder / "stack").read_text()
            )
            stack = [frame for frame in stack if "/titanlite/" in frame[0]] or stack
            where = f" in {Path(stack[0][0]).stem}.{stack[0][1]}" if stack else ""
            what = (
                "hang"
                if hung
                else f"signal {os.WTERMSIG(status)}"
                if os.WIFSIGNALED(status)
                else "exit"
            ) + where
            self._add(what, self.shared[16 : 16 + length])
        for path in sorted((self.folder / "found").glob("*")):
            what, _, data = path.read_bytes().partition(b"\n")
            self._add(what.decode(), data)

    def _add(self, what: str, data: bytes) -> None:
        self.findings.setdefault(what, Finding(self.name, what, data))


def _cpu_seconds(process: int) -> float:
    """CPU time that the process has used so far."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def fuzz(names: list[str], seconds: float, seed: int, folder: Path) -> list[Campaign]:
    """Fuzzes the readers in turn; each has an equal part of the time, in batches of up to a minute."""
    readers = [Campaign(name, folder, seed) for name in names]
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0.1:
        for reader in readers:
            reader.run(min(60.0, left / len(readers)))
    return readers


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument(
        "--reader",
        action="append",
        choices=list(READERS),
        help="a reader; may be repeated; default: all",
    )
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=MEMORY_DISK) as folder:
        readers = fuzz(options.reader or list(READERS), options.seconds, options.seed, Path(folder))
    print(f"{'reader':<24}{'executions':>12}{'per second':>12}  findings")
    for reader in readers:
        kinds = "; ".join(reader.findings) or "none"
        print(
            f"{reader.name:<24}{reader.executions:>12,}{reader.executions / reader.seconds:>12,.0f}  {kinds}"
        )
    print(f"{'all':<24}{sum(reader.executions for reader in readers):>12,}")
    findings = [finding for reader in readers for finding in reader.findings.values()]
    for finding in findings:
        print(f"stored {finding.store().relative_to(ROOT)}")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
