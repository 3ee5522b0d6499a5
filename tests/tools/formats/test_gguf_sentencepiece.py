"""SentencePiece's tokenizers in GGUF files encode as the original, and as llama.cpp does."""

from __future__ import annotations

import importlib.util
import itertools
import random
import time
from pathlib import Path
from typing import Any

import pytest
from foreign_tokenizers import (
    SENTENCEPIECE_TEXT,
    in_gguf,
    mixed_text,
    random_unicode,
    sentencepiece,
)
from messages import refused

from titanlite.tokenizer.tokenizer import Tokenizer
from titanlite.tools.formats import gguf_sentencepiece
from titanlite.tools.formats.gguf_reader import read_header
from titanlite.tools.formats.gguf_sentencepiece import NEVER, join, merges_of
from titanlite.tools.formats.gguf_tokenizer import read_tokenizer

gguf = pytest.importorskip("gguf")
tokenizers = pytest.importorskip("tokenizers")
MIXED = mixed_text(20_000, seed=5)
TEXTS = [
    "",
    " ",
    "x",
    "  two  spaces ",
    "naïve Wörter, e\u0301",
    "日本語 \U0001f642 \U0001f469\u200d\U0001f680",
    "\x00\x07\u2028\r\n\t",
    "▁ the mark ▁▁ itself",
    SENTENCEPIECE_TEXT.replace("<s>", "").replace("<|im_start|>", ""),
    MIXED,
]


