"""A tokenizer in the files of Hugging Face's software, tokenizer.json and tokenizer_config.json.

What it is: a tokenizer that was read from a tokenizer.json is written as it was; for one of a rank
file, the list of merges is every pair of tokens that makes a token, by the rank of what it makes.
`ignore_merges` keeps a word that is a token whole, as tiktoken does.
What it costs: the merges are found by splitting every token at every byte: a second for 128,000
tokens.
Reference: https://huggingface.co/docs/tokenizers
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from titanlite.runtime.documents import parse_json
from titanlite.runtime.errors import ConfigError
from titanlite.runtime.files import read_bounded
from titanlite.tokenizer.bpe import rank_file
from titanlite.tokenizer.byte_level import to_text
from titanlite.tokenizer.kept_files import KEPT_FILE
from titanlite.tokenizer.tokenizer import PATTERN, Tokenizer
from titanlite.tokenizer.tokenizer_json import (
    JSON_FILES,
    MAX_JSON_FILE,
    RANK_FILE,
    TEMPLATE_FILE,
    VOCAB_FILE,
)

IDENTITY = ("tokens", "ranks", "special", "bos", "eos", "before", "pattern", "nfc", "ids")
logger = logging.getLogger("titanlite")


def files_of(content: bytes) -> dict[str, bytes]:
    """The files of a tokenizer by name, as `Tokenizer.files`; their content is not looked at."""
    main, _, config = content.partition(b"\0")
    if main.lstrip()[:1] != b"{":
        return {RANK_FILE: content}
    return dict(zip(JSON_FILES, (main, config or b"{}"), strict=True))


def content_of(files: Mapping[str, bytes | None]) -> bytes | None:
    """`Tokenizer.content` of the files of a folder, the inverse of `files_of`; None if they have
    none.
    """
    main, config = (files.get(name) for name in JSON_FILES)
    if main is None:
        return files.get(RANK_FILE)
    return main + b"\0" + (config or b"{}")


def tokenizer_in(folder: Path) -> bytes | None:
    """`Tokenizer.content` of a folder with such files; None if it has none. Raises OSError."""
    names = [name for name in (RANK_FILE, *JSON_FILES) if (folder / name).is_file()]
    return content_of({name: read_bounded(folder / name, MAX_JSON_FILE) for name in names})


def companions_in(folder: Path) -> dict[str, bytes]:
    """The chat template and the kept files of a folder that `convert` wrote. Raises OSError."""
    names = [name for name in (TEMPLATE_FILE, KEPT_FILE) if (folder / name).is_file()]
    return {name: read_bounded(folder / name, MAX_JSON_FILE) for name in names}


def to_files(tokenizer: Tokenizer, seq_len: int) -> dict[str, bytes]:
    """tokenizer.json and tokenizer_config.json that encode as `tokenizer`."""
    if RANK_FILE in tokenizer.files:
        main = _main(tokenizer)
        config = _names(tokenizer)
    else:
        main, config = (parse_json(tokenizer.files[name]) for name in JSON_FILES)
    config |= {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": seq_len,
        "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", "attention_mask"],
    }
    texts = [json.dumps(value, ensure_ascii=False, indent=1) + "\n" for value in (main, config)]
    return {name: text.encode() for name, text in zip(JSON_FILES, texts, strict=True)}


def _names(tokenizer: Tokenizer) -> dict[str, Any]:
    names = {i: name for name, i in tokenizer.special.items()}
    return {"bos_token": names[tokenizer.bos], "eos_token": names[tokenizer.eos]}


def _main(tokenizer: Tokenizer) -> dict[str, Any]:
    """Makes the tokenizer.json of a rank file."""
    special = tokenizer.special
    tokens = tokenizer.tokens
    bos = _names(tokenizer)["bos_token"]
    flags = {
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": True,
    }
    level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": False,
    }
    split = {
        "type": "Split",
        "pattern": {"Regex": PATTERN},
        "behavior": "Isolated",
        "invert": False,
    }
    first = [
        {"SpecialToken": {"id": bos, "type_id": 0}},
        {"Sequence": {"id": "A", "type_id": 0}},
    ]
    second = [
        {"SpecialToken": {"id": bos, "type_id": 1}},
        {"Sequence": {"id": "B", "type_id": 1}},
    ]
    begins_with_bos = {
        "type": "TemplateProcessing",
        "single": first,
        "pair": first + second,
        "special_tokens": {bos: {"id": bos, "ids": [special[bos]], "tokens": [bos]}},
    }
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": i, "content": name, **flags} for name, i in special.items()],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, level]},
        "post_processor": begins_with_bos,
        "decoder": level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": True,
            "vocab": {to_text(token): i for token, i in tokens.items()},
            "merges": [[to_text(a), to_text(b)] for a, b in merges_of(tokens)],
        },
    }


def merges_of(tokens: dict[bytes, int]) -> list[tuple[bytes, bytes]]:
    """Lists every pair of tokens that tiktoken would merge into a token.

    The pairs are in the order of `tokens`, which is the order of ranks.
    """
    merges = []
    for token in tokens:
        pairs = []
        for i in range(1, len(token)):
            first = token[:i]
            second = token[i:]
            if first in tokens and second in tokens:
                pairs.append((first, second))
        merges += sorted(pairs, key=lambda pair: (tokens[pair[0]], tokens[pair[1]]))
    return merges


def read_tokenizer(folder: Path) -> bytes | None:
    """The tokenizer of a folder's tokenizer.json; None, with a warning, if titanlite cannot encode
    as it does, or if the folder has older files instead.
    """
    paths = [folder / name for name in (JSON_FILES[0], VOCAB_FILE) if (folder / name).exists()]
    if not paths:
        return None
    try:
        tokenizer = Tokenizer(paths[0])
        if tokenizer.whole_documents:  # it has no ranks
            return tokenizer.content
        tokens = sorted(tokenizer.tokens, key=tokenizer.tokens.__getitem__)
        as_rank_file = Tokenizer(folder, rank_file(tokens))
    except ConfigError as error:
        logger.warning("its tokenizer is not used: %s", error)
        return None
    # If it was written by `to_files`, or might have been: checkpoints have the rank file
    if all(getattr(tokenizer, name) == getattr(as_rank_file, name) for name in IDENTITY):
        return as_rank_file.content
    return tokenizer.content
