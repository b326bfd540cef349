"""Users' reward functions: their arguments, and that none of them can harm a run."""

import logging
import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megadapo.codec import decode, encode
from megadapo.config.run_config import from_dict
from megadapo.data.group import Score
from megadapo.data.prompts import Prompt
from megadapo.errors import ConfigError, DataError, RewardError, RewardOutageError
from megadapo.rewards.config import RewardConfig, RewardFunction
from megadapo.rewards.function_runners import Runner, check_functions, start_runner
from megadapo.rewards.scorer import Scorer
from tests.support.processes.running import is_running, wait_until

MODULE = "tests.support.rollout.reward_functions"
JUDGE = {"url": "http://127.0.0.1:9/v1", "model": "m", "request_timeout_s": 1.0}
PROMPT = Prompt("id", (("system", "Add."), ("user", "1+1=?")), "12", "test", {"index": 7})


def function(name: str, **keys: object) -> RewardFunction:
    return RewardFunction(function=f"{MODULE}:{name}", **{"timeout_s": 5.0, **keys})


def score(texts: list[str], *functions: object, prompt: Prompt = PROMPT, **keys: object) -> list:
    with Scorer(RewardConfig(functions=functions, symbolic="off", **keys)) as scorer:
        return scorer.score_group(prompt, texts, tokens(texts))


def tokens(texts: list[str]) -> list[np.ndarray]:
    return [np.arange(len(text), dtype=np.int32) for text in texts]


@pytest.fixture(scope="module")
def hostile() -> Iterator[Runner]:
    runner = start_runner(
        function(
            "hostile",
            timeout_s=1.0,
            on_failure="score",
            failure_score=-0.5,
            num_workers=2,
            memory_mib=1024,
        )
    )
    yield runner
    runner.close()


@pytest.fixture(scope="module")
def returns() -> Iterator[Runner]:
    runner = start_runner(function("returns"))
    yield runner
    runner.close()


def test_function_gets_all_arguments_and_returns_parts() -> None:
    scores = score(["12", "a"], f"{MODULE}:digits")
    assert [(one.reward, one.correct) for one in scores] == [(2.0, True), (0.0, False)]
    assert dict(scores[0].parts) == {
        "digits": 2.0,
        "digits/tokens": 2.0,
        "digits/turns": 2.0,
        "digits/from_test": 1.0,
        "digits/index": 7.0,
        "digits/failed": 0.0,
    }


def test_scores_are_weighted_sums_and_the_first_decides_correctness() -> None:
    functions = (
        "rule",
        {"function": "boxed", "data_sources": ["other"], "weight": 100.0},
        {"function": f"{MODULE}:scaled", "weight": 0.5, "options": {"factor": 2}, "name": "long"},
    )
    texts = ["Answer: 12", "Answer: 13"]
    right, wrong = score(texts, *functions)
    assert (right.reward, right.correct, right.answer) == (1.0 + 10.0, True, "12")
    assert (wrong.reward, wrong.correct, wrong.answer) == (-1.0 + 10.0, False, "13")
    assert dict(right.parts) == {"rule": 1.0, "long": 20.0, "long/failed": 0.0}
    elsewhere = Prompt("id", (("user", "?"),), "1", "elsewhere")
    (only,) = score(["\\boxed{1}"], *functions, prompt=elsewhere)
    assert (only.reward, only.correct) == (-1.0 + 9.0, False)


def test_right_above_defines_what_is_correct() -> None:
    """Without it a score alone says nothing; a later function may."""
    graded = {"function": f"{MODULE}:scaled", "options": {"factor": 1}}
    texts = ["Answer: 12", "Answer: 3"]
    assert [one.correct for one in score(texts, graded)] == [None, None]
    assert [one.correct for one in score(texts, graded, "rule")] == [True, False]
    longer = {**graded, "right_above": 9.5}
    assert [one.correct for one in score(texts, longer, "rule")] == [True, False]
    digits = {"function": f"{MODULE}:digits", "right_above": 5.0}
    assert score(["12"], digits)[0].correct is False


