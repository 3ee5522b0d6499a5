"""Renders a conversation as the text that a model was trained on, by its chat template.

What it is: a template is a Jinja program that came with a model (`chat_template.jinja`, or an entry
of tokenizer_config.json). It is rendered as transformers does, with what the assistant says marked:
by `{% generation %}` blocks if the template has them, otherwise each answer is what the text gains
by it.
Why in a child process: a template is third-party code. Jinja's sandbox denies it attributes of
Python, and the child has limits of CPU time, memory and output: an endless loop or a string of
gigabytes ends in an error (`runtime/limited_child.py`).
What it costs: 0.1 s for the process, and a tenth of a millisecond for a conversation; without
`{% generation %}` twice as much again for each answer, so that the time grows with the square of
their number: 5 s are enough for about 1,500.
Reference: transformers 5, `utils/chat_template_utils.py`
"""

from __future__ import annotations

import atexit
import importlib.util
import json
import os
import re
import resource
import select
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from titanlite.runtime import limited_child
from titanlite.runtime.errors import printable

SECONDS = 5  # of CPU time, for a conversation
MARGIN = 1  # second more, where Python cannot interrupt an operation
WAIT = 12  # times as long on the clock, where the machine is busy
MEMORY = 1 << 29  # bytes, beside those of Python
PACKAGES = ("jinja2", "markupsafe")
MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")
# Noncharacters around the text of a generation block, until its place is known
MARK_BEGIN = "\ufdd1"
MARK_END = "\ufdd3"
# Characters of a rendered conversation: so many, and so many for each character of its messages
LONGEST = 1 << 17
LONGEST_EACH = 16

# For models without a template
PLAIN = """\
{{- bos_token -}}
{%- for message in messages -%}
{%- if message.role == 'system' -%}
{{ message.content }}

{% elif message.role == 'user' -%}
Question: {{ message.content }}
{% elif message.role == 'assistant' -%}
Answer:{% generation %} {{ message.content }}{{ eos_token }}{% endgeneration %}

{% endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}Answer:{% endif -%}
"""


class TemplateError(ValueError):
    """A template cannot render a conversation; the message is the reason, in one line."""


class Rendered(NamedTuple):
    """A conversation as text, and where in it the assistant speaks: ranges of characters."""

    text: str
    answers: list[tuple[int, int]]


Message = Mapping[str, str]  # with role, content and what else a template may know


class ChatTemplate:
    """Renders conversations by one template."""

    def __init__(self, source: str, bos: str, eos: str) -> None:
        """`bos`, `eos`: the names of the tokens that templates know."""
        self.source = source
        self.marks_answers = MARKS.search(source) is not None
        self.variables = {"bos_token": bos, "eos_token": eos}

    def render(self, messages: Sequence[Message], prompt: bool = False) -> Rendered:
        """Renders a conversation; with `prompt` only up to where the next answer begins.

        With `prompt` the places of earlier answers are known only if the template marks them.

        Raises TemplateError.
        """
        return self._ask(messages, prompt, not self.marks_answers and not prompt)

    def text(self, messages: Sequence[Message]) -> str:
        """Renders a conversation without looking for its answers. Raises TemplateError."""
        return self._ask(messages, False, False).text

    def _ask(self, messages: Sequence[Message], prompt: bool, by_prefixes: bool) -> Rendered:
        """Asks the child for the text and its answers: those that the template marks, or what the
        text gains by each.
        """
        size = sum(len(text) for message in messages for text in message.values())
        request = {
            "source": self.source,
            "variables": self.variables,
            "messages": [dict(message) for message in messages],
            "prompt": prompt,
            "by_prefixes": by_prefixes,
            "seconds": SECONDS,
            "longest": LONGEST + LONGEST_EACH * size,
        }
        answer = _ask(request)
        answers = [(begin, end) for begin, end in answer["answers"]]
        return Rendered(answer["text"], answers)


class _Child:
    """A process that renders; started when it is needed, and again after it was ended."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        if self.process is None:
            self.process = _start()
        process = self.process
        assert process.stdout is not None
        line = b""
        limited_child.request(process, request)
        # The child ends itself sooner, but for an operation that Python cannot interrupt
        if select.select([process.stdout], [], [], WAIT * SECONDS)[0]:
            # A character has up to 12 bytes in JSON, and an answer up to 30
            line = process.stdout.readline(50 * request["longest"])
        if not line.endswith(b"\n"):
            self.stop()
            raise TemplateError(f"rendering it takes more than {SECONDS} s, or too much memory")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise TemplateError(answer["error"])
        return answer

    def stop(self) -> None:
        if self.process is not None:
            limited_child.stop(self.process)
        self.process = None


_children: dict[int, _Child] = {}  # by process: after a fork a child is not this process's


def _ask(request: dict[str, Any]) -> dict[str, Any]:
    return _children.setdefault(os.getpid(), _Child()).ask(request)


@atexit.register
def stop() -> None:
    """Ends this process's child."""
    _children.pop(os.getpid(), _Child()).stop()


