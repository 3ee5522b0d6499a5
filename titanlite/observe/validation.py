"""Loss on held-out text.

What it is: the summed loss over the summed number of targets, of all processes: each token counts once, however the
batches fall. Bits per byte is the same loss per byte of text, which compares across tokenizers.
What it costs: a third of a training step per token.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from titanlite.config.schema import ValidationConfig
from titanlite.data.stream import IGNORED, Windows, validation_batches
from titanlite.data.to_device import to_device
from titanlite.observe.metrics import Metrics


class Validator:
    """Validates when it is due and hands the result to the metrics."""

    def __init__(
        self,
        config: ValidationConfig,
        windows: Windows | None,
        name: str,
        token_bytes: list[int],
        metrics: Metrics,
        evaluate: Callable[[Tensor, Tensor], Tensor],
        *,
        sum_counts: Callable[[Tensor], Tensor],
        batch_size: int,
        rank: int,
        world: int,
    ) -> None:
        """`windows` may be absent where validation is never due; `token_bytes` is the length of each id's text;
        `evaluate` gives this process's part of the summed loss of tokens and labels (B, S); `sum_counts` adds a
        tensor up over the processes that read different data."""
        self.config, self.windows, self.name, self.metrics, self.evaluate = config, windows, name, metrics, evaluate
        self.batch_size, self.rank, self.world = batch_size, rank, world
        self.sum_counts = sum_counts
        self.token_bytes = torch.tensor(token_bytes)

    def due(self, step: int, last: bool) -> bool:
        return self.config.freq > 0 and (last or step % self.config.freq == 0)

    def maybe_run(self, step: int, last: bool, stop: Callable[[], bool]) -> float | None:
        """The loss, if it was due. All processes call it together; given up once `stop` says so to all of them."""
        if not self.due(step, last):
            return None
        assert self.windows is not None
        device = self.metrics.device
        loss = torch.zeros((), dtype=torch.float64, device=device)
        counts = torch.zeros(2, dtype=torch.int64)  # targets, and bytes of text they stand for
        for tokens, labels in validation_batches(
            self.windows, self.config.samples, self.batch_size, self.rank, self.world
        ):
            if stop():
                return None
            targets = labels[labels != IGNORED]
            counts += torch.stack([torch.tensor(len(targets)), self.token_bytes[targets].sum()])
            loss += self.evaluate(to_device(tokens, device), to_device(labels, device))
        num_targets, num_bytes = self.sum_counts(counts.to(device)).tolist()
        total = float(self.metrics.sum_losses(loss))
        self.metrics.validation(self.name, total / num_targets, total / math.log(2) / num_bytes)
        return total / num_targets
