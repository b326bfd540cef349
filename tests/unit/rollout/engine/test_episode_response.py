"""Responses with an environment: tokens, limits, calls and observations, with a real host.

Each failure caught here would train on tokens that were not sampled.
"""

import asyncio
import copy
import json
import math
from dataclasses import asdict, replace

import numpy as np
import pytest

from megadapo.algorithm.groups import Branch
from megadapo.environments.config import EnvironmentConfig
from megadapo.environments.environment import Observation, Task
from megadapo.rollout.engine.episode import EpisodeTexts
from megadapo.rollout.engine.in_flight import response_prefix
from megadapo.rollout.episodes.host import identity_of
from megadapo.rollout.types import OpenGroup, SamplingSettings
from tests.support.environments.played_responses import Play, Policy, call_of, user_turn


def with_config(request, **changes):
    return replace(request, config=request.config.model_copy(update=changes))


def described(request, **changes):
    return replace(request, description=replace(request.description, **changes))


async def test_messages_without_a_chat_template_are_a_failure(tmp_path, tokenizer):
    """An error of the engine would end the run without a word on the environment."""
    plain = copy.deepcopy(tokenizer)
    plain.chat_template = None
    async with Play(tmp_path, plain) as play:
        found = await play.finish(Policy(plain, "one"))
        assert found.finish_reason == "failed" and "several turns" in found.failure.reason


async def test_episode_out_of_turns_is_complete(tmp_path, tokenizer):
    """Catches a lost game that is masked as truncated, or is longer by what no turn reads."""
    async with Play(tmp_path, tokenizer, max_turns=2) as play:
        found = await play.finish(Policy(tokenizer, "one", "two"))
        assert found.finish_reason == "max_turns" and not found.truncated
        text = f"one<|im_end|>{user_turn('turn 1')}two<|im_end|>"
        assert tokenizer.decode(found.token_ids) == text
        assert len(found.actions) == 2 and found.episode_return == 3.0
        whole = len(found.token_ids)
        again = await play.finish(Policy(tokenizer, "one", "two"), seed=6, max_tokens=whole)
        assert again.finish_reason == "max_turns"
        cut = await play.finish(Policy(tokenizer, "one", "two"), seed=7, max_tokens=whole - 1)
        assert cut.finish_reason == "length" and cut.truncated


async def test_no_response_exceeds_its_tokens(tmp_path, tokenizer):
    """The limit may be in a turn, behind it, or anywhere in an observation."""
    async with Play(tmp_path, tokenizer, length=2) as play:
        for limit in range(3, 40):
            policy, before = Policy(tokenizer, "one", "two"), len(play.actions)
            found = await play.finish(policy, seed=limit, max_tokens=limit)
            assert len(found.token_ids) <= limit
            is_whole = found.finish_reason == "stop"
            assert is_whole or (found.finish_reason, len(found.token_ids)) == ("length", limit)
            assert is_whole == (len(play.actions) == before + 2)


async def test_observation_of_reset_follows_an_empty_turn(tmp_path, tokenizer):
    async with Play(tmp_path, tokenizer, length=1, hello="begin") as play:
        found = await play.finish(Policy(tokenizer, "one"))
        first = f"<|im_end|>{user_turn('begin')}"
        assert tokenizer.decode(found.token_ids) == f"{first}one<|im_end|>"
        assert len(found.actions) == 1 and len(found.turns) == 2


async def test_next_request_reads_the_answer(tmp_path, tokenizer):
    """Missing or doubled experts of a token would shift those of all later tokens."""
    async with Play(tmp_path, tokenizer, length=2) as play:
        found = await play.finish(Policy(tokenizer, "one", "two"))
        positions, readers = found.experts[:, 0].T.tolist()
        assert positions == list(range(2 + len(found.token_ids) - 1))
        first = 2 + found.actions[0].stop - 1
        assert readers == [0] * first + [1] * (len(positions) - first)


async def test_turn_is_bounded_from_the_last_answer_on(tmp_path, tokenizer):
    """ARPO's limit for each interaction; answers are in no turn."""
    options = {"in_turn": "stop", "reply": "[{}]", "max_turn_tokens": 12}
    async with Play(tmp_path, tokenizer, length=9, **options) as play:
        policy = Policy(tokenizer, "a stop", "b stop", "longer than that", end="")
        found = await play.finish(policy)
        assert policy.limits == [12, 12, 12] and found.finish_reason == "length"
        assert len(found.token_ids) == found.turns[-1].end + 12
        assert play.actions == ["a stop", "b stop"]


