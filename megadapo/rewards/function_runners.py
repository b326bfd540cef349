"""Runs users' reward functions, and unit tests of generated programs, in other processes.

`Runner` is the base of all of them, with their failures.
"""

from __future__ import annotations

import abc
import logging
import os
import signal
import threading
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import numpy as np

from megadapo.algorithm.groups import Steps
from megadapo.data.group import FAILED, MIN_RESPONSES, Failure, Score
from megadapo.data.prompts import Prompt
from megadapo.data.reasoning_gym import Item
from megadapo.errors import ConfigError, DataError, InfraError, RewardError, RewardOutageError
from megadapo.models.folder import path_from_anywhere
from megadapo.observe.rollouts.token_pieces import Decode
from megadapo.rewards.config import (
    LOCAL_MODEL,
    PYTHON_TESTS,
    REASONING_GYM,
    Isolation,
    RewardFunction,
)
from megadapo.rewards.rules import marked_answer
from megadapo.rewards.steps import step_ends
from megadapo.rewards.unit_tests import UnitTests, program_of, read_tests, same_output
from megadapo.rewards.workers import cgroup
from megadapo.rewards.workers.arguments import OFFER
from megadapo.rewards.workers.by_value import pickle_of
from megadapo.rewards.workers.processes import TIMEOUT, CallError, ProcessPool, Program, Reply

logger = logging.getLogger(__name__)

MAX_REASONS = 50
"""Number of different failures that are counted separately."""
MAX_TOLD = 5
"""Number of failures that one warning lists."""
COROUTINE_GRACE_S = 1.0
"""Time that a group of coroutines may take beyond their own limit."""
SECONDS_PER_TEST = 2.0
WAIT_FACTOR = 10.0
"""Factor by which the runs of a sandbox may take longer than their limit, which is of CPU time."""
SANDBOX_GRACE_S = 2.0
"""Time that a sandbox may take beyond the time of its runs."""
ITEM_S = 60.0
"""Time that a sandbox may take to make an item of reasoning-gym again; most take a millisecond."""
KILLED = ("signal SIGKILL", f"exit code {-signal.SIGKILL & 0xFF}")
"""Ends of a process that another one kills, as the kernel does if the host is short of memory. A
process whose sandbox is killed ends with the exit code."""


class FailureCounts:
    """The failures of one function or environment; safe to use from any thread."""

    def __init__(self, name: str) -> None:
        """`name`: kind and name of what fails, as in "reward function judge"."""
        self._name = name
        self._all: Counter[str] = Counter()
        self._unreported: Counter[str] = Counter()
        self._lock = threading.Lock()

    def add(self, failure: str, prompt_id: str) -> None:
        """Count a failure on a response to a prompt; log it if its reason is new."""
        with self._lock:
            is_known = failure in self._all or len(self._all) >= MAX_REASONS
            reason = failure if failure in self._all or not is_known else "other reasons"
            self._all[reason] += 1
            self._unreported[reason] += 1
        if not is_known:
            logger.warning("%s, prompt %s: %s", self._name, prompt_id, failure)

    def drain_warning(self, given: str, *others: str) -> str | None:
        """Return one line on the failures since the last call, if there were any.

        Args:
            given: what the responses got instead of a score.
            others: what else to tell, before the failures.
        """
        with self._lock:
            failures, self._unreported = self._unreported, Counter()
        parts = [*others]
        if failures:
            reasons = "; ".join(f"{n} x {reason}" for reason, n in failures.most_common(MAX_TOLD))
            parts.append(f"failed on {failures.total()} responses, which {given}: {reasons}")
        return f"{self._name} {'; it '.join(parts)}" if parts else None