def fields_of(methods: dict[str, Any], path: Path) -> dict[str, Any]:
    """What a file has that these methods of gguf's writer wrote."""
    writer = gguf.GGUFWriter(path, "llama")
    for method, value in methods.items():
        getattr(writer, method)(value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return read_header(path).fields


def llama_cpp(text: str, fields: dict[str, Any]) -> list[int]:
    """The ids that llama.cpp's `llm_tokenizer_spm` gives, step by step."""
    tokens = fields["tokenizer.ggml.tokens"]
    ids = {token: i for i, token in enumerate(tokens)}
    scores = dict(zip(tokens, fields["tokenizer.ggml.scores"], strict=True))
    if fields["tokenizer.ggml.add_space_prefix"] and text:
        text = " " + text
    symbols = list(text.replace(" ", "▁"))
    while True:
        best = max(
            (
                (scores[first + second], -i)
                for i, (first, second) in enumerate(itertools.pairwise(symbols))
                if first + second in ids
            ),
            default=None,
        )
        if best is None:
            break
        i = -best[1]
        symbols[i : i + 2] = [symbols[i] + symbols[i + 1]]
    found = []
    for symbol in symbols:
        of_bytes = [ids[f"<0x{byte:02X}>"] for byte in symbol.encode()]
        found += [ids[symbol]] if symbol in ids else of_bytes
    return found


@pytest.mark.parametrize("prefix", [True, False])
def test_ids_and_text_are_those_of_the_original(tmp_path, prefix):
    encoder = sentencepiece(prefix, num_tokens=1500, more=MIXED)
    fields = fields_of(in_gguf(encoder, prefix), tmp_path / "a.gguf")
    content = read_tokenizer(tmp_path / "a.gguf", fields)
    assert content is not None
    ours = Tokenizer("a", content)
    assert ours.size == encoder.get_vocab_size() == len(fields["tokenizer.ggml.tokens"])
    assert ours.special == {"<s>": 0, "</s>": 1, "<unk>": 2, "<|im_start|>": 3}
    assert (ours.bos, ours.eos) == (0, 1)
    for text in TEXTS:
        ids = encoder.encode(text, add_special_tokens=False).ids
        assert ours.encode(text) == ids
        assert ours.decode(ids) == encoder.decode(ids, skip_special_tokens=False)
        assert 2 not in ids
        if len(text) < 2000:
            assert ids == llama_cpp(text, fields)
    assert ours.decode(ours.encode("a  b")) == "a  b"


def random_scores(chance: random.Random) -> dict[str, float]:
    """Tokens with scores in any order: a token may have a higher one than its parts."""
    tokens = ["▁", "a", "b", "c"]
    for _ in range(chance.randint(2, 16)):
        token = chance.choice(tokens) + chance.choice(tokens)
        if len(token) < 8 and token not in tokens:
            tokens.append(token)
    tokens += ["".join(chance.choices("abc", k=chance.randint(2, 5))) for _ in range(3)]
    tokens = list(dict.fromkeys(tokens))
    scores = chance.sample(range(-100, 0), len(tokens))
    return dict(zip(tokens, map(float, scores), strict=True))


@pytest.mark.slow
def test_any_scores_give_the_ids_of_llama_cpp():
    chance = random.Random(0)
    words = ["".join(word) for n in range(1, 8) for word in itertools.product("ab", repeat=n)]
    num_ways = 0
    for _ in range(60):
        scores = random_scores(chance)
        names = [f"<0x{i:02X}>" for i in range(256)]
        fields = {
            "tokenizer.ggml.tokens": [*scores, *names],
            "tokenizer.ggml.scores": [*scores.values(), *[0.0] * 256],
            "tokenizer.ggml.add_space_prefix": False,
        }
        merges = merges_of(scores)
        vocab = {token: i for i, token in enumerate(fields["tokenizer.ggml.tokens"])}
        encoder = tokenizers.Tokenizer(
            tokenizers.models.BPE(vocab=vocab, merges=merges, byte_fallback=True, fuse_unk=True)
        )
        longer = ["".join(chance.choices("abc▁d", k=chance.randint(8, 40))) for _ in range(40)]
        for word in words + longer:
            assert encoder.encode(word).ids == llama_cpp(word, fields), (word, scores)
        ways = [
            (token[:i], token[i:])
            for token in scores
            for i in range(1, len(token))
            if token[:i] in scores and token[i:] in scores
        ]
        num_ways += len(ways) - len(merges)
    assert num_ways > 50, "tokens that could be made in several ways"


def test_a_token_is_made_by_one_pair():
    scores = {"a": 0.0, "b": -1.0, "c": -2.0, "bc": -3.0, "ab": -4.0, "abc": -5.0, "ca": -6.0}
    assert merges_of(scores) == [("b", "c"), ("a", "b"), ("a", "bc"), ("c", "a")]
    other = scores | {"ab": -2.5}
    assert merges_of(other) == [("a", "b"), ("b", "c"), ("ab", "c"), ("c", "a")]
    parts, last = join("abca", lambda pair: scores.get("".join(pair), NEVER))
    assert (parts, last) == (["abc", "a"], ("a", "bc"))


@pytest.mark.parametrize("lengths", [[2, 3, 4, 5], [2, 4, 8], [*range(2, 15), 16], [2], [3, 5]])
def test_runs_of_a_character_may_have_one_score(lengths):
    """As Mistral's runs of spaces, of which it has those of 2 to 14 and of 16."""
    scores = {"▁": -1.0, "a": -2.0, "▁a": -3.0, "▁▁": -8.0, "aa": -9.0}
    scores |= {"▁" * length: -9.0 for length in lengths}
    names = {f"<0x{i:02X}>": 0.0 for i in range(256)}
    fields = {
        "tokenizer.ggml.tokens": [*scores, *names],
        "tokenizer.ggml.scores": [*scores.values(), *names.values()],
        "tokenizer.ggml.add_space_prefix": False,
    }
    vocab = {token: i for i, token in enumerate(fields["tokenizer.ggml.tokens"])}
    encoder = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=merges_of(scores)))
    for first in range(50):
        for second in (0, 1, 2, 17):
            text = "▁" * first + "aaa" + "▁" * second + "a" + "▁" * first
            assert encoder.encode(text).ids == llama_cpp(text, fields), (first, second)


def test_what_a_list_of_merges_cannot_say_is_refused(monkeypatch):
    tokens = {"a": 0.0, "b": -1.0, "ab": -3.0}
    with refused("'ab' and 'ba' have the same score, -3"):
        merges_of(tokens | {"ba": -3.0})
    runs = {"aa": -5.0, "aaa": -5.0}
    assert merges_of(tokens | runs) == [("a", "b"), ("aa", "a"), ("a", "a")]
    with refused("'aaa' and 'aa' have the same score, -5"):  # "aab" comes before the next run
        merges_of(tokens | runs | {"ab": -6.0, "aab": -4.0})
    with refused("have the same score, -5"):
        merges_of(tokens | {"a" * length: -5.0 for length in range(2, 40)})
    # A token that text cannot give may have any score
    assert merges_of(tokens | {"bbb": -3.0}) == [("a", "b")]
    with refused("token 'ac': its character 'c' is not a token"):
        merges_of(tokens | {"ac": -4.0})
    with refused("token 'ba' has the score nan"):
        merges_of(tokens | {"ba": float("nan")})
    with refused("a token of 257 characters", "at most 256"):
        merges_of(tokens | {"a" * 257: -4.0})
    monkeypatch.setattr(gguf_sentencepiece, "MOST_WORK", 5)
    with refused("too many and too long"):
        merges_of(tokens)


