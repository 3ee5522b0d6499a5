"""Conversations as ids and targets, against transformers' mask of what the assistant says."""

from __future__ import annotations

import json

import pytest
from chats import CHATML, CONVERSATIONS, MARKED
from messages import refused

from titanlite.tokenizer.tokenizer import Tokenizer
from titanlite.tools.chat.conversation import ChatEncoder, encode, messages_of, question_prompt
from titanlite.tools.chat.template import PLAIN, ChatTemplate
from titanlite.tools.formats.huggingface_tokenizer import to_files


def encoder_of(tokenizer: Tokenizer, source: str) -> ChatEncoder:
    names = {i: name for name, i in tokenizer.special.items()}
    template = ChatTemplate(source, names[tokenizer.bos], names[tokenizer.eos])
    return ChatEncoder(template, list(tokenizer.special))


def test_ids_and_mask_are_those_of_transformers(tmp_path):
    transformers = pytest.importorskip("transformers")
    ours = Tokenizer()
    for name, content in to_files(ours, 128).items():
        (tmp_path / name).write_bytes(content)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for messages in CONVERSATIONS:
        expected = theirs.apply_chat_template(
            messages,
            chat_template=MARKED,
            tokenize=True,
            return_dict=True,
            return_assistant_tokens_mask=True,
        )
        ids, targets = encode(encoder_of(ours, MARKED).pieces(messages), ours)
        assert ids == expected["input_ids"]
        assert targets == [bool(mark) for mark in expected["assistant_masks"]]


def test_what_is_trained():
    """All answers, or the last; with the token that ends them."""
    ours = Tokenizer()
    encoder = encoder_of(ours, MARKED)
    for last_only, expected in ((False, " two<|end_of_text|>"), (True, "")):
        pieces = encoder.pieces(CONVERSATIONS[1], last_only=last_only)
        ids, targets = encode(pieces, ours)
        trained = [i for i, target in zip(ids, targets, strict=True) if target]
        assert ours.decode(trained) == expected + " four <b>'\"&<|end_of_text|>"
    ids, targets = encode(encoder.pieces(CONVERSATIONS[0], prompt=True), ours)
    assert ours.decode(ids).endswith("[A]")


def test_special_tokens_come_from_the_template_alone():
    ours = Tokenizer()
    hostile = "<|end_of_text|> <|begin_of_text|>"
    messages = [{"role": "user", "content": hostile}, {"role": "assistant", "content": hostile}]
    ids, _ = encode(encoder_of(ours, MARKED).pieces(messages), ours)
    assert ids.count(ours.eos) == 1
    assert ids.count(ours.bos) == 1
    assert ours.decode(ids).count(hostile) == 2


def test_characters_of_several_tokens():
    """All tokens of a character are targets if the assistant says it."""
    ours = Tokenizer()
    messages = [
        {"role": "user", "content": "\U0001f642"},
        {"role": "assistant", "content": "\u732b"},
    ]
    ids, targets = encode(encoder_of(ours, MARKED).pieces(messages), ours)
    trained = [i for i, target in zip(ids, targets, strict=True) if target]
    assert ours.decode(trained) == " \u732b<|end_of_text|>"


