"""Converts Hugging Face's tokenizer.json, a byte-level byte-pair encoding, for tiktoken.

What it is: `tokenizers` stores tokens as text, a printable character for each byte, and merges the
pair of tokens that comes first in a list of merges. tiktoken merges the pair whose result has the
lowest rank.
Why the conversion is exact: the merges between two token boundaries depend only on the bytes
between them. So a token can only arise by the last merge in the encoding of its own bytes, and not
at all if they give several tokens. The index of that merge in the list is the token's rank, and a
token that no merges make gets no rank. Then both programs choose the same pair in every step. With
`ignore_merges` a word that is a token stays whole, as in tiktoken, even if merges do not make it;
but tiktoken would merge the two halves of such a token within longer words too, so a file in which
that can happen is refused, like everything else that tiktoken does not compute.
What it costs: every token is encoded alone: two seconds for 150,000 tokens.
Reference: https://huggingface.co/docs/tokenizers
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from titanlite.runtime.documents import parse_json
from titanlite.runtime.errors import ConfigError, reason_of, shortened
from titanlite.runtime.files import read_bounded
from titanlite.tokenizer.byte_level import CHARACTERS, to_bytes, to_text

RANK_FILE = "tokenizer.model"
JSON_FILES = ("tokenizer.json", "tokenizer_config.json")
VOCAB_FILE = "vocab.json"  # of older folders, beside merges.txt; refused
TEMPLATE_FILE = "chat_template.jinja"  # read by `tools/chat/find_template.py`
TOKENIZER_FILES = (JSON_FILES[0], RANK_FILE, VOCAB_FILE)  # the first that a folder has counts
MAX_JSON_FILE = 1 << 25  # bytes; Llama 3.3's has 17 MB
MOST_BEFORE = 16  # special tokens before a text; GLM has two
MAX_ID = 1 << 22  # a list has an entry for each id; Gemma's vocabulary has 1 << 18
NEVER = 1 << 62  # index of a merge that is not in the list
# An added token of this form is not ordinary text, whatever its flags
MARK = re.compile(r"<.*>|\[.*\]", re.DOTALL)
USUAL = {
    "bos_token": ("<|begin_of_text|>", "<|startoftext|>", "<bos>", "<s>"),
    "eos_token": ("<|end_of_text|>", "<|endoftext|>", "<eos>", "</s>"),
}

GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
QWEN_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CASED = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
_UPPER = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
# The alternatives of patterns (GPT-2, GPT-4, Llama 3, Qwen, gpt-oss and others) that match the same
# in both libraries. None matches white space after other characters, except line ends, so a text
# may be cut before a space.
ALTERNATIVES = [
    *GPT2_PATTERN.split("|"),
    # Contractions
    _CONTRACTIONS,
    r"'(?:[sdmt]|ll|ve|re)",
    r"'(?i:[sdmt]|ll|ve|re)",
    # Words
    r"[^\r\n\p{L}\p{N}]?\p{L}+",
    r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+",
    _CASED,
    _UPPER,
    f"{_CASED}{_CONTRACTIONS}?",
    f"{_UPPER}{_CONTRACTIONS}?",
    # Digits
    r"\p{N}",
    r"\p{N}{1,2}",
    r"\p{N}{1,3}",
    # Punctuation
    r" ?[^\s\p{L}\p{N}]+[\r\n]*",
    r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
    r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*",
    # Line ends
    r"\s*[\r\n]+",
    r"\s*[\r\n]",
]
_ONE = "|".join(map(re.escape, ALTERNATIVES))
KNOWN = re.compile(rf"(?:{_ONE})(?:\|(?:{_ONE}))*")

Json = dict[str, Any]  # an object of the file, whose values may be of any type
Pair = tuple[bytes, bytes]


@dataclass(frozen=True)
class Encoding:
    """An encoding for tiktoken."""

    tokens: dict[bytes, int]  # bytes of text -> id
    ranks: dict[bytes, int]  # tiktoken merges the pair whose result has the lowest
    ids: list[int]  # rank -> id; empty: ids are the ranks
    special: dict[str, int]  # name -> id
    pattern: str
    nfc: bool  # whether text is normalised first
    unmade: int  # number of tokens that no merges make


class Frame(NamedTuple):
    """The ids around a text."""

    bos: int
    eos: int
    before: list[int]  # that the tokenizer's files put before a text that is encoded for a model
    files: dict[str, bytes]  # name -> content: files that make a folder this tokenizer


def find(path: Path) -> tuple[Path, bytes]:
    """Finds the tokenizer's file, from its path or its folder's, and the content for `convert`.

    Raises OSError, ConfigError for the files that came before tokenizer.json.
    """
    if path.is_dir():
        path = _in_folder(path)
    if path.name == VOCAB_FILE:
        raise ConfigError(
            f"{path}: is not read without a {JSON_FILES[0]}; transformers makes one: python -c "
            '"from transformers import AutoTokenizer; '
            f"AutoTokenizer.from_pretrained({str(path.parent)!r}).save_pretrained('OUT')\""
        )
    content = read_bounded(path, MAX_JSON_FILE)
    config = path.with_name(JSON_FILES[1])
    if path.suffix == ".json" and config.exists():
        content += b"\0" + read_bounded(config)
    return path, content


def _in_folder(folder: Path) -> Path:
    """Finds the file in a folder that holds the tokenizer."""
    for name in TOKENIZER_FILES:
        if (folder / name).exists():
            return folder / name
    raise FileNotFoundError(errno.ENOENT, f"no {JSON_FILES[0]}, no {RANK_FILE} in this folder")


def parse(path: Path, content: bytes) -> tuple[Json, Json]:
    """Parses a tokenizer.json, and the tokenizer_config.json that may follow in `content` after a
    NUL.

    Raises ConfigError.
    """
    main, _, config = content.partition(b"\0")
    try:
        fields = dict(parse_json(config or b"{}"))
    except (ValueError, TypeError) as error:
        raise ConfigError(
            f"{path.with_name(JSON_FILES[1])}: not a JSON object ({reason_of(error)})"
        ) from None
    try:
        return dict(parse_json(main)), fields
    except (ValueError, TypeError) as error:
        raise ConfigError(
            f"{path}: not a tokenizer.json as Hugging Face writes it ({reason_of(error)})"
        ) from None


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turns errors of a tokenizer.json's content into ConfigErrors that name the file."""
    try:
        yield
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, ConfigError):
            raise ConfigError([f"{path}: {problem}" for problem in error.problems]) from None
        raise ConfigError(
            f"{path}: not a tokenizer.json as Hugging Face writes it ({reason_of(error)})"
        ) from None


