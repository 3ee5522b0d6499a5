"""Runs on several sources: trained, stopped, resumed on another number of processes, and what may
change meanwhile.
"""

from __future__ import annotations

import dataclasses
import gzip
import json
import shutil
import signal

import pytest
from launches import finish, start, wait_for_step
from messages import assert_mentions, refused
from preparing import write_megatron
from runs import curve, rows, train_run, train_until

import train
from titanlite.checkpoint.manifest import Manifest, read_manifest
from titanlite.checkpoint.resume import require_compatible
from titanlite.config.load import load_config
from titanlite.data.prepared import description, load_sources
from titanlite.tokenizer.tokenizer import Tokenizer

NAMES = ("numbers", "words", "lists", "poem")
SOURCES = """
[data]
packing = "best_fit"
document_mask = true

[[data.sources]]
name = "numbers"
path = "{0}/numbers"
weight = 0.4

[[data.sources]]
path = "{0}/words"
weight = 0.3

[[data.sources]]
path = "{0}/lists"
weight = 0.2

[[data.sources]]
path = "{0}/poem.txt"
weight = 0

[[data.phases]]
from_step = 4
weights = {{ numbers = 0.1, words = 0.1, lists = 0.1, poem = 0.7 }}
"""


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """Three folders of documents of different lengths, and a file."""
    folder = tmp_path_factory.mktemp("corpus")
    words = {
        "numbers": "{0} + {1} = {2}\n",
        "words": "The word {0} is not {1}.\n",
        "lists": "[{0}, {1}, {2}]\n",
    }
    for name, line in words.items():
        (folder / name).mkdir()
        for document in range(60):
            lines = (line.format(i, document, i + document) for i in range(document % 13 + 1))
            (folder / name / f"{document}.txt").write_text("".join(lines))
    (folder / "poem.txt").write_text("".join(f"line {i} of a poem\n" for i in range(500)))
    return folder


@pytest.fixture
def mixed(arguments, corpus, tmp_path):
    """Command-line arguments of a run on the four sources."""
    (tmp_path / "debug.toml").write_text(SOURCES.format(corpus))
    rest = [argument for argument in arguments[1:] if not argument.startswith("--data.path")]
    return [
        str(tmp_path / "debug.toml"),
        *rest,
        "--checkpoint.freq=2",
        "--checkpoint.keep=0",
        "--optimizer.lr=1e-2",
    ]


def test_a_run_on_four_sources_resumes_on_other_numbers_of_processes(pool, mixed, tmp_path):
    assert pool.run(1, train_run, [*mixed, "--run.name=whole"]) == [0]
    assert pool.run(2, train_until, 3, mixed) == [75, 75]
    assert pool.run(1, train_run, mixed) == [0]
    whole = curve(tmp_path / "whole")
    assert {step: pytest.approx(row, rel=1e-5) for step, row in whole.items()} == curve(
        tmp_path / "debug"
    )
    found = rows(tmp_path / "debug")
    steps = [row for row in found if "grad_norm" in row]
    for row in steps:
        assert 0 < row["targets"] <= 8 * 64
        assert row["data_percent"] == 100 * max(row[f"epochs/{name}"] for name in NAMES)
    assert len({row["targets"] for row in steps}) > 2  # padding
    poem = [row["epochs/poem"] for row in steps]
    assert poem[:3] == [0, 0, 0]
    assert 0 < poem[3] < poem[4] < poem[5]
    for row in found:
        if "grad_norm" not in row:
            weights = dict(zip(NAMES, (0.4, 0.3, 0.2, 0), strict=True))
            mean = sum(w * row[f"validation/{name}/loss"] for name, w in weights.items()) / 0.9
            assert row["validation/loss"] == pytest.approx(mean)
            assert {
                f"validation/{n}/{k}" for n in NAMES for k in ("bits_per_byte", "perplexity")
            } <= set(row)


def test_the_loss_of_padded_batches_does_not_depend_on_their_division(pool, mixed, tmp_path):
    """One local batch, and accumulation on two processes: the numbers of targets differ between the
    local batches.
    """
    run = [*mixed, "--training.steps=2", "--validation.freq=0"]
    assert pool.run(1, train_run, [*run, "--run.name=whole", "--training.local_batch_size=8"]) == [
        0
    ]
    assert pool.run(2, train_run, [*run, "--run.name=parts", "--training.local_batch_size=1"]) == [
        0,
        0,
    ]
    whole = curve(tmp_path / "whole")
    assert {step: pytest.approx(row, rel=2e-6) for step, row in whole.items()} == curve(
        tmp_path / "parts"
    )


