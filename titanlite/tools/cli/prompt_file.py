"""`titanlite generate --prompts FILE`: continues many prompts.

What it is: rows are read and checked before the model is loaded. They are continued in batches of
prompts of similar lengths (`model/generate.py` says why), and written in the order of the file with
a `text` added. Each row has its own random numbers, so a text does not depend on its batch.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Set
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titanlite.runtime.errors import ConfigError
from titanlite.runtime.files import replace_file
from titanlite.tools.cli.json_rows import JsonRow, raise_problems, read_rows, text_problem

if TYPE_CHECKING:  # these import torch, and the file is read before that
    from titanlite.model.generate import Row
    from titanlite.model.llama import Llama
    from titanlite.tokenizer.tokenizer import Tokenizer

FIELD = "prompt"
RESULT = "text"


def read_prompts(path: Path) -> list[JsonRow]:
    """The rows of JSON lines with `prompt`, or the lines of a .txt file. Raises ConfigError."""
    return read_rows(path, _problem_of, text_field=FIELD)


def _problem_of(values: dict[str, Any]) -> str:
    if RESULT in values:
        return f"has a `{RESULT}`, which is the name of the result; expected another name for it"
    return text_problem(values, FIELD)


def require_target(path: Path, prompts: Path) -> None:
    """Raises ConfigError if it is known already that the file cannot be written."""
    if path.exists() and prompts.exists() and path.samefile(prompts):
        raise ConfigError(f"--out {path}: is the file of --prompts; expected another one")
    if path.is_dir():
        raise ConfigError(f"--out {path}: is a folder; expected a file to write")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"--out {path}: its folder does not exist; expected a file to write")


def rows_to_continue(
    path: Path,
    rows: list[JsonRow],
    tokenizer: Tokenizer,
    trained_length: int,
    max_new_tokens: int,
    seed: int,
) -> list[Row]:
    """The prompts as ids, with the number of new tokens for each.

    With `max_new_tokens` 0 a prompt is continued up to the sequence length of training. Raises
    ConfigError for prompts that leave no room for a new token.
    """
    from titanlite.model.generate import Row, row_seed

    found = []
    problems = []
    for number, row in enumerate(rows):
        ids = tokenizer.encode_prompt(row.values[FIELD])
        room = max_new_tokens or trained_length - len(ids)
        if room < 1:
            problems.append(
                f"{path}:{row.line}: the prompt has {len(ids)} tokens, with those that the "
                f"tokenizer puts before it; expected at most {trained_length - 1}, or "
                f"--max-new-tokens: the sequences of training have {trained_length}"
            )
        found.append(Row(ids, room, row_seed(seed, number)))
    raise_problems(problems)
    return found


def batches_of(rows: list[Row], size: int) -> list[list[int]]:
    """The indices of the rows of each batch, longest prompts first.

    So a batch that does not fit into memory is the first one.
    """
    order = sorted(range(len(rows)), key=lambda i: -len(rows[i].prompt))
    return [order[start : start + size] for start in range(0, len(order), size)]


def continued(
    model: Llama,
    tokenizer: Tokenizer,
    rows: list[Row],
    batches: Iterable[list[int]],
    stop: Set[int],
    temperature: float,
    top_k: int,
) -> Iterator[tuple[int, str]]:
    """Yields (index of a row, the text that continues it), batch by batch."""
    from titanlite.model.generate import generate_rows
    from titanlite.tools.chat.text_stream import text_stream

    for batch in batches:
        chosen = [rows[i] for i in batch]
        new: list[list[int]] = [[] for _ in batch]
        for place, token in generate_rows(
            model, chosen, stop=stop, temperature=temperature, top_k=top_k
        ):
            new[place].append(token)
        for i, row, tokens in zip(batch, chosen, new, strict=True):
            yield i, "".join(text_stream(tokens, tokenizer, row.prompt))


def write_texts(target: Path | None, rows: list[JsonRow], texts: dict[int, str]) -> None:
    """Writes each row with its text to a file, or prints it.

    Raises ConfigError if the file cannot be written; the texts are printed then.
    """
    lines = []
    for number, row in enumerate(rows):
        lines.append(json.dumps({**row.values, RESULT: texts[number]}) + "\n")
    content = "".join(lines)
    if target is None:
        sys.stdout.write(content)
        return
    try:
        replace_file(target.absolute(), content.encode())
    except OSError as error:
        sys.stdout.write(content)
        raise ConfigError(
            f"--out {target}: {error.strerror or error}; expected a file to write. The texts are "
            "on standard output"
        ) from None