def convert(main: Json, max_token: int) -> Encoding:
    """Converts the encoding of a tokenizer.json. Raises ConfigError with the reason if tiktoken
    cannot encode as the file says; for another file any error that `reading` knows.
    """
    pattern, nfc = _pattern_and_nfc(main)
    special, tokens = _special_and_text(main, max_token)
    whole_words = main["model"].get("ignore_merges", False)
    made, unmade = _places(tokens, _merges(main["model"], tokens), whole_words)

    order = sorted(made, key=made.__getitem__)  # first the 256 bytes
    ids = [tokens[token] for token in order[256:]]
    remapped = ids != sorted(ids)  # otherwise ids are the ranks
    if whole_words:
        # Any rank is right for these: no two neighbouring tokens ever merge into one
        order += unmade
    if remapped:
        ranks = {token: rank for rank, token in enumerate(order)}
        ids_of_ranks = [tokens[token] for token in order]
    else:
        ranks = {token: tokens[token] for token in order}
        ids_of_ranks = []

    return Encoding(
        tokens=tokens,
        ranks=ranks,
        ids=ids_of_ranks,
        special=special,
        pattern=pattern,
        nfc=nfc,
        unmade=len(unmade),
    )


def frame_of(main: Json, config: Json, special: dict[str, int]) -> Frame:
    """Reads the ids around a text; `config`: the content of tokenizer_config.json.

    Raises what `convert` does.
    """
    bos, eos = _bos_and_eos(main, config, special)
    main_file, config_file = JSON_FILES
    files = {
        main_file: _to_bytes(main),
        config_file: _to_bytes({"bos_token": bos, "eos_token": eos}),
    }
    return Frame(special[bos], special[eos], ids_before(main, special), files)


def _to_bytes(entry: Json) -> bytes:
    return json.dumps(entry, ensure_ascii=False, separators=(",", ":")).encode()


def _places(
    tokens: dict[bytes, int], merges: dict[Pair, int], whole_words: bool
) -> tuple[dict[bytes, int], list[bytes]]:
    """Maps tokens to the index of the merge that makes them; also lists tokens that none makes.

    Raises ConfigError if tiktoken would make one that `tokenizers` does not.
    """
    made: dict[bytes, int] = {}
    unmade = []
    for token in tokens:
        parts, place = encode_alone(token, merges)
        if len(parts) == 1:
            made[token] = place
        elif whole_words and len(parts) == 2:
            raise ConfigError(
                f"ignore_merges is true, and the merges have no {to_text(parts[0])!r} + "
                f"{to_text(parts[1])!r} for token {tokens[token]}: tiktoken would merge them"
            )
        else:
            unmade.append(token)
    return made, unmade


