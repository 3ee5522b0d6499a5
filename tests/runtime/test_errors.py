"""Messages: ours are whole, texts of others are cut visibly and cannot control a terminal."""

from __future__ import annotations

import re
import unicodedata
from pathlib import Path

from titanlite.runtime.errors import ConfigError, for_terminal, printable, reason_of, shortened

PATH_MAX = 4096  # bytes, on Linux
PACKAGE = Path(__file__).parents[2] / "titanlite"


def test_a_problem_with_two_of_the_longest_paths_is_whole():
    path = "/" + "p" * (PATH_MAX - 1)
    problem = f"{path}: is not a link to {path}; expected one"
    error = ConfigError([problem, "another"])
    assert error.problems == [problem, "another"]
    assert reason_of(error) == f"{problem}; another"


def test_texts_of_files_are_cut_visibly():
    assert reason_of(ValueError("v" * 1000)) == "v" * 200 + "..."
    assert shortened("value", 5) == "value"
    assert len(ConfigError("x" * 1_000_000).problems[0]) < 20_000


def test_no_word_of_python_about_its_types_reaches_a_message():
    def words(program: str) -> str:
        try:
            eval(program)
        except Exception as error:
            return reason_of(error)
        raise AssertionError

    kind = "a value of another type than expected"
    assert words("[].get('x')") == words("'a' // 4") == words("[][None]") == kind
    assert words("1 // 0") == words("2.0 ** 5000") == "a number that is not possible there"
    assert words("{}['step']") == "it has no 'step'"
    assert words("[][3]") == "a list that is too short"
    assert words("open('/nowhere/x')") == "No such file or directory"


def test_no_file_cuts_the_text_of_an_error_that_may_be_ours():
    """The child process that reads pickles raises none of ours."""
    cutting = {
        path.name
        for path in PACKAGE.rglob("*.py")
        if re.search(r"str\(error\)\)*\[:", path.read_text())
    }
    assert cutting <= {"pickle_reader.py"}


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
