"""`titanlite plan`: says whether a config fits, how fast it is, and what it costs.

With `--estimate` it computes this by formula, in a fraction of a second and without torch. Else it
traces the program on pretended processes.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import textwrap
from pathlib import Path
from typing import Any

from titanlite.config.batch_sizes import samples_after
from titanlite.config.load import load_config, split_command_line
from titanlite.config.schema import FROM_CHECKPOINT, Config
from titanlite.config.to_toml import to_toml
from titanlite.model.flavors import LlamaConfig, resolve_flavor
from titanlite.model.flops import flops_per_token
from titanlite.rules.degrees import AXES
from titanlite.runtime.errors import ConfigError
from titanlite.tools.cli.options import StrictParser, at_least, log, write_file
from titanlite.tools.plan.amounts import amount, seconds
from titanlite.tools.plan.budget import (
    GPU_MTBF_HOURS,
    Budget,
    SaveInterval,
    budget_lines,
    checkpoint_bytes,
    flops_lines,
    run_budget,
    run_flops,
    save_interval,
    save_lines,
    speed_from_mfu,
)
from titanlite.tools.plan.machines import Machine, find_machine, price_of, read_prices
from titanlite.tools.plan.plan import Plan, make_plan, with_dtype
from titanlite.tools.plan.scaling import scaling_laws, scaling_lines
from titanlite.tools.plan.schedule import schedule_lines, schedule_points, schedule_warnings
from titanlite.tools.plan.search import as_toml, search
from titanlite.tools.plan.show import plan_json, plan_lines, search_lines

EPILOG = """\
Nothing is trained, downloaded or sent. Without --estimate the real program runs one step on
tensors without numbers, which takes half a minute or more; then the communication, the states and,
where blocks are not compiled, the activations are counted, and only times are estimated.
docs/plan.md says what the numbers are."""
MAX_GPUS = 2**20
WORTH_SAYING = 0.05  # of the time of a step
OF_A_LAYOUT = (  # options that --search does not use
    "tokens",
    "flops",
    "days",
    "mfu",
    "tokens_per_second",
    "estimate",
    "prices",
    "mtbf_hours",
    "save_seconds",
)
SAVE_BANDWIDTH = 1e9  # bytes per second and node, unless --save-seconds is given


def run(argv: list[str]) -> int:
    """Prints the plan. Raises ConfigError."""
    options, rest = _parser().parse_beside_config(argv)
    config = load_config(rest)
    if config.model.flavor == FROM_CHECKPOINT:
        # Imports torch, which reads the checkpoint's shape
        from titanlite.tools.formats.adopt import adopt_checkpoint

        config = adopt_checkpoint(config)
    llama = model_of(config)
    machine = find_machine(options.gpu)
    if options.nodes_of:
        machine = dataclasses.replace(machine, gpus_per_node=options.nodes_of)
    gpus = options.gpus or processes_of(config)
    if options.out and not options.search:
        raise ConfigError("--out: only with --search; expected both")
    if options.search:
        given = [name for name in OF_A_LAYOUT if getattr(options, name) not in (None, False)]
        if given:
            names = " and ".join(f"--{name.replace('_', '-')}" for name in given)
            raise ConfigError(f"{names}: not with --search; plan the layout that it finds")
        _, overrides = split_command_line(rest)
        chosen = frozenset(override.name for override in overrides)
        return _search(config, llama, gpus, machine, chosen, options)
    if not options.estimate:
        log(f"tracing a step of {config.model.flavor} on {gpus} GPUs; --estimate takes a second")
    plan = make_plan(config, llama, gpus, machine, exact=not options.estimate)
    budget = _budget(plan, options)
    if options.json:
        print(plan_json(plan, _run_contents(plan, budget, options)))
    else:
        lines = [*plan_lines(plan), *faster_layout(plan), "", *_run_lines(plan, budget, options)]
        print("\n".join(lines))
    return 0


def faster_layout(plan: Plan) -> list[str]:
    """A line about the fastest layout of all, if it is faster than this one.

    The search takes seconds to a minute: less than a trace, and more than an estimate, which only
    says how to start it.
    """
    if plan.counts.source == "estimated":
        return ["  not compared with other layouts: --search does that in seconds to a minute"]
    log("comparing it with other layouts")
    try:
        best = search(plan.config, plan.llama, plan.gpus, plan.machine).best[0]
    except ConfigError:  # none fits, as the verdict says
        return []
    faster = plan.time.total / best.time.total - 1
    if faster < WORTH_SAYING:
        return []
    text = (
        f"a search without given layout keys finds one that is {100 * faster:.0f} % faster: "
        f"{best.name}"
    )
    return textwrap.wrap(text, 78, initial_indent="  ", subsequent_indent="  ")


def _search(
    config: Config,
    llama: LlamaConfig,
    gpus: int,
    machine: Machine,
    given: frozenset[str],
    options: argparse.Namespace,
) -> int:
    """Prints the best layouts, and writes the first as a config that a run takes."""
    result = search(with_dtype(config, machine), llama, gpus, machine, given=given)
    best = result.best[0]
    if options.json:
        rows = [
            one.keys | {"seconds": one.time.total, "memory": dataclasses.asdict(one.memory)}
            for one in result.best
        ]
        contents = {"tried": result.tried, "refused": result.refused, "held": result.held}
        print(json.dumps(contents | {"best": rows}))
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


def _parser() -> StrictParser:
    parser = StrictParser(
        prog="titanlite plan",
        usage="titanlite plan [CONFIG] [--section.key=value ...] [--gpus N] [--gpu NAME] [...]",
        description="Say what a run would need: memory, communication, time and cost.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
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
    length.add_argument("--flops", metavar="C", help="with attention, as in 5.76e23")
    length.add_argument("--days", metavar="D", help="time of the run, as in 30 or 12h")
    speed = parser.add_mutually_exclusive_group()
    speed.add_argument(
        "--mfu",
        type=at_least(float, 1e-6, 1),
        metavar="F",
        help="plan the run at this MFU, as in 0.5",
    )
    speed.add_argument(
        "--tokens-per-second",
        type=at_least(float, 1e-6),
        metavar="V",
        help="plan the run at this speed of a GPU",
    )
    parser.add_argument("--estimate", action="store_true", help="by arithmetic, without torch")
    parser.add_argument(
        "--search",
        action="store_true",
        help="rank all layouts, by arithmetic; keys on the command line are held",
    )
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="of --search: the best layout as a config"
    )
    parser.add_argument("--prices", type=Path, metavar="FILE", help="TOML: H100 = 2.5")
    parser.add_argument(
        "--mtbf-hours",
        type=at_least(float, 1e-3),
        metavar="H",
        help="of a GPU, between two failures",
    )
    parser.add_argument(
        "--save-seconds", type=at_least(float, 1e-3), metavar="S", help="that a save takes"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def model_of(config: Config) -> LlamaConfig:
    """The shape of a config's model. Raises ConfigError."""
    llama = resolve_flavor(config.model, 0)
    if llama.vocab_size == 0:
        from titanlite.tokenizer.tokenizer import named_tokenizer  # for its vocabulary size

        llama = resolve_flavor(config.model, named_tokenizer(config.data.tokenizer).size)
    return llama


