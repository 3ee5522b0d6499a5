"""Scores of answers: their values by hand, the same in every layout, and what a run writes."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from messages import run_refused
from model_builder import EVEN, build_stages, small_model
from runs import curve, rows, train_run

from titanlite.config.schema import ValidationConfig
from titanlite.model.generate import generate
from titanlite.probes.continuation import Continuation
from titanlite.probes.scores import (
    Scorer,
    encode_prompt,
    exact_match,
    f1,
    normalised,
)
from titanlite.tokenizer.tokenizer import Tokenizer


def test_normalisation_is_that_of_squad():
    assert normalised("The  Cat's (big)\n house, and a  dog.") == "cats big house and dog"
    assert normalised("An apple; theatre") == "apple theatre"
    assert normalised("The, a!") == "the, a!", "all of it would be left out"


@pytest.mark.parametrize(
    ("text", "answers", "match", "overlap"),
    [
        ("The Eiffel Tower!", ["eiffel tower"], 1, 1),
        ("Paris", ["London", "paris."], 1, 1),
        ("in Paris", ["Paris"], 0, 2 / 3),  # precision 1/2, recall 1
        ("red red blue", ["red blue blue"], 0, 2 / 3),  # red and blue once each: 2/3 and 2/3
        ("one two three four", ["five", "two four six"], 0, 4 / 7),  # 2/4 and 2/3
        ("yes", ["no"], 0, 0),
        ("", ["no"], 0, 0),
        ("+", ["-"], 0, 0),  # neither has words
        (" A.\n", ["a."], 1, 1),
        ("", [""], 1, 1),
    ],
)
def test_scores_by_hand(text, answers, match, overlap):
    assert exact_match(text, answers) == match
    assert f1(text, answers) == pytest.approx(overlap)


def test_names_of_special_tokens_are_these_tokens():
    tokenizer = Tokenizer()
    begin = tokenizer.special["<|start_header_id|>"]
    end = tokenizer.special["<|end_header_id|>"]
    assert encode_prompt("def f", tokenizer) == [tokenizer.bos, *tokenizer.encode("def f")]
    assert encode_prompt("", tokenizer) == [tokenizer.bos]
    assert encode_prompt("<|start_header_id|>user<|end_header_id|>\n\nhi", tokenizer) == [
        begin,
        *tokenizer.encode("user"),
        end,
        *tokenizer.encode("\n\nhi"),
    ]


# More than two forwards serve, and the last group is not full
PROMPTS = ("7 12 99", "", "1 2 3 4 5 6 7", "64 3", "50")
BOS, EOS, SEQ_LEN, NEW = 101, 102, 16, 6
TOKENIZER: Any = SimpleNamespace(
    bos=BOS,
    eos=EOS,
    special={"<bos>": BOS, "<eos>": EOS, "<end>": 103},
    encode=lambda text: [int(word) for word in text.split()],
    decode=lambda ids: " ".join(map(str, ids)),
)


def alone() -> list[str]:
    """The answers of the model by itself, with its key/value cache."""
    model = small_model(SEQ_LEN, config=EVEN)
    found = []
    for prompt in PROMPTS:
        ids = [BOS, *TOKENIZER.encode(prompt)]
        new = list(generate(model, ids, NEW, stop=EOS, temperature=0.0, top_k=0, seed=0))
        if 103 in new:
            new = new[: new.index(103)]
        found.append(TOKENIZER.decode(new))
    return found


def scored(parallel: dict[str, Any], questions: str, end: str = "") -> tuple[list[str], dict]:
    """The answers, and the row that is written, of a small model in this layout."""
    stages = build_stages(parallel, 0, EVEN, seq_len=SEQ_LEN, local_batch_size=2)
    training: Any = SimpleNamespace(seq_len=SEQ_LEN, local_batch_size=2)
    stream: Any = SimpleNamespace(training=training, document_mask=False)
    written: list[dict[str, Any]] = []
    metrics: Any = SimpleNamespace(
        device=torch.device("cpu"), progress=SimpleNamespace(step=7), write=written.append
    )
    config = ValidationConfig(questions=questions, answer_tokens=NEW, answer_end=end)
    scorer = Scorer(config, TOKENIZER, stages, stream, metrics)
    requests: Any = SimpleNamespace(agree_to_stop=lambda: False)
    scorer.run(requests)
    answers = scorer.answers(requests)
    assert answers is not None
    return answers, written[0]


@pytest.fixture
def questions(tmp_path) -> str:
    """The first is answered rightly, half of the second, no other."""
    answers = alone()
    half = answers[1].split()[: NEW // 2]
    expected: list[Any] = [["0", answers[0]], " ".join(half), "x", "x", "x"]
    path = tmp_path / "questions.jsonl"
    path.write_text(
        "".join(
            json.dumps({"prompt": prompt, "answer": answer}) + "\n"
            for prompt, answer in zip(PROMPTS, expected, strict=True)
        )
    )
    return str(path)


@pytest.mark.slow
@pytest.mark.parametrize(
    "parallel",
    [
        {"dp_shard": 1},
        {"dp_shard": 2},
        {"tp": 2},
        {"pp": 2},
        pytest.param({"dp_replicate": 2}, marks=pytest.mark.slow),
        pytest.param({"cp": 2}, marks=pytest.mark.slow),
        pytest.param({"dp_shard": 2, "tp": 2}, marks=pytest.mark.slow),
        pytest.param({"pp": 2, "dp_shard": 2}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_every_layout_has_the_answers_and_scores_of_the_model_alone(pool, questions, parallel):
    size = 1
    for degree in parallel.values():
        size *= degree
    row = {
        "step": 7,
        "validation/exact_match": 1 / 5,
        "validation/f1": pytest.approx((1 + 2 * 3 / (6 + 3)) / 5),
    }
    answers = alone()
    assert len(answers[1].split()) == NEW
    results = pool.run(size, scored, {"dp_shard": 1, **parallel}, questions, timeout=120)
    assert results == [(answers, row)] * size


def counted(parallel: dict[str, Any], questions: str, end: str) -> tuple[list[str], int]:
    """The answers of `scored`, and the number of forwards of a group of questions for them."""
    forwards = 0
    next_logits = Continuation.next_logits

    def count(self: Continuation, rows: list[list[int]]) -> torch.Tensor:
        nonlocal forwards
        forwards += 1
        return next_logits(self, rows)

    Continuation.next_logits = count  # type: ignore[method-assign]
    try:
        answers, _ = scored(parallel, questions, end)
    finally:
        Continuation.next_logits = next_logits  # type: ignore[method-assign]
    return answers, forwards


def test_an_answer_ends_at_the_text_that_ends_it(pool, questions):
    """Here a space: the first token remains, and no third one is computed."""
    ((answers, forwards),) = pool.run(1, counted, {"dp_shard": 1}, questions, " ")
    assert answers == [answer.partition(" ")[0] for answer in alone()]
    groups = 3  # of two questions
    assert forwards == 2 * groups * 2, "tokens, groups, and `scored` asks twice"


def options(tmp_path: Path, *questions: dict[str, Any]) -> list[str]:
    path = tmp_path / "questions.jsonl"
    path.write_text("".join(json.dumps(question) + "\n" for question in questions))
    return [f"--validation.questions={path}", "--validation.answer_tokens=3"]


def scores(folder: Path) -> list[tuple[int, float, float]]:
    return [
        (row["step"], row["validation/exact_match"], row["validation/f1"])
        for row in rows(folder)
        if "validation/f1" in row
    ]


def test_a_run_logs_scores_and_has_the_losses_of_one_without(pool, arguments, whole_run, tmp_path):
    asked = [{"prompt": f"def add_{i}(", "answer": ["x", "y"]} for i in range(3)]
    assert pool.run(2, train_run, [*arguments, *options(tmp_path, *asked)]) == [0, 0]
    folder = tmp_path / "debug"
    assert scores(folder) == [(step, 0.0, 0.0) for step in (0, 3, 6)]
    log = (folder / "log.txt").read_text()
    assert log.count(": answers  exact_match 0.0000  f1 0.0000") == 3
    for step, (loss, norm) in curve(folder).items():
        assert curve(whole_run())[step] == pytest.approx((loss, norm), rel=1e-5)


def test_without_validation_a_run_is_scored_at_its_end(pool, arguments, tmp_path):
    """A word without letters or digits is an empty answer."""
    asked = [{"prompt": "x", "answer": "?"}]
    more = [*options(tmp_path, *asked), "--validation.freq=0", "--validation.answer_end= "]
    assert pool.run(1, train_run, [*arguments, *more]) == [0]
    assert [step for step, _, _ in scores(tmp_path / "debug")] == [6]


def test_a_prompt_without_room_for_an_answer_is_refused(pool, arguments, tmp_path):
    asked = [{"prompt": "x", "answer": "x"}, {"prompt": "x y " * 60, "answer": "x"}]
    with run_refused("questions.jsonl:2: the prompt has", "training.seq_len = 64"):
        pool.run(1, train_run, [*arguments, *options(tmp_path, *asked)])
