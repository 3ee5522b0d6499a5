"""The training stream: sample i is a pure function of (seed, i).

What it is: the tokens of a source are cut into rows of S + 1 tokens, and sample i is a row of one
of the sources. A row has S inputs and S labels, so neighbouring rows overlap by one token. A
mixture (`mixture.py`) gives the source of sample i, and how many of the samples before it had the
same source. Each epoch of a source visits every row once, in an order given by a Feistel
permutation (Luby and Rackoff 1988) with (seed, source, epoch) as its key.
Why it is here: the state of the data is one integer, the number of samples used. Resuming is exact
on any number of processes, any sample can be read at once, and no shuffle buffer or worker process
has state that must be saved.
What it costs: a few microseconds of Python per sample.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from titanlite.config.batch_sizes import samples_after
from titanlite.config.schema import DataConfig, TrainingConfig
from titanlite.data.excluded import Range, merge_ranges, sample_number
from titanlite.data.mixture import Mixture, build_mixture
from titanlite.data.packing import PackedRows
from titanlite.data.prepared import PreparedData
from titanlite.data.shards import Array, Tokens
from titanlite.runtime.errors import ConfigError
from titanlite.runtime.phases import Phase, mark_phase

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
    half = max(1, ((size - 1).bit_length() + 1) // 2)  # bits
    low = (1 << half) - 1  # the mask of the lower half
    while True:
        left = index >> half
        right = index & low
        for turn in range(4):
            mixed = mix(key ^ mix(right * 4 + turn)) & low
            next_right = left ^ mixed
            left = right
            right = next_right
        index = left << half | right
        if index < size:  # else permute the result again: this stays a bijection
            return index


class Batch(NamedTuple):
    """tokens and labels (B, S), int64; labels[b, s] is the token after tokens[b, s], or IGNORED.

    positions (B, S), int64, only with `data.document_mask`: the position of each token in its
    document, or in the part of it that the row has. They are 0 at each start of a document and of a
    row.
    dropout_keys (B, S), int64, only for training with `lora.dropout`: a hash of seed, sample and
    place in the row, on which the token's masks depend.
    """

    tokens: Tensor
    labels: Tensor
    positions: Tensor | None = None
    dropout_keys: Tensor | None = None

    def apply(self, function: Callable[[Tensor], Tensor]) -> Batch:
        """The batch with each of its tensors replaced by the function's result."""
        batch = Batch(function(self.tokens), function(self.labels))
        if self.positions is not None:
            batch = batch._replace(positions=function(self.positions))
        if self.dropout_keys is not None:
            batch = batch._replace(dropout_keys=function(self.dropout_keys))
        return batch


def count_targets(batches: list[Batch]) -> Tensor:
    """The number of labels that are not IGNORED in all these batches: a scalar, int64."""
    counts = [(batch.labels != IGNORED).sum() for batch in batches]
    return torch.stack(counts).sum()


class Rows(Protocol):
    """The rows of one source."""

    @property
    def count(self) -> int:
        """The number of rows, which is that of an epoch."""

    def fill(self, index: int, ids: Array, ignored: Array, document_mask: bool) -> Array | None:
        """Writes row `index` to ids (S + 1,), and to ignored (S,) which labels are no targets.

        `ignored` is all False at first. With `document_mask`, returns where in the row documents
        start.
        """


class Windows:
    """Documents one after the other, cut into windows of S + 1 tokens.

    Neighbouring windows overlap by one token: the last label of one is the first input of the next.
    """

    def __init__(self, tokens: Tokens, seq_len: int, description: str) -> None:
        """`description`: of the text, for messages, such as "training text of books".

        Raises ConfigError if it is shorter than one window.
        """
        self.tokens = tokens
        self.seq_len = seq_len
        self.count = (len(tokens) - 1) // seq_len
        if self.count < 1:
            raise ConfigError(_too_short(len(tokens), seq_len, description))
        self.masked = tokens.targets(0, 1) is not None  # the same for all windows

    def fill(self, index: int, ids: Array, ignored: Array, document_mask: bool) -> Array | None:
        """Writes window `index`, as `Rows.fill` says."""
        start = index * self.seq_len
        ids[:] = self.tokens.read(start, self.seq_len + 1)
        if self.masked:
            targets = self.tokens.targets(start + 1, self.seq_len)
            assert targets is not None
            np.logical_not(targets, out=ignored)
        if not document_mask:
            return None
        starts = self.tokens.document_starts(start + 1, start + self.seq_len + 1) - start
        ignored[starts - 1] = True  # the label would be the first token of another document
        return starts


