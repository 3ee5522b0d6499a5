"""The command `titanlite chat`."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from runs import train_run

from titanlite.checkpoint.folders import list_steps
from titanlite.tools.cli.main import main
from titanlite.tools.formats.convert import Options, convert

QUESTIONS = 60


class Typed(io.StringIO):
    """Standard input of a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture(scope="module")
def conversations(tmp_path_factory):
    """Prepared conversations with one answer, which a model learns soon."""
    folder = tmp_path_factory.mktemp("conversations")
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"{i}?"},
                {"role": "assistant", "content": "yes"},
            ]
        }
        for i in range(QUESTIONS)
    ]
    path = folder / "chat.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["prepare", str(path), "--chat", "--out", str(folder / "data")]) == 0
    return folder / "data"


@pytest.mark.slow
def test_a_model_learns_to_answer_and_answers(
    pool, options, conversations, text_file, tmp_path, capsys, monkeypatch
):
    config = tmp_path / "debug.toml"  # the template is not that of the first source, which has none
    debug = Path(__file__).parents[3] / "train_configs/debug.toml"
    sources = [f"[[data.sources]]\npath = '{text_file}'\nweight = 0.01"]
    sources.append(f"[[data.sources]]\npath = '{conversations}'\nweight = 1")
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
    (step,) = list_steps(tmp_path / "debug/checkpoints")
    saved = tmp_path / f"debug/checkpoints/step-{step}/chat_template.jinja"
    assert "Question:" in saved.read_text()
    assert f" chat {tmp_path}/debug\n" in (tmp_path / "debug/log.txt").read_text()
    greedy = ["--temperature", "0", "--device", "cpu"]
    command = ["chat", str(tmp_path / "debug"), *greedy]
    assert main([*command, "--prompt", "7?"]) == 0
    output = capsys.readouterr()
    assert output.out.strip() == "yes"
    assert "its chat template" in output.err
    monkeypatch.setattr("sys.stdin", io.StringIO("1?\n\n/new\n2?\n/exit\n3?\n"))
    assert main([*command, "--system", "Answer."]) == 0
    assert capsys.readouterr().out.split() == ["yes", "yes"]

    # The template goes into other formats; an output with it can be replaced
    for _ in range(2):
        convert(tmp_path / "debug", tmp_path / "hf", Options("hf", force=True, verify=False))
    assert (tmp_path / "hf/chat_template.jinja").read_text() == saved.read_text()

    monkeypatch.setattr("sys.stdin", io.StringIO("1?\n2?\n3?\n4?\n5?\n6?\n7?\n8?\n"))
    assert main(command) == 0
    assert "messages no longer fit" in capsys.readouterr().err

    # What cannot be answered ends the command only where no person is there to go on
    lines = f"{'word ' * 100}\n2?\n"
    for source, code, answers in ((io.StringIO, 2, []), (Typed, 0, ["yes"])):
        monkeypatch.setattr("sys.stdin", source(lines))
        assert main(command) == code
        shown = capsys.readouterr()
        assert shown.out.replace(">", "").split() == answers
        assert "error: the message has" in shown.err

    template = tmp_path / "broken.jinja"
    template.write_text("{{ raise_exception('no such role') }}")
    assert main([*command, "--prompt", "x", "--template", str(template)]) == 2
    assert "no such role" in capsys.readouterr().err


def test_bad_options_of_chat(capsys):
    assert main(["chat", "x", "--temperature=-1"]) == 2
    assert capsys.readouterr().err == "error: argument --temperature: -1: expected at least 0\n"
    assert main(["chat", "x", "--promt=hi"]) == 2
    assert "did you mean --prompt?" in capsys.readouterr().err
    assert main(["chat", "/nowhere/at/all"]) == 2
    assert "no such file" in capsys.readouterr().err
