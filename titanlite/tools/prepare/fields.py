"""Builds hints about fields for messages: the nearest name, or that they hold conversations."""

from __future__ import annotations

import re
import shlex

from titanlite.config.mistakes import suggestion

CONVERSATIONS = ("messages", "conversations", "conversation")
# Fields of a question and its answer, which TRL, OpenAI's fine-tuning and Alpaca call so
ANSWERED = (
    ("prompt", "completion"),
    ("prompt", "response"),
    ("question", "answer"),
    ("instruction", "response"),
    ("instruction", "output"),
)
LEFT_OUT_FIELD = "input"
LEFT_OUT = " (a prompt is one field: join instruction and input before, where input is not empty)"
IDS = ("input_ids", "token_ids", "tokens")
# The start of a list of messages in JSON, in a field of such a name
IN_JSON = re.compile(
    rb'"(messages|conversations?)"\s*:\s*\[\s*\{\s*"(?:role|content|from|value)"\s*:'
)
MESSAGE = re.compile(r'\s*\[\s*\{\s*"(?:role|content|from|value)"\s*:')
NEEDS_CHAT = "conversations need titanlite prepare --chat"


def with_chat(path: str, field: str) -> str:
    """The command that prepares conversations."""
    option = "" if field == "messages" else f" --field {field}"
    return f"titanlite prepare {shlex.quote(path)} --chat{option} --out FOLDER"


def other_fields(path: str, field: str, names: list[str]) -> str:
    """Writes the end of a message about rows without a field: the command that reads such rows."""
    for name in CONVERSATIONS:
        if name in names:
            return (
                f"; its {name} are conversations: {with_chat(path, name)}, "
                "then train with --data.path=FOLDER"
            )
    for name in IDS:
        if name in names:
            return (
                f"; its {name} are token ids, which are read from .bin and .npy: write them with "
                f"numpy.save('ids.npy', numpy.concatenate([row[{name!r}] for row in rows]))"
            )
    for prompt, answer in ANSWERED:
        if prompt in names and answer in names:
            return (
                f"; its {prompt} and {answer} are questions and answers: titanlite prepare "
                f"{shlex.quote(path)} --prompt-field {prompt} --field {answer} --out FOLDER, then "
                f"train with --data.path=FOLDER{LEFT_OUT if LEFT_OUT_FIELD in names else ''}"
            )
    return suggestion(field, names) or f"; it has {', '.join(names[:20])}"
