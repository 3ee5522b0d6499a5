"""The end of an answer, also where only the next turn's beginning is it."""

from __future__ import annotations

import json

import numpy as np
import pytest

from titanlite.data.shards import Tokens
from titanlite.tokenizer.tokenizer import Tokenizer
from titanlite.tools.chat.answer_end import AnswerEnd, find_answer_end
from titanlite.tools.chat.template import PLAIN, ChatTemplate
from titanlite.tools.cli.main import main

# As GLM's: markers of roles, and nothing after an answer
MARKERS = """\
<|reserved_special_token_5|>{% for m in messages %}
{% if m.role == 'user' %}<|start_header_id|>
{{ m.content }}{% elif m.role == 'assistant' %}<|end_header_id|>
{{ m.content | trim }}{% endif %}{% endfor %}
{% if add_generation_prompt %}<|end_header_id|>{% endif %}
"""
NO_END = """\
{% for m in messages %}### {{ m.role }}:
{{ m.content }}
{% endfor %}{% if add_generation_prompt %}### assistant:
{% endif %}"""
UNMARKED_END = """\
{% for m in messages %}{% if m.role == 'assistant' %}
A{% generation %}{{ m.content }}{% endgeneration %}<|eot_id|>
{% else %}U{{ m.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}A{% endif %}
"""
ENDS = {
    "the template's": (PLAIN, AnswerEnd("<|end_of_text|>", "")),
    "the next turn's marker": (MARKERS, AnswerEnd("<|start_header_id|>", "<|start_header_id|>")),
    "after what is marked": (UNMARKED_END, AnswerEnd("<|eot_id|>", "")),
    "none": (NO_END, None),
}


@pytest.mark.parametrize(("source", "expected"), ENDS.values(), ids=ENDS)
def test_ends(source, expected):
    template = ChatTemplate(source, "<|begin_of_text|>", "<|end_of_text|>")
    assert find_answer_end(template, list(Tokenizer().special)) == expected


def prepared(tmp_path, source: str, *options: str) -> int:
    rows = [
        {
            "messages": [
                {"role": role, "content": f"{role} {row} {turn}"}
                for turn in range(1 + row % 3)
                for role in ("user", "assistant")
            ]
        }
        for row in range(12)
    ]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "t.jinja").write_text(source)
    command = ["prepare", str(tmp_path / "a.jsonl"), "--chat", "--out", str(tmp_path / "data")]
    (tmp_path / "b.jsonl").write_text((tmp_path / "a.jsonl").read_text())
    validation = ["--validation", str(tmp_path / "b.jsonl")]
    return main([*command, *validation, "--template", str(tmp_path / "t.jinja"), *options])


@pytest.mark.parametrize("source", [MARKERS, UNMARKED_END], ids=["next turn's", "unmarked"])
@pytest.mark.parametrize("last", [False, True])
def test_the_last_target_of_every_answer_is_its_end(tmp_path, source, last, capsys):
    assert prepared(tmp_path, source, *(["--last-answer"] if last else [])) == 0
    manifest = json.loads((tmp_path / "data/manifest.json").read_text())
    tokens = Tokens(tmp_path / "data", manifest, "train")
    ids = np.asarray(tokens.read(0, len(tokens)))
    targets = np.concatenate([tokens.targets(0, len(tokens)), [False]])
    last_targets = ids[targets[:-1] & ~targets[1:]]
    tokenizer = Tokenizer()
    end = "<|start_header_id|>" if source == MARKERS else "<|eot_id|>"
    assert last_targets.tolist() == [tokenizer.special[end]] * (12 if last else 24)
    assert manifest.get("answer_end", "") == (end if source == MARKERS else "")
    assert ("is trained as the end" in capsys.readouterr().err) == (source == MARKERS)


def test_a_template_without_an_end_is_refused(tmp_path, capsys):
    assert prepared(tmp_path, NO_END) == 2
    assert "no special token of the tokenizer after an answer" in capsys.readouterr().err
    assert not (tmp_path / "data").exists()
