"""One checkpoint format into another, tensor by tensor, in one process without a process group.

    from titanlite.checkpoint.convert import convert, load_full_state
    convert("outputs/debug", "debug_hf", to="hf")
    weights = load_full_state("debug_hf")            # a lazy mapping: name -> Tensor
    weights["layers.0.attention.wq.weight"]          # read now, in titanlite's order of rows

What it is: a source is opened by looking at it (`formats/recognise.py`), written as a stream beside the target
(`formats/targets.py`), synced, renamed, opened again and compared (`formats/check.py`).
What it costs: memory for blocks of rows, in some formats for one tensor; time for reading and writing once, and for the
comparison reading both again.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

import torch
from torch import Tensor

from titanlite.checkpoint.manifest import CorruptCheckpoint, read_manifest
from titanlite.checkpoint.storage import verify_files
from titanlite.config.schema import ConfigError
from titanlite.config.spelling import suggestion
from titanlite.data.tokenizer import Tokenizer
from titanlite.formats.check import different_answers, different_tensors
from titanlite.formats.fill import WEIGHTS
from titanlite.formats.full_state import FullState, FullTensor
from titanlite.formats.gguf_file import expected, open_written
from titanlite.formats.place import publish, remove, require_free, sweep, temporary
from titanlite.formats.recognise import open_full_state
from titanlite.formats.safetensors_files import Told
from titanlite.formats.targets import SHARDED, SUFFIXES, TARGETS, WITH_OTHERS, Selection
from titanlite.model.flavors import parameter_shapes

logger = logging.getLogger("titanlite")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
SHARD_SIZE = 5_000_000_000  # bytes
ROOM = 1 << 26  # bytes beside the tensors: small files, headers


class Mismatch(ConfigError):
    """What was written is not what was read. It lies where it was written."""


def load_full_state(path: str | Path, step: int | None = None, trust_pickle: bool = False) -> FullState:
    """A checkpoint of any format as a lazy mapping: parameter name -> Tensor in its dtype; `.others` has the rest.

    `step`: which one of a run, None the newest. Raises ConfigError where there is none, CorruptCheckpoint where it is
    incomplete, also when a tensor is read. Hashes are not verified: `titanlite checkpoint verify` does that.
    """
    return open_full_state(Path(path), step, trust_pickle=trust_pickle)


def convert(
    source: str | Path,
    target: str | Path,
    to: str = "",
    *,
    dtype: str = "",
    step: int | None = None,
    shard_size: int = 0,
    full: bool = False,
    model: str = "",
    verify: bool = True,
    force: bool = False,
    trust_pickle: bool = False,
    tell: Callable[[str], None] = logger.info,
) -> FullState:
    """Writes the checkpoint `source` as `target` in format `to`, compares the two and returns the new one.

    `to`: titanlite, dcp, safetensors, torch, llama, hf or gguf; by the target's suffix if empty. `dtype`: bf16, fp16,
    fp32 (in gguf also q8_0) for the weights; as they are if empty. `step`: which one of a run; None the newest.
    `shard_size`: bytes of a file in formats that have several; 0 for 5 GB. `full`: optimizer and all else, too.
    `model`: a flavor or model.json, for sources that do not tell. `force`: replace an existing target, convert what is
    not finite.

    Raises ConfigError for what cannot be done, CorruptCheckpoint if the source is incomplete: the target is unchanged.
    Raises Mismatch where the result is not the source's: it is there, to be looked at.
    """
    target = Path(os.path.abspath(target))
    to = _format(target, to)
    as_dtype, q8 = _dtype(dtype, to)
    if shard_size and (to not in SHARDED or (to == "safetensors" and target.suffix == ".safetensors")):
        raise ConfigError(f"--shard-size: {target.name} ({to}) is not cut; allowed: {', '.join(SHARDED)}, in folders")
    state = open_full_state(Path(source), step, model, trust_pickle)
    require_free(state.path, target, force)
    what = Selection(state, as_dtype, full, q8)
    tell(describe(state, full))
    _require_sense(state, to, full, force)
    _write(state, target, to, what, shard_size or SHARD_SIZE, force, tell)
    try:
        result = open_written(target, state.model) if to == "gguf" else open_full_state(target)
        if to != "titanlite":
            result.about.model = result.about.model or state.about.model
    except ConfigError as error:
        raise Mismatch([*error.problems, f"{target} cannot be read again; do not use it"]) from None
    if verify:
        try:
            _verify(state, result, to, what, full, tell)
        except (KeyboardInterrupt, SystemExit):
            tell(f"interrupted: {target} is whole, and was not compared to its end")
            raise
    return result


def _write(
    state: FullState,
    target: Path,
    to: str,
    what: Selection,
    shard_size: int,
    force: bool,
    tell: Callable[[str], None],
) -> None:
    """Writes beside the target, and gives the result its name; or leaves nothing."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if (free := shutil.disk_usage(target.parent).free) < (need := what.nbytes + ROOM):
        raise ConfigError(f"{target.parent}: {free / 1e6:,.0f} MB free, and {need / 1e6:,.0f} MB needed")
    beside = temporary(target)
    sweep(target, state.path)
    progress = _Progress(what.nbytes, tell)
    try:
        with _hashing(state, what, progress) as told:
            TARGETS[to](beside, state, what, shard_size, told)
        if not force:
            _require_finite(state, what)
        publish(beside, target)
    except CorruptCheckpoint:
        if not state.path.exists():
            raise ConfigError(f"{state.path}: was deleted while it was read; see its run's checkpoint.keep") from None
        raise
    finally:
        remove(beside)
    progress.done(target)


