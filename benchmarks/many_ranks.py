"""Measures what many ranks cost rank 0 in a save and in a load of a large model, on one machine.

    python benchmarks/many_ranks.py [--ranks 8 128 1024] [--stock 8 128 1024]

One process pretends to be rank 0 of N, on the meta device: tp 8, the rest dp_shard, AdamW. It does
what `dcp.save` and `dcp.load` do on rank 0 between the tensors and the disk, with the planners and
storages of titanlite, and with torch's own. The other ranks' messages are made from the placements
(`pretended.py`); a second process, pretending to be another rank, checks that this is what that
rank plans. No tensor data is read or written, and no message crosses a network.

    save   the local plan; the plans of all ranks unpickled; the global plan; the answers pickled;
           the results of all ranks unpickled; the manifest, or metadata, written to the disk; the
           metadata pickled for all ranks. In a second save both sides use their first plan again.
    load   the metadata read; the local plan, of the same layout

Stock is DefaultSavePlanner(enable_plan_caching=True) and FileSystemWriter for a save, and for a
load HuggingFaceStorageReader, which reads the headers of all files, and DefaultLoadPlanner. Those
files are sparse: headers as StepWriter writes them, and holes for the tensors. torch's `gather`
pads each rank's message to the longest one, and the padded bytes are counted.
The garbage collector is off on both sides. A stock save on 1,024 ranks takes 14 GB of memory: one
that does not fit is "not measured".
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import pickle
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import report
import torch
from pretended import Others, on_cpu, state_of, stock_written
from step_io import FACTS
from torch import Size, Tensor
from torch.distributed.checkpoint import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    FileSystemWriter,
    HuggingFaceStorageReader,
    LoadPlanner,
    SavePlanner,
    StorageReader,
    StorageWriter,
)
from torch.distributed.checkpoint.planner import SavePlan

from titanlite.checkpoint.grid import Box, Grid
from titanlite.checkpoint.manifest import DTYPES, NAME, Manifest, parse_manifest, read_text
from titanlite.checkpoint.planner import PlacementLoadPlanner, PlacementSavePlanner
from titanlite.checkpoint.shard_file import Shard
from titanlite.checkpoint.state import State
from titanlite.checkpoint.storage import StepReader, StepWriter
from titanlite.model.flavors import FLAVORS

MAX_FILE = 16e9  # torch maps a file as private memory, which Linux limits to the memory there is
MEMORY_LEFT = 2e9  # bytes left to others by a process that may need more than there is

Messages = list[bytes]  # one pickle per rank


def save(
    planner: SavePlanner,
    writer: StorageWriter,
    state: State,
    plans: Messages,
    results: Callable[[list[SavePlan]], Messages],
) -> dict[str, float]:
    """Runs rank 0's part of `dcp.save`. `results`: the ranks' results under the global plan."""
    started = time.process_time()
    planner.set_up_planner(state, is_coordinator=True)
    own = pickle.dumps(planner.create_local_plan())
    plan_seconds = time.process_time() - started
    assert own == plans[0], "rank 0 plans something else"

    started = time.process_time()
    answers, metadata = planner.create_global_plan([pickle.loads(plan) for plan in plans])
    answers = writer.prepare_global_plan(answers)
    sent = [pickle.dumps(answer) for answer in answers]
    planner.finish_plan(pickle.loads(sent[0]))
    seconds = time.process_time() - started

    received = max(map(len, plans))
    plans.clear()  # frees memory
    written = results(answers)

    started = time.process_time()
    writer.finish(metadata, [pickle.loads(result) for result in written])
    broadcast = pickle.dumps(metadata)
    seconds += time.process_time() - started
    return {
        "s": plan_seconds + seconds,
        "plan_s": plan_seconds,
        "received_mb": len(written) * (received + max(map(len, written))) / 1e6,
        "answers_mb": len(sent) * max(map(len, sent)) / 1e6,
        "metadata_mb": len(broadcast) / 1e6,
    }


def load(
    open_reader: Callable[[], StorageReader], planner: LoadPlanner, state: State
) -> dict[str, float]:
    """Runs a rank's part of `dcp.load`, up to the list of what it has to read."""
    state = on_cpu(state, hollow)
    started = time.process_time()
    metadata = open_reader().read_metadata()
    planner.set_up_planner(state, metadata, is_coordinator=True)
    plan = planner.finish_plan(planner.create_local_plan())
    return {"load_s": time.process_time() - started, "load_items": len(plan.items)}


