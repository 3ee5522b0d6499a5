"""Curves over the steps of a run, drawn in the terminal and as SVG.

What it is: the pictures of `titanlite schedule`. In the terminal a column is a step and is filled
up to the value, in eighths of a line. The SVG is text of about 10 kB without scripts or other
files; its colours follow the reader's theme.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
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
    "@media(prefers-color-scheme:dark){text{fill:#ddd}.line{stroke:#6cb2ff}.mark{fill:#6cb2ff}"
    ".paper{fill:#15181c}}"
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
    for number, curve in enumerate(picture.curves):
        marked = [curve.value(mark.step) for mark in picture.marks]
        values = [curve.value(step) for step in steps]
        top = max(*values, *marked) or 1.0
        lines += ["", curve.name, *_bars(curve, values, top, HEIGHTS[min(number, 1)], blocks)]
        lines.append(f"{0:>{LABEL}} +{'-' * width}")
    labelled = (1, steps[width // 2], picture.steps)
    lines.append(_axis("step", [f"{step:,}" for step in labelled], width))
    lines.append(_axis("tokens", [short(picture.tokens(step)) for step in labelled], width))
    return "\n".join([*lines, "", *_table(picture)])


def _bars(
    curve: Curve, values: list[float], top: float, height: int, blocks: bool
) -> Iterator[str]:
    """`height` lines with a bar for each value, from the uppermost down; two have a label."""
    for row in reversed(range(height)):
        label = ""
        if row in (height - 1, height // 2 - 1):
            label = curve.format.format(top * (row + 1) / height)
        line = f"{label:>{LABEL}} |"
        for value in values:
            eighths = round(8 * (value / top * height - row))  # of this line that the bar fills
            if blocks:
                line += BLOCKS[min(8, max(0, eighths))]
            else:
                line += "#" if eighths >= 4 else " "
        yield line.rstrip()


def sampled(steps: int, number: int) -> list[int]:
    """`number` steps from 1 to the last, evenly spaced."""
    return [1 + i * (steps - 1) // (number - 1) for i in range(number)]


def _axis(name: str, labels: list[str], width: int) -> str:
    """Labels at the left, in the middle and at the right."""
    left, middle, right = labels
    half = width // 2
    return f"{name:>{LABEL}}  {left:<{half}}{middle:<{width - half - len(right)}}{right}"


def _table(picture: Picture) -> list[str]:
    """The marks, one a line."""
    header = f"{'':22}{'step':>12}{'tokens':>12}{picture.curves[0].name:>20}"
    for _ in picture.curves[1:]:
        header += f"{'sequences':>12}"
    lines = [header]
    for mark in picture.marks:
        first, *others = _formatted(picture, mark)
        tokens = short(picture.tokens(mark.step))
        line = f"{mark.name:22}{mark.step:>12,}{tokens:>12}{first:>20}"
        for other in others:
            line += f"{other:>12}"
        lines.append(line)
    return lines


def _formatted(picture: Picture, mark: Mark) -> list[str]:
    """The values of a mark, in the format of their curves."""
    return [
        curve.format.format(value) for curve, value in zip(picture.curves, mark.values, strict=True)
    ]


def svg_picture(picture: Picture) -> str:
    """The picture as an SVG document."""
    parts = list[str]()
    y = 44
    right = WIDTH - 24
    steps = set(sampled(picture.steps, 400))
    for mark in picture.marks:  # with the step before, so that a jump of the batch is vertical
        steps |= {max(1, mark.step - 1), mark.step}

    def x(step: int) -> float:
        return LEFT + (right - LEFT) * (step - 1) / max(1, picture.steps - 1)

    for number, curve in enumerate(picture.curves):
        height = PANEL[min(number, 1)]
        points = [(x(step), curve.value(step)) for step in sorted(steps)]
        parts += _panel(picture, number, points, y, height)
        y += height + GAP
    bottom = y - GAP
    for anchor, fraction in (("start", 0.0), ("middle", 0.5), ("end", 1.0)):
        step = 1 + int(fraction * (picture.steps - 1))
        place = f'<text x="{x(step):.1f}" text-anchor="{anchor}"'
        parts.append(f'{place} y="{bottom + 18}">step {step:,}</text>')
        parts.append(f'{place} y="{bottom + 36}">{short(picture.tokens(step))} tokens</text>')
    title = escape(picture.title)
    description = escape("; ".join(_described(picture, mark) for mark in picture.marks))
    height = bottom + 48
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        'role="img" aria-labelledby="t d">',
        f'<title id="t">{title}</title>',
        f'<desc id="d">{description}</desc>',
        f"<style>{STYLE}</style>",
        f'<rect class="paper" width="{WIDTH}" height="{height}"/>',
        f'<text x="{LEFT}" y="24" font-weight="bold">{title}</text>',
    ]
    return "\n".join([*head, *parts, "</svg>\n"])


def _described(picture: Picture, mark: Mark) -> str:
    """A mark in words, for a reader that cannot see the picture."""
    names = [curve.name for curve in picture.curves]
    pairs = zip(names, _formatted(picture, mark), strict=True)
    values = ", ".join(f"{name} {value}" for name, value in pairs)
    return f"{mark.name}: step {mark.step:,}, {short(picture.tokens(mark.step))} tokens, {values}"


def _panel(
    picture: Picture, number: int, points: list[tuple[float, float]], y: float, height: float
) -> list[str]:
    """The axes, the line and the marks of a curve between `y` and `y + height`."""
    curve = picture.curves[number]
    top = max(value for _, value in points) or 1.0
    # x -> y on the page; marks look theirs up by the rounded x
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
        circle = f'<circle class="mark" cx="{x:.1f}" cy="{at[round(x, 3)]:.1f}" r="4">'
        parts.append(f"{circle}<title>{tip}</title></circle>")
    return parts
