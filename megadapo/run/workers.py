"""The running parts of a run, started in the order their memory allows and ended together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from megadapo.cluster.cluster import Cluster
from megadapo.config import RunConfig
from megadapo.data.batch import PackedBatch
from megadapo.data.prompts import Prompt, PromptStream, load_prompts
from megadapo.errors import DataError
from megadapo.observe.metrics import EvaluationRecord
from megadapo.rewards.dapo_math import validate_ground_truth
from megadapo.rewards.verifier import Verifier
from megadapo.rollout.engines import Engines
from megadapo.rollout.evaluation import evaluate
from megadapo.rollout.requests import SamplingSettings
from megadapo.rollout.sampler import Sampler
from megadapo.run.checkpoint import Checkpoint
from megadapo.trainer.result import UpdateResult
from megadapo.trainer.settings import TrainerSettings
from megadapo.trainer.trainer import Trainer
from megadapo.weights.sync.publish import Publisher

SAMPLER_STATE = "sampler"


class Phases(Protocol):
    """Where start-up says what it is doing; a Run is one."""

    def phase(self, name: str) -> AbstractContextManager[None]: ...


@dataclass(frozen=True, kw_only=True)
class Workers:
    """Trainer, engines and what feeds them."""

    config: RunConfig
    trainer: Trainer
    engines: Engines
    sampler: Sampler
    verifier: Verifier
    publisher: Publisher
    tokenizer: PreTrainedTokenizerBase
    held_out: list[Prompt]

    def update(self, batch: PackedBatch, step: int, *, record: Sequence[int] = ()) -> UpdateResult:
        """Train on one step's batch; engines on the trainer's GPUs sleep until the next publish.

        `record`: sequences of the batch whose log-probs the result holds.
        """
        self.engines.sleep()
        return self.trainer.update(
            batch, policy_version=self.engines.policy_version, step=step, record=record
        )

    def publish(self, policy_version: int) -> None:
        """Put the trainer's weights into the engines, which then sample as that version."""
        self.engines.wake_weights()
        self.publisher.publish(policy_version)
        self.engines.wake_cache()

    def evaluate(self, step: int) -> EvaluationRecord:
        """Score the engines' present weights on the held-out problems."""
        config = self.config
        result = evaluate(
            self.engines,
            self.held_out,
            self.verifier,
            config.evaluation,
            tokenizer=self.tokenizer,
            max_response_tokens=config.rollout.max_response_tokens,
            seed=config.run.seed,
        )
        return EvaluationRecord(
            step=step,
            policy_version=self.engines.policy_version,
            accuracy=result.accuracy,
            standard_error=result.standard_error,
            num_problems=result.num_problems,
            samples_per_problem=result.samples_per_problem,
            response_length=result.response_length_mean,
        )

    def state_dict(self) -> dict[str, object]:
        """What a checkpoint holds beside the trainer's weights and optimizer."""
        return {SAMPLER_STATE: self.sampler.state_dict()}


@contextmanager
def start_workers(
    config: RunConfig, phases: Phases, checkpoint: Checkpoint | None
) -> Iterator[Workers]:
    """Start every part, at `checkpoint` where there is one; all have ended when this returns.

    Raises:
        DataError: prompts, gold answers or the tokenizer cannot be used.
        InfraError: a process did not start.
        CheckpointError: the checkpoint is not of this model.
    """
    with ExitStack() as stack:
        with phases.phase("load prompts"):
            tokenizer = _load_tokenizer(config)
            prompts = _load_prompts(config, config.data.train, tokenizer)
            held_out = []
            if config.data.held_out is not None:
                held_out = _load_prompts(config, config.data.held_out, tokenizer)
        with phases.phase("start verifier"):
            verifier = stack.enter_context(Verifier(config.reward))
        with phases.phase("start Ray"):
            cluster = _start_cluster(config)
            stack.callback(cluster.shutdown)
        trainer, engines = _start_processes(config, phases, cluster, stack)
        sampler = _make_sampler(config, engines, prompts, verifier, tokenizer)
        if checkpoint is not None:
            with phases.phase("load checkpoint"):
                trainer.load(checkpoint.trainer_folder)
                sampler.load_state_dict(checkpoint.state[SAMPLER_STATE])
        yield Workers(
            config=config,
            trainer=trainer,
            engines=engines,
            sampler=sampler,
            verifier=verifier,
            publisher=Publisher(
                trainer.ranks,
                engines,
                config.weights,
                tensor_parallel=config.rollout.tensor_parallel,
                pipeline_parallel=config.rollout.pipeline_parallel,
                expert_parallel=config.rollout.expert_parallel,
                dtype=getattr(torch, config.model.dtype),
            ),
            tokenizer=tokenizer,
            held_out=held_out,
        )


def _start_processes(
    config: RunConfig, phases: Phases, cluster: Cluster, stack: ExitStack
) -> tuple[Trainer, Engines]:
    """Start engines and trainer, at once unless they share GPUs."""
    # an engine measures the free memory of its GPU, so it must be alone on it while it starts
    one_by_one = config.cluster.uses_cuda and config.cluster.placement == "colocated"
    with phases.phase("start engines"):
        engines = Engines.start(
            config.rollout,
            cluster,
            model=config.model.path,
            dtype=config.model.dtype,
            max_prompt_tokens=config.data.max_prompt_tokens,
            log_folder=config.run.folder,
            shares_gpus=config.cluster.placement == "colocated",
            wait=one_by_one,
        )
        stack.callback(engines.shutdown)
        if one_by_one:
            engines.sleep()
    with phases.phase("start trainer"):
        trainer = Trainer.start(trainer_settings(config), cluster)
        stack.callback(trainer.shutdown)
    if not one_by_one:
        with phases.phase("wait for engines"):
            engines.wait_until_ready()
    return trainer, engines


def trainer_settings(config: RunConfig) -> TrainerSettings:
    """What the trainer's ranks need to know of a run."""
    return TrainerSettings(
        model=config.model,
        trainer=config.trainer,
        objective=config.algorithm.objective,
        temperature=config.rollout.temperature,
        seed=config.run.seed,
    )


def _make_sampler(
    config: RunConfig,
    engines: Engines,
    prompts: list[Prompt],
    verifier: Verifier,
    tokenizer: PreTrainedTokenizerBase,
) -> Sampler:
    return Sampler(
        engines,
        PromptStream(prompts, config.run.seed, shuffle=config.data.shuffle),
        verifier,
        config.sampling,
        settings=SamplingSettings(
            temperature=config.rollout.temperature,
            top_p=config.rollout.top_p,
            max_tokens=config.rollout.max_response_tokens,
        ),
        tokenizer=tokenizer,
        seed=config.run.seed,
        saved_groups=config.observe.saved_groups,
    )


def _load_tokenizer(config: RunConfig) -> PreTrainedTokenizerBase:
    path = config.model.path
    try:
        return AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise DataError(f"model.path = {path}: no usable tokenizer: {error}") from error


def _load_prompts(
    config: RunConfig, source: str, tokenizer: PreTrainedTokenizerBase
) -> list[Prompt]:
    return load_prompts(
        source,
        check_gold=partial(validate_ground_truth, rule=config.reward.rule),
        tokenizer=tokenizer,
        max_prompt_tokens=config.data.max_prompt_tokens,
        overlong_prompts=config.data.overlong_prompts,
    )


def _start_cluster(config: RunConfig) -> Cluster:
    return Cluster.start(
        config.cluster,
        num_trainer_ranks=config.trainer.num_ranks,
        num_engines=config.rollout.num_engines,
        engine_ranks=config.rollout.ranks_per_engine,
    )
