"""Loss, speed and memory: the lines on the console and in metrics.jsonl.

What it is: the metrics of the logged steps, written by rank 0. Between logged steps (and those that validate or save)
nothing is read from the device, so the host does not wait for it. Units: loss in nats per token; tps in tokens per
second and device, tps_global of all devices; tflops per device by the formula of `model/flops.py`; mfu in percent of
the device's dense bf16 peak, null if that is not known; memory_gib is the peak of rank 0; tokens and seconds count from
the run's first step and continue after a resume.
"""

from __future__ import annotations

import contextlib
import json
import logging
import resource
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from titanlite.config.schema import MetricsConfig, TrainingConfig
from titanlite.distributed.agreement import broadcast_from_rank0
from titanlite.model.flavors import LlamaConfig
from titanlite.model.flops import flops_per_token, peak_tflops
from titanlite.observe.line_file import LineFile

logger = logging.getLogger("titanlite")


class Progress:
    """The position of the run. Stateful: step, tokens over all ranks, and seconds of training."""

    def __init__(self) -> None:
        self.step, self.tokens, self.seconds = 0, 0, 0.0

    def state_dict(self) -> dict[str, Any]:
        seconds = torch.tensor(self.seconds, dtype=torch.float64)
        return {"step": torch.tensor(self.step), "tokens": torch.tensor(self.tokens), "seconds": seconds}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step, self.tokens, self.seconds = int(state["step"]), int(state["tokens"]), float(state["seconds"])


@dataclass(frozen=True)
class Workload:
    """Constants of the run from which metrics are computed."""

    total_steps: int
    tokens_per_step: int  # of all ranks
    flops_per_token: int
    peak_tflops: float | None  # dense bf16 peak of one device; None if it is not known

    @classmethod
    def of(cls, training: TrainingConfig, llama: LlamaConfig, device_name: str) -> Workload:
        tokens, flops = training.global_batch_size * training.seq_len, flops_per_token(llama, training.seq_len)
        return cls(training.steps, tokens, flops, peak_tflops(device_name))


class Metrics:
    """Counts steps; logs every `log_freq`-th step, the first and the last."""

    def __init__(
        self, config: MetricsConfig, folder: Path, device: torch.device, progress: Progress, workload: Workload
    ) -> None:
        """Removes lines after `progress.step` from metrics.jsonl in the run's `folder`; at step 0, all lines.

        Raises ConfigError, on all ranks, if the file cannot be written.
        """
        self.config, self.device, self.progress, self.workload = config, device, progress, workload
        self.file = LineFile(folder / "metrics.jsonl")
        broadcast_from_rank0(self._drop_later_lines)
        self.start()

    def _drop_later_lines(self) -> None:
        if self.file.path.exists():
            from titanlite.observe.metrics_file import truncate_after  # a new run has no such file

            truncate_after(self.file.path, self.progress.step or -1)

    def start(self) -> None:
        """Starts the timing of the next steps."""
        self._last = time.monotonic()
        self._steps, self._since = 0, self.progress.seconds

    def _tick(self) -> None:
        """Adds the time since the last call to the training time."""
        now = time.monotonic()
        self.progress.seconds, self._last = self.progress.seconds + now - self._last, now

    def count_step(self) -> None:
        """Call it after each step."""
        self._tick()
        self.progress.tokens += self.workload.tokens_per_step
        self._steps += 1

    def due(self, last: bool) -> bool:
        """Whether the current step is logged."""
        return self.progress.step % self.config.log_freq == 0 or self.progress.step == 1 or last

    def log(self, loss: Tensor, grad_norm: Tensor, lr: float, epochs: float) -> None:
        """Logs the current step. `loss` is that of all ranks. Reads both from the device, so the host waits for it."""
        progress, work = self.progress, self.workload
        values = torch.stack([loss.float(), grad_norm.float()]).tolist()
        self._tick()
        elapsed, steps = progress.seconds - self._since, self._steps
        self.start()
        per_second = steps * work.tokens_per_step / elapsed
        tps = per_second / dist.get_world_size()
        tflops = tps * work.flops_per_token / 1e12
        row = {
            "step": progress.step,
            "loss": values[0],
            "grad_norm": values[1],
            "lr": lr,
            "tokens": progress.tokens,
            "tps": tps,
            "tps_global": per_second,
            "tflops": tflops,
            "mfu": 100 * tflops / work.peak_tflops if work.peak_tflops else None,
            "memory_gib": peak_memory_gib(self.device),
            "data_percent": 100 * epochs,
            "seconds": progress.seconds,
        }
        self.write(row)
        remaining = (work.total_steps - progress.step) * elapsed / steps
        mfu = f"{row['mfu']:.1f}%" if work.peak_tflops else "n/a"
        logger.info(
            f"{self._position()}  loss {values[0]:.4f}  grad_norm {values[1]:.3f}  lr {lr:.2e}  tps {tps:,.0f}  "
            f"tflops {tflops:.3g}  mfu {mfu}  memory {row['memory_gib']:.2f}GiB  data {100 * epochs:.1f}%  "
            f"eta {duration(remaining)}"
        )

    def _position(self) -> str:
        total = self.workload.total_steps
        return f"step {self.progress.step:>{len(str(total))}}/{total}"

    def validation(self, name: str, loss: float, bits_per_byte: float) -> None:
        """Writes the result of a validation after the current step."""
        prefix = f"validation/{name}"
        self.write({"step": self.progress.step, f"{prefix}/loss": loss, f"{prefix}/bits_per_byte": bits_per_byte})
        logger.info(f"{self._position()}  {prefix}  loss {loss:.4f}  bits_per_byte {bits_per_byte:.4f}")

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """A context for validation and saving, whose time does not count as training time."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self._tick()
        yield
        self._last = time.monotonic()

    def write(self, row: dict[str, Any]) -> None:
        """Appends one JSON object; floats keep every digit, so two runs can be compared bit by bit."""
        if dist.get_rank() == 0:
            self.file.append(json.dumps(row))


def duration(seconds: float) -> str:
    """1:05 for 65 seconds, 2:03:04 beyond an hour."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def peak_memory_gib(device: torch.device) -> float:
    """The peak memory so far: reserved by the allocator on CUDA, resident in this process on CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device) / 2**30
    unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss is bytes on macOS, KiB on Linux
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30
