"""JSON and TOML within limits: integers, depth, and the time of what parsers do slowly."""

from __future__ import annotations

import time

import pytest
from messages import refused

from titanlite.runtime.documents import (
    DEEPEST,
    MOST_TOML,
    parse_json,
    parse_toml,
    read_json,
    read_toml,
)

LAST = 2**63 - 1
TOO_LARGE = "an integer of more than 64 bits"


@pytest.mark.parametrize(
    "text",
    [
        str(2**63),
        str(-(2**63) - 1),
        "9" * 5000,
        "0x" + "f" * 6000,
        "0x8000_0000_0000_0000",
        "0o" + "7" * 6000,
        "0b" + "1" * 64,
        "[1, {b = 0x" + "f" * 17 + "}]",
    ],
)
def test_an_integer_of_toml_has_64_bits_in_every_base(text):
    with refused(TOO_LARGE, error=ValueError):
        parse_toml(f"a = {text}")


def test_the_largest_and_the_smallest_integers_are_read():
    text = f"a = {LAST}\nb = {-(2**63)}\nc = 0x7fff_ffff_ffff_ffff\nd = 0b{'1' * 63}"
    assert parse_toml(text) == {"a": LAST, "b": -(2**63), "c": LAST, "d": LAST}
    assert parse_json(f"[{LAST}, {-(2**63)}]") == [LAST, -(2**63)]


def test_a_larger_integer_of_json_is_a_float():
    """transformers writes 10^30 as the length of a model without a limit."""
    values = parse_json('{"model_max_length": 1000000000000000019884624838656}')
    assert values == {"model_max_length": 1e30}
    assert type(values["model_max_length"]) is float
    assert parse_json("9" * 400) == float("inf")
    assert parse_json(f"[{2**63}, {'9' * 6000}]") == [2.0**63, float("inf")]


@pytest.mark.parametrize("levels", [DEEPEST, DEEPEST + 1, 500, 100_000])
def test_levels_are_limited_whatever_the_parser_bears(levels):
    texts = {
        parse_json: "[" * levels + "]" * levels,
        parse_toml: "a = " + "[" * (levels - 1) + "]" * (levels - 1),
    }
    for parse, text in texts.items():
        if levels <= DEEPEST:
            parse(text)
            continue
        with refused(f"nested more than {DEEPEST} levels deep", error=ValueError):
            parse(text)
    with refused("nested more than", error=ValueError):
        parse_json('{"a":' * 70 + "1" + "}" * 70)


LONG = "a." * 30_000 + "a"
KEYS = {
    "bare": f"{LONG} = 1",
    "a header": f"[{LONG}]",
    "quoted": '"\\"a" . ' * 10_000 + "a = 1",
    "literal": "'#' .\t" * 10_000 + "a = 1",
    "in a table": f"x = {{{LONG} = 1}}",
    # What a scanner may take for the end of a string, or for its beginning
    "after quotes": f'x = {{a = """"x"""", {LONG} = 1}}',
    "after a comment": f"# \"\"\"\n{LONG} = 1\n# '''",
    "after an escape": f'x = "\\\\"\n{LONG} = 1\ny = "\\""',
    "after a literal": f"x = '\\'\n{LONG} = 1",
    "after lines": f"x = '''a'\n''''\n{LONG} = 1",
}


@pytest.mark.parametrize("text", KEYS.values(), ids=KEYS)
def test_a_key_of_many_parts_is_refused_at_once(text):
    """tomllib alone takes a minute and 4 GB for such a key."""
    started = time.process_time()
    with refused(f"a key of more than {DEEPEST} parts", error=ValueError):
        parse_toml(text)
    assert time.process_time() - started < 2


def test_dots_elsewhere_do_not_count():
    dots = "a.b" * 200
    numbers = ", ".join(["1.5"] * 200)
    text = f'a = "{dots}"\nb = [{numbers}]\nc = """\n{dots}\n"""  # {dots}\nd.e = "\\"{dots}"\n'
    table = parse_toml(text)
    assert table == {"a": dots, "b": [1.5] * 200, "c": f"{dots}\n", "d": {"e": f'"{dots}'}}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a = 2020-02-31", "Invalid date"),
        ("a = ", "Invalid value"),
        ("a = '" + "x" * MOST_TOML + "'", f"expected at most {MOST_TOML}"),
    ],
)
def test_wrong_toml_is_a_value_error(text, words):
    with refused(words, error=ValueError):
        parse_toml(text)


def test_files_have_a_limit_of_bytes(tmp_path):
    (tmp_path / "a.json").write_bytes(b"\xef\xbb\xbf[1]")
    assert read_json(tmp_path / "a.json") == [1]
    (tmp_path / "a.toml").write_bytes(b"\xef\xbb\xbfa = 1")
    assert read_toml(tmp_path / "a.toml") == {"a": 1}
    for read, name in ((read_json, "a.json"), (read_toml, "a.toml")):
        with refused("at most 3 bytes", error=OSError):
            read(tmp_path / name, 3)
    (tmp_path / "b.json").write_bytes(b"\xff\xfe\xff")
    with pytest.raises(ValueError, match="codec can't decode"):
        read_json(tmp_path / "b.json")
