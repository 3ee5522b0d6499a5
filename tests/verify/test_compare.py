"""The comparison: it passes layouts that are right, and fails layouts broken on purpose."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from titanlite.model.flavors import LlamaConfig, resolve_flavor
from titanlite.verify.campaign import FIGURES, judge
from titanlite.verify.compare import make_batch, measure, reference
from titanlite.verify.ladder import Case, make_case
from titanlite.verify.pool import WorkerError

SMALL = ["debug", "--model.dim=32", "--model.ffn_dim=64", "--training.seq_len=32"]


def case(layout: str) -> tuple[Case, LlamaConfig]:
    made = make_case(SMALL, layout, "cpu")
    return made, resolve_flavor(made.config.model, 4112)


@pytest.fixture(scope="module")
def right(pool, tmp_path_factory) -> Path:
    """The reference of SMALL."""
    path = tmp_path_factory.mktemp("reference") / "right.pt"
    made, llama = case("dp_shard=1")
    pool.run(1, reference, made.config, llama, path)
    return path


def forget_a_gradient_sum(*arguments):
    """Context parallel whose keys and values get the gradient of this process's queries only."""
    from titanlite.parallel import context_parallel as context

    partial = context.Partial
    context.Partial = context.Replicate
    try:
        return measure(*arguments)
    finally:
        context.Partial = partial


def forget_the_positions(*arguments):
    """Context parallel whose tokens all believe to be at the beginning."""
    from titanlite.parallel import context_parallel

    original = context_parallel.apply_cp

    def apply(model, mesh, method):
        original(model, mesh, method)
        model.positions = torch.arange(model.seq_len // mesh.size())

    context_parallel.apply_cp = apply
    try:
        return measure(*arguments)
    finally:
        context_parallel.apply_cp = original


def forget_the_tied_sum(*arguments):
    """A tied embedding whose two ends keep gradients of their own."""
    from titanlite.parallel import pipeline_parallel

    original = pipeline_parallel.sum_shared_gradients
    pipeline_parallel.sum_shared_gradients = lambda params, mesh: None
    try:
        return measure(*arguments)
    finally:
        pipeline_parallel.sum_shared_gradients = original


def average_gradients(*arguments):
    """FSDP's default: a mean over processes instead of the sum."""
    from torch.distributed.fsdp import FSDPModule

    names = ("set_gradient_divide_factor", "set_force_sum_reduction_for_comms")
    kept = {name: getattr(FSDPModule, name) for name in names}
    for name in names:
        setattr(FSDPModule, name, lambda self, value: None)
    try:
        return measure(*arguments)
    finally:
        for name in names:
            setattr(FSDPModule, name, kept[name])


def compile_at_the_end(*arguments):
    """A graph more in the fifth step."""
    from titanlite.verify import compare

    original, calls = compare.num_compiled_graphs, []

    def graphs():
        calls.append(None)
        return original() + (len(calls) == compare.STEPS)

    compare.num_compiled_graphs = graphs
    try:
        return measure(*arguments)
    finally:
        compare.num_compiled_graphs = original


def count_locally(*arguments):
    """A loss divided by this process's number of targets: a mean of means."""
    from titanlite.distributed.mesh import Mesh

    original = Mesh.sum_counts
    Mesh.sum_counts = lambda mesh, count: count * 2
    try:
        return measure(*arguments)
    finally:
        Mesh.sum_counts = original


def forget_a_reduction(*arguments):
    """Tensor parallel whose last matrix of a block hands on its part of the sum, not the sum."""
    from torch.distributed.tensor import DTensor, Replicate, Shard

    from titanlite.parallel import tensor_parallel as tensor

    class Forgetful(tensor.RowwiseParallel):
        @staticmethod
        def _prepare_output_fn(output_layouts, use_local_output, mod, outputs, device_mesh):
            own = DTensor.from_local(outputs.to_local(), device_mesh, [Replicate()])
            return own.redistribute(placements=[Shard(1)]).to_local()

    plan = tensor.block_plan
    tensor.block_plan = lambda: {**plan(), "feed_forward.w2": Forgetful(output_layouts=tensor.SEQUENCE_SHARD)}
    try:
        return measure(*arguments)
    finally:
        tensor.block_plan = plan


def count_replicas_once_each(*arguments):
    """A gradient norm in which what two processes hold counts twice."""
    from titanlite.optim import clip

    original, clip._replication = clip._replication, lambda parameter: 1
    try:
        return measure(*arguments)
    finally:
        clip._replication = original


def run(pool, function, layout: str, right: Path) -> dict:
    made, llama = case(layout)
    ranks = pool.run(made.processes, function, made.config, llama, right)
    return judge(made, {name: max(rank[name] for rank in ranks) for name in FIGURES}, 0.0)


@pytest.mark.parametrize("layout", ["cp=2", "pp=2", "dp_shard=2", "tp=2", "dp_replicate=2"])
def test_right_layouts_pass(pool, right, layout):
    row = run(pool, measure, layout, right)
    assert row["passed"], row
    assert all(row[name] >= 0 for name in FIGURES)
    assert row["gradient"] > 0, "two ways to add up cannot agree in every bit"


@pytest.mark.parametrize(
    ("function", "layout", "first"),
    [
        (forget_a_gradient_sum, "cp=2", "gradient"),
        (forget_the_positions, "cp=2", "gradient"),
        (forget_the_tied_sum, "pp=2", "gradient"),
        (average_gradients, "dp_shard=2", "gradient"),
        (count_locally, "dp_shard=2", "loss"),
        (forget_a_reduction, "tp=2", "gradient"),
        (count_replicas_once_each, "dp_replicate=2", "grad_norm"),
    ],
)
def test_wrong_layouts_fail(pool, right, function, layout, first):
    row = run(pool, function, layout, right)
    assert not row["passed"], row
    assert row[first] > 1e-4, row


def test_bf16_does_not_hide_a_forgotten_reduction(pool, right):
    layout = "tp=2,training.compute_dtype=bfloat16"
    assert run(pool, measure, layout, right)["passed"]
    assert not run(pool, forget_a_reduction, layout, right)["passed"]


def test_a_late_recompilation_fails(pool, right):
    layout = "dp_shard=2,compile.enabled,compile.backend=aot_eager"
    assert run(pool, measure, layout, right)["passed"]
    with pytest.raises(WorkerError, match=r"compiled 1 graph.*second step"):
        run(pool, compile_at_the_end, layout, right)


def test_batches_have_uneven_targets():
    counts = [int((labels >= 0).sum()) for labels in make_batch(0, 8, 32, 101).labels]
    assert len(set(counts)) > 4
    assert max(counts) == 32
