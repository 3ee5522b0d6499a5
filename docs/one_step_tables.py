"""Writes the tables of one_step.md from a step that is run.

    python docs/one_step_tables.py

What it is: between two comments of the page, a table or a list that `titanlite explain` makes of
the step of the page, and the table of the lines where the host waits. A test compares the page with
this output.
Why it is here: the order of collectives is in no file, and a line number is right until an edit.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from titanlite.config.load import load_config
from titanlite.tools.cli.plan_command import model_of
from titanlite.tools.explain.events import Event, Explanation
from titanlite.tools.explain.explain import explain
from titanlite.tools.explain.sentences import line_of
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


class Wait(NamedTuple):
    """A line at which the host stops until something else is done."""

    file: str
    text: str  # of the line
    when: str  # and for what, if not for the device


WAITS = [
    Wait(
        "titanlite/distributed/agreement.py",
        "return int(combined)",
        "every step, for the other hosts, over gloo",
    ),
    Wait(
        "titanlite/distributed/agreement.py",
        "receiving.wait()",
        "every step, for the other hosts, from 32 ranks on",
    ),
    Wait(
        "titanlite/checkpoint/manager.py",
        "self.saver.wait_for_staging()",
        "the step after an asynchronous save, for the copy of the state",
    ),
    Wait(
        "titanlite/optim/stability.py",
        "copied.synchronize()",
        "every step on a GPU, if `stability` skips, rolls back or has a threshold: the device has, "
        "as a rule, passed this step some steps ago",
    ),
    Wait(
        "titanlite/optim/stability.py",
        "norm = float(grad_norm)",
        "steps that log, validate or save",
    ),
    Wait("titanlite/observe/metrics.py", "torch.stack(scalars).tolist()", "logged steps"),
    Wait("titanlite/observe/step_times.py", "at.synchronize()", "logged steps"),
    Wait(
        "titanlite/observe/ranks.py",
        "seconds, memories = table.T.tolist()",
        "logged steps, for all ranks too",
    ),
    Wait(
        "titanlite/optim/loss_scale.py",
        "torch.stack([self.scale, self.skipped]).tolist()",
        "logged steps, with float16",
    ),
    Wait(
        "titanlite/probes/noise_scale.py",
        "gradient, variance = self.averages.tolist()",
        "logged steps, with `metrics.noise_scale_freq`",
    ),
    Wait(
        "titanlite/probes/layer_norms.py",
        "self._write(torch.stack((gradient, weight, update / weight)).tolist())",
        "steps of `metrics.layer_norms_freq`",
    ),
    Wait(
        "titanlite/probes/activations.py",
        "self._write(names, figures.tolist())",
        "steps of `metrics.activations_freq`",
    ),
    Wait(
        "titanlite/observe/metrics.py",
        "torch.accelerator.synchronize(self.device)",
        "before a validation or a save",
    ),
    Wait(
        "titanlite/observe/validation.py",
        "return Sums(float(self.mesh.sum_losses(loss))",
        "each validation set",
    ),
    Wait(
        "titanlite/probes/continuation.py",
        "chosen = self._choose(logits.cpu()",
        "each new token of a sample",
    ),
    Wait(
        "titanlite/checkpoint/async_save.py",
        "self.wait()",
        "before a save, for an asynchronous one that still writes",
    ),
]


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


def waits(step: Explanation) -> str:
    rows = []
    for wait in WAITS:
        place = line_of(wait.file, wait.text)
        rows.append([f"[{place}](../{wait.file})", f"`{wait.text}`", wait.when])
    return table(("line", "what it says", "when"), rows)


BLOCKS = {
    "forward": events("data", "forward"),
    "backward": events("backward", "gradient sum"),
    "end": events("clip", "update", "agreement", "loss", "metrics"),
    "memory": memory,
    "waits": waits,
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
