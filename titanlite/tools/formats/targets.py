"""The formats that `convert` writes: a class for each, and a table of them.

What it is: a class says what distinguishes its format: the suffix that chooses it, whether it holds
training state, what it refuses and why, how it is written and read back.
`convert.py` does the rest, in the same way for all. What a file contains besides tensors makes it
complete: the model's shape and the tokenizer.
What it costs: all are written once, with one block of rows in memory, of a mixture one expert's
matrix.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from titanlite.checkpoint import manifest as manifests
from titanlite.checkpoint.grid import Box, grid_of
from titanlite.checkpoint.manifest import DTYPE_NAMES, FileEntry, Manifest, TensorEntry
from titanlite.checkpoint.shard_file import sharding_metadata
from titanlite.checkpoint.step_files import digest_of
from titanlite.model.flavors import LlamaConfig, family_of, parameter_shapes
from titanlite.runtime.errors import ConfigError
from titanlite.tokenizer.kept_files import CONFIG, KEPT_FILE, TRAINING
from titanlite.tokenizer.tokenizer import Tokenizer
from titanlite.tokenizer.tokenizer_json import (
    QWEN_PATTERN,
    TEMPLATE_FILE,
)
from titanlite.tools.formats import (
    huggingface,
    huggingface_config,
    huggingface_kept,
    peft,
    torchtitan_names,
)
from titanlite.tools.formats.detect_format import open_adapter, open_full_state
from titanlite.tools.formats.export import Export, Options, Outgoing, text, zeros
from titanlite.tools.formats.full_state import ORIGIN, FullState
from titanlite.tools.formats.huggingface_tokenizer import files_of, to_files
from titanlite.tools.formats.output_path import write_small_files
from titanlite.tools.formats.safetensors_files import write_file, write_folder
from titanlite.tools.formats.same_model import tensor_problems
from titanlite.tools.formats.torch_output import save_file, save_folder

logger = logging.getLogger("titanlite")
DEFAULT_LENGTH = 8192  # for a format that must name the longest sequence, where the source does not


class Target:
    """A format that `convert` writes. A subclass says only where it differs from this one."""

    name = ""
    suffixes: tuple[str, ...] = ()  # of the target's path, where --to is left out
    generations: tuple[str, ...] = ()  # allowed with --names, the default first
    holds_training = False  # also optimizer and training state, with --full
    needs_model = True  # tensors of a model whose shape is not known are refused
    in_one_file = False  # all tensors, which `write` may verify while it reads them
    has_shards = False  # a folder of it may have several files of tensors
    is_model = True  # whose logits can be compared with the source's

    def open_source(self, path: Path, options: Options) -> FullState:
        """The checkpoint to convert. Raises ConfigError or CorruptCheckpoint."""
        return open_full_state(path, options)

    def check(self, export: Export) -> None:
        """Raises ConfigError for what the format cannot hold; warns of what its readers ignore."""
        if self.needs_model or export.state.about.model:
            _require_parameters(export.state)

    def write(self, path: Path, export: Export) -> None:
        """Writes everything at `path`, where nothing is. Raises OSError or ConfigError."""
        raise NotImplementedError

    def read_back(self, path: Path, model: LlamaConfig | None) -> FullState:
        """Opens what was written. `model`: the source's, for formats that do not describe it."""
        result = open_full_state(path)
        result.about.model = result.about.model or model
        return result

    def has_half_split(self, model: LlamaConfig) -> bool:
        """Whether rows of wq and wk lie in Hugging Face's order."""
        return False


class Titanlite(Target):
    """A step folder as `checkpoint/storage.py` writes it, by one process."""

    name = "titanlite"
    holds_training = True

    def write(self, path: Path, export: Export) -> None:
        path.mkdir()
        about = export.state.about
        files: dict[str, FileEntry] = {}
        entries: dict[str, TensorEntry] = {}
        groups = {
            "model": {f"model.{name}": tensor for name, tensor in export.model.items()},
            "training": export.others,
        }
        for kind, tensors in groups.items():
            name = f"{kind}-00000.safetensors"
            if tensors:
                begins = {key: [0] * len(tensor.shape) for key, tensor in tensors.items()}
                write_file(path / name, tensors, sharding_metadata(begins))
                files[name] = FileEntry((path / name).stat().st_size, digest_of(path / name))
            for key, tensor in tensors.items():
                shape = tuple(tensor.shape)
                whole = Box(name, (0,) * len(shape), shape)
                entries[key] = TensorEntry(DTYPE_NAMES[tensor.dtype], grid_of(shape, [whole]))
        small = about.files | _shape_and_tokenizer(export.state)
        write_small_files(path, small)
        for name, content in small.items():
            files[name] = FileEntry(len(content), digest_of(path / name))
        config = about.config
        if not config and about.seq_len:
            config = {"training": {"seq_len": about.seq_len}}
        manifest = Manifest(
            step=about.step or 0,
            finite=not export.nonfinite,
            created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            torch=torch.__version__,
            layout={},
            config=config,
            data=about.data,
            validation_loss=None,
            files=files,
            tensors=entries,
        )
        write_small_files(path, {manifests.NAME: manifests.to_text(manifest).encode()})


