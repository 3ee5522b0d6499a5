"""Compares the speed of titanlite and Hugging Face's Llama or Qwen3-MoE in a plain training loop.

    python benchmarks/vs_transformers.py [--sizes 1M,25M,125M] [--no-compile] [--compute bfloat16]
    python benchmarks/vs_transformers.py --sizes experts --no-compile --cpu-time

Both have the same weights and tokens, compute in fp32 on CPU and in bfloat16 on CUDA or on request
(transformers by autocast), use fused AdamW and clip to norm 1; titanlite is built from the parts of
train.py. On a CPU both have glibc keep freed memory, since they share a process. First the losses
of the first step and of two after it must agree. Then the speed is the median over rounds in the
order A B B A, eager and compiled: titanlite by block and the loss, transformers as a whole.

The rounds are spread over several processes, and in every second one transformers is built first:
at 1 million parameters the placement of memory changes a step by 4 %, differently in each process.
Takes forty minutes on two cores. On a machine with other work `--cpu-time` counts the processor
time of one thread, which this work changes less than the time of the clock.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import report
import torch
from contestants import HuggingFace, Titanlite, configuration, make_batch, side_by_side, threads

from titanlite.config.mistakes import suggestion
from titanlite.distributed import process_group

SIZES = {  # arguments of train.py, steps of a turn, rounds of four turns in a process, processes
    "1M": (["debug", "--training.local_batch_size=8"], 5, 8, 8),
    "25M": (["cpu_25m"], 1, 4, 4),
    "125M": (
        [
            "cpu_25m",
            *(
                "--model.dim=768",
                "--model.num_layers=12",
                "--model.num_heads=12",
                "--model.num_kv_heads=12",
            ),
            *("--model.ffn_dim=2048", "--model.vocab_size=50304", "--training.local_batch_size=2"),
        ],
        1,
        3,
        2,
    ),
    "experts": (  # the auxiliary loss is off: transformers' has another definition
        ["debug_moe", "--training.local_batch_size=8", "--loss.router_aux_loss=0"],
        3,
        3,
        2,
    ),
    "1B": (
        [
            "llama3_1b",
            *("--training.seq_len=4096", "--training.local_batch_size=2", "--recompute.mode=none"),
            "--loss.num_chunks=1",
        ],
        20,
        1,
        2,
    ),
}
# Largest relative difference of the first loss; ten times as much for the next two
GATE = {"float32": 1e-5, "bfloat16": 1e-3}


def one_process(
    size: str, compute: str, compiled: bool, theirs_first: bool, cpu_time: bool
) -> dict[str, Any]:
    """Measures in one process: the first losses, the seconds of all steps, and how much faster
    titanlite is in each round.
    """
    arguments, steps, rounds, _ = SIZES[size]
    arguments = [
        *arguments,
        *(f"--compile.{what}={str(compiled).lower()}" for what in ("enabled", "loss")),
    ]
    arguments += [f"--training.compute_dtype={compute}"]
    config, llama = configuration(arguments)
    device = process_group.start(config.run, config.comm, config.debug)
    build: list[Callable[[], Any]] = [
        lambda: Titanlite(arguments),
        lambda: HuggingFace(arguments, device, compiled),
    ]
    if cpu_time:
        torch.set_num_threads(1)
    order = (1, 0) if theirs_first else (0, 1)
    built = {i: build[i]() for i in order}
    batches = [make_batch(config, device, number) for number in range(steps)]
    losses = {i: [float(built[i].step(*batches[j % steps])) for j in range(3)] for i in order}
    apart = [abs(a - b) / b for a, b in zip(losses[0], losses[1], strict=True)]
    if not (apart[0] <= GATE[compute] and max(apart) <= 10 * GATE[compute]):
        raise SystemExit(f"{size}: the first losses differ, so no speed is reported: {losses}")
    clock = time.process_time if cpu_time else time.perf_counter
    seconds, ratios = side_by_side(built[0].step, built[1].step, batches, device, rounds, clock)
    return {
        "parameters": llama.num_parameters,
        "tokens per step": config.training.local_batch_size * config.training.seq_len,
        "first losses": [losses[0][0], losses[1][0]],
        "losses apart": apart[0],
        "steps": seconds,
        "ratios": ratios,
    }


def compare(size: str, compute: str, compiled: bool, cpu_time: bool) -> dict[str, Any]:
    """Runs all processes of a size, one after the other."""
    found = []
    for number in range(SIZES[size][-1]):
        command = [
            sys.executable,
            __file__,
            "--one",
            size,
            compute,
            str(int(compiled)),
            str(number % 2),
            str(int(cpu_time)),
        ]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        found.append(json.loads(done.stdout.splitlines()[-1]))
        print(
            f"{size}, compiled {compiled}, theirs first {bool(number % 2)}: {found[-1]['ratios']}",
            flush=True,
        )
    ours, theirs = (statistics.median(s for one in found for s in one["steps"][i]) for i in (0, 1))
    tokens = found[0]["tokens per step"]
    return {
        "parameters": found[0]["parameters"],
        "tokens per step": tokens,
        "titanlite tok/s": tokens / ours,
        "transformers tok/s": tokens / theirs,
        "losses apart": max(one["losses apart"] for one in found),
        "ratio": statistics.median(ratio for one in found for ratio in one["ratios"]),
        "by process": [statistics.median(one["ratios"]) for one in found],
        "processes": found,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--sizes", default="1M,25M,125M", help=f"which, of {', '.join(SIZES)}")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    compute = "bfloat16" if torch.cuda.is_available() else "float32"
    parser.add_argument("--compute", default=compute, choices=GATE)
    parser.add_argument("--cpu-time", action="store_true", help="of one thread")
    parser.add_argument("--one", nargs=5, help=argparse.SUPPRESS)  # the case of a child process
    options = parser.parse_args()
    if options.one:
        size, compute, *switches = options.one
        print(
            json.dumps(one_process(size, compute, *(switch == "1" for switch in switches))),
            flush=True,
        )
        os._exit(0)  # gloo's threads can abort an orderly end
    sizes = [size.strip() for size in options.sizes.split(",")]
    if unknown := [size for size in sizes if size not in SIZES]:
        parser.error(
            f"--sizes {unknown[0]!r}: expected some of "
            f"{', '.join(SIZES)}{suggestion(unknown[0], list(SIZES))}"
        )
    if options.cpu_time and torch.cuda.is_available():
        parser.error("--cpu-time: does not contain what a GPU computes; expected a machine without")
    import transformers

    measured = "processor time of one thread" if options.cpu_time else threads()
    load = os.getloadavg()[0]
    body = [
        f"transformers {transformers.__version__}, {measured}, {options.compute}; load average of "
        f"the machine before: {load:.1f}.",
        "",
    ]
    body += [
        "| parameters | tokens per step | | titanlite | transformers | ratio | by process | "
        "first losses apart |"
    ]
    body += ["|---|---|---|---|---|---|---|---|"]
    results = {}
    for size in sizes:
        for compiled in (False, True) if options.compile else (False,):
            one = compare(size, options.compute, compiled, options.cpu_time)
            how = "compiled" if compiled else "eager"
            results[f"{size} {how}"] = one
            body.append(
                f"| {one['parameters'] / 1e6:.1f}M | {one['tokens per step']:,} | {how} "
                f"| {one['titanlite tok/s']:,.0f} tok/s | {one['transformers tok/s']:,.0f} tok/s "
                f"| {one['ratio']:.2f} "
                f"| {min(one['by process']):.2f} to {max(one['by process']):.2f} | "
                f"{one['losses apart']:.1e} |"
            )
            print(body[-1], flush=True)
    which = "" if options.sizes == parser.get_default("sizes") else "_" + "_".join(sizes)
    which += "" if options.compute == compute else f"_{options.compute}"
    report.write("vs_transformers" + which, "titanlite and transformers, one device", body, results)


if __name__ == "__main__":
    main()
