"""Renders the lectures as one page, and keeps the line numbers of quoted code right.

    python -m docs.lectures            # writes build/docs/lectures.html
    python -m docs.lectures --lines    # corrects the numbers in the Markdown

What it is: slides are Markdown, divided by lines of ---; a comment is the speaker's note. A line of
code is quoted with its file and its number; the number follows from the quoted text, which must be
in the file once.
Why it is here: a slide that quotes a line which has moved sends its reader to the wrong place.
"""

from __future__ import annotations

import argparse
import base64
import re
import sys
from pathlib import Path
from typing import NamedTuple

import markdown

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PAGE = ROOT / "build/docs/lectures.html"
LECTURES = (
    "1_one_step.md",
    "2_weights.md",
    "3_tokens_and_layers.md",
    "4_a_run.md",
    "questions.md",
)
# [`file:number`](path#Lnumber): `text of the line`
QUOTE = re.compile(r"\[`([\w./-]+):(\d+)`\]\(([\w./-]+)#L(\d+)\): `([^`\n]+)`")
NOTE = re.compile(r"<!--\n?(.*?)-->", re.DOTALL)


class Quote(NamedTuple):
    """A line of code in a slide."""

    file: str
    number: int
    text: str

    def found(self) -> list[int]:
        """The numbers of the lines that contain the text."""
        lines = (ROOT / self.file).read_text().splitlines()
        return [number for number, line in enumerate(lines, 1) if self.text in line]


def quotes(text: str) -> list[Quote]:
    """The quoted lines of a page."""
    return [Quote(found[1], int(found[2]), found[5]) for found in QUOTE.finditer(text)]


def with_right_numbers(text: str) -> str:
    """The page with the numbers of the lines as they are now.

    Raises ValueError for a text that is in its file never or several times.
    """

    def correct(found: re.Match[str]) -> str:
        quote = Quote(found[1], int(found[2]), found[5])
        numbers = quote.found()
        if len(numbers) != 1:
            raise ValueError(
                f"{quote.file}: {quote.text!r} is in lines {numbers}; expected exactly one line"
            )
        return f"[`{quote.file}:{numbers[0]}`]({found[3]}#L{numbers[0]}): `{quote.text}`"

    return QUOTE.sub(correct, text)


def slides(text: str) -> list[tuple[str, str]]:
    """(Markdown, note) of each slide."""
    parts = re.split(r"^---$", text, flags=re.MULTILINE)
    return [(NOTE.sub("", part).strip(), "\n".join(NOTE.findall(part)).strip()) for part in parts]


def page(names: tuple[str, ...] = LECTURES) -> str:
    """The page of all lectures."""
    sections = []
    for name in names:
        for content, note in slides((HERE / name).read_text()):
            html = _html(_with_images(QUOTE.sub(r"`\1:\2` `\5`", content)))
            aside = f"<aside>{_html(note)}</aside>" if note else ""
            sections.append(f"<section>{_without_file_links(html)}{aside}</section>")
    frame = (HERE / "frame.html").read_text()
    return frame.replace("<!-- slides -->", "\n".join(sections))


def _html(text: str) -> str:
    return markdown.markdown(text, extensions=["tables", "fenced_code", "sane_lists"])


def _with_images(text: str) -> str:
    """Images inside the page: it is one file."""

    def embed(found: re.Match[str]) -> str:
        data = base64.b64encode((HERE / found[2]).read_bytes()).decode()
        return f"![{found[1]}](data:image/svg+xml;base64,{data})"

    return re.sub(r"!\[([^]]*)\]\(([^)]+\.svg)\)", embed, text)


def _without_file_links(html: str) -> str:
    """The page may lie anywhere: links to files would lead nowhere."""
    return re.sub(r'<a href="(?!https:)[^"]*">(.*?)</a>', r"\1", html, flags=re.DOTALL)


def main() -> int:
    parser = argparse.ArgumentParser(description="Render the lectures.")
    parser.add_argument("--lines", action="store_true", help="correct the line numbers instead")
    options = parser.parse_args()
    if options.lines:
        for name in LECTURES:
            path = HERE / name
            path.write_text(with_right_numbers(path.read_text()))
        return 0
    PAGE.parent.mkdir(parents=True, exist_ok=True)
    PAGE.write_text(page())
    print(PAGE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
