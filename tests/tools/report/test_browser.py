"""The page in a real browser, if there is one: charts, controls and keys work, and nothing is
requested or logged.
"""

from __future__ import annotations

import pytest
from browser import BINARY, browser
from report_runs import CONFIG, HOSTILE, write_lines, write_run

from titanlite.tools.report.page import contents, page
from titanlite.tools.report.run_data import read_run

pytestmark = pytest.mark.skipif(not BINARY, reason="needs Chromium")
SEEN = "document.documentElement.dataset"


@pytest.fixture(scope="module")
def tab(tmp_path_factory):
    with browser(tmp_path_factory.mktemp("profile")) as tab:
        yield tab


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    folder = write_run(tmp_path_factory.mktemp("one") / "a")
    (folder / "report.html").write_text(page(contents([read_run(folder)])))
    return f"file://{folder}/report.html"


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    base = tmp_path_factory.mktemp("two")
    config = CONFIG.replace("warmup_steps = 100", "warmup_steps = 200")
    folders = [
        write_run(base / "first"),
        write_run(base / "second-with-a-very-long-name-of-a-run", config=config),
    ]
    (base / "report.html").write_text(page(contents([read_run(folder) for folder in folders])))
    return f"file://{base}/report.html"


def assert_whole(tab, charts: int = 10) -> None:
    """Every chart has values, no error was logged, nothing was requested, and nothing is wider than
    the window.
    """
    seen = tab.run(f"({{...{SEEN}}})")
    assert (seen["errors"], seen["empty"], seen["overflow"]) == ("", "0", "0"), seen
    assert int(seen["charts"]) == int(seen["expected"]) >= charts
    assert tab.messages == []
    assert tab.requests == []


@pytest.mark.slow
@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("name", ["one", "two"])
def test_wide_and_narrow_light_and_dark(tab, request, name, width, dark):
    tab.open(request.getfixturevalue(name), width, dark=dark, touch=width < 600)
    assert_whole(tab)
    back = tab.run("getComputedStyle(document.body).backgroundColor")
    assert (back == "rgb(15, 18, 22)") == dark
    assert tab.run("[...document.querySelectorAll('canvas')].every((c) => c.width > 300)")


def test_the_axis_the_smoothing_and_the_theme_are_choices(tab, one):
    tab.open(one)
    for value in ("tokens", "time", "step"):
        tab.run(f"document.querySelector('#x input[value={value}]').click()")
        assert_whole(tab)
    label = tab.run("document.querySelector('.u-legend .u-series th').textContent")
    assert label == "Steps"
    tab.run(
        "const s = document.getElementById('smooth'); s.value = 0; s.dispatchEvent(new "
        "Event('input'))"
    )
    assert_whole(tab)
    tab.run("document.getElementById('log').click()")
    assert_whole(tab)
    tab.run("document.querySelector('#theme input[value=dark]').click()")
    assert tab.run("getComputedStyle(document.body).backgroundColor") == "rgb(15, 18, 22)"
    tab.run("document.querySelector('#theme input[value=auto]').click()")


def test_keys_move_the_cursor_and_toggle_lines(tab, one):
    tab.open(one)
    tab.run("document.querySelector('.chart .u-wrap').focus()")
    for _ in range(3):
        tab.press("ArrowRight", 39)
    shown = tab.run("document.querySelector('.chart .u-legend .u-value').textContent")
    assert shown == "20"  # of steps 1, 10, 20
    tab.run("document.querySelector('.chart .u-legend th[role=button]').focus()")
    tab.press("Enter", 13, "\r")
    assert (
        tab.run("document.querySelector('.chart .u-legend th[role=button]').ariaPressed") == "false"
    )
    controls = "[...document.querySelectorAll('button, input, summary, .u-wrap, th[role=button]')]"
    assert tab.run(
        f"{controls}.every((c) => c.tabIndex >= 0 && (c.labels?.length || c.textContent || "
        "c.ariaLabel))"
    )


def test_a_run_can_be_hidden_and_events_too(tab, two):
    tab.open(two)
    tab.run("document.querySelector('#runs button').click()")
    # The time split is of one run
    assert int(tab.run(f"{SEEN}.charts")) == int(tab.run(f"{SEEN}.expected")) - 1
    assert tab.run(f"{SEEN}.empty") == "0"
    tab.run("document.querySelector('#legend button').click()")
    assert tab.messages == []


def test_a_zoom_is_of_all_charts_and_can_be_taken_back(tab, one):
    tab.open(one)
    tab.run("document.querySelector('.chart').scrollIntoView()")
    mouse = {
        "x": 300,
        "y": tab.run("document.querySelector('.u-over').getBoundingClientRect().top + 50"),
    }
    for kind, x in (("mousePressed", 300), ("mouseMoved", 500), ("mouseReleased", 500)):
        button = {"button": "left", "clickCount": 1, "buttons": 1}
        tab.call("Input.dispatchMouseEvent", type=kind, **(mouse | {"x": x}), **button)
    assert tab.run("document.getElementById('reset').hidden") is False
    tab.run("document.getElementById('reset').click()")
    assert tab.run("document.getElementById('reset').hidden") is True
    assert_whole(tab)


def test_hostile_text_is_text(tab, tmp_path):
    folder = write_run(tmp_path / "a", config=CONFIG.replace('"debug"', f"'{HOSTILE}'"))
    write_lines(folder / "samples.jsonl", [{"step": 1, "prompt": HOSTILE, "text": HOSTILE}])
    write_lines(folder / "events.jsonl", [{"time": 1, "step": 1, "event": "save", "text": HOSTILE}])
    (folder / "report.html").write_text(page(contents([read_run(folder)])))
    tab.open(f"file://{folder}/report.html")
    assert_whole(tab)
    assert tab.run("document.title") != "1"
    assert tab.run("document.querySelectorAll('img').length") == 0
    assert tab.run("document.querySelector('.sample pre').textContent") == HOSTILE


def test_it_can_be_printed(tab, one):
    tab.open(one, dark=True)
    assert tab.pdf().startswith(b"%PDF")
    assert tab.messages == []
