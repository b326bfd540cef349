"""Measure a model's held-out accuracy in plain transformers: no vLLM, no trainer, no Ray.

    python tools/plain_accuracy.py FOLDER RECIPE [--section.key=value ...]

FOLDER is a Hugging Face folder, such as one of megadapo export. Prompts, chat template, sampling
and rewards are those of megadapo eval RECIPE, so the accuracies agree within their errors. The
responses differ, because the two draw their random numbers in different ways.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from megadapo.config import RunConfig, load_config
from megadapo.data.group import Response
from megadapo.errors import MegadapoError
from megadapo.observe.rollouts.token_pieces import decoder_of
from megadapo.rollout.episodes.requests import EpisodeRequests
from megadapo.rollout.sampling.evaluation import Evaluation, EvaluationInProgress, HeldOutRequests
from megadapo.rollout.types import EngineActivity, OpenGroup, StopReport
from megadapo.run.inputs import SamplingInputs
from megadapo.tokens.tokenizer import read_tokenizer

ROWS_AT_ONCE = 64
"""Responses that are generated together."""


def main() -> int:
    """Print the accuracy of each held-out set."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="Hugging Face folder")
    parser.add_argument("recipe", help="recipe (TOML), or the folder of a run")
    arguments, overrides = parser.parse_known_args()
    try:
        config = load_config(arguments.recipe, [one.removeprefix("--") for one in overrides])
        found = plain_accuracy(config, arguments.folder)
    except MegadapoError as error:
        print(f"plain_accuracy.py: {error}", file=sys.stderr)
        return error.exit_code
    for name, one in (found.sets or {"": found}).items():
        print(
            f"{name or 'held-out'}: avg@{one.samples_per_problem} on {one.num_problems} problems "
            f"{one.accuracy:.4f} ± {one.standard_error:.4f}, "
            f"mean length {one.response_length_mean:.1f} tokens"
        )
    return 0


def plain_accuracy(config: RunConfig, folder: Path) -> Evaluation:
    """Return the accuracy of a model's folder on the held-out problems of a configuration.

    Raises:
        DataError: the problems, their gold answers or the tokenizer cannot be used.
        InfraError: a reward function failed on all responses to a problem.
    """
    model = config.model.model_copy(update={"path": str(folder)})
    config = config.model_copy(update={"model": model})
    with ExitStack() as stack:
        inputs = SamplingInputs.start(config, _Quiet(), stack)
        held_out = HeldOutRequests.create(
            inputs.held_out,
            config.evaluation,
            EpisodeRequests(tokenizer=inputs.tokenizer, seed=config.run.seed),
            max_response_tokens=config.rollout.max_response_tokens,
        )
        engine = PlainEngine(folder, config.model.dtype)
        with EvaluationInProgress(engine, inputs.scorer, held_out) as evaluation:
            return evaluation.finish()


class PlainEngine:
    """Sampling by `model.generate`, with the methods of engines that an evaluation calls."""

    policy_version = 0
    capacity = ROWS_AT_ONCE

    def __init__(self, folder: Path, dtype: str) -> None:
        """Load the model, onto the first GPU if there is one."""
        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
        self._model = model.to(self._device).eval()
        self._tokenizer = read_tokenizer(str(folder))
        self._decode = decoder_of(self._tokenizer)
        ends = self._model.generation_config.eos_token_id
        self._ends = {ends} if isinstance(ends, int) else set(ends or ())
        self._waiting: list[OpenGroup] = []

    @property
    def num_in_flight(self) -> int:
        return len(self._waiting)

    def submit(self, groups: Sequence[OpenGroup]) -> None:
        """Note the groups, which `finished` generates."""
        self._waiting += groups

    def finished(self, timeout_s: float | None = None) -> list[OpenGroup]:
        """Generate the next groups, however long that takes, and return them."""
        number = max(1, ROWS_AT_ONCE // len(self._waiting[0].seeds)) if self._waiting else 0
        groups, self._waiting = self._waiting[:number], self._waiting[number:]
        return list(self._generate(groups)) if groups else []

    def stop(self, keys: Collection[int] | None = None, *, keep: bool) -> StopReport:
        """Report no group, since none is in progress between two calls."""
        return StopReport(keys=(), unfinished=(), num_tokens=0)

    def activity(self) -> list[EngineActivity]:
        """Return no activity, since no metric of an evaluation needs it."""
        return []

    def _generate(self, groups: Sequence[OpenGroup]) -> Iterator[OpenGroup]:
        prompts = [list(group.prompt_ids) for group in groups for _ in group.seeds]
        longest = max(map(len, prompts))
        pad = self._tokenizer.pad_token_id or 0
        rows = [[pad] * (longest - len(ids)) + ids for ids in prompts]
        mask = [[0] * (longest - len(ids)) + [1] * len(ids) for ids in prompts]
        settings = groups[0].settings
        is_greedy = settings.temperature == 0.0
        drawn = (
            {}
            if is_greedy
            else {
                "temperature": settings.temperature,
                "top_p": settings.top_p,
                # transformers' default is 50
                "top_k": 0,
            }
        )
        torch.manual_seed(groups[0].seeds[0])
        with torch.inference_mode():
            output = self._model.generate(
                torch.tensor(rows, device=self._device),
                attention_mask=torch.tensor(mask, device=self._device),
                do_sample=not is_greedy,
                max_new_tokens=settings.max_tokens,
                pad_token_id=pad,
                **drawn,
            )
        responses = iter(output[:, longest:].tolist())
        for group in groups:
            own = tuple(self._response(next(responses)) for _ in group.seeds)
            yield replace(group, responses=own)

    def _response(self, tokens: list[int]) -> Response:
        """Return a row up to the first token that ends a turn."""
        end = next((n for n, token in enumerate(tokens, start=1) if token in self._ends), None)
        ids = np.array(tokens[:end], dtype=np.int32)
        return Response(
            token_ids=ids,
            logprobs=np.full(len(ids), np.nan, dtype=np.float32),
            finish_reason="length" if end is None else "stop",
            text=self._decode(tokens[:end]),
            policy_versions=np.zeros(len(ids), dtype=np.int32),
        )


class _Quiet:
    """A display of phases that shows none."""

    def phase(self, name: str) -> AbstractContextManager[None]:
        return nullcontext()


if __name__ == "__main__":
    sys.exit(main())
