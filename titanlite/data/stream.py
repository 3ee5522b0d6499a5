"""The training stream: sample i is a pure function of (seed, i).

What it is: the tokens of a source are divided into rows of S + 1 tokens, and sample i is a row of
one of the sources. With several sources, a mixture (`mixture.py`) gives the source of sample i, and
how many of the samples before it had the same source. Each epoch of a source visits every row once,
in an order given by a Feistel permutation (Luby and Rackoff 1988) with (seed, source, epoch) as its
key.
Why it is here: the state of the data is one integer, the number of samples used. Resuming is exact
on any number of processes, any sample can be read at once, and no shuffle buffer or worker process
has state that must be saved.
What it costs: a few microseconds of Python per sample.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from titanlite.config.schema import DataConfig, TrainingConfig
from titanlite.data.prepared import PreparedData
from titanlite.data.shards import Tokens
from titanlite.distributed.watchdog import mark_phase
from titanlite.runtime.errors import ConfigError

if TYPE_CHECKING:
    from titanlite.data.mixture import Mixture
    from titanlite.data.packing import PackedRows

Array = np.ndarray[Any, Any]
# The label of a position without a target: the default ignore_index of torch's cross entropy
IGNORED = -100
MASK = (1 << 64) - 1


def mix(x: int) -> int:
    """A hash of 64 bits (the finaliser of splitmix64, Steele et al. 2014)."""
    x = (x + 0x9E3779B97F4A7C15) & MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def permute(index: int, size: int, key: int) -> int:
    """A permutation of 0 .. size - 1, chosen by `key`.

    Four Feistel rounds permute the numbers of 2 * half bits. They are repeated until the result is
    below `size` (fewer than four times on average), which gives a permutation of 0 .. size - 1.
    """
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    low = (1 << half) - 1
    while True:
        left = index >> half
        right = index & low
        for turn in range(4):
            left, right = right, left ^ (mix(key ^ mix(right * 4 + turn)) & low)
        index = left << half | right
        if index < size:
            return index


class Batch(NamedTuple):
    """tokens and labels (B, S), int64; labels[b, s] is the token that follows tokens[b, s], or
    IGNORED.

    positions (B, S), int64, only with `data.document_mask`: the position of each token in its
    document, or in the part of it that the row has. They are 0 at each start of a document and of a
    row.
    """

    tokens: Tensor
    labels: Tensor
    positions: Tensor | None = None

    def apply(self, function: Callable[[Tensor], Tensor]) -> Batch:
        """The batch with each of its tensors replaced by the function's result."""
        positions = None if self.positions is None else function(self.positions)
        return Batch(function(self.tokens), function(self.labels), positions)


def count_targets(batches: list[Batch]) -> Tensor:
    """The number of labels that are not IGNORED in all these batches: a scalar, int64."""
    return torch.stack([(batch.labels != IGNORED).sum() for batch in batches]).sum()


class Windows:
    """Documents one after the other, cut into windows. Neighbouring windows overlap by one token:
    the last label of one is the first input of the next."""

    def __init__(self, tokens: Tokens, seq_len: int, what: str) -> None:
        """Raises ConfigError if the text, which `what` describes, is shorter than one window."""
        self.tokens = tokens
        self.seq_len = seq_len
        self.count = (len(tokens) - 1) // seq_len
        if self.count < 1:
            remedies = [f"up to {len(tokens) - 1}"] * (len(tokens) > 2) + ["more text in data.path"]
            remedies += ["validation.freq = 0"] * what.startswith("validation")
            raise ConfigError(
                f"training.seq_len = {seq_len}: the {what} has only {len(tokens)} tokens; "
                f"allowed: {', or '.join(remedies)}"
            )
        # Asked once: the answer is the same for all windows
        self.masked = tokens.targets(0, 1) is not None

    def fill(self, index: int, ids: Array, ignored: Array, document_mask: bool) -> Array | None:
        """Writes window `index` to ids (S + 1,), and which labels are no targets to ignored (S,),
        at first all False.

        With `document_mask`, returns where in the window documents start.
        """
        start = index * self.seq_len
        ids[:] = self.tokens.read(start, self.seq_len + 1)
        if self.masked and (targets := self.tokens.targets(start + 1, self.seq_len)) is not None:
            np.logical_not(targets, out=ignored)
        if not document_mask:
            return None
        starts = self.tokens.document_starts(start + 1, start + self.seq_len + 1) - start
        ignored[starts - 1] = True  # the label would be the first token of another document
        return starts


Rows: TypeAlias = "Windows | PackedRows"  # the samples of a source


def document_positions(starts: Array, seq_len: int) -> Array:
    """(S,): positions that are 0 at the beginning and at each of the sorted `starts`; those from S
    on are left out.
    """
    origins = np.zeros(seq_len, np.int64)
    inside = starts[starts < seq_len]
    origins[inside] = inside
    return np.arange(seq_len) - np.maximum.accumulate(origins)


