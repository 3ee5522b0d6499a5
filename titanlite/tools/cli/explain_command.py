"""`titanlite explain`: shows one step in order, with the purpose and the line of each collective.

The step runs in other processes; this one imports torch for their functions.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path

from titanlite.config.load import load_config
from titanlite.rules.degrees import AXES
from titanlite.runtime.errors import ConfigError
from titanlite.tools.cli.options import StrictParser, at_least, write_file
from titanlite.tools.cli.plan_command import MAX_GPUS, model_of, processes_of
from titanlite.tools.verify.ladder import parse_layout

EPILOG = """\
Up to 8 processes are started and communicate over gloo; of a larger layout, and with --pretend, one
rank of each pipeline stage is run as titanlite plan does, and its tensors have no numbers.
docs/one_step.md follows such a step."""


def run(argv: list[str]) -> int:
    """Prints the explanation. Raises ConfigError."""
    options, rest = _options(argv)
    layout = [f"--{key}={value}" for key, value in _layout(options.layout)]
    config = load_config([*rest, *layout])
    config = dataclasses.replace(config, run=dataclasses.replace(config.run, device="cpu"))
    llama = model_of(config)
    processes = options.processes or processes_of(config)
    # Imports torch, for which `--help` and mistakes in the config need not wait
    from titanlite.tools.explain.explain import REAL, explain
    from titanlite.tools.explain.page import page
    from titanlite.tools.explain.show import explanation_lines

    real = processes <= REAL and not options.pretend
    if options.rank >= processes:
        raise ConfigError(f"--rank {options.rank}: expected one of {processes} ranks, from 0 on")
    if options.html and not options.html.parent.is_dir():  # reported before the step is run
        raise ConfigError(
            f"--html {options.html}: no folder {options.html.parent}; expected a file in one that "
            "exists"
        )
    explanation = explain(config, llama, processes, real)
    ranks = [lane.rank for lane in explanation.lanes]
    if options.rank not in ranks:
        raise ConfigError(
            f"--rank {options.rank}: not run, the first rank of its stage is; expected one of "
            f"{', '.join(map(str, ranks))}"
        )
    if options.html:
        write_file("--html", options.html, page(explanation))
    if options.json:
        print(json.dumps(dataclasses.asdict(explanation)))
    else:
        print("\n".join(explanation_lines(explanation, options.rank)))
    return 0


def _layout(text: str | None) -> list[tuple[str, str]]:
    """The keys of `--layout`; degrees that it does not name are 1."""
    if text is None:
        return []
    given = parse_layout(text)
    named = {key for key, _ in given}
    others = [(f"parallel.{axis}", "1") for axis in AXES if f"parallel.{axis}" not in named]
    return [*others, *given]


def _options(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """The options of the command, and the arguments of the config."""
    parser = StrictParser(
        prog="titanlite explain",
        usage="titanlite explain [CONFIG] [--layout dp_shard=2,tp=2] [--section.key=value ...]",
        description="Show one training step in order: every collective, its tensor and its cause.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--layout", metavar="L", help="degrees and options, as in dp_shard=2,tp=2")
    parser.add_argument(
        "--processes",
        type=at_least(int, 1, MAX_GPUS),
        metavar="N",
        help="default: what the config has",
    )
    parser.add_argument(
        "--rank", type=at_least(int, 0), default=0, metavar="R", help="whose events are printed"
    )
    parser.add_argument("--pretend", action="store_true", help="start no processes for the ranks")
    parser.add_argument("--json", action="store_true", help="print all ranks' events as JSON")
    parser.add_argument("--html", type=Path, metavar="FILE", help="also write a page")
    return parser.parse_beside_config(argv)
