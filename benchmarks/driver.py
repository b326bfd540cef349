"""Time and memory of the driver's own work on a step: everything that it does with the responses.

The trainer waits for `make_batch`, and the next step for the metrics. The groups are random, of the
paper's size by default: 512 groups of 16 responses of 5,000 tokens on average.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from baselines.measure import reset_resident_peak, resident_peak
from shared import add_numbers, script_parser, write_results

from megadapo.algorithm.advantages import advantages, response_rewards
from megadapo.algorithm.config import AlgorithmConfig
from megadapo.algorithm.loss_weights import loss_weights
from megadapo.cli import parse, report_errors
from megadapo.cluster.processes import return_freed_memory
from megadapo.data.batch import pack
from megadapo.data.group import Group, Response, Score
from megadapo.data.prompts import Prompt
from megadapo.observe.config import ObserveConfig
from megadapo.observe.metrics.reflection import reflection_shares
from megadapo.observe.tables import TextTable

GIB = 1 << 30
LONGEST = 20480
WORDS = (
    *("so", "the", "sum", "of", "x", "and", "y", "is", "equal", "to", "12", "=", "we", "get"),
    *("let", "me", "check", "on", "second"),
)
"""Words of the texts, single words of reflection phrases among them, as in real responses."""
RARE = ("Wait,", "However,", "let me check", "recheck")
"""Reflection phrases, of which a third of the responses has one."""


def main(argv: Sequence[str] | None = None) -> int:
    """Measure each part of equal steps; print a table, and write JSON if requested."""
    parser = script_parser(__doc__)
    numbers = [
        ("groups", 512, "groups of the step"),
        ("responses", 16, "responses of a group"),
        ("tokens", 5000, "mean length of a response"),
        ("steps", 3, "measured steps; memory is fresh in the first"),
    ]
    add_numbers(parser, numbers)
    arguments = parse(parser, argv)
    num_groups, responses = arguments.groups, arguments.responses
    groups = make_groups(num_groups, responses, arguments.tokens)
    num_tokens = sum(sum(group.lengths) for group in groups)
    rounds = [_measure(groups) for _ in range(arguments.steps)]
    rows = [
        [
            name,
            *(f"{one[name]['seconds']:.2f}" for one in rounds),
            f"{rounds[-1][name]['cpu_seconds']:.2f}",
            f"{rounds[-1][name]['gib']:.2f}",
        ]
        for name in rounds[0]
    ]
    title = f"the driver's step, {num_groups} x {responses} responses, {num_tokens:,} tokens"
    head = ["part", *(f"s, step {n + 1}" for n in range(len(rounds))), "CPU s", "peak GiB"]
    print(TextTable(title=title, head=head, rows=rows).text())
    size = {"groups": num_groups, "responses": responses, "tokens": num_tokens}
    write_results(arguments.json, {"size": size, "steps": rounds})
    return 0


def make_groups(num_groups: int, responses: int, tokens: int) -> list[Group]:
    """Return groups of random responses, whose lengths have a long tail."""
    numbers, words = np.random.default_rng(0), random.Random(0)
    lengths = numbers.gamma(2.0, tokens / 2, size=(num_groups, responses))
    sentence = " ".join(words.choices(WORDS, k=4096))
    return [
        Group(
            prompt_index=index,
            prompt=Prompt(str(index), (("user", "?"),), "1", "math"),
            prompt_ids=tuple(range(100 + index % 100)),
            responses=tuple(
                _response(int(np.clip(length, 1, LONGEST)), numbers, words, sentence)
                for length in of_group
            ),
            scores=tuple(
                Score(float(2 * right - 1), bool(right), "1")
                for right in numbers.permutation(np.arange(responses) % 2)
            ),
        )
        for index, of_group in enumerate(lengths)
    ]


def _response(
    length: int, numbers: np.random.Generator, words: random.Random, sentence: str
) -> Response:
    start = words.randrange(len(sentence) // 2)
    text = (sentence[start:] + sentence * (4 * length // len(sentence) + 1))[: 4 * length]
    if words.random() < 1 / 3:
        at = words.randrange(len(text))
        text = f"{text[:at]} {words.choice(RARE)} {text[at:]}"
    return Response(
        token_ids=numbers.integers(0, 150_000, length, dtype=np.int32),
        logprobs=-numbers.random(length, dtype=np.float32),
        finish_reason="stop" if length < LONGEST else "length",
        text=text,
        policy_versions=np.zeros(length, dtype=np.int32),
    )


def _measure(groups: list[Group]) -> dict[str, dict[str, float]]:
    """Return wall and CPU seconds and peak memory of each part of a step, as `make_batch` and
    `step_metrics` do them."""
    algorithm, found = AlgorithmConfig(), dict[str, dict[str, float]]()

    def timed(name: str, part: Callable[[], Any]) -> Any:
        return_freed_memory()
        before = reset_resident_peak()
        wall, cpu = time.perf_counter(), time.process_time()
        result = part()
        found[name] = {
            "seconds": time.perf_counter() - wall,
            "cpu_seconds": time.process_time() - cpu,
            "gib": (resident_peak() - before) / GIB,
        }
        return result

    rewards = timed(
        "shaped rewards", lambda: response_rewards(groups, algorithm, max_response_tokens=LONGEST)
    )
    values = timed(
        "advantages",
        lambda: advantages(groups, algorithm, max_response_tokens=LONGEST, rewards=rewards),
    )
    weights = timed("loss weights", lambda: loss_weights(groups, algorithm, advantages=values))
    size = algorithm.responses_per_mini_batch
    timed("pack", lambda: pack(groups, values, weights, mini_batch_size=size, rewards=rewards))
    texts = [response.text for group in groups for response in group.responses]
    phrases = ObserveConfig().reflection_phrases
    timed("reflection phrases", lambda: reflection_shares(texts, phrases))
    found["all"] = {
        key: max(one[key] for one in found.values())
        if key == "gib"
        else sum(one[key] for one in found.values())
        for key in ("seconds", "cpu_seconds", "gib")
    }
    return found


if __name__ == "__main__":
    sys.exit(report_errors(main))
