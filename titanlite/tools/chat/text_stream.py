"""Printing text while it is generated."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from titanlite.tokenizer.tokenizer import Tokenizer

CONTEXT = 8  # tokens before, on which the text of the first new one may depend


def text_stream(tokens: Iterable[int], tokenizer: Tokenizer, before: list[int]) -> Iterator[str]:
    """The text of new tokens in parts, each of which is complete.

    A character may be several tokens: it comes with the last of them. `before`: the prompt's.
    """
    ids = before[-CONTEXT:]
    printed = len(tokenizer.decode(ids))
    text = ""
    for token in tokens:
        ids.append(token)
        text = tokenizer.decode(ids)
        if not text.endswith("\ufffd"):
            yield text[printed:]
            printed = len(text)
    yield text[printed:]
