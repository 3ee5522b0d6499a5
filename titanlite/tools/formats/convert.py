"""Conversion of a checkpoint into another format, tensor by tensor, in one process without a
process group.

    from titanlite.tools.formats.convert import convert, load_full_state
    convert("outputs/debug", "debug_hf", to="hf")
    weights = load_full_state("debug_hf")            # a lazy mapping: name -> Tensor
    weights["layers.0.attention.wq.weight"]          # read now, in titanlite's order of rows

What it is: the source's format is detected (`detect_format.py`) and its hashes verified; the output
is written beside the target (`targets.py`), synced, renamed, opened again and compared
(`check_export.py`).
What it costs: memory for blocks of rows, in some formats for one tensor; time for reading and
writing once, for hashing a step folder before, and for the comparison, which reads both again.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from titanlite.checkpoint.manifest import CorruptCheckpoint
from titanlite.config.mistakes import suggestion
from titanlite.model.flavors import LlamaConfig, parameter_shapes
from titanlite.runtime.errors import ConfigError, printable
from titanlite.runtime.files import make_folder
from titanlite.runtime.progress import progress_bar
from titanlite.tokenizer.tokenizer import Tokenizer
from titanlite.tokenizer.tokenizer_json import JSON_FILES, QWEN_PATTERN, RANK_FILE
from titanlite.tools.formats import gguf_file, huggingface
from titanlite.tools.formats.check_export import compare_logits, compare_tensors
from titanlite.tools.formats.detect_format import open_adapter, open_full_state
from titanlite.tools.formats.export import Export
from titanlite.tools.formats.full_state import FullState, FullTensor
from titanlite.tools.formats.huggingface_tokenizer import files_of
from titanlite.tools.formats.load_weights import require_intact
from titanlite.tools.formats.output_path import (
    lock_target,
    publish,
    remove,
    require_writable,
    temporary_path,
)
from titanlite.tools.formats.same_model import differences, tensor_problems
from titanlite.tools.formats.targets import SHARDED, SUFFIXES, TARGETS, WITH_OTHERS, WITH_SCRATCH

logger = logging.getLogger("titanlite")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
SPARE = 1 << 26  # bytes of the disk beside the tensors: small files, headers


class Mismatch(ConfigError):
    """The output differs from the source. It stays on the disk."""


def load_full_state(path: str | Path, step: int | None = None) -> FullState:
    """A checkpoint of any format as a lazy mapping: parameter name -> Tensor in its dtype;
    `.others` has the rest.

    `step` selects one of a run's checkpoints, None the newest. Raises ConfigError if there is none,
    CorruptCheckpoint if it is incomplete, also when a tensor is read. Hashes and CRC-32 are not
    compared: see `require_intact`.
    """
    return open_full_state(Path(path), step)


def convert(
    source: str | Path,
    target: str | Path,
    to: str = "",
    *,
    dtype: str = "",
    step: int | None = None,
    weights: str = "model",
    shard_size: int = 0,
    full: bool = False,
    model: str = "",
    adapter: Path | None = None,
    verify: bool = True,
    force: bool = False,
    log: Callable[[str], None] = logger.info,
) -> FullState:
    """Writes the checkpoint `source` as `target` in format `to`, compares the two and returns the
    new one.

    `to`: titanlite, dcp, safetensors, torch, llama, hf, gguf or peft; empty: by the suffix.
    `dtype` of the weights: bf16, fp16, fp32 (for gguf also q8_0); empty: the source's. `step`:
    which of a run's checkpoints; None: the newest. `weights`: ema for the averaged weights of a
    run. `shard_size`: bytes per file in formats with several; 0: 5 GB. `full`: also optimizer and
    training state. `model`: a flavor or model.json, for sources without the model's shape.
    `adapter`: to be added to the weights. `force`: replace an existing target, convert NaN and
    infinity.

    Raises ConfigError for what cannot be done and CorruptCheckpoint for a damaged source, the
    target unchanged then. Raises Mismatch if the output differs from the source; the output stays,
    to be examined.
    """
    target = Path(os.path.abspath(target))
    to = _format(target, to)
    as_dtype, q8 = _dtype(dtype, to)
    if shard_size and (
        to not in SHARDED or (to == "safetensors" and target.suffix == ".safetensors")
    ):
        raise ConfigError(
            f"--shard-size: {target.name} ({to}) is one file; allowed: {', '.join(SHARDED)}, in "
            "folders"
        )
    if to == "peft":
        if adapter is not None:
            raise ConfigError("--adapter has no effect with --to peft: SOURCE holds the adapters")
        state = open_adapter(Path(source), step=step, weights=weights)
        _warn_of_adapters_below(state)
    else:
        state = open_full_state(Path(source), step, model, weights, adapter)
    require_writable(state.path, target, force)
    export = Export(state, as_dtype, q8, full, shard_size)
    log(describe(state, full))
    _require_convertible(state, to, full, force)
    make_folder(target.parent)
    with lock_target(target, state.path):
        # Again: another conversion may have ended since
        require_writable(state.path, target, force)
        _write(export, target, to, force, log)
        return _read_back(export, target, to, verify, log)


def _warn_of_adapters_below(state: FullState) -> None:
    """A run with adapters can begin with another one, whose adapters are in no file of PEFT's."""
    base = Path(state.about.config.get("checkpoint", {}).get("initial_load", ""))
    with contextlib.suppress(ConfigError):  # where it is not there any more
        if open_full_state(base).sources:
            logger.warning(
                "%s: its adapters belong to %s, which has adapters too; PEFT's base model is what "
                "titanlite convert %s TARGET --to hf writes",
                state.path,
                base,
                base,
            )


