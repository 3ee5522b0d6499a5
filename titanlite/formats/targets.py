"""Writing a checkpoint in another format: one function for each, all of which stream tensor by tensor.

What it is: which tensors, under which names, in which order of rows and dtype (`Outgoing`), and the small files that
make the result complete: the model's shape, the tokenizer. Nobody reads what is written here before it is renamed.
What it costs: one block of rows in memory; one whole tensor for GGUF, whose writer takes no less.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from pathlib import Path

import torch
from torch import Tensor

from titanlite.checkpoint import manifest as manifests
from titanlite.checkpoint.manifest import Chunk, FileEntry, Manifest, TensorEntry
from titanlite.checkpoint.shard_file import DTYPE_NAMES, BackgroundConsumer, digest_of, is_finite
from titanlite.data.tokenizer import Tokenizer
from titanlite.formats import gguf_file, huggingface, meta, stock
from titanlite.formats.full_state import ORIGIN, FullState, FullTensor, half_split
from titanlite.formats.huggingface_tokenizer import to_files
from titanlite.formats.safetensors_files import Outgoing, Told, both, write_file
from titanlite.formats.safetensors_files import write_folder as write_shards
from titanlite.formats.torch_file import Tree, write_tree

logger = logging.getLogger("titanlite")
DEFAULT_LENGTH = 8192  # for a format that must name the longest sequence, where the source does not
Write = Callable[[Path, FullState, "Selection", int, Told], None]


class Selection:
    """What of a FullState is written: `model` by parameter name, and `others` if `full`; weights as `dtype`, or q8_0.

    `nonfinite`: names of what has held NaN or infinity so far, as it was written.
    """

    def __init__(self, state: FullState, dtype: torch.dtype | None, full: bool, q8: bool = False) -> None:
        self.dtype, self.q8 = dtype, q8
        self.nonfinite: set[str] = set()
        self.model = {name: self.outgoing(name, tensor) for name, tensor in state.tensors.items()}
        # Moments and counts are for going on, exactly; a dtype is asked for the weights.
        others = state.others.items() if full else ()
        self.others = {name: self._outgoing(name, tensor, tensor.dtype) for name, tensor in others}

    def outgoing(self, name: str, tensor: FullTensor, width: int = 0) -> Outgoing:
        """A weight to write; `width` of a head where its rows are to be in Hugging Face's order."""
        return self._outgoing(name, tensor, self.dtype_of(tensor), width)

    def dtype_of(self, tensor: FullTensor) -> torch.dtype:
        """What a weight is written as."""
        return self.dtype if self.dtype and tensor.dtype.is_floating_point else tensor.dtype

    def _outgoing(self, name: str, tensor: FullTensor, dtype: torch.dtype, width: int = 0) -> Outgoing:
        def blocks() -> Iterator[Tensor]:
            for block in tensor.blocks(width or 1):
                yield self.looked_at(name, (half_split(block, width) if width else block).to(dtype))

        return Outgoing(dtype, tensor.shape, blocks)

    def looked_at(self, name: str, block: Tensor) -> Tensor:
        """The block, after a look whether its numbers are finite: too large ones are not in fp16."""
        if not is_finite(block):
            self.nonfinite.add(name)
        return block

    @property
    def nbytes(self) -> int:
        whole = sum(tensor.nbytes for tensor in (*self.model.values(), *self.others.values()))
        return whole * 34 // 64 if self.q8 else whole  # at most: 34 bytes for 32 numbers of 2 or 4


def _write_small(folder: Path, files: dict[str, bytes]) -> None:
    for name, content in files.items():
        with (folder / name).open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())


def _origin(state: FullState) -> str:
    return json.dumps({"step": state.about.step, "seq_len": state.about.seq_len}) + "\n"


def _length(state: FullState) -> int:
    """The trained length for a format that must name one."""
    if not state.about.seq_len:
        logger.warning("%s: does not tell the length it was trained on; wrote %d", state.path, DEFAULT_LENGTH)
    return state.about.seq_len or DEFAULT_LENGTH


def _shape_and_tokenizer(state: FullState) -> dict[str, bytes]:
    files = {"model.json": state.about.model.to_json().encode()} if state.about.model else {}
    return files | ({"tokenizer.model": state.about.tokenizer} if state.about.tokenizer else {})


def _beside(state: FullState) -> dict[str, bytes]:
    return _shape_and_tokenizer(state) | {ORIGIN: _origin(state).encode()}