def hollow(shape: Size) -> Tensor:
    """Makes a CPU tensor with memory for one number: the planner would allocate a meta tensor."""
    return torch.zeros(()).expand(shape)


def measure(flavor: str, ranks: int, folder: Path) -> dict[str, float]:
    """Measures titanlite's planner and storage. Leaves a step folder with a manifest."""
    state = state_of(FLAVORS[flavor], ranks, 0)
    others = Others(state, ranks)
    other = ranks // 2 + 1
    require_same(flavor, ranks, other, "report", others.report(other))
    plans = [pickle.dumps(SavePlan([], planner_data=others.report(r))) for r in range(ranks)]
    silent = [pickle.dumps(SavePlan([]))] * ranks
    results = [pickle.dumps(others.written(rank)) for rank in range(ranks)]

    planner = PlacementSavePlanner()

    def written(answers: list[SavePlan]) -> Messages:
        writer.write_data(answers[0], planner)  # no files, because no items
        return results

    found: dict[str, float] = {"ranks": ranks}
    for step, messages in enumerate([plans, silent], 1):
        writer = StepWriter(folder, step, planner, {}, FACTS)
        cost = save(planner, writer, state, messages, written)
        found |= {f"save_{step}_{key}": value for key, value in cost.items()}
    assert writer.manifest is not None
    found["parts"] = sum(len(entry.grid.files) for entry in writer.manifest.tensors.values())
    found["manifest_mb"] = (writer.final / NAME).stat().st_size / 1e6

    def open_reader() -> StepReader:
        path = writer.final / NAME
        return StepReader(writer.final, parse_manifest(path, read_text(path)))

    return found | load(open_reader, PlacementLoadPlanner(), state)


def measure_stock_save(flavor: str, ranks: int, folder: Path) -> dict[str, float]:
    """Measures DCP's own planner, and its writer that pickles."""
    state = state_of(FLAVORS[flavor], ranks, 0)
    others = Others(state, ranks)
    planner = DefaultSavePlanner()
    planner.set_up_planner(state, is_coordinator=True)
    own = planner.create_local_plan()
    other = ranks // 2 + 1
    require_same(flavor, ranks, other, "plan", others.stock_plan(other, own))
    plans = [pickle.dumps(own)]
    plans += [pickle.dumps(others.stock_plan(rank, own)) for rank in range(1, ranks)]
    silent = [pickle.dumps(SavePlan([], usable=False))] * ranks
    results: Messages = []

    def written(answers: list[SavePlan]) -> Messages:
        if not results:  # in the second save nothing has changed
            results[:] = [pickle.dumps(stock_written(r, p)) for r, p in enumerate(answers)]
        return results

    found: dict[str, float] = {}
    planner = DefaultSavePlanner(enable_plan_caching=True)  # the caches belong to the class
    for step, messages in enumerate([plans, silent], 1):
        writer = FileSystemWriter(folder / f"stock-{step}")
        writer.prepare_local_plan(own)  # creates the folder
        cost = save(planner, writer, state, messages, written)
        found |= {f"stock_save_{step}_{key}": value for key, value in cost.items()}
    return found


def measure_stock_load(flavor: str, ranks: int, folder: Path) -> dict[str, float]:
    """Measures DCP's own planner and reader of safetensors; `measure` has left `folder`."""
    state = state_of(FLAVORS[flavor], ranks, 0)
    path = folder / "step-2" / NAME
    headers = folder / "headers"
    headers.mkdir()
    write_headers(parse_manifest(path, read_text(path)), headers)
    on_disk = sum(file.stat().st_blocks * 512 for file in headers.iterdir())
    gc.collect()
    found = load(lambda: HuggingFaceStorageReader(str(headers)), DefaultLoadPlanner(), state)
    found["headers_mb"] = on_disk / 1e6
    return {f"stock_{key}": value for key, value in found.items()}


