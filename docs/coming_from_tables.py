"""Writes the tables of coming_from.md from those of the importer.

    python -m docs.coming_from_tables

What it is: between the two comments of each trainer, the fields that become keys of ours, and those
that make no file. A test compares the document with this output.
Why it is here: a table beside the code that applies it would soon say something else.
"""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path

from titanlite.tools.import_config.draft import REQUIRED
from titanlite.tools.import_config.importer import FORMATS
from titanlite.tools.import_config.table import Format, Row
from titanlite.tools.import_config.torchtitan import TORCHTITAN
from titanlite.tools.import_config.torchtitan_json import TORCHTITAN_JSON

PAGE = Path(__file__).with_name("coming_from.md")


def table(form: Format) -> str:
    """The table of a format: the fields that are read together stand in one line.

    torchtitan 0.3 has many fields of 0.2, which stand only there.
    """
    lines = ["| there, with its default | here | how |", "|---|---|---|"]
    shared = TORCHTITAN.rows if form is TORCHTITAN_JSON else ()
    shown = [row for row in form.rows if row.apply or row.ours or row.refuse]
    shown = [row for row in shown if row not in shared]
    for _, group in itertools.groupby(shown, key=lambda row: _together(row)):
        rows = list(group)
        theirs = ", ".join(_with_default(row) for row in rows)
        ours = ", ".join(f"`{key}`" for key in rows[0].ours.split())
        if rows[0].refuse:
            lines.append(f"| {theirs} | no file at other values | {rows[0].note} |")
        else:
            lines.append(f"| {theirs} | {ours or '-'} | {_how(rows[0])} |")
    return "\n".join(lines) + "\n"


def _together(row: Row) -> object:
    """The function that reads the row, or what makes rows without one alike."""
    if row.apply:
        return row.apply
    return row.note if row.refuse else row.theirs


def _with_default(row: Row) -> str:
    """The field as `name = value`: the value that is needed, or the default."""
    if row.refuse:
        return f"`{row.theirs} = {' or '.join(json.dumps(value) for value in row.same)}`"
    if row.default is None or row.default == REQUIRED:
        return f"`{row.theirs}`"
    return f"`{row.theirs} = {json.dumps(row.default)}`"


def _how(row: Row) -> str:
    if row.values is None or row.note:
        return row.note
    pairs = [f"{json.dumps(theirs)} is `{ours}`" for theirs, ours in row.values.items()]
    return "; ".join(pairs)


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
