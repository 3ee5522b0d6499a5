"""Measures training throughput and memory of each flavor on this device.

    python benchmarks/throughput.py [--cases "SET or NAME;NAME"] [--steps 20] [--profile] [--list]

Each case is a configuration in a separate process, built from the parts that train.py is built
from: up to 20 steps that are not measured, then those that are, on text. Reported are tokens per
second by the median step; MFU by the formula of `titanlite/model/flops.py`; the median step, and
the 99th percentile (of fewer than 100 steps the slowest) relative to it; peak memory; how often the
host waited for the device in a step, which should be 0 (CUDA only); the dtype, and whether blocks
were compiled, or why not. With `--profile`, two more steps are recorded: the kernels that took most
of their time are written to the results, as a text file per case. A case that runs out of memory is reported as such, and the others
continue.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import sys
import warnings
from typing import Any

import report

from titanlite.config.mistakes import suggestion

UNCOUNTED = 20
ONE_B = [
    "llama3_1b",
    "--training.seq_len=4096",
    "--training.local_batch_size=2",
    "--loss.num_chunks=2",
    "--recompute.mode=none",
]
THREE_B = [
    "llama3_3b",
    "--training.seq_len=4096",
    "--training.local_batch_size=2",
    "--recompute.mode=none",
]
EIGHT_B = [
    "llama3_8b",
    "--training.seq_len=8192",
    "--training.local_batch_size=1",
    "--recompute.mode=full",
]
LOW_PRECISION = ["--training.param_dtype=bfloat16", "--optimizer.state_dtype=bfloat16"]
CASES: dict[str, list[str]] = {
    "1b": ONE_B,
    "1b, whole loss": [*ONE_B, "--loss.num_chunks=1"],
    "1b, not compiled": [*ONE_B, "--compile.enabled=false"],
    "1b, loss not compiled": [*ONE_B, "--compile.loss=false"],
    "1b, 8 chunks": [*ONE_B, "--loss.num_chunks=8"],
    "1b, 8 chunks, loss not compiled": [
        *ONE_B,
        "--loss.num_chunks=8",
        "--compile.loss=false",
    ],
    "1b, batch 4": [*ONE_B, "--training.local_batch_size=4", "--loss.num_chunks=4"],
    "1b, batch 8": [*ONE_B, "--training.local_batch_size=8", "--loss.num_chunks=8"],
    "1b, bfloat16 states": [*ONE_B, *LOW_PRECISION],
    "1b, selective": [*ONE_B, "--recompute.mode=selective"],
    "1b, full": [*ONE_B, "--recompute.mode=full"],
    "1b, memory budget 0.5": [*ONE_B, "--recompute.mode=memory_budget"],
    "1b, float8": [*ONE_B, "--float8.enabled"],
    "1b, by FSDP": [*ONE_B, "--parallel.reshard_after_forward=always"],
    "1b, by FSDP, kept": [*ONE_B, "--parallel.reshard_after_forward=never"],
    "1b, documents": [*ONE_B, "--data.document_mask"],
    "1b, 8192": [*ONE_B, "--training.seq_len=8192", "--training.local_batch_size=1"],
    "3b": THREE_B,
    "3b, float8": [*THREE_B, "--float8.enabled"],
    "8b": EIGHT_B,
    "8b, float8": [*EIGHT_B, "--float8.enabled"],
    "8b, selective": [*EIGHT_B, "--recompute.mode=selective"],
    "8b, selective, batch 2": [
        *EIGHT_B,
        "--recompute.mode=selective",
        "--training.local_batch_size=2",
        "--loss.num_chunks=4",
    ],
    "8b, bfloat16 states": [*EIGHT_B, *LOW_PRECISION, "--recompute.mode=selective"],
    "debug": ["debug", "--training.local_batch_size=8"],
    "debug, bf16": ["debug", "--training.local_batch_size=8", "--training.compute_dtype=bfloat16"],
    "25m": ["cpu_25m"],
    "25m, documents": ["cpu_25m", "--data.document_mask"],
    "25m, 4 chunks": ["cpu_25m", "--loss.num_chunks=4"],
    "25m, compiled loss": ["cpu_25m", "--compile.loss"],
    "25m, by FSDP": ["cpu_25m", "--parallel.reshard_after_forward=always"],
    "25m, full": ["cpu_25m", "--recompute.mode=full"],
    "25m, not compiled": ["cpu_25m", "--compile.enabled=false"],
    "25m, fp32": ["cpu_25m", "--training.compute_dtype=float32"],
}
SETS = {
    "gpu": [name for name, arguments in CASES.items() if arguments[0].startswith("llama3")],
    "1b": ["1b", "1b, batch 8", "1b, float8", "1b, bfloat16 states"],
    "loss": [
        "1b, whole loss",
        "1b, loss not compiled",
        "1b, 8 chunks",
        "1b, 8 chunks, loss not compiled",
        "1b, batch 4",
    ],
    "fsdp": ["1b, by FSDP", "1b, by FSDP, kept"],
    "recompute": [
        "1b, not compiled",
        "1b, selective",
        "1b, full",
        "1b, memory budget 0.5",
        "1b, documents",
        "1b, 8192",
    ],
    "3b": ["3b", "3b, float8"],
    # Parameters, gradients and moments in fp32 take 120 GiB, more than an H100 has
    "8b": ["8b", "8b, selective, batch 2", "8b, float8"],
    "8b-bfloat16": ["8b, bfloat16 states"],
    "cpu": [name for name, arguments in CASES.items() if not arguments[0].startswith("llama3")],
}


def named(names: list[str]) -> list[str]:
    """Selects cases by name; ends with a message if one is unknown."""
    for name in names:
        if name not in CASES:
            raise SystemExit(
                f"error: no case {name!r}{suggestion(name, list(CASES))}; --list of "
                "throughput.py shows all"
            )
    return names


def profile_of(subject: Any, batches: list[Any]) -> str:
    """Lists the kernels of two steps by their time."""
    from torch.profiler import profile

    from titanlite.observe.profile import summary

    with profile(record_shapes=True) as trace:
        for batch in batches[:2]:
            subject.step(*batch)
    return summary(trace)


def child(arguments: list[str], steps: int, profiled: bool) -> dict[str, Any]:
    """Measures one case in this process."""
    import torch
    from contestants import Titanlite, make_batch, timed

    from titanlite.model.flops import flops_per_token, peak_tflops
    from titanlite.observe.memory import peak_memory_gib
    from titanlite.runtime.device import device_name

    subject = Titanlite(arguments)
    config, device = subject.config, subject.device
    batches = [make_batch(config, device, number) for number in range(steps)]
    loss = float(subject.step(*batches[0]))
    timed(subject.step, batches[:UNCOUNTED], device)
    waits = None
    if device.type == "cuda":
        torch.cuda.set_sync_debug_mode("warn")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            subject.step(*batches[0])
        torch.cuda.set_sync_debug_mode("default")
        waits = sum("synchroniz" in str(one.message) for one in caught)
    seconds = timed(subject.step, batches, device)
    tokens = config.training.local_batch_size * config.training.seq_len
    median = statistics.median(seconds)
    peak = peak_tflops(device_name(device))
    tflops = tokens / median * flops_per_token(subject.llama, config.training.seq_len) / 1e12
    return {
        "device": device_name(device),
        "loss": loss,
        "tok/s": tokens / median,
        "tflops": tflops,
        "mfu": 100 * tflops / peak if peak else None,
        "p50": median,
        "p99": report.p99(seconds),
        "GiB": peak_memory_gib(device),
        "host waits": waits,
        "compute": config.training.compute_dtype,
        "not compiled": subject.not_compiled,
        "seconds": seconds,
        "profile": profile_of(subject, batches) if profiled else "",
    }


def measure(name: str, steps: int, profiled: bool = False) -> dict[str, Any]:
    """Measures one case in a separate process."""
    command = [sys.executable, __file__, "--child", name, "--steps", str(steps)]
    if profiled:
        command.append("--profile")
    return report.child(command)


def write_profile(name: str, found: dict[str, Any]) -> None:
    """Writes the table of kernels of a case into the results."""
    words = name.replace(",", "").replace(" ", "_")
    target = f"{datetime.date.today().isoformat()}-profile_{words}.txt"
    (report.ROOT / "benchmarks/results" / target).write_text(found.pop("profile"))


def row(name: str, found: dict[str, Any]) -> str:
    if "failed" in found:
        return f"| {name} | {found['failed']} | | | | | | | |"
    mfu = f"{found['mfu']:.1f} %" if found["mfu"] is not None else "n/a"
    waits = found["host waits"] if found["host waits"] is not None else "n/a"
    how = f"{found['compute']}, {found['not compiled'] or 'compiled'}"
    return (
        f"| {name} | {found['tok/s']:,.0f} | {found['tflops']:.3g} | {mfu} | {found['p50']:.3f} "
        f"| {found['p99'] / found['p50']:.3f} | {found['GiB']:.2f} | {waits} | {how} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", default="", help=f"a set ({', '.join(SETS)}), or names")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--name", default="", help="of the results; default: throughput_SET")
    parser.add_argument(
        "--profile", action="store_true", help="also write which kernels took most time"
    )
    parser.add_argument("--list", action="store_true", help="print the cases and what they are")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.steps < 1:
        parser.error(f"--steps {options.steps}: expected at least 1")
    if options.list:
        print("\n".join(f"{name}: {' '.join(arguments)}" for name, arguments in CASES.items()))
        return
    if options.child:
        print(json.dumps(child(CASES[options.child], options.steps, options.profile)), flush=True)
        os._exit(0)  # gloo's threads can abort an orderly end
    import torch

    chosen = options.cases or ("gpu" if torch.cuda.is_available() else "cpu")
    names = SETS.get(chosen) or named([name.strip() for name in chosen.split(";") if name.strip()])
    body = [
        "| case | tok/s | TFLOP/s | MFU | p50, s | p99 / p50 | peak GiB | host waits | computed |"
    ]
    body += ["|---|---|---|---|---|---|---|---|---|"]
    results = {}
    for name in names:
        results[name] = measure(name, options.steps, options.profile)
        if options.profile and "profile" in results[name]:
            write_profile(name, results[name])
        body.append(row(name, results[name]))
        print(body[-1], flush=True)
        lines = [*body, "", *(f"- {one}: `{' '.join(CASES[one])}`" for one in results)]
        target = options.name or (f"throughput_{chosen}" if chosen in SETS else "throughput")
        report.write(target, "Throughput", lines, results)
    report.exit_code(results)


if __name__ == "__main__":
    main()
