"""The comparison of objectives on a saved step, before and after the run's own updates of it.

It is shown as text and written as JSON.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from megadapo.algorithm.config import AlgorithmConfig
from megadapo.config import RunConfig
from megadapo.data.batch import PackedBatch
from megadapo.data.group import NO_VERSION
from megadapo.lab.profiling.profiles import trainer_alone
from megadapo.lab.whatif.alternatives import Alternative
from megadapo.lab.whatif.sizes import GradientSizes, gradient_sizes, sizes_json, sizes_table
from megadapo.lab.whatif.types import Measured, OldNumbers, TokenGradients, Variant, merged
from megadapo.observe.metrics.records import MetricRecord, plain_numbers
from megadapo.observe.rollouts.files import ROLLOUTS_FOLDER
from megadapo.observe.run_records import RunRecords
from megadapo.observe.tables import TextTable, formatted, ranges
from megadapo.rollout.sampling.statistics import SampledBatch
from megadapo.run.processes import trainer_settings
from megadapo.run.replay import ReplayedRollouts
from megadapo.run.state.checkpoint import Checkpoint, checkpoints_of, load
from megadapo.run.step.training import make_batch
from megadapo.trainer.types import UpdateRequest

if TYPE_CHECKING:
    from megadapo.trainer.rank import TrainerRank
    from megadapo.trainer.trainer import Trainer


@dataclass(frozen=True, kw_only=True, eq=False)
class SavedStep:
    """The groups that a run trained on in a step, as far as it saved them."""

    step: int
    sampled: SampledBatch
    num_groups: int
    """Number of groups that the run trained on in the step."""
    metrics: MetricRecord
    """Metrics that the run recorded; empty if it ended before."""

    @property
    def is_whole(self) -> bool:
        return len(self.sampled.groups) == self.num_groups


def read_step(config: RunConfig, step: int) -> SavedStep:
    """Read the groups of a step from the run's folder."""
    folder, recorded = config.run.folder, RunRecords(config.run.folder)
    recorded.step_with_groups(step)
    # the copied run ends here, because later steps may not be saved
    run = config.run.model_copy(update={"num_steps": step})
    until = config.model_copy(update={"run": run})
    sampled = ReplayedRollouts(until, folder / ROLLOUTS_FOLDER, first_step=step).next_batch()
    metrics = next((record for record in recorded.steps if record["step"] == step), {})
    return SavedStep(
        step=step,
        sampled=sampled,
        num_groups=int(metrics.get("groups/kept") or config.sampling.prompts_per_step),
        metrics=metrics,
    )


def saved_logprobs(config: RunConfig, saved: SavedStep, batch: PackedBatch) -> np.ndarray:
    """Return the trainer's log-probs before the step's updates, [T] float32.

    NaN where none is saved: on prompts, on tokens without a loss, and on stale tokens if their
    ratio has the engine's log-prob instead.
    """
    groups = {
        group.prompt_index: group
        for group in RunRecords(config.run.folder).groups(saved.step)
        if group.disposition == "trained"
    }
    responses = (
        response
        for group in saved.sampled.groups
        for response in groups[group.prompt_index].responses
    )
    found = np.full(len(batch.tokens), np.nan, dtype=np.float32)
    starts = batch.cu_seqlens[:-1] + batch.prompt_lengths
    for start, stop, response in zip(starts, batch.cu_seqlens[1:], responses, strict=True):
        if response.logprobs_old is not None:
            found[start:stop] = response.logprobs_old
    if config.algorithm.importance.stale_logprobs == "rollout":
        versions = batch.policy_versions
        found[(versions != NO_VERSION) & (versions != saved.step - 1)] = np.nan
    return found


def _checkpoints(folder: Path, step: int) -> list[Checkpoint | None]:
    """Return the newest checkpoint from before a step, and the step's own; None if not kept.

    Without the first, the run started from the weights in model.path.
    """
    kept = checkpoints_of(folder)
    before = max((saved for saved in kept if saved < step), default=-1)
    # the ranks that read their files hash them
    return [load(kept[one], hashes=False) if one in kept else None for one in (before, step)]


_COLUMNS = (
    ("loss", "loss", ".6g"),
    ("|gradient|", "grad_norm", ".6g"),
    ("cosine", "cosine", ".6f"),
    ("clipped low", "clip_low", ".3%"),
    ("clipped high", "clip_high", ".3%"),
    ("eff. samples", "effective_samples", ".2%"),
    ("tokens", "num_tokens", "d"),
    ("moved", "num_moved", "d"),
)
"""Head, field of `Measured` and format of each column."""


