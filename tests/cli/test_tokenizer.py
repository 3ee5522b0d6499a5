"""The command `titanlite tokenizer`."""

from __future__ import annotations

from runs import train_run

from titanlite.cli.main import main


def test_training_a_tokenizer_and_training_with_it(pool, arguments, tmp_path, text_file, capsys):
    path = tmp_path / "own.model"
    assert main(["tokenizer", "train", str(path), "--num-tokens=300", f"--data-path={text_file}"]) == 0
    assert "300 tokens" in capsys.readouterr().out
    assert pool.run(1, train_run, [*arguments, f"--data.tokenizer={path}", "--training.steps=1"]) == [0]
