"""The reference's auxiliary loss and choices are the model's, and other choices are found."""

from __future__ import annotations

import dataclasses
import re

import pytest
import torch
from model_builder import SMALL, small_model

from titanlite.config.load import load_config
from titanlite.data.rows import Batch
from titanlite.distributed.mesh import Mesh
from titanlite.parallel.activation_checkpoint import recomputed
from titanlite.rules.degrees import AXES
from titanlite.tools.verify import compare
from titanlite.tools.verify.compare import fill_weights
from titanlite.tools.verify.routing import (
    Decisions,
    Routing,
    compare_decisions,
    token_places,
)

EXPERTS = dataclasses.replace(SMALL, num_experts=4, experts_per_token=2, expert_ffn_dim=24)


def test_equal_loads_cost_k_and_skewed_ones_more():
    model = small_model(config=EXPERTS)
    routing = Routing(model, weight=0.5)
    tokens = torch.randint(101, (2, 8), generator=torch.Generator().manual_seed(0))
    model(tokens)
    assert float(routing.loss(16).detach()) == pytest.approx(
        0.5 * 2
    )  # f is k / E in the first step
    for name, block in model.layers.items():
        probabilities = routing.logits[name][0].softmax(dim=-1)
        chosen = probabilities.sort(dim=-1, descending=True).indices[:, :2]
        counts = torch.stack([(chosen == expert).sum() for expert in range(4)])
        assert block.feed_forward.num_experts == 4
        routing.loads[name] = counts / 16
    skewed = float(routing.loss(16).detach())
    assert skewed > 0.5 * 2
    expected = dict(routing.loads)
    routing.finish_step()
    for name, (experts, margins) in routing.chosen.items():
        assert experts.shape == (16, 2)
        assert margins.shape == (16,)
        assert 0 <= margins.min() < margins.max() < 2
        counts = torch.stack([(experts == expert).sum() for expert in range(4)])
        assert torch.equal(counts / 16, expected[name])


def test_a_dense_model_has_no_router():
    model = small_model()
    routing = Routing(model, weight=0.5)
    model(torch.zeros(1, 4, dtype=torch.int64))
    assert routing.loss(4) == 0
    routing.finish_step()
    assert routing.chosen == {}


def test_each_token_is_compared_once_also_with_recomputation():
    """Two local batches of two rows, as forwards of one model; the second is recomputed too."""
    tokens = torch.randint(101, (4, 8), generator=torch.Generator().manual_seed(1))
    alone = small_model(config=EXPERTS)
    routing = Routing(alone, weight=0.0)
    alone(tokens)
    routing.finish_step()
    model = small_model(config=EXPERTS)
    for block in model.layers.values():
        block.wrap(recomputed)
    decisions = Decisions(model)
    places = [torch.arange(16), torch.arange(16, 32)]
    for rows in (tokens[:2], tokens[2:]):
        model(rows).sum().backward()
    compared = compare_decisions([decisions], places, routing.chosen, Batch(tokens, tokens))
    assert compared == (3 * 32, 0, "")
    for rows in (tokens[2:], tokens[:2]):  # in the wrong order
        model(rows).sum().backward()
    other = compare_decisions([decisions], places, routing.chosen, Batch(tokens, tokens))
    assert other.number == 3 * 32
    assert other.different > 16
    assert other.example.startswith("layers.0: token ")
    assert " of sequence 0 chose experts [" in other.example
    assert re.search(r"\], with a margin of \d+e-?\d+ of the largest logit$", other.example)


def test_a_batch_with_a_near_tie_is_drawn_again(monkeypatch):
    model = small_model(config=EXPERTS)
    routing = Routing(model, weight=0.0)
    config = load_config(["debug", "--training.seq_len=8", "--training.global_batch_size=4"])
    margins = []
    for draw in range(compare.DRAWS):
        model(compare.make_batch(1, config, 101, draw).tokens)
        margins.append(routing.take_smallest_margin())
    assert len(set(margins)) == compare.DRAWS
    assert min(margins) > 0
    largest = max(range(compare.DRAWS), key=margins.__getitem__)
    after_first = next(draw for draw, margin in enumerate(margins) if margin > margins[0])
    for limit, expected in ((0, 0), (margins[0], after_first), (1, largest)):
        monkeypatch.setattr(compare, "NEAR_TIE", limit)
        assert compare.draw_without_near_tie(1, config, model, routing) == expected
        assert routing.take_smallest_margin() == float("inf")


def places_of_rank(layout: dict[str, int], method: str) -> list[torch.Tensor]:
    degrees = dict.fromkeys(AXES, 1) | layout
    options = ["seq_len=8", "global_batch_size=4", "local_batch_size=2"]
    config = load_config(
        ["debug", f"--parallel.cp_method={method}", *(f"--training.{x}" for x in options)]
    )
    mesh = Mesh("cpu", degrees, 60)
    return token_places([2 * mesh.data_rank], config, mesh)


@pytest.mark.parametrize(
    ("layout", "method", "first_row"),  # first_row: the tokens of sequence 0 on rank 0
    [
        ({"cp": 2}, "all_gather", [0, 1, 6, 7]),
        ({"cp": 2}, "ulysses", [0, 1, 2, 3]),
        ({"tp": 2}, "all_gather", [0, 1, 2, 3]),
        ({"dp_shard": 2}, "all_gather", [0, 1, 2, 3, 4, 5, 6, 7]),
        ({"pp": 2}, "all_gather", [0, 1, 2, 3, 4, 5, 6, 7]),
    ],
)
def test_places_are_those_of_the_global_batch(pool, layout, method, first_row):
    ranks = pool.run(2, places_of_rank, layout, method)
    assert ranks[0][0][: len(first_row)].tolist() == first_row
    if "pp" in layout:  # both ranks see all microbatches, of one sequence each
        assert [places.tolist() for places in ranks[1]] == [list(range(8)), list(range(8, 16))]
    else:
        tokens = torch.cat([places for rank in ranks for places in rank])
        rows = 4 if "dp_shard" in layout else 2
        assert sorted(tokens.tolist()) == list(range(8 * rows))


def test_in_the_first_step_two_experts_tie_for_many_tokens():
    """A tie matters if one expert has a higher logit, and one a lower."""
    model = small_model(config=EXPERTS)
    fill_weights([model])
    routing = Routing(model, weight=0.0)
    model(torch.randint(101, (8, 16), generator=torch.Generator().manual_seed(3)))
    of_blocks = {name: logits[0] for name, logits in routing.logits.items()}
    routing.finish_step()
    for name, logits in of_blocks.items():
        assert (logits[:, :2] == 0).all()
        matters = (logits[:, 2:] > 0).sum(dim=1) == 1
        assert matters.sum() > 20
        experts, margins = routing.chosen[name]
        assert (experts[matters][:, 0] == 0).all()
        assert (experts[matters] != 1).all()
        assert (margins[matters] == 0).all()
