"""Reads and writes the special tokens and sampling defaults of a GGUF file.

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

from titanlite.tokenizer.kept_files import CONFIG, GENERATION, TOKENIZER, Kept, ends_of, name_in
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


def read_fields(fields: dict[str, Any], vocab_size: int) -> Kept:
    """The kept files that a GGUF file's metadata stands for.

    `vocab_size`: of the model, for a file that does not list its tokens.
    """
    listed = fields.get("tokenizer.ggml.tokens")
    tokens: list[str] | None = listed if isinstance(listed, list) else None
    num_ids = vocab_size if tokens is None else len(tokens)

    def token_of(kind: str) -> int | None:
        name = "padding" if kind == "pad" else kind
        value = fields.get(f"tokenizer.ggml.{name}_token_id")
        return value if type(value) is int and 0 <= value < num_ids else None

    ends = [i for i in map(token_of, ENDS) if i is not None]
    ids = {f"{kind}_token_id": token_of(kind) for kind in ("bos", "eos", "pad")}
    generation: dict[str, Any] = {name: i for name, i in ids.items() if i is not None}
    if ends or tokens is not None:
        generation["eos_token_id"] = list(dict.fromkeys(ends))
    for name, key in SAMPLING.items():
        value = fields.get(f"general.sampling.{key}")
        if isinstance(value, float) and math.isfinite(value):
            generation[name] = float(str(np.float32(value)))  # the shortest with these 32 bits
        elif type(value) is int:
            generation[name] = value
    if generation.keys() & SAMPLING.keys():
        generation["do_sample"] = True
    if tokens is None:
        return {CONFIG: dict(ids), GENERATION: generation} if generation else {}
    names: dict[str, Any] = {}
    for kind in ("bos", "eos", "pad"):
        i = token_of(kind)
        names[f"{kind}_token"] = None if i is None else tokens[i]
    return {
        CONFIG: dict(ids),
        GENERATION: generation,
        TOKENIZER: {"tokenizer_class": "PreTrainedTokenizerFast", **names},
    }


def write_fields(writer: Any, state: FullState, tokenizer: Tokenizer | None) -> None:
    """Adds them to a file's metadata. `writer`: a GGUFWriter; `tokenizer`: the model's, if known.

    Without a tokenizer the ids are those that the model's files state.
    """
    kept = kept_of(state)
    if tokenizer:
        _write_tokens(writer, state, kept, tokenizer)
    else:
        stated = kept.get(CONFIG, {}) | kept.get(GENERATION, {})
        for kind in ("bos", "pad"):
            token = stated.get(f"{kind}_token_id")
            if type(token) is int:
                name = "padding" if kind == "pad" else kind
                writer.add_uint32(f"tokenizer.ggml.{name}_token_id", token)
        _write_ends(writer, state, ends_of(kept))
    generation = kept.get(GENERATION, {})
    if generation.get("do_sample") is False:  # what it says of sampling is not used
        return
    for name, key in SAMPLING.items():
        value = generation.get(name)
        if type(value) is int and name == "top_k":
            writer.add_int32(f"general.sampling.{key}", value)
        elif type(value) in (int, float) and name != "top_k":
            writer.add_float32(f"general.sampling.{key}", value)


def _write_tokens(writer: Any, state: FullState, kept: Kept, tokenizer: Tokenizer) -> None:
    """Adds the ids of the tokens that begin, end and fill a text."""
    names = {i: name for name, i in tokenizer.special.items()}
    if name_in(kept, "bos_token", names[tokenizer.bos]):
        writer.add_bos_token_id(tokenizer.bos)
    pad = tokenizer.special.get(name_in(kept, "pad_token", ""))
    if pad is not None:
        writer.add_pad_token_id(pad)
    ends = end_tokens(state, tokenizer)
    # The end of an answer first: it is the end of a turn
    ordered = [i for i in answer_end(state, tokenizer) if i in ends]
    _write_ends(writer, state, list(dict.fromkeys([tokenizer.eos, *ordered, *ends])))


def _write_ends(writer: Any, state: FullState, ends: list[int]) -> None:
    """Adds the ids that end a text, as many as the format has places for."""
    for kind, token in zip(ENDS, ends, strict=False):
        writer.add_uint32(f"tokenizer.ggml.{kind}_token_id", token)
    if len(ends) > len(ENDS):
        logger.warning(
            "%s: a text ends with %d tokens, and a GGUF file has places for %d; left out: %s",
            state.path,
            len(ends),
            len(ENDS),
            ", ".join(map(str, ends[len(ENDS) :])),
        )
