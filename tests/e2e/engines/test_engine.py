"""One real engine, shared by all tests of this file, since a start costs 20 seconds of a core."""

import json
import shutil
import stat
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest
from transformers import AutoTokenizer

from megadapo.codec import encode
from megadapo.data.group import NO_VERSION
from megadapo.environments.config import EnvironmentConfig
from megadapo.environments.environment import Task
from megadapo.environments.processes import EnvironmentDescription
from megadapo.errors import InfraError
from megadapo.rollout.config import BranchingConfig, EvaluationConfig
from megadapo.rollout.engine.in_flight import response_prefix
from megadapo.rollout.episodes.actor import EpisodeHostActor
from megadapo.rollout.episodes.requests import EpisodeRequests
from megadapo.rollout.sampling.evaluation import (
    EvaluationInProgress,
    HeldOutRequests,
    InterleavedEngines,
)
from megadapo.rollout.types import EpisodeRequest, ScoreRequest, response_seeds
from tests.support.rollout.engine_checks import (
    EOS,
    MAX_PROMPT_TOKENS,
    MAX_RESPONSE_TOKENS,
    PROMPTS,
    SETTINGS,
    CorrectIfOddLength,
    Reference,
    all_finished,
    ask,
    bits,
    call_all,
    group_request,
    make_requests,
    make_sampler,
    running_engines,
    worst_error,
)


@pytest.fixture(scope="module")
def model(tiny_model, tmp_path_factory):
    """The tiny model, with a generation config that must be ignored."""
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


def test_logprobs_are_the_models_and_given_tokens_are_scored(engines, reference):
    """The parity probe compares scores with the trainer's log-probs; generation must not notice."""
    temperature = 0.7
    groups = make_requests(12, 3)
    expected = ask(engines, groups, temperature=temperature)
    assert worst_error(reference, groups, expected, temperature) < 1e-5
    settings = replace(SETTINGS, temperature=temperature)
    engines.submit([replace(group, settings=settings) for group in groups])
    requests = []
    for group in groups[3:6]:
        ids = (*group.prompt_ids, *expected[group.key][0].token_ids.tolist())
        positions = np.arange(len(group.prompt_ids), len(ids), 2)
        request = {"token_ids": ids[: positions[-1] + 1], "positions": positions}
        requests.append(ScoreRequest(**request, temperature=temperature))
    (scores,) = engines.score(requests).result()
    for request, found in zip(requests, scores, strict=True):
        ids = request.token_ids
        own = reference.logprobs(ids[:1], ids[1:], temperature)[request.positions - 1]
        assert found.dtype == np.float32 and np.abs(found - own).max() < 1e-5
    answers = {answer.key: answer.responses for answer in all_finished(engines)}
    assert bits(answers) == bits(expected)


def test_sockets_are_in_a_folder_that_only_this_user_enters(engines):
    """vLLM's own place for them is the temporary folder, where other users reach them."""
    [location] = call_all(engines, "location")
    process = psutil.Process(location.pid)
    family = [process, *process.children(recursive=True)]
    paths = {c.laddr for p in family for c in p.net_connections("unix") if c.laddr}
    folders = {Path(path).parent for path in paths if "/ray/" not in path and path[0] == "/"}
    assert folders
    assert all(stat.S_IMODE(folder.stat().st_mode) == 0o700 for folder in folders)


def test_scores_without_a_free_slot_are_given_up(engines):
    """Else the update would wait for them, or find them running."""
    groups = make_requests(40, 4)
    engines.submit(groups)
    request = ScoreRequest(token_ids=(5, 6, 7), positions=np.array([1, 2]), temperature=1.0)
    (call,) = engines.call("score", {0: ([request], 0.0)}).values()
    assert engines.gather({0: call}, doing="score", timeout_s=60, forgive=False) == {0: None}
    engines.stop(keep=False)
    call_all(engines, "reset_prefix_cache")


def test_first_tokens_follow_the_model_distribution(engines, reference):
    """The generation config's top-k, temperature and repetition penalty must not be applied."""
    prompt, num_draws = (7, 9, 11, 30), 4000
    group = group_request(0, prompt, response_seeds(num_draws, "first"))
    (answers,) = ask(engines, [group], max_tokens=1).values()
    counts = np.bincount([response.token_ids[0] for response in answers], minlength=50)
    expected = num_draws * reference.distribution(prompt)[-1].double().exp().numpy()
    # 49 degrees of freedom: above 98 with probability 4e-5
    assert ((counts - expected) ** 2 / expected).sum() < 98


