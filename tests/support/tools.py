"""Scripts of tools/ as modules."""

import importlib.util
import sys
from types import ModuleType

from tests.support import REPOSITORY


def load_tool(name: str) -> ModuleType:
    """Import tools/NAME.py under its own name, which its dataclasses need."""
    spec = importlib.util.spec_from_file_location(name, REPOSITORY / "tools" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
