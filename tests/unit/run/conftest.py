"""Fixtures that tests of runs share."""

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """Decodes the tokens of ScriptedEngines into their digits."""
    words = {str(token - 3) if 3 <= token <= 12 else f"<{token}>": token for token in range(13)}
    plain = Tokenizer(models.WordLevel(words, unk_token="<0>"))
    plain.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=plain)
