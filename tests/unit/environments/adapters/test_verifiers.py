"""Model calls of a verifiers harness become observations, and actions their answers.

The package is stood in for; its calls have the form of `renderers.client.generate` of renderers
0.1.12. test_verifiers_package.py plays with the package itself.
"""

import asyncio
import sys
from collections.abc import Iterator
from contextlib import asynccontextmanager, contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import aiohttp
import pytest

from megadapo.environments.adapters import verifiers
from megadapo.environments.adapters.verifiers import MAX_BODY_BYTES, Verifiers
from megadapo.environments.environment import Action, EnvironmentFailure, Observation, Task
from megadapo.environments.results import read_observation
from tests.unit.environments.adapters.playing import Player

PROMPT = [1, 2, 3]
END = 9
PARAMS = {"stop_token_ids": [END], "logprobs": 1, "skip_special_tokens": False}


class FakeEnv:
    """An environment whose episodes make the calls that their task lists, one after another."""

    def __init__(self) -> None:
        self.url = ""
        self.replies: list[Any] = []
        self.num_cancelled = 0
        self.taskset = FakeTaskset()
        self.config = SimpleNamespace(taskset=SimpleNamespace(task=None))

    @asynccontextmanager
    async def serving(self) -> Any:
        yield

    async def run_episode(self, task: Any, context: Any, on_trace: Any) -> Any:
        self.url = context.client.base_url
        trace = SimpleNamespace(
            id="trace", num_turns=0, rewards={}, metrics={}, errors=[], stop_condition="done"
        )
        on_trace(trace)
        try:
            for call in task.data.get("calls", ()):
                reply = await post(self.url, call, session=trace.id)
                self.replies.append(reply)
                trace.num_turns += 1
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        if "raises" in task.data:
            raise task.data["raises"]
        vars(trace).update(task.data.get("trace", {}))
        trace.reward = sum(one.value for one in trace.rewards.values() if one)
        return SimpleNamespace(ok=not trace.errors, errors=[], traces=[trace])


class FakeTaskset:
    @staticmethod
    def task_type() -> Any:
        class FakeTask:
            def __init__(self, data: Any, config: Any) -> None:
                self.data = data

            @staticmethod
            def data_type() -> Any:
                return SimpleNamespace(model_validate=dict)

        return FakeTask


async def post(url: str, call: Any, *, session: str, path: str = "/inference/v1/generate") -> Any:
    """Call the model as `generate` does; return the reply, or the status of an error."""
    body = call
    if isinstance(call, list):
        body = {"model": "m", "token_ids": call, "sampling_params": PARAMS}
    headers = {"X-Session-ID": session}
    address = url.removesuffix("/v1") + path
    async with (
        aiohttp.ClientSession() as client,
        client.post(address, json=body, headers=headers) as reply,
    ):
        return await reply.json() if reply.status == 200 else reply.status


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> FakeEnv:
    env, module, renderers = FakeEnv(), ModuleType("verifiers.v1"), ModuleType("renderers.base")
    functions = {
        "resolve_env_config": lambda settings: settings,
        "load_environment": lambda settings: env,
        "TrainClientConfig": SimpleNamespace,
        "ModelContext": SimpleNamespace,
    }
    vars(module).update(functions)
    vars(renderers)["load_tokenizer"] = lambda model: SimpleNamespace(decode=str)
    monkeypatch.setitem(sys.modules, "verifiers", ModuleType("verifiers"))
    monkeypatch.setitem(sys.modules, "verifiers.v1", module)
    monkeypatch.setitem(sys.modules, "renderers", ModuleType("renderers"))
    monkeypatch.setitem(sys.modules, "renderers.base", renderers)
    monkeypatch.setattr(verifiers._Server, "_servers", {})
    return env


def task(**data: Any) -> Task:
    return Task(id="t", messages=[], extra_info={"task": data}, prompt_ids=tuple(PROMPT))


