"""Which parts of a run begin anew when it resumes; the rest is in tests/e2e/test_resume.py."""

from __future__ import annotations

import torch

from titanlite.checkpoint.grid import Grid
from titanlite.checkpoint.manifest import Manifest, TensorEntry
from titanlite.checkpoint.resume import missing_parts
from titanlite.checkpoint.state import RandomState, state_of


class Optional:
    """A part that a checkpoint may lack; without a value it is off."""

    def __init__(self, *values: float) -> None:
        self.values = values

    def state_dict(self):
        return {"value": torch.tensor(self.values)} if self.values else {}

    def load_state_dict(self, state): ...

    def reset(self): ...


def test_only_optional_parts_that_are_on_and_not_in_the_checkpoint_begin_anew():
    grid = Grid(((0, 1),), ("training-00000.safetensors",))
    tensors = {"saved.value": TensorEntry("F32", grid)}
    manifest = Manifest(1, True, "", "", {}, {}, "", None, {}, tensors)
    states = {
        "saved": Optional(1.0),
        "new": Optional(1.0),
        "off": Optional(),
        "random": RandomState(),  # not optional: reading the checkpoint names what is absent
    }
    assert missing_parts(manifest, states, state_of(states)) == {"new": states["new"]}
