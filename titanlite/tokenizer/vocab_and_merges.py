"""Reads vocab.json and merges.txt, the files of a byte-level encoding before tokenizer.json.

What it is: vocab.json has the id of each token, merges.txt a merge in each line. Neither says how
text is cut before merging: that follows from `tokenizer_class` in tokenizer_config.json, GPT-2's or
Qwen2's; another class is refused. Added tokens are those of `added_tokens_decoder` there; without
that entry, those of special_tokens_map.json and added_tokens.json. All this is converted to a
tokenizer.json, which is then read like any other. Ids are those of transformers' class.
What it costs: the vocabulary is parsed twice: 0.8 s for 150,000 tokens.
Reference: transformers 5, `GPT2Tokenizer`, `Qwen2Tokenizer` and `tokenization_utils_base.py`
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from titanlite.runtime.documents import parse_json
from titanlite.runtime.errors import ConfigError, reason_of
from titanlite.runtime.files import read_bounded
from titanlite.tokenizer.tokenizer_json import (
    JSON_FILES,
    MAX_JSON_FILE,
    QWEN_PATTERN,
    VOCAB_FILE,
    Json,
)

MERGES_FILE = "merges.txt"
SPECIAL_FILE = "special_tokens_map.json"
ADDED_FILE = "added_tokens.json"
# The names of special tokens, in the order in which those that are not in the vocabulary get ids
NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
END = "<|endoftext|>"
DEFAULTS = {  # class -> the special tokens that it has if no file names others
    "GPT2Tokenizer": {"bos_token": END, "eos_token": END, "unk_token": END},
    "Qwen2Tokenizer": {"eos_token": END, "unk_token": END, "pad_token": END},
}
FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")  # flags of an added token


def to_tokenizer_json(folder: Path) -> bytes:
    """Converts a folder's files to a tokenizer.json, a NUL and a tokenizer_config.json.

    Raises ConfigError.
    """
    vocab = _read_json(folder / VOCAB_FILE)
    wrong = next((text for text, i in vocab.items() if type(i) is not int), None)
    if wrong is not None:
        raise ConfigError(
            f"{folder / VOCAB_FILE}: {wrong[:80]!r}: {vocab[wrong]!r:.40}; expected token -> id"
        )
    if len(set(vocab.values())) < len(vocab):
        raise ConfigError(f"{folder / VOCAB_FILE}: two tokens have the same id")
    config = _read_json(folder / JSON_FILES[1], optional=True)
    kind = _class_of(folder, config)
    names = {**DEFAULTS[kind], **config}
    listed = config.get("added_tokens_decoder")
    try:
        if listed is None:
            names |= _read_json(folder / SPECIAL_FILE, optional=True)
            added = _added_by_files(_read_json(folder / ADDED_FILE, optional=True), names)
        else:
            added = [_entry(token, int(i)) for i, token in listed.items()]
        added.sort(key=lambda entry: entry["id"])
        added += _not_listed(names, added, vocab)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{folder}: the special tokens in {JSON_FILES[1]}, {SPECIAL_FILE} and {ADDED_FILE} are "
            f"not as transformers writes them ({reason_of(error)})"
        ) from None
    ids = {entry["content"]: entry["id"] for entry in added}
    ends = {key: _text(names[key]) for key in ("bos_token", "eos_token") if names.get(key)}
    around: list[dict[str, int]] = []
    for key in ("bos_token", "eos_token"):
        is_added = key in ends and config.get(f"add_{key}")
        around.append({ends[key]: ids[ends[key]]} if is_added else {})
    normalizer, pre_tokenizer = _cut(kind, bool(config.get("add_prefix_space")))
    main = {
        "version": "1.0",
        "added_tokens": added,
        "normalizer": normalizer,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": template(*around),
        "decoder": byte_level(use_regex=True),
        "model": {"type": "BPE", "vocab": vocab, "merges": _read_merges(folder, vocab)},
    }
    content = json.dumps(main).encode() + b"\0" + json.dumps(ends).encode()
    if len(content) > MAX_JSON_FILE:
        raise ConfigError(
            f"{folder}: its tokenizer.json would have {len(content)} bytes; at most {MAX_JSON_FILE}"
        )
    return content


def template(begin: dict[str, int], end: dict[str, int]) -> Json | None:
    """Builds the post-processor that puts these special tokens, name -> id, around a text."""
    if not begin and not end:
        return None

    def single(sequence: str, number: int) -> list[Json]:
        parts = [{"SpecialToken": {"id": name, "type_id": number}} for name in begin]
        parts.append({"Sequence": {"id": sequence, "type_id": number}})
        return parts + [{"SpecialToken": {"id": name, "type_id": number}} for name in end]

    tokens = {**begin, **end}
    return {
        "type": "TemplateProcessing",
        "single": single("A", 0),
        "pair": single("A", 0) + single("B", 1),
        "special_tokens": {
            name: {"id": name, "ids": [i], "tokens": [name]} for name, i in tokens.items()
        },
    }


def _class_of(folder: Path, config: Json) -> str:
    """Finds the name of the class, without the `Fast` of old versions. Raises ConfigError."""
    name = config.get("tokenizer_class")
    if name is None:
        # Files without a class are GPT-2's, as the package `tokenizers` saves them, unless the
        # model beside them is a Qwen
        model = _read_json(folder / "config.json", optional=True)
        is_qwen = model.get("model_type") in ("qwen2", "qwen3")
        return "Qwen2Tokenizer" if is_qwen else "GPT2Tokenizer"
    short = name.removesuffix("Fast") if isinstance(name, str) else ""
    if short not in DEFAULTS:
        raise ConfigError(
            f"{folder / JSON_FILES[1]}: tokenizer_class = {name!r:.99}; allowed with {VOCAB_FILE} "
            f"and {MERGES_FILE}: {', '.join(DEFAULTS)}"
        )
    return short


def _cut(kind: str, prefix_space: bool) -> tuple[Json | None, Json]:
    """Builds the normalizer and the pre-tokenizer of a class."""
    if kind == "GPT2Tokenizer":
        return None, byte_level(use_regex=True, add_prefix_space=prefix_space)
    level = byte_level(use_regex=False, add_prefix_space=prefix_space)
    return {"type": "NFC"}, {"type": "Sequence", "pretokenizers": [split(QWEN_PATTERN), level]}


def split(pattern: str) -> Json:
    """Builds the pre-tokenizer that cuts text by a pattern."""
    return {
        "type": "Split",
        "pattern": {"Regex": pattern},
        "behavior": "Isolated",
        "invert": False,
    }


def byte_level(use_regex: bool, add_prefix_space: bool = False) -> Json:
    """Builds the step that writes bytes as characters; `use_regex`: after GPT-2's pattern."""
    return {
        "type": "ByteLevel",
        "add_prefix_space": add_prefix_space,
        "trim_offsets": True,
        "use_regex": use_regex,
    }


