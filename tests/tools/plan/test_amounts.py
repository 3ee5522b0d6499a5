"""Amounts as text, both ways."""

import pytest

from titanlite.runtime.errors import ConfigError
from titanlite.tools.plan.amounts import amount, bytes_text, duration, seconds, short


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("2T", 2e12),
        ("300B", 3e11),
        ("1.4e12", 1.4e12),
        ("5.76E23", 5.76e23),
        ("0.5 b", 5e8),
        (".5M", 5e5),
        ("1_000_000", 1e6),
        ("1,000,000", 1e6),
        ("7", 7.0),
        (" 8k ", 8000.0),
    ],
)
def test_amounts(text, value):
    assert amount("--tokens", text) == pytest.approx(value, rel=1e-15)


@pytest.mark.parametrize(
    "text", ["", "T", "2X", "2TB", "-1", "nan", "inf", "1e999", "0", "1.2.3", "1" * 10**6]
)
def test_what_is_no_amount_is_refused_with_an_example(text):
    with pytest.raises(ConfigError, match=r"--tokens = .*expected a number above 0"):
        amount("--tokens", text)


@pytest.mark.parametrize(
    ("text", "days"),
    [("30", 30), ("30d", 30), ("30 D", 30), ("12h", 0.5), ("2w", 14), ("1.5", 1.5)],
)
def test_times(text, days):
    assert seconds("--days", text) == pytest.approx(days * 86400)


@pytest.mark.parametrize("text", ["30m", "a month", "-3d"])
def test_what_is_no_time_is_refused_with_an_example(text):
    with pytest.raises(ConfigError, match=r"--days = .*30d"):
        seconds("--days", text)


def test_no_time_at_all_is_refused():
    with pytest.raises(ConfigError, match="--days = '0d': expected a number above 0"):
        seconds("--days", "0d")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (69.28e9, "69.3B"),
        (1.386e12, "1.39T"),
        (7e9, "7.00B"),
        (999.6, "1.00K"),
        (999.6e9, "1.00T"),
        (100.0, "100"),
        (12.34, "12.3"),
        (5.76e23, "5.76e23"),
        (0.0123, "1.23e-02"),
        (0.0, "0"),
    ],
)
def test_short(value, text):
    assert short(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(45.2, "45.2 s"), (750, "12.5 min"), (11520, "3.2 h"), (2337300, "27.1 days")],
)
def test_duration(value, text):
    assert duration(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0 B"), (999, "999 B"), (4096, "4.096 kB"), (2**30, "1.074 GB"), (2.5e15, "2500 TB")],
)
def test_bytes(value, text):
    assert bytes_text(value) == text
