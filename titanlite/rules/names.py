"""Rules about settings that name parts of the model, which must exist. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Iterator
from fnmatch import fnmatchcase

from titanlite.config.mistakes import suggestion
from titanlite.config.schema import Config
from titanlite.model.flavors import BLOCK_LINEAR, LlamaConfig, parameter_shapes
from titanlite.rules.divides import stages_fit_schedule

# PEFT's names of the layers that can have adapters -> ours
PROJECTIONS = {
    "q_proj": "wq",
    "k_proj": "wk",
    "v_proj": "wv",
    "o_proj": "wo",
    "gate_proj": "w1",
    "down_proj": "w2",
    "up_proj": "w3",
}


def optimizer_groups(config: Config, llama: LlamaConfig, degrees: dict[str, int]) -> Iterator[str]:
    """Requires that each pattern of `optimizer.groups` fits parameters that no earlier one has.

    A parameter belongs to the first group whose pattern fits its name.
    """
    names = list(parameter_shapes(llama))
    without_group = set(names)
    for number, group in enumerate(config.optimizer.groups, 1):
        key = f"optimizer.groups[{number}]"
        fitting = {name for name in names if fnmatchcase(name, group.pattern)}
        shown = f'{key}.pattern = "{group.pattern}"'
        if not group.pattern:
            example = "expected a glob pattern of parameter names, as in layers.*.weight"
            yield f"{key}.pattern is missing: {example}"
        elif not fitting:
            kinds = list(dict.fromkeys(re.sub(r"\.\d+\.", ".*.", name) for name in names))
            hint = suggestion(group.pattern, kinds)
            if not hint:
                hint = f"; expected one that fits some of {', '.join(kinds)}"
            yield f"{shown} fits no parameter{hint}"
        elif not fitting & without_group:
            yield f"{shown}: all parameters that it fits belong to earlier groups"
        without_group -= fitting


def float8_skip(config: Config, llama: LlamaConfig, degrees: dict[str, int]) -> Iterator[str]:
    """Requires that each name in `float8.skip` matches a linear layer, and some layers are left."""
    if not config.float8.enabled:
        return
    skipped = config.float8.skipped
    blocks = [f"layers.{i}." for i in range(llama.num_layers)]
    names = [block + name for block in blocks for name in BLOCK_LINEAR]
    for part in skipped:
        if not any(part in name for name in names):
            hint = suggestion(part, [*BLOCK_LINEAR, *blocks])
            yield (
                f"float8.skip: no linear layer has {part} in its name; "
                f"expected parts of {', '.join(BLOCK_LINEAR)}{hint}"
            )
    if all(any(part in name for part in skipped) for name in names):
        yield (
            f"float8.skip = {config.float8.skip!r} skips all linear layers; "
            "expected some, or float8.enabled = false"
        )


def frozen(config: Config, llama: LlamaConfig, degrees: dict[str, int]) -> Iterator[str]:
    """Requires that each pattern of `training.frozen` fits a parameter, and that some are left; in
    a pipeline also in the first stage.
    """
    patterns = config.training.frozen_patterns
    if not patterns:
        return
    names = list(parameter_shapes(llama))
    shown = ", ".join(patterns)
    if config.lora.rank > 0:
        yield f"training.frozen = {shown}: with lora.rank > 0 all weights are frozen; leave it out"
        return
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            kinds = list(dict.fromkeys(re.sub(r"\.\d+\.", ".*.", name) for name in names))
            hint = suggestion(pattern, kinds)
            yield f"training.frozen: {pattern!r} fits no parameter{hint or f'; as {kinds[1]}'}"
    trained = [
        name for name in names if not any(fnmatchcase(name, pattern) for pattern in patterns)
    ]
    if not trained:
        yield f"training.frozen = {shown}: nothing is left to train"
    elif degrees["pp"] > 1 and not any(name.startswith("layers.0.") for name in trained):
        yield (
            f"training.frozen = {shown}: a pipeline stage without trained parameters before it has "
            "no gradient; with parallel.pp > 1 leave some of block 0 trained"
        )


def lora(config: Config, llama: LlamaConfig, degrees: dict[str, int]) -> Iterator[str]:
    """Requires targets and blocks of `lora` that exist, and in a pipeline some in stage 0."""
    if config.lora.rank == 0:
        return
    if config.lora.alpha <= 0:
        yield f"lora.alpha = {config.lora.alpha:g}: adapters times 0 learn nothing; expected more"
    targets = config.lora.target_names
    layers = [name.rpartition(".")[2] for name in BLOCK_LINEAR]
    if llama.num_experts:  # experts have no adapters
        layers = [name for name in layers if name not in ("w1", "w2", "w3")]
    for name in targets:
        if name not in layers:
            hint = suggestion(name, layers)
            if name in PROJECTIONS:
                hint = f"; here that is {PROJECTIONS[name]}"
            yield f"lora.targets: no linear layer {name!r}{hint}; allowed: {', '.join(layers)}"
    if len(set(targets)) < len(targets):
        yield f"lora.targets = {config.lora.targets!r}: names a layer twice; expected each once"
    # An adapter of a rank above the smaller side of its layer adds nothing
    sides = [
        min(shape)
        for name, shape in parameter_shapes(llama).items()
        if name.startswith("layers.0.") and name.split(".")[-2] in targets and len(shape) == 2
    ]
    if config.lora.rank > max(sides, default=config.lora.rank):
        yield (
            f"lora.rank = {config.lora.rank}: the smaller side of a layer in lora.targets has at "
            f"most {max(sides)} features; expected a rank up to that"
        )
    if not targets:
        yield f"lora.targets is empty; expected some of {', '.join(layers)}"
    last = llama.num_layers - 1
    for word in config.lora.layers.replace(",", " ").split():
        numbers = re.fullmatch(r"(\d{1,4})(?:-(\d{1,4}))?", word)
        if not numbers or not int(numbers[1]) <= int(numbers[2] or numbers[1]) <= last:
            yield f"lora.layers: {word!r}; expected numbers from 0 to {last}, or ranges as 0-{last}"
            return
    if degrees["pp"] > 1 and not config.lora.adapts_layer(0):
        yield (
            f"lora.layers = {config.lora.layers!r}: a pipeline stage without adapters before it "
            "has no gradient; with parallel.pp > 1 include block 0, or leave lora.layers empty"
        )


def pipeline_split(config: Config, llama: LlamaConfig, degrees: dict[str, int]) -> Iterator[str]:
    """Requires one module per later stage in `parallel.pp_split`, in the model's order."""
    pp = degrees["pp"]
    names = config.parallel.stage_starts
    if pp == 1 or not names or not stages_fit_schedule(config):
        return
    shown = f"parallel.pp_split = {config.parallel.pp_split!r}"
    order = [*(f"layers.{i}" for i in range(llama.num_layers)), "norm", "output"]
    for name in names:
        if name not in order:
            yield (
                f"parallel.pp_split: no module {name!r}{suggestion(name, order)}; "
                "allowed: layers.N, norm, output"
            )
            return
    later_stages = pp * config.parallel.stages_per_process - 1
    if len(names) != later_stages:
        yield f"{shown} names {len(names)}; expected {later_stages}, one per later stage"
        return
    positions = [order.index(name) for name in names]
    if positions != sorted(set(positions)):
        yield f"{shown}: expected each name once and in the model's order"
