"""A teacher on a small HTTP server that answers in vLLM's form."""

from collections.abc import Iterator

import numpy as np
import pytest

from megadapo.errors import ConfigError, InfraError
from megadapo.rewards.teacher import TeacherServer
from tests.support.processes.teacher_stand_in import LIMIT, TeacherStandIn, logprob
from tests.support.trainer.batches import random_batch


@pytest.fixture
def server() -> Iterator[TeacherStandIn]:
    with TeacherStandIn() as started:
        yield started


@pytest.fixture
def batch():
    return random_batch([9, 5, 30, 4])


def test_every_response_token_gets_the_log_prob_of_its_own_context(server, batch):
    """Also while the server is busy for a while; the third sequence has no loss and is not sent."""
    batch.loss_weights[14:44] = 0.0
    server.num_busy = 2
    found = TeacherServer(server.url + "/").logprobs(batch)
    for index, (start, stop) in enumerate([(0, 9), (9, 14), (14, 44), (44, 48)]):
        tokens, prompt = batch.tokens[start:stop].tolist(), batch.prompt_lengths[index]
        assert np.isnan(found[start : start + prompt]).all()
        for place in range(prompt, stop - start):
            expected = np.nan if index == 2 else logprob(tokens, place)
            np.testing.assert_allclose(found[start + place], expected, rtol=1e-6)
    assert len(server.seen) == 3 + 2


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (lambda entries: entries[:-1], "not one log-prob per token"),
        (lambda entries: [None, {"7777": {"logprob": -1.0}}, *entries[2:]], "not one log-prob"),
        (lambda entries: None, "not one log-prob per token"),
        (lambda entries: [None, *({k: {"logprob": 3.0} for k in e} for e in entries[1:])], "mode"),
    ],
    ids=["one-too-few", "another-token", "none", "logits"],
)
def test_an_answer_that_is_no_log_prob_of_every_token(server, batch, damage, problem):
    """Trained on, it would be a wrong number."""
    server.damage = damage
    with pytest.raises(InfraError, match=problem):
        TeacherServer(server.url).logprobs(batch)


def test_a_server_that_stays_away(server, batch):
    """The run ends with the exit code after which a supervisor starts it again."""
    server.num_busy = 10**6
    with pytest.raises(InfraError, match=r"algorithm.reference.server: .*503, after 1 retries"):
        TeacherServer(server.url, retries=1).logprobs(batch)
    with pytest.raises(InfraError, match="Connection refused"):
        TeacherServer("http://127.0.0.1:1", retries=0).logprobs(batch)


def test_checks_before_a_run(server):
    """Tokens, the longest sequence, and whether this is vLLM at all."""
    teacher = TeacherServer(server.url, retries=0)

    def decode(ids: list[int]) -> str:
        return "".join(chr(ord("a") + n) for n in ids)

    teacher.check(decode, range(20), longest=LIMIT - 1)
    with pytest.raises(ConfigError, match=f"sequence of {LIMIT} tokens .* max_model_len = {LIMIT}"):
        teacher.check(decode, range(20), longest=LIMIT)
    server.first = "b"
    with pytest.raises(ConfigError, match="token 0 is 'b' there and 'a' here"):
        teacher.check(decode, range(20), longest=8)
    with pytest.raises(ConfigError, match="is it a vLLM server"):
        TeacherServer(server.url + "/nowhere").check(decode, range(20), longest=8)
