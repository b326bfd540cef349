"""Evaluation: avg@k, its standard error, pass@k, cons@k, killed processes, and shared engines."""

import itertools
import math
import os
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megadapo.data.group import NO_ANSWER, Group, Score
from megadapo.data.prompts import Prompt
from megadapo.environments.config import EnvironmentConfig
from megadapo.environments.processes import EnvironmentDescription
from megadapo.errors import DataError
from megadapo.rewards.rules import score
from megadapo.rollout.config import EvaluationConfig
from megadapo.rollout.episodes.requests import EpisodeRequests
from megadapo.rollout.journal import record_log
from megadapo.rollout.journal.journal import EVALUATION, Journal
from megadapo.rollout.sampling.background import BackgroundSampler
from megadapo.rollout.sampling.evaluation import (
    Evaluation,
    EvaluationInProgress,
    HeldOutRequests,
    InterleavedEngines,
    consensus,
    pass_at_k,
)
from megadapo.rollout.sampling.sampler import Sampler
from megadapo.rollout.sampling.statistics import SampledBatch
from megadapo.rollout.types import OpenGroup, SamplingSettings, response_seeds
from tests.support.rollout.samplers import HALF, MAX_TOKENS, contents, make_sampler
from tests.support.rollout.scripted_engines import (
    Grades,
    KilledAfter,
    KilledError,
    PlainTokenizer,
    RightAtLeast,
    ScriptedEngines,
    make_prompts,
    respond,
)

BOUND = 40
LONGEST = 20
NUM_STEPS = 4
VERIFIER = RightAtLeast(HALF)
HELD_OUT = HeldOutRequests.create(
    {"": make_prompts(30)},
    EvaluationConfig(samples_per_problem=4),
    EpisodeRequests(tokenizer=PlainTokenizer(), seed=0),
    max_response_tokens=MAX_TOKENS,
)


def held_out(
    prompts: list[Prompt] | dict[str, list[Prompt]],
    episodes: EpisodeRequests | None = None,
    **config: object,
) -> HeldOutRequests:
    return HeldOutRequests.create(
        prompts if isinstance(prompts, dict) else {"": prompts},
        EvaluationConfig(**{"samples_per_problem": 5, **config}),
        episodes or EpisodeRequests(tokenizer=PlainTokenizer(), seed=4),
        max_response_tokens=LONGEST,
    )


def run(
    prompts: list[Prompt] | dict[str, list[Prompt]],
    engines: ScriptedEngines | None = None,
    journal: Journal[Group] | None = None,
    **config: object,
) -> Evaluation:
    engines, asked = engines or ScriptedEngines(), held_out(prompts, **config)
    with EvaluationInProgress(engines, RightAtLeast(BOUND), asked, journal) as running:
        return running.finish()


def test_accuracy_and_standard_error():
    """An error over responses would ignore that a problem's responses are alike."""
    settings = SamplingSettings(temperature=1.0, top_p=0.7, max_tokens=LONGEST)
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
    assert result.truncated_fraction == np.mean(lengths == LONGEST) > 0


@pytest.mark.parametrize("num_correct", [0, 1, 3, 8])
@pytest.mark.parametrize("k", [1, 2, 5, 8])
def test_pass_at_k_is_the_share_of_all_subsets(num_correct, k):
    """1 - (1 - c/n)^k would be too low for every k above 1."""
    correct = [True] * num_correct + [False] * (8 - num_correct)
    subsets = [any(subset) for subset in itertools.combinations(correct, k)]
    assert pass_at_k(num_correct, 8, k) == pytest.approx(np.mean(subsets), abs=1e-15)
    assert pass_at_k(num_correct, 8, 32) == float(num_correct > 0)


@pytest.mark.parametrize(
    ("answers", "correct", "expected"),
    [
        ("7779", "   +", 0.0),
        ("7799", "++  ", 0.5),
        ("779", "++ ", 1.0),
        ("7", "+", 1.0),
        ("????7", "    +", 1.0),
        ("??", "  ", 0.0),
    ],
    ids=["majority-wrong", "tie", "majority", "one", "no-votes-without-answers", "no-answer"],
)
def test_consensus_is_a_majority_of_answers(answers, correct, expected):
    texts = [NO_ANSWER if answer == "?" else answer for answer in answers]
    pairs = zip(texts, correct, strict=True)
    assert consensus([Score(0.0, mark == "+", answer) for answer, mark in pairs]) == expected


