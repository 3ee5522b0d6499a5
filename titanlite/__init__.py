"""A PyTorch-native pretraining reference for Llama models. `titanlite.launch` starts a run."""

# not from typing: `python -m titanlite` would import it before __main__ has cleaned sys.path
TYPE_CHECKING = False
if TYPE_CHECKING:
    from titanlite.tools.cli.from_python import launch as launch


def __getattr__(name: str) -> object:
    if name != "launch":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # When it is used: a training process does not need it
    from titanlite.tools.cli.from_python import launch

    return launch