def _write(export: Export, target: Path, to: str, force: bool, log: Callable[[str], None]) -> None:
    """Writes beside the target and renames; on an error nothing is left."""
    state = export.state
    needed = export.nbytes * (2 if to in WITH_SCRATCH else 1) + SPARE
    free = shutil.disk_usage(target.parent).free
    if free < needed:
        raise ConfigError(
            f"{target.parent}: {free / 1e6:,.0f} MB free, and {needed / 1e6:,.0f} MB needed"
        )
    beside = temporary_path(target)
    try:
        with progress_bar(state.nbytes(export.full), "verifying the source") as bar:
            require_intact(state, export.full, bar.update)
        started = time.monotonic()
        with progress_bar(export.nbytes, "converting") as bar:
            export.progress = bar.update
            TARGETS[to](beside, export)
        if not force:
            _require_finite(export)
        publish(beside, target, force)
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


def _read_back(
    export: Export, target: Path, to: str, verify: bool, log: Callable[[str], None]
) -> FullState:
    """Opens the output, and compares it with the source. Raises Mismatch."""
    state = export.state
    try:
        if to == "gguf":
            result = gguf_file.read_back(target, state.model)
        elif to == "peft":
            result = open_adapter(target, state.model)
        else:
            result = open_full_state(target)
        if to != "titanlite":
            result.about.model = result.about.model or state.about.model
    except ConfigError as error:
        raise Mismatch([*error.problems, f"{target} cannot be read again; do not use it"]) from None
    if verify:
        try:
            log(_verify(export, result, to))
        except (KeyboardInterrupt, SystemExit):
            log(
                f"interrupted: {target} is complete, but the comparison with its source did not "
                "finish"
            )
            raise
    return result


def _format(target: Path, to: str) -> str:
    to = to or SUFFIXES.get(target.suffix, "")
    if not to:
        raise ConfigError(f"{target}: has no suffix of a format; give --to: {', '.join(TARGETS)}")
    if to not in TARGETS:
        raise ConfigError(
            f"--to {to}{suggestion(to, list(TARGETS))}; allowed: {', '.join(TARGETS)}"
        )
    return to


def _dtype(name: str, to: str) -> tuple[torch.dtype | None, bool]:
    """The dtype, None for that of the source; and whether it is q8_0."""
    allowed = [*DTYPES, "q8_0"] if to == "gguf" else list(DTYPES)
    if name and name not in allowed:
        raise ConfigError(
            f"--dtype {name}{suggestion(name, allowed)}; allowed in {to}: {', '.join(allowed)}"
        )
    return DTYPES.get(name), name == "q8_0"