def encode_alone(token: bytes, merges: dict[Pair, int]) -> tuple[list[bytes], int]:
    """Merges a token's bytes as `tokenizers` does; also returns the last merge's index, or -1."""
    parts = [token[i : i + 1] for i in range(len(token))]
    last = -1
    places = [merges.get(pair, NEVER) for pair in itertools.pairwise(parts)]  # one per pair
    while places:
        place = min(places)
        if place == NEVER:
            break
        i = places.index(place)  # the first, if there are several
        last = place
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
        del places[i]
        # Update the new token's pairs
        if i > 0:
            places[i - 1] = merges.get((parts[i - 1], parts[i]), NEVER)
        if i < len(places):
            places[i] = merges.get((parts[i], parts[i + 1]), NEVER)
    return parts, last


def _pattern_and_nfc(main: Json) -> tuple[str, bool]:
    """Reads the pre-tokenizer's pattern, and whether text is normalised.

    Raises ConfigError with all that is refused.
    """
    model = main["model"]
    kind = model.get("type", "BPE")
    if kind != "BPE":
        raise ConfigError(f"model.type = {kind!r}; allowed: 'BPE', byte-level")
    problems = []
    for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(key):
            problems.append(f"model.{key} = {model[key]!r}; allowed: null")
    normalizers = steps(main.get("normalizer"), "normalizers")
    for step in normalizers:
        if step["type"] != "NFC":
            problems.append(f"normalizer {step['type']}; allowed: NFC")
    for step in steps(main.get("decoder"), "decoders"):
        if step["type"] != "ByteLevel":
            problems.append(f"decoder {step['type']}; allowed: ByteLevel")
    pre_tokenizers = steps(main.get("pre_tokenizer"), "pretokenizers")
    pattern, refused = _pattern(pre_tokenizers or [{"type": "none"}])
    problems += refused
    if problems:
        raise ConfigError(problems)
    return pattern, bool(normalizers)


def _pattern(pre_tokenizers: list[Json]) -> tuple[str, list[str]]:
    """Reads the pattern of ByteLevel, or of the Split before it, and lists what is refused."""
    *splits, level = pre_tokenizers
    names = " + ".join(step["type"] for step in pre_tokenizers)
    if level["type"] != "ByteLevel" or level.get("add_prefix_space"):
        allowed = "ByteLevel as the last, without add_prefix_space"
        return "", [f"pre_tokenizer {names}; allowed: {allowed}"]
    has_own_pattern = level.get("use_regex", True)
    num_splits = 0 if has_own_pattern else 1
    if len(splits) != num_splits or any(step["type"] != "Split" for step in splits):
        allowed = "ByteLevel with use_regex, or Split and ByteLevel without"
        return "", [f"pre_tokenizer {names}; allowed: {allowed}"]
    if has_own_pattern:
        return GPT2_PATTERN, []

    problems = []
    (split,) = splits
    behavior = split["behavior"]
    if behavior != "Isolated":
        problems.append(f"pre_tokenizer Split: behavior = {behavior!r}; allowed: 'Isolated'")
    pattern = split["pattern"].get("Regex", "")
    if not KNOWN.fullmatch(pattern):
        problems.append(
            f"pre_tokenizer Split: pattern {shortened(str(split['pattern']), 500)}; allowed: "
            "alternatives of the patterns of GPT-2, GPT-4, Llama 3, Qwen and gpt-oss, for which "
            "tiktoken is known to match the same"
        )
    return pattern, problems


def steps(entry: Json | None, key: str) -> list[Json]:
    """Lists the steps of a normalizer, pre-tokenizer, decoder or post-processor.

    There is none, one, or those of a Sequence, which lists them under `key`.
    """
    if entry is None:
        return []
    if entry["type"] != "Sequence":
        return [entry]
    all_steps = []
    for inner in entry[key]:
        all_steps += steps(inner, key)
    return all_steps


def _special_and_text(main: Json, max_token: int) -> tuple[dict[str, int], dict[bytes, int]]:
    """Reads added tokens by name, and the tokens of text by their bytes. Raises ConfigError."""
    vocab: dict[str, int] = main["model"]["vocab"]
    if any(len(text) > max_token for text in vocab):
        raise ConfigError(f"model.vocab: a token of more than {max_token} bytes")
    special = _special(main["added_tokens"], vocab)
    # A vocabulary may contain its added tokens, which are not text
    texts = {text: i for text, i in vocab.items() if text not in special}
    ids = [*special.values(), *texts.values()]
    if not all(type(i) is int and 0 <= i < MAX_ID for i in ids) or len(set(ids)) < len(ids):
        raise ConfigError(f"model.vocab: its ids are not different integers from 0 to {MAX_ID - 1}")
    try:
        tokens = {to_bytes(text): i for text, i in texts.items()}
    except UnicodeEncodeError:
        known = set(CHARACTERS.values())
        wrong = next(text for text in texts if not known.issuperset(text))
        raise ConfigError(
            f"model.vocab: {wrong[:80]!r} does not stand for bytes; expected a byte-level encoding"
        ) from None
    missing = [i for i in range(256) if bytes([i]) not in tokens]
    if missing:
        raise ConfigError(
            f"model.vocab: no token for {len(missing)} of the 256 bytes, "
            f"the first 0x{missing[0]:02x}"
        )
    return special, tokens


