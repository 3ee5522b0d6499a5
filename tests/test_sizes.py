"""What benchmarks/sizes.py counts as a line of code."""

import runpy
from pathlib import Path

SIZES = runpy.run_path(str(Path(__file__).parents[1] / "benchmarks/sizes.py"))
SOURCE = '''"""What it is."""

# A comment
x = 1  # another


def f():
    """Doc,
    of two lines."""
    return (
        x
    )
'''


def test_comments_docstrings_and_blank_lines_are_no_code():
    assert SIZES["lines_of_code"](SOURCE) == 5


def test_a_row_that_one_checkout_lacks_is_a_dash():
    lines = SIZES["table"]("words", [{"a": 1200, "gone": 3}, {"a": 7}])
    assert lines == [
        "| words | before | after |",
        "|---|---:|---:|",
        "| a | 1,200 | 7 |",
        "| gone | 3 | - |",
        "",
    ]
