"""What is attached to a run in the sinks."""

from __future__ import annotations

import platform
import subprocess

import torch

from titanlite.sinks.provenance import code_version, provenance

SETTINGS = {
    "run": {"name": "x", "device": "cpu"},
    "metrics": {"mlflow_uri": "https://me:secret@host:5000/x", "sinks": ("mlflow",)},
    "training": {"steps": 6},
}


def git(folder, *arguments):
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    command = ["git", *identity, "-C", str(folder), *arguments]
    return subprocess.run(
        command, check=True, capture_output=True, text=True, timeout=60
    ).stdout.strip()


def test_settings_environment_and_no_passwords(tmp_path):
    (tmp_path / "config.toml").write_text(
        '[metrics]\nmlflow_uri = "https://me:secret@host:5000/x"\n'
    )
    found = provenance(tmp_path, {"dp_shard": 2, "tp": 2, "pp": 1, "ep": 2}, SETTINGS)
    assert found.name == tmp_path.name
    assert found.settings["training.steps"] == 6
    assert found.settings["metrics.mlflow_uri"] == "https://***@host:5000/x"
    assert found.toml == '[metrics]\nmlflow_uri = "https://***@host:5000/x"\n'
    assert found.facts["layout"] == "dp_shard 2, tp 2, ep 2"
    assert found.facts["world_size"] == "4"
    assert found.facts["device"] == "CPU"
    assert (found.facts["torch"], found.facts["python"]) == (
        torch.__version__,
        platform.python_version(),
    )


def test_the_commit_and_whether_files_differ_from_it(tmp_path):
    package = tmp_path / "titanlite"
    package.mkdir()
    (package / "__init__.py").write_text("")
    assert set(code_version(package)) == {"titanlite"}  # no checkout
    git(tmp_path, "init", "-q")
    # a checkout of something else, in which it is not tracked
    assert set(code_version(package)) == {"titanlite"}
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "first")
    found = code_version(package)
    assert (found["git_commit"], found["git_changes"]) == (git(tmp_path, "rev-parse", "HEAD"), "no")
    (package / "__init__.py").write_text("x = 1\n")
    assert code_version(package)["git_changes"] == "yes"


def test_git_is_not_asked_about_an_installed_package(tmp_path):
    """The environment may be inside a folder of data, whose .git/config may name programs that git
    runs.
    """
    package = tmp_path / ".venv/lib/site-packages/titanlite"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "first")
    hostile = tmp_path / "hostile"
    hostile.write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\n")
    hostile.chmod(0o755)
    git(tmp_path, "config", "core.fsmonitor", str(hostile))
    assert set(code_version(package)) == {"titanlite"}
    assert not (tmp_path / "ran").exists()
    git(package, "status")
    assert (tmp_path / "ran").exists()  # git itself runs it
