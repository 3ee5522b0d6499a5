"""Chat templates, rendered as transformers renders them; and templates that attack."""

from __future__ import annotations

import json
import time
from pathlib import Path
from unittest import mock

import pytest
from chats import CHATML, CONVERSATIONS, LOOPS, MARKED, NAMESPACE, SYSTEM
from fuzz_samples import Reader, given
from messages import refused

from titanlite.runtime.documents import parse_json
from titanlite.runtime.errors import ConfigError
from titanlite.tokenizer.tokenizer import Tokenizer
from titanlite.tools.chat import template
from titanlite.tools.chat.conversation import ChatEncoder, encode, messages_of
from titanlite.tools.chat.find_template import read_template
from titanlite.tools.chat.template import PLAIN, ChatTemplate, Message, TemplateError

GENERATED = "{% set x %}{% generation %}a{% endgeneration %}{% endset %}"
TEMPLATES = [CHATML, MARKED, SYSTEM, LOOPS, NAMESPACE, PLAIN]


@pytest.mark.parametrize("number", range(len(TEMPLATES)))
@pytest.mark.parametrize("prompt", [False, True])
def test_templates_are_rendered_as_transformers_does(number, prompt):
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    source = TEMPLATES[number]
    for messages in CONVERSATIONS:
        (theirs,), marks = utils.render_jinja_template(
            [messages],
            chat_template=source,
            return_assistant_tokens_mask="generation %" in source,
            add_generation_prompt=prompt,
            bos_token="<s>",
            eos_token="</s>",
        )
        ours = ChatTemplate(source, "<s>", "</s>")._ask(messages, prompt, False)
        assert ours.text == theirs
        if "generation %" in source:
            assert ours.answers == [tuple(mark) for mark in marks[0]]


def test_where_the_answers_are_without_marks():
    rendered = ChatTemplate(CHATML, "", "").render(CONVERSATIONS[1])
    assert [rendered.text[begin:end] for begin, end in rendered.answers] == [
        "two<|im_end|>\n",
        "four <b>'\"&<|im_end|>\n",
    ]
    # One whose earlier answers depend on later messages
    last = "{% for m in messages %}{% if loop.last %}{{ m.content }}{% endif %}{% endfor %}"
    with refused("not how the whole begins", "generation", error=TemplateError):
        ChatTemplate(last, "", "").render(CONVERSATIONS[1])


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", ["unsafe"]),
        ("{{ messages.append(1) }}", ["append"]),
        ("{{ cycler.__init__.__globals__.os.system('true') }}", ["unsafe"]),
        ("{{ (().__class__.__base__) }}", ["unsafe"]),
        ("{% set x = 'a' * 9999999999 %}{{ x }}", ["memory"]),
        ("{{ 'a' | center(9999999999) }}", ["memory"]),
        ("{% for i in range(99999999) %}{{ i }}{% endfor %}", ["too much"]),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", ["calls itself"]),
        ("{% for %}", ["xpected"]),
        ("{% include '/etc/passwd' %}", ["loader"]),
        ("{{ raise_exception('no such role') }}", ["no such role"]),
        (f"{GENERATED}{{{{ x }}}}{{{{ x }}}}", ["generation", "twice"]),
        (f"{GENERATED}{{{{ x[2:] }}}}", ["generation", "changes"]),
        (f"{{% generation %}}{GENERATED}{{{{ x }}}}{{% endgeneration %}}", ["in another one"]),
        ("{{ open('/etc/passwd') }}", ["open"]),
    ],
)
def test_hostile_templates_are_refused(source, words):
    with refused(*words, error=TemplateError):
        ChatTemplate(source, "", "").render(CONVERSATIONS[0])
    assert ChatTemplate("fine", "", "")._ask(CONVERSATIONS[0], False, False).text == "fine"


ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
# One operation, of a minute: Python handles no signal before it ends
ONE_OPERATION = "{{ ('x' * 5000000) | wordwrap(1) | length }}"


