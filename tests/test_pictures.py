"""The pictures of the documents: what is stored is what the program does, and can be read."""

from __future__ import annotations

import itertools
import re
import xml.etree.ElementTree as ET

import pytest

from docs.pictures.__main__ import IMAGES
from docs.pictures.canvas import FILLS, INK, WIDTH
from docs.pictures.draw import PICTURES
from docs.pictures.fsdp_streams import place
from docs.pictures.recorded import SMALL, calls_of_fsdp

PAGES = "".join(path.read_text() for path in sorted(IMAGES.parent.rglob("*.md")))
SLOW = {"step_memory"}  # two traces of sixteen blocks


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] if n in SLOW else []) for n in PICTURES]
)
def test_a_picture_is_drawn_from_what_the_program_does(pool, name):
    """Else: python -m docs.pictures, and look at what has changed."""
    assert (IMAGES / f"{name}.svg").read_text() == PICTURES[name](pool)


@pytest.mark.parametrize("name", PICTURES)
def test_texts_of_a_picture_fit_into_it_and_a_page_shows_it(name):
    assert f"images/{name}.svg)" in PAGES
    picture = ET.parse(IMAGES / f"{name}.svg").getroot()
    height = float(picture.attrib["viewBox"].split()[3])
    assert "prefers-color-scheme:dark" in (IMAGES / f"{name}.svg").read_text()
    texts = [element for element in picture if element.tag.endswith("}text")]
    assert texts
    for element in texts:
        size = float(element.attrib["font-size"])
        assert size >= 10, element.text  # at 390 pixels one unit is about a pixel
        width = len(element.text or "") * size * 0.5  # of an average letter of Helvetica
        anchor = element.attrib.get("text-anchor", "start")
        left = float(element.attrib["x"]) - {"start": 0, "middle": width / 2, "end": width}[anchor]
        assert left >= 0, element.text
        assert left + width <= WIDTH, element.text
        assert size < float(element.attrib["y"]) < height, element.text


def luminance(colour: str) -> float:
    """Relative luminance, as WCAG 2 defines it."""
    parts = [int(pair, 16) / 255 for pair in re.findall("[0-9a-f]{2}", colour)]
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
def test_text_has_contrast_on_every_colour(theme):
    pairs = [("ink", fill) for fill in [*FILLS, "paper", "plain"]] + [("soft", "paper")]
    colours = INK | FILLS
    for front, back in pairs:
        low, high = sorted(luminance(colours[name][theme]) for name in (front, back))
        assert (high + 0.05) / (low + 0.05) >= 4.5, (front, back)


@pytest.mark.slow
def test_streams_keep_the_rules_of_fsdp(pool):
    """Nothing computes before it is gathered or is reduced before it is computed."""
    options = [*SMALL, "--parallel.dp_shard=2", "--training.global_batch_size=4"]
    streams = place(pool.run(2, calls_of_fsdp, options)[0])
    for lane in (streams.gathers, streams.computes, streams.reduces):
        assert all(one.end <= two.start for one, two in itertools.pairwise(lane))
    for bar in streams.computes:
        assert any(g.unit == bar.unit and g.end <= bar.start for g in streams.gathers)
    for bar in streams.reduces:
        assert any(c.unit == bar.unit and c.end <= bar.start for c in streams.computes)
    assert [bar.unit for bar in streams.gathers] == [
        "",
        "layers.0",
        "layers.1",
        "layers.2",
        "layers.1",
        "layers.0",
    ]
    assert [bar.unit for bar in streams.reduces] == ["layers.2", "layers.1", "layers.0", ""]
