"""`--sample N`: one in N tests, other ones for each commit, and each sometimes."""

from __future__ import annotations

from conftest import in_sample

NAMES = [f"tests/test_{number}.py::test" for number in range(600)]


def test_a_sample_has_about_its_part_of_the_tests():
    assert 150 < sum(in_sample(name, 3, "a commit") for name in NAMES) < 250
    assert all(in_sample(name, 1, "") for name in NAMES)


def test_each_test_is_in_the_sample_of_some_commit():
    commits = [f"commit {number}" for number in range(60)]
    assert all(any(in_sample(name, 3, commit) for commit in commits) for name in NAMES)
    drawn = {tuple(in_sample(name, 3, commit) for name in NAMES) for commit in commits}
    assert len(drawn) == len(commits)
