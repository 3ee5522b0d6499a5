"""Mutates files and messages, for the fuzzer.

What it is: changes of any bytes; of words, lines and values where the input is text or JSON; and of
operations where it is a pickle. Most are small, so that what comes before and after is still read;
some repeat a part a thousand times.
"""

from __future__ import annotations

import json
import pickletools
import random
import re
import struct
from collections.abc import Callable
from typing import Any

LARGEST = 1 << 20  # bytes of an input
HOSTILE = rb"""0 -1 1 2 -0.0 1.5 1e400 -1e999 1e-400 NaN -Infinity null true false inf nan 0x10 1_000 = -- [] {} [[]]
[0] [0,1] {"":0} {"a":{"a":0}} {a=1} "" '' "\u0000" "\ud800" "\u001b[2J\n" "../outside" "/etc/passwd" "/dev/zero" "."
"1" "1e999" "F64" 1979-05-27T07:32:00Z""".split()
HOSTILE += [b"9" * 400, b"9" * 5000, b"[" * 500 + b"]" * 500, b" " * 5000]
HOSTILE += [
    b"[" * 100_000 + b"]" * 100_000,
    b'{"a":' * 50_000,
    b'"' + b"x" * 3000 + b'"',
    b'"' + b"x" * 300_000 + b'"',
]
HOSTILE += [b"0x" + b"f" * 6000, b"0o" + b"7" * 6000, b"0b" + b"1" * 6000, b"0x" + b"f" * 16]
HOSTILE += [b"a." * 4000 + b"a = 1", b"${a:-" * 3000, b"\n" * 5000, b"59:" * 3000 + b"59"]
HOSTILE += [b"\xff\xfe", b"\x00", b"\r\n", b"\n", b"\xe2\x80\xa8", b"\xef\xbb\xbf", b"\x1b[2J"]
HOSTILE += [
    str(2**n + d).encode() for n in (8, 16, 24, 31, 32, 53, 61, 62, 63, 64, 128) for d in (-1, 0)
]
OPCODES = [bytes([code]) for code in b"N012(t)\x85\x86\x87}]aesubR\x81Q.\x94\x88\x93o\x92"]
OPCODES += [
    b"K\xff",
    b"J\xff\xff\xff\xff",
    b"\x8a\x08" + b"\xff" * 7 + b"\x7f",
    b"h\x00",
    b"cposix\nsystem\n",
]
OPCODES += [
    b"ctorch\nSize\n",
    b"\x8c\x04true\x85R",
    b"X\x00\x01\x00\x00" + b"x" * 256,
    b"r\x00\x00\x00\x10",
]
TOKEN = re.compile(rb'"(?:[^"\\\n]|\\.)*"|-?\d[\d.eE+_-]*|\w+|[^\w\s]|\n')


def mutate(data: bytes, kind: str, samples: list[bytes], chance: random.Random) -> bytes:
    kinds: list[Callable[..., bytes]] = [change_bytes]
    kinds += {
        "text": [change_tokens, change_lines, change_json] * 2,
        "pickle": [change_opcodes] * 4,
        "bytes": [],
    }[kind]
    for _ in range(chance.choice((1, 1, 1, 2, 2, 3, 6))):
        data = chance.choice(kinds)(data, samples, chance)[:LARGEST]
    return data


def change_bytes(data: bytes, samples: list[bytes], chance: random.Random) -> bytes:
    """Changes, inserts, deletes or repeats some bytes anywhere."""
    at = chance.randrange(len(data) + 1)
    end = min(len(data), at + chance.choice((1, 1, 2, 4, 8, 50, 1000)))
    other = chance.choice(samples)
    place = chance.randrange(len(other) + 1)
    number = chance.choice((0, 1, -1, 127, 255, 2**31 - 1, -(2**31), 2**62, 2**63 - 1))
    new = chance.choice((
        bytes([(data[at] ^ 1 << chance.randrange(8)) if at < len(data) else 0]) + data[at + 1 : end],
        chance.randbytes(chance.choice((1, 2, 8))),
        struct.pack("<q", number)[: chance.choice((1, 2, 4, 8))],
        b"",
        data[at:end] * chance.choice((2, 3, 100, 1000)),
        data[at:end] + chance.choice(HOSTILE),
        other[place : place + chance.choice((1, 8, 100, 5000))],
    ))  # fmt: skip
    return chance.choice((data[:at] + new + data[end:],) * 5 + (data[:at], data[at:]))


