"""The program of a sandbox that asks scorers of reasoning-gym, some of which evaluate answers.

The package is imported once, so a sandbox works on many answers. Each is scored in a child process
of its own, which can start no process and write no file, so no answer meets another one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from megadapo.data.reasoning_gym import ALLOWED, Item, create, item_at
from megadapo.errors import DataError
from megadapo.rewards.workers import isolation
from megadapo.rewards.workers.sandbox_worker import PROBE_S, run_child
from megadapo.rewards.workers.worker import CannotStart, Handler, serve

MAX_DATASETS = 128
MAX_ENTRIES = 64
PROBE = Item("chain_sum", {}, 0, 1, 0)
"""Item whose own answer is scored at the start."""


def main() -> None:
    """Serve scores of an answer.

    `{"item", "prompt", "answer", "seconds"}` to `{"ending", "score"}`, where the score counts if
    the ending is "done", or to `{"error"}` if the item cannot be made or is not in the prompt.
    """
    serve(_prepare)


def _prepare(settings: Mapping[str, Any]) -> Handler:
    try:
        make(PROBE)
    except DataError as error:
        raise CannotStart(str(error)) from error
    user = isolation.enter(settings["isolation"])
    made = lru_cache(MAX_ENTRIES)(lambda text: make(Item.of(json.loads(text))))

    def handle(request: Mapping[str, Any]) -> Mapping[str, Any]:
        try:
            scorer, entry = made(json.dumps(request["item"]))
        except DataError as error:
            return {"error": str(error)}
        if entry["question"] not in request["prompt"]:
            return {"error": "reasoning-gym makes another item now than for the prompt"}

        def work() -> bytes:
            return json.dumps(scorer(request["answer"])).encode()

        run = run_child(
            work,
            b"",
            request["seconds"],
            user=user,
            output_bytes=settings["run_output_bytes"],
            max_processes=0,
        )
        if not run.in_time:
            return {"ending": "timeout", "score": 0.0}
        score = _score(run.result)
        return {"ending": "error" if score is None else "done", "score": score or 0.0}

    question, gold = (made(json.dumps(vars(PROBE)))[1][key] for key in ("question", "answer"))
    probe = {"item": vars(PROBE), "prompt": question, "answer": gold, "seconds": PROBE_S}
    # otherwise a restriction that the kernel refuses would make every answer wrong
    if handle(probe) != {"ending": "done", "score": 1.0}:
        raise CannotStart("not even a correct answer can be scored in the sandbox on this system")
    return handle


def make(item: Item) -> tuple[Callable[[str], float], Mapping[str, Any]]:
    """Return the scorer of an item, and the item."""
    key = json.dumps(item.config, sort_keys=True)
    dataset = _dataset(item.name, key, item.seed, item.size)
    entry = item_at(dataset, item.index)
    score, scored = dataset.score_answer, entry
    if item.name == "puzzle24":
        # its own scorer accepts 24.9, and numbers that the item does not have
        score = _dataset("countdown", "{}", 0, 1).score_answer
        scored = {**entry, "metadata": {**entry["metadata"], "target": 24}}

    def scorer(answer: str) -> float:
        pattern = ALLOWED.get(item.name)
        if pattern is not None and not re.fullmatch(pattern, answer):
            return 0.0
        return float(score(answer, scored))

    return scorer, entry


@lru_cache(MAX_DATASETS)
def _dataset(name: str, config: str, seed: int, size: int) -> Any:
    return create(name, json.loads(config), seed=seed, size=size)


def _score(result: bytes | None) -> float | None:
    """Return the score that a child returned; None without one from 0 to 1."""
    try:
        score = json.loads(result or b"null")
    except (ValueError, RecursionError):
        # an answer that is evaluated can find the token and write a result itself
        return None
    return score if isinstance(score, float) and 0.0 <= score <= 1.0 else None
