"""The order of the training samples: sample i is a pure function of (seed, i).

What it is: sample i is a row of one of the sources. A mixture (`mixture.py`) gives the source of
sample i, and how many of the samples before it had the same source. Each epoch of a source visits
every row once, in an order given by a Feistel permutation (Luby and Rackoff 1988) with (seed,
source, epoch) as its key.
Why it is here: any process can read any sample directly, and there is no shuffle buffer or worker
process whose state would have to be saved.
What it costs: a few microseconds of Python per sample.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from titanlite.config.schema import DataConfig, TrainingConfig
from titanlite.data.excluded import Range, merge_ranges, sample_number
from titanlite.data.mixture import Mixture, build_mixture
from titanlite.data.packing import PackedRows
from titanlite.data.prepared import PreparedData
from titanlite.data.rows import Rows, Windows

MASK = (1 << 64) - 1


def mix(x: int) -> int:
    """Hashes 64 bits (the finaliser of splitmix64, Steele et al. 2014)."""
    x = (x + 0x9E3779B97F4A7C15) & MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def permute(index: int, size: int, key: int) -> int:
    """Permutes 0 .. size - 1; `key` selects the permutation.

    Four Feistel rounds permute the numbers of 2 * half bits. They are repeated until the result is
    below `size` (fewer than four times on average), which gives a permutation of 0 .. size - 1.
    """
    half = max(1, ((size - 1).bit_length() + 1) // 2)  # number of bits
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
        if index < size:  # otherwise permute again: the result is still a bijection
            return index


def dropout_keys(seed: int, samples: Sequence[int], seq_len: int) -> Tensor:
    """Computes the keys of the tokens of these sample numbers: (B, S), from 0 to 2^63 - 1.

    The sample number enters the hash, so equal keys in different samples are unlikely.
    """
    rows = [mix(seed ^ mix(sample)) >> 1 for sample in samples]
    return torch.tensor(rows)[:, None] ^ torch.arange(seq_len)


class Samples:
    """The order of the samples: sample number -> row of a source.

    It is a pure function of sources, seed and mixture. The stream skips excluded ranges of sample
    numbers: its position p is the p-th sample that is not excluded.
    """

    def __init__(
        self,
        sources: Mapping[str, Rows],
        seed: int,
        mixture: Mixture,
        excluded: Sequence[Range] = (),
    ) -> None:
        """`sources` are in the mixture's order. `excluded` may be unsorted, and overlap."""
        self.names = list(sources)
        self.rows = list(sources.values())
        self.seed = seed
        self.mixture = mixture
        self.excluded = merge_ranges(excluded)

    def without(self, ranges: Sequence[Range]) -> Samples:
        """Returns these samples with further ranges excluded."""
        sources = dict(zip(self.names, self.rows, strict=True))
        return Samples(sources, self.seed, self.mixture, [*self.excluded, *ranges])

    def number(self, position: int) -> int:
        """Returns the sample number at a position of the stream."""
        return sample_number(position, self.excluded)

    def pick(self, sample: int) -> tuple[Rows, int]:
        """Returns the source and the row index of sample number `sample`."""
        source, number = self.mixture.locate(sample)
        rows = self.rows[source]
        epoch, index = divmod(number, rows.count)
        # Each epoch of each source has its own order
        key = mix(self.seed ^ mix(source << 32 | epoch))
        return rows, permute(index, rows.count, key)

    def epochs(self, samples: int) -> dict[str, float]:
        """Computes the passes over each source in the first `samples` sample numbers."""
        used = self.mixture.used(samples)
        passes = [number / rows.count for number, rows in zip(used, self.rows, strict=True)]
        return dict(zip(self.names, passes, strict=True))


def build_samples(
    data: list[PreparedData], section: DataConfig, training: TrainingConfig, seed: int
) -> Samples:
    """Builds the order of the training samples; `data`: the sources of `section`."""
    rows: dict[str, Rows] = {}
    for part in data:
        tokens = part.tokens("train")
        description = f"training text of {part.name}"
        if section.packing == "best_fit":
            rows[part.name] = PackedRows(tokens, training.seq_len, description)
        else:
            rows[part.name] = Windows(tokens, training.seq_len, description)
    return Samples(rows, seed, build_mixture(section, training))
