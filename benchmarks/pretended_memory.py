"""Measures the peaks of torch's caching allocator in a step of each flavor, on a pretended GPU.

    python benchmarks/pretended_memory.py [--cases "NAME;NAME"] [--list]

Each case trains three steps in a separate process on the GPU of tests/nullgpu, which computes
nothing and whose memory is never touched: it needs a CUDA build of torch, g++ and no GPU. The
allocator, the compiler and the order of allocations are the real ones, and so are the peaks, except
for what a library allocates by itself on a real device: the CUDA context, NCCL's buffers, cuBLAS's
workspaces beyond torch's own. The device has 640 GiB, so that no case runs out. A planner of memory
must predict these numbers.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import report

sys.path.insert(0, str(report.ROOT / "tests/nullgpu"))

from pretended_gpu import build, environment, why_not

GIB = 2**30
# The second has the moments that the first creates; the third must not be larger than it
STEPS = 3
CAPACITY = 640.0
COMMON = [
    "--training.seq_len=4096",
    "--training.local_batch_size=2",
    "--training.global_batch_size=2",
    "--compile.loss=false",
]
OPTIONS = {
    "compiled, 8 chunks": ["--compile.enabled=true", "--loss.num_chunks=8"],
    "compiled, whole loss": ["--compile.enabled=true", "--loss.num_chunks=1"],
    "not compiled, 8 chunks": ["--compile.enabled=false", "--loss.num_chunks=8"],
    "not compiled, whole loss": ["--compile.enabled=false", "--loss.num_chunks=1"],
}
RECOMPUTE = {
    "compiled, 8 chunks, full": ["--recompute.mode=full"],
    "compiled, 8 chunks, selective": ["--recompute.mode=selective"],
    "compiled, 8 chunks, memory budget 0.5": ["--recompute.mode=memory_budget"],
}
CASES: dict[str, list[str]] = {}
for flavor in ("1b", "3b", "8b"):
    base = [f"llama3_{flavor}", *COMMON]
    for name, options in OPTIONS.items():
        CASES[f"{flavor}, {name}"] = [*base, *options, "--recompute.mode=none"]
    for name, options in RECOMPUTE.items():
        CASES[f"{flavor}, {name}"] = [*base, *OPTIONS["compiled, 8 chunks"], *options]


def child(arguments: list[str]) -> dict[str, Any]:
    """Measures the peaks, in GiB, after each step of one case in this process."""
    import torch
    from contestants import Titanlite, make_batch

    subject = Titanlite([*arguments, "--run.device=cuda"])
    batch, peaks = make_batch(subject.config, subject.device, 0), []
    for _ in range(STEPS):
        subject.step(*batch)
        torch.cuda.synchronize()
        peaks.append(
            (torch.cuda.max_memory_allocated() / GIB, torch.cuda.max_memory_reserved() / GIB)
        )
    parameters = sum(p.numel() for part in subject.model_parts for p in part.parameters())
    return {
        "parameters": parameters,
        "allocated": peaks[-1][0],
        "reserved": peaks[-1][1],
        "peaks by step": peaks,
    }


def measure(name: str, library: Path) -> dict[str, Any]:
    """Measures the peaks of a case in a separate process."""
    variables = environment(library, gib=CAPACITY) | {"PYTHONPATH": str(report.ROOT)}
    command = [sys.executable, __file__, "--child", name]
    done = subprocess.run(command, capture_output=True, text=True, env=variables, check=False)
    if done.returncode:
        return {"failed": (done.stderr.strip().splitlines() or ["no message"])[-1][:200]}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def row(name: str, found: dict[str, Any]) -> str:
    if "failed" in found:
        return f"| {name} | {found['failed']} | | |"
    return (
        f"| {name} | {found['parameters']:,} | {found['allocated']:.2f} | {found['reserved']:.2f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", default="", help="names, with semicolons between; default: all")
    parser.add_argument("--list", action="store_true", help="print the cases and what they are")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.list:
        print("\n".join(f"{name}: {' '.join(arguments)}" for name, arguments in CASES.items()))
        return
    if options.child:
        print(json.dumps(child(CASES[options.child])), flush=True)
        os._exit(0)  # gloo's threads can abort an orderly end
    if missing := why_not():
        raise SystemExit(f"error: {missing}; expected a CUDA build of torch, g++ and no GPU")
    names = [name.strip() for name in options.cases.split(";") if name.strip()] or list(CASES)
    body = ["| case | parameters | allocated, GiB | reserved, GiB |", "|---|---|---|---|"]
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        library = build(Path(folder))
        for name in names:
            found = results[name] = measure(name, library)
            body.append(row(name, found))
            print(body[-1], flush=True)
            lines = [*body, "", *(f"- {one}: `{' '.join(CASES[one])}`" for one in results)]
            report.write("pretended_memory", "Memory on a pretended GPU", lines, results)
    report.exit_code(results)


if __name__ == "__main__":
    main()
