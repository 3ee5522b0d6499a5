"""Reads a model folder of Meta: `consolidated.*.pth`, `params.json`, `tokenizer.model`.

What it is: the same names and order of rows as titanlite's. Larger models come in several files,
one per model-parallel process, each with a shard of every matrix: rows of wq, wk, wv, w1, w3 and
the output, columns of wo and w2, rows of the embedding (columns in Llama 2). params.json gives the
feed-forward width by a formula.
What it costs: the pickles and params.json are read; tensors when they are used.
Reference: github.com/meta-llama/llama-models, models/llama3
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from titanlite.checkpoint.manifest import CorruptCheckpoint
from titanlite.model.flavors import LlamaConfig, RopeScaling
from titanlite.runtime.documents import read_json
from titanlite.tools.formats.full_state import (
    About,
    FullState,
    FullTensor,
    Part,
    Record,
    reading,
    same_numbers,
)
from titanlite.tools.formats.huggingface_tokenizer import companions_in, tokenizer_in
from titanlite.tools.formats.shape_file import checked
from titanlite.tools.formats.torch_file import Tree, read_tree
from titanlite.tools.formats.torchtune_names import from_torchtune, is_torchtune

# What torchtune's checkpointers save in place of consolidated.00.pth
TORCHTUNE_FILE = "model-00001-of-00001.bin"
BY_COLUMNS = ("attention.wo.weight", "feed_forward.w2.weight")
# Widths of Llama 3.2, whose RoPE scaling factor is 32 and not 8; params.json does not hold it
SMALL_DIMS = (2048, 3072)


def to_params(config: LlamaConfig) -> dict[str, Any]:
    """The fields of params.json, and the numbers of RoPE scaling that Meta has in its code only."""
    fields: dict[str, Any] = {
        "dim": config.dim,
        "n_layers": config.num_layers,
        "n_heads": config.num_heads,
        "n_kv_heads": config.num_kv_heads,
        "vocab_size": config.vocab_size,
        # Below one multiple
        "ffn_dim_multiplier": min(1.0, config.ffn_dim / int(8 * config.dim / 3)),
        "multiple_of": config.ffn_dim,  # rounded up to it
        "norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "use_scaled_rope": config.rope_scaling is not None,
    }
    s = config.rope_scaling
    if s:
        fields |= {
            "rope_scaling_factor": s.factor,
            "low_freq_factor": s.low_freq_factor,
            "high_freq_factor": s.high_freq_factor,
            "original_context": s.original_context,
        }
    return fields


def from_params(fields: dict[str, Any], vocab_size: int, tied: bool) -> LlamaConfig:
    """The model of a params.json. Raises KeyError, ValueError or TypeError for other fields."""
    dim = fields["dim"]
    multiple = fields["multiple_of"]
    hidden = int(8 * dim / 3)
    multiplier = fields.get("ffn_dim_multiplier")
    if multiplier is not None:
        hidden = int(multiplier * hidden)
    scaling = None
    if fields.get("use_scaled_rope"):
        default_factor = 32.0 if dim in SMALL_DIMS else 8.0
        scaling = RopeScaling(
            fields.get("rope_scaling_factor") or default_factor,
            fields.get("low_freq_factor", 1.0),
            fields.get("high_freq_factor", 4.0),
            fields.get("original_context", 8192),
        )
    config = LlamaConfig(
        dim=dim,
        num_layers=fields["n_layers"],
        num_heads=fields["n_heads"],
        num_kv_heads=fields.get("n_kv_heads") or fields["n_heads"],
        ffn_dim=multiple * -(-hidden // multiple),
        vocab_size=vocab_size,
        tied_embeddings=tied,
        rope_theta=fields.get("rope_theta", 10000.0),
        rope_scaling=scaling,
        norm_eps=fields.get("norm_eps", 1e-5),
    )
    return checked(config)


def _joined(name: str, pieces: list[FullTensor], dim: int) -> FullTensor:
    """A whole parameter from its shard in each file.

    Raises ValueError if the shards do not fit together.
    """
    first = pieces[0]
    by_columns = name.endswith(BY_COLUMNS)
    if name == "tok_embeddings.weight":  # in Llama 2 by columns, since then by rows
        by_columns = first.shape[1:] != (dim,)
    cut = 1 if by_columns else 0  # the dimension
    is_whole = len(pieces) == 1 or len(first.shape) < 2  # norms are the same in all files
    for piece in pieces:
        fits = piece.dtype == first.dtype and len(piece.shape) == len(first.shape)
        for i, size in enumerate(first.shape):
            if i != cut or is_whole:
                fits = fits and piece.shape[i] == size
        if not fits:
            raise ValueError(f"{name}: its parts do not fit together")
    if is_whole:
        return first
    parts: list[Part] = []
    total = 0  # rows or columns so far
    for piece in pieces:
        offsets = (0, total) if by_columns else (total, 0)
        parts.append(dataclasses.replace(piece.parts[0], offsets=offsets))
        total += piece.shape[cut]
    shape = (first.shape[0], total) if by_columns else (total, first.shape[1])
    return FullTensor(first.dtype, shape, tuple(parts))


def is_meta(folder: Path) -> bool:
    """Whether the folder is Meta's, or one that torchtune saved of a model from such a folder."""
    if not (folder / "params.json").is_file():
        return False
    return any(folder.glob("consolidated.*.pth")) or (folder / TORCHTUNE_FILE).is_file()


def open_folder(folder: Path) -> FullState:
    """The checkpoint in Meta's folder. Raises CorruptCheckpoint or ConfigError."""
    files = sorted(folder.glob("consolidated.*.pth"))
    numbers = [path.name.removeprefix("consolidated.").removesuffix(".pth") for path in files]
    if not files:
        files = [folder / TORCHTUNE_FILE]
    if any(not number.isdecimal() or int(number) != i for i, number in enumerate(numbers)):
        raise CorruptCheckpoint(
            f"{folder}: has {', '.join(path.name for path in files)}; expected "
            "consolidated.00.pth and on"
        )
    trees: list[Tree] = []
    records: list[Record] = []
    for file in files:
        if not file.is_file():
            raise CorruptCheckpoint(f"{file}: expected a regular file")
        tree, of_file = read_tree(file)
        trees.append(tree)
        records += of_file
    path = folder / "params.json"
    with reading(path, "the parameters of a Llama"):
        fields = read_json(path)
        dim = fields["dim"]
        tensors: dict[str, FullTensor] = {}
        for name, value in trees[0].items():
            if not isinstance(value, FullTensor) or name == "rope.freqs":
                continue
            pieces = []
            for tree, file in zip(trees, files, strict=True):
                piece = tree.get(name)
                if not isinstance(piece, FullTensor):
                    raise CorruptCheckpoint(f"{file}: has no {name!r}, which {files[0].name} has")
                pieces.append(piece)
            tensors[name] = _joined(name, pieces, dim)
        if is_torchtune(tensors):
            tensors = from_torchtune(folder, tensors)
        embedding = tensors["tok_embeddings.weight"]
        output = tensors.get("output.weight")
        tied = output is None or same_numbers(output, embedding)
        if tied:
            tensors.pop("output.weight", None)
        config = from_params(fields, tensors["tok_embeddings.weight"].shape[0], tied)
    about = About("llama", config, tokenizer_in(folder), layout=f"{len(files)} files")
    about.files = companions_in(folder)
    state = FullState(folder, about, tensors)
    state.records = records
    return state
