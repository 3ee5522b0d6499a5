"""Writing a checkpoint in another format: one function for each format.

What it is: each function writes the tensors and the small files that make the result complete: the
model's shape, the tokenizer. safetensors and GGUF files are written block by block. torch.save and
DCP take whole tensors, so the converted tensors are written once into a scratch file, and these
writers get them memory-mapped from there: its pages belong to the page cache and not to the
process.
What it costs: one block of rows in memory, one whole tensor for GGUF, whose writer takes no less;
for torch, llama and dcp a second write, and twice the disk space until the end.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException

from titanlite.checkpoint import manifest as manifests
from titanlite.checkpoint.grid import Box, grid_of
from titanlite.checkpoint.manifest import DTYPE_NAMES, FileEntry, Manifest, TensorEntry
from titanlite.checkpoint.shard_file import sharding_metadata
from titanlite.checkpoint.step_files import digest_of
from titanlite.tokenizer.tokenizer import Tokenizer
from titanlite.tokenizer.tokenizer_json import TEMPLATE_FILE
from titanlite.tools.formats import adapters, gguf_file, huggingface, meta
from titanlite.tools.formats.export import Export, Outgoing
from titanlite.tools.formats.full_state import ORIGIN, FullState
from titanlite.tools.formats.huggingface_tokenizer import files_of, to_files
from titanlite.tools.formats.output_path import temporary_path, write_small_files
from titanlite.tools.formats.safetensors_files import write_file
from titanlite.tools.formats.safetensors_files import write_folder as write_shards

logger = logging.getLogger("titanlite")
DEFAULT_LENGTH = 8192  # for a format that must name the longest sequence, where the source does not


def _origin(state: FullState) -> str:
    return json.dumps({"step": state.about.step, "seq_len": state.about.seq_len}) + "\n"


def _length(state: FullState) -> int:
    """The trained length for a format that must name one."""
    if not state.about.seq_len:
        logger.warning(
            "%s: the length it was trained on is not known; wrote %d", state.path, DEFAULT_LENGTH
        )
    return state.about.seq_len or DEFAULT_LENGTH


def _shape_and_tokenizer(state: FullState) -> dict[str, bytes]:
    files: dict[str, bytes] = {}
    if state.about.model:
        files["model.json"] = state.about.model.to_json().encode()
    return files | _tokenizer(state)


def _tokenizer(state: FullState) -> dict[str, bytes]:
    if not state.about.tokenizer:
        return {}
    return files_of(state.about.tokenizer)


def _json(value: dict[str, Any]) -> bytes:
    return (json.dumps(value, indent=1) + "\n").encode()


@contextlib.contextmanager
def mapped(path: Path, tensors: dict[str, Outgoing]) -> Iterator[dict[str, Tensor]]:
    """The converted tensors, memory-mapped from a scratch file beside `path` that is deleted at the
    end.

    torch reports a failed write as "unexpected pos": the error that caused it, or the signal, is
    raised in its place.
    """
    scratch = temporary_path(path)
    try:
        write_file(scratch, tensors, sync=False)
        with safe_open(scratch, framework="pt") as file:
            yield {name: file.get_tensor(name) for name in tensors}
    except (RuntimeError, CheckpointException) as error:  # the latter is a BaseException
        cause: BaseException = error
        if isinstance(error, CheckpointException):
            cause, _ = next(iter(error.failures.values()))
        while not isinstance(cause, (OSError, SystemExit, KeyboardInterrupt)) and cause.__context__:
            cause = cause.__context__
        raise cause from None
    finally:
        scratch.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    """For files that another library has written."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _torch_save(path: Path, tree: dict[str, Any]) -> None:
    with path.open("xb") as file:
        torch.save(tree, file)
        file.flush()
        os.fsync(file.fileno())


def to_titanlite(path: Path, export: Export) -> None:
    """A step folder as `checkpoint/storage.py` writes it, by one process."""
    path.mkdir()
    about = export.state.about
    files: dict[str, FileEntry] = {}
    entries: dict[str, TensorEntry] = {}
    groups = {
        "model": {f"model.{name}": tensor for name, tensor in export.model.items()},
        "training": export.others,
    }
    for kind, tensors in groups.items():
        name = f"{kind}-00000.safetensors"
        if tensors:
            begins = {key: [0] * len(tensor.shape) for key, tensor in tensors.items()}
            write_file(path / name, tensors, sharding_metadata(begins))
            files[name] = FileEntry((path / name).stat().st_size, digest_of(path / name))
        for key, tensor in tensors.items():
            shape = tuple(tensor.shape)
            entries[key] = TensorEntry(
                DTYPE_NAMES[tensor.dtype], grid_of(shape, [Box(name, (0,) * len(shape), shape)])
            )
    small = about.files | _shape_and_tokenizer(export.state)
    write_small_files(path, small)
    files |= {
        name: FileEntry(len(content), digest_of(path / name)) for name, content in small.items()
    }
    manifest = Manifest(
        step=about.step or 0,
        finite=not export.nonfinite,
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        torch=torch.__version__,
        layout={},
        config=about.config or ({"training": {"seq_len": about.seq_len}} if about.seq_len else {}),
        data=about.data,
        validation_loss=None,
        files=files,
        tensors=entries,
    )
    write_small_files(path, {manifests.NAME: manifests.to_text(manifest).encode()})


