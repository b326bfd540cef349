"""The point where a run resumes: its checkpoint, and what must be as in the run that wrote it."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from megadapo.config import RunConfig, to_dict
from megadapo.config.recipe import RESUME_TARGET_FILE
from megadapo.errors import CheckpointError, ConfigError, DataError
from megadapo.models.folder import cached_hub_folder, is_hub_name
from megadapo.observe.files import replace_text
from megadapo.observe.run_records import RunRecords, leaves
from megadapo.run.state.checkpoint import CHECKPOINTS, Checkpoint, CheckpointStore, load
from megadapo.run.state.status import STATUS_FILE, read_status
from megadapo.weights.disk.files import MEANING, unreadable

RESERVE_KEYS = (
    *("data.train", "data.columns", "data.chat_template_kwargs"),
    *("data.max_prompt_tokens", "data.overlong_prompts"),
    *("reward.rule", "reward.pattern", "reward.symbolic", "reward.functions"),
    *("rollout.temperature", "rollout.max_response_tokens", "rollout.environments"),
    *("sampling.responses_per_prompt", "sampling.selection", "sampling.branching"),
    "sampling.accuracy_range",
)
"""Keys that decide how a group is sampled, scored or selected."""
SAMPLING_KEYS = (
    *RESERVE_KEYS,
    *("run.seed", "data.shuffle", "model.dtype", "rollout.quantization", "rollout.vllm"),
    "trainer.router_replay",
)
"""Keys that decide a group's tokens, log-probs and scores, given the weights. Groups that wait in a
journal or a checkpoint are used only if none has changed."""
MODEL_KEYS = ("model.path", "model.init", "trainer.router_aux_loss_coef")
"""Keys that decide which model is trained, and its loss beside the policy's."""
LEARNING_KEYS = (
    *RESERVE_KEYS,
    *MODEL_KEYS,
    *("run.seed", "data.shuffle", "data.overlap", "sampling.mode", "sampling.prompts_per_step"),
    *("sampling.max_staleness", "algorithm", "critic.path", "critic.warmup"),
)
"""Keys and tables that decide what is learned; the others decide where, how fast and what is
shown."""
SUPERVISED_KEYS = (
    *MODEL_KEYS,
    *("data.train", "data.columns", "data.chat_template_kwargs"),
    *("data.max_prompt_tokens", "data.overlong_prompts"),
    *("rollout.max_response_tokens", "run.seed", "data.shuffle", "supervised"),
)
"""Keys and tables that decide what is learned from rows of data."""
MAX_LISTED = 5
"""Number of changed files that one message lists."""
DATA_KEYS = ("data.train", "data.shuffle", "run.seed", "algorithm.pretraining.data")
"""Keys of the training data and its order."""
START_KEYS = ("run.resume", "run.folder")
"""Keys that each start chooses."""
BLOCK_BYTES = 1 << 16
SAMPLED_BYTES = 1 << 29
"""Bytes of a folder's weights that are hashed, in blocks at equal distances: all of a small model.

Every optimizer update changes weights in every block, so other weights are noticed without reading
all of a large model once more."""
ModelFiles = Mapping[str, str]
"""Digest of each file of a model that decides what a run learns; the commit of one on the Hub."""


@dataclass(frozen=True)
class ResumePoint:
    """The state from which a run starts or resumes."""

    checkpoint: Checkpoint | None
    messages: list[str]
    """Lines that explain the choice to the user."""
    is_target: bool = False
    """Whether the user named the checkpoint by its path; no other may replace it."""


def pinned_steps(folder: Path) -> frozenset[int]:
    """Return the step of the run's own checkpoint that was a target, if there is one.

    A job that is queued again names it again, so it is never pruned.
    """
    target = _last_target(folder)
    if target is None or target[0].parent != (folder / CHECKPOINTS).resolve():
        return frozenset()
    return frozenset([target[1]])


def checkpoint_store(config: RunConfig) -> CheckpointStore:
    """Return the store of the run's checkpoints."""
    return CheckpointStore(config.run.folder / CHECKPOINTS, keep=config.checkpoint.keep)


def find_resume_point(config: RunConfig, store: CheckpointStore) -> ResumePoint:
    """Return the point in the run's store that `run.resume` asks for.

    A path is used once: as soon as the run has a newer checkpoint, the path means the newest.
    """
    if config.run.resume in ("auto", "never"):
        return ResumePoint(*find_checkpoint(config, store))
    target = _last_target(config.run.folder)
    if target is not None and target[0] == Path(config.run.resume).resolve():
        later, skipped = store.newest_sound(after=target[1], hashes=False)
        if later is not None:
            message = (
                f"resuming after step {later.step} from {later.path}: the run has resumed from "
                f"{target[0]} before and written newer checkpoints; to return there, delete "
                f"{config.run.folder / RESUME_TARGET_FILE}"
            )
            return ResumePoint(later, [*(f"skipped: {line}" for line in skipped), message])
    return ResumePoint(*find_checkpoint(config, store), is_target=True)