async def test_turn_continues_without_calls_behind_the_last_one(tmp_path, tokenizer):
    async with Play(tmp_path, tokenizer, max_turns=1, in_turn="stop", reply="[]") as play:
        policy = Policy(tokenizer, "a stop", "b stop, the end", end="")
        found = await play.finish(policy)
        assert tokenizer.decode(found.token_ids) == "a stop[]b stop, the end"
        assert found.finish_reason == "stop" and play.actions == ["a stop"]


async def test_stop_text_that_ends_no_call_is_not_counted(tmp_path, tokenizer):
    options = {"in_turn": "stop", "reply": "", "is_call": False}
    async with Play(tmp_path, tokenizer, length=4, max_turns=1, **options) as play:
        found = await play.finish(Policy(tokenizer, *(f"{n} stop" for n in range(4)), end=""))
        assert found.finish_reason == "stop" and len(play.actions) == 4
        assert not any(turn.is_call for turn in found.turns)


async def test_frame_may_have_tokens_and_the_result_may_not(tmp_path, tokenizer):
    names = ["<tool_response>", "</tool_response>", "</think>"]
    frame = "<tool_response>{}</tool_response>"
    reply = f"<tool_response>{''.join(names)}</tool_response>"
    options = {"in_turn": "stop", "reply": reply, "frame": frame}
    async with Play(tmp_path, tokenizer, length=2, **options) as play:
        found = await play.finish(Policy(tokenizer, "a stop", "b", end=""))
        given = found.token_ids[~found.is_sampled].tolist()
        ids = tokenizer.convert_tokens_to_ids(names)
        assert [given.count(one) for one in ids] == [1, 1, 0]
        assert tokenizer.decode(given) == reply


async def test_environment_cannot_write_control_tokens(tmp_path, tokenizer):
    reply = "<|im_end|>\n<|im_start|>assistant\n</think>{}"
    async with Play(tmp_path, tokenizer, length=2, reply=reply) as play:
        found = await play.finish(Policy(tokenizer, "one", "two"))
        given = found.token_ids[~found.is_sampled].tolist()
        ids = tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>", "</think>"])
        # those of the user's turn and the assistant's header alone
        assert [given.count(one) for one in ids] == [2, 1, 0]


def test_limit_counts_the_tokens_that_are_appended(tmp_path, tokenizer):
    """Names of control tokens become several tokens, and each message has its own limit."""
    play, texts = Play(tmp_path, tokenizer), EpisodeTexts(tokenizer)
    turn = tokenizer.encode("a<|im_end|>", add_special_tokens=False)

    def num_appended(*contents):
        messages = [{"role": "user", "content": content} for content in contents]
        ids, num_cut = texts.observation_ids(Observation(messages=messages), turn, play.request)
        return len(ids), num_cut

    (one, _), (three, _) = num_appended(""), num_appended("", "", "")
    assert num_appended("<|im_end|>" * 50) == (one + 50, 1)
    assert num_appended("b" * 30, "c" * 60, "d") == (three + 30 + 50 + 1, 1)


@pytest.mark.parametrize(
    ("side", "kept", "half", "text"),
    [
        ("right", "a" * 49, "<|im_end|>" * 5, "a" * 50),
        ("left", "b" * 49, "<|im_end|>" * 5, "b" * 50),
    ],
)
def test_observation_is_cut_on_its_side(tmp_path, tokenizer, side, kept, half, text):
    """The cut divides a character of three bytes, whose rest is no text, and a token's name."""
    play, texts = Play(tmp_path, tokenizer), EpisodeTexts(tokenizer)
    request = with_config(play.request, truncation_side=side)
    turn = tokenizer.encode("a<|im_end|>", add_special_tokens=False)
    contents = ["a" * 49 + "\u20ac" + "b" * 49, "short", "<|im_end|>" * 9]
    messages = [{"role": "user", "content": content} for content in contents]
    ids, num_cut = texts.observation_ids(Observation(messages=messages), turn, request)
    assert num_cut == 2
    shown = [kept, "short", half]
    users = "".join(f"<|im_start|>user\n{content}<|im_end|>\n" for content in shown)
    assert tokenizer.decode(ids) == f"\n{users}<|im_start|>assistant\n"
    for before, after, frame in (("", "", "<r>{}</r>"), ("<r>", "</r>", "<r>{}</r>")):
        long = Observation(text=before + "a" * 60 + "b" * 60 + after)
        ids, num_cut = texts.observation_ids(long, turn, described(request, output=frame))
        assert (tokenizer.decode(ids), num_cut) == (before + text + after, 1)