@pytest.mark.parametrize(
    ("key", "change", "words"),
    [
        ("scores", lambda values: [-1000.0] * len(values), "have the same score, -1000"),
        ("scores", lambda values: values[1:], "is not used"),
        ("scores", lambda values: None, "is not used"),
        ("tokens", lambda values: [f"{value}x" for value in values], "256 of the 256 bytes"),
        ("tokens", lambda values: list(range(len(values))), "is not used"),
        ("token_type", lambda values: [1] * len(values), "is not used"),
        ("bos_token_id", lambda value: 10**6, "is not used"),
    ],
)
def test_others_are_left_out_with_a_warning(tmp_path, caplog, key, change, words):
    fields = fields_of(in_gguf(sentencepiece()), tmp_path / "a.gguf")
    changed = change(fields[f"tokenizer.ggml.{key}"])
    content = read_tokenizer(tmp_path / "a.gguf", fields | {f"tokenizer.ggml.{key}": changed})
    assert content is None
    assert words in caplog.text


@pytest.mark.slow
def test_a_released_tokenizer():
    """Mistral 7B's, of the wheel mistral-common, against the library that it is made for."""
    spec = importlib.util.find_spec("mistral_common")
    if spec is None or spec.origin is None:
        pytest.skip("pip install --no-deps mistral-common sentencepiece")
    path = Path(spec.origin).parent / "data/tokenizer.model.v1"
    original = pytest.importorskip("sentencepiece").SentencePieceProcessor(model_file=str(path))
    ids = range(original.vocab_size())
    types = []
    for i in ids:
        special = 3 if original.is_control(i) else 1
        types.append(6 if original.is_byte(i) else 2 if original.is_unknown(i) else special)
    fields = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [original.id_to_piece(i) for i in ids],
        "tokenizer.ggml.scores": [original.get_score(i) for i in ids],
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.bos_token_id": original.bos_id(),
        "tokenizer.ggml.eos_token_id": original.eos_id(),
    }
    content = read_tokenizer(path, fields)
    assert content is not None
    ours = Tokenizer("a", content)
    text = mixed_text(1_000_000, seed=9) + "\n" + random_unicode(50_000, seed=1)
    num_tokens = 0
    for line in text.split("\n"):
        expected = original.encode(line)
        assert ours.encode(line) == expected
        assert ours.decode(expected) == original.decode(expected)
        num_tokens += len(expected)
    assert num_tokens > 500_000


def test_user_defined_tokens_are_found_before_anything_is_merged(tmp_path):
    """As in `tokenizers` with an added token that is not special."""
    methods = in_gguf(sentencepiece())
    last = len(methods["add_token_list"]) - 1
    methods["add_token_list"][last] = "qwq"
    methods["add_token_types"][last] = 4
    content = read_tokenizer(tmp_path / "a", fields_of(methods, tmp_path / "a"))
    assert content is not None
    ours = Tokenizer("a", content)
    assert ours.encode("aqwqb").count(last) == 1
    assert last not in ours.encode("a qw q b")
    assert last not in ours.special.values()


@pytest.mark.slow
@pytest.mark.parametrize("groups", [1, 5000])
def test_many_repetitions_are_compared_in_linear_time(groups):
    """20,000 doubled characters: of one score, or of one for each four."""
    characters = [chr(0x4E00 + i) for i in range(20_000)]
    scores = dict.fromkeys(characters, 0.0)
    doubled = {2 * character: -1.0 - i % groups for i, character in enumerate(characters)}
    started = time.process_time()
    merges = merges_of(scores | doubled)
    assert time.process_time() - started < 8
    assert sorted(merges) == [(character, character) for character in characters]


@pytest.mark.slow
def test_long_repetitions_of_many_characters_are_refused_at_once():
    scores = {}
    for i in range(2000):
        character = chr(0x4E00 + i)
        scores[character] = 0.0
        scores |= {character * length: -1.0 for length in (2, 4, 8, 16, 32)}
    started = time.process_time()
    with refused("repetitions of characters are too many"):
        merges_of(scores)
    assert time.process_time() - started < 15
