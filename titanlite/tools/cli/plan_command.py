"""`titanlite plan`: whether a config fits, how fast it is, and what it costs, before it is run.

With `--estimate` by arithmetic, in a fraction of a second and without torch; else the program is
traced on pretended processes.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

from titanlite.config.load import load_config
from titanlite.config.mistakes import suggestion
from titanlite.config.schema import FROM_CHECKPOINT, Config
from titanlite.config.to_toml import to_toml
from titanlite.model.flavors import LlamaConfig, resolve_flavor
from titanlite.model.flops import flops_per_token
from titanlite.rules.degrees import AXES
from titanlite.runtime.errors import ConfigError
from titanlite.runtime.files import replace_file
from titanlite.tools.cli.options import StrictParser, at_least
from titanlite.tools.plan.amounts import amount, seconds
from titanlite.tools.plan.budget import (
    GPU_MTBF_HOURS,
    Budget,
    budget_lines,
    checkpoint_bytes,
    flops_lines,
    run_budget,
    run_flops,
    save_interval,
    save_lines,
)
from titanlite.tools.plan.machines import Machine, find_machine, price_of, read_prices
from titanlite.tools.plan.page import page
from titanlite.tools.plan.plan import Plan, make_plan, with_dtype
from titanlite.tools.plan.scaling import scaling_laws, scaling_lines
from titanlite.tools.plan.search import as_toml, search
from titanlite.tools.plan.show import plan_json, plan_lines, search_lines

EPILOG = """\
Nothing is trained, downloaded or sent. Without --estimate the real program runs one step on
tensors without numbers, in at most a minute. docs/plan.md says what the numbers are."""
MAX_GPUS = 2**20
SAVE_BANDWIDTH = 1e9  # bytes per second and node, that --save-seconds replaces


def run(argv: list[str]) -> int:
    """Prints the plan. Raises ConfigError."""
    parser = _parser()
    options, rest = parser.parse_known_args(argv)
    names = [action.option_strings[0] for action in parser._actions if action.option_strings]
    unknown = [word for word in rest if word.startswith("--") and "." not in word.partition("=")[0]]
    if unknown:
        raise ConfigError(
            [f"unknown option {word}{suggestion(word, names)}; see --help" for word in unknown]
        )
    if options.fit:
        return _fit(options.fit, rest)
    config = load_config(rest)
    if config.model.flavor == FROM_CHECKPOINT:
        # Imports torch, which reads the checkpoint's shape
        from titanlite.tools.formats.adopt import adopt_checkpoint

        config = adopt_checkpoint(config)
    llama = model_of(config)
    machine = find_machine(options.gpu)
    if options.nodes_of:
        machine = dataclasses.replace(machine, gpus_per_node=options.nodes_of)
    gpus = options.gpus or _processes(config)
    if options.out and not options.search:
        raise ConfigError("--out: only with --search; expected both, or --html")
    if options.search:
        return _search(config, llama, gpus, machine, options)
    plan = make_plan(config, llama, gpus, machine, exact=not options.estimate)
    budget = _budget(plan, options)
    if options.json:
        print(plan_json(plan, _budget_contents(plan, budget)))
        return 0
    lines = plan_lines(plan)
    lines += ["", *_budget_text(plan, budget, options)]
    if options.html:
        write_file("--html", options.html, page(plan, lines))
    print("\n".join(lines))
    return 0


def _search(
    config: Config, llama: LlamaConfig, gpus: int, machine: Machine, options: argparse.Namespace
) -> int:
    """Prints the best layouts, and writes the first as a config that a run takes."""
    result = search(with_dtype(config, machine), llama, gpus, machine)
    best = result.best[0]
    if options.json:
        rows = [
            one.keys | {"seconds": one.time.total, "memory": dataclasses.asdict(one.memory)}
            for one in result.best
        ]
        print(json.dumps({"tried": result.tried, "refused": result.refused, "best": rows}))
    else:
        print("\n".join(search_lines(result, machine)))
        print(f"\nThe first, as TOML:\n\n{as_toml(best)}", end="")
    if options.out:
        run = dataclasses.replace(config.run, name=options.out.stem)
        training = dataclasses.replace(
            best.config.training, compute_dtype=config.training.compute_dtype
        )
        chosen = dataclasses.replace(best.config, run=run, training=training)
        write_file("--out", options.out, to_toml(chosen))
    return 0


def write_file(option: str, path: Path, text: str) -> None:
    """Raises ConfigError, naming the option."""
    try:
        replace_file(path.absolute(), text.encode())
    except OSError as error:
        raise ConfigError(
            f"{option} {path}: {error.strerror or error}; expected a file to write"
        ) from None


def _parser() -> argparse.ArgumentParser:
    parser = StrictParser(
        prog="titanlite plan",
        usage="titanlite plan [CONFIG] [--section.key=value ...] [--gpus N] [--gpu NAME] [...]",
        description="Say what a run would need: memory, communication, time and cost.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--gpus", type=at_least(int, 1, MAX_GPUS), metavar="N", help="default: what the config has"
    )
    parser.add_argument("--gpu", default="H100", metavar="NAME", help="or a .toml file; H100")
    parser.add_argument(
        "--nodes-of", type=at_least(int, 1, MAX_GPUS), metavar="N", help="GPUs of a node"
    )
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--tokens", metavar="T", help="tokens of the run, as in 300B or 2T")
    length.add_argument("--flops", metavar="C", help="FLOPs of the run, as in 5.76e23")
    length.add_argument("--days", metavar="D", help="time of the run, as in 30 or 12h")
    parser.add_argument("--estimate", action="store_true", help="by arithmetic, without torch")
    parser.add_argument("--search", action="store_true", help="rank all layouts, by arithmetic")
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="of --search: the best layout as a config"
    )
    parser.add_argument("--prices", type=Path, metavar="FILE", help="TOML: H100 = 2.5")
    parser.add_argument(
        "--mtbf-hours",
        type=at_least(float, 1e-3),
        default=GPU_MTBF_HOURS,
        metavar="H",
        help="of a GPU, between two failures",
    )
    parser.add_argument(
        "--save-seconds", type=at_least(float, 1e-3), metavar="S", help="that a save takes"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--html", type=Path, metavar="FILE", help="also write a page")
    parser.add_argument(
        "--fit", nargs="+", type=Path, metavar="RUN", help="fit a scaling law to these runs"
    )
    return parser


def _fit(folders: list[Path], rest: list[str]) -> int:
    """Fits the loss of the user's own runs."""
    from titanlite.tools.plan.fit import fit_lines, fit_runs  # imports numpy

    if rest:
        raise ConfigError(f"--fit: found {' '.join(rest)} too; expected only folders of runs")
    print("\n".join(fit_lines(fit_runs(folders))))
    return 0


