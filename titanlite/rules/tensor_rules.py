"""Rules of tensor parallel: sizes that it divides. Imported if tp > 1."""

from __future__ import annotations

from collections.abc import Iterable

from titanlite.config.schema import Config
from titanlite.model.flavors import LlamaConfig
from titanlite.rules.degrees import nearest, world


def tensor_problems(config: Config, llama: LlamaConfig, degrees: dict[str, int]) -> Iterable[str]:
    """Heads, hidden width and vocabulary are divided over tp, and so is the sequence between the
    layers.
    """
    tp = degrees["tp"]
    cp = degrees["cp"]
    sizes = {
        "model.num_heads": llama.num_heads,
        "model.num_kv_heads": llama.num_kv_heads,
        "model.ffn_dim": llama.ffn_dim,
        "model.vocab_size": llama.vocab_size,
    }
    if config.training.seq_len % cp == 0:  # otherwise `context_problems` reports the mistake
        name = "training.seq_len / parallel.cp" if cp > 1 else "training.seq_len"
        sizes[name] = config.training.seq_len // cp
    broken = [f"{name} = {size}" for name, size in sizes.items() if size % tp]
    if broken:
        near = nearest(
            tp,
            lambda n: all(size % n == 0 for size in [*sizes.values(), world(degrees)]),
            llama.num_heads,
        )
        yield f"parallel.tp = {tp} does not divide {' and '.join(broken)}; nearest that divide all: {near}"
