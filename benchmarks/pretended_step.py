"""Counts what a training step asks of a GPU, on a pretended one: kernels, waits, collectives.

    python benchmarks/pretended_step.py [--cases "NAME;NAME"] [--list]

What it is: each case is train.py on the GPU of tests/nullgpu, which computes nothing and records
the calls. The fourth step, which is not logged, is counted: kernels of Triton and others, matrix
products, copies, waits of the host, and collectives with their operations. The peak of the
allocator and the number of compiled graphs are reported too.
Why it is here: each of these numbers can grow while all results of training stay the same. A wait
of the host costs time on a GPU only; a second graph costs minutes of compiling.
What it costs: a CUDA build of torch, g++ and no GPU; one to three minutes per case, most of them
for the compiler. It shows no times, and attention is not cuDNN's.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import report

sys.path.insert(0, str(report.ROOT))
sys.path.insert(0, str(report.ROOT / "tests/nullgpu"))

from counted_step import LOW_PRECISION, SMALL, Found, measure
from pretended_gpu import build, why_not


class Case(NamedTuple):
    processes: int
    arguments: list[str]


def one_gpu(flavor: str, local_batches: int, sequences: int, *options: str) -> Case:
    """Builds a case of a preset on one GPU, with so many local batches of so many sequences."""
    sizes = [
        f"--training.local_batch_size={sequences}",
        f"--training.global_batch_size={local_batches * sequences}",
    ]
    return Case(1, [f"llama3_{flavor}", *sizes, *options])


CASES = {
    "1b": one_gpu("1b", 1, 4),
    "1b, 2 local batches": one_gpu("1b", 2, 4),
    "1b, bfloat16 states": one_gpu("1b", 1, 4, *LOW_PRECISION),
    "3b": one_gpu("3b", 1, 1),
    "8b": one_gpu("8b", 1, 1),
    "small": Case(1, SMALL),
    "small, dp_shard 2": Case(2, [*SMALL, "--parallel.dp_shard=2"]),
    "small, dp_shard 2, never resharded": Case(
        2, [*SMALL, "--parallel.dp_shard=2", "--parallel.reshard_after_forward=never"]
    ),
    "small, dp_replicate 2": Case(2, [*SMALL, "--parallel.dp_replicate=2"]),
    "small, tp 2": Case(2, [*SMALL, "--parallel.tp=2"]),
    "small, cp 2": Case(2, [*SMALL, "--parallel.cp=2"]),
    "small, pp 2": Case(2, [*SMALL, "--parallel.pp=2"]),
}


def without_names(found: Found) -> dict[str, Any]:
    """Returns all numbers of a process; its hundreds of kernels are only counted."""
    step = found.step._asdict()
    del step["kernels"]
    return {**found._asdict(), "step": step}


def row(name: str, found: Found) -> str:
    step = found.step
    return (
        f"| {name} | {step.triton} | {step.other} | {step.products} | {step.copies} "
        f"| {len(step.waits)} | {found.graphs} | {found.reserved_gib:.2f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", default="", help="names, with semicolons between; default: all")
    parser.add_argument("--list", action="store_true", help="print the cases and what they are")
    options = parser.parse_args()
    if options.list:
        for name, case in CASES.items():
            print(f"{name}: {' '.join(case.arguments)}")
        return
    if missing := why_not():
        raise SystemExit(f"error: {missing}; expected a CUDA build of torch, g++ and no GPU")
    names = [name.strip() for name in options.cases.split(";") if name.strip()] or list(CASES)
    table = [
        "| case, rank 0 | Triton's kernels | others | products | copies | waits | graphs | reserved, GiB |",
        "|---|---|---|---|---|---|---|---|",
    ]
    collectives = ["| case, rank 0 | collectives of the step |", "|---|---|"]
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        library = build(Path(folder))
        for name in names:
            case = CASES[name]
            try:
                found = measure(case.processes, case.arguments, library)
            except RuntimeError as error:
                results[name] = {"failed": str(error)}
                print(f"{name}: {error}", flush=True)
                continue
            results[name] = {
                "arguments": case.arguments,
                "ranks": [without_names(one) for one in found],
            }
            table.append(row(name, found[0]))
            print(table[-1], flush=True)
            if found[0].step.collectives:
                calls = [f"{n} x {call}" for call, n in found[0].step.collectives.items()]
                collectives.append(f"| {name} | {'; '.join(calls)} |")
                print(collectives[-1], flush=True)
            commands = [f"- {one}: `{' '.join(CASES[one].arguments)}`" for one in results]
            body = [*table, "", *collectives, "", *commands]
            report.write("pretended_step", "A step on a pretended GPU", body, results)
    report.exit_code(results)


if __name__ == "__main__":
    main()
