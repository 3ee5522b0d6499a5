"""Compares titanlite and torchtitan 0.2.2: same model, weights, tokens and options, each in a
separate process.

    python benchmarks/vs_torchtitan.py [--flavor llama3_1b] [--seq-len 4096] [--batch 2] [--pairs autocast,fsdp] ...

torchtitan is the unchanged wheel of the package index (`pip install torchtitan==0.2.2`): its
Trainer, with a data loader that returns the tokens that titanlite gets, and the model shape of the
flavor. There are two pairs: `autocast` is what torchtitan runs on one device, against titanlite's
own casts, and `fsdp` is `fully_shard` at world size 1 in both, where weights are freed after the
forward.

Two gates come first: the losses of 20 steps from the same weights, on 4 batches of text in turn,
must decrease and agree, otherwise no speed is reported. The first gate is in fp32, on short
sequences and with larger weights in attention, to 1e-5: a RoPE with another theta differs by about
1e-4 there. The second is in the compared setting, to 1e-3, the size of rounding in bfloat16.

Then blocks of `--steps` steps are measured, after as many that are not, in the order A B B A:
tokens per second by the median step, p99, and peak memory reserved. Both get their batches in CPU
memory, count their targets, copy them to the device and step their schedule. torchtitan has no tied
embeddings, so flavors with tied embeddings are untied for both (`model.embeddings = untied`). Both
compute all logits and the loss at once (`loss.num_chunks = 1`), recompute as `--recompute` sets,
and compile each block and the loss, which is torchtitan's default. The effect of titanlite's
presets (the loss in chunks) is in the table of throughput.py.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import report

GATE_STEPS, GATE_BATCHES = 20, 4
GATES = {"fp32": 1e-5, "same": 1e-3}  # largest relative difference of the losses
VERSION = "0.2.2"
PAIRS = ("autocast", "fsdp")
CONTESTANTS = ("titanlite", "torchtitan")


def arguments_of(options: argparse.Namespace) -> list[str]:
    """Builds the configuration of both, as arguments of train.py."""
    arguments = [
        options.config,
        f"--model.flavor={options.flavor}",
        "--model.embeddings=untied",
        f"--training.seq_len={options.seq_len}",
        f"--training.local_batch_size={options.batch}",
        f"--training.global_batch_size={options.batch}",
        f"--recompute.mode={options.recompute}",
        f"--compile.enabled={str(options.compile).lower()}",
        f"--compile.loss={str(options.compile).lower()}",
        "--loss.num_chunks=1",
        "--optimizer.lr=1e-4",
        *options.key,
    ]
    if options.pair == "fsdp":
        arguments += ["--parallel.reshard_after_forward=always"]
    if options.gate == "fp32":
        arguments += [
            f"--training.seq_len={min(options.seq_len, 1024)}",
            "--training.compute_dtype=float32",
        ]
        arguments += ["--training.local_batch_size=1", "--training.global_batch_size=1"]
        arguments += ["--compile.enabled=false", "--compile.loss=false"]
    return arguments


def stress(model: Any) -> None:
    """Enlarges attention's weights in place, because with initial weights, wrong positions would
    hardly change the loss.
    """
    import torch

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".attention.w" in name:
                parameter.mul_(4)


def ours(arguments: list[str], weights: Path, stressed: bool) -> Any:
    """Builds titanlite's step; writes its initial weights to `weights` if that is absent."""
    import torch
    from contestants import Titanlite, initial_weights

    subject = Titanlite(arguments)
    changed = [subject.model_parts[0]]
    if not weights.exists():  # drawn on the device: CPU and GPU draw different numbers
        changed.append(initial_weights(subject.config, subject.llama, subject.device))
    for model in changed if stressed else []:
        stress(model)
    if not weights.exists():
        torch.save(
            {name: tensor.cpu() for name, tensor in changed[-1].state_dict().items()}, weights
        )
    return subject, subject.step


def theirs(arguments: list[str], weights: Path, pair: str) -> Any:
    """Builds the step of torchtitan's Trainer, whose loader is a list with one batch."""
    import torch
    from contestants import configuration
    from torchtitan_trainer import build

    config, llama = configuration(arguments)
    trainer = build(config, llama, pair, torch.load(weights, weights_only=True))
    return trainer, trainer.step


def block(
    options: argparse.Namespace, who: str, pair: str, weights: Path, gate: str = ""
) -> dict[str, Any]:
    """Runs one process; returns the losses of the first steps, or the seconds of counted steps, and
    memory; or why it failed.
    """
    words = [
        sys.executable,
        __file__,
        "--child",
        who,
        "--weights",
        str(weights),
        "--pair",
        pair,
        *sys.argv[1:],
    ]
    words += ["--gate", gate] if gate else []
    return report.child(words)


