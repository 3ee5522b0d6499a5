"""The comparison: it passes layouts that are right, and fails layouts broken on purpose."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch

from titanlite.config.schema import LoraConfig
from titanlite.model import llama
from titanlite.model.flavors import LlamaConfig, resolve_flavor
from titanlite.model.llama import Llama
from titanlite.optim.router_balance import ObservedProbabilities
from titanlite.parallel import context_parallel, lora, parallelize, pipeline_parallel
from titanlite.parallel.context_parallel import BatchSharder
from titanlite.tools.faults.catalogue import find_fault
from titanlite.tools.faults.fault import replaced
from titanlite.tools.verify import compare
from titanlite.tools.verify.campaign import FIGURES, judge
from titanlite.tools.verify.compare import make_batch, measure, reference
from titanlite.tools.verify.ladder import EXPERTS, Case, make_case
from titanlite.tools.verify.pool import WorkerError

ADAPTED = "lora.rank=4,lora.targets=wq wo w1 w2"
MASKED = f"{ADAPTED},lora.dropout=0.1"
DOCUMENTS = "data.document_mask"
WINDOW = "model.sliding_window=7,model.window_layers=0-1"
MIXTURE = ",".join(f"{key}={value}" for key, value in EXPERTS.items())
PADDED = f"data.packing=best_fit,{MIXTURE}"
SMALL = ["debug", "--model.dim=32", "--model.ffn_dim=64", "--training.seq_len=32"]


# --- faults that are not in the catalogue of `titanlite break`
# They are mistakes in code that only titanlite has: windows, and dropout masks that do not depend
# on the layout. No other trainer shipped them, so there is no thread to read about them.


def adapters_not_scaled() -> AbstractContextManager[None]:
    """The factors are multiplied, and alpha / rank is not."""
    return replaced(LoraConfig, "scale", 1.0)


def features_from_the_first() -> AbstractContextManager[None]:
    """Every tensor parallel rank draws the dropout mask of the first features."""
    original = lora.dropped

    def dropped(keys: Any, salt: int, first: int, count: int, p: float) -> Any:
        return original(keys, salt, 0, count, p)

    return replaced(lora, "dropped", dropped)


def change_the_part(change: Callable[[Any, Any], Any]) -> AbstractContextManager[None]:
    """Context parallel ranks get another part of the batch: change(batch, part)."""
    original = BatchSharder.shard_batch

    def shard_batch(self: BatchSharder, batch: Any) -> Any:
        return change(batch, original(self, batch))

    return replaced(BatchSharder, "shard_batch", shard_batch)


def keys_not_cut() -> AbstractContextManager[None]:
    """Every context parallel rank has the dropout keys of the first tokens."""

    def change(batch: Any, part: Any) -> Any:
        return part._replace(dropout_keys=batch.dropout_keys[:, : part.tokens.shape[1]])

    return change_the_part(change)


def padding_is_observed() -> AbstractContextManager[None]:
    """Padding counts as a token in the statistics and the auxiliary loss of the routers."""
    original = ObservedProbabilities.forward

    def forward(self: Any, logits: Any, padding: Any) -> Any:
        return original(self, logits)

    return replaced(ObservedProbabilities, "forward", forward)


def padding_not_cut() -> AbstractContextManager[None]:
    """Every context parallel rank has the padding of the first positions."""

    def change(batch: Any, part: Any) -> Any:
        return part._replace(padding=batch.padding[:, : part.tokens.shape[1]])

    return change_the_part(change)


def positions_not_cut() -> AbstractContextManager[None]:
    """Every context parallel rank has the positions in documents of the first tokens."""

    def change(batch: Any, part: Any) -> Any:
        return part._replace(positions=batch.positions[:, : part.tokens.shape[1]])

    return change_the_part(change)


@contextlib.contextmanager
def keys_of_the_latest_forward() -> Iterator[None]:
    """Recomputation uses the dropout keys of the latest forward, which is of another microbatch."""
    recompute = parallelize.apply_ac

    def apply_ac(model: Llama, config: Any) -> None:
        recompute(model, config)
        lora.apply_dropout(model)

    with (
        replaced(parallelize, "apply_ac", apply_ac),
        replaced(parallelize, "apply_dropout", lambda model: None),
    ):
        yield


def change_the_mask(
    change: Callable[..., tuple[torch.Tensor, int]],
) -> AbstractContextManager[None]:
    """Context parallel ranks make masks of other arguments: change(documents, mesh, window)."""
    original = context_parallel.document_masks

    def masks(documents: torch.Tensor, mesh: Any, build: Any, window: int) -> Any:
        documents, window = change(documents, mesh, window)
        return original(documents, mesh, build, window)

    return replaced(context_parallel, "document_masks", masks)


def documents_of_the_part() -> AbstractContextManager[None]:
    """Context parallel ranks make the mask from the documents of their own tokens."""

    def change(documents: torch.Tensor, mesh: Any, window: int) -> tuple[torch.Tensor, int]:
        here = context_parallel.local_positions(documents.shape[1], mesh, "all_gather")
        return documents[:, here].repeat_interleave(mesh.size(), dim=1), window

    return change_the_mask(change)


def window_lost_in_context_parallel() -> AbstractContextManager[None]:
    """The masks of chunks are causal, without the window."""
    return change_the_mask(lambda documents, mesh, window: (documents, 0))


def window_larger_on_one_rank() -> AbstractContextManager[None]:
    """The last context parallel rank has a window of one position more."""

    def change(documents: torch.Tensor, mesh: Any, window: int) -> tuple[torch.Tensor, int]:
        is_last = mesh.get_local_rank() == mesh.size() - 1
        return documents, window + int(is_last)

    return change_the_mask(change)


def window_lost() -> AbstractContextManager[None]:
    """The mask of every block is causal, without the window."""
    original = llama.document_mask

    def mask(documents: Any, start: int = 0, end: int | None = None, window: int = 0) -> Any:
        return original(documents, start, end)

    return replaced(llama, "document_mask", mask)


def window_in_all_blocks() -> AbstractContextManager[None]:
    """Every block of a pipeline stage has the window."""
    original = pipeline_parallel._keep_modules

    def keep(model: Llama, names: Any) -> Any:
        part = original(model, names)
        part.windows = [7] * len(part.windows)
        return part

    return replaced(pipeline_parallel, "_keep_modules", keep)


def compiled_at_the_end() -> AbstractContextManager[None]:
    """The fifth step compiles a graph more."""
    original = compare.num_compiled_graphs
    calls: list[None] = []

    def graphs() -> int:
        calls.append(None)
        return original() + (len(calls) == compare.STEPS)

    return replaced(compare, "num_compiled_graphs", graphs)


OWN = {
    plant.__name__: plant
    for plant in (
        adapters_not_scaled,
        features_from_the_first,
        keys_not_cut,
        padding_is_observed,
        padding_not_cut,
        positions_not_cut,
        keys_of_the_latest_forward,
        documents_of_the_part,
        window_lost_in_context_parallel,
        window_larger_on_one_rank,
        window_lost,
        window_in_all_blocks,
        compiled_at_the_end,
    )
}
RIGHT = "right"  # no fault


def measure_with(fault: str, *arguments: Any) -> dict[str, float]:
    """In a worker: the comparison, with a fault of this file or of the catalogue."""
    if fault == RIGHT:
        return measure(*arguments)
    plant = OWN[fault] if fault in OWN else find_fault(fault).plant
    with plant():
        return measure(*arguments)


# --- the comparison


def case(layout: str) -> tuple[Case, LlamaConfig]:
    made = make_case(SMALL, layout, "cpu")
    return made, resolve_flavor(made.config.model, 4112)


def run(pool, fault: str, layout: str, expected: Path) -> dict:
    made, llama = case(layout)
    ranks = pool.run(made.processes, measure_with, fault, made.config, llama, expected)
    return judge(made, {name: max(rank[name] for rank in ranks) for name in FIGURES}, 0.0)


def assert_only_right_passes(row: dict, fault: str) -> None:
    assert row["passed"] == (fault == RIGHT), row
    assert (row["gradient"] > 1e-4) == (fault != RIGHT), row


@pytest.fixture(scope="module")
def references(pool, tmp_path_factory) -> Callable[[str], Path]:
    """Settings -> the reference of one process with them; each is computed once."""
    folder = tmp_path_factory.mktemp("references")
    known: dict[str, Path] = {}

    def reference_of(settings: str) -> Path:
        if settings not in known:
            known[settings] = folder / f"{len(known)}.pt"
            made, llama = case(f"dp_shard=1,{settings}" if settings else "dp_shard=1")
            pool.run(1, reference, made.config, llama, known[settings])
        return known[settings]

    return reference_of


@pytest.mark.parametrize("layout", ["cp=2", "pp=2", "dp_shard=2", "tp=2", "dp_replicate=2"])
def test_right_layouts_pass(pool, references, layout):
    row = run(pool, RIGHT, layout, references(""))
    assert row["passed"], row
    assert all(row[name] >= 0 for name in FIGURES)
    assert row["gradient"] > 0, "two ways to add up cannot agree in every bit"


@pytest.mark.parametrize(
    ("fault", "layout", "figure"),
    [
        ("cp-key-gradient", "cp=2", "gradient"),
        ("cp-positions", "cp=2", "gradient"),
        ("tied-embedding", "pp=2", "gradient"),
        ("gradients-averaged", "dp_shard=2", "gradient"),
        ("rank-means", "dp_shard=2", "loss"),
        ("partial-sums", "tp=2", "gradient"),
        ("replicas-in-norm", "dp_replicate=2", "grad_norm"),
    ],
)
def test_wrong_layouts_fail(pool, references, fault, layout, figure):
    row = run(pool, fault, layout, references(""))
    assert not row["passed"], row
    assert row[figure] > 1e-4, row


def slow(*values: str):
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("fault", "layout"),
    [
        slow(RIGHT, "dp_shard=2,tp=2"),
        ("adapter-gradient", "tp=2"),
        slow("gradients-averaged", "dp_shard=2"),
        slow("adapters_not_scaled", "dp_shard=2"),
    ],
)
def test_adapters_that_are_not_as_in_one_process_fail(pool, references, fault, layout):
    row = run(pool, fault, f"{layout},{ADAPTED}", references(ADAPTED))
    assert_only_right_passes(row, fault)


@pytest.mark.parametrize(
    ("fault", "layout"),
    [
        slow(RIGHT, "cp=2,tp=2"),
        slow(RIGHT, "pp=2,recompute.mode=full"),
        slow("features_from_the_first", "tp=2"),
        ("keys_not_cut", "cp=2"),
        slow("keys_of_the_latest_forward", "pp=2,recompute.mode=full"),
    ],
)
def test_dropout_masks_that_are_not_those_of_one_process_fail(pool, references, fault, layout):
    row = run(pool, fault, f"{layout},{MASKED}", references(MASKED))
    assert_only_right_passes(row, fault)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "layout"),
    [
        (RIGHT, "cp=2"),
        ("document-mask-lost", "dp_shard=1"),
        ("document-mask-lost", "tp=2"),
        ("document-mask-lost", "cp=2"),
        ("document-mask-lost", "cp=2,cp_method=ulysses"),
        ("document-mask-lost", "pp=2"),
        ("positions_not_cut", "cp=2"),
        ("positions_not_cut", "cp=2,cp_method=ulysses"),
        ("documents_of_the_part", "cp=2"),
    ],
)
def test_documents_that_are_not_as_if_alone_fail(pool, references, fault, layout):
    row = run(pool, fault, f"{layout},{DOCUMENTS}", references(DOCUMENTS))
    assert_only_right_passes(row, fault)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "layout"),
    [
        (RIGHT, "cp=2"),
        (RIGHT, "pp=2"),
        ("window_lost", "dp_shard=1"),
        ("window_lost", "tp=2"),
        ("window_lost", "cp=2"),
        ("window_lost", "cp=2,cp_method=ulysses"),
        ("window_lost", "pp=2"),
        ("window_lost_in_context_parallel", "cp=2"),
        ("window_larger_on_one_rank", "cp=2"),
        ("window_in_all_blocks", "pp=2"),
    ],
)
def test_windows_that_are_not_as_in_one_process_fail(pool, references, fault, layout):
    row = run(pool, fault, f"{layout},{WINDOW}", references(WINDOW))
    assert_only_right_passes(row, fault)


@pytest.mark.slow
@pytest.mark.parametrize("fault", [RIGHT, "ties-by-arrival"])
@pytest.mark.parametrize(
    "layout",
    [
        "dp_shard=2,ep=2",
        "dp_shard=1",
        "tp=2",
        "cp=2",
        "cp=2,cp_method=ulysses,ep=2",
        "pp=2,pp_microbatch_size=2",
        "dp_replicate=2,recompute.mode=full",
    ],
)
def test_in_every_layout_routers_break_ties_as_in_one_process(pool, references, layout, fault):
    expected = references(MIXTURE)
    made, llama = case(f"{layout},{MIXTURE}")
    if fault == RIGHT:
        ranks = pool.run(made.processes, measure_with, fault, made.config, llama, expected)
        assert {rank["decisions"] for rank in ranks} == {5 * 4 * 8 * 32}
    else:
        with pytest.raises(WorkerError, match=r"step 1, layers\.\d: token \d+ of .* chose experts"):
            pool.run(made.processes, measure_with, fault, made.config, llama, expected)


@pytest.mark.parametrize(
    ("fault", "layout", "added"),
    [
        (RIGHT, "cp=2", ""),
        slow(RIGHT, "cp=2,cp_method=ulysses,ep=2", ""),
        slow(RIGHT, "tp=2,recompute.mode=selective", ""),
        slow(RIGHT, "tp=2", f",{DOCUMENTS},lora.rank=4,lora.dropout=0.1"),
        slow(RIGHT, "pp=2,recompute.mode=full", ""),
        slow(RIGHT, "pp=2,pp_schedule=ZBVZeroBubble", ""),
        slow(RIGHT, "dp_shard=2,ep=2,compile.enabled,compile.backend=aot_eager", ""),
        slow("padding_is_observed", "dp_shard=1", ""),
        slow("padding_not_cut", "cp=2", ""),
    ],
)
def test_padding_that_routers_count_fails(pool, references, fault, layout, added):
    """The reference computes the same sequences without their padding."""
    settings = PADDED + added
    expected = references(settings)
    if fault == RIGHT:
        row = run(pool, fault, f"{layout},{settings}", expected)
        assert row["passed"], row
    else:
        with pytest.raises(WorkerError, match=r"step 3, .* chose experts"):
            run(pool, fault, f"{layout},{settings}", expected)


@pytest.mark.slow
def test_bf16_does_not_hide_a_forgotten_reduction(pool, references):
    layout = "tp=2,training.compute_dtype=bfloat16"
    assert run(pool, RIGHT, layout, references(""))["passed"]
    assert not run(pool, "partial-sums", layout, references(""))["passed"]


@pytest.mark.slow
def test_a_late_recompilation_fails(pool, references):
    layout = "dp_shard=2,compile.enabled,compile.backend=aot_eager"
    assert run(pool, RIGHT, layout, references(""))["passed"]
    with pytest.raises(WorkerError, match=r"compiled 1 graph.*second step"):
        run(pool, "compiled_at_the_end", layout, references(""))


def test_batches_have_uneven_targets():
    made, _ = case("dp_shard=2")
    counts = [int((labels >= 0).sum()) for labels in make_batch(0, made.config, 101).labels]
    assert len(set(counts)) > 4
    assert max(counts) == 32
