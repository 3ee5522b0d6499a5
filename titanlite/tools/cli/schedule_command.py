"""`titanlite schedule`: draws the learning rate and a changing batch size over a run's steps."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path

from titanlite.config.batch_sizes import samples_after, segments
from titanlite.config.budget import epochs_in_steps
from titanlite.config.changes import milestones
from titanlite.config.load import load_config
from titanlite.config.mistakes import suggestion
from titanlite.config.schema import Config
from titanlite.optim.schedule import lr_factor
from titanlite.runtime.errors import ConfigError
from titanlite.runtime.files import replace_file
from titanlite.tools.cli.curves import Curve, Mark, Picture, svg_picture, text_picture
from titanlite.tools.cli.options import StrictParser

EPILOG = """\
Draws what a run with this configuration would do; nothing is trained. With a budget in epochs,
the data is prepared first, as for a run. The SVG file needs no other file, follows the reader's
light or dark theme, and has a title and a description for screen readers."""


def run(argv: list[str]) -> int:
    """Prints the picture, and writes it as SVG if asked to. Raises ConfigError."""
    parser = StrictParser(
        prog="titanlite schedule",
        usage="titanlite schedule [CONFIG] [--section.key=value ...] [--svg FILE]",
        description="Draw the learning rate of every step, and the batch size if it changes.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--svg", type=Path, metavar="FILE", help="also write the picture to this file"
    )
    options, rest = parser.parse_known_args(argv)
    unknown = [word for word in rest if word.startswith("--") and "." not in word.partition("=")[0]]
    if unknown:
        raise ConfigError(
            [f"unknown option {word}{suggestion(word, ['--svg'])}; see --help" for word in unknown]
        )
    picture = picture_of(_with_steps(load_config(rest)))
    print(text_picture(picture, blocks="utf" in (sys.stdout.encoding or "").lower()))
    if options.svg:
        try:
            replace_file(options.svg.absolute(), svg_picture(picture).encode())
        except OSError as error:
            raise ConfigError(
                f"--svg {options.svg}: {error.strerror or error}; expected a file to write"
            ) from None
    return 0


def _with_steps(config: Config) -> Config:
    """The config with its budget in steps; for a budget in epochs the data is prepared first."""
    if not config.training.epochs:
        return config
    # These import torch, which a budget in steps does not need.
    from titanlite.data.order import build_samples
    from titanlite.data.prepared import load_sources
    from titanlite.tokenizer.tokenizer import Tokenizer
    from titanlite.tools.prepare.cache import prepare

    tokenizer = Tokenizer(config.data.tokenizer)
    folders = [prepare(part, tokenizer, _note) for part in config.data.parts()]
    data = load_sources(config.data, folders, tokenizer)
    samples = build_samples(data, config.data, config.training, config.run.seed)
    return epochs_in_steps(config, samples)


def _note(text: str) -> None:
    print(text, file=sys.stderr)


def picture_of(config: Config) -> Picture:
    """The curves of a config whose budget is in steps, and its key points."""
    training = config.training
    schedule = config.schedule
    peak = config.optimizer.lr
    total = training.steps

    def rate(step: int) -> float:
        return peak * lr_factor(schedule, step, total)

    def tokens(step: int) -> int:
        return samples_after(training, 0, step) * training.seq_len

    def size(step: int) -> float:
        return samples_after(training, 0, step) - samples_after(training, 0, step - 1)

    # Step -> name: where the schedule and a change of the batch size meet, the schedule's
    warmup = max(1, schedule.warmup_steps)
    points = {1: "first step"}
    points[warmup] = "peak" if warmup == 1 else "peak, end of warmup"
    if schedule.name == "wsd":
        decay_steps = schedule.decay_steps or round(schedule.decay_fraction * total)
        points.setdefault(max(warmup, total - decay_steps), "end of stable phase")
    if schedule.name == "step":
        points |= {m.step: "milestone" for m in milestones(schedule.milestones)}
    curves = [Curve("learning rate", "{:.2e}", rate)]
    if training.batch_ramp:
        curves.append(Curve("sequences per step", "{:,.0f}", size))
        changes = segments(training)[1:]
        if len(changes) > 8:
            changes = (changes[0], changes[-1])  # a table of all would be long
        for change in changes:
            points.setdefault(change.step, "batch size")
    points.setdefault(total, "last step")

    marks = []
    for step, name in sorted(points.items()):
        if step <= total:
            values = tuple(curve.value(step) for curve in curves)
            marks.append(Mark(name, step, values))
    if marks[-1].step == total:
        marks[-1] = dataclasses.replace(marks[-1], name="last step")
    shape = f"wsd, {schedule.decay} decay" if schedule.name == "wsd" else schedule.name
    return Picture(f"{config.run.name}: {shape}", total, tokens, tuple(curves), tuple(marks))
