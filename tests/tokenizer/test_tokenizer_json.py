"""tokenizer.json: encoded as the `tokenizers` package does, or refused with the reason."""

from __future__ import annotations

import copy
import itertools
import json
import random
from pathlib import Path

import pytest
from foreign_tokenizers import (
    SPECIAL,
    in_words,
    mixed_text,
    random_unicode,
    theirs,
    tokenizers,
    trained,
    write,
)
from fuzz_samples import TEXT, Reader, tokenizer_of_others
from messages import refused

from titanlite.runtime.errors import ConfigError
from titanlite.tokenizer.byte_level import to_bytes, to_text
from titanlite.tokenizer.tokenizer import BUNDLED, MAX_TOKEN, Tokenizer, named_tokenizer
from titanlite.tokenizer.tokenizer_json import (
    Encoding,
    convert,
    encode_alone,
    find,
    frame_of,
    parse,
    reading,
)
from titanlite.tools.formats.huggingface_tokenizer import to_files

STYLES = ("gpt2", "llama3", "qwen")


def assert_same(ours: Tokenizer, main: str, text: str) -> None:
    """Equal ids for each line with its neighbours, and for the whole."""
    encoder = theirs(main)
    expected, found = encoder.encode(text, add_special_tokens=False).ids, ours.encode(text)
    if found != expected:
        first = next(i for i, (a, b) in enumerate(itertools.zip_longest(found, expected)) if a != b)
        context = encoder.decode(expected[max(0, first - 10) : first + 10])
        pytest.fail(f"differs from token {first} of {len(expected)} on, near {context!r}")


@pytest.mark.parametrize("style", STYLES)
def test_ids_are_those_of_tokenizers(tmp_path, style):
    ours = Tokenizer(write(tmp_path, trained(style)))
    assert_same(ours, trained(style), mixed_text(300_000))
    assert_same(ours, trained(style), random_unicode(50_000, seed=2))
    for text in ("", " ", "\n", "a", "\u0301", *SPECIAL[style][:1]):
        if not text.startswith("<|"):
            assert_same(ours, trained(style), text)
        assert all(i not in ours.special.values() for i in ours.encode(text)), (
            "text never gives a special token"
        )


@pytest.mark.slow
@pytest.mark.parametrize("style", STYLES)
def test_ten_megabytes_are_encoded_as_tokenizers_encodes_them(tmp_path, style):
    text = mixed_text(7_000_000, seed=3)
    assert len(text.encode()) > 10_000_000
    main = trained(style, 8000)
    assert_same(Tokenizer(write(tmp_path, main)), main, text)
    for seed in range(4):
        assert_same(Tokenizer(tmp_path), main, random_unicode(100_000, seed))


@pytest.mark.parametrize("style", STYLES)
def test_decoding_and_the_bytes_of_tokens(tmp_path, style):
    ours = Tokenizer(write(tmp_path, trained(style)))
    text = mixed_text(20_000)
    plain = tokenizers.normalizers.NFC().normalize_str(text) if style == "qwen" else text
    ids = ours.encode(text)
    assert ours.decode(ids) == plain
    assert sum(ours.token_bytes[i] for i in ids) == len(plain.encode())
    assert [ours.token_bytes[i] for i in ours.special.values()] == [0] * len(ours.special)
    encoder = theirs(trained(style))
    assert ours.size == len(ours.token_bytes) == max(encoder.get_vocab().values()) + 1
    assert ours.special == {
        token.content: i for i, token in encoder.get_added_tokens_decoder().items()
    }
    assert ours.decode([ours.bos, *ids[:3], ours.size, 10**9]).startswith(
        next(iter(SPECIAL[style]))
    )


def random_merges(chance: random.Random) -> tuple[list[tuple[str, str]], list[str]]:
    """Merges as no training gives them: in any order, several for a token, tokens that no merge
    makes.
    """
    tokens = ["a", "b", "c"][: chance.randint(1, 3)]
    for _ in range(chance.randint(1, 14)):
        token = chance.choice(tokens) + chance.choice(tokens)
        if len(token) < 9 and token not in tokens:
            tokens.append(token)
    pairs = [
        (t[:i], t[i:])
        for t in tokens
        for i in range(1, len(t))
        if t[:i] in tokens and t[i:] in tokens
    ]
    chance.shuffle(pairs)
    more = [
        "".join(chance.choices("abc", k=chance.randint(2, 6))) for _ in range(chance.randint(0, 3))
    ]
    return pairs[: chance.randint(0, len(pairs))], tokens + more


