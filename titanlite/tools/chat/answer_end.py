"""Finds the special token that ends an answer in the text of a chat template.

What it is: most templates write it after the answer. Some close an answer by the marker that begins
the next turn (GLM's `<|user|>`): then the marker is the end, and has to be trained as such.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from titanlite.tools.chat.template import ChatTemplate, Message, TemplateError

ANSWER = "an answer"  # of the example
EXAMPLE: list[Message] = [
    {"role": "user", "content": "x"},
    {"role": "assistant", "content": ANSWER},
    {"role": "user", "content": "y"},
]


class AnswerEnd(NamedTuple):
    """How an answer ends."""

    token: str  # the name of a special token
    marker: str  # the text with which the next turn begins, if the token is only there; else ""


def any_of(names: Sequence[str]) -> re.Pattern[str]:
    """A pattern that matches one of the names, the longest first."""
    longest_first = sorted(names, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")


def find_answer_end(template: ChatTemplate, special: Sequence[str]) -> AnswerEnd | None:
    """The end of an answer; None if no special token can be it.

    `special`: the names of the tokenizer's special tokens. Raises TemplateError if the template
    cannot render a conversation.
    """
    pattern = any_of(special)
    _, _, after = template.text(EXAMPLE[:2]).rpartition(ANSWER)
    found = pattern.search(after)
    if found:
        return AnswerEnd(found[0], "")
    try:
        _, _, after = template.text(EXAMPLE).rpartition(ANSWER)
    except TemplateError:  # it renders a single turn
        return None
    space = after[: len(after) - len(after.lstrip())]
    found = pattern.match(after, len(space))
    if found:
        return AnswerEnd(found[0], space + found[0])
    return None
