"""Loss, speed and memory: the rows of metrics.jsonl, and what the console shows of them
(`console.py`).

What it is: the metrics of the logged steps, written by rank 0; docs/metrics.md explains each.
Between logged steps (and those that validate or save) nothing is read from the device, so the host
does not wait for it. Tokens, samples and seconds count from the run's first step and continue after
a resume.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from titanlite.config.schema import (
    CheckpointConfig,
    MetricsConfig,
    TrainingConfig,
    ValidationConfig,
)
from titanlite.data.stream import TrainStream
from titanlite.distributed import watchdog
from titanlite.distributed.agreement import broadcast_from_rank0
from titanlite.distributed.mesh import sum_dtype
from titanlite.model.flavors import LlamaConfig
from titanlite.observe.line_file import LineFile

if TYPE_CHECKING:
    from titanlite.observe.eta import Eta

logger = logging.getLogger("titanlite")


class Progress:
    """The position of the run. Stateful: step, tokens over all ranks, and seconds of training."""

    def __init__(self) -> None:
        self.step = 0
        self.tokens = 0
        self.seconds = 0.0

    def state_dict(self) -> dict[str, Any]:
        seconds = torch.tensor(self.seconds, dtype=torch.float64)
        return {
            "step": torch.tensor(self.step),
            "tokens": torch.tensor(self.tokens),
            "seconds": seconds,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = int(state["step"])
        self.tokens = int(state["tokens"])
        self.seconds = float(state["seconds"])


@dataclass(frozen=True)
class Workload:
    """Constants of the run from which metrics and the remaining time are computed."""

    training: TrainingConfig
    validation: ValidationConfig
    checkpoint: CheckpointConfig
    llama: LlamaConfig
    device_name: str


class Metrics:
    """Counts steps; logs every `log_freq`-th step, the first and the last."""

    def __init__(
        self,
        config: MetricsConfig,
        folder: Path,
        device: torch.device,
        progress: Progress,
        workload: Workload,
    ) -> None:
        """Removes lines after `progress.step` from metrics.jsonl in the run's `folder`; at step 0,
        all lines.

        Raises ConfigError, on all ranks, if the file cannot be written.
        """
        self.config = config
        self.device = device
        self.progress = progress
        self.workload = workload
        # Called by all ranks: further columns of a logged step
        self.more: list[Callable[[], dict[str, Any]]] = []
        self.file = LineFile(folder / "metrics.jsonl")
        broadcast_from_rank0(self._drop_later_lines)
        # Since the last log: after which step, and seconds
        self.pauses: list[tuple[int, float]] = []
        self.compiling = 0.0  # seconds of the first evaluation of this process
        self._last = time.monotonic()

    def _drop_later_lines(self) -> None:
        if self.file.path.exists():
            # a new run has no such file
            from titanlite.observe.metrics_file import drop_later_lines

            drop_later_lines(self.file.path.parent, self.progress.step or -1)

    @functools.cached_property
    def eta(self) -> Eta:
        # What the first step does not need is imported at the first log
        from titanlite.observe.eta import Eta

        return Eta(self.workload.training.steps, self.workload.validation, self.workload.checkpoint)

    def start(self) -> None:
        """Starts the timing of the next steps."""
        self._last = time.monotonic()
        self._begin_window()

    def _begin_window(self) -> None:
        watchdog.mark_phase("start of timing", times_only=True)
        self._tokens = self.progress.tokens
        self._since = self.progress.seconds

    def end_pause(self) -> None:
        """Call it after the validation before the first step: the ETA expects more of them.

        See `paused` for others.
        """
        now = time.monotonic()
        self.pauses.append((self.progress.step, now - self._last))
        self._last = now

    def _tick(self) -> None:
        """Adds the time since the last call to the training time."""
        now = time.monotonic()
        self.progress.seconds = self.progress.seconds + now - self._last
        self._last = now

    def count_step(self, tokens: int) -> None:
        """Call it after each step, with the tokens that it had over all ranks."""
        self._tick()
        self.progress.tokens += tokens

    def due(self, last: bool) -> bool:
        """Whether the current step is logged."""
        return self.progress.step % self.config.log_freq == 0 or self.progress.step == 1 or last

    def log(
        self, loss: Tensor, grad_norm: Tensor, num_targets: Tensor, lr: float, data: TrainStream
    ) -> None:
        """Logs the current step.

        `loss` is that of all ranks. Reads from the device, so the host waits for it.
        """
        from titanlite.observe.console import step_line  # not used before the end of the first step
        from titanlite.observe.memory import peak_memory_gib
        from titanlite.observe.speed import speed_columns

        progress = self.progress
        work = self.workload
        epochs = data.epochs
        if self.config.step_times and watchdog.recorder is None:
            from titanlite.observe.step_times import StepTimes

            self.more.append(StepTimes(self.device).columns)
        values = torch.stack(
            [value.to(sum_dtype(self.device)) for value in (loss, grad_norm, num_targets)]
        ).tolist()
        self._tick()
        elapsed = progress.seconds - self._since
        tokens = progress.tokens - self._tokens
        waited = data.seconds
        data.seconds = 0.0
        self._begin_window()
        row = {
            "step": progress.step,
            "loss": values[0],
            "grad_norm": values[1],
            "lr": lr,
            "tokens": progress.tokens,
            **speed_columns(tokens, elapsed, work.llama, work.training.seq_len, work.device_name),
            "memory_gib": peak_memory_gib(self.device),
            "data_percent": 100 * max(epochs.values()),
            "seconds": progress.seconds,
            "targets": round(values[2]),
            "data_wait_percent": 100 * waited / elapsed,
            "samples": data.samples,
            "samples_per_second": tokens / elapsed / work.training.seq_len,
            "perplexity": math.exp(values[0]) if values[0] < 700 else math.inf,
        }
        row |= {f"epochs/{name}": passes for name, passes in epochs.items()}
        for columns in self.more:
            row |= columns()
        self.write(row)
        samples = data.samples_after(work.training.steps - progress.step) - data.samples
        self.eta.add_window(elapsed, tokens, self.pauses, self.compiling)
        self.pauses = []
        row |= {
            "steps": work.training.steps,
            "eta": self.eta.remaining(progress.step, samples * work.training.seq_len),
        }
        logger.info(step_line(self._position(), row), extra={"row": row})

    def _position(self) -> str:
        total = self.workload.training.steps
        return f"step {self.progress.step:>{len(str(total))}}/{total}"

    def validation(self, results: dict[str, dict[str, float]], mean: float) -> None:
        """Writes the results of a validation after the current step, name -> metrics, and their
        mean loss.
        """
        row: dict[str, Any] = {"step": self.progress.step}
        for name, values in results.items():
            row |= {f"validation/{name}/{key}": value for key, value in values.items()}
            self.log_validation(name, values)
        self.write(row | ({"validation/loss": mean} if len(results) > 1 else {}))

    def log_validation(self, name: str, values: dict[str, float]) -> None:
        shown = "  ".join(f"{key} {value:.4f}" for key, value in values.items())
        found = (self.progress.step, self.workload.training.steps, name, values)
        logger.info(f"{self._position()}  validation/{name}  {shown}", extra={"validation": found})

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """A context for validation and saving, whose time does not count as training time."""
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)
        self._tick()
        watchdog.mark_phase("pause", times_only=True)
        yield
        self.end_pause()

    def write(self, row: dict[str, Any]) -> None:
        """Appends one JSON object.

        Floats keep all digits, to compare runs bit by bit; NaN and infinity become null.
        """
        if dist.get_rank() == 0:
            row = {
                k: None if isinstance(v, float) and not math.isfinite(v) else v
                for k, v in row.items()
            }
            self.file.append(json.dumps(row | {"time": time.time()}))
