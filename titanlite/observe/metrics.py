"""Loss, speed and memory: the rows of metrics.jsonl and of the console.

What it is: the metrics of the logged steps, written by rank 0; docs/metrics.md explains each.
Between logged steps (and those that validate or save) nothing is read from the device, so the host
does not wait for it. Tokens, samples and seconds count from the run's first step and continue after
a resume. Padding is not in the tokens, but in the speeds: it takes as long to compute.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from titanlite.config.schema import Config
from titanlite.data.stream import TrainStream
from titanlite.distributed.agreement import broadcast_from_rank0
from titanlite.model.flavors import LlamaConfig
from titanlite.model.flops import flops_per_token, peak_tflops
from titanlite.observe.console import Eta, step_line
from titanlite.observe.line_file import LineFile
from titanlite.observe.memory import peak_memory_gib
from titanlite.observe.metrics_file import drop_later_lines
from titanlite.observe.step_times import StepTimes
from titanlite.runtime.device import device_name
from titanlite.runtime.phases import Phase, mark_phase

logger = logging.getLogger("titanlite")


class Progress:
    """The position of the run. Stateful: step, tokens over all ranks, and seconds of training."""

    def __init__(self) -> None:
        self.step = 0
        self.tokens = torch.zeros((), dtype=torch.int64)  # on the device after a step
        self.seconds = 0.0

    def state_dict(self) -> dict[str, Any]:
        return {
            "step": torch.tensor(self.step),
            "tokens": self.tokens.to("cpu", copy=True),
            "seconds": torch.tensor(self.seconds, dtype=torch.float64),
        }

    def add_tokens(self, number: Tensor) -> None:
        """Adds the tokens of a step; the host does not wait."""
        self.tokens = self.tokens + number

    def add_seconds(self, seconds: float) -> None:
        """Adds the seconds of training since the last call."""
        self.seconds += seconds

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = int(state["step"])
        self.tokens = state["tokens"].clone()
        self.seconds = float(state["seconds"])


class HasColumns(Protocol):
    """A part that adds columns to logged steps; it adds none if it is switched off."""

    def columns(self) -> dict[str, Any]:
        """Returns the columns. All ranks call it together."""


class Metrics:
    """Counts steps; logs every `metrics.log_freq`-th step, the first and the last."""

    def __init__(
        self,
        config: Config,
        llama: LlamaConfig,
        folder: Path,
        device: torch.device,
        progress: Progress,
        columns: Sequence[HasColumns] = (),
    ) -> None:
        """Removes lines after `progress.step` from metrics.jsonl in the run's `folder`; at step 0,
        all lines.

        `columns`: the parts that add columns to logged steps. Raises ConfigError, on all ranks, if
        the file cannot be written.
        """
        self.config = config.metrics
        self.num_steps = config.training.steps
        self.seq_len = config.training.seq_len
        self.flops_per_token = flops_per_token(
            llama, self.seq_len, config.lora, config.training.frozen_patterns
        )
        self.peak_tflops = peak_tflops(device_name(device))
        self.device = device
        self.progress = progress
        self.columns = columns
        self.step_times = StepTimes(self.config, device)
        self.eta = Eta()
        self.file = LineFile(folder / "metrics.jsonl")
        last_step = progress.step or -1  # at step 0, keep no line
        broadcast_from_rank0(lambda: drop_later_lines(folder, last_step))
        self._steps = 0  # of this process
        # Those without targets, on the device
        self._empty_steps = torch.zeros((), dtype=torch.int64, device=device)
        self._empty_steps_said = 0
        self.start()

    def start(self) -> None:
        """Starts the timing of the next steps."""
        self._last = time.monotonic()
        self._begin_window()

    def _begin_window(self) -> None:
        """Begins the window that ends with the next logged step."""
        mark_phase(Phase.START_TIMING)
        self._positions = 0
        self._seconds_before = self.progress.seconds
        self._targets = torch.zeros((), dtype=torch.int64, device=self.device)

    def _add_time(self) -> None:
        """Adds the time since the last call to the training time."""
        now = time.monotonic()
        self.progress.add_seconds(now - self._last)
        self._last = now

    def count_step(self, positions: int, tokens: Tensor, targets: Tensor) -> None:
        """Counts a step; call it after each one, with its numbers over all ranks.

        `positions`: tokens and padding, which take equally long to compute.
        """
        self._positions += positions
        self.progress.add_tokens(tokens)
        self._targets = self._targets + targets  # on the device
        self._steps += 1
        self._empty_steps = self._empty_steps + (targets == 0)
        self._add_time()

    def due(self, last: bool) -> bool:
        """Whether the current step is logged."""
        step = self.progress.step
        return step % self.config.log_freq == 0 or step == 1 or last

    def log(
        self, loss: Tensor, grad_norm: Tensor, num_targets: Tensor, lr: float, stream: TrainStream
    ) -> None:
        """Logs the current step. `loss` is the loss over all ranks.

        It reads from the device, so the host waits.
        """
        progress = self.progress
        values = (loss, grad_norm, progress.tokens, num_targets, self._targets, self._empty_steps)
        scalars = [value.to(torch.float64) for value in values]
        numbers = torch.stack(scalars).tolist()
        loss_value, norm_value, tokens, targets, all_targets, empty_steps = numbers
        self._add_time()
        seconds = progress.seconds - self._seconds_before
        positions = self._positions
        waited = stream.take_seconds()
        epochs = stream.epochs
        self._begin_window()
        row: dict[str, Any] = {
            "step": progress.step,
            "loss": loss_value if targets else None,
            "grad_norm": norm_value if targets else None,
            "lr": lr,
            "tokens": round(tokens),
            **self._speed(positions, seconds),
            "memory_gib": peak_memory_gib(self.device),
            "data_percent": 100 * max(epochs.values()),
            "seconds": progress.seconds,
            "targets": round(targets),
            "targets_per_second": all_targets / seconds,
            "data_wait_percent": 100 * waited / seconds,
            "samples": stream.samples,
            "samples_per_second": positions / seconds / self.seq_len,
            "perplexity": perplexity(loss_value) if targets else None,
        }
        for name, passes in epochs.items():
            row[f"epochs/{name}"] = passes
        for part in self.columns:
            row |= part.columns()
        row |= self.step_times.columns()
        self.write(row)
        self._warn_of_empty_steps(round(empty_steps))

        remaining_steps = self.num_steps - progress.step
        eta = self.eta.remaining(time.monotonic(), self._steps, remaining_steps)
        logger.info(step_line(self._position(), row, eta))

    def _warn_of_empty_steps(self, empty_steps: int) -> None:
        """Warns when the first step without targets has been read, and after the last step."""
        last = self.progress.step == self.num_steps
        news = empty_steps > 0 and (self._empty_steps_said == 0 or last)
        if news and dist.get_rank() == 0:  # the counts are those of all ranks
            self._empty_steps_said = empty_steps
            logger.warning(
                "%d of %d steps had no target (all their tokens are prompt or padding): they have "
                "no loss, and their updates only continue the momentum. Expected answers that fit "
                "into training.seq_len, or a larger batch",
                empty_steps,
                self._steps,
            )

    def _speed(self, positions: int, seconds: float) -> dict[str, Any]:
        """Computes speeds from `positions` (of all ranks) and `seconds`; `mfu` may be None."""
        tps = positions / seconds / dist.get_world_size()
        tflops = tps * self.flops_per_token / 1e12
        mfu = None
        if self.peak_tflops:
            mfu = 100 * tflops / self.peak_tflops
        return {"tps": tps, "tps_global": positions / seconds, "tflops": tflops, "mfu": mfu}

    def _position(self) -> str:
        width = len(str(self.num_steps))
        return f"step {self.progress.step:>{width}}/{self.num_steps}"

    def log_validation(self, name: str, values: dict[str, float]) -> None:
        """Shows the results of validation on one source."""
        shown = "  ".join(f"{key} {value:.4f}" for key, value in values.items())
        logger.info(f"{self._position()}  validation/{name}  {shown}")

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Excludes the time in this context (validation, saving) from the training time."""
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)
        if self.progress.step > 0:
            self._add_time()
        else:
            self._last = time.monotonic()  # before the first step, this time was the set-up
        mark_phase(Phase.PAUSE)
        yield
        self._last = time.monotonic()

    def close(self) -> None:
        """Stops the step times; call it after the last step."""
        self.step_times.close()

    def write(self, row: dict[str, Any]) -> None:
        """Appends one JSON object.

        Floats keep all digits, so that runs can be compared bit by bit; NaN and infinity become
        null.
        """
        if dist.get_rank() != 0:
            return
        finite = dict(row)
        for key, value in row.items():
            if isinstance(value, float) and not math.isfinite(value):
                finite[key] = None
        finite["time"] = time.time()
        self.file.append(json.dumps(finite))


def perplexity(loss: float) -> float:
    """Computes exp(loss); infinity if that exceeds the range of a float."""
    if loss < 700:
        return math.exp(loss)
    return math.inf
