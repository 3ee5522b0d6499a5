"""The number of chunks that the size of the logits asks for."""

from __future__ import annotations

import pytest

from titanlite.config.load import load_config
from titanlite.rules.degrees import AXES
from titanlite.rules.loss_chunks import loss_chunks

VOCABULARY = 128256


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["training.local_batch_size=1"], 8),  # 4.2 GB: 525 MB each
        (["training.local_batch_size=1", "loss.num_chunks=1"], 1),  # off
        (["training.local_batch_size=1", "loss.num_chunks=3"], 3),
        (["training.local_batch_size=2"], 16),
        (["training.local_batch_size=1", "training.seq_len=1949"], 1),  # 1 GB less 76 KB
        (["training.local_batch_size=1", "training.seq_len=1950"], 2),
        (["training.local_batch_size=4", "parallel.cp=2"], 16),
        (["training.local_batch_size=2", "parallel.tp=8"], 2),
        (["training.local_batch_size=8", "parallel.pp=4"], 8),  # of a microbatch
        (["training.local_batch_size=8", "parallel.pp=4", "parallel.pp_microbatch_size=2"], 16),
    ],
    ids=str,
)
def test_a_chunk_is_at_most_a_gigabyte(arguments, expected):
    config = load_config(
        ["debug", "--training.seq_len=8192", *(f"--{argument}" for argument in arguments)]
    )
    degrees = {axis: max(1, getattr(config.parallel, axis)) for axis in AXES}
    assert loss_chunks(config, VOCABULARY, degrees) == expected
