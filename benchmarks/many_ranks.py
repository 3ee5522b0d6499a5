"""What many ranks cost each other at the start, in a save and in a load of a large model, without
having them.

    python benchmarks/many_ranks.py [--ranks 8 128 512 1024] [--stock 8 128] [--background 64] [--before CHECKOUT]

One process pretends to be rank 0 of N, on the meta device: tp 8, the rest dp_shard. Its own plan is
made by the code of a run. What the other ranks would send is computed from the placements; a second
process, pretending to be another rank, checks that this is what that rank plans. Nothing of the
tensors is read or written, and no message crosses a network.

    save   plan; read the messages of all ranks; check that the parts make up all tensors; write the manifest
    load   read the manifest; find the files and ranges of this rank's parts

`--stock`: the same with the planner of torch.distributed.checkpoint: its local plan, unpickling the
plans of all ranks, removing duplicates and checking (`create_global_plan`), and pickling them
again. It is measured for these numbers of ranks only, because its time grows with them. The
manifest of format 1, which listed all parts, is made and read for comparison. `--background`: a
training step during a save, see background_save.py. Descriptors and file operations: see
run_counts.py; `--before` counts those of another checkout too.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import itertools
import json
import pickle
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import background_save
import report
import run_counts
from pretended import box_of, examples, pretended_report, state_of

from titanlite.model.flavors import FLAVORS


def timed(function: Callable[[], Any]) -> tuple[Any, float]:
    """What a function returns, and its CPU seconds."""
    started = time.process_time()
    return function(), time.process_time() - started


def measure(flavor: str, ranks: int) -> dict[str, Any]:
    """titanlite's own coordination, as rank 0."""
    from titanlite.checkpoint import manifest as manifests
    from titanlite.checkpoint.manifest import FileEntry, Manifest, parse_manifest, to_text
    from titanlite.checkpoint.read_step import require_matching_tensors
    from titanlite.checkpoint.write_plan import Plan, local_parts, tensor_entries

    state = state_of(FLAVORS[flavor], ranks, 0)
    plan, plan_seconds = timed(lambda: Plan(state))
    own, other = plan.boxes(), ranks // 2 + 1
    planned = report.child(
        [sys.executable, __file__, "--flavor", flavor, "--one", "boxes", str(ranks), str(other)]
    )
    layouts = examples(state, plan.table)
    pretended = json.loads(json.dumps(pretended_report(layouts, other)))
    assert sorted(planned["boxes"]) == sorted(pretended), "another rank plans something else"
    entry = FileEntry(1 << 40, "0" * 64)  # longer than any tensor: the reader compares
    messages = []
    for rank in range(ranks):
        boxes = pretended_report(layouts, rank) if rank else own
        files = {box.file: (entry, True) for _, _, box in boxes}
        messages.append(json.dumps(((files, boxes), "")).encode())

    def commit() -> str:
        results = [json.loads(message)[0] for message in messages]
        entries = tensor_entries(
            [plan.table, *({} for _ in range(ranks - 1))], [boxes for _, boxes in results]
        )
        files = {name: FileEntry(*entry) for own, _ in results for name, (entry, _) in own.items()}
        return to_text(Manifest(1, True, "", "", {}, {}, "", None, files, entries))

    text, save_seconds = timed(commit)
    manifest, parse_seconds = timed(lambda: parse_manifest(Path("manifest.json"), text))
    _, compare_seconds = timed(lambda: require_matching_tensors(Path(), manifest, state))

    def find() -> int:
        tensors = manifest.tensors
        return sum(
            1
            for p, _ in local_parts(state)
            for _ in tensors[p.name].grid.overlapping(p.offsets, p.sizes)
        )

    pieces, find_seconds = timed(find)
    fields = json.loads(text.rpartition(manifests.SEAL)[0] + "}")
    listed, _ = timed(lambda: format_1(fields))
    older = listed + manifests.SEAL + hashlib.sha256(listed.encode()).hexdigest() + '"}\n'
    again, parse_1 = timed(lambda: parse_manifest(Path("manifest.json"), older))
    assert again == manifest
    return {
        "ranks": ranks,
        "parts": sum(len(tensor.grid.files) for tensor in manifest.tensors.values()),
        "pieces_read": pieces,
        "plan_s": plan_seconds,
        "save_s": plan_seconds + save_seconds,
        "received_bytes": sum(map(len, messages)) + len(json.dumps(plan.table)),
        "manifest_bytes": len(text),
        "load_s": parse_seconds + compare_seconds + find_seconds,
        "format_1_bytes": len(older),
        "format_1_parse_s": parse_1,
    }


