"""Validation: the loss on held-out text, for each source separately.

What it is: the loss summed over all ranks, divided by the number of targets of all ranks, so each
token counts once in any division into batches. Bits per byte is the same sum in bits, divided by
the bytes of text, so it is comparable across tokenizers. Only a text that is shorter than a
sequence is packed here, so these losses do not depend on `data.packing`, but they do depend on
`data.document_mask`. With several sources, the mean of their losses, weighted by `data.sources` as
training is, decides which checkpoints `checkpoint.keep_best` keeps.
What it costs: a third of a training step per token.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from titanlite.config.schema import ValidationConfig
from titanlite.data.packing import PackedRows
from titanlite.data.prepared import PreparedData
from titanlite.data.rows import IGNORED, Batch, Windows, validation_rows
from titanlite.data.stream import TrainStream, validation_batches
from titanlite.data.to_device import to_device
from titanlite.distributed.mesh import Mesh
from titanlite.distributed.signals import Requests
from titanlite.observe.metrics import Metrics, perplexity
from titanlite.runtime.errors import ConfigError
from titanlite.runtime.phases import Phase, mark_phase


class Sums(NamedTuple):
    """Sums over all ranks and all sequences of a text."""

    loss: float
    num_targets: int
    num_bytes: int  # bytes that the targets encode


class Validator:
    """Validates and logs the result through `metrics`; does nothing with `validation.freq = 0`."""

    def __init__(
        self,
        config: ValidationConfig,
        data: list[PreparedData],
        stream: TrainStream,
        evaluate: Callable[[Batch], Tensor],
        mesh: Mesh,
        metrics: Metrics,
    ) -> None:
        """`evaluate`: returns this rank's part of a batch's summed loss. Batches are as large as
        those of `stream`.

        Raises ConfigError if a source has no held-out text.
        """
        self.config = config
        self.data = data
        self.stream = stream
        self.evaluate = evaluate
        self.mesh = mesh
        self.metrics = metrics
        self.token_bytes = torch.tensor(data[0].tokenizer.token_bytes)
        self.windows: dict[str, Windows | PackedRows] = {}
        if config.freq > 0:
            for source in data:
                text = f"validation text of {source.name}"
                tokens = source.tokens("validation")
                windows = validation_rows(tokens, stream.training.seq_len, text)
                self.windows[source.name] = windows

    def due(self, finished: bool) -> bool:
        """Whether to validate after the current step; `finished`: it is the run's last one."""
        step = self.metrics.progress.step
        return self.config.freq > 0 and (finished or step % self.config.freq == 0)

    def run(self, requests: Requests) -> float | None:
        """Validates and logs the result; returns the loss.

        Returns None without validation, and if the run is to stop.
        """
        if not self.windows:
            return None
        row: dict[str, Any] = {"step": self.metrics.progress.step}
        losses: dict[str, float] = {}
        results: dict[str, dict[str, float]] = {}
        for name, windows in self.windows.items():
            sums = self.sums(windows, requests)
            if sums is None:
                return None
            if sums.num_targets == 0:
                number = self.config.samples or "any"
                raise ConfigError(
                    f"the validation text of {name} has no targets in {number} "
                    "sequences; expected more validation.samples, or another validation text"
                )
            losses[name] = sums.loss / sums.num_targets
            results[name] = {"loss": losses[name]}
            if sums.num_bytes > 0:  # 0: all targets are tokens without text
                results[name]["bits_per_byte"] = sums.loss / math.log(2) / sums.num_bytes
            results[name]["perplexity"] = perplexity(losses[name])
        for name, values in results.items():
            for key, value in values.items():
                row[f"validation/{name}/{key}"] = value
            self.metrics.log_validation(name, values)
        weighted = sum(source.weight * losses[source.name] for source in self.data)
        mean = weighted / sum(source.weight for source in self.data)
        if len(losses) > 1:
            row["validation/loss"] = mean
        self.metrics.write(row)
        return mean

    def run_average(self, requests: Requests) -> None:
        """Logs `ema_loss`, the loss of the averaged weights, which are now in the model.

        It has its own row, after the row of the weights' loss, which alone decides about
        `keep_best`. Nothing is logged if the run is to stop.
        """
        row: dict[str, Any] = {"step": self.metrics.progress.step}
        for name, windows in self.windows.items():
            sums = self.sums(windows, requests)
            if sums is None:
                return
            loss = sums.loss / sums.num_targets
            row[f"validation/{name}/ema_loss"] = loss
            self.metrics.log_validation(name, {"ema_loss": loss})
        self.metrics.write(row)

    def sums(self, windows: Windows | PackedRows, requests: Requests) -> Sums | None:
        """Computes the sums over a text; returns None if a signal has arrived on any rank."""
        device = self.metrics.device
        loss = torch.zeros((), dtype=torch.float64, device=device)
        counts = torch.zeros(2, dtype=torch.int64)  # targets, bytes that they encode
        for batch in validation_batches(windows, self.config.samples, self.stream):
            mark_phase(Phase.VALIDATE)
            if requests.agree_to_stop():
                return None
            targets = batch.labels[batch.labels != IGNORED]
            counts += torch.tensor([len(targets), int(self.token_bytes[targets].sum())])
            loss += self.evaluate(batch.apply(lambda tensor: to_device(tensor, device)))
        num_targets, num_bytes = self.mesh.sum_counts(counts.to(device)).tolist()
        return Sums(float(self.mesh.sum_losses(loss)), num_targets, num_bytes)
