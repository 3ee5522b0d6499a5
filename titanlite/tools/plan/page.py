"""A plan as one HTML file: the memory of each rank as a bar, a step as a bar of time, and tables.

What it is: a document without scripts that requests nothing. All text is escaped, because names
come from files. The page follows the reader's light or dark theme. A table names each colour, so it
can be read without colours.
"""

from __future__ import annotations

import html
from collections.abc import Sequence

from titanlite.tools.plan.advice import GIB, NAMES
from titanlite.tools.plan.plan import Plan
from titanlite.tools.plan.show import TIMES, seconds_text

COLOURS = (
    "#3b6fb6",
    "#7aa6dc",
    "#2f8f6f",
    "#9ccfb8",
    "#c98a2b",
    "#c2553f",
    "#8a5fb0",
    "#8d8d8d",
    "#b7798f",
    "#5f9ea0",
    "#a0a04f",
)
STYLE = """
:root { color-scheme: light dark; --line: #8886; --soft: #8882; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2rem; }
table { border-collapse: collapse; } .scroll { overflow-x: auto; }
td, th { padding: .15rem .8rem .15rem 0; text-align: right; border-bottom: 1px solid var(--line); }
td:first-child, th:first-child { text-align: left; }
.bar { display: flex; height: 1.6rem; background: var(--soft); margin: .2rem 0 .6rem; }
.bar div { height: 100%; }
.key { display: inline-block; width: .8rem; height: .8rem; margin-right: .4rem; }
pre { overflow-x: auto; }
"""


def page(plan: Plan, text: Sequence[str]) -> str:
    """The HTML document. `text`: the lines that the command prints."""
    title = html.escape(f"{plan.config.run.name} on {plan.gpus:,} x {plan.machine.name}")
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{title}</title><style>{STYLE}</style></head><body>",
            f"<h1>{title}: {plan.verdict}</h1>",
            *_memory(plan),
            *_time(plan),
            "<h2>As text</h2>",
            f"<pre>{html.escape(chr(10).join(text))}</pre>",
            "</body></html>",
            "",
        ]
    )


def _memory(plan: Plan) -> list[str]:
    available = plan.machine.memory_bytes
    scale = max(available, *(need.memory.total for need in plan.needs))
    lines = [f"<h2>Memory, of {plan.machine.memory_gib:,.1f} GiB</h2>"]
    for need in plan.needs:
        parts = [(text, getattr(need.memory, key) / scale) for key, text in NAMES.items()]
        label = f"{plan.name_of(need)}: {need.low / GIB:,.1f} to {need.high / GIB:,.1f} GiB"
        lines += [f"<div>{label}, {need.verdict(available)}</div>", _bar(parts, label)]
    memory = plan.worst.memory
    rows = [(text, f"{getattr(memory, key) / GIB:,.2f} GiB") for key, text in NAMES.items()]
    return [*lines, _table(("part", "fullest rank"), rows)]


def _time(plan: Plan) -> list[str]:
    total = plan.time.total
    parts = {name: value for name, value in plan.time.parts.items() if value > 0}
    label = f"{seconds_text(total)} per step"
    bar = _bar([(TIMES[name], value / total) for name, value in parts.items()], label)
    rows = [(TIMES[name], seconds_text(value)) for name, value in parts.items()]
    return [f"<h2>Time: {label}</h2>", bar, _table(("part", "in a step"), rows)]


def _bar(parts: Sequence[tuple[str, float]], label: str) -> str:
    """A bar of the parts of a whole; the rest stays empty."""
    cells = "".join(
        f'<div style="width:{100 * part:.3f}%;background:{colour}" title="{text} '
        f'{100 * part:.1f} %"></div>'
        for (text, part), colour in zip(parts, COLOURS, strict=False)
    )
    return f'<div class="bar" role="img" aria-label="{html.escape(label)}">{cells}</div>'


def _table(head: tuple[str, str], rows: Sequence[tuple[str, str]]) -> str:
    """The legend of a bar with its numbers, in the order of the colours."""
    lines = [f"<tr><th>{head[0]}</th><th>{head[1]}</th></tr>"]
    for (text, value), colour in zip(rows, COLOURS, strict=False):
        key = f'<span class="key" style="background:{colour}"></span>'
        lines.append(f"<tr><td>{key}{text}</td><td>{value}</td></tr>")
    return f'<div class="scroll"><table>{"".join(lines)}</table></div>'