def exactly(path: Path) -> Encoding:
    """By the conversion for tiktoken alone."""
    found, content = find(path)
    main, config = parse(found, content)
    with reading(found):
        encoding = convert(main, MAX_TOKEN)
        frame_of(main, config, encoding.special)
    return encoding


@pytest.mark.slow
@pytest.mark.parametrize("ignore_merges", [False, True])
def test_merges_in_any_order_are_converted_exactly_or_refused(tmp_path, ignore_merges):
    """Every word of up to 7 letters, and longer ones, for merge lists drawn at random."""
    chance, converted, remapped, reasons = random.Random(ignore_merges), 0, 0, list[str]()
    words = [
        "".join(word) for length in range(1, 8) for word in itertools.product("ab", repeat=length)
    ]
    for _ in range(100 if ignore_merges else 50):
        merges, more = random_merges(chance)
        main = json.dumps(in_words(merges, more, ignore_merges=ignore_merges))
        text = " ".join(
            [*words, *("".join(chance.choices("abc", k=chance.randint(3, 30))) for _ in range(300))]
        )
        try:
            convert(json.loads(main), MAX_TOKEN)
        except ConfigError as error:
            reasons.append(str(error))
            continue
        ours = Tokenizer(tmp_path / "x", main.encode())
        assert_same(ours, main, text)
        converted, remapped = converted + 1, remapped + bool(ours.ids)
    assert bool(reasons) == ignore_merges
    assert all("ignore_merges" in reason for reason in reasons)
    assert converted >= 15
    assert remapped >= 5, "the order of the merges was not that of the ids"


def test_refusing_ignore_merges_is_needed():
    """Where it refuses, tiktoken would encode some word otherwise: "ab" is a word, but not a part
    of "abc".
    """
    main = in_words([("b", "c")], ["ab"], ignore_merges=True)
    encoder = theirs(json.dumps(main))
    assert [encoder.encode(word).tokens for word in ("ab", "abd")] == [["ab"], ["a", "b", "d"]]
    with refused("ignore_merges", "'a'", "'b'"):
        convert(main, MAX_TOKEN)
    main["model"]["ignore_merges"] = False
    ours = Tokenizer("x", json.dumps(main).encode())
    assert ours.unmade == 1
    assert ours.decode([main["model"]["vocab"]["ab"]]) == "ab"
    assert_same(ours, json.dumps(main), "ab abd abc aab")


def test_merges_before_ids_in_another_order():
    """As in RoBERTa's files, whose ids are by frequency."""
    main = json.loads(trained("gpt2"))
    texts = list(main["model"]["vocab"])
    random.Random(0).shuffle(texts)
    main["model"]["vocab"] = {text: i for i, text in enumerate(texts)}
    ours = Tokenizer("x", json.dumps(main).encode())
    assert ours.ids
    assert_same(ours, json.dumps(main), mixed_text(50_000))
    text = mixed_text(5000)
    assert sum(ours.token_bytes[i] for i in ours.encode(text)) == len(text.encode())


def test_holes_in_the_vocabulary_are_ids_without_text():
    main = json.loads(trained("gpt2"))
    texts = list(main["model"]["vocab"])
    main["model"]["vocab"] = {text: i + 5 * (i > 1000) for i, text in enumerate(texts)} | {
        "<|endoftext|>": 3000
    }
    main["added_tokens"][0]["id"] = 3000
    ours = Tokenizer("x", json.dumps(main).encode())
    assert ours.size == 3001
    assert (ours.decode([1003]), ours.token_bytes[1003]) == ("", 0)
    assert_same(ours, json.dumps(main), mixed_text(20_000))


