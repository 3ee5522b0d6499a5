"""Summarises, verifies and samples a prepared folder: `titanlite prepare --inspect`.

What it is: the manifest in a few lines, a verification of every byte, and samples of documents
decoded by the tokenizer that it was prepared with. In a sample, tokens that are not targets are
between marks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from titanlite.data.prepared import is_prepared
from titanlite.data.prepared_manifest import read_manifest
from titanlite.data.shards import Tokens
from titanlite.data.verification import expected_files, unverified, verify
from titanlite.runtime.errors import ConfigError, printable
from titanlite.tokenizer.tokenizer import Tokenizer

SAMPLE_TOKENS = 60
SPAN = 1 << 20  # tokens before a position that are searched for the start of its document, at first


def inspect(folder: Path, tokenizer_path: str) -> int:
    """Prints; returns the exit code 0. Raises ConfigError with what is damaged."""
    if not is_prepared(folder):  # perhaps the user's texts, with a manifest.json of another program
        raise ConfigError(
            f"{folder}: not a prepared folder: "
            "it needs a manifest.json and shards (train-00000.bin)"
        )
    manifest = read_manifest(folder)
    for line in describe(manifest):
        print(line)
    unverified(folder, manifest)  # sizes
    verify(folder, manifest, list(expected_files(manifest)))
    print(f"verified {len(expected_files(manifest))} files: sizes, SHA-256, ids, document starts")
    tokenizer = _tokenizer(manifest, tokenizer_path)
    if tokenizer is None:
        print("samples need the tokenizer: --tokenizer FILE")
        return 0
    for split in ("train", "validation"):
        for line in samples(Tokens(folder, manifest, split), tokenizer):
            print(f"{split} {line}")
    return 0


def _tokenizer(manifest: dict[str, Any], path: str) -> Tokenizer | None:
    """The tokenizer at `path`, or the bundled one if the data was made with it.

    Raises ConfigError for another one.
    """
    tokenizer = Tokenizer(path)
    if tokenizer.sha256 == manifest["tokenizer"]["sha256"]:
        return tokenizer
    if path:
        expected = manifest["tokenizer"]["sha256"][:8]
        raise ConfigError(
            f"--tokenizer {path}: has SHA-256 {tokenizer.sha256[:8]}; "
            f"the data was made with {expected}"
        )
    return None


def describe(manifest: dict[str, Any]) -> list[str]:
    """The manifest in lines."""
    tokenizer = manifest["tokenizer"]
    rows = manifest["rows"]
    fingerprint = manifest["fingerprint"][:16]
    megabytes = manifest["bytes"] / 1e6
    roots = ", ".join(manifest["roots"])
    sha256 = tokenizer["sha256"][:16]
    lines = [
        f"name         {manifest['name']}, fingerprint {fingerprint}, format {manifest['format']}",
        f"source       {manifest['files']:,} files, {megabytes:,.1f} MB: {roots}",
        f"tokenizer    {tokenizer['file']}, {tokenizer['size']:,} ids, "
        f"{manifest['dtype']}, {sha256}",
    ]
    masked = False
    for split, entry in manifest["splits"].items():
        ratio = entry["bytes"] / max(1, entry["tokens"])
        lines.append(
            f"{split:<12} {entry['tokens']:,} tokens in {entry['documents']:,} documents "
            f"and {len(entry['shards'])} shards, "
            f"{entry['bytes'] / 1e6:,.1f} MB of text, {ratio:.2f} bytes per token"
        )
        masked = masked or any(shard["mask"] for shard in entry["shards"])
    if masked:
        lines.append("loss mask    yes: prompts are not targets")
    if manifest["duplicates"]:
        lines.append(
            f"duplicates   {manifest['duplicates']:,} documents that equal others were dropped"
        )
    if rows["bad"]:
        lines.append(
            f"left out     {rows['bad']:,} of {rows['rows']:,} documents "
            "that could not be read, such as:"
        )
        lines += [f"  {example}" for example in rows["examples"]]
    return [printable(line) for line in lines]


def samples(tokens: Tokens, tokenizer: Tokenizer) -> list[str]:
    """The starts of the first, the middle and the last document."""
    if not len(tokens):
        return []
    lines = []
    positions = (0, len(tokens) // 2, len(tokens) - 1)
    for start in sorted({_document_start(tokens, position) for position in positions}):
        count = min(SAMPLE_TOKENS, len(tokens) - start)
        ids = tokens.read(start, count)
        targets = tokens.targets(start, count)
        lines.append(f"token {start:,}: {printable(_marked(ids, targets, tokenizer))}")
    return lines


def _document_start(tokens: Tokens, position: int) -> int:
    """The start of the document that the token at `position` belongs to."""
    span = SPAN
    end = position + 1
    starts = tokens.document_starts(max(0, end - span), end)
    while not len(starts) and span < end:
        span *= 2
        starts = tokens.document_starts(max(0, end - span), end)
    if not len(starts):
        return 0
    return int(starts[-1])


def _marked(
    ids: np.ndarray[Any, Any], targets: np.ndarray[Any, Any] | None, tokenizer: Tokenizer
) -> str:
    """The text of the ids, with marks around tokens that are not targets."""
    if targets is None:
        return tokenizer.decode(ids.tolist())
    cuts = np.flatnonzero(np.diff(targets)) + 1
    marked = ""
    # Within a part all tokens are targets, or none is
    for part, is_target in zip(np.split(ids, cuts), np.split(targets, cuts), strict=True):
        text = tokenizer.decode(part.tolist())
        if is_target[0]:
            marked += text
        else:
            marked += f"[not a target: {text}]"
    return marked
