"""Saved groups of a step: log-probs or advantages that are saved with another response."""

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace

import numpy as np
import pytest

from megadapo.algorithm.advantages import advantages, group_advantages, overlong_penalty
from megadapo.algorithm.groups import Steps
from megadapo.codec import encode
from megadapo.data.batch import PackedBatch
from megadapo.data.group import Group
from megadapo.observe.rollouts.files import read_rollouts, rollouts_path, write_rollouts
from megadapo.rollout.sampling.statistics import SampledBatch
from megadapo.run.step.saved_groups import held_out_groups, saved_groups
from megadapo.run.step.training import make_batch
from megadapo.trainer.types import RecordedTokens, UpdateResult
from tests.support.rollout.samplers import MAX_TOKENS, make_sampler
from tests.support.rollout.scripted_engines import POLICY_VERSION, ScriptedEngines
from tests.support.runs.runs_alone import config_of
from tests.support.runs.step_results import UPDATE

SIZES = {
    "rollout": {"max_response_tokens": MAX_TOKENS},
    "sampling": {"prompts_per_step": 8, "responses_per_prompt": 3},
    "algorithm": {"overlong_buffer": 4, "responses_per_mini_batch": 24},
}
CONFIG = config_of(changes=SIZES)


def sample(saved: int | str, *, num_steps: int = 2) -> SampledBatch:
    engines = ScriptedEngines("last first", slots=200)
    sampler = make_sampler(engines, saved_groups=saved, mode="partial", max_staleness=1)
    for _ in range(num_steps):
        engines.policy_version += 1
        batch = sampler.next_batch()
    return batch


def later_verdicts(group: Group) -> list[bool | None]:
    """Return the cross-check verdicts on three responses when they are saved."""
    return [group.prompt_index % 2 == 0, None, True]


def marks(group: Group, index: int) -> np.ndarray:
    size = group.lengths[index]
    return (100 * group.prompt_index + 10 * index + 0.01 * np.arange(size)).astype(np.float32)


def saved_of(sampled, batch, values, update, tokenizer, config=CONFIG):
    parts = (sampled, batch.recorded, values, update, config, tokenizer, later_verdicts)
    return list(saved_groups(9, *parts))


def with_steps(group: Group, steps: Sequence[Steps]) -> Group:
    pairs = zip(group.scores, steps, strict=True)
    return replace(group, scores=tuple(replace(score, steps=own) for score, own in pairs))


def trained(
    sampled: SampledBatch, batch: PackedBatch, *, makes_advantages: bool = False
) -> UpdateResult:
    by_sequence = [marks(group, i) for group in sampled.groups for i in range(3)]
    pieces = [by_sequence[sequence] for sequence in batch.recorded]
    old = np.concatenate([np.empty(0, dtype=np.float32), *pieces])
    made = old / 2 if makes_advantages else np.full_like(old, np.nan)
    recorded = RecordedTokens(old=old, proximal=old, update=-old, advantages=made)
    return replace(UPDATE, recorded=recorded)


@pytest.mark.parametrize("saved", ["all", 5, 1])
def test_responses_are_saved_with_their_own_results(tmp_path, tokenizer, saved):
    sampled = sample(saved)
    batch, values = make_batch(sampled, CONFIG, policy_version=2)
    path = rollouts_path(tmp_path, 9)
    update = trained(sampled, batch)
    write_rollouts(path, saved_of(sampled, batch, values, update, tokenizer))
    found = list(read_rollouts(path))
    assert [g.prompt_index for g in found] == [s.group.prompt_index for s in sampled.saved]
    assert saved != "all" or {g.disposition for g in found} >= {"trained", "to_reserve"}
    for group, entry in zip(found, sampled.saved, strict=True):
        facts = (9, entry.disposition, entry.from_reserve)
        assert (group.step, group.disposition, group.from_reserve) == facts
        # repr hides float32's last bits, the encoding of a checkpoint does not
        without = replace(group.group, scores=entry.group.scores)
        assert encode(without) == encode(replace(entry.group, seconds=0.0))
        verdicts = zip(entry.group.scores, later_verdicts(entry.group), strict=True)
        scores = tuple(replace(score, symbolic_correct=verdict) for score, verdict in verdicts)
        assert group.group.scores == scores
        shaped = [response.shaped_reward for response in group.responses]
        for i, response in enumerate(group.responses):
            assert "".join(response.tokens) == response.response.text
            size = len(response.response.token_ids)
            assert response.penalty == overlong_penalty(size, max_length=MAX_TOKENS, buffer=4)
            assert response.shaped_reward == response.score.reward + response.penalty
            if group.disposition == "trained":
                assert response.advantage == group_advantages(shaped)[i]
                assert np.array_equal(response.logprobs_old, marks(entry.group, i))
                assert np.array_equal(response.logprobs_update, -marks(entry.group, i))
            else:
                assert response.advantage is None
                assert response.logprobs_old is None and response.logprobs_update is None


