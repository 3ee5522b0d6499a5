"""The judge: it passes what is right, and it catches what is wrong."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch

from titanlite.cli.verify import run as verify
from titanlite.config.load import load_config
from titanlite.config.schema import ConfigError
from titanlite.model.flavors import LlamaConfig, resolve_flavor
from titanlite.verify.campaign import FIGURES, judge
from titanlite.verify.compare import make_batch, measure, reference
from titanlite.verify.ladder import Case, ladder, layouts, make_case, parse_layout
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
    from titanlite.parallel import parallelize

    original = parallelize.apply_cp

    def apply(model, mesh, method):
        original(model, mesh, method)
        model.positions = torch.arange(model.seq_len // mesh.size())

    parallelize.apply_cp = apply
    try:
        return measure(*arguments)
    finally:
        parallelize.apply_cp = original


def forget_the_tied_sum(*arguments):
    """A tied embedding whose two ends keep gradients of their own."""
    from titanlite.parallel import stages

    original, stages.add_tied_gradients = stages.add_tied_gradients, lambda weights, mesh: None
    try:
        return measure(*arguments)
    finally:
        stages.add_tied_gradients = original


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
    from titanlite.verify import compare

    original = compare.sum_over
    compare.sum_over = lambda value, mesh, axes: (
        value * 2 if value.dtype == torch.int64 else original(value, mesh, axes)
    )
    try:
        return measure(*arguments)
    finally:
        compare.sum_over = original


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
    with pytest.raises(WorkerError, match="compiled 1 graphs after the second step; expected none"):
        run(pool, compile_at_the_end, layout, right)


def test_what_is_no_number_fails():
    made, _ = case("dp_shard=2")
    good = dict.fromkeys(FIGURES, 0.0)
    assert judge(made, good, 1.0)["passed"]
    for name in FIGURES:
        assert not judge(made, {**good, name: float("nan")}, 1.0)["passed"]
        assert not judge(made, {**good, name: float("inf")}, 1.0)["passed"]
        assert not judge(made, {**good, name: 1.1e-5}, 1.0)["passed"]


def test_the_command_prints_a_table_and_writes_json(tmp_path, capfd):
    found = tmp_path / "rows.json"
    layouts = ["--layout", "dp_shard=2", "--layout", "tp=2,recompute.mode=full"]
    assert verify([*SMALL, *layouts, "--json", str(found)]) == 0
    rows = json.loads(found.read_text())
    assert [row["layout"] for row in rows] == ["dp_shard=2", "tp=2,recompute.mode=full"]
    assert set(rows[0]) == {"layout", "processes", *FIGURES, "seconds", "passed"}
    table = capfd.readouterr().out
    assert "2 of 2 layouts equal one process" in table
    assert table.count("passed") == 2


def break_tp(config, llama, path):
    """A layout that hangs if it has tp."""
    if config.parallel.tp > 1:
        time.sleep(60)
    return measure(config, llama, path)


def test_a_layout_that_hangs_is_a_failure_not_the_end(monkeypatch, tmp_path, capfd):
    monkeypatch.setattr("titanlite.verify.compare.measure", break_tp)
    arguments = [word for layout in ("tp=2", "dp_shard=2") for word in ("--layout", layout)]
    assert verify([*SMALL, *arguments, "--timeout", "8", "--json", str(tmp_path / "rows.json")]) == 1
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert [row["passed"] for row in rows] == [False, True]
    assert rows[0]["loss"] is None
    output = capfd.readouterr()
    assert "1 of 2 layouts equal one process\nFAILED: tp=2" in output.out
    assert "did not answer within 8" in output.err


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--layout", "dp_sahrd=2"], "--layout dp_sahrd=2: unknown key parallel.dp_sahrd; did you mean dp_shard?"),
        (["--layout", "tp=4"], "--layout tp=4: parallel.tp = 4 does not divide model.num_kv_heads = 2"),
        (["--layout", "tp=two"], "--layout tp=two: tp = two: expected an integer, at least 1"),
        (["--layout", "dp_shard=0"], "dp_shard = 0: expected an integer, at least 1"),
        (["--layout", "dp_shard=-1"], "dp_shard = -1: expected an integer, at least 1"),
        (["--layout", "pp=2,pp_schedule=foo"], 'parallel.pp_schedule = "foo": expected one of GPipe'),
        (["--training.seq_len=7", "--model.num_kv_heads=3"], "does not divide"),
        (["--processes", "-1"], "--processes -1: expected 1 to 64, or 0 for the default"),
        (
            ["--json", "/nowhere/rows.json"],
            "--json /nowhere/rows.json: No such file or directory; expected a file to write",
        ),
        (["--json", "/tmp"], "--json /tmp: Is a directory"),
        (["--timeout", "0"], "--timeout 0: expected more than 0 seconds"),
        (["--qiuck"], "unknown option --qiuck; did you mean --quick?"),
        (["--layout", "tp=2,tp=4"], "parallel.tp is given twice"),
        (["--layout", ","], "unknown key parallel."),
        (["--layout", "dp_shard=1000"], "1000 processes; expected at most 64"),
        (["--layout", "cp=2,cp_method=ring", "--run.device=cpu"], "parallel.cp_method = ring needs CUDA devices"),
        (["nonsense"], "config 'nonsense': no such file"),
    ],
)
def test_mistakes_are_told(arguments, expected):
    with pytest.raises(ConfigError) as caught:
        verify(["debug", *arguments] if arguments[0].startswith("--") else arguments)
    assert expected in str(caught.value)


def test_the_ladder_has_each_axis_each_pair_and_the_triples():
    four = [set(degrees.items()) for degrees in layouts(4, quick=False)]
    assert len(four) == 1 + 5 + 5 + 10
    eight = [set(degrees.items()) for degrees in layouts(8, quick=False)]
    for triple in (
        ("dp_shard", "tp", "pp"),
        ("dp_shard", "cp", "tp"),
        ("dp_replicate", "dp_shard", "tp"),
        ("cp", "pp", "tp"),
    ):
        assert {(axis, 2) for axis in triple} in eight
    schedules = {text.partition("pp_schedule=")[2].partition(",")[0] for text in ladder(2, True, "cpu")}
    assert len(schedules - {""}) == 6  # and 1F1B, the default
    for processes in (1, 2, 3, 4, 8):
        for quick in (False, True):
            cases = [make_case(SMALL, text, "cpu") for text in ladder(processes, quick, "cpu")]
            assert len({case.name for case in cases}) == len(cases)
            assert max(case.processes for case in cases) <= processes


def test_the_table_in_the_docs_is_the_quick_ladder():
    text = (Path(__file__).parents[2] / "docs/parallelism.md").read_text().partition("layout      ")[2]
    rows = [line.split() for line in text.partition("\n\n")[0].splitlines()[1:]]
    names = [make_case(SMALL, layout, "cpu").name for layout in ladder(4, True, "cpu")]
    assert [" ".join(row[:-7]) for row in rows] == names
    assert {row[-1] for row in rows} == {"passed"}


def test_a_cut_by_names_may_have_commas():
    pairs = parse_layout("pp=4,pp_split=layers.1,layers.2, output,tp=2")
    assert dict(pairs)["parallel.pp_split"] == "layers.1 layers.2 output"
    assert dict(pairs)["parallel.tp"] == "2"


def test_batches_have_uneven_targets():
    counts = [int((labels >= 0).sum()) for labels in make_batch(0, 8, 32, 101).labels]
    assert len(set(counts)) > 4
    assert max(counts) == 32


def test_the_config_brings_model_and_optimizer_but_no_layout():
    made, llama = case("dp_shard=2")
    assert llama.dim == 32
    other = [
        "--parallel.tp=2",
        "--parallel.reduce_every_microbatch=false",
        "--recompute.mode=full",
        "--compile.enabled",
    ]
    assert make_case([*SMALL, *other], "dp_shard=2", "cpu").config == made.config
    assert load_config(SMALL).optimizer.lr == made.config.optimizer.lr
    assert (made.processes, made.config.training.global_batch_size, made.config.training.local_batch_size) == (2, 8, 4)
