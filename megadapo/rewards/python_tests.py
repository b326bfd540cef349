"""Unit tests of Python that a response has written, each response in a sandbox of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from megadapo.data.prompts import Prompt
from megadapo.rewards.function_config import RewardFunction
from megadapo.rewards.unit_tests import UnitTests, program_of, read_tests, same_output
from megadapo.rewards.workers.processes import Lost, ProcessPool, Reply
from megadapo.rewards.workers.runner import Runner
from megadapo.rewards.workers.worker_process import Program

SECONDS_PER_TEST = 2.0
GRACE_S = 2.0
"""What a sandbox may take beyond the time of the runs in it."""


class PythonTestsRunner(Runner):
    """Runs what responses have written; expected outputs never enter a sandbox.

    A response is right where it passes all tests. What it does in its sandbox is never a failure of
    the function, also where the sandbox is lost to it: the tests that are lost are failed ones.

    Raises:
        InfraError: this system does not isolate processes.
    """

    def __init__(self, config: RewardFunction) -> None:
        super().__init__(config)
        program = Program(
            module="megadapo.rewards.workers.sandbox_worker",
            what=f'reward.functions.function = "{config.function}"',
            memory_bytes=config.memory_mib << 20,
            output_bytes=config.output_kib << 10,
            fresh=True,
        )
        self._pool = ProcessPool(program, config.num_workers)
        self._partial: bool = config.options.get("partial", False)
        self._seconds_per_test = config.options.get("seconds_per_test", SECONDS_PER_TEST)

    def close(self) -> None:
        self._pool.close()

    def _results(
        self, prompt: Prompt, texts: Sequence[str], token_ids: Sequence[np.ndarray]
    ) -> list[Reply]:
        tests = read_tests(prompt.ground_truth)
        programs = [program_of(text) for text in texts]
        # what is written twice is run once
        written = list(dict.fromkeys(program for program in programs if program is not None))
        requests = [self._request(program, tests) for program in written]
        replies = self._pool.run(requests, self.config.timeout_s + GRACE_S)
        by_program = dict(zip(written, replies, strict=True))
        return [self._result(by_program.get(program or ""), tests) for program in programs]

    def _request(self, program: str, tests: UnitTests) -> dict[str, Any]:
        return {
            "code": program,
            "tests": tests.assertions,
            "inputs": list(tests.inputs),
            "seconds_per_run": self._seconds_per_test,
            "seconds": self.config.timeout_s,
            "stops_early": not self._partial,
        }

    def _result(self, reply: Reply | Lost | None, tests: UnitTests) -> Reply:
        is_lost = isinstance(reply, Lost)
        runs = [] if reply is None or isinstance(reply, Lost) else reply["runs"]
        passed = [run["ending"] == "done" for run in runs]
        if tests.assertions is None:
            outputs = zip(runs, tests.outputs, strict=False)
            right = [same_output(run["output"], expected) for run, expected in outputs]
            passed = [both == (True, True) for both in zip(passed, right, strict=True)]
        share = sum(passed) / tests.num_runs
        parts = {
            "passed": share,
            "no_program": float(reply is None),
            "timeouts": float(any(run["ending"] == "timeout" for run in runs)),
            "lost_sandboxes": float(is_lost),
        }
        correct = share == 1.0
        return {
            "score": share if self._partial else float(correct),
            "correct": correct,
            "parts": parts,
        }
