"""`titanlite generate`: samples text from a checkpoint of any format, after one prompt or after
each of a file.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from titanlite.runtime.errors import ConfigError
from titanlite.runtime.progress import progress_bar
from titanlite.tools.cli.options import (
    add_checkpoint_options,
    add_sampling_options,
    at_least,
    device_of,
)
from titanlite.tools.cli.prompt_file import (
    batches_of,
    continued,
    read_prompts,
    require_target,
    rows_to_continue,
    write_texts,
)

if TYPE_CHECKING:
    from titanlite.data.json_rows import JsonRow
    from titanlite.tools.formats.full_state import FullState

PROMPT = "def"
BATCH = 8


def run(argv: list[str]) -> int:
    """Prints the prompt and its continuation by the model, or writes those of a file."""
    options = _options(argv)
    rows: list[JsonRow] = []
    if options.prompts is not None:
        rows = read_prompts(options.prompts)  # a mistake in it is found before torch is imported
    from titanlite.tools.formats.load_weights import open_verified

    full = open_verified(
        options.path, options.step, options.model, options.weights, options.adapter
    )
    if not options.max_new_tokens and not full.about.seq_len:
        raise ConfigError(
            f"{full.path}: the sequence length of training is not in the file; set --max-new-tokens"
        )
    if options.prompts is None:
        _continue_one(options, full)
    else:
        _continue_file(options, full, rows)
    return 0


def _continue_one(options: argparse.Namespace, full: FullState) -> None:
    """Prints a prompt, and its continuation while it is generated."""
    from titanlite.model.generate import generate
    from titanlite.tools.chat.text_stream import text_stream
    from titanlite.tools.formats.load_weights import load_model, tokenizer_of

    tokenizer = tokenizer_of(full, options.tokenizer)
    prompt = [tokenizer.bos, *tokenizer.encode(options.prompt)]
    max_new_tokens = options.max_new_tokens or max(1, full.about.seq_len - len(prompt))
    length = len(prompt) + max_new_tokens
    model = load_model(full, device_of(options), length)
    print(_description(full, length), file=sys.stderr)
    print(options.prompt, end="", flush=True)
    tokens = generate(
        model,
        prompt,
        max_new_tokens,
        stop=tokenizer.eos,
        temperature=options.temperature,
        top_k=options.top_k,
        seed=options.seed,
    )
    for text in text_stream(tokens, tokenizer, prompt):
        print(text, end="", flush=True)
    print()


def _continue_file(options: argparse.Namespace, full: FullState, rows: list[JsonRow]) -> None:
    """Writes the rows of --prompts with their texts."""
    from titanlite.tools.formats.load_weights import load_model, tokenizer_of

    tokenizer = tokenizer_of(full, options.tokenizer)
    to_continue = rows_to_continue(
        options.prompts,
        rows,
        tokenizer,
        full.about.seq_len,
        options.max_new_tokens,
        options.seed,
    )
    length = max(len(row.prompt) + row.max_new_tokens for row in to_continue)
    model = load_model(full, device_of(options), length)
    print(_description(full, length), file=sys.stderr)
    batches = batches_of(to_continue, options.batch)
    texts: dict[int, str] = {}
    with progress_bar(len(rows), "prompts", "") as bar:
        for number, text in continued(
            model, tokenizer, to_continue, batches, options.temperature, options.top_k
        ):
            texts[number] = text
            bar.update(1)
    write_texts(options.out, rows, texts)


def _description(full: FullState, length: int) -> str:
    description = f"{full.path}: {full.model.num_parameters:,} parameters"
    if length > full.about.seq_len > 0:
        description += (
            f"; the text may exceed the {full.about.seq_len} tokens of a training sequence"
        )
    return description


def _options(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="titanlite generate",
        description="Sample text from a checkpoint.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "path",
        type=Path,
        help="a run folder (its newest checkpoint), or any format that `convert` reads",
    )
    add_checkpoint_options(parser)
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--prompt", default=PROMPT, help="text to continue")
    source.add_argument(
        "--prompts",
        type=Path,
        metavar="FILE",
        help="continue each line of a .txt file, or each `prompt` of a file of JSON lines",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="with --prompts: write JSON lines, each row with its `text`; default: print them",
    )
    parser.add_argument(
        "--batch",
        type=at_least(int, 1, 10**6),
        metavar="N",
        help=f"with --prompts: prompts at a time; default: {BATCH}",
    )
    parser.add_argument(
        "--max-new-tokens",
        type=at_least(int, 0, 10**6),
        default=0,
        help="number of tokens; 0: up to the sequence length of training",
    )
    add_sampling_options(parser)
    options = parser.parse_args(argv)
    if options.prompts is None:
        for name in ("out", "batch"):
            if getattr(options, name) is not None:
                raise ConfigError(f"--{name}: is for --prompts FILE")
    options.batch = options.batch or BATCH
    if options.out is not None:
        require_target(options.out)
    return options
