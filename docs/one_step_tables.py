"""Writes the tables of one_step.md from a step that is run.

    python -m docs.one_step_tables

What it is: between two comments of the page, a table or a list that `titanlite explain` makes of
the step of the page. A test compares the page with this output.
Why it is here: the order of collectives is in no file.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from titanlite.config.load import load_config
from titanlite.tools.cli.plan_command import model_of
from titanlite.tools.explain.events import Event, Explanation
from titanlite.tools.explain.explain import explain
from titanlite.tools.plan.amounts import bytes_text

PAGE = Path(__file__).with_name("one_step.md")
# The options of the page's command
OPTIONS = [
    "debug",
    "--parallel.dp_shard=2",
    "--parallel.tp=2",
    "--model.num_layers=2",
    "--model.num_kv_heads=4",
    "--model.embeddings=untied",
    "--training.local_batch_size=4",
    "--training.compute_dtype=float32",
]
# Part of the step -> the block whose collectives over tp are shown; the other repeats them
BLOCK_SHOWN = {"forward": "layers.0", "backward": "layers.1", "gradient sum": "layers.1"}


def step() -> Explanation:
    """The step of the page, on a pretended rank."""
    config = load_config(OPTIONS)
    return explain(config, model_of(config), 4, real=False)


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    lines = ["| " + " | ".join(head) + " |"]
    lines.append("|" + "---|" * lines[0].count(" | ") + "---|")
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def event_rows(events: Iterable[Event]) -> Iterator[list[str]]:
    for event in events:
        shape = " x ".join(map(str, event.shape)) or "scalar"
        yield [
            str(event.number),
            event.axis,
            f"{event.kind}, {event.operation}" if event.operation else event.kind,
            event.tensor,
            shape,
            bytes_text(event.whole_bytes),
        ]


def repeats(event: Event) -> bool:
    """Whether this is a collective over tp of the block that is not shown."""
    shown = BLOCK_SHOWN.get(event.place.phase)
    return (
        shown is not None
        and "layers." in event.tensor
        and event.axis == "tp"
        and shown not in event.tensor
    )


def events(*phases: str) -> Callable[[Explanation], str]:
    """The collectives of these parts of the step."""

    def of(step: Explanation) -> str:
        chosen = [
            event
            for event in step.lanes[0].events
            if event.place.phase in phases and not repeats(event)
        ]
        head = ("", "axis", "collective", "tensor", "this rank gives", "whole")
        return table(head, event_rows(chosen))

    return of


def memory(step: Explanation) -> str:
    """The first and the last collective, and the one at which most is in memory."""
    lane = step.lanes[0]
    fullest = max(lane.events, key=lambda event: sum(event.held.values()))
    rows = []
    for event in (lane.events[0], fullest, lane.events[-1]):
        parts = ", ".join(
            f"{name.replace('_', ' ')} {bytes_text(size)}"
            for name, size in event.held.items()
            if size
        )
        rows.append(
            [str(event.number), event.place.phase, bytes_text(sum(event.held.values())), parts]
        )
    return table(("before", "part", "in memory", "of which"), rows)


BLOCKS = {
    "forward": events("data", "forward"),
    "backward": events("backward", "gradient sum"),
    "end": events("clip", "update", "agreement", "loss", "metrics"),
    "memory": memory,
}


def with_tables(text: str, step: Explanation, names: Iterable[str] = BLOCKS) -> str:
    """The page with these tables as they are in the step."""
    for name in names:
        begin = f"<!-- {name} -->\n"
        end = f"<!-- end of {name} -->\n"
        block = re.compile(re.escape(begin) + ".*?" + re.escape(end), re.DOTALL)
        new = f"{begin}{BLOCKS[name](step)}{end}"
        text = block.sub(lambda _, new=new: new, text)  # type: ignore[misc]
    return text


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text(), step()))