def to_dcp(path: Path, export: Export) -> None:
    """A stock DCP folder of one process, with torchtitan's names: the model's at the root."""
    path.mkdir()
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    with mapped(path / "scratch", export.model | export.others) as tensors:
        # Of several, errors can be lost (pytorch#191391)
        writer = FileSystemWriter(path, thread_count=1)
        dcp.save(tensors, storage_writer=writer, planner=planner, no_dist=True)
    _sync(path / ".metadata")  # torch 2.13 syncs it before it has written all of it
    write_small_files(
        path, _shape_and_tokenizer(export.state) | {ORIGIN: _origin(export.state).encode()}
    )


def to_safetensors(path: Path, export: Export) -> None:
    """titanlite's names; one file if the path ends in .safetensors, else a folder, sharded where it
    is large.
    """
    state = export.state
    tensors = export.model | export.others
    if path.suffix == ".safetensors":
        shape = {"model": state.about.model.to_json()} if state.about.model else {}
        write_file(path, tensors, {"format": "pt", "titanlite": _origin(state), **shape})
        return
    path.mkdir()
    write_shards(path, tensors, export.shard_size)
    write_small_files(path, _shape_and_tokenizer(state) | {ORIGIN: _origin(state).encode()})


def to_torch(path: Path, export: Export) -> None:
    """A file for `torch.load(path, weights_only=True)`: a dict with `model` (name -> tensor) and
    its shape.
    """
    about = export.state.about
    with mapped(path, export.model | export.others) as tensors:
        tree: dict[str, Any] = {"model": {name: tensors[name] for name in export.model}}
        tree |= {"step": about.step, "seq_len": about.seq_len}
        if about.model:
            tree["model_config"] = json.loads(about.model.to_json())
        if export.others:
            tree["training"] = {name: tensors[name] for name in export.others}
        if about.tokenizer:
            tree["tokenizer"] = torch.frombuffer(bytearray(about.tokenizer), dtype=torch.uint8)
        _torch_save(path, tree)


def to_llama(path: Path, export: Export) -> None:
    """Meta's folder, with one consolidated file."""
    path.mkdir()
    state = export.state
    outgoing = dict(export.model)
    if state.model.tied_embeddings:
        # Meta's model always has both
        outgoing["output.weight"] = outgoing["tok_embeddings.weight"]
    with mapped(path / "scratch", outgoing) as tensors:
        _torch_save(path / "consolidated.00.pth", tensors)
    files = {"params.json": _json(meta.to_params(state.model))}
    write_small_files(path, files | _tokenizer(state))


def to_huggingface(path: Path, export: Export) -> None:
    """A folder for `from_pretrained` of transformers' AutoModelForCausalLM and AutoTokenizer."""
    path.mkdir()
    state = export.state
    length = _length(export.state)
    tensors: dict[str, Outgoing] = {}
    for name, hf_name in huggingface.names(state.model).items():
        width = state.model.head_dim if huggingface.is_permuted(name) else 0
        tensors[hf_name] = export.weight(name, width)
    write_shards(path, tensors, export.shard_size)
    bos: int | None = None
    eos: int | None = None
    files: dict[str, bytes] = {}
    if state.about.tokenizer:
        tokenizer = Tokenizer(state.path, state.about.tokenizer)
        bos = tokenizer.bos
        eos = tokenizer.eos
        files = to_files(tokenizer, length)
    dtype = str(tensors["model.norm.weight"].dtype).removeprefix("torch.")
    files["config.json"] = _json(huggingface.to_config(state.model, length, dtype, bos, eos))
    files["generation_config.json"] = _json(
        {"bos_token_id": bos, "eos_token_id": eos, "do_sample": False}
    )
    if TEMPLATE_FILE in state.about.files:
        files[TEMPLATE_FILE] = state.about.files[TEMPLATE_FILE]
    write_small_files(path, files)


def to_peft(path: Path, export: Export) -> None:
    """Adapters as PEFT's folder."""
    path.mkdir()
    state = export.state
    names = adapters.hf_names(state.model)
    tensors = {
        names[name]: export.weight(name, adapters.head_dim_of(name, state.model))
        for name in state.tensors
    }
    write_file(path / adapters.WEIGHTS, tensors, {"format": "pt"})
    write_small_files(path, {adapters.CONFIG: _json(adapters.to_config(state))})


def to_gguf(path: Path, export: Export) -> None:
    """llama.cpp's file."""
    gguf_file.write(path, export, _length(export.state))
    _sync(path)


TARGETS: dict[str, Callable[[Path, Export], None]] = {
    "titanlite": to_titanlite,
    "dcp": to_dcp,
    "safetensors": to_safetensors,
    "torch": to_torch,
    "llama": to_llama,
    "hf": to_huggingface,
    "gguf": to_gguf,
    "peft": to_peft,
}
SUFFIXES = {
    ".gguf": "gguf",
    ".safetensors": "safetensors",
    ".pt": "torch",
    ".pth": "torch",
    ".bin": "torch",
}
SHARDED = ("hf", "safetensors")  # can be several files
WITH_OTHERS = ("titanlite", "dcp", "safetensors", "torch")  # can hold more than a model
WITH_SCRATCH = ("dcp", "torch", "llama")  # need their size twice on the disk