def test_rewards_that_differ_by_rounding_are_equal() -> None:
    """They would be trained on with full advantages: weights that cancel leave 5.6e-17."""
    parts = [
        {"function": f"{MODULE}:sometimes_fp32", "name": name, "weight": weight}
        for name, weight in (("a", 1.0), ("b", -0.7), ("c", -0.3))
    ]
    assert len({one.reward for one in score(["x", "fp32", "y"], *parts)}) == 1
    assert len({one.reward for one in score(["x", "fp32"], *parts[:1])}) == 1
    assert len({one.reward for one in score(["x", "half"], *parts[:2])}) == 2


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ("0-d array", (0.5, None)),
        ("decimal", (0.5, None)),
        ("fraction", (0.5, None)),
        ("true", (1.0, None)),
        ("numpy bool", (1.0, None)),
        ("acc", (1.0, True)),
        ("acc of tests", (0.4, None)),
        ("only correct", (1.0, True)),
        ("no verdict", (1.0, None)),
    ],
)
def test_whatever_is_a_number_is_a_score(response: str, expected: tuple, returns: Runner) -> None:
    """A function whose results are refused fails on every response."""
    (one,) = returns.score_group(PROMPT, [response], tokens([response]))
    assert (one.reward, one.correct, one.failure) == (*expected, None)


def test_texts_of_a_table_are_kept_and_numbers_are_metrics(returns: Runner) -> None:
    (one,) = returns.score_group(PROMPT, ["acc of tests"], tokens(["a"]))
    assert dict(one.parts) == {"acc": 0.4, "failed": 0.0}
    assert dict(one.texts) == {"pred": "34", "all": "[1, 2]"}
    (whole,) = score(["acc of tests"], f"{MODULE}:returns")
    assert decode(Score, encode(whole)) == whole
    assert ("returns/pred", "34") in whole.texts


def test_none_is_no_score(returns: Runner) -> None:
    """Other functions score the response, as in TRL; without any it leaves its group."""
    own = f"{MODULE}:returns"
    (alone,) = score(["none"], own)
    assert alone.failure.reason == "it returned None, and no other function scores the response"
    (other,) = score(["none"], own, {"function": "rule", "weight": 2.0})
    assert (other.reward, other.correct, other.failure) == (-2.0, False, None)
    assert "returns" not in dict(other.parts)
    (batched,) = score(["a"], f"{MODULE}:none_for_all", "rule")
    assert batched.reward == -1.0


def test_function_that_fails_on_a_whole_step_ends_the_run() -> None:
    """It would train on zeros, or on what is left, and only the log would say so."""
    lowest = {"on_failure": "score", "failure_score": -1.0}
    with Scorer(RewardConfig(functions=[function("hostile", **lowest)], symbolic="off")) as scorer:
        scorer.score_group(PROMPT, ["fine", "raise"], tokens(["a", "b"]))
        scorer.check_step()
        (failed,) = scorer.score_group(PROMPT, ["raise"], tokens(["a"]))
        assert (failed.reward, failed.failure) == (-1.0, None)
        with pytest.raises(RewardError, match="hostile failed on all .*ValueError: no such answer"):
            scorer.check_step()
        scorer.check_step()


def test_missing_column_is_named_with_what_there_is() -> None:
    (runner,) = check_functions((RewardFunction(function=f"{MODULE}:scaled"),))
    runner.check_columns("test", ["factor", "b"], "a.jsonl, line 1")
    with pytest.raises(ConfigError, match=r"takes factor, .* a.jsonl, line 1; its columns are b\."):
        runner.check_columns("test", ["b"], "a.jsonl, line 1")
    prompt = replace(PROMPT, further={"factor": 3})
    assert score(["ab"], f"{MODULE}:scaled", prompt=prompt)[0].reward == 6.0


def test_options_are_no_arguments_of_the_process() -> None:
    """Every user of the machine sees these, and options may hold a key."""
    own = RewardFunction(function=f"{MODULE}:scaled", options={"factor": 7391})
    runner = start_runner(own)
    try:
        (pid,) = runner._pool.process_ids
        assert b"7391" not in Path(f"/proc/{pid}/cmdline").read_bytes()
    finally:
        runner.close()


def test_rule_alone_starts_no_process() -> None:
    with Scorer(RewardConfig(symbolic="off")) as scorer:
        assert scorer._runners == {}
        (one,) = scorer.score_group(PROMPT, ["Answer: 12"], tokens(["Answer: 12"]))
    assert (one.reward, one.parts) == (1.0, ())


