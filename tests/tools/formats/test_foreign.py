"""Stock DCP folders as a source of weights: bit-equal in any layout."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from model_builder import EVEN, SMALL, build_stages, full, small_model
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from titanlite.checkpoint.state import ModelState
from titanlite.runtime.errors import ConfigError
from titanlite.tools.formats.detect_format import open_full_state
from titanlite.tools.formats.load_weights import fill, on_all_ranks
from titanlite.tools.formats.stock import is_stock_dcp, read_folder

FLAVORS = {"small": SMALL, "even": EVEN}


def of(stages) -> dict[str, torch.Tensor]:
    return ModelState(stages.model_parts).state_dict()


def whole(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: full(w).clone() for name, w in weights.items()}


def save(folder: Path, parallel: dict, flavor: str, at_root: bool) -> dict[str, torch.Tensor]:
    """As a trainer with stock DCP saves: weights, AdamW, generators, numbers, nested lists."""
    stages = build_stages(parallel, 0, FLAVORS[flavor])
    (model,) = stages.model_parts
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    weights = of(stages)
    state = {
        **(weights if at_root else {"model": weights}),
        "optimizer": get_optimizer_state_dict(model, optimizer),
        "rng": {"cpu": torch.get_rng_state(), "rank": dist.get_rank()},
        "train_state": {"step": 3, "losses": [1.5, 2.5], "name": "run", "seen": {1, 2}},
        "dataloader": {
            "shards": [{"at": 7, "tokens": torch.arange(5)}, [1, [2, 3]]],
            "raw": b"x" * 300,
        },
        "empty": torch.empty(0),
        "scalar": torch.tensor(2.0, dtype=torch.bfloat16),
    }
    dcp.save(state, checkpoint_id=folder)
    return whole(weights)


def read_stock(folder: Path, state: dict[str, torch.Tensor]) -> None:
    on_all_ranks(lambda: fill(open_full_state(folder), state))


def read(folder: Path, parallel: dict, flavor: str) -> dict[str, torch.Tensor]:
    weights = of(build_stages(parallel, 1, FLAVORS[flavor]))
    read_stock(folder, weights)
    return whole(weights)


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() <= expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)


# From processes and layout to processes and layout; 101 ids, and 3 of 8 rows of wq on two: uneven
# shards
LAYOUTS = [
    pytest.param(1, {}, 2, {"dp_shard": 2}, "small", True, marks=pytest.mark.slow),
    (2, {"dp_shard": 2}, 1, {}, "small", False),
    (2, {"dp_shard": 2}, 2, {"tp": 2}, "even", True),
    pytest.param(2, {"tp": 2}, 2, {"pp": 2}, "even", True, marks=pytest.mark.slow),
    pytest.param(2, {"dp_replicate": 2}, 2, {"dp_shard": 2}, "small", True, marks=pytest.mark.slow),
]


@pytest.mark.slow
@pytest.mark.parametrize(("source", "layout", "target", "other", "flavor", "at_root"), LAYOUTS)
def test_any_layout_reads_what_stock_dcp_saved(
    pool, tmp_path, source, layout, target, other, flavor, at_root
):
    (expected, *_) = pool.run(source, save, tmp_path / "saved", layout, flavor, at_root)
    assert is_stock_dcp(tmp_path / "saved")
    found = pool.run(target, read, tmp_path / "saved", other, flavor)
    assert set().union(*found) == set(expected)
    for mine in found:
        assert_equal(mine, expected)


def test_one_process_reads_without_a_group_and_lists(pool, tmp_path):
    expected, _ = pool.run(2, save, tmp_path, {"dp_shard": 2}, "small", True)
    weights = small_model(seed=1).state_dict()
    read_stock(tmp_path, weights)
    assert_equal(weights, expected)
    full = open_full_state(tmp_path)
    assert {name: tensor.shape for name, tensor in full.tensors.items()} == {
        name: tuple(tensor.shape) for name, tensor in expected.items()
    }
    listed = full.others
    assert listed["scalar"].dtype == torch.bfloat16
    assert torch.equal(listed["scalar"].read(), torch.tensor(2.0, dtype=torch.bfloat16))
    assert "train_state.step" not in listed


def save_here(folder: Path, **tensors) -> Path:
    dcp.save(tensors, checkpoint_id=folder, no_dist=True)
    return folder


pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes_are_converted(tmp_path, dtype):
    saved = torch.randn(6, 5, 4).transpose(0, 1).to(dtype)
    target = torch.empty(saved.shape)
    read_stock(save_here(tmp_path, a=saved), {"a": target})
    assert torch.equal(target, saved.float())


def test_all_that_does_not_fit_is_one_error(tmp_path):
    save_here(
        tmp_path,
        **{
            "layers.0.wq": torch.ones(2, 3),
            "b": torch.ones(4),
            "c": torch.ones(2, dtype=torch.int64),
        },
    )
    state = {
        "layers.0.wg": torch.zeros(2, 3),
        "b": torch.zeros(5),
        "c": torch.zeros(2),
        "d": torch.zeros(1),
    }
    with pytest.raises(ConfigError) as caught:
        read_stock(tmp_path, state)
    missing, shape, dtype, other = caught.value.problems
    assert missing.endswith("has no 'layers.0.wg'; did you mean layers.0.wq?")
    assert other.endswith("has no 'd'")
    assert shape.endswith("'b' is (4,); the model's is (5,)")
    assert "'c' is torch.int64; allowed: torch.float32" in dtype
    assert not any(tensor.any() for tensor in state.values())


def test_many_missing_names_are_counted(tmp_path):
    save_here(tmp_path, model={"a": torch.ones(1)})
    with pytest.raises(ConfigError, match="and 92 more like these") as caught:
        read_stock(tmp_path, {f"a{i}": torch.ones(1) for i in range(100)})
    assert caught.value.problems[0].endswith("has no 'a0'; did you mean a?")


def test_a_folder_that_is_none(tmp_path):
    assert not is_stock_dcp(tmp_path)
    assert not is_stock_dcp(tmp_path / ("x" * 300))
    with pytest.raises(ConfigError, match="No such file"):
        read_folder(tmp_path)


def fail_on_one(folder: Path) -> str:
    state = {"a": torch.ones(2 + dist.get_rank())}
    try:
        read_stock(folder, state)
    except ConfigError as error:
        return str(error)
    return ""


def test_what_one_process_finds_all_raise(pool, tmp_path):
    save_here(tmp_path, a=torch.ones(2))
    first, second = pool.run(2, fail_on_one, tmp_path)
    assert first == second
    assert "'a' is (2,); the model's is (3,)" in first
