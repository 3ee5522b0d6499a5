"""Compares checkpoints with torch.distributed.checkpoint's own storages: time and memory.

    python benchmarks/dcp.py [--gb 3] [--folder PATH] [--rounds 4]

1. Two processes save and load the same state (weights and two moments, sharded as FSDP does) as
titanlite does, with HuggingFaceStorageWriter (the same kind of file) and with FileSystemWriter; all
three sync; titanlite also hashes. Arms alternate, forwards and backwards, in the same processes;
medians are reported. Everything is written twice and the second write is measured: a virtual
machine returns free memory to its host, and the first write has to allocate it again. Memory is the
growth of anonymous memory to its peak during a save or load, in the process that needs more.
2. One process makes one file with the whole state, from the state as the storage that it belongs to
saved it: `titanlite convert STEP model.pt` beside dcp.load with torch.save, and `.safetensors`
beside torch's consolidate_safetensors_files. torch's do not sync and ours does, so the first pair is
measured with both synced, and with neither: then ours leaves out fsync and the hint that makes Linux
write early. titanlite verifies the hashes in each; the comparison that `convert` makes afterwards is
timed apart, because torch's make none. `--one-file` measures this part alone.
Takes ten minutes on two cores, and six times the bytes on the disk of the folder.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import report

NUM_WEIGHTS = 12 * 9 + 3
WORLD = 2
ARMS = ("titanlite", "HuggingFaceStorageWriter", "FileSystemWriter")
CONVERT = """
import json, os, sys, time
from pathlib import Path
arm, source, target, benchmarks = sys.argv[1:]
sys.path.insert(0, benchmarks)
from dcp import AnonymousPeak
import torch, torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.checkpoint import _consolidate_hf_safetensors as hf
from titanlite.tools.formats.convert import Options, convert

def titanlite():
    options = Options(full=True, verify="compared" in arm)
    convert(source, target, options, lambda text: None)

def load_and_save():
    saved = dcp.FileSystemReader(source).read_metadata().state_dict_metadata
    state = {name: torch.empty(one.size, dtype=one.properties.dtype) for name, one in saved.items()}
    dcp.load(state, checkpoint_id=source, no_dist=True)
    with open(target, "xb") as file:
        torch.save(state, file)
        if "unsynced" not in arm:
            os.fsync(file.fileno())

def join_parts():
    Path(target).mkdir()
    names = dict.fromkeys(HuggingFaceStorageReader(source).read_metadata().state_dict_metadata, 1)
    hf.consolidate_safetensors_files(source, target, names)

if "unsynced" in arm:
    os.fsync = lambda descriptor: None
    import titanlite.tools.formats.in_place as in_place
    in_place.start_writeback = lambda *place: None
work = {"titanlite": titanlite, "dcp.load": load_and_save, "consolidate": join_parts}
torch.set_num_threads(1)  # its threads spin where another process has their core
started, cpu = time.monotonic(), time.process_time()
with AnonymousPeak() as peak:
    work[arm.split()[0]]()
