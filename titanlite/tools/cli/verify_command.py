"""`titanlite verify`: shows that every parallel layout computes the same as one process."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from titanlite.config.load import load_config, split_command_line
from titanlite.model.flavors import LlamaConfig, resolve_flavor
from titanlite.runtime.errors import ConfigError
from titanlite.tokenizer.tokenizer import named_tokenizer
from titanlite.tools.cli.options import StrictParser, at_least, require_writable
from titanlite.tools.verify.campaign import run_cases
from titanlite.tools.verify.draw import draw_layouts
from titanlite.tools.verify.ladder import (
    BATCH_SIZES,
    MAX_PROCESSES,
    Case,
    adapters,
    compiler_of,
    ladder,
    layout_settings,
    make_case,
    reason_not_fitting,
)

MAX_DRAWN = 100_000
EPILOG = """The degrees, batch sizes and recomputation of the config are not used: each layout sets
them. Columns: the largest relative differences from one process, for the loss and the gradient norm
of 5 steps, each parameter's gradient at step 1 and each parameter after step 5 (norm of the
difference divided by the norm)."""


def run(argv: list[str]) -> int:
    """Runs the command. Returns 0 if every layout passed, 1 if any failed. Raises ConfigError."""
    options, rest = _options(argv)
    config = load_config(rest)
    _require_used(rest)
    device = _device(config.run.device)
    processes = options.processes or (_cuda_devices() if device == "cuda" else 4)
    if device == "cuda" and processes > _cuda_devices():
        raise ConfigError(
            f"--processes {processes}: there are {_cuda_devices()} CUDA devices; "
            "or --run.device=cpu"
        )
    compiler = compiler_of(device)
    tokenizer = named_tokenizer(config.data.tokenizer)
    if options.layout:
        texts = options.layout
    elif options.lora:
        texts = adapters(processes, compiler)
    elif options.draw:
        texts = draw_layouts(
            options.draw, options.draw_seed, processes, rest, device, compiler, tokenizer.size
        )
    else:
        texts = ladder(processes, options.quick, device)
    fitting: list[tuple[Case, LlamaConfig]] = []
    skipped: list[str] = []
    for case in (make_case(rest, text, device) for text in texts):
        llama = resolve_flavor(case.config.model, tokenizer.size)
        problem = reason_not_fitting(case, llama)
        if device == "cuda" and case.processes > _cuda_devices():
            problem = (
                f"{case.processes} processes, but there are {_cuda_devices()} CUDA devices; "
                "or --run.device=cpu"
            )
        if not problem:
            fitting.append((case, llama))
        elif options.layout:
            raise ConfigError(f"--layout {case.name}: {problem}")
        else:
            skipped.append(f"{case.name}: {problem}")
    if not fitting:
        raise ConfigError(
            [f"no layout of up to {processes} processes fits; {text}" for text in skipped]
        )
    rows: list[dict[str, Any]] = []
    try:
        run_cases(fitting, device, options.timeout, rows)
    finally:  # also after an interruption
        if options.json:
            options.json.write_text(json.dumps(rows, indent=1) + "\n")
    print("".join(f"\ndoes not fit: {text}" for text in skipped).lstrip("\n"))
    failed = [row["layout"] for row in rows if not row["passed"]]
    beyond = f"; {len(skipped)} do not fit this model" if skipped else ""
    print(f"{len(rows) - len(failed)} of {len(rows)} layouts equal one process{beyond}")
    for name in failed:
        print(f"FAILED: {name}")
    return 1 if failed else 0


def _device(name: str) -> str:
    if name == "cpu":  # no need to import torch
        return name
    from titanlite.runtime.device import device_type

    return device_type(name)


def _cuda_devices() -> int:
    import torch

    return torch.cuda.device_count()


def _options(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """The options of the command, and the arguments of the config."""
    parser = StrictParser(
        prog="titanlite verify",
        usage="titanlite verify [CONFIG] [--section.key=value ...] [options]",
        description="Show that every parallel layout computes the same as one process.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--processes",
        type=at_least(int, 1, MAX_PROCESSES),
        default=0,
        help="largest number of processes; default: 4, or the number of CUDA devices",
    )
    layout = (
        "run only this layout, as in dp_shard=2,tp=2 or pp=2,recompute.mode=full; may be repeated"
    )
    parser.add_argument("--layout", action="append", help=layout)
    parser.add_argument(
        "--quick",
        action="store_true",
        help="fewer layouts: each axis, each pair of axes, each technique",
    )
    parser.add_argument(
        "--lora",
        action="store_true",
        help="only the layouts with low-rank adapters",
    )
    parser.add_argument(
        "--draw",
        type=at_least(int, 1, MAX_DRAWN),
        default=0,
        metavar="N",
        help="N layouts drawn at random: every setting that changes how a step is computed, in any "
        "combination",
    )
    parser.add_argument(
        "--draw-seed", type=int, default=0, help="of the drawing; another one draws other layouts"
    )
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    parser.add_argument(
        "--timeout",
        type=at_least(float, 1, 10**6),
        default=300,
        help="time-out of one layout in seconds (default 300)",
    )
    options, rest = parser.parse_beside_config(argv)
    chosen = [f"--{name}" for name in ("layout", "quick", "lora", "draw") if vars(options)[name]]
    if len(chosen) > 1:
        raise ConfigError(f"{' and '.join(chosen)}: each chooses the layouts; expected one of them")
    if options.json:
        require_writable("--json", options.json)
    return options, rest


def _require_used(arguments: list[str]) -> None:
    """Raises ConfigError for keys on the command line that each layout would replace."""
    _, overrides = split_command_line(arguments)
    replaced = {*layout_settings(), *BATCH_SIZES}
    unused = dict.fromkeys(f"--{key.name}" for key in overrides if key.name in replaced)
    if unused:
        raise ConfigError(
            f"{' and '.join(unused)}: replaced by each layout; expected it in --layout"
        )
