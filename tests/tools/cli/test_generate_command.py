"""The command `titanlite generate`."""

from __future__ import annotations

import sys

import pytest
from model_builder import EXPORTED, make_file
from runs import train_run

from titanlite.tokenizer.tokenizer import BUNDLED, Tokenizer
from titanlite.tools.cli.main import main


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
