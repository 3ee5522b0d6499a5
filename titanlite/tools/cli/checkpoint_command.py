"""`titanlite checkpoint list | verify | show | diff | prune`: inspects the checkpoints of a run.

What it is: one process without a process group, which reads some rows at a time. Only `prune`
changes anything: it deletes by the same rule as the run (`checkpoint/retention.py`), and refuses
while the run is training.
What it costs: memory for some rows of two tensors, and for all rows of one that is transposed.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from titanlite.checkpoint.folders import find_step_folder, list_steps, step_folder, sweep
from titanlite.checkpoint.manifest import CorruptCheckpoint, read_manifest
from titanlite.checkpoint.retention import Retention, delete_step, read_proof, steps_to_delete
from titanlite.checkpoint.step_files import file_problems, verify_files
from titanlite.distributed.run_folder import lock
from titanlite.runtime.errors import EXIT_CONFIG, ConfigError, printable
from titanlite.runtime.progress import progress_bar
from titanlite.tools.cli.options import StrictParser, at_least
from titanlite.tools.formats.convert import describe
from titanlite.tools.formats.detect_format import open_full_state
from titanlite.tools.formats.full_state import FullState, FullTensor
from titanlite.tools.formats.step_folder import is_step_folder

EXIT_DAMAGED = 1  # or the two checkpoints differ


def run(argv: list[str]) -> int:
    """Runs the command; returns its exit code: 0, or 1 if a checkpoint is damaged or two differ."""
    parser = StrictParser(prog="titanlite checkpoint", description="Checkpoints of a run.")
    commands = parser.add_subparsers(dest="command", required=True)
    listing = commands.add_parser("list", help="list the checkpoints of a run and their problems")
    listing.add_argument("run", type=Path, help="a run's folder, outputs/<run>")
    verifying = commands.add_parser(
        "verify", help="read all files and compare them with their hashes"
    )
    verifying.add_argument(
        "path", type=Path, help="a run's folder (all its checkpoints) or a step's"
    )
    showing = commands.add_parser(
        "show", help="print the origin, files and tensors of a checkpoint"
    )
    showing.add_argument(
        "path", type=Path, help="a step's folder, a run's (the newest), or any that `convert` reads"
    )
    differing = commands.add_parser(
        "diff", help="print the differences between the tensors of two checkpoints"
    )
    differing.add_argument(
        "a", type=Path, help="a step's folder, a run's (the newest), or any that `convert` reads"
    )
    differing.add_argument("b", type=Path, help="the same")
    differing.add_argument("--all", action="store_true", help="also list tensors that are equal")
    pruning = commands.add_parser(
        "prune", help="delete checkpoints by the rule of checkpoint.keep, keep_every, keep_best"
    )
    pruning.add_argument("run", type=Path, help="a run's folder")
    pruning.add_argument("--keep", type=at_least(int, 1), required=True, help="keep the newest n")
    pruning.add_argument(
        "--keep-every", type=at_least(int, 0), default=0, help="keep every n-th step"
    )
    pruning.add_argument("--keep-best", type=at_least(int, 0), default=0, help="keep the best n")
    pruning.add_argument("--dry-run", action="store_true", help="only print what would be deleted")
    options = parser.parse_args(argv)
    if options.command == "list":
        return list_run(options.run)
    if options.command == "verify":
        return verify(options.path)
    if options.command == "show":
        return show(options.path)
    if options.command == "diff":
        return diff(open_full_state(options.a), open_full_state(options.b), options.all)
    return prune(options.run, options.keep, options.keep_every, options.keep_best, options.dry_run)


def _folder(run_folder: Path) -> Path:
    """The `checkpoints` folder of a run. Raises ConfigError if there is none."""
    for folder in (run_folder / "checkpoints", run_folder):
        if list_steps(folder) or any(folder.glob("step-*")):
            return folder
    raise ConfigError(f"{run_folder}: no checkpoints; expected a run's folder (outputs/<run>)")


def list_run(run_folder: Path) -> int:
    """Prints a line for each folder: steps, then incomplete and renamed ones.

    Compares file sizes, not hashes.
    """
    folder = _folder(run_folder)
    rows = [("step", "saved (UTC)", "GB", "layout", "validation loss", "state")]
    for step in list_steps(folder):
        rows.append((str(step), *_described(step_folder(folder, step))))
    for path in sorted(folder.glob("step-*.*")):
        kind = "renamed"
        if ".tmp-" in path.name:
            kind = "incomplete"
        elif path.suffix == ".deleted":
            kind = "partly deleted"
        rows.append((path.name, "", "", "", "", kind))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        print("  ".join(cells).rstrip())
    return 0


def _described(path: Path) -> tuple[str, str, str, str, str]:
    """The cells of a step's row after the step."""
    try:
        manifest = read_manifest(path)
    except CorruptCheckpoint as error:
        return "", "", "", "", f"damaged: {error}"
    except ConfigError as error:  # of another format version
        return "", "", "", "", str(error)
    problems = file_problems(path, manifest.files)
    if not problems and not manifest.finite:
        problems = ["contains NaN or infinity"]
    state = "; ".join(problems) or "complete"
    loss = ""
    if manifest.validation_loss is not None:
        loss = f"{manifest.validation_loss:.4f}"
    saved = manifest.created[:19].replace("T", " ")
    return saved, f"{manifest.size / 1e9:.3f}", manifest.degrees, loss, state