@pytest.mark.slow
def test_changed_sources_are_named_and_later_phases_may_change(pool, mixed, tmp_path):
    run = [*mixed, "--training.steps=2", "--validation.freq=0"]
    assert pool.run(1, train_run, run) == [0]
    path, text, step = (
        tmp_path / "debug.toml",
        (tmp_path / "debug.toml").read_text(),
        tmp_path / "debug/checkpoints/step-2",
    )
    manifest = read_manifest(step)

    def resume(changed: str, *more: str, of: Manifest = manifest) -> None:
        path.write_text(changed)
        config = load_config([*run, *more])
        folders = train.prepared_folders(config.data, Tokenizer())
        data = load_sources(config.data, folders, Tokenizer())
        files = {"model.json": (step / "model.json").read_bytes(), "data.json": description(data)}
        require_compatible(step, of, dataclasses.asdict(config), files, config.checkpoint)

    for changed, expected, key in (
        (
            text.replace("weight = 0.4", "weight = 0.1"),
            ("numbers was 44.4444%", "is 16.6667%"),
            "data",
        ),
        (
            text.replace('/lists"', '/words"\nname = "lists"'),
            ("lists was 22.2222%", "fingerprint"),
            "data",
        ),
        (
            text.replace('/words"', '/words"\nname = "other"').replace("words =", "other ="),
            ("words was", "other was not among"),
            "data",
        ),
        (swapped(text), ("data.sources", "order", "numbers, words", "words, numbers"), "data"),
        (
            text.replace("from_step = 4", "from_step = 2"),
            ("data.phases was {}", "from sample 8': {"),
            "data.phases",
        ),
        (
            text.replace("best_fit", "split"),
            ("data.packing was best_fit and is split",),
            "data.packing",
        ),
    ):
        with refused(*expected, f"--checkpoint.accept={key}"):
            resume(changed)
        resume(changed, f"--checkpoint.accept={key}")
    # What the checkpoint's config lacks has its default
    lacking = {**manifest.config, "data": {"path": ""}}
    with refused(
        "data.packing was split and is best_fit", "data.document_mask was False and is True"
    ):
        resume(text, of=dataclasses.replace(manifest, config=lacking))
    resume(text)
    resume(
        text.replace("weight = 0.4", "weight = 4")
        .replace("weight = 0.3", "weight = 3")
        .replace("0.2\n", "2\n")
    )
    resume(text.replace("from_step = 4", "from_step = 3"))  # it has not begun at step 2
    with refused(
        "data.phases: from_step",
        "training.global_batch_size = 16",
        "have 16 samples",
        "from_tokens",
    ):
        resume(text, "--training.global_batch_size=16")
    resume(text, "--training.global_batch_size=16", "--checkpoint.accept=data.phases")
    resume(
        text.replace("from_step = 4", "from_tokens = 100_000"), "--training.global_batch_size=16"
    )


def swapped(text: str) -> str:
    """The config with its first two sources in the other order."""
    start, first, second, *rest = text.split("[[data.sources]]\n")
    return "[[data.sources]]\n".join([start, second, first, *rest])


@pytest.fixture
def four_kinds(tmp_path, corpus):
    """A config of 200 steps on a folder of text, compressed JSONL, Parquet and token ids of another
    program.
    """
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    folder, tokenizer = tmp_path / "corpus", Tokenizer()
    shutil.copytree(corpus / "numbers", folder / "text")
    lines = (
        json.dumps({"text": f"Row {i} has the number {i * i}.\n" * (i % 9 + 1)}) for i in range(400)
    )
    (folder / "rows.jsonl.gz").write_bytes(gzip.compress("\n".join(lines).encode()))
    bodies = [f"table {i}: {[i + j for j in range(i % 30)]}\n" * 3 for i in range(300)]
    parquet.write_table(pyarrow.table({"body": bodies}), folder / "table.parquet")
    texts = (f"if x == {i}:\n    return {i + 1}\n" * (i % 7 + 1) for i in range(400))
    write_megatron(
        folder / "ids.bin",
        [[tokenizer.bos, *tokenizer.encode(text), tokenizer.eos] for text in texts],
    )
    weights = {"text": 0.67, "rows.jsonl.gz": 0.14, "table.parquet": 0.1, "ids.bin": 0.06}
    tables = [
        f'[[data.sources]]\npath = "{folder / name}"\nweight = {weight}\n'
        for name, weight in weights.items()
    ]
    tables[2] += 'field = "body"\n'
    phase = (
        "[[data.phases]]\nfrom_step = 121\nweights = { text = 0.1, rows = 0.1, table = 0.1, "
        "ids = 0.7 }\n"
    )
    (tmp_path / "kinds.toml").write_text("".join([*tables, phase]))
    return tmp_path / "kinds.toml"


@pytest.mark.slow
def test_four_kinds_of_sources_stopped_and_resumed_with_another_number_of_processes(
    four_kinds, arguments, tmp_path
):
    """By ./run_train.sh, as a user would."""
    rest = [a for a in arguments[1:] if not a.startswith("--data.path")]
    run = [
        str(four_kinds),
        *rest,
        "--training.steps=200",
        "--validation.freq=100",
        "--optimizer.lr=1e-3",
    ]
    code, output = finish(start([*run, "--run.name=whole"]))
    assert code == 0, output
    assert_mentions(output, "the weights sum to 0.97", "validation/ids")
    process = start(run, NGPU="2")
    wait_for_step(tmp_path / "kinds", 60, process)
    process.send_signal(signal.SIGTERM)
    code, output = finish(process)
    assert code == 75, output
    code, output = finish(start(run))
    assert code == 0, output
    assert "resumed from" in output
    whole, parts = curve(tmp_path / "whole"), curve(tmp_path / "kinds")
    assert list(parts) == list(range(1, 201))
    assert {step: pytest.approx(row, rel=1e-3) for step, row in whole.items()} == parts
    last = rows(tmp_path / "kinds")[-2]
    assert last["step"] == 200
    assert last["epochs/ids"] > 1
    first, *_, end = (
        row["validation/ids/loss"] for row in rows(tmp_path / "kinds") if "validation/loss" in row
    )
    assert end < 0.6 * first
