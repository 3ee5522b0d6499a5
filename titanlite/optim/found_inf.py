"""Withholding an update on the device, by the protocol of torch.amp.GradScaler.

What it is: where the scalar `optimizer.found_inf` is 1, `optimizer.step()` changes neither
parameters nor its state.
Why it is here: float16's loss scale and the guard against bad steps decide on the device, and both
set it.
What it costs: nothing but a scalar. With `parallel.cpu_offload` the host waits for the decision,
because the update is computed on the CPU.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from titanlite.runtime.errors import ConfigError


def withhold(optimizer: Any, flag: Tensor) -> None:
    """The next update is withheld if the scalar `flag` is true."""
    (parameter, *_) = optimizer.param_groups[0]["params"]
    # The optimizer would copy it to the parameters' device too, but not wait: a CPU would read it
    # before it is there.
    optimizer.found_inf = flag.float().to(parameter.device)


def require_withholding(optimizer: torch.optim.Optimizer, asked_by: str) -> None:
    """Raises ConfigError if an optimizer does not say that it honours `found_inf`, as torch's fused
    ones do.

    `asked_by`: the setting that needs it.
    """
    fused = all(group.get("fused") for group in optimizer.param_groups)
    if not (fused or getattr(optimizer, "honours_found_inf", False)):
        name = type(optimizer).__name__
        raise ConfigError(f"{asked_by}: {name} cannot withhold an update; expected fused AdamW")


def withheld(optimizer: torch.optim.Optimizer) -> Tensor | None:
    """1.0 on the device if the last update was withheld, 0.0 if not; None without a decision."""
    return getattr(optimizer, "found_inf", None)
