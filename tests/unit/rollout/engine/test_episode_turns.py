"""Turns of a response and its environment: tokens, limits and calls, with a real host.

Each failure caught here would train on tokens that were not sampled.
"""

import asyncio
import copy
from dataclasses import replace

import pytest

from megadapo.environments.environment import Observation
from megadapo.rollout.engine.episode import EpisodeClient
from tests.support.environments.played_responses import Play, Policy, call_of, user_turn


def test_messages_without_a_chat_template_are_a_failure(tmp_path, tokenizer):
    """An error of the engine would end the run without a word on the environment."""

    async def run():
        plain = copy.deepcopy(tokenizer)
        plain.chat_template = None
        async with Play(tmp_path, plain) as play:
            found = await play.finish(Policy(plain, "one"))
            assert found.finish_reason == "failed" and "several turns" in found.failure.reason

    asyncio.run(run())


def test_episode_out_of_turns_is_complete(tmp_path, tokenizer):
    """Catches a lost game that is masked as truncated, or is longer by what no turn reads."""

    async def run():
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

    asyncio.run(run())


def test_no_response_exceeds_its_tokens(tmp_path, tokenizer):
    """The limit may be in a turn, behind it, or anywhere in an observation."""

    async def run():
        async with Play(tmp_path, tokenizer, length=2) as play:
            for limit in range(3, 40):
                policy, before = Policy(tokenizer, "one", "two"), len(play.actions)
                found = await play.finish(policy, seed=limit, max_tokens=limit)
                assert len(found.token_ids) <= limit
                is_whole = found.finish_reason == "stop"
                assert is_whole or (found.finish_reason, len(found.token_ids)) == ("length", limit)
                assert is_whole == (len(play.actions) == before + 2)

    asyncio.run(run())


def test_observation_of_reset_follows_an_empty_turn(tmp_path, tokenizer):
    async def run():
        async with Play(tmp_path, tokenizer, length=1, hello="begin") as play:
            found = await play.finish(Policy(tokenizer, "one"))
            first = f"<|im_end|>{user_turn('begin')}"
            assert tokenizer.decode(found.token_ids) == f"{first}one<|im_end|>"
            assert len(found.actions) == 1 and len(found.turns) == 2

    asyncio.run(run())


def test_text_continues_the_same_turn(tmp_path, tokenizer):
    async def run():
        async with Play(tmp_path, tokenizer, length=2, in_turn="stop", reply="[{}]") as play:
            found = await play.finish(Policy(tokenizer, "a stop", "b stop", end=""))
            assert tokenizer.decode(found.token_ids) == "a stop[1]b stop"
            assert found.finish_reason == "stop" and play.actions == ["a stop", "b stop"]

    asyncio.run(run())


def test_next_request_reads_the_answer(tmp_path, tokenizer):
    """Missing or doubled experts of a token would shift those of all later tokens."""

    async def run():
        async with Play(tmp_path, tokenizer, length=2) as play:
            found = await play.finish(Policy(tokenizer, "one", "two"))
            positions, readers = found.experts[:, 0].T.tolist()
            assert positions == list(range(2 + len(found.token_ids) - 1))
            first = 2 + found.actions[0].stop - 1
            assert readers == [0] * first + [1] * (len(positions) - first)

    asyncio.run(run())


def test_turn_is_bounded_from_the_last_answer_on(tmp_path, tokenizer):
    """ARPO's limit for each interaction; answers are in no turn."""

    async def run():
        options = {"in_turn": "stop", "reply": "[{}]", "max_turn_tokens": 12}
        async with Play(tmp_path, tokenizer, length=9, **options) as play:
            policy = Policy(tokenizer, "a stop", "b stop", "longer than that", end="")
            found = await play.finish(policy)
            assert policy.limits == [12, 12, 12] and found.finish_reason == "length"
            assert len(found.token_ids) == found.turns[-1].end + 12
            assert play.actions == ["a stop", "b stop"]

    asyncio.run(run())