def to_titanlite(path: Path, state: FullState, what: Selection, shard_size: int, told: Told) -> None:
    """A step folder of ours: two safetensors files, the small files and the manifest."""
    path.mkdir()
    files: dict[str, FileEntry] = {}
    tensors: dict[str, TensorEntry] = {}
    groups = {"model": {f"model.{name}": tensor for name, tensor in what.model.items()}, "training": what.others}
    for kind, group in groups.items():
        if not group:
            continue
        name = f"{kind}-00000.safetensors"
        digest = hashlib.sha256()
        with BackgroundConsumer(digest.update) as hashing:
            write_file(path / name, group, {}, both(hashing.add, told))
        files[name] = FileEntry((path / name).stat().st_size, digest.hexdigest())
        for key, tensor in group.items():
            shape = list(tensor.shape)
            tensors[key] = TensorEntry(DTYPE_NAMES[tensor.dtype], shape, [Chunk(name, [0] * len(shape), shape)])
    small = state.about.files | _shape_and_tokenizer(state)
    _write_small(path, small)
    files |= {name: FileEntry(len(content), digest_of(path / name)) for name, content in small.items()}
    made = datetime.now(timezone.utc).isoformat(timespec="seconds")
    config = state.about.config or ({"training": {"seq_len": state.about.seq_len}} if state.about.seq_len else {})
    step = state.about.step or 0
    manifest = Manifest(
        step, not what.nonfinite, made, torch.__version__, {}, config, state.about.data, None, files, tensors
    )
    _write_small(path, {manifests.NAME: manifests.to_text(manifest).encode()})


def to_dcp(path: Path, state: FullState, what: Selection, shard_size: int, told: Told) -> None:
    """A stock DCP folder, with torchtitan's names: the model's at the root."""
    stock.write_folder(path, what.model | what.others, told)
    _write_small(path, _beside(state))


def to_safetensors(path: Path, state: FullState, what: Selection, shard_size: int, told: Told) -> None:
    """Our names; one file if the path ends so, else a folder, in shards where it is large."""
    tensors = what.model | what.others
    if path.suffix == ".safetensors":
        shape = {"model": state.about.model.to_json()} if state.about.model else {}
        write_file(path, tensors, {"format": "pt", "titanlite": _origin(state), **shape}, told)
        return
    path.mkdir()
    write_shards(path, tensors, shard_size, told)
    _write_small(path, _beside(state))


def to_torch(path: Path, state: FullState, what: Selection, shard_size: int, told: Told) -> None:
    """A file for `torch.load(path, weights_only=True)`: a dict with `model` (name -> tensor) and what is known."""
    tree: Tree = {"model": what.model, "step": state.about.step, "seq_len": state.about.seq_len}
    if state.about.model:
        tree["model_config"] = json.loads(state.about.model.to_json())
    if what.others:
        tree["training"] = what.others
    if ranks := state.about.tokenizer:
        content = torch.frombuffer(bytearray(ranks), dtype=torch.uint8)
        tree["tokenizer"] = Outgoing(torch.uint8, (len(ranks),), lambda: iter([content]))
    write_tree(path, tree, told)


def to_llama(path: Path, state: FullState, what: Selection, shard_size: int, told: Told) -> None:
    """Meta's folder, with one consolidated file."""
    path.mkdir()
    tensors = dict(what.model)
    if state.model.tied_embeddings:
        tensors["output.weight"] = tensors["tok_embeddings.weight"]  # Meta's model always has one of its own
    write_tree(path / "consolidated.00.pth", tensors, told)
    files = {"params.json": (json.dumps(meta.to_params(state.model), indent=1) + "\n").encode()}
    _write_small(path, files | ({"tokenizer.model": state.about.tokenizer} if state.about.tokenizer else {}))


def to_huggingface(path: Path, state: FullState, what: Selection, shard_size: int, told: Told) -> None:
    """A folder for `transformers.AutoModelForCausalLM.from_pretrained`, and AutoTokenizer's."""
    path.mkdir()
    config, length = state.model, _length(state)
    tensors: dict[str, Outgoing] = {}
    for ours, theirs in huggingface.names(config).items():
        width = config.head_dim if huggingface.is_turned(ours) else 0
        tensors[theirs] = what.outgoing(ours, state.tensors[ours], width)
    write_shards(path, tensors, shard_size, told)
    bos = eos = None
    files: dict[str, bytes] = {}
    if ranks := state.about.tokenizer:
        tokenizer = Tokenizer(state.path, ranks)
        bos, eos = tokenizer.bos, tokenizer.eos
        files = to_files(tokenizer, ranks, length)
    dtype = str(tensors["model.norm.weight"].dtype).removeprefix("torch.")
    described = {
        "config.json": huggingface.to_config(config, length, dtype, bos, eos),
        "generation_config.json": {"bos_token_id": bos, "eos_token_id": eos, "do_sample": False},
    }
    _write_small(path, files | {name: (json.dumps(it, indent=1) + "\n").encode() for name, it in described.items()})


def to_gguf(path: Path, state: FullState, what: Selection, shard_size: int, told: Told) -> None:
    """llama.cpp's file."""
    gguf_file.write(path, state, _length(state), what.dtype, what.q8, what.looked_at, told)
    with path.open("rb") as file:
        os.fsync(file.fileno())


TARGETS: dict[str, Write] = {
    "titanlite": to_titanlite,
    "dcp": to_dcp,
    "safetensors": to_safetensors,
    "torch": to_torch,
    "llama": to_llama,
    "hf": to_huggingface,
    "gguf": to_gguf,
}
SUFFIXES = {".gguf": "gguf", ".safetensors": "safetensors", ".pt": "torch", ".pth": "torch", ".bin": "torch"}
SHARDED = ("hf", "safetensors")  # which can be several files
WITH_OTHERS = ("titanlite", "dcp", "safetensors", "torch")  # which can hold more than a model
