"""Folders that are one data set of another program, whose files cannot be read each for itself.

What it is: MDS (mosaicml-streaming), what `save_to_disk` of the package `datasets` wrote, and our
own prepared folders. Each is refused with the command that converts or uses it.
What it costs: one listing of each folder that has a file of the source.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from titanlite.data.prepared import is_prepared
from titanlite.tools.prepare.litdata_chunk import read_index
from titanlite.tools.prepare.sources import HUB, FoundFile

MDS = (".mds", ".mds.zstd", ".mds.gz", ".mds.br", ".mds.snappy")


def foreign_folders(files: Iterable[FoundFile]) -> list[str]:
    """Returns a message for each folder of these files that is such a data set."""
    folders: dict[Path, set[str]] = {}
    for file in files:
        path = Path(file.path)
        folders.setdefault(path.parent, set()).add(path.name)
    problems = []
    for folder, names in folders.items():
        if any(name.endswith(MDS) for name in names):
            problems.append(_mds(folder))
        elif any(name.endswith(".arrow") for name in names) and (folder / "state.json").is_file():
            has_splits = "dataset_dict.json" in folders.get(folder.parent, ())
            problems.append(_saved_to_disk(folder.parent if has_splits else folder, has_splits))
        elif any(name.endswith(".bin") for name in names) and is_prepared(folder):
            problems.append(
                f"{folder}: is a folder of prepared data; train on all of it with "
                f"--data.path={shlex.quote(str(folder))}"
            )
    return list(dict.fromkeys(problems))  # a saved data set with several splits is named once


def _saved_to_disk(root: Path, has_splits: bool) -> str:
    splits = ""
    if has_splits:
        splits = f" (its split train; another one as {HUB}FOLDER::SPLIT)"
    return (
        f"{root}: is a data set that datasets saved (save_to_disk); give it as {HUB}{root}{splits}"
    )


def _mds(folder: Path) -> str:
    """The command depends on the columns that index.json lists."""
    place = shlex.quote(str(folder))
    shards = read_index(folder).get("shards")
    first: Any = shards[0] if isinstance(shards, list) and shards else {}
    if not isinstance(first, dict) or first.get("format") != "mds":
        return (
            f"{folder}: shards of MDS (mosaicml-streaming) without the index.json that describes "
            "them; put it beside them"
        )
    names = first.get("column_names")
    encodings = first.get("column_encodings")
    if not isinstance(names, list) or not isinstance(encodings, list):
        names = []
        encodings = []
    columns = {str(name): str(kind) for name, kind in zip(names, encodings, strict=False)}
    shown = ", ".join(f"{name} {kind}" for name, kind in list(columns.items())[:20])
    unpack = f"zstd -d {place}/*.mds.zstd && " if first.get("compression") else ""
    rows = "for row in streaming.LocalDataset(sys.argv[1])]"
    texts = [name for name, kind in columns.items() if kind == "str"]
    ids = [name for name, kind in columns.items() if kind.startswith(("bytes", "ndarray"))]
    if texts:
        command = (
            f"import json, streaming, sys; [print(json.dumps({{name: row[name] for name in {texts}"
            f'}})) {rows}" {place} > rows.jsonl'
        )
    elif ids:
        command = (
            f"import streaming, sys; [sys.stdout.buffer.write(bytes(row[{ids[0]!r}])) "
            f'{rows}" {place} > ids.bin'
        )
    else:
        return f"{folder}: is MDS of mosaicml-streaming, without a column of text or ids: {shown}"
    return (
        f"{folder}: is MDS of mosaicml-streaming ({shown}); convert it: "
        f'{unpack}python -c "{command}'
    )