class Runner(abc.ABC):
    """A function that is called in other processes; safe to use from any thread.

    Raises:
        InfraError: the processes cannot start.
    """

    num_threads = 1
    """Number of groups that it can score at the same time."""
    is_fresh = False
    """Whether a process is for one request only."""
    columns: Mapping[str, bool] = {}
    """Whether each column of the row that it takes by name is required."""
    takes_rest = False
    """Whether it takes all other columns too."""

    def __init__(
        self, config: RewardFunction, program: Program, decode: Decode | None = None
    ) -> None:
        """`decode`: of the tokenizer; only needed for steps of the text."""
        self.config = config
        what = f'reward.functions.function = "{config.function}"'
        self._pool = ProcessPool(program, config.num_workers, what=what, is_fresh=self.is_fresh)
        self._decode = decode
        self._failures = FailureCounts(f"reward function {config.label}")
        self._num_repeats = self._num_scored = 0
        self._last_failure = ""
        """Reason of the last failure since `check_step`."""
        self._lock = threading.Lock()

    def close(self) -> None:
        """End its processes."""
        self._pool.close()

    @abc.abstractmethod
    def _results(
        self, prompt: Prompt, texts: Sequence[str], token_ids: Sequence[np.ndarray]
    ) -> Sequence[Reply]:
        """Return each response's result of `ResultReader.read`, or `{"error", "outage"?}`."""

    def score_group(
        self, prompt: Prompt, texts: Sequence[str], token_ids: Sequence[np.ndarray]
    ) -> list[Score | None]:
        """Score the responses to one prompt, as if it were the only function; None: no score."""
        given = zip(self._results(prompt, texts, token_ids), texts, token_ids, strict=True)
        results = [self._with_ends(*one) for one in given]
        self._check_outage(results)
        for result in results:
            failure = result.get("error")
            if failure is not None:
                self._count_failure(failure, prompt)
            with self._lock:
                self._num_scored += failure is None
                self._last_failure = failure or self._last_failure
        # a response that it failed on is not correct, if others are
        says = any(result.get("correct") is not None for result in results)
        return [self._score(result, False if says else None) for result in results]

    def check_step(self) -> None:
        """Check the responses since the last call.

        Raises:
            RewardError: the function failed on all of them.
        """
        with self._lock:
            failure, num_scored = self._last_failure, self._num_scored
            self._last_failure, self._num_scored = "", 0
        if failure and not num_scored:
            raise RewardError(
                f"reward function {self.config.label} failed on all responses of the step: "
                f"{failure}. Nothing of the step is trained on; mend the function"
            )

    def check_columns(self, data_source: str, found: Collection[str], place: str) -> None:
        """Check that a row has the columns that the function needs, if it scores the row.

        Raises:
            ConfigError: one is missing.
        """
        needed = [name for name, is_required in self.columns.items() if is_required]
        missing = [name for name in needed if name not in found]
        if missing and self.config.applies_to(data_source):
            raise ConfigError(
                f'reward.functions.function = "{self.config.function}" takes {missing[0]}, which '
                f"is no column of {place}; its columns are {', '.join(found) or 'not read'}. "
                f"Arguments are {OFFER}"
            )

    def drain_warning(self) -> str | None:
        """Return a summary of the failures since the last call, if there were any."""
        with self._lock:
            num_repeats, self._num_repeats = self._num_repeats, 0
        score = self.config.failure_score
        given = "were left out" if score is None else f"scored {score:g}"
        repeated = f"could not score a group {num_repeats} times, and it was scored again"
        return self._failures.drain_warning(given, *[repeated] * bool(num_repeats))

    def _check_outage(self, results: Sequence[Reply]) -> None:
        """Raise RewardOutageError if an outage leaves too few responses, or any must wait."""
        outages = [result["error"] for result in results if result.get("outage")]
        reaction = self.config.on_failure
        num_scored = sum("error" not in result for result in results)
        too_few = num_scored < min(MIN_RESPONSES, len(results))
        if outages and (reaction == "retry" or (reaction == "exclude" and too_few)):
            with self._lock:
                self._num_repeats += 1
            raise RewardOutageError(
                f"reward function {self.config.label} cannot score a group: {outages[-1]}"
            )

    def _score(self, result: Reply, correct_if_failed: bool | None) -> Score | None:
        if "error" in result:
            score, parts = self.config.failure_score, ((FAILED, 1.0),)
            if score is not None:
                return Score(score, correct_if_failed, "", parts=parts)
            failure = Failure(self.config.label, result["error"])
            return Score(0.0, None, "", parts=parts, failure=failure)
        if result["score"] is None:
            return None
        steps: Steps = tuple(result.get("steps", ()))
        counted = {}
        if steps:
            mean = sum(value for _, value in steps) / len(steps)
            counted = {"steps": float(len(steps)), "step_mean": mean}
        return Score(
            result["score"],
            result.get("correct"),
            "",
            parts=tuple({**counted, **result["parts"], FAILED: 0.0}.items()),
            texts=tuple(result.get("texts", {}).items()),
            steps=steps,
        )

    def _with_ends(self, result: Reply, text: str, token_ids: np.ndarray) -> Reply:
        """Return a result whose steps end at tokens; a failure if the text's steps do not."""
        scored = result.get("steps", ())
        ends: list[int] | None = [end for end, _ in scored]
        if any(end is None for end, _ in scored):
            assert self._decode is not None, "steps of a text need the tokenizer"
            ends = step_ends(text, token_ids, self.config.separators, self._decode)
        if ends is None:
            return {"error": "its steps cannot be located among the tokens of the response"}
        steps = [(end, score) for end, (_, score) in zip(ends, scored, strict=True)]
        return {**result, "steps": steps}

    def _count_failure(self, failure: str, prompt: Prompt) -> None:
        label = self.config.label
        if self.config.on_failure == "stop":
            raise RewardError(
                f"reward function {label} failed on a response to prompt {prompt.id}: {failure}. "
                'Set its on_failure = "exclude" to leave such a response out and continue'
            )
        self._failures.add(failure, prompt.id)


