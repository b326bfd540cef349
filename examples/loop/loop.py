"""DAPO on one page: load, sample, score, advantages, update, publish.

    python examples/loop/loop.py [--section.key=value ...]

It trains the quickstart with the pieces that `megadapo train` uses, and gets the same numbers. What
a long run needs besides is left out: checkpoints, evaluations, oracles, saved rollouts, restarts.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack
from dataclasses import dataclass

import torch

from megadapo.algorithm.advantages import advantages, response_rewards
from megadapo.algorithm.loss_weights import loss_weights
from megadapo.cluster.cluster import Cluster
from megadapo.config import RunConfig, load_config
from megadapo.data.batch import PackedBatch, in_training_order, pack
from megadapo.data.group import Group
from megadapo.rewards.scorer import Scorer
from megadapo.rollout.pool.engines import Engines
from megadapo.rollout.pool.publish import Publisher
from megadapo.rollout.sampling.sampler import Sampler
from megadapo.rollout.types import SamplingSettings
from megadapo.run.inputs import RunPrompts, load_tokenizer
from megadapo.run.processes import start_engines, trainer_settings
from megadapo.tokens.stops import stop_ids
from megadapo.trainer.trainer import Trainer
from megadapo.trainer.types import UpdateRequest, UpdateResult

RECIPE = "configs/quickstart.toml"


@dataclass(frozen=True)
class Pieces:
    """The processes and objects of a loop."""

    sampler: Sampler
    """Requests groups of responses, scores them, and keeps the mixed ones."""
    engines: Engines
    trainer: Trainer
    publisher: Publisher
    """Sends the trainer's weights to the engines."""


def start(config: RunConfig, stack: ExitStack) -> Pieces:
    """Load the data and start all processes; they end with `stack`."""
    tokenizer = load_tokenizer(config)
    scorer = stack.enter_context(Scorer(config.reward))
    prompts = RunPrompts.load(config, tokenizer, scorer.further_columns)
    scorer.check_prompts(prompts.prompts)

    rollout, logs = config.rollout, config.run.folder / "logs"
    cluster = Cluster.start(
        config.cluster,
        num_trainer_ranks=config.trainer.num_ranks,
        num_engines=rollout.num_engines,
        engine_ranks=rollout.ranks_per_engine,
    )
    stack.callback(cluster.shutdown)
    engines = start_engines(
        config,
        cluster,
        stack,
        numbers=range(rollout.num_engines),
        log_folder=logs,
        weights_from="trainer",
        shares_gpus=config.cluster.placement == "colocated",
    )
    trainer = Trainer.start(trainer_settings(config), cluster, log_folder=logs)
    stack.callback(trainer.shutdown)
    engines.wait_until_ready()
    publisher = Publisher(
        trainer.ranks,
        engines,
        config.weights,
        tensor_parallel=rollout.tensor_parallel,
        dtype=getattr(torch, config.model.dtype),
    )
    sampler = Sampler(
        engines,
        prompts.stream(config),
        scorer,
        config.sampling,
        settings=SamplingSettings(
            temperature=rollout.temperature,
            top_p=1.0,
            max_tokens=rollout.max_response_tokens,
            stop_ids=stop_ids(tokenizer),
        ),
        tokenizer=tokenizer,
        seed=config.run.seed,
    )
    return Pieces(sampler, engines, trainer, publisher)


def make_batch(groups: list[Group], config: RunConfig) -> PackedBatch:
    """Return the sequences of all responses with their advantages and loss weights."""
    algorithm, size = config.algorithm, config.sampling.responses_per_prompt
    longest = config.rollout.max_response_tokens
    rewards = response_rewards(groups, algorithm, max_response_tokens=longest)
    return pack(
        groups,
        advantages(groups, algorithm, max_response_tokens=longest, rewards=rewards),
        loss_weights(groups, algorithm, group_size=size),
        mini_batch_size=algorithm.responses_per_mini_batch,
        group_size=size,
        rewards=rewards,
    )


def show(step: int, groups: list[Group], update: UpdateResult) -> None:
    """Print one line on a step."""
    rewards = [score.reward for group in groups for score in group.scores]
    print(
        f"step={step} reward={sum(rewards) / len(rewards):.4f} "
        f"loss={update.metrics['policy/loss']:.3e} "
        f"first_ratio_error={update.metrics['policy/ratio_first_max_error']} "
        f"stale_tokens={update.metrics['staleness/token_share']:.4f}",
        flush=True,
    )


def main() -> None:
    """Sample with the present weights, train on it, publish the new ones, and repeat."""
    config = load_config(RECIPE, [word.removeprefix("--") for word in sys.argv[1:]])
    with ExitStack() as stack:
        pieces = start(config, stack)
        sampler, engines, trainer = pieces.sampler, pieces.engines, pieces.trainer
        pieces.publisher.publish(policy_version=0)
        sampler.resume_sampling(policy_version=0)
        for step in range(1, config.run.num_steps + 1):
            sampled = sampler.next_batch()
            groups = in_training_order(sampled.groups, step - 1, config.groups_per_mini_batch)
            batch = make_batch(groups, config)
            engines.on_update_start()
            update = trainer.update(UpdateRequest(batch=batch, step=step, policy_version=step - 1))
            pieces.publisher.publish(step)
            engines.on_update_done()
            sampler.resume_sampling(step)
            show(step, groups, update)


if __name__ == "__main__":
    main()