def _format(target: Path, to: str) -> str:
    to = to or SUFFIXES.get(target.suffix, "")
    if to not in TARGETS:
        raise ConfigError(
            f"--to {to}: no format that can be written{suggestion(to, list(TARGETS))}; allowed: {', '.join(TARGETS)}"
            if to
            else f"{target}: its name does not tell the format; give --to: {', '.join(TARGETS)}"
        )
    return to


def _dtype(name: str, to: str) -> tuple[torch.dtype | None, bool]:
    """The dtype, None for that of the source; and whether it is q8_0."""
    allowed = [*DTYPES, "q8_0"] if to == "gguf" else list(DTYPES)
    if name and name not in allowed:
        raise ConfigError(f"--dtype {name}{suggestion(name, allowed)}; allowed in {to}: {', '.join(allowed)}")
    return DTYPES.get(name), name == "q8_0"


def _require_sense(state: FullState, to: str, full: bool, force: bool) -> None:
    """Raises ConfigError where the source cannot become that, or is not what one would want to be converted."""
    if full and to not in WITH_OTHERS:
        raise ConfigError(f"--full: {to} holds a model and no more; allowed: {', '.join(WITH_OTHERS)}")
    if full and not state.others:
        raise ConfigError(f"--full: {state.path} holds a model and no more")
    if state.about.finite is False and not force:
        raise ConfigError(f"{state.path}: holds NaN or infinity; choose another step, or convert it with --force")
    if state.about.step == 0:
        logger.warning("%s: step 0: before any training, or weights of which the step was not known", state.path)
    if to in ("titanlite", "hf", "llama", "gguf") or state.about.model:
        _require_model(state)
    if to in ("hf", "gguf") and (ranks := state.about.tokenizer):
        size, vocabulary = Tokenizer(state.path / "tokenizer.model", ranks).size, state.model.vocab_size
        if size > vocabulary:
            raise ConfigError(f"{state.path}: its tokenizer has {size} ids, and the model {vocabulary}")


def _require_model(state: FullState) -> None:
    """Raises ConfigError where the tensors are not those of its model: with the nearest name, and what is left over."""
    shapes = parameter_shapes(state.model)
    problems = []
    extra = [name for name in state.tensors if name not in shapes]
    for name, shape in shapes.items():
        if (tensor := state.tensors.get(name)) is None:
            problems.append(f"{state.path}: has no {name!r}{suggestion(name, extra[:500])}")
        elif tensor.shape != shape:
            problems.append(f"{state.path}: {name!r} is {tensor.shape}; the model's is {shape}")
        elif tensor.dtype not in WEIGHTS:
            problems.append(f"{state.path}: {name!r} is {tensor.dtype}; weights are floats")
    problems += [f"{state.path}: {name!r} is no parameter of this model" for name in extra]
    if problems:
        more = [f"and {len(problems) - 8} more like these"] if len(problems) > 9 else []
        raise ConfigError(problems[: 8 if more else 9] + more)


