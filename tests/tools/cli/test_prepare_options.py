"""Options for what is dropped: each limit has one, and those that cannot be meant are named."""

from __future__ import annotations

import argparse

import pytest
from messages import refused

from titanlite.tools.cli.prepare_options import (
    add_duplicate_options,
    add_filter_options,
    duplicates_from,
    filters_from,
)
from titanlite.tools.prepare.duplicates import DuplicateConfig
from titanlite.tools.prepare.filters import RULES, FilterConfig


def parse_filters(*arguments: str) -> FilterConfig:
    parser = argparse.ArgumentParser()
    add_filter_options(parser)
    return filters_from(parser.parse_args(arguments))


def test_filters():
    assert parse_filters() == FilterConfig()
    given = [f"--{rule.replace('_', '-')}=0.5" for rule in RULES]
    assert parse_filters(*given) == FilterConfig(*[0.5] * len(RULES))


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--max-symbol-ratio=10"], ["--max-symbol-ratio", "10", "0 to 1"]),
        (["--min-chars=-1"], ["--min-chars", "-1", "from 0"]),
        (["--min-alphabetic-ratio=nan"], ["--min-alphabetic-ratio", "nan", "0 to 1"]),
        (["--min-chars=10", "--max-chars=9"], ["--min-chars", "10", "--max-chars", "9"]),
        (
            ["--min-mean-word-length=7", "--max-mean-word-length=3"],
            ["--min-mean-word-length", "7", "3"],
        ),
    ],
)
def test_limits_that_cannot_be_meant(arguments, parts):
    with refused(*parts):
        parse_filters(*arguments)


def parse_duplicates(*arguments: str) -> DuplicateConfig:
    parser = argparse.ArgumentParser()
    add_duplicate_options(parser)
    return duplicates_from(parser.parse_args(arguments))


def test_duplicates():
    assert parse_duplicates() == DuplicateConfig("none")
    assert parse_duplicates("--drop-duplicates", "exact") == DuplicateConfig("exact")
    assert parse_duplicates("--drop-duplicates=near") == DuplicateConfig("near", 0.55)
    assert parse_duplicates("--drop-duplicates=near", "--near-threshold=0.8").threshold == 0.8
    with refused("--near-threshold", "0.3", "0.5 to 1"):
        parse_duplicates("--drop-duplicates=near", "--near-threshold=0.3")
    with refused("--near-threshold", "--drop-duplicates near", "'exact'"):
        parse_duplicates("--drop-duplicates=exact", "--near-threshold=0.7")
