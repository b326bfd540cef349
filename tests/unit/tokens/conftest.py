"""Tokenizers: small ones everywhere, the models' own where `make test-tokenizers` ran."""

import pytest

from megadapo.tokens.tokenizer import read_tokenizer
from tests.support.tokenizers.small import KINDS, TOKENIZERS, write_tokenizer
from tests.support.tokenizers.small import OWN as PUBLIC

OWN = [pytest.param((name, True), id=f"{name}-own", marks=pytest.mark.full) for name in PUBLIC]


@pytest.fixture(scope="session", params=[*(pytest.param((n, False), id=n) for n in KINDS), *OWN])
def kind(request):
    """The name of a tokenizer and whether it is the model's own."""
    return request.param


@pytest.fixture(scope="session")
def folder(kind, tmp_path_factory):
    name, is_own = kind
    if not is_own:
        return write_tokenizer(name, tmp_path_factory.mktemp("tokenizers") / name)
    if not (TOKENIZERS / name / "tokenizer.json").is_file():
        pytest.skip(f"no {TOKENIZERS / name}: run make test-tokenizers, which fetches it")
    return TOKENIZERS / name


@pytest.fixture(scope="session")
def tokenizer(folder):
    return read_tokenizer(str(folder))
