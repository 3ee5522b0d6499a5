"""Reads a model folder of Hugging Face's transformers: names and order of rows.

What it is: the same tensors under other names. The rows of wq and wk are permuted, because their
RoPE rotates other pairs (`half_split`); w1 is `gate_proj`, w3 `up_proj`, w2 `down_proj`. A mistake
here raises no error: logits are off by 0.2. A mixture has a tensor for each matrix of each expert,
where titanlite has one (E, F, D) for all experts. transformers 5 in memory has w1 above w3, in one
tensor for all experts, and can save them so: this is read too. `huggingface_config.py` has
config.json.
What it costs: config.json and the headers are read; tensors when they are used.
Reference: transformers 5, `LlamaForCausalLM`, `Qwen3MoeForCausalLM`, `MixtralForCausalLM`
"""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import Any

from titanlite.checkpoint.manifest import CorruptCheckpoint
from titanlite.model.flavors import LlamaConfig, block_shapes, family_of
from titanlite.runtime.documents import read_json
from titanlite.runtime.errors import ConfigError
from titanlite.runtime.typed_json import typed
from titanlite.tokenizer.kept_files import read_kept, to_files
from titanlite.tokenizer.tokenizer_json import TEMPLATE_FILE
from titanlite.tools.chat.find_template import find_template
from titanlite.tools.formats.full_state import (
    About,
    FullState,
    FullTensor,
    Part,
    reading,
)
from titanlite.tools.formats.huggingface_config import from_config
from titanlite.tools.formats.huggingface_tokenizer import read_tokenizer
from titanlite.tools.formats.safetensors_files import read_folder
from titanlite.tools.formats.same_model import without_tables
from titanlite.tools.formats.shape_file import sequence_length

logger = logging.getLogger("titanlite")
LAYER = {  # ours -> theirs
    "attention_norm": "input_layernorm",
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
}
# The same of mixtures of experts, by family; {} stands for the number of an expert
MIXTURES = {
    "qwen3_moe": {
        "feed_forward.router": "mlp.gate",
        "feed_forward.experts.w1": "mlp.experts.{}.gate_proj",
        "feed_forward.experts.w2": "mlp.experts.{}.down_proj",
        "feed_forward.experts.w3": "mlp.experts.{}.up_proj",
    },
    "mixtral": {
        "feed_forward.router": "block_sparse_moe.gate",
        "feed_forward.experts.w1": "block_sparse_moe.experts.{}.w1",
        "feed_forward.experts.w2": "block_sparse_moe.experts.{}.w2",
        "feed_forward.experts.w3": "block_sparse_moe.experts.{}.w3",
    },
}
# RoPE rotates what these compute
PERMUTED = ("attention.wq", "attention.wk", "attention.q_norm", "attention.k_norm")


def names(config: LlamaConfig) -> dict[str, list[str]]:
    """Hugging Face's parameter names by ours, in our order: one, or one for each expert."""
    layer = dict(LAYER)
    if config.num_experts:
        layer |= MIXTURES[family_of(config)]
    result = {"tok_embeddings.weight": ["model.embed_tokens.weight"]}
    for i in range(config.num_layers):
        for name in block_shapes(config):
            module, _, kind = name.rpartition(".")  # attention.wq, weight or bias
            there = f"model.layers.{i}.{layer[module]}.{kind}"
            numbers = range(config.num_experts if "{}" in there else 1)
            result[f"layers.{i}.{name}"] = [there.format(number) for number in numbers]
    result["norm.weight"] = ["model.norm.weight"]
    if not config.tied_embeddings:
        result["output.weight"] = ["lm_head.weight"]
    return result


def is_permuted(name: str) -> bool:
    """Whether the rows of this parameter lie in another order in Hugging Face's files."""
    return name.rpartition(".")[0].endswith(PERMUTED)