seconds, cpu = time.monotonic() - started, time.process_time() - cpu
print(json.dumps({"seconds": seconds, "cpu": cpu, "memory": peak.extra}))
"""
# Arm -> the storage that saved its source, and the target; torch's arm comes after ours
ONE_FILE = {
    "titanlite .pt": ("titanlite", "whole.pt"),
    "titanlite .pt compared": ("titanlite", "whole.pt"),
    "dcp.load and torch.save": ("FileSystemWriter", "whole.pt"),
    "titanlite .pt unsynced": ("titanlite", "whole.pt"),
    "dcp.load and torch.save unsynced": ("FileSystemWriter", "whole.pt"),
    "titanlite .safetensors unsynced": ("titanlite", "whole.safetensors"),
    "consolidate unsynced": ("HuggingFaceStorageWriter", "whole"),
}


class AnonymousPeak:
    """Measures the growth of this process's anonymous memory to its peak, every 5 ms.

    Pages of mapped files belong to the page cache.
    """

    def __enter__(self) -> AnonymousPeak:
        self.base = self.peak = self.anonymous()
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self.watch)
        self.thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.ended.set()
        self.thread.join()

    def watch(self) -> None:
        while not self.ended.wait(0.005):
            self.peak = max(self.peak, self.anonymous())

    @property
    def extra(self) -> int:
        return self.peak - self.base

    @staticmethod
    def anonymous() -> int:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("RssAnon"):
                return int(line.split()[1]) * 1024
        raise ValueError("no RssAnon in /proc/self/status")


class Arms:
    """The work of one process of the pair."""

    def __init__(self, folder: Path, num_bytes: int) -> None:
        import torch
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import DTensor, Shard

        from titanlite.checkpoint.planner import PlacementSavePlanner

        self.folder = folder
        self.steps = 0
        mesh = init_device_mesh("cpu", (WORLD,))
        rows = num_bytes // (3 * NUM_WEIGHTS * 4 * 512) // WORLD

        def tensor() -> DTensor:
            return DTensor.from_local(torch.randn(rows, 512), mesh, [Shard(0)])

        names = [f"layers.{i}.weight" for i in range(NUM_WEIGHTS)]
        moments = {f"state.{name}.{key}": tensor() for name in names for key in ("m", "v")}
        self.state: dict[str, dict[str, Any]] = {
            "model": {name: tensor() for name in names},
            "optimizer": moments,
        }
        self.planner = PlacementSavePlanner()

    def save(self, arm: str) -> None:
        import torch.distributed.checkpoint as dcp

        path = self.folder / arm
        if arm == "titanlite":
            import step_io

            step_io.save(path, 1, self.state, self.planner)
        elif arm == "HuggingFaceStorageWriter":
            writer = dcp.HuggingFaceStorageWriter(str(path), save_distributed=True)
            dcp.save(self.state, storage_writer=writer)
        elif arm == "FileSystemWriter":
            dcp.save(self.state, storage_writer=dcp.FileSystemWriter(path, sync_files=True))
        else:
            self.plain_write(path)

    def plain_write(self, path: Path) -> None:
        """Writes the same bytes as one file per process, as fast as the disk takes them."""
        import torch
        import torch.distributed as dist

        path.mkdir(exist_ok=True)
        with (path / str(dist.get_rank())).open("wb", buffering=0) as file:
            for part in self.state.values():
                for tensor in part.values():
                    file.write(tensor.to_local().reshape(-1).view(torch.uint8).numpy().data)
            os.fsync(file.fileno())

    def load(self, arm: str) -> None:
        import torch.distributed.checkpoint as dcp

        path = self.folder / arm
        if arm == "titanlite":
            import step_io

            from titanlite.checkpoint.manifest import read_manifest

            step_io.load(path / "step-1", read_manifest(path / "step-1"), self.state)
        elif arm == "HuggingFaceStorageWriter":
            reader = dcp.HuggingFaceStorageReader(str(path))
            dcp.load(self.state, storage_reader=reader)
        else:
            dcp.load(self.state, storage_reader=dcp.FileSystemReader(path))

    def measure(self, what: str, arm: str) -> dict[str, float]:
        """Measures seconds until all processes are done, and the growth of this one's memory."""
        import torch.distributed as dist

        repetitions = 2 if what == "save" else 1
        for _ in range(repetitions):
            if what == "save" and dist.get_rank() == 0:
                shutil.rmtree(self.folder / arm, ignore_errors=True)
            gc.collect()
            dist.barrier()
            started = time.monotonic()
            with AnonymousPeak() as peak:
                (self.save if what == "save" else self.load)(arm)
            dist.barrier()
            seconds = time.monotonic() - started
        return {"seconds": seconds, "memory": peak.extra}


def child(rank: int, folder: Path, num_bytes: int) -> None:
    """Runs one of two processes, which follows the commands on its standard input."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), WORLD)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD)
    gc.disable()  # as training has it between its own collections
    arms = Arms(folder, num_bytes)
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        what, arm = json.loads(line)
        print(json.dumps(arms.measure(what, arm)), flush=True)
    dist.barrier()
    os._exit(0)


class Pair:
    """Two processes, which take turns at the arms together."""

    def __init__(self, folder: Path, num_bytes: int) -> None:
        environment = os.environ | {
            "PYTHONPATH": f"{report.ROOT}:{report.ROOT / 'benchmarks'}",
            "PYTHONWARNINGS": "ignore",
        }
        command = [sys.executable, __file__, "--child", str(folder), str(num_bytes)]
        self.processes = [
            subprocess.Popen(
                [*command, str(rank)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=environment,
            )
            for rank in range(WORLD)
        ]
        self.answers()

    def answers(self) -> list[Any]:
        lines = [process.stdout.readline() for process in self.processes if process.stdout]
        if not all(lines):
            raise SystemExit("a process ended; its message is above")
        return [json.loads(line) for line in lines]

    def measure(self, what: str, arm: str) -> dict[str, float]:
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.write(json.dumps([what, arm]) + "\n")
            process.stdin.flush()
        found = self.answers()
        return {key: max(one[key] for one in found) for key in ("seconds", "memory")}

    def close(self) -> None:
        for process in self.processes:  # each waits for the other before it ends
            assert process.stdin is not None
            process.stdin.close()
        for process in self.processes:
            process.wait(60)


def compared(
    pair: Pair, arms: tuple[str, ...], what: str, rounds: int
) -> dict[str, dict[str, float]]:
    """Returns medians of each arm; runs the arms forwards, then backwards, and so on."""
    found: dict[str, list[dict[str, float]]] = {arm: [] for arm in arms}
    for number in range(rounds):
        for arm in arms if number % 2 == 0 else reversed(arms):
            found[arm].append(pair.measure(what, arm))
            print(what, arm, found[arm][-1], flush=True)
    return {
        arm: {key: statistics.median(one[key] for one in all_of) for key in all_of[0]}
        for arm, all_of in found.items()
    }


def whole_files(folder: Path, rounds: int) -> dict[str, dict[str, float]]:
    """Measures making one file with the whole state in one process, from each storage's folder."""
    found: dict[str, list[dict[str, float]]] = {arm: [] for arm in ONE_FILE}
    for number in range(rounds):
        for arm in ONE_FILE if number % 2 == 0 else reversed(ONE_FILE):
            storage, name = ONE_FILE[arm]
            source = folder / storage / ("step-1" if storage == "titanlite" else "")
            target = folder / name
            for _ in range(2):
                shutil.rmtree(target, ignore_errors=True)
                target.unlink(missing_ok=True)
                command = [sys.executable, "-W", "ignore", "-c", CONVERT, arm]
                here = str(Path(__file__).parent)
                one = report.child([*command, str(source), str(target), here])
            shutil.rmtree(target, ignore_errors=True)
            target.unlink(missing_ok=True)
            found[arm].append(one)
            print(arm, one, flush=True)
    return {
        arm: {key: statistics.median(one[key] for one in all_of) for key in all_of[0]}
        for arm, all_of in found.items()
    }


