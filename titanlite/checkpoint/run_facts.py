"""What a checkpoint says about its run, so that it can be used without the run's folder.

What it is: the config, the layout and the data's fingerprint, which go into each manifest; and the
small files beside it: config.toml, model.json (the model's shape), data.json and the tokenizer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from titanlite.checkpoint.manifest import RunMetadata, Settings
from titanlite.config.schema import Config
from titanlite.config.to_toml import to_toml
from titanlite.data.prepared import PreparedData, description, fingerprint_of
from titanlite.model.flavors import LlamaConfig
from titanlite.tokenizer.tokenizer_json import TEMPLATE_FILE


class RunFacts:
    """The facts of a run, which do not change while it trains."""

    def __init__(
        self,
        config: Config,
        llama: LlamaConfig,
        degrees: Mapping[str, int],
        data: list[PreparedData],
    ) -> None:
        """`config`: as it is to be recorded; `degrees`: of each axis of the mesh."""
        self.toml = to_toml(config)
        self.config: Settings = dataclasses.asdict(config)
        self.layout = dict(degrees)
        self.data = fingerprint_of(data)
        self.vocab_size = llama.vocab_size
        self.files = {  # name -> content
            "config.toml": self.toml.encode(),
            "data.json": description(data),
            "model.json": llama.to_json().encode(),
            **data[0].tokenizer.files,
        }
        templates = [part.manifest.get("chat_template", "") for part in data]
        template = next(filter(None, templates), "")
        if template:  # of conversations: a user of the checkpoint talks to it in the same form
            self.files[TEMPLATE_FILE] = template.encode()

    def metadata(self, validation_loss: float | None) -> RunMetadata:
        """The run's part of a manifest; `validation_loss`: at the step that is saved."""
        return RunMetadata(self.layout, self.config, self.data, validation_loss)
