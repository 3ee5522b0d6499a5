"""Which slow tests run: their marks, and `--sample N`, which draws one in N for each commit."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import MARKS, ROOT, in_sample, mark_of

NAMES = [f"tests/test_{number}.py::test" for number in range(600)]


def test_a_sample_has_about_its_part_of_the_tests():
    assert 150 < sum(in_sample(name, 3, "a commit") for name in NAMES) < 250
    assert all(in_sample(name, 1, "") for name in NAMES)


def test_each_test_is_in_the_sample_of_some_commit():
    commits = [f"commit {number}" for number in range(60)]
    assert all(any(in_sample(name, 3, commit) for commit in commits) for name in NAMES)
    drawn = {tuple(in_sample(name, 3, commit) for name in NAMES) for commit in commits}
    assert len(drawn) == len(commits)


def test_the_longest_path_decides_the_mark():
    assert mark_of(Path("tools/cli/test_main.py")) == "formats"
    assert mark_of(Path("tools/plan/test_trace.py")) == "parity"
    assert mark_of(Path("e2e/test_parity.py")) == "parity"
    assert mark_of(Path("e2e/test_new.py")) == "faults"


def test_a_slow_test_without_a_mark_is_refused():
    with pytest.raises(pytest.UsageError, match=r"tests/new/test_new\.py .* MARKS"):
        mark_of(Path("new/test_new.py"))


def test_marks_belong_to_tests_that_exist():
    assert all((ROOT / "tests" / path).exists() for path in MARKS)
    assert set(MARKS.values()) == {"parity", "faults", "formats"}