def test_batched_and_async_functions() -> None:
    assert [one.reward for one in score(["a"] * 3, f"{MODULE}:in_batches")] == [3.0] * 3
    assert [one.reward for one in score(["a"] * 3, f"{MODULE}:batches_later")] == [2.0] * 3
    (failure,) = {one.failure.reason for one in score(["a"] * 3, f"{MODULE}:too_few")}
    assert failure.endswith("returned a list of 1; expected a list of 3 scores")
    started = time.perf_counter()
    texts = ["a"] * 16 + ["raise", "hang"]
    scores = score(texts, function("later", timeout_s=1.0))
    assert [one.failure is None for one in scores] == [True] * 16 + [False] * 2
    assert time.perf_counter() - started < 4.0


@pytest.mark.fault
@pytest.mark.parametrize(
    ("response", "reason"),
    [
        ("raise", "ValueError: no such answer"),
        ("hang", "took longer than 1 s"),
        ("sleep", "took longer than 1 s"),
        ("nan", "returned nan"),
        ("list", "returned list, not a number"),
        ("two numbers", "returned ndarray, not a number"),
        ("text as correct", "returned str as correct, not a number"),
        ("nan as correct", "returned nan as correct"),
        ("half correct", "returned 0.5 as correct, which is neither true nor false"),
        ("no score", 'returned a table without "score"'),
        ("part", "returned inf as format"),
        ("print", "printed or wrote more than reward.functions.output_kib"),
        ("stderr", "printed or wrote more than reward.functions.output_kib"),
        ("memory", "MemoryError"),
        ("fork", "starts a process, and reward.functions.processes is false"),
        ("spawn", "starts a process, and reward.functions.processes is false"),
        ("subprocess", "starts a process, and reward.functions.processes is false"),
        ("socket", "opens a socket, and reward.functions.network is false"),
        ("exit", "SystemExit: 3"),
        ("die", "its process ended: exit code 3"),
        ("die slowly", "its process ended: exit code 3"),
        ("interrupt", "KeyboardInterrupt"),
        ("no text", "Unreadable: <exception str() failed>"),
        ("no truth", "returned a value that cannot be read: ValueError: unreadable"),
        ("segfault", "its process ended: signal SIGSEGV"),
    ],
)
def test_failure_is_named_counted_and_costs_one_score(
    hostile: Runner, response: str, reason: str
) -> None:
    texts = ["fine", response, "fine"]
    started = time.perf_counter()
    first, failed, last = hostile.score_group(PROMPT, texts, tokens(texts))
    assert time.perf_counter() - started < 5.0
    assert (first.reward, first.failure, last.reward, last.failure) == (1.0, None, 1.0, None)
    assert (failed.reward, failed.correct, failed.parts) == (-0.5, None, (("failed", 1.0),))
    warning = hostile.drain_warning()
    start = "reward function hostile failed on 1 responses, which scored -0.5: 1 x "
    assert warning.startswith(start) and reason in warning
    assert hostile.drain_warning() is None


@pytest.mark.fault
def test_worker_that_reads_nothing_costs_its_time_limit() -> None:
    """Catches a blocking write: a request beyond the pipe's 64 KiB would wait for ever."""
    runner = start_runner(function("scaled", timeout_s=1.0, options={"factor": 1}))
    try:
        long = "x" * 3_000_000
        (whole,) = runner.score_group(PROMPT, [long], tokens(["a"]))
        assert (whole.reward, whole.failure) == (len(long), None)
        (process_id,) = runner._pool.process_ids
        os.kill(process_id, signal.SIGSTOP)
        started = time.perf_counter()
        stopped, other = runner.score_group(PROMPT, ["x" * 200_000, "y"], tokens(["a", "a"]))
        assert time.perf_counter() - started < 10.0
        assert (stopped.failure.reason, other.reward) == ("took longer than 1 s", 1.0)
    finally:
        runner.close()


@pytest.mark.fault
def test_killed_function_is_no_score() -> None:
    """Catches a score of 0 because the host was short of memory."""
    runner = start_runner(function("hostile", timeout_s=20.0))
    results: list = []

    def ask(texts: list[str]) -> None:
        try:
            results.append(runner.score_group(PROMPT, texts, tokens(texts)))
        except RewardOutageError as error:
            results.append(str(error))

    try:
        for texts in (["sleep", "fine", "fine"], ["sleep", "fine"]):
            asking = threading.Thread(target=ask, args=(texts,))
            asking.start()
            wait_until(lambda: any(runner._pool._workers[0]._calls))
            os.kill(runner._pool.process_ids[0], signal.SIGKILL)
            asking.join()
    finally:
        runner.close()
    (failed, *others), outage = results
    assert [one.reward for one in others] == [1.0, 1.0]
    assert failed.failure.reason == "its process ended: signal SIGKILL"
    assert "hostile cannot score a group: its process ended: signal SIGKILL" in outage


