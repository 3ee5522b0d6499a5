"""Damage and malice: every flipped byte is found, and no manifest or shard makes us do more than
say no.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import random
import re
import shutil
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from checkpoints import read_step, write_step
from fuzz_samples import STEP, Reader, read_run, write_run

from titanlite.checkpoint import manifest as manifests
from titanlite.checkpoint.manifest import (
    NAME,
    SEAL,
    CorruptCheckpoint,
    RunMetadata,
    read_manifest,
    to_text,
)
from titanlite.checkpoint.shard_file import ShardFile
from titanlite.checkpoint.step_files import verify_files
from titanlite.model.flavors import FLAVORS
from titanlite.runtime.errors import ConfigError
from titanlite.tools.cli.main import main
from titanlite.tools.formats.load_weights import load_model, read_weights
from titanlite.tools.formats.shared_model import open_shared

MODEL = "model-00000.safetensors"


def small_checkpoint(folder: Path) -> None:
    """Step 1, with two weights, moments, and small files."""
    state = {
        "model": {"a": torch.arange(12.0).reshape(3, 4), "b": torch.ones(5, dtype=torch.bfloat16)},
        "training": {"count": torch.tensor(7), "random": torch.arange(9, dtype=torch.uint8)},
    }
    files = {"model.json": b"{}", "tokenizer.model": bytes(range(256))}
    write_step(
        folder, 1, state, files, RunMetadata({"dp_shard": 1}, {"run": {"name": "x"}}, "f" * 64, 1.5)
    )


@pytest.fixture(scope="module")
def written(pool, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("written")
    pool.run(1, small_checkpoint, folder)
    return folder / "step-1"


@pytest.fixture
def step(written, tmp_path) -> Path:
    """A copy of the step, for each test to damage."""
    shutil.copytree(written, tmp_path / "step-1")
    return tmp_path / "step-1"


def problems(step: Path) -> list[str]:
    try:
        return verify_files(step, read_manifest(step))
    except CorruptCheckpoint as error:
        return error.problems


def state() -> dict[str, Any]:
    return {"model": {"a": torch.zeros(3, 4), "b": torch.zeros(5, dtype=torch.bfloat16)}}


def test_it_reads_back(step):
    manifest, found = read_manifest(step), state()
    assert not verify_files(step, manifest)
    read_step(step, manifest, found)
    assert torch.equal(found["model"]["a"], torch.arange(12.0).reshape(3, 4))
    assert (manifest.step, manifest.finite, manifest.validation_loss) == (1, True, 1.5)
    assert set(json.loads((step / NAME).read_text())) > {
        "format",
        "layout",
        "config",
        "torch",
        "files",
        "tensors",
    }


def test_a_manifest_that_could_not_be_read_again_is_not_written(step, monkeypatch):
    manifest = read_manifest(step)
    text = to_text(manifest)
    monkeypatch.setattr(manifests, "MAX_BYTES", len(text) - 1)
    with pytest.raises(ValueError, match="would have"):
        to_text(manifest)


@pytest.mark.slow
def test_every_flipped_byte_is_found(step):
    chance, files = random.Random(0), sorted(step.iterdir())
    sizes = [path.stat().st_size for path in files]
    for _ in range(1000):
        path = chance.choices(files, sizes)[0]
        content = path.read_bytes()
        place, bit = chance.randrange(len(content)), 1 << chance.randrange(8)
        path.write_bytes(content[:place] + bytes([content[place] ^ bit]) + content[place + 1 :])
        found = problems(step)
        assert found, f"{path.name}: bit {bit} of byte {place}"
        assert path.name in found[0]
        path.write_bytes(content)
    assert not problems(step)


def test_every_truncation_is_found(step):
    chance = random.Random(0)
    for _ in range(20):
        path = chance.choice(sorted(step.iterdir()))
        content = path.read_bytes()
        os.truncate(path, chance.randrange(len(content)))
        assert path.name in problems(step)[0]
        path.write_bytes(content)
    assert not problems(step)


Change = Callable[[dict[str, Any]], Any]


def tensor(**fields: Any) -> Change:
    return lambda manifest: manifest["tensors"]["model.a"].update(fields)


def grid(**fields: Any) -> Change:
    """Another grid of the tensor `model.a`."""
    return lambda manifest: manifest["grids"][str(manifest["tensors"]["model.a"]["grid"])].update(
        fields
    )


def setting(value: Any) -> Change:
    """A setting that no run has."""
    return lambda manifest: manifest["config"]["run"].update(since_removed=value)


def absurd(*shape: int) -> Change:
    def change(manifest: dict[str, Any]) -> None:
        tensor(shape=list(shape))(manifest)
        grid(edges=[[0, size] for size in shape])(manifest)

    return change


def file(name: str) -> Change:
    """A file of another name, which holds a tensor."""

    def change(manifest: dict[str, Any]) -> None:
        manifest["files"][name] = manifest["files"].pop(MODEL)
        for entry in manifest["grids"].values():
            entry["files"] = [name if other == MODEL else other for other in entry["files"]]

    return change


HOSTILE: dict[str, Change] = {  # a manifest whose own hash is right, but not what it says
    "a file above": file("../../canary"),
    "an absolute file": file("/etc/passwd"),
    "a file in a folder": file("a/b"),
    "a hidden file": file(".bashrc"),
    "a name with a zero": file("model\0x"),
    "a very long name": file("m" * 5000),
    "no name": file(""),
    "the manifest itself": file(NAME),
    "a negative size": tensor(shape=[-3, 4]),
    "an absurd shape": absurd(1 << 40, 1 << 40),
    "a shape beyond 64 bits": absurd(10**4000),
    "a shape of fractions": tensor(shape=[3.0, 4.0]),
    "a shape of truths": tensor(shape=[True, 12]),
    "a grid of another shape": tensor(shape=[4, 3]),
    "a grid that is not there": tensor(grid=99),
    "a grid that is a list": tensor(grid=[0]),
    "a grid of a file that is not there": grid(files=["model-00009.safetensors"]),
    "a grid of a file that is a list": grid(files=[["x"]]),
    "a cell without a file": grid(edges=[[0, 1, 3], [0, 4]]),
    "a grid of a file that is not of tensors": grid(files=["model.json"]),
    "a file without a cell": grid(files=[MODEL, MODEL]),
    "edges that descend": grid(edges=[[0, 4, 3], [0, 4]], files=[MODEL, MODEL]),
    "edges that do not begin at zero": grid(edges=[[1, 3], [0, 4]]),
    "edges that are fractions": grid(edges=[[0, 3.0], [0, 4]]),
    "no edges": grid(edges=[[], []], files=[]),
    "edges that are a number": grid(edges=7),
    "cells without number": grid(edges=[list(range(4)) for _ in range(60)]),
    "forty thousand dimensions": absurd(*[1] * 40_000),
    "an escape sequence for a name": lambda manifest: manifest["tensors"].update(
        {"\x1b[2J": manifest["tensors"].pop("model.a")}
    ),
    "an escape sequence for an axis": lambda manifest: manifest.update(layout={"\x1b[2J": 2}),
    "data that is a number": lambda manifest: manifest.update(data=5),
    "a loss that is none": lambda manifest: manifest.update(validation_loss=float("nan")),
    "an unknown dtype": tensor(dtype="os.system"),
    "a dtype that is none": tensor(dtype=["F32"]),
    "a tensor that is a list": lambda manifest: manifest["tensors"].update({"model.a": [1, 2]}),
    "tensors that are a number": lambda manifest: manifest.update(tensors=7),
    "grids that are a number": lambda manifest: manifest.update(grids=7),
    "an extra field": lambda manifest: manifest.update(__class__="x"),
    "no files": lambda manifest: manifest.pop("files"),
    "a size that is text": lambda manifest: manifest["files"][MODEL].update(size="100"),
    "a hash that is none": lambda manifest: manifest["files"][MODEL].update(sha256="../x"),
    "a section that is a list": lambda manifest: manifest.update(config={"run": ["name"]}),
    "a setting that is a table": setting({"name": "x"}),
    "settings that are deep": setting([[[[[1]]]]]),
    "a setting of many values": setting([0] * (1 << 18)),
    "a setting of long text": setting("x" * (1 << 22)),
    "another shape than the shard's": lambda manifest: [absurd(4, 3)(manifest)],
    "another dtype than the shard's": tensor(dtype="I32"),
}


def reseal(step: Path, change: Change) -> None:
    """Writes a changed manifest with a right hash, as an attacker would."""
    fields = json.loads((step / NAME).read_text())
    fields.pop("sha256")
    change(fields)
    body = json.dumps(fields)[:-1]
    (step / NAME).write_text(body + SEAL + hashlib.sha256(body.encode()).hexdigest() + '"}\n')


def outside(folder: Path) -> dict[str, bytes | None]:
    return {
        str(path): path.read_bytes() if path.is_file() else None
        for path in sorted(folder.rglob("*"))
    }


def test_a_tensor_has_room_in_its_own_files(step):
    """Before memory is allocated for its shape, whatever the model is."""
    reseal(step, absurd(1 << 40, 1 << 40))
    with pytest.raises(CorruptCheckpoint, match="longer than its files"):
        read_manifest(step)


def test_many_tensors_of_one_large_grid_cost_nothing(step):
    """Each names its grid in a few bytes, and each of its 262,144 parts would have to be found: a
    file has at most one part of a tensor.
    """

    def change(manifest: dict[str, Any]) -> None:
        manifest["grids"]["9"] = {"edges": [list(range(513))] * 2, "files": [MODEL] * 512 * 512}
        manifest["files"][MODEL]["size"] = 1 << 30
        for number in range(32):
            manifest["tensors"][f"model.{number}"] = {
                "dtype": "F32",
                "shape": [512, 512],
                "grid": 9,
            }

    reseal(step, change)
    started = time.process_time()
    with pytest.raises(CorruptCheckpoint, match="grids: 262144 files"):
        read_manifest(step)
    assert time.process_time() - started < 5


def test_many_empty_lists_are_counted_before_they_are_parsed(step):
    reseal(step, setting([[]] * (1 << 21)))
    started = time.process_time()
    with pytest.raises(CorruptCheckpoint, match="lists and tables; at most 2097152"):
        read_manifest(step)
    assert time.process_time() - started < 1


def test_a_setting_of_any_version_is_kept(step):
    phases = [{"from_step": 1, "weights": [["a", 0.5]]}]  # the deepest, and one that has left
    reseal(step, setting(phases))
    assert read_manifest(step).config == {"run": {"name": "x", "since_removed": phases}}


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("optimizer.lr", [1], r"optimizer.lr = \[1\]; expected a number"),
        ("optimizer.lr", 10**400, "optimizer.lr = Infinity; expected a number"),
        ("optimizer.betas", [0.9], r"optimizer.betas = \[0.9\]; expected a list of two numbers"),
        ("training.seq_len", 10**30, r"training.seq_len = 1e\+30; expected an integer"),
        ("training.seq_len", None, "training.seq_len = null; expected an integer"),
        ("metrics.sinks", [3], r"metrics.sinks = \[3\]; expected a list of strings"),
        ("data.sources", "x", 'data.sources = "x"; expected a list of tables'),
        ("checkpoint.initial_load", 5, "checkpoint.initial_load = 5; expected a string"),
    ],
)
def test_a_known_setting_of_another_type_is_refused(step, name, value, expected):
    section, _, key = name.partition(".")
    reseal(step, lambda manifest: manifest["config"].update({section: {key: value}}))
    with pytest.raises(CorruptCheckpoint, match=f"{NAME}: invalid manifest .config: {expected}"):
        read_manifest(step)


def test_settings_that_had_another_type_before_are_read(step):
    """As a step has them that an earlier version saved."""
    old = {
        "compile": {"enabled": True, "loss": False},
        "model": {"qkv_bias": "", "qk_norm": "true", "dim": 0},
        "optimizer": {"betas": [0, 0.95], "lr": 1},
    }
    reseal(step, lambda manifest: manifest["config"].update(old))
    assert read_manifest(step).config == {"run": {"name": "x"}} | old


@pytest.mark.parametrize("change", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_manifest_is_refused(step, change):
    (step.parent / "canary").write_text("mine")
    reseal(step, change)
    before, started = outside(step.parent), time.process_time()
    with pytest.raises(ConfigError):
        read_step(step, read_manifest(step), state())
    with pytest.raises(ConfigError):
        load_model(open_shared(step), torch.device("cpu"), 8)
    assert main(["checkpoint", "list", str(step.parent)]) == 0
    assert main(["checkpoint", "show", str(step)]) in (0, 2)
    assert main(["checkpoint", "diff", str(step), str(step)]) in (0, 2)
    assert main(["generate", str(step)]) == 2
    assert outside(step.parent) == before
    assert time.process_time() - started < 5


def test_deep_nesting_is_refused(step):
    body = (
        (step / NAME)
        .read_text()
        .rpartition(SEAL)[0]
        .replace('"f' + "f" * 63 + '"', "[" * 100_000 + "]" * 100_000)
    )
    (step / NAME).write_text(body + SEAL + hashlib.sha256(body.encode()).hexdigest() + '"}\n')
    with pytest.raises(CorruptCheckpoint, match="nested more than 64 levels"):
        read_manifest(step)


def test_another_format_is_told_from_damage(step):
    reseal(step, lambda manifest: manifest.update(format=2))
    with pytest.raises(ConfigError, match=r"format 2 of another .* expected 3") as caught:
        read_manifest(step)
    assert not isinstance(caught.value, CorruptCheckpoint)


def linked(step: Path, name: str) -> None:
    target = step.parent / "elsewhere"
    shutil.move(step / name, target)
    (step / name).symlink_to(target)


@pytest.mark.parametrize("name", [MODEL, NAME, "tokenizer.model"])
def test_links_and_devices_are_no_files(step, name):
    linked(step, name)
    assert "expected a regular file" in problems(step)[0]
    # The one waits for ever, the other never ends
    for make in (os.mkfifo, lambda path: path.symlink_to("/dev/zero")):
        (step / name).unlink()
        make(step / name)
        assert "expected a regular file" in problems(step)[0]
        assert main(["checkpoint", "diff", str(step), str(step)]) == 2
        assert main(["generate", str(step)]) == 2


def test_a_file_that_the_manifest_does_not_name_is_not_read(step):
    reseal(
        step,
        lambda manifest: [
            manifest["files"].pop(name) for name in ("model.json", "tokenizer.model")
        ],
    )
    for name in ("model.json", "tokenizer.model"):
        (step / name).unlink()
        (step / name).symlink_to("/dev/zero")
    with pytest.raises(CorruptCheckpoint, match="not in the manifest"):
        load_model(open_shared(step), torch.device("cpu"), 8)
    assert main(["generate", str(step)]) == 2


OUTSIDE = b'{"model.a": {"dtype": "F32", "shape": [3, 4], "data_offsets": [0, 1125899906842624]}}'
HEADERS = {
    "longer than the file": struct.pack("<Q", 1 << 40),
    "negative": b"\xff" * 8,
    "not JSON": struct.pack("<Q", 8) + b"os.exit!",
    "deep": struct.pack("<Q", 90_000) + b"[" * 90_000,
    "offsets outside": struct.pack("<Q", len(OUTSIDE)) + OUTSIDE,
    "empty": b"",
}


@pytest.mark.parametrize("header", HEADERS.values(), ids=HEADERS)
def test_a_hostile_shard_is_refused(step, header):
    """Its size and hash are in the manifest as they are, as if the author had meant it."""
    shard = step / MODEL
    content = header.ljust(shard.stat().st_size, b"\0") if header else b""
    shard.write_bytes(content)
    entry = {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    reseal(step, lambda manifest: manifest["files"].update({MODEL: entry}))
    with pytest.raises(ConfigError, match="step-1"):
        read_step(step, read_manifest(step), state())


@pytest.mark.parametrize(
    "shape",
    [
        {"dim": 1 << 40},
        {"num_layers": 1 << 40},
        {"vocab_size": -1},
        {"num_heads": 0},
        {"dim": "x"},
        {"ffn_dim": 1e9},
    ],
    ids=str,
)
def test_a_hostile_model_shape_takes_no_memory(whole_run, tmp_path, shape):
    folder = tmp_path / "step-6"
    shutil.copytree(whole_run() / "checkpoints/step-6", folder)
    content = json.dumps(json.loads((folder / "model.json").read_text()) | shape).encode()
    (folder / "model.json").write_bytes(content)
    entry = {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    reseal(folder, lambda manifest: manifest["files"].update({"model.json": entry}))
    started = time.process_time()
    with pytest.raises(ConfigError, match="step-6"):
        load_model(open_shared(folder), torch.device("cpu"), 8)
    assert time.process_time() - started < 5


def test_what_does_not_fit_is_listed_by_name(step):
    whole_numbers = torch.zeros(5, dtype=torch.int64)
    other = {
        "model": {"a": torch.zeros(4, 3), "b": whole_numbers, "c": torch.zeros(1)},
        "training": {"count": whole_numbers.float()[0]},
    }
    with pytest.raises(ConfigError) as caught:
        read_step(step, read_manifest(step), other)
    assert [problem.split(": ", 1)[1] for problem in caught.value.problems] == [
        "model.a is float32 [3, 4]; expected float32 [4, 3]",
        "model.b is bfloat16 [5]; expected int64 [5]",
        "has no model.c",
        "training.count is int64 []; expected float32 []",
    ]


def test_another_precision_is_rounded_to(step):
    other = {"model": {"a": torch.zeros(3, 4, dtype=torch.bfloat16), "b": torch.zeros(5)}}
    read_step(step, read_manifest(step), other)
    assert other["model"]["a"].equal(torch.arange(12.0).reshape(3, 4).bfloat16())
    assert other["model"]["b"].equal(torch.ones(5))


def read_where_one_may_not(folder: Path, number: int) -> None:
    """Rank 1 meets an error that is not the folder's."""
    from titanlite.checkpoint import step_files

    def refuse(path, progress):
        raise OSError(number, os.strerror(number))

    if torch.distributed.get_rank() == 1:
        step_files.digest_of = refuse
    if number == errno.EACCES:
        with pytest.raises(ConfigError, match=r"\.\w+: Permission denied"):
            step_files.verify_together(folder)
    else:
        with pytest.raises(CorruptCheckpoint) as caught:
            step_files.verify_together(folder)
        assert len(caught.value.problems) == 2


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO])
def test_what_a_process_may_not_read_is_not_damaged(pool, step, number):
    pool.run(2, read_where_one_may_not, step, number)


