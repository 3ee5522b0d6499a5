"""Runs the layouts of `titanlite verify` and compares them with one process.

What it is: each layout of the ladder runs on a pool of workers and is compared with a reference,
which is computed once for each model shape. A table shows the differences and whether they are
within the tolerance of the dtype: in fp32 a layout may differ by the order of additions. With
experts, the router's decision for each token of each step and block must be that of one process.
Why it is here: layouts compute in fp32, also on GPUs, unless their name has another dtype. The
rounding of bf16 would hide small mistakes.
What it costs: minutes on a laptop for the default config, and the gradients and parameters of the
model once on disk.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import sys
import tempfile
import textwrap
import time
from pathlib import Path
from typing import Any

from titanlite.config.schema import Config
from titanlite.model.flavors import LlamaConfig
from titanlite.tools.verify.ladder import Case

FIGURES = ("loss", "grad_norm", "gradient", "parameters")
# The largest relative differences allowed; with several dtypes in a layout the last one counts
TOLERANCES = {
    "float32": {"loss": 1e-5, "grad_norm": 1e-5, "gradient": 1e-5, "parameters": 1e-5},
    "float16": {"loss": 1e-4, "grad_norm": 3e-3, "gradient": 5e-3, "parameters": 1e-2},
    "bfloat16": {"loss": 1e-3, "grad_norm": 1e-2, "gradient": 3e-2, "parameters": 3e-2},
    # A difference in the last bit of fp32 can change how a number is rounded to 8 bits, and does so
    # again in every following layer
    "float8": {"loss": 1e-3, "grad_norm": 5e-2, "gradient": 1e-1, "parameters": 1e-1},
}


def run_cases(
    cases: list[tuple[Case, LlamaConfig]], device: str, timeout: float, rows: list[dict[str, Any]]
) -> None:
    """Runs each case, prints its row and adds it to `rows`.

    Cases with equal settings of the reference share one.
    """
    os.environ["OMP_NUM_THREADS"] = "1"  # workers share the cores
    from titanlite.tools.verify.compare import larger, measure, reference
    from titanlite.tools.verify.pool import Pool, WorkerError

    pool = Pool(["titanlite.tools.verify.compare"], device, quiet=True)
    references: dict[tuple[object, ...], Path] = {}
    width = max([len(case.name) for case, _ in cases], default=6)
    figures = "  ".join(f"{name:>10}" for name in FIGURES)
    print(f"{'layout':{width}}  processes  {figures}  seconds  verdict", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for case, llama in cases:
            key = reference_key(case.config, llama)
            started = time.monotonic()
            differences = dict.fromkeys(FIGURES, float("nan"))
            decisions = 0
            error = ""
            try:
                if key not in references:
                    path = Path(folder, f"{len(references)}.pt")
                    pool.run(1, reference, case.config, llama, path, timeout=timeout)
                    references[key] = path
                    started = time.monotonic()  # the layout's time is without the reference's
                ranks = pool.run(
                    case.processes, measure, case.config, llama, references[key], timeout=timeout
                )
                for name in FIGURES:
                    differences[name] = functools.reduce(larger, [rank[name] for rank in ranks])
                decisions = int(ranks[0]["decisions"])
            except WorkerError as problem:
                error = str(problem)
            rows.append(judge(case, differences, time.monotonic() - started, decisions))
            _show(rows[-1], width, error)


def reference_key(config: Config, llama: LlamaConfig) -> tuple[object, ...]:
    """The settings that the reference depends on; cases with equal keys share one."""
    training = dataclasses.replace(
        config.training, local_batch_size=1, compute_dtype="", reduce_dtype=""
    )
    return (
        llama,
        training,
        config.optimizer,
        config.ema,
        config.loss.z_loss,
        config.loss.router_aux_loss,
        config.float8,
        config.lora,
        config.run.seed,
        config.data.document_mask,
    )


def tolerances_of(case: Case) -> dict[str, float]:
    """Figure -> the largest difference that a layout may have."""
    training = case.config.training
    dtypes = [training.compute_dtype, training.reduce_dtype, training.param_dtype]
    if case.config.float8.enabled:
        dtypes.append("float8")
    known = [dtype for dtype in dtypes if dtype in TOLERANCES]  # not `auto`
    least_precise = max(known, key=list(TOLERANCES).index)
    return TOLERANCES[least_precise]


def judge(
    case: Case, differences: dict[str, float], seconds: float, decisions: int = 0
) -> dict[str, Any]:
    """Makes a row of the result. NaN does not pass.

    `decisions`: how many of routers were compared; 0 without experts, and in lower precision.
    """
    tolerances = tolerances_of(case)
    passed = all(differences[name] <= tolerances[name] for name in FIGURES)
    # JSON has no NaN
    figures = {
        name: None if math.isnan(differences[name]) else differences[name] for name in FIGURES
    }
    return {
        "layout": case.name,
        "processes": case.processes,
        **figures,
        "decisions": decisions,
        "seconds": seconds,
        "passed": passed,
    }


def _show(row: dict[str, Any], width: int, error: str) -> None:
    figures = "  ".join(
        f"{'-':>10}" if row[name] is None else f"{row[name]:10.1e}" for name in FIGURES
    )
    verdict = "passed" if row["passed"] else "FAILED"
    if row["decisions"]:
        verdict += f", {row['decisions']:,} router decisions equal"
    print(
        f"{row['layout']:{width}}  {row['processes']:9}  {figures}  {row['seconds']:7.1f}  "
        f"{verdict}",
        flush=True,
    )
    if error:
        print(textwrap.indent(error.strip(), "    "), file=sys.stderr, flush=True)
