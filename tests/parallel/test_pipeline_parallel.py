"""The cut of the layers into stages, and which process has which."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from model_builder import EVEN, build_stages, full, small_model

from titanlite.model.flavors import FLAVORS, LlamaConfig
from titanlite.model.llama import Llama
from titanlite.parallel.pipeline_parallel import balanced_split, stage_indices, stage_modules


def stage_weights(weights: list[int], starts: list[int]) -> list[int]:
    return [sum(weights[begin:end]) for begin, end in zip(starts, [*starts[1:], len(weights)], strict=True)]


def test_no_other_cut_has_a_lighter_heaviest_stage():
    """Against every cut there is, for random weights."""
    generator = random.Random(0)
    for _ in range(60):
        blocks, stages = generator.randint(1, 8), generator.randint(1, 5)
        if stages > blocks:
            continue
        weights = [generator.randint(0, 9), *[generator.randint(1, 9)] * blocks, generator.randint(0, 20)]
        starts = balanced_split(weights, stages)
        assert len(starts) == stages
        assert starts[0] == 0
        bounds = [*starts[1:], len(weights) - 1]
        assert all(b > max(a, 1) or (a == 0 and b > 1) for a, b in itertools.pairwise([0, *bounds])), "a block each"
        cuts = itertools.combinations(range(2, blocks + 1), stages - 1)
        best = min(max(stage_weights(weights, [0, *cut])) for cut in cuts)
        assert max(stage_weights(weights, starts)) == best


@pytest.mark.parametrize(
    ("flavor", "stages", "expected"),
    [  # blocks per stage: the ends of the smaller models weigh as several blocks
        ("llama3_8b", 4, [8, 9, 9, 6]),
        ("llama3_70b", 4, [20, 20, 21, 19]),
        ("llama3_405b", 16, [7, *[8] * 14, 7]),
    ],
)
def test_ends_weigh_in_the_cut_of_the_flavors(flavor, stages, expected):
    with torch.device("meta"):
        model = Llama(FLAVORS[flavor], 16)
    modules = stage_modules(model, stages, [])
    assert [len([name for name in names if name.startswith("layers")]) for names in modules] == expected
    assert [name for names in modules for name in names][:2] == ["tok_embeddings", "layers.0"]
    assert modules[-1][-2:] == ["norm", "output"]


def test_the_explicit_cut_is_what_it_says():
    modules = stage_modules(small_model(config=EVEN), 3, ["layers.1", "norm"])
    assert modules == [["tok_embeddings", "layers.0"], ["layers.1", "layers.2", "layers.3"], ["norm", "output"]]


def test_stages_go_round_or_in_a_v():
    assert [stage_indices(rank, 4, 1, "1F1B") for rank in range(4)] == [[0], [1], [2], [3]]
    assert [stage_indices(rank, 2, 3, "Interleaved1F1B") for rank in range(2)] == [[0, 2, 4], [1, 3, 5]]
    assert [stage_indices(rank, 2, 2, "ZBVZeroBubble") for rank in range(2)] == [[0, 3], [1, 2]]
    assert [stage_indices(rank, 2, 2, "DualPipeV") for rank in range(2)] == [[0, 3], [1, 2]]


def names_held(parallel: dict, llama: LlamaConfig) -> tuple[list[list[str]], list[int]]:
    """The parameters of each of this process's parts, and how many of them another stage has too."""
    stages = build_stages(parallel, llama=llama, local_batch_size=4)
    return [[name for name, _ in part.named_parameters()] for part in stages.model_parts], [len(stages.shared_params)]


@pytest.mark.parametrize("schedule", ["1F1B", "Interleaved1F1B", "DualPipeV"])
def test_each_parameter_is_on_one_stage(pool, schedule):
    found = pool.run(2, names_held, {"pp": 2, "pp_schedule": schedule}, EVEN)
    names = [name for parts, _ in found for part in parts for name in part]
    assert sorted(names) == sorted(name for name, _ in small_model(config=EVEN).named_parameters())
    assert [twice for _, twice in found] == [[0], [0]]


@pytest.mark.parametrize(("schedule", "copies"), [("1F1B", [1, 1]), ("Interleaved1F1B", [1, 1]), ("DualPipeV", [2, 0])])
def test_a_tied_embedding_is_at_both_ends(pool, schedule, copies):
    from dataclasses import replace

    tied = replace(EVEN, tied_embeddings=True)
    found = pool.run(2, names_held, {"pp": 2, "pp_schedule": schedule}, tied)
    names = [name for parts, _ in found for part in parts for name in part]
    assert names.count("tok_embeddings.weight") == 2
    assert [twice for _, (twice,) in found] == copies


def evaluate_and_train(parallel: dict) -> list[float]:
    """Losses of this process: evaluation, a step, and both again; gradients are added to, and not by evaluation."""
    stages = build_stages(parallel, llama=EVEN, local_batch_size=4)
    tokens = torch.randint(104, (4, 17), generator=torch.Generator().manual_seed(1))
    x, y = tokens[:, :-1], tokens[:, 1:]
    parameters = [p for part in stages.model_parts for p in part.parameters()]
    losses, gradients = [], []
    for _ in range(2):
        losses += [float(stages.evaluate(x, y)) / 64, float(stages.forward_backward(x, y, torch.tensor(64)))]
        gradients.append([full(p.grad).clone() for p in parameters])
    assert all(torch.equal(2 * once, twice) for once, twice in zip(*gradients, strict=True))
    return losses


@pytest.mark.parametrize(
    "schedule", ["GPipe", "1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"]
)
def test_evaluation_between_steps_gives_the_loss(pool, schedule):
    """Only the process with the last stage has a loss; the others have zero."""
    ranks = pool.run(2, evaluate_and_train, {"pp": 2, "pp_schedule": schedule})
    holder, other = (ranks[0], ranks[1]) if ranks[0][0] else (ranks[1], ranks[0])
    assert other == [0.0] * 4
    assert holder == pytest.approx([holder[0]] * 4, rel=1e-6)
    (alone,) = pool.run(1, evaluate_and_train, {"dp_shard": 1})
    assert holder == pytest.approx(alone, rel=1e-6)
