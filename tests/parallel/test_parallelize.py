"""The order of the techniques: what it must be, by trying others; and what is equal in any order."""

from __future__ import annotations

import contextlib
import functools

import pytest
import torch
from model_builder import EVEN, full, small_model
from torch.distributed.tensor.parallel import loss_parallel

from titanlite.config.schema import ParallelConfig, RecomputeConfig
from titanlite.distributed.mesh import Mesh
from titanlite.model.llama import Llama
from titanlite.optim.loss import cross_entropy_sum
from titanlite.parallel.activation_checkpoint import apply_ac
from titanlite.parallel.compile import apply_compile
from titanlite.parallel.fsdp import apply_fsdp
from titanlite.parallel.parallelize import assign_shard
from titanlite.parallel.pipeline_parallel import split_into_stages
from titanlite.parallel.tensor_parallel import apply_tp, loss_parallel_cross_entropy_sum
from titanlite.rules.degrees import AXES
from titanlite.tools.verify.pool import WorkerError

TOKENS = torch.randint(101, (2, 17), generator=torch.Generator().manual_seed(3))


def largest_difference(degrees: dict[str, int], order: str, mode: str) -> float:
    """Applies the techniques in this order; the largest relative difference of a gradient from the
    plain model's.
    """
    mesh = Mesh("cpu", {axis: degrees.get(axis, 1) for axis in AXES}, 60)
    with torch.device("meta"):
        model = Llama(EVEN, 16)
    for technique in order.split():
        if technique == "pp":
            (model,) = split_into_stages(model, ParallelConfig(pp=2), mesh["pp"])
        elif technique == "tp":
            apply_tp(model, mesh["tp"], async_tp=False)
        elif technique == "fsdp":
            apply_fsdp(model, ParallelConfig(), mesh, torch.float32, torch.float32)
        elif technique == "ac":
            apply_ac(model, RecomputeConfig(mode=mode))
        elif technique == "compile":
            apply_compile(model, "aot_eager", RecomputeConfig())
    model.to_empty(device="cpu")
    model.init_weights(0, assign_shard)
    loss, scope = cross_entropy_sum, contextlib.nullcontext
    if mesh["tp"].size() > 1:
        loss, scope = (
            functools.partial(loss_parallel_cross_entropy_sum, mesh=mesh["tp"]),
            loss_parallel,
        )
    tokens = TOKENS.chunk(mesh.data_size)[mesh.data_rank]
    with scope():
        (loss(model(tokens[:, :-1]), tokens[:, 1:]) / 32).backward()
    plain = small_model(config=EVEN)
    (cross_entropy_sum(plain(TOKENS[:, :-1]), TOKENS[:, 1:]) / 32).backward()
    expected = {name: parameter.grad for name, parameter in plain.named_parameters()}
    return max(
        float((full(parameter.grad) - expected[name]).norm() / expected[name].norm())
        for name, parameter in model.named_parameters()
    )


@pytest.mark.parametrize(
    ("degrees", "order", "mode"),
    [
        ({"tp": 2}, "tp compile ac fsdp", "full"),  # the order of parallelize
        # likewise
        pytest.param({"tp": 2}, "tp ac compile fsdp", "selective", marks=pytest.mark.slow),
        pytest.param({"tp": 2}, "compile ac tp fsdp", "full", marks=pytest.mark.slow),
        pytest.param({"tp": 2}, "compile tp fsdp ac", "selective", marks=pytest.mark.slow),
        pytest.param({"dp_shard": 2}, "fsdp compile ac", "full", marks=pytest.mark.slow),
        pytest.param({"dp_shard": 2}, "fsdp ac compile", "selective", marks=pytest.mark.slow),
    ],
)
def test_orders_that_give_the_gradients_of_the_plain_model(pool, degrees, order, mode):
    assert max(pool.run(2, largest_difference, degrees, order, mode)) < 1e-5


@pytest.mark.parametrize(
    ("degrees", "order", "error"),
    [
        ({"tp": 2}, "fsdp tp", "Cannot distribute a DTensor with device mesh"),
        pytest.param(
            {"tp": 2}, "tp ac compile fsdp", "tensors_saved_with_vc_check", marks=pytest.mark.slow
        ),
        ({"pp": 2}, "fsdp pp", "FSDP does not support deepcopy"),
    ],
)
def test_orders_that_fail(pool, degrees, order, error):
    with pytest.raises(WorkerError, match=error):
        pool.run(2, largest_difference, degrees, order, "full")


def test_frozen_parameters_have_neither_gradients_nor_moments(pool, arguments, tmp_path):
    """And are saved as they were."""
    from runs import train_run

    from titanlite.tools.formats.convert import load_full_state

    frozen = "layers.0.attention.*"
    run = [*arguments, f"--training.frozen={frozen}", "--checkpoint.freq=1", "--checkpoint.keep=0"]
    assert pool.run(2, train_run, run) == [0, 0]
    first, last = (load_full_state(tmp_path / "debug", step) for step in (1, 6))
    assert first.tensors.keys() == last.tensors.keys()
    for name in first:
        same = torch.equal(first[name], last[name])
        assert same == name.startswith("layers.0.attention."), name
    moments = [name for name in last.others if ".exp_avg." in f"{name}."]
    assert moments
    assert not [name for name in moments if "layers.0.attention." in name]
