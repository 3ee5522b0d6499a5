"""Encodes a conversation as token ids, and marks those that are targets of the loss.

What it is: rows in two shapes (OpenAI's, ShareGPT's) become messages, which a template renders as
text. Special tokens are recognised only where the template wrote them. A token is a target if any
of its characters is the assistant's, or if it is the special token that ends an answer.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from titanlite.runtime.documents import parse_json
from titanlite.runtime.errors import ConfigError
from titanlite.tokenizer.kept_files import Kept, name_in, text_ends
from titanlite.tokenizer.nfc import nfc
from titanlite.tokenizer.tokenizer import Tokenizer
from titanlite.tokenizer.tokenizer_json import JSON_FILES
from titanlite.tools.chat.answer_end import any_of, find_answer_end
from titanlite.tools.chat.template import ChatTemplate, Message, Rendered, TemplateError

ROLES = ("system", "user", "assistant", "tool")
MUST_SPEAK = ("user", "assistant")  # the messages of others may be empty
# ShareGPT's -> OpenAI's
FROM = {"human": "user", "gpt": "assistant", "system": "system", "user": "user", "bot": "assistant"}
HIDDEN = "\ufdd0"  # a noncharacter, within the name of a special token that a message has
NONCHARACTERS = re.compile("[\ufdd0-\ufdd3]")


class Piece(NamedTuple):
    """A part of a rendered conversation."""

    text: str
    special: bool  # the name of a special token, not text
    target: bool


def messages_of(value: Any) -> list[Message]:
    """The messages of a row: {role, content} each, or ShareGPT's {from, value}.

    Other texts of a message, such as reasoning_content, stay in it, for templates that use them.
    Raises ValueError with the reason.
    """
    if not isinstance(value, list):
        raise ValueError(f"expected a list of messages, found {type(value).__name__}")
    if not value:
        raise ValueError("expected a list of messages, found an empty one")
    messages: list[Message] = []
    for number, entry in enumerate(value, 1):
        try:
            messages.append(_message_of(entry))
        except ValueError as error:
            raise ValueError(f"message {number} {error}") from None
    return messages


def _message_of(entry: Any) -> Message:
    """Reads a message. Raises ValueError with what is wrong with it."""
    if not isinstance(entry, dict):
        raise ValueError(f"is of type {type(entry).__name__}")
    if "from" in entry:
        role = FROM.get(str(entry["from"]), entry["from"])
        content = entry.get("value")
    else:
        role = entry.get("role")
        content = entry.get("content")
    if role not in ROLES:
        raise ValueError(f"has role {role!r:.80}; allowed: {', '.join(ROLES)}")
    if entry.get("tool_calls"):
        raise ValueError("has tool_calls, which are not supported")
    if not isinstance(content, str):
        raise ValueError(f"has content of type {type(content).__name__}; expected text")
    if role in MUST_SPEAK and not content.strip():
        raise ValueError(f"({role}) is empty")
    if entry.get("weight") == 0 and role == "assistant":
        raise ValueError(
            "has weight 0, which is not supported: all answers are trained, or the last"
        )
    message = {"role": role, "content": content}
    for name, text in entry.items():
        if isinstance(text, str) and name not in ("role", "content", "from", "value"):
            message[name] = text
    if any(NONCHARACTERS.search(text) for text in message.values()):
        raise ValueError("has the noncharacters U+FDD0 to U+FDD3")
    return message


class ChatEncoder:
    """Turns conversations into pieces, and pieces into ids."""

    def __init__(
        self,
        template: ChatTemplate,
        special: Sequence[str],
        control: Sequence[str] | None = None,
        marker: str = "",
    ) -> None:
        """`special`: the names of the tokenizer's special tokens; `control`: those that a message
        cannot have, by default all; `marker`: what follows the last answer of a conversation, for a
        template that ends an answer only by the beginning of the next turn.
        """
        self.template = template
        self.marker = marker
        self._special = any_of(special)
        self._control = any_of(special if control is None else control)

    def pieces(
        self, messages: Sequence[Message], prompt: bool = False, last_only: bool = False
    ) -> list[Piece]:
        """The parts of a conversation.

        `prompt`: only up to the beginning of the next answer. `last_only`: only the last answer is
        a target.

        Raises TemplateError.
        """
        hidden = [
            {name: self._control.sub(_hide, text) for name, text in message.items()}
            for message in messages
        ]
        rendered = self.template.render(hidden, prompt)
        if not prompt:
            rendered = self._with_ends(rendered)
        answers = rendered.answers[-1:] if last_only else rendered.answers
        pieces: list[Piece] = []
        for begin, end, target in _ranges(Rendered(rendered.text, answers)):
            text = rendered.text[begin:end]
            position = 0
            for match in self._special.finditer(text):
                pieces.append(Piece(text[position : match.start()], False, target))
                pieces.append(Piece(match[0], True, target))
                position = match.end()
            pieces.append(Piece(text[position:], False, target))
        shown = [piece._replace(text=piece.text.replace(HIDDEN, "")) for piece in pieces]
        return [piece for piece in shown if piece.text]

    def _with_ends(self, rendered: Rendered) -> Rendered:
        """Extends each answer to the special token that ends it.

        Without it a model learns no end, and generates up to a limit. Raises TemplateError if no
        special token follows.
        """
        text = rendered.text
        answers = []
        spans = sorted(rendered.answers)
        for number, (begin, end) in enumerate(spans, 1):
            said = text[begin:end].rstrip()
            ends = [match.end() for match in self._control.finditer(said)]
            if said and ends[-1:] != [len(said)]:
                if self.marker and not text[end:].strip():
                    text = text[:end] + self.marker  # nothing but space was there
                begin_of_next = len(text) - len(text[end:].lstrip())
                following = self._special.match(text, begin_of_next)
                if following is None:
                    raise TemplateError(
                        f"an answer is followed by {text[end : end + 40]!r}; expected a special "
                        "token, with which a model can end it"
                    )
                end = following.end()
                if number < len(spans):  # within the next answer it is a target already
                    end = min(end, spans[number][0])
            answers.append((begin, end))
        return Rendered(text, answers)


def control_tokens(tokenizer: Tokenizer) -> list[str]:
    """The special tokens that only a template may write.

    A tokenizer.json can have others, such as `<think>`, which a model writes itself.
    """
    main = tokenizer.files.get(JSON_FILES[0])
    if main is None:
        return list(tokenizer.special)
    return [entry["content"] for entry in parse_json(main)["added_tokens"] if entry["special"]]


def template_names(tokenizer: Tokenizer, kept: Kept) -> tuple[str, str]:
    """The `bos_token` and `eos_token` of a template.

    "" for one that the model's own files do not have: transformers renders nothing for it.
    """
    names = {i: name for name, i in tokenizer.special.items()}
    return (
        name_in(kept, "bos_token", names[tokenizer.bos]),
        name_in(kept, "eos_token", names[tokenizer.eos]),
    )


def question_prompt(
    question: str, source: str, tokenizer: Tokenizer, kept: Kept
) -> tuple[list[int], set[int]]:
    """A user's message as the ids of a prompt, and the ids that end its answer.

    These are the ids that end a text, and the special token that the template writes after an
    answer, or with which it begins the next turn. `source`: the chat template; `kept`: the files of
    the model's folder (`kept_files.py`).

    Raises ConfigError.
    """
    template = ChatTemplate(source, *template_names(tokenizer, kept))
    special = list(tokenizer.special)
    encoder = ChatEncoder(template, special, control_tokens(tokenizer))
    try:
        pieces = encoder.pieces([{"role": "user", "content": question}], prompt=True)
        end = find_answer_end(template, special)
    except TemplateError as error:
        raise ConfigError(f"the chat template: {error}") from None
    ids, _ = encode(pieces, tokenizer)
    if not ids:
        raise ConfigError("the chat template writes nothing of the question")
    stops = text_ends(kept, tokenizer.eos)
    if end is not None:
        stops.add(tokenizer.special[end.token])
    return ids, stops


def _hide(match: re.Match[str]) -> str:
    """Hides the name of a special token in a message, so that it is not recognised as one."""
    return match[0][0] + HIDDEN + match[0][1:]


def _ranges(rendered: Rendered) -> list[tuple[int, int, bool]]:
    """Spans of the whole text: (begin, end, whether the assistant says it)."""
    ranges = []
    position = 0
    for begin, end in sorted(rendered.answers):
        ranges.append((position, begin, False))
        ranges.append((begin, end, True))
        position = end
    ranges.append((position, len(rendered.text), False))
    return ranges


def encode(pieces: Sequence[Piece], tokenizer: Tokenizer) -> tuple[list[int], list[bool]]:
    """Encodes pieces: ids, and whether each is a target. Text between special tokens is one run."""
    ids: list[int] = []
    targets: list[bool] = []
    run: list[Piece] = []
    for piece in [*pieces, Piece("", True, False)]:
        if not piece.special:
            text = nfc(piece.text) if tokenizer.nfc else piece.text
            run.append(piece._replace(text=text))
            continue
        if run:
            of_run, is_target = _encode_run(run, tokenizer)
            ids += of_run
            targets += is_target
            run = []
        if piece.text:
            ids.append(tokenizer.special[piece.text])
            targets.append(piece.target)
    return ids, targets


def _encode_run(run: Sequence[Piece], tokenizer: Tokenizer) -> tuple[list[int], list[bool]]:
    """Encodes text without special tokens, part of which is the assistant's."""
    ids, starts = tokenizer.encode_with_starts("".join(piece.text for piece in run))
    size = sum(len(piece.text) for piece in run)
    says = np.zeros(size + 1, dtype=np.int64)  # how many of the first characters are targets
    position = 0
    for piece in run:
        length = len(piece.text)
        if piece.target:
            says[position + 1 : position + length + 1] = 1
        position += length
    says = says.cumsum()
    ends = [*starts[1:], size]
    # The tokens of one character have the same start: its place counts for all of them
    targets = [
        bool(says[max(end, begin + 1)] > says[begin])
        for begin, end in zip(starts, ends, strict=True)
    ]
    return ids, targets
