"""Runs with the tokenizers of others: trained, resumed, sampled from, and exported to other
software and back.
"""

from __future__ import annotations

import dataclasses
import json
import logging

import pytest
from foreign_tokenizers import mixed_text, theirs, trained, write
from messages import refused
from model_builder import EXPORTED, make_file
from runs import curve, train_run

from titanlite.config.load import load_config
from titanlite.tokenizer.tokenizer import BUNDLED, Tokenizer
from titanlite.tools.cli.main import main
from titanlite.tools.formats.adopt import adopt_checkpoint
from titanlite.tools.formats.convert import Options, convert, load_full_state
from titanlite.tools.formats.huggingface_tokenizer import (
    content_of,
    files_of,
    merges_of,
    read_tokenizer,
    to_files,
)
from titanlite.tools.formats.load_weights import read_weights

STYLES = ("gpt2", "qwen")
TEXT = mixed_text(3000)


def test_merges_are_listed_by_the_rank_of_what_they_make():
    assert merges_of({b"a": 0, b"b": 1, b"ab": 2, b"abb": 3, b"bb": 4}) == [
        *((b"a", b"b"), (b"a", b"bb"), (b"ab", b"b"), (b"b", b"b"))
    ]


def quiet(text: str) -> None:
    pass


@pytest.fixture(scope="module")
def run_of(pool, options, tmp_path_factory):
    """style -> the folders of a tokenizer and of a run of two steps with it."""
    found = {}

    def run(style: str):
        if style not in found:
            folder = tmp_path_factory.mktemp(style)
            tokenizer = write(folder / "tokenizer", trained(style))
            more = [f"--run.folder={folder}", f"--data.tokenizer={tokenizer}", "--training.steps=2"]
            assert pool.run(
                1,
                train_run,
                [*options, *more, "--validation.prompts=def", "--validation.prompt_tokens=4"],
            ) == [0]
            found[style] = tokenizer, folder / "debug", [*options, *more]
        return found[style]

    return run


@pytest.mark.slow
@pytest.mark.parametrize("style", STYLES)
def test_a_checkpoint_has_the_tokenizer_and_a_run_resumes(pool, run_of, style, capsys):
    tokenizer, run, arguments = run_of(style)
    step = run / "checkpoints/step-2"
    again = Tokenizer(step)
    assert again.content == Tokenizer(tokenizer).content == load_full_state(run).about.tokenizer
    assert json.loads((step / "model.json").read_text())["vocab_size"] == again.size
    assert main(["generate", str(run), "--prompt", "naïve", "--max-new-tokens=3"]) == 0
    assert capsys.readouterr().out.startswith("naïve")
    assert pool.run(1, train_run, [*arguments, "--training.steps=3"]) == [0]
    assert list(curve(run)) == [1, 2, 3]


@pytest.mark.slow
@pytest.mark.parametrize("style", STYLES)
def test_exports_to_hugging_face_and_back(run_of, style, tmp_path):
    transformers = pytest.importorskip("transformers")
    tokenizer, run, _ = run_of(style)
    ours = Tokenizer(tokenizer)
    convert(run, tmp_path / "hf", Options("hf"), log=quiet)
    found = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert (
        found(TEXT, add_special_tokens=False)["input_ids"]
        == theirs(trained(style)).encode(TEXT).ids
        == ours.encode(TEXT)
    )
    assert (found.bos_token_id, found.eos_token_id) == (ours.bos, ours.eos)
    config = json.loads((tmp_path / "hf/config.json").read_text())
    assert (config["bos_token_id"], config["eos_token_id"]) == (ours.bos, ours.eos)
    for target, to in (
        ("a.pt", ""),
        ("step", "titanlite"),
        ("dcp", "dcp"),
        ("safetensors", "safetensors"),
    ):
        convert(tmp_path / "hf", tmp_path / target, Options(to), log=quiet)
        again = load_full_state(tmp_path / target).about.tokenizer
        assert again is not None
        assert Tokenizer("x", again).content == ours.content


