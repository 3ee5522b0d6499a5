"""Measures `titanlite prepare`: MB of text per CPU second, scaling with processes, peak memory.

    python benchmarks/prepare.py [--gigabytes 5] [--tokenizer FILE]

Makes a JSON lines file, a text file and a Parquet file on the spot, of the standard library's
source, and prepares each in separate processes. CPU seconds and memory are sums over all processes.
Memory is the peak of ten samples per second of the proportional set size (PSS: a shared page is
divided among the processes that map it). 0.2 GB take two minutes on two cores.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import report

from titanlite.tokenizer.tokenizer import Tokenizer
from titanlite.tools.prepare.sources import Source, find

ROW = 2000  # characters


def rows() -> Iterator[str]:
    """Yields pieces of the standard library's source repeatedly, each a little different."""
    text = "".join(Path(file.path).read_text() for file in find(Source()).files)
    for turn in itertools.count():
        for start in range(0, len(text), ROW):
            yield f"# {turn} {start}\n{text[start : start + ROW]}"


def make(path: Path, size: int) -> None:
    """Makes a file of about `size` bytes of text; its name gives the kind."""
    made = 0
    if path.suffix == ".parquet":
        import pyarrow as pa
        import pyarrow.parquet as pq

        with pq.ParquetWriter(path, pa.schema([("text", pa.string())])) as writer:
            source = rows()
            while made < size:
                group = list(itertools.islice(source, 5000))
                writer.write_table(pa.table({"text": group}))
                made += sum(map(len, group))
        return
    with path.open("w") as file:
        for text in rows():
            made += file.write(
                json.dumps({"text": text}) + "\n" if path.suffix == ".jsonl" else text
            )
            if made >= size:
                return


def memory(root: int) -> int:
    """Measures the PSS of a process and its children, in bytes."""
    total = 0
    with contextlib.suppress(OSError):
        total += 1024 * int(
            re.findall(r"^Pss:\s+(\d+)", Path(f"/proc/{root}/smaps_rollup").read_text(), re.M)[0]
        )
        for task in Path(f"/proc/{root}/task").iterdir():
            total += sum(memory(int(child)) for child in (task / "children").read_text().split())
    return total


def measure(source: Path, workers: int, tokenizer: str, folder: Path) -> dict[str, Any]:
    """Measures one preparation: text bytes per second and per CPU second, and peak memory."""
    command = [sys.executable, "-m", "titanlite", "prepare", str(source), "--out", str(folder)]
    command += ["--workers", str(workers), "--tokenizer", tokenizer]
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    peak = 0
    with subprocess.Popen(
        command, cwd=report.ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        while process.poll() is None:
            peak = max(peak, memory(process.pid))
            time.sleep(0.1)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)}: exit code {process.returncode}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds, cpu = (
        time.perf_counter() - started,
        after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
    )
    splits = json.loads((folder / "manifest.json").read_text())["splits"].values()
    size = sum(split["bytes"] for split in splits)
    return {"MB": size / 1e6, "seconds": seconds, "cpu seconds": cpu, "peak MB": peak / 1e6}


def limit(tokenizer: str) -> float:
    """Measures MB of text per CPU second of tiktoken alone, in this process."""
    encode, texts = Tokenizer(tokenizer).encode, list(itertools.islice(rows(), 5000))
    started = time.process_time()
    for text in texts:
        encode(text)
    return sum(len(text.encode()) for text in texts) / 1e6 / (time.process_time() - started)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--gigabytes", type=float, default=0.2, help="size of each source")
    parser.add_argument("--kinds", default="jsonl,txt,parquet")
    parser.add_argument("--tokenizer", default="", help="default: the bundled one")
    options = parser.parse_args()
    cores = len(os.sched_getaffinity(0))
    found: dict[str, Any] = {"tiktoken MB/cpu s": limit(options.tokenizer)}
    body = [
        "| source | processes | MB/s | MB per CPU second | peak memory |",
        "|---|---|---|---|---|",
    ]
    with tempfile.TemporaryDirectory() as scratch:
        for kind in options.kinds.split(","):
            source = Path(scratch, f"source.{kind}")
            make(source, int(options.gigabytes * 1e9))
            for workers in sorted({1, cores}):
                one = measure(
                    source, workers, options.tokenizer, Path(scratch, f"{kind}-{workers}")
                )
                found[f"{kind}, {workers}"] = one
                speeds = f"{one['MB'] / one['seconds']:.1f} | {one['MB'] / one['cpu seconds']:.1f}"
                body.append(
                    f"| {one['MB']:,.0f} MB of {kind} | {workers} | {speeds} | "
                    f"{one['peak MB']:,.0f} MB |"
                )
            source.unlink()
    body += ["", f"`Tokenizer.encode` alone: {found['tiktoken MB/cpu s']:.1f} MB per CPU second."]
    print("\n".join(body))
    report.write("prepare", "Preparing data", body, found)


if __name__ == "__main__":
    main()