def processes_of(config: Config) -> int:
    """The number of GPUs that a config needs at least: -1 counts as 1."""
    gpus = 1
    for axis in AXES:
        gpus *= max(1, getattr(config.parallel, axis))
    return gpus


def _budget(plan: Plan, options: argparse.Namespace) -> Budget | None:
    """The budget of the run that the options describe, else the config.

    None if the length depends on data that is not read, or if the speed is not known.
    """
    config = plan.config
    training = config.training
    tokens: float | None = None
    flops: float | None = None
    time: float | None = None
    if options.flops is not None:
        flops = amount("--flops", options.flops)
    elif options.days is not None:
        time = seconds("--days", options.days)
    elif options.tokens is not None:
        tokens = amount("--tokens", options.tokens)
    elif training.epochs:
        return None
    else:
        tokens = float(samples_after(training, 0, training.steps) * training.seq_len)
    per_token = flops_per_token(plan.llama, training.seq_len, config.lora, training.frozen_patterns)
    speed = plan.time.tokens_per_second
    given = options.tokens_per_second is not None or options.mfu is not None
    if plan.fitted is None and not given:
        return None
    if options.tokens_per_second is not None:
        speed = options.tokens_per_second
    elif options.mfu is not None:
        speed = speed_from_mfu(per_token, options.mfu, plan.machine.peak_tflops)
    return run_budget(
        per_token,
        plan.gpus,
        speed,
        tokens=tokens,
        flops=flops,
        seconds=time,
        price=price_of(plan.machine, read_prices(options.prices, plan.machine)),
        peak_tflops=plan.machine.peak_tflops,
    )


