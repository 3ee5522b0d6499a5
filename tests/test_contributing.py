"""What CONTRIBUTING.md says is so: the files it names exist, and its diffs apply to this tree and
work.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / "CONTRIBUTING.md").read_text()
# The diff below each heading: no other heading may stand between the two
DIFFS = dict(
    re.findall(r"^### (.+)\n(?:(?!### ).*\n)*?```diff\n((?:.*\n)*?)```$", TEXT, re.MULTILINE)
)
TREE = (
    "titanlite",
    "tests",
    "benchmarks",
    "docs",
    "learn",
    "train_configs",
    "train.py",
    "setup.py",
    "pyproject.toml",
)

needs_git = pytest.mark.skipif(not shutil.which("git"), reason="needs git, which applies the diffs")


def apply(diff: str, folder: Path, *options: str) -> None:
    """Applies a diff to a folder, whether that is a repository or not."""
    # Not one that is around it
    environment = {**os.environ, "GIT_CEILING_DIRECTORIES": str(folder.parent)}
    command = ["git", "apply", "--verbose", *options, "-"]
    result = subprocess.run(
        command, cwd=folder, input=diff, env=environment, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    assert result.stderr.count("Checking patch") == diff.count("diff --git"), result.stderr


def test_the_topics_with_a_diff():
    assert list(DIFFS) == ["a learning-rate schedule", "a model variation", "a parallel technique"]
    assert TEXT.count("```diff") == len(DIFFS)


def test_it_names_existing_files():
    prose = re.sub(r"^```diff\n.*?^```$", "", TEXT, flags=re.MULTILINE | re.DOTALL)
    names = set(
        re.findall(r"(?<![\w/])((?:titanlite|tests|docs|train_configs|\.ci)/[\w./-]*\w)", prose)
    )
    names |= set(re.findall(r"[\w-]+\.(?:py|sh|md|txt)\b", prose)) & {
        path.name for path in ROOT.iterdir()
    }
    names |= set(re.findall(r"\]\(([^)]+)\)", prose))
    names |= set(re.findall(r"\./(\w+\.sh)", prose))
    assert len(names) >= 15
    assert not [name for name in sorted(names) if not (ROOT / name).exists()]


@needs_git
@pytest.mark.parametrize("topic", DIFFS)
def test_a_diff_applies_to_this_tree(topic):
    apply(DIFFS[topic], ROOT, "--check")


@pytest.mark.slow
@needs_git
def test_the_diffs_work_together(tmp_path):
    """Their tests pass in a copy of the tree, and so do lint, types and the layout that is said to
    prove the last.
    """
    for name in TREE:
        if (ROOT / name).is_dir():
            shutil.copytree(
                ROOT / name,
                tmp_path / name,
                ignore=shutil.ignore_patterns("__pycache__", "results"),
            )
        else:
            shutil.copy2(ROOT / name, tmp_path)
    for diff in DIFFS.values():
        apply(diff, tmp_path)
    tests = sorted(set(re.findall(r"^\+\+\+ b/(tests/.+)$", TEXT, re.MULTILINE)))
    assert len(tests) == len(DIFFS)
    # Without what finds this repository in place of the copy in the current folder
    paths = ("PYTHONPATH", "PYTHONSAFEPATH")
    environment = {name: value for name, value in os.environ.items() if name not in paths}
    for command in (
        ["pytest", *tests],
        ["ruff", "check", "."],
        ["ruff", "format", "--check", "."],
        ["mypy"],
        ["titanlite", "verify", "debug", "--layout", "dp_shard=2,blocks_per_unit=3"],
    ):
        result = subprocess.run(
            [sys.executable, "-m", *command],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=900,
        )
        assert result.returncode == 0, f"{command}: {result.stdout}{result.stderr}"