def format_1(fields: dict[str, Any]) -> str:
    """A manifest's fields with a list of parts for each tensor, as text."""
    grids = fields["grids"]
    tensors = {}
    for name, entry in fields["tensors"].items():
        edges, files = (grids[str(entry["grid"])][key] for key in ("edges", "files"))
        cells = itertools.product(*(itertools.pairwise(line) for line in edges))
        chunks = [
            [f, [a for a, _ in cell], [b - a for a, b in cell]]
            for cell, f in zip(cells, files, strict=True)
        ]
        tensors[name] = {"dtype": entry["dtype"], "shape": entry["shape"], "chunks": chunks}
    rest = {key: value for key, value in fields.items() if key != "grids"}
    return json.dumps(rest | {"format": 1, "tensors": tensors})[:-1]


def measure_stock(flavor: str, ranks: int) -> dict[str, Any]:
    """The same by DCP's planners: what each rank does, and what rank 0 does with the plans of all."""
    from torch import Size
    from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
    from torch.distributed.checkpoint.planner import SavePlan

    from titanlite.checkpoint.write_plan import Plan

    state = state_of(FLAVORS[flavor], ranks, 0)
    planner = DefaultSavePlanner()
    planner.set_up_planner(state, is_coordinator=True)
    local, plan_seconds = timed(planner.create_local_plan)
    table, sent = Plan(state).table, []
    for rank in range(ranks):
        # A layout differs between tensors of one kind by its writer only, so its box is that of all
        # of them.
        boxes = {
            layout: box_of(value, rank) for layout, (_, value, _) in examples(state, table).items()
        }
        items = []
        for item in local.items:
            layout = table[item.index.fqn][2]
            if layout in boxes:
                chunk = ChunkStorageMetadata(*map(Size, boxes[layout]))
                index = dataclasses.replace(item.index, offset=chunk.offsets)
                data = dataclasses.replace(item.tensor_data, chunk=chunk)
                item = dataclasses.replace(item, index=index, tensor_data=data)
            items.append(item)
        sent.append(pickle.dumps(SavePlan(items, planner_data=local.planner_data)))
    plans, received = timed(lambda: [pickle.loads(plan) for plan in sent])
    (planned, metadata), decided = timed(lambda: planner.create_global_plan(plans))
    _, returned = timed(lambda: [pickle.dumps(plan) for plan in planned])
    loader = DefaultLoadPlanner()
    loader.set_up_planner(state, metadata, is_coordinator=True)
    reads, load_seconds = timed(loader.create_local_plan)
    _, one = timed(lambda: pickle.dumps(pickle.loads(pickle.dumps(reads))))
    return {
        "ranks": ranks,
        "plan_s": plan_seconds,
        "save_s": plan_seconds + received + decided + returned,
        "received_bytes": sum(map(len, sent)),
        "load_s": load_seconds + ranks * one,
    }


ROWS = {  # label -> key, format
    "parts of tensors": ("parts", "{:,.0f}"),
    "**save**, CPU seconds on rank 0": ("save_s", "{:.2f}"),
    "of these its own plan, as on every rank": ("plan_s", "{:.2f}"),
    "MB that rank 0 receives": ("received_mb", "{:.1f}"),
    "MB of the manifest": ("manifest_mb", "{:.2f}"),
    "**load**, CPU seconds on each rank": ("load_s", "{:.2f}"),
    "DCP: **save**, CPU seconds on rank 0": ("stock_save_s", "{:.1f}"),
    "DCP: of these its own plan": ("stock_plan_s", "{:.1f}"),
    "DCP: MB that rank 0 receives": ("stock_received_mb", "{:.0f}"),
    "DCP: **load**, CPU seconds on rank 0": ("stock_load_s", "{:.1f}"),
    "manifest of format 1, MB": ("format_1_mb", "{:.1f}"),
    "manifest of format 1, CPU seconds to read it": ("format_1_parse_s", "{:.1f}"),
    "descriptors of rank 0": ("descriptors_0", "{:,.0f}"),
    "descriptors of another rank": ("descriptors", "{:,.0f}"),
    "file operations of all ranks: start": ("operations_start", "{:,.0f}"),
    "file operations of all ranks: load": ("operations_load", "{:,.0f}"),
    "file operations of all ranks: save": ("operations_save", "{:,.0f}"),
}
COUNTED = [
    label for label, (key, _) in ROWS.items() if key.startswith(("descriptors", "operations"))
]
ROWS |= {f"before: {label}": (f"before_{ROWS[label][0]}", "{:,.0f}") for label in COUNTED}