@dataclass(frozen=True, kw_only=True)
class WhatIfComparison:
    """All objectives at the same weights."""

    title: str
    objectives: Sequence[tuple[str, Measured]]
    """Name and numbers of each objective, the run's own first."""
    notes: Sequence[str]
    sizes: Sequence[tuple[str, GradientSizes]]
    """Spread of each objective's gradient over the tokens."""

    def text(self) -> str:
        """Return one row per objective, and the notes."""
        rows = [
            [name, *(formatted(getattr(measured, field), form) for _, field, form in _COLUMNS)]
            for name, measured in self.objectives
        ]
        head = ["objective", *(label for label, _, _ in _COLUMNS)]
        table = TextTable(title=self.title, head=head, rows=rows)
        entropy = self.objectives[0][1].entropy
        notes = [] if entropy is None else [f"Entropy: {entropy:.4f} nats per token."]
        return "\n".join([table.text(), "", sizes_table(self.sizes), "", *self.notes, *notes])

    def to_json(self) -> dict[str, Any]:
        """Return all numbers as JSON values."""
        return {
            "title": self.title,
            "notes": list(self.notes),
            "objectives": [
                plain_numbers({"name": name, **asdict(measured)})
                for name, measured in self.objectives
            ],
            "sizes": sizes_json(self.sizes),
        }


def compare(
    config: RunConfig, step: int, alternatives: Sequence[Alternative]
) -> Iterator[WhatIfComparison]:
    """Yield the objectives on a step's saved groups, before the step's updates and after them.

    Args:
        alternatives: the run's own objective first.
    """
    saved = read_step(config, step)
    before, after = _checkpoints(config.run.folder, step)
    obstacle = None if after is not None else _cannot_repeat(config, saved, before)
    variants, names = _variants(saved, alternatives), [name for name, _ in alternatives]
    settings = trainer_settings(config)
    # no engine shares the device; the loss that balances experts is no part of an objective
    alone = settings.trainer.model_copy(update={"offload": (), "router_aux_loss_coef": 0.0})
    settings = replace(settings, trainer=alone, reads_weights=before is None)
    with trainer_alone(config, settings) as trainer:
        if before is not None:
            trainer.load(before.trainer_folder, before.files)
        found = _measure(trainer, variants, step, None)
        _, current, _ = found
        known = saved_logprobs(config, saved, variants[0].batch)
        notes = [*_notes(config, saved, before, np.abs(known - current.logprobs))]
        if obstacle is not None:
            notes.append(
                f"Clip shares of fresh tokens need the weights after step {step}: it has no "
                f"checkpoint, and its updates cannot be repeated, because {obstacle}. Steps for "
                f"which that is possible: {_possible_steps(config) or 'none'}."
            )
        title = f"before the updates of step {step}, where the ratio of every fresh token is 1"
        yield _comparison(title, names, variants, found, notes)
        if obstacle is not None:
            return
        if after is not None:
            trainer.load(after.trainer_folder, after.files)
            source = "its checkpoint"
        else:
            _repeat_updates(trainer, variants[0], step)
            source = "its updates, repeated here"
        old = np.where(np.isfinite(known), known, current.logprobs)
        found = _measure(trainer, variants, step, replace(current, logprobs=old))
        title = f"after the updates of step {step}, with the old log-probs from before them"
        yield _comparison(title, names, variants, found, [f"These weights are from {source}."])


def _comparison(
    title: str,
    names: Sequence[str],
    variants: Sequence[Variant],
    found: tuple[list[Measured], OldNumbers, TokenGradients],
    notes: Sequence[str],
) -> WhatIfComparison:
    """Return the comparison of what `_measure` returned."""
    measured, numbers, gradients = found
    sizes = (
        gradient_sizes(d_policy, gradients.distance, numbers.logprobs, variant.batch)
        for variant, d_policy in zip(variants, gradients.d_policy, strict=True)
    )
    return WhatIfComparison(
        title=title,
        objectives=list(zip(names, measured, strict=True)),
        notes=notes,
        sizes=list(zip(names, sizes, strict=True)),
    )


def _repeat_updates(trainer: Trainer, own: Variant, step: int) -> None:
    objective = own.algorithm.objective
    trainer.update(
        UpdateRequest(
            batch=own.batch,
            policy_version=step - 1,
            step=step,
            kl_reward_coef=own.kl_reward_coef,
            old_kl_coef=objective.old_kl_coef,
            entropy_coef=objective.entropy_coef,
        )
    )


def _variants(saved: SavedStep, alternatives: Sequence[Alternative]) -> list[Variant]:
    """Return each objective with its advantages and loss weights of the saved groups."""
    found: list[Variant] = []
    _, own_config = alternatives[0]
    for _, config in alternatives:
        batch, _ = make_batch(saved.sampled, config, policy_version=saved.step - 1)
        num_mini_batches = len(batch.mini_batches)
        if found:
            # the loss weights have the alternative's mini-batches; the passes need common ones
            own = found[0].batch
            changed = ("advantages", "loss_weights", "rewards")
            batch = replace(own, **{name: getattr(batch, name) for name in changed})
        found.append(
            Variant(
                algorithm=_with_recorded_coefs(saved, config.algorithm, own_config.algorithm),
                batch=batch,
                num_mini_batches=num_mini_batches,
                kl_reward_coef=_kl_reward_coef(saved, config, own=own_config),
            )
        )
    return found


