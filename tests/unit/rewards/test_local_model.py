"""A reward model in a reward function's own process."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, Qwen2ForSequenceClassification

from megadapo.data.prompts import Prompt
from megadapo.errors import ConfigError
from megadapo.rewards.config import RewardConfig, RewardFunction
from megadapo.rewards.function_runners import check_functions, start_runner

BASE = "configs/quickstart-base"
PROMPT = Prompt("id", (("user", "12+34+56=?"),), "102", "arithmetic")


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
        scores = runner.score_group(PROMPT, texts, [np.arange(1)] * len(texts))
    finally:
        runner.close()
    model = Qwen2ForSequenceClassification.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for text, one in zip(texts, scores, strict=True):
        ids = torch.tensor([[*tokenizer.encode("12+34+56=?" + text), tokenizer.eos_token_id]])
        hidden = model.model(ids).last_hidden_state[0, -1]
        assert one.failure is None
        assert one.score == pytest.approx(model.score(hidden).item(), abs=1e-5)


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
