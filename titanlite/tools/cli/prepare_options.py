"""Options of `titanlite prepare` for what is dropped: limits of quality filters, and duplicates."""

from __future__ import annotations

import argparse
from dataclasses import fields

from titanlite.runtime.errors import ConfigError
from titanlite.tools.prepare.duplicates import THRESHOLD, DuplicateConfig
from titanlite.tools.prepare.filters import RULES, FilterConfig


def add_filter_options(parser: argparse.ArgumentParser) -> None:
    """An option for each limit, such as --min-alphabetic-ratio."""
    group = parser.add_argument_group("quality filters, each off unless it is given")
    for rule in fields(FilterConfig):
        metavar = "SHARE" if _is_share(rule.name) else "N"
        group.add_argument(
            f"--{_option(rule.name)}", type=float, metavar=metavar, help=rule.metadata["help"]
        )


def filters_from(options: argparse.Namespace) -> FilterConfig:
    """The limits that were given.

    Raises ConfigError for one that no document, or each document, would break.
    """
    given = {name: getattr(options, name) for name in RULES}
    for name, limit in given.items():
        if _is_share(name):
            highest = 1.0
            expected = "a share from 0 to 1"
        else:
            highest = float("inf")
            expected = "a number from 0 on"
        if limit is not None and not 0 <= limit <= highest:  # also for NaN
            raise ConfigError(f"--{_option(name)} = {limit:g}: expected {expected}")
    for measure in ("chars", "mean_word_length"):
        low = given[f"min_{measure}"]
        high = given[f"max_{measure}"]
        if low is not None and high is not None and low > high:
            name = _option(measure)
            raise ConfigError(
                f"--min-{name} = {low:g} is above --max-{name} = {high:g}: no document can pass"
            )
    return FilterConfig(**given)


def _is_share(rule: str) -> bool:
    return rule.endswith(("ratio", "lines", "text"))


def _option(name: str) -> str:
    return name.replace("_", "-")


def add_duplicate_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "removal of duplicates; the first document of each set is kept, "
        "one of --validation before others"
    )
    group.add_argument(
        "--drop-duplicates", choices=("none", "exact", "near"), default="none", help="default: none"
    )
    group.add_argument(
        "--near-threshold",
        type=float,
        metavar="SHARE",
        help="near duplicates have at least this estimated Jaccard similarity, from 0.5 to 1; "
        f"default: {THRESHOLD}",
    )


def duplicates_from(options: argparse.Namespace) -> DuplicateConfig:
    """Raises ConfigError for a threshold out of range or without near duplicates."""
    remove = options.drop_duplicates
    threshold = options.near_threshold
    if threshold is None:
        return DuplicateConfig(remove)
    if not 0.5 <= threshold <= 1:
        raise ConfigError(f"--near-threshold = {threshold:g}: expected a number from 0.5 to 1")
    if remove != "near":
        raise ConfigError(f"--near-threshold is for --drop-duplicates near; it is {remove!r}")
    return DuplicateConfig(remove, threshold)
