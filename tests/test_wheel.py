"""The wheel and the source distribution: their contents, and training from an empty folder.

No network is used.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from runs import rows

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("titanlite", "tests", "benchmarks", "docs", "train_configs", ".ci", ".github")
PATTERNS = (
    "*.py",
    "*.md",
    "*.sh",
    "requirements*.txt",
    "pyproject.toml",
    "MANIFEST.in",
    ".gitignore",
    ".pre-commit*",
)
JUNK = shutil.ignore_patterns("__pycache__", ".done", "*.egg-info")
BUILD_SDIST = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"


def command(*words: object, cwd: Path, **variables: str) -> str:
    """Runs Python with these words; returns standard output."""
    environment = {
        name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "NGPU")
    }
    result = subprocess.run(
        [sys.executable, *map(str, words)],
        cwd=cwd,
        env=environment | variables,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def sources(tmp_path_factory) -> Path:
    """A copy of the clone: a build writes beside its sources."""
    pytest.importorskip(
        "setuptools", reason="builds need setuptools: pip install -r requirements-dev.txt"
    )
    copy = tmp_path_factory.mktemp("clone")
    for name in FOLDERS:
        shutil.copytree(ROOT / name, copy / name, ignore=JUNK)
    for path in (path for pattern in PATTERNS for path in ROOT.glob(pattern)):
        shutil.copy2(path, copy)
    return copy


@pytest.fixture(scope="module")
def sdist(sources, tmp_path_factory) -> Path:
    """The source distribution, unpacked."""
    present, folder = files(sources), tmp_path_factory.mktemp("sdist")
    command("-c", BUILD_SDIST, folder, cwd=sources)
    (archive,) = folder.glob("titanlite-*.tar.gz")
    with tarfile.open(archive) as tar:
        tar.extractall(folder, filter="data")
    (unpacked,) = (path for path in folder.iterdir() if path.is_dir())
    missing = present - files(unpacked)
    assert not missing, f"MANIFEST.in names none of these: {sorted(missing)}"
    return unpacked


@pytest.fixture(scope="module")
def wheel(sdist, tmp_path_factory) -> Path:
    """The wheel, built from the source distribution as package indexes do."""
    folder = tmp_path_factory.mktemp("wheel")
    options = ("--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check")
    command("-m", "pip", "wheel", sdist, "-w", folder, *options, cwd=folder)
    (path,) = folder.glob("titanlite-*.whl")
    return path


@pytest.mark.slow
def test_the_wheel_holds_the_package_the_program_and_nothing_else(wheel):
    found = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    package = {str(path.relative_to(ROOT)) for path in (ROOT / "titanlite").rglob("*.py")}
    package |= {
        "titanlite/py.typed",
        "titanlite/tokenizer/tokenizer.model",
        "titanlite/program/train.py",
    }
    for tool in ("explain", "report"):
        static = ROOT / "titanlite/tools" / tool / "static"
        package |= {str(path.relative_to(ROOT)) for path in static.iterdir()}
    configs = {
        f"titanlite/program/train_configs/{path.name}"
        for path in (ROOT / "train_configs").glob("*.toml")
    }
    assert found == package | configs
    assert not (ROOT / "titanlite/program").exists()


@pytest.mark.slow
def test_it_trains_from_an_empty_folder(wheel, tmp_path, text_file):
    target, folder = tmp_path / "installed", tmp_path / "empty"
    folder.mkdir()
    options = ("--no-deps", "--no-index", "--disable-pip-version-check")
    command("-m", "pip", "install", wheel, "--target", target, *options, cwd=folder)
    installed = {"PYTHONPATH": str(target), "LOG_RANK": "0"}
    where = command("-c", "import titanlite; print(titanlite.__file__)", cwd=folder, **installed)
    assert Path(where.strip()).is_relative_to(target)
    section = (
        "--training.steps=2",
        "--metrics.log_freq=1",
        "--validation.freq=0",
        "--validation.prompts=",
    )
    output = command(
        "-m",
        "titanlite",
        "train",
        "debug",
        f"--data.path={text_file}",
        *section,
        cwd=folder,
        **installed,
    )
    run = folder / "outputs/debug"
    assert [row["step"] for row in rows(run)] == [1, 2]
    assert (run / "checkpoints/step-2/manifest.json").exists()
    assert "titanlite train outputs/debug --training.steps=4" in output
    assert "run_train.sh" not in output
    assert 'flavor = "cpu_25m"' in command(
        "-m", "titanlite", "train", "cpu_25m", "--print-config", cwd=folder, **installed
    )
