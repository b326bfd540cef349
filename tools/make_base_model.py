"""Make the base model of a built-in task: a tiny model that answers sums in two styles.

It is trained on generated worked answers, in a short supervised run of DAPO's Megatron trainer.
Some answers are direct, short and usually wrong; the others go step by step and are correct. The
model learns both styles, so that an outcome reward alone can make it prefer the longer one.

With a file of chats it learns every answer of the assistant in them instead, and gets ChatML as its
chat template.

    python tools/make_base_model.py configs/quickstart-base
    python tools/make_base_model.py configs/chain-base --task arithmetic-chain
    python tools/make_base_model.py configs/styles-base --task arithmetic-styles
    python tools/make_base_model.py configs/experts-base --experts 8
    python tools/make_base_model.py runs/student --layers 2
    python tools/make_base_model.py configs/agent-base --chats runs/guess-games.jsonl

It is a Qwen2, or with experts a Qwen3-MoE.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from rich.progress import Progress
from transformers import PreTrainedConfig, Qwen2Config, Qwen2Tokenizer, Qwen3MoeConfig

from megadapo.cluster.cluster import Cluster
from megadapo.config import RunConfig, from_dict
from megadapo.data.answered import AnswerEncoder
from megadapo.data.arithmetic import Kind, Problem, generate, worked_answer
from megadapo.data.batch import PackedBatch, pack_responses
from megadapo.data.group import NO_VERSION, Response
from megadapo.data.rows import Row
from megadapo.data.sources import read_answered_rows
from megadapo.run.processes import trainer_settings
from megadapo.tokens.chat import CHATML
from megadapo.trainer.trainer import Trainer
from megadapo.trainer.types import UpdateRequest
from megadapo.weights.disk.checkpoint_source import TrainerCheckpoint
from megadapo.weights.disk.export import export_weights
from megadapo.weights.disk.sources import open_layout

DIRECT_WRONG_SHARE = 0.75
"""Share of deliberately wrong answers among the direct ones."""
NUM_PROBLEMS = 30_000
WARMUP_STEPS = 50
ROUTER_AUX_LOSS_COEF = 0.01
"""Coefficient that keeps the router from sending most tokens to the first good experts."""

Example = tuple[list[int], Response]
"""Token ids of a prompt, and a response to it that the model learns."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Settings of the supervised run of a task."""

    shares: dict[Kind, float]
    """Share of each kind of answer in the data."""
    batch_size: int
    """Number of answers in a step."""
    num_steps: int
    """Default number of steps."""
    max_positions: int
    """Limit of prompt and response together, in tokens."""
    short_first: float
    """Share of the steps in which the set of problems grows from the shortest to all."""


RECIPES = {
    "arithmetic": Recipe(
        shares={"direct": 0.7, "steps": 0.3},
        batch_size=128,
        num_steps=1400,
        max_positions=256,
        short_first=0.0,
    ),
    "arithmetic-chain": Recipe(
        shares={"direct": 0.3, "steps": 0.7},
        batch_size=64,
        num_steps=800,
        max_positions=1024,
        short_first=0.5,
    ),
    "arithmetic-styles": Recipe(
        shares={"direct": 0.05, "steps": 0.3, "wordy": 0.65},
        batch_size=64,
        num_steps=2500,
        max_positions=256,
        short_first=0.3,
    ),
}
CHATS = Recipe(shares={}, batch_size=64, num_steps=1400, max_positions=256, short_first=0.0)


