"""Loads the model of a run's own checkpoint into one process, for the sample text at the end of a
run.

What it is: the parameters of a step folder, verified and read through its manifest; any layout may
have written them. `tools/formats/load_weights.py` loads other formats, and folders from elsewhere.
What it costs: memory for the parameters; the parameter files are read twice, the first time to
verify their hashes.
"""

from __future__ import annotations

from pathlib import Path

import torch

from titanlite.checkpoint.manifest import CorruptCheckpoint
from titanlite.checkpoint.manifest_reader import read_file, read_manifest
from titanlite.checkpoint.read_step import read_step, verify_files
from titanlite.model.llama import Llama
from titanlite.model.shape_file import from_json


def load_model(folder: Path, device: torch.device, seq_len: int) -> Llama:
    """The model in a step folder, for sequences of up to `seq_len` tokens.

    Raises CorruptCheckpoint.
    """
    manifest = read_manifest(folder)
    problems = verify_files(
        folder, manifest, [name for name in manifest.files if name.startswith("model")]
    )
    if problems:
        raise CorruptCheckpoint(problems)
    try:
        config = from_json(read_file(folder, manifest, "model.json").decode())
    except CorruptCheckpoint:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptCheckpoint(f"{folder / 'model.json'}: {error}") from None
    with torch.device("meta"):
        model = Llama(config, seq_len)
    model.to_empty(device=device)
    model.reset_rope(device)
    read_step(folder, manifest, {"model": model.state_dict()}, alone=True)
    return model.eval()
