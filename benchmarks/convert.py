"""The cost of a conversion: time compared with a plain copy of the same bytes, and memory.

    python benchmarks/convert.py [--flavor llama3_1b] [--folder PATH]

Makes a checkpoint of the flavor with random weights. Then it runs, each in a separate process, a
plain copy with fsync and the conversions from the step folder to every format and back, each twice
in the order A B B A with the copy, and reports medians. Everything is written twice in a row and
the second write is measured: a virtual machine returns free memory to its host, and the first write
has to allocate it again. The comparison of result and source (`--verify`) is timed separately.
Memory is the peak of the resident set minus the resident set after the imports. Takes about 15
minutes on two cores and five times the checkpoint's bytes on the disk.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import report

CHILD = """
import json, resource, shutil, sys, time
from pathlib import Path
from titanlite.tools.formats.convert import convert
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
base, options = peak(), json.loads(sys.argv[1])
for _ in range(2):
    target = Path(options["target"])
    shutil.rmtree(target) if target.is_dir() else target.unlink(missing_ok=True)
    started = time.monotonic()
    convert(**options, log=lambda text: None)
print(json.dumps({"seconds": time.monotonic() - started, "memory": peak() - base, "base": base}))
"""
MAKE = """
import sys
from pathlib import Path
import torch
import step_io
from titanlite.checkpoint.planner import PlacementSavePlanner
from titanlite.model.flavors import FLAVORS, parameter_shapes
config, generator = FLAVORS[sys.argv[1]], torch.Generator().manual_seed(0)
weights = {name: torch.randn(shape, generator=generator) * 0.02 for name, shape in parameter_shapes(config).items()}
files = {"model.json": config.to_json().encode()}
step_io.save(Path(sys.argv[2]), 1, {"model": weights}, PlacementSavePlanner(), files)
"""
FORMATS = {
    "hf": "",
    "safetensors": "",
    "torch": ".pt",
    "llama": "",
    "dcp": "",
    "gguf": ".gguf",
    "titanlite": "",
}


def run(*arguments: str) -> str:
    environment = os.environ | {"PYTHONPATH": f"{report.ROOT}:{report.ROOT / 'benchmarks'}"}
    return subprocess.run(
        [sys.executable, "-c", *arguments], check=True, stdout=-1, text=True, env=environment
    ).stdout


def remove(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def size_of(path: Path) -> int:
    return sum(
        file.stat().st_size
        for file in (path.rglob("*") if path.is_dir() else [path])
        if file.is_file()
    )


def copy(source: Path, target: Path) -> float:
    """Seconds of a plain copy that ends on the disk, as a conversion does."""
    for _ in range(2):
        if target.exists():
            shutil.rmtree(target)
        started = time.monotonic()
        target.mkdir()
        for file in [source] if source.is_file() else sorted(source.iterdir()):
            shutil.copyfile(file, target / file.name)
            descriptor = os.open(target / file.name, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)
        seconds = time.monotonic() - started
    return seconds


def measure(source: Path, target: Path, to: str) -> dict[str, float]:
    """Medians of a conversion and of plain copies of its source; the result of the conversion
    stays.
    """
    copies, found = [], []
    beside = target.with_name("copy")

    def convert() -> None:
        options = {"source": str(source), "target": str(target), "to": to, "verify": False}
        found.append(json.loads(run(CHILD, json.dumps(options))))

    def plain() -> None:
        copies.append(copy(source, beside))
        remove(beside)

    for work in (plain, convert, convert, plain):
        work()
    seconds = statistics.median(one["seconds"] for one in found)
    return {
        "copy": statistics.median(copies),
        "seconds": seconds,
        "memory": max(one["memory"] for one in found),
        "base": found[0]["base"],
        "bytes": size_of(source),
    }


def verified(source: Path, target: Path, to: str) -> dict[str, float]:
    """Seconds and memory of one conversion with its comparison."""
    return json.loads(
        run(CHILD, json.dumps({"source": str(source), "target": str(target), "to": to}))
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--flavor", default="llama3_1b")
    parser.add_argument("--formats", default=",".join(FORMATS), help="which, separated by commas")
    parser.add_argument("--folder", default=None, help="a folder on the disk to measure")
    options = parser.parse_args()
    body: list[str] = []
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        run(MAKE, options.flavor, str(folder / "run"))
        step = folder / "run/step-1"
        body += [f"{options.flavor}: {size_of(step) / 1e9:.2f} GB in fp32.", ""]
        body += [
            "| conversion | copy / conversion | conversion | speed | memory | with comparison | "
            "its memory |"
        ]
        body += ["|---|---|---|---|---|---|---|"]
        for to in options.formats.split(","):
            there, back = folder / f"there{FORMATS[to]}", folder / "back"
            ways = [(step, there, to)] + (
                [(there, back, "titanlite")] if to not in ("gguf", "titanlite") else []
            )
            for source, target, form in ways:
                one = measure(source, target, form)
                whole = verified(source, target, form) if target == there else {}
                results[f"{source.name} to {form} ({to})"] = {"plain": one, "verified": whole}
                label = f"titanlite to {to}" if target == there else f"{to} to titanlite"
                comparison = (
                    f"{whole['seconds']:.1f} s | {whole['memory'] / 1e9:.2f} GB" if whole else " | "
                )
                ratio, speed = one["copy"] / one["seconds"], one["bytes"] / one["seconds"] / 1e9
                body.append(
                    f"| {label} | {ratio:.2f} | {one['seconds']:.1f} s | {speed:.2f} GB/s "
                    f"| {one['memory'] / 1e9:.2f} GB | {comparison} |"
                )
                print(body[-1], flush=True)
            remove(there)
            remove(back)
    report.write("convert", "What a conversion costs", body, results)


if __name__ == "__main__":
    main()
