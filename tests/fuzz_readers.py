"""Every reader of files and messages, for the fuzzer: how valid samples are made, and a function of
any bytes.

What it is: `READERS`, name -> `Reader`. `prepare` fills an empty folder with valid files and
returns samples of the one input that is mutated; `read` puts any bytes in its place, reads it as
the commands do, and uses what it has read.
What it costs: samples are made on the spot, of a model with 5,080 parameters, 0.3 s for all
readers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gzip
import hashlib
import io
import json
import math
import random
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pyarrow
import pyarrow.parquet
import torch
import zstandard
from checkpoints import read_step, write_step
from foreign_configs import SAMPLES
from model_builder import small_model
from preparing import write_datatrove, write_megatron
from safetensors.torch import save_file

from titanlite.checkpoint.divergence import read_record
from titanlite.checkpoint.folders import RECORD as DIVERGED
from titanlite.checkpoint.manifest import NAME, SEAL, RunMetadata, read_manifest
from titanlite.checkpoint.resume import (
    EXCLUDED,
    read_excluded,
    require_compatible,
    training_changes,
)
from titanlite.checkpoint.retention import PROVEN, Retention, read_proof, steps_to_delete
from titanlite.checkpoint.shard_file import SHARDING_INFO
from titanlite.checkpoint.state import RandomState
from titanlite.config.load import load_config
from titanlite.config.schema import CheckpointConfig, Config, RunConfig
from titanlite.config.to_toml import to_toml
from titanlite.data.prepared import PreparedData
from titanlite.data.prepared_manifest import read_manifest as read_prepared
from titanlite.data.verification import RECORD, unverified
from titanlite.data.verification import verify as verify_data
from titanlite.distributed.agreement import read_message
from titanlite.distributed.hang_diagnosis import Heartbeat, diagnose, read_heartbeat
from titanlite.model.flavors import LlamaConfig, RopeScaling, resolve_flavor
from titanlite.observe.metrics_file import RowReader, truncate_after
from titanlite.rules.check import check_layout
from titanlite.runtime.errors import ConfigError
from titanlite.sinks.metric_names import scalars
from titanlite.tokenizer.tokenizer import BUNDLED, Tokenizer
from titanlite.tools.cli.checkpoint_command import list_run, show, verify
from titanlite.tools.cli.prompt_file import read_prompts, rows_to_continue, write_texts
from titanlite.tools.formats.convert import Options, convert, describe
from titanlite.tools.formats.detect_format import open_full_state, read_model
from titanlite.tools.formats.full_state import ORIGIN
from titanlite.tools.formats.huggingface_tokenizer import to_files
from titanlite.tools.formats.load_weights import load_model, tokenizer_of
from titanlite.tools.formats.safetensors_files import INDEX
from titanlite.tools.formats.same_model import require_same_model
from titanlite.tools.import_config.detect import import_config
from titanlite.tools.import_config.mapping import to_toml as import_to_toml
from titanlite.tools.plan.counts import Collective
from titanlite.tools.plan.machines import MACHINES, read_machine, read_prices
from titanlite.tools.plan.step_time import Rates, collective_seconds
from titanlite.tools.prepare import build as build_module
from titanlite.tools.prepare import job as job_module
from titanlite.tools.prepare.build import MANIFEST, build, working_folder
from titanlite.tools.prepare.build import Options as BuildOptions
from titanlite.tools.prepare.duplicates import KEPT
from titanlite.tools.prepare.inspect import describe as describe_data
from titanlite.tools.prepare.inspect import samples
from titanlite.tools.prepare.plan_job import text_files
from titanlite.tools.prepare.sources import Source, find
from titanlite.tools.prepare.text_files import read_texts
from titanlite.tools.report.page import contents as report_contents
from titanlite.tools.report.page import page
from titanlite.tools.report.run_data import read_run as read_for_report
from titanlite.tools.report.text_report import text_report

RANKS = b"".join(BUNDLED.read_bytes().splitlines(keepends=True)[:270])  # all bytes, and 14 pairs
LLAMA = LlamaConfig(8, 1, 2, 1, 12, 286, rope_scaling=RopeScaling(8.0, original_context=32))
STEP = "checkpoints/step-3"
SHAPE = LLAMA.to_json().encode()
DATA = json.dumps({"name": "text", "bytes": 9, "fingerprint": "f" * 64}).encode()
FILES = {"model.json": SHAPE, "data.json": DATA, "tokenizer.model": RANKS}
CONFIG = dataclasses.asdict(Config())
ROWS_OF_TEXT = b"".join(json.dumps({"text": f"row {i} \u00e9"}).encode() + b"\n" for i in range(30))
LLMC_HEADER = np.array([20240520, 1, 286, *[0] * 253], "<i4").tobytes()
IDS = np.arange(286, dtype="<u2").tobytes()
TEXT = "def f(x):\n    return x  # 123\n" * 20


class Reader(NamedTuple):
    kind: str  # of mutation: text, pickle or bytes
    prepare: Callable[[Path], list[bytes]]
    read: Callable[[Path, bytes], Any]


def _saved(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


@functools.cache
def _tree() -> bytes:
    """A file of torch.save."""
    tokenizer = torch.frombuffer(bytearray(RANKS), dtype=torch.uint8)
    shape = dataclasses.asdict(LLAMA)
    return _saved(
        {
            "model": _weights(),
            "model_config": shape,
            "step": 3,
            "seq_len": 64,
            "tokenizer": tokenizer,
        }
    )


def _converted(to: str, name: str, folder: Path, **options: Any) -> list[bytes]:
    """The checkpoint in another format in `folder/x`; returns its file `name`."""
    (folder / "x.pt").write_bytes(_tree())
    convert(
        folder / "x.pt", folder / "x", Options(to, verify=False, **options), log=lambda text: None
    )
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


def _read_in(name: str, folder: Path, data: bytes) -> None:
    """The checkpoint in `folder/x`, with other bytes in its file `name`."""
    (folder / "x" / name).write_bytes(data)
    read_any(folder / "x")


@functools.cache
def _weights() -> dict[str, torch.Tensor]:
    return small_model(config=LLAMA).state_dict()


def _write_step(folder: Path) -> list[bytes]:
    """A run in `folder`, whose step 3 is complete; returns its manifest."""
    state = {"model": _weights(), "random": RandomState().state_dict()}
    write_step(
        folder / "checkpoints", 3, state, FILES, RunMetadata({"dp_shard": 1}, CONFIG, "f" * 64, 1.5)
    )
    return [(folder / STEP / NAME).read_bytes()]


def _read_step(folder: Path, data: bytes) -> None:
    (folder / STEP / NAME).write_bytes(data)
    read_run(folder)


def read_run(folder: Path) -> None:
    """As `titanlite checkpoint` and a resuming run do."""
    list_run(folder)
    steps_to_delete(Retention(folder / "checkpoints").good(), 1, 1, 1)
    show(folder)
    verify(folder)
    _resume(folder)


def _resume(folder: Path) -> None:
    manifest = read_manifest(folder / STEP)
    with contextlib.suppress(ConfigError):  # the weights may fit nevertheless
        require_compatible(folder / STEP, manifest, CONFIG, FILES, CheckpointConfig())
    training_changes(manifest.config, CONFIG)
    json.dumps(read_excluded(folder / STEP, manifest))
    read_step(folder / STEP, manifest, {"model": _weights()})
    read_any(folder)


def _unsealed(folder: Path) -> list[bytes]:
    return [sample.decode().rpartition(SEAL)[0].encode() + b"}" for sample in _write_step(folder)]


def _seal(data: bytes) -> bytes:
    body = data.rstrip().removesuffix(b"}")
    return body + SEAL.encode() + hashlib.sha256(body).hexdigest().encode() + b'"}\n'


def _read_small_file(name: str, folder: Path, data: bytes) -> None:
    """Another content of a step's small file, whose hash in the manifest is made to fit."""
    (folder / STEP / name).write_bytes(data)
    fields = json.loads((folder / STEP / NAME).read_text())
    fields["files"][name] = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    fields.pop("sha256")
    (folder / STEP / NAME).write_bytes(_seal(json.dumps(fields).encode()))
    _resume(folder)


