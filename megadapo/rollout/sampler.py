"""Dynamic sampling: ask in rounds until the batch is full of groups with a signal.

DAPO (arXiv 2503.14476) section 3.2. Groups are taken in the order they were asked for, never in
the order they finished: a batch of early finishers would be a batch of short answers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from megadapo.algorithm.selection import has_signal
from megadapo.data.batch import Group, Sample
from megadapo.data.prompts import Prompt, PromptStream, render
from megadapo.errors import CheckpointError, SamplingError
from megadapo.observe.config import SavedGroups
from megadapo.rewards.dapo_math import Score
from megadapo.rollout.config import SamplingConfig
from megadapo.rollout.requests import GroupResponse, Response, SamplingSettings, response_seeds
from megadapo.rollout.reserve import Reserve
from megadapo.rollout.sampled_batch import SampledBatch, Tally
from megadapo.rollout.scoring import (
    Question,
    SupportsGenerate,
    SupportsScore,
    run_round,
)
from megadapo.rollout.selection import (
    YieldEstimate,
    accuracy_histogram,
    describe_shortfall,
    round_size,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


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
        saved_groups: SavedGroups = 0,
    ) -> None:
        """Start with an empty reserve.

        Args:
            seed: the run's; with a group's place in asking order it decides every response.
            saved_groups: how many groups each batch names for being saved.
        """
        self._engines = engines
        self._prompts = prompts
        self._verifier = verifier
        self._config = config
        self._settings = settings
        self._tokenizer = tokenizer
        self._seed = seed
        self._saved_groups = saved_groups
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
        tally = Tally(num_from_reserve=len(kept))
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
            surplus = with_signal[missing:]
            num_stored = self._reserve.put(surplus)
            tally.to_reserve += surplus[:num_stored]
            tally.dropped += surplus[num_stored:]
        self._check(kept, tally)
        return tally.batch(kept, self._saved_groups)

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

    def _num_allowed(self, tally: Tally) -> int:
        return self._config.max_asked_per_step - len(tally.generated)

    def _ask(self, num_groups: int, tally: Tally) -> list[Group]:
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
        for engine, share in outcome.engines.items():
            tally.engines[engine].add(share)
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

    def _check(self, kept: Sequence[Group], tally: Tally) -> None:
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
        samples=tuple(_sample(question, sample) for sample in response.responses),
        rewards=tuple(score.reward for score in scores),
        correct=tuple(score.correct for score in scores),
        answers=tuple(score.answer for score in scores),
        symbolic_correct=tuple(score.symbolic_correct for score in scores),
    )


def _sample(question: Question, response: Response) -> Sample:
    assert response.finish_reason != "unfinished", "only whole responses are scored"
    return Sample(
        prompt_ids=question.prompt_ids,
        response_ids=response.token_ids,
        logprobs_rollout=response.logprobs,
        finish_reason=response.finish_reason,
        policy_versions=response.policy_versions,
        text=response.text,
    )
