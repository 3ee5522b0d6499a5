"""Turns generated tokens into text while they arrive, and writes it."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator

from titanlite.runtime.errors import for_terminal
from titanlite.tokenizer.tokenizer import Tokenizer


def text_stream(tokens: Iterable[int], tokenizer: Tokenizer, before: list[int]) -> Iterator[str]:
    """Yields the text of new tokens in parts that consist of whole characters.

    A character of several tokens comes with the last of them. `before` are the prompt's tokens.
    """
    printed = before  # the tokens of the last part: the text of a token may depend on them
    new: list[int] = []
    text = ""
    for token in tokens:
        new.append(token)
        text = tokenizer.decode(printed + new)[len(tokenizer.decode(printed)) :]
        if text and not text.endswith("\ufffd"):
            yield text
            printed = new
            new = []
            text = ""
    yield text


def write_text(text: str) -> None:
    """Writes text of a model to standard output.

    A terminal would obey the control characters in it, so there they are escaped. A pipe or a file
    gets every character as the model wrote it.
    """
    if sys.stdout.isatty():
        text = for_terminal(text)
    sys.stdout.write(text)
    sys.stdout.flush()