def _has_length_of_config(config: Config, options: argparse.Namespace) -> bool:
    """Whether the planned run has the steps of the config."""
    given = (options.tokens, options.flops, options.days)
    return given == (None, None, None) and not config.training.epochs


def _interval(plan: Plan, options: argparse.Namespace) -> SaveInterval:
    """The best interval between saves, if each node writes at SAVE_BANDWIDTH."""
    nodes = -(-plan.gpus // plan.machine.gpus_per_node)
    size = checkpoint_bytes(plan.llama, plan.config)
    saving = options.save_seconds or size / (SAVE_BANDWIDTH * nodes)
    return save_interval(saving, plan.gpus, options.mtbf_hours or GPU_MTBF_HOURS)


def _run_lines(plan: Plan, budget: Budget | None, options: argparse.Namespace) -> list[str]:
    """Lines about the whole run: length, cost, checkpoints, schedule and scaling laws."""
    if budget is None and plan.fitted is None:
        return [f"The run: no rate for {plan.machine.name}; give --mfu or --tokens-per-second"]
    if budget is None:
        epochs = plan.config.training.epochs
        return [f"The run: training.epochs = {epochs:g} of data that is not read; give --tokens"]
    config = plan.config
    training = config.training
    flops = run_flops(
        plan.llama, training.seq_len, budget.tokens, config.lora, training.frozen_patterns
    )
    size = checkpoint_bytes(plan.llama, config)
    parameters = float(plan.llama.num_active_parameters)  # as many as a dense model computes with
    lines = ["The run"]
    if plan.verdict == "does not fit":
        lines = ["The run, if it did fit"]
    if config.training.batch_ramp and options.days is None:
        lines.append("  (by the speed of the first batch size)")
    lines += [
        *budget_lines(budget),
        *flops_lines(flops, config.training.seq_len),
        *save_lines(_interval(plan, options), size, plan.time.total, budget.seconds),
        "",
    ]
    if _has_length_of_config(config, options):
        lines += [*schedule_lines(schedule_points(config)), *schedule_warnings(config), ""]
    return [*lines, *scaling_lines(scaling_laws(parameters=parameters, tokens=budget.tokens))]


def _run_contents(plan: Plan, budget: Budget | None, options: argparse.Namespace) -> dict[str, Any]:
    """The run as a whole, as plain data."""
    interval = _interval(plan, options)
    training = plan.config.training
    contents: dict[str, Any] = {
        "flops_per_token": flops_per_token(
            plan.llama, training.seq_len, plan.config.lora, training.frozen_patterns
        ),
        "checkpoint_bytes": checkpoint_bytes(plan.llama, plan.config),
        "save_interval": dataclasses.asdict(interval),
        "budget": None,
        "schedule": [],
    }
    if _has_length_of_config(plan.config, options):
        contents["schedule"] = [point._asdict() for point in schedule_points(plan.config)]
    if budget is not None:
        contents["budget"] = dataclasses.asdict(budget) | {
            "gpu_hours": budget.gpu_hours,
            "cost": budget.cost,
        }
    return contents