def test_biases_with_a_tokenizer_that_is_not_qwens(tmp_path, caplog):
    """transformers then cuts text otherwise, unless its general class reads the tokenizer."""
    transformers = pytest.importorskip("transformers")
    config = dataclasses.replace(EXPORTED["debug"], qkv_bias=True)
    make_file(tmp_path / "a.pt", config)
    with caplog.at_level(logging.WARNING):
        convert(tmp_path / "a.pt", tmp_path / "hf", Options("hf"), log=quiet)
    assert "PreTrainedTokenizerFast.from_pretrained" in caplog.text
    text = "1234 na\u0069\u0308ve"
    ours = Tokenizer()
    expected = [ours.bos, *ours.encode(text)]
    general = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path / "hf")
    assert general(text)["input_ids"] == expected
    chosen = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert chosen(text)["input_ids"] != expected
    assert Tokenizer("x", load_full_state(tmp_path / "hf").about.tokenizer).content == ours.content


def test_a_folder_with_vocab_and_merges_alone_is_left_to_transformers(tmp_path, caplog):
    make_file(tmp_path / "a.pt", EXPORTED["debug"])
    convert(tmp_path / "a.pt", tmp_path / "hf", Options("hf"), log=quiet)
    (tmp_path / "hf/tokenizer.json").rename(tmp_path / "hf/vocab.json")
    command = f"AutoTokenizer.from_pretrained('{tmp_path / 'hf'}').save_pretrained('OUT')"
    for path in (tmp_path / "hf", tmp_path / "hf/vocab.json"):
        with refused("vocab.json: is not read without a tokenizer.json", command):
            Tokenizer(path)
    assert load_full_state(tmp_path / "hf").about.tokenizer is None
    assert command in caplog.text
    options = ["debug", "--model.flavor=from_checkpoint"]
    config = load_config([*options, f"--checkpoint.initial_load={tmp_path / 'hf'}"])
    with refused(command):
        Tokenizer(adopt_checkpoint(config).data.tokenizer)


def test_weights_of_another_encoding_are_warned_of(run_of, tmp_path, caplog):
    """Other special tokens are no other encoding."""
    _, run, _ = run_of("gpt2")
    convert(run, tmp_path / "a.pt", log=quiet)
    full = load_full_state(run)
    state = {name: full[name].clone() for name in full}
    other_names = json.loads(trained("gpt2"))
    other_names["added_tokens"][0]["content"] = "<|end|>"
    for content, warned in (
        (full.about.tokenizer, False),
        (
            Tokenizer(
                "x", json.dumps(other_names).encode() + b'\0{"eos_token": "<|end|>"}'
            ).content,
            False,
        ),
        (BUNDLED.read_bytes(), True),
        (b"damaged", True),
    ):
        caplog.clear()
        read_weights(tmp_path / "a.pt", state, full.model, content)
        assert ("another tokenizer" in caplog.text) == warned


def test_files_and_content():
    rank = Tokenizer()
    assert content_of(files_of(rank.content)) == rank.content
    assert files_of(rank.content) == rank.files == {"tokenizer.model": BUNDLED.read_bytes()}
    qwen = Tokenizer("x", trained("qwen").encode())
    assert content_of(files_of(qwen.content)) == qwen.content
    assert files_of(qwen.content) == qwen.files
    assert content_of({}) is None


def test_files_for_hugging_face(tmp_path):
    """A file that was read is written as it was, whatever else is in it."""
    main = json.loads(trained("qwen")) | {"truncation": None, "padding": None}
    ours = Tokenizer("x", json.dumps(main).encode())
    files = to_files(ours, 77)
    assert json.loads(files["tokenizer.json"]) == main
    config = json.loads(files["tokenizer_config.json"])
    assert (config["model_max_length"], config["eos_token"]) == (77, "<|endoftext|>")
    assert read_tokenizer(tmp_path) is None
