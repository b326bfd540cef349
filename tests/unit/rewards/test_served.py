"""Judges and reward models, served by a small HTTP server on loopback or loaded by a worker."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, Qwen2ForSequenceClassification

from megadapo.data.group import Score
from megadapo.data.prompts import Prompt
from megadapo.errors import ConfigError, RewardError, RewardOutageError
from megadapo.rewards.config import RewardConfig, RewardFunction
from megadapo.rewards.function_runners import check_functions, start_runner
from megadapo.rewards.scorer import Scorer
from tests.support.processes.fake_server import FakeServer, Reply

BROKEN = {
    "no HTTP": b"garbage\r\n\r\n",
    "half": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nff\r\n{}",
}
"""Malformed replies, by the message that triggers them."""
PROMPT = Prompt("id", (("system", "Be brief."), ("user", "1+1=?")), "2", "test")
AWAY = {"url": "http://127.0.0.1:9", "retries": 0}
"""Options of a server that is not there."""
BASE = "configs/quickstart-base"
SUM = Prompt("id", (("user", "12+34+56=?"),), "102", "arithmetic")


class Judge(FakeServer):
    """A server that behaves as the request's text says."""

    def __init__(self) -> None:
        super().__init__()
        self.num_busy = 0
        self.said = "Score: 3?\n**Score: 8**"

    def answer(self, path: str, body: dict) -> Reply:
        text = body["messages"][-1]["content"]
        if "cut off" in text or text in BROKEN:
            return BROKEN.get(text, b"")
        if "busy" in text:
            self.num_busy += 1
            if self.num_busy <= 2:
                return 503, {}
        if "forbidden" in text:
            return 401, {}
        if path == "/classify":
            return 200, {"data": [{"probs": [0.1, len(text) / 2]}]}
        said = "I cannot say." if "unclear" in text else self.said
        if text.startswith("Score: "):
            said = text
        return 200, {"choices": [{"message": {"content": said}}] if "empty" not in text else []}


@pytest.fixture
def server() -> Iterator[Judge]:
    with Judge() as server:
        yield server


def ask(name: str, texts: list[str], **options: object) -> list[Score]:
    names = ("environment", "on_failure", "failure_score")
    keys = {key: options.pop(key) for key in names if key in options}
    options = {"request_timeout_s": 2.0, "retries": 2, "model": "m"} | options
    config = RewardFunction(function=name, timeout_s=10.0, options=options, **keys)
    runner = start_runner(config)
    try:
        return runner.score_group(PROMPT, texts, [np.arange(1)] * len(texts))
    finally:
        runner.close()


def test_judge_scores_each_response_and_failures_stay_separate(server: Judge) -> None:
    texts = ["two", "unclear", "busy", "forbidden", "cut off", "empty"]
    scores = ask("judge", texts, url=f"{server.url}/v1/")
    assert [one.reward for one in scores] == [0.8, 0.0, 0.8, 0.0, 0.0, 0.0]
    assert [dict(one.parts).get("retries") for one in scores[:3]] == [0.0, None, 2.0]
    assert [one.failure and one.failure.reason.partition(":")[0] for one in scores] == [
        *(None, "NoAnswer", None, "NoAnswer", "ServerAwayError", "NoAnswer")
    ]
    assert "gave no score: 'I cannot say.'" in scores[1].failure.reason
    assert "HTTP 401" in scores[3].failure.reason
    assert "after 2 retries" in scores[4].failure.reason
    path, key, body = next(one for one in server.seen if "two" in str(one[2]))
    asked = body["messages"][0]["content"]
    assert (path, key, body["temperature"]) == ("/v1/chat/completions", None, 0.0)
    assert "Be brief.\n\n1+1=?" in asked and "The right answer: 2" in asked


def test_score_outside_scale_is_a_failure(server: Judge) -> None:
    """A response that persuades its judge to say 1000 would be worth 100 right ones."""
    template = {"template": "$response", "url": f"{server.url}/v1"}
    for one in ask("judge", ["Score: 1000", "Score: -3", "Score: 10.1"], **template):
        assert "is not from 0 to 10" in one.failure.reason


def test_key_is_sent_only_if_named(server: Judge, monkeypatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "k")
    url = f"{server.url}/v1"
    ask("judge", ["a"], url=url)
    ask("judge", ["a"], url=url, environment=["OPENAI_API_KEY"])
    assert [key for _, key, _ in server.seen] == [None, "Bearer k"]


def test_custom_template_and_pattern(server: Judge) -> None:
    own = {"template": "$response/$ground_truth {x}", "pattern": r"Score: (\d)\?", "scale": 4.0}
    assert [one.reward for one in ask("judge", ["a"], url=f"{server.url}/v1", **own)] == [0.75]
    assert server.seen[0][2]["messages"][0]["content"] == "a/2 {x}"


def test_reward_model_scores_whole_conversation(server: Judge) -> None:
    """Broken HTTP fails only its response."""
    texts = ["four", "busy", "no HTTP", "half"]
    scores = ask("reward_model", texts, url=server.url, index=1)
    assert [one.reward for one in scores] == [2.0, 2.0, 0.0, 0.0]
    assert "BadStatusLine" in scores[2].failure.reason
    assert "IncompleteRead" in scores[3].failure.reason
    assert all("after 2 retries" in one.failure.reason for one in scores[2:])
    roles = [message["role"] for message in server.seen[0][2]["messages"]]
    assert roles == ["system", "user", "assistant"]
    assert server.seen[0][2]["use_activation"] is False


