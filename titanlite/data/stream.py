"""The training stream: the local batches of each step, for one data-parallel rank.

What it is: the samples in their order (`order.py`), read as batches (`rows.py`) and divided over
the data-parallel ranks. Validation divides its rows in the same way.
Why it is here: the state of the data is one integer, the number of samples used, so resuming is
exact on any number of processes.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from titanlite.config.batch_sizes import samples_after
from titanlite.config.schema import TrainingConfig
from titanlite.data.excluded import Range
from titanlite.data.order import Samples, dropout_keys, permute
from titanlite.data.packing import PackedRows
from titanlite.data.rows import Batch, Rows, Windows, read_batch
from titanlite.runtime.phases import Phase, mark_phase


class DataRanks(Protocol):
    """The attributes of `Mesh` that the stream reads. The data-parallel ranks share every batch."""

    @property
    def data_rank(self) -> int: ...

    @property
    def data_size(self) -> int: ...


class TrainStream:
    """The batches of one data-parallel rank.

    Stateful: the state is the number of samples that all ranks have used.
    """

    def __init__(
        self,
        samples: Samples,
        training: TrainingConfig,
        mesh: DataRanks,
        document_mask: bool,
        dropout: bool = False,
    ) -> None:
        """`dropout`: whether batches have keys for dropout masks."""
        self.order = samples
        self.training = training
        self.document_mask = document_mask
        self.dropout = dropout
        self.data_rank = mesh.data_rank
        self.data_size = mesh.data_size

        self.samples = 0  # samples used by all ranks, without excluded ones
        self.begun = 0  # `samples` before the current step
        self.step_positions = 0  # of all ranks in the last step: tokens and padding
        self.seconds = 0.0  # time in `next_step` since the last log

    def next_step(self) -> list[Batch]:
        """Reads this rank's local batches of the next step: (local_batch_size, S) each."""
        mark_phase(Phase.READ_DATA)
        started = time.perf_counter()
        size = self.training.local_batch_size
        seq_len = self.training.seq_len
        self.begun = self.samples
        self.samples = samples_after(self.training, self.samples, 1)
        self.step_positions = (self.samples - self.begun) * seq_len

        # Local batches are dealt to the ranks in turn: 0, 1, ..., data_size - 1, 0, ...
        first = self.begun + self.data_rank * size
        batches = []
        for start in range(first, self.samples, size * self.data_size):
            numbers = [self.order.number(position) for position in range(start, start + size)]
            picks = [self.order.pick(number) for number in numbers]
            batch = read_batch(picks, seq_len, self.document_mask)
            if self.dropout:
                keys = dropout_keys(self.order.seed, numbers, seq_len)
                batch = batch._replace(dropout_keys=keys)
            batches.append(batch)
        self.seconds += time.perf_counter() - started
        return batches

    @property
    def step_samples(self) -> range:
        """The sample numbers of the current step, from the first to the last of all ranks."""
        first = self.order.number(self.begun)
        last = self.order.number(self.samples - 1)
        return range(first, last + 1)

    def take_seconds(self) -> float:
        """Returns the seconds spent in `next_step` since the last call, and resets them."""
        seconds = self.seconds
        self.seconds = 0.0
        return seconds

    def exclude(self, ranges: Sequence[Range]) -> None:
        """Skips these sample numbers too, from the current position on."""
        self.order = self.order.without(ranges)

    @property
    def epochs(self) -> dict[str, float]:
        """Computes the number of passes over each source so far."""
        return self.order.epochs(self.order.number(self.samples))

    def state_dict(self) -> dict[str, Tensor]:
        return {"samples": torch.tensor(self.samples)}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.samples = int(state["samples"])
        self.seconds = 0.0


def validation_batches(
    windows: Windows | PackedRows, samples: int, stream: TrainStream
) -> Iterator[Batch]:
    """Yields the first `samples` windows (0: all) of a fixed shuffled order, as batches.

    Ranks share them as they share the stream. Every rank gets the same number of batches; the last
    ones may contain rows without targets.
    """
    count = windows.count
    if samples:
        count = min(samples, count)
    size = stream.training.local_batch_size
    for start in range(0, count, size * stream.data_size):
        first = start + stream.data_rank * size
        # Rows after the last window stay None, so that all ranks run the same number of collectives
        picks: list[tuple[Rows, int] | None] = [None] * size
        for b, i in enumerate(range(first, min(first + size, count))):
            picks[b] = (windows, permute(i, windows.count, 0))
        yield read_batch(picks, windows.seq_len, stream.document_mask)