def test_on_failure_stop_ends_the_run(caplog) -> None:
    stops = function("hostile", on_failure="stop")
    with pytest.raises(RewardError, match="hostile failed on .* prompt id: ValueError: no such"):
        score(["fine", "raise"], stops)
    with caplog.at_level(logging.WARNING):
        score(["raise", "raise"], function("hostile"))
    assert caplog.messages == ["reward function hostile, prompt id: ValueError: no such answer"]


@pytest.mark.fault
def test_children_of_a_function_end_with_it(tmp_path: Path) -> None:
    file = tmp_path / "pid"
    prompt = Prompt("id", (("user", "?"),), "1", "test", {"file": str(file)})
    hangs = function("leaves_a_child", timeout_s=1.0, processes=True)
    assert score(["a"], hangs, prompt=prompt)[0].failure is not None
    child = int(file.read_text())
    wait_until(lambda: not is_running(child), timeout_s=5)


def test_function_sees_only_named_variables(monkeypatch) -> None:
    monkeypatch.setenv("SECRET", "1")
    monkeypatch.setenv("SHOWN", "1")
    assert score(["a"], function("secret", environment=["SHOWN"]))[0].reward == 2.0


def test_function_in_working_folder_is_found(tmp_path: Path, monkeypatch) -> None:
    lines = "def half(messages, response, tokens, ground_truth, extra_info):\n    return 0.5\n"
    (tmp_path / "my_rewards.py").write_text(lines)
    monkeypatch.chdir(tmp_path)
    assert score(["a"], "my_rewards:half")[0].reward == 0.5


def test_format_and_length() -> None:
    pattern = {"function": "format", "options": {"pattern": "<think>.*</think>.*"}}
    keys = {"function": "format", "name": "json", "options": {"json_keys": ["answer"]}}
    texts = ["<think>\n</think> 3", "3", '```json\n{"answer": 3}\n```', '{"other": 1}', "[" * 9999]
    texts.append('```python\nx\n```\nprints\n```JSON\n{"answer": 3}\n```\n')
    scores = score(texts, pattern, keys)
    assert [one.reward for one in scores] == [1.0, 0.0, 1.0, 0.0, 0.0, 1.0]
    assert dict(scores[2].parts)["json/json"] == 1.0
    options = {"min_tokens": 2, "max_tokens": 4, "buffer": 4}
    length = {"function": "length", "options": options}
    by_length = score(["", "a", "aa", "aaaa", "a" * 5, "a" * 99], length)
    assert [one.reward for one in by_length] == [-0.5, -0.25, 0.0, 0.0, -0.25, -1.0]
    by_token = {"function": "length", "options": {"alpha_len": 0.001, "max_tokens": None}}
    found = [one.reward for one in score(["a" * n for n in (10, 100, 1000)], by_token)]
    assert found == pytest.approx([-0.01, -0.1, -1.0], rel=1e-12)
    both = {"function": "length", "options": {"alpha_len": 0.001, "max_tokens": 98, "buffer": 4}}
    assert score(["a" * 100], both)[0].reward == pytest.approx(-0.6, rel=1e-12)


def test_hierarchical_reward_is_equation_8_of_arpo() -> None:
    """A bonus for tools alone, or for a wrong answer, would teach calls instead of answers."""
    used = "<search>a</search> <python>1+1</python>"
    rewards = {
        f"<think>{used}</think> Answer: 12": 1.1,
        "<think><search>a</search></think> Answer: 12": 1.0,
        "<think></think> Answer: 12": 1.0,
        f"<think>{used}</think> Answer: 13": 0.0,
        f"<think>{used} Answer: 12": -1.0,
        "Answer: 13": -1.0,
    }
    options = {"tools": ["</search>", "</python>"], "pattern": "<think>.*</think>.*"}
    scores = score([*rewards], {"function": "hierarchical", "options": options})
    assert [one.reward for one in scores] == pytest.approx([*rewards.values()])
    assert [one.correct for one in scores] == [text.endswith("12") for text in rewards]
    used_tools = [dict(one.parts)["hierarchical/used_tools"] for one in scores]
    assert used_tools == [1.0, 0.0, 0.0, 1.0, 1.0, 0.0]
    boxed = {"tools": ["</python>"], "bonus": 0.5, "rule": "boxed"}
    (one,) = score([rf"{used} \boxed{{12}}"], {"function": "hierarchical", "options": boxed})
    assert one.reward == 1.5