@contextlib.contextmanager
def _hashing(state: FullState, what: Selection, progress: Told) -> Iterator[Told]:
    """Hashes the source while it is converted. What it yields is to hear of all that is written.

    Raises CorruptCheckpoint, from there as soon as it is known, where the source is not what was written.
    """
    stop = Event()
    with ThreadPoolExecutor(1) as thread:
        whole = thread.submit(_require_whole, state, what, stop)

        def told(data: memoryview) -> None:
            progress(data)
            if whole.done():
                whole.result()

        try:
            yield told
            whole.result()
        except BaseException:
            stop.set()
            raise


def _require_whole(state: FullState, what: Selection, stop: Event) -> None:
    """Raises CorruptCheckpoint where the source's bytes do not match its hashes, if it has any; ends at `stop`."""
    if state.about.format == "titanlite":
        manifest = read_manifest(state.path)
        wanted = None if what.others else [name for name in manifest.files if name.startswith("model")]
        if problems := verify_files(state.path, manifest, wanted, stop):
            raise CorruptCheckpoint(problems)


def _require_finite(state: FullState, what: Selection) -> None:
    if names := sorted(what.nonfinite):
        as_dtype = f" as {what.dtype}" if what.dtype else ""
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        raise ConfigError(
            f"{state.path}: {', '.join(map(repr, names[:3]))}{more}: NaN or infinity{as_dtype}; convert it anyway with "
            "--force"
        )


def describe(state: FullState, full: bool = False) -> str:
    """What the source is, in a line."""
    about, tensors = state.about, list(state.tensors.values()) + list(state.others.values() if full else ())
    dtypes = ", ".join(sorted({str(t.dtype).removeprefix("torch.") for t in state.tensors.values()}))
    flavor = about.config.get("model", {}).get("flavor", "")
    told = [
        f"{state.path}: {about.format}",
        f"step {about.step}" if about.step is not None else "",
        f"saved by {about.layout}" if about.layout else "",
        f"flavor {flavor}" if flavor else "",
        f"{len(tensors)} tensors, {sum(tensor.nbytes for tensor in tensors) / 1e9:.3f} GB, {dtypes}",
        f"{about.model.num_parameters:,} parameters" if about.model else "the model's shape is not known",
        "with its tokenizer" if about.tokenizer else "no tokenizer",
    ]
    return "; ".join(part for part in told if part)


class _Progress:
    """Hears of every piece that is written; tells every few seconds how far it is."""

    def __init__(self, total: int, tell: Callable[[str], None]) -> None:
        self.total, self.tell, self.done_bytes = total, tell, 0
        self.started = self.told = time.monotonic()

    def __call__(self, data: memoryview) -> None:
        self.done_bytes += len(data)
        if (now := time.monotonic()) > self.told + 5:
            self.told, speed = now, self.done_bytes / (now - self.started)
            left = max(0, self.total - self.done_bytes) / speed
            self.tell(
                f"{self.done_bytes / 1e9:.2f} of {self.total / 1e9:.2f} GB, {speed / 1e9:.2f} GB/s, {left:.0f} s left"
            )

    def done(self, target: Path) -> None:
        seconds = time.monotonic() - self.started
        self.tell(
            f"wrote {target}: {self.total / 1e9:.3f} GB in {seconds:.2f} s, {self.total / seconds / 1e9:.2f} GB/s"
        )


def _verify(
    state: FullState, result: FullState, to: str, what: Selection, full: bool, tell: Callable[[str], None]
) -> None:
    def rounded(tensor: FullTensor, rows: Tensor) -> Tensor:
        if to == "gguf":
            return expected(tensor, rows, what.dtype, what.q8)
        return rows.to(what.dtype_of(tensor))

    target = result.path
    problems = different_tensors(state, result, rounded, full)
    said = f"verified: {len(state.tensors) + (len(state.others) if full else 0)} tensors bit by bit"
    if not problems and state.about.model and not full:
        problem = different_answers(state, target, to, result, rounded)
        problems = [problem] if problem else []
        said += "; its logits are not finite" if problem is None else ", and the model's logits"
    if problems:
        raise Mismatch([*problems[:8], f"{target} is not what {state.path} is; it stays where it is, do not use it"])
    tell(said)