def _kl_reward_coef(saved: SavedStep, config: RunConfig, own: RunConfig) -> float:
    """Return the recorded coefficient, which may have moved, unless `--set` gives another one."""
    objective, of_run = config.algorithm.objective, own.algorithm.objective
    recorded = saved.metrics.get("kl/coef")
    is_own = (objective.kl_in, objective.kl_coef) == (of_run.kl_in, of_run.kl_coef)
    if objective.kl_in == "reward" and is_own and recorded is not None:
        return float(recorded)
    return objective.kl_reward_coef


def _with_recorded_coefs(
    saved: SavedStep, algorithm: AlgorithmConfig, own: AlgorithmConfig
) -> AlgorithmConfig:
    """Return the algorithm with the coefficients that the step recorded, as above."""
    recorded = {
        name: float(value)
        for name, metric in (("old_kl_coef", "kl/old_coef"), ("entropy_coef", "entropy/coef"))
        if (value := saved.metrics.get(metric)) is not None
        and getattr(algorithm.objective, name) == getattr(own.objective, name)
    }
    objective = algorithm.objective.model_copy(update=recorded)
    return algorithm.model_copy(update={"objective": objective})


def _measure(
    trainer: Trainer, variants: Sequence[Variant], step: int, old: OldNumbers | None
) -> tuple[list[Measured], OldNumbers, TokenGradients]:
    """Return each objective's numbers, and all tokens' at the trainer's weights."""
    answers = trainer.call_all("apply", _measure_on, variants, step - 1, old)
    parts = [part for _, part, _ in answers if part is not None]
    gradients = [part for _, _, part in answers if part is not None]
    logprobs = merged([part.logprobs for part in parts])
    d_policy = merged([part.d_policy for part in gradients])
    distance = merged([part.distance for part in gradients])
    assert logprobs is not None and d_policy is not None and distance is not None, "of some rank"
    old_numbers = OldNumbers(
        logprobs=logprobs,
        values=merged([part.values for part in parts]),
        logprobs_ref=merged([part.logprobs_ref for part in parts]),
    )
    return answers[0][0], old_numbers, TokenGradients(d_policy=d_policy, distance=distance)


def _measure_on(
    rank: TrainerRank, variants: Sequence[Variant], policy_version: int, old: OldNumbers | None
) -> tuple[list[Measured], OldNumbers | None, TokenGradients | None]:
    # only a rank imports Megatron
    from megadapo.lab.whatif.measure import measure

    return measure(rank, variants, policy_version, old)


def _cannot_repeat(config: RunConfig, saved: SavedStep, before: Checkpoint | None) -> str | None:
    """Return the reason why the step's updates cannot be repeated, None if they can."""
    if _step_of(before) != saved.step - 1:
        return f"step {saved.step - 1} has none"
    if not saved.is_whole:
        return "only a part of its groups is saved"
    if config.algorithm.pretraining.data is not None:
        return "algorithm.pretraining takes part in them"
    if config.trainer.router_aux_loss_coef != 0.0:
        return "trainer.router_aux_loss_coef takes part in them"
    return None


def _possible_steps(config: RunConfig) -> str:
    """List the steps whose weights after their updates are there or can be computed."""
    kept = {0, *checkpoints_of(config.run.folder)}
    repeats = (
        config.observe.saved_groups == "all"
        and config.algorithm.pretraining.data is None
        and config.trainer.router_aux_loss_coef == 0.0
    )
    saved = RunRecords(config.run.folder).saved_steps
    return ranges([one for one in saved if one in kept or (repeats and one - 1 in kept)])


def _step_of(weights: Checkpoint | None) -> int:
    return 0 if weights is None else weights.step


def _notes(
    config: RunConfig, saved: SavedStep, before: Checkpoint | None, distances: np.ndarray
) -> Iterator[str]:
    """Yield what the reader must know of the batch and of the weights before the step."""
    step, num_groups = saved.step, len(saved.sampled.groups)
    if not saved.is_whole:
        yield (
            f"Only {num_groups} of the step's {saved.num_groups} groups are saved, and all numbers "
            'are of these; a run saves whole batches with observe.saved_groups = "all".'
        )
    if config.algorithm.kl_control.target is not None and saved.metrics.get("kl/coef") is None:
        yield "The step recorded no kl/coef, so the KL coefficient is that of the first step."
    name = "in model.path" if before is None else f"of {before.path}"
    distance = f"{np.nanmax(distances):.2g}" if np.isfinite(distances).any() else "unknown"
    is_exact = _step_of(before) == step - 1
    exact = "" if is_exact else f", not those of step {step - 1}, which has none"
    yield (
        f"The weights are those {name}{exact}. Largest distance of their log-probs to the saved "
        f"old ones: {distance}."
    )
    loss, norm = saved.metrics.get("policy/loss"), saved.metrics.get("policy/grad_norm")
    if loss is not None and norm is not None:
        updates = -(-saved.num_groups // config.groups_per_mini_batch) * config.algorithm.passes
        yield (
            f"The run recorded policy/loss {loss:.6g} and policy/grad_norm {norm:.6g}"
            + (f", means over its {updates} updates." if updates > 1 else ".")
        )
