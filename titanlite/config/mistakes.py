"""Messages about mistakes: the word that was probably meant, and the line in a config file.

Imports no torch.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
from difflib import SequenceMatcher, get_close_matches
from pathlib import Path

from titanlite.config.schema import sections
from titanlite.runtime.errors import shortened

# The last word of other trainers' keys -> ours
OTHER_TRAINERS = {
    "max_steps": "training.steps",
    "train_iters": "training.steps",
    "batch_size": "training.global_batch_size or training.local_batch_size",
    "learning_rate": "optimizer.lr",
    "compile": "compile.enabled",
    "interval": "checkpoint.freq or validation.freq or metrics.log_freq",
    "save_steps": "checkpoint.freq",
    "data_parallel_shard_degree": "parallel.dp_shard",
    "data_parallel_replicate_degree": "parallel.dp_replicate",
    "tensor_parallel_degree": "parallel.tp",
    "pipeline_parallel_degree": "parallel.pp",
    "context_parallel_degree": "parallel.cp",
    "expert_parallel_degree": "parallel.ep",
}
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}", re.ASCII)  # of an organisation or a model


def suggestion(word: str, allowed: list[str], cutoff: float = 0.65) -> str:
    """Writes `; did you mean X?` with the most similar allowed words; "" if none is similar.

    `cutoff`: the required similarity, from 0 to 1 (the same word). Case is ignored.
    """
    best = _most_similar(word[:199], tuple(allowed), cutoff)
    return f"; did you mean {' or '.join(best)}?" if best else ""


@functools.lru_cache(maxsize=1000)  # a command line may have the same mistake thousands of times
def _most_similar(word: str, allowed: tuple[str, ...], cutoff: float) -> list[str]:
    """Finds similar words for one of less than 200 letters (more change SequenceMatcher)."""
    word = word.lower()
    lower = [name.lower() for name in allowed]
    similarity = {}
    for other in get_close_matches(word, lower, 9, cutoff):
        similarity[other] = SequenceMatcher(None, other, word).ratio()
    highest = max(similarity.values(), default=0.0)
    return [
        name for name, low in zip(allowed, lower, strict=True) if similarity.get(low) == highest
    ]


def where(path: Path, text: str, section: str, name: str) -> str:
    """Finds `file:line` of a key; of its section's header if `name` is empty or not in it.

    The second table of an array is the section `data.sources[2]`.
    """
    current = ""
    header_line = 0
    tables: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        header = re.match(r"\s*\[(\[?)\s*([\w.-]+)\s*\]", line)
        if header:
            current = header[2]
            if header[1]:
                tables[current] = tables.get(current, 0) + 1
                current += f"[{tables[current]}]"
            if current == section:
                header_line = number
                if not name:
                    break
        elif (
            current == section
            and name
            and re.match(rf"""\s*["']?{re.escape(name)}["']?\s*=""", line)
        ):
            return f"{path}:{number}"
    return f"{path}:{header_line}" if header_line else str(path)


def unknown_config(name: str, flavors: list[str]) -> str:
    """Writes the message for a CONFIG argument that is neither a file nor one of the flavors."""
    hint = suggestion(name, flavors)
    shown = shortened(name, 1000)  # it may be a path
    problem = f"config {shown!r}: no such file, and no such flavor in train_configs/{hint}"
    allowed = f"a TOML file, a run's folder or one of {', '.join(flavors)}"
    return f"{problem}{hub_advice(name)}; allowed: {allowed}"


def hub_name(path: str) -> str:
    """Returns the name on huggingface.co, as ORG/NAME, that was given in place of a path; empty if
    it is not such a name. Paths in a config are absolute already.
    """
    with contextlib.suppress(OSError):  # the current folder was deleted
        path = path.removeprefix(f"{os.getcwd()}/")
    parts = path.split("/")
    if len(parts) != 2 or not all(HUB_NAME.fullmatch(part) for part in parts):
        return ""
    if os.path.isdir(parts[0]):  # a local folder, and its entry is mistyped
        return ""
    return path


def hub_advice(path: str) -> str:
    """Writes how to get a model whose name on huggingface.co was given in place of a path; empty
    if it is not such a name.
    """
    name = hub_name(path)
    if not name:
        return ""
    folder = name.partition("/")[2]
    return (
        "; nothing is downloaded: if it is a model on huggingface.co, get it by "
        f"`hf download {name} --local-dir {folder}` (pip install huggingface_hub), and give the "
        f"path {folder}"
    )


def wrong_value(name: str, value: object, expected: str, choices: tuple[object, ...]) -> str:
    """Writes the message for a value that is not as `expected`, with the nearest choice."""
    hint = ""
    if isinstance(value, str):
        names = [str(choice) for choice in choices]
        hint = suggestion(value, names) or _with_part(value, names)
    shown = shortened(json.dumps(value, default=str))
    return f"{name} = {shown}: expected {expected}{hint}"


def _with_part(word: str, names: list[str]) -> str:
    """Writes `; did you mean X?` with the names that contain the word, as llama3_8b for 8B."""
    part = f"_{word[:199].lower().replace('-', '_')}_"
    having = [name for name in names if part in f"_{name.lower()}_"]
    return f"; did you mean {' or '.join(having)}?" if having else ""


def unknown_section(name: str) -> str:
    """Writes the message for a section that does not exist."""
    return f"unknown section [{shortened(name)}]{suggestion(name, list(sections()))}"


def unknown_key(name: str, keys: list[str]) -> str:
    """Writes the message for a key that is not one of `keys`, with the probable one."""
    return f"unknown key {shortened(name)}{_probable_key(name, keys)}"


def without_dashes(word: str, keys: list[str]) -> str:
    """Writes the message for `key=value` on the command line."""
    name = word.partition("=")[0]
    hint = _probable_key(name, keys)
    if name in keys:
        hint = f"; did you mean --{shortened(word)}?"
    return f"{shortened(word)}: a key of the command line is --section.key=value{hint}"


def _probable_key(name: str, keys: list[str]) -> str:
    """Writes which key was probably meant; empty if none is similar."""
    name = name.replace("-", "_")  # as most programs write their options
    section, _, entry = name.partition(".")
    if name in sections():
        in_section = ", ".join(key for key in keys if key.startswith(name))
        return f"; that is a section: set one of its keys, {in_section}"
    if name == "help":
        return "; expected --help for all keys, or --help SECTION, as in --help parallel"
    if (entry or section) in OTHER_TRAINERS:
        return f"; did you mean {OTHER_TRAINERS[entry or section]}?"
    same_name = [key for key in keys if key.partition(".")[2] == (entry or section)]
    if not same_name:
        # A higher cutoff, because keys of one section share its name
        hint = suggestion(name, keys, 0.8)
        if not hint and section in sections():
            prefix = f"{section}."
            entries = [key.removeprefix(prefix) for key in keys if key.startswith(prefix)]
            hint = f"; [{section}] has {', '.join(entries)}"
        return hint
    hint = ""
    if entry and section not in sections():  # the section may be mistyped
        hint = suggestion(name, same_name)
    elif entry:  # the name may be, by a letter
        hint = suggestion(name, [key for key in keys if key.startswith(f"{section}.")], 0.93)
    if hint:
        return hint
    return f"; did you mean {' or '.join(same_name)}?"
