"""Writes the files of a Hugging Face folder that say how a model is used.

What it is: those that came with the model (`tokenizer/kept_files.py`) are written as they were. A
model without them gets its tokenizer's begin and end. A run adds the tokens with which its own
documents and answers end, because the model has learned to end a text with them.
"""

from __future__ import annotations

import logging
from typing import Any

from titanlite.tokenizer.kept_files import (
    CONFIG,
    GENERATION,
    KEPT_FILE,
    TOKENIZER,
    TRAINING,
    Kept,
    ends_of,
    from_bytes,
    text_ends,
)
from titanlite.tokenizer.tokenizer import Tokenizer
from titanlite.tokenizer.tokenizer_json import TEMPLATE_FILE
from titanlite.tools.chat.answer_end import find_answer_end
from titanlite.tools.chat.conversation import template_names
from titanlite.tools.chat.template import ChatTemplate, TemplateError
from titanlite.tools.formats.full_state import FullState

logger = logging.getLogger("titanlite")


def kept_of(full: FullState) -> Kept:
    """The files of the checkpoint's model that are kept as they are; none if it has none."""
    return from_bytes(full.about.files.get(KEPT_FILE, b""))


def stops_of(full: FullState, tokenizer: Tokenizer) -> set[int]:
    """The ids that end a text of the checkpoint's model."""
    return text_ends(kept_of(full), tokenizer.eos)


def files_of(state: FullState, tokenizer: Tokenizer | None) -> dict[str, dict[str, Any]]:
    """File name -> its JSON object; of config.json only the ids of tokens, and the fields of
    training under a name of their own.

    Without a tokenizer they are what the model's files say of ids, sampling and training.
    """
    kept = kept_of(state)
    if tokenizer is None:
        return {name: kept[name] for name in (CONFIG, TRAINING, GENERATION) if name in kept}
    files: dict[str, dict[str, Any]] = {name: dict(value) for name, value in kept.items()}
    if CONFIG not in files and GENERATION not in files:  # the model came without a folder
        own = {"bos_token_id": tokenizer.bos, "eos_token_id": tokenizer.eos}
        files[CONFIG] = dict(own)
        files[GENERATION] = {**own, "do_sample": False}
    ends = end_tokens(state, tokenizer)
    if set(ends) != set(ends_of(files)):
        generation = files.setdefault(GENERATION, {"_from_model_config": True, **files[CONFIG]})
        generation["eos_token_id"] = ends[0] if len(ends) == 1 else ends
    if TOKENIZER in files and TEMPLATE_FILE in state.about.files:
        files[TOKENIZER].pop("chat_template", None)  # the template has a file
    return files


def end_tokens(state: FullState, tokenizer: Tokenizer) -> list[int]:
    """The ids that end a text of the model: those of its files, and those of a run's training.

    A model that was only converted has what its authors say; nothing is added.
    """
    kept = kept_of(state)
    ends = ends_of(kept)
    was_trained = bool(state.about.data)
    if not was_trained and (GENERATION in kept or CONFIG in kept):
        return ends
    return list(dict.fromkeys([*ends, tokenizer.eos, *_answer_end(state, tokenizer)]))


def _answer_end(state: FullState, tokenizer: Tokenizer) -> list[int]:
    """The token with which the chat template ends an answer; none without a template."""
    content = state.about.files.get(TEMPLATE_FILE)
    if content is None:
        return []
    names = template_names(tokenizer, kept_of(state))
    try:
        template = ChatTemplate(content.decode("utf-8", "replace"), *names)
        end = find_answer_end(template, list(tokenizer.special))
    except TemplateError as error:
        logger.warning(
            "%s: the end of an answer is not known, because its chat template is not rendered: %s",
            state.path,
            error,
        )
        return []
    return [tokenizer.special[end.token]] if end else []
