"""Formats a plan as text of at most 80 columns, and as JSON.

What it is: the lines of `titanlite plan`. Memory is in GiB = 2^30 bytes, since its sizes are powers
of two; traffic is in GB = 10^9 bytes, as links are rated.
"""

from __future__ import annotations

import dataclasses
import json
import textwrap
from typing import Any

from titanlite.model.flops import flops_per_token
from titanlite.rules.degrees import AXES
from titanlite.tools.plan.accuracy import kind_of
from titanlite.tools.plan.advice import GIB, NAMES
from titanlite.tools.plan.amounts import bytes_text
from titanlite.tools.plan.machines import Machine
from titanlite.tools.plan.plan import Plan
from titanlite.tools.plan.search import SearchResult, why_slower
from titanlite.tools.plan.step_time import FASTEST, attention_part, fitted_of, own_kernel

WIDTH = 80
SHOWN = 5e-4  # of a step: smaller parts have no line
BAR = 27  # columns of a bar that stands for the whole
TIMES = {
    "products": "matrix products",
    "attention": "attention",
    "pointwise": "other operators",
    "tensor_parallel": "tp",
    "context_parallel": "cp",
    "expert_parallel": "ep, all-to-alls",
    "sharding": "dp_shard and dp_replicate, not hidden",
    "messages": "pp, messages",
    "bubble": "pp, bubble",
    "host": "waiting for the host",
    "optimizer": "clipping and update",
    "offload": "copies to CPU memory",
}


def plan_lines(plan: Plan) -> list[str]:
    """The lines of a plan without budget and cost."""
    return [
        *_title(plan),
        "",
        *_memory(plan),
        "",
        *_traffic(plan),
        "",
        *_flops(plan),
        "",
        *_time(plan),
        *_warnings(plan),
    ]


def _title(plan: Plan) -> list[str]:
    counts = plan.counts
    training = plan.config.training
    used = [f"{axis} {counts.degrees[axis]}" for axis in AXES if counts.degrees[axis] > 1]
    if plan.config.parallel.ep > 1:
        used.append(f"ep {plan.config.parallel.ep}")
    parameters = f"{plan.llama.num_parameters:,} parameters"
    if plan.llama.num_experts:
        parameters += f", of which a token uses {plan.llama.num_active_parameters:,}"
    machine = plan.machine
    gpus = "1 GPU" if plan.gpus == 1 else f"{plan.gpus:,} GPUs"
    batches = "1 local batch"
    if counts.local_batches > 1:
        batches = f"{counts.local_batches} local batches"
    how = "compiled" if plan.compiled else "not compiled"
    name = plan.config.run.name
    if plan.config.model.flavor != name:
        name = f"{name} (model {plan.config.model.flavor})"
    return [
        *_wrapped(f"{name}: {parameters}", ""),
        f"{gpus}: {machine.name}, {machine.memory_gib:g} GiB, {machine.gpus_per_node} per node",
        f"layout: {', '.join(used) or 'one process'}",
        *_wrapped(f"ZeRO {plan.zero}", ""),
        f"step: {counts.tokens:,} tokens; per rank {batches} of {training.local_batch_size} x "
        f"{training.seq_len:,}",
        f"{training.compute_dtype}, {how}, recompute.mode = {plan.config.recompute.mode}",
        plan.source,
    ]


def _memory(plan: Plan) -> list[str]:
    worst = plan.worst
    lines = [f"Memory of {plan.name_of(worst)} at its fullest moment, in GiB"]
    for name, text in NAMES.items():
        nbytes = getattr(worst.memory, name)
        bar = "#" * round(BAR * nbytes / max(plan.machine.memory_bytes, worst.memory.total))
        lines.append(f"  {text:<33}{nbytes / GIB:>9,.2f}  {bar}".rstrip())
    total = f"{gib_text(worst.low)} to {gib_text(worst.high)}"
    lines.append(
        f"  {'total, with what is reserved':<33}{total:>17} of "
        f"{plan.machine.memory_gib:,.1f}: {plan.verdict}"
    )
    if len(plan.needs) > 1:
        each = ", ".join(gib_text(need.high) for need in plan.needs)
        lines += _wrapped(f"at most, by rank of pp: {each}")
    for remedy in plan.remedies:
        need = remedy.need
        verdict = need.verdict(plan.machine.memory_bytes)
        leaves = f"{gib_text(need.low)} to {gib_text(need.high)}, {verdict}"
        lines.append(f"  with {remedy.change}: {leaves}")
    if plan.verdict != "fits":
        lines.append("  --search tries several keys at once; more GPUs hold less each")
    return lines