def test_response_is_independent_of_the_batch(engines):
    """Order, priority, the rest of the batch and the cache change no bit."""
    groups = make_requests(12, 4)
    expected = bits(ask(engines, groups))
    call_all(engines, "reset_prefix_cache")
    urgent = [replace(group, priority=-group.key % 3) for group in groups[::-1]]
    assert bits(ask(engines, urgent)) == expected
    for some in (groups[8:11], groups[4:5]):
        assert bits(ask(engines, some)) == {group.key: expected[group.key] for group in some}


def test_finished_groups_free_capacity(engines):
    """Otherwise engines would idle until the whole round is done."""
    slots = engines.capacity
    groups = make_requests(30, 4)
    engines.submit(groups)
    assert engines.capacity == slots - 120
    calls = [engines.finished() for _ in range(3)]
    assert engines.num_in_flight == 30 - sum(map(len, calls)) > 0
    assert slots - 120 < engines.capacity < slots
    assert engines.finished(timeout_s=0.0) is not None
    last = list(all_finished(engines))[-1]
    assert engines.capacity == slots and engines.finished() == []
    assert last.seconds > 0


def test_stopped_groups_are_continued(engines, reference):
    """No token is lost, doubled or scored at another position; seeds and limits continue."""
    groups = make_requests(12, 4)
    whole = ask(engines, groups)
    engines.submit(groups)
    early = engines.finished()
    stopped = engines.stop(keep=True)
    assert engines.num_in_flight == 0
    assert {one.key for one in early} | set(stopped.keys) == set(whole)
    parts = {one.key: one.responses for one in stopped.unfinished}
    responses = [response for group in parts.values() for response in group]
    assert stopped.num_tokens == sum(len(response.token_ids) for response in responses)
    assert {"unfinished"} <= {response.finish_reason for response in responses}
    for key, group in parts.items():
        for part, full in zip(group, whole[key], strict=True):
            assert (full.token_ids[: len(part.token_ids)] == part.token_ids).all()

    again = list(stopped.unfinished)
    answers = ask(engines, again)
    assert worst_error(reference, again, answers) < 1e-5
    assert bits(ask(engines, again)) == bits(answers)
    for key, group in answers.items():
        for part, full in zip(parts[key], group, strict=True):
            assert (full.token_ids[: len(part.token_ids)] == part.token_ids).all()
            assert full.finish_reason in ("stop", "length")
            assert (full.finish_reason == "length") == (
                len(full.token_ids) == MAX_RESPONSE_TOKENS and full.token_ids[-1] != EOS
            )
            assert len(full.policy_versions) == len(full.token_ids) == len(full.logprobs)


def test_only_chosen_groups_are_stopped(engines):
    """Groups that finish before the engine receives the stop are not lost."""
    groups = make_requests(30, 4)
    engines.submit(groups)
    stopped = engines.stop({3, 4, 5, 99}, keep=False)
    assert stopped.keys == (3, 4, 5) and stopped.unfinished == () and stopped.num_tokens >= 0
    assert len(list(all_finished(engines))) == 27
    activity = engines.activity()[0]
    assert 0 < activity.busy_seconds <= activity.seconds
    assert 0 < activity.mean_running <= 1 and activity.num_tokens > 27 * 4


@pytest.mark.parametrize("stop", [EOS, 7], ids=["end token", "stop token"])
def test_responses_end_at_their_end_tokens(engines, model, stop):
    """The end of a turn in a chat template, which vLLM does not know, ends them too."""
    answers = ask(engines, make_requests(24, 4), stop_ids=() if stop == EOS else (stop,))
    tokenizer = AutoTokenizer.from_pretrained(model)
    last, reasons = set(), set()
    for response in (r for group in answers.values() for r in group):
        ids = response.token_ids.tolist()
        last.add(ids[-1])
        reasons.add(response.finish_reason)
        assert not {stop, EOS} & set(ids[:-1])
        assert (ids[-1] in (stop, EOS)) == (response.finish_reason == "stop")
        assert response.finish_reason == "stop" or len(ids) == MAX_RESPONSE_TOKENS
        shown = ids[:-1] if ids[-1] == stop else ids
        assert response.text == tokenizer.decode(shown, skip_special_tokens=True)
    assert {stop, EOS} < last and reasons == {"stop", "length"}


def test_response_depends_on_the_seed_only(engines):
    seeds = response_seeds(6, "seeds")
    groups = [group_request(key, (5, 6, 7), seeds) for key in (0, 1)]
    answers = bits(ask(engines, groups))
    assert answers[0] == answers[1]
    assert len({tokens for tokens, *_ in answers[0]}) == 6


