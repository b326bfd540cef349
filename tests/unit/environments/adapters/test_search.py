"""A search finds the texts that BM25 ranks first, in the same order in every process."""

import json
import math
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from megadapo.environments.adapters.search import NO_RESULTS, Index, Search, terms_of
from tests.support.processes.running import run_python
from tests.unit.environments.adapters.playing import playing, task

ROWS = [
    {"id": "1", "title": "Berlin", "text": "Berlin is the capital of Germany. " * 40},
    {"id": "2", "title": "Paris", "text": "Paris is the capital of France."},
    {"id": "3", "title": "Café", "text": "A café sells coffee, in Paris too.", "url": 7},
    {"id": "4", "title": "東京", "text": "東京は日本の首都です。"},
    {"id": "5", "title": "Empty", "text": ""},
]


@pytest.fixture
def corpus(tmp_path: Path) -> str:
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return str(path)


def by_definition(
    documents: list[Counter[str]], query: str, *, k1: float = 0.9, b: float = 0.4
) -> list[float]:
    """Return the score of each text, term by term from the formula of BM25."""
    mean = sum(one.total() for one in documents) / len(documents)
    scores = []
    for one in documents:
        score = 0.0
        for term in set(terms_of(query)):
            having = sum(term in other for other in documents)
            rarity = math.log(1 + (len(documents) - having + 0.5) / (having + 0.5))
            norm = k1 * (1 - b + b * one.total() / mean)
            score += rarity * one[term] * (k1 + 1) / (one[term] + norm)
        scores.append(score)
    return scores


def test_ranking_is_that_of_the_definition() -> None:
    random = np.random.default_rng(0)
    words = [f"w{n}" for n in range(40)]
    texts = [" ".join(random.choice(words, size=random.integers(0, 60))) for _ in range(200)]
    index, documents = Index(texts), [Counter(terms_of(text)) for text in texts]
    for _ in range(30):
        query = " ".join(random.choice(words, size=random.integers(1, 6)))
        scores = by_definition(documents, query)
        found = index.search(query, 12)
        best = sorted(scores, reverse=True)[: len(found)]
        assert [scores[number] for number in found] == pytest.approx(best, rel=1e-5)
        assert all(scores[number] > 0 for number in found)


def test_ties_keep_the_order_of_the_corpus_and_misses_are_left_out() -> None:
    index = Index(["b a", "x", "a b", "b c", "", "a b"])
    assert index.search("a", 10) == [0, 2, 5]
    assert index.search("a", 2) == [0, 2]
    assert index.search("b a", 4) == [0, 2, 5, 3]
    assert index.search("y", 3) == index.search("", 3) == index.search("a", 0) == []
    assert Index([]).search("a", 3) == []


@pytest.mark.parametrize(
    ("query", "titles"),
    [
        ("capital of France", ["Paris", "Berlin"]),
        ("CAFÉ", ["Café"]),
        ("cafe\u0301", ["Café"]),
        ("日本の首都", ["東京"]),
        ("東", ["東京"]),
        ("ＰＡＲＩＳ!!", ["Paris", "Café"]),
        ("berlin " * 5000, ["Berlin"]),
    ],
)
def test_words_match_without_case_and_forms_of_unicode(
    corpus: str, query: str, titles: list[str]
) -> None:
    with playing(Search(corpus=corpus), task()) as player:
        found = player.call("search", query=query).split("\n\n")
        assert [one.splitlines()[0] for one in found] == [
            f"[{place}] {title}" for place, title in enumerate(titles, start=1)
        ]


def test_results_are_numbered_and_cut(corpus: str) -> None:
    with playing(Search(corpus=corpus, max_chars=33), task()) as player:
        found = player.call("search", query="capital", num=2)
        assert found == (
            "[1] Berlin\nBerlin is the capital of Germany. ...\n\n"
            "[2] Paris\nParis is the capital of France."
        )


@pytest.mark.parametrize("query", ["", " ", "\n", "?!", "\ud800", "\0", "zebra", "<search>"])
def test_a_query_without_results_says_so(corpus: str, query: str) -> None:
    with playing(Search(corpus=corpus), task()) as player:
        assert player.call("search", query=query) == NO_RESULTS


def test_mistakes_in_calls_are_told(corpus: str) -> None:
    with playing(Search(corpus=corpus, max_num=4), task()) as player:
        assert player.call("search") == 'Error: search: argument "query" is missing'
        for num in (-1, 5, 10**30):
            assert "from 1 to 4" in player.call("search", query="paris", num=num)
        for num in ("3", 2.0, True, None):
            assert 'argument "num" must be {"type": "integer"}' in player.call(
                "search", query="paris", num=num
            )
        assert (
            player.call("find", query="x") == 'Error: there is no tool "find"; the tool is search'
        )


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{", "line 6.*JSONDecodeError"),
        ("[]", "line 6.*expected a JSON object"),
        ('{"id": "6", "title": "t"}', "line 6.*KeyError: 'text'"),
        ('{"id": 6, "title": "t", "text": "x"}', "line 6: id, title, text must be texts"),
    ],
)
def test_a_wrong_row_is_named(corpus: str, line: str, problem: str) -> None:
    with open(corpus, "a") as file:
        file.write(line)
    with pytest.raises(ValueError, match=problem):
        Search(corpus=corpus)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"num": 11}, "num = 11 must be at most max_num = 10"),
        ({"max_num": 0}, "max_num = 0 must be a whole number above 0"),
        ({"max_chars": -1}, "max_chars = -1 must be a whole number above 0"),
    ],
)
def test_wrong_options_are_named(corpus: str, options: dict[str, int], problem: str) -> None:
    """Without a number in the call, a search would return more than the most."""
    with pytest.raises(ValueError, match=problem):
        Search(corpus=corpus, **options)


def test_an_empty_corpus_is_refused(tmp_path: Path) -> None:
    (tmp_path / "none.jsonl").touch()
    with pytest.raises(ValueError, match="no rows"):
        Search(corpus=str(tmp_path / "none.jsonl"))
    with pytest.raises(OSError):
        Search(corpus=str(tmp_path / "missing.jsonl"))


def test_index_is_made_once_in_a_process_and_again_for_a_changed_file(tmp_path: Path) -> None:
    path = tmp_path / "corpus.jsonl"
    row = {"id": "1", "title": "t", "text": ""}
    lines = [json.dumps(row | {"text": f"w{n} " * 50}) for n in range(3000)]
    path.write_text("\n".join(lines))
    start = time.perf_counter()
    first = Search(corpus=str(path))
    once = time.perf_counter() - start
    start = time.perf_counter()
    others = [Search(corpus=str(path)) for _ in range(50)]
    assert time.perf_counter() - start < once
    assert all(other._index is first._index for other in others)
    path.write_text("\n".join([*lines, json.dumps(row | {"text": "changed"})]))
    with playing(Search(corpus=str(path)), task()) as player:
        assert player.call("search", query="changed") == "[1] t\nchanged"


def test_order_is_the_same_in_every_process() -> None:
    """Sums in the order of a set would differ with the hashes of texts."""
    program = (
        "from megadapo.environments.adapters.search import Index\n"
        "texts = [' '.join(f'w{(n * k) % 17}' for k in range(n % 23)) for n in range(300)]\n"
        "index = Index(texts)\n"
        "for n in range(40): print(index.search(f'w{n % 17} w{n % 5} w{n % 11} w{n % 7}', 9))\n"
    )
    outputs = {run_python(program, PYTHONHASHSEED=seed).stdout for seed in ("1", "2", "3")}
    assert len(outputs) == 1
