"""setup_env.sh: which interpreter the environment has, with another python3 on PATH at each call.

The interpreters are shell scripts that note how they are called.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# As python, in the calls that setup_env.sh makes. `- FILE` asks whether packages are installed
INTERPRETER = """#!/bin/bash
echo "NAME $*" >> CALLS
case "$*" in
  "- "*) exit 1 ;;
  "-I -c import pip") [ ! -e "$(dirname "$0")/broken" ] ;;
  "-I -m venv "*) rm -rf "${@: -1}"; mkdir -p "${@: -1}/bin"; cp "$0" "${@: -1}/bin/python" ;;
esac
"""


@pytest.fixture
def clone(tmp_path):
    """A folder with setup_env.sh and the requirements."""
    for name in ("setup_env.sh", "requirements.txt", "requirements-dev.txt"):
        shutil.copy(ROOT / name, tmp_path)
    return tmp_path


def set_up(clone: Path, name: str, requirements: str) -> list[str]:
    """What the interpreters are told, if `python3` on PATH is the one of this name."""
    folder = clone / name
    folder.mkdir(exist_ok=True)
    calls = clone / "calls"
    calls.unlink(missing_ok=True)
    for command in ("python3", "python"):
        path = folder / command
        path.write_text(INTERPRETER.replace("NAME", name).replace("CALLS", str(calls)))
        path.chmod(0o755)
    script = f"source {clone}/setup_env.sh; setup_env {requirements} && echo $PYTHON"
    result = subprocess.run(
        ["bash", "-c", script],
        env={"PATH": f"{folder}:/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout.strip() == str(clone / ".venv/bin/python")
    return [line for line in calls.read_text().splitlines() if " -m " in line]


def test_another_interpreter_on_path_uses_the_environment_that_is_there(clone):
    made, filled = set_up(clone, "first", "requirements.txt")
    assert made == f"first -I -m venv --clear {clone}/.venv"
    assert filled.startswith("first -I -m pip install")
    (more,) = set_up(clone, "second", "requirements-dev.txt")
    assert more.startswith("first -I -m pip install")
    assert more.endswith("requirements-dev.txt")


def test_an_environment_whose_pip_is_broken_is_made_anew(clone):
    set_up(clone, "first", "requirements.txt")
    (clone / ".venv/bin/broken").touch()
    made, filled = set_up(clone, "second", "requirements-dev.txt")
    assert made == f"second -I -m venv --clear {clone}/.venv"
    assert filled.startswith("second -I -m pip install")
    assert not (clone / ".venv/bin/broken").exists()
