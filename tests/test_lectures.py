"""The lectures: quoted lines are where the slides say, commands run, and the page can be used."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from browser import BINARY, browser

from docs.draw_schedule import SCHEDULES
from docs.lectures import __main__ as lectures
from titanlite.config.load import load_config
from titanlite.tools.cli.main import COMMANDS
from titanlite.tools.verify.ladder import ladder

ROOT = Path(__file__).parents[1]
TEXTS = {name: (lectures.HERE / name).read_text() for name in lectures.LECTURES}
# (page, command), in the order of the slides
DEMONSTRATIONS = [
    (name, line)
    for name, text in TEXTS.items()
    for block in re.findall(r"^```bash\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    for line in block.splitlines()
]
SECONDS = 60  # that a demonstration may take, on an idle machine
BUSY = 10  # times as long, beside other tests


@pytest.mark.parametrize("name", lectures.LECTURES)
def test_quoted_lines_are_where_the_slides_say(name):
    """Else: python -m docs.lectures --lines."""
    found = lectures.quotes(TEXTS[name])
    assert found
    links = re.findall(r"\]\(\.\./\.\./([^)]*)\)", TEXTS[name])
    assert len([link for link in links if not link.endswith(".md")]) == len(found)
    assert lectures.with_right_numbers(TEXTS[name]) == TEXTS[name]


def test_a_quote_that_is_not_in_its_file_once_is_refused():
    for text in ("no such line", "import"):
        page = f"[`train.py:3`](../../train.py#L3): `{text}`"
        with pytest.raises(ValueError, match="expected exactly one line"):
            lectures.with_right_numbers(page)


def test_each_of_twelve_questions_is_answered_from_at_most_two_files():
    questions = lectures.slides(TEXTS["questions.md"])[1:]
    assert [int(content.split()[1].strip(".")) for content, _ in questions] == list(range(1, 13))
    for content, _ in questions:
        assert 1 <= len({quote.file for quote in lectures.quotes(content)}) <= 2, content


def test_every_lecture_has_notes_and_demonstrations():
    for name, text in TEXTS.items():
        assert any(page == name for page, _ in DEMONSTRATIONS), name
        if name != "questions.md":
            assert all(note for _, note in lectures.slides(text)), name


@pytest.mark.parametrize("command", sorted({command for _, command in DEMONSTRATIONS}))
def test_commands_are_valid(command):
    words = [word for word in shlex.split(command) if not word.startswith("NGPU=")]
    if words[0] == "./run_train.sh":
        load_config(words[1:])
    elif words[:2] == ["titanlite", "verify"]:
        named = words[2:]
        assert named[::2] == ["--layout"] * (len(named) // 2)
        # Which tests/tools/verify/test_campaign.py runs
        assert {*named[1::2]} <= {*ladder(4, True, "cpu")}
    elif words[0] == "titanlite":
        assert words[1] in COMMANDS
    else:
        assert words[:2] == ["python", "docs/draw_schedule.py"]
        assert words[words.index("--schedule") + 1] in SCHEDULES


@pytest.mark.slow
@pytest.mark.parametrize("page", sorted({page for page, _ in DEMONSTRATIONS}))
def test_demonstrations_run(page, tmp_path):
    """In the order of the slides, in a folder of their own; but for layouts of the ladder."""
    for command in [command for other, command in DEMONSTRATIONS if other == page]:
        words = shlex.split(command)
        if words[:2] == ["titanlite", "verify"]:
            continue
        variables = dict(word.split("=", 1) for word in words if word.startswith("NGPU="))
        words = words[len(variables) :]
        programs = {
            "./run_train.sh": [str(ROOT / "titanlite/__main__.py"), "train"],
            "titanlite": [str(ROOT / "titanlite/__main__.py")],
            "python": [],
        }
        arguments = [str(ROOT / word) if word.startswith("docs/") else word for word in words[1:]]
        done = subprocess.run(
            [sys.executable, *programs[words[0]], *arguments],
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": str(ROOT)} | variables,
            capture_output=True,
            text=True,
            timeout=SECONDS * BUSY,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"


def test_the_page_is_one_file():
    html = lectures.page()
    count = sum(len(lectures.slides(text)) for text in TEXTS.values())
    assert html.count("<section>") == count
    assert not re.search(r'(?:src|href)="(?!data:|https:)', html)
    assert not re.search(r"<(?:script|link|img)[^>]*https?:", html)
    assert "```" not in html


@pytest.mark.slow
@pytest.mark.skipif(not BINARY, reason="needs Chromium")
@pytest.mark.parametrize("width", [390, 1280])
def test_the_page_is_turned_by_keyboard(tmp_path, width):
    path = tmp_path / "lectures.html"
    path.write_text(lectures.page())
    now = "document.querySelector('section.now').querySelector('h1,h2').textContent"
    with browser(tmp_path / "profile") as page:
        page.open(path.as_uri(), width, 900)
        first = page.run(now)
        page.press("ArrowRight", 39)
        assert page.run(now) == "Why more than one process" != first
        page.press("End", 35)
        assert page.run(now).startswith("12. ")
        page.press("n", 78, "n")
        assert (
            page.run("getComputedStyle(document.querySelector('section.now')).display") == "block"
        )
        page.press("Home", 36)
        assert page.run("getComputedStyle(document.querySelector('.now aside')).display") == "block"
        slides = page.run("document.querySelectorAll('section').length")
        for _ in range(slides):
            assert page.run("document.documentElement.scrollWidth") <= width, page.run(now)
            page.press("ArrowRight", 39)
        assert not page.messages
        assert all(request.startswith("data:") for request in page.requests)