def start_runner(
    config: RewardFunction, decode: Decode | None = None, isolation: Isolation = "auto"
) -> Runner:
    """Start the processes of a function that does not run in the driver.

    Args:
        decode: of the tokenizer; locates steps of the text among the tokens.
        isolation: of generated code.

    Raises:
        ConfigError: the function cannot be imported, called or run on this machine.
    """
    try:
        if config.function == PYTHON_TESTS:
            return PythonTestsRunner(config, isolation)
        if config.function == REASONING_GYM:
            return ReasoningGymRunner(config, isolation)
        return FunctionRunner(config, decode)
    except InfraError as error:
        raise ConfigError(str(error)) from error


def check_functions(
    functions: Sequence[RewardFunction], isolation: Isolation = "auto"
) -> list[Runner]:
    """Start and end each function once, as a check; return the ended functions.

    Raises:
        ConfigError: lists every function that cannot be started.
    """
    problems, ended = [], []
    for config in functions:
        if config.is_in_process:
            continue
        try:
            one = config.model_copy(update={"num_workers": 1})
            runner = start_runner(one, isolation=isolation)
            runner.close()
            ended.append(runner)
        except ConfigError as error:
            problems.append(str(error))
    if problems:
        raise ConfigError("\n".join(problems))
    return ended


