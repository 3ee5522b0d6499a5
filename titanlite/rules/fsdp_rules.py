"""Rules of `parallel.reshard_after_forward`, if it is not default, always or never."""

from __future__ import annotations

from collections.abc import Iterable

from titanlite.config.mistakes import suggestion
from titanlite.config.schema import Config
from titanlite.model.flavors import LlamaConfig


def sharding_problems(config: Config, llama: LlamaConfig, degrees: dict[str, int]) -> Iterable[str]:
    """`reshard_after_forward` as a number of processes."""
    mode = config.parallel.reshard_after_forward
    size = degrees["dp_shard"] * degrees["cp"]
    if mode.isdecimal() and degrees["pp"] * degrees["tp"] > 1:
        # A deadlock: FSDP2 makes process groups on each row of the mesh alone, but all ranks must
        # take part in each.
        yield (
            f'parallel.reshard_after_forward = "{mode}": a number works without parallel.pp and parallel.tp only; '
            "with them use default, always or never"
        )
        return
    groups = [n for n in range(2, size) if size % n == 0]
    if not mode.isdecimal():
        near = suggestion(mode, ["default", "always", "never"])
        yield f'parallel.reshard_after_forward = "{mode}": expected default, always, never or a number{near}'
    elif int(mode) not in groups:
        allowed = ", ".join(map(str, groups)) or f"none for {size}, so use default, always or never"
        yield (
            f'parallel.reshard_after_forward = "{mode}": expected a number of processes that divides '
            f"parallel.dp_shard x parallel.cp = {size} and is neither 1 nor all of them; allowed: {allowed}"
        )
