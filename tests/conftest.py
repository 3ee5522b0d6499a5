"""What tests share: the worker pool, a fixed text, and small configs made from it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from titanlite.verify.pool import Pool

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["LOG_RANK"] = "none"


@pytest.fixture(scope="session")
def pool():
    return Pool(["train", "tomllib"])


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory):
    """Prepared data of this session; nothing of the user's is read or written."""
    folder = tmp_path_factory.mktemp("cache")
    os.environ["TITANLITE_CACHE"] = str(folder)
    return folder


@pytest.fixture(scope="session")
def text_file(tmp_path_factory) -> Path:
    """150 kB of text that is the same everywhere and has something to learn."""
    path = tmp_path_factory.mktemp("text") / "numbers.py"
    blocks = (f"def add_{i}(x):\n    y = x + {i * i % 97}\n    return y * {i % 7}\n\n\n" for i in range(2600))
    path.write_text("".join(blocks))
    return path


@pytest.fixture
def arguments(text_file, tmp_path):
    """Command-line arguments of a run that takes a second: the debug config, made smaller."""
    return [
        "debug",
        f"--run.folder={tmp_path}",
        "--run.sample_tokens=0",
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
