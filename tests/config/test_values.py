"""One value: its type, its bounds, and the text of the command line."""

from __future__ import annotations

import dataclasses
import math

import pytest

from titanlite.config.keys import Key
from titanlite.config.values import convert, parse

INTEGER = Key("a.b", int, 1, "", 0, None, (), None, "any")
NUMBER = dataclasses.replace(INTEGER, kind=float)
PAIR = dataclasses.replace(INTEGER, kind=tuple, max=1)
TEXT = dataclasses.replace(INTEGER, kind=str, min=None)
SWITCH = dataclasses.replace(TEXT, choices=("auto", "true", "false"))
FLAG = dataclasses.replace(TEXT, kind=bool)


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [(INTEGER, 3, 3), (NUMBER, 3, 3.0), (PAIR, [0, 0.5], (0.0, 0.5)), (FLAG, True, True)],
)
def test_a_value_gets_the_type_of_its_key(key, value, expected):
    converted = convert(value, key)
    assert converted == (expected, "")
    assert type(converted.value) is type(expected)


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        (INTEGER, True, "an integer"),
        (INTEGER, 1.0, "an integer"),
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