def test_a_pattern_that_leaves_text_out_keeps_it():
    """`tokenizers` makes a piece of what nothing matches; tiktoken alone would drop it."""
    main = json.loads(trained("llama3"))
    main["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = r" ?\p{L}+|\s+"
    ours = Tokenizer("x", json.dumps(main).encode())
    text = "a1234 ...\n\n  b!!c "
    assert ours.decode(ours.encode(text)) == text
    assert_same(ours, json.dumps(main), text)
    assert_same(ours, json.dumps(main), mixed_text(50_000))


def test_our_own_export_says_the_same_as_the_rank_file(tmp_path):
    from titanlite.tools.formats.huggingface_tokenizer import read_tokenizer, to_files

    ours = Tokenizer()
    for name, content in to_files(ours, 100).items():
        (tmp_path / name).write_bytes(content)
    again = Tokenizer(tmp_path)
    assert again.encode(mixed_text(10_000)) == ours.encode(mixed_text(10_000))
    assert (again.tokens, again.ranks, again.special) == (ours.tokens, ours.ranks, ours.special)
    assert read_tokenizer(tmp_path) == BUNDLED.read_bytes()


@pytest.mark.parametrize("style", STYLES)
def test_what_a_checkpoint_keeps_is_complete_and_stays_the_same(tmp_path, style):
    first = Tokenizer(
        write(tmp_path / "a", json.loads(trained(style)), eos_token=SPECIAL[style][-1])
    )
    second = Tokenizer(tmp_path / "elsewhere", first.content)
    (tmp_path / "b").mkdir()
    for name, content in first.files.items():
        (tmp_path / "b" / name).write_bytes(content)
    third = Tokenizer(tmp_path / "b" / "tokenizer.json")
    for other in (second, third):
        assert (other.content, other.sha256, other.bos, other.eos) == (
            first.content,
            first.sha256,
            first.bos,
            first.eos,
        )
        assert other.encode("def naïve():") == first.encode("def naïve():")
    assert (
        tokenizers.Tokenizer.from_file(str(tmp_path / "b/tokenizer.json")).get_vocab_size()
        == first.size
    )


def test_the_identity_depends_on_what_encloses_documents(tmp_path):
    plain = Tokenizer(write(tmp_path, trained("qwen")))
    other = Tokenizer(write(tmp_path, trained("qwen"), eos_token="<|im_end|>"))
    write(
        tmp_path,
        trained("qwen"),
        eos_token="<|endoftext|>",
        chat_template="{{ messages }}",
        bos_token=None,
    )
    again = Tokenizer(tmp_path)
    assert plain.sha256 == again.sha256 != other.sha256


TEMPLATE = {
    "type": "TemplateProcessing",
    "single": [
        {"SpecialToken": {"id": "<|im_start|>", "type_id": 0}},
        {"Sequence": {"id": "A", "type_id": 0}},
        {"SpecialToken": {"id": "<|im_end|>", "type_id": 0}},
    ],
    "pair": [],
    "special_tokens": {},
}


@pytest.mark.parametrize(
    ("style", "config", "changes", "expected"),
    [
        ("gpt2", {}, {}, ("<|endoftext|>", "<|endoftext|>")),
        ("qwen", {}, {}, ("<|endoftext|>", "<|endoftext|>")),
        ("qwen", {"bos_token": None, "eos_token": "<|im_end|>"}, {}, ("<|im_end|>", "<|im_end|>")),
        ("qwen", {"bos_token": {"content": "<|im_start|>"}}, {}, ("<|im_start|>", "<|endoftext|>")),
        ("llama3", {}, {}, ("<|begin_of_text|>", "<|end_of_text|>")),
        ("qwen", {}, {"post_processor": TEMPLATE}, ("<|im_start|>", "<|im_end|>")),
        (
            "qwen",
            {"eos_token": "<|endoftext|>"},
            {"post_processor": TEMPLATE},
            ("<|im_start|>", "<|endoftext|>"),
        ),
        (
            "llama3",
            {"eos_token": "<|reserved_special_token_3|>"},
            {},
            ("<|begin_of_text|>", "<|reserved_special_token_3|>"),
        ),
    ],
)
def test_what_encloses_documents(tmp_path, style, config, changes, expected):
    ours = Tokenizer(write(tmp_path, json.loads(trained(style)) | changes, **config))
    assert (ours.decode([ours.bos]), ours.decode([ours.eos])) == expected


def processor(*names: str) -> dict:
    """What puts these special tokens before a text, with <|im_end|> after it."""
    parts = [{"SpecialToken": {"id": name, "type_id": 0}} for name in (*names, "<|im_end|>")]
    single = [*parts[:-1], {"Sequence": {"id": "A", "type_id": 0}}, parts[-1]]
    ids = {"<|endoftext|>": 1500, "<|im_start|>": 1501, "<|im_end|>": 1502}
    return {
        "type": "TemplateProcessing",
        "single": single,
        "pair": [*single, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {
            name: {"id": name, "ids": [ids[name]], "tokens": [name]}
            for name in {*names, "<|im_end|>"}
        },
    }


LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
PROCESSORS = {
    "none": None,
    "bytes": LEVEL,
    "one token": processor("<|endoftext|>"),
    "two tokens, as GLM's": processor("<|endoftext|>", "<|im_start|>"),
    "in a sequence": {"type": "Sequence", "processors": [LEVEL, processor("<|im_start|>")]},
    "RoBERTa's": {
        "type": "RobertaProcessing",
        "sep": ["<|im_end|>", 1502],
        "cls": ["<|im_start|>", 1501],
        "trim_offsets": True,
        "add_prefix_space": False,
    },
}


@pytest.mark.parametrize("post_processor", PROCESSORS.values(), ids=PROCESSORS)
def test_a_prompt_begins_as_the_package_begins_it(tmp_path, post_processor):
    main = json.loads(trained("qwen")) | {"post_processor": post_processor}
    ours = Tokenizer(write(tmp_path, main, bos_token="<|endoftext|>", add_bos_token=True))
    whole = tokenizers.Tokenizer.from_str(json.dumps(main)).encode("def f():").ids
    ends = [ours.special["<|im_end|>"]]
    assert ours.encode_prompt("def f():") + (ends if whole[-1:] == ends else []) == whole
    assert ours.encode_prompt("") == (ours.before or [ours.bos])
    named = "no special token" if not ours.before else ours.decode(ours.before)
    assert ours.prompt_rule().startswith(f"prompts begin with {named}, ")


@pytest.mark.parametrize("ids", [[999_999], [1] * 17])
def test_a_prompt_cannot_begin_with_what_is_no_token(tmp_path, ids):
    template = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}],
        "pair": [],
        "special_tokens": {"<s>": {"id": "<s>", "ids": ids, "tokens": ["<s>"] * len(ids)}},
    }
    main = json.loads(trained("qwen")) | {"post_processor": template}
    with refused("post_processor: ids "):
        Tokenizer(write(tmp_path, main, bos_token="<|endoftext|>"))


