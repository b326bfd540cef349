"""Return the message with which a recipe is refused."""

from pathlib import Path

import pytest

from megadapo.config import load_config
from megadapo.errors import ConfigError


def refused(path: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    return str(caught.value)