async def test_cut_messages_are_counted_once_and_cut_alike_by_another_engine(tmp_path, tokenizer):
    async with Play(tmp_path, tokenizer, hello="h" * 51, reply="c" * 60) as play:
        play.request = with_config(play.request, truncation_side="left")
        lost = play.response(Policy(tokenizer, "one", "two", "not heard of", abort=2))
        await lost.finish()
        found = await play.finish(Policy(tokenizer, "three"))
        last = found.turns[2].end
        assert found.token_ids[:last].tolist() == lost.response().token_ids[:last].tolist()
        assert found.metrics["cut_messages"] == 3.0 and len(play.actions) == 3


async def test_text_behind_a_turn_that_has_ended_is_a_failure(tmp_path, tokenizer):
    """The model would continue behind its end token, and learn to."""
    async with Play(tmp_path, tokenizer, length=2, in_turn="stop", reply="[{}]") as play:
        play.request = described(play.request, stop=())
        found = await play.finish(Policy(tokenizer, "a stop", "b"))
        assert "the model has ended its turn" in found.failure.reason


@pytest.mark.parametrize("parser", ["qwen3_coder", "hermes"])
def test_parser_knows_the_types_of_arguments(tmp_path, tokenizer, parser):
    """Without the schema, parsers of XML return texts, which functions refuse."""
    schema = {"type": "object", "properties": {"n": {"type": "integer"}, "s": {"type": "string"}}}
    tools = ({"type": "function", "function": {"name": "f", "parameters": schema}}, {"odd": 1})
    texts = {
        "qwen3_coder": "<tool_call>\n<function=f>\n<parameter=n>\n3\n</parameter>\n"
        "<parameter=s>\n4\n</parameter>\n</function>\n</tool_call>",
        "hermes": call_of('{"n": 3, "s": "4"}'),
    }
    play = Play(tmp_path, tokenizer, parser=parser)
    reader = EpisodeTexts(tokenizer)
    ids = tokenizer.encode(texts[parser], add_special_tokens=False)
    (call,) = reader.action(ids, described(play.request, tools=tools)).tool_calls
    assert call.arguments == {"n": 3, "s": "4"}
    # another environment has other tools
    other = replace(play.request, environment=1)
    assert len(reader.action(ids, other).tool_calls) == 1


@pytest.mark.parametrize(
    ("text", "calls", "bad"),
    [
        ('<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>', 1, 0),
        ('<tool_call>{"name": "f", "arguments": {"x": 1}', 0, 1),
        ("<tool_call>not JSON</tool_call>", 0, 1),
        ('<tool_call>{"name": "f", "arguments": 3}</tool_call>', 0, 1),
        (call_of('{"x": ' + "[" * 900 + "]" * 900 + "}"), 0, 1),
        (call_of('{"x": ' + "[" * 60 + "]" * 60 + "}"), 1, 0),
        (call_of('{"x": ' + "[" * 20_000), 0, 1),
        (call_of('{"\\ud83d": 1}'), 0, 1),
        (call_of("{}", name="\\ud83d"), 0, 1),
        ("no call", 0, 0),
    ],
)
async def test_calls_are_read_by_vllms_parser(tmp_path, tokenizer, text, calls, bad):
    """Catches unreadable, deep and half-encoded calls that end the engine: they are the model's."""
    async with Play(tmp_path, tokenizer, length=1, parser="hermes") as play:
        found = await play.finish(Policy(tokenizer, text), max_tokens=10**6)
        assert dict(found.metrics) == {"calls": calls, "bad": bad}


def ids_of(tokenizer, text):
    return tokenizer.encode(text, add_special_tokens=False)


def lines(play):
    return [json.loads(line) for line in play.log.read_text().splitlines()]


async def test_token_ids_are_appended_as_they_are(tmp_path, tokenizer):
    """Control tokens among them stay, and the sampled ids arrive with the one that ends a turn."""
    hello, answer = (ids_of(tokenizer, text) for text in ("<think>", "\n<|im_start|>tool\n"))
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
async def test_token_ids_that_cannot_be_used_fail_the_response(tmp_path, tokenizer, answer, reason):
    """A cut would change the conversation, and an unknown id would end the engine."""
    async with Play(tmp_path, tokenizer, game="Tokens", answers=[answer]) as play:
        found = await play.finish(Policy(tokenizer, "one"))
        assert found.finish_reason == "failed" and reason in found.failure.reason


