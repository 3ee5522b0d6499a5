"""Quality filters: each rule drops what it is for, in every script, and nothing unless it is asked
for.
"""

from __future__ import annotations

import pytest

from titanlite.tools.prepare import shingles
from titanlite.tools.prepare.filters import RULES, FilterConfig, Measures, rejection

ENGLISH = (
    "The committee met on Tuesday, and it agreed that the bridge should be painted before "
    "the winter.\n"
)
KOREAN = "위원회는 화요일에 모여서 겨울이 오기 전에 다리를 새로 칠해야 한다는 데에 뜻을 모았다.\n"
JAPANESE = "委員会は火曜日に開かれ、冬が来る前に橋を塗り直すべきだということで意見が一致した。\n"
CHINESE = "委员会于星期二开会,一致同意应该在冬天到来之前重新粉刷这座桥。\n"
HINDI = "समिति की बैठक मंगलवार को हुई और उसने तय किया कि सर्दियों से पहले पुल को रंगा जाना चाहिए।\n"
CODE = (
    "def scale(values, factor=2):\n    return [factor * value for value in values if value > 0]\n"
)
TEXTS = {"en": ENGLISH, "ko": KOREAN, "ja": JAPANESE, "zh": CHINESE, "hi": HINDI, "code": CODE}
PROSE = ["en", "ko", "ja", "zh", "hi"]


@pytest.mark.parametrize("text", [*TEXTS.values(), "", "\n", "\ud800\0", "!!!", "a" * 10_000])
def test_nothing_is_dropped_unless_asked_for(text):
    assert rejection(text, FilterConfig()) == ""


@pytest.mark.parametrize("name", PROSE)
def test_prose_of_every_script_passes_the_same_limits(name):
    config = FilterConfig(20, 1000, 2, 10, 0.2, 0.8, 0.3, 0.3)
    assert all(getattr(config, rule) is not None for rule in RULES)
    assert rejection(TEXTS[name], config) == ""


def test_length_is_in_characters():
    assert rejection("다섯글자요", FilterConfig(min_chars=5, max_chars=5)) == ""
    assert rejection("네글자요", FilterConfig(min_chars=5)) == "min_chars"
    assert rejection("여섯글자예요", FilterConfig(max_chars=5)) == "max_chars"


@pytest.mark.parametrize(
    ("text", "length"),
    [
        ("one three  four\n", 4),
        ("한국어 문장", 2.5),
        ("日本語の文章", None),  # no spaces, so no words
        ("ภาษาไทยไม่มีช่องว่าง", None),
        ("Python 3で書かれたプログラムを実行する。", None),  # most letters belong to such a script
        ("words and東京here", 4),
        ("", None),
        (" \n", None),
    ],
)
def test_mean_word_length(text, length):
    measured = Measures(text).mean_word_length
    assert measured == (None if length is None else pytest.approx(length))


def test_word_length_limits():
    assert rejection("a b c d", FilterConfig(min_mean_word_length=2)) == "min_mean_word_length"
    assert rejection("A" * 300, FilterConfig(max_mean_word_length=12)) == "max_mean_word_length"
    assert rejection("漢" * 300, FilterConfig(max_mean_word_length=12)) == ""


def test_ratios_are_of_all_but_white_space():
    measures = Measures("ab 1 #!\n\t é각漢")
    assert measures.alphabetic_ratio == pytest.approx(5 / 8)
    assert measures.symbol_ratio == pytest.approx(2 / 8)
    assert Measures("\u0939\u093f").alphabetic_ratio == 1  # a letter and a vowel sign
    assert Measures(" \n").symbol_ratio is None
    assert rejection("{} [] <> ## a", FilterConfig(max_symbol_ratio=0.5)) == "max_symbol_ratio"
    assert rejection("12 34 56 a", FilterConfig(min_alphabetic_ratio=0.5)) == "min_alphabetic_ratio"


def test_repeated_lines():
    assert Measures("one\ntwo\n  one\n\n\n").repeated_lines == pytest.approx(1 / 3)
    assert Measures(ENGLISH + KOREAN + "\n\n").repeated_lines == 0
    assert rejection("같은 줄\n" * 10, FilterConfig(max_repeated_lines=0.5)) == "max_repeated_lines"


@pytest.mark.parametrize("name", TEXTS)
def test_repeated_text_without_line_ends(name):
    text = TEXTS[name].strip()
    assert Measures(text).repeated_text == 0
    assert Measures(" ".join([text] * 10)).repeated_text > 0.8
    assert (
        rejection(" ".join([text] * 10), FilterConfig(max_repeated_text=0.5)) == "max_repeated_text"
    )


def test_long_documents_are_measured_in_blocks(monkeypatch):
    text = (ENGLISH + KOREAN + JAPANESE) * 20
    whole = Measures(text)
    values, repeated = (
        [whole.mean_word_length, whole.symbol_ratio, whole.alphabetic_ratio],
        whole.repeated_text,
    )
    monkeypatch.setattr("titanlite.tools.prepare.filters.BLOCK", 1000)
    monkeypatch.setattr(shingles, "BLOCK", 1000)
    blocks = Measures(text)
    assert [blocks.mean_word_length, blocks.symbol_ratio, blocks.alphabetic_ratio] == pytest.approx(
        values, rel=0.01
    )
    assert 0.5 < blocks.repeated_text < repeated


def test_the_first_rule_is_named():
    config = FilterConfig(min_chars=100, max_symbol_ratio=0.1)
    assert rejection("###", config) == "min_chars"
    assert rejection("###" * 100, config) == "max_symbol_ratio"