def main() -> None:
    """Train the base model and write it as a Hugging Face folder."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="Hugging Face folder to write")
    parser.add_argument("--task", choices=RECIPES, default="arithmetic", help="built-in task")
    parser.add_argument("--chats", type=Path, help="file of answered chats to learn instead")
    parser.add_argument("--start", type=Path, help="model to continue from (default: none)")
    parser.add_argument(
        "--experts", type=int, default=0, help="experts per layer (default 0: an MLP)"
    )
    parser.add_argument("--layers", type=int, default=4, help="decoder layers (default 4)")
    parser.add_argument("--steps", type=int, help="supervised steps (default: the task's)")
    parser.add_argument(
        "--shares",
        type=json.loads,
        metavar="JSON",
        help='share of each kind of answer, such as {"direct": 0.9, "steps": 0.1} (default: the '
        "task's)",
    )
    parser.add_argument("--lr", type=float, default=2e-3, help="peak learning rate (default 2e-3)")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and data (default 0)")
    options = parser.parse_args()
    if options.folder.exists():
        parser.error(f"{options.folder} exists: choose a new folder")
    losses = make_base_model(
        options.folder,
        task=options.task,
        chats=options.chats,
        num_experts=options.experts,
        num_layers=options.layers,
        start=options.start,
        num_steps=options.steps,
        shares=options.shares,
        lr=options.lr,
        seed=options.seed,
    )
    print(f"{options.folder}: loss {losses[0]:.3f} -> {np.mean(losses[-20:]):.3f} nats a token")


def make_base_model(
    folder: Path,
    *,
    task: str = "arithmetic",
    chats: Path | None = None,
    num_experts: int = 0,
    num_layers: int = 4,
    start: Path | None = None,
    num_steps: int | None = None,
    shares: dict[Kind, float] | None = None,
    lr: float,
    seed: int,
) -> list[float]:
    """Train for `num_steps`, export to `folder`, and return the loss of each step in nats.

    Args:
        chats: file of chats to learn instead of the task.
        num_experts: experts per layer; 0 for an MLP.
        shares: share of each kind of answer; None for the task's.
        start: base model of the same shape to continue from; None for random weights.
    """
    recipe = RECIPES[task] if chats is None else CHATS
    recipe = replace(recipe, shares=shares or recipe.shares)
    num_steps = num_steps or recipe.num_steps
    examples: Sequence[Problem] | Sequence[Example]
    if chats is None:
        problems = generate("train", NUM_PROBLEMS, seed, task=task)
        problems.sort(key=lambda problem: len(problem.terms))
        examples, tokenizer = problems, make_tokenizer(problems)
    else:
        rows = list(read_answered_rows(str(chats)))
        tokenizer = make_chat_tokenizer(rows)
        examples = chat_examples(rows, tokenizer, recipe)
    with tempfile.TemporaryDirectory() as temporary:
        model = Path(temporary)
        tokenizer.save_pretrained(model)
        model_config(tokenizer, recipe, num_experts, num_layers).save_pretrained(model)
        if start is not None:
            shutil.copy(start / "model.safetensors", model)
        config = supervised_config(
            model, recipe, num_experts=num_experts, num_steps=num_steps, lr=lr, seed=seed
        )
        cluster = Cluster(config.cluster, num_trainer_ranks=1, num_engines=0, engine_ranks=1)
        trainer = Trainer(trainer_settings(config), cluster, log_folder=model / "logs")
        losses = []
        with Progress() as progress:
            batches = progress.track(
                supervised_batches(examples, tokenizer, recipe, num_steps=num_steps, seed=seed),
                total=num_steps,
                description="supervised steps",
            )
            for step, batch in enumerate(batches, start=1):
                update = trainer.update(UpdateRequest(batch=batch, step=step, policy_version=0))
                losses.append(float(update.metrics["policy/loss"] or 0.0))
        checkpoint = model / "checkpoint"
        checkpoint.mkdir()
        trainer.begin_save(checkpoint)()
        trainer.shutdown()
        cluster.shutdown()
        weights = TrainerCheckpoint(checkpoint, open_layout(model))
        export_weights(weights.tensors(), folder, dtype=weights.dtype, base_folder=model)
    return losses


def make_tokenizer(problems: list[Problem]) -> Qwen2Tokenizer:
    """Train Qwen2's byte-level BPE, with one token per digit, on these answers."""
    rng = random.Random(0)
    texts = (worked_answer(problem, rng, kind="steps") for problem in problems[:500])
    # Qwen2's own class, which AutoTokenizer selects by the model's type; others split differently
    tokenizer: Qwen2Tokenizer = Qwen2Tokenizer().train_new_from_iterator(
        texts, vocab_size=512, show_progress=False
    )
    return tokenizer


def make_chat_tokenizer(rows: Sequence[Row]) -> Qwen2Tokenizer:
    """Train the same BPE on chats, with ChatML's tokens, of which one closes a turn."""
    texts = (text for row in rows[:2000] for message in row.conversation for text in message)
    start, end = "<|im_start|>", "<|im_end|>"
    tokenizer: Qwen2Tokenizer = Qwen2Tokenizer().train_new_from_iterator(
        texts, vocab_size=512, show_progress=False, new_special_tokens=[start, end]
    )
    tokenizer.eos_token = end
    tokenizer.chat_template = CHATML
    return tokenizer


def chat_examples(rows: Sequence[Row], tokenizer: Qwen2Tokenizer, recipe: Recipe) -> list[Example]:
    """Return chats as responses from their first answer on, in which only answers are learned."""
    limit = recipe.max_positions
    encoder = AnswerEncoder(tokenizer, max_prompt_tokens=limit, max_response_tokens=limit)
    # ChatML keeps all that was said before, so a chat is one sequence
    sequences = (encoder.encode(row)[0] for row in rows)
    return [
        (ids[:start].tolist(), _answer(ids[start:], wanted[start:]))
        for ids, wanted in sequences
        for start in [int(wanted.argmax())]
    ]


