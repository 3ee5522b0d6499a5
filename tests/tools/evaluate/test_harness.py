"""lm-eval on a checkpoint: the same answers as from lm-eval's own class for the exported model."""

from __future__ import annotations

import json
import math
import os

import pytest
import torch
from messages import refused

os.environ |= dict.fromkeys(("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "HF_EVALUATE_OFFLINE"), "1")
pytest.importorskip("lm_eval")

from lm_eval.api.instance import Instance

from titanlite.tools.cli.evaluate_command import run
from titanlite.tools.formats.convert import Options, convert
from titanlite.tools.formats.load_weights import load_model, tokenizer_of
from titanlite.tools.formats.shared_model import open_shared

CHOICE = """
task: sums
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "def add_{{{{n}}}}(x):"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
target_delimiter: ""
metric_list: [{{metric: acc}}]
"""
GENERATE = """
task: lines
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: generate_until
doc_to_text: "def add_{{{{n}}}}(x):"
doc_to_target: "{{{{line}}}}"
generation_kwargs: {{until: ["\\n\\n"], max_gen_toks: 12, do_sample: false}}
metric_list: [{{metric: exact_match}}]
"""


@pytest.fixture(scope="module")
def trained(whole_run):
    """A run that has learned something."""
    return whole_run("--training.steps=30", "--validation.freq=0")


@pytest.fixture(scope="module")
def evaluated(trained):
    from titanlite.tools.evaluate.harness import Evaluated

    full = open_shared(trained)
    return Evaluated(load_model(full, torch.device("cpu"), 64), tokenizer_of(full), batch_size=3)


def requests(kind: str, *arguments: tuple) -> list[Instance]:
    return [Instance(kind, {}, given, i) for i, given in enumerate(arguments)]


CONTINUATIONS = [
    ("def add_1(x):", "\n    y = x + 1"),
    ("def add_1(x):", "\n    return y"),
    ("def add_1(x): ", "x"),  # a space at the end belongs to the continuation
    ("", "def add_7(x):\n"),
    ("x = 1\n" * 40, "x = 1\n"),  # longer than the model's sequences
]
TEXTS = [("def add_3(x):\n    y = x + 9\n    return y * 3\n\n\n" * 6,), ("x",)]
PROMPTS = [
    ("def add_5(x):", {"until": ["\n\n"], "max_gen_toks": 20}),
    ("def add_5(x):", {"until": ["return"], "max_gen_toks": 20, "do_sample": False}),
    ("z = 1\n" * 50 + "def", {"until": [], "max_gen_toks": 8}),
]


def test_answers_are_those_of_the_exported_model(trained, evaluated, tmp_path):
    from lm_eval.models.huggingface import HFLM

    convert(trained, tmp_path / "hf", Options(to="hf"))
    own = evaluated
    stock = HFLM(
        str(tmp_path / "hf"),
        device="cpu",
        dtype="float32",
        max_length=64,
        batch_size=1,
        add_bos_token=True,
    )
    asked = requests("loglikelihood", *CONTINUATIONS)
    for (ours, greedy), (theirs, also) in zip(
        own.loglikelihood(asked), stock.loglikelihood(asked), strict=True
    ):
        assert ours == pytest.approx(theirs, abs=1e-4)
        assert greedy == also
    prompts = requests("generate_until", *PROMPTS)
    texts = own.generate_until(prompts)
    assert texts == stock.generate_until(prompts)
    assert any(texts)
    # With bos, lm-eval's class scores bos itself as a token of the text.
    plain = HFLM(
        str(tmp_path / "hf"),
        device="cpu",
        dtype="float32",
        max_length=64,
        batch_size=1,
        add_bos_token=False,
    )
    whole = requests("loglikelihood_rolling", *TEXTS)
    assert own.loglikelihood_rolling(whole) == pytest.approx(
        plain.loglikelihood_rolling(whole), abs=1e-3
    )


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    """A folder with two tasks whose data is local."""
    folder = tmp_path_factory.mktemp("tasks")
    data = folder / "data.jsonl"
    rows = [
        {
            "n": n,
            "choices": ["\n    y = x", "qqqq", " zz zz"],
            "answer": int(n % 4 == 0),
            "line": "\n    y = x + 1",
        }
        for n in range(12)
    ]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, text in (("sums", CHOICE), ("lines", GENERATE)):
        (folder / f"{name}.yaml").write_text(text.format(data=data))
    return folder, rows


def test_tasks_with_local_data(trained, evaluated, tasks, tmp_path, capsys):
    folder, rows = tasks
    found = tmp_path / "found.json"
    options = [
        "--tasks=sums,lines",
        f"--include={folder}",
        f"--json={found}",
        "--seq-len=64",
        "--device=cpu",
    ]
    assert run([str(trained), *options]) == 0
    results = json.loads(found.read_bytes())["results"]
    right = 0
    for row in rows:
        asked = requests(
            "loglikelihood", *((f"def add_{row['n']}(x):", choice) for choice in row["choices"])
        )
        scores = [score for score, _ in evaluated.loglikelihood(asked)]
        right += scores.index(max(scores)) == row["answer"]
    assert 0 < right < 12
    assert results["sums"]["acc"] == pytest.approx(right / 12)
    error = math.sqrt(right / 12 * (1 - right / 12) / 11)
    assert results["sums"]["acc_stderr"] == pytest.approx(error)
    options = {"until": ["\n\n"], "max_gen_toks": 12}
    texts = evaluated.generate_until(
        requests("generate_until", *((f"def add_{row['n']}(x):", dict(options)) for row in rows))
    )
    exact = sum(text == row["line"] for text, row in zip(texts, rows, strict=True))
    assert results["lines"]["exact_match"] == pytest.approx(exact / 12)
    assert f"sums   acc          {right / 12:.4f} ± {error:.4f}" in capsys.readouterr().out
    (line,) = [
        json.loads(text) for text in (trained / "evaluations.jsonl").read_text().splitlines()
    ]
    assert line["evaluate/sums/acc"] == results["sums"]["acc"]


def test_wrong_tasks_are_one_error(trained, tasks):
    folder, _ = tasks
    with refused("--tasks summs", "no such task", "sums"):
        run([str(trained), "--tasks=summs,lines", f"--include={folder}"])
    with refused("arc_easy", "cannot be loaded", "--online"):
        run([str(trained), "--tasks=arc_easy"])
    with refused("--include", "absent"):
        run([str(trained), "--tasks=sums", "--include=absent"])
