"""Scaling laws on a CPU: trains four sizes on several numbers of tokens, and fits L(N, D).

    python benchmarks/scaling_laws.py [--folder outputs/scaling_laws]

What it is: 10 runs of titanlite on the default corpus, in fp32 on one core, each with its own
cosine schedule, then `fit_runs` (titanlite/tools/plan/fit.py) as for anyone's runs. Runs that are
in the folder already are not trained again. Larger sizes have fewer runs, because their longest
would take most of the time. Each run is also predicted from the others. A step has two sequences,
so that few tokens are many steps: with eight, and a quarter of the steps, 256,000 tokens give the
widths 32, 64 and 192 losses of 5.60, 5.61 and 5.15 instead of 5.32, 5.16 and 5.09, which do not
fall with the size. Neither batch nor rates were searched for.
Why it is here: docs/plan.md shows what a fit of small runs determines and what it does not.
What it costs: 20 minutes of one core.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import resource
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import drawing
import report

sys.path.insert(0, str(report.ROOT))

from titanlite.tools.plan.amounts import exponent, short
from titanlite.tools.plan.fit import (
    Estimate,
    Fit,
    Point,
    fit_lines,
    fit_points,
    fit_record,
    fit_runs,
)

BATCH = 2
SEQ_LEN = 128
HEAD_DIM = 32
STEPS = (1000, 2000, 4000)
RATES = {32: 4e-3, 64: 3e-3, 128: 2e-3, 192: 1.5e-3}  # learning rate by width
MOST_STEPS = {32: 4000, 64: 4000, 128: 2000, 192: 2000}
CPU_SECONDS = "cpu_seconds.json"  # in a run's folder, by this program

PICTURE = report.ROOT / "docs/images/scaling_laws.svg"
WIDTH = 760
HEIGHT = 420

# The frame of the plot
LEFT = 62
RIGHT = 742
TOP = 44
BOTTOM = 352


@dataclass(frozen=True)
class Case:
    """One run."""

    width: int
    steps: int

    @property
    def name(self) -> str:
        return f"d{self.width}-{self.steps}"

    @property
    def options(self) -> dict[str, object]:
        return {
            "run.name": self.name,
            "run.device": "cpu",
            "run.sample_tokens": 0,
            "model.dim": self.width,
            "model.num_heads": self.width // HEAD_DIM,
            "model.num_kv_heads": self.width // HEAD_DIM,
            "model.ffn_dim": self.width * 11 // 4,
            "training.steps": self.steps,
            "training.seq_len": SEQ_LEN,
            "training.global_batch_size": BATCH,
            "training.local_batch_size": BATCH,
            "training.compute_dtype": "float32",
            "optimizer.lr": RATES[self.width],
            "schedule.name": "cosine",
            "schedule.warmup_steps": self.steps // 10,
            "validation.freq": self.steps,
            "validation.prompts": "",
            "checkpoint.freq": 0,
            "metrics.log_freq": 10,
        }


CASES = [Case(width, steps) for width in RATES for steps in STEPS if steps <= MOST_STEPS[width]]


def train(case: Case, folder: Path) -> None:
    """Trains one run, unless the folder has it; its CPU time goes into CPU_SECONDS."""
    done = folder / case.name / CPU_SECONDS
    if done.exists():
        return
    command = [
        sys.executable,
        str(report.ROOT / "titanlite/__main__.py"),
        "train",
        "debug",
        f"--run.folder={folder}",
        *(f"--{key}={value}" for key, value in case.options.items()),
    ]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1", "NGPU": "1"}, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    done.write_text(json.dumps(round(seconds, 1)) + "\n")


def left_out(fit: Fit, point: Point) -> Estimate:
    """The loss of a run as the others predict it."""
    others = [other for other in fit.points if other.name != point.name]
    return fit_points(others, fit.measure).loss(point.parameters, point.tokens)


def rows(fit: Fit, predicted: dict[str, Estimate], cpu_seconds: dict[str, float]) -> list[str]:
    """The table of runs."""
    lines = [
        "| run | parameters | tokens | 6 N D | CPU seconds | loss | fitted | from the other runs |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for point in fit.points:
        fitted = fit.law.loss(point.parameters, point.tokens)
        guess = predicted[point.name]
        error = 100 * (guess.value / point.loss - 1)
        lines.append(
            f"| {point.name} | {point.parameters:,.0f} | {point.tokens:,.0f} | "
            f"{exponent(point.flops)} | {cpu_seconds[point.name]:.0f} | {point.loss:.3f} | "
            f"{fitted:.3f} | {guess.value:.3f} ({guess.low:.3f} to {guess.high:.3f}), "
            f"{error:+.1f} % |"
        )
    return lines


def beyond(fit: Fit) -> list[str]:
    """What the fit says of larger numbers of FLOPs than any run had."""
    lines = ["| FLOPs | best N | its loss |", "|---|---|---|"]
    largest = max(point.flops for point in fit.points)
    for factor in (1, 10, 100):
        flops = factor * largest
        size = fit.best_parameters(flops)
        loss = fit.loss(size.value, flops / 6 / size.value)
        lines.append(
            f"| {exponent(flops)} | {short(size.value)} ({short(size.low)} to {short(size.high)}) "
            f"| {loss.value:.2f} ({loss.low:.2f} to {loss.high:.2f}) |"
        )
    return lines


def draw(fit: Fit, caption: str) -> str:
    """Measured losses as points, and the fitted law as a curve for each size, as SVG."""
    tokens = [point.tokens for point in fit.points]
    losses = [point.loss for point in fit.points]
    first = min(tokens) / 1.3
    last = max(tokens) * 1.3
    top = max(losses) + 0.1
    bottom = min(losses) - 0.3

    def x(count: float) -> float:
        return LEFT + (RIGHT - LEFT) * math.log(count / first) / math.log(last / first)

    def y(loss: float) -> float:
        return BOTTOM - (BOTTOM - TOP) * (loss - bottom) / (top - bottom)

    title = "Loss of four sizes by tokens: measured (points) and fitted (curves)"
    parts = [
        *drawing.begin(WIDTH, HEIGHT, "Loss by tokens for four sizes"),
        drawing.text(LEFT, 26, title, size=16, weight="bold"),
    ]
    for tick in range(math.ceil(2 * bottom), math.floor(2 * top) + 1):
        loss = tick / 2
        parts.append(drawing.line(LEFT, y(loss), RIGHT, y(loss), "#dddddd"))
        parts.append(drawing.text(LEFT - 8, y(loss) + 4, f"{loss:.1f}", anchor="end"))
    for count in sorted(set(tokens)):
        parts.append(drawing.line(x(count), BOTTOM, x(count), BOTTOM + 5, "#777777"))
        parts.append(drawing.text(x(count), BOTTOM + 20, short(count), anchor="middle"))
    middle = (LEFT + RIGHT) / 2
    parts.append(drawing.text(middle, BOTTOM + 38, "tokens (logarithmic)", anchor="middle"))
    parts.append(
        f'<text transform="translate(20 {(TOP + BOTTOM) / 2}) rotate(-90)" text-anchor="middle" '
        'fill="#333333">validation loss (nats per token)</text>'
    )
    sizes = sorted({point.parameters for point in fit.points})
    legend = TOP + 16
    for size, colour in zip(sizes, drawing.COLOURS, strict=True):
        counts = [first * (last / first) ** (i / 60) for i in range(61)]
        path = [(x(count), y(fit.law.loss(size, count))) for count in counts]
        parts.append(drawing.curve([(a, b) for a, b in path if TOP <= b <= BOTTOM], colour))
        for point in fit.points:
            if point.parameters == size:
                parts.append(
                    f'<circle cx="{x(point.tokens):.1f}" cy="{y(point.loss):.1f}" r="4.5" '
                    f'fill="{colour}" stroke="#ffffff"/>'
                )
        parts.append(drawing.line(RIGHT - 190, legend - 4, RIGHT - 154, legend - 4, colour, 4))
        parts.append(drawing.text(RIGHT - 144, legend, f"{short(size)} parameters"))
        legend += 20
    parts.append(drawing.text(LEFT, BOTTOM + 58, caption, colour=drawing.GREY, size=12))
    parts.append("</svg>")
    return "\n".join(parts) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, default=report.ROOT / "outputs/scaling_laws")
    options = parser.parse_args()
    for case in CASES:
        train(case, options.folder)

    fit = fit_runs([options.folder / case.name for case in CASES])
    predicted = {point.name: left_out(fit, point) for point in fit.points}
    cpu_seconds = {
        case.name: json.loads((options.folder / case.name / CPU_SECONDS).read_text())
        for case in CASES
    }
    body = [
        *rows(fit, predicted, cpu_seconds),
        "",
        f"CPU time of all runs: {sum(cpu_seconds.values()) / 60:.0f} minutes of one core.",
        "",
        "```",
        *fit_lines(fit),
        "```",
        "",
        *beyond(fit),
    ]
    results = fit_record(fit) | {
        "cpu_seconds": cpu_seconds,
        "left_out": {name: dataclasses.asdict(one) for name, one in predicted.items()},
    }
    report.write("scaling_laws", "A scaling law from four sizes on a CPU", body, results)
    caption = f"titanlite on Python's standard library; {report.cpu()}, shared"
    PICTURE.write_text(draw(fit, caption))
    print(f"wrote {PICTURE}")


if __name__ == "__main__":
    main()