def model_of(config: Config) -> LlamaConfig:
    """The shape of a config's model. Raises ConfigError."""
    llama = resolve_flavor(config.model, 0)
    if llama.vocab_size == 0:
        from titanlite.data.tokenizer import Tokenizer  # for its size alone

        llama = resolve_flavor(config.model, Tokenizer(config.data.tokenizer).size)
    return llama


def _processes(config: Config) -> int:
    """The number of GPUs that a config needs at least: -1 counts as 1."""
    gpus = 1
    for axis in AXES:
        gpus *= max(1, getattr(config.parallel, axis))
    return gpus


def _budget(plan: Plan, options: argparse.Namespace) -> Budget:
    """Of the run that the options describe; else of the config's."""
    tokens: float | None = None
    flops: float | None = None
    time: float | None = None
    if options.flops:
        flops = amount("--flops", options.flops)
    elif options.days:
        time = seconds("--days", options.days)
    elif options.tokens:
        tokens = amount("--tokens", options.tokens)
    else:
        tokens = float(plan.config.training.steps * plan.counts.tokens)
    per_token = flops_per_token(plan.llama, plan.config.training.seq_len, plan.config.lora)
    return run_budget(
        per_token,
        plan.gpus,
        plan.time.tokens_per_second,
        tokens=tokens,
        flops=flops,
        seconds=time,
        price=price_of(plan.machine, read_prices(options.prices)),
        peak_tflops=plan.machine.peak_tflops,
    )


def _budget_text(plan: Plan, budget: Budget, options: argparse.Namespace) -> list[str]:
    size = checkpoint_bytes(plan.llama, plan.config)
    saving = options.save_seconds or _save_seconds(size, plan)
    interval = save_interval(saving, plan.gpus, options.mtbf_hours)
    flops = run_flops(plan.llama, plan.config.training.seq_len, budget.tokens, plan.config.lora)
    scaling = scaling_laws(parameters=float(plan.llama.num_parameters), tokens=budget.tokens)
    return [
        "The run",
        *budget_lines(budget),
        *flops_lines(flops, plan.config.training.seq_len),
        *save_lines(interval, size, plan.time.total),
        "",
        *scaling_lines(scaling),
    ]


def _save_seconds(nbytes: int, plan: Plan) -> float:
    """A save in which each node writes at SAVE_BANDWIDTH."""
    nodes = -(-plan.gpus // plan.machine.gpus_per_node)
    return nbytes / (SAVE_BANDWIDTH * nodes)


def _budget_contents(plan: Plan, budget: Budget) -> dict[str, Any]:
    return {
        "budget": dataclasses.asdict(budget) | {"gpu_hours": budget.gpu_hours, "cost": budget.cost},
        "checkpoint_bytes": checkpoint_bytes(plan.llama, plan.config),
    }
