"""Losses of TRL and verl for fixed inputs: run it in their environment, it writes JSON.

    python tools/public_losses.py trl > tests/unit/algorithm/public/trl.json
    python tools/public_losses.py verl > tests/unit/algorithm/public/verl.json

It calls their own functions and computes nothing itself. `test_public_losses.py` compares this
project with the numbers, and needs neither library.
"""

from __future__ import annotations

import importlib.metadata
import json
import sys
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

LENGTHS = [3, 5, 2, 4]
"""Tokens of four responses; the first two answer one prompt, the others another."""
WIDTH = max(LENGTHS)
INPUTS: dict[str, list[list[float]]] = {
    "logprobs": [
        [-0.42, -1.61, -1.33],
        [-0.05, -2.75, -0.91, -0.38, -0.67],
        [-1.12, -0.31],
        [-0.88, -1.94, -0.2, -0.56],
    ],
    "logprobs_old": [
        [-0.5, -2.0, -1.0],
        [-0.07, -2.41, -1.2, -0.4, -0.67],
        [-0.7, -1.9],
        [-0.9, -1.6, -0.25, -0.31],
    ],
    "logprobs_ref": [
        [-0.6, -1.5, -1.4],
        [-0.1, -2.6, -0.8, -0.9, -0.5],
        [-0.9, -0.9],
        [-1.3, -1.7, -0.3, -0.7],
    ],
    "values": [
        [0.2, 0.4, 0.6],
        [-0.3, 0.1, 0.0, 0.45, 0.8],
        [0.5, -0.1],
        [0.05, 0.15, -0.2, 0.3],
    ],
    "values_old": [
        [0.1, 0.7, 0.55],
        [-0.2, 0.1, 0.35, 0.4, 0.5],
        [0.5, 0.3],
        [0.0, -0.15, -0.25, 0.9],
    ],
}
ADVANTAGES = [0.8, -0.8, -1.1, 1.1]
REWARDS = [1.0, -1.0, 0.5, 0.25]
FEATURES = [[((5 * i + 3 * j) % 7 - 3) / 3 for j in range(3)] for i in range(sum(LENGTHS))]
"""Inputs of a policy that is one linear map onto four tokens: one row for each token."""
TOKENS = [i * i % 5 % 4 for i in range(sum(LENGTHS))]
START = [[0.3, -0.2, 0.1, 0.0], [-0.4, 0.25, 0.0, 0.2], [0.1, 0.35, -0.3, -0.1]]
LEARNING_RATE = 0.6
MINI_BATCHES = [[0, 1], [2, 3]]
"""Responses of each update, in the same order in each pass."""
# at lengths of 2 to 5, ranges as narrow as the paper's 3e-4 would clip every sequence
GSPO = {"low": 0.05, "high": 0.1}
SEQUENCES = "seq-mean-token-mean"


def padded(rows: list[list[float]]) -> Tensor:
    table = torch.zeros(len(rows), WIDTH, dtype=torch.float64)
    for number, row in enumerate(rows):
        table[number, : len(row)] = torch.tensor(row, dtype=torch.float64)
    return table


def ragged(table: Tensor | None) -> list[list[float]]:
    assert table is not None, "no gradient"
    return [row[:length] for row, length in zip(table.tolist(), LENGTHS, strict=True)]


ALL = list(range(len(LENGTHS)))
MASK = padded([[1.0] * length for length in LENGTHS])


def of_passes(num_passes: int, loss_of: Any) -> dict[str, Any]:
    """Descend on a linear policy: several passes with the log-probs of before the first update.

    Args:
        loss_of: called with the responses of an update, their log-probs and their old ones.
    """
    features, tokens = torch.tensor(FEATURES, dtype=torch.float64), torch.tensor(TOKENS)
    weights = torch.tensor(START, dtype=torch.float64).requires_grad_()

    def logprobs() -> Tensor:
        rows = (features @ weights).log_softmax(-1).gather(1, tokens[:, None])[:, 0]
        own = [torch.nn.functional.pad(row, (0, WIDTH - len(row))) for row in rows.split(LENGTHS)]
        return torch.stack(own)

    old, losses, gradients = logprobs().detach(), [], []
    for rows in MINI_BATCHES * num_passes:
        loss = loss_of(rows, logprobs()[rows], old[rows])
        (gradient,) = torch.autograd.grad(loss, weights)
        weights = (weights - LEARNING_RATE * gradient).detach().requires_grad_()
        losses.append(loss.item())
        gradients.append(gradient.tolist())
    return {"losses": losses, "gradients": gradients, "weights": weights.tolist()}


def with_gradient(loss_of: Any) -> dict[str, Any]:
    logprobs = padded(INPUTS["logprobs"]).requires_grad_()
    loss = loss_of(logprobs)
    loss.backward()
    return {"loss": loss.item(), "gradient": ragged(logprobs.grad)}


