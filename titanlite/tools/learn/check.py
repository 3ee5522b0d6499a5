"""Grades an exercise: runs the learner's program and compares what it did with the lesson.

What it is: compares losses and gradient norms with those of one process (in `learn/steps`), the
collectives of every rank with formulas, and the memory with that of a right answer. If a figure is
off, it prints the hint of the known mistake that it matches.
Why it is here: two programs with equal losses can differ by a factor in what they send and hold.
What it costs: the learner's code runs in 1 to 4 separate processes with a time limit. An error ends
only them; after a hang the line that each rank is at is printed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from titanlite.runtime.errors import ConfigError, for_terminal
from titanlite.tools.learn.exercise import course
from titanlite.tools.learn.lessons import MEMORY_TOLERANCE, TOLERANCE, Lesson, Result
from titanlite.tools.learn.measure import measure
from titanlite.tools.verify.pool import Pool, WorkerError

SMALL = 64 * 1024  # bytes of labels, losses and the like
LAST_LINES = 12  # of a traceback


@dataclass(frozen=True)
class Grade:
    """The lines to print, whether all is right, and the names of recognised mistakes."""

    passed: bool
    lines: list[str]
    mistakes: list[str]


def expected_losses(name: str) -> tuple[list[float], list[float]]:
    """The losses and gradient norms of `train.py`, from a file in `learn/steps`: those with
    steps.toml are in losses.txt, those with experts.toml in experts_losses.txt.
    """
    rows = [line.split() for line in (course() / "steps" / name).read_text().splitlines()]
    return [float(row[1]) for row in rows], [float(row[2]) for row in rows]


def check_program(lesson: Lesson, folder: Path, pool: Pool, timeout: float) -> Grade:
    """Runs and grades the program of an exercise."""
    path = (folder / f"{lesson.step}.py").resolve()
    if not path.is_file():
        raise ConfigError(f"{path}: not found; expected the program of lesson {lesson.name}")
    try:
        ranks = pool.run(lesson.processes, measure, str(path), lesson.recorded, timeout=timeout)
    except WorkerError as error:
        return Grade(False, failure_lines(str(error), path.parent, timeout), [])
    losses, norms = expected_losses(lesson.losses)
    result = Result(ranks, losses, norms, lesson)
    verdicts = [_losses(result), _norms(result), _collectives(result), *_memory(result)]
    passed = all(right for right, _ in verdicts)
    lines = [f"{'right' if right else 'WRONG'}  {text}" for right, text in verdicts]
    mistakes: list[str] = []
    if not passed and len(ranks[0].losses) == len(losses):
        for mistake in lesson.mistakes:
            if mistake.sign(result):
                mistakes.append(mistake.name)
                lines += ["", f"hint: {mistake.hint}"]
                break  # the first sign that fits: later ones are less specific
        else:
            lines += [
                "",
                "hint: no known mistake has these figures; compare with the lesson's text",
            ]
    return Grade(passed, lines, mistakes)


def _losses(result: Result) -> tuple[bool, str]:
    own = result.ranks[0].losses
    if len(own) != len(result.losses):
        return False, f"losses: `train` returned {len(own)} of them, expected {len(result.losses)}"
    step = result.first_off
    if step:
        own_loss = own[step - 1]
        right = result.losses[step - 1]
        return False, f"losses: from step {step} on; {own_loss:.6f}, on one process {right:.6f}"
    return True, f"losses: all {len(own)} equal those of one process to {TOLERANCE:g}"


def _norms(result: Result) -> tuple[bool, str]:
    """Compares the norms of all steps on all ranks, which `update` notes; lesson 1 has none."""
    if not any(measured.norms for measured in result.ranks):
        return True, "gradient norms: not noted here"
    for rank, measured in enumerate(result.ranks):
        for step, (own, right) in enumerate(zip(measured.norms, result.norms, strict=False), 1):
            if not abs(own - right) <= TOLERANCE * 10 * right:
                where = f"gradient norm: rank {rank}, step {step}"
                return False, f"{where}: {own:.6f}, on one process {right:.6f}"
    return True, "gradient norms: equal on all ranks"


def _collectives(result: Result) -> tuple[bool, str]:
    """Compares calls and bytes of each kind, on each rank, in the recorded steps."""
    steps = ", ".join(map(str, result.lesson.recorded))
    texts = []
    for rank, measured in enumerate(result.ranks):
        expected = result.lesson.expected(rank)
        for kind in sorted(expected.keys() | measured.calls.keys()):
            calls = measured.calls.get(kind, 0)
            right = expected[kind].calls if kind in expected else 0
            sent = measured.bytes.get(kind, 0)
            right_bytes = expected[kind].bytes if kind in expected else 0
            if calls != right or (right_bytes and sent != right_bytes):
                return False, (
                    f"collectives of steps {steps}: rank {rank}: {calls} {kind} of {sent:,} bytes, "
                    f"expected {right} of {right_bytes:,}"
                )
            if rank == 0:
                texts.append(f"{calls} {kind} ({sent:,} bytes)")
    return True, f"collectives of steps {steps}: {', '.join(texts) or 'none, as expected'}"


def _memory(result: Result) -> list[tuple[bool, str]]:
    """Compares the memory of the fullest rank with its limits."""
    verdicts = []
    worst = max(range(len(result.ranks)), key=lambda rank: result.ranks[rank].held)
    held = result.ranks[worst].held
    needed = result.lesson.held(worst)
    text = f"memory between two steps: {held:,} bytes on rank {worst}, needed {needed:,}"
    if held < needed / MEMORY_TOLERANCE:
        text += "; parameters and moments cannot be in fewer, so the program does not train"
        verdicts.append((False, text))
    else:
        verdicts.append((held <= needed * MEMORY_TOLERANCE + SMALL, text))
    peak = max(measured.peak for measured in result.ranks)
    limit = result.lesson.peak
    text = f"memory at its fullest: {peak:,} bytes, the step in learn/steps {limit:,}"
    verdicts.append((peak <= limit * MEMORY_TOLERANCE, text))
    return verdicts


def failure_lines(error: str, folder: Path, timeout: float) -> list[str]:
    """The lines about a program that failed: its part of the traceback, or where it hangs."""
    if "did not answer within" in error.splitlines()[0]:
        ranks = re.sub(r" did not answer.*", "", error.splitlines()[0])
        lines = [
            f"WRONG  {ranks} did not finish within {timeout:g} s: they wait for a collective or a "
            "message that another rank does not call or send in the same order, or a loop does "
            "not end (if the machine is slow: --timeout)"
        ]
        for text in re.split(r"(?=rank \d+ died)", error)[1:]:
            rank = text.split()[1]
            place = re.search(
                rf'File "{re.escape(str(folder))}/([^"]+)", line (\d+) in (\w+)', text
            )
            if place:
                lines.append(f"       rank {rank}: {place[1]}, line {place[2]}, in {place[3]}")
            else:
                lines.append(f"       rank {rank}: has finished, or has not begun")
        return lines
    lines = error.rstrip().splitlines()
    program_error = lines[-1].partition("ProgramError: ")[2]
    if program_error:
        return [f"WRONG  {for_terminal(program_error)}"]
    own = [i for i, line in enumerate(lines) if f'File "{folder}/' in line]
    if own:
        lines = [lines[0], *lines[own[0] :]]
    if len(lines) > LAST_LINES:
        lines = [lines[0], "  ...", *lines[-LAST_LINES:]]
    return ["WRONG  the program failed", *(f"       {for_terminal(line)}" for line in lines)]
