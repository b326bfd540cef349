"""Phrases are counted as whole words, once a response, in any case and over line breaks."""

import pytest

from megadapo.errors import ConfigError
from megadapo.observe.config import ObserveConfig
from megadapo.observe.metrics.reflection import metric_name, reflection_shares


def test_shares_are_of_responses_and_of_whole_words():
    texts = [
        "Wait, wait: 3.\nLet  me\ncheck that.",
        "The waiter awaits; let me checkmate.",
        "HOWEVER I wait",
        "",
    ]
    assert reflection_shares(texts, ["wait", "let me check", "however", "double-check"]) == {
        "reflection/response_share": 0.5,
        "reflection/wait": 0.5,
        "reflection/let_me_check": 0.25,
        "reflection/however": 0.25,
        "reflection/double_check": 0.0,
    }


@pytest.mark.parametrize(
    ("phrase", "text", "has"),
    [
        ("wait", "wait!", True),
        ("wait", "wait2", False),
        ("double-check", "I double-check", True),
        ("hmm...", "hmm... no", True),
        ("(wait)", "so (wait) so", True),
        ("等一下", "我们等一下再看", True),
        ("a.c", "abc", False),
    ],
)
def test_a_phrase_is_text_and_no_pattern(phrase, text, has):
    assert reflection_shares([text], [phrase])[metric_name(phrase)] == float(has)


def test_nothing_to_look_at_is_not_a_share_of_zero():
    assert reflection_shares([], ["wait"]) == {
        "reflection/response_share": None,
        "reflection/wait": None,
    }
    assert reflection_shares(["wait"], []) == {"reflection/response_share": None}


@pytest.mark.parametrize(
    ("phrases", "said"),
    [
        (("wait", "Wait"), "would share reflection/wait"),
        (("let me", "let-me"), "would share"),
        (("response share",), "would share"),
        (("", "wait"), "without a word"),
        (("...",), "without a word"),
    ],
)
def test_phrases_that_cannot_be_told_apart_are_refused(phrases, said):
    with pytest.raises(ConfigError, match=said):
        ObserveConfig(reflection_phrases=phrases)
    assert ObserveConfig(reflection_phrases=()).reflection_phrases == ()
