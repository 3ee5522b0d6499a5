"""Valid samples for the fuzzer, and readers that use what they have read.

What it is: what the entries `FUZZED` of several test files share. Such an entry stands beside the
tests of its reader and maps a name to a `Reader`; `fuzz.py` lists the files that have one.
What it costs: samples are made on the spot, of a model with 5,080 parameters, 0.3 s for all
readers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from checkpoints import read_step, write_step
from model_builder import small_model

from titanlite.checkpoint.manifest import NAME, RunMetadata, read_manifest
from titanlite.checkpoint.resume import read_excluded, require_compatible, training_changes
from titanlite.checkpoint.retention import Retention, steps_to_delete
from titanlite.checkpoint.state import RandomState
from titanlite.config.schema import CheckpointConfig, Config, RunConfig
from titanlite.config.to_toml import to_toml
from titanlite.data.prepared import PreparedData
from titanlite.data.prepared_manifest import read_manifest as read_prepared
from titanlite.data.verification import RECORD, unverified
from titanlite.data.verification import verify as verify_data
from titanlite.model.flavors import LlamaConfig, RopeScaling
from titanlite.runtime.errors import ConfigError
from titanlite.tokenizer.tokenizer import BUNDLED, Tokenizer
from titanlite.tools.cli.checkpoint_command import list_run, show, verify
from titanlite.tools.formats.convert import Options as ConvertOptions
from titanlite.tools.formats.convert import convert, describe
from titanlite.tools.formats.detect_format import open_full_state
from titanlite.tools.formats.huggingface_tokenizer import to_files
from titanlite.tools.formats.load_weights import load_model, tokenizer_of
from titanlite.tools.prepare.build import Options as BuildOptions
from titanlite.tools.prepare.build import build
from titanlite.tools.prepare.inspect import describe as describe_data
from titanlite.tools.prepare.inspect import samples
from titanlite.tools.prepare.sources import Source, find

RANKS = b"".join(BUNDLED.read_bytes().splitlines(keepends=True)[:270])  # all bytes, and 14 pairs
TEXT = "def f(x):\n    return x  # 123\n" * 20
LLAMA = LlamaConfig(8, 1, 2, 1, 12, 286, rope_scaling=RopeScaling(8.0, original_context=32))
SHAPE = LLAMA.to_json().encode()
TOML = b'base = "base.toml"\n' + to_toml(Config(run=RunConfig("x"))).encode()
CONFIG = dataclasses.asdict(Config())
STEP = "checkpoints/step-3"
DATA = json.dumps({"name": "text", "bytes": 9, "fingerprint": "f" * 64}).encode()
FILES = {"model.json": SHAPE, "data.json": DATA, "tokenizer.model": RANKS}


class Reader(NamedTuple):
    """A reader of any bytes, and valid samples of them.

    `prepare` fills an empty folder with valid files and returns samples of the one input that is
    mutated. `read` puts any bytes in its place, reads it as the commands do, and uses what it has
    read.
    """

    kind: str  # of mutation: text, pickle or bytes
    prepare: Callable[[Path], list[bytes]]
    read: Callable[[Path, bytes], Any]
    names_files: bool = False  # the input is trusted: it may name any file


def given(*samples: bytes) -> Callable[[Path], list[bytes]]:
    """`prepare` of a reader that needs no other files."""
    return lambda folder: list(samples)


def json_lines(objects: list[dict[str, Any]]) -> bytes:
    """JSON lines."""
    return b"".join(json.dumps(entry).encode() + b"\n" for entry in objects)


# --- checkpoints of all formats


@functools.cache
def weights() -> dict[str, torch.Tensor]:
    return small_model(config=LLAMA).state_dict()


@functools.cache
def torch_file() -> bytes:
    """A file of torch.save."""
    content = {
        "model": weights(),
        "model_config": dataclasses.asdict(LLAMA),
        "step": 3,
        "seq_len": 64,
        "tokenizer": torch.frombuffer(bytearray(RANKS), dtype=torch.uint8),
    }
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()


def converted(to: str, name: str, folder: Path, **options: Any) -> list[bytes]:
    """Writes the checkpoint in another format to `folder/x`; returns its file `name`."""
    (folder / "x.pt").write_bytes(torch_file())
    how = ConvertOptions(to, verify=False, **options)
    convert(folder / "x.pt", folder / "x", how, log=lambda text: None)
    return [(folder / "x" / name).read_bytes()]


def read_any(path: Path) -> None:
    """Reads a checkpoint of any format, all of its tensors and its tokenizer."""
    full = open_full_state(path)
    describe(full, full=True)
    for tensor in (*full.tensors.values(), *full.others.values()):
        if tensor.nbytes < 1 << 20:
            tensor.read().clone()
    if full.about.tokenizer is not None:
        tokenizer_of(full).encode(TEXT)
    if full.about.model is not None:
        load_model(full, torch.device("cpu"), 16)


def read_file(name: str, folder: Path, data: bytes) -> None:
    """Reads a checkpoint of one file."""
    (folder / name).write_bytes(data)
    read_any(folder / name)


def read_in(name: str, folder: Path, data: bytes) -> None:
    """Reads the checkpoint in `folder/x` with other bytes in its file `name`."""
    (folder / "x" / name).write_bytes(data)
    read_any(folder / "x")


def of_format(kind: str, to: str, name: str, **options: Any) -> Reader:
    """The reader of a file `name` in a folder of the format `to`."""
    prepare = functools.partial(converted, to, name, **options)
    return Reader(kind, prepare, functools.partial(read_in, name))


def header_of(path: Path) -> bytes:
    """The JSON at the beginning of a safetensors file."""
    whole = path.read_bytes()
    return whole[8 : 8 + int.from_bytes(whole[:8], "little")]


def with_header(data: bytes) -> bytes:
    """A safetensors file that begins with this header, and has as many bytes as the weights."""
    return len(data).to_bytes(8, "little") + data + bytes(4 * LLAMA.num_parameters)


# --- tokenizers


def tokenizer_of_others() -> dict[str, Any]:
    """A tokenizer.json like GPT-2's: one step of pre-tokenisation, and words that are tokens are
    not kept whole.
    """
    main = json.loads(to_files(Tokenizer("", RANKS), 16)["tokenizer.json"])
    main["pre_tokenizer"] = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
    main["model"]["ignore_merges"] = False
    return main


# --- runs


def write_run(folder: Path) -> list[bytes]:
    """Writes a run to `folder`, whose step 3 is complete; returns the manifest of the step."""
    state = {"model": weights(), "random": RandomState().state_dict()}
    facts = RunMetadata({"dp_shard": 1}, CONFIG, "f" * 64, 1.5)
    write_step(folder / "checkpoints", 3, state, FILES, facts)
    return [(folder / STEP / NAME).read_bytes()]


def read_run(folder: Path) -> None:
    """Reads a run as `titanlite checkpoint` and a resuming run do."""
    list_run(folder)
    steps_to_delete(Retention(folder / "checkpoints").good(), 1, 1, 1)
    show(folder)
    verify(folder)
    resume(folder)


def resume(folder: Path) -> None:
    """Reads step 3 as a run that resumes from it."""
    manifest = read_manifest(folder / STEP)
    with contextlib.suppress(ConfigError):  # the weights may fit nevertheless
        require_compatible(folder / STEP, manifest, CONFIG, FILES, CheckpointConfig())
    training_changes(manifest.config, CONFIG)
    json.dumps(read_excluded(folder / STEP, manifest))
    read_step(folder / STEP, manifest, {"model": weights()})
    read_any(folder)


# --- data


def build_data(source: Source, made: Path, drop_duplicates: bool = False) -> None:
    """Prepares a source, whatever was at `made` before."""
    shutil.rmtree(made, ignore_errors=True)
    how = BuildOptions(drop_duplicates, workers=1, max_bad_rows=1e9)
    build([(source, find(source))], Tokenizer("", RANKS), made, how, lambda text: None)


def prepare_data(folder: Path) -> list[bytes]:
    """Prepares three files in `folder/data`; returns the manifest."""
    for i in range(3):
        (folder / f"{i}.txt").write_text(TEXT)
    build_data(Source(str(folder), "*.txt"), folder / "data")
    return [(folder / "data/manifest.json").read_bytes()]


def read_data(folder: Path) -> None:
    """Reads prepared data as a run does."""
    manifest = read_prepared(folder)
    verify_data(folder, manifest, unverified(folder, manifest))
    prepared = PreparedData(folder, Tokenizer("", RANKS))
    "\n".join(describe_data(manifest)).encode()
    for split in ("train", "validation"):
        tokens = prepared.tokens(split)
        samples(tokens, Tokenizer("", RANKS))
        count = min(len(tokens), 1000)
        tokens.read(0, count), tokens.targets(0, count), tokens.document_starts(0, count)


def read_data_with(name: str, folder: Path, data: bytes) -> None:
    """Reads the prepared data in `folder/data` with other bytes in its file `name`."""
    (folder / "data" / RECORD).unlink(missing_ok=True)
    (folder / "data" / name).write_bytes(data)
    read_data(folder / "data")


def read_source(name: str, folder: Path, data: bytes) -> None:
    """Prepares a file of any kind."""
    (folder / name).write_bytes(data)
    build_data(Source(str(folder / name)), folder / "made")


def of_source(kind: str, name: str, *samples: bytes) -> Reader:
    """The reader of a source; its kind is detected by the suffix of `name`."""
    return Reader(kind, given(*samples), functools.partial(read_source, name))
