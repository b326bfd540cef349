"""The messages of engines that fail."""

import pytest

from megadapo.cluster.process_log import START_LINE
from megadapo.rollout.engine.failure import describe_failure, root_cause


def explained(folder, text, detail=""):
    """Return the message about an engine with this log, whose path it names."""
    path = folder / "engine-0.log"
    path.write_text(START_LINE + text)
    message = describe_failure("rollout engine 0 could not start", detail, path)
    assert str(path) in message
    return message


WORKER = "(Worker pid=7) ERROR 11-20 07:09:16 [multiproc_executor.py:1063] "
CORE = "(EngineCore pid=6) ERROR 11-20 07:09:16 [core.py:1512] "


def test_first_cause_is_found_among_its_consequences():
    log = (
        f"{WORKER}Traceback (most recent call last):\n"
        f"{WORKER}RuntimeError: CPU Generator does not use offset\n"
        f"{CORE}RuntimeError: Worker failed with error 'CPU Generator does not use offset'\n"
        "RuntimeError: Engine core initialization failed. See root cause above.\n"
    )
    assert root_cause(log) == "RuntimeError: CPU Generator does not use offset"


def test_errors_of_earlier_starts_are_ignored():
    old = f"{START_LINE}ValueError: an old error\n"
    assert root_cause(old) == "ValueError: an old error"
    assert root_cause(old + START_LINE + "started\n") is None


@pytest.mark.parametrize(
    ("cause", "remedy"),
    [
        (
            "ValueError: To serve at least one request with the models's max seq len (4096), "
            "(2.0 GiB KV cache is needed, which is larger than the available KV cache memory",
            "raise rollout.kv_cache_gib",
        ),
        (
            "ValueError: Available memory on node 0 (3/24 GiB) on kv cache allocation is less "
            "than requested memory for kv (64.0 GiB).",
            "lower rollout.kv_cache_gib",
        ),
        (
            "ValueError: Free memory on device (10/80 GiB) on startup is less than desired GPU "
            "memory utilization (0.9, 72 GiB).",
            "lower rollout.gpu_memory_utilization",
        ),
        ("torch.OutOfMemoryError: CUDA out of memory.", "lower rollout.gpu_memory_utilization"),
        (
            "OSError: models/none is not a local folder and is not a valid model identifier",
            "model.path",
        ),
    ],
)
def test_known_cause_comes_with_a_remedy(tmp_path, cause, remedy):
    end = "RuntimeError: Engine core initialization failed. See root cause above.\n"
    text = explained(tmp_path, f"{CORE}{cause}\n{end}")
    assert cause in text and remedy in text


def test_validation_error_fits_on_one_line(tmp_path):
    detail = (
        "ValidationError: 1 validation error for ModelConfig\n  Value error, User-specified "
        "max_model_len (4192) is greater than the derived max_model_len [type=value_error, "
        "input_value=ArgsKwargs()]\n    For further information visit https://errors.pydantic.dev"
    )
    text = describe_failure("engine 0 could not start", detail, tmp_path / "none.log")
    assert text.startswith("engine 0 could not start: Value error, User-specified max_model_len")
    assert "rollout.max_response_tokens" in text
    assert "\n" not in text and "pydantic" not in text


def test_log_is_read_only_if_the_error_has_its_cause_elsewhere(tmp_path):
    log = f"{WORKER}ValueError: a plugin is missing\n"
    assert "plugin" not in explained(tmp_path, log, "OSError: the prompt is too long")
    dead = "EngineDeadError: EngineCore encountered an issue. See stack trace (above)"
    assert "plugin" in explained(tmp_path, log, dead)


def test_without_log_the_exception_is_shown(tmp_path):
    text = describe_failure("engine 1 died", "OSError: disk failure", tmp_path / "none.log")
    assert "engine 1 died: OSError: disk failure" in text