def _last_target(folder: Path) -> tuple[Path, int] | None:
    """Return path and step of the last target of the run in `folder`; None without one."""
    try:
        target = json.loads((folder / RESUME_TARGET_FILE).read_text(encoding="utf-8"))
        return Path(target["path"]), int(target["step"])
    except (FileNotFoundError, KeyError, TypeError, ValueError):
        return None


def keep_target(folder: Path, checkpoint: Checkpoint) -> None:
    """Write the target into the run's folder, for the same command started again."""
    target = {"path": str(checkpoint.path), "step": checkpoint.step}
    replace_text(folder / RESUME_TARGET_FILE, json.dumps(target) + "\n")


def find_checkpoint(
    config: RunConfig, store: CheckpointStore
) -> tuple[Checkpoint | None, list[str]]:
    """Return the checkpoint that `run.resume` asks for, and messages for the user.

    The ranks hash the trainer's files when they load them. They are hashed here only if later
    checkpoints must be set aside for this one. Raise CheckpointError if it does not exist, if
    "never" would mix two runs in one folder, or if the run had checkpoints and has none.
    """
    if config.run.resume == "auto":
        checkpoint, skipped = store.newest(hashes=False)
        messages = [f"skipped: {line}" for line in skipped]
        saved = 0
        with suppress(DataError):
            saved = read_status(config.run.folder).checkpoint_step
        if checkpoint is None and saved:
            raise CheckpointError(
                f"{config.run.folder / STATUS_FILE} says that step {saved} was saved, but "
                f"{store.folder} has no checkpoint: is its disk mounted here? To start over from "
                'step 0 in this folder, set run.resume = "never"'
            )
    elif config.run.resume == "never":
        if store.steps():
            raise CheckpointError(
                f'{store.folder} already holds checkpoints and run.resume is "never": choose '
                "another run.folder, or delete this one"
            )
        checkpoint, messages = None, []
    else:
        path = Path(config.run.resume)
        if not path.is_dir():
            raise CheckpointError(f"run.resume = {path}: there is no such checkpoint folder")
        # a link stands for the folder that it points to
        checkpoint, messages = load(path.resolve(), hashes=False), []
        if any(step > checkpoint.step for step in store.steps()):
            # the ranks find damage only after later checkpoints are set aside
            load(checkpoint.path)
    if checkpoint is not None:
        messages.append(f"resuming after step {checkpoint.step} from {checkpoint.path}")
    return checkpoint, messages


def check_config_diff(
    config: RunConfig,
    checkpoint: Checkpoint,
    *,
    accepted: Collection[str] = (),
    keys: tuple[str, ...] = LEARNING_KEYS,
    models: Mapping[str, ModelFiles] | None = None,
) -> list[str]:
    """Compare a configuration, and the models it names, with those of the run of a checkpoint.

    Return one line for each changed key. Raise ConfigError if a run in its own folder would learn
    something else. A checkpoint from another folder starts a new run, whose changes are listed.

    Args:
        accepted: keys and tables that may change although they decide what is learned.
        keys: keys and tables that decide what is learned.
        models: files of the models; a path may change to one with equal files.
    """
    changes = {
        key: f"{json.dumps(before)} -> {json.dumps(after)}"
        for key, (before, after) in changed_keys(checkpoint.config, to_dict(config)).items()
    }
    equal = _equal_models(checkpoint, models or {}, changes)
    refused = [
        key
        for key in changes
        if _within(key, keys) and not _within(key, tuple(accepted)) and key not in equal
    ]
    if refused and _is_own(config, checkpoint):
        raise ConfigError(
            "\n".join(
                [
                    f"the run in {config.run.folder} would learn something else with these "
                    "changes:",
                    *(f"  {key}: {changes[key]}" for key in refused),
                    "undo them, choose another run.folder, or add "
                    f"--accept-changes={','.join(refused)}",
                ]
            )
        )
    return [f"changed: {key}: {line}" for key, line in changes.items()]


def _equal_models(
    checkpoint: Checkpoint, models: Mapping[str, ModelFiles], changes: dict[str, str]
) -> set[str]:
    """Return the keys of models with the files of the checkpoint's; add the others to `changes`."""
    equal = set()
    for key, files in models.items():
        before = checkpoint.models.get(key)
        if before == files:
            equal.add(key)
        elif before is not None:
            names = [name for name in {**before, **files} if before.get(name) != files.get(name)]
            listed = f"other {', '.join(names[:MAX_LISTED])} than at the start of the run"
            changes[key] = f"{changes[key]}, {listed}" if key in changes else listed
    return equal


