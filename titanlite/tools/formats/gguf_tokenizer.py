"""The tokenizer in a GGUF file: its lists of tokens and merges as a tokenizer.json.

What it is: llama.cpp names the way in which text is cut before merging (`tokenizer.ggml.pre`); the
names that are known here are in a table, and a file with another one is read without its tokenizer.
Reference: llama.cpp, `convert_hf_to_gguf.py` and `llama-vocab.cpp`
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from titanlite.data.tokenizer import PATTERN, Tokenizer
from titanlite.data.tokenizer_json import JSON_FILES, QWEN_PATTERN, Json, steps
from titanlite.runtime.errors import ConfigError

logger = logging.getLogger("titanlite")
LEVEL_DEFAULTS = {"use_regex": True, "add_prefix_space": True, "individual_digits": False}
CONTROL = 3  # types of tokens: one that is no text
USER_DEFINED = 4


def _level(use_regex: bool) -> Json:
    return {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": use_regex,
    }


def _split(pattern: str) -> list[Json]:
    split = {
        "type": "Split",
        "pattern": {"Regex": pattern},
        "behavior": "Isolated",
        "invert": False,
    }
    return [split, _level(use_regex=False)]


# llama.cpp's name -> what cuts the text, and whether words that are tokens stay whole
PRE_TOKENIZERS: dict[str, tuple[list[Json], bool]] = {
    "gpt-2": ([_level(use_regex=True)], False),
    "llama-bpe": (_split(PATTERN), True),
    "qwen2": (_split(QWEN_PATTERN), False),
    "smollm": ([{"type": "Digits", "individual_digits": True}, _level(use_regex=True)], False),
}


def name_of(tokenizer: Tokenizer) -> str:
    """llama.cpp's name of how a tokenizer.json cuts text; "" if it has none."""
    main = json.loads(tokenizer.files[JSON_FILES[0]])
    own = steps(main.get("pre_tokenizer"), "pretokenizers")
    whole_words = main["model"].get("ignore_merges", False)
    added = {entry["content"] for entry in main["added_tokens"]}
    if main.get("normalizer") or added - tokenizer.special.keys():  # llama.cpp has neither
        return ""
    for name, (known, keeps_words) in PRE_TOKENIZERS.items():
        alike = len(own) == len(known) and all(
            entry.get(key, LEVEL_DEFAULTS.get(key)) == value
            for entry, expected in zip(own, known, strict=True)
            for key, value in expected.items()
            if key != "trim_offsets"  # of places in the text, not of ids
        )
        if alike and whole_words == keeps_words:
            return name
    return ""


def read_tokenizer(path: Path, fields: dict[str, Any]) -> bytes | None:
    """`Tokenizer.content` of the file's tokenizer; None, with a warning, if it cannot be read."""
    kind = fields.get("tokenizer.ggml.model")
    pre = fields.get("tokenizer.ggml.pre")
    if kind != "gpt2" or pre not in PRE_TOKENIZERS:
        logger.warning(
            "%s: its tokenizer (%r, %r) is not read; name one with --tokenizer",
            path,
            kind,
            pre,
        )
        return None
    try:
        return Tokenizer(path, _content(fields)).content
    except (ConfigError, KeyError, TypeError, ValueError, IndexError) as error:
        logger.warning("%s: its tokenizer is not used: %s", path, error)
        return None


def _content(fields: dict[str, Any]) -> bytes:
    """tokenizer.json, a NUL and tokenizer_config.json."""
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    types: list[int] = fields["tokenizer.ggml.token_type"]
    pre_tokenizers, whole_words = PRE_TOKENIZERS[fields["tokenizer.ggml.pre"]]
    added = [
        {
            "id": i,
            "content": token,
            "special": kind == CONTROL,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
        }
        for i, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if kind in (CONTROL, USER_DEFINED)
    ]
    main = {
        "version": "1.0",
        "added_tokens": added,
        # transformers' Qwen normalises; the file does not say so
        "normalizer": {"type": "NFC"} if fields["tokenizer.ggml.pre"] == "qwen2" else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": pre_tokenizers},
        "post_processor": None,
        "decoder": _level(use_regex=True),
        "model": {
            "type": "BPE",
            "ignore_merges": whole_words,
            "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": [merge.split(" ") for merge in fields["tokenizer.ggml.merges"]],
        },
    }
    ends = {}
    for key in ("bos", "eos"):
        i = fields.get(f"tokenizer.ggml.{key}_token_id")
        if i is not None:
            ends[f"{key}_token"] = tokens[i]
    return json.dumps(main).encode() + b"\0" + json.dumps(ends).encode()
