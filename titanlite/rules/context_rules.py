"""Rules of context parallel: sizes that it divides, and what its methods do not support.

Imported if cp > 1.
"""

from __future__ import annotations

from collections.abc import Iterable

from titanlite.config.schema import Config
from titanlite.model.flavors import LlamaConfig
from titanlite.rules.degrees import multiples, nearest, world


def context_problems(config: Config, llama: LlamaConfig, degrees: dict[str, int]) -> Iterable[str]:
    """The sequence is divided over cp, into two chunks per rank; for Ulysses heads are divided as
    well.
    """
    cp = degrees["cp"]
    tp = degrees["tp"]
    method = config.parallel.cp_method
    seq_len = config.training.seq_len
    if method == "ring" and config.run.device == "cpu":
        yield "parallel.cp_method = ring needs CUDA devices; with run.device = cpu: all_gather or ulysses"
    if method == "ring" and config.data.document_mask:
        yield (
            "parallel.cp_method = ring supports no masks; with data.document_mask = true use all_gather or ulysses, "
            "or set data.document_mask to false"
        )
    if method != "ulysses":
        if seq_len % (2 * cp):
            near = nearest(
                cp,
                lambda n: n == 1 or (seq_len % (2 * n) == 0 and world(degrees) % n == 0),
                world(degrees),
            )
            yield (
                f"training.seq_len = {seq_len} is not a multiple of 2 x parallel.cp = {2 * cp} (each process has a "
                f"chunk from the head and one from the tail); nearest: {multiples(seq_len, 2 * cp)}, "
                f"or parallel.cp = {near}"
            )
        return
    sizes = {
        "training.seq_len": seq_len,
        "model.num_heads / parallel.tp": llama.num_heads // tp,
        "model.num_kv_heads / parallel.tp": llama.num_kv_heads // tp,
    }
    broken = [f"{name} = {size}" for name, size in sizes.items() if size % cp]
    if broken:
        near = nearest(
            cp,
            lambda n: all(size % n == 0 for size in [*sizes.values(), world(degrees)]),
            llama.num_heads,
        )
        yield (
            f"parallel.cp = {cp} with parallel.cp_method = ulysses does not divide {' and '.join(broken)}; "
            f"nearest that divide all: {near}; all_gather needs no heads to divide"
        )
