"""What a GGUF file says of the use of its model: end tokens, begin and padding, sampling defaults.

What it is: the same things that Hugging Face has in generation_config.json and
tokenizer_config.json, so they are read into the kept files (`tokenizer/kept_files.py`) and written
from them. llama.cpp ends a text at `eos`, `eot` (end of turn) and `eom` (end of message).
Reference: github.com/ggml-org/llama.cpp, `gguf-py/gguf/constants.py`
"""

from __future__ import annotations

import logging
import math
from typing import Any

import numpy as np

from titanlite.tokenizer.kept_files import CONFIG, GENERATION, TOKENIZER, Kept, name_in
from titanlite.tokenizer.tokenizer import Tokenizer
from titanlite.tools.formats.full_state import FullState
from titanlite.tools.formats.huggingface_kept import answer_end, end_tokens, kept_of

logger = logging.getLogger("titanlite")
ENDS = ("eos", "eot", "eom")
# Hugging Face's name -> llama.cpp's, in general.sampling
SAMPLING = {
    "temperature": "temp",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "penalty_repeat",
}


def read_fields(fields: dict[str, Any]) -> Kept:
    """The kept files that a GGUF file's metadata stands for; none without a tokenizer."""
    tokens = fields.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list):
        return {}

    def token_of(kind: str) -> int | None:
        name = "padding" if kind == "pad" else kind
        value = fields.get(f"tokenizer.ggml.{name}_token_id")
        return value if type(value) is int and 0 <= value < len(tokens) else None

    ends = [i for i in map(token_of, ENDS) if i is not None]
    ids = {f"{kind}_token_id": token_of(kind) for kind in ("bos", "eos", "pad")}
    generation: dict[str, Any] = {
        **{name: i for name, i in ids.items() if i is not None},
        "eos_token_id": list(dict.fromkeys(ends)),
    }
    for name, key in SAMPLING.items():
        value = fields.get(f"general.sampling.{key}")
        if isinstance(value, float) and math.isfinite(value):
            generation[name] = float(str(np.float32(value)))  # the shortest with these 32 bits
        elif type(value) is int:
            generation[name] = value
    if generation.keys() & SAMPLING.keys():
        generation["do_sample"] = True
    names: dict[str, Any] = {}
    for kind in ("bos", "eos", "pad"):
        i = token_of(kind)
        names[f"{kind}_token"] = None if i is None else tokens[i]
    return {
        CONFIG: dict(ids),
        GENERATION: generation,
        TOKENIZER: {"tokenizer_class": "PreTrainedTokenizerFast", **names},
    }


def write_fields(writer: Any, state: FullState, tokenizer: Tokenizer) -> None:
    """Adds them to a file's metadata. `writer`: a GGUFWriter."""
    kept = kept_of(state)
    names = {i: name for name, i in tokenizer.special.items()}
    if name_in(kept, "bos_token", names[tokenizer.bos]):
        writer.add_bos_token_id(tokenizer.bos)
    writer.add_eos_token_id(tokenizer.eos)
    pad = tokenizer.special.get(name_in(kept, "pad_token", ""))
    if pad is not None:
        writer.add_pad_token_id(pad)
    ends = end_tokens(state, tokenizer)
    # The end of an answer first: it is the end of a turn
    ordered = [i for i in answer_end(state, tokenizer) if i in ends]
    others = [i for i in dict.fromkeys([*ordered, *ends]) if i != tokenizer.eos]
    for kind, token in zip(ENDS[1:], others, strict=False):
        writer.add_uint32(f"tokenizer.ggml.{kind}_token_id", token)
    if len(others) >= len(ENDS):
        logger.warning(
            "%s: a text ends with %d tokens, and a GGUF file has places for %d; left out: %s",
            state.path,
            len(others) + 1,
            len(ENDS),
            ", ".join(map(str, others[2:])),
        )
    generation = kept.get(GENERATION, {})
    if generation.get("do_sample") is False:  # what it says of sampling is not used
        return
    for name, key in SAMPLING.items():
        value = generation.get(name)
        if type(value) is int and name == "top_k":
            writer.add_int32(f"general.sampling.{key}", value)
        elif type(value) in (int, float) and name != "top_k":
            writer.add_float32(f"general.sampling.{key}", value)