def read_batch(
    picks: Sequence[tuple[Rows, int] | None], seq_len: int, document_mask: bool
) -> Batch:
    """These rows; None gives a row without targets, so that every process gets a batch."""
    ids = np.zeros((len(picks), seq_len + 1), dtype=np.int64)
    ignored = np.zeros((len(picks), seq_len), dtype=bool)
    positions = np.tile(np.arange(seq_len), (len(picks), 1)) if document_mask else None
    for row, pick in enumerate(picks):
        if pick is None:
            ignored[row] = True
        else:
            rows, index = pick
            starts = rows.fill(index, ids[row], ignored[row], document_mask)
            if positions is not None and starts is not None:
                positions[row] = document_positions(starts, seq_len)
    labels = ids[:, 1:].copy()
    np.putmask(labels, ignored, IGNORED)
    tokens = torch.from_numpy(ids[:, :-1].copy())
    return Batch(
        tokens, torch.from_numpy(labels), None if positions is None else torch.from_numpy(positions)
    )


class Samples:
    """The order of the samples: sample number -> row of a source, a pure function of sources, seed
    and mixture.
    """

    def __init__(self, sources: dict[str, Rows], seed: int, mixture: Mixture | None = None) -> None:
        """`mixture`: with several sources, which sample is of which."""
        self.names = list(sources)
        self.rows = list(sources.values())
        self.seed = seed
        self.mixture = mixture

    def pick(self, sample: int) -> tuple[Rows, int]:
        """The source of sample number `sample`, and which of its rows it is."""
        source, number = self.mixture.locate(sample) if self.mixture else (0, sample)
        rows = self.rows[source]
        epoch, index = divmod(number, rows.count)
        return rows, permute(index, rows.count, mix(self.seed ^ mix(source << 32 | epoch)))

    def epochs(self, samples: int) -> dict[str, float]:
        """The number of passes over each source in the first `samples` samples."""
        used = self.mixture.used(samples) if self.mixture else [samples]
        return {
            name: n / rows.count for name, rows, n in zip(self.names, self.rows, used, strict=True)
        }


def build_samples(
    data: list[PreparedData], section: DataConfig, training: TrainingConfig, seed: int
) -> Samples:
    """The training samples of these sources, which are those of the section."""
    build: Callable[[Tokens, int, str], Rows] = Windows
    if section.packing == "best_fit":
        from titanlite.data.packing import PackedRows

        build = PackedRows
    rows = {
        part.name: build(part.tokens("train"), training.seq_len, f"training text of {part.name}")
        for part in data
    }
    if len(data) == 1:
        return Samples(rows, seed)
    from titanlite.data.mixture import build_mixture

    return Samples(rows, seed, build_mixture(section, training))


class TrainStream:
    """Batches of one data-parallel rank.

    Stateful: the state is the number of samples that all ranks have used.
    """

    def __init__(
        self, order: Samples, training: TrainingConfig, rank: int, world: int, document_mask: bool
    ) -> None:
        """`rank` and `world`: of the data-parallel ranks, each with its own part of every batch."""
        self.order = order
        self.training = training
        self.document_mask = document_mask
        # `step_tokens` of all ranks in the last step
        self.rank = rank
        self.world = world
        self.step_tokens = 0
        # `seconds` in `next_step` since they were last logged
        self.samples = 0
        self.seconds = 0.0
        self.begun = 0  # `samples` before the current step

    def next_step(self) -> list[Batch]:
        """This rank's local batches of the next optimizer step: (local_batch_size, S) each."""
        mark_phase("reading data", in_step=True)
        started = time.perf_counter()
        size = self.training.local_batch_size
        seq_len = self.training.seq_len
        self.begun, self.samples = self.samples, self.samples_after(1)
        starts = range(self.begun + self.rank * size, self.samples, size * self.world)
        self.step_tokens = (self.samples - self.begun) * seq_len
        picks = [[self.order.pick(start + i) for i in range(size)] for start in starts]
        batches = [read_batch(rows, seq_len, self.document_mask) for rows in picks]
        self.seconds += time.perf_counter() - started
        return batches

    def samples_after(self, steps: int) -> int:
        """The number of samples that all ranks will have used after so many more steps."""
        if not self.training.batch_ramp:
            return self.samples + steps * self.training.global_batch_size
        from titanlite.config.batch_sizes import samples_after

        return samples_after(self.training, self.samples, steps)

    def take_seconds(self) -> float:
        """Seconds spent in `next_step` since the last call."""
        seconds = self.seconds
        self.seconds = 0.0
        return seconds

    @property
    def epochs(self) -> dict[str, float]:
        """The number of passes over each source so far."""
        return self.order.epochs(self.samples)

    def state_dict(self) -> dict[str, Any]:
        return {"samples": torch.tensor(self.samples)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.samples = int(state["samples"])
        self.seconds = 0.0


def validation_batches(windows: Windows, samples: int, stream: TrainStream) -> Iterator[Batch]:
    """The first `samples` windows (0: all) of a shuffled order that is always the same, divided
    like the stream.

    Every rank gets the same number of batches; the last ones may contain rows without targets.
    """
    count = min(samples or windows.count, windows.count)
    size = stream.training.local_batch_size
    for start in range(0, count, size * stream.world):
        first = start + stream.rank * size
        picks = [
            (windows, permute(i, windows.count, 0)) if i < count else None
            for i in range(first, first + size)
        ]
        yield read_batch(picks, windows.seq_len, stream.document_mask)
