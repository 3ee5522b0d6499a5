"""Text during training: the same in every layout, and a training that is the same with and
without.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from model_builder import EVEN, build_stages, small_model

from titanlite.config.schema import CompileConfig, DataConfig, LossConfig
from titanlite.data.rows import Batch
from titanlite.model.generate import generate
from titanlite.probes.continuation import Continuation
from titanlite.tools.torch_private import num_compiled_graphs

# Prompts of different lengths, more than a local batch
PROMPTS = ("7 12 99", "", "1 2 3 4 5 6 7", "64 3", "50")
BOS, EOS, SEQ_LEN, NEW = 101, 102, 16, 6
TOKENIZER: Any = SimpleNamespace(
    bos=BOS,
    eos=EOS,
    encode=lambda text: [int(word) for word in text.split()],
    decode=lambda ids: " ".join(map(str, ids)),
)


def continuation(parallel: dict[str, Any], *sections: Any) -> Continuation:
    """Builds the continuation of a small model in this layout."""
    stages = build_stages(parallel, 0, EVEN, *sections, seq_len=SEQ_LEN, local_batch_size=2)
    data = next((section for section in sections if isinstance(section, DataConfig)), DataConfig())
    training: Any = SimpleNamespace(seq_len=SEQ_LEN, local_batch_size=2)
    stream: Any = SimpleNamespace(training=training, document_mask=data.document_mask)
    return Continuation(TOKENIZER, {EOS}, stages, stream, torch.device("cpu"))


def continued(
    made: Continuation, temperature: float = 0.0, stop: Any = lambda: False
) -> list[str] | None:
    prompts = [[BOS, *TOKENIZER.encode(text)] for text in PROMPTS]
    return made.texts(prompts, NEW, temperature, 5, stop)


def texts(parallel: dict[str, Any], *sections: Any, temperature: float = 0.0) -> list[str] | None:
    return continued(continuation(parallel, *sections), temperature)


def expected(temperature: float = 0.0) -> list[str]:
    """By the model alone, with its key/value cache."""
    found = []
    for i, prompt in enumerate(PROMPTS):
        ids = [BOS, *TOKENIZER.encode(prompt)]
        options = {"stop": {EOS}, "temperature": temperature, "top_k": 50, "seed": 5 + i}
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


@pytest.mark.slow
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
    made = continuation({"dp_shard": 1}, compile)
    stages = made.stages
    tokens = torch.randint(104, (2, SEQ_LEN + 1), generator=torch.Generator().manual_seed(1))
    batch = Batch(tokens[:, :-1], tokens[:, 1:])
    first = float(stages.forward_backward(batch, torch.tensor(32)))
    evaluated = float(stages.evaluate(batch))
    graphs, random = num_compiled_graphs(), torch.get_rng_state()
    gradients = [p.grad.clone() for p in stages.model_parts[0].parameters()]
    continued(made)
    same = all(
        torch.equal(p.grad, g)
        for p, g in zip(stages.model_parts[0].parameters(), gradients, strict=True)
    )
    same &= torch.equal(random, torch.get_rng_state())
    losses = float(stages.forward_backward(batch, torch.tensor(32))), float(stages.evaluate(batch))
    return graphs, num_compiled_graphs(), same, losses == (first, evaluated)


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_training_goes_on_as_before(pool, compiled):
    """The same graphs, gradients, random state and losses."""
    ((before, after, same, losses),) = pool.run(1, sample_and_train, compiled)
    assert (before > 0) == compiled
    assert after == before
    assert same
    assert losses


def stopped() -> list[str] | None:
    made = continuation({"dp_shard": 1})
    calls = iter([False, False, True])
    return continued(made, stop=lambda: next(calls))


def test_a_request_to_stop_is_obeyed_between_tokens(pool):
    assert pool.run(1, stopped) == [None]


def ended(weight: float) -> list[str] | None:
    """Continues with a model whose output weights are all this number."""
    made = continuation({"dp_shard": 1})
    torch.nn.init.constant_(made.stages.model_parts[0].output.weight, weight)
    return continued(made)


def test_a_model_that_is_not_finite_gives_no_text(pool):
    assert pool.run(1, ended, float("nan")) == [[""] * len(PROMPTS)]


def ended_by(end: int) -> list[str] | None:
    made = continuation({"dp_shard": 1})
    made.ends = {EOS, end}
    return continued(made)


def test_an_end_that_the_model_s_files_name_ends_a_text(pool):
    alone = [text.split() for text in expected()]
    end = alone[0][2]
    cut = []
    for words in alone:
        place = words.index(end) if end in words else len(words)
        cut.append(" ".join(words[:place]))
    assert len(cut[0].split()) <= 2
    assert pool.run(1, ended_by, int(end)) == [cut]
