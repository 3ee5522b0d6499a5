"""Draws docs/images/four_layouts.svg: the loss of one config in four layouts.

    python benchmarks/four_layouts.py            # trains five times, and draws; four minutes
    python benchmarks/four_layouts.py --draw     # draws the stored losses again

What it is: `debug` in fp32 for 300 steps, by one process, and by two processes that divide the
parameters (dp_shard), the matrices (tp) or the layers (pp). The losses of every step are stored in
benchmarks/results/<date>-four_layouts.json, and the newest of these files is drawn.
Why it is here: the README shows the picture. Curves that coincide would hide each other, so they
take turns: each draws three steps of every twelve. The legend says how far each is from one
process. Sums in another order differ in their last bits, and training amplifies the difference. How
far that goes without any parallelism is measured too: by one process that computes the batch of a
step in one piece instead of four.
What it costs: 1.5 million tokens.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import report
from drawing import COLOURS, GREY, begin, curve, line, text

STEPS = 300
LAYOUTS = {
    "1 process": (1, []),
    "dp_shard = 2": (2, ["--parallel.dp_shard=2"]),
    "tp = 2": (2, ["--parallel.tp=2"]),
    "pp = 2": (2, ["--parallel.pp=2"]),
}
# The same batch in one piece instead of four: only the order of sums differs
CONTROL = (1, ["--training.local_batch_size=8"])
OPTIONS = {
    "training.steps": STEPS,
    "training.compute_dtype": "float32",
    "run.device": "cpu",
    "validation.prompts": "",
    "metrics.log_freq": 1,
    "checkpoint.freq": 0,
    "validation.freq": 0,
}
PICTURE = report.ROOT / "docs/images/four_layouts.svg"

WIDTH = 760
HEIGHT = 420

# The frame of the plot
LEFT = 62
RIGHT = 742
TOP = 44
BOTTOM = 352

TURN = 3  # steps that each curve draws in its turn


def train(processes: int, layout: list[str]) -> list[float]:
    """Trains; returns the loss of each step."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            str(report.ROOT / "titanlite/__main__.py"),
            "train",
            "debug",
            f"--run.folder={folder}",
            "--run.name=run",
            *(f"--{key}={value}" for key, value in OPTIONS.items()),
            *layout,
        ]
        subprocess.run(command, env=os.environ | {"NGPU": str(processes)}, check=True)
        lines = Path(folder, "run/metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    losses = [row["loss"] for row in rows if "loss" in row]
    assert len(losses) == STEPS
    return losses


def largest_difference(losses: list[float], reference: list[float]) -> float:
    """Computes the largest difference of a step's loss, in nats per token."""
    return max(abs(a - b) for a, b in zip(losses, reference, strict=True))


def describe(losses: list[float], reference: list[float]) -> str:
    """Describes how far a curve is from the reference."""
    first = largest_difference(losses[:1], reference[:1])
    rounding = f"{first:.1e}" if first else "0"
    return f"step 1: {rounding}, largest: {largest_difference(losses, reference):.3f}"


def draw(curves: dict[str, list[float]], control: list[float], caption: str) -> str:
    """Draws the picture as SVG."""
    reference = next(iter(curves.values()))
    steps = len(reference)
    highest = max(max(losses) for losses in curves.values())
    top_tick = int(highest) + 1
    bottom_tick = int(min(min(losses) for losses in curves.values()))

    def x(step: float) -> float:
        return LEFT + (RIGHT - LEFT) * step / steps

    def y(loss: float) -> float:
        return BOTTOM - (BOTTOM - TOP) * (loss - bottom_tick) / (top_tick - bottom_tick)

    parts = [
        *begin(WIDTH, HEIGHT, "The training loss in four layouts"),
        text(LEFT, 26, "Training loss of one config in four layouts", size=16, weight="bold"),
    ]
    for tick in range(bottom_tick, top_tick + 1):
        parts.append(line(LEFT, y(tick), RIGHT, y(tick), "#dddddd"))
        parts.append(text(LEFT - 8, y(tick) + 4, str(tick), anchor="end"))
    for tick in range(0, steps + 1, 50):
        parts.append(line(x(tick), BOTTOM, x(tick), BOTTOM + 5, "#777777"))
        parts.append(text(x(tick), BOTTOM + 20, str(tick), anchor="middle"))
    parts.append(text((LEFT + RIGHT) / 2, BOTTOM + 38, "step", anchor="middle"))
    parts.append(
        f'<text transform="translate(20 {(TOP + BOTTOM) / 2}) rotate(-90)" text-anchor="middle" '
        'fill="#333333">loss (nats per token)</text>'
    )
    # Where curves coincide, each would hide the one before: they take turns
    for i, (losses, colour) in enumerate(zip(curves.values(), COLOURS, strict=True)):
        for start in range(i * TURN, steps - 1, len(curves) * TURN):
            stop = min(start + TURN, steps - 1)
            points = [(x(step + 1), y(losses[step])) for step in range(start, stop + 1)]
            parts.append(curve(points, colour))
    legend = TOP + 16
    parts.append(text(LEFT + 380, legend, "difference from 1 process, in nats", colour=GREY))
    for (name, losses), colour in zip(curves.items(), COLOURS, strict=True):
        legend += 20
        parts.append(line(LEFT + 222, legend - 4, LEFT + 258, legend - 4, colour, width=4))
        parts.append(text(LEFT + 268, legend, name))
        if losses is not reference:
            parts.append(text(LEFT + 380, legend, describe(losses, reference)))
    legend += 24
    remark = f"1 process, sums in another order (not drawn): {describe(control, reference)}"
    parts.append(text(LEFT + 222, legend, remark, colour=GREY, size=12))
    parts.append(text(LEFT, BOTTOM + 58, caption, colour=GREY, size=12))
    parts.append("</svg>")
    return "\n".join(parts) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--draw", action="store_true", help="only draw the newest stored losses")
    if not parser.parse_args().draw:
        curves = {name: train(*layout) for name, layout in LAYOUTS.items()}
        control = train(*CONTROL)
        reference = next(iter(curves.values()))
        body = ["| run | last loss | difference from one process, in nats |", "|---|---|---|"]
        for name, losses in [*curves.items(), ("1 process, sums in another order", control)]:
            body.append(f"| {name} | {losses[-1]:.6f} | {describe(losses, reference)} |")
        results = {"layouts": curves, "sums in another order": control}
        report.write("four_layouts", "The loss in four layouts", body, results)
    newest = max((report.ROOT / "benchmarks/results").glob("*-four_layouts.json"))
    stored = json.loads(newest.read_text())
    results = stored["results"]
    caption = (
        f"The config debug in fp32; torch {stored['torch']}, {stored['machine']}, {stored['date']}"
    )
    PICTURE.write_text(draw(results["layouts"], results["sums in another order"], caption))
    print(f"wrote {PICTURE}")


if __name__ == "__main__":
    main()
