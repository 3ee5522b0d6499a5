"""JSON as declared types: what fits is read, and the message names the place of what does not."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Annotated, Any, NamedTuple, TypedDict

import pytest

from titanlite.runtime.typed_json import Count, Sha256, typed


class Pair(NamedTuple):
    name: str
    size: Count
    more: str = ""


class Row(TypedDict):
    text: str
    mask: Pair | None


class LongRow(Row, total=False):
    begin: Count


@dataclass(frozen=True)
class Everything:
    pairs: tuple[Pair, ...]
    rows: list[LongRow]
    share: float
    limit: float | None = None
    kind: Annotated[str, re.compile("a|b")] = "a"
    names: dict[str, int] = field(default_factory=dict)
    digest: Sha256 = "0" * 64
    on: bool = False


VALID: dict[str, Any] = {
    "pairs": [["x", 1], ["y", 2, "z"]],
    "rows": [{"text": "", "mask": None}, {"text": "", "mask": ["x", 0], "begin": 5}],
    "share": 1,
}


def test_what_fits_is_read():
    found = typed(Everything, VALID | {"names": {"n": -1}, "on": True, "limit": 0.5, "kind": "b"})
    assert found.pairs == (Pair("x", 1), Pair("y", 2, "z"))
    assert isinstance(found.pairs[0], Pair)
    assert found.rows[1] == {"text": "", "mask": Pair("x", 0), "begin": 5}
    assert (found.share, found.limit, found.kind, found.names, found.on) == (
        1,
        0.5,
        "b",
        {"n": -1},
        True,
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pairs": {}}, "pairs: expected list, found dict"),
        ({"pairs": [["x"]]}, "pairs[0].size: is missing"),
        ({"pairs": [["x", 1, "y", "z"]]}, "pairs[0]: expected 3 items, found 4"),
        ({"pairs": [["x", True]]}, "pairs[0].size: expected int, found bool"),
        ({"pairs": [["x", -1]]}, "pairs[0].size: expected 0 to 4611686018427387903, found -1"),
        (
            {"pairs": [["x", 10**400]]},
            "pairs[0].size: expected an integer of 64 bits, found a larger one",
        ),
        ({"rows": [{"text": ""}]}, "rows[0].mask: is missing"),
        ({"rows": [{"text": "", "mask": None, "end": 1}]}, "rows[0].end: is not known"),
        ({"rows": [{"text": None, "mask": None}]}, "rows[0].text: expected str, found NoneType"),
        ({"share": "1"}, "share: expected float, found str"),
        ({"share": None}, "share: expected float, found NoneType"),
        ({"limit": [1]}, "limit: expected float, found list"),
        ({"kind": "c"}, "kind: expected a text as a|b, found 'c'"),
        ({"kind": "a\n"}, "kind: expected a text as a|b, found 'a\\n'"),
        ({"names": {"n": 1.0}}, "names.n: expected int, found float"),
        ({"digest": "F" * 64}, f"digest: expected a text as [0-9a-f]{{64}}, found '{'F' * 64}'"),
        ({"on": 1}, "on: expected bool, found int"),
        ({"other": 1}, "other: is not known"),
    ],
)
def test_the_place_of_what_does_not_fit_is_named(change, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        typed(Everything, VALID | change)


@pytest.mark.parametrize("value", [None, [], 1, "x"])
def test_the_file_is_an_object(value):
    with pytest.raises(ValueError, match=r"^the file: expected dict, found "):
        typed(Everything, value)