def test_encoding_alone_keeps_the_place_of_the_last_merge():
    merges = {(b"a", b"b"): 1, (b"ab", b"c"): 2, (b"b", b"c"): 0, (b"a", b"bc"): 5}
    assert encode_alone(b"abc", merges) == ([b"abc"], 5)
    assert encode_alone(b"ab", merges) == ([b"ab"], 1)
    assert encode_alone(b"abab", merges) == ([b"ab", b"ab"], 1)
    assert encode_alone(b"a", merges) == ([b"a"], -1)
    assert encode_alone(b"ca", merges) == ([b"c", b"a"], -1)


def test_texts_of_tokens():
    everything = bytes(range(256))
    assert to_bytes(to_text(everything)) == everything
    assert to_text(b" \n\xff") == "ĠĊÿ"


def at(*path):
    """A change of the value at a path of keys."""

    def change(main: dict, value) -> None:
        for key in path[:-1]:
            main = main[key]
        main[path[-1]] = value

    return change


def words(**kwargs) -> dict:
    return {
        "type": "Split",
        "pattern": {"Regex": r"\s+"},
        "behavior": "Isolated",
        "invert": False,
    } | kwargs


LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}


@pytest.mark.parametrize(
    ("change", "value", "expected"),
    [
        (at("model", "type"), "Unigram", ("model.type", "Unigram", "BPE")),
        (at("model", "type"), "WordPiece", ("model.type", "WordPiece")),
        (at("model", "dropout"), 0.1, ("model.dropout", "0.1")),
        (at("model", "continuing_subword_prefix"), "##", ("continuing_subword_prefix", "##")),
        (at("model", "end_of_word_suffix"), "</w>", ("end_of_word_suffix", "</w>")),
        (at("model", "vocab", "日本"), 99_999, ("model.vocab", "'日本'", "byte")),
        (at("model", "vocab", "a b"), 99_999, ("model.vocab", "'a b'", "byte")),
        (at("model", "vocab", "zzzzzzzz"), 3, ("model.vocab", "ids")),
        (at("model", "vocab", "zzzzzzzz"), -1, ("model.vocab", "ids")),
        (at("model", "vocab", "zzzzzzzz"), "9", ("model.vocab", "ids")),
        (at("model", "vocab", "zzzzzzzz"), 1 << 40, ("model.vocab", "ids")),
        (at("model", "vocab", "z" * 1025), 99_999, ("a token of more than 1024 bytes",)),
        (at("model", "merges"), [["a", "qqqq"]], ("model.merges[0]", "qqqq")),
        (at("model", "merges"), [["q", "zqz"]], ("model.merges[0]", "zqz")),
        (at("model", "merges"), ["a b c"], ("model.merges[0]", "two tokens")),
        (at("model", "merges"), 7, ("not a tokenizer.json",)),
        (at("model"), None, ("not a tokenizer.json",)),
        (at("normalizer"), {"type": "Lowercase"}, ("normalizer Lowercase", "NFC")),
        (
            at("normalizer"),
            {"type": "Sequence", "normalizers": [{"type": "NFC"}, {"type": "Strip"}]},
            ("Strip", "NFC"),
        ),
        (at("normalizer"), {"type": "NFKC"}, ("normalizer NFKC",)),
        (at("pre_tokenizer"), None, ("pre_tokenizer", "none", "ByteLevel")),
        (at("pre_tokenizer"), {"type": "Metaspace"}, ("pre_tokenizer", "Metaspace", "ByteLevel")),
        (at("pre_tokenizer", "add_prefix_space"), True, ("add_prefix_space",)),
        (at("pre_tokenizer", "use_regex"), False, ("pre_tokenizer", "use_regex")),
        (
            at("pre_tokenizer"),
            {"type": "Sequence", "pretokenizers": [words(), words(), LEVEL]},
            ("Split + Split",),
        ),
        (
            at("pre_tokenizer"),
            {"type": "Sequence", "pretokenizers": [{"type": "Digits"}, LEVEL]},
            ("Digits",),
        ),
        (
            at("pre_tokenizer"),
            {"type": "Sequence", "pretokenizers": [words(behavior="Removed"), LEVEL]},
            ("Removed",),
        ),
        (
            at("pre_tokenizer"),
            {"type": "Sequence", "pretokenizers": [words(pattern={"String": " "}), LEVEL]},
            ("String",),
        ),
        (
            at("pre_tokenizer"),
            {"type": "Sequence", "pretokenizers": [words(pattern={"Regex": r"\w+"}), LEVEL]},
            (r"\w",),
        ),
        (
            at("pre_tokenizer"),
            {"type": "Sequence", "pretokenizers": [words(pattern={"Regex": r"\s+|"}), LEVEL]},
            (r"\s+",),
        ),
        (at("decoder"), {"type": "WordPiece"}, ("decoder WordPiece", "ByteLevel")),
        (at("added_tokens", 0, "id"), 5, ("<|endoftext|>", "id 5")),
        (at("added_tokens", 0, "content"), "<|end|>", ("<|end|>", "id 1500", "1501")),
        (at("added_tokens"), [], ("bos_token or eos_token", "none")),
        (at("added_tokens"), {}, ("bos_token or eos_token",)),
    ],
)
def test_what_tiktoken_cannot_encode_is_refused(tmp_path, change, value, expected):
    main = json.loads(trained("gpt2"))
    # As in GPT-2's own file
    main["model"]["vocab"]["<|endoftext|>"] = main["added_tokens"][0]["id"]
    Tokenizer(write(tmp_path, main))
    change(main, value)
    with refused("tokenizer.json", *expected):
        exactly(write(tmp_path, main))


