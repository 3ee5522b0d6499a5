"""The export of a run that has finished."""

from __future__ import annotations

import json
import os
import shutil

import pytest
import torch
from runs import train_run

from titanlite.tools.formats import export_run
from titanlite.tools.formats.convert import load_full_state


def test_a_finished_run_leaves_its_model(pool, arguments, tmp_path):
    run = [*arguments, "--checkpoint.export=torch"]
    assert pool.run(2, train_run, run) == [0, 0]
    tree = torch.load(tmp_path / "debug/model.pt", weights_only=True)
    saved = load_full_state(tmp_path / "debug")
    assert tree["step"] == 6
    for name, tensor in tree["model"].items():
        assert torch.equal(tensor, saved[name])
    # The run goes on, and replaces it
    assert pool.run(1, train_run, [*run, "--training.steps=8"]) == [0]
    assert torch.load(tmp_path / "debug/model.pt", weights_only=True)["step"] == 8


@pytest.mark.parametrize("form", ["hf", "torch"])
def test_an_export_replaces_an_earlier_one_and_nothing_else(
    whole_run, tmp_path, caplog, monkeypatch, form
):
    folder = tmp_path / "run"
    shutil.copytree(whole_run(), folder)
    target = folder / export_run.TARGETS[form]
    others = set(os.listdir(folder))
    killed = folder / "titanlite-tmp-export" / target.name
    killed.mkdir(parents=True)
    export_run.export_run(folder, form)
    assert not killed.parent.exists()
    assert load_full_state(target).about.step in (6, None)
    weights = target / "model.safetensors" if form == "hf" else target
    whole = weights.read_bytes()
    weights.write_bytes(b"of an earlier step")
    with monkeypatch.context() as patched:
        patched.setattr(export_run, "convert", lambda *arguments: 1 / 0)
        export_run.export_run(folder, form)
    assert weights.read_bytes() == b"of an earlier step"
    assert "division by zero" in caplog.text
    caplog.clear()
    export_run.export_run(folder, form)
    assert weights.read_bytes() == whole
    assert set(os.listdir(folder)) == others | {target.name}
    assert not caplog.records
    if form == "hf":
        (target / "mine").write_text("mine")
        export_run.export_run(folder, form)
        assert f"{target}: holds mine" in caplog.text
        assert (target / "mine").read_text() == "mine"


def fail_to_export(arguments: list[str], error: type[Exception]) -> int:
    def convert(*arguments, **options):
        raise error("the disk is full")

    export_run.convert = convert
    return train_run(arguments)


@pytest.mark.slow
@pytest.mark.parametrize("error", [OSError, RuntimeError])
def test_an_export_that_fails_does_not_fail_the_run(pool, arguments, tmp_path, error):
    run = [*arguments, "--checkpoint.export=hf"]
    assert pool.run(1, fail_to_export, run, error) == [0]
    text = (tmp_path / "debug/log.txt").read_text()
    assert "checkpoint.export = hf" in text
    assert "the disk is full" in text
    assert json.loads((tmp_path / "debug/checkpoints/step-6/manifest.json").read_text())["finite"]
