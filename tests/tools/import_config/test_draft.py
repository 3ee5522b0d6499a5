"""Values of a config in the making."""

from __future__ import annotations

from titanlite.tools.import_config.draft import Draft, as_number


def test_numbers_in_text():
    assert [as_number(text) for text in ("7", "1e-5", "x", True)] == [7, 1e-5, "x", True]
    draft = Draft({"a": "2.5", "b": True, "c": "no", "d": -1}, dict.fromkeys("abcde"))
    assert [draft.number(name) for name in "abcde"] == [2.5, 0, 0, -1, 0]
    assert [draft.count(name) for name in "ade"] == [2, 0, 0]
    assert [draft.on(name) for name in "abcde"] == [True, True, False, True, False]
    assert draft.refusals == [
        "b = True: expected a number",
        "c = no: expected a number",
        "a = 2.5: expected a whole number",
    ]
