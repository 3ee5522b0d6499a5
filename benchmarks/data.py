"""The speed of the data: text to tokens, and tokens to batches.

    python benchmarks/data.py [--path FOLDER]

Tokenises text into shards, as the first start of a run does, and then reads the batches of steps from them, as training
does: first with a cold page cache if the system can drop it, then with a warm one. Takes a minute on two cores.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import report

sys.path.insert(0, str(report.ROOT))

from titanlite.config.schema import DataConfig
from titanlite.data.prepare import prepare
from titanlite.data.shards import Tokens, read_manifest
from titanlite.data.stream import TrainStream, Windows
from titanlite.data.tokenizer import Tokenizer

SEQ_LEN, BATCH = 2048, 8


def drop(folder: Path) -> bool:
    """Drops a folder's files from the page cache; False if the system has no call for it."""
    if not hasattr(os, "posix_fadvise"):
        return False
    for path in (path for path in folder.rglob("*") if path.is_file()):
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)
    return True


def read(prepared: Path) -> float:
    """Tokens per second of batches, as one process reads them."""
    manifest = read_manifest(prepared)
    windows = Windows(Tokens(prepared, manifest, "train"), SEQ_LEN, "training")
    stream = TrainStream(windows, seed=0, local_batch_size=BATCH, accumulation=1, rank=0, world=1)
    steps = windows.count // BATCH  # one epoch: what is read twice is in the page cache the second time
    started = time.perf_counter()
    for _ in range(steps):
        stream.next_step()
    return steps * BATCH * SEQ_LEN / (time.perf_counter() - started)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--path", default="", help="text; default: the standard library")
    options = parser.parse_args()
    if options.path and not os.path.exists(options.path):
        parser.error(f"--path {options.path}: no such file or folder")
    with tempfile.TemporaryDirectory() as cache:
        started = time.perf_counter()
        prepared = prepare(DataConfig(path=options.path, cache=cache), Tokenizer(), lambda text: None)
        seconds = time.perf_counter() - started
        manifest = read_manifest(prepared)
        tokens = sum(len(Tokens(prepared, manifest, part)) for part in ("train", "validation"))
        cold = read(prepared) if drop(prepared) else None
        warm = read(prepared)
    found: dict[str, Any] = {
        "prepare tok/s": tokens / seconds,
        "tokens": tokens,
        "cold tok/s": cold,
        "warm tok/s": warm,
    }
    body = ["| what | tok/s |", "|---|---|"]
    body.append(f"| text to shards, {tokens:,} tokens, one process | {tokens / seconds:,.0f} |")
    body += [f"| batches of {BATCH} x {SEQ_LEN}, cold | {cold:,.0f} |"] if cold else []
    body.append(f"| the same, warm | {warm:,.0f} |")
    print("\n".join(body))
    report.write("data", "Data", body, found)


if __name__ == "__main__":
    main()
