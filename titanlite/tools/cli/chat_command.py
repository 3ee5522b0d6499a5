"""`titanlite chat`: holds a conversation with a model in the terminal.

What it is: each line becomes a user's message. The chat template makes a prompt of the whole
conversation, and the answer is printed while it is generated. The template comes from the
checkpoint (from its training data or the model's folder); without one a plain template is used.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from titanlite.runtime.errors import ConfigError
from titanlite.tools.cli.options import (
    StrictParser,
    add_checkpoint_options,
    add_sampling_options,
    at_least,
    selection_of,
)
from titanlite.tools.cli.several import add_processes_option, is_to_start, join, start

if TYPE_CHECKING:
    from titanlite.tools.chat.session import ChatSession

HELP = "Ctrl-D or /exit ends, /new begins another conversation"
DEFAULT_CONTEXT = 4096  # tokens, if the checkpoint does not name its sequence length


def run(argv: list[str]) -> int:
    """Answers `--prompt`, or what is read from standard input, line by line."""
    options = _options(argv)
    if is_to_start(options):
        return start("chat", argv, options.processes)
    device = join(options)
    from titanlite.tokenizer.tokenizer_json import TEMPLATE_FILE
    from titanlite.tools.chat.find_template import find_template, read_template
    from titanlite.tools.chat.session import ChatSession, Sampling
    from titanlite.tools.chat.template import PLAIN
    from titanlite.tools.formats.huggingface_kept import kept_of
    from titanlite.tools.formats.load_weights import tokenizer_of
    from titanlite.tools.formats.shared_model import SharedModel, open_shared, this_rank

    full = open_shared(options.path, selection_of(options))
    tokenizer = tokenizer_of(full, options.tokenizer)
    if options.template:
        template = read_template(options.template)
    elif TEMPLATE_FILE in full.about.files:
        template = full.about.files[TEMPLATE_FILE].decode("utf-8", "replace")
    else:
        template = find_template(Path(options.tokenizer or full.path))
    context = options.context or full.about.seq_len or DEFAULT_CONTEXT
    shared = SharedModel(full, device, context)
    if this_rank() == 0:
        sampling = Sampling(
            options.max_new_tokens, options.temperature, options.top_k, options.seed
        )
        session = ChatSession(
            shared.model, tokenizer, template or PLAIN, sampling, options.system, kept_of(full)
        )
        form = "its chat template" if template else "a plain template: it has none"
        print(f"{full.path}: {shared.describe()}, {context} tokens, {form}", file=sys.stderr)
        _talk(session, options.prompt)
    shared.follow()
    return 0


def _talk(session: ChatSession, prompt: str) -> None:
    """Prints the answer to the prompt, or to each line that is read.

    Raises ConfigError for a message that cannot be answered. On a terminal the error is printed
    and the conversation goes on.
    """
    from titanlite.tools.chat.template import TemplateError
    from titanlite.tools.chat.text_stream import write_text

    typed = sys.stdin.isatty() and not prompt
    left_out = 0
    for text in [prompt] if prompt else _lines(typed):
        if text == "/new":
            session.begin()
            continue
        try:
            for part in session.answer(text):
                write_text(part)
        except (ConfigError, TemplateError) as error:
            problem = str(error)
            if isinstance(error, TemplateError):
                problem = f"the chat template: {problem}"
            if not typed:
                raise ConfigError(problem) from None
            print(f"error: {problem}", file=sys.stderr)
            continue
        print()
        if session.left_out > left_out:
            print(
                f"the first {session.left_out} messages no longer fit and are left out (--context)",
                file=sys.stderr,
            )
        left_out = session.left_out


def _lines(typed: bool) -> Iterator[str]:
    """Yields the lines that are typed or piped, without blank ones, up to the end or /exit."""
    if typed:
        print(HELP, file=sys.stderr)
    while True:
        try:
            text = input("> " if typed else "").strip()
        except EOFError:
            return
        if text == "/exit":
            return
        if text:
            yield text


def _options(argv: list[str]) -> argparse.Namespace:
    parser = StrictParser(
        prog="titanlite chat",
        description="Talk to a model in the terminal.",
    )
    parser.add_argument(
        "path",
        type=Path,
        metavar="CHECKPOINT",
        help="a run folder (its newest checkpoint), or any format that `convert` reads",
    )
    add_checkpoint_options(parser)
    parser.add_argument("--prompt", default="", help="answer this and end")
    parser.add_argument("--system", default="", help="the system message; default: none")
    parser.add_argument("--template", type=Path, help="a chat template (Jinja) in place of its own")
    parser.add_argument(
        "--context",
        type=at_least(int, 0, 10**6),
        default=0,
        help="tokens of the longest conversation; 0 (default): the sequence length of training",
    )
    parser.add_argument(
        "--max-new-tokens",
        type=at_least(int, 1, 10**6),
        default=256,
        help="tokens of an answer; default: %(default)s",
    )
    add_sampling_options(parser)
    add_processes_option(parser)
    return parser.parse_args(argv)
