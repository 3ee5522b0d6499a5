"""Steps in which no token is a target: they have no loss, and nothing takes them for a good one."""

from __future__ import annotations

import json
import random

import pytest
from runs import rows, train_run

from titanlite.checkpoint.retention import read_proof
from titanlite.tokenizer.tokenizer import Tokenizer
from titanlite.tools.cli.main import main

SEQ_LEN = 64
ANSWERS = [f"the answer {i}" for i in range(8)]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Long prompts with short answers: most sequences of 64 tokens are part of a prompt."""
    folder = tmp_path_factory.mktemp("prompts")
    words = random.Random(0)
    lines = folder / "rows.jsonl"
    with lines.open("w") as file:
        for answer in ANSWERS:
            prompt = " ".join(words.choice(("red", "green", "blue")) for _ in range(100))
            file.write(json.dumps({"q": prompt, "a": answer}) + "\n")
    held_out = folder / "held_out.jsonl"
    held_out.write_text(json.dumps({"q": "red", "a": "blue"}) + "\n")
    command = ["prepare", str(lines), "--field", "a", "--prompt-field", "q"]
    assert main([*command, "--validation", str(held_out), "--out", str(folder / "data")]) == 0
    return folder / "data"


def test_a_step_without_targets_has_no_loss(pool, options, data, tmp_path):
    """In one pass every target is seen once, so their number follows from the answers alone."""
    tokens = json.loads((data / "manifest.json").read_text())["splits"]["train"]["tokens"]
    steps = -(-(tokens - 1) // SEQ_LEN)
    run = [word for word in options if not word.startswith(("--data.path", "--training."))]
    run += [f"--data.path={data}", f"--run.folder={tmp_path}", f"--training.seq_len={SEQ_LEN}"]
    run += [f"--training.steps={steps}", "--training.global_batch_size=1"]
    run += ["--training.local_batch_size=1", "--validation.freq=0", "--checkpoint.freq=16"]
    run += ["--stability.action=skip", "--stability.threshold=8", "--stability.window=16"]
    assert pool.run(1, train_run, run) == [0]

    found = rows(tmp_path / "debug")
    empty = [row["step"] for row in found if row["targets"] == 0]
    assert len(empty) > steps / 2
    assert [row["step"] for row in found if row["loss"] is None] == empty
    assert [row["step"] for row in found if row["perplexity"] is None] == empty
    assert [row["step"] for row in found if row["grad_norm"] is None] == empty
    encode = Tokenizer("").encode
    answers = sum(len(encode(answer)) + 1 for answer in ANSWERS)  # each with its end token
    assert sum(row["targets"] for row in found) == answers

    # The window has the other steps only: the loss of none of them is a spike above 0
    assert found[-1]["bad_steps"] == 0
    proof = read_proof(tmp_path / "debug")
    assert proof.loss is not None
    assert proof.loss > 1
    log = (tmp_path / "debug/log.txt").read_text()
    assert log.count("had no target") == 2
    assert f"1 of {empty[0]} steps had no target" in log
    assert f"{len(empty)} of {steps} steps had no target" in log
