"""Keeps what a model's authors decide in its folder: sampling, end tokens, names, and how another
program trains it.

What it is: they are read beside a tokenizer, go through a run in one file of its checkpoints
(`KEPT_FILE`), and are written back where the model is exported. The tokens that end a text also end
what the model writes here, in training and in every command (`text_ends`).
Why it is here: an export with a generation_config.json of our own has one end of text, and
transformers then generates to its limit where the model has ended its answer with another one.
What it costs: a few kilobytes in each checkpoint.
"""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path
from typing import Any

from titanlite.runtime.documents import parse_json
from titanlite.runtime.files import read_bounded
from titanlite.tokenizer.tokenizer_json import TEMPLATE_FILE

logger = logging.getLogger("titanlite")
KEPT_FILE = "huggingface.json"  # name of a file, or TRAINING -> its content
CONFIG = "config.json"  # only these of its fields:
IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
# And under this name those that only transformers uses, most of them in training
TRAINING = "training"
TRAINING_FIELDS = (
    "attention_dropout",
    "initializer_range",
    "output_router_logits",
    "router_aux_loss_coef",
    "router_jitter_noise",
    "use_cache",
)
GENERATION = "generation_config.json"
TOKENIZER = "tokenizer_config.json"
OTHERS = ("special_tokens_map.json",)
MOST = 1 << 22  # bytes of a file; a tokenizer_config.json lists all added tokens

Json = dict[str, Any]
Kept = dict[str, Json]


def read_kept(folder: Path) -> Kept:
    """The kept files of a model's folder, or of a checkpoint's; a broken one is left out."""
    if (folder / KEPT_FILE).is_file():
        return from_bytes(_read(folder / KEPT_FILE))
    kept: Kept = {}
    for name in (GENERATION, TOKENIZER, *OTHERS, CONFIG):
        if not (folder / name).is_file():
            continue
        content = _object(folder / name)
        if name == CONFIG:
            training = {field: content[field] for field in TRAINING_FIELDS if field in content}
            if training:
                kept[TRAINING] = training
            content = {field: content[field] for field in IDS if field in content}
        if content:
            kept[name] = content
    return kept


def kept_beside(tokenizer: str, of_model: bool) -> Kept:
    """The kept files beside the tokenizer that `data.tokenizer` names; none for the bundled one.

    `of_model`: whether the weights come from there too; otherwise only the tokenizer's own are.
    """
    if not tokenizer:
        return {}
    kept = read_kept(folder_of(tokenizer))
    if of_model:
        return kept
    own = {name: kept[name] for name in (TOKENIZER, *OTHERS) if name in kept}
    own.get(TOKENIZER, {}).pop("chat_template", None)
    return own


def folder_of(tokenizer: str) -> Path:
    """The folder of the tokenizer that `data.tokenizer` names."""
    path = Path(tokenizer)
    return path if path.is_dir() else path.parent


def template_in(folder: Path) -> dict[str, bytes]:
    """The file of the chat template in a model's folder, by its name; none if there is none."""
    content = _read(folder / TEMPLATE_FILE) if (folder / TEMPLATE_FILE).is_file() else b""
    return {TEMPLATE_FILE: content} if content else {}


def _read(path: Path) -> bytes:
    try:
        return read_bounded(path, MOST)
    except OSError as error:
        logger.warning("%s: is not kept: %s", path, error.strerror or error)
        return b""


def _object(path: Path) -> Json:
    """The JSON object in a file; an empty one, with a warning, if there is none."""
    content = _read(path)
    if not content:
        return {}
    try:
        value = _as_written(parse_json(content))
    except ValueError:
        value = None
    if not isinstance(value, dict):
        logger.warning("%s: is not kept: expected a JSON object of finite numbers", path)
        return {}
    return value


def _as_written(value: Any) -> Any:
    """Turns floats that `parse_json` made of integers beyond 64 bits, such as 10^30, back.

    Raises ValueError for NaN and infinity.
    """
    if isinstance(value, dict):
        return {name: _as_written(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_as_written(item) for item in value]
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError("not a number of JSON")
        if 1 << 63 <= abs(value) < 1e40:
            return int(value)
    return value


def to_files(kept: Kept) -> dict[str, bytes]:
    """The file of a checkpoint that keeps them, by its name; none if there is nothing to keep."""
    if not kept:
        return {}
    return {KEPT_FILE: (json.dumps(kept, ensure_ascii=False, indent=1) + "\n").encode()}


def from_bytes(content: bytes) -> Kept:
    """The inverse of `to_files`; nothing for other content."""
    try:
        objects = _as_written(parse_json(content or b"{}"))
    except ValueError:
        objects = None
    if not isinstance(objects, dict) or not all(isinstance(o, dict) for o in objects.values()):
        logger.warning("%s: expected a JSON object of objects; it is not used", KEPT_FILE)
        return {}
    names = (GENERATION, TOKENIZER, *OTHERS, CONFIG, TRAINING)
    return {name: objects[name] for name in names if name in objects}  # no path of another file


def ends_of(kept: Kept) -> list[int]:
    """The ids that end a text by the model's files, in their order; none if they do not say."""
    for name in (GENERATION, CONFIG):  # transformers asks the second if there is no first
        if "eos_token_id" in kept.get(name, {}):
            ids = kept[name]["eos_token_id"]
            listed = ids if isinstance(ids, list) else [ids]
            return [i for i in listed if type(i) is int]
    return []


def text_ends(kept: Kept, eos: int) -> set[int]:
    """The ids that end a text of the model: the tokenizer's eos, and those of its files."""
    return {eos, *ends_of(kept)}


def name_in(kept: Kept, key: str, default: str) -> str:
    """The name of a token (`bos_token`, ...) by tokenizer_config.json; "" if it says there is none.

    `default`: for models without the file.
    """
    if TOKENIZER not in kept:
        return default
    value = kept[TOKENIZER].get(key)
    name = value.get("content") if isinstance(value, dict) else value
    return name if isinstance(name, str) else ""