def _special(added_tokens: list[Json], vocab: dict[str, int]) -> dict[str, int]:
    """Maps added tokens to ids; new ones follow the vocabulary. Raises ConfigError."""
    special: dict[str, int] = {}
    following = len(vocab)
    for entry in added_tokens:
        name = entry["content"]
        expected = vocab.get(name, following)
        if not isinstance(name, str):
            raise ValueError(f"added token {name!r}: expected a text")
        if entry["id"] != expected:
            raise ConfigError(
                f"added token {name!r} has id {entry['id']}; `tokenizers` gives it {expected}"
            )
        if not (entry["special"] or MARK.fullmatch(name)):
            raise ConfigError(
                f"added token {name!r} is ordinary text, at which `tokenizers` would cut before "
                "merging"
            )
        special[name] = expected
        following = max(following, expected + 1)
    return special


def _merges(model: Json, tokens: dict[bytes, int]) -> dict[Pair, int]:
    """Maps each pair of tokens to its index in the list of merges. Raises ConfigError."""
    merges = {}
    for place, merge in enumerate(model["merges"]):
        parts = merge.split(" ") if isinstance(merge, str) else merge
        if len(parts) != 2:
            raise ConfigError(f"model.merges[{place}] = {merge!r:.80}; expected two tokens")
        a, b = map(to_bytes, parts)
        if not (a in tokens and b in tokens and a + b in tokens):
            raise ConfigError(
                f"model.merges[{place}] = {merge!r}: a part of it, or the result, is not in "
                "model.vocab"
            )
        merges[a, b] = place
    return merges


def _bos_and_eos(main: Json, config: Json, special: dict[str, int]) -> tuple[str, str]:
    """Finds the tokens that enclose a document; if a file has only one, it serves for both.

    It takes those of tokenizer_config.json, else those that the post-processor adds, else the first
    of the usual names.
    """
    ends: dict[str, str] = {}
    for key in USUAL:
        name = _document_end(key, main, config, special)
        if name is None:
            continue
        if name not in special:
            raise ConfigError(f"{key} = {name!r} is not one of its {len(special)} added tokens")
        ends[key] = name
    if not ends:
        names = [shortened(name, 40) for name in list(special)[:10]]
        if len(special) > 10:
            names.append("...")
        raise ConfigError(
            "no token begins or ends a document: give bos_token or eos_token in a "
            f"tokenizer_config.json beside it; its added tokens: {', '.join(names) or 'none'}"
        )
    either = next(iter(ends.values()))
    return ends.get("bos_token", either), ends.get("eos_token", either)


def _document_end(key: str, main: Json, config: Json, special: dict[str, int]) -> str | None:
    """Finds the name of one of the two tokens; `key`: bos_token or eos_token."""
    value = config.get(key)
    name: str | None = value["content"] if isinstance(value, dict) else value
    name = name or _of_template(main, key)
    if name:
        return name
    for usual in USUAL[key]:
        if usual in special:
            return usual
    return None


def _of_template(main: Json, key: str) -> str | None:
    """Finds the token that TemplateProcessing puts before (bos_token) or after (eos_token) text."""
    for step in steps(main.get("post_processor"), "processors"):
        if step["type"] != "TemplateProcessing":
            continue
        template = step["single"]
        is_text = ["Sequence" in part for part in template]
        text = is_text.index(True) if True in is_text else len(template)
        around = template[:text] if key == "bos_token" else template[text + 1 :]
        return around[0]["SpecialToken"]["id"] if around else None
    return None


def ids_before(main: Json, special: dict[str, int]) -> list[int]:
    """Lists the ids of the special tokens that the post-processor puts before a text."""
    ids: list[int] = []
    for step in steps(main.get("post_processor"), "processors"):
        if step["type"] in ("BertProcessing", "RobertaProcessing"):
            ids.append(step["cls"][1])
        elif step["type"] == "TemplateProcessing":
            for part in step["single"]:
                if "Sequence" in part:
                    break
                name = part["SpecialToken"]["id"]
                by_file = step.get("special_tokens", {}).get(name)
                ids += by_file["ids"] if by_file else [special[name]]
    size = len(main["model"]["vocab"])
    known = [type(i) is int and (0 <= i < size or i in special.values()) for i in ids]
    if len(ids) > MOST_BEFORE or not all(known):
        raise ValueError(
            f"post_processor: ids {ids!r:.80}; expected at most {MOST_BEFORE}, of the vocabulary"
        )
    return ids
