"""Measures the speed of the data: text to tokens, and tokens to batches.

    python benchmarks/data.py [--path FOLDER]

Tokenises text into shards, as the first start of a run does, and then reads the batches of steps
from them, as training does: first with a cold page cache if the system can drop it, then with a
warm one. Then it measures the CPU time of several sources, of packing and of document masks. Takes
a minute on two cores.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import report

sys.path.insert(0, str(report.ROOT))

from titanlite.config.schema import DataConfig, TrainingConfig
from titanlite.data.mixture import Mixture
from titanlite.data.order import Samples
from titanlite.data.packing import PackedRows, best_fit
from titanlite.data.prepared_manifest import read_manifest
from titanlite.data.rows import Windows
from titanlite.data.shards import Tokens
from titanlite.data.stream import TrainStream
from titanlite.tokenizer.tokenizer import Tokenizer
from titanlite.tools.prepare.cache import prepare

SEQ_LEN, BATCH = 2048, 8


class OneRank(NamedTuple):
    """The data-parallel ranks of a run with one process."""

    data_rank: int = 0
    data_size: int = 1


def drop(folder: Path) -> bool:
    """Drops a folder's files from the page cache; returns False if the system cannot."""
    if not hasattr(os, "posix_fadvise"):
        return False
    for path in (path for path in folder.rglob("*") if path.is_file()):
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)
    return True


def stream_of(
    prepared: Path, packing: str = "split", document_mask: bool = False, sources: int = 1
) -> TrainStream:
    """Builds a run's stream; `sources`: the number of sources with this text and other weights."""
    tokens = Tokens(prepared, read_manifest(prepared), "train")
    training = TrainingConfig(seq_len=SEQ_LEN, global_batch_size=BATCH, local_batch_size=BATCH)
    build = PackedRows if packing == "best_fit" else Windows
    rows = {str(i): build(tokens, SEQ_LEN, "text") for i in range(sources)}
    mixture = Mixture([(0, [1.0 + i for i in range(sources)])])
    return TrainStream(Samples(rows, 0, mixture), training, OneRank(), document_mask)


def read(prepared: Path) -> float:
    """Measures tokens per second of batches that one process reads."""
    stream = stream_of(prepared)
    # One epoch only: a second read would find the page cache warm
    steps = stream.order.rows[0].count // BATCH
    started = time.perf_counter()
    for _ in range(steps):
        stream.next_step()
    return steps * BATCH * SEQ_LEN / (time.perf_counter() - started)


def per_cpu_second(stream: TrainStream) -> float:
    """Measures tokens per CPU second: the fastest of five times 100 steps, since a busy machine
    slows some of them down.
    """
    stream.next_step()  # maps the files
    seconds = []
    for _ in range(5):
        started = time.process_time()
        for _ in range(100):
            stream.next_step()
        seconds.append(time.process_time() - started)
    return 100 * BATCH * SEQ_LEN / min(seconds)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--path", default="", help="text; default: the standard library")
    options = parser.parse_args()
    if options.path and not os.path.exists(options.path):
        parser.error(f"--path {options.path}: no such file or folder")
    with tempfile.TemporaryDirectory() as cache:
        started = time.perf_counter()
        prepared = prepare(
            DataConfig(path=options.path, cache=cache), Tokenizer(), lambda text: None
        )
        seconds = time.perf_counter() - started
        manifest = read_manifest(prepared)
        tokens = sum(len(Tokens(prepared, manifest, part)) for part in ("train", "validation"))
        cold = read(prepared) if drop(prepared) else None
        warm = read(prepared)
        variants = {
            "one source": per_cpu_second(stream_of(prepared)),
            "four sources": per_cpu_second(stream_of(prepared, sources=4)),
            "best-fit packing": per_cpu_second(stream_of(prepared, "best_fit")),
            "document mask": per_cpu_second(stream_of(prepared, document_mask=True)),
            "four sources, packing and mask": per_cpu_second(
                stream_of(prepared, "best_fit", True, 4)
            ),
        }
        started = time.process_time()
        packed = PackedRows(Tokens(prepared, manifest, "train"), SEQ_LEN, "text")
        pack_seconds = time.process_time() - started
    lengths = np.random.default_rng(0).lognormal(6, 1, 2_500_000).astype(np.int64) % SEQ_LEN + 1
    started = time.process_time()
    best_fit(lengths, SEQ_LEN + 1)
    many_seconds = time.process_time() - started
    found: dict[str, Any] = {
        "prepare tok/s": tokens / seconds,
        "tokens": tokens,
        "cold tok/s": cold,
        "warm tok/s": warm,
        "tok/CPU s": variants,
        "packing CPU s": pack_seconds,
        "packing 2.5 million documents CPU s": many_seconds,
        "padding": packed.padding,
        "cut documents": packed.cut,
    }
    body = ["| what | tok/s |", "|---|---|"]
    body.append(f"| text to shards, {tokens:,} tokens, one process | {tokens / seconds:,.0f} |")
    body += [f"| batches of {BATCH} x {SEQ_LEN}, cold | {cold:,.0f} |"] if cold else []
    body.append(f"| the same, warm | {warm:,.0f} |")
    body += ["", f"| batches of {BATCH} x {SEQ_LEN}, warm | tok per CPU second |", "|---|---|"]
    body += [f"| {name} | {speed:,.0f} |" for name, speed in variants.items()]
    body += [
        "",
        f"Best-fit packing: {100 * packed.padding:.2f} % of the positions have no target, and "
        f"{100 * packed.cut:.1f} % "
        f"of the documents are cut. The rows of this text take {pack_seconds:.3f} CPU seconds, "
        "those of 2.5 million "
        f"documents of random lengths {many_seconds:.2f}.",
    ]
    print("\n".join(body))
    report.write("data", "Data", body, found)


if __name__ == "__main__":
    main()
