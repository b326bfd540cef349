"""The judge and the reward model of docs/rewards.md, with vLLM's own server."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2ForSequenceClassification

from megadapo.cluster.processes import cpu_environment
from megadapo.data.group import Score
from megadapo.data.prompts import Prompt
from megadapo.rewards.config import RewardFunction
from megadapo.rewards.function_runners import start_runner
from tests.support.processes.running import wait_until

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]

BASE = Path("configs/quickstart-base").resolve()
PROMPT = Prompt("id", (("user", "12+34+56=?"),), "102", "arithmetic")


CONTENTS = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
"""A chat template that only joins the contents."""
START_TIMEOUT_S = 300.0


@contextmanager
def served(model: Path, log: Path, *options: str) -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    environment = os.environ | cpu_environment(1)
    environment |= {
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_KVCACHE_SPACE": "1",
    }
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)),
        *("--host", "127.0.0.1", "--port", str(port), "--served-model-name", "served"),
        *("--dtype", "float32", "--enforce-eager", "--max-model-len", "128"),
        *("--chat-template", CONTENTS, *options),
    ]
    with log.open("w") as output:
        server = subprocess.Popen(
            command, env=environment, stdout=output, stderr=output, start_new_session=True
        )
        try:
            url = f"http://127.0.0.1:{port}"
            wait_until(lambda: server.poll() is not None or _is_up(url), timeout_s=START_TIMEOUT_S)
            assert server.poll() is None, log.read_text()[-3000:]
            yield url
        finally:
            # the group outlives a server that has failed
            with contextlib.suppress(ProcessLookupError):
                os.killpg(server.pid, signal.SIGTERM)
            server.wait(timeout=60)


def _is_up(url: str) -> bool:
    try:
        urllib.request.urlopen(f"{url}/health", timeout=5).close()
    except OSError:
        return False
    return True


def score(function: str, texts: list[str], **options: object) -> list[Score]:
    runner = start_runner(RewardFunction(function=function, options=options, timeout_s=120.0))
    try:
        ids = [np.arange(len(text), dtype=np.int32) for text in texts]
        return runner.score_group(PROMPT, texts, ids)
    finally:
        runner.close()


def test_judge_served_by_vllm(tmp_path):
    texts = ["10+20+30=?", "11+22+33=?", "no sum at all", ""]
    options = {"model": "served", "template": "$response", "pattern": r"Answer: (\d+)"}
    with served(BASE, tmp_path / "log") as url:
        scores = score("judge", texts, url=f"{url}/v1", scale=100.0, max_tokens=40, **options)
        unknown = score("judge", texts[:1], url=f"{url}/v1", **(options | {"model": "other"}))
    tokenizer = AutoTokenizer.from_pretrained(BASE)
    model = AutoModelForCausalLM.from_pretrained(BASE, dtype=torch.float32)
    for text, one in zip(texts[:2], scores, strict=False):
        ids = torch.tensor([tokenizer.encode(text)])
        said = model.generate(ids, do_sample=False, max_new_tokens=40)[0, ids.shape[1] :]
        answer = tokenizer.decode(said, skip_special_tokens=True).rpartition("Answer: ")[2]
        assert (one.failure, one.reward) == (None, int(answer) / 100.0)
        assert dict(one.parts)["retries"] == 0.0
    assert "HTTP 400" in str(scores[3].failure), "an empty prompt is refused"
    assert "HTTP 404" in str(unknown[0].failure)


def test_reward_model_served_by_vllm(tmp_path):
    """Scores are logits of the whole conversation before any activation, as in transformers."""
    folder = tmp_path / "reward-model"
    torch.manual_seed(0)
    model = Qwen2ForSequenceClassification.from_pretrained(BASE, num_labels=2, dtype=torch.float32)
    torch.nn.init.normal_(model.score.weight, std=0.5)
    model.config.pad_token_id = 0
    model.save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(BASE)
    tokenizer.save_pretrained(folder)
    texts = ["12+34=46;46+56=102\nAnswer: 102", "Answer: 7", ""]
    with served(folder, tmp_path / "log", "--runner", "pooling") as url:
        scores = score("reward_model", texts, url=url, model="served", index=1)
        first = score("reward_model", texts[:1], url=url, model="served")
    for text, one in zip(texts, scores, strict=True):
        ids = torch.tensor([tokenizer.encode(PROMPT.messages[0][1] + text)])
        with torch.no_grad():
            expected = model(ids).logits[0].tolist()
        assert one.failure is None
        assert one.reward == pytest.approx(expected[1], abs=1e-4)
        if text == texts[0]:
            assert first[0].reward == pytest.approx(expected[0], abs=1e-4)
    assert len({round(one.reward, 3) for one in scores}) == 3
