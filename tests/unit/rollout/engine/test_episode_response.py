"""Responses of episodes that are stopped, lost, repeated or branched, with a real host.

Each failure caught here would train on tokens that were not sampled, or act twice.
"""

import asyncio

import numpy as np
import pytest

from megadapo.algorithm.groups import Branch
from megadapo.rollout.engine.in_flight import response_prefix
from megadapo.rollout.types import OpenGroup, SamplingSettings
from tests.support.environments.played_responses import Play, Policy, user_turn


def test_turns_are_sampled_tokens_and_the_templates_glue(tmp_path, tokenizer):
    async def run():
        async with Play(tmp_path, tokenizer) as play:
            policy = Policy(tokenizer, "one", "two <think>", "three")
            found = await play.finish(policy)
            texts = [
                f"one<|im_end|>{user_turn('turn 1')}",
                f"two <think><|im_end|>{user_turn('turn 2')}",
            ]
            assert tokenizer.decode(found.token_ids) == "".join(texts) + "three<|im_end|>"
            # each request continues from exactly these tokens
            assert policy.prompts[2] == [1, 2, *found.token_ids[: found.turns[1].end].tolist()]
            assert [tokenizer.decode(found.token_ids[one]) for one in found.actions] == [
                *("one<|im_end|>", "two <think><|im_end|>", "three<|im_end|>")
            ]
            assert set(found.policy_versions[found.is_sampled]) == {1}
            assert np.isnan(found.logprobs[~found.is_sampled]).all()
            assert found.finish_reason == "stop" and found.episode_return == 6.0
            assert dict(found.metrics) == {"calls": 0.0, "bad": 0.0}
            assert play.actions == ["one", "two <think>", "three"]

    asyncio.run(run())


def test_response_stopped_in_a_call_acts_once(tmp_path, tokenizer):
    """An update of the weights stops a response while its environment works."""

    async def run():
        async with Play(tmp_path, tokenizer, pause_s=0.3) as play:
            one = play.response(Policy(tokenizer, "one"))
            playing = asyncio.ensure_future(one.finish())
            while not one.is_waiting or not play.actions:
                await asyncio.sleep(0.01)
            one.stop()
            await asyncio.wait_for(playing, 0.2)
            begun = one.response()
            assert begun.finish_reason == "unfinished" and not begun.turns
            assert tokenizer.decode(begun.token_ids) == "one<|im_end|>"
            found = await play.finish(Policy(tokenizer, "two", "three"), begun=begun, version=2)
            assert found.finish_reason == "stop" and len(found.actions) == 3
            assert [set(found.policy_versions[one]) for one in found.actions] == [{1}, {2}, {2}]
            assert play.actions == ["one", "two", "three"]

    asyncio.run(run())


def test_turn_stopped_in_the_middle_goes_on(tmp_path, tokenizer):
    async def run():
        async with Play(tmp_path, tokenizer, length=2) as play:
            begun = await play.finish(Policy(tokenizer, "first", "second", abort=1))
            assert begun.finish_reason == "unfinished" and len(begun.turns) == 1
            found = await play.finish(Policy(tokenizer, ""), begun=begun, version=4)
            assert play.actions == ["first", "second"] and found.finish_reason == "stop"
            assert set(found.policy_versions[found.actions[1]]) == {1, 4}

    asyncio.run(run())


def test_response_of_a_dead_engine_takes_the_recorded_turns(tmp_path, tokenizer):
    """Another engine gets the request as it was submitted, without any token."""

    async def run():
        async with Play(tmp_path, tokenizer) as play:
            lost = play.response(Policy(tokenizer, "one", "two", "not heard of", abort=2))
            await lost.finish()
            policy = Policy(tokenizer, "three")
            found = await play.finish(policy)
            assert found.token_ids[: found.turns[1].end].tolist() == (
                lost.response().token_ids[: found.turns[1].end].tolist()
            )
            assert len(policy.prompts) == 1 and play.actions == ["one", "two", "three"]
            assert found.episode_return == 6.0 and found.finish_reason == "stop"

    asyncio.run(run())


def test_response_stopped_in_a_stop_text_acts_behind_its_rest(tmp_path, tokenizer):
    """The engine searches only new text, and would continue without a call."""

    async def run():
        async with Play(tmp_path, tokenizer, length=2, in_turn="stop", reply="[{}]") as play:
            begun = await play.finish(Policy(tokenizer, "a stop", end="", abort=0))
            assert tokenizer.decode(begun.token_ids) == "a sto" and not play.actions
            found = await play.finish(Policy(tokenizer, "p", "b stop", end=""), begun=begun)
            assert tokenizer.decode(found.token_ids) == "a stop[1]b stop"
            assert play.actions == ["a stop", "b stop"]

    asyncio.run(run())


def test_rest_of_a_stop_text_elsewhere_ends_no_turn(tmp_path, tokenizer):
    async def run():
        async with Play(tmp_path, tokenizer, length=1, in_turn="stop", reply="[{}]") as play:
            begun = await play.finish(Policy(tokenizer, "a stop", end="", abort=0))
            policy = Policy(tokenizer, "re up, then", " stop and more", end="")
            found = await play.finish(policy, begun=begun)
            assert tokenizer.decode(found.token_ids) == "a store up stop"
            assert play.actions == ["a store up stop"] and len(policy.prompts) == 2
            # at the limit it is not continued
            cut = await play.finish(Policy(tokenizer, "re up", end=""), begun=begun, max_tokens=10)
            assert (len(cut.token_ids), cut.finish_reason) == (10, "length")

    asyncio.run(run())


