"""megadapo: DAPO training of reasoning models at Megatron scale."""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"
__all__ = ["RunFolder", "evaluate", "load_config", "train"]


def __getattr__(name: str) -> Any:
    """Import what notebooks and scripts use when they first do."""
    if name in __all__:
        return getattr(import_module("megadapo.api"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *__all__]