class FunctionRunner(Runner):
    """One function in its processes.

    If a call scores one response, the responses of a group are distributed over the processes. If
    it scores a group, each process works on a different group.
    """

    def __init__(self, config: RewardFunction, decode: Decode | None = None) -> None:
        super().__init__(config, _program(config), decode)
        (described,) = self._pool.run([{"row": None}], config.timeout_s)
        assert not isinstance(described, CallError), "the worker answers without the function"
        self._takes: Literal["one", "batch", "async"] = described["takes"]
        self.columns, self.takes_rest = described["columns"], described["takes_rest"]
        if self._takes != "one":
            self.num_threads = config.num_workers

    def _results(
        self, prompt: Prompt, texts: Sequence[str], token_ids: Sequence[np.ndarray]
    ) -> list[Reply]:
        messages = [{"role": role, "content": content} for role, content in prompt.messages]
        row = {
            "messages": messages,
            "is_text": prompt.is_text,
            "ground_truth": prompt.ground_truth,
            "data_source": prompt.data_source,
            "extra_info": {**prompt.extra_info, "data_source": prompt.data_source},
            "further": prompt.further,
        }
        responses = [(text, ids.tolist()) for text, ids in zip(texts, token_ids, strict=True)]
        parts = [responses] if self._takes != "one" else [[response] for response in responses]
        requests = [{"row": row, "responses": part} for part in parts]
        # each coroutine has its own limit, so that the others of the group keep their scores
        limit_s = self.config.timeout_s + (COROUTINE_GRACE_S if self._takes == "async" else 0.0)
        replies = self._pool.run(requests, limit_s)
        return [
            result
            for reply, part in zip(replies, parts, strict=True)
            for result in self._unpack(reply, len(part))
        ]

    def _unpack(self, reply: Reply | CallError, size: int) -> Sequence[Reply]:
        on_network = self.config.may_use_network
        if not isinstance(reply, CallError):
            results: Sequence[Reply] = reply["results"]
            return [
                {**result, "outage": on_network and result.get("outage", False)}
                for result in results
            ]
        error, is_outage = f"its process ended: {reply.details}", False
        if reply.cause == TIMEOUT:
            error, is_outage = f"took longer than {self.config.timeout_s:g} s", on_network
        elif reply.details.startswith(KILLED):
            is_outage = True
        return [{"error": error, "outage": is_outage}] * size


def _program(config: RewardFunction) -> Program:
    options = dict(config.options)
    if config.function == LOCAL_MODEL and isinstance(path := options.get("path"), str):
        if not Path(path, "config.json").is_file():
            raise ConfigError(
                f"reward.functions.options.path = {path}: no folder of a Hugging Face model here "
                "(it has no config.json)"
            )
        # a worker's working directory is another one
        options["path"] = path_from_anywhere(path)
    return Program(
        module="megadapo.rewards.workers.function_worker",
        memory_bytes=config.memory_mib << 20,
        output_bytes=config.output_kib << 10,
        settings={
            "path": config.path,
            "pickle": pickle_of(config.path, "reward"),
            "options": options,
            "network": config.may_use_network,
            "processes": config.processes,
            "timeout_s": config.timeout_s,
            "step_separators": config.separators,
            "step_score": config.step_score,
        },
        variables={name: os.environ[name] for name in config.environment if name in os.environ},
    )


class SandboxRunner(Runner):
    """The base of functions that run generated code, in processes of a module of `workers`."""

    module: str

    def __init__(self, config: RewardFunction, isolation: Isolation) -> None:
        program = Program(
            module=f"megadapo.rewards.workers.{self.module}",
            memory_bytes=config.memory_mib << 20,
            # the texts on stdin are files too, and may be longer than the limit on output
            output_bytes=None,
            group=cgroup.find_parent(),
            settings={"isolation": isolation, "run_output_bytes": config.output_kib << 10},
        )
        super().__init__(config, program)
        # runs end earlier, unless the machine has hardly any CPU time for them
        self._limit_s = WAIT_FACTOR * config.timeout_s + SANDBOX_GRACE_S

    def _scored(self, share: float, parts: dict[str, float]) -> Reply:
        """Return a result; a response is right with a share of 1, and earns less only if asked."""
        correct = share >= 1.0
        score = share if self.config.options.get("partial", False) else float(correct)
        return {"score": score, "correct": correct, "parts": parts}


