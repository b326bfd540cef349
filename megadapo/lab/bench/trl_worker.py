"""TRL's side of `megadapo bench step`: GRPOTrainer(loss_type="dapo"), one step per request.

The process has its own environment with TRL and only this package of ours. Settings come as one
JSON file (`lab/bench/step.py:trl_settings`); then every line on stdin requests one step, answered
by one JSON line with the fields of `lab/bench/step.py:StepTime`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

import torch
import trl
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback

from megadapo.algorithm.shaping import overlong_penalty
from megadapo.rewards.rules import score


class _Reward:
    """The run's rule and overlong penalty as a reward function of TRL, with a step's counters."""

    __name__ = "rule"

    def __init__(self, settings: dict[str, Any]) -> None:
        self._settings = settings
        self.start_step()

    def start_step(self) -> None:
        """Reset the counters."""
        self._start = time.perf_counter()
        self.rollout_s = 0.0
        self._num_answers = self._num_tokens = self._num_correct = 0

    def finish_step(self) -> dict[str, float]:
        """Return the counters of the step."""
        return {
            "seconds": time.perf_counter() - self._start,
            "rollout_s": self.rollout_s,
            "num_answers": self._num_answers,
            "num_tokens": self._num_tokens,
            "accuracy": self._num_correct / self._num_answers,
        }

    def __call__(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        completion_ids: Sequence[Sequence[int]],
        ground_truth: Sequence[str],
        **others: object,
    ) -> list[float]:
        """Return the rewards of a batch; completions are texts, or chat messages."""
        rule, pattern, max_length, buffer, factor = (
            self._settings[name] for name in ("rule", "pattern", "max_length", "buffer", "factor")
        )
        texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
        scores = [
            score(text, gold, rule, pattern) for text, gold in zip(texts, ground_truth, strict=True)
        ]
        lengths = [len(ids) for ids in completion_ids]
        self._num_answers += len(texts)
        self._num_tokens += sum(lengths)
        self._num_correct += sum(one.correct for one in scores)
        return [
            one.reward + factor * overlong_penalty(length, max_length=max_length, buffer=buffer)
            for one, length in zip(scores, lengths, strict=True)
        ]


class _Trainer(trl.GRPOTrainer):  # type: ignore[misc]  # TRL is not in this environment
    """A GRPOTrainer that measures the time of its rollouts."""

    step_reward: _Reward

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        start = time.perf_counter()
        batch = super()._generate_and_score_completions(inputs)
        self.step_reward.rollout_s += time.perf_counter() - start
        return batch


class _Turns(TrainerCallback):
    """A callback that waits after every whole step for the next request."""

    def __init__(self, reward: _Reward, updates_per_step: int, replies: TextIO) -> None:
        self._reward = reward
        self._updates_per_step = updates_per_step
        self._replies = replies

    def on_train_begin(self, args: Any, state: Any, control: Any, **others: object) -> None:
        self._wait_for_turn(control, {"ready": trl.__version__})

    def on_step_end(self, args: Any, state: Any, control: Any, **others: object) -> None:
        if state.global_step % self._updates_per_step == 0:
            self._wait_for_turn(control, self._reward.finish_step())

    def _wait_for_turn(self, control: Any, reply: dict[str, Any]) -> None:
        print(json.dumps(reply), file=self._replies, flush=True)
        if not sys.stdin.readline():
            control.should_training_stop = True
        self._reward.start_step()


def main() -> None:
    """Train one step per line on stdin."""
    settings = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    # output of libraries must not mix with the replies
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    torch.set_num_threads(settings["num_threads"])
    reward = _Reward(settings["reward"])
    tokenizer = AutoTokenizer.from_pretrained(settings["model"], trust_remote_code=False)
    rows = [
        {
            "prompt": (
                [{"role": role, "content": content} for role, content in messages]
                if tokenizer.chat_template
                else "".join(content for _, content in messages)
            ),
            "ground_truth": gold,
        }
        for messages, gold in settings["prompts"]
    ]
    trainer = _Trainer(
        model=settings["model"],
        args=trl.GRPOConfig(**settings["grpo"]),
        reward_funcs=reward,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        callbacks=[_Turns(reward, settings["updates_per_step"], replies)],
    )
    trainer.step_reward = reward
    trainer.train()


if __name__ == "__main__":
    main()
