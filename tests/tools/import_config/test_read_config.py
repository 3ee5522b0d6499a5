"""Files of other trainers as flat keys."""

from __future__ import annotations

import contextlib
import sys
import time

import pytest
from messages import refused

from titanlite.runtime.errors import ConfigError
from titanlite.tools.import_config import read_config
from titanlite.tools.import_config.read_config import flatten, is_small, read_arguments, read_table


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.json", '{"a": {"b-c": 1}, "d": [1, {"e": 2}], "f": {}}'),
        ("a.toml", 'd = [1, {e = 2}]\nf = {}\n[a]\nb-c = 1\n'),
        ("a.yml", "a:\n  b-c: 1\nd: [1, {e: 2}]\nf: {}\n"),
        ("a", "a:\n  b-c: 1\nd: [1, {e: 2}]\nf: {}\n"),
        ("a.conf", '{"a": {"b-c": 1}, "d": [1, {"e": 2}], "f": {}}'),
        ("a.cfg", 'd = [1, {e = 2}]\nf = {}\n[a]\nb-c = 1\n'),
    ],
)  # fmt: skip
def test_three_kinds_of_files_by_ending_and_by_content(name, text, tmp_path):
    (tmp_path / name).write_text(text)
    table = read_table(tmp_path / name)
    assert flatten(table) == {"a.b-c": 1, "d": [1, {"e": 2}], "f": {}}
    assert flatten(table, whole=("a",)) == {"a": {"b-c": 1}, "d": [1, {"e": 2}], "f": {}}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("--lr 1e-4 --bf16", {"lr": "1e-4", "bf16": True}),
        ("--lr=1e-4 --adam-beta1 0.9  # --seed 3", {"lr": "1e-4", "adam_beta1": "0.9"}),
        ("--data-path 1 a_b 2 c_d \\\n  --min-lr -1", {"data_path": "1 a_b 2 c_d", "min_lr": "-1"}),
        ("N=8\nexport M=${N}\nrun --a $N --b ${N} --c ${X:-4} --d $Y", {"a": "8", "b": "8", "c": "4", "d": "$Y"}),
        ('A=(\n  --a 1\n  --b "x"\n)\nB="--c 2 \\\n --d"\nrun $B --e 3 2>&1 | tee log', {
            "a": "1", "b": "x", "c": "2", "d": True, "e": "3"}),
        ("--a 1 && rm -rf /; --b $(date)", {"a": "1", "b": "$(date"}),
        ("--dashes-only --", {"dashes_only": "--"}),
        # A variable that is set twice has a value that only the shell knows
        ("N=8\nif x; then\nN=9\nfi\nrun --a $N --b 2 --b 2", {"a": "$N", "b": "2"}),
        ("N=8\nif x; then N=9; fi\nrun --a ${N:-7}", {"a": "${N:-7}"}),
        ("N=8\nN=$((N * 2))\nrun --a $N", {"a": "$N"}),
        ("N=8\n[ -n x ] && N=9\nrun --a $N", {"a": "$N"}),
        ("N=8\nfor N in 1 2; do\nrun --a $N\ndone", {"a": "$N"}),
        ("if x; then\nN=9\nfi\nrun --a $N", {"a": "$N"}),
        ("N=9\nif x; then\nM=1\nfi\nrun --a $N", {"a": "9"}),
        # What stands for arguments is read where it is set
        ('A="--a 1"\nB=(--b 2)\nrun x.py --c 3 $A "${B[@]}" --d', {"a": "1", "b": "2", "c": "3", "d": True}),
    ],
)  # fmt: skip
def test_arguments_are_read_and_nothing_is_run(text, expected):
    assert read_arguments(text) == expected


