"""The loss of a checkpoint on prepared text, against what the run has measured."""

from __future__ import annotations

import json

import pytest
from runs import rows

from titanlite.tools.cli.evaluate_command import run


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
