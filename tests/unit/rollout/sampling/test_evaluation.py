"""avg@k and its error; answers of a process that was killed count, and only those."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from megadapo.data.prompts import Prompt
from megadapo.errors import DataError
from megadapo.rewards.dapo_math import Score
from megadapo.rollout.config import EvaluationConfig
from megadapo.rollout.journal.answer_log import AnswerLog, ProblemResult
from megadapo.rollout.sampling.evaluation import Evaluation, EvaluationUnderWay, HeldOut
from megadapo.rollout.tools import ToolsConfig
from megadapo.rollout.types import GroupResponse, SamplingSettings, response_seeds
from tests.support.rollout.scripted_engines import (
    PlainTokenizer,
    RightAtLeast,
    ScriptedEngines,
    make_prompts,
    respond,
)

BOUND = 40
MAX_TOKENS = 20


def held_out(prompts: list[Prompt], **config: object) -> HeldOut:
    return HeldOut.of(
        prompts,
        EvaluationConfig(**{"samples_per_problem": 5, **config}),
        tokenizer=PlainTokenizer(),
        max_response_tokens=MAX_TOKENS,
        seed=4,
    )


def run(
    prompts: list[Prompt],
    engines: ScriptedEngines | None = None,
    answers: AnswerLog | None = None,
    **config: object,
) -> Evaluation:
    engines, asked = engines or ScriptedEngines(), held_out(prompts, **config)
    with EvaluationUnderWay(engines, RightAtLeast(BOUND), asked, answers) as under_way:
        return under_way.finish()


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


class ThreeAtATime(RightAtLeast):
    """Scores no group before two others are with it, as a judge that is waited for."""

    num_threads = 3

    def __init__(self, bound: int) -> None:
        super().__init__(bound)
        self._together = threading.Barrier(3)
        self._lock = threading.Lock()
        self._num_in_flight = self.most_in_flight = 0

    def score_group(
        self, prompt: Prompt, texts: Sequence[str], token_ids: Sequence[np.ndarray]
    ) -> list[Score]:
        with self._lock:
            self._num_in_flight += 1
            self.most_in_flight = max(self.most_in_flight, self._num_in_flight)
        self._together.wait(timeout=10)
        scores = super().score_group(prompt, texts, token_ids)
        with self._lock:
            self._num_in_flight -= 1
        return scores


def test_a_slow_scorer_has_as_many_groups_as_it_asks_for_at_the_same_time():
    """One after the other, the first would wait for ever; more at a time than it has processes
    for would only queue up in front of it."""
    scorer = ThreeAtATime(BOUND)
    engines = ScriptedEngines("at random", at_once=4)
    with EvaluationUnderWay(engines, scorer, held_out(make_prompts(12))) as under_way:
        found = under_way.finish()
    assert scorer.most_in_flight == 3
    assert found == run(make_prompts(12))


def test_max_problems_takes_the_first_ones():
    assert run(make_prompts(12), max_problems=4) == run(make_prompts(4))


def test_one_problem_has_no_standard_error():
    assert math.isnan(run(make_prompts(1)).standard_error)


def test_no_problems_is_an_error():
    with pytest.raises(DataError, match="held-out"):
        run([])


class Killed(Exception):
    """The process has ended."""


class EnginesThatEnd(ScriptedEngines):
    """Hand back so many groups."""

    def __init__(self, num_groups: int) -> None:
        super().__init__("at random")
        self._num_left = num_groups

    def finished(self, timeout_s: float | None = None) -> list[GroupResponse]:
        if not self._num_left:
            raise Killed
        self._num_left -= 1
        return super().finished(timeout_s)


def cut_off(prompts: list[Prompt], path: Path, num_groups: int) -> int:
    """Evaluate until so many groups came back; return the number of answers kept."""
    with pytest.raises(Killed):
        run(prompts, EnginesThatEnd(num_groups), AnswerLog(path, "weights"))
    return len(AnswerLog(path, "weights").read())


def test_what_was_answered_before_a_kill_is_not_asked_again(tmp_path):
    prompts, path = make_prompts(12), tmp_path / "answers.jsonl"
    num_kept = cut_off(prompts, path, 8)
    assert 0 < num_kept <= 8
    engines = ScriptedEngines()
    assert run(prompts, engines, AnswerLog(path, "weights")) == run(prompts)
    assert len(engines.asked) == 12 - num_kept
    again = ScriptedEngines()
    assert run(prompts, again, AnswerLog(path, "weights")) == run(prompts)
    assert again.asked == []


@pytest.mark.parametrize(
    ("weights", "change"),
    [
        ("other weights", {}),
        ("weights", {"temperature": 0.5}),
        ("weights", {"samples_per_problem": 4}),
    ],
)
def test_answers_of_other_weights_or_to_other_questions_do_not_count(tmp_path, weights, change):
    """An accuracy made of two policies' answers is that of none."""
    prompts, path = make_prompts(6), tmp_path / "answers.jsonl"
    cut_off(prompts, path, 5)
    engines = ScriptedEngines()
    assert run(prompts, engines, AnswerLog(path, weights), **change) == run(prompts, **change)
    assert len(engines.asked) == 6


@pytest.mark.parametrize("cut", [1, 30])
def test_a_torn_last_line_is_asked_again_and_the_next_answer_has_a_line_of_its_own(tmp_path, cut):
    path, result = (
        tmp_path / "answers.jsonl",
        ProblemResult(accuracy=0.25, num_tokens=9, num_truncated=1),
    )
    for name in "ab":
        AnswerLog(path, "weights").append(name, result)
    path.write_bytes(path.read_bytes()[:-cut])
    log = AnswerLog(path, "weights")
    torn = {"a": result} if cut > 1 else {"a": result, "b": result}
    assert log.read() == torn
    log.append("c", result)
    assert AnswerLog(path, "weights").read() == {**torn, "c": result}


def test_lines_that_are_no_answers_are_passed_over(tmp_path):
    path = tmp_path / "answers.jsonl"
    path.write_bytes(b'\xff\n[]\n{"scored": "weights"}\n{"result": {"accuracy": 1}}\n\n7\n')
    assert AnswerLog(path, "weights").read() == {}


def test_held_out_problems_are_asked_with_the_tool_and_never_branch():
    """An answer with another tool, or without one, is another answer: an interrupted evaluation
    would go on with it."""
    tool = ToolsConfig(tool="calculator")
    plain, asked = (
        HeldOut.of(
            make_prompts(1),
            EvaluationConfig(samples_per_problem=5),
            tokenizer=PlainTokenizer(),
            max_response_tokens=MAX_TOKENS,
            seed=4,
            tools=tools,
        )
        for tools in (None, tool)
    )
    assert asked.settings.tools == tool and not asked.settings.branching.is_on
    assert plain.digest(plain.questions[0]) != asked.digest(asked.questions[0])
