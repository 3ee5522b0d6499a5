"""The merge can be interrupted at any of its steps, and repeated."""

from __future__ import annotations

from pathlib import Path

import pytest
from messages import refused
from preparing import TOKENIZER, content, documents_of, prepared, text_of

from titanlite.data.prepared_manifest import read_manifest
from titanlite.tools.cli.main import main
from titanlite.tools.cli.prepare_command import run
from titanlite.tools.prepare import job as jobs
from titanlite.tools.prepare import merge as module
from titanlite.tools.prepare import rows
from titanlite.tools.prepare.build import Options, build, working_folder
from titanlite.tools.prepare.duplicates import DuplicateConfig
from titanlite.tools.prepare.filter_report import FilterReport
from titanlite.tools.prepare.filters import FilterConfig
from titanlite.tools.prepare.job import File, Job
from titanlite.tools.prepare.merge import check_bad_rows
from titanlite.tools.prepare.plan_job import Settings
from titanlite.tools.prepare.records import PartRecord
from titanlite.tools.prepare.sources import Source, find


@pytest.mark.slow
@pytest.mark.parametrize("step", range(12))
def test_an_interrupted_merge_goes_on(tmp_path, monkeypatch, step):
    (tmp_path / "a.txt").write_text("".join(f"line {i}\n" for i in range(1000)))
    source = Source(str(tmp_path / "a.txt"))
    steps = iter(range(100))

    def interrupt(function):
        def run(*arguments, **options):
            if next(steps) == step:
                raise KeyboardInterrupt
            return function(*arguments, **options)

        return run

    def attempt(folder: Path) -> None:
        build(
            [(source, find(source))],
            TOKENIZER,
            folder,
            Options(Settings(parts=3)),
            lambda text: None,
        )

    attempt(tmp_path / "whole")
    with monkeypatch.context() as patch:
        patch.setattr(module, "replace_file", interrupt(module.replace_file))
        patch.setattr(module, "sync_folder", interrupt(module.sync_folder))
        for name in ("unlink", "rename"):
            patch.setattr(Path, name, interrupt(getattr(Path, name)))
        try:
            attempt(tmp_path / "out")
        except KeyboardInterrupt:
            assert not (tmp_path / "out").exists() or content(tmp_path / "out") == content(
                tmp_path / "whole"
            )
    if not (tmp_path / "out").exists():
        attempt(tmp_path / "out")
    assert content(tmp_path / "out") == content(tmp_path / "whole")


def test_the_first_of_equal_documents_stays(tmp_path):
    texts = tmp_path / "texts"
    texts.mkdir()
    for i in range(40):
        (texts / f"{i:02}.txt").write_text(f"text {i % 25}\n")
    folder = prepared(tmp_path / "out", texts, "--pattern", "*.txt", "--drop-duplicates", "exact")
    assert sorted(documents_of(folder)) == sorted(f"text {i}\n" for i in range(25))


@pytest.mark.parametrize("remove", ["none", "exact"])
def test_lines_are_counted_for_the_rows_that_are_shown_only(tmp_path, monkeypatch, remove):
    """Not by each part, which would read the file up to its own start."""
    counted, first_row_number = [], rows.first_row_number
    monkeypatch.setattr(
        rows, "first_row_number", lambda *a: counted.append(a) or first_row_number(*a)
    )
    monkeypatch.setattr(jobs, "CUT", 100)
    kinds = [
        '{"text": "some text %d"}',
        "broken %d",
        '{"text": "%d"}',
        '{"text": "a third text %d"}',
    ]
    lines = [kinds[i % 4] % i if i > 100 else '{"text": "the start %d"}' % i for i in range(300)]  # noqa: UP031
    path = tmp_path / "a.jsonl"
    path.write_text("".join(f"{line}\n" for line in lines))
    source, duplicates = Source(str(path)), DuplicateConfig(remove)
    options = Options(
        Settings(9, FilterConfig(min_chars=5), duplicates), workers=1, max_bad_rows=0.5
    )
    build([(source, find(source))], TOKENIZER, tmp_path / "out", options, lambda text: None)
    manifest = read_manifest(tmp_path / "out")
    assert [example.split(":")[1] for example in manifest["rows"]["examples"]] == [
        "102",
        "106",
        "110",
        "114",
        "118",
    ]
    assert [e["row"] for e in manifest["filters"]["rules"]["min_chars"]["examples"]] == [
        103,
        107,
        111,
    ]
    assert len(counted) == 5 + 3  # bad rows and those of the rule