def test_all_bytes_must_be_tokens(tmp_path):
    main = in_words([], [])
    for text in ("a", "Ġ"):
        del main["model"]["vocab"][text]
    main["added_tokens"][0]["id"] = 254
    main["model"]["vocab"] = {text: 1000 + i for text, i in main["model"]["vocab"].items()}
    with refused("tokenizer.json", "2 of the 256 bytes", "0x20"):
        exactly(write(tmp_path, main))


def test_added_tokens_that_are_ordinary_text_are_refused(tmp_path):
    """`tokenizers` cuts text at them before it merges, as in the files of GPT-NeoX for runs of
    spaces.
    """
    main = json.loads(trained("gpt2"))
    main["added_tokens"].append(
        main["added_tokens"][0] | {"id": 1501, "content": "    ", "special": False}
    )
    with refused("added token '    '", "ordinary text"):
        exactly(write(tmp_path, main))


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("tokenizer.json", b"", ("tokenizer.json", "256 bytes")),
        ("tokenizer.json", b"{", ("tokenizer.json", "Expecting property name")),
        ("tokenizer.json", b'{"a": "\xff"}', ("tokenizer.json", "'utf-8' codec")),
        ("tokenizer.json", b"[1]", ("tokenizer.json",)),
        ("tokenizer.json", b'{"model": {"type": "BPE"}}', ("tokenizer.json", "pre_tokenizer")),
        (
            "tokenizer.json",
            b'{"model": {}, "pre_tokenizer": {"type": "ByteLevel"}}',
            ("tokenizer.json", "it has no "),
        ),
        ("tokenizer.json", b"{" * 100_000, ("tokenizer.json",)),
        (
            "tokenizer.json",
            b'{"model":' * 100_000,
            ("tokenizer.json", "nested more than 64 levels"),
        ),
        ("tokenizer_config.json", b"{", ("tokenizer_config.json",)),
        ("tokenizer_config.json", b"[1]", ("tokenizer_config.json",)),
        ("tokenizer_config.json", b'{"bos_token": "<s>"}', ("bos_token = '<s>'", "added tokens")),
        ("tokenizer_config.json", b'{"eos_token": 7}', ("eos_token",)),
    ],
)
def test_damaged_files_are_refused(tmp_path, name, content, expected):
    write(tmp_path, trained("gpt2"))
    (tmp_path / name).write_bytes(content)
    with refused(*expected):
        Tokenizer(tmp_path)