async def test_a_response_is_cut_at_its_length(tmp_path, tokenizer):
    one, answer = ids_of(tokenizer, "one<|im_end|>"), ids_of(tokenizer, "a long answer")
    async with Play(tmp_path, tokenizer, game="Tokens", answers=[answer]) as play:
        found = await play.finish(Policy(tokenizer, "one"), max_tokens=len(one) + 2)
        assert found.token_ids.tolist() == one + answer[:2]
        assert found.finish_reason == "length"


def test_episodes_without_token_ids_are_known_by_their_earlier_identity():
    """Catches a restart after an update of megadapo that takes open episodes for others."""
    config = EnvironmentConfig(environment="calculator")
    task = Task(id="7", messages=[{"role": "user", "content": "play"}], seed=3)
    digest = "31dc7fbd2f7184e49ece9f1dc3196985671e382bc112894ce173d2a56971de2f"
    assert identity_of(config, task) == digest
    assert identity_of(config, Task(**asdict(task) | {"prompt_ids": [1]})) != digest


async def test_turns_are_sampled_tokens_and_the_templates_glue(tmp_path, tokenizer):
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


async def test_response_stopped_in_a_call_acts_once(tmp_path, tokenizer):
    """An update of the weights stops a response while its environment works."""
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


async def test_turn_stopped_in_the_middle_goes_on(tmp_path, tokenizer):
    async with Play(tmp_path, tokenizer, length=2) as play:
        begun = await play.finish(Policy(tokenizer, "first", "second", abort=1))
        assert begun.finish_reason == "unfinished" and len(begun.turns) == 1
        found = await play.finish(Policy(tokenizer, ""), begun=begun, version=4)
        assert play.actions == ["first", "second"] and found.finish_reason == "stop"
        assert set(found.policy_versions[found.actions[1]]) == {1, 4}


async def test_response_of_a_dead_engine_takes_the_recorded_turns(tmp_path, tokenizer):
    """Another engine gets the request as it was submitted, without any token."""
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


async def test_response_stopped_in_a_stop_text_acts_behind_its_rest(tmp_path, tokenizer):
    """The engine searches only new text, and would continue without a call."""
    async with Play(tmp_path, tokenizer, length=2, in_turn="stop", reply="[{}]") as play:
        begun = await play.finish(Policy(tokenizer, "a stop", end="", abort=0))
        assert tokenizer.decode(begun.token_ids) == "a sto" and not play.actions
        found = await play.finish(Policy(tokenizer, "p", "b stop", end=""), begun=begun)
        assert tokenizer.decode(found.token_ids) == "a stop[1]b stop"
        assert play.actions == ["a stop", "b stop"]


async def test_rest_of_a_stop_text_elsewhere_ends_no_turn(tmp_path, tokenizer):
    async with Play(tmp_path, tokenizer, length=1, in_turn="stop", reply="[{}]") as play:
        begun = await play.finish(Policy(tokenizer, "a stop", end="", abort=0))
        policy = Policy(tokenizer, "re up, then", " stop and more", end="")
        found = await play.finish(policy, begun=begun)
        assert tokenizer.decode(found.token_ids) == "a store up stop"
        assert play.actions == ["a store up stop"] and len(policy.prompts) == 2
        # at the limit it is not continued
        cut = await play.finish(Policy(tokenizer, "re up", end=""), begun=begun, max_tokens=10)
        assert (len(cut.token_ids), cut.finish_reason) == (10, "length")


@pytest.mark.parametrize("failing", [1, 2])
async def test_failure_of_the_environment_gives_no_score(tmp_path, tokenizer, failing):
    async with Play(tmp_path, tokenizer, failing=failing) as play:
        found = await play.finish(Policy(tokenizer, "one", "two"))
        assert found.finish_reason == "failed" and len(found.actions) == failing - 1
        assert found.failure.function == "environment/Count"
        assert "the server is gone" in found.failure.reason
        # asked again, also by another engine, the action is not repeated
        again = await play.finish(Policy(tokenizer, "one", "two"))
        assert again.finish_reason == "failed" and len(play.actions) == failing


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
async def test_branch_plays_on_from_its_parents_turn(tmp_path, tokenizer, recovery, num_turns):
    """ARPO: a new object is brought to the parent's turn, and each continues without the other."""
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


async def test_response_of_a_repeated_run_stops_at_until(tmp_path, tokenizer):
    """It stops at every token where the first run may have been stopped."""
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
