"""The command `titanlite generate`."""

from __future__ import annotations

import dataclasses
import json
import sys

import pytest
from model_builder import EXPORTED, make_file
from runs import train_run

from titanlite.model.flavors import RopeScaling
from titanlite.tokenizer.tokenizer import BUNDLED, Tokenizer
from titanlite.tools.cli.main import main
from titanlite.tools.formats import load_weights

PROMPTS = [
    "def add_",
    "x",
    "class Test:\n    def test_it(self):\n        assert",
    "import",
    "1 + 1 =",
]


def test_generate_from_a_run(pool, arguments, tmp_path, capsys):
    assert pool.run(2, train_run, [*arguments, "--training.steps=3"]) == [0, 0]
    command = [
        "generate",
        str(tmp_path / "debug"),
        "--prompt",
        "def add_",
        "--max-new-tokens",
        "90",
        "--device",
        "cpu",
    ]
    texts = []
    for seed in ("1", "1", "2"):
        assert main([*command, "--seed", seed]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != texts[2]
    assert texts[0].startswith("def add_")
    assert (
        main(["generate", str(tmp_path / "debug/checkpoints/step-3"), "--max-new-tokens", "1"]) == 0
    )


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_what_a_model_writes_does_not_control_the_terminal(command, tmp_path, capsys, monkeypatch):
    """A pipe or a file gets it as it is."""
    written = "\x1b[2J\x9b1A\ta\r\n日\u202e"
    make_file(tmp_path / "x.pt", EXPORTED["debug"])
    tokens = Tokenizer().encode(written)
    module = "titanlite.model.generate" if command == "generate" else "titanlite.tools.chat.session"
    monkeypatch.setattr(f"{module}.generate", lambda *arguments, **options: iter(tokens))
    options = [f"--tokenizer={BUNDLED}", "--prompt=a", "--device=cpu", "--max-new-tokens=9"]
    assert main([command, str(tmp_path / "x.pt"), *options]) == 0
    assert capsys.readouterr().out.endswith(f"{written}\n")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert main([command, str(tmp_path / "x.pt"), *options]) == 0
    shown = capsys.readouterr().out
    assert shown.endswith("\\x1b[2J\\x9b1A\ta\\r\n日\\u202e\n")


def test_bad_options_of_generate(capsys):
    for option in ("--temperature=-1", "--top-k=x", "--max-new-tokens=-1", "--device=tpu"):
        assert main(["generate", "x", option]) == 2
        assert capsys.readouterr().err.startswith(f"error: argument {option.partition('=')[0]}: ")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A small model of an odd shape with a tokenizer, in one file."""
    path = tmp_path_factory.mktemp("model") / "model.pt"
    scaling = RopeScaling(4.0, original_context=16, kind="yarn")
    make_file(path, dataclasses.replace(EXPORTED["debug"], qkv_bias=True, rope_scaling=scaling))
    return path


def generated(capsys, checkpoint, *arguments: str) -> str:
    assert main(["generate", str(checkpoint), "--device", "cpu", *arguments]) == 0
    return capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("temperature", ["0", "0.9"])
def test_a_file_gives_each_prompt_the_text_that_it_has_alone(
    checkpoint, tmp_path, capsys, temperature
):
    """With the seed of its row, in batches of any size, and in the order of the file."""
    rows = [{"id": i, "prompt": prompt} for i, prompt in enumerate(PROMPTS)]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = ["--max-new-tokens", "12", "--temperature", temperature]
    expected = []
    for i, prompt in enumerate(PROMPTS):
        text = generated(capsys, checkpoint, "--prompt", prompt, "--seed", str(3 + i), *options)
        assert text.startswith(prompt)
        assert text.endswith("\n")
        expected.append({"id": i, "prompt": prompt, "text": text[len(prompt) : -1]})
    assert len({row["text"] for row in expected}) == len(PROMPTS)
    options += ["--prompts", str(path), "--seed", "3"]
    for batch in ("1", "2", "8"):
        out = tmp_path / f"{batch}.jsonl"
        assert generated(capsys, checkpoint, *options, "--batch", batch, "--out", str(out)) == ""
        assert [json.loads(line) for line in out.read_text().splitlines()] == expected
    assert generated(capsys, checkpoint, *options) == out.read_text()


def test_each_line_of_a_text_file_is_a_prompt(checkpoint, tmp_path, capsys):
    path = tmp_path / "prompts.txt"
    path.write_text("one\n\ntwo {\n")
    lines = generated(capsys, checkpoint, "--prompts", str(path), "--max-new-tokens=3").splitlines()
    assert [list(json.loads(line)) for line in lines] == [["prompt", "text"]] * 2
    assert [json.loads(line)["prompt"] for line in lines] == ["one", "two {"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"prompt": "a"}\n{"prompt": "\xff"}\n', ":2: byte 13 of the line is not UTF-8"),
        (b'{"text": "a"}\n', ":1: has a `text`"),
        (b'{"id": 1}\n', ":1: has no `prompt`"),
        (json.dumps({"prompt": "word " * 600}).encode(), ":1: the prompt has "),
    ],
)
def test_bad_rows_are_an_error_before_the_model_is_loaded(
    checkpoint, tmp_path, capsys, monkeypatch, content, message
):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(content)
    monkeypatch.setattr(load_weights, "load_model", None)
    assert main(["generate", str(checkpoint), "--prompts", str(path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {path}{message}")


@pytest.mark.parametrize("option", ["--out=x.jsonl", "--batch=3"])
def test_options_of_a_file_are_refused_without_one(option, capsys):
    assert main(["generate", "x", option]) == 2
    assert "is for --prompts FILE" in capsys.readouterr().err
