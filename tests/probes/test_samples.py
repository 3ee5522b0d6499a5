"""Samples during training: the same text in every layout, and a training that is the same with and
without.
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
from model_builder import EVEN, build_stages, small_model
from runs import curve, rows, train_run, train_until, validation

from titanlite.config.schema import CompileConfig, DataConfig, LossConfig, ValidationConfig
from titanlite.data.stream import Batch
from titanlite.distributed.torch_private import num_compiled_graphs
from titanlite.model.generate import generate
from titanlite.observe.line_file import LineFile
from titanlite.observe.metrics_file import SAMPLES
from titanlite.probes.samples import Sampler

# Of different lengths, and more than a local batch
PROMPTS = ("7 12 99", "", "1 2 3 4 5 6 7", "64 3", "50")
BOS, EOS, SEQ_LEN, NEW = 101, 102, 16, 6
TOKENIZER: Any = SimpleNamespace(
    bos=BOS,
    eos=EOS,
    encode=lambda text: [int(word) for word in text.split()],
    decode=lambda ids: " ".join(map(str, ids)),
)


def sampler(
    parallel: dict[str, Any], *sections: Any, temperature: float = 0.0
) -> tuple[Sampler, Any]:
    """A sampler, and the stages, of a small model."""
    stages = build_stages(parallel, 0, EVEN, *sections, seq_len=SEQ_LEN, local_batch_size=2)
    data = next((section for section in sections if isinstance(section, DataConfig)), DataConfig())
    training: Any = SimpleNamespace(seq_len=SEQ_LEN, local_batch_size=2)
    config = ValidationConfig(prompts=PROMPTS, prompt_tokens=NEW, prompt_temperature=temperature)
    stream: Any = SimpleNamespace(training=training, document_mask=data.document_mask)
    metrics: Any = SimpleNamespace(
        device=torch.device("cpu"), file=SimpleNamespace(path=Path("unused/metrics.jsonl"))
    )
    return Sampler(config, 5, TOKENIZER, stages, stream, metrics), stages


def texts(parallel: dict[str, Any], *sections: Any, temperature: float = 0.0) -> list[str] | None:
    return sampler(parallel, *sections, temperature=temperature)[0].continued(lambda: False)


def expected(temperature: float = 0.0) -> list[str]:
    """By the model alone, with its key/value cache."""
    found = []
    for i, prompt in enumerate(PROMPTS):
        ids = [BOS, *TOKENIZER.encode(prompt)]
        options = {"stop": EOS, "temperature": temperature, "top_k": 50, "seed": 5 + i}
        found.append(
            TOKENIZER.decode(list(generate(small_model(SEQ_LEN, config=EVEN), ids, NEW, **options)))
        )
    return found


CHUNKS, MASK = LossConfig(num_chunks=3), DataConfig(document_mask=True)
COMPILED = CompileConfig(enabled="true", loss=True, backend="aot_eager")
SLOW = [
    ({"dp_replicate": 2}, []),
    ({"cp": 2, "cp_method": "ulysses"}, []),
    ({"cp": 2}, [MASK, CHUNKS]),
    ({"tp": 2}, [COMPILED]),
    ({"pp": 2}, [MASK]),
    ({"pp": 2, "pp_schedule": "ZBVZeroBubble"}, [CHUNKS]),
    ({"pp": 2, "pp_schedule": "GPipe"}, []),
    ({"dp_shard": 2, "tp": 2}, []),
    ({"dp_shard": 2, "cp": 2}, [COMPILED]),
    ({"pp": 2, "tp": 2}, []),
    ({"pp": 2, "dp_shard": 2}, []),
    ({"cp": 2, "tp": 2}, [CHUNKS]),
]


@pytest.mark.parametrize(
    ("parallel", "sections"),
    [
        ({"dp_shard": 1}, [CHUNKS, MASK]),
        ({"dp_shard": 2}, []),
        ({"tp": 2}, [CHUNKS]),
        ({"cp": 2}, []),
        ({"pp": 2, "pp_schedule": "Interleaved1F1B"}, []),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW),
    ],
    ids=str,
)
def test_every_layout_gives_the_text_of_the_model_alone(pool, parallel, sections):
    size = 1
    for axis in ("dp_shard", "dp_replicate", "tp", "cp", "pp"):
        size *= parallel.get(axis, 1)
    alone = expected()
    assert len(set(alone)) > 2
    assert (
        pool.run(size, texts, {"dp_shard": 1, **parallel}, *sections, timeout=120) == [alone] * size
    )


def test_sampling_with_a_temperature_is_that_of_generate(pool):
    alone = expected(1.0)
    assert alone != expected()
    assert pool.run(2, texts_with_a_temperature, 1.0) == [alone] * 2


def texts_with_a_temperature(temperature: float) -> list[str] | None:
    return texts({"dp_shard": 2}, temperature=temperature)


def sample_and_train(compiled: bool) -> tuple[int, int, bool, bool]:
    """Graphs after a step and a validation, and after sampling and another step; whether state has
    changed.
    """
    compile = CompileConfig(enabled="true" if compiled else "false", backend="aot_eager")
    sampled, stages = sampler({"dp_shard": 1}, compile)
    tokens = torch.randint(104, (2, SEQ_LEN + 1), generator=torch.Generator().manual_seed(1))
    batch = Batch(tokens[:, :-1], tokens[:, 1:])
    first = float(stages.forward_backward(batch, torch.tensor(32)))
    evaluated = float(stages.evaluate(batch))
    graphs, random = num_compiled_graphs(), torch.get_rng_state()
    gradients = [p.grad.clone() for p in stages.model_parts[0].parameters()]
    sampled.continued(lambda: False)
    same = all(
        torch.equal(p.grad, g)
        for p, g in zip(stages.model_parts[0].parameters(), gradients, strict=True)
    )
    same &= torch.equal(random, torch.get_rng_state())
    losses = float(stages.forward_backward(batch, torch.tensor(32))), float(stages.evaluate(batch))
    return graphs, num_compiled_graphs(), same, losses == (first, evaluated)


@pytest.mark.parametrize("compiled", [False, True])
def test_training_goes_on_as_before(pool, compiled):
    """The same graphs, gradients, random state and losses."""
    ((before, after, same, losses),) = pool.run(1, sample_and_train, compiled)
    assert (before > 0) == compiled
    assert after == before
    assert same
    assert losses


def stopped() -> list[Any]:
    sampled, stages = sampler({"dp_shard": 1})
    calls = iter([False, False, True])
    loss = stages.runner.loss
    return [sampled.continued(lambda: next(calls)), stages.runner.loss is loss]


def test_a_request_to_stop_is_obeyed_between_tokens(pool):
    assert pool.run(1, stopped) == [[None, True]]


def ended(weight: float) -> list[str] | None:
    """Of a model whose output weights are all this number."""
    sampled, stages = sampler({"dp_shard": 1})
    torch.nn.init.constant_(stages.model_parts[0].output.weight, weight)
    return sampled.continued(lambda: False)


def test_a_model_that_is_not_finite_gives_no_text(pool):
    assert pool.run(1, ended, float("nan")) == [[""] * len(PROMPTS)]


def room_for(prompt: list[int]) -> Sampler:
    stages: Any = SimpleNamespace(mesh=None)
    stream: Any = SimpleNamespace(training=SimpleNamespace(seq_len=SEQ_LEN))
    metrics: Any = SimpleNamespace(
        device=None,
        file=SimpleNamespace(path=Path("metrics.jsonl")),
        progress=SimpleNamespace(step=7),
    )
    tokenizer: Any = SimpleNamespace(bos=0, encode=lambda text: prompt if text == "b" else [])
    config = ValidationConfig(prompts=("a", "b"))
    return Sampler(config, 0, tokenizer, stages, stream, metrics)


def test_prompts_that_are_too_long_are_refused():
    room_for([1] * 14)
    with refused("validation.prompts[2] has 16 tokens", "at most 15", "training.seq_len = 16"):
        room_for([1] * 15)


def test_a_sample_is_one_line_whatever_it_contains(tmp_path, monkeypatch):
    """In the file for every reader of lines, and on the console."""
    text = "a\u2028b\nc\x85\x1b[2J"
    sampled = room_for([1])
    sampled.file = LineFile(tmp_path / SAMPLES)
    monkeypatch.setattr(sampled, "continued", lambda stop: [text, ""])
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


def test_a_resumed_run_has_each_sample_once(pool, arguments, whole_run, tmp_path):
    """Stopped after step 4, which is saved; then samples of a later step, which is not."""
    assert pool.run(1, train_until, 4, [*arguments, *OPTIONS]) == [75]
    later = {"step": 6, "prompt": "lost", "text": "lost"}
    with (tmp_path / "debug" / SAMPLES).open("a") as file:
        file.write(json.dumps(later) + "\n")
    assert pool.run(1, train_run, [*arguments, *OPTIONS]) == [0]
    assert samples(tmp_path / "debug") == samples(whole_run(*OPTIONS))
    assert len(rows(tmp_path / "debug")) == len(rows(whole_run(*OPTIONS)))
