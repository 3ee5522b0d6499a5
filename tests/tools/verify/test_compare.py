"""The comparison: it passes layouts that are right, and fails layouts broken on purpose."""

from __future__ import annotations

import contextlib
from pathlib import Path
from unittest import mock

import pytest
import torch

from titanlite.model.flavors import LlamaConfig, resolve_flavor
from titanlite.parallel.lora import apply_dropout as lora_dropout
from titanlite.tools.verify.campaign import FIGURES, judge
from titanlite.tools.verify.compare import make_batch, measure, reference
from titanlite.tools.verify.ladder import Case, make_case
from titanlite.tools.verify.pool import WorkerError

ADAPTED = "lora.rank=4,lora.targets=wq wo w1 w2"
MASKED = f"{ADAPTED},lora.dropout=0.1"
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

    with mock.patch.object(context, "Partial", context.Replicate):
        return measure(*arguments)


def forget_the_positions(*arguments):
    """Context parallel whose tokens all believe to be at the beginning."""
    from titanlite.parallel import parallelize

    original = parallelize.apply_cp

    def apply(model, mesh, method):
        original(model, mesh, method)
        model.positions = torch.arange(model.seq_len // mesh.size())

    with mock.patch.object(parallelize, "apply_cp", apply):
        return measure(*arguments)


def forget_the_tied_sum(*arguments):
    """A tied embedding whose two pipeline stages do not add up their gradients."""
    from titanlite.parallel import stages

    with mock.patch.object(stages, "sum_shared_gradients", return_value=None):
        return measure(*arguments)


def average_gradients(*arguments):
    """FSDP's default: a mean over processes instead of the sum."""
    from torch.distributed.fsdp import FSDPModule

    names = ("set_gradient_divide_factor", "set_force_sum_reduction_for_comms")
    with mock.patch.multiple(FSDPModule, **dict.fromkeys(names, lambda self, value: None)):
        return measure(*arguments)


def compile_at_the_end(*arguments):
    """A graph more in the fifth step."""
    from titanlite.tools.verify import compare

    original, calls = compare.num_compiled_graphs, []

    def graphs():
        calls.append(None)
        return original() + (len(calls) == compare.STEPS)

    with mock.patch.object(compare, "num_compiled_graphs", graphs):
        return measure(*arguments)


def count_locally(*arguments):
    """A loss divided by this process's number of targets: a mean of means."""
    from titanlite.distributed.mesh import Mesh

    with mock.patch.object(Mesh, "sum_counts", lambda mesh, count: count * 2):
        return measure(*arguments)


def forget_a_reduction(*arguments):
    """Tensor parallel whose last matrix of a block returns its partial sum without reducing it."""
    from torch.distributed.tensor import DTensor, Replicate, Shard

    from titanlite.parallel import tensor_parallel as tensor

    class Forgetful(tensor.RowwiseParallel):
        @staticmethod
        def _prepare_output_fn(output_layouts, use_local_output, mod, outputs, device_mesh):
            own = DTensor.from_local(outputs.to_local(), device_mesh, [Replicate()])
            return own.redistribute(placements=[Shard(1)]).to_local()

    plan = {
        **tensor.block_plan(qk_norm=False),
        "feed_forward.w2": Forgetful(output_layouts=tensor.SEQUENCE_SHARD),
    }
    with mock.patch.object(tensor, "block_plan", return_value=plan):
        return measure(*arguments)


def forget_the_sum_of_an_adapter(*arguments):
    """Tensor parallel whose ranks each keep their term of the gradient of a factor they all hold,
    and of the activations.
    """
    from titanlite.parallel import lora

    with mock.patch.object(lora, "Partial", lora.Replicate):
        return measure(*arguments)


def forget_the_scale_of_an_adapter(*arguments):
    """The factors are multiplied, and alpha / rank is not."""
    from titanlite.config.schema import LoraConfig

    with mock.patch.object(LoraConfig, "scale", 1.0):
        return measure(*arguments)


def forget_the_first_feature(*arguments):
    """Tensor parallel whose ranks all take their features for the first ones."""
    from titanlite.parallel import lora

    original = lora.dropped

    def dropped(keys, salt, first, count, p):
        return original(keys, salt, 0, count, p)

    with mock.patch.object(lora, "dropped", dropped):
        return measure(*arguments)


def forget_to_cut_the_keys(*arguments):
    """Context parallel whose ranks all have the keys of the first tokens."""
    from titanlite.parallel.context_parallel import BatchSharder

    original = BatchSharder.shard_batch

    @contextlib.contextmanager
    def shard(self, batch):
        with original(self, batch) as part:
            yield part._replace(dropout_keys=batch.dropout_keys[:, : part.tokens.shape[1]])

    with mock.patch.object(BatchSharder, "shard_batch", shard):
        return measure(*arguments)


def take_the_keys_of_another_microbatch(*arguments):
    """Recomputation that has the keys of the latest forward, as if it repeated less."""
    from titanlite.parallel import parallelize

    recompute = parallelize.apply_ac

    def apply_ac(model, config):
        recompute(model, config)
        lora_dropout(model)

    patches = {"apply_ac": apply_ac, "apply_dropout": lambda model: None}
    with mock.patch.multiple(parallelize, **patches):
        return measure(*arguments)


def count_replicas_once_each(*arguments):
    """A gradient norm in which what two processes hold counts twice."""
    from titanlite.distributed import dtensor

    with mock.patch.object(dtensor, "num_holders", return_value=1):
        return measure(*arguments)


def forget_the_documents(*arguments):
    """A causal mask over the whole sequence, with the right positions."""
    from titanlite.model.llama import Llama

    original = Llama.document_mask

    def mask(documents, *ends, **window):
        return original(torch.zeros_like(documents), *ends, **window)

    with mock.patch.object(Llama, "document_mask", staticmethod(mask)):
        return measure(*arguments)


def forget_the_positions_in_documents(*arguments):
    """Context parallel whose ranks all compute RoPE at the positions of the first tokens."""
    from titanlite.parallel.context_parallel import BatchSharder

    original = BatchSharder.shard_batch

    @contextlib.contextmanager
    def shard(self, batch):
        with original(self, batch) as part:
            yield part._replace(positions=batch.positions[:, : part.tokens.shape[1]])

    with mock.patch.object(BatchSharder, "shard_batch", shard):
        return measure(*arguments)


def number_documents_of_the_part(*arguments):
    """Context parallel whose ranks make the mask from their part of the positions."""
    from titanlite.parallel import context_parallel

    original = context_parallel.document_masks

    def masks(documents, mesh, build, window):
        here = context_parallel.local_positions(documents.shape[1], mesh, "all_gather")
        return original(documents[:, here].repeat_interleave(mesh.size(), dim=1), mesh, build)

    with mock.patch.object(context_parallel, "document_masks", masks):
        return measure(*arguments)


def forget_the_window(*arguments):
    """A causal mask over the whole sequence."""
    from titanlite.model.llama import Llama

    original = Llama.document_mask

    def mask(documents, start=0, end=None, window=0):
        return original(documents, start, end)

    with mock.patch.object(Llama, "document_mask", staticmethod(mask)):
        return measure(*arguments)


def forget_the_window_in_context_parallel(*arguments):
    """The masks of chunks by causality alone."""
    from titanlite.parallel import context_parallel

    original = context_parallel.document_masks

    def masks(documents, mesh, build, window):
        return original(documents, mesh, build)

    with mock.patch.object(context_parallel, "document_masks", masks):
        return measure(*arguments)


def see_one_position_more_on_one_rank(*arguments):
    """Context parallel whose last rank has a window of one position more."""
    from titanlite.parallel import context_parallel

    original = context_parallel.document_masks

    def masks(documents, mesh, build, window):
        is_last = mesh.get_local_rank() == mesh.size() - 1
        return original(documents, mesh, build, window + int(is_last))

    with mock.patch.object(context_parallel, "document_masks", masks):
        return measure(*arguments)


def give_all_blocks_the_window(*arguments):
    """Pipeline stages in which every block has the window."""
    from titanlite.parallel import pipeline_parallel

    original = pipeline_parallel._keep_modules

    def keep(model, names):
        part = original(model, names)
        part.windows = [7] * len(part.windows)
        return part

    with mock.patch.object(pipeline_parallel, "_keep_modules", keep):
        return measure(*arguments)


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


@pytest.mark.parametrize(
    ("function", "layout"),
    [
        pytest.param(measure, "dp_shard=2,tp=2", marks=pytest.mark.slow),
        (forget_the_sum_of_an_adapter, "tp=2"),
        pytest.param(average_gradients, "dp_shard=2", marks=pytest.mark.slow),
        pytest.param(forget_the_scale_of_an_adapter, "dp_shard=2", marks=pytest.mark.slow),
    ],
)
def test_adapters_that_are_not_as_in_one_process_fail(pool, adapted, function, layout):
    row = run(pool, function, f"{layout},{ADAPTED}", adapted)
    assert row["passed"] == (function is measure), row
    assert (row["gradient"] > 1e-4) == (function is not measure), row


@pytest.fixture(scope="module")
def masked(pool, tmp_path_factory) -> Path:
    """The reference with dropout on adapters."""
    path = tmp_path_factory.mktemp("reference") / "masked.pt"
    made, llama = case(f"dp_shard=1,{MASKED}")
    pool.run(1, reference, made.config, llama, path)
    return path


@pytest.mark.parametrize(
    ("function", "layout"),
    [
        pytest.param(measure, "cp=2,tp=2", marks=pytest.mark.slow),
        pytest.param(measure, "pp=2,recompute.mode=full", marks=pytest.mark.slow),
        pytest.param(forget_the_first_feature, "tp=2", marks=pytest.mark.slow),
        (forget_to_cut_the_keys, "cp=2"),
        pytest.param(
            take_the_keys_of_another_microbatch,
            "pp=2,recompute.mode=full",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_masks_that_are_not_those_of_one_process_fail(pool, masked, function, layout):
    row = run(pool, function, f"{layout},{MASKED}", masked)
    assert row["passed"] == (function is measure), row
    assert (row["gradient"] > 1e-4) == (function is not measure), row


@pytest.fixture(scope="module")
def adapted(pool, tmp_path_factory) -> Path:
    """The reference with adapters on a frozen model."""
    path = tmp_path_factory.mktemp("reference") / "adapted.pt"
    made, llama = case(f"dp_shard=1,{ADAPTED}")
    pool.run(1, reference, made.config, llama, path)
    return path


@pytest.fixture(scope="module")
def documents_alone(pool, tmp_path_factory) -> Path:
    """The reference with several documents in a sequence."""
    path = tmp_path_factory.mktemp("reference") / "documents.pt"
    made, llama = case("dp_shard=1,data.document_mask")
    pool.run(1, reference, made.config, llama, path)
    return path


@pytest.mark.slow
@pytest.mark.parametrize(
    ("function", "layout"),
    [
        (measure, "cp=2"),
        (forget_the_documents, "dp_shard=1"),
        (forget_the_positions_in_documents, "cp=2"),
        pytest.param(number_documents_of_the_part, "cp=2", marks=pytest.mark.slow),
        pytest.param(
            forget_the_positions_in_documents, "cp=2,cp_method=ulysses", marks=pytest.mark.slow
        ),
        *(
            pytest.param(forget_the_documents, layout, marks=pytest.mark.slow)
            for layout in ("tp=2", "cp=2", "cp=2,cp_method=ulysses", "pp=2")
        ),
    ],
)
def test_documents_that_are_not_as_if_alone_fail(pool, documents_alone, function, layout):
    row = run(pool, function, f"{layout},data.document_mask", documents_alone)
    assert row["passed"] == (function is measure), row
    assert (row["gradient"] > 1e-4) == (function is not measure), row


WINDOW = "model.sliding_window=7,model.window_layers=0-1"


@pytest.fixture(scope="module")
def windowed(pool, tmp_path_factory) -> Path:
    """The reference with a sliding window in two of four blocks."""
    path = tmp_path_factory.mktemp("reference") / "windowed.pt"
    made, llama = case(f"dp_shard=1,{WINDOW}")
    pool.run(1, reference, made.config, llama, path)
    return path


@pytest.mark.slow
@pytest.mark.parametrize(
    ("function", "layout"),
    [
        (measure, "cp=2"),
        (measure, "pp=2"),
        (forget_the_window, "dp_shard=1"),
        (forget_the_window_in_context_parallel, "cp=2"),
        (see_one_position_more_on_one_rank, "cp=2"),
        (give_all_blocks_the_window, "pp=2"),
        *(
            pytest.param(forget_the_window, layout, marks=pytest.mark.slow)
            for layout in ("tp=2", "cp=2", "cp=2,cp_method=ulysses", "pp=2")
        ),
    ],
)
def test_windows_that_are_not_as_in_one_process_fail(pool, windowed, function, layout):
    row = run(pool, function, f"{layout},{WINDOW}", windowed)
    assert row["passed"] == (function is measure), row
    assert (row["gradient"] > 1e-4) == (function is not measure), row


@pytest.mark.slow
def test_bf16_does_not_hide_a_forgotten_reduction(pool, right):
    layout = "tp=2,training.compute_dtype=bfloat16"
    assert run(pool, measure, layout, right)["passed"]
    assert not run(pool, forget_a_reduction, layout, right)["passed"]


@pytest.mark.slow
def test_a_late_recompilation_fails(pool, right):
    layout = "dp_shard=2,compile.enabled,compile.backend=aot_eager"
    assert run(pool, measure, layout, right)["passed"]
    with pytest.raises(WorkerError, match=r"compiled 1 graph.*second step"):
        run(pool, compile_at_the_end, layout, right)


def test_batches_have_uneven_targets():
    made, _ = case("dp_shard=2")
    counts = [int((labels >= 0).sum()) for labels in make_batch(0, made.config, 101).labels]
    assert len(set(counts)) > 4
    assert max(counts) == 32