def counts(
    root: Path, ranks: list[int], prefix: str
) -> tuple[dict[int, dict[str, float]], list[str]]:
    """What is counted in runs with 2, 4 and 8 processes: for these numbers of ranks, and as lines
    of a table.
    """
    found = {processes: run_counts.count(root, processes) for processes in (2, 4, 8)}
    print(prefix, found, flush=True)
    lines = [
        f"| {prefix}{key.replace('_', ' ')} | "
        + " | ".join(str(f[key]) for f in found.values())
        + " |"
        for key in found[2]
    ]
    return {
        n: {prefix + key: value for key, value in run_counts.fit(found, n).items()} for n in ranks
    }, lines


def in_background(flavor: str, ranks: int) -> tuple[dict[str, float], str]:
    """A step during a save on so many ranks, and a sentence about it."""
    run = [sys.executable, __file__, "--flavor", flavor, "--one", "background", str(ranks)]
    found = report.child(run)
    if "failed" in found:
        return found, found["failed"]
    return found, (
        f"A training step of {found['quiet_s']:.2f} s that only launches operations takes "
        f"{found['ratio']:.3f} times "
        f"as long while {ranks} ranks save in the background (median of {found['steps']} steps "
        "each, A B B A; without "
        "the time for which other processes had the cores). The training thread waits "
        f"{found['waits_s']:.2f} s for "
        f"others; these use {found['others_cpu_s']:.2f} CPU seconds, of which the one that plans "
        f"{found['cpu_s']:.2f}."
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="*", default=[8, 128, 512, 1024])
    parser.add_argument("--stock", type=int, nargs="*", default=[8, 128])
    parser.add_argument(
        "--background", type=int, default=64, help="number of ranks; 0: not measured"
    )
    parser.add_argument(
        "--before",
        type=Path,
        help="another checkout, whose descriptors and file operations to count",
    )
    parser.add_argument("--flavor", default="llama3_405b")
    parser.add_argument("--one", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:  # in a separate process
        print(json.dumps(in_this_process(options.flavor, *options.one)))
        return
    body: list[str] = []
    results: dict[str, Any] = {}
    if options.background:
        results["background"], sentence = in_background(options.flavor, options.background)
        body += [sentence, ""]
        print(sentence, flush=True)
    counted, lines = counts(report.ROOT, options.ranks, "") if options.ranks else ({}, [])
    if options.before and options.ranks:
        before, more = counts(options.before.resolve(), options.ranks, "before_")
        counted, lines = {n: counted[n] | before[n] for n in counted}, lines + more
    for ranks in options.ranks:
        run = [sys.executable, __file__, "--flavor", options.flavor, "--one"]
        found = report.child([*run, "own", str(ranks)])
        if ranks in options.stock:
            found |= {
                f"stock_{key}": value
                for key, value in report.child([*run, "stock", str(ranks)]).items()
            }
        found |= {
            key.replace("_bytes", "_mb"): value / 1e6
            for key, value in found.items()
            if key.endswith("_bytes")
        }
        results[str(ranks)] = found | counted[ranks]
        print(ranks, found, flush=True)
    body += ["| | " + " | ".join(f"{ranks:,} ranks" for ranks in options.ranks) + " |"]
    body += ["|---" * (len(options.ranks) + 1) + "|"]
    for label, (key, form) in ROWS.items():
        cells = [
            form.format(f[key]) if key in f else "not measured"
            for n, f in results.items()
            if n != "background"
        ]
        body.append(f"| {label} | " + " | ".join(cells) + " |")
    body += ["", "Counted with 2, 4 and 8 processes, and continued as a line or parabola:", ""]
    body += ["| | 2 processes | 4 processes | 8 processes |", "|---|---|---|---|", *lines]
    name = "many_ranks" + ("" if options.flavor == "llama3_405b" else f"_{options.flavor}")
    report.write(name, f"What many ranks cost each other, with {options.flavor}", body, results)
    report.exit_code(results)


def in_this_process(flavor: str, kind: str, ranks: str, *rank: str) -> dict[str, Any]:
    """One measurement."""
    if kind == "boxes":
        from titanlite.checkpoint.write_plan import Plan

        return {"boxes": Plan(state_of(FLAVORS[flavor], int(ranks), int(rank[0]))).boxes()}
    if kind == "background":
        return background_save.measure(FLAVORS[flavor], int(ranks), rounds=3)
    return (measure if kind == "own" else measure_stock)(flavor, int(ranks))


if __name__ == "__main__":
    main()
