"""What a checkpoint holds: tensors by plain names; what cannot be written is refused with its name, and
nothing of a save stays behind.
"""

from __future__ import annotations

import gc
import io
import random
import weakref
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from checkpoints import write_step
from fuzz_samples import Reader
from safetensors import safe_open

from titanlite.checkpoint.manager import Checkpointer
from titanlite.checkpoint.manifest import RunMetadata, read_manifest
from titanlite.checkpoint.state import OptionalStateful, RandomState, switched_on
from titanlite.checkpoint.storage import SaveError
from titanlite.config.schema import CheckpointConfig

FACTS = RunMetadata({}, {}, "")
GOOD = torch.ones(2)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0.1, "model.a: is of type float; expected plain tensors and DTensors"),
        ("text", "model.a: is of type str; expected plain tensors and DTensors"),
        (torch.ones(2, dtype=torch.complex64), "model.a: is torch.complex64; a safetensors file"),
    ],
    ids=str,
)
def test_what_no_file_can_hold_is_refused(tmp_path, value, expected):
    with pytest.raises(SaveError) as caught:
        write_step(tmp_path, 1, {"model": {"good": GOOD, "a": value}}, {}, FACTS)
    assert str(caught.value).startswith(f"step 1 could not be saved in {tmp_path}: {expected}")
    assert not list(tmp_path.iterdir())


def test_names_are_plain_and_the_header_says_where_a_part_begins(tmp_path):
    state = {"model": {"a.weight": torch.ones(3, 2)}, "data": {"samples": torch.tensor(7)}}
    manifest = write_step(tmp_path, 1, state, {"note.txt": b"x"}, FACTS)
    assert manifest == read_manifest(tmp_path / "step-1")
    assert list(manifest.files) == [
        "model-00000.safetensors",
        "training-00000.safetensors",
        "note.txt",
    ]
    with safe_open(tmp_path / "step-1/model-00000.safetensors", framework="pt") as file:
        assert list(file.keys()) == ["model.a.weight"]
        assert file.metadata() == {
            "DCP_SHARDING_INFO": '{"model.a.weight":{"saved_offsets":[0,0]}}',
            "DCP_VERSION": "1.0",
            "format": "pt",
        }


class Weights:
    """A Stateful part."""

    def __init__(self) -> None:
        self.weight = torch.ones(100)

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"weight": self.weight}

    def load_state_dict(self, state_dict: dict[str, torch.Tensor]) -> None: ...


class Facts:
    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}

    def metadata(self, validation_loss: float | None) -> RunMetadata:
        return FACTS


def copies_after_a_save(folder: Path) -> list[bool]:
    """Whether the copy that an asynchronous save made is still in memory, for two saves.

    The memory is not kept for the next save, as on CUDA with `async_mode = disabled`.
    """
    config = CheckpointConfig(async_mode="async")
    manager = Checkpointer(config, folder, {"model": Weights()}, Facts(), torch.device("cpu"), None)
    manager.saver.staging.keep = False
    copies = []
    original = manager.saver.staging.copy

    def copy(*arguments):
        staged = original(*arguments)
        copies.append(weakref.ref(staged["model"]["weight"]))
        return staged

    manager.saver.staging.copy = copy
    found = []
    for step in (1, 2):
        manager.save(step, None, wait=True)
        gc.collect()
        found.append(copies[-1]() is not None)
    if dist.get_rank() == 0:
        assert (folder / "checkpoints/step-2").is_dir()
    return found


def test_the_copy_of_a_save_is_freed_after_it(pool, tmp_path):
    assert pool.run(2, copies_after_a_save, tmp_path) == [[False, False]] * 2


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
    assert switched_on({"on": Part(True), "off": Part(False)}).keys() == {"on"}
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