def test_rewards_without_answers_or_verdicts_have_no_consensus():
    assert consensus([Score(0.0, True, ""), Score(0.0, False, "")]) is None
    assert consensus([Score(0.0, None, "7")]) is None


@pytest.mark.parametrize("rule", ["last_number", "pattern"])
def test_votes_are_counted_as_answers_are_compared(rule):
    """5, 5.0 and 5.00 would be three answers with a vote each, and 7 the most frequent one."""
    scores = [score(text, "5", rule, r"[0-9.]+") for text in ("5", "5.0", "5.00", "7", "7")]
    assert consensus(scores) == 1.0
    assert consensus([score(text, "5", rule, r"[0-9.]+") for text in ("5", "7", "7.0")]) == 0.0
    half = [Score(1.0, True, answer, True) for answer in ("1/2", "0.5", "2/4")]
    wrong = [Score(-1.0, False, "1/3", False)] * 2
    assert consensus([*half, *wrong]) == 1.0
    # by a function of one's own, whose comparison is unknown
    accepted = [replace(score, symbolic_correct=None) for score in half]
    assert consensus([*accepted, *wrong]) == 1.0


def test_score_is_measured_if_no_function_says_what_is_correct():
    """An accuracy of "score above 0" would be 1 for every judge."""
    judge = Grades()
    asked = held_out(make_prompts(20))
    with EvaluationInProgress(ScriptedEngines(), judge, asked) as running:
        result = running.finish()
    assert result.accuracy is None and result.pass_at == {} and result.consensus is None
    assert result.score == pytest.approx(np.mean(judge.given)) and result.standard_error > 0
    sets = {"a": make_prompts(20)[:5], "b": make_prompts(20)[5:]}
    with EvaluationInProgress(ScriptedEngines(), judge, held_out(sets)) as running:
        of_sets = running.finish()
    assert of_sets.accuracy is None
    assert of_sets.score == pytest.approx(np.mean([one.score for one in of_sets.sets.values()]))


def test_pass_and_consensus_of_two_problems():
    """A policy that collapses gains in avg@k and loses in pass@k."""
    scores = {0: ["4444", "++++"], 1: ["7779", "   +"]}

    class Judge(RightAtLeast):
        def score_group(self, prompt, texts, token_ids):
            answers, correct = scores[int(prompt.id.rpartition("-")[2]) % 2]
            pairs = zip(answers, correct, strict=True)
            return [Score(1.0, mark == "+", answer) for answer, mark in pairs]

    engines = ScriptedEngines("last first")
    asked = held_out(make_prompts(2), samples_per_problem=4)
    with EvaluationInProgress(engines, Judge(BOUND), asked) as running:
        found = running.finish()
    assert (found.accuracy, found.consensus) == (0.625, 0.5)
    assert found.pass_at == {2: 0.75, 4: 1.0}


def test_problems_are_independent():
    prompts = make_prompts(12)
    whole = run(prompts)
    assert run(prompts[::-1], ScriptedEngines("short first")) == whole
    halves = [run(prompts[:6]), run(prompts[6:])]
    assert np.mean([half.accuracy for half in halves]) == pytest.approx(whole.accuracy)


def test_sets_have_the_same_weight():
    """A mean over all problems would be the accuracy of the largest set."""
    small, large = make_prompts(40)[:4], make_prompts(40)[4:]
    both = run({"small": small, "large": large})
    alone = {"small": run(small), "large": run(large)}
    assert both.sets == alone
    first, second = alone.values()
    assert first.accuracy != second.accuracy
    assert both.accuracy == pytest.approx((first.accuracy + second.accuracy) / 2, abs=1e-15)
    squares = first.standard_error**2 + second.standard_error**2
    assert both.standard_error == pytest.approx(math.sqrt(squares) / 2, abs=1e-15)
    assert both.num_problems == 40
    assert not run(small).sets


class ThreeAtATime(RightAtLeast):
    """A scorer that needs three groups at the same time."""

    num_threads = 3
    _together = threading.Barrier(3)

    def score_group(self, *given: Any) -> list[Score]:
        self._together.wait(timeout=10)
        return super().score_group(*given)


