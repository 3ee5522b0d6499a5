"""Draws layouts at random, from all settings that change how a step is computed.

What it is: a layout has degrees whose product is at most `processes`, and each setting of
`CHOICES`, where it has an effect, with a probability of 1 in 5. What the rules of `titanlite/rules`
refuse is drawn again.
Why it is here: `ladder.py` lists combinations chosen by hand. A mistake in how two settings work
together is more likely in the others.
What it costs: nothing but the runs. The same seed draws the same layouts.
"""

from __future__ import annotations

import math
import random

from titanlite.config.schema import PP_SCHEDULES
from titanlite.model.flavors import resolve_flavor
from titanlite.rules.degrees import AXES
from titanlite.runtime.errors import ConfigError
from titanlite.tools.verify.ladder import EXPERTS, make_case, reason_not_fitting

ATTEMPTS = 100  # per layout; of those drawn for `debug` on 4 processes 64 % fit
PROBABILITY = 0.2
# Key -> its values other than the default
CHOICES: dict[str, tuple[str, ...]] = {
    "reshard_after_forward": ("always", "never", "2"),
    "reduce_every_microbatch": ("false",),
    "prefetch": ("2",),
    "cpu_offload": ("true",),
    "optimizer_offload": ("true",),
    "cp_method": ("ulysses",),
    "pp_schedule": tuple(name for name in PP_SCHEDULES if name != "1F1B"),
    "pp_microbatch_size": ("2",),
    "pp_split": ("output",),
    "ep": ("2", "4"),  # with experts
    "recompute.mode": ("full", "selective", "memory_budget"),
    "recompute.every": ("2",),
    "recompute.offload": ("true",),
    "compile.enabled": ("true",),
    "compile.loss": ("true",),
    "loss.num_chunks": ("3",),
    "loss.z_loss": ("1e-2",),
    "ema.decay": ("0.9",),
    "optimizer.name": ("muon",),
    "optimizer.clip": ("agc",),
    "training.local_batch_size": ("1", "2", "8"),
    "training.frozen": ("layers.1.*", "tok_embeddings.* *.attention_norm.weight"),
    "data.document_mask": ("true",),
    "model.embeddings": ("untied",),
    "model.qkv_bias": ("true",),
    "model.qk_norm": ("true",),
    "model.head_dim": ("40",),
    "model.rope_theta": ("10000",),
    "model.sliding_window": ("7",),
    "model.window_layers": ("1-2",),
    "lora.rank": ("4",),
    "lora.targets": ("wq w2", "wq wk wv wo w1 w2 w3"),
    "lora.dropout": ("0.1",),
}
# Key -> another key without which it has no effect; an axis must have more than one process
NEEDS = {
    "cp_method": "cp",
    "pp_schedule": "pp",
    "pp_microbatch_size": "pp",
    "pp_split": "pp",
    "recompute.every": "recompute.mode",
    "recompute.offload": "recompute.mode",
    "model.window_layers": "model.sliding_window",
    "lora.targets": "lora.rank",
    "lora.dropout": "lora.rank",
}


def draw_layouts(
    count: int,
    seed: int,
    processes: int,
    arguments: list[str],
    device: str,
    compiler: str,
    vocab_size: int,
) -> list[str]:
    """Draws `count` different arguments of `--layout` that fit the model, or fewer if few fit.

    `processes`: the largest number of processes.
    """
    generator = random.Random(seed)
    fitting: dict[str, None] = {}  # in the order in which they are drawn
    for _ in range(count * ATTEMPTS):
        if len(fitting) == count:
            break
        layout = draw(generator, processes, compiler)
        try:
            case = make_case(arguments, layout, device)
            llama = resolve_flavor(case.config.model, vocab_size)
        except ConfigError:
            continue
        if not reason_not_fitting(case, llama):
            fitting[layout] = None
    return list(fitting)


def draw(generator: random.Random, processes: int, compiler: str) -> str:
    """Draws an argument of `--layout`, which may not fit."""
    degrees = dict.fromkeys(AXES, 1)
    for axis in generator.sample(AXES, len(AXES)):
        left = processes // math.prod(degrees.values())
        degrees[axis] = generator.choice([n for n in (1, 1, 2, 2, 4) if n <= left])
    options = {axis: str(degree) for axis, degree in degrees.items() if degree > 1}
    for key, values in CHOICES.items():
        drawn = generator.random() < PROBABILITY
        value = generator.choice(values)
        if drawn and NEEDS.get(key, key) in {*options, key}:
            options[key] = value
    if "ep" in options:
        options |= EXPERTS
    by_compiler = options.get("recompute.mode") == "memory_budget"
    if by_compiler or "compile.enabled" in options or "compile.loss" in options:
        options["compile.backend"] = compiler
    return ",".join(f"{key}={value}" for key, value in options.items())
