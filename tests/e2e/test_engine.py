"""One real engine, shared by all tests of this file: a start costs 20 seconds of a core."""

import json
import shutil

import numpy as np
import pytest
from transformers import AutoTokenizer

from megadapo.data.prompts import Prompt, PromptStream
from megadapo.errors import InfraError
from megadapo.rewards.dapo_math import Score
from megadapo.rollout.config import EvaluationConfig, SamplingConfig
from megadapo.rollout.evaluation import evaluate
from megadapo.rollout.requests import GroupRequest, SamplingSettings, response_seeds
from megadapo.rollout.reserve import encode_group
from megadapo.rollout.sampler import Sampler
from tests.support.engine_checks import (
    EOS,
    MAX_PROMPT_TOKENS,
    MAX_RESPONSE_TOKENS,
    Reference,
    ask,
    bits,
    make_requests,
    running_engines,
    worst_error,
)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model(tiny_model, tmp_path_factory):
    """The tiny model, with a generation config that asks for another way of sampling."""
    folder = shutil.copytree(tiny_model, tmp_path_factory.mktemp("models") / "model")
    path = folder / "generation_config.json"
    settings = {"do_sample": True, "top_k": 3, "temperature": 0.2, "repetition_penalty": 1.5}
    path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))
    return folder


@pytest.fixture(scope="module")
def engines(model, tmp_path_factory):
    with running_engines(model, tmp_path_factory.mktemp("logs"), num_threads=2) as engines:
        yield engines


@pytest.fixture(scope="module")
def reference(model):
    return Reference(model)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_the_models_at_the_sampling_temperature(engines, reference, temperature):
    """Taken before the temperature, they would be another distribution's than the trainer's."""
    groups = make_requests(12, 3)
    answers = ask(engines, groups, temperature=temperature)
    assert worst_error(reference, groups, answers, temperature) < 1e-5


def test_first_tokens_follow_the_models_distribution(engines, reference):
    """The generation config's top-k, temperature and repetition penalty must not be applied."""
    prompt, num_draws = (7, 9, 11, 30), 4000
    group = GroupRequest(key=0, prompt_ids=prompt, seeds=response_seeds(num_draws, "first"))
    (answers,) = ask(engines, [group], max_tokens=1).values()
    counts = np.bincount([response.token_ids[0] for response in answers], minlength=50)
    expected = num_draws * reference.distribution(prompt)[-1].double().exp().numpy()
    # 49 degrees of freedom: above 98 with probability 4e-5
    assert ((counts - expected) ** 2 / expected).sum() < 98


def test_a_response_does_not_depend_on_its_company(engines):
    """On order, on the rest of the batch, or on what is cached: to the last bit, at two threads."""
    groups = make_requests(40, 4)
    expected = bits(ask(engines, groups))
    assert bits(ask(engines, groups)) == expected
    assert bits(ask(engines, groups[::-1])) == expected
    for some in (groups[30:33], groups[4:5]):
        assert bits(ask(engines, some)) == {group.key: expected[group.key] for group in some}


def test_only_a_response_that_ends_itself_has_an_end_token(engines, model):
    answers = ask(engines, make_requests(40, 4))
    tokenizer = AutoTokenizer.from_pretrained(model)
    reasons = set()
    for response in (r for group in answers.values() for r in group):
        ids = response.token_ids.tolist()
        reasons.add(response.finish_reason)
        assert EOS not in ids[:-1]
        assert (ids[-1] == EOS) == (response.finish_reason == "stop")
        assert response.finish_reason == "stop" or len(ids) == MAX_RESPONSE_TOKENS
        assert response.text == tokenizer.decode(ids, skip_special_tokens=True)
    assert reasons == {"stop", "length"}


def test_the_seed_alone_decides(engines):
    seeds = response_seeds(6, "seeds")
    groups = [GroupRequest(key=key, prompt_ids=(5, 6, 7), seeds=seeds) for key in (0, 1)]
    answers = bits(ask(engines, groups))
    assert answers[0] == answers[1]
    assert len({tokens for tokens, *_ in answers[0]}) == 6


def test_a_prompt_that_does_not_fit_is_an_error_and_not_the_engines_end(engines):
    too_long = GroupRequest(
        key=0, prompt_ids=(3,) * (MAX_PROMPT_TOKENS + MAX_RESPONSE_TOKENS + 1), seeds=(1,)
    )
    with pytest.raises(InfraError, match="engine 0 failed while generating: .*length"):
        ask(engines, [too_long])
    groups = make_requests(3, 2)
    assert len(ask(engines, groups)) == 3


class RightIfOddLength:
    """Calls a response right where its length is an odd number (the limit is even)."""

    def score_batch(self, responses, ground_truths):
        right = [len(response) % 2 == 1 for response in responses]
        return [Score(1.0 if ok else -1.0, ok, "", None) for ok in right]


@pytest.fixture(scope="module")
def prompts():
    return [Prompt(f"p{i}", (("user", f"{i * 37 % 100}+{i}=?"),), "", "test") for i in range(60)]


def make_sampler(engines, model, prompts):
    return Sampler(
        engines,
        PromptStream(prompts, 0),
        RightIfOddLength(),
        SamplingConfig(prompts_per_step=12, responses_per_prompt=4, oversampling=2.0),
        settings=SamplingSettings(temperature=1.0, top_p=1.0, max_tokens=MAX_RESPONSE_TOKENS),
        tokenizer=AutoTokenizer.from_pretrained(model),
        seed=3,
    )


def test_resumed_sampling_equals_uninterrupted_sampling(engines, model, prompts):
    """Tokens, log-probs and reserve, after the state went through JSON."""
    sampler = make_sampler(engines, model, prompts)
    sampler.next_batch()
    state = json.loads(json.dumps(sampler.state_dict(), allow_nan=False))
    assert state["reserve"]
    expected = sampler.next_batch()
    resumed = make_sampler(engines, model, prompts)
    resumed.load_state_dict(state)
    again = resumed.next_batch()
    assert [encode_group(g) for g in again.groups] == [encode_group(g) for g in expected.groups]
    assert resumed.state_dict() == sampler.state_dict()
    assert expected.num_from_reserve == len(state["reserve"])


def test_evaluation_on_a_real_engine(engines, model, prompts):
    config = EvaluationConfig(samples_per_problem=4)
    arguments = {
        "tokenizer": AutoTokenizer.from_pretrained(model),
        "max_response_tokens": MAX_RESPONSE_TOKENS,
        "seed": 0,
    }
    result = evaluate(engines, prompts, RightIfOddLength(), config, **arguments)
    assert result == evaluate(engines, prompts[::-1], RightIfOddLength(), config, **arguments)
    assert 0.05 < result.accuracy < 0.5
    assert result.standard_error == pytest.approx(0.03, rel=0.5)
