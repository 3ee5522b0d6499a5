"""Formats an explanation as text.

What it is: lines for a terminal, one function for each part. docs/one_step.md has some of them as
tables.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence

from titanlite.tools.explain.events import PHASES, Event, Explanation, Holding, Lane, Parameter
from titanlite.tools.explain.explain import totals
from titanlite.tools.plan.amounts import bytes_text

BAR = 30  # characters of the longest one
WIDTH = 110  # of a line, where it has words to wrap
GLUE = "\u00a0"  # a space between words that stay on one line
INDENT = " " * 7  # of what is said of an event
MANY_RANKS = 8  # of a parameter: more are not listed


def flops_text(number: float) -> str:
    for unit in ("", "k", "M", "G", "T"):
        if number < 1000:
            return f"{number:.4g} {unit}FLOP"
        number /= 1000
    return f"{number:.4g} PFLOP"


def explanation_lines(explanation: Explanation, rank: int) -> list[str]:
    """All lines, with the events of one rank."""
    lane = next(lane for lane in explanation.lanes if lane.rank == rank)
    return [
        *head_lines(explanation, lane),
        "",
        *event_lines(lane),
        "",
        *total_lines(lane),
        "",
        *holding_lines(explanation.parameters, explanation),
        "",
        *memory_lines(lane, explanation),
        "",
        *overlap_lines(lane, explanation),
        *doubled_lines(explanation),
    ]


def head_lines(explanation: Explanation, lane: Lane) -> list[str]:
    layout = ", ".join(f"{axis} {n}" for axis, n in explanation.degrees.items() if n > 1)
    processes = f"{explanation.processes} processes: {layout}" if layout else "one process"
    lines = [
        f"One step of {explanation.title} on {processes}",
        f"{explanation.tokens:,} tokens; local batches of each rank: {explanation.local_batches}",
    ]
    if explanation.real:
        lines.append("run on gloo: the second step, with what a logged step does in addition")
    else:
        lines.append("run on pretended ranks: tensors have shapes and no numbers")
    if explanation.shown_blocks < explanation.blocks:
        lines.append(
            f"{explanation.shown_blocks} of {explanation.blocks} blocks are run: those not run do "
            "the same as layers.1, and are counted with it"
        )
    if not explanation.real and explanation.local_batches > 2:
        lines.append("the first local batch stands for all but the last one")
    place = ", ".join(
        f"{axis} {lane.coordinates[axis]}" for axis, n in explanation.degrees.items() if n > 1
    )
    lines.append(f"what follows is of rank {lane.rank}" + (f" ({place})" if place else ""))
    return [line for text in lines for line in wrapped(text, "", "  ")]


def event_lines(lane: Lane) -> list[str]:
    """A line for each event, and its explanation where it differs from the last one."""
    if not lane.events:
        return ["No collectives: one process has everything"]
    lines = [
        "Collectives in order. Below each: what this rank gives, why, and three lines of code:",
        "the one that asks for it < the one that runs < the one of the step or of train.py.",
        "(as 7): all this is as at 7.",
        f"  {'':>4} {'phase':13} {'kind':15} {'axis':12} bytes",
    ]
    said: dict[tuple[str, str, str], int] = {}
    for event in lane.events:
        text = (shape_text(event), event.why, " < ".join(lines_of(event)))
        earlier = said.setdefault(text, event.number)
        times = f" x{GLUE}{event.times:,}" if event.times > 1 else ""
        again = f" (as{GLUE}{earlier})" if earlier != event.number else ""
        head = (
            f"  {event.number:>4} {event.place.phase:13} {event.kind:15} {event.axis:12} "
            f"{bytes_text(event.whole_bytes):10} "
        )
        lines += wrapped(f"{event.tensor}{times}{again}", head, " " * len(head))
        if not again:
            for part in text:
                lines += wrapped(part, INDENT, f"{INDENT}  ")
    return lines


def wrapped(text: str, first: str, others: str) -> list[str]:
    """The wrapped lines of a text, with these beginnings."""
    lines = textwrap.wrap(
        text,
        WIDTH,
        initial_indent=first,
        subsequent_indent=others,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [line.replace(GLUE, " ") for line in lines]


def shape_text(event: Event) -> str:
    operation = f", {event.operation}" if event.operation else ""
    shape = "x".join(map(str, event.shape)) or "scalar"
    if event.kind in ("send", "recv"):
        return f"{shape} {event.dtype}"
    return f"{shape} {event.dtype}{operation} over ranks {ranks_text(event.ranks)}"


def ranks_text(ranks: Sequence[int]) -> str:
    """Ranks as text (0, 2, 4); of many the first ones and the last."""
    if len(ranks) > MANY_RANKS:
        ranks_shown = [*map(str, ranks[:3]), "...", str(ranks[-1])]
        return ", ".join(ranks_shown)
    return ", ".join(map(str, ranks))


def lines_of(event: Event) -> list[str]:
    """The cause, the line that ran, and the line of the step, each once."""
    return list(dict.fromkeys([event.cause, event.place.line, event.loop_line]))


def total_lines(lane: Lane) -> list[str]:
    lines = [
        "In a step of this rank",
        f"  {'axis':12} {'kind':15} {'calls':>7} {'whole':>10} {'sent':>10}",
    ]
    for (axis, kind), total in sorted(totals(lane.events).items()):
        lines.append(
            f"  {axis:12} {kind:15} {total.calls:>7,} {bytes_text(total.whole_bytes):>10} "
            f"{bytes_text(total.sent_bytes):>10}"
        )
    return lines


def part_text(holding: Holding, parameter: Parameter) -> str:
    """The part of a parameter as text: rows 0-7, with columns where they are divided."""
    if holding.rows[1] < 0:
        return "none"
    text = f"{holding.rows[0]}-{holding.rows[1]}"
    if len(parameter.shape) > 1 and holding.columns != (0, parameter.shape[1] - 1):
        text += f", columns {holding.columns[0]}-{holding.columns[1]}"
    return text


def holding_lines(parameters: Sequence[Parameter], explanation: Explanation) -> list[str]:
    """Lines with the rows that each rank stores; of the blocks the first of each stage."""
    lines = ["What each rank stores: rows of dimension 0"]
    seen: set[tuple[str, str]] = set()
    for parameter in parameters:
        ranks = sorted(parameter.holdings)
        words = parameter.name.split(".")
        kind = ".".join(words[2:]) if words[0] == "layers" else parameter.name
        if (kind, str(ranks)) in seen:
            continue
        seen.add((kind, str(ranks)))
        shape = "x".join(map(str, parameter.shape))
        lines.append(f"  {parameter.name} ({shape}; {parameter.placements})")
        shown = [
            f"{rank}: {part_text(parameter.holdings[rank], parameter)}"
            for rank in ranks[:MANY_RANKS]
        ]
        more = f" | {len(ranks) - MANY_RANKS} more ranks" if len(ranks) > MANY_RANKS else ""
        lines += wrapped(f"rank {' | '.join(shown)}{more}", "    ", "      ")
    return lines


def memory_lines(lane: Lane, explanation: Explanation) -> list[str]:
    """Lines with the fullest moment of each phase, and the memory at the fullest of all."""
    peaks: dict[str, int] = {}
    for event in lane.events:
        peaks[event.place.phase] = max(peaks.get(event.place.phase, 0), event.peak)
    largest = max(sum(lane.peak.values()), 1)
    note = ""
    if explanation.shown_blocks < explanation.blocks:
        note = ", of the blocks that are run (titanlite plan has the memory of all)"
    lines = [f"Memory of this rank, at the fullest moment of each part{note}"]
    for phase in PHASES:
        if phase in peaks:
            bar = "#" * round(BAR * peaks[phase] / largest)
            lines.append(f"  {phase:13} {bytes_text(peaks[phase]):>10}  {bar}")
    lines.append("  at the fullest moment of the step:")
    for category, nbytes in sorted(lane.peak.items(), key=lambda item: -item[1]):
        if nbytes:
            lines.append(f"    {category.replace('_', ' '):16} {bytes_text(nbytes):>10}")
    return lines


def overlap_lines(lane: Lane, explanation: Explanation) -> list[str]:
    lines = [
        "What could overlap with what computation, by the order of calls, on a device that",
        "communicates in another stream. Nothing is measured here: "
        + (
            "gloo communicates on the CPU." if explanation.real else "pretended ranks send nothing."
        ),
    ]
    numbers: dict[str, list[str]] = {}
    for event in lane.events:
        if not event.behind.startswith("nothing"):
            flops = f", {flops_text(event.hidden_flops)}" if event.hidden_flops else ""
            text = f"{event.kind} of {event.tensor}: {event.behind}{flops}"
            numbers.setdefault(text, []).append(str(event.number))
    for text, equal in numbers.items():
        lines += wrapped(f"{', '.join(equal)}: {text}", "  ", "    ")
    waited = sum(event.times for event in lane.events if event.behind.startswith("nothing"))
    return [*lines, f"  the other {waited:,} are waited for"]


def doubled_lines(explanation: Explanation) -> Iterator[str]:
    for doubled in explanation.doubled:
        yield ""
        batch = "the same global batch" if doubled.same_batch else "twice the global batch"
        if doubled.problem:
            batch = "the same global batch"
        yield (
            f"With {doubled.axis} = {2 * doubled.degree} instead of {doubled.degree}, and {batch}"
        )
        if doubled.problem:
            yield from wrapped(f"not possible: {doubled.problem}", "  ", "    ")
            continue
        yield f"  {'axis':11} {'kind':14} {'calls':>16} {'whole':>23} {'sent':>23}"
        for change in doubled.changes:
            calls = f"{change.calls:,} -> {change.calls_doubled:,}"
            whole = f"{bytes_text(change.whole_bytes)} -> {bytes_text(change.whole_bytes_doubled)}"
            sent = f"{bytes_text(change.sent_bytes)} -> {bytes_text(change.sent_bytes_doubled)}"
            yield f"  {change.axis:11} {change.kind:14} {calls:>16} {whole:>23} {sent:>23}"
