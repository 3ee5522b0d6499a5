"""The facts about a run in its checkpoints, so that they can be used without the run's folder.

What it is: the config, the layout and the data's fingerprint, which go into each manifest; and the
small files beside it: config.toml, model.json (the model's shape), data.json, the tokenizer, and
what is kept of a folder that the tokenizer came from (`tokenizer/kept_files.py`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from titanlite.checkpoint.manifest import RunMetadata, Settings
from titanlite.config.schema import Config
from titanlite.config.to_toml import to_toml
from titanlite.data.prepared import PreparedData, description, fingerprint_of
from titanlite.model.flavors import LlamaConfig
from titanlite.tokenizer.kept_files import (
    folder_of,
    kept_beside,
    template_in,
    text_ends,
    to_files,
)
from titanlite.tokenizer.tokenizer_json import TEMPLATE_FILE


class RunFacts:
    """The facts of a run, which do not change while it trains."""

    def __init__(
        self,
        config: Config,
        llama: LlamaConfig,
        layout: Mapping[str, int],
        data: list[PreparedData],
    ) -> None:
        """`config`: the one to record; `layout`: mesh axis -> degree, with ep."""
        self.toml = to_toml(config)
        self.config: Settings = dataclasses.asdict(config)
        self.layout = dict(layout)
        self.data = fingerprint_of(data)
        self.vocab_size = llama.vocab_size
        kept = kept_beside(config.data.tokenizer, bool(config.checkpoint.initial_load))
        self.ends = text_ends(kept, data[0].tokenizer.eos)  # ids that end a text of the model
        self.files = {  # name -> content
            "config.toml": self.toml.encode(),
            "data.json": description(data),
            "model.json": llama.to_json().encode(),
            **data[0].tokenizer.files,
            **to_files(kept),
        }
        templates = [part.manifest.get("chat_template", "") for part in data]
        template = next(filter(None, templates), "")
        if template:  # for conversations: whoever uses the checkpoint needs the same template
            self.files[TEMPLATE_FILE] = template.encode()
        elif config.checkpoint.initial_load and config.data.tokenizer:
            self.files |= template_in(folder_of(config.data.tokenizer))

    def metadata(self, validation_loss: float | None) -> RunMetadata:
        """Builds the run's part of a manifest; `validation_loss`: that of the saved step."""
        return RunMetadata(self.layout, self.config, self.data, validation_loss)
