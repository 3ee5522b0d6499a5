"""The page in a real browser, if there is one: lanes follow the keys, and nothing is wider than the
window, requested or logged.
"""

from __future__ import annotations

import pytest
from browser import BINARY, browser

from titanlite.tools.explain.events import Event, Explanation, Lane, Place
from titanlite.tools.explain.page import page

pytestmark = pytest.mark.skipif(not BINARY, reason="needs Chromium")
KEYS = {"End": 35, "Home": 36, "ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40}
NUM_EVENTS = 300  # more than a narrow window has pixels for


def made(rank: int) -> Lane:
    events = []
    for number in range(1, NUM_EVENTS + 1):
        phase = "forward" if number <= NUM_EVENTS // 2 else "backward"
        place = Place(phase, "layers.0.feed_forward", "input", False, "a.py:1", "f", ())
        events.append(
            Event(
                *(number, "all_gather", "tp", (0, 1), "", (4, 64, 128), "float32", 262144, 1, 0),
                *({"parameters": 4096}, 4096 * number, 0, place),
                before=(1e-7 * number, 2.0, None),
                after=(1e-7, 2.0, None, 3.0, 4.0, 5.0),
                tensor=f"</script><b>tensor</b> {number}",
                why="because",
                cause="b.py:2",
                loop_line="train.py:3",
                behind="nothing: what follows needs the result",
            )
        )
    return Lane(rank, {"tp": rank}, tuple(events), 0, {"parameters": 4096})


@pytest.fixture(scope="module")
def tab(tmp_path_factory):
    folder = tmp_path_factory.mktemp("page")
    lanes = (made(0), made(1))
    step = Explanation("made", {"tp": 2}, 2, True, 1, 1024, 1, 1, lanes, (), ())
    (folder / "step.html").write_text(page(step))
    with browser(tmp_path_factory.mktemp("profile")) as tab:
        tab.url = f"file://{folder}/step.html"
        yield tab


def press(tab, key: str) -> None:
    tab.press(key, KEYS[key])


def in_sight(tab, selector: str) -> bool:
    """Whether its element is within its lane, and the lane within the window."""
    return tab.run(
        f"""(() => {{
          const box = document.querySelector("{selector}").getBoundingClientRect();
          const track = document.querySelector("{selector}").parentElement.getBoundingClientRect();
          return box.left >= track.left && box.right <= track.right
            && track.right <= innerWidth && box.top >= 0 && box.bottom <= innerHeight;
        }})()"""
    )


@pytest.mark.slow
@pytest.mark.parametrize("width", [390, 1280])
def test_the_lanes_follow_the_keys(tab, width):
    tab.open(tab.url, width=width, dark=width == 390)
    for key in ("End", "ArrowLeft", "ArrowDown", "ArrowLeft"):
        press(tab, key)
    assert tab.run("document.getElementById('h-event').textContent") == (
        f"{NUM_EVENTS - 2}. </script><b>tensor</b> {NUM_EVENTS - 2}"
    )
    assert in_sight(tab, ".current")
    assert in_sight(tab, ".together")  # the other rank's end of it
    assert tab.run("document.activeElement.className").startswith("event tp current")
    assert "1.00e-7, 2, not finite | 3, 4, 5" in tab.run(
        "document.getElementById('values').innerText"
    )
    # All bars of the memory, and nothing wider than the window
    assert (
        tab.run("document.getElementById('memory').lastChild.getBoundingClientRect().right")
        <= width
    )
    assert tab.run("document.documentElement.scrollWidth") == width
    press(tab, "Home")
    tab.press("Enter", 13)  # on a box that has the focus
    assert tab.run("document.getElementById('position').textContent") == (
        f"rank 1, 1 of {NUM_EVENTS}: forward"
    )
    assert tab.messages == []
    assert tab.requests == []
