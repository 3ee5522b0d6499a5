"""`titanlite prepare`: its forms, its options, and one line for each kind of damaged input."""

from __future__ import annotations

import gzip
import json
import shutil
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from messages import refused
from preparing import documents_of, prepared, write_megatron

from titanlite.data.prepared_manifest import read_manifest
from titanlite.runtime.errors import ConfigError
from titanlite.tokenizer.tokenizer import BUNDLED
from titanlite.tools.chat.template import PLAIN
from titanlite.tools.cli.main import main
from titanlite.tools.cli.prepare_command import run
from titanlite.tools.prepare import job

ROW = '{"text": "a good row"}\n'
ZSTD = zstandard.ZstdCompressor().compress


def table(columns: dict) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table(columns), sink)
    return sink.getvalue().to_pybytes()


def flipped(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 0xFF]) + data[at + 1 :]


def llmc(count: int, ids: bytes) -> bytes:
    return struct.pack("<3i", 20240520, 1, count) + bytes(1012) + ids


def megatron(folder: Path, damage: tuple[str, int, bytes]) -> None:
    """A Megatron file whose .bin or .idx has other bytes at an offset; None at the offset: cut
    there.
    """
    write_megatron(folder / "ids", [[1, 2, 3], [4, 5], [6] * 20])
    suffix, offset, new = damage
    path = folder / f"ids{suffix}"
    data = path.read_bytes()
    path.write_bytes(data[:offset] + new + data[offset + len(new) :] if new else data[:offset])


IDS = np.arange(1000, dtype="<u2").tobytes()
PARQUET = table({"text": [f"row {i}" for i in range(500)]})
# (files or a function that makes them, the source, options, what the error must name)
DAMAGED = {
    "no such file": ({}, "absent.txt", "no such file or folder"),
    "an empty file": ({"a.txt": b""}, "a.txt", "the file is empty"),
    "a folder of empty files": ({"d/a.txt": b"", "d/b.txt": b""}, "d", "its 2 files are empty"),
    "an empty folder": ({"d/.hidden": b"x"}, "d", "no file matches"),
    "text with a byte that is not UTF-8": ({"a.txt": b"caf\xe9\n" * 9}, "a.txt", "not UTF-8 text"),
    "the same far from the start": (
        {"a.txt": b"good\n" * 9999 + b"\xff"},
        "a.txt",
        "near byte 49995",
    ),
    "text with NUL": ({"a.txt": b"a\0b"}, "a.txt", "NUL"),
    "NUL far from the start": ({"a.txt": b"good\n" * 9999 + b"\0"}, "a.txt", "near byte 49995"),
    "UTF-16": ({"a.txt": "text".encode("utf-16")}, "a.txt", "UTF-16"),
    "an image among text": ({"d/a.txt": b"x", "d/b.png": b"\x89PNG\r\n\0\0"}, "d", "b.png"),
    "a zip archive": ({"a.zip": b"PK\x03\x04"}, "a.zip", "zip"),
    "a pickle": ({"a.pkl": b"\x80\x04\x95"}, "a.pkl", "pickle"),
    "a JSON array": ({"a.json": b'[{"text": "one"}]'}, "a.json", "JSON array"),
    "lines that are not JSON": ({"a.jsonl": b"one\ntwo\n"}, "a.jsonl", "none of its first 2 lines"),
    "rows without the field": ({"a.jsonl": b'{"content": "x"}\n'}, "a.jsonl", "it has content"),
    "a broken row": ({"a.jsonl": f"{ROW}{{broken\n".encode()}, "a.jsonl", "a.jsonl:2: not JSON"),
    "a row that is cut off": (
        {"a.jsonl": f'{ROW}{{"text": "x'.encode()},
        "a.jsonl",
        "a.jsonl:2: not JSON",
    ),
    "a row that is not UTF-8": (
        {"a.jsonl": ROW.encode() + b'{"text": "\xff"}\n'},
        "a.jsonl",
        "a.jsonl:2: not UTF-8",
    ),
    "a row that is a list": (
        {"a.jsonl": f"{ROW}[1]\n".encode()},
        "a.jsonl",
        "a.jsonl:2: expected an object",
    ),
    "a row without the field": (
        {"a.jsonl": f'{ROW}{{"b": 1}}\n'.encode()},
        "a.jsonl",
        "a.jsonl:2: no field 'text'",
    ),
    "a number as text": (
        {"a.jsonl": f'{ROW}{{"text": 1}}\n'.encode()},
        "a.jsonl",
        "a.jsonl:2: field 'text' is of type",
    ),
    "half a surrogate pair": (
        {"a.jsonl": f'{ROW}{{"text": "\\ud800"}}'.encode()},
        "a.jsonl",
        "a.jsonl:2: field 'text'",
    ),
    "a nesting without end": (
        {"a.jsonl": f"{ROW}{'[' * 99999}".encode()},
        "a.jsonl",
        "a.jsonl:2: not JSON",
    ),
    "gzip that is cut off": (
        {"a.gz": gzip.compress(ROW.encode() * 9999, mtime=0)[:-9]},
        "a.gz",
        "damaged gzip data",
    ),
    "gzip with another byte": (
        {"a.gz": flipped(gzip.compress(ROW.encode() * 9, mtime=0), 30)},
        "a.gz",
        "a.gz: ",
    ),
    "zstd that is cut off": (
        {"a.zst": ZSTD(bytes(range(97, 123)) * 9999)[:-3]},
        "a.zst",
        "a.zst: ",
    ),
    "zstd with garbage": (
        {"a.zst": ZSTD(ROW.encode() * 9999) + b"garbage"},
        "a.zst",
        "damaged zstd data",
    ),
    "Parquet that is cut off": ({"a.parquet": PARQUET[:-9]}, "a.parquet", "damaged Parquet data"),
    "Parquet with other bytes": (
        {"a.parquet": PARQUET[:20] + b"zzzz" * 9 + PARQUET[56:]},
        "a.parquet",
        "a.parquet: ",
    ),
    "Parquet without the column": (
        {"a.parquet": table({"texts": ["a"]})},
        "a.parquet",
        "did you mean texts",
    ),
    "a column of numbers": ({"a.parquet": table({"text": [1]})}, "a.parquet", "type int64"),
    "an odd byte count": ({"a.bin": IDS + b"\1"}, "a.bin", "not a whole number of 2-byte ids"),
    "ids beyond the vocabulary": ({"a.bin": IDS + b"\xff\xff"}, "a.bin", "id 65535 at byte 2000"),
    "llm.c's ids, cut off": (
        {"a.bin": llmc(1001, IDS)},
        "a.bin",
        "1001 ids at byte 8, but 1000 follow",
    ),
    "Megatron's ids, cut off": (
        lambda f: megatron(f, (".bin", 40, b"")),
        "ids.bin",
        "sequence 2, at byte",
    ),
    "Megatron's index, cut off": (
        lambda f: megatron(f, (".idx", 50, b"")),
        "ids.bin",
        "ids.idx: 50 bytes, expected",
    ),
    "an index of another version": (
        lambda f: megatron(f, (".idx", 9, b"\2")),
        "ids.bin",
        "version 1",
    ),
    "an index of floats": (
        lambda f: megatron(f, (".idx", 17, b"\7")),
        "ids.bin",
        "type 7 at byte 17",
    ),
    "an index without ids": (
        {"ids.idx": b"MMIDIDX\0\0" + bytes(25)},
        "ids.idx",
        "give their file",
    ),
    "ids of datatrove without an index": (
        {"a.ds": IDS},
        "a.ds",
        "without a.ds.index",
    ),
    "a data set that is not there": ({}, "hf:./no/such/folder/at/all", "no such folder"),
}


