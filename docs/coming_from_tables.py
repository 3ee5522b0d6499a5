"""Writes the tables of coming_from.md from those of the importer.

    python docs/coming_from_tables.py

What it is: between the two comments of each trainer, the table of its keys, as `titanlite
import-config` uses it. A test compares the document with this output.
Why it is here: a table beside the code that applies it would soon say something else.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from titanlite.tools.import_config import deepspeed
from titanlite.tools.import_config.detect import FORMATS
from titanlite.tools.import_config.mapping import Format, markdown
from titanlite.tools.import_config.neox import NEOX

PAGE = Path(__file__).with_name("coming_from.md")


def table(form: Format) -> str:
    """The table of a format; of GPT-NeoX without the rows that it shares with DeepSpeed."""
    if form is NEOX:
        own = tuple(row for row in form.rows if row not in deepspeed.ROWS)
        form = replace(form, rows=own)
    return markdown(form)


def with_tables(text: str) -> str:
    """The page with the tables as they are now."""
    for form in FORMATS:
        begin = f"<!-- keys of {form.name} -->\n"
        end = f"<!-- end of {form.name} -->\n"
        block = re.compile(re.escape(begin) + ".*?" + re.escape(end), re.DOTALL)
        new = f"{begin}{table(form)}{end}"
        text = block.sub(lambda _, new=new: new, text)  # type: ignore[misc]
    return text


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text()))
