"""`titanlite generate`: samples text from a checkpoint, after one prompt or each of a file."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from titanlite.runtime.errors import ConfigError
from titanlite.runtime.progress import progress_bar
from titanlite.tools.cli.options import (
    StrictParser,
    add_checkpoint_options,
    add_sampling_options,
    at_least,
    selection_of,
)
from titanlite.tools.cli.prompt_file import (
    batches_of,
    continued,
    read_prompts,
    require_target,
    rows_to_continue,
    write_texts,
)
from titanlite.tools.cli.several import add_processes_option, is_to_start, join, start

if TYPE_CHECKING:
    import torch

    from titanlite.tokenizer.tokenizer import Tokenizer
    from titanlite.tools.cli.json_rows import JsonRow
    from titanlite.tools.formats.full_state import FullState
    from titanlite.tools.formats.shared_model import SharedModel

PROMPT = "def"
BATCH = 8


def run(argv: list[str]) -> int:
    """Prints the prompt and its continuation by the model, or writes those of a file."""
    options = _options(argv)
    rows: list[JsonRow] = []
    if options.prompts is not None:
        rows = read_prompts(options.prompts)  # a mistake in it is found before torch is imported
    if is_to_start(options):
        return start("generate", argv, options.processes)
    device = join(options)
    from titanlite.tools.formats.shared_model import open_shared

    full = open_shared(options.path, selection_of(options))
    if not options.max_new_tokens and not full.about.seq_len:
        raise ConfigError(
            f"{full.path}: the sequence length of training is not in the file; set --max-new-tokens"
        )
    if options.prompts is None:
        _continue_one(options, full, device)
    else:
        _continue_file(options, full, device, rows)
    return 0


def _continue_one(options: argparse.Namespace, full: FullState, device: torch.device) -> None:
    """Prints a prompt, and its continuation while rank 0 generates it."""
    from titanlite.model.generate import generate
    from titanlite.tools.chat.text_stream import text_stream, write_text
    from titanlite.tools.formats.huggingface_kept import stops_of
    from titanlite.tools.formats.load_weights import tokenizer_of
    from titanlite.tools.formats.shared_model import SharedModel, this_rank

    tokenizer = tokenizer_of(full, options.tokenizer)
    prompt = tokenizer.encode_prompt(options.prompt)
    max_new_tokens = options.max_new_tokens or max(1, full.about.seq_len - len(prompt))
    length = len(prompt) + max_new_tokens
    shared = SharedModel(full, device, length)
    if this_rank() == 0:
        print(_description(full, shared, tokenizer, length), file=sys.stderr)
        print(options.prompt, end="", flush=True)
        tokens = generate(
            shared.model,
            prompt,
            max_new_tokens,
            stop=stops_of(full, tokenizer),
            temperature=options.temperature,
            top_k=options.top_k,
            seed=options.seed,
        )
        for text in text_stream(tokens, tokenizer, prompt):
            write_text(text)
        print()
    shared.follow()


def _continue_file(
    options: argparse.Namespace, full: FullState, device: torch.device, rows: list[JsonRow]
) -> None:
    """Writes the rows of --prompts with their texts. Each process continues its batches of them."""
    from titanlite.distributed.agreement import gather_on_rank0
    from titanlite.tools.formats.huggingface_kept import stops_of
    from titanlite.tools.formats.load_weights import tokenizer_of
    from titanlite.tools.formats.shared_model import SharedModel, num_ranks, this_rank

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
    shared = SharedModel(full, device, length)
    if this_rank() == 0:
        print(_description(full, shared, tokenizer, length), file=sys.stderr)
    # Small enough that each process has a batch
    size = min(options.batch, -(-len(rows) // num_ranks()))
    own_batches = batches_of(to_continue, size)[this_rank() :: num_ranks()]
    texts: list[tuple[int, str]] = []
    with progress_bar(sum(map(len, own_batches)), "prompts", "") as bar:
        bar.disable = this_rank() > 0
        for number, text in continued(
            shared.model,
            tokenizer,
            to_continue,
            own_batches,
            stops_of(full, tokenizer),
            options.temperature,
            options.top_k,
        ):
            texts.append((number, text))
            bar.update(1)
    shared.follow()
    of_all: dict[int, str] = {}
    for part in gather_on_rank0(texts):
        of_all |= dict(part)
    if this_rank() == 0:
        write_texts(options.out, rows, of_all)


def _description(full: FullState, shared: SharedModel, tokenizer: Tokenizer, length: int) -> str:
    description = f"{full.path}: {shared.describe()}; {tokenizer.prompt_rule()}"
    if length > full.about.seq_len > 0:
        description += (
            f"; the text may exceed the {full.about.seq_len} tokens of a training sequence"
        )
    return description


def _options(argv: list[str]) -> argparse.Namespace:
    parser = StrictParser(
        prog="titanlite generate",
        description="Sample text from a checkpoint.",
    )
    parser.add_argument(
        "path",
        type=Path,
        metavar="CHECKPOINT",
        help="a run folder (its newest checkpoint), or any format that `convert` reads",
    )
    add_checkpoint_options(parser)
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--prompt", default=PROMPT, help=f"text to continue; default: {PROMPT}")
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
        help="number of tokens; 0 (default): up to the sequence length of training",
    )
    add_sampling_options(parser)
    add_processes_option(parser)
    options = parser.parse_args(argv)
    if options.prompts is None:
        for name in ("out", "batch"):
            if getattr(options, name) is not None:
                raise ConfigError(f"--{name}: is for --prompts FILE")
    options.batch = options.batch or BATCH
    if options.out is not None:
        require_target(options.out, options.prompts)
    return options
