"""Writes what the steps and train.py train on: text.txt, bytes.model and rows.txt.

    PYTHONPATH=. python learn/steps/make_rows.py

What it is: sums with their results, a tokenizer whose ids are bytes, and the token ids of the first
20 optimizer steps in the order in which titanlite's stream takes them.
Why it is here: the steps need no titanlite, and train on the same tokens as `train.py
learn/steps/steps.toml`. The files are in the repository; a test compares them with this program.
"""

from __future__ import annotations

import base64
import random
import sys
import tempfile
from pathlib import Path

from titanlite.config.load import load_config
from titanlite.data.order import build_samples
from titanlite.data.prepared import load_sources
from titanlite.data.rows import Windows
from titanlite.tokenizer.tokenizer import Tokenizer
from titanlite.tools.prepare.cache import prepare

HERE = Path(__file__).parent


def make_text() -> str:
    """A thousand lines such as `17 + 25 = 42`, the same on every machine."""
    numbers = random.Random(0)
    lines = []
    for _ in range(1000):
        a = int(numbers.random() * 50)
        b = int(numbers.random() * 50)
        lines.append(f"{a} + {b} = {a + b}\n")
    return "".join(lines)


def make_tokenizer() -> str:
    """A rank file whose id of a token is its only byte."""
    words = (base64.b64encode(bytes([i])).decode() for i in range(256))
    return "".join(f"{word} {i}\n" for i, word in enumerate(words))


def make_rows(folder: Path) -> str:
    """One line of S + 1 token ids for each sample of the run that `steps.toml` describes."""
    files = [
        f"--data.path={folder}/text.txt",
        f"--data.tokenizer={folder}/bytes.model",
        f"--data.cache={folder}/cache",
    ]
    config = load_config([str(HERE / "steps.toml"), *files])
    tokenizer = Tokenizer(config.data.tokenizer)
    prepared = [prepare(part, tokenizer) for part in config.data.parts()]
    data = load_sources(config.data, prepared, tokenizer)
    samples = build_samples(data, config.data, config.training, config.run.seed)
    lines = []
    for sample in range(config.training.steps * config.training.global_batch_size):
        windows, index = samples.pick(sample)
        assert isinstance(windows, Windows)
        ids = windows.tokens.read(index * config.training.seq_len, config.training.seq_len + 1)
        lines.append(" ".join(map(str, ids)) + "\n")
    return "".join(lines)


def make_files(folder: Path) -> None:
    """Writes the three files into a folder."""
    (folder / "text.txt").write_text(make_text())
    (folder / "bytes.model").write_text(make_tokenizer())
    with tempfile.TemporaryDirectory() as cache:
        temporary = Path(cache)
        for name in ("text.txt", "bytes.model"):
            (temporary / name).write_bytes((folder / name).read_bytes())
        (folder / "rows.txt").write_text(make_rows(temporary))


if __name__ == "__main__":
    folder = HERE
    if len(sys.argv) > 1:
        folder = Path(sys.argv[1])
    make_files(folder)
