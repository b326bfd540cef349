"""Speed of an engine whose conversations wait for a slow environment.

The same conversations are played in an environment that answers at once and in one that takes a
while, and answers of the same length are sampled in a single turn. All three take turns on one
engine.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from shared import HEAD_DIM, add_numbers, chosen, script_parser, write_model, write_results

from megadapo.cli import parse, report_errors
from megadapo.config import RunConfig, from_dict
from megadapo.data.prompts import Prompt
from megadapo.errors import InfraError
from megadapo.observe.progress import Spinner
from megadapo.observe.tables import TextTable
from megadapo.rollout.types import OpenGroup, SamplingSettings, response_seeds
from megadapo.run.inputs import Phases
from megadapo.tokens.chat import CHATML

if TYPE_CHECKING:
    from megadapo.rollout.episodes.requests import EpisodeRequests
    from megadapo.rollout.pool.engines import Engines

VOCABULARY = 16384
CALL_TIMEOUT_S = 60.0
AT_ONCE, SLOW, SINGLE = WAYS = ("answers at once", "slow answers", "a single turn")

Round = dict[str, dict[str, float]]
"""Measurements of each way, by name."""


NUMBERS = (
    ("conversations", 64, "conversations in flight"),
    ("slots", 64, "responses that the engine generates at the same time"),
    ("turns", 4, "turns of a conversation"),
    ("tokens", 64, "mean length of a turn"),
    ("delay", 0.2, "seconds that the environment takes for an answer"),
    ("layers", 4, "decoder layers of the model"),
    ("hidden", 512, "hidden size of the model"),
    ("rounds", 4, "measured rounds"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print a table, and write JSON if requested."""
    parser = script_parser(__doc__)
    add_numbers(parser, NUMBERS)
    setting = parse(parser, argv)
    with tempfile.TemporaryDirectory(prefix="megadapo-bench-") as name:
        folder = Path(name)
        num_parameters = write_model(
            folder / "model",
            layers=setting.layers,
            hidden=setting.hidden,
            dtype="float32",
            num_key_value_heads=math.gcd(setting.hidden // HEAD_DIM, 2),
            vocab_size=VOCABULARY,
            max_position_embeddings=1 << 16,
            tie_word_embeddings=True,
        )
        _write_tokenizer(folder / "model")
        rounds = _measure(setting, folder, Spinner(Console()))
    results = {way: means(rounds, way) for way in WAYS}
    print(_table(setting, results))
    record = {"settings": chosen(setting, NUMBERS), "parameters": num_parameters, "means": results}
    write_results(setting.json, {**record, "rounds": rounds})
    return 0


def _write_tokenizer(folder: Path) -> None:
    """Write a tokenizer of single bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={one: n for n, one in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", chat_template=CHATML
    ).save_pretrained(folder)


def _max_response_tokens(setting: argparse.Namespace) -> int:
    return 4 * int(setting.turns) * int(setting.tokens)


def _config(setting: argparse.Namespace, folder: Path) -> RunConfig:
    environments = [
        {
            "environment": "baselines.delayed:Delayed",
            "name": way.replace(" ", "_"),
            "data_sources": [way],
            "options": {"turns": setting.turns, "delay": delay},
            "max_turns": setting.turns,
        }
        for way, delay in ((AT_ONCE, 0.0), (SLOW, setting.delay))
    ]
    rollout = {
        "num_engines": 1,
        "max_response_tokens": _max_response_tokens(setting),
        "max_num_seqs": setting.slots,
        "environments": environments,
    }
    return from_dict(
        {
            "run": {"folder": str(folder), "num_steps": 1},
            "model": {"path": str(folder / "model"), "dtype": "float32"},
            "data": {"train": "arithmetic:train:64", "max_prompt_tokens": 64},
            "rollout": rollout,
            "reward": {"functions": ["environment"]},
            "algorithm": {"overlong_buffer": 0},
        }
    )


def _measure(setting: argparse.Namespace, folder: Path, phases: Phases) -> list[Round]:
    """Return the measurements of all rounds, after one that warms the engine up."""
    from megadapo.rollout.episodes.host import check_environments
    from megadapo.rollout.episodes.requests import EpisodeRequests
    from megadapo.run.inputs import load_tokenizer
    from megadapo.run.processes import start_engines_alone

    config = _config(setting, folder)
    environments = config.rollout.environments
    requests = EpisodeRequests(
        environments=[*zip(environments, check_environments(environments), strict=True)],
        tokenizer=load_tokenizer(config),
        seed=config.run.seed,
    )
    rounds: list[Round] = []
    with ExitStack() as stack:
        engines, host = start_engines_alone(
            config, phases, stack, log_folder=folder / "logs", folder=folder
        )
        assert host is not None
        for number in range(setting.rounds + 1):
            measured: Round = {}
            tokens: dict[str, list[list[int]]] = {}
            lengths: list[int] = []
            # a machine that gets slower or faster favours neither environment
            for way in (*((AT_ONCE, SLOW) if number % 2 else (SLOW, AT_ONCE)), SINGLE):
                groups = _groups(setting, requests, way, number, lengths)
                # no tokens of the other way, and a journal of its own, as in each step of a run
                engines.call_all("reset_prefix_cache", CALL_TIMEOUT_S)
                host.begin(len(WAYS) * number + WAYS.index(way), "")
                with phases.phase(f"round {number} of {setting.rounds}: {way}"):
                    measured[way], tokens[way] = _play(engines, groups)
                lengths = [len(ids) for ids in tokens[way]]
            if tokens[SLOW] != tokens[AT_ONCE]:
                raise InfraError("the engine sampled other tokens for slow answers: this is a bug")
            rounds += [measured] * (number > 0)
    return rounds


def _groups(
    setting: argparse.Namespace,
    requests: EpisodeRequests,
    way: str,
    number: int,
    lengths: Sequence[int],
) -> list[OpenGroup]:
    """Return the conversations of a round, or answers of these lengths in a single turn."""
    groups = []
    num_stops = VOCABULARY // setting.tokens
    for place in range(setting.conversations):
        text = f"Question {number}-{place}"
        prompt = Prompt(id=text, messages=(("user", text),), ground_truth="", data_source=way)
        is_single = way == SINGLE
        # a random model gives all tokens about the same probability
        settings = SamplingSettings(
            temperature=1.0,
            top_p=1.0,
            max_tokens=lengths[place] if is_single else _max_response_tokens(setting),
            stop_ids=() if is_single else tuple(range(VOCABULARY - num_stops, VOCABULARY)),
        )
        group = OpenGroup(
            key=place,
            prompt_ids=requests.prompt_ids(prompt),
            seeds=response_seeds(1, number, place),
            settings=settings,
            episode=requests.request(prompt),
            priority=place,
        )
        groups.append(group)
    return groups


def _play(
    engines: Engines, groups: Sequence[OpenGroup]
) -> tuple[dict[str, float], list[list[int]]]:
    """Generate groups, and return measurements and each response's sampled tokens."""
    engines.activity()
    start = time.perf_counter()
    engines.submit(groups)
    finished: dict[int, OpenGroup] = {}
    while engines.num_in_flight:
        finished |= {group.key: group for group in engines.finished()}
    seconds = time.perf_counter() - start
    (activity,) = engines.activity()
    responses = [finished[group.key].responses[0] for group in groups]
    for one in responses:
        if one.failure is not None:
            raise InfraError(f"an episode has failed: {one.failure.reason}")
    tokens = [one.token_ids[one.is_sampled].tolist() for one in responses]
    waited = sum(turn.seconds for one in responses for turn in one.turns)
    num_tokens = sum(map(len, tokens))
    return {
        "seconds": seconds,
        "tokens": num_tokens,
        "turns": sum(len(one.turns) or 1 for one in responses),
        "tokens_per_second": num_tokens / seconds,
        "busy_share": activity.busy_seconds / seconds,
        "slot_use": activity.mean_running * activity.busy_seconds / seconds,
        "mean_waiting": waited / seconds,
        "tokens_read": activity.num_prompt_tokens - activity.num_cached_tokens,
        "tokens_from_cache": activity.num_cached_tokens,
        "load": os.getloadavg()[0],
    }, tokens


def means(rounds: Sequence[Round], way: str) -> dict[str, float]:
    """Return the means over the rounds, with ratios to the environment that answers at once."""
    found = {name: statistics.fmean(one[way][name] for one in rounds) for name in rounds[0][way]}
    for name in ("tokens_per_second", "busy_share"):
        ratios = [one[way][name] / one[AT_ONCE][name] for one in rounds]
        found[f"{name}_ratio"] = statistics.fmean(ratios)
        spread = statistics.stdev(ratios) if len(ratios) > 1 else math.nan
        found[f"{name}_ratio_standard_error"] = spread / math.sqrt(len(ratios))
    return found


def _table(setting: argparse.Namespace, results: Mapping[str, Mapping[str, float]]) -> str:
    rows = []
    for way, one in results.items():
        name = "tokens_per_second_ratio"
        numbers = (
            f"{one['seconds']:.2f}",
            f"{one['tokens_per_second']:.0f}",
            f"{one[name]:.3f} +- {one[name + '_standard_error']:.3f}",
            f"{one['busy_share']:.3f}",
            f"{one['busy_share_ratio']:.3f}",
            f"{one['slot_use']:.2f}",
            f"{one['mean_waiting']:.1f}",
            f"{one['tokens_read']:.0f}",
            f"{one['tokens_from_cache']:.0f}",
        )
        rows.append([way, *numbers])
    head = ["seconds", "tokens/s", "ratio", "busy", "ratio", "slots used", "waiting"]
    title = (
        f"{setting.conversations} conversations in {setting.slots} slots; slow answers take "
        f"{setting.delay:g} s"
    )
    return TextTable(title=title, head=["", *head, "read", "from cache"], rows=rows).text()


if __name__ == "__main__":
    sys.exit(report_errors(main))
