"""`titanlite generate`: samples text from a checkpoint."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from titanlite.runtime.errors import ConfigError
from titanlite.tools.cli.options import (
    StrictParser,
    add_checkpoint_options,
    at_least,
    log,
    selection_of,
)
from titanlite.tools.cli.several import add_processes_option, is_to_start, join, start

if TYPE_CHECKING:
    from titanlite.tokenizer.tokenizer import Tokenizer
    from titanlite.tools.formats.full_state import FullState
    from titanlite.tools.formats.shared_model import SharedModel

PROMPT = "def"


def run(argv: list[str]) -> int:
    """Prints the prompt and its continuation, or the answer to a question, while rank 0 generates
    it.
    """
    options = _options(argv)
    if is_to_start(options):
        return start("generate", argv, options.processes)
    device = join(options)
    from titanlite.model.generate import generate
    from titanlite.tools.cli.text_stream import text_stream, write_text
    from titanlite.tools.formats.huggingface_kept import stops_of
    from titanlite.tools.formats.load_weights import tokenizer_of
    from titanlite.tools.formats.shared_model import SharedModel, open_shared, this_rank

    full = open_shared(options.path, selection_of(options))
    if not options.max_new_tokens and not full.about.seq_len:
        raise ConfigError(
            f"{full.path}: the sequence length of training is not in the file; set --max-new-tokens"
        )
    tokenizer = tokenizer_of(full, options.tokenizer)
    if options.chat is None:
        prompt = tokenizer.encode_prompt(options.prompt)
        stops = stops_of(full, tokenizer)
        shown = options.prompt
        rule = tokenizer.prompt_rule()
    else:
        prompt, stops = _question(options, full, tokenizer)
        shown = ""
        rule = "the question is written by its chat template"
    max_new_tokens = options.max_new_tokens or max(1, full.about.seq_len - len(prompt))
    length = len(prompt) + max_new_tokens
    shared = SharedModel(full, device, length)
    if this_rank() == 0:
        log(_description(full, shared, rule, length))
        print(shown, end="", flush=True)
        tokens = generate(
            shared.model,
            prompt,
            max_new_tokens,
            stop=stops,
            temperature=options.temperature,
            top_k=options.top_k,
            seed=options.seed,
        )
        for text in text_stream(tokens, tokenizer, prompt):
            write_text(text)
        print()
    shared.follow()
    return 0


def _question(
    options: argparse.Namespace, full: FullState, tokenizer: Tokenizer
) -> tuple[list[int], set[int]]:
    """The ids of --chat, and those that end the answer. Raises ConfigError."""
    from titanlite.tokenizer.tokenizer_json import TEMPLATE_FILE
    from titanlite.tools.chat.conversation import question_prompt
    from titanlite.tools.chat.find_template import find_template
    from titanlite.tools.formats.huggingface_kept import kept_of

    if TEMPLATE_FILE in full.about.files:
        template = full.about.files[TEMPLATE_FILE].decode("utf-8", "replace")
    else:
        template = find_template(Path(options.tokenizer or full.path))
    if not template:
        raise ConfigError(
            f"--chat: {full.path} has no chat template; expected one in it or in the folder of "
            "--tokenizer, or --prompt in place of --chat"
        )
    return question_prompt(options.chat, template, tokenizer, kept_of(full))


def _description(full: FullState, shared: SharedModel, rule: str, length: int) -> str:
    description = f"{full.path}: {shared.describe()}; {rule}"
    if length > full.about.seq_len > 0:
        description += (
            f"; the text may exceed the {full.about.seq_len} tokens of a training sequence"
        )
    return description


def _options(argv: list[str]) -> argparse.Namespace:
    parser = StrictParser(
        prog="titanlite generate",
        description="Sample text from a checkpoint, or its answer to a question.",
    )
    parser.add_argument(
        "path",
        type=Path,
        metavar="CHECKPOINT",
        help="a run folder (its newest checkpoint), or any format that `convert` reads",
    )
    add_checkpoint_options(parser)
    given = parser.add_mutually_exclusive_group()
    given.add_argument("--prompt", default=PROMPT, help=f"text to continue; default: {PROMPT}")
    given.add_argument(
        "--chat", metavar="TEXT", help="a question, written by the model's chat template"
    )
    parser.add_argument(
        "--max-new-tokens",
        type=at_least(int, 0, 10**6),
        default=0,
        help="number of tokens; 0 (default): up to the sequence length of training",
    )
    parser.add_argument(
        "--temperature",
        type=at_least(float, 0),
        default=0.7,
        help="0: always the most likely token; default: %(default)s",
    )
    parser.add_argument(
        "--top-k",
        type=at_least(int, 0),
        default=50,
        help="sample from the k most likely tokens; 0: from all; default: %(default)s",
    )
    parser.add_argument(
        "--seed",
        type=at_least(int, 0, 2**63 - 1),
        default=0,
        help="the same seed gives the same text; default: %(default)s",
    )
    add_processes_option(parser)
    options: argparse.Namespace = parser.parse_args(argv)
    return options