class TokenPlayer(Player):
    def turn(self, *token_ids: int) -> Observation:  # type: ignore[override]
        logprobs = [-0.5] * len(token_ids)
        action = Action(text="", token_ids=token_ids, logprobs=logprobs)
        found = self.value(self.environment.step(action))
        # the process of an environment refuses other observations
        read_observation(found, "step")
        return found


@contextmanager
def playing() -> Iterator[TokenPlayer]:
    loop = asyncio.new_event_loop()
    player = TokenPlayer(Verifiers(env={"taskset": {"id": "game"}}, model="m"), loop)
    try:
        yield player
    finally:
        player.value(player.environment.close())
        loop.run_until_complete(asyncio.sleep(0.05))
        left = asyncio.all_tasks(loop)
        loop.close()
    # a call that waits for ever would hold its connection
    assert not [one for one in left if "RequestHandler" in repr(one)]


def test_an_episode_is_played_by_token_ids(package: FakeEnv) -> None:
    one, two = [4, END], [5, 6, END]
    calls = [PROMPT, [*PROMPT, *one, 7, 8], [*PROMPT, *one, 7, 8, *two, 7]]
    scores = {"found": (1.0, 0.5), "b": (2.0, 1.0)}
    rewards = {name: SimpleNamespace(score=s, value=v) for name, (s, v) in scores.items()}
    trace = {"rewards": rewards, "metrics": {"guesses": 3.0, "none": None}}
    with playing() as player:
        assert player.reset(task(calls=calls, trace=trace)) is None
        found = player.turn(*one)
        assert (list(found.token_ids), found.reward, found.done) == ([7, 8], 0.0, False)
        assert list(player.turn(*two).token_ids) == [7]
        last = player.turn(END)
        assert (last.reward, last.done, last.token_ids) == (1.5, True, None)
        assert last.metrics == {"found": 1.0, "b": 2.0, "guesses": 3.0}
    [choice] = package.replies[0]["choices"]
    assert choice == {
        "index": 0,
        "token_ids": one,
        "finish_reason": "stop",
        "logprobs": {
            "content": [
                {"token": "token_id:4", "logprob": -0.5},
                {"token": f"token_id:{END}", "logprob": -0.5},
            ]
        },
    }


def test_a_prompt_that_goes_on_is_observed(package: FakeEnv) -> None:
    """Some renderers begin the model's turn with an empty thought."""
    with playing() as player:
        assert list(player.reset(task(calls=[[*PROMPT, 7]])).token_ids) == [7]
        assert player.turn(4, END).done


@pytest.mark.parametrize("prompt", [[1, 2, 4], [1, 2], []])
def test_another_prompt_is_a_failure(package: FakeEnv, prompt: list[int]) -> None:
    """The tokens that are trained on would follow another prompt than here."""
    with playing() as player, pytest.raises(ValueError, match="begins with another prompt"):
        player.reset(task(calls=[prompt]))


@pytest.mark.parametrize(
    "call", [[*PROMPT, 5, END, 7], [*PROMPT, 4], [1, 7, 3, 4, END, 7], [7], PROMPT]
)
def test_a_conversation_that_was_rendered_again_is_a_failure(
    package: FakeEnv, call: list[int]
) -> None:
    with playing() as player:
        player.reset(task(calls=[PROMPT, call]))
        with pytest.raises(EnvironmentFailure, match="does not continue the sampled.*retention"):
            player.turn(4, END)


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        (
            {"sampling_params": {**PARAMS, "temperature": 0.5, "max_tokens": 3}},
            "max_tokens, temper",
        ),
        ({"features": {"mm_hashes": {}}}, "features"),
    ],
)
def test_settings_that_the_engine_does_not_use_are_a_failure(
    package: FakeEnv, changed: Any, named: str
) -> None:
    """An answer of another distribution, or without the image, would be trained on."""
    call = {"model": "m", "token_ids": PROMPT, "sampling_params": PARAMS, **changed}
    with playing() as player, pytest.raises(ValueError, match=f"sets {named}"):
        player.reset(task(calls=[call]))


