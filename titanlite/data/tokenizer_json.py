"""Hugging Face's tokenizer.json: a byte-level byte-pair encoding, converted to one that tiktoken
computes.

What it is: `tokenizers` stores tokens as text, a printable character for each byte, and merges the
pair of tokens that comes first in a list of merges. tiktoken merges the pair whose result has the
lowest rank.
Why the conversion is exact: what is merged between two ends of tokens depends only on the bytes
between them. So a token can only arise by the merge that comes last when its own bytes are encoded
alone, and not at all if these give several tokens. The place of that merge in the list is the
token's rank, and a token that no merges make gets none. Then both choose the same pair in every
step. With `ignore_merges` a word that is a token stays whole, as in tiktoken, also if merges do not
make it; but tiktoken would merge the two halves of such a token within longer words too, so a file
in which that can happen is refused, like everything else that tiktoken does not compute.
What it costs: every token is encoded alone: two seconds for 150,000 tokens.
Reference: https://huggingface.co/docs/tokenizers
"""

from __future__ import annotations

import errno
import itertools
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titanlite.data.token_text import CHARACTERS, to_bytes, to_text
from titanlite.runtime.errors import ConfigError
from titanlite.runtime.files import read_bounded

RANK_FILE = "tokenizer.model"
JSON_FILES = ("tokenizer.json", "tokenizer_config.json")
MAX_JSON_FILE = 1 << 25  # bytes; Llama 3.3's has 17 MB
MAX_ID = 1 << 24
NEVER = 1 << 62  # the place of a merge that is not in the list
# An added token like this is not ordinary text, whatever its flags
MARK = re.compile(r"<.*>|\[.*\]", re.DOTALL)
USUAL = {
    "bos_token": ("<|begin_of_text|>", "<|startoftext|>", "<bos>", "<s>"),
    "eos_token": ("<|end_of_text|>", "<|endoftext|>", "<eos>", "</s>"),
}

GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CASED = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
_UPPER = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
# The parts of patterns that mean the same to both libraries: those of GPT-2, GPT-4, Llama 3, Qwen,
# gpt-oss and others. None matches white space after other characters, except for line ends, so that
# a text may be cut before a space.
ALTERNATIVES = [
    *GPT2_PATTERN.split("|"),
    *(_CONTRACTIONS, r"'(?:[sdmt]|ll|ve|re)", r"'(?i:[sdmt]|ll|ve|re)"),
    *(r"[^\r\n\p{L}\p{N}]?\p{L}+", r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+"),
    *(_CASED, _UPPER, f"{_CASED}{_CONTRACTIONS}?", f"{_UPPER}{_CONTRACTIONS}?"),
    *(r"\p{N}", r"\p{N}{1,2}", r"\p{N}{1,3}"),
    *(
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
        r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*",
    ),
    *(r"\s*[\r\n]+", r"\s*[\r\n]"),
]
_ONE = "|".join(map(re.escape, ALTERNATIVES))
KNOWN = re.compile(rf"(?:{_ONE})(?:\|(?:{_ONE}))*")


@dataclass(frozen=True)
class Converted:
    """An encoding for tiktoken."""

    files: dict[str, bytes]  # with which a folder has this tokenizer: name -> content
    tokens: dict[bytes, int]  # of text -> id
    ranks: dict[bytes, int]  # tiktoken merges the pair whose result has the lowest
    ids: list[int]  # of each rank; empty: the rank itself
    special: dict[str, int]  # name -> id
    bos: int
    eos: int
    pattern: str
    nfc: bool  # whether text is normalised first
    unmade: int  # number of tokens that no merges make


def find(path: Path) -> tuple[Path, bytes]:
    """The tokenizer's file, given itself or its folder, and the content that `convert` takes.

    Raises OSError.
    """
    if path.is_dir():
        path = next(
            (path / name for name in (JSON_FILES[0], RANK_FILE) if (path / name).exists()),
            path / JSON_FILES[0],
        )
        if not path.exists():
            raise FileNotFoundError(
                errno.ENOENT, f"no {JSON_FILES[0]} and no {RANK_FILE} in this folder"
            )
    content = read_bounded(path, MAX_JSON_FILE)
    beside = path.with_name(JSON_FILES[1])
    return path, content + b"\0" + read_bounded(
        beside
    ) if path.suffix == ".json" and beside.exists() else content


def convert(path: Path, content: bytes, max_token: int) -> Converted:
    """The encoding of a tokenizer.json; in `content` a NUL and a tokenizer_config.json may follow.

    Raises ConfigError with the reason if tiktoken cannot encode as the file says.
    """
    main, _, config = content.partition(b"\0")
    try:
        fields = dict(json.loads(config or b"{}"))
    except (ValueError, TypeError, RecursionError) as error:
        raise ConfigError(
            f"{path.with_name(JSON_FILES[1])}: not a JSON object ({str(error)[:80]})"
        ) from None
    try:
        return _convert(json.loads(main), fields, max_token)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        if isinstance(error, ConfigError):
            raise ConfigError([f"{path}: {problem}" for problem in error.problems]) from None
        reason = f"{type(error).__name__}: {str(error)[:80]}"
        raise ConfigError(
            f"{path}: not a tokenizer.json as Hugging Face writes it ({reason})"
        ) from None


def _convert(main: dict[str, Any], config: dict[str, Any], max_token: int) -> Converted:
    pattern, nfc = _pattern_and_nfc(main)
    special, tokens = _special_and_text(main, max_token)
    merges = _merges(main["model"], tokens)
    whole_words = main["model"].get("ignore_merges", False)
    made: dict[bytes, int] = {}  # token -> the place in the list of the merge that makes it
    unmade = []
    for token in tokens:
        parts, place = encode_alone(token, merges)
        if len(parts) == 1:
            made[token] = place
        elif whole_words and len(parts) == 2:
            raise ConfigError(
                f"ignore_merges is true, and the merges have no {to_text(parts[0])!r} + {to_text(parts[1])!r} for "
                f"token {tokens[token]}: tiktoken would merge them"
            )
        else:
            unmade.append(token)
    order = sorted(made, key=made.__getitem__)  # first the 256 bytes
    ids = [tokens[token] for token in order[256:]]
    remapped = ids != sorted(ids)  # else an id can be the rank
    if whole_words:
        # With any rank: no two tokens are next to each other that would make one of them
        order += unmade
    bos, eos = _bos_and_eos(main, config, special)
    files = zip(JSON_FILES, (main, {"bos_token": bos, "eos_token": eos}), strict=True)
    return Converted(
        files={
            name: json.dumps(f, ensure_ascii=False, separators=(",", ":")).encode()
            for name, f in files
        },
        tokens=tokens,
        ranks={token: rank if remapped else tokens[token] for rank, token in enumerate(order)},
        ids=[tokens[token] for token in order] if remapped else [],
        special=special,
        bos=special[bos],
        eos=special[eos],
        pattern=pattern,
        nfc=nfc,
        unmade=len(unmade),
    )


def encode_alone(token: bytes, merges: dict[tuple[bytes, bytes], int]) -> tuple[list[bytes], int]:
    """Its bytes, merged as `tokenizers` does, and the place of the last merge; -1 if there was
    none.
    """
    parts = [token[i : i + 1] for i in range(len(token))]
    last = -1
    places = [merges.get(pair, NEVER) for pair in itertools.pairwise(parts)]
    while places and (place := min(places)) != NEVER:
        # The first of several
        i = places.index(place)
        last = place
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
        del places[i]
        if i > 0:  # the pairs of the new token
            places[i - 1] = merges.get((parts[i - 1], parts[i]), NEVER)
        if i < len(places):
            places[i] = merges.get((parts[i], parts[i + 1]), NEVER)
    return parts, last


def _pattern_and_nfc(main: dict[str, Any]) -> tuple[str, bool]:
    """The pre-tokenizer's pattern, and whether text is normalised.

    Raises ConfigError with all that is refused.
    """
    model = main["model"]
    problems = []
    kind = model.get("type", "BPE")
    if kind != "BPE":
        raise ConfigError(f"model.type = {kind!r}; allowed: 'BPE', byte-level")
    for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(key):
            problems.append(f"model.{key} = {model[key]!r}; allowed: null")
    normalizers = _steps(main.get("normalizer"), "normalizers")
    problems += [
        f"normalizer {step['type']}; allowed: NFC" for step in normalizers if step["type"] != "NFC"
    ]
    decoders = _steps(main.get("decoder"), "decoders")
    problems += [
        f"decoder {step['type']}; allowed: ByteLevel"
        for step in decoders
        if step["type"] != "ByteLevel"
    ]
    *splits, level = _steps(main.get("pre_tokenizer"), "pretokenizers") or [{"type": "none"}]
    names = " + ".join(step["type"] for step in (*splits, level))
    pattern = GPT2_PATTERN
    if level["type"] != "ByteLevel" or level.get("add_prefix_space"):
        problems.append(
            f"pre_tokenizer {names}; allowed: ByteLevel as the last, without add_prefix_space"
        )
    elif len(splits) != (not level.get("use_regex", True)) or any(
        step["type"] != "Split" for step in splits
    ):
        problems.append(
            f"pre_tokenizer {names}; allowed: ByteLevel with use_regex, or Split and ByteLevel without"
        )
    elif splits:
        behavior = splits[0]["behavior"]
        if behavior != "Isolated":
            problems.append(f"pre_tokenizer Split: behavior = {behavior!r}; allowed: 'Isolated'")
        pattern = splits[0]["pattern"].get("Regex", "")
        if not KNOWN.fullmatch(pattern):
            problems.append(
                f"pre_tokenizer Split: pattern {str(splits[0]['pattern'])[:200]}; allowed: alternatives of the "
                "patterns of GPT-2, GPT-4, Llama 3, Qwen and gpt-oss, for which tiktoken is known to match the same"
            )
    if problems:
        raise ConfigError(problems)
    return pattern, bool(normalizers)


def _steps(entry: dict[str, Any] | None, key: str) -> list[dict[str, Any]]:
    """The steps of a normalizer, pre-tokenizer, decoder or post-processor: none, one, or those of a
    Sequence.
    """
    if entry is None:
        return []
    return (
        [step for inner in entry[key] for step in _steps(inner, key)]
        if entry["type"] == "Sequence"
        else [entry]
    )


def _special_and_text(
    main: dict[str, Any], max_token: int
) -> tuple[dict[str, int], dict[bytes, int]]:
    """Added tokens by name, and the tokens of text by their bytes. Raises ConfigError."""
    vocab: dict[str, int] = main["model"]["vocab"]
    if any(len(text) > max_token for text in vocab):
        raise ConfigError(f"model.vocab: a token of more than {max_token} bytes")
    special: dict[str, int] = {}
    following = len(vocab)
    for entry in main["added_tokens"]:
        name = entry["content"]
        expected = vocab.get(entry["content"], following)
        if not isinstance(name, str):
            raise TypeError(f"added token {name!r}")
        if entry["id"] != expected:
            raise ConfigError(
                f"added token {name!r} has id {entry['id']}; `tokenizers` gives it {expected}"
            )
        if not (entry["special"] or MARK.fullmatch(name)):
            raise ConfigError(
                f"added token {name!r} is ordinary text, at which `tokenizers` would cut before merging"
            )
        special[name] = expected
        following = max(following, expected + 1)
    ids = [*special.values(), *(i for text, i in vocab.items() if text not in special)]
    if not all(type(i) is int and 0 <= i < MAX_ID for i in ids) or len({*ids}) < len(ids):
        raise ConfigError(f"model.vocab: its ids are not different integers from 0 to {MAX_ID - 1}")
    try:
        tokens = {to_bytes(text): i for text, i in vocab.items() if text not in special}
    except UnicodeEncodeError:
        known = {*CHARACTERS.values()}
        wrong = next(text for text in vocab if text not in special and not known.issuperset(text))
        raise ConfigError(
            f"model.vocab: {wrong[:80]!r} does not stand for bytes; expected a byte-level encoding"
        ) from None
    missing = [i for i in range(256) if bytes([i]) not in tokens]
    if missing:
        raise ConfigError(
            f"model.vocab: no token for {len(missing)} of the 256 bytes, the first 0x{missing[0]:02x}"
        )
    return special, tokens


def _merges(model: dict[str, Any], tokens: dict[bytes, int]) -> dict[tuple[bytes, bytes], int]:
    """Pair of tokens -> its place in the list of merges. Raises ConfigError."""
    merges = {}
    for place, merge in enumerate(model["merges"]):
        first, second = merge.split(" ") if isinstance(merge, str) else merge
        pair = to_bytes(first), to_bytes(second)
        if not (pair[0] in tokens and pair[1] in tokens and pair[0] + pair[1] in tokens):
            raise ConfigError(
                f"model.merges[{place}] = {merge!r}: a part of it, or the result, is not in model.vocab"
            )
        merges[pair] = place
    return merges


def _bos_and_eos(
    main: dict[str, Any], config: dict[str, Any], special: dict[str, int]
) -> tuple[str, str]:
    """The tokens that enclose a document; a file that has one of them only has it for both.

    They are those of tokenizer_config.json, else those that the post-processor adds, else the first
    of the usual names.
    """
    found: dict[str, str] = {}
    for key, usual in USUAL.items():
        value = config.get(key)
        name = value["content"] if isinstance(value, dict) else value
        name = (
            name
            or _of_template(main, key)
            or next((name for name in usual if name in special), None)
        )
        if name is not None:
            if name not in special:
                raise ConfigError(f"{key} = {name!r} is not one of its {len(special)} added tokens")
            found[key] = name
    if not found:
        raise ConfigError(
            "no token begins or ends a document: give bos_token or eos_token in a tokenizer_config.json beside it; "
            f"its added tokens: {', '.join(special) or 'none'}"[:300]
        )
    one = next(iter(found.values()))
    return found.get("bos_token", one), found.get("eos_token", one)


def _of_template(main: dict[str, Any], key: str) -> str | None:
    """The token that a TemplateProcessing puts before (bos_token) or after (eos_token) a text."""
    for step in _steps(main.get("post_processor"), "processors"):
        if step["type"] == "TemplateProcessing":
            template = step["single"]
            text = next((i for i, part in enumerate(template) if "Sequence" in part), len(template))
            tokens = template[:text] if key == "bos_token" else template[text + 1 :]
            return next((part["SpecialToken"]["id"] for part in tokens), None)
    return None