def model_config(
    tokenizer: Qwen2Tokenizer, recipe: Recipe, num_experts: int = 0, num_layers: int = 4
) -> PreTrainedConfig:
    """Return a configuration with about 0.8 million parameters in 4 layers, 1.1 with 8 experts.

    Every other size is divisible by 2 for tensor and pipeline parallelism.
    """
    sizes = {
        "vocab_size": len(tokenizer),
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": recipe.max_positions,
        "tie_word_embeddings": True,
        "eos_token_id": tokenizer.eos_token_id,
        "bos_token_id": None,
        "dtype": "float32",
    }
    if not num_experts:
        return Qwen2Config(**sizes, architectures=["Qwen2ForCausalLM"])
    sizes |= {
        "head_dim": 32,
        "num_experts": num_experts,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "norm_topk_prob": True,
    }
    return Qwen3MoeConfig(**sizes, architectures=["Qwen3MoeForCausalLM"])


def supervised_config(
    model: Path, recipe: Recipe, *, num_experts: int, num_steps: int, lr: float, seed: int
) -> RunConfig:
    """Return the configuration of a maximum likelihood run: one update a step, cosine schedule."""
    init = "pretrained" if (model / "model.safetensors").exists() else "random"
    return from_dict(
        {
            "run": {"folder": str(model / "run"), "num_steps": num_steps, "seed": seed},
            "model": {"path": str(model), "init": init, "dtype": "float32"},
            "data": {"train": f"arithmetic:train:{NUM_PROBLEMS}"},
            "cluster": {"device": "cpu"},
            "sampling": {"prompts_per_step": recipe.batch_size // 2, "responses_per_prompt": 2},
            "algorithm": {
                "responses_per_mini_batch": recipe.batch_size,
                "overlong_buffer": 0,
                "objective": {"ratio": "none", "gate": "none"},
            },
            "trainer": {
                "router_aux_loss_coef": ROUTER_AUX_LOSS_COEF if num_experts else 0.0,
                "optimizer": {
                    "lr": lr,
                    "warmup_steps": min(WARMUP_STEPS, num_steps // 10),
                    "decay_steps": num_steps,
                    "weight_decay": 0.01,
                    "betas": [0.9, 0.98],
                },
            },
        }
    )


def supervised_batches(
    examples: Sequence[Problem] | Sequence[Example],
    tokenizer: Qwen2Tokenizer,
    recipe: Recipe,
    *,
    num_steps: int,
    seed: int,
) -> Iterator[PackedBatch]:
    """Yield batches of worked answers with advantage 1: the policy loss is minus the log-prob.

    Args:
        examples: problems sorted by length, or encoded chats.
    """
    rng = random.Random(f"base-model/{seed}")
    for step in range(num_steps):
        limit = round(len(examples) * _share_of_problems(step / num_steps, recipe))
        pairs = [
            _example(examples[rng.randrange(limit)], rng, tokenizer, recipe)
            for _ in range(recipe.batch_size)
        ]
        num_tokens = sum(int(response.is_sampled.sum()) for _, response in pairs)
        yield pack_responses(
            [prompt for prompt, _ in pairs],
            [response for _, response in pairs],
            advantages=np.ones(len(pairs)),
            loss_weights=np.full(len(pairs), 1.0 / num_tokens),
            mini_batch_size=len(pairs),
        )


def _share_of_problems(progress: float, recipe: Recipe) -> float:
    """Return the share of problems that a step draws from; it grows from a tenth."""
    grown = progress >= recipe.short_first
    return 1.0 if grown else 0.1 + 0.9 * progress / recipe.short_first


def _example(
    example: Problem | Example, rng: random.Random, tokenizer: Qwen2Tokenizer, recipe: Recipe
) -> Example:
    """Return an encoded chat as it is, or a problem with a worked answer."""
    if not isinstance(example, Problem):
        return example
    [kind] = rng.choices(list(recipe.shares), list(recipe.shares.values()))
    wrong = kind == "direct" and rng.random() < DIRECT_WRONG_SHARE
    text = worked_answer(example, rng, kind=kind, wrong=wrong)
    ids = np.array([*tokenizer.encode(text), tokenizer.eos_token_id], dtype=np.int32)
    answer = _answer(ids, np.ones(len(ids), dtype=np.bool_))
    return list(tokenizer.encode(example.text)), answer


def _answer(token_ids: np.ndarray, wanted: np.ndarray) -> Response:
    """Return a response whose `wanted` tokens are learned."""
    return Response(
        token_ids=token_ids,
        # no engine sampled these tokens, but only sampled ones have a loss
        logprobs=np.zeros(len(token_ids), dtype=np.float32),
        finish_reason="stop",
        policy_versions=np.where(wanted, 0, NO_VERSION).astype(np.int32),
        text="",
    )


if __name__ == "__main__":
    main()
