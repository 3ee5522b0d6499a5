"""Validation: bits per byte over the held-out text."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
from messages import refused
from runs import rows, train_run

from titanlite.config.schema import ValidationConfig
from titanlite.observe.validation import Sums, Validator


def test_bits_per_byte_follows_from_the_text(pool, arguments, tmp_path):
    """Over the whole held-out text: nats per token * tokens / ln 2 / bytes."""
    from titanlite.config.schema import DataConfig
    from titanlite.data.prepared_manifest import read_manifest
    from titanlite.data.shards import Tokens
    from titanlite.tokenizer.tokenizer import Tokenizer
    from titanlite.tools.prepare.cache import prepare

    assert pool.run(1, train_run, [*arguments, "--validation.samples=0", "--training.steps=1"]) == [
        0
    ]
    row = next(row for row in rows(tmp_path / "debug") if row["step"] == 0)
    path = next(a for a in arguments if a.startswith("--data.path=")).partition("=")[2]
    tokenizer = Tokenizer()
    folder = prepare(DataConfig(path=path), tokenizer, lambda message: None)
    tokens = Tokens(folder, read_manifest(folder), "validation")
    count = (len(tokens) - 1) // 64 * 64
    text = tokenizer.decode(i for i in tokens.read(1, count).tolist() if i < tokenizer.bos)
    expected = row["validation/numbers/loss"] * count / math.log(2) / len(text.encode())
    assert row["validation/numbers/bits_per_byte"] == pytest.approx(expected, rel=1e-6)
    assert row["validation/numbers/loss"] == pytest.approx(math.log(4112), abs=0.1)


def test_a_text_without_targets_is_refused(monkeypatch):
    """For example, if the first sequences are all prompts."""
    validator = object.__new__(Validator)
    validator.config = ValidationConfig(freq=1, samples=4)
    validator.windows = {"web": None}
    validator.metrics = SimpleNamespace(progress=SimpleNamespace(step=1))
    monkeypatch.setattr(Validator, "sums", lambda *arguments: Sums(0.0, 0, 0))
    with refused("validation text of web", "no targets in 4 sequences", "validation.samples"):
        validator.run(None)


def test_targets_that_encode_no_bytes_have_no_bits_per_byte(monkeypatch):
    """A mean over nothing is not a number."""
    written: list[dict[str, float]] = []
    validator = object.__new__(Validator)
    validator.config = ValidationConfig(freq=1)
    validator.windows = {"web": None}
    validator.data = [SimpleNamespace(name="web", weight=1.0)]
    validator.metrics = SimpleNamespace(
        progress=SimpleNamespace(step=1), log_validation=lambda *_: None, write=written.append
    )
    monkeypatch.setattr(Validator, "sums", lambda *arguments: Sums(3.0, 2, 0))
    assert validator.run(None) == 1.5
    assert written == [
        {"step": 1, "validation/web/loss": 1.5, "validation/web/perplexity": math.exp(1.5)}
    ]
