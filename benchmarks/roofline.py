"""A CPU's training speed as a part of the speed of its matrix products, and where the rest of a
step goes.

    python benchmarks/roofline.py [--cases "25m;25m, fp32"] [--steps 8]

Each case runs in a separate process, with `--steps` steps after as many that are not measured.
Before and after them the process times matrix products of the compute dtype: squares of 1024, 2048
and 3072, of which the fastest counts as the limit, and those of the model's feed-forward and output
layers, forward. A step's FLOPs are those of `titanlite/model/flops.py`. Time by group is self time
in a profile of two more steps.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from typing import Any

import report
from throughput import CASES, named

GROUPS = {  # group -> words in the names of its operations; the first that fits
    "matrix products": ("aten::mm", "aten::addmm", "aten::bmm", "mkldnn_linear", "onednn"),
    "attention": ("scaled_dot_product",),
    "loss": ("softmax", "nll_loss"),
    "optimizer": ("_fused_adamw_",),
    "casts, copies, fills": (
        "aten::copy_",
        "aten::cat",
        "aten::fill_",
        "aten::zero_",
        "aten::_to_copy",
    ),
    "compiled, without its products": ("CompiledFxGraph",),
}


def rate(dtype: Any, m: int, k: int, n: int) -> float:
    """GFLOP/s of (m, k) times (k, n), the median of five."""
    import torch

    a, b, seconds = torch.randn(m, k).to(dtype), torch.randn(n, k).to(dtype), []
    torch.nn.functional.linear(a, b)
    for _ in range(5):
        started = time.perf_counter()
        torch.nn.functional.linear(a, b)
        seconds.append(time.perf_counter() - started)
    return 2 * m * k * n / statistics.median(seconds) / 1e9


def by_group(step: Any) -> dict[str, float]:
    """The part of two steps' CPU time that each group of operations takes."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU]) as found:
        for _ in range(2):
            step()
    seconds = dict.fromkeys([*GROUPS, "other"], 0.0)
    for event in found.key_averages():
        name = next(
            (group for group, words in GROUPS.items() if any(word in event.key for word in words)),
            "other",
        )
        seconds[name] += event.self_cpu_time_total
    return {name: value / sum(seconds.values()) for name, value in seconds.items()}


def child(case: str, steps: int) -> dict[str, Any]:
    """Measures one case in this process."""
    import torch
    from contestants import Titanlite, make_batch, timed

    from titanlite.model.flops import flops_per_token

    subject = Titanlite(CASES[case])
    training, llama = subject.config.training, subject.llama
    dtype, tokens = (
        getattr(torch, training.compute_dtype),
        training.local_batch_size * training.seq_len,
    )
    batches = [make_batch(subject.config, subject.device, number) for number in range(steps)]
    timed(subject.step, batches, subject.device)

    def rates() -> tuple[float, list[float]]:
        widths = (llama.ffn_dim, llama.vocab_size)
        return max(rate(dtype, n, n, n) for n in (1024, 2048, 3072)), [
            rate(dtype, tokens, llama.dim, width) for width in widths
        ]

    before = rates()
    seconds = statistics.median(timed(subject.step, batches, subject.device))
    after = rates()
    limit = (before[0] + after[0]) / 2
    speed = tokens * flops_per_token(llama, training.seq_len) / seconds / 1e9
    return {
        "compute": training.compute_dtype,
        "not compiled": subject.not_compiled,
        "tok/s": tokens / seconds,
        "GFLOP/s": speed,
        "limit": limit,
        "limit before and after": [before[0], after[0]],
        "feed-forward, output layer": [
            statistics.mean(pair) for pair in zip(before[1], after[1], strict=True)
        ],
        "part": speed / limit,
        "groups": by_group(lambda: subject.step(*batches[0])),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--cases",
        default="25m, fp32;25m, fp32, not compiled;25m;124m",
        help="names of cases, with ;",
    )
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(child(options.child, options.steps)), flush=True)
        os._exit(0)  # gloo's threads can abort an orderly end
    names = named([name.strip() for name in options.cases.split(";")])
    columns = [*GROUPS, "other"]
    body = [f"| case | computed | tok/s | GFLOP/s | limit | part | {' | '.join(columns)} |"]
    body += ["|---" * (6 + len(columns)) + "|"]
    results: dict[str, Any] = {}
    for name in names:
        results[name] = one = report.child(
            [sys.executable, __file__, "--child", name, "--steps", str(options.steps)]
        )
        if "failed" in one:
            body.append(f"| {name} | {one['failed']} |" + " |" * (4 + len(columns)))
        else:
            groups = " | ".join(f"{100 * one['groups'][group]:.0f} %" for group in columns)
            how = f"{one['compute']}, {one['not compiled'] or 'compiled'}"
            body.append(
                f"| {name} | {how} | {one['tok/s']:,.0f} | {one['GFLOP/s']:.0f} | "
                f"{one['limit']:.0f} "
                f"| {one['part']:.2f} | {groups} |"
            )
        print(body[-1], flush=True)
    lines = [*body, "", *(f"- {name}: `{' '.join(CASES[name])}`" for name in results)]
    report.write("roofline", "Speed as a part of the speed of matrix products", lines, results)
    report.exit_code(results)


if __name__ == "__main__":
    main()