def test_an_end_that_the_engine_has_not_noticed_is_a_failure(package: FakeEnv) -> None:
    """For verifiers, the turn would have ended in the middle of the sampled tokens."""
    with playing() as player:
        player.reset(task(calls=[PROMPT]))
        with pytest.raises(EnvironmentFailure, match=f"ends a turn at token {END}"):
            player.turn(4, END, 5, END)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (
            {"trace": {"errors": [SimpleNamespace(type="TaskError", message="no file")]}},
            "^TaskError: no file$",
        ),
        (
            {"trace": {"rewards": {"found": None}, "stop_condition": "scoring_timeout"}},
            "no reward found: scoring_timeout",
        ),
    ],
)
def test_failures_of_verifiers_are_no_rewards(package: FakeEnv, data: Any, reason: str) -> None:
    with playing() as player:
        player.reset(task(calls=[PROMPT], **data))
        with pytest.raises(EnvironmentFailure, match=reason):
            player.turn(4, END)


def test_an_exception_of_verifiers_arrives(package: FakeEnv) -> None:
    """Else the step would wait until its time limit."""
    with playing() as player:
        player.reset(task(calls=[PROMPT], raises=KeyError("lost")))
        with pytest.raises(KeyError, match="lost"):
            player.turn(4, END)


def test_an_episode_without_a_call_is_a_failure(package: FakeEnv) -> None:
    with playing() as player, pytest.raises(ValueError, match="without a call"):
        player.reset(task())


def test_a_prompt_of_no_task_says_how_to_make_one(package: FakeEnv) -> None:
    with playing() as player, pytest.raises(ValueError, match="prepare.py"):
        player.reset(Task(id="t", messages=[]))


def test_closing_ends_the_episode_and_its_calls(package: FakeEnv) -> None:
    """The check of `playing` finds a call that is still answered."""
    with playing() as player:
        player.reset(task(calls=[PROMPT]))
        player.value(player.environment.close())
        assert package.num_cancelled == 1 and not package.replies
        # a call of a program that lives on finds no episode
        assert player.value(post(package.url, PROMPT, session="trace")) == 404


def test_only_the_harness_can_call_the_model(package: FakeEnv) -> None:
    """Other users of the machine see the port, and could answer for the environment."""
    with playing() as player:
        player.reset(task(calls=[PROMPT]))
        url = package.url
        assert url.startswith("http://127.0.0.1:")
        root = url.rpartition("/")[0].rpartition("/")[0]

        def status(base: str, call: Any, session: str = "trace", **options: Any) -> Any:
            return player.value(post(base, call, session=session, **options))

        assert status(f"{root}/v1", PROMPT) == status(f"{root}/guessed/v1", PROMPT) == 404
        with pytest.raises(aiohttp.ClientConnectorError):
            status(url.replace("127.0.0.1", "127.0.0.2"), PROMPT)
        assert status(url, PROMPT, session="another") == 404
        assert status(url, {"token_ids": PROMPT}) == status(url, {"sampling_params": 3}) == 400
        assert status(url, {"text": "x" * MAX_BODY_BYTES}) == 413
        # none of them was taken for a call of the episode
        assert player.turn(4, END).done


def test_the_models_have_no_limit(package: FakeEnv) -> None:
    async def models(url: str) -> Any:
        async with aiohttp.ClientSession() as client, client.get(f"{url}/models") as reply:
            return await reply.json()

    with playing() as player:
        player.reset(task(calls=[PROMPT]))
        assert player.value(models(package.url)) == {"object": "list", "data": []}


def test_without_the_package_the_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verifiers._Server, "_servers", {})
    monkeypatch.setitem(sys.modules, "verifiers.v1", None)
    with pytest.raises(RuntimeError, match="install verifiers, and set rollout.environments.pyth"):
        Verifiers(env={}, model="m")
