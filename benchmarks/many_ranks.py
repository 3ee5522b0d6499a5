"""What it costs rank 0 to coordinate a save and a load of a large model on many ranks, without having them.

    python benchmarks/many_ranks.py [--ranks 8 128 512 1024] [--stock 8 128] [--flavor llama3_405b]

One process pretends to be rank 0 of N, on the meta device: tp 8, the rest dp_shard. Its own plan is made by the code of
a run. What the other ranks would send is computed from the placements; a second process, pretending to be another rank,
checks that this is what that rank plans. Nothing of the tensors is read or written, and no message crosses a network.

    save   plan; read the messages of all ranks; check that the parts make up all tensors; write the manifest
    load   read the manifest; find the files and ranges of this rank's parts

`--stock`: the same with the planner of torch.distributed.checkpoint: its local plan, unpickling the plans of all ranks,
removing duplicates and checking (`create_global_plan`), and pickling them again. It is measured for these numbers of
ranks only, because its time grows with them. The manifest of format 1, which listed all parts, is made and
read for comparison.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import itertools
import json
import pickle
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import report

PARTS = ["--parallel.tp=8", "--run.device=cpu", "--compile.enabled=false", "--recompute.mode=none"]
PARTS += ["--training.compute_dtype=bfloat16", "--training.reduce_dtype=float32"]


def timed(function: Callable[[], Any]) -> tuple[Any, float]:
    """What a function returns, and its CPU seconds."""
    started = time.process_time()
    return function(), time.process_time() - started


def state_of(flavor: str, ranks: int, rank: int) -> dict[str, dict[str, Any]]:
    """The state of a run with AdamW, as this rank of so many would have it, on the meta device."""
    import torch
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from titanlite.checkpoint.state import ModelState
    from titanlite.config.load import load_config
    from titanlite.distributed.mesh import Mesh
    from titanlite.model.flavors import FLAVORS
    from titanlite.model.llama import Llama
    from titanlite.parallel.parallelize import split_and_parallelize

    dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
    config = load_config(["debug", f"--model.flavor={flavor}", *PARTS])
    mesh = Mesh("cpu", {"pp": 1, "dp_replicate": 1, "dp_shard": ranks // 8, "cp": 1, "tp": 8}, 600)
    with torch.device("meta"):
        model = Llama(FLAVORS[flavor], config.training.seq_len)
    weights = ModelState(split_and_parallelize(model, config, mesh)).state_dict()
    moments = {f"state.{n}.{key}": torch.empty_like(w) for n, w in weights.items() for key in ("exp_avg", "exp_avg_sq")}
    return {"model": weights, "optimizer": moments | {f"state.{n}.step": torch.zeros(()) for n in weights}}


def box_of(value: Any, rank: int) -> tuple[Any, Any]:
    """Offsets and sizes of a rank's part of a DTensor."""
    from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset

    mesh = value.device_mesh
    place = (mesh.mesh == rank).nonzero()[0].tolist()
    sizes, offsets = _compute_local_shape_and_global_offset(value.shape, tuple(mesh.shape), place, value.placements)
    return tuple(offsets), tuple(sizes)


def flat(state: dict[str, dict[str, Any]]) -> dict[str, Any]:
    return {f"{part}.{name}": value for part, own in state.items() for name, value in own.items()}


def examples(state: dict[str, dict[str, Any]], table: dict[str, Any]) -> dict[int, tuple[str, Any, int | None]]:
    """Layout -> name and value of its last tensor, and which replica writes it: replicas, along tp, take turns."""
    from torch.distributed.tensor import DTensor

    found: dict[int, tuple[str, Any, int | None]] = {}
    turns = itertools.count()
    for name, value in flat(state).items():
        if isinstance(value, DTensor):
            writer = next(turns) % value.device_mesh.size(1) if value.placements[1].is_replicate() else None
            found[table[name][2]] = (name, value, writer)
    return found


def pretended_report(layouts: dict[int, tuple[str, Any, int | None]], rank: int) -> list[Any]:
    """What `Plan.boxes` gives on another rank: its box in each layout that it writes."""
    from titanlite.checkpoint.grid import Box

    boxes = []
    for layout, (name, value, writer) in layouts.items():
        if writer is None or writer == rank % value.device_mesh.size(1):
            file = f"{'model' if name.startswith('model.') else 'training'}-{rank:05}.safetensors"
            boxes.append((0, layout, Box(file, *box_of(value, rank))))
    return boxes


def launch_rate(work: Callable[[], Any]) -> tuple[float, float]:
    """Small operations per second that this thread launches while another does some work, and that work's seconds."""
    import torch

    numbers, count = torch.zeros(4), 0
    thread = threading.Thread(target=work)
    started = time.perf_counter()
    thread.start()
    while thread.is_alive():
        numbers.add_(1)
        count += 1
    seconds = time.perf_counter() - started
    return count / seconds, seconds