class PythonTestsRunner(SandboxRunner):
    """Unit tests of the programs that responses contain, each program in its own sandbox.

    Expected outputs never enter a sandbox, and assertions never the process of the program. A
    response is right if it passes all tests. Code that misbehaves, or even ends its sandbox, fails
    its tests; that is no failure of the function. A sandbox that is killed from outside is one, and
    so are tests that cannot be used.
    """

    module, is_fresh = "sandbox_worker", True

    def _results(
        self, prompt: Prompt, texts: Sequence[str], token_ids: Sequence[np.ndarray]
    ) -> list[Reply]:
        tests = read_tests(prompt.ground_truth)
        programs = [program_of(text) for text in texts]
        # identical programs are run once
        written = list(dict.fromkeys(program for program in programs if program is not None))
        requests = [self._request(program, tests) for program in written]
        replies = self._pool.run(requests, self._limit_s)
        by_program = dict(zip(written, replies, strict=True))
        return [self._result(by_program.get(program or ""), tests) for program in programs]

    def _request(self, program: str, tests: UnitTests) -> dict[str, Any]:
        return {
            "code": program,
            "tests": tests.assertions,
            "names": tests.names,
            "inputs": tests.inputs,
            "seconds_per_run": self.config.options.get("seconds_per_test", SECONDS_PER_TEST),
            "seconds": self.config.timeout_s,
            "stops_early": not self.config.options.get("partial", False),
        }

    def _result(self, reply: Reply | CallError | None, tests: UnitTests) -> Reply:
        runs: Sequence[Mapping[str, Any]] = []
        if isinstance(reply, CallError):
            if reply.cause == TIMEOUT or reply.details.startswith(KILLED):
                return {"error": f"its sandbox was killed: {reply.details}", "outage": True}
        elif reply is not None:
            runs = reply["runs"]
        if tests.assertions is not None and runs and runs[0]["output"]:
            return {"error": f"the unit tests cannot be used: {runs[0]['output']}"}
        is_exact = self.config.options.get("exact", False)
        passed = [
            run["ending"] == "done" and same_output(run["output"], expected, is_exact=is_exact)
            for run, expected in zip(runs, tests.outputs, strict=False)
        ]
        share = sum(passed) / len(tests.outputs)
        parts = {
            "passed": share,
            "no_program": float(reply is None),
            "timeouts": float(any(run["ending"] == "timeout" for run in runs)),
            "lost_sandboxes": float(isinstance(reply, CallError)),
        }
        return self._scored(share, parts)


class ReasoningGymRunner(SandboxRunner):
    """The scorers of reasoning-gym in sandboxes, because some evaluate the answer.

    A response is right if its score is 1. An answer on which the scorer raises, or takes too long,
    scores 0. A sandbox that ends is a failure of the function.
    """

    module = "reasoning_gym_worker"

    def _results(
        self, prompt: Prompt, texts: Sequence[str], token_ids: Sequence[np.ndarray]
    ) -> list[Reply]:
        try:
            item = Item.of(prompt.extra_info)
        except DataError as error:
            raise RewardError(f'"{REASONING_GYM}", prompt {prompt.id}: {error}') from error
        answers = [marked_answer(text, prompt.ground_truth) for text in texts]
        # equal answers are scored once
        given = list(dict.fromkeys(filter(None, answers)))
        common = {"item": asdict(item), "prompt": prompt.messages[-1][1]}
        requests = [{**common, "answer": one, "seconds": self.config.timeout_s} for one in given]
        replies = dict(zip(given, self._pool.run(requests, self._limit_s + ITEM_S), strict=True))
        return [self._result(replies.get(answer)) for answer in answers]

    def _result(self, reply: Reply | CallError | None) -> Reply:
        if isinstance(reply, CallError):
            return {"error": f"its sandbox ended: {reply.details}", "outage": True}
        if reply is not None and "error" in reply:
            return reply
        ending, score = ("no_answer", 0.0) if reply is None else (reply["ending"], reply["score"])
        parts = {
            "partial": score,
            "no_answer": float(ending == "no_answer"),
            "errors": float(ending == "error"),
            "timeouts": float(ending == "timeout"),
        }
        return self._scored(score, parts)