@pytest.mark.parametrize("what", DAMAGED)
def test_damaged_input_is_one_error(tmp_path, monkeypatch, capfd, what):
    make, source, problem = DAMAGED[what]
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    if callable(make):
        make(tmp_path)
    for name, data in make.items() if isinstance(make, dict) else ():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(data)
    assert main(["prepare", source, "--out", "out", "--max-bad-rows", "0"]) == 2
    errors = [line for line in capfd.readouterr().err.splitlines() if line.startswith("error: ")]
    assert problem in "\n".join(errors)
    assert Path(source).stem in "\n".join(errors)
    assert len(errors) <= 2  # how many rows are bad, and the first of them
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.rglob("*.tmp-*"))


def test_a_prepared_folder_is_used_as_it_is(tmp_path):
    (tmp_path / "a.jsonl").write_text(ROW * 30)
    folder = prepared(tmp_path / "data", tmp_path / "a.jsonl")
    before = sorted(folder.iterdir())
    assert (
        main(["prepare", "debug", f"--data.path={folder}", f"--data.cache={tmp_path / 'cache'}"])
        == 0
    )
    assert sorted(folder.iterdir()) == before
    assert not (tmp_path / "cache").exists()


def test_rows_are_prepared_from_a_config(tmp_path, capsys):
    (tmp_path / "a.jsonl").write_text(
        "".join(json.dumps({"text": f"row {i}"}) + "\n" for i in range(100))
    )
    assert (
        main(
            [
                "prepare",
                "--data.path",
                str(tmp_path / "a.jsonl"),
                f"--data.cache={tmp_path / 'cache'}",
            ]
        )
        == 0
    )
    folder = Path(capsys.readouterr().out.strip())
    assert sorted(documents_of(folder)) == sorted(f"row {i}" for i in range(100))


