import math

import numpy as np
import pytest

from megadapo.errors import DataError
from megadapo.rollout.config import EvaluationConfig
from megadapo.rollout.evaluation import evaluate
from megadapo.rollout.requests import SamplingSettings, response_seeds
from tests.support.scripted_engines import (
    PlainTokenizer,
    RightAtLeast,
    ScriptedEngines,
    make_prompts,
    respond,
)

BOUND = 40
MAX_TOKENS = 20


def run(prompts, engines=None, **config):
    config = {"samples_per_problem": 5, **config}
    return evaluate(
        engines or ScriptedEngines(),
        prompts,
        RightAtLeast(BOUND),
        EvaluationConfig(**config),
        tokenizer=PlainTokenizer(),
        max_response_tokens=MAX_TOKENS,
        seed=4,
    )


def test_accuracy_and_its_standard_error_over_problems():
    """Over responses, the error would ignore that a problem's responses are alike."""
    settings = SamplingSettings(temperature=1.0, top_p=0.7, max_tokens=MAX_TOKENS)
    texts = [
        [respond(seed, settings).text for seed in response_seeds(5, 4, "evaluation", prompt.id)]
        for prompt in make_prompts(30)
    ]
    means = np.array([np.mean([sum(map(int, t)) >= BOUND for t in group]) for group in texts])
    lengths = np.array([len(t) for group in texts for t in group])
    result = run(make_prompts(30))
    assert 0.2 < result.accuracy < 0.8
    assert result.accuracy == pytest.approx(means.mean(), abs=1e-15)
    assert result.standard_error == pytest.approx(means.std(ddof=1) / math.sqrt(30), abs=1e-15)
    assert (result.num_problems, result.samples_per_problem) == (30, 5)
    assert result.response_length_mean == lengths.mean()
    assert result.truncated_fraction == np.mean(lengths == MAX_TOKENS) > 0


def test_neither_the_order_nor_the_other_problems_matter():
    prompts = make_prompts(12)
    whole = run(prompts)
    assert run(prompts[::-1], ScriptedEngines("short first")) == whole
    halves = [run(prompts[:6]), run(prompts[6:])]
    assert np.mean([half.accuracy for half in halves]) == pytest.approx(whole.accuracy)


def test_max_problems_takes_the_first_ones():
    assert run(make_prompts(12), max_problems=4) == run(make_prompts(4))


def test_one_problem_has_no_standard_error():
    assert math.isnan(run(make_prompts(1)).standard_error)


def test_no_problems_is_an_error():
    with pytest.raises(DataError, match="held-out"):
        run([])
