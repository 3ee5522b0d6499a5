"""titanlite against torchtitan 0.2.2: same model, weights, tokens, options; each in a process of its own.

    python benchmarks/vs_torchtitan.py [--flavor llama3_1b] [--seq-len 4096] [--batch 2] [--pairs autocast,fsdp] ...

torchtitan is the wheel of the package index (`pip install torchtitan==0.2.2`), run as it is: its Trainer, with a data
loader that hands out the tokens that titanlite gets, and the model shape of the flavor. Two pairs: `autocast`, which is
what torchtitan does on one device, and `fsdp`, its `fully_shard` path at world size 1; titanlite has one path.

First the gate: the losses of 20 steps from the same weights, on 4 batches of text in turn, must fall and agree to 1e-3,
else no speed is told. Then blocks of `--steps` after as many that do not count, in the order A B B A: tokens per second
by the median step, p99, peak memory reserved. Both get their batches in CPU memory, count their targets, copy them to
the device and step their schedule. torchtitan has no tied embeddings, so flavors that have are untied for both
(`model.embeddings = untied`). Logits and loss are whole on both sides (`loss.num_chunks = 1`), recomputation is the
same by `--recompute`, and both compile each block and the loss, torchtitan's default. What titanlite gains by its own
presets (the loss by chunks) is in the table of throughput.py.
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

GATE_STEPS, GATE_BATCHES, GATE = 20, 4, 1e-3
VERSION = "0.2.2"
PAIRS = ("autocast", "fsdp")
CONTESTANTS = ("titanlite", "torchtitan")


def arguments_of(options: argparse.Namespace) -> list[str]:
    """The configuration of both, as train.py takes it."""
    return [
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


def ours(arguments: list[str], weights: Path) -> Any:
    """A step of titanlite; its initial weights go to `weights` if nothing is there."""
    import torch
    from contestants import Titanlite

    subject = Titanlite(arguments)
    if not weights.exists():
        torch.save(weights_of(subject), weights)
    return subject, subject.step


def weights_of(subject: Any) -> dict[str, Any]:
    """What a titanlite begins with, in CPU memory. Drawn where it was drawn: a GPU draws other numbers."""
    from contestants import initial_weights

    whole = initial_weights(subject.config, subject.llama, subject.device)
    return {name: tensor.cpu() for name, tensor in whole.state_dict().items()}


def theirs(arguments: list[str], weights: Path, pair: str) -> Any:
    """A step of torchtitan's Trainer, whose loader is a list with one batch."""
    import torch
    from contestants import configuration
    from torchtitan_trainer import build

    config, llama = configuration(arguments)
    trainer = build(config, llama, pair, torch.load(weights, weights_only=True))
    return trainer, trainer.step


def block(options: argparse.Namespace, who: str, pair: str, weights: Path, gate: bool) -> dict[str, Any]:
    """One process: the losses of the first steps, or the seconds of steps that count, and memory; or why it failed."""
    words = [sys.executable, __file__, "--child", who, "--weights", str(weights), "--pair", pair, *sys.argv[1:]]
    words += ["--gate"] if gate else []
    return report.child(words)


def clock() -> int | None:
    """MHz, where the package that asks the driver (nvidia-ml-py) is there and the driver answers."""
    import torch

    with contextlib.suppress(Exception):  # the package's errors have no common base that is there without it
        return torch.cuda.clock_rate()
    return None


def child(options: argparse.Namespace) -> dict[str, Any]:
    import torch
    from contestants import make_batch, timed

    arguments, weights = arguments_of(options), Path(options.weights)
    if options.child == "titanlite":
        subject, step = ours(arguments, weights)
    else:
        subject, step = theirs(arguments, weights, options.pair)
    config, device = subject.config, subject.device
    # In CPU memory, where a loader would have them.
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
    weights = folder / "weights.pt"
    gates = [block(options, who, pair, weights, gate=True) for who in CONTESTANTS]
    if failed := report.failure(*gates):
        return {"failed": failed}
    a, b = (gate["losses"] for gate in gates)
    apart = max(abs(x - y) / y for x, y in zip(a, b, strict=True))
    if not (apart <= GATE and sum(a[-GATE_BATCHES:]) < sum(a[:GATE_BATCHES])):
        return {"failed": f"losses apart by {apart:.2e}, or none learnt, in {GATE_STEPS} steps: {a} {b}"}
    found: list[list[dict[str, Any]]] = [[], []]
    for which in (0, 1, 1, 0):
        found[which].append(block(options, CONTESTANTS[which], pair, weights, gate=False))
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
    parser.add_argument("--key", action="append", default=[], help="another --section.key=value for both")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--weights", help=argparse.SUPPRESS)
    parser.add_argument("--pair", help=argparse.SUPPRESS)
    parser.add_argument("--gate", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(child(options)), flush=True)
        os._exit(0)  # process groups of both are of no use any more
    results: dict[str, Any] = {}
    body = [f"`{' '.join(arguments_of(options))}`, torchtitan {VERSION}.", ""]
    body += [
        "| pair | | tok/s | ratio | p99 / median | peak reserved | losses apart (20 steps) |",
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
                ratio = f"{one['titanlite']['tok/s'] / one['torchtitan']['tok/s']:.3f}" if who == "titanlite" else ""
                told = one[who]
                body.append(
                    f"| {pair} | {who} | {told['tok/s']:,.0f} | {ratio} | {told['p99 / median']:.3f} "
                    f"| {told['GiB']:.2f} GiB | {one['losses apart']:.1e} |"
                )
                print(body[-1], flush=True)
    which = "" if options.pairs == ",".join(PAIRS) else f"_{options.pairs.replace(',', '_')}"
    report.write(
        f"vs_torchtitan_{options.flavor}{which}", f"titanlite and torchtitan {VERSION}, one device", body, results
    )
    report.exit_code(results)


if __name__ == "__main__":
    main()
