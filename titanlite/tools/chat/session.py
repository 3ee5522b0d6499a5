"""Keeps a conversation with a model and generates the next answer.

What it costs: each answer computes the whole conversation before it once, then one forward per
token, with a key/value cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from typing import NamedTuple

from titanlite.model.generate import generate
from titanlite.model.llama import Llama
from titanlite.runtime.errors import ConfigError
from titanlite.tokenizer.kept_files import Kept, text_ends
from titanlite.tokenizer.tokenizer import Tokenizer
from titanlite.tools.chat.answer_end import find_answer_end
from titanlite.tools.chat.conversation import (
    ChatEncoder,
    control_tokens,
    encode,
    template_names,
)
from titanlite.tools.chat.template import ChatTemplate, Message
from titanlite.tools.chat.text_stream import text_stream


class Sampling(NamedTuple):
    """How an answer is sampled: see `generate`."""

    max_new_tokens: int
    temperature: float
    top_k: int
    seed: int


class ChatSession:
    """`answer` adds the user's message and the model's answer to the conversation."""

    def __init__(
        self,
        model: Llama,
        tokenizer: Tokenizer,
        template: str,
        sampling: Sampling,
        system: str,
        kept: Kept | None = None,
    ) -> None:
        """`template`: its Jinja source; `system`: the first message, empty for none; `kept`: the
        files of the model's folder (`kept_files.py`).
        """
        self.model = model
        self.tokenizer = tokenizer
        self.sampling = sampling
        self.system = system
        self.kept = kept or {}
        self.template = ChatTemplate(template, *template_names(tokenizer, self.kept))
        self.encoder = ChatEncoder(
            self.template, list(tokenizer.special), control_tokens(tokenizer)
        )
        self.messages: list[Message] = []
        self.left_out = 0  # messages of this conversation that are no longer among them
        self.begin()

    def begin(self) -> None:
        """Begins a new conversation."""
        self.messages = []
        self.left_out = 0
        if self.system:
            self.messages.append({"role": "system", "content": self.system})

    def stop_tokens(self) -> set[int]:
        """The ids that end an answer: those that end a text, and the special token that the
        template writes after an answer, or with which it begins the next turn.

        Raises TemplateError.
        """
        tokens = text_ends(self.kept, self.tokenizer.eos)
        end = find_answer_end(self.template, list(self.tokenizer.special))
        if end is not None:
            tokens.add(self.tokenizer.special[end.token])
        return tokens

    def answer(self, text: str) -> Iterator[str]:
        """Yields the parts of the model's answer to a message.

        Raises TemplateError, and ConfigError if a single message is too long for the model. The
        conversation then stays as it was.
        """
        before = list(self.messages)
        left_out = self.left_out
        self.messages.append({"role": "user", "content": text})
        try:
            prompt = self._prompt()
        except ValueError:
            self.messages = before
            self.left_out = left_out
            raise
        stops = self.stop_tokens()
        count = min(self.sampling.max_new_tokens, self.model.seq_len - len(prompt))
        tokens = self._sampled(prompt, count, stops)
        parts = []
        for part in text_stream(tokens, self.tokenizer, prompt):
            parts.append(part)
            yield part
        self.messages.append({"role": "assistant", "content": "".join(parts).strip()})

    def _sampled(self, prompt: list[int], count: int, stops: Set[int]) -> Iterator[int]:
        """Samples new tokens up to one of `stops`, which is left out."""
        return generate(
            self.model,
            prompt,
            count,
            stop=stops,
            temperature=self.sampling.temperature,
            top_k=self.sampling.top_k,
            seed=self.sampling.seed,
        )

    def _prompt(self) -> list[int]:
        """The conversation as ids. If it is too long, the oldest messages are left out."""
        room = min(self.sampling.max_new_tokens, self.model.seq_len // 4)  # for the answer
        while True:
            ids, _ = encode(self.encoder.pieces(self.messages, prompt=True), self.tokenizer)
            if not ids:
                raise ConfigError("the chat template writes nothing of the conversation")
            first = 1 if self.system else 0
            is_first = len(self.messages) < first + 3
            if len(ids) + (1 if is_first else room) <= self.model.seq_len:
                return ids
            if is_first:
                raise ConfigError(
                    f"the message has {len(ids)} tokens with its template; the conversation may "
                    f"have {self.model.seq_len} (--context)"
                )
            del self.messages[first : first + 2]  # a message and its answer
            self.left_out += 2
