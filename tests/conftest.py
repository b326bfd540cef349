"""Fixtures that several folders of tests share."""

from __future__ import annotations

from pathlib import Path

import pytest
from fixtures.tiny_model import build_tiny_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder of a random two-layer Qwen2 with a character tokenizer."""
    return build_tiny_model(tmp_path_factory.mktemp("models") / "tiny")
