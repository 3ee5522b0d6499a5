"""Tokenizers like those of other models, trained by the package `tokenizers` on many scripts."""

from __future__ import annotations

import functools
import json
import os
import random
import unicodedata
from pathlib import Path

import pytest

from titanlite.tokenizer.byte_level import CHARACTERS
from titanlite.tokenizer.tokenizer import PATTERN
from titanlite.tokenizer.tokenizer_json import GPT2_PATTERN

tokenizers = pytest.importorskip("tokenizers")

PATTERNS = {"gpt2": GPT2_PATTERN, "llama3": PATTERN, "qwen": PATTERN.replace("{N}{1,3}", "{N}")}
SPECIAL = {
    "gpt2": ["<|endoftext|>"],
    "llama3": [
        "<|begin_of_text|>",
        "<|end_of_text|>",
        *(f"<|reserved_special_token_{i}|>" for i in range(14)),
    ],
    "qwen": ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
}
SCRIPTS = {  # ranges of letters, and what stands between words
    "Korean": ((0xAC00, 0xD7A3), " "),
    "Japanese": ((0x3041, 0x3096), ""),
    "Katakana": ((0x30A1, 0x30FA), "・"),
    "Chinese": ((0x4E00, 0x9FA5), ""),
    "Arabic": ((0x0620, 0x064A), " "),
    "Hebrew": ((0x05D0, 0x05EA), " "),
    "Devanagari": ((0x0904, 0x0939), "् "),
    "Cyrillic": ((0x0410, 0x044F), " "),
    "Greek": ((0x0391, 0x03C9), " "),
    "Thai": ((0x0E01, 0x0E3A), ""),
    "emoji": ((0x1F300, 0x1F64F), "\u200d"),
    "accents": ((0x0061, 0x007A), "\u0301"),
}
ODD = [
    *(
        "    ",
        "\t\t",
        "\n\n\n",
        "\r\n",
        " \n ",
        "\u00a0",
        "\u3000",
        "\u2028",
        "\x85",
        "  \t x",
        "\x00",
        "\x1c",
    ),
    *(
        "don't",
        "I'LL",
        "we'VE",
        "'\u017f",
        "it\u2019s",
        "1234567890",
        "\uff13\uff11\uff14",
        "٣٤٥",
        "Ⅷ",
        "½",
        "a1b2",
        "==",
        "-->",
        "...!?",
    ),
    *(
        "e\u0301",
        "n\u0303\u0323",
        "\u1100\u1161\u11a8",
        "\u0958",
        "\u212b",
        "\ufb01",
        "\U0001d15e",
        "🏳️‍🌈",
        "🇰🇷",
        "<|x|>",
    ),
]


def mixed_text(size: int, seed: int = 0) -> str:
    """About `size` characters: a third is Python, the rest words of many scripts, spaces, digits,
    odd characters.
    """
    chance = random.Random(seed)
    files = sorted(Path(os.__file__).parent.glob("*.py"))
    parts, total = [], 0
    while total < size:
        source = chance.choice(files).read_text(errors="replace")
        start = chance.randrange(max(1, len(source) - 4000))
        (low, high), between = chance.choice(list(SCRIPTS.values()))
        letters = [
            chr(chance.randint(low, high)) for _ in range(40)
        ]  # a small alphabet, so that there is what to merge
        words = ["".join(chance.choices(letters, k=chance.randint(1, 6))) for _ in range(60)]
        prose = between.join(chance.choices(words, k=300))
        odd = (
            " ".join(chance.choices(ODD, k=30))
            + " " * chance.randint(0, 70)
            + "\n" * chance.randint(0, 4)
        )
        line = "".join(chance.choices(ODD, k=20)) + "".join(
            chr(chance.randint(32, 0x2FFF)) for _ in range(40)
        )
        parts += [source[start : start + chance.randint(100, 4000)], prose, odd, line]
        total += sum(map(len, parts[-4:]))
    return "".join(parts)