def _traffic(plan: Plan) -> list[str]:
    lines = [
        "Communication of a rank in a step",
        "  axis         collective     ranks  calls    whole     sent  over         time",
    ]
    for one in plan.traffic:
        call = one.call
        lines.append(
            f"  {call.axis:<12} {call.kind:<14}{call.size:>6,}{call.count:>7,}"
            f"{bytes_text(call.whole_bytes):>9}{bytes_text(call.sent_bytes):>9}  {one.link:<8}"
            f"{seconds_text(one.seconds):>9}"
        )
    if not plan.traffic:
        lines[1:] = ["  none"]
    return lines


def _flops(plan: Plan) -> list[str]:
    training = plan.config.training
    per_token = flops_per_token(
        plan.llama, training.seq_len, plan.config.lora, training.frozen_patterns
    )
    six_n = 6 * plan.llama.num_active_parameters
    step = per_token * plan.counts.tokens
    return [
        "FLOPs",
        f"  per token {per_token:.3e} (PaLM: with attention); 6 N is {six_n:.3e}",
        f"  per step  {step:.3e}; with recomputation {plan.recompute_factor:.2f} times as many",
    ]


def _time(plan: Plan) -> list[str]:
    time = plan.time
    source = "by the model of docs/plan.md" if plan.fitted else "at default rates"
    lines = [f"Time of a step: {seconds_text(time.total)}, {source}"]
    for name, seconds in time.parts.items():
        if seconds > SHOWN * time.total:
            bar = "#" * round(BAR * seconds / time.total)
            lines.append(f"  {TIMES[name]:<39}{seconds_text(seconds):>9}  {bar}".rstrip())
    lines += _kernel_lines(plan)
    lines += _expert_lines(plan)
    lines += error_lines(plan)
    if plan.bubble:
        lines.append(f"  the bubble is {100 * plan.bubble:.1f} % of the pipeline's time")
    everywhere = time.tokens_per_second * plan.gpus
    if plan.fitted is None:
        return lines
    lines.append(
        f"  {time.tokens_per_second:,.0f} tokens/s per GPU, {everywhere:,.0f} in all; "
        f"MFU {100 * time.mfu:.1f} %"
    )
    return lines


def _kernel_lines(plan: Plan) -> list[str]:
    """The attention's time with the kernel of older software, where that is much slower."""
    part = attention_part("flash2", plan.machine.generation)
    if part == 1 or own_kernel(plan.config, plan.llama) != FASTEST:
        return []
    slower = seconds_text(plan.time.attention / part)
    return [f"  attention is by cuDNN; with torch before 2.10, FlashAttention 2 takes {slower}"]


def _expert_lines(plan: Plan) -> list[str]:
    """What the times of a mixture of experts assume; its rates are fitted to dense models."""
    if not plan.llama.num_experts:
        return []
    return _wrapped(
        "all experts are taken to be chosen equally often, and rates are those of dense models: no "
        "published row of a mixture was fitted, and the one that docs/plan.md compares is slower"
    )


