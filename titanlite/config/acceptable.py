"""Settings that a checkpoint and the resumed run must share, unless `checkpoint.accept` names them.

Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator

from titanlite.config.keys import schema_keys
from titanlite.config.mistakes import suggestion
from titanlite.config.schema import CheckpointConfig

# `data` stands for the sources: their names, weights, texts and validation texts
ACCEPTABLE = ("data", *(name for name, key in schema_keys().items() if key.resume == "same"))


def accept_problems(section: CheckpointConfig) -> Iterator[str]:
    """Yields a message for each name in `checkpoint.accept` that is not allowed there."""
    for accepted in section.accepted:
        if accepted in ACCEPTABLE:
            continue
        hint = suggestion(accepted, list(ACCEPTABLE))
        if accepted.startswith("data.source"):  # an error's name for a source
            hint = "; did you mean data?"
        yield f"checkpoint.accept: {accepted}: expected some of {', '.join(ACCEPTABLE)}{hint}"