def test_all_reasons_are_given_at_once(tmp_path):
    main = copy.deepcopy(json.loads(trained("qwen")))
    main["normalizer"], main["decoder"] = {"type": "NFD"}, {"type": "Fuse"}
    with refused("NFD", "Fuse"):
        exactly(write(tmp_path, main))


def test_a_folder_without_a_tokenizer_is_named(tmp_path):
    with refused("data.tokenizer", str(tmp_path), "tokenizer.json"):
        named_tokenizer(str(tmp_path))
    (tmp_path / "tokenizer.model").write_bytes(BUNDLED.read_bytes())
    assert Tokenizer(tmp_path).size == Tokenizer().size


def samples_of_others(folder: Path) -> list[bytes]:
    """Without a normalizer, and with Qwen's NFC."""
    main = tokenizer_of_others()
    return [json.dumps(main | {"normalizer": kind}).encode() for kind in (None, {"type": "NFC"})]


def read_json(folder: Path, data: bytes) -> None:
    (folder / "tokenizer.json").write_bytes(data)
    tokenizer = Tokenizer(folder)
    tokenizer.decode(tokenizer.encode(TEXT))
    Tokenizer(folder, tokenizer.content)
    to_files(tokenizer, 16)


FUZZED = {"data.tokenizer": Reader("text", samples_of_others, read_json)}
