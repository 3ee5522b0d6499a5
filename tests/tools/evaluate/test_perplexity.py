"""The loss of a checkpoint on prepared text, against what the run has measured."""

from __future__ import annotations

import json

import pytest
import torch
import torch.nn.functional as F
from runs import rows

from titanlite.config.schema import DataConfig
from titanlite.tokenizer.tokenizer import Tokenizer
from titanlite.tools.cli.evaluate_command import run
from titanlite.tools.formats.detect_format import open_full_state
from titanlite.tools.formats.load_weights import load_model
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
    data = prepare(DataConfig(path=str(text_file)), Tokenizer(), lambda message: None)
    for size in (1, 5):
        found = tmp_path / "found.json"
        options = ["--limit=21", f"--batch-size={size}", f"--json={found}", "--device=cpu"]
        assert run([str(folder), "--perplexity", str(data), *options]) == 0
        result = json.loads(found.read_bytes())
        values = result["results"]["numbers"]
        tokens = values.pop("tokens")
        assert values == pytest.approx(validated(folder), rel=1e-6)
        assert tokens == 21 * 64  # the text is one document
        assert (result["step"], result["seq_len"]) == (6, 64)


def test_a_text_that_is_shorter_than_a_sequence_is_a_row(whole_run, text_file, tmp_path):
    """Here one document: the same as a window of all of it."""
    text = tmp_path / "short.txt"
    text.write_text(text_file.read_text()[:3000])
    length = len(Tokenizer().encode(text.read_text())) + 1  # bos
    found = tmp_path / "found.json"
    values = []
    for seq_len in (length - 1, length + 100):
        options = [f"--seq-len={seq_len}", f"--json={found}", "--device=cpu"]
        assert run([str(whole_run()), "--perplexity", str(text), *options]) == 0
        values.append(json.loads(found.read_bytes())["results"]["short"])
    assert values[0]["tokens"] == length - 1
    assert values[0] == pytest.approx(values[1], rel=1e-6)


@pytest.mark.parametrize("masked", [False, True])
def test_all_of_a_file_is_evaluated(whole_run, text_file, tmp_path, capsys, masked):
    """Against a loop over the ids of the file, a window after the other; it is one document.

    It begins as the tokenizer's file says, so an eos after it is not a target.
    """
    folder = whole_run(*["--data.document_mask=true"] * masked)
    text = tmp_path / "mine.txt"
    text.write_text(text_file.read_text()[:4000])
    tokenizer = Tokenizer()
    ids = [tokenizer.bos, *tokenizer.encode(text.read_text())]
    model = load_model(open_full_state(folder), torch.device("cpu"), 64)
    total = 0.0
    with torch.no_grad():
        for start in range(0, len(ids) - 1, 64):
            window = torch.tensor([ids[start : start + 65]])
            logits = model(window[:, :-1])[0].double()
            total += float(F.cross_entropy(logits, window[0, 1:], reduction="sum"))
    found = tmp_path / "found.json"
    command = [str(folder), "--perplexity", str(text), f"--json={found}", "--device=cpu"]
    assert run(command) == 0
    values = json.loads(found.read_bytes())["results"]["mine"]
    assert values["tokens"] == len(ids) - 1
    assert values["loss"] == pytest.approx(total / (len(ids) - 1), rel=1e-5)
    notes = capsys.readouterr().err
    assert f"{len(ids) - 1:,} tokens, the whole file; texts begin with <|begin_of_text|>" in notes
