"""Settings that a checkpoint and the resumed run must share, unless `checkpoint.accept` names them.

Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator

from titanlite.config.mistakes import suggestion
from titanlite.config.schema import CheckpointConfig

ACCEPTABLE = (
    "run.seed",
    "data",  # also the names, weights and validation texts of its sources
    "data.phases",
    "data.packing",
    "data.document_mask",
    "training.seq_len",
    "optimizer.lr",
    "optimizer.betas",
    "optimizer.eps",
    "optimizer.weight_decay",
    "optimizer.decayed",
    "optimizer.groups",
    "optimizer.muon_momentum",
    "optimizer.muon_scale",
    "optimizer.clip",
    "optimizer.agc_factor",
    "loss.z_loss",
    "lora.alpha",
    "lora.rslora",
    "lora.dropout",
)


def accept_problems(section: CheckpointConfig) -> Iterator[str]:
    """Names in `checkpoint.accept` that are not allowed there."""
    for accepted in section.accepted:
        if accepted in ACCEPTABLE:
            continue
        hint = suggestion(accepted, list(ACCEPTABLE))
        if accepted.startswith("data.source"):  # as errors name them; `data` stands for them all
            hint = "; did you mean data?"
        yield f"checkpoint.accept: {accepted}: expected some of {', '.join(ACCEPTABLE)}{hint}"
