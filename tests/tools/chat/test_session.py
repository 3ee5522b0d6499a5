"""A conversation with a model: what it is asked, where its answers end, what is left out."""

from __future__ import annotations

import pytest
from chats import CHATML, MARKED
from messages import refused

from titanlite.model.flavors import LlamaConfig
from titanlite.model.llama import Llama
from titanlite.tokenizer.tokenizer import Tokenizer
from titanlite.tools.chat import session
from titanlite.tools.chat.session import ChatSession, Sampling
from titanlite.tools.chat.template import PLAIN
from titanlite.tools.chat.text_stream import text_stream

GREEDY = Sampling(max_new_tokens=5, temperature=0.0, top_k=0, seed=0)


@pytest.fixture(scope="module")
def model() -> Llama:
    tokenizer = Tokenizer()
    config = LlamaConfig(16, 1, 2, 1, 16, vocab_size=tokenizer.size)
    made = Llama(config, 96)
    made.init_weights(0)
    return made.eval()


def test_the_model_is_asked_the_whole_conversation(model, monkeypatch):
    tokenizer = Tokenizer()
    asked: list[list[int]] = []
    answers = iter(["one.", "two."])

    def generate(model, prompt, count, **options):
        asked.append(prompt)
        assert options["stop"] == {tokenizer.special["<|end_of_text|>"]}
        yield from tokenizer.encode(next(answers))

    monkeypatch.setattr(session, "generate", generate)
    chat = ChatSession(model, tokenizer, MARKED, GREEDY, "Count.")
    assert "".join(chat.answer("a")) == "one."
    assert "".join(chat.answer("b")) == "two."
    text = tokenizer.decode(asked[1])
    assert text == "<|begin_of_text|>[S] Count.\n[U] a\n[A] one.<|end_of_text|>\n[U] b\n[A]"
    assert [message["role"] for message in chat.messages[1:]] == ["user", "assistant"] * 2
    chat.begin()
    assert chat.messages == [{"role": "system", "content": "Count."}]


def test_an_answer_ends_with_the_template_s_token(model):
    tokenizer = Tokenizer()
    chatml = CHATML.replace("<|im_end|>", "<|eot_id|>")
    tokens = ChatSession(model, tokenizer, chatml, GREEDY, "").stop_tokens()
    assert tokens == {tokenizer.eos, tokenizer.special["<|eot_id|>"]}


def test_an_answer_also_ends_where_the_model_s_files_say(model):
    """And with the marker of the next turn, if the template has no other end."""
    tokenizer = Tokenizer()
    markers = "{% for m in messages %}<|start_header_id|>{{ m.content }}{% endfor %}"
    kept = {"generation_config.json": {"eos_token_id": [3, 4]}}
    tokens = ChatSession(model, tokenizer, markers, GREEDY, "", kept).stop_tokens()
    assert tokens == {tokenizer.eos, 3, 4, tokenizer.special["<|start_header_id|>"]}


@pytest.mark.parametrize("name", ["<|eot_id|>", None])
def test_a_template_has_the_begin_token_of_the_model_s_files(model, name):
    kept = {"tokenizer_config.json": {"bos_token": name, "eos_token": "<|end_of_text|>"}}
    chat = ChatSession(model, Tokenizer(), PLAIN, GREEDY, "", kept)
    text = chat.template.text([{"role": "user", "content": "a"}])
    assert text.startswith((name or "") + "Question: a")


def test_old_messages_are_left_out(model):
    """The system message stays; a single message that is too long is an error."""
    chat = ChatSession(model, Tokenizer(), PLAIN, GREEDY, "Short.")
    for number in range(12):
        list(chat.answer(f"question number {number}"))
    assert chat.messages[0]["role"] == "system"
    assert len(chat.messages) < 20
    assert len(chat.messages) + chat.left_out == 1 + 2 * 12
    assert chat.messages[-2]["content"] == "question number 11"
    messages = list(chat.messages)
    with refused("tokens", "96", "--context"):
        list(chat.answer("word " * 200))
    assert chat.messages == messages


def test_a_template_without_text_is_refused(model):
    chat = ChatSession(model, Tokenizer(), "{# nothing #}", GREEDY, "")
    with refused("the chat template writes nothing"):
        list(chat.answer("a"))


def test_characters_are_printed_when_they_are_complete():
    tokenizer = Tokenizer()
    ids = tokenizer.encode("a \U0001f642 b")
    parts = list(text_stream(ids, tokenizer, tokenizer.encode("before")))
    assert "".join(parts) == "a \U0001f642 b"
    assert not any("�" in part for part in parts)


def test_a_template_whose_history_changes_can_be_asked(model):
    """As Qwen3's, which leaves the thoughts of earlier answers out."""
    source = (
        "{% for m in messages %}{% if m.role == 'assistant' and not loop.last %}[A] -"
        "{% else %}[{{ m.role[0] | upper }}] {{ m.content }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}[A]{% endif %}"
    )
    chat = ChatSession(model, Tokenizer(), source, GREEDY, "")
    for text in ("a", "b", "c"):
        list(chat.answer(text))
    assert len(chat.messages) == 6