class Dcp(Target):
    """A stock DCP folder of one process, with torchtitan's names: the model's at the root."""

    name = "dcp"
    generations = torchtitan_names.GENERATIONS
    holds_training = True
    needs_model = False
    in_one_file = True

    def has_half_split(self, model: LlamaConfig) -> bool:
        return model.qk_norm

    def check(self, export: Export) -> None:
        super().check(export)
        if export.names != torchtitan_names.OLDER:
            return
        problem = ""
        if torchtitan_names.split_widths(export.state.tensors):
            problem = (
                "the model has norms of q and k, whose rows torchtitan 0.2 has in another order "
                "under these names"
            )
        if torchtitan_names.routers(export.state.tensors):
            problem = "the model has experts, whose names in torchtitan 0.2 are not written"
        if problem:
            allowed = torchtitan_names.NEWER
            raise ConfigError(f"--names {export.names}: {problem}; allowed: {allowed}")

    def write(self, path: Path, export: Export) -> None:
        path.mkdir()
        save_folder(path, _torchtitan_tensors(export), export.hashes)
        with (path / ".metadata").open("rb") as index:
            os.fsync(index.fileno())  # torch 2.13 syncs it before it has written all of it
        write_small_files(path, _shape_and_tokenizer(export.state) | _origin_file(export.state))


def _torchtitan_tensors(export: Export) -> dict[str, Outgoing]:
    """All tensors under torchtitan's names, in its order of rows."""
    state = export.state
    generation = export.names or torchtitan_names.NEWER
    widths = torchtitan_names.split_widths(state.tensors | state.others)
    tensors: dict[str, Outgoing] = {}
    for name in export.model:
        renamed = torchtitan_names.to_torchtitan(name, generation)
        tensors[renamed] = export.weight(name, widths.get(name, 0))
    for name in export.others:
        renamed = torchtitan_names.to_torchtitan(name, generation)
        tensors[renamed] = export.training(name, widths.get(name, 0))
    if state.about.model and state.about.model.tied_embeddings:
        # torchtitan's state dict has both
        output = torchtitan_names.to_torchtitan("output.weight", generation)
        tensors[output] = export.weight("tok_embeddings.weight")
    for block, num_experts in torchtitan_names.routers(state.tensors).items():
        tensors[block + torchtitan_names.EXPERT_BIAS] = zeros(num_experts)
    return tensors


class Safetensors(Target):
    """titanlite's names in one file, or in a folder of files where the path has no suffix."""

    name = "safetensors"
    suffixes = (".safetensors",)
    holds_training = True
    needs_model = False
    has_shards = True

    def write(self, path: Path, export: Export) -> None:
        state = export.state
        tensors = export.model | export.others
        if path.suffix in self.suffixes:
            metadata = {"format": "pt", "titanlite": _origin(state)}
            if state.about.model:
                metadata["model"] = state.about.model.to_json()
            write_file(path, tensors, metadata, export.hashes)
        else:
            path.mkdir()
            write_folder(path, tensors, export.shard_size)
            write_small_files(path, _shape_and_tokenizer(state) | _origin_file(state))


class Torch(Target):
    """A file for `torch.load(path, weights_only=True)`: a dict with `model` (name -> tensor) and
    its shape.
    """

    name = "torch"
    suffixes = (".pt", ".pth", ".bin")
    holds_training = True
    needs_model = False
    in_one_file = True

    def write(self, path: Path, export: Export) -> None:
        about = export.state.about
        tree: dict[str, Any] = {"model": export.model}
        tree |= {"step": about.step, "seq_len": about.seq_len}
        if about.model:
            tree["model_config"] = json.loads(about.model.to_json())
        if export.others:
            tree["training"] = export.others
        if about.tokenizer:
            tree["tokenizer"] = text(about.tokenizer)
        save_file(path, tree, export.hashes)


class HuggingFace(Target):
    """A folder for `from_pretrained` of transformers' AutoModelForCausalLM and AutoTokenizer."""

    name = "hf"
    has_shards = True

    def has_half_split(self, model: LlamaConfig) -> bool:
        return True

    def check(self, export: Export) -> None:
        state = export.state
        family_of(state.model)
        _require_parameters(state)
        tokenizer = _fitting_tokenizer(state)
        if tokenizer is None or not state.model.qkv_bias:
            return
        if tokenizer.pattern != QWEN_PATTERN or not tokenizer.nfc:
            logger.warning(
                "%s: transformers 5 has biases of q, k and v in Qwen2 only, and its AutoTokenizer "
                "cuts text as Qwen does in any folder of a Qwen2; with this tokenizer that gives "
                "other ids: load it with PreTrainedTokenizerFast.from_pretrained",
                state.path,
            )

    def write(self, path: Path, export: Export) -> None:
        path.mkdir()
        state = export.state
        length = _length(state)
        tensors: dict[str, Outgoing] = {}
        for name, hf_names in huggingface.names(state.model).items():
            if len(hf_names) > 1:  # a mixture's
                for number, hf_name in enumerate(hf_names):
                    tensors[hf_name] = export.expert(name, number)
            else:
                width = state.model.head_dim if huggingface.is_permuted(name) else 0
                tensors[hf_names[0]] = export.weight(name, width)
        write_folder(path, tensors, export.shard_size)
        dtype = str(tensors["model.norm.weight"].dtype).removeprefix("torch.")
        config = huggingface_config.to_config(state.model, length, dtype)
        files: dict[str, bytes] = {}
        tokenizer: Tokenizer | None = None
        if state.about.tokenizer:
            tokenizer = Tokenizer(state.path, state.about.tokenizer)
            files = to_files(tokenizer, length)
        kept = huggingface_kept.files_of(state, tokenizer)
        for name in (CONFIG, TRAINING):
            config |= kept.pop(name, {})
        files |= {name: _json(value) for name, value in kept.items()}
        files["config.json"] = _json(config)
        if TEMPLATE_FILE in state.about.files:
            files[TEMPLATE_FILE] = state.about.files[TEMPLATE_FILE]
        write_small_files(path, files)


