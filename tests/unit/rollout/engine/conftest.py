"""The tokenizer of the tests of episodes."""

import pytest
from transformers import AutoTokenizer

from tests.support.tokenizers.small import write_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return AutoTokenizer.from_pretrained(
        write_tokenizer("qwen3", tmp_path_factory.mktemp("tokenizer") / "qwen3")
    )
