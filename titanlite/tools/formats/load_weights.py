"""Loads weights from a checkpoint of any format into a run under any layout, or into one process.

What it is: used by `checkpoint.initial_load`, `titanlite generate` and other tools. A step folder
is loaded as a resumed run loads it (`checkpoint/planner.py`): by its manifest, so that a process
opens only the files that hold its parts. Of other formats each process reads the rows of its own
parts from a `FullState`.
What it costs: the parameters in fp32 once; each process reads only the rows of its own shards, and
of what tensor parallelism cuts by columns (wo and w2) whole rows. If the file of a tied model has
an output besides the embedding, each process reads both completely, to see that they are equal.
Files with hashes or CRC-32 are read twice, the first time for these. A few collectives, to agree on
errors.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from titanlite.checkpoint.folders import find_step_folder
from titanlite.checkpoint.manifest import DTYPES, CorruptCheckpoint, Manifest, read_manifest
from titanlite.checkpoint.planner import LocalParts, Part, PlacementLoadPlanner
from titanlite.checkpoint.shard_file import is_finite
from titanlite.checkpoint.state import ModelState
from titanlite.checkpoint.step_files import read_file, verify_together
from titanlite.checkpoint.storage import StepReader, loading
from titanlite.config.schema import CheckpointConfig
from titanlite.distributed.agreement import PATIENT, broadcast_from_rank0, on_all_ranks
from titanlite.distributed.process_group import checkpoint_group
from titanlite.model.flavors import LlamaConfig
from titanlite.model.llama import Llama
from titanlite.parallel.lora import is_adapter
from titanlite.runtime.errors import ConfigError
from titanlite.tokenizer.tokenizer import Tokenizer, named_tokenizer
from titanlite.tokenizer.tokenizer_json import JSON_FILES, RANK_FILE
from titanlite.tools.formats.detect_format import drop_tied_output, open_full_state
from titanlite.tools.formats.full_state import BLOCK, FullState, FullTensor
from titanlite.tools.formats.huggingface_tokenizer import content_of
from titanlite.tools.formats.intact import other_steps, require_intact
from titanlite.tools.formats.same_model import (
    Stored,
    mismatches,
    require_own_tensors,
    require_same_model,
)
from titanlite.tools.formats.step_folder import is_step_folder, model_of

logger = logging.getLogger("titanlite")


def load_weights(
    config: CheckpointConfig, model: ModelState, llama: LlamaConfig, tokenizer: Tokenizer
) -> None:
    """Replaces `model`'s weights with those that `checkpoint.initial_load` names; all processes
    call it together.

    Raises ConfigError if they are damaged, not finite or not those of the model.
    """
    weights = model.state_dict()
    origin = read_weights(Path(config.initial_load), weights, llama, tokenizer.content)
    logger.info("loading weights from %s", origin)
    model.load_state_dict(weights)


def read_weights(path: Path, state: dict[str, Any], model: LlamaConfig, tokenizer: bytes) -> Path:
    """Fills `state` (parameter name -> tensor or DTensor) from a checkpoint of any format, of a run
    from its newest.

    All processes call it together, in any layout, and each reads its own rows; returns the path.
    Raises ConfigError if the checkpoint is damaged, not finite or of another model than `model`.
    """
    if broadcast_from_rank0(lambda: is_step_folder(path) and not _has_adapters(path)):
        # Rank 0 chooses for all: the run it belongs to may be saving another one now.
        folder = Path(broadcast_from_rank0(lambda: str(find_step_folder(path))))
        _read_step(folder, state, model, tokenizer)
        return folder
    full = on_all_ranks(lambda: open_full_state(path), PATIENT)
    # Divided among the ranks of a node, because each node may have another copy.
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    share = slice(local_rank, None, local_world_size)
    on_all_ranks(lambda: require_intact(full, share=share), PATIENT)
    _compare_tokenizers(path, full.about.tokenizer, tokenizer)
    on_all_ranks(lambda: _fill_same_model(full, state, model), PATIENT)
    return path


def _has_adapters(path: Path) -> bool:
    """Whether a run's newest step holds adapters, which are added to the weights of its model."""
    manifest = read_manifest(find_step_folder(path))
    return any(map(is_adapter, manifest.tensors))


def _read_step(folder: Path, state: dict[str, Any], model: LlamaConfig, tokenizer: bytes) -> None:
    """Fills `state` from a step folder."""
    try:
        manifest = verify_together(folder, "model")
    except CorruptCheckpoint as error:
        raise CorruptCheckpoint([*error.problems, other_steps(folder)]) from None
    if not manifest.finite:
        raise ConfigError(f"{folder}: holds NaN or infinity; choose another step")
    on_all_ranks(lambda: _require_manifest_of(folder, manifest, model), PATIENT)
    names = [name for name in (RANK_FILE, *JSON_FILES) if name in manifest.files]
    saved = content_of(
        on_all_ranks(lambda: {name: read_file(folder, manifest, name) for name in names})
    )
    _compare_tokenizers(folder, saved, tokenizer)
    with loading(folder):
        dcp.load(
            {"model": state},
            storage_reader=StepReader(folder, manifest),
            planner=PlacementLoadPlanner(),
            process_group=checkpoint_group(),
        )


