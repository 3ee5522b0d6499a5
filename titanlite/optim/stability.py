"""Recognises bad steps on the device, which can then withhold their updates.

What it is: before each optimizer step the `Guard` judges the loss over all ranks and the norm of
the whole gradient. A step is bad if one of them is NaN, infinite or a spike: with x a loss or norm
and X the values of the last `window` steps,

    z = (x - median(X)) / (1.4826 MAD(X)),   MAD(X) = median(|X - median(X)|)

and it is a spike if z > threshold.

1.4826 MAD estimates the standard deviation of a normal distribution, and a few outliers do not
change it. Its lower bound is FLOOR times the median. While a loss falls, each value in X is lowered
by the slope times its age; otherwise the fall would hide spikes. The slope is the median of the
differences of values half a window apart (Theil 1950, Sen 1968, for some of the pairs); a rise is
not corrected. Finite values enter the window, also spikes, so a new level is adopted once half of
the window has it. Values that are not finite never enter, and a step without targets is not judged:
its loss is undefined, and its gradient of 0 says nothing about the norms of the others.
Why it is here: a NaN must not reach the weights, and the host must not wait for the device to find
one. With the defaults (`action = stop` and no threshold) no step is judged and every update is
applied: the run ends when a loss or norm that it reads is not finite.

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
from titanlite.distributed.mesh import Mesh
from titanlite.optim.found_inf import require_withholding, withhold
from titanlite.optim.loss_scale import LossScale

logger = logging.getLogger("titanlite")

FLOOR = 1e-3  # lower bound of the deviation over the median: equal losses have deviation 0
AHEAD = 8  # most steps whose numbers are on their way to the host
NOT_FINITE = 1.0
SPIKE = 2.0


class Verdict(NamedTuple):
    """The decision about a step. Its samples have the numbers `first` to `end - 1`."""

    step: int
    first: int
    end: int
    kind: float  # 0, NOT_FINITE or SPIKE
    loss: float
    grad_norm: float
    loss_z: float  # NaN without a threshold, and until the window is three quarters full
    grad_norm_z: float
    # Bad steps up to this one, without steps that were rolled back
    num_bad: int
    num_not_finite: int  # steps in a row, up to this one, that were not finite

    def __str__(self) -> str:
        where = f"step {self.step} (samples {self.first} to {self.end - 1})"
        if self.kind != SPIKE:
            values = f"the loss is {self.loss:.6g}, the gradient norm is {self.grad_norm:.6g}"
            return f"{where}: {values}"
        name = "loss"
        value = self.loss
        z = self.loss_z
        if self.grad_norm_z > self.loss_z:
            name = "gradient norm"
            value = self.grad_norm
            z = self.grad_norm_z
        deviations = f"{z:.1f} robust standard deviations above its median"
        return f"{where}: the {name} is {value:.6g}, {deviations}"


class Outcome(NamedTuple):
    """The numbers of a step that the host has read: see `Guard.read`."""

    step: int
    loss: float  # over all ranks; NaN without targets
    grad_norm: float
    overflowed: bool  # float16: a too large loss scale made the norm infinite; it is now lower
    acts_on: Verdict | None  # the bad step that the run must act on: this or an earlier one
    withholds: bool  # whether the guard is on, and so withheld all bad updates

    @property
    def finite(self) -> bool:
        """Whether loss and gradient are finite, so the weights before this step were good."""
        return math.isfinite(self.grad_norm) and math.isfinite(self.loss)

    @property
    def diverged(self) -> bool:
        """Whether the run must act: roll back or end."""
        if self.acts_on is not None:
            return True
        if self.overflowed or self.withholds:
            return False
        # A step without targets has no loss (NaN) and a gradient of 0
        return math.isinf(self.loss) or not math.isfinite(self.grad_norm)

    @property
    def description(self) -> str:
        """Describes the bad step."""
        if self.acts_on is not None:
            return str(self.acts_on)
        return f"step {self.step}: the loss is {self.loss}, the gradient norm is {self.grad_norm}"


class Pending(NamedTuple):
    """The numbers of a step, on their way to the host."""

    step: int
    first: int
    end: int
    numbers: Tensor  # the fields of a `Verdict` from `kind` on, (7,)
    copied: torch.cuda.Event | None  # set when they are in host memory; None: at once


class Guard:
    """Judges each step, and sets `optimizer.found_inf`.

    With `stability.action = stop` and no threshold it is off: then it judges nothing and has no
    state. Stateful: the state is the window and the counts.
    """

    def __init__(
        self,
        config: StabilityConfig,
        optimizer: torch.optim.Optimizer,
        scaler: LossScale,
        mesh: Mesh,
        device: torch.device,
    ) -> None:
        """Raises ConfigError if the optimizer cannot withhold an update."""
        self.enabled = config.action != "stop" or config.threshold > 0
        if self.enabled:
            require_withholding(optimizer, "[stability]")
        self.config = config
        self.optimizer = optimizer
        self.scaler = scaler
        self.device = device
        self.copies = mesh.degrees["tp"]  # ranks that have the same part of the loss
        self.values = torch.empty(2, config.window, device=device)  # rings of losses and norms
        # Values entered, bad steps, steps in a row that were not finite
        self.counts = torch.empty(3, dtype=torch.int64, device=device)
        self.rollbacks = 0  # rollbacks of the run, for the metrics
        self._slots = torch.empty(AHEAD, 7, dtype=torch.float64, pin_memory=device.type == "cuda")
        self.reset()

    def reset(self) -> None:
        """Restores the state at the beginning of a run."""
        self.values.zero_()  # zeros, because a checkpoint that contains NaN counts as bad
        self.counts.zero_()
        # Whether all updates are withheld because a step was bad
        self._withholding = torch.zeros((), dtype=torch.bool, device=self.device)
        self.pending: deque[Pending] = deque()
        self._latest: Verdict | None = None
        self._acts_on: Verdict | None = None

    def set_rollbacks(self, count: int) -> None:
        """Sets the number of rollbacks of the run so far, for the metrics."""
        self.rollbacks = count

    def state_dict(self) -> dict[str, Any]:
        if not self.enabled:
            return {}
        return {"values": self.values, "counts": self.counts}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.enabled:
            self.values.copy_(state["values"])
            self.counts.copy_(state["counts"])

    @torch.no_grad()
    def judge(
        self, step: int, samples: range, loss: Tensor, grad_norm: Tensor, num_targets: Tensor
    ) -> None:
        """Withholds the update of this step if it is bad. All ranks call it before
        `optimizer.step()`, and after `scaler.judge`.

        `samples`: the numbers of the step's samples; `loss`: this rank's part of the loss;
        `grad_norm`: the norm of the whole gradient; `num_targets`: of the step, over all ranks. The
        last three are scalars on the device.
        """
        if not self.enabled:
            return
        total = loss.double() / self.copies
        if dist.get_world_size() > 1:
            dist.all_reduce(total)
        measured = torch.stack([total.float(), grad_norm.float()])
        empty = num_targets == 0
        numbers, withheld = self.decide(step, measured, self.scaler.tolerated, empty)
        withhold(self.optimizer, withheld)
        self.send(step, samples.start, samples.stop, numbers)

    def decide(
        self, step: int, measured: Tensor, overflow: Tensor, empty: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Returns a `Verdict`'s fields from `kind` on, (7,), and whether the update is withheld.

        `measured`: loss and norm, (2,); `overflow`: whether the gradient is not finite because of
        a loss scale that has been lowered; then the update is withheld in any case. `empty`:
        whether the step has no targets; then it is not judged. The host does not wait: all
        decisions are tensors.
        """
        entered = self.counts[0]
        loss_finite, norm_finite = measured.isfinite()
        finite = loss_finite & norm_finite & ~empty
        acceptable = loss_finite & (norm_finite | overflow)
        broken = ~(acceptable | empty)
        z = torch.full_like(measured, math.nan)
        spike = torch.zeros_like(finite)
        if self.config.threshold and step > self.config.warmup_steps:
            full_enough = 4 * entered >= 3 * self.config.window
            z = torch.where(full_enough, robust_z(self.values, entered, measured), z)
            spike = finite & (z > self.config.threshold).any()
        bad = broken | spike

        # Finite values replace the oldest ones in the ring
        place = (entered % self.config.window).expand(2, 1)
        oldest = self.values.gather(1, place)
        self.values.scatter_(1, place, torch.where(finite, measured[:, None], oldest))
        num_bad = self.counts[1] + bad
        # A step that is not judged does not end a sequence of steps that were not finite
        num_not_finite = torch.where(empty, self.counts[2], (self.counts[2] + 1) * broken)
        self.counts.copy_(torch.stack([entered + finite, num_bad, num_not_finite]))

        if self.config.action != "skip":
            self._withholding |= bad
        kind = NOT_FINITE * broken + SPIKE * spike
        withheld = bad | self._withholding | overflow
        numbers = torch.cat([kind[None], measured, z, torch.stack([num_bad, num_not_finite])])
        return numbers.double(), withheld

    def send(self, step: int, first: int, end: int, numbers: Tensor) -> None:
        """Starts the copy of a step's numbers to the host."""
        copied = None
        if self.device.type == "cuda":
            if len(self.pending) == AHEAD:
                self._read_oldest()  # this step is AHEAD steps ago, so it is complete
            slot = self._slots[step % AHEAD]
            slot.copy_(numbers, non_blocking=True)
            numbers = slot
            copied = torch.cuda.current_stream(self.device).record_event()
        self.pending.append(Pending(step, first, end, numbers, copied))

    def _read_oldest(self) -> None:
        """Reads the oldest numbers that were sent, and waits for them if necessary."""
        step, first, end, numbers, copied = self.pending.popleft()
        if copied is not None:
            copied.synchronize()
        kind, loss, grad_norm, loss_z, grad_norm_z, num_bad, num_not_finite = numbers.tolist()
        counts = (int(num_bad), int(num_not_finite))
        verdict = Verdict(step, first, end, kind, loss, grad_norm, loss_z, grad_norm_z, *counts)
        self._latest = verdict
        if kind == 0 or self._acts_on is not None:
            # After the first bad step, all updates are withheld: only the first one matters
            return
        if self.config.action != "skip" or verdict.num_not_finite >= self.config.max_skips:
            self._acts_on = verdict
            return
        event = {"event": "spike" if kind == SPIKE else "skip", "step": verdict.step}
        text = "%s: its update was skipped, %d so far"
        logger.info(text, verdict, verdict.num_bad, extra=event)

    @property
    def noticed(self) -> bool:
        """Whether this process has read that the run must act on a bad step.

        Other ranks may read it later. Does not wait.
        """
        while self.pending:
            copied = self.pending[0].copied
            if copied is not None and not copied.query():
                break
            self._read_oldest()
        return self._acts_on is not None

    def _read_all(self) -> None:
        while self.pending:
            self._read_oldest()

    def read(self, step: int, loss: Tensor, grad_norm: Tensor) -> Outcome:
        """Reads the outcome of this step, the same on all ranks. The host waits for the device.

        `loss`: the loss over all ranks; `grad_norm`: the norm of the whole gradient.
        """
        self._read_all()
        norm = float(grad_norm)
        return Outcome(
            step=step,
            loss=float(loss),
            grad_norm=norm,
            overflowed=not math.isfinite(norm) and bool(self.scaler.tolerated),
            acts_on=self._acts_on,
            withholds=self.enabled,
        )

    def columns(self) -> dict[str, Any]:
        """Returns the columns of a logged step."""
        if not self.enabled:
            return {}
        self._read_all()
        assert self._latest is not None, "a step was judged"
        row: dict[str, Any] = {"bad_steps": self._latest.num_bad, "rollbacks": self.rollbacks}
        if self.config.threshold:
            row["loss_z"] = self._latest.loss_z
            row["grad_norm_z"] = self._latest.grad_norm_z
        return row


def robust_z(ring: Tensor, entered: Tensor, now: Tensor) -> Tensor:
    """Computes z of `now` (n,) for each row of a ring (n, window), as at the top of this file; no
    host sync.

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
    """Computes the median of each row, (n, 1); torch.nanmedian would wait for the device."""
    ordered = values.sort(dim=1).values  # NaNs come last
    middle = torch.stack([(count - 1) // 2, count // 2]).clamp(min=0)
    return ordered.gather(1, middle.expand(len(values), 2)).mean(dim=1, keepdim=True)
