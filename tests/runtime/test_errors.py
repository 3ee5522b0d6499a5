"""Texts of others in messages and on a terminal."""

from __future__ import annotations

import unicodedata

from titanlite.runtime.errors import for_terminal, printable


def test_a_terminal_gets_no_control_character_but_tab_and_newline():
    """By the categories of Unicode, in the plane that has them all: controls, halves of characters, other lines; and by hand what
    turns the direction of a text.
    """
    turns = {*range(0x202A, 0x202F), *range(0x2066, 0x206A)}
    for code in range(1 << 16):
        character = chr(code)
        is_control = unicodedata.category(character) in ("Cc", "Cs", "Zl", "Zp") or code in turns
        is_kept = not is_control or character in "\t\n"
        shown = for_terminal(character)
        assert (shown == character) == is_kept, hex(code)
        assert is_kept or printable(shown) == shown
    # Spaces and joiners that scripts need, which are not `isprintable`
    assert for_terminal("日\u3000本\xa0👩\u200d💻\n") == "日\u3000本\xa0👩\u200d💻\n"
    assert for_terminal("\x1b[2J\r\x9b1A") == "\\x1b[2J\\r\\x9b1A"
