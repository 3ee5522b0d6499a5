"""Converts a checkpoint into another format, tensor by tensor, in one process without a process
group.

    from titanlite.tools.formats.convert import Options, convert, load_full_state
    convert("outputs/debug", "debug_hf", Options(to="hf"))
    weights = load_full_state("debug_hf")            # a lazy mapping: name -> Tensor
    weights["layers.0.attention.wq.weight"]          # read now, in titanlite's order of rows

What it is: detect the source's format (`detect_format.py`), check that the target's can hold it
(`targets.py`), verify the source's hashes, write beside the target, sync, publish
(`output_path.py`), open the output again and compare the two (`check_export.py`). A target of one
file verifies a step folder while it is read; nothing is published if it is damaged.
What it costs: memory for blocks of rows; time for writing once, for reading once, or twice where
the hashes come first, and for the comparison, which reads both again.
"""

from __future__ import annotations

import logging
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from torch import Tensor

from titanlite.checkpoint.manifest import CorruptCheckpoint
from titanlite.config.mistakes import suggestion
from titanlite.runtime.errors import ConfigError, printable
from titanlite.runtime.files import make_folder
from titanlite.runtime.progress import progress_bar
from titanlite.tools.formats.check_export import (
    compare_descriptions,
    compare_logits,
    compare_tensors,
)
from titanlite.tools.formats.detect_format import open_full_state
from titanlite.tools.formats.export import DTYPES, Export, Options
from titanlite.tools.formats.full_state import FullState, FullTensor
from titanlite.tools.formats.intact import hashes_of, require_intact
from titanlite.tools.formats.output_path import (
    lock_target,
    publish,
    remove,
    require_apart,
    require_new,
    temporary_path,
)
from titanlite.tools.formats.same_model import differences
from titanlite.tools.formats.selection import Selection
from titanlite.tools.formats.targets import TARGETS, Target

logger = logging.getLogger("titanlite")
SPARE = 1 << 26  # bytes of the disk beside the tensors: small files, headers
DEFAULTS = Options()


class Mismatch(ConfigError):
    """The output differs from the source. It stays on the disk."""


def load_full_state(path: str | Path, step: int | None = None) -> FullState:
    """A checkpoint of any format as a lazy mapping: parameter name -> Tensor in its dtype;
    `.others` has the rest.

    `step` selects one of a run's checkpoints, None the newest. Raises ConfigError if there is none,
    CorruptCheckpoint if it is incomplete, also when a tensor is read. Hashes and CRC-32 are not
    compared: see `require_intact`.
    """
    return open_full_state(Path(path), Selection(step=step))


def convert(
    source: str | Path,
    target: str | Path,
    options: Options = DEFAULTS,
    log: Callable[[str], None] = logger.info,
) -> FullState:
    """Writes the checkpoint `source` as `target`, compares the two and returns the new one.

    Raises ConfigError for what cannot be done and CorruptCheckpoint for a damaged source, the
    target unchanged then. Raises Mismatch if the output differs from the source; the output stays,
    to be examined.
    """
    target = Path(os.path.abspath(target))
    form = _format_of(target, options)
    state = form.open_source(Path(source), options)
    require_apart(state.path, target)
    export = Export(state, options)
    _require_convertible(export, form, options.allow_nonfinite)
    make_folder(target.parent)
    with lock_target(target, state.path):
        require_new(target)
        log(describe(state, options.full))
        _write(export, target, form, options.allow_nonfinite, log)
        result = _read_back(export, target, form)
        if options.verify:
            _compare(export, result, form, log)
    return result


def _format_of(target: Path, options: Options) -> Target:
    """The format that --to or the suffix names.

    Raises ConfigError if there is none, or for an option that it does not have.
    """
    if options.to == "gguf" or target.suffix == ".gguf":
        raise ConfigError(
            f"{target}: GGUF files are not written; llama.cpp's convert_hf_to_gguf.py makes one of "
            "the folder that --to hf writes"
        )
    by_suffix = {suffix: form for form in TARGETS.values() for suffix in form.suffixes}
    if options.to and options.to not in TARGETS:
        raise ConfigError(
            f"--to {options.to}{suggestion(options.to, list(TARGETS))}; "
            f"allowed: {', '.join(TARGETS)}"
        )
    form = TARGETS.get(options.to) or by_suffix.get(target.suffix)
    if form is None:
        raise ConfigError(f"{target}: has no suffix of a format; give --to: {', '.join(TARGETS)}")
    named = by_suffix.get(target.suffix, form)
    if named is not form:
        raise ConfigError(
            f"{target}: {target.suffix} names a file of {named.name}, and --to is {form.name}; "
            f"expected another target, or --to {named.name}"
        )
    dtype = options.dtype
    if dtype and dtype not in DTYPES:
        raise ConfigError(
            f"--dtype {dtype}{suggestion(dtype, list(DTYPES))}; allowed: {', '.join(DTYPES)}"
        )
    names = options.names
    if names and names not in form.generations:
        other = ", ".join(form.generations) or f"none with {form.name}"
        raise ConfigError(
            f"--names {names}{suggestion(names, list(form.generations))}; allowed: {other}"
        )
    in_folder = target.suffix not in form.suffixes
    if options.shard_size and not (form.has_shards and in_folder):
        allowed = sorted(other.name for other in TARGETS.values() if other.has_shards)
        raise ConfigError(
            f"--shard-size: {target.name} ({form.name}) is one file; "
            f"allowed: {', '.join(allowed)}, in folders"
        )
    return form