def _require_manifest_of(folder: Path, manifest: Manifest, model: LlamaConfig) -> None:
    """Raises ConfigError if the manifest lists tensors of another model; no shard is opened."""
    name = "model.json"
    stated: LlamaConfig | None = None
    if name in manifest.files:
        stated = model_of(folder / name, read_file(folder, manifest, name))
    tensors = {
        name.removeprefix("model."): Stored(DTYPES[entry.dtype], entry.shape)
        for name, entry in manifest.tensors.items()
        if name.startswith("model.")
    }
    require_same_model(folder, stated, tensors, model)


def _compare_tokenizers(path: Path, saved: bytes | None, tokenizer: bytes) -> None:
    """Warns if the weights were trained with another tokenizer."""
    if saved is None or saved == tokenizer:
        return
    try:  # the same encoding can be in several files, with other special tokens
        a = Tokenizer(path, saved)
        b = Tokenizer(path, tokenizer)
        same = (a.tokens, a.ranks, a.pattern, a.nfc) == (b.tokens, b.ranks, b.pattern, b.nfc)
        same = same and not a.whole_documents  # whose merges are not known
    except ConfigError:
        same = False
    if not same:
        logger.warning(
            "%s: was trained with another tokenizer; its embeddings belong to other tokens", path
        )


def _fill_same_model(full: FullState, state: dict[str, Any], model: LlamaConfig) -> None:
    """Fills `state` from a checkpoint of this model.

    Raises ConfigError if it is not finite or of another model.
    """
    if full.about.model is None and model.tied_embeddings:
        drop_tied_output(full)
    require_same_model(full.path, full.about.model, full.tensors, model)
    fill(full, state)


def tokenizer_of(full: FullState, path: str = "") -> Tokenizer:
    """The checkpoint's tokenizer, or that at `path`. Raises ConfigError if there is neither."""
    if path:
        tokenizer = named_tokenizer(path, "--tokenizer")
        shape = full.about.model
        if shape is not None and tokenizer.size > shape.vocab_size:
            raise ConfigError(
                f"{path}: has {tokenizer.size} ids, and the model {shape.vocab_size}; expected the "
                "model's tokenizer"
            )
        return tokenizer
    if full.about.tokenizer is None:
        raise ConfigError(
            f"{full.path}: has no tokenizer that titanlite reads; name a tokenizer's file with "
            "--tokenizer"
        )
    return Tokenizer(full.path, full.about.tokenizer)


def load_model(full: FullState, device: torch.device, seq_len: int) -> Llama:
    """The model of a checkpoint, for sequences of up to `seq_len` tokens.

    Raises CorruptCheckpoint or ConfigError, also if the weights are not finite.
    """
    model = meta_model(full, seq_len)
    model.to_empty(device=device)
    model.reset_rope(device)
    fill(full, model.state_dict())
    return model.eval()


def meta_model(full: FullState, seq_len: int) -> Llama:
    """The model of a checkpoint without memory; the checkpoint's tensors have its shapes.

    Raises CorruptCheckpoint or ConfigError.
    """
    require_own_tensors(full)
    with torch.device("meta"):
        return Llama(full.model, seq_len)


def fill(full: FullState, state: dict[str, Any]) -> None:
    """Fills `state` (parameter name -> Tensor or DTensor) in place, converting dtypes.

    Raises ConfigError with everything that does not fit, before anything is filled, and for NaN or
    infinity in the rows that this process reads; CorruptCheckpoint if a file is incomplete.
    """
    shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
    problems = mismatches(full.path, full.tensors, shapes)
    if problems:
        raise ConfigError(problems)
    converted = {f"{full.tensors[name].dtype} -> {tensor.dtype}" for name, tensor in state.items()}
    logger.debug("%s: %d tensors, %s", full.path, len(state), ", ".join(sorted(converted)))
    nonfinite = []
    for part in LocalParts().of(state):
        if not _read_rows(full.tensors[part.name], part):
            nonfinite.append(part.name)
    if nonfinite:
        raise ConfigError(
            [
                f"{full.path}: {name!r} holds NaN or infinity; expected numbers"
                for name in nonfinite[:3]
            ]
        )


def _read_rows(source: FullTensor, part: Part) -> bool:
    """Fills this process's part of a tensor, about 4 MB at a time.

    Returns whether all numbers that it read are finite.
    """
    target = part.local
    finite = True
    if not source.shape:
        target.copy_(source.read().reshape(target.shape))
    elif target.numel():
        top = part.chunk.offsets[0]
        height = part.chunk.sizes[0]
        box = tuple(
            slice(offset, offset + size)
            for offset, size in zip(part.chunk.offsets, part.chunk.sizes, strict=True)
        )
        rows = max(1, BLOCK // max(1, source.nbytes // source.shape[0]))
        if any(stored.is_transposed for stored in source.parts):
            rows = height  # each block would read nearly all of it
        for start in range(0, height, rows):
            stop = min(start + rows, height)
            whole_rows = source.read(top + start, top + stop)
            finite = finite and is_finite(whole_rows)
            target[start:stop] = whole_rows[(slice(None), *box[1:])]
    return finite
