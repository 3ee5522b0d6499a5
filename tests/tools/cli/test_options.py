"""Options of several commands."""

from __future__ import annotations

import argparse

import pytest
from messages import assert_mentions

from titanlite.runtime.errors import ConfigError
from titanlite.tools.cli.options import StrictParser, at_least


def test_numbers_have_bounds():
    port = at_least(int, 0, 65535)
    assert port("0") == 0
    assert at_least(float, 0.5)("0.75") == 0.75
    for text, expected in (("65536", "at most 65535"), ("-1", "at least 0"), ("x", "a number")):
        with pytest.raises(argparse.ArgumentTypeError, match=expected):
            port(text)


def test_an_unknown_option_is_a_config_error_with_the_nearest_one():
    parser = StrictParser(prog="x")
    parser.add_argument("--number", type=int, default=3)
    assert parser.parse_args(["--number=4"]).number == 4
    with pytest.raises(ConfigError) as caught:
        parser.parse_args(["--numbr=4", "--other"])
    assert len(caught.value.problems) == 2
    assert_mentions(str(caught.value), "--numbr=4", "did you mean --number?", "--other")
    with pytest.raises(ConfigError, match="invalid int value"):
        parser.parse_args(["--number=x"])
