"""Which parts of a run begin anew when it resumes; the rest is in tests/e2e/test_resume.py."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from pathlib import Path

import pytest
import torch
from fuzz_samples import DATA, SHAPE, STEP, Reader, resume, write_run
from messages import refused

from titanlite.checkpoint.grid import Grid
from titanlite.checkpoint.manifest import NAME, SEAL, FileEntry, Manifest, TensorEntry
from titanlite.checkpoint.resume import (
    EXCLUDED,
    missing_parts,
    require_compatible,
    samples_used,
    training_changes,
)
from titanlite.checkpoint.state import RandomState, switched_on
from titanlite.checkpoint.step_files import digest_of
from titanlite.config.schema import CheckpointConfig, Config
from titanlite.model.flavors import FLAVORS


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
    assert missing_parts(manifest, switched_on(states)) == {"new": states["new"]}


@pytest.mark.parametrize("content", [b"", b"not a file of tensors"])
def test_a_count_of_samples_that_is_no_count_is_found_when_it_is_loaded(tmp_path, content):
    """It is looked at before: a number with a fraction, or infinity, is not converted."""
    name = "training-00000.safetensors"
    (tmp_path / name).write_bytes(content)
    tensors = {"data.samples": TensorEntry("F32", Grid((), (name,)))}
    manifest = Manifest(1, True, "", "", {}, {}, "", None, {}, tensors)
    assert samples_used(tmp_path, manifest) == 0
    manifest = dataclasses.replace(
        manifest, tensors={"data.samples": TensorEntry("I64", Grid((), (name,)))}
    )
    with refused(name):
        samples_used(tmp_path, manifest)


@pytest.mark.parametrize("older", [False, True])
def test_a_model_that_computes_otherwise_is_refused(tmp_path, older):
    """Also if model.json was written before the field existed: its shapes are the same."""
    shape = json.loads(FLAVORS["debug"].to_json())
    if older:
        del shape["sliding_window"]
        del shape["window_layers"]
    source = {"name": "a", "weight": 1, "manifest": {"bytes": 1, "fingerprint": "0"}}
    files = {
        "model.json": json.dumps(shape).encode(),
        "data.json": json.dumps({"sources": [source]}).encode(),
    }
    entries = {}
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
        entries[name] = FileEntry(len(content), digest_of(tmp_path / name))
    config = dataclasses.asdict(Config())
    saved = dataclasses.asdict(Config())
    group = {"pattern": "norm.*", "lr": None, "weight_decay": 0.0}
    config["optimizer"]["groups"] = [group]
    saved["optimizer"]["groups"] = [group]
    manifest = Manifest(1, True, "", "", {}, saved, "", None, entries, {})
    section = CheckpointConfig()

    def resume(**changes: object) -> None:
        llama = dataclasses.replace(FLAVORS["debug"], **changes)
        now = {**files, "model.json": llama.to_json().encode()}
        require_compatible(tmp_path, manifest, config, now, section)

    resume()
    assert training_changes(json.loads(json.dumps(saved)), config) == []
    with refused("model.sliding_window was 0 and is 8", "cannot change within a run"):
        resume(sliding_window=8)
    with refused("model.rope_theta was 500000.0 and is 10000.0"):
        resume(rope_theta=10000.0)


def resume_with(name: str, folder: Path, data: bytes) -> None:
    """Resumes with other bytes in a small file of the step, and a manifest that fits them."""
    (folder / STEP / name).write_bytes(data)
    fields = json.loads((folder / STEP / NAME).read_text())
    fields["files"][name] = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    fields.pop("sha256")
    body = json.dumps(fields).removesuffix("}")
    digest = hashlib.sha256(body.encode()).hexdigest()
    (folder / STEP / NAME).write_text(f'{body}{SEAL}{digest}"}}\n')
    resume(folder)


def file_of_a_step(name: str, sample: bytes) -> Reader:
    def prepare(folder: Path) -> list[bytes]:
        write_run(folder)
        return [sample]

    return Reader("text", prepare, functools.partial(resume_with, name))


FUZZED = {
    "model.json of a step": file_of_a_step("model.json", SHAPE),
    "data.json of a step": file_of_a_step("data.json", DATA),
    f"{EXCLUDED} of a step": file_of_a_step(EXCLUDED, b"[[32, 40], [72, 80]]"),
}
