"""Token pieces: text that is lost, or shown at the wrong token."""

import random
import time

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from megadapo.observe.rollouts.token_pieces import token_pieces


def byte_tokenizer() -> Tokenizer:
    """Return a tokenizer with token b for byte b, a few words, and a special token 300."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    visible = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    visible.decoder = decoders.ByteLevel()
    return visible


TOKENIZER = byte_tokenizer()
SPECIAL = len(TOKENIZER.get_vocab())
TOKENIZER.add_special_tokens(["<end>"])


def encode(text: str) -> list[int]:
    pre = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    ((piece, _),) = pre.pre_tokenize_str(text) or [("", (0, 0))]
    return [TOKENIZER.token_to_id(character) for character in piece]


def decode(ids: list[int]) -> str:
    return TOKENIZER.decode(ids, skip_special_tokens=True)


def pieces_of(ids: list[int]) -> tuple[str, ...]:
    return token_pieces(decode, ids, decode(ids))


def test_no_tokens():
    assert token_pieces(decode, [], "") == ()


def test_character_is_at_its_last_token():
    pieces = ("a", "", "\u00e9", " ", *("", "", "", "\U0001f600"), "!")
    assert pieces_of(encode("".join(pieces))) == pieces


def test_special_tokens_add_nothing():
    assert pieces_of([*encode("ab"), SPECIAL]) == ("a", "b", "")
    assert pieces_of([SPECIAL]) == ("",)


@pytest.mark.parametrize("seed", range(20))
def test_pieces_join_to_the_text(seed):
    """Incomplete and invalid characters decode to replacement characters."""
    source = random.Random(seed)
    good = encode("x \u00e9\u4e8c\U0001f600\ufffd")
    ids = [source.choice([*good, source.randrange(256)]) for _ in range(source.randrange(200))]
    pieces = pieces_of(ids)
    assert len(pieces) == len(ids)
    assert "".join(pieces) == decode(ids)


def test_invalid_bytes_take_linear_time():
    start = time.perf_counter()
    assert len(pieces_of([200] * 10_000)) == 10_000
    assert time.perf_counter() - start < 5


def test_decoder_that_drops_the_first_space():
    """SentencePiece models strip the space of the first word only."""
    words = Tokenizer(models.WordLevel({"\u2581a": 0, "\u2581b": 1}, unk_token="\u2581a"))
    words.decoder = decoders.Metaspace()
    ids = [0, 1, 0]
    assert token_pieces(words.decode, ids, words.decode(ids)) == ("a", " b", " a")
