"""docs/corpus.py: what datatrove filters, deduplicates and tokenises is what training reads."""

from __future__ import annotations

import itertools
import json
import os
import random
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from launches import finish, start
from page_commands import commands
from preparing import TOKENIZER, prepared
from runs import curve

from titanlite.data.prepared_manifest import read_manifest
from titanlite.data.shards import Tokens

PACKAGES = ("datatrove", "orjson", "spacy")
pytestmark = pytest.mark.skipif(
    not all(map(find_spec, PACKAGES)), reason=f"needs {', '.join(PACKAGES)}, of the extra [corpus]"
)

ROOT = Path(__file__).parents[3]
NOUNS = [
    "river",
    "model",
    "teacher",
    "garden",
    "window",
    "engine",
    "letter",
    "mountain",
    "market",
    "bridge",
    "story",
    "ocean",
]
VERBS = [
    "shows",
    "follows",
    "carries",
    "changes",
    "explains",
    "supports",
    "finds",
    "leaves",
    "brings",
    "protects",
]
ADJECTIVES = [
    "quiet",
    "old",
    "bright",
    "careful",
    "distant",
    "simple",
    "heavy",
    "narrow",
    "green",
    "famous",
]
# A download would fail: nothing listens there
OFFLINE = {"HF_HUB_OFFLINE": "1", "http_proxy": "http://[::1]:1", "https_proxy": "http://[::1]:1"}


def page(choose: random.Random) -> str:
    """Text that the filters of Gopher, C4 and FineWeb keep: English sentences in lines."""

    def thing() -> str:
        return f"the {choose.choice(ADJECTIVES)} {choose.choice(NOUNS)}"

    def sentence() -> str:
        verbs = choose.sample(VERBS, 2)
        things = f"{thing()} that {verbs[0]} {thing()} and {verbs[1]} {thing()} of {thing()}"
        return f"It is {things} in {choose.randint(1000, 9999)}."

    return "\n".join(" ".join(sentence() for _ in range(choose.randint(1, 3))) for _ in range(8))


def documents_of(folder: Path) -> list[list[int]]:
    """The ids of each document of both splits of a prepared folder, in order of their ids."""
    manifest = read_manifest(folder)
    documents = []
    for split in ("train", "validation"):
        tokens = Tokens(folder, manifest, split)
        starts = tokens.document_starts(0, len(tokens)).tolist()
        for begin, end in itertools.pairwise([*starts, len(tokens)]):
            documents.append(tokens.read(begin, end - begin).tolist())
    return sorted(documents)


def make_corpus(clone: Path) -> subprocess.CompletedProcess[str]:
    """Runs the command of the page as it is printed, in a clone that is not installed."""
    for name in ("titanlite", "docs"):
        (clone / name).symlink_to(ROOT / name)
    (command,) = [
        line for line in commands((ROOT / "docs/prepare.md").read_text()) if "my_corpus -" in line
    ]
    environment = os.environ | OFFLINE
    environment["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    for name in ("PYTHONPATH", "PYTHONSAFEPATH"):  # the tests of commands set the second
        environment.pop(name, None)
    return subprocess.run(
        ["bash", "-c", command], cwd=clone, env=environment, capture_output=True, text=True
    )


def write_rows(path: Path, texts: list[str]) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


@pytest.mark.slow
def test_training_reads_what_prepare_makes_of_the_same_texts(tmp_path):
    choose = random.Random(0)
    pages = [page(choose) for _ in range(150)]
    pages[7] = pages[7].replace("It is", "<|end_of_text|> It is", 1)  # characters, as any others
    pages[9] = pages[9].replace(".", ". \u00e9\u20ac \ud55c\uad6d\uc5b4.", 1)
    near = pages[20].replace("It is", "That is", 1)
    dropped = ["Too short.", "lorem ipsum " * 200, "the same line again.\n" * 100]
    rows = [*pages, near, pages[30], *dropped]
    choose.shuffle(rows)
    write_rows(tmp_path / "my_texts/0.jsonl", rows[::2])
    write_rows(tmp_path / "my_texts/1.jsonl", rows[1::2])
    printed = make_corpus(tmp_path)
    assert printed.returncode == 0, printed.stderr
    corpus = tmp_path / "my_corpus"

    run = [
        "debug",
        f"--data.path={corpus / 'tokens'}",
        f"--data.cache={tmp_path / 'cache'}",
        f"--run.folder={tmp_path / 'runs'}",
        "--training.steps=4",
        "--metrics.log_freq=1",
        "--checkpoint.freq=0",
    ]
    code, output = finish(start(run, NGPU="1"))
    assert code == 0, output
    assert list(curve(tmp_path / "runs/debug")) == [1, 2, 3, 4]

    [read] = (tmp_path / "cache").iterdir()
    found = documents_of(read)
    assert len(found) == len(pages)
    kept = {tuple(document) for document in found}
    # One of the two similar pages is left, either of them
    is_near = (TOKENIZER.bos, *TOKENIZER.encode(near), TOKENIZER.eos) in kept
    texts = [near if is_near and text == pages[20] else text for text in pages]
    write_rows(tmp_path / "same.jsonl", texts)
    assert found == documents_of(prepared(tmp_path / "same", tmp_path / "same.jsonl"))


@pytest.mark.slow
def test_a_corpus_of_nothing_is_refused_in_a_line(tmp_path):
    for name, text, expected in (
        ("0.txt", "Some text.", "my_texts: expected a folder of JSON lines"),
        ("1.jsonl", '{"text": "Too short."}', "my_texts: the filters drop every document"),
    ):
        clone = tmp_path / name
        (clone / "my_texts").mkdir(parents=True)
        (clone / "my_texts" / name).write_text(text)
        done = make_corpus(clone)
        assert done.returncode != 0
        assert expected in done.stderr.splitlines()[-1]
