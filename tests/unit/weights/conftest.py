"""Models that several tests read."""

from pathlib import Path

import pytest

from tests.support.models.tiny_models import FAMILY_NAMES, make_model


@pytest.fixture(scope="session")
def model_folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One folder per family."""
    root = tmp_path_factory.mktemp("models")
    return {family: make_model(root / family, family) for family in FAMILY_NAMES}
