"""`titanlite verify`: every layout computes what one process computes.

What it is: runs the ladder on a pool of workers, against a reference made once for each model shape, prints a table
and judges. The tolerances are those of the number format: in fp32 a layout may differ by the order in which it adds.
Layouts compute in fp32, on GPUs too, but for those that say bf16: its rounding hides small mistakes.
What it costs: a laptop's minutes for the default config; the gradients and parameters of the model once on disk.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from titanlite.config import Config, ConfigError
from titanlite.configure import load_config
from titanlite.data.tokenizer import Tokenizer
from titanlite.model.flavors import LlamaConfig, resolve_flavor
from titanlite.spelling import suggestion
from titanlite.verify.ladder import MOST, Case, ladder, make_case, misfit

FIGURES = ("loss", "grad_norm", "gradient", "parameters")
TOLERANCES = {  # the largest relative differences that pass
    "float32": {"loss": 1e-5, "grad_norm": 1e-5, "gradient": 1e-5, "parameters": 1e-5},
    "bfloat16": {"loss": 1e-3, "grad_norm": 1e-2, "gradient": 3e-2, "parameters": 3e-2},
}
EPILOG = """The config's own degrees, batch sizes and recomputation do not matter: each layout brings its own.
Columns: the largest relative differences from one process of the loss and the gradient norm over 5 steps, of any
parameter's gradient at step 1 and of any parameter after step 5 (norm of the difference over norm)."""


def verify(argv: list[str]) -> int:
    """Runs the command; 0 if every layout passed, 1 if any failed. Raises ConfigError."""
    options, rest = _options(argv)
    device = _device(load_config(rest).run.device)
    processes = options.processes or (_cuda_devices() if device == "cuda" else 4)
    if device == "cuda" and processes > _cuda_devices():
        raise ConfigError(f"--processes {processes}: there are {_cuda_devices()} CUDA devices; or --run.device=cpu")
    texts = options.layout or ladder(processes, options.quick, device)
    tokenizer = Tokenizer(load_config(rest).data.tokenizer)
    fitting: list[tuple[Case, LlamaConfig]] = []
    skipped: list[str] = []
    for case in (make_case(rest, text, device) for text in texts):
        llama = resolve_flavor(case.config.model, tokenizer.size)
        problem = misfit(case, llama)
        if device == "cuda" and case.processes > _cuda_devices():
            problem = f"{case.processes} processes, but there are {_cuda_devices()} CUDA devices; or --run.device=cpu"
        if not problem:
            fitting.append((case, llama))
        elif options.layout:
            raise ConfigError(f"--layout {case.name}: {problem}")
        else:
            skipped.append(f"{case.name}: {problem}")
    if not fitting:
        raise ConfigError([f"no layout of up to {processes} processes fits; {text}" for text in skipped])
    rows: list[dict[str, Any]] = []
    try:
        run_cases(fitting, device, options.timeout, rows)
    finally:  # also what there is when interrupted
        if options.json:
            options.json.write_text(json.dumps(rows, indent=1) + "\n")
    print("".join(f"\ndoes not fit: {text}" for text in skipped).lstrip("\n"))
    failed = [row["layout"] for row in rows if not row["passed"]]
    beyond = f"; {len(skipped)} do not fit this model" if skipped else ""
    print(f"{len(rows) - len(failed)} of {len(rows)} layouts equal one process{beyond}")
    for name in failed:
        print(f"FAILED: {name}")
    return 1 if failed else 0


