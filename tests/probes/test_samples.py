"""Samples during training: what is written of them, and that the losses are those of a run without;
test_continuation.py has the texts in every layout.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from messages import refused
from runs import curve, rows, train_run, train_until, validation

from titanlite.config.schema import ValidationConfig
from titanlite.observe.line_file import LineFile
from titanlite.observe.metrics_file import SAMPLES
from titanlite.probes.samples import Sampler

SEQ_LEN = 16


def room_for(prompt: list[int]) -> Sampler:
    stages: Any = SimpleNamespace(mesh=None)
    stream: Any = SimpleNamespace(training=SimpleNamespace(seq_len=SEQ_LEN))
    metrics: Any = SimpleNamespace(
        device=None,
        file=SimpleNamespace(path=Path("metrics.jsonl")),
        progress=SimpleNamespace(step=7),
    )
    tokenizer: Any = SimpleNamespace(
        encode_prompt=lambda text: [0, *prompt] if text == "b" else [0], prompt_rule=str
    )
    config = ValidationConfig(prompts=("a", "b"))
    return Sampler(config, 0, tokenizer, set(), stages, stream, metrics)


def test_prompts_that_are_too_long_are_refused():
    room_for([1] * 14)
    with refused("validation.prompts[2] has 16 tokens", "at most 15", "training.seq_len = 16"):
        room_for([1] * 15)


def test_a_sample_is_one_line_whatever_it_contains(tmp_path, monkeypatch):
    """In the file for every reader of lines, and on the console."""
    text = "a\u2028b\nc\x85\x1b[2J"
    sampled = room_for([1])
    sampled.file = LineFile(tmp_path / SAMPLES)
    monkeypatch.setattr(sampled.continuation, "texts", lambda *arguments: [text, ""])
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    shown: list[str] = []
    monkeypatch.setattr(logging.getLogger("titanlite"), "info", shown.append)
    requests: Any = SimpleNamespace(agree_to_stop=lambda: False)
    sampled.run(requests)
    assert sampled.texts == ["a" + text, "b"]
    assert samples(tmp_path) == [
        {"step": 7, "prompt": "a", "text": text},
        {"step": 7, "prompt": "b", "text": ""},
    ]
    assert shown == ['step 7: sample "a" + "a\\u2028b\\nc\\x85\\x1b[2J"', 'step 7: sample "b" + ""']


OPTIONS = [
    '--validation.prompts=["def add_7(x):\\n", "y, \\"z\\""]',
    "--validation.prompt_tokens=5",
]


def samples(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / SAMPLES).read_text().splitlines()]


def test_a_run_writes_samples_and_has_the_losses_of_one_without(whole_run):
    folder = whole_run(*OPTIONS)
    found = samples(folder)
    assert [(row["step"], row["prompt"]) for row in found] == [
        (step, prompt) for step in (0, 3, 6) for prompt in ("def add_7(x):\n", 'y, "z"')
    ]
    assert all(list(row) == ["step", "prompt", "text"] and row["text"] for row in found)
    assert (folder / "log.txt").read_text().count('sample "def add_7(x):\\n" + "') == 3
    assert curve(folder) == curve(whole_run())
    assert validation(folder) == validation(whole_run())
    assert not (whole_run() / SAMPLES).exists()


@pytest.mark.slow
def test_a_resumed_run_has_each_sample_once(pool, arguments, whole_run, tmp_path):
    """Stopped after step 4, which is saved; then samples of a later step, which is not."""
    assert pool.run(1, train_until, 4, [*arguments, *OPTIONS]) == [75]
    later = {"step": 6, "prompt": "lost", "text": "lost"}
    with (tmp_path / "debug" / SAMPLES).open("a") as file:
        file.write(json.dumps(later) + "\n")
    assert pool.run(1, train_run, [*arguments, *OPTIONS]) == [0]
    assert samples(tmp_path / "debug") == samples(whole_run(*OPTIONS))
    assert len(rows(tmp_path / "debug")) == len(rows(whole_run(*OPTIONS)))
