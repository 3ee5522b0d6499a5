"""Writes the table of checkpoints.md that says which settings a resumed run may change.

    python -m docs.settings_table

What it is: the keys whose `resume` in the schema is "same" or "fixed", between two comments of the
page. A test compares the page with this output.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from titanlite.config.keys import ACCEPTABLE, schema_keys

PAGE = Path(__file__).with_name("checkpoints.md")
BLOCK = re.compile("(?<=<!-- settings -->\n).*?(?=<!-- end of settings -->)", re.DOTALL)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def with_table(text: str) -> str:
    """The page with the table as the schema has it."""
    fixed = [name for name, key in schema_keys().items() if key.resume == "fixed"]
    lines = [
        "| in a resumed run | settings |",
        "|---|---|",
        f"| may differ if `checkpoint.accept` names it | {_listed(ACCEPTABLE)} |",
        f"| cannot change | the model's shape; {_listed(fixed)} |",
    ]
    return BLOCK.sub("\n".join(lines) + "\n", text)


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text()))
