"""Loss on held-out text.

What it is: the loss summed over all ranks, divided by the number of targets of all ranks, so each token counts once in
any division into batches. Bits per byte is the same sum in bits, per byte of text, comparable across tokenizers.
What it costs: a third of a training step per token.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from titanlite.config.schema import TrainingConfig, ValidationConfig
from titanlite.data.prepared import PreparedData
from titanlite.data.stream import IGNORED, Windows, validation_batches
from titanlite.data.to_device import to_device
from titanlite.distributed.mesh import Mesh
from titanlite.distributed.watchdog import mark_phase
from titanlite.observe.metrics import Metrics


class Validator:
    """Validates when validation is due, and logs the result through `metrics`."""

    def __init__(
        self,
        config: ValidationConfig,
        training: TrainingConfig,
        data: PreparedData,
        evaluate: Callable[[Tensor, Tensor], Tensor],
        mesh: Mesh,
        metrics: Metrics,
    ) -> None:
        """`evaluate` returns this rank's part of the summed loss of tokens and labels (B, S)."""
        self.config, self.data, self.evaluate, self.mesh, self.metrics = config, data, evaluate, mesh, metrics
        self.batch_size, self.token_bytes = training.local_batch_size, torch.tensor(data.tokenizer.token_bytes)
        if config.freq:
            self.windows = Windows(data.tokens("validation"), training.seq_len, "validation")

    def due(self, step: int, last: bool) -> bool:
        return self.config.freq > 0 and (last or step % self.config.freq == 0)

    def maybe_run(self, step: int, last: bool, stop: Callable[[], bool]) -> float | None:
        """The loss; None if it is not due or `stop` returns true, which it does on all ranks or on none."""
        if not self.due(step, last):
            return None
        device, mesh = self.metrics.device, self.mesh
        loss = torch.zeros((), dtype=torch.float64, device=device)
        counts = torch.zeros(2, dtype=torch.int64)  # targets, and the bytes of text that they encode
        for tokens, labels in validation_batches(
            self.windows, self.config.samples, self.batch_size, mesh.data_rank, mesh.data_size
        ):
            mark_phase("validation")
            if stop():
                return None
            targets = labels[labels != IGNORED]
            counts += torch.stack([torch.tensor(len(targets)), self.token_bytes[targets].sum()])
            loss += self.evaluate(to_device(tokens, device), to_device(labels, device))
        num_targets, num_bytes = mesh.sum_counts(counts.to(device)).tolist()
        total = float(mesh.sum_losses(loss))
        self.metrics.validation(self.data.name, total / num_targets, total / math.log(2) / num_bytes)
        return total / num_targets