def fail_on_rank_1(folder: Path, kind: str) -> str:
    """How reading a checkpoint ends on this rank, if rank 1 meets an error of some kind."""

    wanted, original = state(), ShardFile.read
    if dist.get_rank() == 1:
        if kind == "mismatch":
            wanted["model"]["a"] = torch.zeros(4, 3)

        def fail(*arguments):
            raise {
                "damaged": OSError(errno.EIO, "Input/output error"),
                "memory": RuntimeError("out of memory"),
            }[kind]

        ShardFile.read = fail if kind != "mismatch" else original
    try:
        read_step(folder, read_manifest(folder), wanted)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        ShardFile.read = original
    return ""


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("mismatch", "ConfigError: .*model.a is float32"),
        ("damaged", "CorruptCheckpoint: .*Input/output error"),
        ("memory", "RuntimeError: .*out of memory"),
    ],
)
def test_an_error_of_one_process_is_raised_on_all(pool, step, kind, expected):
    for found in pool.run(2, fail_on_rank_1, step, kind):
        assert re.match(expected, found), found


def load_together(folder: Path) -> None:
    with pytest.raises(CorruptCheckpoint, match="SHA-256"):
        read_weights(folder, state()["model"], FLAVORS["debug"], b"")


def test_damage_is_seen_by_all_processes(pool, step):
    content = bytearray((step / MODEL).read_bytes())
    content[-1] ^= 1
    (step / MODEL).write_bytes(content)
    pool.run(2, load_together, step)


def without_seal(folder: Path) -> list[bytes]:
    return [sample.decode().rpartition(SEAL)[0].encode() + b"}" for sample in write_run(folder)]


def sealed(data: bytes) -> bytes:
    """A manifest with a valid hash of itself."""
    body = data.rstrip().removesuffix(b"}")
    return body + SEAL.encode() + hashlib.sha256(body).hexdigest().encode() + b'"}\n'


def read_with_manifest(folder: Path, data: bytes) -> None:
    (folder / STEP / NAME).write_bytes(data)
    read_run(folder)


FUZZED = {
    "manifest": Reader("text", write_run, read_with_manifest),
    "manifest, sealed": Reader(
        "text", without_seal, lambda folder, data: read_with_manifest(folder, sealed(data))
    ),
}
