"""Fixtures that several folders of tests share."""

import gc
import os
from pathlib import Path

import pytest

pytest.register_assert_rewrite("tests.support")

from megadapo.cluster.processes import COLLECTOR_THRESHOLD  # noqa: E402
from tests.support import REPOSITORY  # noqa: E402 - its assertions are rewritten
from tests.support.models.tiny_models import make_text_model  # noqa: E402

gc.set_threshold(*COLLECTOR_THRESHOLD)
# what tests start imports tests.support as well: fork servers, Ray's workers, whole programs
os.environ["PYTHONPATH"] = os.pathsep.join(
    filter(None, [os.environ.get("PYTHONPATH"), str(REPOSITORY)])
)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder of a random two-layer Qwen2 with a character tokenizer."""
    return make_text_model(tmp_path_factory.mktemp("models") / "tiny")