def change_tokens(data: bytes, samples: list[bytes], chance: random.Random) -> bytes:
    """Replaces, deletes, inserts or repeats words, numbers, strings and signs."""
    places = [match.span() for match in TOKEN.finditer(data[:50_000])] or [(0, len(data))]
    first = chance.randrange(len(places))
    begin, end = (
        places[first][0],
        places[min(len(places) - 1, first + chance.choice((0, 0, 0, 0, 1, 3, 10)))][1],
    )
    other = data[slice(*chance.choice(places))]
    new = chance.choice(
        (chance.choice(HOSTILE),) * 4
        + (other, b"", data[begin:end][:2000] * chance.choice((2, 3, 500)))
    )
    return data[:begin] + new + data[end:]


def change_lines(data: bytes, samples: list[bytes], chance: random.Random) -> bytes:
    """Replaces what follows the first `=`, `:` or space of a line, or removes, doubles, moves or
    exchanges lines.
    """
    lines = data.split(b"\n", 5000)
    at = chance.randrange(len(lines))
    line, other = lines[at], chance.choice(chance.choice(samples).split(b"\n"))
    head = re.match(rb"[^=: ]*(\s*[=:]\s*|\s+|)", line)
    assert head
    new = [[], [line, line], [line] * 300, [other], [line, other]]
    lines[at : at + 1] = chance.choice(new + [[head[0] + chance.choice(HOSTILE)]] * 8)
    return b"\n".join(lines)


def change_json(data: bytes, samples: list[bytes], chance: random.Random) -> bytes:
    """Replaces a value by a hostile one, or removes, renames, doubles or adds a key, where it is
    JSON.
    """
    try:
        tree = json.loads(data if len(data) < 50_000 else b"")
    except (ValueError, RecursionError):
        return change_lines(data, samples, chance)
    inner = [tree] if isinstance(tree, (dict, list)) and tree else []
    for holder in inner:
        inner += [
            v
            for v in (holder.values() if isinstance(holder, dict) else holder[:300])
            if v and type(v) in (dict, list)
        ]
    if not inner:
        return chance.choice(HOSTILE)
    holder: Any = chance.choice(inner)
    place = chance.choice(list(holder) if isinstance(holder, dict) else range(len(holder)))
    value, mark, action = holder[place], "@@", chance.randrange(8)
    new = chance.choice(HOSTILE)
    if action < 4:
        holder[place] = mark
    elif action == 4:
        del holder[place]
    elif action == 5 and isinstance(holder, dict):
        holder[
            chance.choice((*holder, "", "x", "\x1b[2J", "x" * 3000, "../x", "__class__", mark))
        ] = value
    elif action == 5:
        holder[place:place] = [value] * chance.choice((1, 2, 1000 if len(data) < 3000 else 3))
    elif action == 6:
        holder[place] = chance.choice(([value], {"x": value}, str(value), mark))
    else:
        source = chance.choice(inner)
        holder[place] = chance.choice(list(source.values()) if isinstance(source, dict) else source)
    try:
        return json.dumps(tree).encode().replace(f'"{mark}"'.encode(), new)
    except (ValueError, RecursionError):  # it holds itself now
        return data


def change_opcodes(data: bytes, samples: list[bytes], chance: random.Random) -> bytes:
    """Inserts, deletes, repeats or exchanges operations of a pickle."""

    def operations(program: bytes) -> list[bytes]:
        places = []
        try:
            places += (place for _, _, place in pickletools.genops(program))
        except Exception:
            places.append(len(program))
        return [program[a:b] for a, b in zip(places, [*places[1:], len(program)], strict=True)]

    own, other = operations(data), operations(chance.choice(samples))
    at = chance.randrange(len(own) + 1)
    end = at + chance.choice((0, 0, 1, 1, 2, 5))
    place = chance.randrange(len(other) + 1)
    new = chance.choice((
        [chance.choice(OPCODES)],
        [chance.choice(OPCODES)] * chance.choice((2, 100, 5000)),
        own[at:end] * chance.choice((0, 2, 1000)),
        other[place : place + chance.choice((1, 3, 20))],
    ))  # fmt: skip
    return b"".join(own[:at] + new + own[end:])
