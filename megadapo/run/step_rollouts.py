"""From one step's results to the groups that are saved of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from megadapo.algorithm.advantages import Advantages
from megadapo.algorithm.shaping import overlong_penalties
from megadapo.config import RunConfig
from megadapo.data.batch import Group
from megadapo.observe.rollouts.saved_group import SavedGroup, SavedResponse
from megadapo.observe.rollouts.token_pieces import Decode, decoder_of, token_pieces
from megadapo.rewards.dapo_math import score

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from megadapo.rollout.sampling.sampled_batch import SampledBatch
    from megadapo.rollout.sampling.selection import SampledGroup
    from megadapo.trainer.types import UpdateResult


SecondOpinions = Callable[[Group], Sequence[bool | None]]
"""Whether each response of a group is right by the symbolic comparison, as far as that is known."""


@dataclass(frozen=True)
class _TrainedResponse:
    """What only training gives of one response; None where it was not trained on."""

    advantage: float | None = None
    advantages: np.ndarray | None = None
    """Where each token has its own."""
    logprobs_old: np.ndarray | None = None
    logprobs_update: np.ndarray | None = None


class _TrainedBatch:
    """What training gave the saved responses of a batch, in the batch's order."""

    def __init__(
        self, sampled: SampledBatch, advantages: Advantages | None, update: UpdateResult | None
    ) -> None:
        self._sequences = _sequences_by_order(sampled)
        self._advantages = advantages
        self._update = update
        lengths = [len(sample.response_ids) for group in sampled.groups for sample in group.samples]
        asked_for = saved_sequences(sampled)
        bounds = np.cumsum([0] + [lengths[sequence] for sequence in asked_for])
        self._slices = {
            sequence: slice(bounds[i], bounds[i + 1]) for i, sequence in enumerate(asked_for)
        }

    def of(self, sampled: SampledGroup) -> list[_TrainedResponse]:
        """What training gave each response of a group."""
        if sampled.fate != "trained":
            return [_TrainedResponse()] * len(sampled.group.samples)
        return [self._response(i) for i in self._sequences[sampled.group.order]]

    def _response(self, sequence: int) -> _TrainedResponse:
        own = None if self._advantages is None else np.asarray(self._advantages[sequence])
        if self._update is None:
            return _TrainedResponse(*_mean_and_tokens(own))
        recorded, place = self._update.recorded, self._slices[sequence]
        assert recorded is not None, "the update was not asked for the saved sequences"
        made = recorded.advantages[place]
        return _TrainedResponse(
            *_mean_and_tokens(made if np.isfinite(made).any() else own),
            logprobs_old=recorded.old[place],
            logprobs_update=recorded.update[place],
        )


def _mean_and_tokens(advantages: np.ndarray | None) -> tuple[float | None, np.ndarray | None]:
    """The advantage of a response and those of its tokens, if these have their own.

    Args:
        advantages: of the response, or of each token with NaN where it has no loss; None: nobody
            knows them.
    """
    if advantages is None:
        return None, None
    if advantages.ndim == 0:
        return float(advantages), None
    known = advantages[np.isfinite(advantages)].astype(np.float64)
    if not len(known) or (known == known[0]).all():
        return float(known[0]) if len(known) else None, None
    return float(known.mean()), advantages


def saved_sequences(sampled: SampledBatch) -> list[int]:
    """Return which sequences of the step's batch are responses of saved groups, ascending."""
    by_order = _sequences_by_order(sampled)
    trained = [entry.group.order for entry in sampled.saved if entry.fate == "trained"]
    return sorted(sequence for order in trained for sequence in by_order[order])


def saved_groups(
    step: int,
    sampled: SampledBatch,
    advantages: Advantages,
    update: UpdateResult | None,
    config: RunConfig,
    tokenizer: PreTrainedTokenizerBase,
    cross_checks: SecondOpinions,
) -> Iterator[SavedGroup]:
    """Yield what is saved of a step, in the order the groups were asked for.

    Args:
        advantages: of each response of the batch, or of its tokens; those that the trainer made
            come before, and with gae there are no others.
        update: of the batch, with the log-probs of its `saved_sequences`; None where it was not
            trained on.
        cross_checks: is asked when a group's turn comes, and so as late as can be.
    """
    of_responses = None if config.algorithm.advantage == "gae" else advantages
    trained = _TrainedBatch(sampled, of_responses, update)
    decode = decoder_of(tokenizer)
    for entry in sampled.saved:
        group = entry.group
        yield SavedGroup(
            step=step,
            order=group.order,
            fate=entry.fate,
            from_reserve=entry.from_reserve,
            prompt=group.prompt,
            prompt_ids=group.samples[0].prompt_ids,
            responses=_responses(entry, trained.of(entry), cross_checks(group), config, decode),
        )


def _responses(
    entry: SampledGroup,
    trained: Sequence[_TrainedResponse],
    symbolic: Sequence[bool | None],
    config: RunConfig,
    decode: Decode,
) -> tuple[SavedResponse, ...]:
    group = entry.group
    penalties = overlong_penalties(
        group.lengths,
        config.algorithm,
        max_response_tokens=config.rollout.max_response_tokens,
    )
    return tuple(
        SavedResponse(
            text=sample.text,
            token_ids=sample.response_ids,
            tokens=token_pieces(decode, sample.response_ids.tolist(), sample.text),
            logprobs_rollout=sample.logprobs_rollout,
            finish_reason=sample.finish_reason,
            policy_versions=sample.policy_versions,
            reward=group.rewards[i],
            penalty=float(penalties[i]),
            shaped_reward=float(group.rewards[i] + penalties[i]),
            correct=group.correct[i],
            answer=group.answers[i],
            rule_correct=_rule_correct(group, i, config),
            symbolic_correct=symbolic[i],
            advantage=trained[i].advantage,
            advantages=trained[i].advantages,
            logprobs_old=trained[i].logprobs_old,
            logprobs_update=trained[i].logprobs_update,
            reward_parts=dict(group.reward_parts[i]) if group.reward_parts else {},
            steps=group.steps[i] if group.steps else (),
            branch=sample.branch,
            experts=sample.experts,
        )
        for i, sample in enumerate(group.samples)
    )


def _rule_correct(group: Group, i: int, config: RunConfig) -> bool:
    """The rule's verdict on a response; where it is not asked, that of what scores the prompt."""
    if not config.reward.uses_rule(group.prompt.data_source):
        return group.correct[i]
    text, gold = group.samples[i].text, group.prompt.ground_truth
    return score(text, gold, config.reward.rule).correct


def _sequences_by_order(sampled: SampledBatch) -> dict[int, range]:
    """The sequences of the batch that are responses of each group, by the group's order."""
    sequences, start = {}, 0
    for group in sampled.groups:
        sequences[group.order] = range(start, start + len(group.samples))
        start += len(group.samples)
    return sequences
