"""Help: every key with its default and a line."""

from __future__ import annotations

import dataclasses

from titanlite.config.schema import sections
from titanlite.config.text import help_text


def test_help_names_every_key_with_its_default_and_a_line():
    lines = help_text().splitlines()
    for section, cls in sections().items():
        for field in dataclasses.fields(cls):
            (at,) = [i for i, line in enumerate(lines) if line.startswith(f"  --{section}.{field.name}  ")]
            assert "(default " in lines[at]
            assert lines[at + 1].strip() == field.metadata["help"]
