"""`titanlite evaluate`: computes the loss of a checkpoint on text."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING

from titanlite.config.schema import DataConfig
from titanlite.runtime.errors import ConfigError
from titanlite.tools.cli.options import (
    StrictParser,
    add_checkpoint_options,
    at_least,
    log,
    require_writable,
    selection_of,
    write_file,
)
from titanlite.tools.cli.several import add_processes_option, is_to_start, join, start

if TYPE_CHECKING:
    from titanlite.data.prepared import PreparedData
    from titanlite.tokenizer.tokenizer import Tokenizer
    from titanlite.tools.formats.full_state import FullState
    from titanlite.tools.formats.shared_model import SharedModel

EPILOG = """\
The results of a checkpoint in a run's folder are added to evaluations.jsonl there and appear in
its report. Tasks, such as ARC: """
WHOLE = "validation"  # the split of all of a file's documents
TASKS = (
    "titanlite convert CHECKPOINT DIR --to hf, then "
    "lm_eval --model hf --model_args pretrained=DIR --tasks NAME"
)


def run(argv: list[str]) -> int:
    """Prints a table of results, and records them. Raises ConfigError."""
    options = _options(argv)
    if is_to_start(options):
        return start("evaluate", argv, options.processes)
    import torch

    from titanlite.tools.formats.load_weights import tokenizer_of
    from titanlite.tools.formats.shared_model import SharedModel, open_shared, this_rank

    device = join(options)
    full = open_shared(options.path, selection_of(options))
    tokenizer = tokenizer_of(full, options.tokenizer)
    length = options.seq_len or full.about.seq_len
    if not length:
        raise ConfigError(
            f"{full.path}: the sequence length of training is not in the file; set --seq-len"
        )
    texts = _prepared(options, tokenizer)
    shared = SharedModel(full, device, length)
    if this_rank() == 0:
        log(f"{full.path}: {shared.describe()}")
    # Without autocast's cache, which would keep weights that FSDP frees
    low_precision = options.dtype == "bfloat16"
    with torch.autocast(device.type, torch.bfloat16, low_precision, cache_enabled=False):
        results = _evaluate(options, full, shared, tokenizer, texts)
    if this_rank() == 0:
        _report(options, full, length, results)
    return 0


def _report(
    options: argparse.Namespace,
    full: FullState,
    length: int,
    results: dict[str, dict[str, float]],
) -> None:
    """Prints the results, and writes them to --json and to the run's folder."""
    from titanlite.tools.evaluate.record import append, run_folder_of

    print("\n".join(_table(results)))
    columns: dict[str, float] = {}
    for name, values in results.items():
        for metric, value in values.items():
            columns[f"evaluate/{name}/{metric}"] = value
    settings = {"limit": options.limit, "seq_len": length, "dtype": options.dtype}
    if options.json:  # first: a run's folder may be read-only
        origin = {"checkpoint": str(full.path), "step": full.about.step}
        content = json.dumps({**origin, **settings, "results": results}) + "\n"
        write_file("--json", options.json, content)
    folder = run_folder_of(full)
    if folder and full.about.step is not None:
        path = append(folder, full.about.step, options.weights, columns, settings)
        log(f"recorded in {path}")


def _options(argv: list[str]) -> argparse.Namespace:
    parser = StrictParser(
        prog="titanlite evaluate",
        usage="titanlite evaluate CHECKPOINT --perplexity DATA ... [options]",
        description="Compute the loss of a checkpoint on text.",
        epilog=EPILOG + TASKS,
    )
    parser.add_argument(
        "path",
        type=Path,
        metavar="CHECKPOINT",
        help="a run's folder, or any format that convert reads",
    )
    parser.add_argument(
        "--perplexity",
        nargs="+",
        required=True,
        metavar="DATA",
        help="prepared folders, or text as in data.path; all of a file, a split of a folder",
    )
    parser.add_argument(
        "--split", choices=("validation", "train"), help="of a folder; default: validation"
    )
    add_checkpoint_options(parser)
    parser.add_argument(
        "--seq-len", type=at_least(int, 2, 2**20), default=0, help="default: that of training"
    )
    parser.add_argument(
        "--batch-size", type=at_least(int, 1, 10**6), default=8, help="texts at a time; default 8"
    )
    parser.add_argument("--limit", type=at_least(int, 1), help="only this many sequences of a text")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), default="float32", help="of the computation"
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="also write the results to this file"
    )
    add_processes_option(parser)
    if any(word.startswith("--tasks") for word in argv):
        raise ConfigError(f"--tasks: lm-eval evaluates an export: {TASKS}")
    options = parser.parse_args(argv)
    problems = []
    if options.split:
        for path in filter(_is_whole, options.perplexity):
            problems.append(
                f"--split {options.split}: {path} is a file, which is evaluated whole; expected "
                "folders"
            )
    options.split = options.split or "validation"
    if problems:
        raise ConfigError(problems)
    if options.json:
        require_writable("--json", options.json)
    return options


