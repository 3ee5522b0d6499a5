"""What is exported of a run: a model file when it has finished, and a card with its figures."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys

import pytest
import torch
from runs import rows, train_run

import titanlite
from titanlite.tools.formats import export_run
from titanlite.tools.formats.convert import convert, load_full_state
from titanlite.tools.formats.export import Options
from titanlite.tools.formats.model_card import CARD


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
def test_an_export_replaces_an_earlier_one_and_nothing_else(whole_run, tmp_path, caplog, form):
    folder = tmp_path / "run"
    shutil.copytree(whole_run(), folder)
    target = folder / export_run.TARGETS[form]
    others = set(os.listdir(folder))
    export_run.export_run(folder, form)
    assert load_full_state(target).about.step in (6, None)
    weights = target / "model.safetensors" if form == "hf" else target
    whole = weights.read_bytes()
    weights.write_bytes(b"of an earlier step")
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


HF = Options(to="hf")


def cells(card: str) -> dict[str, str]:
    return dict(re.findall(r"^\| ([^|]+) \| ([^|]+) \|$", card, re.MULTILINE))


def test_the_card_has_the_figures_of_the_run(whole_run, tmp_path, text_file):
    folder = whole_run()
    target = tmp_path / "hf"
    convert(folder, target, HF)
    card = (target / CARD).read_text()
    assert card.startswith("---\nlibrary_name: transformers\n")
    assert "\n# debug\n" in card
    parameters = sum(
        1 if not shape else _product(shape) for shape in _shapes(folder / "checkpoints/step-6")
    )
    assert f"A Llama of {parameters:,} parameters" in card
    logged = [row for row in rows(folder) if "loss" in row][-1]
    validated = [row for row in rows(folder) if "validation/numbers/loss" in row][-1]
    table = cells(card)
    assert table["steps"] == "6"
    assert table["tokens"] == f"{logged['tokens']:,}"
    assert table["tokens of a sequence"] == "64"
    assert table["data"] == "numbers"
    assert table["layout"] == "one process"
    assert table["torch"] == torch.__version__
    assert f"Exported by titanlite {titanlite.__version__}." in card
    assert "base model" not in table
    assert table["training loss (nats per token)"] == f"{logged['loss']:.4f}"
    assert table["validation loss, numbers"] == f"{validated['validation/numbers/loss']:.4f}"
    for path in (folder, text_file.parent, tmp_path):
        assert str(path) not in card


@pytest.mark.slow
def test_the_card_of_adapters_names_their_base_and_has_a_program_that_generates(
    pool, arguments, whole_run, tmp_path
):
    pytest.importorskip("transformers")
    base = f"--checkpoint.initial_load={whole_run() / 'checkpoints/step-6'}"
    run = [*arguments, "--run.name=tuned", "--lora.rank=2", base, "--training.steps=1"]
    assert pool.run(1, train_run, run) == [0]
    target = tmp_path / "hf"
    convert(tmp_path / "tuned", target, HF)
    card = (target / CARD).read_text()
    assert cells(card)["base model"] == "debug"
    (program,) = re.findall(r"^```python\n(.*?)^```", card, re.MULTILINE | re.DOTALL)
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=target, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "The" in done.stdout


def _shapes(step) -> list[list[int]]:
    tensors = json.loads((step / "manifest.json").read_text())["tensors"]
    return [entry["shape"] for name, entry in tensors.items() if name.startswith("model.")]


def _product(shape: list[int]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def test_a_model_without_a_run_has_a_card_without_training(whole_run, tmp_path):
    first = tmp_path / "first"
    convert(whole_run(), first, HF)
    convert(first, tmp_path / "second", HF)
    card = (tmp_path / "second" / CARD).read_text()
    assert "A Llama of " in card
    assert "## Training" not in card


def test_a_folder_with_a_dot_in_its_name_keeps_it(whole_run, tmp_path):
    convert(whole_run(), tmp_path / "Llama-3.2-1B", HF)
    convert(tmp_path / "Llama-3.2-1B", tmp_path / "second", HF)
    assert "\n# Llama-3.2-1B\n" in (tmp_path / "second" / CARD).read_text()


@pytest.mark.parametrize("name", ["a|b", "<script>", "a\nb"])
def test_names_cannot_end_their_cell(whole_run, tmp_path, name):
    from titanlite.tools.formats import model_card

    shown = model_card._cell(name)
    assert not set(shown) & set("|<>\n")