def test_groups_are_scored_in_parallel():
    engines, asked = ScriptedEngines("at random", at_once=4), held_out(make_prompts(12))
    with EvaluationInProgress(engines, ThreeAtATime(BOUND), asked) as running:
        found = running.finish()
    assert found == run(make_prompts(12))


def test_number_of_problems():
    assert math.isnan(run(make_prompts(1)).standard_error)
    with pytest.raises(DataError, match="held-out"):
        run([])


def journal_in(folder: Path, weights: str = "weights") -> Journal[Group]:
    journal = Journal(Group, folder, "settings", name=EVALUATION)
    journal.begin(3, weights)
    return journal


def test_results_that_cannot_be_written_end_no_evaluation(tmp_path, caplog, monkeypatch):
    """A file server that fails for a minute would end the run."""
    prompts, engines = make_prompts(6), ScriptedEngines()
    nowhere = journal_in(tmp_path / "no" / "folder")
    assert run(prompts, engines, nowhere) == run(prompts)
    assert "evaluation-3.log: cannot be written: No such file" in caplog.text
    monkeypatch.setattr(record_log.os, "pwrite", lambda *arguments: os.stat("missing"))
    assert run(prompts, ScriptedEngines(), journal_in(tmp_path)) == run(prompts)
    assert caplog.text.count("are requested again after a kill") == 2


class Routing(ScriptedEngines):
    """Engines that return the experts of each token."""

    def finished(self, timeout_s: float | None = None) -> list[OpenGroup]:
        return [
            replace(
                group,
                responses=tuple(
                    replace(one, experts=np.zeros((len(one.token_ids), 2, 1), dtype=np.uint8))
                    for one in group.responses
                ),
            )
            for group in super().finished(timeout_s)
        ]


def test_experts_of_an_evaluation_are_not_kept(tmp_path):
    """Those of all held-out responses of a 30B model are gigabytes, and nothing reads them."""
    asked, journal = held_out(make_prompts(2)), journal_in(tmp_path)
    with EvaluationInProgress(Routing(), RightAtLeast(BOUND), asked, journal) as running:
        running.finish()
        responses = [one for group in running.groups for one in group.responses]
    assert len(responses) == 10 and all(one.experts is None for one in responses)
    assert b"uint8" not in next(tmp_path.iterdir()).read_bytes()


def test_stopped_evaluation_has_a_result_on_the_problems_with_answers():
    """A stop after minutes would show nothing."""
    sets = {"a": make_prompts(2), "b": make_prompts(4)[2:]}
    asked = held_out(sets)
    with EvaluationInProgress(ScriptedEngines(), RightAtLeast(BOUND), asked) as running:
        running.submit(10)
        while len(running.groups) < 2:
            running.poll()
        assert running.so_far == run({"a": make_prompts(2)})
        assert running.finish() == run(sets)


@pytest.mark.parametrize(
    ("weights", "change"),
    [
        ("other weights", {}),
        ("weights", {"temperature": 0.5}),
        ("weights", {"samples_per_problem": 4}),
    ],
)
def test_results_of_other_weights_or_requests_are_ignored(tmp_path, weights, change):
    prompts = make_prompts(6)
    with pytest.raises(KilledError):
        killed = KilledAfter(5, finish="at random")
        run(prompts, killed, journal_in(tmp_path))
    engines = ScriptedEngines()
    assert run(prompts, engines, journal_in(tmp_path, weights), **change) == run(prompts, **change)
    assert len(engines.asked) == 6


def test_held_out_requests_have_environments_and_never_branch():
    """A result with another tool must not be reused."""
    tool = EnvironmentConfig(environment="calculator", max_turns=3)
    described = EnvironmentDescription("calculator", (), ("=",), "{}")
    episodes = EpisodeRequests(environments=[(tool, described)], tokenizer=PlainTokenizer(), seed=4)
    plain, asked = held_out(make_prompts(1)), held_out(make_prompts(1), episodes)
    [request] = asked.requests
    assert request.episode.description.stop == ("=",) and request.episode.config.max_turns == 3
    assert not request.settings.branching.is_on
    assert plain.digest(-1) != asked.digest(-1)