@pytest.mark.fault
def test_endless_pattern_is_a_failure() -> None:
    slow = {"function": "format", "options": {"pattern": "(a+)+b"}, "timeout_s": 1.0}
    fine, failed = score(["aab", "a" * 40], slow)
    assert (fine.reward, failed.failure.function) == (1.0, "format")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_such_module:f", "no_such_module cannot be imported: ModuleNotFoundError"),
        (f"{MODULE}:no_such", f"{MODULE} has no function no_such"),
        (f"{MODULE}:NOT_A_FUNCTION", "has no function NOT_A_FUNCTION"),
        (f"{MODULE}:Unreadable", "is a class"),
    ],
)
def test_uncallable_function_fails_at_start(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f'reward.functions.function = "{name}".*{message}'):
        check_functions((RewardFunction(function=name),))


@pytest.mark.parametrize(
    ("functions", "message"),
    [
        (["formt"], '"formt" is no built-in function; did you mean format'),
        (["a:b:c"], 'write "MODULE:FUNCTION"'),
        ([], "reward.functions"),
        (["m:mean"], '"mean" cannot be the name of a metric'),
        (["m:f", "n:f"], 'two are called "f"'),
        ([{"function": "m:f", "timeout_s": 0.0}], "reward.functions.0.timeout_s = 0.0 must be"),
        ([{"weight": 1.0}], "reward.functions.0.function: required, but missing"),
        ([{"function": "rule", "options": {"a": 1}}], '"rule" takes none'),
        ([{"function": "judge", "step_score": "sum"}], '.step_score: "judge" scores no steps'),
        ([{"function": "m:f", "step_separators": [""]}], "an empty text separates nothing"),
        ([{"function": "arithmetic_steps", "step_separators": ["."]}], "has its own"),
        ([{"function": "m:f", "step_score": "max"}], "reward.functions.0.step_score"),
        ([{"function": "format", "options": {"pattern": "("}}], "no regular expression"),
        ([{"function": "hierarchical", "options": {"pattern": "("}}], "no regular expression"),
        (
            [{"function": "hierarchical", "options": {"tools": ["a"], "rule": "box"}}],
            "rule = 'box'",
        ),
        ([{"function": "hierarchical", "options": {"tools": "</s>"}}], "tools = '</s>'"),
        ([{"function": "length", "options": {"max_tokens": "9"}}], "max_tokens = '9'"),
        ([{"function": "length", "options": {"buffer": 9}}], "max_tokens, min_tokens or alpha_len"),
        ([{"function": "length", "options": {"min_tokens": 2, "max_tokens": 1}}], "above max"),
        ([{"function": "m:f", "on_failure": "score"}], 'on_failure = "score" needs failure_score'),
        ([{"function": "m:f", "failure_score": 0.0}], "failure_score has no effect"),
        (
            [{"function": "judge", "options": {**JUDGE, "template": "Rate $responses"}}],
            "options.template has no $response",
        ),
    ],
)
def test_a_wrong_entry_is_named_with_its_key(functions: list, message: str) -> None:
    table = {
        "run": {"folder": "runs/a", "num_steps": 1},
        "model": {"path": "m"},
        "data": {"train": "arithmetic:train:10"},
        "reward": {"functions": functions},
    }
    with pytest.raises(ConfigError) as raised:
        from_dict(table)
    assert message in str(raised.value)


def test_unscored_data_source_fails_at_load() -> None:
    config = RewardConfig(functions=({"function": "boxed", "data_sources": ["math"]}, "format"))
    assert config.check_gold("7", "math") == "7"
    only = RewardConfig(functions=({"function": "boxed", "data_sources": ["math"]},))
    with pytest.raises(DataError, match="no entry of reward.functions scores .* 'code'"):
        only.check_gold("7", "code")