def write_headers(manifest: Manifest, folder: Path) -> None:
    """Writes the files of a manifest, with their headers but without data."""
    boxes: dict[Grid, list[Box]] = {}
    shards: dict[str, Shard] = {}
    for name, entry in manifest.tensors.items():
        if entry.grid not in boxes:
            boxes[entry.grid] = list(entry.grid.boxes())
        for box in boxes[entry.grid]:
            shard = shards.setdefault(box.file, Shard({}, {}))
            part = torch.empty(box.sizes, dtype=DTYPES[entry.dtype], device="meta")
            shard.tensors[name] = part
            shard.offsets[name] = list(box.offsets)
    for file, shard in shards.items():
        names = list(shard.tensors)
        size = sum(tensor.nbytes for tensor in shard.tensors.values())
        count = int(size // MAX_FILE) + 1
        for number in range(count):
            some = names[number::count]
            piece = Shard(
                {name: shard.tensors[name] for name in some},
                {name: shard.offsets[name] for name in some},
            )
            header = piece.header()
            size = sum(tensor.nbytes for tensor in piece.tensors.values())
            with (folder / f"{number}-{file}").open("wb") as target:
                target.write(header)
                target.truncate(len(header) + size)


def require_same(flavor: str, ranks: int, rank: int, key: str, pretended: object) -> None:
    """Asserts that a process that pretends to be this rank makes the plan that was made for it."""
    command = [sys.executable, __file__, "--flavor", flavor, "--one", "rank", str(ranks), str(rank)]
    planned = report.child(command)
    assert planned.get(key) == fingerprint(pretended), f"rank {rank} plans something else"


def measure_rank(flavor: str, ranks: int, rank: int) -> dict[str, str]:
    """Makes another rank's plans: its report to titanlite's planner, and its stock plan."""
    state = state_of(FLAVORS[flavor], ranks, rank)
    ours = PlacementSavePlanner()
    stock = DefaultSavePlanner()
    plans = []
    for planner in (ours, stock):
        planner.set_up_planner(state)
        plans.append(planner.create_local_plan())
    return {"report": fingerprint(plans[0].planner_data), "plan": fingerprint(plans[1])}


def fingerprint(value: object) -> str:
    """Computes the hash of a value and the size of its pickle."""
    return f"{hashlib.sha256(repr(value).encode()).hexdigest()} {len(pickle.dumps(value))}"


def limit_memory() -> None:
    """Makes this process fail if it would take more memory than there is."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    kilobytes = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
    limit = int(1024 * kilobytes - MEMORY_LEFT)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


ROWS = {  # label -> key, format
    "parts of tensors": ("parts", "{:,.0f}"),
    "**first save**, CPU seconds on rank 0": ("save_1_s", "{:.2f}"),
    "of these its own plan, as on every rank": ("save_1_plan_s", "{:.2f}"),
    "MB that rank 0 receives": ("save_1_received_mb", "{:.2f}"),
    "MB that it answers": ("save_1_answers_mb", "{:.2f}"),
    "MB of the metadata, for each rank": ("save_1_metadata_mb", "{:.2f}"),
    "**later save**, CPU seconds on rank 0": ("save_2_s", "{:.2f}"),
    "later: of these its own plan": ("save_2_plan_s", "{:.2f}"),
    "later: MB that rank 0 receives": ("save_2_received_mb", "{:.2f}"),
    "MB of the manifest": ("manifest_mb", "{:.2f}"),
    "**load**, CPU seconds on each rank": ("load_s", "{:.2f}"),
    "stock: **first save**, CPU seconds on rank 0": ("stock_save_1_s", "{:.1f}"),
    "stock: of these its own plan": ("stock_save_1_plan_s", "{:.1f}"),
    "stock: MB that rank 0 receives": ("stock_save_1_received_mb", "{:,.0f}"),
    "stock: MB that it answers": ("stock_save_1_answers_mb", "{:,.0f}"),
    "stock: MB of the metadata, for each rank": ("stock_save_1_metadata_mb", "{:,.0f}"),
    "stock: **later save**, CPU seconds on rank 0": ("stock_save_2_s", "{:.1f}"),
    "stock: later: of these its own plan": ("stock_save_2_plan_s", "{:.1f}"),
    "stock: later: MB that rank 0 receives": ("stock_save_2_received_mb", "{:,.0f}"),
    "stock: **load**, CPU seconds on each rank": ("stock_load_s", "{:.1f}"),
    "stock: MB of the headers": ("stock_headers_mb", "{:,.0f}"),
    "first save, CPU: titanlite / stock": ("save_1_s_ratio", "{:.4f}"),
    "later save, CPU: titanlite / stock": ("save_2_s_ratio", "{:.4f}"),
    "first save, bytes received: titanlite / stock": ("save_1_received_mb_ratio", "{:.4f}"),
    "later save, bytes received: titanlite / stock": ("save_2_received_mb_ratio", "{:.4f}"),
    "load, CPU: titanlite / stock": ("load_s_ratio", "{:.4f}"),
}


def ratios(found: dict[str, Any]) -> dict[str, float]:
    """Divides titanlite's figures by stock's, where both were measured."""
    compared = [key.removesuffix("_ratio") for key, _ in ROWS.values() if key.endswith("_ratio")]
    return {
        f"{key}_ratio": found[key] / found[f"stock_{key}"]
        for key in compared
        if f"stock_{key}" in found
    }


def measure_all(flavor: str, ranks: int, stock: bool) -> dict[str, Any]:
    """Runs all measurements for this number of ranks, each in a separate process."""
    with tempfile.TemporaryDirectory() as folder:
        run = [sys.executable, __file__, "--flavor", flavor, "--folder", folder, "--one"]
        found = report.child([*run, "own", str(ranks)])
        if stock and "failed" not in found:
            for kind in ("stock_load", "stock_save"):
                part = report.child([*run, kind, str(ranks)])
                if "failed" in part:
                    part = {f"{kind}_failed": part["failed"], f"{kind}_output": part["output"]}
                found |= part
    return found | ratios(found)


def table_row(label: str, cells: list[str]) -> str:
    return f"| {label} | " + " | ".join(cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="*", default=[8, 128, 1024])
    parser.add_argument("--stock", type=int, nargs="*", default=[8, 128, 1024])
    parser.add_argument("--flavor", default="llama3_405b")
    parser.add_argument("--one", nargs="+", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:  # in a separate process
        print(json.dumps(in_this_process(options.flavor, options.folder, *options.one)))
        return

    measured: dict[int, dict[str, Any]] = {}
    for ranks in options.ranks:
        found = measure_all(options.flavor, ranks, ranks in options.stock)
        measured[ranks] = found
        print(ranks, json.dumps(found, indent=1), flush=True)

    columns = [f"{ranks:,} ranks" for ranks in options.ranks]
    body = [table_row("", columns), "|---" * (len(columns) + 1) + "|"]
    for label, (key, form) in ROWS.items():
        cells = []
        for found in measured.values():
            cells.append(form.format(found[key]) if key in found else "not measured")
        body.append(table_row(label, cells))
    for ranks, found in measured.items():
        for kind in ("stock_save", "stock_load"):
            if f"{kind}_failed" in found:
                body += ["", f"{kind} on {ranks:,} ranks: {found[f'{kind}_failed']}"]
    name = "many_ranks"
    if options.flavor != "llama3_405b":
        name = f"many_ranks_{options.flavor}"
    results = {str(ranks): found for ranks, found in measured.items()}
    report.write(name, f"What many ranks cost rank 0, with {options.flavor}", body, results)
    report.exit_code(results)


def in_this_process(
    flavor: str, folder: Path, kind: str, ranks: str, rank: str = "0"
) -> dict[str, Any]:
    """Runs one measurement."""
    if kind == "rank":
        return measure_rank(flavor, int(ranks), int(rank))
    gc.disable()
    torch.set_num_threads(1)  # CPU seconds also count threads that wait
    if kind == "stock_save":
        limit_memory()
        return measure_stock_save(flavor, int(ranks), folder)
    if kind == "stock_load":
        return measure_stock_load(flavor, int(ranks), folder)
    return measure(flavor, int(ranks), folder)


if __name__ == "__main__":
    main()
