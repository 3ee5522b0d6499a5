"""A PyTorch-native pretraining reference for Llama models. `titanlite.launch` starts a run."""

from titanlite.runtime.version import __version__ as __version__

# not from typing: `python -m titanlite` would import it before __main__ has cleaned sys.path
TYPE_CHECKING = False
if TYPE_CHECKING:
    from titanlite.runtime.errors import ConfigError as ConfigError
    from titanlite.tools.cli.from_python import launch as launch


def __getattr__(name: str) -> object:
    """Imports `launch`, and `ConfigError`, which it raises, at their first use: training needs
    neither.
    """
    if name == "launch":
        from titanlite.tools.cli.from_python import launch

        return launch
    if name == "ConfigError":
        from titanlite.runtime.errors import ConfigError

        return ConfigError
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
