"""A planted fault: a small patch of the running program, and the difference that it makes.

What it is: `Fault` holds the patch, the layout that the fault needs, and the prediction: the figure
that differs first, and the step from which it does. `replaced` is how a patch is made: it replaces
one attribute within a `with` statement.
Why it is here: most of these faults were shipped by well-known trainers, and none of them stops a
run. The loss still falls, only less, and a comparison with one process is needed to see the fault.
What it costs: nothing outside of the `with` statement, after which the attribute is the original.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass

# The figures of each check, in the order in which a step computes them
CHECKS = {
    "verify": ("loss", "gradient", "grad_norm", "parameters"),
    "experts": ("choices", "loss", "gradient", "grad_norm", "parameters"),
    "run": ("loss", "validation"),
    "export": ("tensors", "logits"),
    "merge": ("loss", "merged"),
}
FIGURES = {
    "choices": "the experts that tokens choose, as a share of the tokens and blocks of a step",
    "loss": "the loss of a step",
    "gradient": "the gradient of a parameter at step 1",
    "grad_norm": "the gradient norm of a step",
    "parameters": "the parameters after step 5",
    "validation": "the loss on held-out text",
    "tensors": "how many tensors of the export differ when titanlite reads them again",
    "logits": "the logits of the exported model",
    "merged": "the logits of the model with the adapters added to its weights",
}
# A figure of a file, which belongs to no step
OF_A_FILE = ("tensors", "logits", "merged")
Plant = Callable[[], AbstractContextManager[None]]


@dataclass(frozen=True)
class Fault:
    """One fault, and the prediction that a test compares with what happens."""

    name: str
    title: str
    plant: Plant  # `titanlite break` shows its source as the patch
    layout: str  # an argument of `titanlite verify --layout`; empty: one process
    figure: str  # the first figure that differs
    step: int  # the first step in which it differs
    why: str  # explains the prediction
    threads: tuple[str, ...] = ()  # where others shipped it: owner/repository#number
    unchanged: tuple[str, ...] = ()  # the figures that stay right in all steps
    check: str = "verify"
    resumed: str | None = None  # check = run: the layout in which the run goes on after a stop


@contextlib.contextmanager
def replaced(owner: object, name: str, value: object) -> Iterator[None]:
    """Context manager in which attribute `name` of a module or class is `value`."""
    original = inspect.getattr_static(owner, name)  # a staticmethod as it is stored
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)
