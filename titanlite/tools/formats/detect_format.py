"""Detects the format of a path and opens it as a `FullState`.

What it is: the format is recognised by the names of files and their first bytes, and its module
makes the index. A run's folder means its newest committed step. Adapters are added to the weights
of their model.
What it costs: headers and small files are read, no tensor (but the two embeddings of a tied model
saved twice).
"""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path

from titanlite.checkpoint.manifest import CorruptCheckpoint
from titanlite.config.mistakes import hub_advice, suggestion
from titanlite.model.flavors import FLAVORS, LlamaConfig
from titanlite.runtime.errors import ConfigError, reason_of
from titanlite.runtime.files import read_bounded
from titanlite.tools.formats import (
    adapters,
    huggingface,
    peft,
    state_dicts,
    stock,
)
from titanlite.tools.formats.full_state import FullState, same_numbers
from titanlite.tools.formats.safetensors_files import INDEX, WHOLE, read_folder, shards_of
from titanlite.tools.formats.same_model import require_stated
from titanlite.tools.formats.selection import NEWEST, Selection
from titanlite.tools.formats.shape_file import from_json
from titanlite.tools.formats.step_folder import is_step_folder, open_step

logger = logging.getLogger("titanlite")
# The two sets of weights that a run can save: its own, and their average
WEIGHTS = ("model", "ema")
TORCH_SUFFIXES = (".pt", ".pth", ".bin")
READABLE = (
    "a run's or a step's folder, a stock DCP folder (.metadata), a Hugging Face folder "
    "(config.json), a .safetensors file or folder (also of shards that DCP's "
    "HuggingFaceStorageWriter wrote), or a file of torch.save"
)
FROM_GGUF = (
    "is a GGUF file, which is not read; transformers makes a Hugging Face folder of it: see GGUF "
    "in docs/models.md"
)


def open_full_state(path: Path, selection: Selection = NEWEST) -> FullState:
    """Opens the checkpoint at `path`, of any format.

    The adapters of a run are added to the model that it began with. Raises CorruptCheckpoint if the
    checkpoint is incomplete, ConfigError if it is not a checkpoint, of a format that is not read,
    or without such weights.
    """
    state = _open_one(path, selection)
    adapter = selection.adapter
    if adapter is not None:
        if adapters.holds_adapters(state):
            raise ConfigError(
                f"--adapter {adapter}: {path} holds adapters itself; give their model"
            )
        added = open_adapter(adapter, state.model)
        if not adapters.is_base(state, added):
            logger.warning("%s: are not the weights that %s was trained on", path, adapter)
        return adapters.merge(state, added)
    if adapters.holds_adapters(state):
        base = open_full_state(adapters.base_of(state), Selection(model=selection.model))
        if not adapters.is_base(base, state):
            raise ConfigError(
                f"{base.path}: are not the weights that the adapters in {state.path} were trained "
                "on; expected those, or these as the path and the adapters with --adapter"
            )
        return adapters.merge(base, state)
    return state


def open_adapter(
    path: Path, model: LlamaConfig | None = None, step: int | None = None, weights: str = "model"
) -> FullState:
    """Opens the adapters of a run, or those in PEFT's folder, without their model's weights.

    `model`: the model of PEFT's adapters. `step` and `weights`: which ones of a run. Raises
    ConfigError or CorruptCheckpoint.
    """
    if (path / peft.CONFIG).is_file():
        if model is None:
            raise ConfigError(f"{path}: is in PEFT's format; expected a run with lora.rank > 0")
        return peft.read_folder(path, model)
    if is_step_folder(path):
        state = _open_one(path, Selection(step=step, weights=weights))
        if adapters.holds_adapters(state):
            return state
    if path.is_file() and (path.parent / peft.CONFIG).is_file():
        raise ConfigError(f"{path}: is a file of adapters; give its folder: {path.parent}")
    problem = "holds no adapters"
    if not path.exists():
        problem = f"no such folder{hub_advice(str(path))}"
    raise ConfigError(
        f"{path}: {problem}; expected a run with lora.rank > 0, or a folder with {peft.CONFIG}"
    )


def _open_one(path: Path, selection: Selection) -> FullState:
    """Opens a checkpoint without `selection.adapter`, also one that holds only adapters."""
    step = selection.step
    weights = selection.weights
    model = selection.model
    if weights not in WEIGHTS:
        raise ConfigError(
            f"--weights {weights}{suggestion(weights, list(WEIGHTS))}; allowed: "
            f"{', '.join(WEIGHTS)}"
        )
    try:
        state = _open(path, step)
    except OSError as error:
        raise ConfigError(f"{error.filename or path}: {error.strerror or error}") from None
    names = [
        name
        for name in (*state.tensors, *state.others)
        if not name.isprintable() or len(name) > 1000
    ]
    if names:
        raise ConfigError(
            f"{path}: holds a tensor named {names[0][:100]!r}; expected printable names"
        )
    if step is not None and state.about.format != "titanlite":
        raise ConfigError(f"--step {step}: {path} is not a run; leave --step out")
    if weights == "ema":
        state = _averaged(state)
    if model:
        named = read_model(model, state)
        if state.about.model:
            require_stated(named, state.about.model, "--model", model, path)
        state.about.model = named
    if state.about.model and state.about.model.tied_embeddings:
        drop_tied_output(state)
    return state