class Peft(Target):
    """The adapters of a run with `lora.rank` > 0, without their model, as PEFT's folder."""

    name = "peft"
    is_model = False

    def open_source(self, path: Path, options: Options) -> FullState:
        for name, value in (("--adapter", options.adapter), ("--model", options.model)):
            if value:
                raise ConfigError(
                    f"{name} has no effect with --to peft: SOURCE holds the adapters and the "
                    "model's shape"
                )
        state = open_adapter(path, step=options.step, weights=options.weights)
        base = Path(state.about.config.get("checkpoint", {}).get("initial_load", ""))
        has_adapters = False
        with contextlib.suppress(ConfigError):  # where it is not there any more
            has_adapters = bool(open_full_state(base).sources)
        if has_adapters:
            logger.warning(
                "%s: its adapters belong to %s, which has adapters too; PEFT's base model is what "
                "titanlite convert %s TARGET --to hf writes",
                state.path,
                base,
                base,
            )
        return state

    def check(self, export: Export) -> None:
        """Accepts all: writing adapter_config.json compares the adapters with [lora]."""

    def write(self, path: Path, export: Export) -> None:
        path.mkdir()
        state = export.state
        tensors: dict[str, Outgoing] = {}
        names = peft.hf_names(state.model)
        for name in state.tensors:
            tensors[names[name]] = export.weight(name, peft.head_dim_of(name, state.model))
        write_file(path / peft.WEIGHTS, tensors, {"format": "pt"})
        write_small_files(path, {peft.CONFIG: _json(peft.to_config(state))})

    def read_back(self, path: Path, model: LlamaConfig | None) -> FullState:
        return open_adapter(path, model)


ALL = (Titanlite(), Dcp(), Safetensors(), Torch(), HuggingFace(), Peft())
TARGETS: dict[str, Target] = {target.name: target for target in ALL}


def _require_parameters(state: FullState) -> None:
    """Raises ConfigError unless the tensors are the parameters of the source's model."""
    problems = tensor_problems(state.path, state.tensors, parameter_shapes(state.model))
    if problems:
        raise ConfigError(problems)


def _fitting_tokenizer(state: FullState) -> Tokenizer | None:
    """The source's tokenizer, None if it has none.

    Raises ConfigError if it has more ids than the model.
    """
    if not state.about.tokenizer:
        return None
    tokenizer = Tokenizer(state.path, state.about.tokenizer)
    vocabulary = state.model.vocab_size
    if tokenizer.size > vocabulary:
        raise ConfigError(
            f"{state.path}: its tokenizer has {tokenizer.size} ids, and the model {vocabulary}"
        )
    return tokenizer


def _length(state: FullState) -> int:
    """The trained length for a format that must name one."""
    if state.about.seq_len:
        return state.about.seq_len
    logger.warning(
        "%s: the length it was trained on is not known; wrote %d", state.path, DEFAULT_LENGTH
    )
    return DEFAULT_LENGTH


def _origin(state: FullState) -> str:
    return json.dumps({"step": state.about.step, "seq_len": state.about.seq_len}) + "\n"


def _origin_file(state: FullState) -> dict[str, bytes]:
    return {ORIGIN: _origin(state).encode()}


def _shape_and_tokenizer(state: FullState) -> dict[str, bytes]:
    files: dict[str, bytes] = {}
    if state.about.model:
        files["model.json"] = state.about.model.to_json().encode()
    return files | _tokenizer_files(state) | _companions(state)


def _companions(state: FullState) -> dict[str, bytes]:
    """The chat template and the kept files of a model's folder."""
    files = state.about.files
    return {name: files[name] for name in (TEMPLATE_FILE, KEPT_FILE) if name in files}


def _tokenizer_files(state: FullState) -> dict[str, bytes]:
    if not state.about.tokenizer:
        return {}
    return files_of(state.about.tokenizer)


def _json(value: dict[str, Any]) -> bytes:
    return (json.dumps(value, indent=1) + "\n").encode()