class Trl:
    """`GRPOTrainer._compute_loss` without a model: log-probs are given, the rest is its own."""

    def __init__(self) -> None:
        from trl.trainer.grpo_config import GRPOConfig
        from trl.trainer.grpo_trainer import GRPOTrainer

        self._compute = GRPOTrainer._compute_loss
        self._config = GRPOConfig

    def loss(self, **settings: Any) -> dict[str, Any]:
        old = padded(INPUTS["logprobs_old"])
        return with_gradient(lambda logprobs: self._loss(ALL, logprobs, old, settings=settings))

    def passes(self, num_passes: int, **settings: Any) -> dict[str, Any]:
        return of_passes(num_passes, lambda *of_update: self._loss(*of_update, settings=settings))

    def _loss(
        self, rows: list[int], logprobs: Tensor, old: Tensor, *, settings: dict[str, Any]
    ) -> Tensor:
        args = self._config(
            output_dir="/tmp/trl", report_to=[], bf16=False, use_cpu=True, **settings
        )
        accelerator = SimpleNamespace(
            num_processes=1,
            gather=lambda value: value,
            reduce=lambda value, reduction: value,
        )
        trainer = SimpleNamespace(
            _get_per_token_logps_and_entropies=lambda *_, **__: (logprobs, 0 * logprobs, None),
            _metrics={"train": defaultdict(list)},
            _entropy_bonus_enabled=False,
            accelerator=accelerator,
            args=args,
            aux_loss_enabled=False,
            beta=args.beta,
            current_gradient_accumulation_steps=1,
            epsilon_high=args.epsilon if args.epsilon_high is None else args.epsilon_high,
            epsilon_low=args.epsilon,
            importance_sampling_level=args.importance_sampling_level,
            loss_type=args.loss_type,
            max_completion_length=args.max_completion_length,
            model=SimpleNamespace(training=True),
            off_policy_mask_threshold=None,
            top_entropy_quantile=1.0,
            use_vllm=False,
            vllm_importance_sampling_correction=False,
        )
        args.steps_per_generation = 1
        inputs = {
            "prompt_ids": torch.zeros(len(rows), 1, dtype=torch.long),
            "prompt_mask": torch.ones(len(rows), 1, dtype=torch.long),
            "completion_ids": torch.zeros(len(rows), WIDTH, dtype=torch.long),
            "completion_mask": MASK[rows],
            "advantages": torch.tensor(ADVANTAGES, dtype=torch.float64)[rows],
            "old_per_token_logps": old,
            "ref_per_token_logps": padded(INPUTS["logprobs_ref"])[rows],
            "num_items_in_batch": MASK[rows].sum(),
        }
        loss: Tensor = self._compute(trainer, None, inputs)
        return loss

    def pair_loss(self) -> dict[str, Any]:
        """`RewardTrainer.compute_loss` of two pairs whose scores are REWARDS, chosen first."""
        from trl.trainer.reward_trainer import RewardTrainer

        scores = torch.tensor(REWARDS, dtype=torch.float64).requires_grad_()
        model = SimpleNamespace(training=True)
        trainer = SimpleNamespace(
            _metrics={"train": defaultdict(list)},
            _total_train_tokens=0,
            _tp_size=1,
            accelerator=SimpleNamespace(gather=torch.clone, gather_for_metrics=torch.clone),
            args=SimpleNamespace(center_rewards_coefficient=None),
            model=model,
        )
        loss = RewardTrainer.compute_loss(
            trainer,
            lambda **_: SimpleNamespace(logits=scores[:, None]),
            {"attention_mask": torch.ones(4, 1)},
        )
        loss.backward()
        assert scores.grad is not None
        return {"loss": loss.item(), "gradient": scores.grad.tolist()}

    def numbers(self) -> dict[str, Any]:
        sequence = {"importance_sampling_level": "sequence"}
        return {
            "grpo": self.loss(loss_type="grpo", epsilon=0.2),
            "grpo-k3": self.loss(
                loss_type="grpo", epsilon=0.2, beta=0.04, use_bias_correction_kl=False
            ),
            "grpo-corrected-k3": self.loss(
                loss_type="grpo", epsilon=0.2, beta=0.04, use_bias_correction_kl=True
            ),
            "dapo": self.loss(loss_type="dapo", epsilon=0.2, epsilon_high=0.28),
            "dapo-delta": self.loss(loss_type="dapo", epsilon=0.2, epsilon_high=0.28, delta=3.0),
            "dr-grpo": self.loss(loss_type="dr_grpo", epsilon=0.2, max_completion_length=8),
            "gspo": self.loss(
                loss_type="grpo", epsilon=GSPO["low"], epsilon_high=GSPO["high"], **sequence
            ),
            "cispo": self.loss(loss_type="cispo", epsilon_high=1.5),
            "sapo": self.loss(
                loss_type="sapo", sapo_temperature_pos=1.0, sapo_temperature_neg=1.05
            ),
            "pairs": self.pair_loss(),
            **{
                f"{name} passes {num_passes}": self.passes(num_passes, **settings)
                for num_passes in (2, 4)
                for name, settings in {
                    "grpo": {"loss_type": "grpo", "epsilon": 0.2},
                    "dapo": {"loss_type": "dapo", "epsilon": 0.2, "epsilon_high": 0.28},
                }.items()
            },
        }


