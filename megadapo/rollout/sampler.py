"""Dynamic sampling: ask in rounds until the batch is full of groups with a signal.

DAPO (arXiv 2503.14476) section 3.2. Groups are taken in the order they were asked for, never in
the order they finished: a batch of early finishers would be a batch of short answers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from megadapo.algorithm.selection import has_signal
from megadapo.data.batch import Group, Sample
from megadapo.data.prompts import Prompt, PromptStream, render
from megadapo.errors import CheckpointError, SamplingError
from megadapo.rewards.dapo_math import Score
from megadapo.rollout.config import SamplingConfig
from megadapo.rollout.requests import GroupResponse, SamplingSettings, response_seeds
from megadapo.rollout.reserve import Reserve
from megadapo.rollout.scoring import Question, SupportsGenerate, SupportsScore, run_round
from megadapo.rollout.selection import (
    YieldEstimate,
    accuracy_histogram,
    describe_shortfall,
    round_size,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, kw_only=True)
class SampledBatch:
    """The groups of one step and what was seen while they were sought.

    Everything but `groups`, `num_kept` and `num_from_reserve` is about the responses generated in
    this step, those of groups that were thrown away included; those of reserved groups were
    counted in the step that generated them.
    """

    groups: tuple[Group, ...]
    num_sampled: int
    """Groups generated: all right + all wrong + those with a signal."""
    num_all_correct: int
    num_all_wrong: int
    num_from_reserve: int
    """Groups of the batch that an earlier step had generated."""
    num_to_reserve: int
    """Surplus groups with a signal, kept for the next step."""
    num_dropped: int
    """Surplus groups with a signal for which the reserve had no room."""
    num_tokens: int
    """Response tokens generated."""
    reward_seconds: float
    accuracy: float
    """Share of correct responses."""
    reward_mean: float
    """Mean reward of the verifier, before any shaping."""
    response_length_mean: float
    """Mean length in tokens, the end-of-sequence token included."""
    response_length_p95: float
    truncated_fraction: float
    """Share of responses that were cut at the length limit."""

    @property
    def num_kept(self) -> int:
        """Groups in the batch."""
        return len(self.groups)


@dataclass
class _Tally:
    """What one step has generated so far."""

    generated: list[Group] = field(default_factory=list)
    num_from_reserve: int = 0
    num_to_reserve: int = 0
    num_surplus: int = 0
    reward_seconds: float = 0.0


class Sampler:
    """Fills batches from the prompt stream; its state is all that a resumed run needs."""

    def __init__(
        self,
        engines: SupportsGenerate,
        prompts: PromptStream,
        verifier: SupportsScore,
        config: SamplingConfig,
        *,
        settings: SamplingSettings,
        tokenizer: PreTrainedTokenizerBase,
        seed: int,
    ) -> None:
        """`seed` is the run's; with a group's place in asking order it decides every response."""
        self._engines = engines
        self._prompts = prompts
        self._verifier = verifier
        self._config = config
        self._settings = settings
        self._tokenizer = tokenizer
        self._seed = seed
        self._next_order = 0
        self._yield = YieldEstimate()
        self._reserve = Reserve(config.reserve_size)

    def next_batch(self) -> SampledBatch:
        """Return prompts_per_step groups with a signal, those in the reserve first.

        Raises:
            SamplingError: the bound on groups asked for was met with too few, and either none at
                all was found or `sampling.on_shortfall` is "stop".
            InfraError: an engine failed.
        """
        needed = self._config.prompts_per_step
        kept = self._reserve.take(needed)
        tally = _Tally(num_from_reserve=len(kept))
        while (missing := needed - len(kept)) and (allowed := self._num_allowed(tally)):
            size = round_size(
                missing,
                self._yield.value,
                oversampling=self._config.oversampling,
                num_allowed=allowed,
            )
            with_signal = [group for group in self._ask(size, tally) if has_signal(group.correct)]
            self._yield.update(size, len(with_signal))
            kept += with_signal[:missing]
            tally.num_surplus += len(with_signal[missing:])
            tally.num_to_reserve += self._reserve.put(with_signal[missing:])
        self._check(kept, tally)
        return _batch(kept, tally)

    def state_dict(self) -> dict[str, Any]:
        """Return where sampling stands, as JSON can hold it; the reserve's tokens included."""
        return {
            "next_order": self._next_order,
            "prompts": self._prompts.state_dict(),
            "yield": self._yield.state_dict(),
            "reserve": self._reserve.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state_dict` was taken.

        Raises:
            CheckpointError: the state is damaged.
            DataError: it belongs to other prompts.
        """
        try:
            self._next_order = int(state["next_order"])
            self._yield.load_state_dict(state["yield"])
            self._reserve.load_state_dict(state["reserve"])
            prompts = state["prompts"]
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"the saved state of sampling is damaged: {error!r}") from error
        self._prompts.load_state_dict(prompts)

    def _num_allowed(self, tally: _Tally) -> int:
        return self._config.max_asked_per_step - len(tally.generated)

    def _ask(self, num_groups: int, tally: _Tally) -> list[Group]:
        """Run one round and return its groups in asking order."""
        first = self._next_order
        questions = [
            self._question(order, prompt)
            for order, prompt in enumerate(self._prompts.next(num_groups), start=first)
        ]
        self._next_order += num_groups
        outcome = run_round(self._engines, self._verifier, questions, self._settings, _group)
        tally.generated += outcome.results
        tally.reward_seconds += outcome.reward_seconds
        return outcome.results

    def _question(self, order: int, prompt: Prompt) -> Question:
        return Question(
            key=order,
            prompt=prompt,
            prompt_ids=tuple(render(prompt, self._tokenizer)),
            seeds=response_seeds(
                self._config.responses_per_prompt, self._seed, "train", order, prompt.id
            ),
        )

    def _check(self, kept: Sequence[Group], tally: _Tally) -> None:
        needed = self._config.prompts_per_step
        if len(kept) == needed or (kept and self._config.on_shortfall == "train"):
            return
        raise SamplingError(
            describe_shortfall(
                len(kept),
                needed,
                accuracy_histogram(tally.generated),
                self._config.responses_per_prompt,
            )
        )


def _group(question: Question, response: GroupResponse, scores: list[Score]) -> Group:
    return Group(
        order=question.key,
        prompt=question.prompt,
        samples=tuple(
            Sample(
                prompt_ids=question.prompt_ids,
                response_ids=sample.token_ids,
                logprobs_rollout=sample.logprobs,
                finish_reason=sample.finish_reason,
                policy_version=sample.policy_version,
                text=sample.text,
            )
            for sample in response.responses
        ),
        rewards=tuple(score.reward for score in scores),
        correct=tuple(score.correct for score in scores),
        answers=tuple(score.answer for score in scores),
        symbolic_correct=tuple(score.symbolic_correct for score in scores),
    )


def _batch(kept: Sequence[Group], tally: _Tally) -> SampledBatch:
    samples = [sample for group in tally.generated for sample in group.samples]
    lengths = np.array([len(sample.response_ids) for sample in samples])
    size = len(tally.generated[0].samples)
    histogram: Counter[int] = accuracy_histogram(tally.generated)
    return SampledBatch(
        groups=tuple(kept),
        num_sampled=len(tally.generated),
        num_all_correct=histogram[size],
        num_all_wrong=histogram[0],
        num_from_reserve=tally.num_from_reserve,
        num_to_reserve=tally.num_to_reserve,
        num_dropped=tally.num_surplus - tally.num_to_reserve,
        num_tokens=int(lengths.sum()),
        reward_seconds=tally.reward_seconds,
        accuracy=float(np.mean([group.correct for group in tally.generated])),
        reward_mean=float(np.mean([group.rewards for group in tally.generated])),
        response_length_mean=float(lengths.mean()),
        response_length_p95=float(np.quantile(lengths, 0.95)),
        truncated_fraction=float(np.mean([sample.truncated for sample in samples])),
    )
