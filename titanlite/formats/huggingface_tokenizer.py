"""tokenizer.json <-> tiktoken's rank file: the same byte-pair encoding in two formats.

What it is: tiktoken stores tokens as bytes in the order they were learned, and merges the pair whose result has the
lowest rank. Hugging Face's `tokenizers` stores tokens as text (a printable character per byte) and an ordered list of
merges. Both encode alike if that list has every pair of tokens that makes a token. `ignore_merges` keeps a word that is
a token whole, as tiktoken does.
What it costs: the merges are found by splitting every token at every byte: a second for 128,000 tokens.
Reference: https://huggingface.co/docs/tokenizers
"""

from __future__ import annotations

import base64
import json
import logging
from pathlib import Path
from typing import Any

from titanlite.config.files import read_bounded
from titanlite.data.bpe import PATTERN
from titanlite.data.tokenizer import MAX_TOKEN, Tokenizer

logger = logging.getLogger("titanlite")
MAX_BYTES = 1 << 25  # of a tokenizer.json; Llama 3.3's has 17 MB


def _byte_characters() -> dict[int, str]:
    """A printable character for each byte: itself where it is one, else one of those from U+0100 on (GPT-2's map)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = (byte for byte in range(256) if byte not in printable)
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}


CHARACTERS = _byte_characters()
BYTES = {character: byte for byte, character in CHARACTERS.items()}


def parse_ranks(content: bytes) -> list[bytes]:
    """The tokens of a rank file in order."""
    return [base64.b64decode(line.split()[0]) for line in content.splitlines()]


def merges_of(tokens: list[bytes]) -> list[tuple[bytes, bytes]]:
    """Every pair of tokens that makes a token, by the rank of what it makes: tiktoken merges any of them."""
    ranks = {token: rank for rank, token in enumerate(tokens)}
    merges = []
    for token in tokens:
        cuts = ((token[:i], token[i:]) for i in range(1, len(token)))
        pairs = [pair for pair in cuts if pair[0] in ranks and pair[1] in ranks]
        merges += sorted(pairs, key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
    return merges


def to_text(token: bytes) -> str:
    """A token as `tokenizers` and llama.cpp write it: a printable character for each byte."""
    return "".join(CHARACTERS[byte] for byte in token)


def to_files(tokenizer: Tokenizer, content: bytes, seq_len: int) -> dict[str, bytes]:
    """tokenizer.json and tokenizer_config.json that encode as `tokenizer`, whose rank file `content` is."""
    tokens = parse_ranks(content)
    special, bos, eos = tokenizer.special, "<|begin_of_text|>", "<|end_of_text|>"
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    begin = {"SpecialToken": {"id": bos, "type_id": 0}}
    first, second = ({"Sequence": {"id": name, "type_id": i}} for i, name in enumerate("AB"))
    split = {"type": "Split", "pattern": {"Regex": PATTERN}, "behavior": "Isolated", "invert": False}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    main: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": i, "content": name, **flags} for name, i in special.items()],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, level]},
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [begin, first],
            "pair": [begin, first, {"SpecialToken": {"id": bos, "type_id": 1}}, second],
            "special_tokens": {bos: {"id": bos, "ids": [special[bos]], "tokens": [bos]}},
        },
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
            "vocab": {to_text(token): i for i, token in enumerate(tokens)},
            "merges": [[to_text(a), to_text(b)] for a, b in merges_of(tokens)],
        },
    }
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": bos,
        "eos_token": eos,
        "model_max_length": seq_len,
        "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", "attention_mask"],
    }
    dump = {"tokenizer.json": main, "tokenizer_config.json": config}
    return {name: (json.dumps(value, ensure_ascii=False, indent=1) + "\n").encode() for name, value in dump.items()}


def read_tokenizer(folder: Path) -> bytes | None:
    """The rank file of a folder's tokenizer.json; None, with a warning, if it does not encode as Llama 3's does."""
    path = folder / "tokenizer.json"
    try:
        main = json.loads(read_bounded(path, MAX_BYTES))
        model = main["model"]
        order = sorted(model["vocab"].items(), key=lambda item: item[1])
        tokens = [bytes(BYTES[c] for c in text) for text, _ in order]
        if any(len(text) > MAX_TOKEN for text, _ in order):
            raise ValueError(f"a token of more than {MAX_TOKEN} bytes")
        if [i for _, i in order] != list(range(len(order))) or len({*tokens}) < len(tokens):
            raise ValueError("its ids are not 0, 1, 2, ... of different tokens")
        pairs = [tuple(merge.split(" ")) if isinstance(merge, str) else tuple(merge) for merge in model["merges"]]
        if pairs != [(to_text(a), to_text(b)) for a, b in merges_of(tokens)]:
            raise ValueError("its merges do not follow the order of its tokens")
        ranks = b"".join(base64.b64encode(token) + b" %d\n" % i for i, token in enumerate(tokens))
        tokenizer = Tokenizer(path, ranks)
        ours = json.loads(to_files(tokenizer, ranks, 0)["tokenizer.json"])
        same = {key: main[key] == ours[key] for key in ("normalizer", "pre_tokenizer")}
        same |= {key: model.get(key) == ours["model"][key] for key in ours["model"] if key not in ("vocab", "merges")}
        if other := [key for key, equal in same.items() if not equal]:
            raise ValueError(f"its {', '.join(other)} differs from Llama 3's")
        added = {token["id"]: token["content"] for token in main["added_tokens"]}
        names = {i: name for name, i in tokenizer.special.items()}
        if any(added.get(i) != names[i] for i in (tokenizer.bos, tokenizer.eos)) or min(added) < len(tokens):
            raise ValueError("its special tokens do not begin with <|begin_of_text|> and <|end_of_text|>")
        return ranks
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        logger.warning("%s: not used (%s: %s)", path, type(error).__name__, str(error)[:200])
        return None
