"""A picture as SVG text, in light and dark.

What it is: rectangles, lines, arrows and text with classes; the style inside the file gives the
classes their colours, and other ones where the reader's system is dark. Pictures are 360 units wide
and are shown at one and a half times that, or in the width of a telephone.
Why it is here: an SVG of plain elements is text, so a test can compare it byte by byte, and a diff
shows what has changed.
What it costs: a few kilobytes per picture.
"""

from __future__ import annotations

from xml.sax.saxutils import escape

WIDTH = 360
SHOWN = 1.5  # times as large, where there is room

# class -> (light, dark)
INK = {
    "paper": ("#ffffff", "#161b22"),
    "ink": ("#1f2328", "#e6edf3"),
    "soft": ("#57606a", "#9ea7b3"),
    "line": ("#8c959f", "#6e7681"),
    "plain": ("#eaeef2", "#2d333b"),
}
# Fills that a text of class "ink" can stand on. The first four are those of ranks
FILLS = {
    "a": ("#b6d7ff", "#1b4f8a"),  # blue
    "b": ("#ffd29b", "#84500c"),  # orange
    "c": ("#b5e8bd", "#1d6434"),  # green
    "d": ("#f5c6e6", "#7d2d66"),  # pink
    "e": ("#e3d4ff", "#553a95"),  # violet
    "f": ("#f2e394", "#655a10"),  # yellow
    "g": ("#a9e5e2", "#0f5d5a"),  # teal
    "h": ("#ffc2bd", "#8c302a"),  # red
}
RANKS = "abcd"


def _style() -> str:
    def rules(theme: int) -> str:
        colours = INK | FILLS
        fills = " ".join(f".{name}{{fill:{pair[theme]}}}" for name, pair in colours.items())
        line = colours["line"][theme]
        return f"{fills} .stroke{{stroke:{line};fill:none}} .edge{{stroke:{line}}}"

    return (
        "<style>text{font-family:Helvetica,Arial,sans-serif}\n"
        f"{rules(0)}\n@media (prefers-color-scheme:dark){{{rules(1)}}}</style>"
    )


class Canvas:
    """Collects the elements of a picture; `finish` returns the file."""

    def __init__(self, title: str, description: str) -> None:
        self.title = title
        self.description = description
        self.elements: list[str] = []

    def text(
        self,
        x: float,
        y: float,
        content: str,
        size: float = 11,
        anchor: str = "start",
        ink: str = "ink",
        bold: bool = False,
    ) -> None:
        """`y` is the base line; `anchor`: start, middle or end."""
        weight = ' font-weight="bold"' if bold else ""
        self.elements.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size:g}" text-anchor="{anchor}"{weight} '
            f'class="{ink}">{escape(content)}</text>'
        )

    def lines(self, x: float, y: float, contents: list[str], size: float = 11) -> float:
        """Lines of small text below each other; returns the base line of the next one."""
        for content in contents:
            self.text(x, y, content, size, ink="soft")
            y += size + 3.5
        return y

    def box(
        self, x: float, y: float, width: float, height: float, fill: str, edge: bool = True
    ) -> None:
        kind = f"{fill} edge" if edge else fill
        stroke = ' stroke-width="0.8"' if edge else ""
        self.elements.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"{stroke} '
            f'class="{kind}"/>'
        )

    def labelled(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        fill: str,
        labels: list[str],
        size: float = 11,
    ) -> None:
        """A box with lines of text in its middle."""
        self.box(x, y, width, height, fill)
        step = size + 2.5
        first = y + height / 2 + size * 0.36 - step * (len(labels) - 1) / 2
        for i, label in enumerate(labels):
            self.text(x + width / 2, first + i * step, label, size, "middle")

    def line(self, x1: float, y1: float, x2: float, y2: float, dashed: bool = False) -> None:
        dashes = ' stroke-dasharray="3 3"' if dashed else ""
        self.elements.append(
            f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}"{dashes} class="stroke"/>'
        )

    def arrow(self, x1: float, y1: float, x2: float, y2: float) -> None:
        """A horizontal or vertical line with a head at its end."""
        self.line(x1, y1, x2, y2)
        along = 1 if x2 + y2 > x1 + y1 else -1
        if y1 == y2:
            head = f"{x2:g},{y2:g} {x2 - 5 * along:g},{y2 - 3:g} {x2 - 5 * along:g},{y2 + 3:g}"
        else:
            head = f"{x2:g},{y2:g} {x2 - 3:g},{y2 - 5 * along:g} {x2 + 3:g},{y2 - 5 * along:g}"
        self.elements.append(f'<polygon points="{head}" class="line"/>')

    def area(self, points: list[tuple[float, float]], fill: str) -> None:
        drawn = " ".join(f"{x:g},{y:g}" for x, y in points)
        self.elements.append(f'<polygon points="{drawn}" class="{fill}"/>')

    def finish(self, height: float) -> str:
        """The file, with the title as its first line of text."""
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" '
                f'width="{WIDTH * SHOWN:g}" height="{height * SHOWN:g}" role="img">',
                f"<title>{escape(self.title)}</title>",
                f"<desc>{escape(self.description)}</desc>",
                _style(),
                f'<rect width="{WIDTH}" height="{height:g}" class="paper"/>',
                f'<text x="8" y="18" font-size="13" font-weight="bold" class="ink">'
                f"{escape(self.title)}</text>",
                *self.elements,
                "</svg>\n",
            ]
        )
