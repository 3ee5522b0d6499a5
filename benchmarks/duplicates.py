"""Removal of duplicates: recall and precision on planted ones, speed, and memory.

    python benchmarks/duplicates.py [--text LANGUAGE=FILE ...] [--threshold 0.55] [--pages /usr/share/man]

Plants changed copies in a corpus of each language (`planted_duplicates.py`) and counts which are
found. Then measures the speed of signatures and of all filters in MB of text per CPU second, and
the time and memory of a search among millions of signatures; also datasketch and rensa, if they are
installed. `--pages` compares what is dropped of the files of a folder, which may be compressed with
gzip, with what connected components of similar documents would drop. Takes four minutes on two
cores.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import importlib
import importlib.util
import json
import random
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import report
from planted_duplicates import KINDS, LANGUAGES, Document, pieces, planted

sys.path.insert(0, str(report.ROOT))

from titanlite.tools.prepare.duplicates import (
    BANDS,
    ROWS,
    THRESHOLD,
    DuplicateConfig,
    find_duplicates,
)
from titanlite.tools.prepare.filters import RULES, FilterConfig, rejection
from titanlite.tools.prepare.shingles import simplify, window_hashes
from titanlite.tools.prepare.signatures import NUM_HASHES, RECORD, WINDOW, signature

PASS_ALL = FilterConfig(**{rule: 0.0 if rule.startswith("min") else float("inf") for rule in RULES})


def per_second(function: Callable[[str], Any], texts: list[str]) -> float:
    """MB of text per CPU second."""
    function(texts[0])
    started = time.process_time()
    for text in texts:
        function(text)
    return sum(len(text.encode()) for text in texts) / 1e6 / (time.process_time() - started)


def similarity(one: str, other: str) -> float:
    """The exact Jaccard similarity of two documents, without MinHash."""
    a, b = (
        set(np.concatenate(list(window_hashes(text, WINDOW))).tolist()) for text in (one, other)
    )
    return len(a & b) / len(a | b)


def quality(documents: list[Document], folder: Path, threshold: float) -> dict[str, Any]:
    """Recall of each kind of copy, the share of which do not stay beside their original; and
    precision.

    Two precisions of what is dropped: the share of planted copies; and the share that is planted or
    really has the similarity of the threshold, because real text has near duplicates that were not
    planted.
    """
    path = folder / "signatures"
    path.write_bytes(b"".join(signature(document.text) for document in documents))
    first = find_duplicates([path], DuplicateConfig("near", threshold)).first
    original = {document.origin: i for i, document in enumerate(documents) if not document.kind}
    found: dict[str, Any] = {"documents": len(documents)}
    for kind in KINDS:
        copies = [i for i, document in enumerate(documents) if document.kind == kind]
        originals = [original[documents[i].origin] for i in copies]
        both_stay = [
            first[i] == i and first[o] == o for i, o in zip(copies, originals, strict=True)
        ]
        found[kind] = 1.0 - float(np.mean(both_stay))
    dropped = [(documents[i], documents[first[i]]) for i in range(len(documents)) if first[i] != i]
    right = [one.origin == other.origin for one, other in dropped]
    found["precision, planted"] = float(np.mean(right))
    similar = [similarity(one.text, other.text) >= threshold for one, other in dropped]
    found["precision"] = float(np.mean(np.logical_or(right, similar)))
    return found


def pages(folder: Path, threshold: float, most: int = 4000) -> list[dict[str, Any]]:
    """What is dropped of a folder's files, and what connected components of all similar pairs would
    drop.
    """
    texts: dict[str, None] = {}
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    random.Random(0).shuffle(paths)
    for path in paths:
        with contextlib.suppress(OSError, UnicodeDecodeError, EOFError):
            text = (
                gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
            ).decode()
            if len(text) >= 500 and len(texts) < most:
                texts[text] = None
    with tempfile.TemporaryDirectory() as temporary:
        path = Path(temporary, "signatures")
        path.write_bytes(b"".join(map(signature, texts)))
        stays = find_duplicates([path], DuplicateConfig("near", threshold)).stays
        numbers = np.fromfile(path, RECORD)["minhash"]
    equal = np.stack([np.count_nonzero(numbers == row, axis=1) for row in numbers])
    similar = equal >= threshold * NUM_HASHES
    component = np.arange(len(similar))
    while not np.array_equal(
        component, lower := np.where(similar, component, len(component)).min(axis=1)
    ):
        component = lower
    rows = []
    for name, kept in (
        ("as here", stays),
        ("connected components", component == np.arange(len(component))),
    ):
        with_similar = np.count_nonzero(similar[:, kept], axis=1) > 0
        others = similar[np.ix_(kept, kept)].sum(axis=1) > 1
        rows.append(
            {
                "method": name,
                "documents": len(kept),
                "dropped": float(np.mean(~kept)),
                "of these, with a similar one that stays": float(np.mean(with_similar[~kept])),
                "of those that stay, with a similar one that stays": float(np.mean(others)),
            }
        )
    return rows


def search(count: int) -> dict[str, Any]:
    """Time and peak memory of the search among signatures, half of which are near duplicates (J =
    0.75) of others.
    """
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, f"{part}") for part in range(10)]
        for path in files:
            with path.open("wb") as file:
                for begin in range(0, count // 10, 20_000):
                    half = np.zeros(min(20_000, count // 10 - begin) // 2, RECORD)
                    half["minhash"] = rng.integers(0, 1 << 16, half["minhash"].shape)
                    other = half.copy()
                    changed = rng.random(other["minhash"].shape) > 0.75
                    other["minhash"][changed] = rng.integers(0, 1 << 16, np.count_nonzero(changed))
                    both = np.concatenate([half, other])
                    both["exact"], both["shingles"] = rng.integers(0, 1 << 62, (len(both), 2)), 1000
                    file.write(both.tobytes())
        before, started = peak_memory(), time.process_time()
        found = find_duplicates(files, DuplicateConfig("near"))
        seconds = time.process_time() - started
        size = sum(path.stat().st_size for path in files)
    return {
        "signatures": len(found.first),
        "found": found.near / (len(found.first) // 2),
        "CPU s": seconds,
        "files MB": size / 1e6,
        "MB before": before,
        "peak MB": peak_memory(),
    }


def peak_memory() -> float:
    """The largest resident set of this process so far, with mapped files."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6


