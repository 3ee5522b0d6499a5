"""`titanlite eject`: what it copies runs by the commands it prints, and it overwrites nothing."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from page_commands import printed_next
from runs import rows

from titanlite.tools.cli.main import main

ROOT = Path(__file__).resolve().parents[3]


def run_shell(command: str) -> str:
    result = subprocess.run(
        command, shell=True, capture_output=True, text=True, env={**os.environ, "LOG_RANK": "0"}
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout + result.stderr


@pytest.mark.slow
def test_the_copy_trains_by_the_printed_command(tmp_path, capsys, monkeypatch, text_file):
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.chdir(tmp_path)
    assert main(["eject", "my project"]) == 0
    output = capsys.readouterr().out
    copied = {
        str(path.relative_to(tmp_path / "my project"))
        for path in Path("my project").resolve().rglob("*.*")
    }
    assert copied == {
        "train.py",
        *(f"train_configs/{path.name}" for path in (ROOT / "train_configs").glob("*.toml")),
    }
    assert f"copied train.py and {len(copied) - 1} configs to my project" in output
    config = Path("my project/train_configs/debug.toml")
    config.write_text(config.read_text().replace("seq_len = 128", "seq_len = 32"))
    _, enter, single, several = output.splitlines()
    assert single.strip().endswith("train.py train_configs/debug.toml")
    assert "--nproc-per-node 2 train.py" in several
    options = "--training.steps=2 --metrics.log_freq=1 --validation.freq=0 --validation.prompts="
    output = run_shell(f"{enter} && {single} --data.path={text_file} {options}")
    assert [row["step"] for row in rows(Path("my project/outputs/debug"))] == [1, 2]
    assert "8 sequences of 32 per step" in output
    run_shell(f"{enter} && {printed_next(output)[1]}")
    assert [row["step"] for row in rows(Path("my project/outputs/debug"))] == [1, 2, 3, 4]


@pytest.mark.parametrize("name", ["train.py", "train_configs/llama3_8b.toml"])
def test_an_existing_file_is_kept(name, tmp_path, capsys):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("mine")
    assert main(["eject", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert (
        error
        == f"error: {tmp_path / name} exists already; delete it first or name another folder\n"
    )
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [tmp_path / name]
    assert (tmp_path / name).read_text() == "mine"


def test_a_second_time_is_refused_in_one_line(tmp_path, capsys):
    assert main(["eject", str(tmp_path)]) == 0
    assert main(["eject", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    configs = len(list((ROOT / "train_configs").glob("*.toml")))
    assert f"train.py (and {configs} more) exists already" in error
    assert error.count("\n") == 1


def test_a_file_in_place_of_the_folder(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert main(["eject", str(tmp_path / "file")]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {tmp_path / 'file'}: ")
    assert error.endswith("expected a folder to write to\n")
