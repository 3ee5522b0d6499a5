"""The lessons without a program: questions about real models, answered by the planner.

What it is: each problem is a config and a number of GPUs; a question about it has a key in
`answers.toml`. The right answers are computed when a lesson is checked, by `titanlite plan`'s own
functions with `--estimate`. In the last lesson the answer is a layout, which is planned.
Why it is here: no laptop can run the large models, so their memory and bubbles are computed. The
arithmetic changes with the program; a list of answers would not.
What it costs: under a second for each problem, without torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from titanlite.config.load import load_config
from titanlite.model.flavors import resolve_flavor
from titanlite.rules.degrees import AXES
from titanlite.runtime.documents import read_toml
from titanlite.runtime.errors import ConfigError
from titanlite.tokenizer.tokenizer import named_tokenizer
from titanlite.tools.plan.machines import find_machine
from titanlite.tools.plan.plan import Plan, make_plan

GIB = 1 << 30
FIVE_AXES = ("dp_replicate", "dp_shard", "cp", "tp", "pp")
MOST_BUBBLE = 0.2
# The parts of a step's time in which a rank waits for others
WAITS = ("sharding", "tensor_parallel", "context_parallel", "messages")
NOTES = {
    "fits": "the fullest rank's total, beside the GPU's memory",
    "memory_gib": "16 N / (ranks that share the states), activations, and the gathered unit",
    "compute_bound": "yes, if a rank waits for others less than a tenth of the step's time; the "
    "time over a link is bytes / bandwidth, and FSDP's is hidden behind the computation",
    "bubble_percent": "(p - 1) / (M + p - 1)",
    "extra_flops_percent": "of the products and the attention that a step repeats",
}


@dataclass(frozen=True)
class Problem:
    """A table of `answers.toml`, and the layout of its questions."""

    name: str
    gpus: int
    arguments: tuple[str, ...]  # of a config
    questions: tuple[str, ...]


PIPELINE = (
    "llama3_405b",
    "--parallel.pp=8",
    "--parallel.tp=8",
    "--parallel.dp_shard=16",
    "--parallel.pp_microbatch_size=1",
    "--training.local_batch_size=32",
)
PLAN_QUESTIONS = ("fits", "memory_gib", "compute_bound", "bubble_percent")
TWO_ROWS = ("llama3_8b", "--training.local_batch_size=2")
PROBLEMS = {
    "recompute": tuple(
        Problem(
            mode,
            8,
            (*TWO_ROWS, f"--recompute.mode={mode}"),
            ("fits", "memory_gib", "extra_flops_percent"),
        )
        for mode in ("none", "selective", "full")
    ),
    "planning": (
        Problem("8b_on_8", 8, ("llama3_8b",), PLAN_QUESTIONS),
        Problem("70b_on_64", 64, ("llama3_70b",), PLAN_QUESTIONS),
        Problem("405b_on_1024", 1024, PIPELINE, PLAN_QUESTIONS),
    ),
}


def plan_of(arguments: Sequence[str], gpus: int) -> Plan:
    """The estimate for H100 GPUs. Raises ConfigError."""
    config = load_config(list(arguments))
    llama = resolve_flavor(config.model, named_tokenizer(config.data.tokenizer).size)
    return make_plan(config, llama, gpus, find_machine("H100"))


def answer(plan: Plan, question: str) -> str | float:
    """The right answer to a question about a plan."""
    if question == "fits":
        return "yes" if plan.verdict == "fits" else "no"
    if question == "memory_gib":
        return plan.worst.high / GIB
    if question == "compute_bound":
        waits = sum(plan.time.parts[name] for name in WAITS)
        return "yes" if waits < plan.time.total / 10 else "no"
    if question == "bubble_percent":
        return 100 * plan.bubble
    assert question == "extra_flops_percent"
    return 100 * (plan.recompute_factor - 1)


def right(own: object, expected: str | float) -> bool:
    """Whether an answer is right: an equal word, or a number within a tenth or within 1."""
    if isinstance(expected, str):
        return own == expected
    if isinstance(own, bool) or not isinstance(own, int | float) or not math.isfinite(own):
        return False
    return abs(own - expected) <= max(1.0, abs(expected) / 10)


def read_answers(path: Path) -> dict[str, object]:
    """Reads `answers.toml`. Raises ConfigError."""
    try:
        content = read_toml(path, 1 << 16)
    except FileNotFoundError:
        raise ConfigError(f"{path}: not found; expected the answers of the lesson") from None
    except ValueError as error:
        raise ConfigError(f"{path}: not TOML: {error}") from None
    return dict(content)


def check_answers(lesson: str, path: Path) -> tuple[bool, list[str]]:
    """Whether all answers of a lesson are right, and a line for each."""
    answers = read_answers(path)
    if lesson == "five_axes":
        return check_layout_answer(answers)
    lines = []
    passed = True
    for problem in PROBLEMS[lesson]:
        table = answers.get(problem.name)
        if not isinstance(table, dict):
            raise ConfigError(f"{path}: no table [{problem.name}]; expected one for each problem")
        plan = plan_of(problem.arguments, problem.gpus)
        for question in problem.questions:
            own = table.get(question, "")
            good = right(own, answer(plan, question))
            passed = passed and good
            lines.append(f"{'right' if good else 'WRONG'}  {problem.name}.{question} = {own!r}")
            if not good:
                lines.append(f"       hint: {NOTES[question]}")
    return passed, lines


def check_layout_answer(answers: dict[str, object]) -> tuple[bool, list[str]]:
    """Checks a layout of the 405B model on 512 H100 with all five axes."""
    layout = answers.get("layout")
    if not isinstance(layout, list) or not all(isinstance(word, str) for word in layout):
        raise ConfigError('layout: expected a list of keys, as ["--parallel.tp=8"]')
    try:
        plan = plan_of(["llama3_405b", *layout], 512)
    except ConfigError as error:
        return False, [
            "WRONG  titanlite refuses it:",
            *(f"       {text}" for text in error.problems),
        ]
    degrees = plan.counts.degrees
    assert set(FIVE_AXES) == set(AXES)
    unused = [axis for axis in FIVE_AXES if degrees[axis] == 1]
    needed = plan.worst.high / GIB
    available = plan.machine.memory_bytes / GIB
    verdicts = [
        (not unused, f"axes of one rank: {', '.join(unused) or 'none'}, expected none"),
        (
            plan.verdict == "fits",
            f"{plan.verdict}: up to {needed:.1f} GiB on the fullest rank, of {available:.1f}",
        ),
        (
            plan.bubble <= MOST_BUBBLE,
            f"bubble {100 * plan.bubble:.1f} %, at most {100 * MOST_BUBBLE:.0f} % expected",
        ),
    ]
    lines = [f"{'right' if good else 'WRONG'}  {text}" for good, text in verdicts]
    if unused:
        lines.append("       hint: 512 = 2 x 2 x 2 x 8 x 8, and tp should stay on a node of 8")
    if plan.verdict != "fits":
        lines.append("       hint: activations: recompute.mode; states: dp_shard, tp and pp")
    if plan.bubble > MOST_BUBBLE:
        lines.append("       hint: more microbatches: local_batch_size / pp_microbatch_size")
    return all(good for good, _ in verdicts), lines


def open_answers(lesson: str) -> str:
    """The text of a lesson's `answers.toml`, with every answer empty."""
    if lesson == "five_axes":
        return 'layout = []  # such as ["--parallel.tp=8", "--recompute.mode=full"]\n'
    lines = []
    for problem in PROBLEMS[lesson]:
        lines.append(f"\n[{problem.name}]")
        for question in problem.questions:
            kind = '"yes" or "no"' if question in ("fits", "compute_bound") else "a number"
            lines.append(f'{question} = ""  # {kind}')
    return "\n".join(lines).lstrip("\n") + "\n"
