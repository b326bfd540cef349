"""TRL's side of `megadapo bench step`: GRPOTrainer(loss_type="dapo"), one step per request.

The process has its own environment with TRL and only this package of ours. Settings come as one
JSON file; then every line on stdin requests one step, answered by one JSON line.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

import torch
import trl
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback

from megadapo.algorithm.shaping import overlong_penalty
from megadapo.lab.bench.trl_settings import StepTime, TrlSettings
from megadapo.rewards.dapo_math import score


class _StepCounts:
    """Counters of the current step."""

    def __init__(self) -> None:
        self.start = time.perf_counter()
        self.rollout_s = 0.0
        self.num_answers = self.num_tokens = self.num_correct = 0

    def finish(self) -> StepTime:
        return StepTime(
            seconds=time.perf_counter() - self.start,
            rollout_s=self.rollout_s,
            num_answers=self.num_answers,
            num_tokens=self.num_tokens,
            accuracy=self.num_correct / self.num_answers,
        )


class _Reward:
    """The run's rule and overlong penalty as a reward function of TRL."""

    __name__ = "rule"

    def __init__(self, settings: TrlSettings) -> None:
        self._settings = settings
        self.counts = _StepCounts()

    def __call__(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        completion_ids: Sequence[Sequence[int]],
        ground_truth: Sequence[str],
        **others: object,
    ) -> list[float]:
        """Return the rewards of a batch; completions are texts, or chat messages."""
        settings, counts = self._settings, self.counts
        texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
        scores = [
            score(text, gold, settings.rule) for text, gold in zip(texts, ground_truth, strict=True)
        ]
        lengths = [len(ids) for ids in completion_ids]
        counts.num_answers += len(texts)
        counts.num_tokens += sum(lengths)
        counts.num_correct += sum(one.correct for one in scores)
        return [
            one.reward
            + settings.overlong_factor
            * overlong_penalty(
                length,
                max_length=settings.max_response_tokens,
                buffer=settings.overlong_buffer,
            )
            for one, length in zip(scores, lengths, strict=True)
        ]


class _Trainer(trl.GRPOTrainer):  # type: ignore[misc]  # TRL is not in this environment
    """A GRPOTrainer that measures the time of its rollouts."""

    counts: _Reward

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        start = time.perf_counter()
        batch = super()._generate_and_score_completions(inputs)
        self.counts.counts.rollout_s += time.perf_counter() - start
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
            self._wait_for_turn(control, asdict(self._reward.counts.finish()))

    def _wait_for_turn(self, control: Any, reply: dict[str, Any]) -> None:
        print(json.dumps(reply), file=self._replies, flush=True)
        if not sys.stdin.readline():
            control.should_training_stop = True
        self._reward.counts = _StepCounts()


def main() -> None:
    """Train one step per line on stdin."""
    settings = TrlSettings(**json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
    # output of libraries must not mix with the replies
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    torch.set_num_threads(settings.num_threads)
    reward = _Reward(settings)
    tokenizer = AutoTokenizer.from_pretrained(settings.model, trust_remote_code=False)
    rows = [
        {
            "prompt": (
                [{"role": role, "content": content} for role, content in messages]
                if tokenizer.chat_template
                else "".join(content for _, content in messages)
            ),
            "ground_truth": gold,
        }
        for messages, gold in settings.prompts
    ]
    trainer = _Trainer(
        model=settings.model,
        args=grpo_config(settings),
        reward_funcs=reward,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        callbacks=[_Turns(reward, settings.updates_per_step, replies)],
    )
    trainer.counts = reward
    trainer.train()


def grpo_config(settings: TrlSettings) -> Any:
    """Return TRL's settings for the same step, without options that only cost time."""
    return trl.GRPOConfig(
        output_dir=settings.folder,
        loss_type="dapo",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        model_init_kwargs={"dtype": "float32"},
        optim="adamw_torch_fused",
        per_device_train_batch_size=settings.responses_per_mini_batch,
        gradient_accumulation_steps=1,
        steps_per_generation=settings.updates_per_step,
        num_generations=settings.responses_per_prompt,
        num_iterations=1,
        max_steps=settings.max_steps * settings.updates_per_step,
        max_completion_length=settings.max_response_tokens,
        temperature=settings.temperature,
        top_p=settings.top_p,
        beta=0.0,
        epsilon=settings.clip_low,
        epsilon_high=settings.clip_high,
        learning_rate=settings.lr,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=settings.warmup_steps * settings.updates_per_step,
        weight_decay=settings.weight_decay,
        adam_beta1=settings.betas[0],
        adam_beta2=settings.betas[1],
        adam_epsilon=settings.eps,
        max_grad_norm=settings.grad_clip,
        shuffle_dataset=False,
        dataloader_num_workers=0,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        log_completions=False,
        seed=settings.seed,
        **settings.trl_arguments,
    )


if __name__ == "__main__":
    main()
