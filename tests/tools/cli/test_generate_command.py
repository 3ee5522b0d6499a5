"""The command `titanlite generate`."""

from __future__ import annotations

import pytest
from runs import train_run

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


@pytest.mark.parametrize(
    "option", ["--temperature=-1", "--top-k=x", "--max-new-tokens=-1", "--device=tpu"]
)
def test_bad_options_of_generate(option, capsys):
    with pytest.raises(SystemExit) as caught:
        main(["generate", "x", option])
    assert caught.value.code == 2
    assert "Traceback" not in capsys.readouterr().err