def verify(path: Path) -> int:
    """Hashes every file of a checkpoint, or of all checkpoints of a run.

    Returns 1 if any is damaged, else 2 if any cannot be verified.
    """
    damaged = False
    unread = False
    for folder in _step_folders(path):
        started = time.monotonic()
        try:
            manifest = read_manifest(folder)
            with progress_bar(manifest.size, f"verifying {folder.name}") as bar:
                problems = verify_files(folder, manifest, progress=bar.update)
        except CorruptCheckpoint as error:
            problems = error.problems
        except ConfigError as error:  # another format version, or no permission
            print(f"not verified: {error}")
            unread = True
            continue
        for problem in problems:
            print(f"damaged: {problem}")
            damaged = True
        if not problems:
            seconds = time.monotonic() - started
            note = "" if manifest.finite else ", but contains NaN or infinity"
            gb = manifest.size / 1e9
            size = f"{len(manifest.files)} files, {gb:.3f} GB"
            print(f"{folder}: {size}, complete{note} ({seconds:.2f} s, {gb / seconds:.2f} GB/s)")
    if damaged:
        return EXIT_DAMAGED
    return EXIT_CONFIG if unread else 0


def _step_folders(path: Path) -> list[Path]:
    """The folder of a step itself, or those of all steps of a run.

    Raises ConfigError for a checkpoint of another format, which has no hashes.
    """
    named = re.fullmatch(r"step-\d+", path.name)
    if named and not path.is_dir():
        steps = _listed(list_steps(path.parent))
        raise ConfigError(f"{path}: no such folder; steps there: {steps}")
    if named or (path / "manifest.json").exists():
        return [path]
    if path.exists() and not is_step_folder(path):
        form = open_full_state(path).about.format
        raise ConfigError(
            f"{path}: format {form} has no hashes; expected a run's or a step's folder"
        )
    folder = _folder(path)
    return [step_folder(folder, step) for step in list_steps(folder)]


def show(path: Path) -> int:
    """Prints the manifest, or the tensors of a checkpoint of another format."""
    if path.exists() and not is_step_folder(path):
        full = open_full_state(path)
        print(describe(full, full=True))
        for name, other in (full.tensors | full.others).items():
            print(f"  {name}  {str(other.dtype).removeprefix('torch.')}  {list(other.shape)}")
        return 0
    folder = find_step_folder(path)
    manifest = read_manifest(folder)
    num_parameters = 0
    for name, tensor in manifest.tensors.items():
        if name.startswith("model."):
            num_parameters += torch.Size(tensor.shape).numel()
    saved = f"saved {manifest.created} by torch {manifest.torch}"
    note = "" if manifest.finite else ", NOT FINITE"
    print(folder)
    print(f"  step {manifest.step}, {saved}, {manifest.degrees}")
    print(f"  {num_parameters:,} parameters, {manifest.size / 1e9:.3f} GB{note}")
    print(f"  data {manifest.data[:8]}, validation loss {manifest.validation_loss}, config:")
    for section, entries in manifest.config.items():
        settings = ", ".join(f"{key} = {json.dumps(value)}" for key, value in entries.items())
        print(printable(f"    [{section}] {settings}"))
    print("  files:")
    for name, file in manifest.files.items():
        print(f"    {name}  {file.size:,} bytes  sha256 {file.sha256}")
    print("  tensors:")
    for name, tensor in manifest.tensors.items():
        count = len(tensor.grid.files)
        parts = f"  in {count} parts" if count > 1 else ""
        print(f"    {name}  {tensor.dtype}  {list(tensor.shape)}{parts}")
    return 0