def _require_convertible(export: Export, form: Target, allow_nonfinite: bool) -> None:
    """Raises ConfigError if the source cannot be written in that format, or is not finite."""
    state = export.state
    if export.full and not form.holds_training:
        allowed = [other.name for other in TARGETS.values() if other.holds_training]
        raise ConfigError(f"--full: {form.name} holds a model only; allowed: {', '.join(allowed)}")
    if export.full and state.about.averaged:
        raise ConfigError(
            "--full: training state belongs to the weights, not to their average; leave "
            "--weights out"
        )
    if export.full and not state.others:
        raise ConfigError(f"--full: {state.path} holds a model only")
    if state.about.finite is False and not allow_nonfinite:
        raise ConfigError(
            f"{state.path}: holds NaN or infinity; choose another step, or convert it with "
            "--allow-nonfinite"
        )
    form.check(export)
    if state.about.step == 0:
        logger.warning("%s: step 0: before any training, or weights of an unknown step", state.path)


def _write(
    export: Export,
    target: Path,
    form: Target,
    allow_nonfinite: bool,
    log: Callable[[str], None],
) -> None:
    """Writes beside the target and publishes it; on an error nothing is left."""
    state = export.state
    needed = export.nbytes + SPARE
    free = shutil.disk_usage(target.parent).free
    if free < needed:
        raise ConfigError(
            f"{target.parent}: {free / 1e6:,.0f} MB free, and {needed / 1e6:,.0f} MB needed"
        )
    beside = temporary_path(target)
    try:
        if form.in_one_file or target.suffix in form.suffixes:
            export.hashes = hashes_of(state, export.full)
        if not export.hashes:
            with progress_bar(state.nbytes(export.full), "verifying the source") as bar:
                require_intact(state, export.full, bar.update)
        started = time.monotonic()
        with progress_bar(export.nbytes, "converting") as bar:
            export.progress = bar.update
            form.write(beside, export)
        if not allow_nonfinite:
            _require_finite(export)
        publish(beside, target)
    except CorruptCheckpoint:
        if not state.path.exists():
            raise ConfigError(
                f"{state.path}: was deleted while it was read; see its run's checkpoint.keep"
            ) from None
        raise
    finally:
        remove(beside)
    seconds = time.monotonic() - started
    gb = export.nbytes / 1e9
    log(f"wrote {target}: {gb:.3f} GB in {seconds:.2f} s, {gb / seconds:.2f} GB/s")


def _require_finite(export: Export) -> None:
    names = sorted(export.nonfinite)
    if not names:
        return
    listed = ", ".join(map(repr, names[:3]))
    if len(names) > 3:
        listed += f" and {len(names) - 3} more"
    problem = "NaN or infinity"
    if export.dtype:
        problem += f" as {export.dtype}"
    raise ConfigError(
        f"{export.state.path}: {listed}: {problem}; convert it anyway with --allow-nonfinite"
    )


def _read_back(export: Export, target: Path, form: Target) -> FullState:
    """Opens the output. Raises Mismatch."""
    try:
        return form.read_back(target, export.state.about.model)
    except ConfigError as error:
        raise Mismatch([*error.problems, f"{target} cannot be read again; do not use it"]) from None


def _compare(export: Export, result: FullState, form: Target, log: Callable[[str], None]) -> None:
    """Compares the output with the source. Raises Mismatch."""
    try:
        problems, compared = _problems(export, result, form)
    except (KeyboardInterrupt, SystemExit):
        log(
            f"interrupted: {result.path} is complete, but the comparison with its source did not "
            "finish"
        )
        raise
    if problems:
        raise Mismatch(
            [
                *problems[:8],
                f"{result.path} differs from {export.state.path}; it stays on the disk, do not "
                "use it",
            ]
        )
    log(f"verified: {compared}")


def _problems(export: Export, result: FullState, form: Target) -> tuple[list[str], str]:
    """How the output differs from the source, and what was compared."""
    state = export.state

    def rounded(tensor: FullTensor, rows: Tensor) -> Tensor:
        return rows.to(export.dtype_of(tensor))

    with progress_bar(result.nbytes(export.full), "comparing") as bar:
        problems = compare_tensors(state, result, rounded, export.full, bar.update)
    if state.about.model and result.about.model:
        for name, expected, actual in differences(state.about.model, result.about.model):
            problems.append(f"{result.path}: {name} is {actual}; expected {expected}")
    compared = f"{len(export.model) + len(export.others)} tensors bit by bit"
    if problems or export.full or not state.about.model or not form.is_model:
        return problems, compared
    problems = compare_descriptions(state, result)
    if problems:
        return problems, compared
    problem = compare_logits(state, result, rounded, form.has_half_split(state.model))
    if problem is None:
        return [], f"{compared}; its logits are not finite"
    if problem:
        return [problem], compared
    return [], f"{compared}, and the model's logits"


def describe(state: FullState, full: bool = False) -> str:
    """A checkpoint in a line: format, step, layout, tensors, model and tokenizer."""
    about = state.about
    parts = [f"{state.path}: {about.format}"]
    if about.step is not None:
        parts.append(f"step {about.step}")
    if about.layout:
        parts.append(f"saved by {about.layout}")
    flavor = about.config.get("model", {}).get("flavor", "")
    if flavor:
        parts.append(f"flavor {flavor}")
    if about.averaged:
        parts.append("averaged weights")
    count = len(state.tensors)
    if full:
        count += len(state.others)
    dtypes = {str(tensor.dtype).removeprefix("torch.") for tensor in state.tensors.values()}
    size = state.nbytes(full) / 1e9
    parts.append(f"{count} tensors, {size:.3f} GB, {', '.join(sorted(dtypes))}")
    if about.model:
        parts.append(f"{about.model.num_parameters:,} parameters")
    else:
        parts.append("the model's shape is not known")
    parts.append("with its tokenizer" if about.tokenizer else "no tokenizer")
    return printable("; ".join(parts))
