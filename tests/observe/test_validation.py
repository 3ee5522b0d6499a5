"""Validation: bits per byte over the held-out text."""

from __future__ import annotations

import math

import pytest
from runs import rows, train_run


def test_bits_per_byte_follows_from_the_text(pool, arguments, tmp_path):
    """Over the whole held-out text: nats per token * tokens / ln 2 / bytes."""
    from titanlite.config.schema import DataConfig
    from titanlite.data.prepare import prepare
    from titanlite.data.shards import Tokens, read_manifest
    from titanlite.data.tokenizer import Tokenizer

    assert pool.run(1, train_run, [*arguments, "--validation.samples=0", "--training.steps=1"]) == [0]
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
