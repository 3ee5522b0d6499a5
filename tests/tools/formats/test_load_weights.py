"""Weights of a checkpoint in several processes: which bytes each reads, and a model that they share."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from messages import refused
from model_builder import EVEN, EXPORTED, GROUPED, ODD, build_stages, make_file, small_model
from torch.distributed.tensor import DTensor

from titanlite.model.flavors import LlamaConfig
from titanlite.model.generate import generate
from titanlite.runtime.errors import ConfigError
from titanlite.tokenizer.tokenizer import BUNDLED
from titanlite.tools.formats.convert import Options, convert
from titanlite.tools.formats.detect_format import open_full_state
from titanlite.tools.formats.full_state import Part
from titanlite.tools.formats.load_weights import load_model, read_weights, tokenizer_of
from titanlite.tools.formats.shared_model import SharedModel, open_shared

MODEL = dataclasses.replace(EVEN, qkv_bias=True)
EXPERTS = dataclasses.replace(EVEN, num_experts=4, experts_per_token=2, expert_ffn_dim=24)


def bytes_read(
    folder: Path, model: LlamaConfig, layouts: list[dict[str, int]]
) -> list[tuple[int, int, int]]:
    """Bytes read of the folder's tensors, and of this process's parts, all and those that are read
    in whole rows because columns are cut, in each layout.
    """
    total = 0
    original = Part.read

    def counted(part: Part, *arguments: Any) -> torch.Tensor:
        nonlocal total
        block = original(part, *arguments)
        total += block.nbytes
        return block

    Part.read = counted  # type: ignore[method-assign]
    found = []
    for layout in layouts:
        state: dict[str, torch.Tensor] = {}
        for part in build_stages(layout, llama=model).model_parts:
            state |= part.to_empty(device="cpu").state_dict()
        total = 0
        read_weights(folder, state, model, b"")
        own = {
            name: value.to_local() if isinstance(value, DTensor) else value
            for name, value in state.items()
        }
        by_columns = [
            own[name].nbytes for name in own if name.endswith((".wo.weight", ".w2.weight"))
        ]
        found.append((total, sum(value.nbytes for value in own.values()), sum(by_columns)))
    return found


def test_each_rank_reads_its_part_of_a_folder(pool, tmp_path):
    make_file(tmp_path / "a.pt", MODEL)
    convert(
        tmp_path / "a.pt", tmp_path / "hf", Options("hf", shard_size=20_000), log=lambda text: None
    )
    assert len(list((tmp_path / "hf").glob("*.safetensors"))) > 2
    layouts = [{"dp_shard": 2}, {"pp": 2}, {"tp": 2}]
    for found in pool.run(2, bytes_read, tmp_path / "hf", MODEL, layouts):
        for layout, (total, own, by_columns) in zip(layouts, found, strict=True):
            assert total == own + (by_columns if "tp" in layout else 0), layout


def test_each_rank_reads_its_experts_of_a_folder(pool, tmp_path):
    make_file(tmp_path / "a.pt", EXPERTS)
    convert(
        tmp_path / "a.pt", tmp_path / "hf", Options("hf", shard_size=20_000), log=lambda text: None
    )
    layouts = [{"dp_shard": 2}, {"dp_shard": 2, "ep": 2}, {"pp": 2}]
    for found in pool.run(2, bytes_read, tmp_path / "hf", EXPERTS, layouts):
        for layout, (total, own, _) in zip(layouts, found, strict=True):
            assert total == own, layout


def test_a_tokenizer_of_more_ids_than_the_model_is_refused(tmp_path):
    make_file(tmp_path / "x.pt", EVEN)
    full = open_full_state(tmp_path / "x.pt")
    with refused("has 4112 ids", f"the model {EVEN.vocab_size}"):
        tokenizer_of(full, str(BUNDLED))


CPU = torch.device("cpu")
SHAPES = {
    "tied": EXPORTED["debug"],
    "odd": ODD,
    "norms": dataclasses.replace(GROUPED, qk_norm=True),
    "experts": dataclasses.replace(GROUPED, num_experts=4, experts_per_token=2, expert_ffn_dim=40),
}
Row = tuple[list[int], int, int]  # a prompt, the number of new tokens, the seed
ROWS: list[Row] = [([5, 6, 7], 9, 0), ([8], 4, 1), ([9, 3], 11, 2)]


@pytest.fixture(params=SHAPES)
def checkpoint(request, tmp_path) -> Path:
    make_file(tmp_path / "model.pt", SHAPES[request.param])
    return tmp_path / "model.pt"


def texts_of(model: Any, rows: list[Row]) -> list[list[int]]:
    found = []
    for prompt, count, seed in rows:
        tokens = generate(model, prompt, count, stop=set(), temperature=0.9, top_k=20, seed=seed)
        found.append(list(tokens))
    return found


def shared_texts(path: Path, rows: list[list[Row]]) -> tuple[list[list[int]], int, bool]:
    """Texts of this rank's rows; the bytes of its parameters after that; and whether the logits of
    batches that differ between ranks are those of the whole model.
    """
    full = open_shared(path)
    shared = SharedModel(full, CPU, 32)
    found = texts_of(shared.model, rows[dist.get_rank()])
    shared.follow()
    stored = 0
    for parameter in shared.model.parameters():
        stored += parameter.to_local().untyped_storage().nbytes()
    tokens = torch.arange(6 + dist.get_rank())[None] % full.model.vocab_size
    with torch.no_grad():
        logits = shared.model(tokens)
    shared.follow()
    expected = load_model(full, CPU, 32)(tokens)
    return found, stored, torch.allclose(logits, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("checkpoint", ["odd"], indirect=True)
def test_three_processes_with_different_work(pool, checkpoint):
    """One has two rows, one has one, and one has none."""
    model = load_model(open_shared(checkpoint), CPU, 32)
    expected = [texts_of(model, ROWS[:2]), [], texts_of(model, ROWS[2:])]
    results = pool.run(3, shared_texts, checkpoint, [ROWS[:2], [], ROWS[2:]])
    assert [texts for texts, _, _ in results] == expected
    assert all(same for _, _, same in results)


def test_each_of_two_processes_holds_half_of_the_parameters(pool, checkpoint):
    """And gives the same texts, of all rows on one of them."""
    full = open_shared(checkpoint)
    expected = texts_of(load_model(full, CPU, 32), ROWS)
    results = pool.run(2, shared_texts, checkpoint, [ROWS, []])
    assert [texts for texts, _, _ in results] == [expected, []]
    assert all(same for _, _, same in results)
    whole = 4 * full.model.num_parameters
    for _, stored, _ in results:
        # An odd number of rows is rounded up
        assert 0.45 * whole < stored < 0.55 * whole


def failing(path: Path) -> str:
    """What this rank raises when it reads its part of the weights."""
    full = open_shared(path)
    try:
        SharedModel(full, CPU, 32)
    except ConfigError as error:
        return str(error)
    return ""


def test_nan_in_the_rows_of_one_rank_is_an_error_on_all(pool, tmp_path):
    weights = small_model(config=EVEN).state_dict()
    weights["norm.weight"][-1] = torch.nan  # a row of the last rank
    path = tmp_path / "a.pt"
    torch.save({"model": weights, "model_config": dataclasses.asdict(EVEN)}, path)
    message = f"{path}: 'norm.weight' holds NaN or infinity; expected numbers"
    assert pool.run(2, failing, path) == [message] * 2
    with refused(message):
        SharedModel(open_shared(path), CPU, 32)


@pytest.mark.parametrize("checkpoint", ["odd"], indirect=True)
def test_one_process_has_the_whole_model_and_follows_no_rank(checkpoint):
    full = open_shared(checkpoint)
    shared = SharedModel(full, CPU, 32)
    shared.follow()
    assert texts_of(shared.model, ROWS) == texts_of(load_model(full, CPU, 32), ROWS)
    assert shared.describe() == f"{full.model.num_parameters:,} parameters"
