"""Tiny models, a batch and the trainer processes that the tests of this folder share."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.trainer.ranks import Ranks


@pytest.fixture(scope="package")
def ranks(models: Path) -> Iterator[Ranks]:
    # they end before other folders' tests: an idle group's threads still wake up all the time
    started = Ranks(models)
    yield started
    started.close()


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one tiny random model per architecture and option, all in fp32."""
    from tests.support.models.tiny_models import make_trained_models

    folder = tmp_path_factory.mktemp("models")
    make_trained_models(folder)
    return folder