def _too_short(num_tokens: int, seq_len: int, description: str) -> str:
    """The message about a text of too few tokens for one window."""
    remedies = ["more text in data.path"]
    if num_tokens > 2:
        remedies.insert(0, f"up to {num_tokens - 1}")
    if description.startswith("validation"):
        remedies.append("validation.freq = 0")
    return (
        f"training.seq_len = {seq_len}: the {description} has only {num_tokens} tokens; "
        f"allowed: {', or '.join(remedies)}"
    )


def document_positions(starts: Array, seq_len: int) -> Array:
    """(S,): the position of each token in its document, where documents start at sorted `starts`.

    Position 0 is also that of the first token; starts from S on are left out.
    """
    origins = np.zeros(seq_len, np.int64)
    inside = starts[starts < seq_len]
    origins[inside] = inside
    origins = np.maximum.accumulate(origins)  # the start of each token's document
    return np.arange(seq_len) - origins


def read_batch(
    picks: Sequence[tuple[Rows, int] | None], seq_len: int, document_mask: bool
) -> Batch:
    """These rows; None gives a row without targets, so that every process gets a batch."""
    size = len(picks)  # B
    ids = np.zeros((size, seq_len + 1), dtype=np.int64)
    ignored = np.zeros((size, seq_len), dtype=bool)
    positions = np.tile(np.arange(seq_len), (size, 1))
    for b, pick in enumerate(picks):
        if pick is None:
            ignored[b] = True
            continue
        rows, index = pick
        starts = rows.fill(index, ids[b], ignored[b], document_mask)
        if document_mask and starts is not None:
            positions[b] = document_positions(starts, seq_len)
    labels = ids[:, 1:].copy()  # (B, S)
    np.putmask(labels, ignored, IGNORED)
    tokens = ids[:, :-1].copy()  # (B, S)
    batch = Batch(torch.from_numpy(tokens), torch.from_numpy(labels))
    if document_mask:
        batch = batch._replace(positions=torch.from_numpy(positions))
    return batch


def dropout_keys(seed: int, samples: Sequence[int], seq_len: int) -> Tensor:
    """The keys of the tokens of these sample numbers: (B, S), from 0 to 2^63 - 1.

    Rows have hashes of their own, so equal keys of different samples are not to be expected.
    """
    rows = [mix(seed ^ mix(sample)) >> 1 for sample in samples]
    return torch.tensor(rows)[:, None] ^ torch.arange(seq_len)


class Samples:
    """The order of the samples: sample number -> row of a source.

    A pure function of sources, seed and mixture. Excluded ranges of sample numbers are left out of
    the stream: its position p is the p-th sample that is not excluded.
    """

    def __init__(
        self,
        sources: Mapping[str, Rows],
        seed: int,
        mixture: Mixture,
        excluded: Sequence[Range] = (),
    ) -> None:
        """`sources`: in the mixture's order. `excluded` may be in any order, and overlap."""
        self.names = list(sources)
        self.rows = list(sources.values())
        self.seed = seed
        self.mixture = mixture
        self.excluded = merge_ranges(excluded)

    def without(self, ranges: Sequence[Range]) -> Samples:
        """The same samples, with these ranges excluded too."""
        sources = dict(zip(self.names, self.rows, strict=True))
        return Samples(sources, self.seed, self.mixture, [*self.excluded, *ranges])

    def number(self, position: int) -> int:
        """The sample number at a position of the stream."""
        return sample_number(position, self.excluded)

    def pick(self, sample: int) -> tuple[Rows, int]:
        """The source of sample number `sample`, and which of its rows it is."""
        source, number = self.mixture.locate(sample)
        rows = self.rows[source]
        epoch, index = divmod(number, rows.count)
        # Each epoch of each source has its own order
        key = mix(self.seed ^ mix(source << 32 | epoch))
        return rows, permute(index, rows.count, key)

    def epochs(self, samples: int) -> dict[str, float]:
        """The number of passes over each source in the first `samples` sample numbers."""
        used = self.mixture.used(samples)
        passes = [number / rows.count for number, rows in zip(used, self.rows, strict=True)]
        return dict(zip(self.names, passes, strict=True))


