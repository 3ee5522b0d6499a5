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


def test_a_subcommand_suggests_its_own_options():
    parser = StrictParser(prog="x")
    parser.add_argument("--lost", action="store_true")
    commands = parser.add_subparsers(dest="command", required=True)
    keep = commands.add_parser("prune")
    keep.add_argument("run")
    keep.add_argument("--keep", type=int, required=True)
    for words, expected in (
        (["prune", "a", "--keep=1", "--kep", "3"], ["option --kep; did you mean --keep?"]),
        (["prune", "a", "--kep", "3"], ["required: --keep", "option --kep; did you mean --keep?"]),
        (["prune", "a", "b", "--keep=1"], ["unexpected argument 'b'"]),
    ):
        with pytest.raises(ConfigError) as caught:
            parser.parse_args(words)
        assert len(caught.value.problems) == len(expected)
        assert_mentions(str(caught.value), *expected)


def test_words_of_a_config_are_left_and_options_are_not():
    parser = StrictParser(prog="x", allow_abbrev=False)
    parser.add_argument("--gpus", type=int)
    options, rest = parser.parse_beside_config(["debug", "--gpus=2", "--training.steps=3"])
    assert (options.gpus, rest) == (2, ["debug", "--training.steps=3"])
    with pytest.raises(ConfigError, match="unknown option --gps; did you mean --gpus"):
        parser.parse_beside_config(["debug", "--gps", "2"])