def _state_bytes() -> bytes:
    return b"".join(tensor.numpy().tobytes() for tensor in RandomState().state_dict().values())


def _read_random_state(folder: Path, data: bytes) -> None:
    """The state of random generators, of the right shape and with any content."""
    content = io.BytesIO(data.ljust(len(_state_bytes()), b"\0"))
    state = RandomState().state_dict()
    for name, tensor in state.items():
        state[name] = torch.frombuffer(bytearray(content.read(tensor.nbytes)), dtype=tensor.dtype)
    RandomState().load_state_dict(state)
    random.random(), torch.rand(3)


def _header(data: bytes) -> bytes:
    return len(data).to_bytes(8, "little") + data


def _safetensors(folder: Path) -> list[bytes]:
    (folder / "x.pt").write_bytes(_tree())
    convert(folder / "x.pt", folder / "x.safetensors", Options(verify=False), log=lambda text: None)
    return [(folder / "x.safetensors").read_bytes()]


def _headers(folder: Path) -> list[bytes]:
    (whole,) = _safetensors(folder)
    return [whole[8 : 8 + int.from_bytes(whole[:8], "little")]]


def _bare_headers(folder: Path) -> list[bytes]:
    """The header of a file that does not describe its model: a run compares it by names and shapes."""
    save_file(_weights(), folder / "x.safetensors")
    whole = (folder / "x.safetensors").read_bytes()
    return [whole[8 : 8 + int.from_bytes(whole[:8], "little")]]


