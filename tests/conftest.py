"""Fixtures of all tests: the worker pool, a fixed text, small configs; and which tests run."""

from __future__ import annotations

import functools
import hashlib
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from titanlite.tools.verify.pool import Pool

ROOT = Path(__file__).parents[1]
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["LOG_RANK"] = "none"


# Folder or file -> the mark of its slow tests; the longest path counts. docs/tests.md says after
# which change which of them are run.
MARKS = {
    "checkpoint": "faults",
    "config": "formats",
    "data": "formats",
    "distributed": "faults",
    "e2e": "faults",
    "e2e/test_batch_ramp.py": "parity",
    "e2e/test_bits.py": "parity",
    "e2e/test_conversations.py": "parity",
    "e2e/test_gpu.py": "parity",
    "e2e/test_large.py": "parity",
    "e2e/test_mixture.py": "parity",
    "e2e/test_parity.py": "parity",
    "e2e/test_sinks.py": "formats",
    "model": "parity",
    "nullgpu": "parity",
    "observe": "faults",
    "optim": "parity",
    "parallel": "parity",
    "probes": "parity",
    "runtime": "faults",
    "sinks": "formats",
    "test_architecture.py": "parity",
    "test_contributing.py": "formats",
    "test_first_hour.py": "formats",
    "test_fuzz.py": "formats",
    "test_gpu_script.py": "faults",
    "test_one_step.py": "parity",
    "test_orchestrators.py": "faults",
    "test_pictures.py": "formats",
    "test_wheel.py": "formats",
    "tokenizer": "formats",
    "tools": "formats",
    "tools/explain": "parity",
    "tools/faults": "parity",
    "tools/learn": "parity",
    "tools/plan": "parity",
    "tools/verify": "parity",
}


def pytest_itemcollected(item):
    """Gives each slow test one of the three marks."""
    if item.get_closest_marker("slow") is None:
        return
    if any(item.get_closest_marker(mark) for mark in MARKS.values()):
        raise pytest.UsageError(f"{item.nodeid}: MARKS in tests/conftest.py has its mark")
    item.add_marker(mark_of(item.path.relative_to(ROOT / "tests")))


def mark_of(path: Path) -> str:
    """The mark of the slow tests in this file of tests/."""
    for part in (path, *path.parents):
        if str(part) in MARKS:
            return MARKS[str(part)]
    raise pytest.UsageError(f"tests/{path} has slow tests: add its folder to MARKS in conftest.py")


def pytest_addoption(parser):
    parser.addoption(
        "--sample",
        type=int,
        default=1,
        metavar="N",
        help="run one in N of the selected tests, other ones for each commit",
    )


@pytest.hookimpl(trylast=True)  # after `-m` has selected
def pytest_collection_modifyitems(config, items):
    parts = config.getoption("sample")
    if parts < 1:
        raise pytest.UsageError(f"--sample {parts}: expected 1, which runs all, or more")
    seed = _commit() if parts > 1 else ""
    kept = []
    others = []
    for item in items:
        (kept if in_sample(item.nodeid, parts, seed) else others).append(item)
    config.hook.pytest_deselected(items=others)
    items[:] = kept


def in_sample(name: str, parts: int, seed: str) -> bool:
    """Whether the test of this name is in the sample of one in `parts` that `seed` draws."""
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    return int.from_bytes(digest[:8], "big") % parts == 0


def _commit() -> str:
    """The commit that is tested; empty outside a repository."""
    command = ["git", "rev-parse", "HEAD"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip()


@pytest.fixture(scope="session")
def pool():
    # Imported once, by the server that forks the workers
    return Pool(["train", "tomllib", "pytest"])


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory):
    """Prepared data of this session; nothing of the user's is read or written."""
    folder = tmp_path_factory.mktemp("cache")
    os.environ["TITANLITE_CACHE"] = str(folder)
    return folder


@pytest.fixture
def section(tmp_path) -> Any:
    """The `[data]` of a small text."""
    from titanlite.config.schema import DataConfig

    (tmp_path / "one.txt").write_text("x = 1\n" * 1000)
    return DataConfig(path=str(tmp_path / "one.txt"), cache=str(tmp_path / "cache"))


@pytest.fixture
def folder(section) -> Path:
    """The prepared folder of that text."""
    from titanlite.tokenizer.tokenizer import Tokenizer
    from titanlite.tools.prepare.cache import prepare

    return prepare(section, Tokenizer(), lambda text: None)


@pytest.fixture(scope="session")
def text_file(tmp_path_factory) -> Path:
    """150 kB of text that is the same everywhere and has something to learn."""
    path = tmp_path_factory.mktemp("text") / "numbers.py"
    blocks = (
        f"def add_{i}(x):\n    y = x + {i * i % 97}\n    return y * {i % 7}\n\n\n"
        for i in range(2600)
    )
    path.write_text("".join(blocks))
    return path


@pytest.fixture(scope="session")
def options(text_file) -> list[str]:
    """Command-line arguments of a run that takes a second: the debug config, made smaller."""
    return [
        "debug",
        "--validation.prompts=",
        f"--data.path={text_file}",
        "--model.dim=32",
        "--model.num_layers=2",
        "--model.ffn_dim=64",
        "--training.seq_len=64",
        "--training.steps=6",
        "--training.global_batch_size=8",
        "--training.local_batch_size=2",
        "--schedule.warmup_steps=2",
        "--metrics.log_freq=1",
        "--checkpoint.freq=0",
        "--validation.freq=3",
        "--validation.samples=21",
        "--compile.enabled=false",
    ]


@pytest.fixture
def arguments(options, tmp_path) -> list[str]:
    """The arguments of a run whose folder is this test's."""
    return [*options, f"--run.folder={tmp_path}"]


@pytest.fixture(scope="session")
def whole_run(pool, options, tmp_path_factory) -> Callable[..., Path]:
    """More options -> the folder of a run with these, on one process and never interrupted.

    Each is run once.
    """
    from runs import train_run  # with torch, which not every test needs

    @functools.cache
    def run(*more: str) -> Path:
        folder = tmp_path_factory.mktemp("whole")
        assert pool.run(1, train_run, [*options, f"--run.folder={folder}", *more]) == [0]
        return folder / "debug"

    return run
