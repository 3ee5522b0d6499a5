"""`titanlite break`: shows a planted fault, asks for a prediction, runs it and explains.

What it is: the texts that the command prints. The patch is shown as the source of the function that
plants it.
Why it is here: a reader who predicts the figure before seeing it learns which figure to look at in
a run.
"""

from __future__ import annotations

import inspect
import math
import textwrap
from collections.abc import Callable

from titanlite.tools.faults.experiment import Experiments, Measured, Outcome
from titanlite.tools.faults.fault import CHECKS, FIGURES, OF_A_FILE, Fault

CHECKED = {
    "verify": "5 steps of this layout beside one process, by `titanlite verify`'s comparison",
    "experts": "5 steps of this layout of a mixture of experts beside one process, by "
    "`titanlite verify`'s comparison",
    "run": "6 steps of train.py beside an uninterrupted run of one process",
    "export": "the exported model beside titanlite's own, on one prompt",
    "merge": "6 steps of adapters beside one process, and their exports on one prompt",
}
Ask = Callable[[str], str]  # a question -> the answer; raises EOFError at the end of the input


def show_fault(fault: Fault) -> None:
    """The patch and the place where it is planted, without its effect."""
    print(f"\n{fault.name}: {fault.title}\n")
    source = textwrap.dedent(inspect.getsource(fault.plant)).rstrip()
    print(textwrap.indent(source, "    "))
    print(f"\nlayout: {describe_layout(fault)}")
    print(f"compared: {CHECKED[fault.check]}")


def describe_layout(fault: Fault) -> str:
    text = fault.layout or "one process"
    if fault.resumed is not None:
        text += f" until step 3; then resumed on {fault.resumed or 'one process'}"
    return text


def run_fault(fault: Fault, experiments: Experiments, ask: Ask | None) -> Outcome:
    """Shows a fault, asks (unless `ask` is None), runs it and explains. Returns what happened."""
    show_fault(fault)
    answer = ""
    if ask is not None:
        answer = ask_figure(fault, ask)
    print("\nrunning it without the fault, and with it ...", flush=True)
    healthy = experiments.run(fault, planted=False)
    broken = experiments.run(fault, planted=True)
    print()
    for line in table(fault, healthy, broken):
        print(line)
    print(f"\n{describe_first(fault, broken)}")
    if answer:
        print(judge_answer(answer, broken))
    print()
    print(textwrap.fill(" ".join(fault.why.split()), 100))
    if fault.threads:
        print(f"shipped by others: {', '.join(fault.threads)}")
    return broken


def ask_figure(fault: Fault, ask: Ask) -> str:
    """Asks until the answer is a figure of the fault's check, and returns it."""
    figures = CHECKS[fault.check]
    print("\nWhich figure is off first?")
    for name in figures:
        print(f"    {name:10}  {FIGURES[name]}")
    while True:
        answer = ask("figure: ").strip().lower()
        if answer in figures:
            return answer
        print(f"expected one of: {', '.join(figures)}")


def judge_answer(answer: str, broken: Outcome) -> str:
    first = broken.first_off()
    if first is None:
        return "You predicted a difference, and there is none."
    if answer == first.figure:
        return "Your prediction is right."
    return f"You predicted another one: {answer}."


def describe_first(fault: Fault, outcome: Outcome) -> str:
    first = outcome.first_off()
    if first is None:
        return "nothing differs"
    later = [name for name in figures_off(outcome) if name != first.figure]
    place = ""
    if first.figure not in OF_A_FILE:
        place = f" at step {first.step}" if first.step > 0 else " before step 1"
    text = f"off first: {first.figure}{place} ({number(first.difference)})"
    if later:
        text += f"; also, there or later: {', '.join(later)}"
    return text


def figures_off(outcome: Outcome) -> list[str]:
    """The figures that differ in any step, each once."""
    return list(dict.fromkeys(each.figure for each in outcome.measured if each.is_off))


def table(fault: Fault, healthy: Outcome, broken: Outcome) -> list[str]:
    """A table of the largest differences of both programs, and of each step of the broken one.

    An asterisk marks those above the tolerance.
    """
    figures = CHECKS[fault.check]
    lines = [f"{'':14}" + "".join(f"{name:>12}" for name in figures)]
    for title, outcome in (("healthy", healthy), ("with the fault", broken)):
        cells = "".join(f"{number(outcome.largest(name)):>12}" for name in figures)
        lines.append(f"{title:14}{cells}")
    steps = sorted({each.step for each in broken.measured if each.figure not in OF_A_FILE})
    if len(steps) > 1:
        for step in steps:
            lines.append(f"{f'  step {step}':14}" + "".join(cells_of(step, figures, broken)))
    return [line.rstrip() for line in lines]


def cells_of(step: int, figures: tuple[str, ...], outcome: Outcome) -> list[str]:
    """The cells of a step; a figure that the step does not have is empty."""
    found: dict[str, Measured] = {
        each.figure: each for each in outcome.measured if each.step == step
    }
    cells = []
    for name in figures:
        text = ""
        if name in found:
            mark = "*" if found[name].is_off else ""
            text = number(found[name].difference) + mark
        cells.append(f"{text:>12}")
    return cells


def number(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    return f"{value:.1e}" if math.isfinite(value) else "inf"
