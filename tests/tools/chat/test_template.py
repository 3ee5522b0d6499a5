"""Chat templates, rendered as transformers renders them; and templates that attack."""

from __future__ import annotations

import time

import pytest
from chats import CHATML, CONVERSATIONS, LOOPS, MARKED, NAMESPACE, SYSTEM
from messages import refused

from titanlite.tools.chat import template
from titanlite.tools.chat.template import PLAIN, ChatTemplate, TemplateError

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
        ours = ChatTemplate(source, "<s>", "</s>")._ask(messages, prompt)
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
    assert ChatTemplate("fine", "", "")._ask(CONVERSATIONS[0], False).text == "fine"


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


def test_a_child_that_does_not_answer_is_ended(monkeypatch):
    monkeypatch.setattr(template, "WAIT", 0.1)
    with refused("more than 5 s", error=TemplateError):
        ChatTemplate(ENDLESS, "", "").text(CONVERSATIONS[0])
    assert ChatTemplate("fine", "", "").text(CONVERSATIONS[0]) == "fine"