@pytest.mark.slow
@pytest.mark.parametrize("source", [ENDLESS, ONE_OPERATION])
def test_a_template_that_does_not_end_is_ended(source, monkeypatch):
    monkeypatch.setattr(template, "SECONDS", 1)
    monkeypatch.setattr(template, "WAIT", 100)
    started = time.monotonic()
    with refused("more than 1 s", error=TemplateError):
        ChatTemplate(source, "", "").text(CONVERSATIONS[0])
    assert time.monotonic() - started < 90, "by the child, not by its parent"
    assert ChatTemplate("fine", "", "").text(CONVERSATIONS[0]) == "fine"


def test_a_child_that_does_not_answer_is_ended():
    with mock.patch.object(template, "WAIT", 0.1), refused("more than 5 s", error=TemplateError):
        ChatTemplate(ENDLESS, "", "").text(CONVERSATIONS[0])
    assert ChatTemplate("fine", "", "").text(CONVERSATIONS[0]) == "fine"


LOOP = "{% for i in range(999) %}{% for j in range(999) %}x{% endfor %}{% endfor %}"
SPEECH = "{% for m in messages %}[{{ m.content }}]{% endfor %}"


def test_output_is_bounded_by_the_length_of_the_conversation():
    most = template.LONGEST + template.LONGEST_EACH * len("userhello")
    conversation = [{"role": "user", "content": "hello"}]
    at_most = ChatTemplate(f"{{{{ 'x' * {most} }}}}", "", "").text(conversation)
    assert len(at_most) == most
    for source in (f"{{{{ 'x' * {most + 1} }}}}", "{{ 'x' * 60000000 }}", LOOP):
        started = time.process_time()
        with refused(f"more than {most} characters", error=TemplateError):
            ChatTemplate(source, "", "").text(conversation)
        assert time.process_time() - started < 1, "of this process"
    long = [{"role": "user", "content": "x" * 1_000_000}]
    assert len(ChatTemplate(SPEECH, "", "").text(long)) == 1_000_002


@pytest.mark.slow
def test_a_conversation_without_marks_has_one_limit_of_time(monkeypatch):
    """Not one for each of its answers. The places are those of the texts themselves."""
    turns = [
        {"role": role, "content": f"{role} {i}"}
        for i in range(150)
        for role in ("user", "assistant")
    ]
    rendered = ChatTemplate(SPEECH, "", "").render(turns)
    answers = [rendered.text[begin:end] for begin, end in rendered.answers]
    assert answers == [f"[assistant {i}]" for i in range(150)]
    monkeypatch.setattr(template, "SECONDS", 1)
    started = time.monotonic()
    with refused("takes more than 1 s", error=TemplateError):
        ChatTemplate(SPEECH, "", "").render(turns * 30)
    assert time.monotonic() - started < 10
    assert ChatTemplate("fine", "", "").text(turns) == "fine"


def test_a_reason_is_printable():
    source = "{{ raise_exception('\x1b[2J\u202e\u2028 no') }}"
    with refused("\\x1b[2J", error=TemplateError) as _:
        ChatTemplate(source, "", "").text(CONVERSATIONS[0])


CONVERSATION = json.dumps(CONVERSATIONS[1]).encode()
EOS = "<|end_of_text|>"  # of the bundled tokenizer, which has no token of ChatML
SOURCES = [source.replace("<|im_end|>", EOS).encode() for source in (CHATML, MARKED, SYSTEM, PLAIN)]


def use(source: str, messages: list[Message]) -> None:
    """What `prepare --chat` and `generate --chat` do with a template and a conversation."""
    tokenizer = Tokenizer()
    encoder = ChatEncoder(ChatTemplate(source, "", EOS), list(tokenizer.special))
    for prompt in (False, True):
        encode(encoder.pieces(messages, prompt), tokenizer)


def read_template_of_others(folder: Path, data: bytes) -> None:
    (folder / "a.jinja").write_bytes(data)
    source = read_template(folder / "a.jinja")
    try:
        use(source, CONVERSATIONS[1])
    except ValueError as error:  # a bad row
        raise ConfigError(str(error)) from None


def read_conversation(folder: Path, data: bytes) -> None:
    try:
        use(SOURCES[0].decode(), messages_of(parse_json(data)))
    except ValueError as error:
        raise ConfigError(str(error)) from None


FUZZED = {
    "chat template": Reader("text", given(*SOURCES), read_template_of_others),
    "conversation": Reader("text", given(CONVERSATION), read_conversation),
}
