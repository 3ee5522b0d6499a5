"""A model folder of Hugging Face's transformers: names and order of rows.

What it is: the same tensors under other names. The rows of wq and wk are permuted, because their
RoPE rotates other pairs (`half_split`); w1 is `gate_proj`, w3 `up_proj`, w2 `down_proj`. A mistake
here raises no error: logits are off by 0.2. `huggingface_config.py` has config.json.
What it costs: config.json and the headers are read; tensors when they are used.
Reference: transformers 5, `LlamaForCausalLM`
"""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import Any

from titanlite.checkpoint.manifest import CorruptCheckpoint
from titanlite.model.flavors import LlamaConfig, block_shapes
from titanlite.model.shape_file import sequence_length
from titanlite.runtime.documents import read_json
from titanlite.runtime.errors import ConfigError, reason_of
from titanlite.runtime.typed_json import typed
from titanlite.tokenizer.kept_files import read_kept, to_files
from titanlite.tokenizer.tokenizer_json import TEMPLATE_FILE
from titanlite.tools.chat.find_template import find_template
from titanlite.tools.formats.full_state import About, FullState, FullTensor, same_numbers
from titanlite.tools.formats.huggingface_config import from_config
from titanlite.tools.formats.huggingface_tokenizer import read_tokenizer
from titanlite.tools.formats.safetensors_files import read_folder
from titanlite.tools.formats.same_model import without_tables

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
# RoPE rotates what these compute
PERMUTED = ("attention.wq", "attention.wk", "attention.q_norm", "attention.k_norm")


def names(config: LlamaConfig) -> dict[str, str]:
    """Hugging Face's parameter names by ours, in our order."""
    result = {"tok_embeddings.weight": "model.embed_tokens.weight"}
    for i in range(config.num_layers):
        for name in block_shapes(config):
            module, _, kind = name.rpartition(".")  # attention.wq, weight or bias
            result[f"layers.{i}.{name}"] = f"model.layers.{i}.{LAYER[module]}.{kind}"
    result["norm.weight"] = "model.norm.weight"
    if not config.tied_embeddings:
        result["output.weight"] = "lm_head.weight"
    return result


def is_permuted(name: str) -> bool:
    """Whether the rows of this parameter lie in another order in Hugging Face's files."""
    return name.rpartition(".")[0].endswith(PERMUTED)


def open_folder(folder: Path) -> FullState:
    """The checkpoint in a folder with config.json and safetensors files.

    Raises CorruptCheckpoint or ConfigError.
    """
    path = folder / "config.json"
    try:
        fields = typed(dict[str, Any], read_json(path))
        config = from_config(path, fields)
    except (
        OSError,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        ArithmeticError,
    ) as error:
        if isinstance(error, ConfigError):
            raise
        raise CorruptCheckpoint(
            f"{path}: not the configuration of a Llama ({reason_of(error)})"
        ) from None
    stored = without_tables(read_folder(folder))
    tensors: dict[str, FullTensor] = {}
    for name, hf_name in names(config).items():
        tensor = stored.pop(hf_name, None)
        if tensor:
            width = config.head_dim if is_permuted(name) else 0
            tensors[name] = dataclasses.replace(tensor, half_split=width)
    # What is left in `stored` is not known: comparing the models reports it
    output = stored.get("lm_head.weight")
    embedding = tensors.get("tok_embeddings.weight")
    if config.tied_embeddings and output and embedding and same_numbers(output, embedding):
        del stored["lm_head.weight"]
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
    return FullState(folder, about, tensors | stored)
