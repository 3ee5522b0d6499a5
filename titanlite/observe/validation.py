"""Loss on held-out text, of each source by itself.

What it is: the loss summed over all ranks, divided by the number of targets of all ranks, so each
token counts once in any division into batches. Bits per byte is the same sum in bits, per byte of
text, comparable across tokenizers. Documents are never packed here, so these losses do not depend
on `data.packing`; on `data.document_mask` they do.
With several sources, the mean of their losses, weighted by `data.sources` as training is, decides
which checkpoints `checkpoint.keep_best` keeps.
What it costs: a third of a training step per token.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import torch
from torch import Tensor

from titanlite.config.schema import ValidationConfig
from titanlite.data.prepared import PreparedData
from titanlite.data.stream import IGNORED, Batch, TrainStream, Windows, validation_batches
from titanlite.data.to_device import to_device
from titanlite.distributed.mesh import Mesh, sum_dtype
from titanlite.distributed.watchdog import mark_phase
from titanlite.observe.metrics import Metrics
from titanlite.runtime.errors import ConfigError


class Validator:
    """Validates when validation is due, and logs the result through `metrics`."""

    def __init__(
        self,
        config: ValidationConfig,
        data: list[PreparedData],
        stream: TrainStream,
        evaluate: Callable[[Batch], Tensor],
        mesh: Mesh,
        metrics: Metrics,
    ) -> None:
        """`evaluate` returns this rank's part of the summed loss of a batch; batches are as large
        as those of `stream`.

        Raises ConfigError if the held-out text of a source is shorter than a sequence.
        """
        self.config = config
        self.data = data
        self.stream = stream
        self.evaluate = evaluate
        self.mesh = mesh
        self.metrics = metrics
        self.token_bytes = torch.tensor(data[0].tokenizer.token_bytes)
        self.windows = {
            part.name: Windows(
                part.tokens("validation"),
                stream.training.seq_len,
                f"validation text of {part.name}",
            )
            for part in (data if config.freq else ())
        }

    def due(self, step: int, last: bool) -> bool:
        return self.config.freq > 0 and (last or step % self.config.freq == 0)

    def maybe_run(self, step: int, last: bool, stop: Callable[[], bool]) -> float | None:
        """The loss; None if it is not due or `stop` returns true, which it does on all ranks or on
        none.
        """
        if not self.due(step, last):
            return None
        results = {}
        for name, windows in self.windows.items():
            sums = self.sums_over(windows, stop)
            if sums is None:
                return None
            total, num_targets, num_bytes = sums
            if not num_targets:
                raise ConfigError(
                    f"the validation text of {name} has no targets in {self.config.samples or 'any'} sequences; "
                    "expected more validation.samples, or another validation text"
                )
            loss = total / num_targets
            bits = total / math.log(2) / max(1, num_bytes)
            perplexity = math.exp(loss) if loss < 700 else math.inf
            results[name] = {"loss": loss, "bits_per_byte": bits, "perplexity": perplexity}
        mean = sum(part.weight * results[part.name]["loss"] for part in self.data) / sum(
            d.weight for d in self.data
        )
        self.metrics.validation(results, mean)
        return mean

    def sums_over(
        self, windows: Windows, stop: Callable[[], bool]
    ) -> tuple[float, int, int] | None:
        """Over all ranks: the summed loss of a text, its targets, and the bytes that they encode;
        None: `stop`.
        """
        device = self.metrics.device
        loss = torch.zeros((), dtype=sum_dtype(device), device=device)
        counts = torch.zeros(2, dtype=torch.int64)
        for batch in validation_batches(windows, self.config.samples, self.stream):
            mark_phase("validation")
            if stop():
                return None
            targets = batch.labels[batch.labels != IGNORED]
            counts += torch.stack([torch.tensor(len(targets)), self.token_bytes[targets].sum()])
            began = time.monotonic()
            loss += self.evaluate(batch.apply(lambda tensor: to_device(tensor, device)))
            # The first one of this process
            self.metrics.compiling = self.metrics.compiling or time.monotonic() - began
        num_targets, num_bytes = self.mesh.sum_counts(counts.to(device)).tolist()
        return float(self.mesh.sum_losses(loss)), num_targets, num_bytes