def _require_metas_llama(model: LlamaConfig) -> None:
    """Raises ConfigError for what Meta's Llama does not have."""
    others = {
        "biases of q, k and v": model.qkv_bias,
        "norms of q and k": model.qk_norm,
        f"heads of width {model.head_dim}": model.explicit_head_dim != 0,
        f"a sliding window of {model.sliding_window}": model.sliding_window != 0,
    }
    if model.rope_scaling:
        kind = model.rope_scaling.kind
        others[f"RoPE scaling {kind}"] = kind != "llama3"
    for difference, is_there in others.items():
        if is_there:
            raise ConfigError(
                f"--to llama: the model has {difference}, which Meta's Llama has not; "
                f"{gguf_file.ALL_MODELS}"
            )


def _require_convertible(state: FullState, to: str, full: bool, force: bool) -> None:
    """Raises ConfigError if the source cannot be written in that format, or is not finite."""
    if full and to not in WITH_OTHERS:
        raise ConfigError(f"--full: {to} holds a model only; allowed: {', '.join(WITH_OTHERS)}")
    if full and state.about.averaged:
        raise ConfigError(
            "--full: training state belongs to the weights, not to their average; leave "
            "--weights out"
        )
    if full and not state.others:
        raise ConfigError(f"--full: {state.path} holds a model only")
    if state.about.finite is False and not force:
        raise ConfigError(
            f"{state.path}: holds NaN or infinity; choose another step, or convert it with --force"
        )
    if to == "hf":
        huggingface.family_of(state.model)
    if to == "gguf":
        gguf_file.architecture_of(state.model)
    if to == "llama":
        _require_metas_llama(state.model)
    if state.about.step == 0:
        logger.warning("%s: step 0: before any training, or weights of an unknown step", state.path)
    if to == "peft":
        return
    if to in ("titanlite", "hf", "llama", "gguf") or state.about.model:
        problems = tensor_problems(state.path, state.tensors, parameter_shapes(state.model))
        if problems:
            raise ConfigError(problems)
    content = state.about.tokenizer
    if not content:
        return
    if to == "llama" and RANK_FILE not in files_of(content):
        logger.warning(
            "%s: its tokenizer is a %s, which Meta's code does not read", state.path, JSON_FILES[0]
        )
    if to in ("hf", "gguf"):
        tokenizer = Tokenizer(state.path, content)
        vocabulary = state.model.vocab_size
        if tokenizer.size > vocabulary:
            raise ConfigError(
                f"{state.path}: its tokenizer has {tokenizer.size} ids, and the model {vocabulary}"
            )
        if to == "gguf":
            gguf_file.pre_tokenizer(tokenizer)
        cuts_as_qwen = tokenizer.pattern == QWEN_PATTERN and tokenizer.nfc
        if to == "hf" and state.model.qkv_bias and not cuts_as_qwen:
            logger.warning(
                "%s: transformers 5 has biases of q, k and v in Qwen2 only, and its AutoTokenizer "
                "cuts text as Qwen does in any folder of a Qwen2; with this tokenizer that gives "
                "other ids: load it with PreTrainedTokenizerFast.from_pretrained",
                state.path,
            )


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
    raise ConfigError(f"{export.state.path}: {listed}: {problem}; convert it anyway with --force")


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


def _verify(export: Export, result: FullState, to: str) -> str:
    """What was compared. Raises Mismatch if the output differs from the source."""
    state = export.state
    target = result.path

    def rounded(tensor: FullTensor, rows: Tensor) -> Tensor:
        if to == "gguf":
            return gguf_file.rounded(tensor, rows, export.dtype, export.q8)
        return rows.to(export.dtype_of(tensor))

    with progress_bar(result.nbytes(export.full), "comparing") as bar:
        problems = compare_tensors(state, result, rounded, export.full, bar.update)
    if state.about.model and result.about.model:
        for name, expected, actual in differences(state.about.model, result.about.model):
            problems.append(f"{target}: {name} is {actual}; expected {expected}")
    compared = f"verified: {len(export.model) + len(export.others)} tensors bit by bit"
    if not problems and state.about.model and not export.full and to != "peft":
        problem = compare_logits(state, target, to, result, rounded)
        if problem is None:
            compared += "; its logits are not finite"
        else:
            compared += ", and the model's logits"
        if problem:
            problems.append(problem)
    if problems:
        raise Mismatch(
            [
                *problems[:8],
                f"{target} differs from {state.path}; it stays on the disk, do not use it",
            ]
        )
    return compared
