"""Tables of fields, as text."""

from __future__ import annotations

from titanlite.tools.import_config.draft import REQUIRED
from titanlite.tools.import_config.table import ANY, by, leave, must, read_fields


def test_fields_have_a_default_and_other_values():
    text = 'a=1 b c=false|true d=required e=null|any f=["x"] g=1e-3 h="2" i=none'
    assert read_fields(text) == {
        "a": (1,), "b": (None,), "c": (False, True), "d": (REQUIRED,), "e": (None, ANY),
        "f": (["x"],), "g": (1e-3,), "h": ("2",), "i": ("none",),
    }  # fmt: skip
    assert list(read_fields("a b.c", under="t.")) == ["t.a", "t.b.c"]


def test_three_kinds_of_rows():
    left, _ = leave("why", "a=false|true b=2")
    assert (left.default, left.same, left.note, left.refuse) == (False, (False, True), "why", False)
    (refused,) = must("why", "c=1")
    assert (refused.same, refused.refuse) == ((1,), True)
    together = by(print, "run.seed", "how", "d=3 e")
    assert [(row.theirs, row.default, row.apply) for row in together] == [
        ("d", 3, print),
        ("e", None, print),
    ]