def clock() -> int | None:
    """Reads the clock in MHz, if nvidia-ml-py is installed and the driver answers."""
    import torch

    # The package's errors have no base class that exists without the package
    with contextlib.suppress(Exception):
        return torch.cuda.clock_rate()
    return None


def child(options: argparse.Namespace) -> dict[str, Any]:
    import torch
    from contestants import make_batch, timed

    arguments, weights = arguments_of(options), Path(options.weights)
    if options.child == "titanlite":
        subject, step = ours(arguments, weights, options.gate == "fp32")
    else:
        subject, step = theirs(arguments, weights, options.pair)
    config, device = subject.config, subject.device
    # In CPU memory, as from a loader.
    count = GATE_BATCHES if options.gate else options.steps
    batches = [make_batch(config, torch.device("cpu"), number) for number in range(count)]
    if options.gate:
        return {"losses": [float(step(*batches[i % GATE_BATCHES])) for i in range(GATE_STEPS)]}
    timed(step, batches, device)
    seconds = timed(step, batches, device)
    cuda = device.type == "cuda"
    return {
        "seconds": seconds,
        "reserved": torch.cuda.max_memory_reserved() / 2**30 if cuda else None,
        "clock": clock() if cuda else None,
    }


def compare(options: argparse.Namespace, pair: str, folder: Path) -> dict[str, Any]:
    apart = {}
    for gate, allowed in GATES.items():
        weights = folder / f"{gate}.pt"
        both = [block(options, who, pair, weights, gate) for who in CONTESTANTS]
        if failed := report.failure(*both):
            return {"failed": f"gate {gate}: {failed}"}
        a, b = (one["losses"] for one in both)
        apart[gate] = max(abs(x - y) / y for x, y in zip(a, b, strict=True))
        if not (apart[gate] <= allowed and sum(a[-GATE_BATCHES:]) < sum(a[:GATE_BATCHES])):
            return {
                "failed": f"gate {gate}: losses {apart[gate]:.2e} apart, or none learnt: {a} {b}"
            }
    found: list[list[dict[str, Any]]] = [[], []]
    for which in (0, 1, 1, 0):
        found[which].append(block(options, CONTESTANTS[which], pair, weights))
    if failed := report.failure(*found[0], *found[1]):
        return {"failed": failed, "losses apart": apart}
    tokens = options.batch * options.seq_len
    result: dict[str, Any] = {"losses apart": apart, "blocks": found}
    for who, blocks in zip(CONTESTANTS, found, strict=True):
        seconds = sorted(second for one in blocks for second in one["seconds"])
        result[who] = {
            "tok/s": tokens / statistics.median(seconds),
            "p99 / median": report.p99(seconds) / statistics.median(seconds),
            "GiB": max((one["reserved"] or 0) for one in blocks),
        }
    return result


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", default="llama3_1b")
    parser.add_argument("--flavor", default="llama3_1b")
    parser.add_argument("--seq-len", type=int, default=4096)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--recompute", choices=("none", "full", "selective"), default="none")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--pairs", default=",".join(PAIRS))
    parser.add_argument(
        "--key", action="append", default=[], help="another --section.key=value for both"
    )
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--weights", help=argparse.SUPPRESS)
    parser.add_argument("--pair", help=argparse.SUPPRESS)
    parser.add_argument("--gate", choices=GATES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(child(options)), flush=True)
        os._exit(0)  # skip the clean-up of both process groups
    results: dict[str, Any] = {}
    body = [f"`{' '.join(arguments_of(options))}`, torchtitan {VERSION}.", ""]
    body += [
        "| pair | | tok/s | ratio | p99 / median | peak reserved | losses apart: fp32, same |",
        "|---|---|---|---|---|---|---|",
    ]
    with tempfile.TemporaryDirectory() as name:
        for pair in options.pairs.split(","):
            results[pair] = one = compare(options, pair, Path(name))
            if "failed" in one:
                body.append(f"| {pair} | {one['failed']} | | | | | |")
                print(body[-1], flush=True)
                continue
            for who in CONTESTANTS:
                ratio = (
                    f"{one['titanlite']['tok/s'] / one['torchtitan']['tok/s']:.3f}"
                    if who == "titanlite"
                    else ""
                )
                row = one[who]
                body.append(
                    f"| {pair} | {who} | {row['tok/s']:,.0f} | {ratio} | {row['p99 / median']:.3f} "
                    f"| {row['GiB']:.2f} GiB | "
                    f"{', '.join(f'{value:.1e}' for value in one['losses apart'].values())} |"
                )
                print(body[-1], flush=True)
    which = "" if options.pairs == ",".join(PAIRS) else f"_{options.pairs.replace(',', '_')}"
    report.write(
        f"vs_torchtitan_{options.flavor}{which}",
        f"titanlite and torchtitan {VERSION}, one device",
        body,
        results,
    )
    report.exit_code(results)


if __name__ == "__main__":
    main()
