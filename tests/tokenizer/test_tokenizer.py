"""The tokenizer: the bundled file, trained files, special tokens, hostile text."""

from __future__ import annotations

import base64
import json
import os
import time
from pathlib import Path

import pytest
from foreign_tokenizers import trained
from fuzz_samples import RANKS, TEXT, Reader, given
from messages import refused

from titanlite.runtime.errors import ConfigError
from titanlite.tokenizer.bpe import train_bpe, write_rank_file
from titanlite.tokenizer.tokenizer import (
    BUNDLED,
    MAX_RANK_FILE,
    MAX_TOKEN,
    Tokenizer,
    named_tokenizer,
)
from titanlite.tools.formats.huggingface_tokenizer import to_files

KOREAN = "대규모 언어 모델을 처음부터 학습합니다. "

TEXTS = [
    "",
    "def f(x):\n    return x\n",
    KOREAN,
    "naïve café 🦙 \u2028\x00\r\n",
    "<|end_of_text|><|begin_of_text|>",
    " " * 300 + "x",
]


def test_a_trained_file_loads_and_round_trips(tmp_path):
    path = tmp_path / "my.model"
    write_rank_file(train_bpe([KOREAN * 20], 300), path)
    tokenizer = Tokenizer(path)
    assert tokenizer.size == 300 + 16
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer.encode(KOREAN)) < len(KOREAN.encode()) / 2


@pytest.mark.parametrize("text", TEXTS)
def test_bundled_tokenizer_round_trips(text):
    tokenizer = Tokenizer()
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert all(0 <= i < 4096 for i in ids), "text never gives a special token"
    assert sum(tokenizer.token_bytes[i] for i in ids) == len(text.encode())


def test_bundled_tokenizer_has_4096_tokens_and_16_special_ones():
    tokenizer = Tokenizer()
    assert len(BUNDLED.read_text().splitlines()) == 4096
    assert (tokenizer.size, tokenizer.bos, tokenizer.eos) == (4112, 4096, 4097)
    assert tokenizer.token_bytes[4096:] == [0] * 16
    assert (
        tokenizer.decode([tokenizer.bos, *tokenizer.encode("x"), 999_999]) == "<|begin_of_text|>x"
    )


@pytest.mark.slow
def test_llama3_ids_of_special_tokens(tmp_path):
    """A file of 128,000 ranks gets Llama 3's 256: begin 128000, end 128001, eot 128009, 128256 ids
    in all.
    """
    tokens = [bytes([i]) for i in range(256)] + [b"%05x" % i for i in range(127_744)]
    path = tmp_path / "tokenizer.model"
    write_rank_file(tokens, path)
    tokenizer = Tokenizer(path)
    assert (tokenizer.size, tokenizer.bos, tokenizer.eos) == (128_256, 128_000, 128_001)
    names = {
        i: tokenizer.decode([i])
        for i in (128_002, 128_006, 128_007, 128_008, 128_009, 128_010, 128_255)
    }
    assert names == {
        128_002: "<|reserved_special_token_0|>",
        128_006: "<|start_header_id|>",
        128_007: "<|end_header_id|>",
        128_008: "<|reserved_special_token_4|>",
        128_009: "<|eot_id|>",
        128_010: "<|reserved_special_token_5|>",
        128_255: "<|reserved_special_token_250|>",
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    "text", [" " * 1_100_000, "a" * 1_100_000, "\n" * 1_100_000, "=" * 1_100_000, "ab " * 400_000]
)
def test_a_megabyte_of_one_kind_takes_bounded_time(text):
    tokenizer = Tokenizer()
    started = time.process_time()
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert time.process_time() - started < 10


def line(token: bytes, rank: int) -> bytes:
    return base64.b64encode(token) + b" %d\n" % rank


TOO_LONG = f"expected at most {MAX_TOKEN}"
# name -> (what becomes of the lines of all bytes, words of the message)
DAMAGED = {
    "a line that is not base64": (
        lambda lines: [*lines[:100], b"not base64! 100\n", *lines[101:]],
        (":101: ", "`base64 rank`"),
    ),
    "a line left out": (
        lambda lines: [*lines[:100], *lines[101:]],
        (":101: ", "rank 101", "100"),
    ),
    "a file that is cut": (lambda lines: lines[:200], ("56 of the 256 bytes", "0xc8")),
    "a token twice": (lambda lines: [*lines, line(b"a", 256)], (":257: ", "token")),
    "a line that is not text": (
        lambda lines: [*lines, b"\x00\xff\n"],
        (":257: ", "`base64 rank`"),
    ),
    "a long token": (
        lambda lines: [*lines, line(b"x" * (MAX_TOKEN + 1), 256)],
        (":257: ", f"a token of {MAX_TOKEN + 1} bytes", TOO_LONG),
    ),
    # Its merges, found by splitting it at every byte, would take minutes
    "a token of 300,000 bytes": (
        lambda lines: [*lines, line(b"x" * 300_000, 256)],
        (":257: ", "a token of 300000 bytes", TOO_LONG),
    ),
}


@pytest.mark.parametrize(("damage", "expected"), DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_file_is_named_with_its_line(tmp_path, damage, expected):
    path = tmp_path / "bad.model"
    path.write_bytes(b"".join(damage([line(bytes([i]), i) for i in range(256)])))
    with refused("bad.model", *expected):
        Tokenizer(path)


def test_an_absent_file_is_named():
    with refused("--tokenizer = 'no/such.model': No such file"):
        named_tokenizer("no/such.model", "--tokenizer")


def test_a_file_that_is_no_tokenizer_is_named_with_its_setting(tmp_path):
    path = tmp_path / "README.md"
    path.write_text("# words")
    with refused(f"data.tokenizer = '{path}': {path}:1:", "base64 rank"):
        named_tokenizer(str(path))


def test_a_rejected_file_is_reported_once(tmp_path):
    """tiktoken and `tokenizers` both find that nothing begins or ends a document."""
    path = tmp_path / "tokenizer.json"
    main = json.loads(trained("qwen"))
    path.write_text(json.dumps(main | {"added_tokens": []}))
    with pytest.raises(ConfigError) as caught:
        Tokenizer(path)
    (problem,) = caught.value.problems
    assert problem.startswith(f"{path}: no token begins or ends a document")


def test_tokens_and_files_have_a_largest_size(tmp_path):
    path = tmp_path / "long.model"
    count = len(BUNDLED.read_bytes().splitlines())
    path.write_bytes(BUNDLED.read_bytes() + line(b"x" * MAX_TOKEN, count))
    assert Tokenizer(path).size == count + 17
    os.truncate(path, MAX_RANK_FILE + 1)
    with refused(f"expected a regular file of at most {MAX_RANK_FILE} bytes"):
        Tokenizer(path)


def test_no_longer_token_is_trained():
    tokens = train_bpe(["=" * 5000, "=" * 5000], 300)
    assert max(map(len, tokens)) == MAX_TOKEN == 1024


def read_ranks(folder: Path, data: bytes) -> None:
    (folder / "ranks").write_bytes(data)
    tokenizer = Tokenizer(folder / "ranks")
    tokenizer.decode(tokenizer.encode(TEXT))
    to_files(tokenizer, 16)


FUZZED = {"rank file": Reader("text", given(RANKS), read_ranks)}
