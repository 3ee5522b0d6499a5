"""Bad steps: recognised on the device, which then withholds their updates.

What it is: before each optimizer step the `Guard` judges the loss of all ranks and the norm of the
whole gradient. A step is bad if one of them is NaN or infinite, or a spike: with x a loss or a norm
and X those of the last `window` steps,

    z = (x - median(X)) / (1.4826 MAD(X)),   MAD(X) = median(|X - median(X)|),   a spike if z > threshold.

1.4826 MAD estimates the standard deviation of a normal distribution, and a few outliers do not
change it. It is taken as at least FLOOR times the median. While a loss falls, X are lowered by the
slope times their age; otherwise the fall would hide spikes. The slope is the median of the
differences of values half a window apart (Theil 1950, Sen 1968, for some of the pairs); a rise is
not taken out. Finite values enter the window, also spikes: a new level is adopted once half of the
window has it. Values that are not finite never enter.
Why it is here: a NaN must not reach the weights, and the host must not wait for the device to find
one.

What withholds an update is `optimizer.found_inf` (torch.amp.GradScaler's protocol): a scalar on the
device, 1 for a step that must change nothing. Loss scaling decides before `judge`, which withholds
the update if one of them does. A gradient that has overflowed is not a bad step if the scale could
be lowered; a loss that is not finite always is one. `stop` and `rollback` withhold all later
updates too, until the host has read that a step was bad: the numbers of each step are copied to
pinned memory, and the host looks at a later step whether the copy is complete. On the CPU it reads
them at once.
What it costs: an all-reduce of 8 bytes over all ranks, so that all have the same bits and decide
alike; about 30 tensor operations on a few numbers, with a threshold 80 on 2 `window` numbers; 8
`window` + 24 bytes in the checkpoint.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from titanlite.config.schema import StabilityConfig
from titanlite.data.stream import TrainStream
from titanlite.distributed.mesh import Mesh
from titanlite.optim.found_inf import require_withholding, withhold

logger = logging.getLogger("titanlite")

FLOOR = 1e-3  # least deviation, as a fraction of the median: equal losses have none
AHEAD = 8  # steps whose numbers may be on their way to the host
NOT_FINITE = 1.0
SPIKE = 2.0


class Verdict(NamedTuple):
    """What was decided about a step. Its samples have the numbers `first` to `end - 1`."""

    step: int
    first: int
    end: int
    kind: float  # 0, NOT_FINITE or SPIKE
    loss: float
    grad_norm: float
    loss_z: float  # NaN without a threshold, and until the window is three quarters full
    grad_norm_z: float
    # Bad steps up to this one; a step that led to a rollback was taken back, and is not among them
    bad: int
    row: int  # steps in a row, up to this one, that were not finite

    def __str__(self) -> str:
        where = f"step {self.step} (samples {self.first} to {self.end - 1})"
        if self.kind != SPIKE:
            return (
                f"{where}: the loss is {self.loss:.6g}, the gradient norm is {self.grad_norm:.6g}"
            )
        values = (
            ("loss", self.loss, self.loss_z),
            ("gradient norm", self.grad_norm, self.grad_norm_z),
        )
        name, value, z = max(values, key=lambda entry: entry[2])
        return f"{where}: the {name} is {value:.6g}, {z:.1f} robust standard deviations above its median"


class Guard:
    """Judges each step, and sets `optimizer.found_inf`. Stateful: the window and the counts."""

    optional = True  # in a checkpoint

    def __init__(
        self,
        config: StabilityConfig,
        data: TrainStream,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        mesh: Mesh,
        loss_scale: Any = None,
    ) -> None:
        """`loss_scale`: of a run in float16.

        Raises ConfigError if the optimizer cannot withhold an update.
        """
        require_withholding(optimizer, "[stability]")
        self.config = config
        self.data = data
        self.optimizer = optimizer
        self.device = device
        self.loss_scale = loss_scale
        self.copies = mesh.degrees["tp"]  # number of ranks that have the same part of the loss
        self.values = torch.empty(2, config.window, device=device)  # losses and norms; a ring
        # Values entered; bad steps; not finite in a row
        self.counts = torch.empty(3, dtype=torch.int64, device=device)
        self.rollbacks = 0  # of the run, for the metrics
        self._slots = torch.empty(AHEAD, 7, dtype=torch.float64, pin_memory=device.type == "cuda")
        self.reset()

    def reset(self) -> None:
        """Back to the state at the beginning of a run."""
        self.values.zero_()  # not NaN: a checkpoint with NaN counts as bad
        self.counts.zero_()
        # All updates: a step was bad
        self._withholding = torch.zeros((), dtype=torch.bool, device=self.device)
        self._pending: deque[tuple[tuple[int, int, int], Tensor, Any]] = deque()
        self._latest: Verdict | None = None
        self._bad: Verdict | None = None

    def state_dict(self) -> dict[str, Any]:
        return {"values": self.values, "counts": self.counts}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values.copy_(state["values"])
        self.counts.copy_(state["counts"])

    @torch.no_grad()
    def judge(self, step: int, loss: Tensor, grad_norm: Tensor) -> None:
        """Withholds the update of this step if it is bad. All ranks call it before
        `optimizer.step()`.

        `loss`: this rank's part of the loss; `grad_norm`: of the whole gradient. Both are scalars
        on the device.
        """
        total = loss.double() / self.copies
        if dist.get_world_size() > 1:
            dist.all_reduce(total)
        overflow = self.loss_scale.tolerated if self.loss_scale else None
        numbers, withheld = self._decide(
            step, torch.stack([total.float(), grad_norm.float()]), overflow
        )
        withhold(self.optimizer, withheld)
        order = self.data.order
        first = order.number(self.data.begun)
        last = order.number(self.data.samples - 1)
        self._send((step, first, last + 1), numbers)

    def _decide(self, step: int, now: Tensor, overflow: Tensor | None) -> tuple[Tensor, Tensor]:
        """The numbers of a `Verdict` from `kind` on, (7,), and whether the update is withheld. No
        host sync.

        `now`: loss and norm, (2,); `overflow`: whether the update is withheld in any case, since
        the gradient is not finite because of a loss scale that has been lowered.
        """
        entered, (loss_finite, norm_finite) = self.counts[0], now.isfinite()
        finite = loss_finite & norm_finite
        broken = ~finite if overflow is None else ~(loss_finite & (norm_finite | overflow))
        z = torch.full_like(now, math.nan)
        spike = torch.zeros_like(finite)
        if self.config.threshold and step > self.config.warmup_steps:
            z = torch.where(
                4 * entered >= 3 * self.config.window, robust_z(self.values, entered, now), z
            )
            spike = finite & (z > self.config.threshold).any()
        bad = broken | spike
        at = (entered % self.config.window).expand(2, 1)
        self.values.scatter_(1, at, torch.where(finite, now[:, None], self.values.gather(1, at)))
        total = self.counts[1] + bad
        row = (self.counts[2] + 1) * broken
        self.counts.copy_(torch.stack([entered + finite, total, row]))
        if self.config.action != "skip":
            self._withholding |= bad
        kind = NOT_FINITE * broken + SPIKE * spike
        withheld = (
            bad | self._withholding if overflow is None else bad | self._withholding | overflow
        )
        return torch.cat([kind[None], now, z, torch.stack([total, row])]).double(), withheld

    def _send(self, where: tuple[int, int, int], numbers: Tensor) -> None:
        """Starts the copy of a step's numbers to the host."""
        copied = None
        if self.device.type == "cuda":
            if len(self._pending) == AHEAD:
                self._read()  # of a step so long ago that it is complete
            slot = self._slots[where[0] % AHEAD]
            slot.copy_(numbers, non_blocking=True)
            numbers = slot
            copied = torch.cuda.current_stream(self.device).record_event()
        self._pending.append((where, numbers, copied))

    def _read(self) -> None:
        """Reads the oldest numbers that were sent, and waits for them if necessary."""
        where, numbers, copied = self._pending.popleft()
        if copied is not None:
            copied.synchronize()
        kind, loss, grad_norm, loss_z, grad_norm_z, bad, row = numbers.tolist()
        self._latest = verdict = Verdict(
            *where, kind, loss, grad_norm, loss_z, grad_norm_z, int(bad), int(row)
        )
        # Updates after the first bad step were withheld in any case
        if not kind or self._bad is not None:
            return
        if self.config.action != "skip" or verdict.row >= self.config.max_skips:
            self._bad = verdict
        else:
            event = {"event": "spike" if kind == SPIKE else "skip", "step": verdict.step}
            logger.info("%s: its update was skipped, %d so far", verdict, verdict.bad, extra=event)

    @property
    def noticed(self) -> bool:
        """Whether this process has read that the run must act on a bad step.

        Other ranks may read it later.
        """
        while self._pending and (self._pending[0][2] is None or self._pending[0][2].query()):
            self._read()
        return self._bad is not None

    def read_all(self) -> Verdict | None:
        """The step on which the run must act, after waiting for all numbers: the same on all ranks
        after a step.
        """
        while self._pending:
            self._read()
        return self._bad

    def columns(self) -> dict[str, Any]:
        """Columns of a logged step."""
        self.read_all()
        assert self._latest is not None, "a step was judged"
        row: dict[str, Any] = {"bad_steps": self._latest.bad, "rollbacks": self.rollbacks}
        if self.config.threshold:
            row |= {"loss_z": self._latest.loss_z, "grad_norm_z": self._latest.grad_norm_z}
        return row


