"""Is titanlite as fast as Hugging Face's Llama in the loop one writes around it?

    python benchmarks/vs_transformers.py [--sizes 1M,25M,125M] [--no-compile]

Same weights, same tokens, fp32 on CPU (bfloat16 compute on CUDA), fused AdamW, clipping to norm 1; titanlite is made
of the parts of train.py. First the losses of the first step must agree; then rounds of turns in the order A B B A, and
the median over the rounds. Eager, and compiled: ours by block and the loss, theirs as a whole. A quarter of an hour on
two cores.
"""

from __future__ import annotations

import argparse
import gc
import math
from typing import Any

import report
import torch
from contestants import HuggingFace, Titanlite, make_batch, side_by_side, threads

SIZES = {  # arguments of train.py, steps of a turn, rounds of four turns
    "1M": (["debug", "--training.local_batch_size=8"], 5, 30),
    "25M": (["cpu_25m"], 1, 12),
    "125M": (
        [
            "cpu_25m",
            *("--model.dim=768", "--model.num_layers=12", "--model.num_heads=12", "--model.num_kv_heads=12"),
            *("--model.ffn_dim=2048", "--model.vocab_size=50304", "--training.local_batch_size=2"),
        ],
        1,
        8,
    ),
    "1B": (["llama3_1b", "--training.seq_len=4096", "--training.local_batch_size=2", "--recompute.mode=none"], 20, 1),
}
GATE = {"cpu": 1e-5, "cuda": 2e-3}  # of the first loss, relative


def compare(size: str, compiled: bool) -> dict[str, Any]:
    arguments, steps, rounds = SIZES[size]
    arguments = [*arguments, *(f"--compile.{what}={str(compiled).lower()}" for what in ("enabled", "loss"))]
    arguments += [] if torch.cuda.is_available() else ["--training.compute_dtype=float32"]
    ours = Titanlite(arguments)
    theirs = HuggingFace(arguments, ours.device, compiled)
    config, device = ours.config, ours.device
    batches = [make_batch(config, ours.llama, device, number) for number in range(steps)]
    losses = [[float(contestant.step(*batches[i % steps])) for i in range(3)] for contestant in (ours, theirs)]
    apart = abs(losses[0][0] - losses[1][0]) / losses[1][0]
    if not apart <= GATE[device.type] or not all(map(math.isfinite, losses[0] + losses[1])):
        raise SystemExit(f"{size}: the first losses differ, so no speed is told: {losses}")
    a, b, ratio = side_by_side(ours.step, theirs.step, batches, device, rounds)
    tokens = config.training.local_batch_size * config.training.seq_len
    return {
        "parameters": ours.llama.num_parameters,
        "tokens per step": tokens,
        "first losses": [losses[0][0], losses[1][0]],
        "losses apart": apart,
        "titanlite tok/s": tokens / a.median,
        "transformers tok/s": tokens / b.median,
        "ratio": ratio,
        "steps": {"titanlite": a.steps, "transformers": b.steps},
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--sizes", default="1M,25M,125M", help=f"which, of {', '.join(SIZES)}")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    options = parser.parse_args()
    import transformers

    body = [f"transformers {transformers.__version__}, {threads()}.", ""]
    body += ["| parameters | tokens per step | | titanlite | transformers | ratio, by rounds | first losses apart |"]
    body += ["|---|---|---|---|---|---|---|"]
    results = {}
    for size in options.sizes.split(","):
        for compiled in (False, True) if options.compile else (False,):
            torch._dynamo.reset()
            one = compare(size, compiled)
            gc.collect()
            how = "compiled" if compiled else "eager"
            results[f"{size} {how}"] = one
            body.append(
                f"| {one['parameters'] / 1e6:.1f}M | {one['tokens per step']:,} | {how} "
                f"| {one['titanlite tok/s']:,.0f} tok/s | {one['transformers tok/s']:,.0f} tok/s "
                f"| {one['ratio']:.2f} | {one['losses apart']:.1e} |"
            )
            print(body[-1], flush=True)
    which = "" if options.sizes == parser.get_default("sizes") else "_" + options.sizes.replace(",", "_")
    report.write("vs_transformers" + which, "titanlite and transformers, one device", body, results)


if __name__ == "__main__":
    main()
