"""The inputs of a run: prompts, tokenizer, scorer, pretraining data, and the cluster to run on."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

from transformers import PreTrainedTokenizerBase

from megadapo.algorithm.advantages import has_mixed_steps
from megadapo.cluster.cluster import Cluster
from megadapo.cluster.nodes import NodeFolders
from megadapo.cluster.process_log import LOGS_FOLDER
from megadapo.config import RunConfig
from megadapo.data.group import Group
from megadapo.data.order import Share
from megadapo.data.overlap import warn_of_overlap, without_overlap
from megadapo.data.pretraining import PretrainingStream, read_texts
from megadapo.data.prompts import Prompt, PromptStream, load_prompts, warn_of_contradictions
from megadapo.errors import DataError, InfraError
from megadapo.models.folder import read_hf_config, resolve_model_folder
from megadapo.models.shape import required_size
from megadapo.observe.rollouts.token_pieces import decoder_of
from megadapo.rewards.scorer import Scorer
from megadapo.rewards.verifier import Verifier
from megadapo.rollout.episodes.actor import EpisodeHostActor
from megadapo.rollout.episodes.host import check_environments
from megadapo.rollout.episodes.requests import EpisodeRequests
from megadapo.rollout.journal.journal import Journal
from megadapo.rollout.sampling.sampler import Sampler
from megadapo.rollout.sampling.schedule import SamplingSchedule
from megadapo.rollout.sampling.scoring import SupportsGenerate
from megadapo.rollout.sampling.statistics import SampledBatch
from megadapo.rollout.types import SamplingSettings
from megadapo.run.state.status import rewrite_status
from megadapo.tokens.stops import stop_ids
from megadapo.tokens.tokenizer import check_vocabulary, read_tokenizer
from megadapo.weights.disk.headers import read_headers

logger = logging.getLogger(__name__)


class Phases(Protocol):
    """A display of start-up phases; a Run is one."""

    def phase(self, name: str) -> AbstractContextManager[None]: ...


@dataclass(frozen=True, kw_only=True)
class RunPrompts:
    """The prompts of a run, and their tokenizer."""

    tokenizer: PreTrainedTokenizerBase
    prompts: list[Prompt]
    shares: Sequence[Share] = ()
    """Sources of the prompts, in the prompts' order; empty: they are one source."""
    held_out: Mapping[str, Sequence[Prompt]]
    """Problems of each held-out set by its name, empty for one without a name."""

    @staticmethod
    def load(
        config: RunConfig, tokenizer: PreTrainedTokenizerBase, further: Collection[str]
    ) -> RunPrompts:
        """Load data.train and data.held_out; `further`: other columns that are read."""
        load = partial(_load_prompts, config, tokenizer=tokenizer, further=further)
        held_out = config.data.load_held_out(load)
        all_held_out = [problem for problems in held_out.values() for problem in problems]

        def load_train(source: str) -> list[Prompt]:
            loaded = load(source)
            return loaded if config.data.overlap == "warn" else _drop(all_held_out, loaded, source)

        prompts, shares = config.data.load_train(load_train)
        hides_gold = config.reward.hides_gold
        warn_of_contradictions([one for one in prompts if not hides_gold(one.data_source)])
        for name, problems in held_out.items():
            warn_of_overlap(prompts, problems, name)
        return RunPrompts(tokenizer=tokenizer, prompts=prompts, shares=shares, held_out=held_out)

    def stream(self, config: RunConfig) -> PromptStream:
        """Return the training prompts in the run's order."""
        shuffle = config.data.shuffle
        return PromptStream(self.prompts, config.run.seed, shuffle=shuffle, shares=self.shares)


