"""Checks that error messages say what a reader needs: the key, the value found, what is allowed.

The rest of a sentence is free to change.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from titanlite.runtime.errors import ConfigError


def assert_mentions(text: str, *parts: str) -> None:
    """Asserts that each of the parts is in the text."""
    missing = [part for part in parts if part not in text]
    assert not missing, f"not mentioned: {missing}\nin: {text}"


@contextlib.contextmanager
def refused(*parts: str, error: type[BaseException] = ConfigError) -> Iterator[None]:
    """Asserts that the block raises `error` with a message that mentions each of the parts."""
    with pytest.raises(error) as caught:
        yield
    assert_mentions(str(caught.value), *parts)


@contextlib.contextmanager
def run_refused(*parts: str) -> Iterator[None]:
    """Does what `refused` does, for a run on the worker pool, where a ConfigError comes back within a stack
    trace.
    """
    with pytest.raises(AssertionError) as caught:
        yield
    _, raised, message = str(caught.value).rpartition("ConfigError: ")
    assert raised, caught.value
    assert_mentions(message, *parts)