def drop_tied_output(state: FullState) -> None:
    """Removes the output of a tied model if it is its embedding: one parameter, which state_dict()
    lists twice.
    """
    embedding = state.tensors.get("tok_embeddings.weight")
    for name in ("output.weight", "lm_head.weight"):  # the latter of a folder of Hugging Face
        output = state.tensors.get(name)
        if output and embedding and same_numbers(output, embedding):
            del state.tensors[name]


def _averaged(state: FullState) -> FullState:
    """The same checkpoint with the averaged weights as its tensors.

    Raises ConfigError if it has none.
    """
    if state.about.format != "titanlite":
        raise ConfigError(f"--weights ema: {state.path} is not a run; leave --weights out")
    averages = {
        name.removeprefix("ema."): tensor
        for name, tensor in state.others.items()
        if name.startswith("ema.")
    }
    if not any(name in averages for name in state.tensors):
        raise ConfigError(
            f"--weights ema: {state.path} has no averaged weights; its run had ema.decay = 0"
        )
    # Frozen weights have no average: they are as they were
    tensors = {name: averages.get(name, tensor) for name, tensor in state.tensors.items()}
    about = dataclasses.replace(state.about, averaged=True)
    return FullState(state.path, about, tensors)


def read_model(model: str, state: FullState) -> LlamaConfig:
    """The shape of a flavor, with the vocabulary of the saved embedding, or of a model.json.

    Raises ConfigError.
    """
    if model in FLAVORS:
        embedding = state.tensors.get("tok_embeddings.weight")
        if embedding is None:
            return FLAVORS[model]
        return dataclasses.replace(FLAVORS[model], vocab_size=embedding.shape[0])
    try:
        return from_json(read_bounded(Path(model)).decode())
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(
            f"--model {model}: neither a model.json ({reason_of(error)}) nor a "
            f"flavor{suggestion(model, list(FLAVORS))}; flavors: {', '.join(FLAVORS)}. The weights "
            "are the first argument"
        ) from None


def _open(path: Path, step: int | None) -> FullState:
    if not path.exists():
        advice = hub_advice(str(path))
        raise ConfigError(f"{path}: no such file or folder{advice}; expected {READABLE}")
    if path.is_file():
        return _open_file(path)
    if is_step_folder(path):
        return open_step(path, step)
    if stock.is_stock_dcp(path):
        return state_dicts.open_folder(path, "dcp", stock.read_folder(path))
    shards = shards_of(path)
    weights = shards or (path / INDEX).is_file() or (path / WHOLE).is_file()
    if weights and (path / "config.json").is_file():
        return huggingface.open_folder(path)
    if weights:
        form = "dcp" if shards else "safetensors"
        return state_dicts.open_folder(path, form, read_folder(path))
    if (path / peft.CONFIG).is_file():
        raise ConfigError(
            f"{path}: holds adapters in PEFT's format, and not their model; name the model, and "
            "this folder with --adapter (titanlite convert MODEL TARGET --adapter adds them up)"
        )
    gguf_files = sorted(path.glob("*.gguf"))
    if gguf_files:
        raise ConfigError(f"{gguf_files[0]}: {FROM_GGUF}")
    if any(path.glob("consolidated.*.pth")):
        raise ConfigError(
            f"{path}: a model folder of Meta; the same weights are published as a folder of "
            "Hugging Face, with config.json and safetensors files: give that one"
        )
    torch_files = [file for file in sorted(path.iterdir()) if file.suffix in TORCH_SUFFIXES]
    if torch_files:
        raise ConfigError(
            f"{path}: has files of torch.save; give the file, as {torch_files[0]}, or have "
            "transformers write safetensors: from_pretrained(...).save_pretrained(...)"
        )
    if any((path / name).exists() for name in ("config.json", "model.json")):
        raise CorruptCheckpoint(
            f"{path}: describes a model, but has no weights ({WHOLE}, {INDEX} or shards) beside it"
        )
    raise ConfigError(f"{path}: not a checkpoint; expected {READABLE}")


def _open_file(path: Path) -> FullState:
    with path.open("rb") as file:
        start = file.read(4)
    if start == b"GGUF":
        raise ConfigError(f"{path}: {FROM_GGUF}")
    if start == b"PK\x03\x04":
        return state_dicts.open_torch_file(path)
    if path.suffix == ".safetensors":
        return state_dicts.open_safetensors_file(path)
    raise ConfigError(
        f"{path}: neither a zip archive of torch.save nor a .safetensors file; expected {READABLE}"
    )