@pytest.mark.parametrize("failing", [1, 2])
def test_failure_of_the_environment_gives_no_score(tmp_path, tokenizer, failing):
    async def run():
        async with Play(tmp_path, tokenizer, failing=failing) as play:
            found = await play.finish(Policy(tokenizer, "one", "two"))
            assert found.finish_reason == "failed" and len(found.actions) == failing - 1
            assert found.failure.function == "environment/Count"
            assert "the server is gone" in found.failure.reason
            # asked again, also by another engine, the action is not repeated
            again = await play.finish(Policy(tokenizer, "one", "two"))
            assert again.finish_reason == "failed" and len(play.actions) == failing

    asyncio.run(run())


@pytest.mark.parametrize("recovery", ["replay", "state"])
@pytest.mark.parametrize("failing", [1, 2])
def test_failed_response_continues_where_its_environment_failed(
    tmp_path, tokenizer, failing, recovery
):
    """Catches a second try that samples answered turns again, or has other tokens."""
    texts = ["one", "two", "three"]

    async def run(folder, **options):
        (tmp_path / folder).mkdir()
        async with Play(tmp_path / folder, tokenizer, recovery=recovery, **options) as play:
            play.closes = True
            found, policy = None, Policy(tokenizer, *texts)
            while found is None or found.finish_reason == "failed":
                begun = None
                if found is not None:
                    group = OpenGroup(
                        key=0,
                        prompt_ids=(1, 2),
                        seeds=(5,),
                        settings=SamplingSettings(temperature=1.0, top_p=1.0, max_tokens=400),
                        responses=(found,),
                    )
                    [begun] = group.repeat_failures().responses
                found = await play.finish(policy, begun=begun)
            return found, policy.prompts, play.actions

    plain, prompts, _ = asyncio.run(run("plain"))
    found, again, actions = asyncio.run(run("failing", failing=failing, num_failures=2))
    assert found.finish_reason == "stop" and found.failure is None
    assert found.token_ids.tolist() == plain.token_ids.tolist() and again == prompts
    assert [one.end for one in found.turns] == [one.end for one in plain.turns]
    assert found.episode_return == 6.0
    repeated = texts[: failing - 1] if recovery == "replay" else []
    tries = [*repeated, texts[failing - 1]]
    assert actions == [*texts[:failing], *tries, *tries, *texts[failing:]]


@pytest.mark.parametrize("recovery", ["replay", "state"])
@pytest.mark.parametrize("num_turns", [1, 2])
def test_branch_plays_on_from_its_parents_turn(tmp_path, tokenizer, recovery, num_turns):
    """ARPO: a new object is brought to the parent's turn, and each continues without the other."""

    async def run():
        async with Play(tmp_path, tokenizer, recovery=recovery) as play:
            parent = await play.finish(Policy(tokenizer, "one", "two", "three"))
            branch = Branch(0, parent.turns[num_turns - 1].end)
            begun = response_prefix(parent, branch.num_tokens, num_prompt=2)
            policy = Policy(tokenizer, *("other",) * (3 - num_turns))
            found = await play.finish(policy, seed=6, begun=begun, branch=branch)
            assert found.branch == branch and found.finish_reason == "stop"
            assert found.episode_return == 6.0 and len(found.actions) == 3
            kept = found.token_ids[: branch.num_tokens].tolist()
            assert kept == parent.token_ids[: branch.num_tokens].tolist()
            repeated = ["one", "two"][:num_turns] if recovery == "replay" else []
            assert play.actions[3:] == [*repeated, *("other",) * (3 - num_turns)]

    asyncio.run(run())


def test_response_of_a_repeated_run_stops_at_until(tmp_path, tokenizer):
    """It stops at every token where the first run may have been stopped."""

    async def run():
        async with Play(tmp_path, tokenizer, length=2) as play:
            whole = await play.finish(Policy(tokenizer, "one", "two"))
            ids, observed = whole.token_ids.tolist(), whole.turns[0].end
            for until in range(1, len(ids) + 3):
                policy = Policy(tokenizer, "one", "two")
                found = await play.finish(policy, seed=100 + until, until=until)
                # an answer comes as a whole, so no run stops inside of it
                in_answer = whole.actions[0].stop < until < observed
                end = observed if in_answer else min(until, len(ids))
                assert found.token_ids.tolist() == ids[:end]
                is_whole = until >= len(ids)
                assert found.finish_reason == ("stop" if is_whole else "unfinished")
                # an engine that died after that leaves its turns in the host's records
                num_acted = sum(action.stop <= until for action in whole.actions)
                policy = Policy(tokenizer, *("one", "two")[num_acted:])
                again = await play.finish(policy, seed=100 + until, until=until)
                assert again.token_ids.tolist() == ids[:end]
                assert again.finish_reason == found.finish_reason

    asyncio.run(run())
