"""The parts of a run that sample and score: prompts, verifier, engines, sampler. No trainer."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from megadapo.algorithm.advantages import has_mixed_steps
from megadapo.cluster.cluster import Cluster
from megadapo.cluster.nodes import Needs
from megadapo.config import RunConfig
from megadapo.data.batch import Group
from megadapo.data.overlap import warn_of_overlap
from megadapo.data.prompts import Prompt, PromptStream, load_prompts
from megadapo.data.texts import TextStream, read_texts
from megadapo.errors import DataError
from megadapo.models.folder import path_from_anywhere
from megadapo.observe.rollouts.token_pieces import decoder_of
from megadapo.rewards.scorer import Scorer
from megadapo.rewards.verifier import Verifier
from megadapo.rollout.journal.journal import Journal
from megadapo.rollout.pool.engines import Engines
from megadapo.rollout.sampling.sampled_batch import SampledBatch
from megadapo.rollout.sampling.sampler import Sampler
from megadapo.rollout.sampling.scoring import SupportsGenerate
from megadapo.rollout.types import SamplingSettings


class Phases(Protocol):
    """Where start-up says what it is doing; a Run is one."""

    def phase(self, name: str) -> AbstractContextManager[None]: ...


@dataclass(frozen=True, kw_only=True)
class Questions:
    """What is asked and how it is scored: all that sampling needs beside engines."""

    tokenizer: PreTrainedTokenizerBase
    prompts: list[Prompt]
    held_out: list[Prompt]
    scorer: Scorer

    @property
    def verifier(self) -> Verifier:
        """What compares answers, by the rule and symbolically."""
        return self.scorer.verifier

    @classmethod
    def start(cls, config: RunConfig, phases: Phases, stack: ExitStack) -> Questions:
        """Load the prompts and start what scores, which ends with `stack`.

        Raises:
            ConfigError: a reward function cannot be imported or called.
            DataError: prompts, gold answers or the tokenizer cannot be used.
            InfraError: a process of the verifier did not start.
        """
        with phases.phase("load prompts"):
            tokenizer = load_tokenizer(config)
            prompts = _load_prompts(config, config.data.train, tokenizer)
            held_out = []
            if config.data.held_out is not None:
                held_out = _load_prompts(config, config.data.held_out, tokenizer)
                warn_of_overlap(prompts, held_out)
        with phases.phase("start verifier"):
            scorer = stack.enter_context(Scorer(config.reward, decoder_of(tokenizer)))
        return cls(tokenizer=tokenizer, prompts=prompts, held_out=held_out, scorer=scorer)

    def ask_cross_check(self, sampled: SampledBatch) -> None:
        """Have the answers of a batch compared symbolically, what is saved of them first."""
        self.verifier.ask_cross_check(
            (sample.text, entry.group.prompt.ground_truth)
            for entry in sampled.saved
            for sample in entry.group.samples
        )

    def cross_checks(self, group: Group) -> Sequence[bool | None]:
        """Verdicts of the symbolic comparison on a group's responses, as far as there are any."""
        texts = [sample.text for sample in group.samples]
        later = self.verifier.cross_checks(texts, group.prompt.ground_truth)
        return [
            at_once if at_once is not None else verdict
            for at_once, verdict in zip(group.symbolic_correct, later, strict=True)
        ]

    def sampler(
        self, config: RunConfig, engines: SupportsGenerate, journal: Journal | None = None
    ) -> Sampler:
        """Return the sampler of a run at its first step."""
        return Sampler(
            engines,
            PromptStream(self.prompts, config.run.seed, shuffle=config.data.shuffle),
            self.scorer,
            config.sampling,
            settings=SamplingSettings(
                temperature=config.rollout.temperature,
                top_p=config.rollout.top_p,
                max_tokens=config.rollout.max_response_tokens,
                tools=config.rollout.tools,
                branching=config.sampling.branching,
            ),
            tokenizer=self.tokenizer,
            seed=config.run.seed,
            saved_groups=config.observe.saved_groups,
            is_mixed=has_mixed_steps if config.algorithm.compares_steps else None,
            journal=journal,
        )


