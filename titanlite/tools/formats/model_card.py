"""Writes README.md of a folder for Hugging Face: the model, how it was trained, what it reached.

What it is: a model card in the form of huggingface.co, from the configuration in the checkpoint and
the metrics of its run. Paths stay out of it, because a card is made to be published: of the data it
has the names.
What it costs: reading metrics.jsonl once.
Reference: https://huggingface.co/docs/hub/model-cards
"""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path
from typing import Any

from titanlite.model.flavors import LlamaConfig
from titanlite.observe.metrics_file import RowReader
from titanlite.runtime.documents import parse_json
from titanlite.runtime.errors import printable, shortened
from titanlite.runtime.version import __version__
from titanlite.tools.formats.full_state import FullState

CARD = "README.md"
HEAD = """\
---
library_name: transformers
pipeline_tag: text-generation
tags:
- titanlite
---
"""
USE = """\
## Use

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

folder = "."  # this one, or its name on huggingface.co
model = AutoModelForCausalLM.from_pretrained(folder)
tokenizer = AutoTokenizer.from_pretrained(folder)
prompt = tokenizer("The", return_tensors="pt")
print(tokenizer.decode(model.generate(**prompt, max_new_tokens=50)[0]))
```

The licence of the weights is not stated here; add it, and what the data allows, before you publish
the folder.
"""
# Row of the table -> keys of the config, shown one after the other
SETTINGS = {
    "sequences per step": ("training.global_batch_size",),
    "tokens of a sequence": ("training.seq_len",),
    "optimizer": ("optimizer.name",),
    "peak learning rate": ("optimizer.lr",),
    "schedule": ("schedule.name",),
    "computed in": ("training.compute_dtype",),
    "rank of adapters": ("lora.rank",),
}
MOST_SETS = 20  # of validation, in the table


def model_card(state: FullState, family: str, length: int) -> bytes:
    """Writes the card of a checkpoint; `family`: of transformers, `length`: the longest sequence.

    A checkpoint of another program has no configuration, so its card has the model only.
    """
    trained = state.sources[-1] if state.sources else state  # with adapters, the run that made them
    run = ""
    if trained.about.format == "titanlite":
        run = trained.path.parent.parent.name
    name = state.path.name if state.path.is_dir() else state.path.stem
    title = _cell(_setting(trained, "run.name") or run or name)
    lines = [HEAD, f"# {title}", "", _model(state.model, family, length), ""]
    rows = _rows(trained)
    if rows:
        lines += ["## Training", "", "| | |", "|---|---|"]
        lines += [f"| {name} | {value} |" for name, value in rows]
        lines.append("")
    return "\n".join([*lines, USE]).encode()


def _model(model: LlamaConfig, family: str, length: int) -> str:
    return (
        f"A {family.capitalize()} of {model.num_parameters:,} parameters: {model.num_layers} "
        f"blocks of width {model.dim}, {model.num_heads} query heads and {model.num_kv_heads} "
        f"key/value heads, a vocabulary of {model.vocab_size:,}, sequences of up to {length:,} "
        f"tokens. Exported by titanlite {__version__}."
    )


def _rows(state: FullState) -> list[tuple[str, str]]:
    """The table about the training of a run's checkpoint; empty for others."""
    about = state.about
    if about.format != "titanlite" or about.step is None:
        return []
    rows = [("steps", f"{about.step:,}")]
    metrics = _metrics(state.path.parent.parent / "metrics.jsonl", about.step)
    tokens = metrics.get("tokens")
    if tokens is not None:
        rows.append(("tokens", f"{tokens:,.0f}"))
    for name, keys in SETTINGS.items():
        values = [_setting(state, key) for key in keys]
        shown = [_cell(value) for value in values if value not in (None, "", 0)]
        if shown:
            rows.append((name, ", ".join(shown)))
    base = _setting(state, "checkpoint.initial_load")
    if isinstance(base, str) and base:
        base = re.sub(r"(^|/)checkpoints/step-\d+/*$", "", base)  # a run's name, not its step's
        rows.append(("base model", _cell(Path(os.path.abspath(base)).name)))
    for name, value in (("layout", about.layout), ("torch", about.torch)):
        rows.append((name, _cell(value)))
    names = _data_names(about.files.get("data.json", b"{}"))
    if names:
        rows.append(("data", ", ".join(names)))
    if "loss" in metrics:
        rows.append(("training loss (nats per token)", f"{metrics['loss']:.4f}"))
    validated = [name for name in metrics if re.fullmatch(r"validation/.+/loss", name)]
    for name in validated[:MOST_SETS]:
        data = _cell(name.split("/", 1)[1].rpartition("/")[0])
        rows.append((f"validation loss, {data}", f"{metrics[name]:.4f}"))
    return rows


def _metrics(path: Path, step: int) -> dict[str, float]:
    """The last value of each metric up to a step; none of a checkpoint outside of its run."""
    reader = RowReader(path)
    values: dict[str, float] = {}
    while rows := reader.read():
        for row in rows:
            if row["step"] > step:
                continue
            for name, value in row.items():
                if isinstance(value, (int, float)):
                    values[name] = value
    return values


def _setting(state: FullState, key: str) -> Any:
    section, _, name = key.partition(".")
    keys = state.about.config.get(section)
    return keys.get(name) if isinstance(keys, dict) else None


def _data_names(description: bytes) -> list[str]:
    """The names of the sources in a checkpoint's data.json."""
    with contextlib.suppress(ValueError, TypeError, KeyError, AttributeError):
        about = parse_json(description)
        entries = about.get("sources", [about])
        return [_cell(entry["name"]) for entry in entries[:MOST_SETS] if entry["name"]]
    return []


def _cell(value: object) -> str:
    """A value in a table of Markdown: one line, without marks that would end the cell."""
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return re.sub(r"[|<>`\[\]\\]", " ", shortened(printable(text[:1000]), 100))