def pairs_table(rows: dict[str, dict[str, float]], num_bytes: int) -> list[str]:
    """Writes a table of the arms that make one file: each of ours relative to the next of torch."""
    lines = [
        "| one file | seconds | CPU seconds | titanlite's time / torch's | its CPU time / torch's | "
        "its memory / state |",
        "|---|---|---|---|---|---|",
    ]
    arms = list(rows)
    for number, arm in enumerate(arms):
        row = rows[arm]
        ratios = ["", ""]
        if arm.startswith("titanlite"):
            name = next(other for other in arms[number:] if not other.startswith("titanlite"))
            ratios = [f"{row[key] / rows[name][key]:.2f}" for key in ("seconds", "cpu")]
        lines.append(
            f"| {arm} | {row['seconds']:.2f} | {row['cpu']:.2f} | {ratios[0]} | {ratios[1]} | "
            f"{row['memory'] / num_bytes:.3f} |"
        )
    return [*lines, ""]


def table(rows: dict[str, dict[str, float]], num_bytes: int, first: str) -> list[str]:
    """Writes a table: time, speed, memory, and both relative to the first row."""
    lines = [
        f"| {first} | seconds | GB/s | extra memory | titanlite's time / its | its memory / state |",
        "|---|---|---|---|---|---|",
    ]
    own = rows["titanlite"]["seconds"]
    for name, row in rows.items():
        seconds = row["seconds"]
        lines.append(
            f"| {name} | {seconds:.2f} | {num_bytes / seconds / 1e9:.2f} | "
            f"{row['memory'] / 1e9:.3f} GB | {own / seconds:.2f} | "
            f"{row['memory'] / num_bytes:.3f} |"
        )
    return [*lines, ""]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gb", type=float, default=3.0, help="bytes of state, of both processes")
    parser.add_argument("--folder", default=None, help="a folder on the disk to measure")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--one-file", action="store_true", help="measure the second part alone")
    parser.add_argument("--label", default="disk", help="in the result's name, with --one-file")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        folder, size, rank = options.child
        child(int(rank), Path(folder), int(size))
        return
    num_bytes = int(options.gb * 1e9)
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        pair = Pair(folder, num_bytes)
        if options.one_file:
            for arm in ARMS:
                pair.measure("save", arm)
        else:
            results["save"] = compared(pair, (*ARMS, "plain write"), "save", options.rounds)
            shutil.rmtree(folder / "plain write")  # nothing loads it
            results["load"] = compared(pair, ARMS, "load", options.rounds)
        pair.close()
        one_file = whole_files(folder, max(1, options.rounds // 2))
    body = [f"State of {options.gb} GB, two processes, files in the page cache for loading.", ""]
    for what, rows in results.items():
        body += table(rows, num_bytes, what)
    body += pairs_table(one_file, num_bytes)
    results["one file"] = one_file
    print("\n".join(body))
    name = "dcp"
    if options.one_file:
        name = f"one_file_{options.label}"
    report.write(name, "A checkpoint beside torch's own storages", body, results)


if __name__ == "__main__":
    main()