def _is_own(config: RunConfig, checkpoint: Checkpoint) -> bool:
    """Return whether the run resumes in the folder of the run that wrote the checkpoint."""
    return checkpoint.path.parent.parent.resolve() == config.run.folder.resolve()


def accepts_other_data(
    config: RunConfig, checkpoint: Checkpoint, accepted: Collection[str]
) -> bool:
    """Return whether a resumed run may have other prompts, texts or rows than its checkpoint's."""
    is_named = any(_within(key, tuple(accepted)) for key in DATA_KEYS)
    return is_named or not _is_own(config, checkpoint)


def check_accepted(config: RunConfig, accepted: Collection[str]) -> None:
    """Raise ConfigError unless all names are keys or tables of the configuration, old or new."""
    tables = (to_dict(config), RunRecords(config.run.folder).config)
    known = [key for table in tables for key, _ in leaves(table)]
    for name in accepted:
        if not any(_within(key, (name,)) or _within(name, (key,)) for key in known):
            raise ConfigError(f"--accept-changes={name}: there is no such key or section")


def changed_keys(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return both values of each dotted key that differs, without the keys of a start."""
    # JSON has no tuples, so both sides have lists
    before, after = (dict(leaves(json.loads(json.dumps(plain)))) for plain in (old, new))
    return {
        key: (before.get(key), after.get(key))
        for key in after | before
        if before.get(key) != after.get(key) and key not in START_KEYS
    }


def decides_learning(key: str) -> bool:
    """Return whether a dotted key decides what is learned."""
    return _within(key, (*LEARNING_KEYS, *SUPERVISED_KEYS))


def samples_digest(config: RunConfig) -> str:
    """Return a digest of everything that sampled groups depend on except the weights.

    It covers the modules of reward functions, but not what these import.
    """
    found = {key: value for key, value in leaves(to_dict(config)) if _within(key, SAMPLING_KEYS)}
    sources = [_source_digest(function.function) for function in config.reward.functions]
    return hashlib.sha256(json.dumps([found, sources], sort_keys=True).encode()).hexdigest()


def _source_digest(function: str) -> str | None:
    """Return a hash of the file with MODULE:FUNCTION, which is not imported; None without one."""
    module, colon, _ = function.partition(":")
    parts = module.split(".") if colon else []
    folders: list[str] | None = [*sys.path, ""]
    spec = None
    for end in range(1, len(parts) + 1):
        spec = PathFinder.find_spec(".".join(parts[:end]), folders)
        folders = [] if spec is None else spec.submodule_search_locations
    if spec is None or spec.origin is None:
        return None
    return hashlib.sha256(Path(spec.origin).read_bytes()).hexdigest()


def _within(key: str, names: tuple[str, ...]) -> bool:
    return any(key == name or key.startswith(f"{name}.") for name in names)


def model_files(config: RunConfig) -> dict[str, ModelFiles]:
    """Return the files of each model that is on this machine, by the key of its path."""
    found: dict[str, ModelFiles] = {}
    for key, path in config.model_paths.items():
        if Path(path).is_dir():
            found[key] = _digests(Path(path))
        elif is_hub_name(path) and (folder := cached_hub_folder(path)) is not None:
            found[key] = {"commit": folder.name}
    return found


def _digests(folder: Path) -> ModelFiles:
    """Return a digest of each file of configuration, tokenizer, chat template and weights."""
    texts = {path for pattern in MEANING for path in folder.glob(pattern)}
    weights = set(folder.glob("*.safetensors*"))
    try:
        num_bytes = sum(path.stat().st_size for path in weights)
        every = BLOCK_BYTES * max(1, -(-num_bytes // SAMPLED_BYTES))
        return {
            str(path.relative_to(folder)): _digest(path, every if path in weights else BLOCK_BYTES)
            for path in sorted(texts | weights)
            if path.is_file()
        }
    except OSError as error:
        raise unreadable(Path(error.filename or folder), error) from error


def _digest(path: Path, every: int) -> str:
    """Hash a file's size and the block of bytes at each multiple of `every`."""
    num_bytes = path.stat().st_size
    digest = hashlib.sha256(str(num_bytes).encode())
    with path.open("rb", buffering=0) as file:
        for start in range(0, num_bytes, every):
            file.seek(start)
            digest.update(file.read(BLOCK_BYTES))
    return digest.hexdigest()[:16]
