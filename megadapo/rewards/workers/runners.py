"""Which runner a function of the configuration needs."""

from __future__ import annotations

from collections.abc import Sequence

from megadapo.errors import ConfigError, InfraError
from megadapo.observe.rollouts.token_pieces import Decode
from megadapo.rewards.function_config import PYTHON_TESTS, RewardFunction
from megadapo.rewards.functions import FunctionRunner
from megadapo.rewards.python_tests import PythonTestsRunner
from megadapo.rewards.workers.runner import Runner


def start_runner(config: RewardFunction, decode: Decode | None = None) -> Runner:
    """Start the processes of a function that does not run in this one.

    Args:
        decode: the tokenizer's, by which steps of the text are found among the tokens.

    Raises:
        ConfigError: it cannot be imported or called, or not run on this machine.
    """
    try:
        if config.function == PYTHON_TESTS:
            return PythonTestsRunner(config)
        return FunctionRunner(config, decode)
    except InfraError as error:
        raise ConfigError(str(error)) from error


def check_functions(functions: Sequence[RewardFunction]) -> None:
    """Start each function once, and end it again.

    Raises:
        ConfigError: lists every function that cannot be started.
    """
    problems = []
    for config in functions:
        if config.is_in_process:
            continue
        try:
            start_runner(config.model_copy(update={"num_workers": 1})).close()
        except ConfigError as error:
            problems.append(str(error))
    if problems:
        raise ConfigError("\n".join(problems))