@pytest.mark.parametrize("remove", ["exact", "near"])
@pytest.mark.parametrize("parts", [1, 3])
def test_held_out_documents_stay_and_their_training_copies_go(tmp_path, remove, parts):
    names = {"train": "abcde", "held_out": "bdfb"}
    for name, letters in names.items():
        rows = "".join(f'{{"text": "text {letter}"}}\n' for letter in letters)
        (tmp_path / f"{name}.jsonl").write_text(rows)
    sources = (
        tmp_path / "train.jsonl",
        "--validation",
        tmp_path / "held_out.jsonl",
        "--drop-duplicates",
        remove,
    )
    folder = tmp_path / "out"
    for _ in range(2 if parts > 1 else 0):
        for part in range(1, parts + 1):
            assert (
                main(
                    [
                        "prepare",
                        *map(str, sources),
                        "--out",
                        str(folder),
                        "--part",
                        f"{part}/{parts}",
                    ]
                )
                == 0
            )
        assert main(["prepare", "--merge", str(folder)]) == 0
    if parts == 1:
        prepared(folder, *sources)
    for split, letters in (("train", "ace"), ("validation", "bdf")):
        found = text_of(folder, split).replace("<|end_of_text|>", "").split("<|begin_of_text|>")[1:]
        assert found == [f"text {letter}" for letter in letters]


@pytest.mark.parametrize(
    ("limit", "allowed"), [(0.05, True), (0.04, False), (5, True), (4, False), (0, False)]
)
def test_the_limit_is_a_share_or_a_number(limit, allowed):
    example = {"file": "a", "row": 0, "begin": 0, "text": "x"}
    records = [PartRecord(40, 4, [example], FilterReport()), PartRecord(60, 1, [], FilterReport())]
    job = Job("x", ("/",), (File("a", "a", 9, 0, "jsonl", "", "hash"),), "text", "", "", "", 1)
    if allowed:
        check_bad_rows(job, records, limit)
    else:
        with refused("5 of 100", "--max-bad-rows", "a:1: x"):
            check_bad_rows(job, records, limit)


def test_an_incomplete_shard_is_not_published(tmp_path):
    (tmp_path / "text").mkdir()
    (tmp_path / "text/a.txt").write_text("".join(f"a longer line {i}\n" for i in range(1000)))
    (tmp_path / "text/b.txt").write_text("".join(f"line {i}\n" for i in range(1000)))
    sources, folder = ["prepare", str(tmp_path / "text"), "--out"], tmp_path / "out"
    for out in ("whole", "out"):
        for part in ("1/2", "2/2"):
            assert main([*sources, str(tmp_path / out), "--part", part]) == 0
    assert main(["prepare", "--merge", str(tmp_path / "whole")]) == 0
    shard = working_folder(folder) / "train-00001.bin"
    shard.write_bytes(shard.read_bytes()[:50])
    with refused(str(shard), "50 bytes", "--part 2/2"):
        run(["--merge", str(folder)])
    assert not folder.exists()
    with refused("1 of 2 parts", "2/2"):
        run(["--merge", str(folder)])
    assert main([*sources, str(folder), "--part", "2/2"]) == 0
    assert main(["prepare", "--merge", str(folder)]) == 0
    assert content(folder) == content(tmp_path / "whole")
    (folder / shard.name).write_bytes(b"damaged after the merge")
    with refused(shard.name, "23 bytes"):
        run(["--merge", str(folder)])


def test_what_was_dropped_is_shown_if_nothing_is_left(tmp_path, capsys):
    (tmp_path / "a.txt").write_text("some text\n")
    with refused("no document is left"):
        run([str(tmp_path / "a.txt"), "--out", str(tmp_path / "out"), "--min-chars", "99999"])
    assert "min_chars: 1 documents" in capsys.readouterr().err
    prepared(tmp_path / "out", tmp_path / "a.txt")  # the mistake does not stand in the way
