"""Detects the format of a path and opens it as a `FullState`.

What it is: the format is recognised by the names of files and their first bytes; one function per
format makes the index. A run's folder means its newest committed step.
What it costs: headers and small files are read, no tensor (but the two embeddings of a tied model
saved twice).
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
from pathlib import Path

import torch

from titanlite.checkpoint.folders import find_step_folder, list_steps, step_folder
from titanlite.checkpoint.manifest import DTYPES, CorruptCheckpoint, read_manifest
from titanlite.checkpoint.step_files import file_problems, read_file
from titanlite.config.mistakes import suggestion
from titanlite.model.flavors import FLAVORS, LlamaConfig
from titanlite.model.shape_file import from_json, sequence_length
from titanlite.runtime.errors import ConfigError, reason_of
from titanlite.runtime.files import read_bounded
from titanlite.tokenizer.tokenizer_json import MAX_JSON_FILE
from titanlite.tools.formats import adapters, gguf_reader, huggingface, meta, stock
from titanlite.tools.formats.full_state import (
    ORIGIN,
    About,
    FullState,
    FullTensor,
    Record,
    same_numbers,
)
from titanlite.tools.formats.huggingface_tokenizer import content_of, tokenizer_in
from titanlite.tools.formats.safetensors_files import (
    INDEX,
    WHOLE,
    read_folder,
    read_header,
    read_whole_file,
    shards_of,
)
from titanlite.tools.formats.same_model import require_stated, without_tables
from titanlite.tools.formats.torch_file import Tree, read_tree
from titanlite.tools.formats.torchtune_names import from_torchtune, is_torchtune

logger = logging.getLogger("titanlite")
ROOTS = ("tok_embeddings.", "layers.", "norm.", "output.")  # of the model's parameter names
OTHERS = {  # whose names -> parts of them, of which ours have none; the first that fits is named
    "GPT-2's": ("transformer.h.", "transformer.wte.", ".attn.c_attn.", ".mlp.c_fc."),
    "GPT-NeoX's": ("gpt_neox.",),
    "Megatron's": (".self_attention.linear_", ".mlp.linear_fc"),
    "Hugging Face's": ("embed_tokens.", ".self_attn.", ".mlp.", "lm_head."),
}
ADVICE = {
    "Hugging Face's": "give a folder with config.json and safetensors files",
}
# What else a run saves
TRAINING = (
    "optimizer.",
    "schedule.",
    "data.",
    "progress.",
    "random.",
    "loss_scale.",
    "stability-",
    "ema.",
    "noise_scale.",
    "frozen.",
)
# The two sets of weights that a run can save: its own, and their average
WEIGHTS = ("model", "ema")
READABLE = (
    "a run's or a step's folder, a stock DCP folder (.metadata), a Hugging Face folder "
    "(config.json), a folder with "
    "consolidated.00.pth and params.json, a .safetensors file or folder (also of shards that DCP's "
    "HuggingFaceStorageWriter wrote), a GGUF file, or a file of torch.save"
)


def open_full_state(
    path: Path,
    step: int | None = None,
    model: str = "",
    weights: str = "model",
    adapter: Path | None = None,
) -> FullState:
    """The checkpoint at `path`, of any format. `step` selects one of a run's checkpoints, None the
    newest.

    `model`: a flavor or a model.json, for files without the model's shape. `weights`: ema for the
    averaged weights of a run. `adapter`: a run with adapters, or PEFT's folder, to be added to the
    weights; those of a run with adapters are added to the model that it began with.
    Raises CorruptCheckpoint if it is incomplete, ConfigError if it is not a checkpoint, of a format
    that is not read, or without such weights.
    """
    state = _open_one(path, step, model, weights)
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
        base = open_full_state(adapters.base_of(state), model=model)
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
    """The adapters of a run, or in PEFT's folder, without their model's weights.

    `model`: that they belong to, for PEFT's; `step` and `weights`: of a run. Raises ConfigError or
    CorruptCheckpoint.
    """
    if (path / adapters.CONFIG).is_file():
        if model is None:
            raise ConfigError(f"{path}: is in PEFT's format; expected a run with lora.rank > 0")
        return adapters.read_peft(path, model)
    if is_step_folder(path):
        state = _open_one(path, step, "", weights)
        if adapters.holds_adapters(state):
            return state
    raise ConfigError(
        f"{path}: holds no adapters; expected a run with lora.rank > 0, or a folder with "
        f"{adapters.CONFIG}"
    )


def _open_one(path: Path, step: int | None, model: str, weights: str) -> FullState:
    """A checkpoint as it is, also one with adapters only."""
    if weights not in WEIGHTS:
        raise ConfigError(
            f"--weights {weights}{suggestion(weights, list(WEIGHTS))}; allowed: "
            f"{', '.join(WEIGHTS)}"
        )
    try:
        state = _open(path, step)
    except OSError as error:
        raise ConfigError(
            f"{str(error.filename or path)[:300]}: {error.strerror or error}"
        ) from None
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
    output = state.tensors.get("output.weight")
    embedding = state.tensors.get("tok_embeddings.weight")
    if output and embedding and same_numbers(output, embedding):
        del state.tensors["output.weight"]


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
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ConfigError(
            f"--model {model}: neither a model.json ({reason_of(error)}) nor a "
            f"flavor{suggestion(model, list(FLAVORS))}; "
            f"flavors: {', '.join(FLAVORS)}"
        ) from None


def is_step_folder(path: Path) -> bool:
    """Whether the path is a step's folder, or a run's folder with a step."""
    with contextlib.suppress(OSError):  # a name too long, say
        if (path / "manifest.json").is_file():
            return True
        return any(list_steps(folder) for folder in (path / "checkpoints", path))
    return False


def _open(path: Path, step: int | None) -> FullState:
    if not path.exists():
        raise ConfigError(f"{path}: no such file or folder; expected {READABLE}")
    if path.is_file():
        return _open_file(path)
    if is_step_folder(path):
        return _open_step(path, step)
    if stock.is_stock_dcp(path):
        return _named(path, stock.read_folder(path), _beside(path, "dcp"))
    if (path / "params.json").is_file() and any(path.glob("consolidated.*.pth")):
        return meta.open_folder(path)
    shards = shards_of(path)
    weights = shards or (path / INDEX).is_file() or (path / WHOLE).is_file()
    if weights and (path / "config.json").is_file():
        return huggingface.open_folder(path)
    if weights:
        form = "dcp" if shards else "safetensors"
        return _named(path, read_folder(path), _beside(path, form))
    if shards_of(path / "sharded"):  # HuggingFaceStorageWriter(enable_consolidation=True), ended
        raise ConfigError(
            f"{path}: has its weights in the folder sharded only, from which they were not "
            f"consolidated; give {path / 'sharded'}"
        )
    if any(path.glob("pytorch_model*.bin")):
        raise ConfigError(
            f"{path}: has its weights in pytorch_model.bin; have transformers write them as "
            "safetensors: "
            "from_pretrained(...).save_pretrained(...)"
        )
    if (path / adapters.CONFIG).is_file():
        raise ConfigError(
            f"{path}: holds adapters in PEFT's format, and not their model; name the model, and "
            "this folder with --adapter (titanlite convert MODEL TARGET --adapter adds them up)"
        )
    if any((path / name).exists() for name in ("config.json", "params.json", "model.json")):
        raise CorruptCheckpoint(
            f"{path}: describes a model, but has no weights ({WHOLE}, {INDEX} or shards) beside it"
        )
    raise ConfigError(f"{path}: not a checkpoint; expected {READABLE}")


def _open_step(path: Path, step: int | None) -> FullState:
    """A step folder of titanlite."""
    folder = find_step_folder(path)
    if step is not None:
        folder = step_folder(folder.parent, step)
        if not folder.is_dir():
            allowed = ", ".join(str(number) for number in list_steps(folder.parent))
            raise ConfigError(f"--step {step}: not in {folder.parent}; allowed: {allowed}")
    manifest = read_manifest(folder)
    problems = file_problems(folder, manifest.files)
    if problems:
        raise CorruptCheckpoint(problems)
    headers = {
        name: read_header(folder / name)[0]
        for name in manifest.files
        if name.endswith(".safetensors")
    }
    model: dict[str, FullTensor] = {}
    others: dict[str, FullTensor] = {}
    for name, entry in manifest.tensors.items():
        parts = []
        for box in entry.grid.boxes():
            stored = headers[box.file].get(name)
            if stored is None or (stored.dtype, stored.shape) != (DTYPES[entry.dtype], box.sizes):
                raise CorruptCheckpoint(
                    f"{folder / box.file}: does not hold {name} as the manifest says"
                )
            parts.append(dataclasses.replace(stored.parts[0], offsets=box.offsets))
        whole = FullTensor(DTYPES[entry.dtype], entry.shape, tuple(parts))
        group = model if name.startswith("model.") else others
        group[name.removeprefix("model.")] = whole
    small_files = {
        name: read_file(folder, manifest, name)
        for name in manifest.files
        if not name.endswith(".safetensors")
    }
    layout = " ".join(f"{axis} {degree}" for axis, degree in manifest.layout.items() if degree > 1)
    length = manifest.config.get("training", {}).get("seq_len", 0)
    about = About(
        "titanlite",
        model_of(folder / "model.json", small_files.get("model.json")),
        content_of(small_files),
        manifest.step,
        sequence_length(length),
        layout or "one process",
        manifest.finite,
        manifest.config,
        manifest.data,
        small_files,
    )
    return FullState(folder, about, model, others)


def model_of(path: Path, content: bytes | None, within: str = "") -> LlamaConfig | None:
    """The model that a model.json describes; `within`: where in the file it is.

    Raises CorruptCheckpoint.
    """
    if content is None:
        return None
    try:
        return from_json(content.decode())
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        what = f"its {within} is not" if within else "not"
        raise CorruptCheckpoint(
            f"{path}: {what} titanlite's description of a model ({reason_of(error)})"
        ) from None


def _open_file(path: Path) -> FullState:
    with path.open("rb") as file:
        start = file.read(4)
    if start == b"GGUF":
        return gguf_reader.open_file(path)
    if start == b"PK\x03\x04":
        return _of_tree(path, *read_tree(path))
    if path.suffix == ".safetensors":
        tensors, metadata = read_whole_file(path)
        shape = metadata["model"].encode() if "model" in metadata else None
        about = About("safetensors", model_of(path, shape, "metadata entry 'model'"))
        _add_origin(about, metadata.get("titanlite", "{}"))
        return _named(path, tensors, about)
    raise ConfigError(
        f"{path}: neither a zip archive of torch.save (older files: load and save them with "
        "torch >= 1.6) nor a "
        f".safetensors file; expected {READABLE}"
    )


def _of_tree(path: Path, tree: Tree, records: list[Record]) -> FullState:
    """A tree given to torch.save: a model's state dict, or a dict that has it under one of the
    usual keys.
    """
    about = About("torch")
    flat = tree
    for key in ("model", "state_dict", "model_state_dict"):
        if isinstance(tree.get(key), dict):
            flat = tree[key]
    shape = tree.get("model_config")
    if isinstance(shape, dict):
        about.model = model_of(path, json.dumps(shape, default=str).encode(), "'model_config'")
    origin = {"step": tree.get("step"), "seq_len": tree.get("seq_len")}
    _add_origin(about, json.dumps(origin, default=str))
    tokenizer = tree.get("tokenizer")
    if (
        isinstance(tokenizer, FullTensor)
        and tokenizer.dtype == torch.uint8
        and len(tokenizer.shape) == 1
    ):
        if tokenizer.nbytes > MAX_JSON_FILE:
            raise ConfigError(
                f"{path}: its tokenizer has {tokenizer.nbytes} bytes; at most {MAX_JSON_FILE} "
                "are read"
            )
        about.tokenizer = tokenizer.read().numpy().tobytes()
    state = _named(path, _tensors_of(flat), about)
    state.records = records
    training = tree.get("training")
    if isinstance(training, dict):
        state.others |= _tensors_of(training)
    if not state.tensors:
        keys = ", ".join(map(repr, list(tree)[:8])) or "none"
        raise ConfigError(
            f"{path}: no tensors at the top level or under model, state_dict or "
            f"model_state_dict; its keys: {keys}"
        )
    return state


def _tensors_of(tree: Tree) -> dict[str, FullTensor]:
    return {name: value for name, value in tree.items() if isinstance(value, FullTensor)}


def _beside(folder: Path, form: str) -> About:
    """The model's shape, the tokenizer, step and sequence length from the small files in a folder,
    if they exist.
    """
    about = About(form, model=None, tokenizer=tokenizer_in(folder))
    shape_file = folder / "model.json"
    if shape_file.is_file():
        about.model = model_of(shape_file, read_bounded(shape_file))
    origin_file = folder / ORIGIN
    if origin_file.is_file():
        _add_origin(about, read_bounded(origin_file).decode("utf-8", "replace"))
    return about


def _add_origin(about: About, text: str) -> None:
    """Adds step and sequence length from a JSON object, if they are valid."""
    with contextlib.suppress(ValueError, RecursionError):
        origin = json.loads(text)
        if not isinstance(origin, dict):
            return
        step = origin.get("step")
        if type(step) is int and step >= 0:
            about.step = step
        length = sequence_length(origin.get("seq_len"))
        if length:
            about.seq_len = length


def _named(path: Path, stored: dict[str, FullTensor], about: About) -> FullState:
    """Separates parameters from training state; removes tables of RoPE, and prefixes of wrappers
    and other trainers.

    Raises ConfigError if two names become one, or names are those of other software.
    """
    plain = {
        name.replace("_orig_mod.", "").removeprefix("module."): tensor
        for name, tensor in stored.items()
    }
    if len(plain) < len(stored):
        raise ConfigError(
            f"{path}: has the same parameters twice, with and without the prefix of a wrapper"
        )
    plain = without_tables(plain)
    if is_torchtune(plain):
        plain = from_torchtune(path, plain)
    for software, marks in OTHERS.items():
        foreign = [name for name in plain if any(mark in name for mark in marks)]
        if foreign:
            advice = ADVICE.get(
                software,
                "titanlite reads Llama models, with its own, Meta's or Hugging Face's names",
            )
            raise ConfigError(f"{path}: has {software} names ({foreign[0]!r}); {advice}")
    if plain and all(name.startswith(TRAINING) for name in plain):
        raise ConfigError(
            f"{path}: holds only training state; name the folder that also has the model's files"
        )
    root = ""
    training = set[str]()
    is_dcp = about.format == "dcp"
    if "tok_embeddings.weight" in plain:
        # In DCP, trainers save arbitrary entries beside a model; elsewhere only titanlite's own are
        # not parameters.
        training = {name for name in plain if name.startswith(TRAINING)}
        if is_dcp:
            training |= {name for name in plain if not name.startswith(ROOTS)}
    elif "model.tok_embeddings.weight" in plain or (
        is_dcp and any(name.startswith("model.") for name in plain)
    ):
        root = "model."
        training = {name for name in plain if not name.startswith(root)}
    model: dict[str, FullTensor] = {}
    others: dict[str, FullTensor] = {}
    for name, tensor in plain.items():
        if name in training:
            others[name] = tensor
        else:
            model[name.removeprefix(root)] = tensor
    return FullState(path, about, model, others)
