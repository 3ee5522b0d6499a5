"""`titanlite import-config`."""

from __future__ import annotations

from pathlib import Path

import pytest
from foreign_configs import DEEPSPEED, GPT3, MEGATRON
from messages import assert_mentions

from titanlite.config.load import load_config
from titanlite.runtime import files
from titanlite.tools.cli.main import main


def test_the_toml_is_printed_and_what_is_open_goes_to_standard_error(tmp_path, capsys):
    (tmp_path / "run.sh").write_text(MEGATRON)
    assert main(["import-config", str(tmp_path / "run.sh")]) == 0
    printed = capsys.readouterr()
    (tmp_path / "ours.toml").write_text(printed.out)
    assert load_config([str(tmp_path / "ours.toml")]).parallel.pp == 2
    assert "pp = 2  # pipeline_model_parallel_size\n" in printed.out
    assert "#   load = ckpt: a run resumes" in printed.out
    assert_mentions(printed.err, "to decide: data.path:", "not taken over: load = ckpt")


def test_it_is_written_to_a_new_file_for_a_number_of_processes(tmp_path, capsys):
    (tmp_path / "ds.json").write_text(DEEPSPEED)
    command = ["import-config", str(tmp_path / "ds.json"), "--out", str(tmp_path / "ours.toml")]
    assert main([*command, "--processes", "4"]) == 0
    assert capsys.readouterr().out == ""
    assert load_config([str(tmp_path / "ours.toml")]).training.global_batch_size == 128
    assert main([*command, "--processes", "4"]) == 2
    assert_mentions(capsys.readouterr().err, "ours.toml", "exists", "a new file")


def test_what_cannot_be_expressed_makes_no_file(tmp_path, capsys):
    (tmp_path / "run.sh").write_text(GPT3)
    out = tmp_path / "ours.toml"
    assert main(["import-config", str(tmp_path / "run.sh"), "--out", str(out)]) == 2
    printed = capsys.readouterr()
    assert_mentions(
        printed.err, "run.sh: default of swiglu = False", "run.sh: default of normalization"
    )
    assert printed.out == ""
    assert not out.exists()


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["missing.json"], ["missing.json", "No such file"]),
        ([], ["file"]),
        (["a.json", "--formt=x"], ["--formt=x", "did you mean --format?"]),
        (["a.json", "--processes=0"], ["--processes", "at least 1"]),
    ],
)
def test_wrong_arguments(arguments, parts, capsys):
    assert main(["import-config", *arguments]) == 2
    assert_mentions(capsys.readouterr().err, *parts)


def test_a_full_disk_leaves_no_file(tmp_path, capsys, monkeypatch):
    (tmp_path / "ds.json").write_text(DEEPSPEED)
    command = ["import-config", str(tmp_path / "ds.json"), "--out", str(tmp_path / "ours.toml")]

    def write_synced(path: Path, content: bytes) -> None:
        path.write_bytes(content[:10])
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(files, "write_synced", write_synced)
        assert main([*command, "--processes", "4"]) == 2
    assert_mentions(capsys.readouterr().err, "ours.toml", "No space left")
    assert [path.name for path in tmp_path.iterdir()] == ["ds.json"]
    assert main([*command, "--processes", "4"]) == 0
