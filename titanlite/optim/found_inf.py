"""Withholds an update on the device, by the protocol of torch.amp.GradScaler.

What it is: where the scalar `optimizer.found_inf` is 1, `optimizer.step()` changes neither
parameters nor its state.
Why it is here: float16's loss scale and the guard against bad steps decide on the device, and both
set this flag.
What it costs: one scalar. With `parallel.cpu_offload` the host waits for the decision,
because the update is computed on the CPU.
"""

from __future__ import annotations

import torch
from torch import Tensor

from titanlite.runtime.errors import ConfigError


def withhold(optimizer: torch.optim.Optimizer, flag: Tensor) -> None:
    """Withholds the next update if the scalar `flag` is true."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if not parameters:  # of this pipeline stage none is trained
        return
    # The optimizer copies the flag to the parameters' device too, but does not wait: a CPU would
    # read it before it has arrived.
    set_found_inf(optimizer, flag.float().to(parameters[0].device))


def found_inf_of(optimizer: torch.optim.Optimizer) -> Tensor | None:
    """Returns the flag of the next update, a scalar on the device; None if it is not set."""
    found_inf: Tensor | None = getattr(optimizer, "found_inf", None)
    return found_inf


def set_found_inf(optimizer: torch.optim.Optimizer, found_inf: Tensor | None) -> None:
    """Sets the flag, an attribute that torch's optimizers read but do not declare."""
    optimizer.found_inf = found_inf  # type: ignore[attr-defined]


def require_withholding(optimizer: torch.optim.Optimizer, setting: str) -> None:
    """Raises ConfigError if an optimizer does not honour `found_inf`, as torch's fused ones do.

    `setting`: what needs it.
    """
    fused = all(group.get("fused") for group in optimizer.param_groups)
    if not (fused or getattr(optimizer, "honours_found_inf", False)):
        name = type(optimizer).__name__
        raise ConfigError(f"{setting}: {name} cannot withhold an update; expected fused AdamW")
