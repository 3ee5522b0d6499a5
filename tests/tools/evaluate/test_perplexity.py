"""The loss of a checkpoint on prepared text, against what the run has measured."""

from __future__ import annotations

import json

import pytest
from runs import rows

from titanlite.config.schema import DataConfig
from titanlite.data.prepared import PreparedData
from titanlite.tokenizer.tokenizer import Tokenizer
from titanlite.tools.cli.evaluate_command import run
from titanlite.tools.prepare.cache import prepare


def validated(folder) -> dict[str, float]:
    """The last validation of a run: metric -> value."""
    row = [row for row in rows(folder) if "validation/numbers/loss" in row][-1]
    return {
        name.rpartition("/")[2]: value
        for name, value in row.items()
        if name.startswith("validation/numbers/")
    }


@pytest.mark.parametrize("masked", [False, True])
def test_it_is_that_of_validation(whole_run, text_file, tmp_path, masked):
    """Also with other batches; 21 windows are those of `validation.samples`."""
    folder = whole_run(*["--data.document_mask=true"] * masked)
    for size in (1, 5):
        found = tmp_path / "found.json"
        options = ["--limit=21", f"--batch-size={size}", f"--json={found}", "--device=cpu"]
        assert run([str(folder), "--perplexity", str(text_file), *options]) == 0
        result = json.loads(found.read_bytes())
        values = result["results"]["numbers"]
        tokens = values.pop("tokens")
        assert values == pytest.approx(validated(folder), rel=1e-6)
        assert tokens == 21 * 64  # the text is one document
        assert (result["step"], result["seq_len"]) == (6, 64)


def test_a_text_that_is_shorter_than_a_sequence_is_a_row(whole_run, text_file, tmp_path):
    """Here one document: the same as a window of all of it."""
    tokenizer = Tokenizer()
    folder = prepare(DataConfig(path=str(text_file)), tokenizer, lambda message: None)
    length = len(PreparedData(folder, tokenizer).tokens("validation"))
    found = tmp_path / "found.json"
    values = []
    for seq_len in (length - 1, length + 100):
        options = [f"--seq-len={seq_len}", f"--json={found}", "--device=cpu"]
        assert run([str(whole_run()), "--perplexity", str(text_file), *options]) == 0
        values.append(json.loads(found.read_bytes())["results"]["numbers"])
    assert values[0]["tokens"] == length - 1
    assert values[0] == pytest.approx(values[1], rel=1e-6)