@pytest.mark.parametrize(
    ("name", "content", "parts"),
    [
        ("a.json", b"{", ["not JSON", "line 1"]),
        ("a.toml", b"= 3", ["not TOML"]),
        ("a.yaml", b"a: [1", ["not YAML"]),
        ("a.yaml", b"a: !!timestamp x", ["not YAML: a value that is not what its tag says"]),
        ("a.yaml", b"a: " + b"9" * 6000, ["not YAML", "more than 64 bits"]),
        ("a.yaml", b"a: !!python/object/apply:os.system [date]", ["not YAML", "python/object"]),
        ("a.yaml", b"\xff\xfe", ["not UTF-8"]),
        ("a.yaml", b"", ["no keys"]),
        ("a.json", b"[1, 2]", ["no keys"]),
        ("a.json", b'{"a":' * 20 + b"1" + b"}" * 20, ["tables within each other"]),
        ("a.json", b'{"a": [' + b"1," * 50_000 + b"1]}", ["more than 50000"]),
        ("a.yaml", b"a: " + b"x" * 70_000, ["70003 letters of YAML; expected at most 65536"]),
        ("a.toml", b"a = 0x" + b"f" * 6000, ["not TOML", "more than 64 bits"]),
        ("a.toml", b"a." * 30_000 + b"a = 1", ["not TOML", "a key of more than 64 parts"]),
        ("a.yaml", b"a: 0x" + b"f" * 6000, ["not YAML", "more than 64 bits"]),
        ("a.yaml", b"a: 0b" + b"1" * 6000, ["not YAML", "more than 64 bits"]),
        ("a.yaml", b"a: 0" + b"7" * 6000, ["not YAML", "more than 64 bits"]),
        ("a.yaml", b"a: " + b"59:" * 20_000 + b"59", ["not YAML", "more than 64 bits"]),
        ("a.yaml", b"a: " + b"9" * 30, ["not YAML", "more than 64 bits"]),
        ("a.yaml", b"- " * 30_000, ["not YAML"]),
        ("a.json", b"[" * 100_000, ["not JSON", "nested"]),
        ("a.sh", b"--a " + b"x" * 300_000, ["300004 letters of arguments", "262144"]),
        ("a.sh", b"x --lr 1 \\\n --lr 2", ["not arguments", "--lr has two values, 1 and 2"]),
        ("a.sh", b"x.py --lr 1 \\\n $MORE --bf16", ["not arguments: $MORE: arguments that the file"]),
        ("a.sh", b"A='--lr 1'\nx.py $A \"$@\"", ['"$@": arguments that the file does not have']),
        ("a.sh", b"x.py $(cat more) --lr 1", ["$(cat: arguments that the file does not have"]),
        ("a.sh", b"A='--lr 1'\nif y; then\nA='--bf16'\nfi", ["--bf16 stands under a condition"]),
        ("a.sh", b"A='--lr 1'\n[ y ] && A='--bf16'", ["--bf16 stands under a condition"]),
        ("a.json", b'{"a": {"b": 1, "c": 2, "b": 1}}', ["not JSON: b stands twice in one object"]),
        ("a.json", b'{"a.b": 1, "a": {"b": 2}}', ["a.b stands twice"]),
        ("a.yaml", b"a: &a [x, x, x]\nb: &b [*a, *a, *a, *a]\n"
         + b"".join(b"%c: &%c [*%c, *%c, *%c, *%c]\n" % (n, n, *[n - 1] * 4) for n in range(99, 115)),
         ["more than 50000"]),
    ],
)  # fmt: skip
def test_bad_files_give_one_clear_error(name, content, parts, tmp_path):
    (tmp_path / name).write_bytes(content)
    with refused(name, *parts):
        read_table(tmp_path / name)


def test_a_file_that_is_not_there_and_yaml_without_its_package(tmp_path, monkeypatch):
    with refused("missing.json", "No such file"):
        read_table(tmp_path / "missing.json")
    (tmp_path / "a.yaml").write_text("a: 1")
    monkeypatch.setitem(sys.modules, "yaml", None)
    with refused("YAML needs the package PyYAML", "pip install pyyaml"):
        read_table(tmp_path / "a.yaml")


def test_elements_of_lists_and_tables_count():
    assert is_small([1, {"a": [2]}, (3,)])
    assert not is_small({"a": [0] * 50_000})


SLOW = {
    "lines after an argument": b"--a 1" + b"\n" * 65_000,
    "lines without arguments": b"\n" * 4_000_000,
    "spaces after a variable": (b"A=1" + b" " * 900) * 70,
    "unclosed variables": b"--a " + b"${a:-" * 20_000,
    "exports": b"--a 1\n" + b"export " * 35_000,
    "open tables": b"[" * 65_000,
    "a long word": b"--a " + b"x" * 250_000,
    "conditions": b"--a 1\n" + b"if\nfi\nA=1\n" * 24_000,
    "names of one object": b"{" + b"".join(b'"%d":1,' % i for i in range(200_000)) + b'"199999":1}',
    "quotes": b"--a " + b"'\"" * 120_000,
}


@pytest.mark.parametrize("content", SLOW.values(), ids=SLOW)
def test_no_file_takes_more_than_seconds(content, tmp_path):
    """Whatever is read or refused: a regular expression begins once at each character."""
    (tmp_path / "a").write_bytes(content)
    started = time.process_time()
    with contextlib.suppress(ConfigError):
        read_table(tmp_path / "a")
    assert time.process_time() - started < 4


def test_merged_tables_of_yaml_have_a_limit(tmp_path, monkeypatch):
    pytest.importorskip("yaml")
    monkeypatch.setattr(read_config, "MOST", 5)
    (tmp_path / "a.yaml").write_text(
        "a: &a {b: 1, c: 2, d: 3}\ne:\n  <<: *a\n  f: 4\n  g: 5\n  h: 6\n"
    )
    with refused("a.yaml", "a table of more than 5 keys"):
        read_table(tmp_path / "a.yaml")
