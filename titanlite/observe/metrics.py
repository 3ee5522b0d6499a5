"""Loss, speed and memory of the steps: the console line and metrics.jsonl.

What it is: numbers of the last logged step, written by rank 0. Between logged steps nothing is read from the
device, so the host never waits for it.
Units: loss in nats per token; tps in tokens per second and device, tps_global of all; tflops per device by the
formula of `plan/flops.py`; mfu in percent of the device's dense bf16 peak, null where that is not known;
memory_gib is this process's peak; tokens and seconds count from the run's first step, over restarts.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import resource
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from titanlite.config.schema import MetricsConfig

logger = logging.getLogger("titanlite")


class Progress:
    """How far the run is. Stateful: step, target tokens over all processes, and seconds of training."""

    def __init__(self) -> None:
        self.step, self.tokens, self.seconds = 0, 0, 0.0

    def state_dict(self) -> dict[str, Any]:
        seconds = torch.tensor(self.seconds, dtype=torch.float64)
        return {"step": torch.tensor(self.step), "tokens": torch.tensor(self.tokens), "seconds": seconds}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step, self.tokens, self.seconds = int(state["step"]), int(state["tokens"]), float(state["seconds"])


class NonFinite(RuntimeError):
    """The loss or the gradient norm is no number; the weights are lost, the last checkpoint is not."""


class Metrics:
    """Collects a step at a time and writes the due ones."""

    def __init__(
        self,
        config: MetricsConfig,
        folder: Path,
        device: torch.device,
        progress: Progress,
        *,
        sum_losses: Callable[[Tensor], Tensor],
        total_steps: int,
        tokens_per_step: int,
        flops_per_token: int,
        peak_tflops: float | None,
        before_raising: Callable[[], None] = lambda: None,
    ) -> None:
        """`folder` is the run's. Lines beyond `progress`, left by a run that died, are removed; all of them at step 0.

        `sum_losses` adds a tensor up, in place, over the processes that hold different parts of the loss;
        `before_raising` is called on all processes before NonFinite ends the run.
        """
        self.config, self.device, self.progress = config, device, progress
        self.sum_losses, self.num_devices = sum_losses, dist.get_world_size()
        self.total_steps, self.tokens_per_step, self.flops_per_token = total_steps, tokens_per_step, flops_per_token
        self.peak, self.before_raising = peak_tflops, before_raising
        self.path = folder / "metrics.jsonl"
        self.writes = dist.get_rank() == 0
        if self.writes:
            _truncate_after(self.path, progress.step or -1)
        self.start()

    def start(self) -> None:
        """Starts the clock of the first step."""
        self._last = time.monotonic()
        self._steps, self._since = 0, self.progress.seconds

    def _tick(self) -> None:
        """Counts the time since the last call as time of training."""
        now = time.monotonic()
        self.progress.seconds, self._last = self.progress.seconds + now - self._last, now

    def step(self, loss: Tensor, grad_norm: Tensor, lr: float, epochs: float, last: bool) -> None:
        """Counts a step; on every `log_freq`-th, the first and the last it reads the device, and writes."""
        progress = self.progress
        self._tick()
        progress.tokens += self.tokens_per_step
        self._steps += 1
        if not (progress.step % self.config.log_freq == 0 or progress.step == 1 or last):
            return
        self.require_finite(grad_norm)
        values = torch.stack([self.sum_losses(loss).float(), grad_norm.float()]).tolist()  # waits for the device
        self._tick()
        elapsed, steps = progress.seconds - self._since, self._steps
        self.start()
        per_second = steps * self.tokens_per_step / elapsed
        tps = per_second / self.num_devices
        tflops = tps * self.flops_per_token / 1e12
        row = {
            "step": progress.step,
            "loss": values[0],
            "grad_norm": values[1],
            "lr": lr,
            "tokens": progress.tokens,
            "tps": tps,
            "tps_global": per_second,
            "tflops": tflops,
            "mfu": 100 * tflops / self.peak if self.peak else None,
            "memory_gib": peak_memory_gib(self.device),
            "data_percent": 100 * epochs,
            "seconds": progress.seconds,
        }
        self.write(row)
        remaining = (self.total_steps - progress.step) * elapsed / steps
        mfu = f"{row['mfu']:.1f}%" if self.peak else "n/a"
        logger.info(
            f"step {progress.step:>{len(str(self.total_steps))}}/{self.total_steps}  loss {values[0]:.4f}  "
            f"grad_norm {values[1]:.3f}  lr {lr:.2e}  tps {tps:,.0f}  tflops {tflops:.3g}  mfu {mfu}  "
            f"memory {row['memory_gib']:.2f}GiB  data {100 * epochs:.1f}%  eta {duration(remaining)}"
        )

    def validation(self, name: str, loss: float, bits_per_byte: float) -> None:
        """Writes the result of a validation after the current step."""
        prefix = f"validation/{name}"
        self.write({"step": self.progress.step, f"{prefix}/loss": loss, f"{prefix}/bits_per_byte": bits_per_byte})
        logger.info(f"step {self.progress.step:>{len(str(self.total_steps))}}/{self.total_steps}  "
                    f"validation/{name}  loss {loss:.4f}  bits_per_byte {bits_per_byte:.4f}")  # fmt: skip

    def require_finite(self, grad_norm: Tensor) -> None:
        """Raises NonFinite on all processes alike: the norm is global, and no loss that is NaN leaves it finite."""
        if not math.isfinite(float(grad_norm)):
            self.before_raising()
            raise NonFinite(
                f"step {self.progress.step}: the gradient norm is {float(grad_norm)}: training has diverged"
            )

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Time in here is no training (validation, saving): it does not count in the speed of the steps."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self._tick()
        yield
        self._last = time.monotonic()

    def write(self, row: dict[str, Any]) -> None:
        """Appends one JSON object; floats keep every digit, so two runs can be compared bit by bit."""
        if self.writes:
            with self.path.open("a") as file:
                file.write(json.dumps(row) + "\n")


def _truncate_after(path: Path, step: int) -> None:
    """Keeps the lines up to `step` of a metrics file, dropping a last line that was cut off."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text().splitlines():
        try:
            if json.loads(line)["step"] <= step:
                kept.append(line + "\n")
        except (ValueError, KeyError):
            continue
    temporary = path.with_suffix(".tmp")
    temporary.write_text("".join(kept))
    temporary.replace(path)


def duration(seconds: float) -> str:
    """1:05 for 65 seconds, 2:03:04 beyond an hour."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def peak_memory_gib(device: torch.device) -> float:
    """The most memory held so far: reserved by the allocator on CUDA, resident in this process on CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device) / 2**30
    unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss is bytes on macOS, KiB on Linux
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30
