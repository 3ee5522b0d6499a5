"""README.md of an exported folder: figures of the run, and no paths."""

from __future__ import annotations

import json
import re

import pytest
from runs import rows

from titanlite.tools.formats.convert import convert
from titanlite.tools.formats.export import Options
from titanlite.tools.formats.model_card import CARD

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
    assert table["training loss (nats per token)"] == f"{logged['loss']:.4f}"
    assert table["validation loss, numbers"] == f"{validated['validation/numbers/loss']:.4f}"
    for path in (folder, text_file.parent, tmp_path):
        assert str(path) not in card


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