def test_both_shapes_of_messages():
    assert messages_of([{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]) == [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
    ]


def test_other_texts_of_a_message_reach_the_template():
    """With control tokens as ordinary text; other fields than text are left out."""
    entry = {
        "role": "assistant",
        "content": "a",
        "reasoning_content": "so </s>",
        "id": 7,
        "n": None,
    }
    (message,) = messages_of([entry])
    assert message == {"role": "assistant", "content": "a", "reasoning_content": "so </s>"}
    source = "{% for m in messages %}({{ m.reasoning_content }}){{ m.content }}{% endfor %}</s>"
    encoder = ChatEncoder(ChatTemplate(source, "<s>", "</s>"), ["<s>", "</s>"])
    pieces = encoder.pieces([message], prompt=True)
    assert "".join(piece.text for piece in pieces) == "(so </s>)a</s>"
    assert [piece.special for piece in pieces] == [False, True]


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("text", ["list of messages", "str"]),
        ([], ["list of messages"]),
        ([1], ["message 1", "int"]),
        ([{"role": "me", "content": "a"}], ["message 1", "'me'", "user, assistant"]),
        ([{"from": ["a"], "value": "b"}], ["message 1", "['a']"]),
        ([{"role": "user", "content": None}], ["content", "NoneType"]),
        ([{"role": "user", "content": "\ufdd1"}], ["noncharacters"]),
        ([{"role": "user", "content": "a", "tool_calls": [1]}], ["tool_calls"]),
        ([{"role": "user", "content": "a", "name": "\ufdd3"}], ["noncharacters"]),
        ([{"from": "human", "value": " \n"}], ["message 1 (user) is empty"]),
        ([{"role": "assistant", "content": ""}], ["message 1 (assistant) is empty"]),
        ([{"role": "assistant", "content": "a", "weight": 0}], ["message 1 has weight 0"]),
    ],
)
def test_wrong_messages_are_refused(value, words):
    with refused(*words, error=ValueError):
        messages_of(json.loads(json.dumps(value)))


def test_templates_without_marks():
    ours = Tokenizer()
    chatml = CHATML.replace("<|im_end|>", "<|eot_id|>")  # which the tokenizer has
    pieces = encoder_of(ours, chatml).pieces(CONVERSATIONS[0])
    assert "".join(piece.text for piece in pieces if piece.target) == "4<|eot_id|>\n"


def test_tokens_that_a_model_writes_itself_are_recognised_in_messages():
    """Those that are not control tokens, such as <think>; a control token stays ordinary text."""
    template = ChatTemplate(MARKED, "<s>", "</s>")
    encoder = ChatEncoder(template, ["<s>", "</s>", "<think>"], control=["<s>", "</s>"])
    messages = [{"role": "assistant", "content": "<think></s>"}]
    special = [piece.text for piece in encoder.pieces(messages) if piece.special]
    assert special == ["<s>", "<think>", "</s>"]
    text = "".join(piece.text for piece in encoder.pieces(messages) if not piece.special)
    assert text.count("</s>") == 1


def test_an_answer_ends_with_the_template_s_token():
    tokenizer = Tokenizer()
    chatml = CHATML.replace("<|im_end|>", "<|eot_id|>")
    _, stops = question_prompt("a", chatml, tokenizer, {})
    assert stops == {tokenizer.eos, tokenizer.special["<|eot_id|>"]}


def test_an_answer_also_ends_where_the_model_s_files_say():
    """And with the marker of the next turn, if the template has no other end."""
    tokenizer = Tokenizer()
    markers = "{% for m in messages %}<|start_header_id|>{{ m.content }}{% endfor %}"
    kept = {"generation_config.json": {"eos_token_id": [3, 4]}}
    _, stops = question_prompt("a", markers, tokenizer, kept)
    assert stops == {tokenizer.eos, 3, 4, tokenizer.special["<|start_header_id|>"]}


@pytest.mark.parametrize("name", ["<|eot_id|>", None])
def test_a_question_begins_with_the_begin_token_of_the_model_s_files(name):
    tokenizer = Tokenizer()
    kept = {"tokenizer_config.json": {"bos_token": name, "eos_token": "<|end_of_text|>"}}
    ids, _ = question_prompt("a", PLAIN, tokenizer, kept)
    assert tokenizer.decode(ids) == f"{name or ''}Question: a\nAnswer:"


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{# nothing #}", "the chat template writes nothing"),
        ("{{ raise_exception('no such role') }}", "the chat template: no such role"),
    ],
)
def test_a_template_without_text_is_refused(source, reason):
    with refused(reason):
        question_prompt("a", source, Tokenizer(), {})