def open_folder(folder: Path) -> FullState:
    """The checkpoint in a folder with config.json and safetensors files.

    Raises CorruptCheckpoint or ConfigError.
    """
    path = folder / "config.json"
    with reading(path, "the configuration of a Llama"):
        fields = typed(dict[str, Any], read_json(path))
        config = from_config(path, fields)
    stored = without_tables(read_folder(folder))
    tensors = _take_fused(stored, config)
    for name, hf_names in names(config).items():
        found = [stored.pop(hf_name) for hf_name in hf_names if hf_name in stored]
        if found and name in tensors:
            raise CorruptCheckpoint(
                f"{folder}: has {name!r} twice, with all experts in one tensor and as "
                f"{hf_names[0]!r}; expected one of them"
            )
        if len(found) == len(hf_names) == 1:
            width = config.head_dim if is_permuted(name) else 0
            tensors[name] = dataclasses.replace(found[0], half_split=width)
        elif len(found) == len(hf_names):
            tensors[name] = _stacked(folder, hf_names, found)
        elif found:
            raise CorruptCheckpoint(
                f"{folder}: has {len(found)} of the {len(hf_names)} tensors {hf_names[0]!r} to "
                f"{hf_names[-1]!r}"
            )
    length = fields.get("max_position_embeddings", 0)
    about = About("hf", config, read_tokenizer(folder), seq_len=sequence_length(length))
    about.files |= to_files(read_kept(folder))
    try:
        template = find_template(folder)
    except ConfigError as error:  # only a conversation needs it
        logger.warning("its chat template is not used: %s", error)
        template = ""
    if template:
        about.files[TEMPLATE_FILE] = template.encode()
    # What is left in `stored` is not known: comparing the models reports it
    return FullState(folder, about, tensors | stored)


def _stacked(folder: Path, hf_names: list[str], tensors: list[FullTensor]) -> FullTensor:
    """One tensor (E, ...) of the experts' tensors. Raises CorruptCheckpoint if they differ."""
    first = tensors[0]
    parts: list[Part] = []
    for number, tensor in enumerate(tensors):
        if (tensor.dtype, tensor.shape) != (first.dtype, first.shape):
            raise CorruptCheckpoint(
                f"{folder}: {hf_names[number]!r} is {tensor.dtype} {tensor.shape}, and "
                f"{hf_names[0]!r} {first.dtype} {first.shape}; expected the same"
            )
        for part in tensor.parts:
            offsets = (number, *part.offsets)
            parts.append(dataclasses.replace(part, offsets=offsets, sizes=(1, *part.sizes)))
    return FullTensor(first.dtype, (len(tensors), *first.shape), tuple(parts))


def _take_fused(stored: dict[str, FullTensor], config: LlamaConfig) -> dict[str, FullTensor]:
    """Removes mixtures as transformers 5 has them in memory, with all experts in one tensor, from
    those that are stored, and returns them under our names.
    """
    taken: dict[str, FullTensor] = {}
    if not config.num_experts:
        return taken
    fitting = (config.num_experts, 2 * config.expert_ffn_dim, config.dim)
    same = {"gate.weight": "router.weight", "experts.down_proj": "experts.w2.weight"}
    for i in range(config.num_layers):
        theirs = f"model.layers.{i}.mlp."
        ours = f"layers.{i}.feed_forward."
        for hf_name, name in same.items():
            if theirs + hf_name in stored:
                taken[ours + name] = stored.pop(theirs + hf_name)
        w1_and_w3 = stored.get(f"{theirs}experts.gate_up_proj")
        if w1_and_w3 and w1_and_w3.shape == fitting and len(w1_and_w3.parts) == 1:
            del stored[f"{theirs}experts.gate_up_proj"]
            taken[f"{ours}experts.w1.weight"] = _half_of_rows(w1_and_w3, 0)
            taken[f"{ours}experts.w3.weight"] = _half_of_rows(w1_and_w3, 1)
    return taken


def _half_of_rows(both: FullTensor, half: int) -> FullTensor:
    """The first (0) or second (1) half of the rows of each matrix: (E, rows, in) -> half of it."""
    num, rows, columns = both.shape
    shape = (num, rows // 2, columns)
    (whole,) = both.parts
    part = dataclasses.replace(
        whole,
        begin=whole.begin + half * (rows // 2) * columns * both.dtype.itemsize,
        sizes=shape,
        strides=(rows * columns, columns, 1),
    )
    return FullTensor(both.dtype, shape, (part,))
