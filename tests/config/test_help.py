"""Help: every key with its default and a line."""

from __future__ import annotations

import dataclasses

import pytest

from titanlite.config.help import help_text
from titanlite.config.schema import PhaseConfig, SourceConfig, sections


def test_help_names_every_key_with_its_default_and_a_line():
    lines = help_text().splitlines()
    for section, cls in sections().items():
        for field in dataclasses.fields(cls):
            (at,) = [
                i
                for i, line in enumerate(lines)
                if line.startswith(f"  --{section}.{field.name}  ")
            ]
            assert "(default " in lines[at]
            assert lines[at + 1].strip() == field.metadata["help"]


@pytest.mark.parametrize("arguments", [["--help"], ["debug", "-h"]])
def test_the_program_without_its_launcher_prints_the_same(arguments, capsys):
    import train

    assert train.run(arguments) == 0
    assert capsys.readouterr().out == help_text() + "\n"


def test_help_names_the_keys_of_tables():
    text = help_text()
    for name, cls in (("data.sources", SourceConfig), ("data.phases", PhaseConfig)):
        block = text.partition(f"  --{name}  ")[2]
        for field in dataclasses.fields(cls):
            assert f"\n        {field.name}  " in block
            assert f": {field.metadata['help']}" in block