class Watched(ScriptedEngines):
    """Engines that remember every request, and their free capacity after it."""

    def __init__(self, finish: str = "at random", *, slots: int = 24, at_once: int = 1) -> None:
        super().__init__(finish, slots=slots, at_once=at_once)
        self.requests: list[OpenGroup] = []
        self.capacity_left: list[int] = []

    def submit(self, groups: Sequence[OpenGroup]) -> None:
        capacity = self.capacity - sum(len(group.seeds) for group in groups)
        super().submit(groups)
        self.requests += groups
        self.capacity_left += [capacity] * len(groups)


def steps(
    engines: ScriptedEngines, *, evaluates: bool, **sampling: object
) -> tuple[list[SampledBatch], list[Evaluation]]:
    """Return a run's batches, and the evaluation beside each step."""
    shared = InterleavedEngines(engines)
    sampler: Sampler | BackgroundSampler = make_sampler(shared, **sampling)
    if sampling.get("mode") == "one_step_off":
        engines.policy_version = 0
        sampler = BackgroundSampler(sampler, NUM_STEPS)
        sampler.resume_sampling(0)
    batches, evaluations = [], []
    for _ in range(NUM_STEPS):
        with EvaluationInProgress(engines, VERIFIER, HELD_OUT) as running:
            shared.evaluation = running if evaluates else None
            batches.append(sampler.next_batch())
            sampler.pause_for_weights()
            evaluations.append(running.finish() if evaluates else None)
        assert engines.num_in_flight == 0 or sampling.get("mode") == "partial"
        engines.policy_version += 1
        sampler.resume_sampling(engines.policy_version)
    sampler.close()
    return batches, evaluations


def alone() -> Evaluation:
    with EvaluationInProgress(ScriptedEngines(), VERIFIER, HELD_OUT) as running:
        return running.finish()


@pytest.mark.parametrize(
    "sampling",
    [{}, {"mode": "rounds"}, {"mode": "one_step_off", "max_staleness": 1}],
    ids=["sync", "rounds", "one_step_off"],
)
def test_training_and_evaluation_do_not_change_each_other(sampling):
    undisturbed, by_itself = steps(ScriptedEngines(), evaluates=False, **sampling)[0], alone()
    orders = ("short first", "last first", "at random")
    for finish, slots in itertools.product(orders, (3, 24, 400)):
        engines = Watched(finish, slots=slots, at_once=3)
        batches, evaluations = steps(engines, evaluates=True, **sampling)
        assert contents(batches) == contents(undisturbed), (finish, slots)
        assert evaluations == [by_itself] * NUM_STEPS, (finish, slots)


def test_partial_step_does_not_stop_the_evaluation():
    batches, evaluations = steps(Watched(), evaluates=True, mode="partial", max_staleness=2)
    assert evaluations == [alone()] * NUM_STEPS
    assert [len(batch.groups) for batch in batches] == [8] * NUM_STEPS
    assert all(group.prompt_index >= 0 for batch in batches for group in batch.groups)


def test_evaluation_uses_idle_slots():
    """Until the batch is full, no evaluation request may delay training."""
    engines = Watched("short first")
    shared = InterleavedEngines(engines)
    with EvaluationInProgress(engines, VERIFIER, HELD_OUT) as running:
        shared.evaluation = running
        make_sampler(shared).next_batch()
    training = [request for request in engines.requests if request.key >= 0]
    asked = [
        (request, left)
        for request, left in zip(engines.requests, engines.capacity_left, strict=True)
        if request.key < 0
    ]
    beside = [request for request, left in asked if left >= 0]
    assert 0 < len(beside) < len(asked) == len(HELD_OUT.requests)
    assert min(r.priority for r, _ in asked) > max(r.priority for r in training)
    # remaining requests are submitted when the batch is full
    assert [request for request, _ in asked[: len(beside)]] == beside


def test_evaluation_does_not_reduce_capacity():
    engines = Watched(slots=24)
    shared = InterleavedEngines(engines)
    with EvaluationInProgress(engines, VERIFIER, HELD_OUT) as running:
        shared.evaluation = running
        running.submit(10)
        assert (engines.capacity, shared.capacity) == (16, 24)
        assert (engines.num_in_flight, shared.num_in_flight) == (2, 0)