def measure(flavor: str, ranks: int) -> dict[str, Any]:
    """titanlite's own coordination, as rank 0."""
    from titanlite.checkpoint import manifest as manifests
    from titanlite.checkpoint.manifest import FileEntry, Manifest, to_text
    from titanlite.checkpoint.manifest_reader import parse_manifest
    from titanlite.checkpoint.plan import Plan, local_parts, tensor_entries
    from titanlite.checkpoint.read import require_matching_tensors

    state = state_of(flavor, ranks, 0)
    plan, plan_seconds = timed(lambda: Plan(state))
    own, other = plan.boxes(), ranks // 2 + 1
    planned = report.child([sys.executable, __file__, "--flavor", flavor, "--one", "boxes", str(ranks), str(other)])
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
        entries = tensor_entries([plan.table, *({} for _ in range(ranks - 1))], [boxes for _, boxes in results])
        files = {name: FileEntry(*entry) for own, _ in results for name, (entry, _) in own.items()}
        return to_text(Manifest(1, True, "", "", {}, {}, "", None, files, entries))

    text, save_seconds = timed(commit)
    alone, _ = launch_rate(lambda: time.sleep(1))
    meanwhile, in_background = launch_rate(lambda: (Plan(state), commit()))
    manifest, parse_seconds = timed(lambda: parse_manifest(Path("manifest.json"), text))
    _, compare_seconds = timed(lambda: require_matching_tensors(Path(), manifest, state))

    def find() -> int:
        tensors = manifest.tensors
        return sum(1 for p, _ in local_parts(state) for _ in tensors[p.name].grid.overlapping(p.offsets, p.sizes))

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
        "background_s": in_background,
        "background_rate": meanwhile / alone,
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
        chunks = [[f, [a for a, _ in cell], [b - a for a, b in cell]] for cell, f in zip(cells, files, strict=True)]
        tensors[name] = {"dtype": entry["dtype"], "shape": entry["shape"], "chunks": chunks}
    rest = {key: value for key, value in fields.items() if key != "grids"}
    return json.dumps(rest | {"format": 1, "tensors": tensors})[:-1]


def measure_stock(flavor: str, ranks: int) -> dict[str, Any]:
    """The same by DCP's planners: what each rank does, and what rank 0 does with the plans of all."""
    from torch import Size
    from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
    from torch.distributed.checkpoint.planner import SavePlan

    from titanlite.checkpoint.plan import Plan

    state = state_of(flavor, ranks, 0)
    planner = DefaultSavePlanner()
    planner.set_up_planner(state, is_coordinator=True)
    local, plan_seconds = timed(planner.create_local_plan)
    table, sent = Plan(state).table, []
    for rank in range(ranks):
        # A layout differs between tensors of one kind by its writer only, so its box is that of all of them.
        boxes = {layout: box_of(value, rank) for layout, (_, value, _) in examples(state, table).items()}
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
    "in the background: seconds": ("background_s", "{:.2f}"),
    "meanwhile, operations that the training thread launches": ("background_rate", "{:.0%}"),
    "MB that rank 0 receives": ("received_mb", "{:.1f}"),
    "MB of the manifest": ("manifest_mb", "{:.2f}"),
    "**load**, CPU seconds on each rank": ("load_s", "{:.2f}"),
    "DCP: **save**, CPU seconds on rank 0": ("stock_save_s", "{:.1f}"),
    "DCP: of these its own plan": ("stock_plan_s", "{:.1f}"),
    "DCP: MB that rank 0 receives": ("stock_received_mb", "{:.0f}"),
    "DCP: **load**, CPU seconds on rank 0": ("stock_load_s", "{:.1f}"),
    "manifest of format 1, MB": ("format_1_mb", "{:.1f}"),
    "manifest of format 1, CPU seconds to read it": ("format_1_parse_s", "{:.1f}"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 128, 512, 1024])
    parser.add_argument("--stock", type=int, nargs="*", default=[8, 128])
    parser.add_argument("--flavor", default="llama3_405b")
    parser.add_argument("--one", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:  # in a separate process
        kind, ranks, *rank = options.one
        if kind == "boxes":
            from titanlite.checkpoint.plan import Plan

            print(json.dumps({"boxes": Plan(state_of(options.flavor, int(ranks), int(rank[0]))).boxes()}))
        else:
            print(json.dumps((measure if kind == "own" else measure_stock)(options.flavor, int(ranks))))
        return
    results: dict[str, Any] = {}
    for ranks in options.ranks:
        run = [sys.executable, __file__, "--flavor", options.flavor, "--one"]
        found = report.child([*run, "own", str(ranks)])
        if ranks in options.stock:
            found |= {f"stock_{key}": value for key, value in report.child([*run, "stock", str(ranks)]).items()}
        found |= {key.replace("_bytes", "_mb"): value / 1e6 for key, value in found.items() if key.endswith("_bytes")}
        results[str(ranks)] = found
        print(ranks, found, flush=True)
    body = [
        "| | " + " | ".join(f"{ranks:,} ranks" for ranks in options.ranks) + " |",
        "|---" * (len(results) + 1) + "|",
    ]
    for label, (key, form) in ROWS.items():
        cells = [form.format(found[key]) if key in found else "not measured" for found in results.values()]
        body.append(f"| {label} | " + " | ".join(cells) + " |")
    name = "many_ranks" + ("" if options.flavor == "llama3_405b" else f"_{options.flavor}")
    report.write(name, f"Coordinating a save and a load of {options.flavor} on many ranks", body, results)
    report.exit_code(results)


if __name__ == "__main__":
    main()
