"""Curves over the steps of a run, drawn in the terminal and as SVG.

What it is: the pictures of `titanlite schedule`. In the terminal a column is a step and is filled
up to the value, in eighths of a line. The SVG is text of about 10 kB without scripts or other
files; its colours follow the reader's theme.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from xml.sax.saxutils import escape

# Of the terminal, and of the numbers at the left
COLUMNS = 80
LABEL = 10
BLOCKS = " ▁▂▃▄▅▆▇█"
HEIGHTS = (12, 5)  # lines of the first curve and of the others
# Of the SVG
WIDTH = 720
LEFT = 90
PANEL = (240, 100)
GAP = 46
STYLE = (
    "text{font:13px system-ui,sans-serif;fill:#222}.line{fill:none;stroke:#0b62c4;stroke-width:2}"
    ".axis{stroke:#888;stroke-width:1}.mark{fill:#0b62c4}.paper{fill:#fff}"
    "@media(prefers-color-scheme:dark){text{fill:#ddd}.line{stroke:#6cb2ff}.mark{fill:#6cb2ff}.paper{fill:#15181c}}"
)


@dataclass(frozen=True)
class Curve:
    """A value at each step, 1 to the last."""

    name: str
    format: str
    value: Callable[[int], float]


@dataclass(frozen=True)
class Mark:
    """A step with a name, and the values of the curves at it."""

    name: str
    step: int
    values: tuple[float, ...]


@dataclass(frozen=True)
class Picture:
    """Curves over the same steps, and the marks on them; the last mark is the last step."""

    title: str
    steps: int
    tokens: Callable[[int], int]  # until the end of a step
    curves: tuple[Curve, ...]
    marks: tuple[Mark, ...]


def short(number: float) -> str:
    """Four significant digits, with k, M, B or T for the powers of a thousand."""
    for unit in ("", "k", "M", "B"):
        if number < 999.95:
            return f"{number:.4g}{unit}"
        number /= 1000
    return f"{number:.4g}T"


def text_picture(picture: Picture, blocks: bool = True) -> str:
    """The picture in at most 80 columns; without `blocks` in ASCII. Then a table of the marks."""
    width = COLUMNS - LABEL - 2
    steps = sampled(picture.steps, width)
    lines = [picture.title[:COLUMNS]]
    for curve, height in zip(
        picture.curves, itertools.chain(HEIGHTS, itertools.repeat(HEIGHTS[1])), strict=False
    ):
        values = [curve.value(step) for step in steps]
        top = max(*values, *(curve.value(mark.step) for mark in picture.marks)) or 1.0
        lines += ["", curve.name]
        for row in reversed(range(height)):
            label = (
                curve.format.format(top * (row + 1) / height)
                if row in (height - 1, height // 2 - 1)
                else ""
            )
            eighths = (round(8 * (value / top * height - row)) for value in values)
            filled = "".join(
                BLOCKS[min(8, max(0, e))] if blocks else "#" if e >= 4 else " " for e in eighths
            )
            lines.append(f"{label:>{LABEL}} |{filled}".rstrip())
        lines.append(f"{0:>{LABEL}} +{'-' * width}")
    ends = 1, steps[width // 2], picture.steps
    lines.append(_axis("step", [f"{step:,}" for step in ends], width))
    lines.append(_axis("tokens", [short(picture.tokens(step)) for step in ends], width))
    return "\n".join([*lines, "", *_table(picture)])


def sampled(steps: int, number: int) -> list[int]:
    """`number` steps from 1 to the last, evenly spaced."""
    return [1 + i * (steps - 1) // (number - 1) for i in range(number)]


def _axis(name: str, labels: list[str], width: int) -> str:
    """Labels at the left, in the middle and at the right."""
    half = width // 2
    return f"{name:>{LABEL}}  {labels[0]:<{half}}{labels[1]:<{width - half - len(labels[2])}}{labels[2]}"


def _table(picture: Picture) -> list[str]:
    """The marks, one a line."""
    names = [curve.name for curve in picture.curves]
    lines = [f"{'':22}{'step':>12}{'tokens':>12}" + "".join(f"{name:>20}" for name in names[:1])]
    lines[0] += "".join(f"{'sequences':>12}" for _ in names[1:])
    for mark in picture.marks:
        first, *others = (
            curve.format.format(v) for curve, v in zip(picture.curves, mark.values, strict=True)
        )
        lines.append(
            f"{mark.name:22}{mark.step:>12,}{short(picture.tokens(mark.step)):>12}{first:>20}"
        )
        lines[-1] += "".join(f"{other:>12}" for other in others)
    return lines


def svg_picture(picture: Picture) -> str:
    """The picture as an SVG document."""
    parts = list[str]()
    y = 44
    right = WIDTH - 24
    steps = sorted(
        {
            *sampled(picture.steps, 400),
            *(s for m in picture.marks for s in (m.step - 1, m.step) if s),
        }
    )

    def x(step: int) -> float:
        return LEFT + (right - LEFT) * (step - 1) / max(1, picture.steps - 1)

    for number, curve in enumerate(picture.curves):
        height = PANEL[min(number, 1)]
        parts += _panel(
            picture, number, [(x(step), curve.value(step)) for step in steps], y, height
        )
        y += height + GAP
    bottom = y - GAP
    for anchor, fraction in (("start", 0.0), ("middle", 0.5), ("end", 1.0)):
        step = 1 + int(fraction * (picture.steps - 1))
        place = f'<text x="{x(step):.1f}" text-anchor="{anchor}"'
        parts.append(f'{place} y="{bottom + 18}">step {step:,}</text>')
        parts.append(f'{place} y="{bottom + 36}">{short(picture.tokens(step))} tokens</text>')
    described = "; ".join(
        f"{mark.name}: step {mark.step:,}, {short(picture.tokens(mark.step))} tokens, "
        + ", ".join(
            f"{c.name} {c.format.format(v)}"
            for c, v in zip(picture.curves, mark.values, strict=True)
        )
        for mark in picture.marks
    )
    height = bottom + 48
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" aria-labelledby="t d">\n'
        f'<title id="t">{escape(picture.title)}</title>\n<desc id="d">{escape(described)}</desc>\n'
        f'<style>{STYLE}</style>\n<rect class="paper" width="{WIDTH}" height="{height}"/>\n'
        f'<text x="{LEFT}" y="24" font-weight="bold">{escape(picture.title)}</text>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def _panel(
    picture: Picture, number: int, points: list[tuple[float, float]], y: float, height: float
) -> list[str]:
    """The axes, the line and the marks of a curve between `y` and `y + height`."""
    curve = picture.curves[number]
    top = max(value for _, value in points) or 1.0
    at = {round(x, 3): y + height * (1 - value / top) for x, value in points}
    line = " ".join(f"{x:.1f},{at[round(x, 3)]:.1f}" for x, _ in points)
    left = points[0][0]
    right = points[-1][0]
    parts = [
        f'<path class="axis" fill="none" d="M{left:.1f} {y}V{y + height}H{right:.1f}"/>',
        f'<text x="{left - 8:.1f}" y="{y + 5}" text-anchor="end">{curve.format.format(top)}</text>',
        f'<text x="{left - 8:.1f}" y="{y + height}" text-anchor="end">0</text>',
        f'<text x="{left + 8:.1f}" y="{y - 6}">{escape(curve.name)}</text>',
        f'<polyline class="line" points="{line}"/>',
    ]
    for mark in picture.marks:
        x = left + (right - left) * (mark.step - 1) / max(1, picture.steps - 1)
        value = curve.format.format(mark.values[number])
        tip = f"{escape(mark.name)}: step {mark.step:,}, {value}"
        parts.append(
            f'<circle class="mark" cx="{x:.1f}" cy="{at[round(x, 3)]:.1f}" r="4"><title>{tip}</title></circle>'
        )
    return parts
