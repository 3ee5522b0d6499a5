"""`titanlite checkpoint`: what people see of a run's checkpoints, and what prune leaves."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as stock
from messages import assert_mentions, run_refused
from runs import train_run

from titanlite.checkpoint.folders import list_steps, sweep
from titanlite.checkpoint.manifest import SEAL
from titanlite.checkpoint.retention import delete_step
from titanlite.distributed.run_folder import lock
from titanlite.tools.cli.checkpoint_command import _config_differences
from titanlite.tools.cli.main import main
from titanlite.tools.formats.full_state import BLOCK, FullTensor


@pytest.fixture
def run_folder(pool, arguments, tmp_path) -> Path:
    """A run of two processes with checkpoints 1 to 4."""
    run = [
        *arguments,
        "--checkpoint.freq=1",
        "--checkpoint.keep=0",
        "--training.steps=4",
        "--validation.freq=1",
    ]
    assert pool.run(2, train_run, run) == [0, 0]
    return tmp_path / "debug"


@pytest.mark.slow
def test_list_tells_what_is_there(run_folder, capsys):
    folder = run_folder / "checkpoints"
    os.truncate(folder / "step-2/model-00001.safetensors", 100)
    (folder / "step-3/manifest.json").unlink()
    (folder / "step-9.tmp-0011").mkdir()
    (folder / "step-7.damaged").mkdir()
    assert main(["checkpoint", "list", str(run_folder)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == [
        "step",
        "saved",
        "(UTC)",
        "GB",
        "layout",
        "validation",
        "loss",
        "state",
    ]
    assert "dp_shard=2" in lines[1]
    assert lines[1].endswith("complete")
    assert_mentions(lines[2], "model-00001.safetensors", "100 bytes")
    assert_mentions(lines[3], "damaged", "manifest.json")
    assert lines[4].endswith("complete")
    assert lines[5].split() == ["step-7.damaged", "renamed"]
    assert lines[6].split() == ["step-9.tmp-0011", "incomplete"]


def test_verify_reads_everything(run_folder, capsys):
    assert main(["checkpoint", "verify", str(run_folder)]) == 0
    assert capsys.readouterr().out.count("complete") == 4
    shard = run_folder / "checkpoints/step-3/training-00000.safetensors"
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    assert main(["checkpoint", "verify", str(run_folder)]) == 1
    out = capsys.readouterr().out
    assert out.count("complete") == 3
    assert_mentions(out, f"damaged: {shard}", "SHA-256")
    assert main(["checkpoint", "verify", str(shard.parent)]) == 1
    assert main(["checkpoint", "verify", str(run_folder / "checkpoints/step-4")]) == 0
    assert main(["checkpoint", "verify", str(run_folder / "nothing")]) == 2
    assert_mentions(capsys.readouterr().err, str(run_folder / "nothing"), "no checkpoint")
    assert main(["checkpoint", "verify", str(run_folder / "checkpoints/step-999")]) == 2
    assert_mentions(capsys.readouterr().err, "step-999: no such folder", "1, 2, 3, 4")
    # The manifest of another version, before a damaged step and an intact one
    manifest = run_folder / "checkpoints/step-1/manifest.json"
    body = manifest.read_text().rpartition(SEAL)[0].replace('"format": 3', '"format": 4')
    manifest.write_text(body + SEAL + hashlib.sha256(body.encode()).hexdigest() + '"}\n')
    assert main(["checkpoint", "verify", str(run_folder)]) == 1
    out = capsys.readouterr().out
    assert_mentions(out, f"not verified: {manifest}: format 4", f"damaged: {shard}")
    assert out.count("complete") == 2
    assert main(["checkpoint", "verify", str(manifest.parent)]) == 2


def test_show_and_diff(run_folder, capsys):
    assert main(["checkpoint", "show", str(run_folder)]) == 0
    out = capsys.readouterr().out
    assert "step 4, saved " in out
    assert "model.layers.0.attention.wq.weight  F32  [32, 32]  in 2 parts" in out
    first = str(run_folder / "checkpoints/step-3")
    assert main(["checkpoint", "diff", first, first]) == 0
    out = capsys.readouterr().out
    assert "87 of 87 tensors" in out
    assert main(["checkpoint", "diff", first, str(run_folder)]) == 1
    out = capsys.readouterr().out
    (norm,) = (line for line in out.splitlines() if line.startswith("norm.weight"))
    (samples,) = (line for line in out.splitlines() if line.startswith("data.samples"))
    assert "32 of 32" in norm
    assert_mentions(samples, "1 of 1", " 8", "0.333")


def test_a_diff_reads_some_rows_at_a_time(tmp_path, capsys, monkeypatch):
    weights = torch.ones(5000, 512)  # 10 MB
    weights[7] = torch.nan
    torch.save({"norm.weight": weights}, tmp_path / "a.pt")
    weights[1] = 3
    weights[4999, :2] = 0
    torch.save({"norm.weight": weights}, tmp_path / "b.pt")
    largest = 0
    original = FullTensor.read

    def noted(*arguments):
        nonlocal largest
        rows = original(*arguments)
        largest = max(largest, rows.nbytes)
        return rows

    monkeypatch.setattr(FullTensor, "read", noted)
    assert main(["checkpoint", "diff", str(tmp_path / "a.pt"), str(tmp_path / "b.pt")]) == 1
    assert "norm.weight: 514 of 2,560,000 differ, by up to 2; relative norm 0.0283" in (
        capsys.readouterr().out
    )
    assert largest <= BLOCK


def test_a_diff_compares_the_settings_that_both_state():
    a = {"training": {"seq_len": 64, "steps": 6}, "model": {"dim": 32}}
    b = {"training": {"seq_len": 128}, "run": {}}
    assert list(_config_differences(a, b)) == [
        "training.seq_len: 64 in a, 128 in b",
        "settings that only a states, which are not compared: 2",
    ]
    assert list(_config_differences(a, a)) == []


def test_show_opens_a_stock_folder(tmp_path, capsys):
    stock.save({"norm.weight": torch.ones(5)}, checkpoint_id=str(tmp_path / "theirs"), no_dist=True)
    assert main(["checkpoint", "show", str(tmp_path / "theirs")]) == 0
    assert "norm.weight  float32  [5]" in capsys.readouterr().out


@pytest.mark.slow
def test_prune_keeps_by_the_rule_and_respects_a_run(run_folder, capsys, monkeypatch):
    command = ["checkpoint", "prune", str(run_folder), "--keep", "1", "--keep-every", "3"]
    folder = run_folder / "checkpoints"
    (folder / "step-9.tmp-0011").mkdir()
    assert main([*command, "--dry-run"]) == 0
    assert_mentions(capsys.readouterr().out, "would delete", "1, 2 ")
    assert list_steps(folder) == [1, 2, 3, 4]
    held = lock(run_folder / ".lock")
    assert main(command) == 2
    assert_mentions(capsys.readouterr().err, "training", str(run_folder))
    monkeypatch.chdir(folder)
    assert main(["checkpoint", "prune", ".", "--keep", "1"]) == 2
    held.close()
    assert main(command) == 0
    assert ": 3, 4" in capsys.readouterr().out
    assert {path.name for path in folder.iterdir()} == {"step-3", "step-4"}
    assert main(["checkpoint", "prune", str(run_folder), "--keep", "0"]) == 2


@pytest.mark.slow
def test_prune_keeps_the_newest_proven_one(run_folder, capsys):
    """Training has not gone on from the newer ones: they may be what it diverged with."""
    (run_folder / ".proven").write_text('{"step": 2, "plausible": 2}')
    assert main(["checkpoint", "prune", str(run_folder), "--keep", "1"]) == 0
    assert ": 2, 4" in capsys.readouterr().out


@pytest.mark.slow
def test_prune_keeps_the_last_plausible_one(run_folder, capsys):
    """The newer ones are proven, but their losses are far above its own."""
    (run_folder / ".proven").write_text(
        '{"step": 4, "plausible": 1, "loss": 2.5, "validation_loss": null}'
    )
    assert main(["checkpoint", "prune", str(run_folder), "--keep", "1"]) == 0
    assert ": 1, 4" in capsys.readouterr().out


def test_a_link_to_a_checkpoint_is_deleted_and_not_what_it_leads_to(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "step-3").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "step-2.deleted").symlink_to(tmp_path / "elsewhere")
    delete_step(tmp_path, 3)
    sweep(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["elsewhere"]


def test_a_path_that_is_too_long_is_one_error(capsys):
    for command in (["list"], ["verify"], ["show"], ["prune", "--keep", "1"]):
        assert main(["checkpoint", *command, "x" * 300]) == 2
        error = capsys.readouterr().err
        assert_mentions(error, "error: ", "File name too long")
        assert error.count("\n") == 1


def test_a_name_that_moves_the_cursor_is_refused(tmp_path, capsys):
    torch.save({"\x1b[31m\nerror: forged": torch.zeros(2)}, tmp_path / "a.pt")
    assert main(["checkpoint", "show", str(tmp_path / "a.pt")]) == 2
    error = capsys.readouterr().err
    assert error.rstrip("\n").isprintable()
    assert_mentions(error, "a.pt", "printable names")


@pytest.mark.slow  # from each format: tests/tools/formats/test_convert.py
def test_a_run_begins_with_the_weights_of_another(pool, arguments, run_folder, tmp_path, capsys):
    """From one of our folders under another layout, and from a stock DCP folder; the optimizer
    starts anew.
    """
    from safetensors.torch import load_file

    theirs = tmp_path / "theirs"
    saved: dict[str, torch.Tensor] = {}
    for path in sorted((run_folder / "checkpoints/step-4").glob("model-*")):
        for key, value in load_file(path).items():
            name = key.split("[")[0].removeprefix("model.")
            saved[name] = torch.cat([saved[name], value]) if name in saved else value
    stock.save(saved, checkpoint_id=str(theirs), no_dist=True)
    base = [*arguments, "--training.steps=1", "--optimizer.lr=0", "--validation.freq=0"]
    for number, (source, processes, layout) in enumerate(
        [(run_folder, 1, "tp=1"), (theirs, 2, "tp=2")]
    ):
        name = f"next-{number}"
        run = [
            *base,
            f"--run.name={name}",
            f"--checkpoint.initial_load={source}",
            f"--parallel.{layout}",
        ]
        assert pool.run(processes, train_run, run) == [0] * processes
        log = (tmp_path / name / "log.txt").read_text()
        assert_mentions(log, "weights", str(source))
        # At learning rate 0 a step changes nothing.
        step = str(tmp_path / name / "checkpoints/step-1")
        assert main(["checkpoint", "diff", step, str(run_folder)]) == 1
        out = capsys.readouterr().out
        assert "\nlayers" not in out
        assert "optimizer.state.norm.weight.exp_avg" in out
    (tmp_path / "empty").mkdir()
    with run_refused("not a checkpoint; expected a run's or a step's"):
        pool.run(
            1, train_run, [*base, "--run.name=none", f"--checkpoint.initial_load={tmp_path}/empty"]
        )
    with run_refused("model.dim = 16, and 32 in", str(run_folder)):
        other = ["--run.name=other", "--model.dim=16", f"--checkpoint.initial_load={run_folder}"]
        pool.run(1, train_run, [*base, *other])
