"""docs/coming_from.md: its tables are the importer's, its keys exist, its bytes are computed."""

from __future__ import annotations

import re
from pathlib import Path

from docs.coming_from_tables import PAGE, table, with_tables
from titanlite.config.keys import all_keys
from titanlite.config.schema import sections
from titanlite.tools.import_config.importer import FORMATS

TEXT = PAGE.read_text()
FINETUNE = Path(__file__).parents[1] / "docs/finetune.md"


def test_the_tables_are_those_of_the_importer():
    assert with_tables(TEXT) == TEXT, "run python -m docs.coming_from_tables"
    assert all(table(form) in TEXT for form in FORMATS)


def test_every_key_of_ours_that_is_named_exists():
    prose = re.sub(r"<!-- keys of .*?<!-- end of", "", TEXT, flags=re.DOTALL)
    columns = re.findall(r"^\| `.*?\| (`.*?) \| .*\|$", TEXT, re.MULTILINE)
    ours = "|".join(sections())
    named = re.findall(rf"`((?:{ours})\.[a-z_]+)", "\n".join([prose, *columns]))
    assert len(set(named)) > 60
    assert set(named) <= set(all_keys())


def billions(formula: str) -> float:
    """A number of bytes, as `2N + 16N/W`, in GB for 8 billion parameters on 4 processes."""
    terms = re.findall(r"(\d+)N(/W)?", formula)
    return sum(int(number) * 8 / (4 if divided else 1) for number, divided in terms)


def test_the_bytes_of_the_stages_are_those_of_their_formulas():
    rows = re.findall(
        r"^\| (\w.*?) \| ([\dNW+/ ]+) \| (\d+) GB \| (.*?) \| ([\dNW+/ ]+) \| (\d+) GB \|$",
        TEXT,
        re.MULTILINE,
    )
    assert len(rows) == 4
    for _, there, number, _, here, own_number in rows:
        assert billions(there) == int(number)
        assert billions(here) == int(own_number)
    (zero_2,) = [row for row in rows if row[0].startswith("ZeRO-2")]
    assert (zero_2[2], zero_2[5]) == ("44", "48")


def test_the_pages_about_coming_from_elsewhere_link_each_other():
    assert "(coming_from.md)" in FINETUNE.read_text()
    assert "(finetune.md#coming-from-peft-trl-or-torchtune)" in TEXT
