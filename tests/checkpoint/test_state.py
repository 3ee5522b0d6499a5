"""What a checkpoint holds: tensors only, and nothing of a part that is switched off."""

from __future__ import annotations

import io
import random
from pathlib import Path

import torch
from fuzz_samples import Reader

from titanlite.checkpoint.state import OptionalStateful, RandomState, state_of


class Part:
    """A part of a run that is switched on or off."""

    def __init__(self, enabled: bool) -> None:
        self.enabled = enabled

    def state_dict(self):
        return {"value": torch.ones(2)} if self.enabled else {}

    def load_state_dict(self, state):
        raise AssertionError("not called")

    def reset(self):
        raise AssertionError("not called")


def test_a_part_that_is_off_is_left_out():
    assert state_of({"on": Part(True), "off": Part(False)}).keys() == {"on"}
    assert isinstance(Part(True), OptionalStateful)
    assert not isinstance(RandomState(), OptionalStateful)


def test_random_state_round_trips():
    state = RandomState()
    saved = state.state_dict()
    assert all(isinstance(value, torch.Tensor) for value in saved.values())
    expected = (random.random(), torch.rand(3).tolist())
    random.random()
    state.load_state_dict(saved)
    assert (random.random(), torch.rand(3).tolist()) == expected


def random_state_bytes() -> bytes:
    return b"".join(tensor.numpy().tobytes() for tensor in RandomState().state_dict().values())


def load_random_state(folder: Path, data: bytes) -> None:
    """Loads states of random generators that have the right shape and any content."""
    content = io.BytesIO(data.ljust(len(random_state_bytes()), b"\0"))
    state = RandomState().state_dict()
    for name, tensor in state.items():
        state[name] = torch.frombuffer(bytearray(content.read(tensor.nbytes)), dtype=tensor.dtype)
    RandomState().load_state_dict(state)
    random.random(), torch.rand(3)


FUZZED = {
    "random state": Reader("bytes", lambda folder: [random_state_bytes()], load_random_state),
}
