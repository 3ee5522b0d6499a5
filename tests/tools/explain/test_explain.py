"""What explain shows is what the ranks sent, one by one and in order, and what they store."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import re
from collections import Counter

import pytest
from logged_group import log_run, record_logged

from docs.one_step_tables import BLOCKS, OPTIONS, PAGE, with_tables
from titanlite.config.load import load_config
from titanlite.model.flavors import resolve_flavor
from titanlite.rules.check import check_layout
from titanlite.rules.degrees import AXES, num_processes
from titanlite.tokenizer.tokenizer import Tokenizer
from titanlite.tools.cli.plan_command import model_of
from titanlite.tools.explain import sentences
from titanlite.tools.explain.events import Explanation
from titanlite.tools.explain.explain import Run, assemble, explain, totals, with_senders
from titanlite.tools.explain.holdings import holdings
from titanlite.tools.explain.page import page
from titanlite.tools.explain.sentences import explained, line_of
from titanlite.tools.explain.show import explanation_lines
from titanlite.tools.explain.step import Recorded, Stored, record_real
from titanlite.tools.plan.trace import trace

SMALL = [
    "debug",
    "--run.device=cpu",
    "--model.dim=32",
    "--model.num_layers=2",
    "--model.num_heads=4",
    "--model.num_kv_heads=2",
    "--model.ffn_dim=64",
    "--model.vocab_size=128",
    "--model.embeddings=untied",
    "--training.seq_len=16",
    "--training.local_batch_size=2",
    "--training.global_batch_size=4",
    "--training.compute_dtype=float32",
    "--compile.enabled=false",
]
EIGHT = "training.global_batch_size=8"
EXPERTS = ["model.num_experts=4", "model.experts_per_token=2", "model.expert_ffn_dim=48"]
SLOW = [
    ["dp_shard=2", "tp=2"],
    ["dp_shard=2", EIGHT],  # two local batches
    ["dp_shard=2", EIGHT, "parallel.reduce_every_microbatch=false"],
    ["tp=2", "recompute.mode=full"],
    ["cp=2", "tp=2", "recompute.mode=selective"],
    ["dp_shard=2", "tp=2", "recompute.mode=full", "loss.num_chunks=2", "loss.z_loss=1e-4",
     "model.embeddings=tied"],
    ["dp_replicate=2", "dp_shard=2", EIGHT],
    ["dp_replicate=2", "cp=2", "recompute.mode=selective"],
    ["cp=2", "recompute.mode=full"],
    ["cp=2", "parallel.cp_method=ulysses"],
    ["pp=2", "dp_shard=2", "tp=2"],
    ["pp=2", "parallel.pp_schedule=ZBVZeroBubble", "model.num_layers=4",
     "training.local_batch_size=4"],
    ["pp=2", "parallel.pp_schedule=Interleaved1F1B", "model.num_layers=4",
     "model.embeddings=tied", "training.local_batch_size=4"],
    ["dp_shard=4", EIGHT, "parallel.reshard_after_forward=2", "optimizer.name=muon"],
    ["dp_shard=2", "training.compute_dtype=bfloat16", "training.reduce_dtype=float32"],
    ["dp_shard=2", "ep=2", *EXPERTS, EIGHT],
    ["dp_shard=2", "cp=2", "ep=2", *EXPERTS, "recompute.mode=selective"],
    ["dp_shard=2", "tp=2", "ep=2", *EXPERTS, "recompute.mode=full"],
    ["pp=2", "dp_shard=2", "ep=2", *EXPERTS],
    ["dp_replicate=2", "tp=2", *EXPERTS],
]  # fmt: skip

NOT_PLANNED = ("agreement", "loss", "metrics")  # of a logged step; plan does not count them


def run_of(settings: list[str]) -> Run:
    """The config of a small model; a setting without a section is a degree."""
    options = [f"--{s}" if "." in s else f"--parallel.{s}" for s in settings]
    config = load_config([*SMALL, "--parallel.dp_shard=1", *options])
    llama = resolve_flavor(config.model, 0)
    size = num_processes({axis: getattr(config.parallel, axis) for axis in AXES})
    return Run(config, llama, check_layout(config, llama, size))


def logged_steps(pool, run: Run) -> list[Recorded]:
    """What each rank recorded, which is what its process group saw, and the rows that it has."""
    degrees = run.degrees
    size = num_processes(degrees)
    found = pool.run(size, record_logged, *run)
    recorded = [rank[0] for rank in found]
    by_stage = {one.coordinates["pp"]: one.stored for one in recorded}
    held = {parameter.name: parameter.holdings for parameter in holdings(by_stage, degrees)}
    for rank, (one, seen, rows) in enumerate(found):
        events = [(event.kind, event.ranks, event.whole_bytes) for event in one.events]
        assert events == seen
        for name, numbers in rows.items():
            first, last = held[name][rank].rows
            assert numbers == list(range(first, last + 1)), name
    return recorded


@pytest.mark.slow
@pytest.mark.parametrize("settings", SLOW, ids=" ".join)
def test_the_events_are_what_the_process_group_saw(pool, settings):
    recorded = with_senders(logged_steps(pool, run_of(settings)))
    check_messages(recorded)
    for one in recorded:
        for event in explained(one.events, {}):
            assert event.tensor
            assert event.why not in ("", "the line says")
            assert ":" in event.cause


def check_messages(recorded: list[Recorded]) -> None:
    """Both ends say the same of a message, and have the same numbers of it."""
    ends = {"send": Counter(), "recv": Counter()}
    for one in recorded:
        for event in one.events:
            if event.kind in ends:
                numbers = event.before if event.kind == "send" else event.after
                key = (event.ranks, event.place.role, event.place.phase, event.shape, numbers)
                ends[event.kind][key] += 1
    assert ends["send"] == ends["recv"]


@pytest.mark.slow
def test_the_step_of_the_page(pool):
    """That docs/one_step.md follows, on real ranks: its tables, and numbers that add up."""
    config = load_config(OPTIONS)
    llama = model_of(config)
    degrees = check_layout(config, llama, 4)
    recorded = pool.run(4, record_real, config, llama, degrees)
    for one in recorded:
        found = Counter((event.axis, event.kind) for event in explained(one.events, {}))
        assert found == {
            ("dp_shard", "all_gather"): 7,
            ("dp_shard", "reduce_scatter"): 4,
            ("tp", "all_gather"): 10,
            ("tp", "reduce_scatter"): 10,
            ("tp", "all_reduce"): 8,
            ("dp_shard", "all_reduce"): 2,  # targets and loss
            ("world", "all_reduce"): 3,  # gradient norm, the hosts' agreement, step times
        }
    check_numbers(recorded)
    explanation = assemble(Run(config, llama, degrees), llama, recorded, real=True)
    names = BLOCKS.keys() - {"memory"}  # of a pretended rank
    text = PAGE.read_text()
    assert with_tables(text, explanation, names) == text, "run python -m docs.one_step_tables"
    check_texts(explanation)


def check_texts(explanation: Explanation) -> None:
    """The text has every event, and the page has all that is known."""
    lines = explanation_lines(explanation, rank=3)
    assert max(map(len, lines)) <= 120
    text = " ".join(" ".join(lines).split())
    (data,) = re.findall(
        r'<script type="application/json" id="data">(.*)</script>', page(explanation)
    )
    assert json.loads(data) == json.loads(json.dumps(dataclasses.asdict(explanation)))
    for event in explanation.lanes[3].events:
        assert f"{event.number} {event.place.phase}" in text
        assert event.why in text


def check_numbers(recorded: list[Recorded]) -> None:
    """What a rank has afterwards follows from what all of its group gave."""
    for one in recorded:
        for i, event in enumerate(one.events):
            given = [recorded[rank].events[i].before for rank in event.ranks]
            if event.place.phase == "metrics":
                assert event.after == ()  # no operator reads it
            elif event.kind == "all_reduce" and event.operation == "sum":
                expected = [sum(values) for values in zip(*given, strict=True)]
                assert event.after == pytest.approx(expected, rel=1e-5, abs=1e-7)
            elif event.operation == "max":
                assert event.after == tuple(map(max, *given))
            elif event.kind == "reduce_scatter":
                # The first numbers of the part that this rank keeps
                place = 3 * event.ranks.index(one.rank)
                expected = [sum(values[place + j] for values in given) for j in range(3)]
                assert event.after[:3] == pytest.approx(expected, rel=1e-4, abs=1e-7)
            elif event.kind == "all_gather":
                expected = [value for values in given for value in values[:3]]
                assert list(event.after) == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [["dp_shard=2", "tp=2"], ["pp=2", "cp=2"], ["pp=2", "dp_shard=2", *EXPERTS]],
    ids=" ".join,
)
def test_a_logged_step_of_a_run_has_these_events(pool, options, tmp_path, layout):
    """Between two steps of train.py, as between two of explain."""
    argv = [*options, *(f"--{s}" if "." in s else f"--parallel.{s}" for s in layout)]
    argv += [f"--run.folder={tmp_path}"]
    argv += ["--training.steps=3", "--validation.freq=0", "--training.compute_dtype=float32"]
    steps = pool.run(4, log_run, argv, timeout=120)
    config = load_config(argv)
    llama = resolve_flavor(config.model, Tokenizer().size)
    explanation = explain(config, llama, 4, real=True, doubling=False)
    for lane, of_rank in zip(explanation.lanes, steps, strict=True):
        events = [(event.kind, event.ranks, event.whole_bytes) for event in lane.events]
        assert events == of_rank[1]


def test_each_line_of_the_program_that_is_named_as_a_cause_is_there():
    """An edit of the program would otherwise end `explain` of some layouts with an error."""
    named = list(sentences.LOOP_LINES.values())
    for call in ast.walk(ast.parse(inspect.getsource(sentences))):
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "line_of":
            file, *texts = call.args
            for node in (node for text in texts for node in ast.walk(text)):
                if isinstance(node, ast.Constant):
                    named.append((getattr(sentences, ast.unparse(file)), node.value))
    assert len(named) > 15
    for file, text in named:
        assert line_of(file, text).startswith(f"{file}:")


@pytest.mark.slow
def test_the_exchanges_of_a_block_with_experts(pool):
    """With k 2, 32 tokens of a rank are 64 rows of 32 numbers, there and back."""
    settings = ["dp_shard=2", "ep=2", *EXPERTS, "recompute.mode=full"]
    config, llama, _ = run_of(settings)
    explanation = explain(config, llama, 2, real=False, doubling=False)
    exchanges = [event for event in explanation.lanes[0].events if event.axis == "ep"]
    rows = 64 * 32 * 4
    counts = 4 * 8
    again = ", computed again for the backward"
    for number in (0, 1):
        block = f"layers.{number}"
        forward = [
            (f"counts: rows of {block} for each expert", counts),
            (f"dispatch: rows of {block}", rows),
            (f"combine: results of {block}", rows),
        ]
        backward = [
            (f"combine: gradients of results of {block}", rows),
            (f"dispatch: gradients of rows of {block}", rows),
        ]
        repeated = [(f"{text}{again}", nbytes) for text, nbytes in forward]
        found = [
            (event.tensor, event.whole_bytes) for event in exchanges if f"{block}" in event.tensor
        ]
        assert found == [*forward, *repeated, *backward]


@pytest.mark.slow
def test_equal_blocks_are_shown_once_and_counted(pool):
    """A deep model repeats what a few blocks do, as often as plan counts it."""
    config, llama, degrees = run_of(
        ["dp_shard=2", "tp=2", "model.num_layers=11", "training.global_batch_size=16"]
    )
    explanation = explain(config, llama, 4, real=False)
    assert (explanation.shown_blocks, explanation.blocks) == (3, 11)
    (lane,) = explanation.lanes
    counted = totals([e for e in lane.events if e.place.phase not in NOT_PLANNED])
    (rank,) = trace(config, llama, degrees).ranks
    assert counted == {
        (call.axis, call.kind): (call.count, call.whole_bytes, call.sent_bytes)
        for call in rank.collectives
        if call.size > 1
    }
    by_axis = {doubled.axis: doubled for doubled in explanation.doubled}
    assert "num_kv_heads" in by_axis["tp"].problem
    weights = next(
        change
        for change in by_axis["dp_shard"].changes
        if (change.axis, change.kind) == ("dp_shard", "all_gather")
    )
    assert weights.calls_doubled == weights.calls // 2  # half as many local batches


ONE = {"pp": 1, "dp_replicate": 1, "dp_shard": 1, "cp": 1, "tp": 1}
STRIDED = ((0, 2), (0, 1))  # FSDP cuts what tp has cut


@pytest.mark.parametrize(
    ("degrees", "shape", "cuts", "rows"),
    [
        ({"dp_shard": 2, "tp": 2}, (32, 8), STRIDED, [(0, 7), (16, 23), (8, 15), (24, 31)]),
        ({"dp_shard": 2, "tp": 2}, (32, 8), ((0, 1), (1, 1)), [(0, 15), (0, 15), (16, 31), (16, 31)]),
        ({"dp_shard": 4}, (5,), ((0, 1), (-1, 1)), [(0, 1), (2, 3), (4, 4), (5, -1)]),
        ({"dp_shard": 2, "cp": 2}, (8,), ((0, 1), (-1, 1)), [(0, 1), (2, 3), (4, 5), (6, 7)]),
        ({"dp_replicate": 2, "dp_shard": 2}, (4,), ((0, 1), (-1, 1)), [(0, 1), (2, 3)] * 2),
    ],
)  # fmt: skip
def test_rows(degrees, shape, cuts, rows):
    degrees = {**ONE, **degrees}
    sizes = (degrees["dp_shard"] * degrees["cp"], degrees["tp"])
    stored = Stored("wq", shape, ("dp_shard_cp", "tp"), sizes, cuts, "")
    (parameter,) = holdings({0: [stored]}, degrees)
    assert [parameter.holdings[rank].rows for rank in range(4)] == rows


def test_rows_of_experts():
    """Eight experts over ep 2, then over the two ranks that hold the same four."""
    axes = ("expert_shard", "ep", "tp")
    cuts = ((0, 2), (0, 1), (-1, 1))
    stored = Stored("experts.w1", (8, 48, 32), axes, (2, 2, 1), cuts, "")
    (parameter,) = holdings({0: [stored]}, ONE | {"dp_shard": 2, "cp": 2})
    rows = [parameter.holdings[rank].rows for rank in range(4)]
    assert rows == [(0, 1), (4, 5), (2, 3), (6, 7)]