def error_lines(plan: Plan) -> list[str]:
    """How far predictions of this GPU and kind of layout were off."""
    if plan.fitted is not None and plan.llama.num_experts:
        return []
    if plan.fitted is None:
        return _wrapped(
            f"no rate for {plan.machine.name}: too few measurements are known to predict speed and "
            "cost; the parts show what costs most"
        )
    what, error = plan.fitted.error_of(kind_of(plan.counts.degrees))
    lines = _wrapped(
        f"off by {100 * error.median:.0f} % in the median, 9 of 10 by at most "
        f"{100 * error.p90:.0f} %: {error.rows} measurements of {what} on this GPU"
    )
    if plan.fitted.constant_is_better:
        lines += _wrapped(
            f"a constant MFU of {100 * plan.fitted.constant_mfu:.0f} % is closer here: off by "
            f"{100 * plan.fitted.constant_error.median:.0f} % in the median"
        )
    return lines


def _warnings(plan: Plan) -> list[str]:
    lines: list[str] = []
    for text in plan.time.warnings:
        lines += ["", *_wrapped(f"warning: {text}", "")]
    return lines


def seconds_text(value: float) -> str:
    """A time in seconds or milliseconds."""
    if value >= 1:
        return f"{value:,.2f} s"
    return f"{1000 * value:,.1f} ms"


def gib_text(nbytes: int) -> str:
    """A total of memory, in GiB."""
    gib = nbytes / GIB
    return f"{gib:,.1f}" if gib >= 1 else f"{gib:.3f}"


def _wrapped(text: str, indent: str = "  ") -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=indent, subsequent_indent=indent + "  ")


def search_lines(result: SearchResult, machine: Machine) -> list[str]:
    """The best layouts of a search, and why the second is not the first."""
    unknown = f"no rate for {machine.name}: the order is by default rates"
    lines = [
        *([] if fitted_of(machine) else _wrapped(unknown, "")),
        *_wrapped(f"{result.tried:,} layouts tried; {', '.join(_refused(result))}", ""),
        *(_wrapped(f"held, because given: {', '.join(result.held)}", "") if result.held else []),
        "",
        "  step        tokens/s  MFU     GiB   layout",
    ]
    for candidate in result.best:
        time = candidate.time
        row = (
            f"  {seconds_text(time.total):>9}{time.tokens_per_second:>11,.0f}"
            f"{100 * time.mfu:>5.1f} %{candidate.reserved / GIB:>7.1f}   "
        )
        lines += textwrap.wrap(
            candidate.name, WIDTH, initial_indent=row, subsequent_indent=" " * len(row)
        )
    if len(result.best) > 1:
        lines += ["", *_wrapped(f"the second is {why_slower(result.best[1], result.best[0])}")]
    return lines


def _refused(result: SearchResult) -> list[str]:
    return [f"{count:,}: {reason}" for reason, count in result.refused.items()] or ["all fit"]


def _error_contents(plan: Plan) -> dict[str, Any] | None:
    """The error of the time as plain data; None without a rate for the GPU, or with experts."""
    if plan.fitted is None or plan.llama.num_experts:
        return None
    what, error = plan.fitted.error_of(kind_of(plan.counts.degrees))
    return {"of": what, **dataclasses.asdict(error)}


def plan_json(plan: Plan, extra: dict[str, Any]) -> str:
    """The plan, and more sections, as JSON; bytes and seconds as they are."""
    contents = {
        "config": plan.config.run.name,
        "parameters": plan.llama.num_parameters,
        "active_parameters": plan.llama.num_active_parameters,
        "gpus": plan.gpus,
        "gpu": dataclasses.asdict(plan.machine),
        "compiled": plan.compiled,
        "verdict": plan.verdict,
        "source": plan.source,
        "remedies": [dataclasses.asdict(remedy) for remedy in plan.remedies],
        "zero": plan.zero,
        "bubble": plan.bubble,
        "needs": [dataclasses.asdict(need) for need in plan.needs],
        "time": dataclasses.asdict(plan.time) | {"total": plan.time.total},
        "time_error": _error_contents(plan),
        "traffic": [
            dataclasses.asdict(one.call)
            | {"sent_bytes": one.call.sent_bytes, "link": one.link, "seconds": one.seconds}
            for one in plan.traffic
        ],
        "counts": dataclasses.asdict(plan.counts),
        **extra,
    }
    return json.dumps(contents, indent=1)
