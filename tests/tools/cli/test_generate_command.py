"""The command `titanlite generate`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from model_builder import EXPORTED, make_file
from runs import train_run

from titanlite.checkpoint.folders import list_steps
from titanlite.tokenizer.tokenizer import BUNDLED, Tokenizer
from titanlite.tools.cli.main import main
from titanlite.tools.cli.text_stream import text_stream
from titanlite.tools.formats.convert import Options, convert


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


def test_what_a_model_writes_does_not_control_the_terminal(tmp_path, capsys, monkeypatch):
    """A pipe or a file gets it as it is."""
    written = "\x1b[2J\x9b1A\ta\r\n日\u202e"
    make_file(tmp_path / "x.pt", EXPORTED["debug"])
    tokens = Tokenizer().encode(written)
    monkeypatch.setattr(
        "titanlite.model.generate.generate", lambda *arguments, **options: iter(tokens)
    )
    options = [f"--tokenizer={BUNDLED}", "--prompt=a", "--device=cpu", "--max-new-tokens=9"]
    assert main(["generate", str(tmp_path / "x.pt"), *options]) == 0
    assert capsys.readouterr().out.endswith(f"{written}\n")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert main(["generate", str(tmp_path / "x.pt"), *options]) == 0
    shown = capsys.readouterr().out
    assert shown.endswith("\\x1b[2J\\x9b1A\ta\\r\n日\\u202e\n")


def test_bad_options_of_generate(capsys):
    for option in ("--temperature=-1", "--top-k=x", "--max-new-tokens=-1", "--device=tpu"):
        assert main(["generate", "x", option]) == 2
        assert capsys.readouterr().err.startswith(f"error: argument {option.partition('=')[0]}: ")
    assert main(["generate", "x", "--prompt=a", "--chat=b"]) == 2
    assert "not allowed with" in capsys.readouterr().err


def test_a_model_without_a_template_cannot_be_asked(tmp_path, capsys):
    make_file(tmp_path / "x.pt", EXPORTED["debug"])
    options = [f"--tokenizer={BUNDLED}", "--chat=a", "--device=cpu", "--max-new-tokens=9"]
    assert main(["generate", str(tmp_path / "x.pt"), *options]) == 2
    assert "has no chat template" in capsys.readouterr().err


@pytest.mark.slow
def test_a_model_learns_to_answer_and_answers(pool, options, text_file, tmp_path, capsys):
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"{i}?"},
                {"role": "assistant", "content": "yes"},
            ]
        }
        for i in range(60)
    ]
    path = tmp_path / "chat.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = tmp_path / "data"
    assert main(["prepare", str(path), "--chat", "--out", str(data)]) == 0
    config = tmp_path / "debug.toml"  # the template is not that of the first source, which has none
    debug = Path(__file__).parents[3] / "train_configs/debug.toml"
    sources = [f"[[data.sources]]\npath = '{text_file}'\nweight = 0.01"]
    sources.append(f"[[data.sources]]\npath = '{data}'\nweight = 1")
    config.write_text("\n".join([f"base = '{debug}'", *sources]))
    run = [word for word in options[1:] if not word.startswith("--data.path")]
    run = [str(config), *run, f"--run.folder={tmp_path}", "--optimizer.lr=1e-2"]
    run += [
        "--data.packing=best_fit",
        "--data.document_mask",
        "--training.steps=40",
        "--validation.freq=0",
    ]
    assert pool.run(2, train_run, run) == [0, 0]
    folder = tmp_path / "debug"
    (step,) = list_steps(folder / "checkpoints")
    saved = folder / f"checkpoints/step-{step}/chat_template.jinja"
    assert "Question:" in saved.read_text()
    assert f" generate {folder} --chat 'a question'\n" in (folder / "log.txt").read_text()
    capsys.readouterr()
    assert main(["generate", str(folder), "--chat=7?", "--temperature=0", "--device=cpu"]) == 0
    output = capsys.readouterr()
    assert output.out.strip() == "yes"
    assert "its chat template" in output.err

    # The template goes into other formats
    convert(folder, tmp_path / "hf", Options("hf", verify=False))
    assert (tmp_path / "hf/chat_template.jinja").read_text() == saved.read_text()


class Bytes:
    """One id for each byte. As the byte fallback of SentencePiece does, it decodes bytes that are
    not UTF-8 as a whole to nothing but U+FFFD.
    """

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: list[int]) -> str:
        try:
            return bytes(ids).decode()
        except UnicodeDecodeError:
            return "\ufffd" * len(ids)


@pytest.mark.parametrize("tokenizer", [Tokenizer(), Bytes()])
def test_characters_are_printed_when_they_are_complete(tokenizer, monkeypatch):
    text = "a \U0001f642 b" + "\U0001f642" * 3 + "\u20ac" * 30
    before = tokenizer.encode("before \u20ac\u20ac\u20ac")
    longest = 0
    decode = tokenizer.decode

    def noted(ids):
        nonlocal longest
        longest = max(longest, len(ids))
        return decode(ids)

    monkeypatch.setattr(tokenizer, "decode", noted)
    parts = list(text_stream(tokenizer.encode(text), tokenizer, before))
    assert "".join(parts) == text
    assert not any("\ufffd" in part for part in parts)
    assert longest < 30  # most in the prompt
