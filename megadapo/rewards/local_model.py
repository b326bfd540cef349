"""Rewards from a reward model that the worker process itself loads, without a server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

Conversation = Sequence[Mapping[str, str]]


def local_reward_model_reward(
    messages: Sequence[Conversation],
    responses: Sequence[str],
    tokens: Sequence[Sequence[int]],
    ground_truths: Sequence[str],
    extra_infos: Sequence[Mapping[str, Any]],
    *,
    path: str,
) -> list[float]:
    """Return the score of each response by a sequence classifier, on one CPU thread in fp32.

    Args:
        path: folder of the classifier, such as a reward model that `megadapo export` wrote.
    """
    import torch

    from megadapo.data.pairs import conversation_tokens

    model, tokenizer = _load(path)
    scores = []
    for conversation, response in zip(messages, responses, strict=True):
        prompt = tuple((message["role"], message["content"]) for message in conversation)
        ids = conversation_tokens((*prompt, ("assistant", response)), tokenizer)
        with torch.inference_mode():
            # the classifier itself would skip a last token that is also its padding
            hidden = model.base_model(torch.tensor([ids])).last_hidden_state[0, -1]
            scores.append(float(model.score(hidden)[0]))
    return scores


@lru_cache(maxsize=1)
def _load(path: str) -> tuple[Any, Any]:
    import torch
    from transformers import AutoModelForSequenceClassification

    from megadapo.tokens.tokenizer import read_tokenizer

    torch.set_num_threads(1)
    tokenizer = read_tokenizer(path, key="local_reward_model")
    model = AutoModelForSequenceClassification.from_pretrained(
        path, dtype=torch.float32, trust_remote_code=False
    )
    return model.eval(), tokenizer