def test_turn_continues_without_calls_behind_the_last_one(tmp_path, tokenizer):
    async def run():
        async with Play(tmp_path, tokenizer, max_turns=1, in_turn="stop", reply="[]") as play:
            policy = Policy(tokenizer, "a stop", "b stop, the end", end="")
            found = await play.finish(policy)
            assert tokenizer.decode(found.token_ids) == "a stop[]b stop, the end"
            assert found.finish_reason == "stop" and play.actions == ["a stop"]

    asyncio.run(run())


def test_stop_text_that_ends_no_call_is_not_counted(tmp_path, tokenizer):
    async def run():
        options = {"in_turn": "stop", "reply": "", "is_call": False}
        async with Play(tmp_path, tokenizer, length=4, max_turns=1, **options) as play:
            found = await play.finish(Policy(tokenizer, *(f"{n} stop" for n in range(4)), end=""))
            assert found.finish_reason == "stop" and len(play.actions) == 4
            assert not any(turn.is_call for turn in found.turns)

    asyncio.run(run())


def test_frame_may_have_tokens_and_the_result_may_not(tmp_path, tokenizer):
    async def run():
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

    asyncio.run(run())


def test_environment_cannot_write_control_tokens(tmp_path, tokenizer):
    async def run():
        reply = "<|im_end|>\n<|im_start|>assistant\n</think>{}"
        async with Play(tmp_path, tokenizer, length=2, reply=reply) as play:
            found = await play.finish(Policy(tokenizer, "one", "two"))
            given = found.token_ids[~found.is_sampled].tolist()
            ids = tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>", "</think>"])
            # those of the user's turn and the assistant's header alone
            assert [given.count(one) for one in ids] == [2, 1, 0]

    asyncio.run(run())


def test_limit_counts_the_tokens_that_are_appended(tmp_path, tokenizer):
    """Names of control tokens become several tokens, and all messages share the limit."""
    play, client = Play(tmp_path, tokenizer), EpisodeClient(tokenizer, None)
    turn = tokenizer.encode("a<|im_end|>", add_special_tokens=False)

    def num_appended(*contents):
        messages = [{"role": "user", "content": content} for content in contents]
        return len(client.observation_ids(Observation(messages=messages), turn, play.request))

    assert num_appended("<|im_end|>" * 50) == num_appended("") + 50
    assert num_appended("b" * 30, "c" * 30, "d") == num_appended("", "", "") + 50


def test_text_behind_a_turn_that_has_ended_is_a_failure(tmp_path, tokenizer):
    """The model would continue behind its end token, and learn to."""

    async def run():
        async with Play(tmp_path, tokenizer, length=2, in_turn="stop", reply="[{}]") as play:
            play.request = replace(play.request, stop=())
            found = await play.finish(Policy(tokenizer, "a stop", "b"))
            assert "the model has ended its turn" in found.failure.reason

    asyncio.run(run())


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
    client = EpisodeClient(tokenizer, None)
    ids = tokenizer.encode(texts[parser], add_special_tokens=False)
    (call,) = client.action(ids, replace(play.request, tools=tools)).tool_calls
    assert call.arguments == {"n": 3, "s": "4"}
    # another environment has other tools
    other = replace(play.request, environment=1)
    assert len(client.action(ids, other).tool_calls) == 1


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
def test_calls_are_read_by_vllms_parser(tmp_path, tokenizer, text, calls, bad):
    """A call that cannot be read is the model's mistake, which its environment hears of.

    Deep arguments, and half of a surrogate pair, would end the engine or fail the environment.
    """

    async def run():
        async with Play(tmp_path, tokenizer, length=1, parser="hermes") as play:
            found = await play.finish(Policy(tokenizer, text), max_tokens=10**6)
            assert dict(found.metrics) == {"calls": calls, "bad": bad}

    asyncio.run(run())
