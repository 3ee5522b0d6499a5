"""A PyTorch-native pretraining reference for Llama models. `titanlite.launch` starts a run."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from titanlite.cli.from_python import launch as launch


def __getattr__(name: str) -> object:
    if name != "launch":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_module("titanlite.cli.from_python").launch  # when it is used: a training process does not need it