def test_token_advantages_and_steps_are_saved(tmp_path, tokenizer):
    sampled = sample("all", num_steps=1)
    groups = tuple(
        with_steps(group, (((1, group.prompt_index), (n, 0.5)), (), ((n, 0.25),)))
        for group in sampled.groups
        for n in [min(group.lengths)]
    )
    known = {group.prompt_index: group for group in groups}
    saved = tuple(replace(s, group=known.get(s.group.prompt_index, s.group)) for s in sampled.saved)
    sampled = replace(sampled, groups=groups, saved=saved)
    process = {"algorithm.advantage": "grpo-process", "reward.functions": ["arithmetic_steps"]}
    config = config_of(changes={**SIZES, **process})
    batch, values = make_batch(sampled, config, policy_version=2)
    path = rollouts_path(tmp_path, 9)
    update = trained(sampled, batch)
    write_rollouts(path, saved_of(sampled, batch, values, update, tokenizer, config))
    found = [group for group in read_rollouts(path) if group.disposition == "trained"]
    responses = [response for group in found for response in group.responses]
    expected = {group.prompt_index: values[3 * i : 3 * i + 3] for i, group in enumerate(groups)}
    whole = [tokens for group in found for tokens in expected[group.prompt_index]]
    for response, tokens in zip(responses, whole, strict=True):
        if (tokens == tokens[0]).all():
            assert (response.advantage, response.advantages) == (tokens[0], None)
        else:
            assert np.array_equal(response.advantages, tokens.astype(np.float32))
            assert response.advantage == tokens.mean()
    again = advantages(
        [group.group for group in found], config.algorithm, max_response_tokens=MAX_TOKENS
    )
    assert all(np.array_equal(one, two) for one, two in zip(again, whole, strict=True))


def test_special_tokens_of_responses_are_saved_with_their_names(tokenizer):
    """Catches a conversation whose turns seem to have no end, and names of unused tokens."""
    sampled = sample("all")
    tokenizer = deepcopy(tokenizer)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_end|>", "<|other|>"]})
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    first, *others = sampled.saved
    response = first.group.responses[0]
    ids = np.append(response.token_ids[:-1], end).astype(np.int32)
    changed = replace(response, token_ids=ids, text=response.text[:-1])
    responses = (changed, *first.group.responses[1:])
    first = replace(first, group=replace(first.group, responses=responses))
    sampled = replace(sampled, saved=(first, *others))
    batch, values = make_batch(sampled, CONFIG, policy_version=2)
    found = saved_of(sampled, batch, values, trained(sampled, batch), tokenizer)
    assert found[0].control_tokens == {end: "<|im_end|>"}
    assert found[0].responses[0].tokens[-1] == ""
    assert all(group.control_tokens == {} for group in found[1:])


def test_trainer_advantages_take_precedence(tokenizer):
    sampled = sample("all")
    config = config_of(changes={**SIZES, "algorithm.advantage": "gae"})
    batch, values = make_batch(sampled, config, policy_version=2)
    made = trained(sampled, batch, makes_advantages=True)
    for update in (made, None):
        saved = saved_of(sampled, batch, values, update, tokenizer, config)
        for group, entry in zip(saved, sampled.saved, strict=True):
            for i, response in enumerate(group.responses):
                if update is None or entry.disposition != "trained":
                    assert response.advantage is None and response.advantages is None
                    continue
                tokens = marks(entry.group, i) / 2
                assert response.advantage == pytest.approx(tokens.mean(), rel=1e-6)
                assert response.advantages is None or np.array_equal(response.advantages, tokens)
                assert (response.advantages is None) == (len(tokens) == 1)


def test_no_sequences_without_saved_groups(tokenizer):
    sampled = sample(0)
    batch, values = make_batch(sampled, CONFIG, policy_version=2)
    # four groups have a stale response for the parity probe
    assert len(batch.recorded) == 4
    fresh, _ = make_batch(sample(0, num_steps=1), CONFIG, policy_version=POLICY_VERSION + 1)
    assert fresh.recorded == []
    assert saved_of(sampled, batch, values, trained(sampled, batch), tokenizer) == []


def test_all_sequences_are_saved_in_order():
    batch, _ = make_batch(sample("all"), CONFIG, policy_version=2)
    assert batch.recorded == list(range(24))


def test_rule_verdict_is_saved_if_another_scorer_decides(tokenizer):
    sampled = sample("all")
    batch, values = make_batch(sampled, CONFIG, policy_version=2)
    update = trained(sampled, batch)
    saved = saved_of(sampled, batch, values, update, tokenizer)
    responses = [response for group in saved for response in group.responses]
    # the scorer of this test looks at numbers alone, and no response has an answer for the rule
    assert any(response.score.correct for response in responses)
    assert not any(response.rule_correct for response in responses)
    assert {response.disagreed for response in responses} == {True, False}
    assert all(r.disagreed == (r.score.symbolic_correct is True) for r in responses)


def test_first_problems_of_an_evaluation_are_saved(tmp_path, tokenizer):
    """An accuracy of 0 could not be looked into."""
    sampled = [replace(one.group, prompt_index=-1 - i) for i, one in enumerate(sample("all").saved)]
    for number, wanted in ((2, 2), ("all", len(sampled)), (0, 0)):
        config = config_of(changes=SIZES | {"observe.saved_groups": number})
        groups = held_out_groups(9, sampled, config, tokenizer)
        assert [one.prompt_index for one in groups] == list(range(wanted))
        assert {one.disposition for one in groups} <= {"held_out"}
    write_rollouts(tmp_path / "groups", held_out_groups(9, sampled, CONFIG, tokenizer))
    first, *_ = read_rollouts(tmp_path / "groups")
    assert [saved.response.text for saved in first.responses] == [
        response.text for response in sampled[0].responses
    ]
    assert [saved.score.reward for saved in first.responses] == [*sampled[0].rewards]
