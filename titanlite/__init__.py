"""A PyTorch-native pretraining reference for Llama models. `titanlite.launch` starts a run."""

TYPE_CHECKING = False  # not from typing: `python -m titanlite` would import it before __main__ has cleaned sys.path
if TYPE_CHECKING:
    from titanlite.tools.cli.from_python import launch as launch


def __getattr__(name: str) -> object:
    if name != "launch":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from titanlite.tools.cli.from_python import launch  # when it is used: a training process does not need it

    return launch