def _is_whole(path: str) -> bool:
    """Whether all of the text is evaluated, not a split of it: whether the path is a file."""
    return Path(path).is_file()


def _prepared(options: argparse.Namespace, tokenizer: Tokenizer) -> list[PreparedData]:
    """The data of --perplexity.

    Rank 0 prepares text that is not prepared yet, with the checkpoint's tokenizer.
    """
    from titanlite.data.prepared import PreparedData, open_prepared
    from titanlite.distributed.agreement import PATIENT, broadcast, on_all_ranks
    from titanlite.tools.formats.shared_model import this_rank
    from titanlite.tools.prepare.cache import prepare_text
    from titanlite.tools.prepare.sources import Keys, Source

    # Other settings of a source are options of another command
    keys = Keys(
        "--perplexity",
        "titanlite prepare --pattern",
        "titanlite prepare --field",
        "titanlite prepare --validation",
        "titanlite prepare --ids",
    )

    def prepare_all() -> list[str]:
        if this_rank() > 0:
            return []
        folders = []
        for path in options.perplexity:
            folder = open_prepared(DataConfig(path=path))
            if folder is None:
                split = WHOLE if _is_whole(path) else ""
                source = Source(path, keys=keys, split=split, enclosed=False)
                folder = prepare_text(source, tokenizer, log)
            folders.append(str(folder))
        return folders

    folders = broadcast(on_all_ranks(prepare_all, PATIENT))
    data = [PreparedData(Path(folder), tokenizer) for folder in folders]
    names = [part.name for part in data]
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise ConfigError(
            f"--perplexity: {', '.join(repeated)}: several sets have this name, that of the text "
            "they were made from; evaluate one at a time"
        )
    return data


def _evaluate(
    options: argparse.Namespace,
    full: FullState,
    shared: SharedModel,
    tokenizer: Tokenizer,
    texts: list[PreparedData],
) -> dict[str, dict[str, float]]:
    """Set -> metric -> value."""
    from titanlite.tools.evaluate.perplexity import Reading, perplexity
    from titanlite.tools.formats.shared_model import this_rank

    mask = full.about.config.get("data", {}).get("document_mask") is True
    reading = Reading(shared.model.seq_len, options.limit or 0, options.batch_size, mask)
    results = {}
    for path, part in zip(options.perplexity, texts, strict=True):
        split = options.split
        what = f"its {split} split"
        whole = _is_whole(path)
        if whole:
            split = WHOLE
            what = "the whole file"
        how = dataclasses.replace(reading, rest=whole)
        rule = _ids_as_given(path, part)
        if not rule:
            rule = f"{tokenizer.prompt_rule('texts')}, and end without a special token"
            how = dataclasses.replace(how, document_mask=True)  # each text on its own
        results[part.name] = perplexity(shared, part, split, how)
        if this_rank() == 0:
            what = f"{options.limit} sequences of {what}" if options.limit else what
            log(f"{path}: {results[part.name]['tokens']:,} tokens, {what}; {rule}")
    return results


def _ids_as_given(path: str, part: PreparedData) -> str:
    """Says why nothing is put before a document here; empty for text, which begins as a prompt."""
    from titanlite.data.prepared import is_prepared
    from titanlite.tools.prepare.job import read_job

    if is_prepared(Path(path)):
        return "documents as they were prepared for training"
    if all(file.kind in ("tokens", "megatron") for file in read_job(part.folder).files):
        return "the ids of the file as they are"
    return ""


def _table(results: dict[str, dict[str, float]]) -> list[str]:
    """A line for each metric."""
    rows: list[tuple[str, str, str]] = []
    for name, values in results.items():
        for metric, value in values.items():
            shown = f"{value:,}" if isinstance(value, int) else f"{value:.4f}"
            rows.append((name, metric, shown))
    name_width = max((len(name) for name, _, _ in rows), default=0)
    metric_width = max((len(metric) for _, metric, _ in rows), default=0)
    return [
        f"{name:<{name_width}}  {metric:<{metric_width}}  {shown}" for name, metric, shown in rows
    ]