def run_cases(cases: list[tuple[Case, LlamaConfig]], device: str, timeout: float, rows: list[dict[str, Any]]) -> None:
    """Measures and judges each case, printing its row and adding it to `rows`; one reference for each model shape."""
    os.environ["OMP_NUM_THREADS"] = "1"  # workers share the cores
    from titanlite.verify.compare import measure, reference
    from titanlite.verify.pool import Pool, WorkerError

    pool = Pool(["titanlite.verify.compare"], device, quiet=True)
    references: dict[Any, Path] = {}
    width = max([len(case.name) for case, _ in cases], default=6)
    print(
        f"{'layout':{width}}  processes  {'  '.join(f'{name:>10}' for name in FIGURES)}  seconds  verdict", flush=True
    )
    with tempfile.TemporaryDirectory() as folder:
        for case, llama in cases:
            key = _same_reference(case.config, llama)
            started = time.monotonic()
            found, error = dict.fromkeys(FIGURES, float("nan")), ""
            try:
                if key not in references:
                    path = Path(folder, f"{len(references)}.pt")
                    pool.run(1, reference, case.config, llama, path, timeout=timeout)
                    references[key], started = path, time.monotonic()
                ranks = pool.run(case.processes, measure, case.config, llama, references[key], timeout=timeout)
                found = {name: _largest([rank[name] for rank in ranks]) for name in FIGURES}
            except WorkerError as problem:
                error = str(problem)
            rows.append(judge(case, found, time.monotonic() - started))
            _show(rows[-1], width, error)


def _same_reference(config: Config, llama: LlamaConfig) -> Any:
    """What the numbers of one process depend on."""
    training = dataclasses.replace(config.training, local_batch_size=1, compute_dtype="", reduce_dtype="")
    return llama, training, config.optimizer, config.run.seed


def judge(case: Case, found: dict[str, float], seconds: float) -> dict[str, Any]:
    """A row of the result. What is no number has not passed."""
    training = case.config.training
    tolerances = TOLERANCES[
        "bfloat16" if "bfloat16" in (training.compute_dtype, training.reduce_dtype, training.param_dtype) else "float32"
    ]
    passed = all(found[name] <= tolerances[name] for name in FIGURES)
    figures = {name: found[name] if found[name] == found[name] else None for name in FIGURES}
    return {"layout": case.name, "processes": case.processes, **figures, "seconds": seconds, "passed": passed}


def _show(row: dict[str, Any], width: int, error: str) -> None:
    figures = "  ".join(f"{row[name]:10.1e}" if row[name] is not None else f"{'-':>10}" for name in FIGURES)
    verdict = "passed" if row["passed"] else "FAILED"
    print(f"{row['layout']:{width}}  {row['processes']:9}  {figures}  {row['seconds']:7.1f}  {verdict}", flush=True)
    if error:
        print("\n".join(f"    {line}" for line in error.strip().splitlines()), file=sys.stderr, flush=True)


def _largest(values: list[float]) -> float:
    """The largest; what is no number is larger than any."""
    return next((value for value in values if value != value), max(values))


def _device(name: str) -> str:
    if name == "cpu":  # known without torch
        return name
    from titanlite.runtime import device_type

    return device_type(name)


def _cuda_devices() -> int:
    import torch

    return torch.cuda.device_count()


def _options(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """The command's own options, and the config's."""
    parser = argparse.ArgumentParser(
        prog="titanlite verify",
        usage="titanlite verify [CONFIG] [--section.key=value ...] [options]",
        description="Show that every layout computes what one process computes.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--processes", type=int, default=0, help="how many at most; default: 4, or the CUDA devices")
    layout = "this one only, as in dp_shard=2,tp=2 or pp=2,recompute.mode=full; may be repeated"
    parser.add_argument("--layout", action="append", help=layout)
    parser.add_argument(
        "--quick", action="store_true", help="a part of the ladder: each axis, each pair, each technique"
    )
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    parser.add_argument("--timeout", type=float, default=300, help="seconds that one layout may take (default 300)")
    options, rest = parser.parse_known_args(argv)
    own = [f"--{name}" for name in vars(options)]
    if unknown := [word for word in rest if word.startswith("--") and "." not in word.partition("=")[0]]:
        raise ConfigError([f"unknown option {word}{suggestion(word, own)}; see --help" for word in unknown])
    if not 0 <= options.processes <= MOST:
        raise ConfigError(f"--processes {options.processes}: expected 1 to {MOST}, or 0 for the default")
    if not options.timeout > 0:
        raise ConfigError(f"--timeout {options.timeout:g}: expected more than 0 seconds")
    if options.json:
        try:
            options.json.open("a").close()
        except OSError as error:
            raise ConfigError(f"--json {options.json}: {error.strerror or error}; expected a file to write") from None
    return options, rest
