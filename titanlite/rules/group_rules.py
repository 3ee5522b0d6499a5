"""Rules of `optimizer.groups`: patterns that fit parameters.

Imported if the key is set; imports no torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from fnmatch import fnmatchcase

from titanlite.config.mistakes import suggestion
from titanlite.config.schema import Config
from titanlite.model.flavors import LlamaConfig, parameter_shapes


def group_problems(config: Config, llama: LlamaConfig, degrees: dict[str, int]) -> Iterable[str]:
    """No two groups share a parameter: it belongs to the first group whose pattern fits its name."""
    names = list(parameter_shapes(llama))
    left = set(names)
    for number, group in enumerate(config.optimizer.groups, 1):
        key = f"optimizer.groups[{number}]"
        for name in ("lr", "weight_decay"):
            if -1 < (value := getattr(group, name)) < 0:
                yield f"{key}.{name} = {value}: expected at least 0, or -1 for that of the section"
        fitting = {name for name in names if fnmatchcase(name, group.pattern)}
        if not group.pattern:
            yield f"{key}.pattern is missing: expected a glob pattern of parameter names, as in layers.*.weight"
        elif not fitting:
            kinds = list(dict.fromkeys(re.sub(r"\.\d+\.", ".*.", name) for name in names))
            near = (
                suggestion(group.pattern, kinds)
                or f"; expected one that fits some of {', '.join(kinds)}"
            )
            yield f'{key}.pattern = "{group.pattern}" fits no parameter{near}'
        elif not fitting & left:
            yield f'{key}.pattern = "{group.pattern}": all parameters that it fits belong to earlier groups'
        left -= fitting
