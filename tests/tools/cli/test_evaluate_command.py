"""`titanlite evaluate`: what it records, and wrong input."""

from __future__ import annotations

import json
from argparse import Namespace

import pytest
from messages import refused

from titanlite.runtime.errors import ConfigError
from titanlite.tools.cli.evaluate_command import _report, run
from titanlite.tools.evaluate import record


@pytest.mark.slow
def test_it_is_recorded_with_its_run(whole_run, text_file, capsys):
    folder = whole_run("--training.steps=4")
    for limit in ("3", "4"):
        assert run([str(folder), "--perplexity", str(text_file), f"--limit={limit}"]) == 0
    table = capsys.readouterr().out
    lines = [json.loads(line) for line in (folder / "evaluations.jsonl").read_text().splitlines()]
    assert [(line["step"], line["weights"], line["settings"]["limit"]) for line in lines] == [
        (4, "model", 3),
        (4, "model", 4),
    ]
    for line in lines:
        assert f"{line['evaluate/numbers/loss']:.4f}" in table
    assert lines[1]["evaluate/numbers/tokens"] == 256


@pytest.mark.slow
def test_another_format_is_not_recorded(whole_run, text_file, tmp_path):
    from titanlite.tools.formats.convert import convert

    folder = whole_run()
    before = sorted(path.name for path in folder.iterdir())
    target = tmp_path / "exported.safetensors"
    convert(folder, target)
    values = []
    for path in (folder / "checkpoints/step-6", target):
        found = tmp_path / "found.json"
        options = ["--limit=5", f"--json={found}", "--seq-len=64"]
        if path == target:
            options.append(f"--tokenizer={folder / 'checkpoints/step-6/tokenizer.model'}")
        assert run([str(path), "--perplexity", str(text_file), *options]) == 0
        values.append(json.loads(found.read_bytes())["results"])
    assert values[0] == values[1]
    assert sorted(path.name for path in folder.iterdir()) == sorted({*before, "evaluations.jsonl"})


def test_json_is_written_also_if_the_run_folder_is_read_only(monkeypatch, tmp_path):
    def refuse(*arguments):
        raise ConfigError("read-only")

    monkeypatch.setattr(record, "run_folder_of", lambda full: tmp_path)
    monkeypatch.setattr(record, "append", refuse)
    found = tmp_path / "found.json"
    options = Namespace(json=found, limit=None, dtype="float32", weights="model")
    full = Namespace(path=tmp_path, about=Namespace(step=3))
    results = {"numbers": {"loss": 1.5}}
    with refused("read-only"):
        _report(options, full, 64, results)
    assert json.loads(found.read_bytes())["results"] == results


def test_wrong_input(whole_run, text_file, tmp_path):
    folder = str(whole_run())
    with refused("required", "--perplexity"):
        run([folder])
    with refused("--tasks", "titanlite convert", "--to hf", "lm_eval --model hf"):
        run([folder, "--tasks=arc_easy"])
    with refused("--perplexitty", "--perplexity"):
        run([folder, "--perplexitty", "x"])
    with refused("--perplexity = '", "absent", "no such file or folder"):
        run([folder, "--perplexity", str(tmp_path / "absent")])
    with refused("--split train", str(text_file), "is a file, which is evaluated whole"):
        run([folder, "--perplexity", str(text_file), "--split=train"])
    with refused("--step 5", "allowed: 6"):
        run([folder, "--perplexity", str(text_file), "--step=5"])
    with refused("several sets", "numbers"):
        run([folder, "--perplexity", str(text_file), str(text_file)])