def _start() -> subprocess.Popen[bytes]:
    if not all(map(importlib.util.find_spec, PACKAGES)):
        raise TemplateError("chat templates need jinja2: pip install jinja2")
    return limited_child.start(main, PACKAGES)


# From here on: the child


class TooLong(Exception):
    """The time for a conversation is over."""


def main() -> None:
    """Answers requests."""
    limited_child.forbid(resource.RLIMIT_FSIZE, resource.RLIMIT_NPROC)
    render = renderer()
    limited_child.limit({resource.RLIMIT_AS: MEMORY + limited_child.address_space()})
    signal.signal(signal.SIGPROF, _too_long)
    for request in limited_child.requests():
        limited_child.send(_answer(render, request))
        sys.stdout.flush()


def _answer(render: Any, request: dict[str, Any]) -> dict[str, Any]:
    seconds = request["seconds"]
    signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds + MARGIN)  # its signal ends the process
    try:
        answer: dict[str, Any] = render(request)
        return answer
    except TooLong:
        return {"error": f"rendering it takes more than {seconds} s"}
    except (MemoryError, OverflowError):
        return {"error": "rendering it takes too much memory"}
    except RecursionError:
        return {"error": "it calls itself too often"}
    except Exception as error:  # whatever it is, the template or its conversation is the cause
        text = str(error).strip() or type(error).__name__
        return {"error": printable(text.splitlines()[0][:300])}
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)


def _too_long(number: int, frame: object) -> None:
    raise TooLong


def renderer() -> Any:
    """The function that renders a request, with jinja2 as transformers uses it."""
    import datetime

    import jinja2
    from jinja2 import ext, nodes, sandbox

    spans: list[str] = []  # how the text of each generation block begins

    class Generation(ext.Extension):
        """`{% generation %}` ... `{% endgeneration %}`: what the assistant says."""

        tags = {"generation"}  # noqa: RUF012  # as jinja2 declares it

        def parse(self, parser: Any) -> nodes.Node:
            number = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            call = self.call_method("_mark")
            return nodes.CallBlock(call, [], [], body).set_lineno(number)

        def _mark(self, caller: Any) -> str:
            text = str(caller())
            if MARK_BEGIN in text:
                raise jinja2.exceptions.TemplateError("it has {% generation %} in another one")
            spans.append(f"{MARK_BEGIN}{len(spans)}\ufdd2")
            return f"{spans[-1]}{text}{MARK_END}"

    def raise_exception(message: str) -> None:
        raise jinja2.exceptions.TemplateError(message)

    def to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    environment = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, ext.loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    compiled: dict[str, Any] = {}

    def write(request: dict[str, Any], messages: list[Any], prompt: bool) -> str:
        """The text of a template, with marks around its generation blocks."""
        variables = request["variables"] | {"messages": messages, "add_generation_prompt": prompt}
        spans.clear()
        parts = []
        left = request["longest"]
        for part in compiled[request["source"]].generate(**variables):
            parts.append(part)
            left -= len(part)
            if left < 0:
                raise jinja2.exceptions.TemplateError(
                    f"it makes a text of more than {request['longest']} characters; allowed: "
                    f"{LONGEST}, and {LONGEST_EACH} for each character of the messages"
                )
        return "".join(parts)

    def by_prefixes(request: dict[str, Any], text: str) -> list[tuple[int, int]]:
        """The places of the answers in the text of a template without marks."""
        answers = []
        messages = request["messages"]
        for i, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = write(request, messages[:i], True)
            after = write(request, messages[: i + 1], False)
            if not (text.startswith(after) and after.startswith(before)):
                raise jinja2.exceptions.TemplateError(
                    f"its text up to message {i + 1} is not how the whole begins, and it has no "
                    "{% generation %}: where the answer is cannot be known"
                )
            answers.append((len(before), len(after)))
        return answers

    def render(request: dict[str, Any]) -> dict[str, Any]:
        source = request["source"]
        if source not in compiled:
            compiled.clear()
            compiled[source] = environment.from_string(source)
        text = write(request, request["messages"], request["prompt"])
        if request["by_prefixes"]:
            return {"text": text, "answers": by_prefixes(request, text)}
        answers = []
        for mark in spans:
            before, found, rest = text.partition(mark)
            if not found:
                continue  # made, and not written
            answer, _, after = rest.partition(MARK_END)
            text = before + answer + after
            answers.append((len(before), len(before) + len(answer)))
        if MARK_BEGIN in text or MARK_END in text:
            return {"error": "it writes the text of a {% generation %} twice, or changes it"}
        return {"text": text, "answers": answers}

    return render