def test_a_local_data_set(tmp_path, monkeypatch, capfd):
    pytest.importorskip("datasets")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "hf"))
    (tmp_path / "set").mkdir()
    for i in range(3):
        rows = "".join(
            json.dumps({"text": f"row {i} {j}", "more": "x" * 9999}) + "\n" for j in range(20)
        )
        (tmp_path / f"set/train-{i}.jsonl").write_text(rows)
    size = sum(path.stat().st_size for path in (tmp_path / "set").iterdir())
    folder = prepared(tmp_path / "data", f"hf:{tmp_path / 'set'}", "--workers", 1)
    assert f"3 files, {size / 1e6:.1f} MB from hf:" in capfd.readouterr().err
    assert read_manifest(folder)["bytes"] == size
    assert sorted(documents_of(folder)) == sorted(
        f"row {i} {j}" for i in range(3) for j in range(20)
    )
    with refused("--field = 'nope'", "it has text"):
        run([f"hf:{tmp_path / 'set'}", "--field=nope", f"--out={tmp_path / 'other'}"])
    (tmp_path / "set/train-1.jsonl").write_text(rows)
    with refused(str(folder), "other files or options"):
        run([f"hf:{tmp_path / 'set'}", f"--out={folder}"])


@pytest.mark.slow
@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)]
)
def test_a_signal_ends_it_with_advice(tmp_path, monkeypatch, capfd, number):
    (tmp_path / "a.jsonl").write_text(ROW * 20_000)
    code = (
        "import sys; from titanlite.tools.prepare import job; job.PART, job.CUT = 10_000, 5_000; "
    )
    code += "from titanlite.tools.cli.main import main; sys.exit(main(sys.argv[1:]))"
    command = [
        sys.executable,
        "-c",
        code,
        "prepare",
        str(tmp_path / "a.jsonl"),
        "--out",
        str(tmp_path / "out"),
    ]
    options = {"cwd": Path(__file__).parents[3], "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([*command, "--workers", "2"], **options) as process:
        deadline = time.monotonic() + 60
        while not list(tmp_path.glob(".out.parts-*/part-*.json")):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.01)
        process.send_signal(number)
        lines = process.communicate(timeout=60)[1].splitlines()
    assert process.returncode == 128 + number
    assert lines[-1] == "stopped; the same command goes on with what is missing"
    assert not any("Traceback" in line for line in lines)
    done = list(tmp_path.glob(".out.parts-*/part-*.json"))
    monkeypatch.setattr(job, "PART", 10_000)
    monkeypatch.setattr(job, "CUT", 5_000)
    prepared(tmp_path / "out", tmp_path / "a.jsonl", "--workers", 1)
    assert f"going on: {len(done)} of " in capfd.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["a", "--out", "b", "--patern", "*.txt"], ["--patern", "did you mean --pattern"]),
        (["a", "--out", "b", "--max-bad-rows", "x"], ["--max-bad-rows", "'x'"]),
        (["--out", "b"], ["SOURCE"]),
        (["--inspect", "a", "--out", "b"], ["--inspect", "--out"]),
        (["."], ["'.'", "--out FOLDER"]),
        (["python-stdlib", "--out", "."], ["exists", "--out"]),
    ],
)
def test_wrong_options_are_named(tmp_path, monkeypatch, arguments, parts):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as caught:
        run(arguments)
    assert [part for part in parts if part not in str(caught.value)] == []


def test_help(capsys):
    with pytest.raises(SystemExit) as caught:
        run(["--help"])
    assert caught.value.code == 0
    shown = capsys.readouterr().out
    for option in (
        "--out",
        "--field",
        "--inspect",
        "--drop-duplicates",
        "hf:NAME",
    ):
        assert option in shown


def test_chat_says_which_tokenizer_and_template_it_used(tmp_path, capsys):
    rows = tmp_path / "chats.jsonl"
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    rows.write_text((json.dumps({"messages": messages}) + "\n") * 30)
    assert main(["prepare", str(rows), "--chat", "--out", str(tmp_path / "a")]) == 0
    said = capsys.readouterr().err
    assert "tokenizer: the bundled one of 4,096 tokens (--tokenizer names another)" in said
    assert "chat template: a plain one (--template names another)" in said
    folder = tmp_path / "model"
    folder.mkdir()
    shutil.copy(BUNDLED, folder)
    (folder / "chat_template.jinja").write_text(PLAIN.replace("user", "user "))
    command = ["prepare", str(rows), "--chat", "--tokenizer", str(folder / BUNDLED.name)]
    assert main([*command, "--out", str(tmp_path / "b")]) == 0
    path = folder / BUNDLED.name
    assert f"tokenizer: {path}; chat template: that beside {path}\n" in capsys.readouterr().err