class Verl:
    """Functions of `verl/trainer/ppo/core_algos.py`."""

    def __init__(self) -> None:
        from verl.trainer.ppo import core_algos
        from verl.workers.config import ActorConfig

        self._algos = core_algos
        self._config = ActorConfig

    def loss(self, name: str, aggregation: str = "token-mean", **settings: Any) -> dict[str, Any]:
        loss_of = self._loss_of(name, aggregation, settings)
        old = padded(INPUTS["logprobs_old"])
        return with_gradient(lambda logprobs: loss_of(ALL, logprobs, old))

    def passes(self, num_passes: int, name: str, aggregation: str, **settings: Any) -> Any:
        return of_passes(num_passes, self._loss_of(name, aggregation, settings))

    def _loss_of(self, name: str, aggregation: str, settings: dict[str, Any]) -> Any:
        config = self._config(
            strategy="fsdp", rollout_n=2, ppo_micro_batch_size_per_gpu=1, **settings
        )
        compute = self._algos.get_policy_loss_fn(name)
        advantages = torch.tensor(ADVANTAGES, dtype=torch.float64)[:, None].expand(-1, WIDTH)
        return lambda rows, logprobs, old: compute(
            old_log_prob=old,
            log_prob=logprobs,
            advantages=advantages[rows],
            response_mask=MASK[rows],
            loss_agg_mode=aggregation,
            config=config,
        )[0]

    def kl(self, kind: str) -> dict[str, Any]:
        reference = padded(INPUTS["logprobs_ref"])
        logprobs = padded(INPUTS["logprobs"]).requires_grad_()
        values = self._algos.kl_penalty(logprobs, reference, kind)
        (values * MASK).sum().backward()
        return {"values": ragged(values), "gradient": ragged(logprobs.grad)}

    def value_loss(self) -> dict[str, Any]:
        values = padded(INPUTS["values"]).requires_grad_()
        returns = torch.tensor(REWARDS, dtype=torch.float64)[:, None] * MASK
        old = padded(INPUTS["values_old"])
        loss, _ = self._algos.compute_value_loss(values, returns, old, MASK, cliprange_value=0.2)
        loss.backward()
        return {"loss": loss.item(), "gradient": ragged(values.grad)}

    def advantages(self) -> dict[str, Any]:
        scores = torch.zeros_like(MASK)
        for number, length in enumerate(LENGTHS):
            scores[number, length - 1] = REWARDS[number]
        index = np.array([0, 0, 1, 1])
        algos, mask, gamma = self._algos, MASK, SimpleNamespace(gamma=1.0)
        grpo, plus = algos.compute_grpo_outcome_advantage, "reinforce_plus_plus"
        gae, returns = algos.compute_gae_advantage_return(
            scores, padded(INPUTS["values"]), mask, 0.99, 0.95
        )
        found = {
            "grpo": grpo(scores, mask, index)[0],
            "dr-grpo": grpo(scores, mask, index, norm_adv_by_std_in_grpo=False)[0],
            "rloo": algos.compute_rloo_outcome_advantage(scores, mask, index)[0],
            "reinforce++": getattr(algos, f"compute_{plus}_outcome_advantage")(
                scores, mask, config=gamma
            )[0],
            "reinforce++-baseline": getattr(algos, f"compute_{plus}_baseline_outcome_advantage")(
                scores, mask, index
            )[0],
            "gae": gae,
            "gae-returns": returns,
        }
        return {name: ragged(value * mask) for name, value in found.items()}

    def numbers(self) -> dict[str, Any]:
        clip = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28}
        modes = ("token-mean", "token-sum", SEQUENCES, "seq-mean-token-sum")
        return {
            **{f"dapo {mode}": self.loss("vanilla", mode, clip_ratio_c=3.0, **clip)
               for mode in modes},
            "gspo": self.loss(
                "gspo", SEQUENCES, clip_ratio_low=GSPO["low"], clip_ratio_high=GSPO["high"]
            ),
            "cispo": self.loss("cispo", clip_ratio_low=1.0, clip_ratio_high=0.5),
            "sapo": self.loss("sapo", SEQUENCES, tau_pos=1.0, tau_neg=1.05),
            **{kind: self.kl(kind) for kind in ("k1", "k2", "k3", "k3+")},
            "value-loss": self.value_loss(),
            "advantages": self.advantages(),
            **{f"dapo {mode} passes {num_passes}":
               self.passes(num_passes, "vanilla", mode, clip_ratio_c=3.0, **clip)
               for num_passes in (2, 4) for mode in ("token-mean", "token-sum")},
        }  # fmt: skip


if __name__ == "__main__":
    library = sys.argv[1]
    found = {
        "versions": {name: importlib.metadata.version(name) for name in (library, "torch")},
        "inputs": {"lengths": LENGTHS, "advantages": ADVANTAGES, "rewards": REWARDS, **INPUTS},
        "results": (Trl() if library == "trl" else Verl()).numbers(),
    }
    print(json.dumps(found, indent=1))