def _entry(token: Json, i: int) -> Json:
    """Builds an added token for tokenizer.json."""
    if type(i) is not int:
        raise ValueError(f"{i!r:.40} is not an id")
    flags = {flag: bool(token.get(flag, False)) for flag in FLAGS}
    return {"id": i, "content": _text(token), **flags}


def _text(token: Any) -> str:
    """Reads the text of a special token, which is written alone or with its flags."""
    text = token["content"] if isinstance(token, dict) else token
    if not isinstance(text, str):
        raise ValueError(f"{text!r:.40} is not the text of a token")
    return text


def _named(names: Json) -> list[Any]:
    """Lists the special tokens that have a name, then the others."""
    others = names.get("extra_special_tokens") or names.get("additional_special_tokens") or []
    if not isinstance(others, list):
        raise ValueError(f"additional_special_tokens: {others!r:.40} is not a list")
    return [names[key] for key in NAMED if names.get(key)] + others


def _added_by_files(ids: Json, names: Json) -> list[Json]:
    """Lists the tokens of added_tokens.json, name -> id; those in `names` are special."""
    special = {_text(token) for token in _named(names)}
    entries = []
    for name, i in ids.items():
        is_special = name in special
        token = {"content": name, "normalized": not is_special, "special": is_special}
        entries.append(_entry(token, i))
    return entries


def _not_listed(names: Json, added: list[Json], vocab: Json) -> list[Json]:
    """Lists special tokens missing in `added`, with ids of the vocabulary, or else new ids."""
    known = {entry["content"] for entry in added}
    following = max([len(vocab), *(entry["id"] + 1 for entry in added)])
    entries = []
    for token in _named(names):
        name = _text(token)
        if name in known:
            continue
        known.add(name)
        flags = token if isinstance(token, dict) else {}
        i = vocab.get(name, following)
        entries.append(_entry({**flags, "content": name, "special": True}, i))
        following = max(following, i + 1)
    return entries


def _read_json(path: Path, optional: bool = False) -> Json:
    """Reads the object in a file; an optional file may be absent. Raises ConfigError."""
    if optional and not path.exists():
        return {}
    try:
        return dict(parse_json(_read(path)))
    except (ValueError, TypeError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{path}: not a JSON object ({reason_of(error)})") from None


def _read_merges(folder: Path, vocab: Json) -> list[str]:
    """Reads the merges, as `first second`. Raises ConfigError."""
    path = folder / MERGES_FILE
    try:
        text = _read(path).decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 ({error.reason} at byte {error.start})") from None
    merges = []
    for number, line in enumerate(text.split("\n"), 1):
        merge = line.removesuffix("\r")
        if not merge or merge.startswith("#version"):
            continue
        if len(merge.split(" ")) != 2 or merge.startswith(" ") or merge.endswith(" "):
            raise ConfigError(f"{path}:{number}: {merge[:80]!r}: expected two tokens and a space")
        first, second = merge.split(" ")
        for token in (first, second, first + second):
            if token not in vocab:
                raise ConfigError(
                    f"{path}:{number}: {merge[:80]!r}: {token[:80]!r} is not in {VOCAB_FILE}; "
                    "expected both parts and what they make"
                )
        merges.append(merge)
    if not merges:
        raise ConfigError(f"{path}: has no merges")
    return merges


def _read(path: Path) -> bytes:
    """Reads the content of a file. Raises ConfigError."""
    try:
        return read_bounded(path, MAX_JSON_FILE)
    except OSError as error:
        raise ConfigError(
            f"{path}: {error.strerror or error}; {VOCAB_FILE} and {MERGES_FILE} are one tokenizer"
        ) from None
