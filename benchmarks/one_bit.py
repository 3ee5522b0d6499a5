"""Measures how much one process's training changes if initial weights change by one bit of fp32.

    python benchmarks/one_bit.py [--noise 6e-8] [LAYOUT ...]

A layout adds numbers in another order than one process does, which changes their last bits. Here
the layout stays the same, and the last bits of the weights change, so differences that `titanlite
verify` finds come from rounding alone. Each line is the largest difference over three draws of the
noise, for the figures that `titanlite verify` compares. Takes two minutes.
"""

from __future__ import annotations

import argparse
import functools
import tempfile
from pathlib import Path
from typing import Any

import report
import torch
from torch import Tensor

from titanlite.model.flavors import LlamaConfig
from titanlite.model.llama import Llama
from titanlite.tools.faults.experiment import llama_of
from titanlite.tools.faults.fault import replaced
from titanlite.tools.verify.campaign import FIGURES, tolerances_of
from titanlite.tools.verify.compare import larger, largest_difference, reference
from titanlite.tools.verify.ladder import Case, make_case

FLOAT8 = "float8.enabled,float8.emulate"
LAYOUTS = (
    "model.qk_norm,model.head_dim=48",
    FLOAT8,
    f"{FLOAT8},model.qk_norm",
    f"{FLOAT8},model.head_dim=48",
    f"{FLOAT8},model.qk_norm,model.head_dim=48",
)
DRAWS = 3


def train(case: Case, llama: LlamaConfig, noise: float, draw: int, path: Path) -> dict[str, Any]:
    """What `titanlite verify` keeps of a training of one process, with noise on its weights."""
    original = Llama.init_weights

    @torch.no_grad()
    def init_weights(self: Llama, *arguments: Any) -> None:
        original(self, *arguments)
        generator = torch.Generator().manual_seed(draw)
        for parameter in self.parameters():
            parameter.mul_(1 + noise * torch.randn(parameter.shape, generator=generator))

    with replaced(Llama, "init_weights", init_weights):
        reference(case.config, llama, path)
    result: dict[str, Any] = torch.load(path)
    return result


def compare(found: dict[str, Any], expected: dict[str, Any]) -> dict[str, float]:
    """Computes the largest difference of each figure."""

    def steps(figure: str) -> float:
        pairs = zip(found[figure], expected[figure], strict=True)
        return functools.reduce(larger, (abs(a / b - 1) for a, b in pairs))

    def tensors(figure: str) -> float:
        values: dict[str, Tensor] = found[figure]
        return largest_difference(values.items(), expected[figure])

    return {
        "loss": steps("loss"),
        "grad_norm": steps("grad_norm"),
        "gradient": tensors("gradient"),
        "parameters": tensors("parameters"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--noise", type=float, default=6e-8, help="relative to each weight")
    parser.add_argument("layouts", nargs="*", default=LAYOUTS, metavar="LAYOUT")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "training.pt")
        for layout in options.layouts:
            case = make_case(["debug"], layout, "cpu")
            llama = llama_of(case.config)
            expected = train(case, llama, 0.0, 0, path)
            largest = dict.fromkeys(FIGURES, 0.0)
            for draw in range(DRAWS):
                found = compare(train(case, llama, options.noise, draw, path), expected)
                largest = {name: larger(largest[name], found[name]) for name in FIGURES}
            rows.append({"layout": layout, **largest, "accepted": tolerances_of(case)})
            print(rows[-1], flush=True)
    body = [
        f"The initial weights differ by {options.noise:g} of themselves (standard deviation). The",
        f"largest of {DRAWS} draws; in parentheses what `titanlite verify` accepts.",
        "",
        f"| model | {' | '.join(FIGURES)} |",
        f"|---|{'---|' * len(FIGURES)}",
    ]
    for row in rows:
        cells = [f"{row[name]:.1e} ({row['accepted'][name]:.0e})" for name in FIGURES]
        body.append(f"| {row['layout']} | {' | '.join(cells)} |")
    report.write("one_bit", "One bit of the weights", body, rows)


if __name__ == "__main__":
    main()
