"""The schema: its keys by name, its help, and the type and bounds of a value."""

from __future__ import annotations

import dataclasses
import math
import typing

import pytest
from messages import refused

from titanlite.config.help import help_text
from titanlite.config.keys import Key, all_keys, keys_of, schema_keys, setting
from titanlite.config.schema import FROM_CHECKPOINT, Config, PhaseConfig, SourceConfig, sections
from titanlite.config.values import convert, parse
from titanlite.model.flavors import FLAVORS


def test_flavor_choices_are_the_flavors():
    (field,) = [f for f in dataclasses.fields(sections()["model"]) if f.name == "flavor"]
    assert set(field.metadata["choices"]) == {*FLAVORS, FROM_CHECKPOINT}


def test_defaults_have_the_type_of_their_key():
    """An int where a float belongs becomes an integer tensor, or is written to TOML as another
    type.
    """
    checked = 0
    for name, section in sections().items():
        types = typing.get_type_hints(section)
        for field, default in vars(section()).items():
            if default is None:  # absent: the flavor's value
                assert type(None) in typing.get_args(types[field])
                continue
            expected = typing.get_origin(types[field]) or types[field]
            assert type(default) is expected, (
                f"{name}.{field} = {default!r}: expected {expected.__name__}"
            )
            checked += 1
    assert checked > 100


def test_every_key_has_the_type_of_its_default():
    assert list(schema_keys()) == all_keys()
    for name, key in schema_keys().items():
        assert setting(Config(), name) == key.default
        if key.default is None:  # absent: the flavor's value
            assert name.startswith("model."), name
        elif key.kind is not list:
            assert type(key.default) is key.kind, name


def test_kinds_of_keys():
    keys = schema_keys()
    assert keys["optimizer.betas"].kind is tuple
    assert keys["data.phases"].kind is list
    assert not keys["data.phases"].is_list_of_strings
    assert keys["validation.prompts"].is_list_of_strings
    assert keys["compile.loss"].words == ("auto", "true", "false")
    assert keys["compile.enabled"].words == ("auto", "true", "false")
    assert keys["training.steps"].words == ()
    assert list(keys_of(PhaseConfig)) == ["from_step", "from_tokens", "weights"]


def test_help_names_every_key_with_its_default_and_a_line():
    lines = help_text([]).splitlines()
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
    assert capsys.readouterr().out == help_text([]) + "\n"


def test_help_of_a_section_is_a_part_of_the_whole():
    part = help_text(["debug", "--help", "lora"])
    assert part.startswith("[lora]  ")
    assert part in help_text([])
    assert {line.split(".")[0] for line in part.splitlines() if line[:4] == "  --"} == {"  --lora"}
    assert help_text(["--help", "lora.rank"]) == part
    with refused("--help", "[paralel]", "did you mean parallel?"):
        help_text(["--help", "paralel"])
    with refused("--help", "lora.rnak", "did you mean lora.rank?"):
        help_text(["--help", "lora.rnak"])


def test_help_names_the_keys_of_tables():
    text = help_text([])
    for name, cls in (("data.sources", SourceConfig), ("data.phases", PhaseConfig)):
        block = text.partition(f"  --{name}  ")[2]
        for field in dataclasses.fields(cls):
            assert f"\n        {field.name}  " in block
            assert f": {field.metadata['help']}" in block


INTEGER = Key("a.b", int, 1, "", 0, None, (), None, "any")
NUMBER = dataclasses.replace(INTEGER, kind=float)
PAIR = dataclasses.replace(INTEGER, kind=tuple, max=1)
TEXT = dataclasses.replace(INTEGER, kind=str, min=None)
SWITCH = dataclasses.replace(TEXT, choices=("auto", "true", "false"))
FLAG = dataclasses.replace(TEXT, kind=bool)


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        (INTEGER, 3, 3),
        (INTEGER, 1e9, 10**9),
        (NUMBER, 3, 3.0),
        (PAIR, [0, 0.5], (0.0, 0.5)),
        (FLAG, True, True),
    ],
)
def test_a_value_gets_the_type_of_its_key(key, value, expected):
    converted = convert(value, key)
    assert converted == (expected, "")
    assert type(converted.value) is type(expected)


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        (INTEGER, True, "an integer"),
        (INTEGER, 1.5, "an integer (1e9 is one)"),
        (INTEGER, -1, "an integer, at least 0"),
        (INTEGER, 1 << 63, "an integer below 2**63"),
        (NUMBER, 1 << 63, "a number below 2**63"),
        (NUMBER, math.inf, "a finite number"),
        (NUMBER, math.nan, "a number, at least 0"),
        (PAIR, [0], "a list of two numbers"),
        (PAIR, [0, True], "a list of two numbers"),
        (PAIR, [0, 2], "a list of two numbers, at least 0 and at most 1"),
        (TEXT, 3, "a string"),
        (TEXT, "\udcff", "text in UTF-8, without NUL"),
        (SWITCH, "maybe", "one of auto, true, false"),
        (FLAG, 1, "true or false"),
    ],
)
def test_a_wrong_value_stays_as_it_is(key, value, expected):
    assert convert(value, key) == (value, expected)


@pytest.mark.parametrize(
    ("key", "text", "expected"),
    [
        (INTEGER, "1_000", 1000),
        (INTEGER, "1e3", 1000.0),
        (INTEGER, "many", "many"),
        (PAIR, "[0, 1]", [0, 1]),
        (FLAG, "True", True),
        (SWITCH, "TRUE", "true"),
        (TEXT, "TRUE", "TRUE"),
        (TEXT, "7", "7"),
    ],
)
def test_the_text_of_the_command_line(key, text, expected):
    assert parse(text, key) == expected