def test_group_waits_for_a_missing_server() -> None:
    """Catches scores of 0, and prompts that are used up, while a judge is restarted."""
    for texts in (["a", "b"], ["a"]):
        with pytest.raises(RewardOutageError, match="reward_model cannot .* Connection refused"):
            ask("reward_model", texts, **AWAY)


def test_explicit_reactions_to_a_missing_server() -> None:
    worst = {"on_failure": "score", "failure_score": -3.0}
    scores = ask("reward_model", ["a", "b"], **worst, **AWAY)
    assert [(one.reward, one.failure) for one in scores] == [(-3.0, None)] * 2
    with pytest.raises(RewardError, match="Connection refused"):
        ask("reward_model", ["a", "b"], on_failure="stop", **AWAY)


def test_retry_waits_for_every_response_and_exclude_for_two(server: Judge) -> None:
    texts, keys = ["one", "two", "cut off"], {"url": f"{server.url}/v1", "retries": 0}
    assert [one.failure is None for one in ask("judge", texts, **keys)] == [True, True, False]
    with pytest.raises(RewardOutageError, match="after 0 retries"):
        ask("judge", texts, **keys, on_failure="retry")
    with pytest.raises(RewardOutageError, match="after 0 retries"):
        ask("judge", texts[1:], **keys)


def test_server_that_answers_has_no_outage(server: Judge) -> None:
    """Catches a run that waits half an hour, and ends, for answers that never change."""
    for reaction in ("retry", "exclude"):
        texts = ["unclear", "forbidden", "empty"]
        scores = ask("judge", texts, url=f"{server.url}/v1", on_failure=reaction)
        assert all(one.failure is not None for one in scores)


def test_failed_responses_are_left_out(server: Judge) -> None:
    options = {"url": f"{server.url}/v1", "model": "m", "request_timeout_s": 2.0}
    judge = {"function": "judge", "options": options}
    with Scorer(RewardConfig(functions=("format", judge), symbolic="off")) as scorer:
        texts = ["one", "unclear", "two"]
        scores = scorer.score_group(PROMPT, texts, [np.arange(1)] * 3)
        (warning,) = scorer.drain_warnings()
    assert [one.failure and one.failure.function for one in scores] == [None, "judge", None]
    assert "judge failed on 1 responses, which were left out: 1 x NoAnswer" in warning


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"request_timeout_s": 60}, "timeout_s = 10 ends the call of a group before"),
        ({"model": 7}, "options.model = 7: Input should be a valid string"),
        ({"modle": 1}, "it does not take the option modle"),
        ({"url": "localhost:8000/v1"}, "must begin with http:// or https://"),
        ({"pattern": "score: ([0-9"}, "options.pattern is no regular expression"),
        ({"pattern": "score: [0-9]"}, "options.pattern has 0 groups"),
        ({"scale": 0}, "options.scale = 0 must be above 0"),
    ],
)
def test_wrong_options_fail_at_start(options: dict, message: str) -> None:
    """Later, every response would wait for a judge that cannot answer."""
    usual = {"url": "http://127.0.0.1:9/v1", "model": "m", "request_timeout_s": 1.0}
    with pytest.raises(ConfigError, match=message):
        start_runner(RewardFunction(function="judge", options=usual | options))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reward-model")
    torch.manual_seed(0)
    model = Qwen2ForSequenceClassification.from_pretrained(BASE, num_labels=1, dtype=torch.float32)
    torch.nn.init.normal_(model.score.weight, std=0.5)
    # as of many base models: the end-of-sequence token pads, and would be skipped
    model.config.pad_token_id = 0
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(BASE).save_pretrained(folder)
    return str(folder)


@pytest.mark.slow
def test_scores_are_those_of_the_last_token(folder, monkeypatch):
    """The path is relative, as in the docs; a worker that looked for it elsewhere scores 0."""
    texts = ["12+34=46;46+56=102\nAnswer: 102", "Answer: 7", ""]
    function = RewardFunction(
        function="local_reward_model", options={"path": Path(folder).name}, timeout_s=240.0
    )
    with monkeypatch.context() as inside:
        inside.chdir(Path(folder).parent)
        runner = start_runner(function)
    try:
        scores = runner.score_group(SUM, texts, [np.arange(1)] * len(texts))
    finally:
        runner.close()
    model = Qwen2ForSequenceClassification.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for text, one in zip(texts, scores, strict=True):
        ids = torch.tensor([[*tokenizer.encode("12+34+56=?" + text), tokenizer.eos_token_id]])
        hidden = model.model(ids).last_hidden_state[0, -1]
        assert one.failure is None
        assert one.reward == pytest.approx(model.score(hidden).item(), abs=1e-5)


def test_limit_that_loading_would_exceed_is_refused(folder):
    """Every first call would be killed, and the response would score 0."""
    function = {"function": "local_reward_model", "options": {"path": folder}}
    with pytest.raises(ConfigError, match="which loads the model"):
        RewardConfig.model_validate({"functions": [function]})


def test_missing_model_is_refused_before_a_run(tmp_path):
    """The worker starts without it; then every response would score 0."""
    options = {"path": str(tmp_path)}
    function = RewardFunction(function="local_reward_model", options=options, timeout_s=120.0)
    with pytest.raises(ConfigError, match="no config.json"):
        check_functions([function])