def robust_z(ring: Tensor, entered: Tensor, now: Tensor) -> Tensor:
    """z of `now` (n,) for each row of a ring (n, window), as at the top of this file. (n,); no host
    sync.

    `entered`: how many numbers were entered so far; the next one goes to entered % window.
    """
    size = ring.shape[1]
    half = size // 2
    age = torch.arange(size, 0, -1, device=ring.device)
    window = ring[:, (entered - age) % size].masked_fill(age > entered, math.nan)  # oldest first
    falls = window[:, half:] - window[:, : size - half]
    slope = _median(falls, (entered - half).clamp(0, size - half)).clamp(max=0) / half
    window = window + slope * age
    count = entered.clamp(max=size)
    median = _median(window, count)
    deviation = 1.4826 * _median((window - median).abs(), count)
    return (now - median[:, 0]) / deviation.maximum(FLOOR * median.abs())[:, 0]


def _median(values: Tensor, count: Tensor) -> Tensor:
    """The median of each row, (n, 1). torch.nanmedian waits for the device."""
    ordered = values.sort(dim=1).values  # NaN last
    middle = torch.stack([(count - 1) // 2, count // 2]).clamp(min=0)
    return ordered.gather(1, middle.expand(len(values), 2)).mean(dim=1, keepdim=True)
