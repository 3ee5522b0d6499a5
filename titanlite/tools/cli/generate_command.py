"""`titanlite generate`: samples text from a checkpoint of any format."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from titanlite.runtime.errors import ConfigError
from titanlite.tools.cli.options import at_least


def run(argv: list[str]) -> int:
    """Prints the prompt and its continuation by the model."""
    options = _options(argv)
    import torch

    from titanlite.model.generate import generate
    from titanlite.tools.formats.load_weights import load_model, open_verified, tokenizer_of

    full = open_verified(options.path, options.step, options.model, options.weights)
    cuda = options.device == "cuda" or (options.device == "auto" and torch.cuda.is_available())
    if cuda and not torch.cuda.is_available():
        raise ConfigError("--device cuda: torch finds no CUDA device; allowed: auto, cpu")
    encoder = tokenizer_of(full, options.tokenizer)
    prompt = [encoder.bos, *encoder.encode(options.prompt)]
    trained = full.about.seq_len
    if not trained and not options.max_new_tokens:
        raise ConfigError(
            f"{full.path}: the sequence length of training is not in the file; set --max-new-tokens"
        )
    room = options.max_new_tokens or max(1, trained - len(prompt))
    model = load_model(full, torch.device("cuda" if cuda else "cpu"), len(prompt) + room)
    note = (
        f"; the text may exceed the {trained} tokens of a training sequence"
        if len(prompt) + room > trained > 0
        else ""
    )
    print(f"{full.path}: {model.config.num_parameters:,} parameters{note}", file=sys.stderr)
    new = generate(
        model,
        prompt,
        room,
        stop=encoder.eos,
        temperature=options.temperature,
        top_k=options.top_k,
        seed=options.seed,
    )
    print(options.prompt, end="", flush=True)
    ids = []
    shown = ""
    for token in new:
        ids.append(token)
        text = encoder.decode(ids)
        # a character may be several tokens: print it when it is complete
        if not text.endswith("\ufffd"):
            print(text[len(shown) :], end="", flush=True)
            shown = text
    print(encoder.decode(ids)[len(shown) :])
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
    parser.add_argument(
        "--step", type=at_least(int, 0), help="step of the checkpoint; default: the newest"
    )
    parser.add_argument(
        "--weights", default="model", help="of a run: model, or ema for the averaged weights"
    )
    parser.add_argument(
        "--model", default="", help="flavor or model.json, for files without the model's shape"
    )
    parser.add_argument(
        "--tokenizer", default="", help="a tokenizer's file or folder, for checkpoints without one"
    )
    parser.add_argument("--prompt", default="def", help="text to continue")
    parser.add_argument(
        "--max-new-tokens",
        type=at_least(int, 0, 10**6),
        default=0,
        help="number of tokens; 0: up to the sequence length of training",
    )
    parser.add_argument(
        "--temperature",
        type=at_least(float, 0),
        default=0.7,
        help="0: always the most likely token",
    )
    parser.add_argument(
        "--top-k",
        type=at_least(int, 0),
        default=50,
        help="sample from the k most likely tokens; 0: from all",
    )
    parser.add_argument(
        "--seed",
        type=at_least(int, 0, 2**63 - 1),
        default=0,
        help="the same seed gives the same text",
    )
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="device")
    return parser.parse_args(argv)