def test_too_long_prompt_does_not_end_the_engine(engines):
    too_long = group_request(0, (3,) * (MAX_PROMPT_TOKENS + MAX_RESPONSE_TOKENS + 1), (1,))
    with pytest.raises(InfraError, match="engine 0 failed while generating: .*length"):
        ask(engines, [too_long])
    assert engines.num_in_flight == 0
    groups = make_requests(3, 2)
    assert len(ask(engines, groups)) == 3


TOOLS = [
    {"environment": "tests.support.environments.games:Count", "name": "answers"},
    {"environment": "mark", "options": {"stop": "2"}},
]
"""Tools that a random model calls often."""


def episode_of(number, **limits):
    return EpisodeRequest(
        environment=number,
        config=EnvironmentConfig(**TOOLS[number], max_observation_tokens=7, **limits),
        description=EnvironmentDescription("tool", tools=(), stop=("2",), output="{}"),
        task=Task(id="0", messages=[]),
    )


ANSWERS = episode_of(0, max_turns=2)
"""Its answers have the stop text, and are cut off."""
MARK = episode_of(1, max_turns=8)


@pytest.fixture(scope="module")
def host(engines, tmp_path_factory):
    logs = tmp_path_factory.mktemp("environments")
    answers, mark = TOOLS
    log = {"log": str(logs / "actions")}
    answers = answers | {"options": {"in_turn": "2", "length": 99, "reply": "<{}1+2>", **log}}
    tools = [EnvironmentConfig(**one) for one in (answers, mark)]
    actor = EpisodeHostActor(tools, folder=None, log_folder=logs, timeout_s=120)
    yield actor
    actor.close()


def played(groups, episode):
    return [replace(group, episode=episode) for group in groups]


def calls_of(response):
    return [turn for turn in response.turns if turn.is_call]


def test_tool_output_is_not_sampled(engines, host, reference, model):
    """It has no log-prob and no version, later tokens depend on it, and the limits hold."""
    groups = played(make_requests(24, 4), ANSWERS)
    answers = ask(engines, groups)
    assert bits(ask(engines, groups[7:9])) == {
        key: value for key, value in bits(answers).items() if key in (7, 8)
    }
    assert worst_error(reference, groups, answers) < 1e-5
    responses = [response for group in answers.values() for response in group]
    num_calls = [len(calls_of(response)) for response in responses]
    assert min(num_calls) == 0 and max(num_calls) == 2, "no calls were tested"
    for response in responses:
        is_output = response.policy_versions == NO_VERSION
        assert (np.isnan(response.logprobs) == is_output).all()
        ends = [call.end for call in calls_of(response)]
        assert ends == (np.flatnonzero(np.diff(is_output, append=False) & is_output) + 1).tolist()
        assert is_output.sum() <= 7 * len(ends)
        assert len(response.token_ids) <= MAX_RESPONSE_TOKENS
    # an answer that takes the last token
    full = [r for r in responses if calls_of(r) and calls_of(r)[-1].end == MAX_RESPONSE_TOKENS]
    assert {response.finish_reason for response in full} == {"length"}


@pytest.mark.slow
def test_stopped_responses_continue_after_tool_output(engines, host, reference):
    """Earlier calls count, and their output is still no sample."""
    groups = played(make_requests(24, 4), ANSWERS)
    engines.submit(groups)
    engines.finished()
    begun = engines.stop(keep=True).unfinished
    parts = {one.key: one.responses for one in begun}
    answers = ask(engines, begun)
    assert begun and worst_error(reference, begun, answers) < 1e-5
    assert bits(ask(engines, begun)) == bits(answers)
    for key, group in answers.items():
        for part, full in zip(parts[key], group, strict=True):
            kept = full.turns[: len(part.turns)]
            assert [call.end for call in kept] == [call.end for call in part.turns]
            # NaN where a call is a response's last token, which is not equal to itself
            entropies = [[call.entropy for call in calls] for calls in (kept, part.turns)]
            np.testing.assert_array_equal(*entropies)
            assert len(calls_of(full)) <= 2
            assert (full.policy_versions[: len(part.token_ids)] == part.policy_versions).all()