def diff(a: FullState, b: FullState, everything: bool) -> int:
    """Prints each tensor's largest difference, and the norm of the difference over that of `a`.

    Returns 1 if any tensor differs.
    """
    print(f"a: {describe(a, full=True)}")
    print(f"b: {describe(b, full=True)}")
    for line in _config_differences(a.about.config, b.about.config):
        print(line)
    first = a.tensors | a.others
    second = b.tensors | b.others
    equal = 0
    names = sorted({*first, *second})
    for name in names:
        if name not in first or name not in second:
            print(f"{name}: only in {'a' if name in first else 'b'}")
            continue
        was = first[name]
        now = second[name]
        if (was.dtype, was.shape) != (now.dtype, now.shape):
            print(f"{name}: {was.dtype} {was.shape} in a, {now.dtype} {now.shape} in b")
            continue
        difference = _difference(was, now)
        if difference:
            print(f"{name}: {difference}")
            continue
        equal += 1
        if everything:
            print(f"{name}: equal")
    print(f"{equal} of {len(names)} tensors are equal")
    return 0 if equal == len(names) else EXIT_DAMAGED


def _difference(a: FullTensor, b: FullTensor) -> str:
    """Describes how two tensors of one shape and dtype differ; "" if they are equal."""
    changed = 0
    largest = torch.zeros((), dtype=torch.float64)
    squares = torch.zeros((), dtype=torch.float64)
    squares_of_a = torch.zeros((), dtype=torch.float64)
    # A transposed tensor has one range, because a part of its rows takes reading all
    for start, stop in min(a.row_ranges(), b.row_ranges(), key=len):
        x = a.read(start, stop)
        y = b.read(start, stop)
        both_nan = x.isnan() & y.isnan()
        differs = (x != y) & ~both_nan
        x = x.double()
        squares_of_a += x[~both_nan].square().sum()
        if bool(differs.any()):
            distance = (x - y.double())[differs].abs()
            changed += len(distance)
            largest = largest.maximum(distance.max())
            squares += distance.square().sum()
    if not changed:
        return ""
    relative = float(squares.sqrt() / squares_of_a.sqrt().clamp(min=1e-300))
    extent = f"by up to {float(largest):.3g}; relative norm {relative:.3g}"
    return f"{changed:,} of {math.prod(a.shape):,} differ, {extent}"


def _config_differences(
    a: dict[str, dict[str, Any]], b: dict[str, dict[str, Any]]
) -> Iterator[str]:
    """A line for each setting with two values. Those that only one states are counted: a
    checkpoint that was converted states hardly any.
    """
    first = _settings(a)
    second = _settings(b)
    for key in first:  # in the order of the config
        if key in second and first[key] != second[key]:
            yield f"{key}: {json.dumps(first[key])} in a, {json.dumps(second[key])} in b"
    for name, only in (("a", first.keys() - second.keys()), ("b", second.keys() - first.keys())):
        if only:
            yield f"settings that only {name} states, which are not compared: {len(only)}"


def _settings(config: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The settings of a config by their whole names."""
    settings = {}
    for section, entries in config.items():
        for key, value in entries.items():
            settings[f"{section}.{key}"] = value
    return settings


def prune(run_folder: Path, keep: int, keep_every: int, keep_best: int, dry_run: bool) -> int:
    """Deletes the checkpoints that the rule does not keep, and the folders of interrupted saves."""
    folder = _folder(run_folder.resolve())
    if not dry_run:
        _lock = _lock_run(run_folder, folder.parent)  # until this function returns
    good = Retention(folder).good()
    proof = read_proof(folder.parent)
    gone = steps_to_delete(good, keep, keep_every, keep_best, proof.plausible)
    proven = [manifest.step for manifest in good if manifest.step <= proof.step]
    # Training has not gone on from any newer one: it may have diverged
    if proven and set(proven) <= set(gone):
        gone.remove(proven[-1])
    stay = [manifest.step for manifest in good if manifest.step not in gone]
    freed = sum(manifest.size for manifest in good if manifest.step in gone) / 1e9
    leftovers = [*folder.glob("step-*.tmp-*"), *folder.glob("step-*.deleted")]
    if not dry_run:
        for step in gone:
            delete_step(folder, step)
        sweep(folder)
    verb = "would delete" if dry_run else "deleted"
    names = "".join(f", {path.name}" for path in leftovers)
    print(f"{verb} steps {_listed(gone)} ({freed:.3f} GB){names}")
    print(f"complete checkpoints that are kept: {_listed(stay)}")
    return 0


def _lock_run(run_folder: Path, folder: Path) -> object:
    """The lock of a run's folder, held as long as the object lives. Raises ConfigError."""
    try:
        return lock(folder / ".lock")
    except BlockingIOError:
        raise ConfigError(
            f"{run_folder}: a run is training in this folder, and deletes checkpoints itself"
        ) from None
    except OSError as error:
        raise ConfigError(f"{run_folder}: {error.strerror or error}") from None


def _listed(steps: list[int]) -> str:
    return ", ".join(map(str, steps)) or "none"
