"""Error messages of engines: the cause, from the log, and what to change."""

from __future__ import annotations

import re
from pathlib import Path

from megadapo.cluster.process_log import START_LINE, read_tail

MAX_CAUSE = 600
"""Longest cause in a message, in characters; the log has the whole text."""

ADVICE = (
    (
        r"larger than the (available KV cache memory|maximum number of tokens that can be stored)"
        r"|No available memory for the cache blocks|KV cache is needed",
        "raise rollout.kv_cache_gib (CPU) or rollout.gpu_memory_utilization (CUDA), or lower "
        "rollout.max_response_tokens",
    ),
    (
        r"less than (requested memory for kv|desired CPU memory)|on kv cache allocation",
        "lower rollout.kv_cache_gib, rollout.num_engines or rollout.tensor_parallel, or free "
        "memory on this machine",
    ),
    (
        r"less than desired GPU memory utilization|out of memory|OutOfMemory",
        "lower rollout.gpu_memory_utilization, free the GPU, or raise rollout.tensor_parallel",
    ),
    (
        r"(not divisible|must be divisible) by|divisible by tensor parallel",
        "choose a rollout.tensor_parallel that divides the model's attention heads",
    ),
    (
        r"greater than the derived max_model_len|max_position_embeddings",
        "lower data.max_prompt_tokens or rollout.max_response_tokens to the model's maximum "
        "positions",
    ),
    (
        r"Repo id must|not a valid model identifier|is not a local folder|config\.json"
        r"|Cannot find any model weights|safetensors|Error retrieving file list",
        "check that model.path is a complete Hugging Face folder or a name on the Hub",
    ),
)
"""Patterns of vLLM's error messages, each with what the user can change."""

_ERROR_LINE = re.compile(r"\b((?:[A-Za-z_]+\.)*[A-Za-z_]*(?:Error|Exception): .+)$")
_PYDANTIC_HEAD = re.compile(r"\w*ValidationError: \d+ validation errors? for .*\n\s*")
_CONSEQUENCES = (
    "Engine core initialization failed",
    "EngineCore encountered an issue",
    "WorkerProc initialization failed",
    "Worker failed with error",
    "cancelled",
)


def root_cause(log: str) -> str | None:
    """Return the last error of an engine's log that no error of another process caused."""
    lines = log.rpartition(START_LINE)[2].splitlines()
    found = [match.group(1).strip() for line in lines if (match := _ERROR_LINE.search(line))]
    causes = [line for line in found if not _is_consequence(line)]
    return causes[-1] if causes else (found[-1] if found else None)


def describe_failure(what: str, detail: str, log_file: Path) -> str:
    """Return a message: what failed, the cause, what to change, and the log.

    Args:
        detail: error of the failed call; if an error in another process caused it, the cause is
            read from the log.
    """
    cause = detail
    if not detail or _is_consequence(detail):
        cause = root_cause(read_tail(log_file)) or detail or "its process ended"
    advice = next((text for pattern, text in ADVICE if re.search(pattern, cause)), None)
    remedy = f"; {advice}" if advice else ""
    return f"{what}: {concise(cause)}{remedy} (log: {log_file})"


def concise(cause: str) -> str:
    """Return a cause on one line, without pydantic's additions."""
    text = _PYDANTIC_HEAD.sub("", cause).partition(" [type=")[0]
    text = " ".join(text.split())
    return text if len(text) <= MAX_CAUSE else text[:MAX_CAUSE] + "..."


def _is_consequence(text: str) -> bool:
    return any(one in text for one in _CONSEQUENCES)
