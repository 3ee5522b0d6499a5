"""Converts the tokenizer in a GGUF file, lists of tokens and merges, to a tokenizer.json.

What it is: llama.cpp names the way in which text is cut before merging (`tokenizer.ggml.pre`); the
names that are known here are in a table, and a file with another one is read without its tokenizer.
`gguf_sentencepiece.py` has the kind that is not byte-level.
Reference: llama.cpp, `convert_hf_to_gguf.py` and `llama-vocab.cpp`
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from titanlite.runtime.documents import parse_json
from titanlite.runtime.errors import ConfigError, reason_of
from titanlite.tokenizer.tokenizer import PATTERN, Tokenizer
from titanlite.tokenizer.tokenizer_json import JSON_FILES, QWEN_PATTERN, Json, steps
from titanlite.tokenizer.vocab_and_merges import byte_level, split, template
from titanlite.tools.formats import gguf_sentencepiece

logger = logging.getLogger("titanlite")
LEVEL_DEFAULTS = {"use_regex": True, "add_prefix_space": True, "individual_digits": False}
# Whether text is normalised first, which llama.cpp never does: a key of ours says so. Without it,
# text is normalised under the name whose tokenizers do so in transformers
NFC = "titanlite.tokenizer.nfc"
NORMALIZED = "qwen2"
UNKNOWN = 2  # types of tokens: two that are no text,
CONTROL = 3
USER_DEFINED = 4  # and text that is found before anything is merged


def _split(pattern: str) -> list[Json]:
    return [split(pattern), byte_level(use_regex=False)]


# llama.cpp's name -> what cuts the text, and whether words that are tokens stay whole
PRE_TOKENIZERS: dict[str, tuple[list[Json], bool]] = {
    "gpt-2": ([byte_level(use_regex=True)], False),
    "llama-bpe": (_split(PATTERN), True),
    "qwen2": (_split(QWEN_PATTERN), False),
    "smollm": ([{"type": "Digits", "individual_digits": True}, byte_level(use_regex=True)], False),
}


def name_of(tokenizer: Tokenizer) -> str:
    """llama.cpp's name for the way in which a tokenizer.json cuts text; "" if it has none."""
    main = parse_json(tokenizer.files[JSON_FILES[0]])
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
    # A list: `pre` may be of any type, also one without a hash
    is_known = kind == "llama" or (kind == "gpt2" and pre in list(PRE_TOKENIZERS))
    if not is_known:
        logger.warning(
            "%s: its tokenizer (%.99s, %.99s) is not read; name one with --tokenizer",
            path,
            repr(kind),
            repr(pre),
        )
        return None
    try:
        return Tokenizer(path, _content(fields)).content
    except (ConfigError, KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        logger.warning("%s: its tokenizer is not used: %s", path, reason_of(error))
        return None


def _content(fields: dict[str, Any]) -> bytes:
    """Joins tokenizer.json, a NUL and tokenizer_config.json."""
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    types: list[int] = fields["tokenizer.ggml.token_type"]
    added = [
        {
            "id": i,
            "content": token,
            "special": kind != USER_DEFINED,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
        }
        for i, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if kind in (UNKNOWN, CONTROL, USER_DEFINED)
    ]
    ends = {}
    around: list[dict[str, int]] = []
    # Whether llama.cpp adds them to a text if a file does not say
    pre = fields.get("tokenizer.ggml.pre")
    begins = fields["tokenizer.ggml.model"] == "llama" or pre == "llama-bpe"
    for key, default in (("bos", begins), ("eos", False)):
        i = fields.get(f"tokenizer.ggml.{key}_token_id")
        if i is None:
            around.append({})
            continue
        ends[f"{key}_token"] = tokens[i]
        adds = fields.get(f"tokenizer.ggml.add_{key}_token", default)
        around.append({tokens[i]: i} if adds else {})
    main: Json = {"version": "1.0", "added_tokens": added}
    if fields["tokenizer.ggml.model"] == "llama":
        main |= gguf_sentencepiece.parts_of(fields)
    else:
        main |= _byte_level(fields)
    main["post_processor"] = template(*around)
    return json.dumps(main).encode() + b"\0" + json.dumps(ends).encode()


def _byte_level(fields: dict[str, Any]) -> Json:
    """The entries of tokenizer.json that say how text is encoded, of `model = "gpt2"`."""
    pre = fields["tokenizer.ggml.pre"]
    pre_tokenizers, whole_words = PRE_TOKENIZERS[pre]
    return {
        "normalizer": {"type": "NFC"} if fields.get(NFC, pre == NORMALIZED) else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": pre_tokenizers},
        "decoder": byte_level(use_regex=True),
        "model": {
            "type": "BPE",
            "ignore_merges": whole_words,
            "vocab": {token: i for i, token in enumerate(fields["tokenizer.ggml.tokens"])},
            "merges": [merge.split(" ") for merge in fields["tokenizer.ggml.merges"]],
        },
    }