@functools.cache
def trained(style: str, num_tokens: int = 1500) -> str:
    """A tokenizer.json in the style of gpt2, llama3 or qwen."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = (
        pre_tokenizer(style),
        tokenizers.decoders.ByteLevel(),
    )
    if style == "qwen":
        tokenizer.normalizer = tokenizers.normalizers.NFC()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=num_tokens,
        initial_alphabet=sorted(CHARACTERS.values()),
        special_tokens=[],
        show_progress=False,
    )
    tokenizer.train_from_iterator([mixed_text(150_000, seed=1)], trainer)
    tokenizer.add_special_tokens(SPECIAL[style])
    if style == "qwen":
        tokenizer.add_tokens(["<tool_call>", "</tool_call>"])
    return tokenizer.to_str()


SENTENCEPIECE_SPECIAL = ["<s>", "</s>", "<unk>", "<|im_start|>"]
SENTENCEPIECE_TEXT = (
    """def tokens(text):  # zwei Wörter,   three  spaces
    return [" 日本語 ", 12345, '<s>', "<|im_start|>"]  \U0001f642\t\r\n
"""
    * 3
)


def sentencepiece():
    """A tokenizer like Llama 2's: a prefix, a mark for spaces, bytes for characters that are not in its text,
    which is a few lines.
    """
    models, normalizers, decoders = tokenizers.models, tokenizers.normalizers, tokenizers.decoders
    encoder = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    prepend, mark = normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")
    encoder.normalizer = normalizers.Sequence([prepend, mark])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    encoder.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    bytes_of_text = [f"<0x{i:02X}>" for i in range(256)]
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=700,
        special_tokens=[*SENTENCEPIECE_SPECIAL, *bytes_of_text],
        show_progress=False,
    )
    text = SENTENCEPIECE_TEXT.replace("日本語", "")
    # Lines, so that no token is a whole text
    lines = [line for line in (text * 3).split("\n") if line]
    encoder.train_from_iterator(lines, trainer)
    main = json.loads(encoder.to_str())  # the bytes are no special tokens there
    main["added_tokens"] = main["added_tokens"][: len(SENTENCEPIECE_SPECIAL)]
    return tokenizers.Tokenizer.from_str(json.dumps(main))


def pre_tokenizer(style: str):
    level, regex = tokenizers.pre_tokenizers.ByteLevel, tokenizers.Regex(PATTERNS[style])
    if style == "gpt2":
        return level(add_prefix_space=False)
    split = tokenizers.pre_tokenizers.Split(regex, "isolated")
    return tokenizers.pre_tokenizers.Sequence(
        [split, level(add_prefix_space=False, use_regex=False)]
    )


def in_words(merges: list[tuple[str, str]], more: list[str], **options) -> dict:
    """A tokenizer.json whose pieces are words of letters."""
    level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": True,
    }
    alphabet = sorted(CHARACTERS.values())
    texts = dict.fromkeys([*alphabet, *(a + b for a, b in merges), *more])
    model = {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None}
    model |= {
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
    }
    flags = {
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": True,
    }
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": len(texts), "content": "<|endoftext|>", **flags}],
        "normalizer": None,
        "pre_tokenizer": level,
        "post_processor": None,
        "decoder": level,
        "model": {
            **model,
            "vocab": {t: i for i, t in enumerate(texts)},
            "merges": [list(m) for m in merges],
            **options,
        },
    }


def write(folder: Path, main: str | dict, **config) -> Path:
    """Writes tokenizer.json, and tokenizer_config.json if there is something to say in it; returns
    the folder.
    """
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_text(main if isinstance(main, str) else json.dumps(main))
    if config:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def theirs(main: str):
    """The encoder of `tokenizers`, set so that it finds no special tokens in text."""
    tokenizer = tokenizers.Tokenizer.from_str(main)
    tokenizer.encode_special_tokens = True
    return tokenizer


@functools.cache
def _marks() -> list[str]:
    return [c for c in map(chr, range(0x110000)) if unicodedata.combining(c)]


def random_unicode(size: int, seed: int) -> str:
    """Random code points, many of them combining characters and white space."""
    chance = random.Random(seed)
    marks = _marks()
    spaces = [c for c in map(chr, range(0x3001)) if c.isspace()]
    anywhere = [
        chr(i)
        for i in (chance.randrange(0x110000) for _ in range(size // 2))
        if not 0xD800 <= i < 0xE000
    ]
    near = [chr(chance.randrange(0x3100)) for _ in range(size // 4)]
    text = (
        anywhere + near + chance.choices(marks, k=size // 8) + chance.choices(spaces, k=size // 8)
    )
    chance.shuffle(text)
    return "".join(text)
