"""The command `titanlite tokenizer`."""

from __future__ import annotations

import io
import sys

import pytest
from foreign_tokenizers import trained, write
from messages import assert_mentions
from runs import train_run

from titanlite.tokenizer.tokenizer import Tokenizer
from titanlite.tools.cli.main import main

TEXT = "naïve 漢字 🦙\n\n  def f(x):\r\n"


def test_training_a_tokenizer_and_training_with_it(pool, arguments, tmp_path, text_file, capsys):
    path = tmp_path / "own.model"
    assert (
        main(["tokenizer", "train", str(path), "--num-tokens=300", f"--data-path={text_file}"]) == 0
    )
    assert "300 tokens" in capsys.readouterr().out
    assert pool.run(
        1, train_run, [*arguments, f"--data.tokenizer={path}", "--training.steps=1"]
    ) == [0]


def test_fast_training_writes_the_same_format(tmp_path, text_file, capsys):
    path = tmp_path / "fast.model"
    assert (
        main(
            [
                "tokenizer",
                "train",
                str(path),
                "--fast",
                "--num-tokens=300",
                f"--data-path={text_file}",
            ]
        )
        == 0
    )
    assert "300 tokens" in capsys.readouterr().out
    assert Tokenizer(path).size == 316


def test_fast_training_without_the_package_is_refused(tmp_path, text_file, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    assert (
        main(["tokenizer", "train", str(tmp_path / "x"), "--fast", f"--data-path={text_file}"]) == 2
    )
    assert_mentions(capsys.readouterr().err, "--fast", "tokenizers")
    assert not (tmp_path / "x").exists()


def test_info_of_a_rank_file(tmp_path, capsys):
    (tmp_path / "text").write_text("def add(x):\n    return x\n" * 100)
    assert main(["tokenizer", "info", f"--file={tmp_path / 'text'}"]) == 0
    shown = capsys.readouterr().out
    assert_mentions(
        shown,
        "rank file",
        "4,112",
        "4,096",
        "<|begin_of_text|> (4096)",
        r"\p{N}{1,3}",
        "2,500 bytes",
    )
    count = len(Tokenizer().encode((tmp_path / "text").read_text()))
    assert f"{count:,} tokens, {2500 / count:.3f} bytes per token" in shown


def test_info_of_a_tokenizer_json(tmp_path, capsys):
    write(tmp_path, trained("qwen"), eos_token="<|im_end|>", bos_token=None)
    assert main(["tokenizer", "info", str(tmp_path)]) == 0
    assert_mentions(
        capsys.readouterr().out,
        "tokenizer.json",
        "NFC",
        "<tool_call>",
        "end with <|im_end|> (1502)",
    )


@pytest.mark.slow
@pytest.mark.parametrize("style", ["", "gpt2"])
def test_encoding_and_decoding(tmp_path, style, capsys, monkeypatch):
    path = str(write(tmp_path / "t", trained(style))) if style else ""
    (tmp_path / "text").write_bytes(TEXT.encode())
    expected = Tokenizer(path).encode(TEXT)
    shown = []
    for arguments in ([TEXT], [f"--file={tmp_path / 'text'}"], []):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(TEXT.encode())))
        assert main(["tokenizer", "encode", path, *arguments]) == 0
        shown.append(capsys.readouterr().out)
    assert shown == [" ".join(map(str, expected)) + "\n"] * 3
    for arguments in (shown[0].split(), []):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(shown[0].encode())))
        assert main(["tokenizer", "decode", path, *arguments]) == 0
        assert capsys.readouterr().out == TEXT


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["info", "no/such"], ("no/such", "No such file", "tokenizer.json")),
        (
            ["info", "tests"],
            ("tests: no tokenizer.json", "no tokenizer.json", "tokenizer.model", "folder"),
        ),
        (["info", "", "--file=no/such"], ("--file no/such", "No such file")),
        (["info", "pyproject.toml"], ("pyproject.toml:1", "base64 rank")),
        (["encode", "", "text", "--file=README.md"], ("--file README.md", "text")),
        (["encode", "", "--file=/dev/null/x"], ("--file /dev/null/x",)),
        (["decode", "", "4112"], ("'4112'", "4111")),
        (["decode", "", "12", "x"], ("'x'", "integers")),
        (["decode", "", "1.5"], ("'1.5'", "integers")),
        (["decode", "", "²"], ("'²'", "integers")),
        (["decode", "", "9" * 5000], ("integers",)),
    ],
)
def test_mistakes_are_one_line(arguments, expected, capsys):
    assert main(["tokenizer", *arguments]) == 2
    error = capsys.readouterr().err
    assert_mentions(error, *expected)
    assert error.count("\n") == 1


def test_a_text_that_is_not_utf8_is_refused(tmp_path, capsys):
    (tmp_path / "latin").write_bytes("naïve".encode("latin-1"))
    assert main(["tokenizer", "encode", "", f"--file={tmp_path / 'latin'}"]) == 2
    assert_mentions(capsys.readouterr().err, "latin", "UTF-8")


def test_a_trained_tokenizer_for_transformers(tmp_path, text_file, capsys):
    """The folder of --json encodes as the rank file."""
    output = tmp_path / "my.model"
    command = ["tokenizer", "train", str(output), "--data-path", str(text_file)]
    command += ["--num-tokens", "300", "--json", str(tmp_path / "hf")]
    assert main(command) == 0
    assert Tokenizer(tmp_path / "hf").encode("def add_7") == Tokenizer(output).encode("def add_7")
    output.unlink()
    assert main(command) == 2
    assert "--json" in capsys.readouterr().err
