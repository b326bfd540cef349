"""TRL's side of `benchmarks/step.py`: GRPOTrainer(loss_type="dapo"), one step per request.

The process has its own environment with TRL and only this package of ours. Settings come as one
JSON file (`trl_baseline.py:trl_settings`). Every line on stdin is a request: "step" is
answered by one JSON line with the fields of `trl_baseline.py:StepTime`, "evaluate" by one with the
fields of a `ProblemResult` for each held-out problem.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

import torch
import trl
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback

from megadapo.algorithm.advantages import overlong_penalty
from megadapo.data.group import Score
from megadapo.rewards.rules import score


class _Reward:
    """The run's rule and overlong penalty as a reward function of TRL, with a step's counters."""

    __name__ = "rule"

    def __init__(self, settings: dict[str, Any]) -> None:
        self._settings = settings
        self.start_step()

    def score(self, text: str, gold: str) -> Score:
        """Return the score of a response by the rule."""
        return score(text, gold, self._settings["rule"], self._settings["pattern"])

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
            "num_sampled": self._num_answers,
            "num_tokens": self._num_tokens,
            "accuracy": self._num_correct / self._num_answers,
        }

    def __call__(
        self,
        prompts: Sequence[str],
        completions: Sequence[str],
        completion_ids: Sequence[Sequence[int]],
        ground_truth: Sequence[str],
        **others: object,
    ) -> list[float]:
        """Return the rewards of a batch."""
        max_length, buffer, factor = (
            self._settings[name] for name in ("max_length", "buffer", "factor")
        )
        scores = [
            self.score(text, gold) for text, gold in zip(completions, ground_truth, strict=True)
        ]
        lengths = [len(ids) for ids in completion_ids]
        self._num_answers += len(completions)
        self._num_tokens += sum(lengths)
        self._num_correct += sum(bool(one.correct) for one in scores)
        return [
            one.reward + factor * overlong_penalty(length, max_length=max_length, buffer=buffer)
            for one, length in zip(scores, lengths, strict=True)
        ]


class _Trainer(trl.GRPOTrainer):  # type: ignore[misc]  # TRL is not in this environment
    """A GRPOTrainer with the recipe's prompts and learning rates; it measures its rollouts.

    A prompt of its dataset is the place of its token ids in the settings.
    """

    step_reward: _Reward
    settings: dict[str, Any]

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """Set the learning rate of each step; TRL's own warm-up would begin at 0."""
        factors, num_updates = self.settings["rate_factors"], self.settings["updates_per_step"]
        self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(
            optimizer or self.optimizer,
            lambda update: factors[min(update // num_updates, len(factors) - 1)],
        )
        return self.lr_scheduler

    def evaluate_held_out(self) -> list[dict[str, Any]]:
        """Return the result of each held-out problem, with the same seed in every evaluation."""
        held_out, size = self.settings["held_out"], self.settings["held_out"]["num_samples"]
        problems, results = held_out["prompts"], []
        at_once = max(1, self.settings["responses_per_step"] // size)
        with torch.random.fork_rng(devices=[]), self._sampling(held_out):
            torch.manual_seed(held_out["seed"])
            for start in range(0, len(problems), at_once):
                chunk = problems[start : start + at_once]
                ids = [prompt_ids for prompt_ids, _ in chunk for _ in range(size)]
                responses, _ = self._generate_single_turn(ids, None, {}, size)
                results += [
                    self._result(responses[number * size : (number + 1) * size], gold)
                    for number, (_, gold) in enumerate(chunk)
                ]
        return results

    def _result(self, responses: Sequence[list[int]], gold: str) -> dict[str, Any]:
        texts = self.processing_class.batch_decode(responses, skip_special_tokens=True)
        scores = [self.step_reward.score(text, gold) for text in texts]
        return {
            "num_correct": sum(bool(score.correct) for score in scores),
            "num_scored": len(texts),
            "reward_sum": sum(score.reward for score in scores),
            "consensus": None,
            "num_tokens": sum(map(len, responses)),
            "num_truncated": sum(ids[-1] not in self.eos_token_ids for ids in responses),
        }

    @contextmanager
    def _sampling(self, held_out: dict[str, Any]) -> Iterator[None]:
        """Sample as the held-out evaluation does."""
        trained = {"do_sample": True, "temperature": self.temperature, "top_p": self.top_p}
        is_greedy = held_out["temperature"] == 0.0
        self._set_sampling(
            {"do_sample": False, "temperature": 1.0, "top_p": 1.0}
            if is_greedy
            else {name: held_out[name] for name in ("temperature", "top_p")}
        )
        yield
        self._set_sampling(trained)

    def _set_sampling(self, values: dict[str, Any]) -> None:
        if self.use_vllm:
            # vLLM is greedy at temperature 0
            is_drawn = values.get("do_sample", True)
            self.vllm_generation.temperature = values["temperature"] if is_drawn else 0.0
            self.vllm_generation.top_p = values["top_p"]
            return
        self.generation_config.update(**values)
        self.generation_kwargs.update(values)

    def _tokenize_prompts(self, prompts: Sequence[str]) -> Any:
        return [self.settings["prompts"][int(place)][0] for place in prompts], None, {}

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        start = time.perf_counter()
        batch = super()._generate_and_score_completions(inputs)
        self.step_reward.rollout_s += time.perf_counter() - start
        return batch


class _Turns(TrainerCallback):
    """A callback that answers requests after every whole step, until the next step is requested."""

    def __init__(self, trainer: _Trainer, replies: TextIO) -> None:
        self._trainer = trainer
        self._reward = trainer.step_reward
        self._updates_per_step = trainer.settings["updates_per_step"]
        self._replies = replies

    def on_train_begin(self, args: Any, state: Any, control: Any, **others: object) -> None:
        ready = {"version": trl.__version__, "stop_ids": self._trainer.eos_token_ids}
        self._answer_requests(control, ready)

    def on_step_end(self, args: Any, state: Any, control: Any, **others: object) -> None:
        if state.global_step % self._updates_per_step == 0:
            self._answer_requests(control, self._reward.finish_step())

    def _answer_requests(self, control: Any, reply: dict[str, Any]) -> None:
        self._send(reply)
        while (request := sys.stdin.readline().strip()) == "evaluate":
            self._send({"results": self._trainer.evaluate_held_out()})
        if not request:
            control.should_training_stop = True
        self._reward.start_step()

    def _send(self, reply: dict[str, Any]) -> None:
        print(json.dumps(reply), file=self._replies, flush=True)


def main() -> None:
    """Train one step, or evaluate, per line on stdin."""
    settings = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    # output of libraries must not mix with the replies
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    torch.set_num_threads(settings["num_threads"])
    reward = _Reward(settings["reward"])
    golds = [gold for _, gold in settings["prompts"]]
    rows = [{"prompt": str(place), "ground_truth": gold} for place, gold in enumerate(golds)]
    trainer = _Trainer(
        model=settings["model"],
        args=trl.GRPOConfig(**settings["grpo"]),
        reward_funcs=reward,
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(settings["model"], trust_remote_code=False),
    )
    trainer.step_reward, trainer.settings = reward, settings
    trainer.add_callback(_Turns(trainer, replies))
    trainer.train()


if __name__ == "__main__":
    main()