def build_samples(
    data: list[PreparedData], section: DataConfig, training: TrainingConfig, seed: int
) -> Samples:
    """The training samples of these sources, which are those of the section."""
    rows: dict[str, Rows] = {}
    for part in data:
        tokens = part.tokens("train")
        description = f"training text of {part.name}"
        if section.packing == "best_fit":
            rows[part.name] = PackedRows(tokens, training.seq_len, description)
        else:
            rows[part.name] = Windows(tokens, training.seq_len, description)
    return Samples(rows, seed, build_mixture(section, training))


class DataRanks(Protocol):
    """What the stream reads of the `Mesh`: the data-parallel ranks, which share every batch."""

    @property
    def data_rank(self) -> int: ...

    @property
    def data_size(self) -> int: ...


class TrainStream:
    """Batches of one data-parallel rank.

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
        """`dropout`: its batches have keys for the masks."""
        self.order = samples
        self.training = training
        self.document_mask = document_mask
        self.dropout = dropout
        self.data_rank = mesh.data_rank
        self.data_size = mesh.data_size

        self.samples = 0  # used by all ranks; excluded ones are not counted
        self.begun = 0  # `samples` before the current step
        self.step_tokens = 0  # of all ranks in the last step
        self.seconds = 0.0  # in `next_step` since they were last logged

    def next_step(self) -> list[Batch]:
        """This rank's local batches of the next optimizer step: (local_batch_size, S) each."""
        mark_phase(Phase.READ_DATA)
        started = time.perf_counter()
        size = self.training.local_batch_size
        seq_len = self.training.seq_len
        self.begun = self.samples
        self.samples = self.samples_after(1)
        self.step_tokens = (self.samples - self.begun) * seq_len

        # Each local batch of the step goes to the next rank: 0, 1, ..., data_size - 1, 0, ...
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

    def samples_after(self, steps: int) -> int:
        """The number of samples that all ranks will have used after so many more steps."""
        return samples_after(self.training, self.samples, steps)

    def take_seconds(self) -> float:
        """Seconds spent in `next_step` since the last call."""
        seconds = self.seconds
        self.seconds = 0.0
        return seconds

    def exclude(self, ranges: Sequence[Range]) -> None:
        """Leaves these sample numbers out too, from the current position on."""
        self.order = self.order.without(ranges)

    @property
    def epochs(self) -> dict[str, float]:
        """The number of passes over each source so far."""
        return self.order.epochs(self.order.number(self.samples))

    def state_dict(self) -> dict[str, Tensor]:
        return {"samples": torch.tensor(self.samples)}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.samples = int(state["samples"])
        self.seconds = 0.0


def validation_rows(tokens: Tokens, seq_len: int, description: str) -> Windows | PackedRows:
    """The windows of a validation text; of one that is shorter than a window, a row with padding.

    Raises ConfigError if it has less than two tokens.
    """
    if 2 <= len(tokens) <= seq_len:
        return PackedRows(tokens, seq_len, description)
    return Windows(tokens, seq_len, description)


def validation_batches(
    windows: Windows | PackedRows, samples: int, stream: TrainStream
) -> Iterator[Batch]:
    """The first `samples` windows (0: all) of a shuffled order that is always the same.

    They are divided over the ranks as the stream is. Every rank gets the same number of batches;
    the last ones may contain rows without targets.
    """
    count = windows.count
    if samples:
        count = min(samples, count)
    size = stream.training.local_batch_size
    for start in range(0, count, size * stream.data_size):
        first = start + stream.data_rank * size
        # Beyond the last window rows stay None, so that all ranks run equally many collectives
        picks: list[tuple[Rows, int] | None] = [None] * size
        for b, i in enumerate(range(first, min(first + size, count))):
            picks[b] = (windows, permute(i, windows.count, 0))
        yield read_batch(picks, windows.seq_len, stream.document_mask)
