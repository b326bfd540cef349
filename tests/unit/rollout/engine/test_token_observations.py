"""Environments that take and give token ids.

Each failure caught here would train on tokens that the environment has not seen.
"""

import asyncio
import json
import math
from dataclasses import asdict

import numpy as np
import pytest

from megadapo.environments.config import EnvironmentConfig
from megadapo.environments.environment import Action, Observation, Task
from megadapo.rollout.episodes.host import identity_of
from megadapo.rollout.episodes.journal import EpisodeRecord, TurnRecord
from megadapo.rollout.episodes.types import Outcome
from tests.support.environments.played_responses import Play, Policy


def ids_of(tokenizer, text):
    return tokenizer.encode(text, add_special_tokens=False)


def lines(play):
    return [json.loads(line) for line in play.log.read_text().splitlines()]


def test_token_ids_are_appended_as_they_are(tmp_path, tokenizer):
    """Control tokens among them stay, and the sampled ids arrive with the one that ends a turn."""
    hello, answer = (ids_of(tokenizer, text) for text in ("<think>", "\n<|im_start|>tool\n"))

    async def run():
        async with Play(tmp_path, tokenizer, game="Tokens", answers=[answer], hello=hello) as play:
            policy = Policy(tokenizer, "one", "two")
            found = await play.finish(policy)
            one, two = (ids_of(tokenizer, f"{text}<|im_end|>") for text in ("one", "two"))
            assert found.token_ids.tolist() == [*hello, *one, *answer, *two]
            assert policy.prompts == [[1, 2, *hello], [1, 2, *hello, *one, *answer]]
            kept = [*[False] * len(hello), *[True] * len(one), *[False] * len(answer)]
            assert found.is_sampled.tolist() == kept + [True] * len(two)
            assert np.isnan(found.logprobs[~found.is_sampled]).all()
            assert found.finish_reason == "stop" and found.episode_return == 1.0
            prompt, *turns = lines(play)
            assert prompt == [[1, 2]]
            assert [[ids, text] for ids, _, text in turns] == [[one, "one"], [two, "two"]]
            # the policy of this test gives none
            assert all(math.isnan(x) and len(turns[0][1]) == len(one) for x in turns[0][1])

    asyncio.run(run())


def test_another_engine_and_a_restart_continue_with_recorded_token_ids(tmp_path, tokenizer):
    answers = [ids_of(tokenizer, text) for text in ("first", "second")]
    given = {"game": "Tokens", "answers": answers, "recovery": "replay"}

    async def lose():
        async with Play(tmp_path, tokenizer, **given) as play:
            await play.finish(Policy(tokenizer, "one", "two", "lost", abort=2))

    async def resume():
        async with Play(tmp_path, tokenizer, **given) as play:
            policy = Policy(tokenizer, "three")
            return await play.finish(policy), policy.prompts, lines(play)

    asyncio.run(lose())
    found, [prompt], received = asyncio.run(resume())
    turns = [ids_of(tokenizer, f"{text}<|im_end|>") for text in ("one", "two", "three")]
    known = [*turns[0], *answers[0], *turns[1], *answers[1]]
    assert prompt == [1, 2, *known] and found.token_ids.tolist() == known + turns[2]
    # both turns are replayed with the same ids, and no turn is sampled again
    assert [one[0] for one in received] == [[1, 2], *turns[:2], [1, 2], *turns]


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ([3] * 51, "51 token ids, which cannot be cut off: raise rollout.environments.max_obs"),
        ([10_000], "the token id 10000, and the model's tokenizer has"),
    ],
)
def test_token_ids_that_cannot_be_used_fail_the_response(tmp_path, tokenizer, answer, reason):
    """A cut would change the conversation, and an unknown id would end the engine."""

    async def run():
        async with Play(tmp_path, tokenizer, game="Tokens", answers=[answer]) as play:
            found = await play.finish(Policy(tokenizer, "one"))
            assert found.finish_reason == "failed" and reason in found.failure.reason

    asyncio.run(run())


def test_a_response_is_cut_at_its_length(tmp_path, tokenizer):
    one, answer = ids_of(tokenizer, "one<|im_end|>"), ids_of(tokenizer, "a long answer")

    async def run():
        async with Play(tmp_path, tokenizer, game="Tokens", answers=[answer]) as play:
            found = await play.finish(Policy(tokenizer, "one"), max_tokens=len(one) + 2)
            assert found.token_ids.tolist() == one + answer[:2]
            assert found.finish_reason == "length"

    asyncio.run(run())


def test_journals_of_earlier_versions_are_read():
    """They have no token ids in observations, actions and tasks."""
    turn = TurnRecord("digest", b"ids", Action(text="one"), "weights")
    turn.outcome = Outcome(Observation(text="1"), None, 0.5)
    record = EpisodeRecord("identity", True, Observation(text="0"), turns=[turn])
    entry = json.loads(json.dumps(record.to_json()))
    for observation in (entry["observation"], entry["turns"][0]["observation"]):
        del observation["token_ids"]
    for name in ("token_ids", "logprobs"):
        del entry["turns"][0]["action"][name]
    found = EpisodeRecord.from_json(entry, 1)
    assert found.observation.text == "0" and found.observation.token_ids is None
    assert found.turns[0].action.token_ids == () and found.turns[0].outcome.observation.text == "1"


def test_episodes_without_token_ids_are_known_by_their_earlier_identity():
    """Catches a restart after an update of megadapo that takes open episodes for others."""
    config = EnvironmentConfig(environment="calculator")
    task = Task(id="7", messages=[{"role": "user", "content": "play"}], seed=3)
    digest = "31dc7fbd2f7184e49ece9f1dc3196985671e382bc112894ce173d2a56971de2f"
    assert identity_of(config, task) == digest
    assert identity_of(config, Task(**asdict(task) | {"prompt_ids": [1]})) != digest
