"""The groups to save of one step, with the results of training."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from megadapo.algorithm.advantages import Advantages, overlong_penalties
from megadapo.config import RunConfig
from megadapo.data.group import Group
from megadapo.observe.rollouts.saved_group import SavedGroup, SavedResponse
from megadapo.observe.rollouts.token_pieces import Decode, decoder_of, token_pieces
from megadapo.rollout.sampling.statistics import SampledGroup

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from megadapo.rollout.sampling.statistics import SampledBatch
    from megadapo.trainer.types import UpdateResult


CrossChecks = Callable[[Group], Sequence[bool | None]]
"""Returns the cross-check's result for each response, None if it is not known yet."""


@dataclass(frozen=True)
class _Trained:
    """The results of training for one response; all None if it was not trained on."""

    advantage: float | None = None
    advantages: np.ndarray | None = None
    """Advantages of the tokens, if they differ."""
    logprobs_old: np.ndarray | None = None
    logprobs_update: np.ndarray | None = None


def saved_groups(
    step: int,
    sampled: SampledBatch,
    recorded: Sequence[int],
    advantages: Advantages,
    update: UpdateResult | None,
    config: RunConfig,
    tokenizer: PreTrainedTokenizerBase,
    cross_checks: CrossChecks,
) -> Iterator[SavedGroup]:
    """Yield the groups to save of a step, by prompt index.

    Args:
        recorded: the batch's sequences that are responses of saved groups, ascending.
        advantages: one per response of the batch, or one per token. Advantages that the trainer
            computed take precedence; with gae there are no others.
        update: result for the batch with the log-probs of the recorded sequences; None if the
            batch was not trained on.
        cross_checks: called when a group is yielded, so that late results are included.
    """
    known = None if config.algorithm.advantage == "gae" else advantages
    trained = _trained_responses(sampled, recorded, known, update)
    decoding = _decoding(tokenizer)
    for entry in sampled.saved:
        untrained = [_Trained()] * len(entry.group.responses)
        is_trained = entry.disposition == "trained"
        results = trained[entry.group.prompt_index] if is_trained else untrained
        yield _saved_group(step, entry, results, cross_checks(entry.group), config, decoding)


def held_out_groups(
    step: int, groups: Sequence[Group], config: RunConfig, tokenizer: PreTrainedTokenizerBase
) -> list[SavedGroup]:
    """Return the groups to save of an evaluation: the first problems."""
    number = config.observe.saved_groups
    if number == 0:
        return []
    decoding = _decoding(tokenizer)
    return [
        _saved_group(
            step,
            # their keys are -1, -2, ...
            SampledGroup(
                group=replace(group, prompt_index=-group.prompt_index - 1),
                disposition="held_out",
                from_reserve=False,
            ),
            [_Trained()] * len(group.responses),
            [score.symbolic_correct for score in group.scores],
            config,
            decoding,
        )
        for group in groups[: None if number == "all" else number]
    ]


def _decoding(tokenizer: PreTrainedTokenizerBase) -> tuple[Decode, Mapping[int, str]]:
    """Return what decodes tokens, and the names of special tokens."""
    known = tokenizer.added_tokens_decoder.items()
    return decoder_of(tokenizer), {number: one.content for number, one in known if one.special}


def _saved_group(
    step: int,
    entry: SampledGroup,
    trained: Sequence[_Trained],
    symbolic: Sequence[bool | None],
    config: RunConfig,
    decoding: tuple[Decode, Mapping[int, str]],
) -> SavedGroup:
    group, (decode, names) = entry.group, decoding
    return SavedGroup(
        step=step,
        prompt_index=group.prompt_index,
        disposition=entry.disposition,
        from_reserve=entry.from_reserve,
        prompt=group.prompt,
        prompt_ids=group.prompt_ids,
        responses=_saved_responses(entry, trained, symbolic, config, decode),
        failures=group.failures,
        control_tokens=_control_tokens(group, names),
    )


def _control_tokens(group: Group, names: Mapping[int, str]) -> dict[int, str]:
    """Return the names of the special tokens in a group's responses by their ids."""
    found = {
        int(token_id) for response in group.responses for token_id in np.unique(response.token_ids)
    }
    return {number: names[number] for number in sorted(found & names.keys())}


def _trained_responses(
    sampled: SampledBatch,
    recorded: Sequence[int],
    advantages: Advantages | None,
    update: UpdateResult | None,
) -> dict[int, list[_Trained]]:
    """Return the results of saved trained groups by prompt index."""
    found: dict[int, list[_Trained]] = {}
    indices = [group.prompt_index for group in sampled.groups for _ in group.responses]
    lengths = [length for group in sampled.groups for length in group.lengths]
    start = 0
    for sequence in recorded:
        own = None if advantages is None else np.asarray(advantages[sequence])
        if update is None:
            result = _Trained(*_mean_and_tokens(own))
        else:
            assert update.recorded is not None, "the update did not record the saved sequences"
            place = slice(start, start + lengths[sequence])
            start = place.stop
            made = update.recorded.advantages[place]
            result = _Trained(
                *_mean_and_tokens(made if np.isfinite(made).any() else own),
                logprobs_old=update.recorded.old[place],
                logprobs_update=update.recorded.update[place],
            )
        found.setdefault(indices[sequence], []).append(result)
    return found


def _mean_and_tokens(advantages: np.ndarray | None) -> tuple[float | None, np.ndarray | None]:
    """Return a response's advantage, and those of its tokens if they differ.

    `advantages`: one value, or one per token with NaN if a token has no loss.
    """
    if advantages is None:
        return None, None
    if advantages.ndim == 0:
        return float(advantages), None
    known = advantages[np.isfinite(advantages)].astype(np.float64)
    if not len(known) or (known == known[0]).all():
        return float(known[0]) if len(known) else None, None
    return float(known.mean()), advantages


def _saved_responses(
    entry: SampledGroup,
    trained: Sequence[_Trained],
    symbolic: Sequence[bool | None],
    config: RunConfig,
    decode: Decode,
) -> tuple[SavedResponse, ...]:
    group = entry.group
    limit = config.rollout.max_response_tokens
    penalties = overlong_penalties(group.lengths, config.algorithm, max_response_tokens=limit)
    return tuple(
        SavedResponse(
            response=response,
            score=replace(group.scores[i], symbolic_correct=symbolic[i]),
            tokens=token_pieces(decode, response.token_ids.tolist(), response.text),
            penalty=float(penalties[i]),
            shaped_reward=float(group.rewards[i] + penalties[i]),
            rule_correct=_rule_correct(group, i, config),
            advantage=trained[i].advantage,
            advantages=trained[i].advantages,
            logprobs_old=trained[i].logprobs_old,
            logprobs_update=trained[i].logprobs_update,
        )
        for i, response in enumerate(group.responses)
    )


def _rule_correct(group: Group, i: int, config: RunConfig) -> bool | None:
    """Return whether the rule, or the functions if no rule is used, call a response correct."""
    if not config.reward.uses_rule(group.prompt.data_source):
        return group.scores[i].correct
    text, gold = group.responses[i].text, group.prompt.ground_truth
    return config.reward.score(text, gold).correct
