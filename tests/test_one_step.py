"""The tables of docs/one_step.md are those of the step that is run now."""

import re
from pathlib import Path

import pytest

from docs.one_step_tables import BLOCKS, PAGE, step, with_tables

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
def test_the_tables_are_those_of_the_step():
    """tests/tools/explain/test_explain.py compares most of them with a step on real ranks."""
    text = PAGE.read_text()
    assert all(f"<!-- {name} -->" in text for name in BLOCKS)
    assert with_tables(text, step()) == text, "run python -m docs.one_step_tables"


def test_the_lines_where_the_host_waits_stand_in_their_files():
    rows = re.findall(r"^\| \[([\w/.]+)\]\(\S+\) \| `(.+?)` \|", PAGE.read_text(), re.M)
    assert rows
    for file, text in rows:
        assert text in (ROOT / file).read_text(), (file, text)