@pytest.mark.parametrize("episode", [None, ANSWERS], ids=["no tool", "tool"])
def test_responses_stop_at_the_tokens_of_an_earlier_stop(engines, host, episode):
    """A repeated run has no clock: it must stop and continue each response as the first run did."""
    groups = played(make_requests(24, 4), episode)
    parts = {}
    # on a busy machine all may have ended before the stop
    while "unfinished" not in {one.finish_reason for part in parts.values() for one in part}:
        engines.submit(groups)
        parts = {}
        while not parts:
            parts = {one.key: one.responses for one in engines.finished()}
        parts |= {one.key: one.responses for one in engines.stop(keep=True).unfinished}
    if episode is None:
        # the last of these tokens end a block of the cache; it has 32 tokens
        for key, counts in ((1, (0, 25, 26, 27)), (2, (0, 20, 21, 22)), (3, (0, 0, 0, 0))):
            (whole,) = ask(engines, [groups[key]]).values()
            parts[key] = tuple(map(first_tokens, whole, counts))
    expected = ask(engines, with_responses(groups, parts))

    call_all(engines, "reset_prefix_cache")
    until = {key: tuple(len(one.token_ids) for one in part) for key, part in parts.items()}
    again = ask(engines, [replace(group, stop_at_tokens=until[group.key]) for group in groups])
    if episode is None:
        assert bits(again) == bits(parts)
    # a response that was stopped while its environment answered may have ended here
    assert tokens_of(again) == tokens_of(parts)
    reasons = {one.finish_reason for part in again.values() for one in part}
    assert "unfinished" in reasons and len(reasons) > 1
    assert bits(ask(engines, with_responses(groups, again))) == bits(expected)


def tokens_of(answers):
    return {key: [tokens for tokens, *_ in group] for key, group in bits(answers).items()}


def first_tokens(response, count):
    if len(response.token_ids) <= count:
        return replace(response, text="")  # as in every group with an unfinished response
    return response_prefix(response, count, num_prompt=0)


def with_responses(groups, responses):
    return [replace(group, responses=responses[group.key]) for group in groups]


@pytest.mark.parametrize("episode", [ANSWERS, MARK], ids=["answers", "mark"])
@pytest.mark.slow
def test_branches_are_independent_of_the_batch(engines, host, reference, episode):
    """The tree has the same bits; a branch has its parent's prefix and its own end."""
    branching = BranchingConfig(initial_rollouts=3, num_tokens=4)
    groups, settings = played(make_requests(10, 8), episode), {"branching": branching}
    slots = engines.capacity
    answers = ask(engines, groups, **settings)
    assert engines.capacity == slots
    assert bits(ask(engines, groups[4:6], **settings)) == {
        key: value for key, value in bits(answers).items() if key in (4, 5)
    }
    assert worst_error(reference, groups, answers) < 1e-5
    depths = set()
    for group in answers.values():
        assert len(group) == 8 and not any(response.branch for response in group[:3])
        for place, response in enumerate(group):
            if (branch := response.branch) is None:
                continue
            parent, n = group[branch.parent], branch.num_tokens
            depths.add(parent.branch is not None)
            assert branch.parent < place
            assert n in [call.end for call in parent.turns]
            assert (response.token_ids[:n] == parent.token_ids[:n]).all()
            assert response.logprobs[:n].tobytes() == parent.logprobs[:n].tobytes()
            assert response.entropy == parent.entropy > 0.0
        tails = [response.token_ids.tobytes() for response in group]
        assert len(set(tails)) > 5
    assert False in depths and (True in depths or episode is not MARK), (
        "no branch of a branch was tested"
    )


@pytest.fixture(scope="module")
def held_out(model):
    return HeldOutRequests.create(
        {"": PROMPTS},
        EvaluationConfig(samples_per_problem=4),
        EpisodeRequests(tokenizer=AutoTokenizer.from_pretrained(model), seed=0),
        max_response_tokens=MAX_RESPONSE_TOKENS,
    )


def evaluate(engines, held_out):
    with EvaluationInProgress(engines, CorrectIfOddLength(), held_out) as under_way:
        return under_way.finish()


def test_evaluation_on_a_real_engine(engines, held_out):
    result = evaluate(engines, held_out)
    assert result == evaluate(engines, replace(held_out, requests=held_out.requests[::-1]))
    assert 0.05 < result.accuracy < 0.5
    assert result.standard_error == pytest.approx(0.03, rel=0.5)


@pytest.mark.slow
def test_interleaved_evaluation_changes_no_result(engines, model, held_out):
    """Both share the engine's batches, and neither may change a bit of the other."""
    expected = make_sampler(engines, model, prompts_per_step=12).next_batch()
    shared = InterleavedEngines(engines)
    with EvaluationInProgress(engines, CorrectIfOddLength(), held_out) as under_way:
        shared.evaluation = under_way
        under_way.submit(8)
        batch = make_sampler(shared, model, prompts_per_step=12).next_batch()
        assert under_way.finish() == evaluate(engines, held_out)
    one, two = ([encode(replace(g, seconds=0.0)) for g in b.groups] for b in (batch, expected))
    assert one == two