def _cut(half: int) -> dict[str, torch.Tensor]:
    """The first or second half of the rows of each weight."""
    return {name: w.tensor_split(2)[half].clone() for name, w in _weights().items()}


def _shards(folder: Path) -> list[bytes]:
    """Two shards in `folder/x`; returns what the second says about the places of its parts."""
    (folder / "x").mkdir()
    (folder / "x/model.json").write_bytes(SHAPE)
    save_file(_cut(0), folder / "x/shard-00001-model-00001-of-00001.safetensors")
    places = {
        name: {"saved_offsets": [w.shape[0] - w.shape[0] // 2, *[0] * (w.dim() - 1)]}
        for name, w in _weights().items()
    }
    return [json.dumps(places).encode()]


def _read_shards(folder: Path, data: bytes) -> None:
    path = folder / "x/shard-00002-model-00001-of-00001.safetensors"
    save_file(_cut(1), path, {SHARDING_INFO: data.decode("utf-8", "replace")})
    read_any(folder / "x")


def _read_bare(folder: Path, data: bytes) -> None:
    (folder / "x.safetensors").write_bytes(_header(data) + bytes(4 * LLAMA.num_parameters))
    full = open_full_state(folder / "x.safetensors")
    require_same_model(full.path, full.about.model, full.tensors, LLAMA)


def _read_file(name: str, folder: Path, data: bytes) -> None:
    (folder / name).write_bytes(data)
    read_any(folder / name)


def _zipped(program: bytes) -> bytes:
    """A file of torch.save with another pickle."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(_tree())) as old, zipfile.ZipFile(buffer, "w") as new:
        for name in old.namelist():
            new.writestr(name, program if name.endswith("/data.pkl") else old.read(name))
    return buffer.getvalue()


def _program(folder: Path) -> list[bytes]:
    with zipfile.ZipFile(io.BytesIO(_tree())) as archive:
        return [archive.read(name) for name in archive.namelist() if name.endswith("/data.pkl")]


def _read_ranks(folder: Path, data: bytes) -> None:
    (folder / "ranks").write_bytes(data)
    tokenizer = Tokenizer(folder / "ranks")
    tokenizer.decode(tokenizer.encode(TEXT))
    to_files(tokenizer, 16)


def _json_of_others() -> list[bytes]:
    """As GPT-2's: one step of pre-tokenisation, and words that are tokens are not kept whole; and
    with Qwen's NFC.
    """
    main = json.loads(to_files(Tokenizer("", RANKS), 16)["tokenizer.json"])
    main["pre_tokenizer"] = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
    main["model"]["ignore_merges"] = False
    return [
        json.dumps(main | {"normalizer": normalizer}).encode()
        for normalizer in (None, {"type": "NFC"})
    ]


def _read_json(folder: Path, data: bytes) -> None:
    (folder / "tokenizer.json").write_bytes(data)
    tokenizer = Tokenizer(folder)
    tokenizer.decode(tokenizer.encode(TEXT))
    Tokenizer(folder, tokenizer.content)
    to_files(tokenizer, 16)


def _write_vocab(name: str, folder: Path) -> list[bytes]:
    """The files of before tokenizer.json; returns the one of this name."""
    main = json.loads(_json_of_others()[0])["model"]
    config = {
        "tokenizer_class": "GPT2Tokenizer",
        "add_bos_token": True,
        "added_tokens_decoder": {str(len(main["vocab"])): {"content": "<a>", "special": True}},
        "additional_special_tokens": ["<b>"],
    }
    contents = {
        "vocab.json": json.dumps(main["vocab"]),
        "merges.txt": "\n".join(["#version: 0.2", *(" ".join(pair) for pair in main["merges"])]),
        "tokenizer_config.json": json.dumps(config),
    }
    for file, content in contents.items():
        (folder / file).write_text(content)
    return [contents[name].encode()]


def _read_vocab(name: str, folder: Path, data: bytes) -> None:
    (folder / name).write_bytes(data)
    tokenizer = Tokenizer(folder)
    tokenizer.decode(tokenizer.encode(TEXT))
    to_files(tokenizer, 16)


def _of_vocab(name: str) -> Reader:
    return Reader(
        "text", functools.partial(_write_vocab, name), functools.partial(_read_vocab, name)
    )


def _prepare_data(folder: Path) -> list[bytes]:
    """Prepared data in `folder/data`; returns its manifest."""
    for i in range(3):
        (folder / f"{i}.txt").write_text(TEXT)
    _build(Source(str(folder), "*.txt"), folder / "data")
    return [(folder / "data/manifest.json").read_bytes()]


def _read_data(folder: Path, name: str, data: bytes) -> None:
    (folder / "data" / RECORD).unlink(missing_ok=True)
    (folder / "data" / name).write_bytes(data)
    read_data(folder / "data")


def read_data(folder: Path) -> None:
    """As a run does."""
    manifest = read_prepared(folder)
    verify_data(folder, manifest, unverified(folder, manifest))
    prepared = PreparedData(folder, Tokenizer("", RANKS))
    "\n".join(describe_data(manifest)).encode()
    for split in ("train", "validation"):
        tokens = prepared.tokens(split)
        samples(tokens, Tokenizer("", RANKS))
        count = min(len(tokens), 1000)
        tokens.read(0, count), tokens.targets(0, count), tokens.document_starts(0, count)


def _read_shard(folder: Path, data: bytes) -> None:
    """A shard whose length and hash in the manifest are made to fit."""
    manifest = json.loads((folder / "data/manifest.json").read_text())
    split = manifest["splits"]["train"]
    (shard,) = split["shards"]
    (folder / "data" / shard["file"]).write_bytes(data)
    shard |= {
        "tokens": len(data) // np.dtype(manifest["dtype"]).itemsize,
        "sha256": hashlib.sha256(data).hexdigest(),
    }
    split["tokens"] = shard["tokens"]
    _read_data(folder, "manifest.json", json.dumps(manifest).encode())


def _read_starts(folder: Path, data: bytes) -> None:
    """The starts of documents, whose number and hash in the manifest are made to fit."""
    manifest = json.loads((folder / "data/manifest.json").read_text())
    split = manifest["splits"]["train"]
    (shard,) = split["shards"]
    (folder / "data" / shard["starts"]["file"]).write_bytes(data)
    shard["starts"]["sha256"] = hashlib.sha256(data).hexdigest()
    split["documents"] = shard["documents"] = len(data) // 8
    _read_data(folder, "manifest.json", json.dumps(manifest).encode())


def _read_text(folder: Path, data: bytes) -> None:
    (folder / "text").write_bytes(data)
    source = Source(str(folder / "text"))
    with contextlib.suppress(ConfigError):
        sum(map(len, read_texts(text_files(source, find(source)))))
    _build(source, folder / "made")


def _build(source: Source, made: Path, drop_duplicates: bool = False) -> None:
    shutil.rmtree(made, ignore_errors=True)
    how = BuildOptions(drop_duplicates, workers=1, max_bad_rows=1e9)
    build([(source, find(source))], Tokenizer("", RANKS), made, how, lambda text: None)


def _prepare_interrupted(folder: Path, name: str, stage: str) -> list[bytes]:
    """A preparation of two parts that was interrupted before `stage`, a function of build.py, in
    `folder/interrupted`; returns its file `name`.
    """
    rows = [{"text": f"row {i % 20} \u00e9"} for i in range(30)] + [{"text": 1}]
    (folder / "rows.jsonl").write_bytes(_lines(rows))
    with contextlib.suppress(KeyboardInterrupt), mock.patch.object(build_module, stage, _interrupt):
        _continue(folder)
    working_folder(folder / "made").rename(folder / "interrupted")
    if name == MANIFEST:  # written before the folder gets its final name
        _read_interrupted("job.json", folder, (folder / "interrupted/job.json").read_bytes())
        shutil.rmtree(folder / "interrupted")
        (folder / "made").rename(folder / "interrupted")
    return [(folder / "interrupted" / name).read_bytes()]


def _interrupt(*arguments: Any) -> None:
    raise KeyboardInterrupt


def _continue(folder: Path) -> None:
    """The preparation, as the same command does it again. Its parts are of 500 bytes."""
    with mock.patch.multiple(job_module, PART=500, CUT=100):
        _build(Source(str(folder / "rows.jsonl")), folder / "made", drop_duplicates=True)


def _read_interrupted(name: str, folder: Path, data: bytes) -> None:
    """The preparation goes on with another content of one of its files."""
    work = working_folder(folder / "made")
    for left in (folder / "made", work):
        shutil.rmtree(left, ignore_errors=True)
    shutil.copytree(folder / "interrupted", work)
    (work / name).write_bytes(data)
    _continue(folder)
    read_data(folder / "made")


def _of_interrupted(name: str, stage: str = "finish") -> Reader:
    kind = "text" if name.endswith(".json") else "bytes"
    prepare = functools.partial(_prepare_interrupted, name=name, stage=stage)
    return Reader(kind, prepare, functools.partial(_read_interrupted, name))


def _read_source(name: str, folder: Path, data: bytes) -> None:
    """A source of any kind, or the index of one."""
    path = folder / name
    path.write_bytes(data)
    if path.suffix == ".idx":
        path = path.with_suffix(".bin")
    elif path.suffix in (".index", ".metadata"):
        path = path.with_suffix("")
    _build(Source(str(path)), folder / "made")


def _prepare_megatron(folder: Path, name: str) -> list[bytes]:
    write_megatron(folder / "ids", [[1, 2, 3], [4, 5], [6] * 20])
    return [(folder / name).read_bytes()]


def _prepare_datatrove(folder: Path, name: str) -> list[bytes]:
    """With 16 bits per id, with 32, and with what datatrove's tokenizers may add."""
    samples = []
    documents = [[1, 2, 3], [270, 4, 5, 271], [6] * 20, [], [7, 271]]
    for dtype in ("<u4", "<u2"):
        write_datatrove(folder / "ids.ds", documents, dtype)
        samples.append((folder / name).read_bytes())
    return samples


def _compressed(module: Any, content: str = "") -> bytes:
    """Rows, unless another content is given."""
    return module.compress(content.encode() or ROWS_OF_TEXT)


def _parquet() -> list[bytes]:
    """Plain, dictionary-encoded and compressed columns; several row groups, and another column."""
    samples = []
    table = pyarrow.table(
        {"text": [f"row {i % 7} \u00e9" for i in range(40)], "other": list(range(40))}
    )
    for options in ({"compression": "none"}, {"compression": "none", "use_dictionary": False}, {}):
        buffer = io.BytesIO()
        pyarrow.parquet.write_table(table, buffer, row_group_size=20, **options)
        samples.append(buffer.getvalue())
    return samples


def _use(config: Config) -> None:
    to_toml(config)
    check_layout(config, resolve_flavor(config.model, 4112), 1)


def _read_toml(folder: Path, data: bytes) -> None:
    (folder / "run.toml").write_bytes(data)
    (folder / "base.toml").write_bytes(b"[run]\nseed = 1\n")
    _use(load_config([str(folder / "run.toml")]))


def _read_machine(folder: Path, data: bytes) -> None:
    (folder / "machine.toml").write_bytes(data)
    machine = read_machine(folder / "machine.toml")
    assert machine.memory_bytes > 0
    collective = Collective("tp", "all_reduce", 2, 1, 10)
    degrees = {"pp": 1, "dp_replicate": 1, "dp_shard": 1, "cp": 1, "tp": 2}
    assert collective_seconds(collective, degrees, machine, Rates()) >= 0


def _read_prices(folder: Path, data: bytes) -> None:
    (folder / "prices.toml").write_bytes(data)
    lab = dataclasses.replace(MACHINES["H100"], name="lab")
    assert all(price > 0 for price in read_prices(folder / "prices.toml", lab).values())


def _read_arguments(folder: Path, data: bytes) -> None:
    # As the system gives them
    _use(load_config(data.decode("utf-8", "surrogateescape").split("\n")))


def _read_metrics(folder: Path, data: bytes) -> None:
    (folder / "metrics.jsonl").write_bytes(data)
    for row in RowReader(folder / "metrics.jsonl").read() or []:
        scalars(row)
    truncate_after(folder / "metrics.jsonl", 3)
    assert len((folder / "metrics.jsonl").read_bytes()) <= len(data) + 1


def _read_prompts(name: str, folder: Path, data: bytes) -> None:
    """As `titanlite generate` reads, encodes and writes them."""
    (folder / name).write_bytes(data)
    rows = read_prompts(folder / name)
    for row in rows_to_continue(folder / name, rows, Tokenizer("", RANKS), 64, 0, 0):
        assert 1 <= row.max_new_tokens < 64
    write_texts(folder / "texts.jsonl", rows, dict.fromkeys(range(len(rows)), TEXT))


def _lines(objects: list[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(entry).encode() + b"\n" for entry in objects)


def _read_report(name: str, folder: Path, data: bytes) -> None:
    """A page and a text of the run: all that is read must fit into JSON and into a table."""
    (folder / name).write_bytes(data)
    run = read_for_report(folder)
    contents = report_contents([run])
    page(contents).encode()
    text_report([run]).encode()


PROOF = b'{"step": 120, "plausible": 110, "loss": 2.5, "validation_loss": null}'


def _read_proven(folder: Path, data: bytes) -> None:
    (folder / PROVEN).write_bytes(data)
    proof = read_proof(folder)
    assert 0 <= proof.step < 1 << 62
    assert 0 <= proof.plausible < 1 << 62
    assert proof.loss is None or math.isfinite(proof.loss)


def _read_record(folder: Path, data: bytes) -> None:
    (folder / DIVERGED).write_bytes(data)
    record = read_record(folder)
    assert all(0 <= entry["first"] < entry["end"] for entry in record.rollbacks)
    assert type(record.attempts) is type(record.newest) is int


BEAT = Heartbeat(
    0,
    "node",
    7,
    1.5,
    3,
    '"training" of step 4',
    100.0,
    "comm.timeout_seconds",
    200.0,
    2,
    "train.py:9",
)


def _read_beat(folder: Path, data: bytes) -> None:
    own = Heartbeat(1, "node", 8, still=300.0)
    if (beat := read_heartbeat(data)) is not None:
        diagnose([own, beat.aged(5.0, own)], own, folder)
        diagnose([own, beat.aged(1.0, own)], dataclasses.replace(own, rank=0), folder)
        json.dumps(dataclasses.asdict(beat))


def _write(name: str, *samples: bytes) -> Callable[[Path], list[bytes]]:
    """For readers that need no other files."""
    return lambda folder: list(samples)


def _read_foreign(folder: Path, data: bytes) -> None:
    """What is imported can be loaded."""
    (folder / "foreign").write_bytes(data)
    form, draft = import_config(folder / "foreign", processes=64)
    (folder / "run.toml").write_text(import_to_toml(draft, "foreign", form))
    load_config([str(folder / "run.toml")])


MACHINE = b'base = "H100"\ngpus_per_node = 4\nnetwork_bandwidth = 12.5\nhalf_dtype = "float16"\n'
TOML = b'base = "base.toml"\n' + to_toml(Config(run=RunConfig("x"))).encode()
SHORT = (
    b'base = "base.toml"\n[training]\nsteps = 10\nseq_len = 64\n[optimizer]\nbetas = [0.9, 0.95]\n'
)
ARGUMENTS = b"debug\n--training.steps=100\n--training.seq_len\n64\n--compile.enabled\n--optimizer.betas=[0.9, 0.95]"
ROLLED_BACK = json.dumps({
    "attempts": 2, "newest": 4, "config": "ab", "last": "step 5", "rollbacks": [
        {"step": 5, "resumed": 4, "first": 32, "end": 40}, {"step": 9, "first": 72, "end": 80}
]}).encode()  # fmt: skip
ROWS = b"".join(
    json.dumps({"step": i, "loss": 2.5, "mfu": None}).encode() + b"\n" for i in range(6)
)
LOGGED = [
    {"step": i, "loss": 9 / i, "tokens": 8 * i, "seconds": 0.5 * i, "time/data": 0.1}
    for i in range(1, 50)
]
HAPPENED = [
    {"time": 1e9, "step": i, "event": name, "text": name}
    for i, name in enumerate(("start", "save", "end"))
]
PROMPTS = [{"id": i, "prompt": f"def f_{i}(", "tags": ["\u00e9", None]} for i in range(4)]
DRAWN = [{"step": i, "prompt": "def", "text": f" f({i})"} for i in range(3)]
EVALUATED = [
    {"step": i, "weights": w, "evaluate/a/acc": 0.5, "evaluate/a/acc_stderr": 0.1}
    for i, w in ((2, "ema"), (4, ""))
]
HAPPENED[0]["about"] = {"parameters": 5080, "device": "CPU", "layout": "one process"}
HEARTBEATS = [json.dumps(dataclasses.asdict(dataclasses.replace(BEAT, diagnosis=d))).encode() for d in (
    {}, {"message": "rank 1: no progress", "frozen": [1]})]  # fmt: skip

READERS = {
    "manifest": Reader("text", _write_step, _read_step),
    "manifest, sealed": Reader(
        "text", _unsealed, lambda folder, data: _read_step(folder, _seal(data))
    ),
    "model.json of a step": Reader(
        "text",
        lambda f: _write_step(f) and [SHAPE],
        functools.partial(_read_small_file, "model.json"),
    ),
    "data.json of a step": Reader(
        "text",
        lambda f: _write_step(f) and [DATA],
        functools.partial(_read_small_file, "data.json"),
    ),
    f"{EXCLUDED} of a step": Reader(
        "text",
        lambda f: _write_step(f) and [b"[[32, 40], [72, 80]]"],
        functools.partial(_read_small_file, EXCLUDED),
    ),
    "random state": Reader("bytes", lambda f: [_state_bytes()], _read_random_state),
    "safetensors": Reader("bytes", _safetensors, functools.partial(_read_file, "x.safetensors")),
    "shapes without a description": Reader("text", _bare_headers, _read_bare),
    "safetensors header": Reader(
        "text",
        _headers,
        lambda folder, data: _read_file(
            "x.safetensors", folder, _header(data) + bytes(4 * LLAMA.num_parameters)
        ),
    ),
    "safetensors index": Reader(
        "text",
        functools.partial(_converted, "safetensors", INDEX, shard_size=8000),
        functools.partial(_read_in, INDEX),
    ),
    SHARDING_INFO: Reader("text", _shards, _read_shards),
    "model.json": Reader(
        "text",
        functools.partial(_converted, "safetensors", "model.json"),
        functools.partial(_read_in, "model.json"),
    ),
    "--model": Reader(
        "text",
        lambda f: _safetensors(f) and [SHAPE],
        lambda f, data: (
            (f / "m.json").write_bytes(data)
            and read_model(str(f / "m.json"), open_full_state(f / "x.safetensors"))
        ),
    ),
    ORIGIN: Reader(
        "text",
        functools.partial(_converted, "safetensors", ORIGIN),
        functools.partial(_read_in, ORIGIN),
    ),
    "config.json": Reader(
        "text",
        functools.partial(_converted, "hf", "config.json"),
        functools.partial(_read_in, "config.json"),
    ),
    "tokenizer.json": Reader(
        "text",
        functools.partial(_converted, "hf", "tokenizer.json"),
        functools.partial(_read_in, "tokenizer.json"),
    ),
    "params.json": Reader(
        "text",
        functools.partial(_converted, "llama", "params.json"),
        functools.partial(_read_in, "params.json"),
    ),
    "rank file": Reader("text", _write("ranks", RANKS), _read_ranks),
    "data.tokenizer": Reader("text", lambda folder: _json_of_others(), _read_json),
    "vocab.json": _of_vocab("vocab.json"),
    "merges.txt": _of_vocab("merges.txt"),
    "special tokens": _of_vocab("tokenizer_config.json"),
    "prepared manifest": Reader(
        "text", _prepare_data, lambda f, data: _read_data(f, "manifest.json", data)
    ),
    "verified.json": Reader(
        "text",
        lambda f: [
            _prepare_data(f) and (_read_data(f, "x", b"") or (f / "data" / RECORD).read_bytes())
        ],
        lambda f, data: _read_data(f, RECORD, data),
    ),
    "job.json": _of_interrupted("job.json"),
    "record of a part": _of_interrupted("part-00000.json"),
    "manifest before the end": _of_interrupted(MANIFEST),
    "hashes": _of_interrupted("hashes-00000.bin", "decide_duplicates"),
    "hashes, compared": _of_interrupted("hashes-00000.bin"),
    "kept documents": _of_interrupted(KEPT),
    "shard": Reader(
        "bytes",
        lambda f: _prepare_data(f) and [(f / "data/train-00000.bin").read_bytes()],
        _read_shard,
    ),
    "starts": Reader(
        "bytes",
        lambda f: _prepare_data(f) and [(f / "data/train-00000.starts.bin").read_bytes()],
        _read_starts,
    ),
    "text": Reader("bytes", _write("text", TEXT.encode(), "é😀\r\n".encode() * 9), _read_text),
    "JSON lines": Reader(
        "text", _write("rows.jsonl", ROWS_OF_TEXT), functools.partial(_read_source, "rows.jsonl")
    ),
    "gzip": Reader(
        "bytes",
        _write("rows.jsonl.gz", _compressed(gzip)),
        functools.partial(_read_source, "rows.jsonl.gz"),
    ),
    "gzip text": Reader(
        "bytes",
        _write("text.gz", _compressed(gzip, TEXT)),
        functools.partial(_read_source, "text.gz"),
    ),
    "zstd": Reader(
        "bytes",
        _write("rows.zst", _compressed(zstandard)),
        functools.partial(_read_source, "rows.jsonl.zst"),
    ),
    "zstd text": Reader(
        "bytes",
        _write("text.zst", _compressed(zstandard, TEXT)),
        functools.partial(_read_source, "text.zst"),
    ),
    "Parquet": Reader(
        "bytes", lambda f: _parquet(), functools.partial(_read_source, "rows.parquet")
    ),
    "token ids with a header": Reader(
        "bytes", _write("ids.bin", LLMC_HEADER + IDS), functools.partial(_read_source, "ids.bin")
    ),
    "token ids": Reader(
        "bytes", _write("ids.bin", IDS), functools.partial(_read_source, "ids.bin")
    ),
    "Megatron index": Reader(
        "bytes",
        lambda f: _prepare_megatron(f, "ids.idx"),
        functools.partial(_read_source, "ids.idx"),
    ),
    **{
        f"datatrove {name}": Reader(
            "text" if name.endswith("metadata") else "bytes",
            functools.partial(_prepare_datatrove, name=name),
            functools.partial(_read_source, name),
        )
        for name in ("ids.ds", "ids.ds.index", "ids.ds.metadata")
    },
    "TOML": Reader("text", _write("run.toml", TOML, SHORT), _read_toml),
    "machine": Reader("text", _write("machine.toml", MACHINE), _read_machine),
    "prices": Reader("text", _write("prices.toml", b"H100 = 2.5\nlab = 1\n"), _read_prices),
    "command line": Reader("text", _write("", ARGUMENTS), _read_arguments),
    "metrics.jsonl": Reader("text", _write("metrics.jsonl", ROWS), _read_metrics),
    "report, metrics": Reader(
        "text",
        _write("metrics.jsonl", ROWS, _lines(LOGGED)),
        functools.partial(_read_report, "metrics.jsonl"),
    ),
    "report, evaluations": Reader(
        "text",
        _write("evaluations.jsonl", _lines(EVALUATED)),
        functools.partial(_read_report, "evaluations.jsonl"),
    ),
    "report, events": Reader(
        "text",
        _write("events.jsonl", _lines(HAPPENED)),
        functools.partial(_read_report, "events.jsonl"),
    ),
    "report, samples": Reader(
        "text",
        _write("samples.jsonl", _lines(DRAWN)),
        functools.partial(_read_report, "samples.jsonl"),
    ),
    "report, config": Reader(
        "text", _write("config.toml", TOML), functools.partial(_read_report, "config.toml")
    ),
    "config of another trainer": Reader(
        "text",
        _write("foreign", *(text.encode() for _, text in SAMPLES.values())),
        _read_foreign,
    ),
    "prompts, rows": Reader(
        "text",
        _write("prompts.jsonl", _lines(PROMPTS)),
        functools.partial(_read_prompts, "prompts.jsonl"),
    ),
    "prompts, text": Reader(
        "text",
        _write("prompts.txt", b"def\n\nclass A:\r\n"),
        functools.partial(_read_prompts, "prompts.txt"),
    ),
    PROVEN: Reader("bytes", _write(PROVEN, PROOF), _read_proven),
    DIVERGED: Reader("text", _write(DIVERGED, ROLLED_BACK, b"{}"), _read_record),
    "heartbeat": Reader("text", _write("", *HEARTBEATS), _read_beat),
    "message": Reader(
        "text",
        _write("", b'[null, [], ""]', b'["no such folder"]'),
        lambda f, data: read_message(data),
    ),
    "DCP index": Reader(
        "pickle",
        functools.partial(_converted, "dcp", ".metadata"),
        functools.partial(_read_in, ".metadata"),
    ),
    "DCP data": Reader(
        "bytes",
        functools.partial(_converted, "dcp", "__0_0.distcp"),
        functools.partial(_read_in, "__0_0.distcp"),
    ),
    "torch.save": Reader("bytes", lambda f: [_tree()], functools.partial(_read_file, "x.pt")),
    "torch.save pickle": Reader(
        "pickle", _program, lambda f, data: _read_file("x.pt", f, _zipped(data))
    ),
}
