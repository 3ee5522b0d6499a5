"""`titanlite generate`: samples text from a checkpoint of any format."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from titanlite.runtime.errors import ConfigError
from titanlite.tools.cli.options import (
    add_checkpoint_options,
    add_sampling_options,
    at_least,
    device_of,
)


def run(argv: list[str]) -> int:
    """Prints the prompt and its continuation by the model."""
    options = _options(argv)
    from titanlite.model.generate import generate
    from titanlite.tools.chat.text_stream import text_stream
    from titanlite.tools.formats.load_weights import load_model, open_verified, tokenizer_of

    full = open_verified(
        options.path, options.step, options.model, options.weights, options.adapter
    )
    device = device_of(options)
    tokenizer = tokenizer_of(full, options.tokenizer)
    prompt = [tokenizer.bos, *tokenizer.encode(options.prompt)]
    trained_length = full.about.seq_len
    max_new_tokens = options.max_new_tokens
    if not max_new_tokens:
        if not trained_length:
            raise ConfigError(
                f"{full.path}: the sequence length of training is not in the file; set "
                "--max-new-tokens"
            )
        max_new_tokens = max(1, trained_length - len(prompt))
    length = len(prompt) + max_new_tokens
    model = load_model(full, device, length)
    description = f"{full.path}: {model.config.num_parameters:,} parameters"
    if length > trained_length > 0:
        description += f"; the text may exceed the {trained_length} tokens of a training sequence"
    print(description, file=sys.stderr)
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
    return 0


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
    parser.add_argument("--prompt", default="def", help="text to continue")
    parser.add_argument(
        "--max-new-tokens",
        type=at_least(int, 0, 10**6),
        default=0,
        help="number of tokens; 0: up to the sequence length of training",
    )
    add_sampling_options(parser)
    return parser.parse_args(argv)