def memory() -> float:
    """The resident set of this process now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 1e6


def windows_of(text: str) -> list[bytes]:
    """The shingles as the libraries take them."""
    data = simplify(text).encode()
    return [data[i : i + WINDOW] for i in range(len(data) - WINDOW + 1)]


def datasketch(texts: list[str], count: int) -> dict[str, Any]:
    """A library: its speed from text to MinHash, and the memory of its bands."""
    library = importlib.import_module("datasketch")

    def compute(text: str) -> Any:
        minhash = library.MinHash(NUM_HASHES)
        minhash.update_batch(windows_of(text))
        return minhash

    index = library.MinHashLSH(THRESHOLD, NUM_HASHES, params=(BANDS, ROWS))
    return _library(compute, index.insert, texts, count)


def rensa(texts: list[str], count: int) -> dict[str, Any]:
    library = importlib.import_module("rensa")

    def compute(text: str) -> Any:
        minhash = library.RMinHash(num_perm=NUM_HASHES, seed=1)
        minhash.update(windows_of(text))
        return minhash

    index = library.RMinHashLSH(threshold=THRESHOLD, num_perm=NUM_HASHES, num_bands=BANDS)
    return _library(compute, index.insert, texts, count)


def _library(
    compute: Callable[[str], Any], insert: Callable[[int, Any], None], texts: list[str], count: int
) -> dict[str, Any]:
    speed = per_second(compute, texts)
    before = memory()
    for i in range(count):
        insert(i, compute(random.Random(i).randbytes(40).hex()))
    return {"MB/s": speed, "bytes per document": (memory() - before) * 1e6 / count}


CHILDREN = {"datasketch": datasketch, "rensa": rensa}


def tables(results: dict[str, Any]) -> list[str]:
    languages, found = results["languages"], results["search"]
    columns = [
        "documents",
        *KINDS,
        "precision",
        "precision, planted",
        "signature MB/s",
        "filters MB/s",
    ]
    body = [
        f"Recall of each kind of copy, and precision, at {results['threshold']}; speed per CPU "
        "second:",
        "",
    ]
    body += [f"| language | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    for language, row in languages.items():
        formats = (
            "," if column == "documents" else ".1f" if "MB" in column else ".3f"
            for column in columns
        )
        shown = [format(row[column], style) for column, style in zip(columns, formats, strict=True)]
        body.append(f"| {language} | {' | '.join(shown)} |")
    body += ["", "Search among signatures, half of them near duplicates of others:", ""]
    body += [f"| {' | '.join(found)} |", "|---" * len(found) + "|"]
    shown = [format(value, ".4f" if key == "found" else ",.0f") for key, value in found.items()]
    body.append(f"| {' | '.join(shown)} |")
    if results["pages"]:
        body += ["", "Whole files of a folder, in random order:", ""]
        body += [f"| {' | '.join(results['pages'][0])} |", "|---" * len(results["pages"][0]) + "|"]
    for row in results["pages"]:
        shown = [
            format(value, ".3f") if isinstance(value, float) else str(value)
            for value in row.values()
        ]
        body.append(f"| {' | '.join(shown)} |")
    if results["libraries"]:
        body += ["", f"Libraries, {NUM_HASHES} hashes and {BANDS} bands:", ""]
        body += [
            "| library | text to MinHash, MB/s | memory per document, bytes |",
            "|---|---|---|",
        ]
    for name, row in results["libraries"].items():
        shown = (
            [row["failed"], ""]
            if "failed" in row
            else [f"{row['MB/s']:.1f}", f"{row['bytes per document']:,.0f}"]
        )
        body.append(f"| {name} | {' | '.join(shown)} |")
    return body


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--text", action="append", default=[], metavar="LANGUAGE=FILE", help="more text, UTF-8"
    )
    parser.add_argument("--threshold", type=float, default=THRESHOLD, help="of similarity")
    parser.add_argument(
        "--pages", type=Path, metavar="FOLDER", help="whole files, such as /usr/share/man"
    )
    parser.add_argument(
        "--per-kind",
        type=int,
        default=300,
        help="copies of each kind, at most a sixth of the text's",
    )
    parser.add_argument("--signatures", type=int, default=2_500_000, help="of the search")
    parser.add_argument("--child", choices=["search", *CHILDREN], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child == "search":
        print(json.dumps(search(options.signatures)))
        return
    if options.child:
        print(json.dumps(CHILDREN[options.child](LANGUAGES["code"]()[:100], 50_000)))
        return
    corpora = {language: make() for language, make in LANGUAGES.items()}
    for given in options.text:
        language, _, path = given.partition("=")
        corpora[language] = pieces(Path(path).read_text("utf-8"))
    results: dict[str, Any] = {"languages": {}, "libraries": {}, "threshold": options.threshold}
    results["pages"] = pages(options.pages, options.threshold) if options.pages else []
    with tempfile.TemporaryDirectory() as folder:
        for language, texts in corpora.items():
            documents = planted(texts, min(options.per_kind, len(set(texts)) // 6), seed=0)
            row = results["languages"][language] = quality(
                documents, Path(folder), options.threshold
            )
            row["signature MB/s"] = per_second(signature, texts)
            row["filters MB/s"] = per_second(lambda text: rejection(text, PASS_ALL), texts)
    command = [sys.executable, __file__, f"--signatures={options.signatures}", "--child"]
    results["search"] = report.child([*command, "search"])
    for name in CHILDREN:
        if importlib.util.find_spec(name):
            results["libraries"][name] = report.child([*command, name])
    body = tables(results)
    print("\n".join(body))
    report.write("duplicates", "Duplicates", body, results)


if __name__ == "__main__":
    main()