def start_cluster(
    config: RunConfig,
    phases: Phases,
    stack: ExitStack,
    *,
    trains: bool,
    num_engines: int,
    folder: Path | None = None,
) -> Cluster:
    """Start or join Ray with slots for trainer ranks, engines or both; left with `stack`.

    `folder`: that all nodes must see; None: the run's.

    Raises:
        InfraError: the cluster does not have what the layout asks for in time.
    """
    with phases.phase("start Ray"):
        cluster = Cluster.start(
            config.cluster,
            num_trainer_ranks=config.trainer.num_ranks if trains else 0,
            num_engines=num_engines,
            engine_ranks=config.rollout.ranks_per_engine,
            tensor_parallel=config.trainer.tensor_parallel,
            needs=_needs(config, folder or config.run.folder),
        )
        stack.callback(cluster.shutdown)
        # what ends after this has ended when it looks for the nodes
        stack.enter_context(cluster.naming_lost_nodes())
    return cluster


def _needs(config: RunConfig, folder: Path) -> Needs:
    """What every node must see: a shared folder, and models that are no names on the Hub."""
    paths = {"model.path": config.model.path, "critic.path": config.critic.path}
    models = {key: Path(path).absolute() for key, path in paths.items() if path}
    return Needs(
        shared=folder.absolute(),
        present={key: path for key, path in models.items() if path.is_dir()},
    )


def start_engines_alone(
    config: RunConfig, phases: Phases, stack: ExitStack, *, log_folder: Path
) -> Engines:
    """Start engines with the weights of model.path and no trainer beside them; left with `stack`.

    Raises:
        InfraError: the cluster lacks slots, or an engine did not start.
    """
    num_engines = config.rollout.num_engines
    cluster = start_cluster(
        config, phases, stack, trains=False, num_engines=num_engines, folder=log_folder
    )
    with phases.phase("start engines"):
        engines = Engines.start(
            config.rollout,
            cluster,
            model=path_from_anywhere(config.model.path),
            dtype=config.model.dtype,
            max_prompt_tokens=config.data.max_prompt_tokens,
            log_folder=log_folder,
            weights_from="folder",
            shares_gpus=False,
            returns_experts=config.trainer.router_replay,
        )
        stack.callback(engines.shutdown)
    return engines


def load_tokenizer(config: RunConfig) -> PreTrainedTokenizerBase:
    """The tokenizer of model.path.

    Raises:
        DataError: it has none that can be used.
    """
    path = config.model.path
    try:
        return AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise DataError(f"model.path = {path}: no usable tokenizer: {error}") from error


def load_texts(
    config: RunConfig, phases: Phases, tokenizer: PreTrainedTokenizerBase
) -> TextStream | None:
    """The texts of algorithm.pretraining, at their beginning; None where there are none.

    Raises:
        DataError: they cannot be used.
    """
    pretraining = config.algorithm.pretraining
    if pretraining.data is None:
        return None

    def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer.encode(text)
        end = tokenizer.eos_token_id
        return ids if end is None or ids[-1:] == [end] else [*ids, end]

    with phases.phase("load texts"):
        return TextStream(
            read_texts(pretraining.data),
            encode,
            seed=config.run.seed,
            max_tokens=pretraining.max_text_tokens,
        )


def load_training_prompts(config: RunConfig) -> list[Prompt]:
    """The prompts of data.train, as a run loads them.

    Raises:
        DataError: they, or the tokenizer that measures them, cannot be used.
    """
    return _load_prompts(config, config.data.train, load_tokenizer(config))


def _load_prompts(
    config: RunConfig, source: str, tokenizer: PreTrainedTokenizerBase
) -> list[Prompt]:
    return load_prompts(
        source,
        check_gold=config.reward.check_gold,
        with_extra_info=config.reward.reads_extra_info,
        tokenizer=tokenizer,
        max_prompt_tokens=config.data.max_prompt_tokens,
        overlong_prompts=config.data.overlong_prompts,
    )
