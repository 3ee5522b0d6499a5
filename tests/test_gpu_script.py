"""benchmarks/gpu.sh with a Python that only records how it is called: parts, marks, time limits,
results.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tarfile
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PYTHON = """#!/bin/bash
echo "$*" >> "$CALLS"
case "$*" in
    *"pip list"*) echo "pytest==1" ;;
    *first_checks*) echo begun > benchmarks/results/first.md; if [[ -n $SLOW ]]; then sleep 60; fi ;;

    *"-m gpu"*) echo "one test failed"; exit 1 ;;
esac
"""


@pytest.fixture
def script(tmp_path):
    """A copy of the script in a separate folder: (arguments, more environment) -> the process."""
    for folder in ("titanlite", "tests", "train_configs", "benchmarks", "bin", "out"):
        (tmp_path / folder).mkdir()
    (tmp_path / "train.py").write_text("")
    shutil.copy(ROOT / "benchmarks/gpu.sh", tmp_path / "benchmarks")
    (tmp_path / "bin/python3").write_text(PYTHON)
    (tmp_path / "bin/python3").chmod(0o755)
    environment = os.environ | {
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        "OUT": str(tmp_path / "out"),
    }
    environment |= {"CALLS": str(tmp_path / "calls"), "SLOW": ""}

    def start(*arguments: str, **more: str) -> subprocess.Popen:
        command = ["bash", str(tmp_path / "benchmarks/gpu.sh"), *arguments]
        output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        return subprocess.Popen(command, env=environment | more, start_new_session=True, **output)

    return start


def archived(folder: Path) -> dict[str, str]:
    """The results in the archive, by name without the date."""
    with tarfile.open(folder / "out/results.tgz") as archive:
        return {
            Path(one.name).name.split("-")[-1]: archive.extractfile(one).read().decode()
            for one in archive
        }


def test_a_finished_part_is_not_repeated_and_a_failed_one_is(script, tmp_path):
    process = script("first", "tests", "1b", "verify")
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    assert output.splitlines()[-1] == "failed: tests"
    results = archived(tmp_path)
    assert results["first.md"] == "begun\n"
    assert results["gpu_tests.txt"].splitlines()[:2] == ["== tests", "one test failed"]
    assert "ended: exit code 1" in results["gpu_tests.txt"]
    script("first", "tests", "verify").communicate(timeout=60)
    calls = (tmp_path / "calls").read_text()
    assert [calls.count(word) for word in ("first_checks", "-m gpu", "verify --quick")] == [1, 2, 1]


def test_a_part_ends_at_its_time_limit(script, tmp_path):
    output, _ = script("first", "verify", SLOW="yes", PART_SECONDS="1").communicate(timeout=30)
    assert "ended: exit code 124" in output
    assert output.splitlines()[-1] == "failed: first"
    assert archived(tmp_path)["first.md"] == "begun\n"


@pytest.mark.slow
def test_what_is_cut_off_leaves_its_results(script, tmp_path):
    """Killed with everything in it, as where time is up."""
    process = script("first", SLOW="yes")
    deadline = time.monotonic() + 60
    while not (tmp_path / "out/results.tgz").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    subprocess.run(["pkill", "-KILL", "-s", str(process.pid)], check=True)  # its session
    process.wait()
    results = archived(tmp_path)
    assert results["first.md"] == "begun\n"
    assert "ended:" not in results["gpu_first.txt"]


def test_unknown_parts_are_named(script):
    process = script("frist")
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 2
    assert "no part frist" in output