@dataclass(frozen=True, kw_only=True)
class SamplingInputs(RunPrompts):
    """Everything that sampling needs besides engines: prompts, tokenizer and scorer."""

    scorer: Scorer
    episodes: EpisodeRequests

    @property
    def verifier(self) -> Verifier:
        return self.scorer.verifier

    @classmethod
    def start(cls, config: RunConfig, phases: Phases, stack: ExitStack) -> SamplingInputs:
        """Load the prompts and start the scorer, which ends with `stack`."""
        tokenizer = load_tokenizer(config)
        with phases.phase("start verifier"):
            scorer = stack.enter_context(Scorer(config.reward, decoder_of(tokenizer)))
        with phases.phase("load prompts"):
            loaded = RunPrompts.load(config, tokenizer, scorer.further_columns)
        problems = [problem for one in loaded.held_out.values() for problem in one]
        scorer.check_prompts([*loaded.prompts, *problems])
        environments = config.rollout.environments
        described = check_environments(environments) if environments else []
        episodes = EpisodeRequests(
            environments=[*zip(environments, described, strict=True)],
            tokenizer=loaded.tokenizer,
            seed=config.run.seed,
        )
        episodes.check([*loaded.prompts, *problems], config.data.max_prompt_tokens)
        return cls(**vars(loaded), scorer=scorer, episodes=episodes)

    def start_cross_check(self, sampled: SampledBatch) -> None:
        """Start the symbolic comparison of a batch's answers, saved groups first."""
        self.verifier.ask_cross_check(
            (response.text, entry.group.prompt.ground_truth)
            for entry in sampled.saved
            for response in entry.group.responses
        )

    def cross_checks(self, group: Group) -> Sequence[bool | None]:
        """Return the symbolic comparison's result for each response, None if it is not known."""
        texts = [response.text for response in group.responses]
        later = self.verifier.cross_checks(texts, group.prompt.ground_truth)
        return [
            result if score.symbolic_correct is None else score.symbolic_correct
            for score, result in zip(group.scores, later, strict=True)
        ]

    def sampler(
        self,
        config: RunConfig,
        engines: SupportsGenerate,
        journal: Journal[Group] | None = None,
        schedule: SamplingSchedule | None = None,
        host: EpisodeHostActor | None = None,
    ) -> Sampler:
        """Return the sampler of a run at its first step."""
        return Sampler(
            engines,
            self.stream(config),
            self.scorer,
            config.sampling,
            settings=SamplingSettings(
                temperature=config.rollout.temperature,
                top_p=1.0,  # the trainer scores tokens with the whole softmax
                max_tokens=config.rollout.max_response_tokens,
                branching=config.sampling.branching,
                stop_ids=stop_ids(self.tokenizer),
            ),
            episodes=self.episodes,
            saved_groups=config.observe.saved_groups,
            is_mixed=has_mixed_steps if config.algorithm.compares_steps else None,
            journal=journal,
            schedule=schedule,
            max_failed_share=config.reward.max_failed_share,
            verdict=config.reward.verdict,
            host=host,
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
    """Start or join Ray with slots for trainer ranks, engines or both; leave it with `stack`.

    `folder`: the folder that all nodes must see; None means the run's folder.
    """
    models = {key: Path(path).absolute() for key, path in config.model_paths.items()}
    folders = NodeFolders(
        shared=(folder or config.run.folder).absolute(),
        present={key: path for key, path in models.items() if path.is_dir()},
    )
    with phases.phase("start Ray"):
        cluster = Cluster(
            config.cluster,
            num_trainer_ranks=config.trainer.num_ranks if trains else 0,
            num_engines=num_engines,
            engine_ranks=config.rollout.ranks_per_engine,
            tensor_parallel=config.trainer.tensor_parallel,
            folders=folders,
        )
        logs = (folder or config.run.folder / LOGS_FOLDER) / "ray"

        def leave(kind: object, error: BaseException | None, trace: object) -> None:
            if isinstance(error, InfraError):
                cluster.keep_logs(logs)
            cluster.shutdown()

        def write_end(reason: str) -> None:
            cluster.keep_logs(logs)
            if folder is None:
                rewrite_status(config.run.folder, state="failed", reason=reason)

        cluster.daemons.before_end = write_end
        stack.push(leave)
        # processes that start later have ended when this looks for lost nodes
        stack.enter_context(cluster.naming_lost_nodes())
    return cluster


def load_tokenizer(config: RunConfig) -> PreTrainedTokenizerBase:
    """Return the tokenizer of model.path, whose tokens are all in the model's vocabulary."""
    path = config.model.path
    tokenizer = read_tokenizer(path, chat_template_kwargs=config.data.chat_template_kwargs)
    hf_config = read_hf_config(resolve_model_folder(path, with_weights=False))
    check_vocabulary(tokenizer, required_size(hf_config, "vocab_size"))
    if config.model.init == "pretrained" and Path(path).is_dir():
        for note in read_headers(Path(path)).notes:
            logger.warning("%s", note)
    return tokenizer


def load_pretraining_data(
    config: RunConfig, phases: Phases, tokenizer: PreTrainedTokenizerBase
) -> PretrainingStream | None:
    """Return the pretraining data from its start, None if algorithm.pretraining names none."""
    pretraining = config.algorithm.pretraining
    if pretraining.data is None:
        return None

    def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer.encode(text)
        end = tokenizer.eos_token_id
        return ids if end is None or ids[-1:] == [end] else [*ids, end]

    with phases.phase("load pretraining data"):
        return PretrainingStream(
            read_texts(pretraining.data),
            encode,
            seed=config.run.seed,
            max_tokens=pretraining.max_text_tokens,
        )


def _load_prompts(
    config: RunConfig,
    source: str,
    tokenizer: PreTrainedTokenizerBase,
    further: Collection[str],
) -> list[Prompt]:
    return load_prompts(
        source,
        columns=config.data.columns,
        check_gold=config.reward.check_gold,
        hides_gold=config.reward.hides_gold,
        with_extra_info=config.reads_extra_info,
        further=further,
        tokenizer=tokenizer,
        max_prompt_tokens=config.data.max_prompt_tokens,
        overlong_prompts=config.data.overlong_prompts,
    )


def _drop(problems: Sequence[Prompt], loaded: Sequence[Prompt], source: str) -> list[Prompt]:
    """Return the loaded training prompts without held-out problems, and log their number."""
    kept = without_overlap(loaded, problems)
    if not kept:
        raise DataError(
            f'{source}: every prompt is also a held-out problem, and data.overlap = "drop" leaves '
            "these out; take other prompts, or more"
        )
    num_dropped = len(loaded) - len(kept)
    message = "%s: %d of %d prompts are held-out problems and left out of training"
    if num_dropped:
        logger.info(message, source, num_dropped, len(loaded))
    return kept
