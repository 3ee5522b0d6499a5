"""The training stream: sample i is a pure function of (seed, i).

What it is: the tokens of the corpus are divided into windows of S + 1 tokens. Neighbouring windows overlap by one
token: the last label of one is the first input of the next. Each epoch visits every window once, in an order given by a
Feistel permutation (Luby and Rackoff 1988) with (seed, epoch) as its key.
Why it is here: the state of the data is one integer, the number of samples used. Resuming is exact on any number of
processes, any sample can be read at once, and no shuffle buffer or worker process has state that must be saved.
What it costs: a few microseconds of Python per sample.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from titanlite.config.schema import ConfigError
from titanlite.data.shards import Tokens
from titanlite.distributed.watchdog import mark_phase

IGNORED = -100  # the label of a position without a target: the default ignore_index of torch's cross entropy
MASK = (1 << 64) - 1


def mix(x: int) -> int:
    """A hash of 64 bits (the finaliser of splitmix64, Steele et al. 2014)."""
    x = (x + 0x9E3779B97F4A7C15) & MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def permute(index: int, size: int, key: int) -> int:
    """A permutation of 0 .. size - 1, chosen by `key`.

    Four Feistel rounds permute the numbers of 2 * half bits. They are repeated until the result is below `size` (fewer
    than four times on average), which gives a permutation of 0 .. size - 1.
    """
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    low = (1 << half) - 1
    while True:
        left, right = index >> half, index & low
        for turn in range(4):
            left, right = right, left ^ (mix(key ^ mix(right * 4 + turn)) & low)
        index = left << half | right
        if index < size:
            return index


class Batch(NamedTuple):
    """tokens and labels (B, S), int64; labels[b, s] is the token that follows tokens[b, s], or IGNORED."""

    tokens: Tensor
    labels: Tensor


def count_targets(batches: list[Batch]) -> Tensor:
    """The number of labels that are not IGNORED in all these batches: a scalar, int64."""
    return torch.stack([(batch.labels != IGNORED).sum() for batch in batches]).sum()


class Windows:
    """The windows of the training or the validation text, in file order."""

    def __init__(self, tokens: Tokens, seq_len: int, what: str) -> None:
        """Raises ConfigError if the text is shorter than one window."""
        self.tokens, self.seq_len = tokens, seq_len
        self.count = (len(tokens) - 1) // seq_len
        if self.count < 1:
            remedies = [f"up to {len(tokens) - 1}"] * (len(tokens) > 2) + ["more text in data.path"]
            remedies += ["validation.freq = 0"] * (what == "validation")
            raise ConfigError(
                f"training.seq_len = {seq_len}: the {what} text has only {len(tokens)} tokens; "
                f"allowed: {', or '.join(remedies)}"
            )

    def batch(self, indices: list[int | None]) -> Batch:
        """The windows with these indices; None gives a row without targets, so that every process gets a batch."""
        rows = np.zeros((len(indices), self.seq_len + 1), dtype=np.int64)
        for row, index in zip(rows, indices, strict=True):
            if index is not None:
                row[:] = self.tokens.read(index * self.seq_len, self.seq_len + 1)
        labels = torch.from_numpy(rows[:, 1:].copy())
        labels[[i for i, index in enumerate(indices) if index is None]] = IGNORED
        return Batch(torch.from_numpy(rows[:, :-1].copy()), labels)


class TrainStream:
    """Batches of one data-parallel rank. Stateful: the state is the number of samples that all ranks have used."""

    def __init__(
        self, windows: Windows, *, seed: int, local_batch_size: int, accumulation: int, rank: int, world: int
    ) -> None:
        self.windows, self.seed = windows, seed
        self.local_batch_size, self.accumulation, self.rank, self.world = local_batch_size, accumulation, rank, world
        self.samples = 0

    def window_of(self, sample: int) -> int:
        """The index of the window that sample number `sample` reads."""
        epoch, index = divmod(sample, self.windows.count)
        return permute(index, self.windows.count, mix(self.seed ^ mix(epoch)))

    def next_step(self) -> list[Batch]:
        """This rank's local batches of the next optimizer step: `accumulation` times (local_batch_size, S)."""
        mark_phase("reading data", in_step=True)
        size, first = self.local_batch_size, self.samples + self.rank * self.local_batch_size
        starts = [first + i * size * self.world for i in range(self.accumulation)]
        self.samples += size * self.world * self.accumulation
        return [self.windows.batch([self.window_of(start + i) for i in range(size)]) for start in starts]

    @property
    def epochs(self) -> float:
        """The number of passes over the corpus so far."""
        return self.samples / self.windows.count

    def state_dict(self) -> dict[str, Any]:
        return {"samples": torch.tensor(self.samples)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.samples = int(state["samples"])


def validation_batches(windows: Windows, samples: int, batch_size: int, rank: int, world: int) -> Iterator[Batch]:
    """This rank's part of the first `samples` windows (0: all) of a shuffled order that is always the same.

    Every rank gets the same number of batches; the last ones may contain rows without targets.
    """
    count = min(samples or windows.count, windows.count)
    for start in range(0, count, batch_size * world):
        first = start + rank * batch_size
        indices = range(first, first + batch_size)
        yield windows.batch([permute(i, windows.count, 0) if i < count else None for i in indices])
