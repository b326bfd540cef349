"""One step's batch and its update: from sampled groups to the trainer's result."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from megadapo.algorithm.advantages import Advantages, advantages, response_rewards
from megadapo.algorithm.config import AlgorithmConfig
from megadapo.algorithm.entropy_control import EntropyController
from megadapo.algorithm.kl_control import KlController
from megadapo.algorithm.loss_weights import loss_weights
from megadapo.config import RunConfig
from megadapo.data.batch import PackedBatch, pack
from megadapo.data.group import Group
from megadapo.data.pretraining import PretrainingStream, pack_pretraining
from megadapo.errors import CheckpointError
from megadapo.rollout.sampling.statistics import SampledBatch
from megadapo.run.processes import GpuSharing
from megadapo.run.state.checkpoint import Checkpoint
from megadapo.run.step.probe import ParityProbe, probed_sequences
from megadapo.trainer.trainer import Trainer
from megadapo.trainer.types import UpdateRequest, UpdateResult
from megadapo.weights.disk.files import Files

KL_CONTROL_STATE = "kl_control"
OLD_KL_CONTROL_STATE = "old_kl_control"
ENTROPY_CONTROL_STATE = "entropy_control"
PRETRAINING_STATE = "pretraining_data"


def make_batch(
    sampled: SampledBatch, config: RunConfig, *, policy_version: int
) -> tuple[PackedBatch, Advantages]:
    """Return the packed batch of a step, which says on which sequences the trainer reports.

    Return the advantages in float64 too, for the saved rollouts: the batch rounds them to fp32.
    `policy_version`: of the weights that train on it; tokens of other weights are stale.
    """
    groups = sampled.groups
    packed, values = pack_groups(groups, config, policy_version=policy_version)
    saved = {entry.group.prompt_index for entry in sampled.saved if entry.disposition == "trained"}
    indices = (group.prompt_index for group in groups for _ in group.responses)
    recorded = {sequence for sequence, index in enumerate(indices) if index in saved}
    recorded |= probed_sequences(packed, config, policy_version=policy_version).keys()
    return replace(packed, recorded=sorted(recorded)), values


def pack_groups(
    groups: Sequence[Group], config: RunConfig, *, policy_version: int
) -> tuple[PackedBatch, Advantages]:
    """Return groups as a batch, with shaped rewards, advantages and loss weights; and the
    advantages in float64. `policy_version`: as in `make_batch`."""
    algorithm = config.algorithm
    max_response_tokens = config.rollout.max_response_tokens
    group_size = config.sampling.responses_per_prompt
    rewards = response_rewards(groups, algorithm, max_response_tokens=max_response_tokens)
    num_tokens = None
    if algorithm.importance.stale_logprobs == "none":
        responses = (response for group in groups for response in group.responses)
        num_tokens = [
            int((response.policy_versions == policy_version).sum()) for response in responses
        ]
    values = advantages(
        groups,
        algorithm,
        max_response_tokens=max_response_tokens,
        rewards=rewards,
        num_tokens=num_tokens,
    )
    packed = pack(
        groups,
        values,
        loss_weights(groups, algorithm, num_tokens, group_size=group_size, advantages=values),
        mini_batch_size=algorithm.responses_per_mini_batch,
        group_size=group_size,
        rewards=rewards,
    )
    return packed, values


class TrainerState:
    """The trainer's ranks, and the step whose weights they have."""

    def __init__(
        self, trainer: Trainer, gpus: GpuSharing, state: Mapping[str, Any] | None = None
    ) -> None:
        """`state`: part of the run's state that the ranks do not save, if it never changes."""
        self.ranks = trainer
        self.step: int | None = 0
        """Step that produced the trainer's weights; None in the middle of an update."""
        self.gpus = gpus
        self._state = state or {}

    def apply(self, request: UpdateRequest) -> UpdateResult:
        """Apply the updates of a step. Engines on shared GPUs sleep until the next publish."""
        # first, because an engine that cannot sleep fails here: the weights are still a step's
        self.gpus.start_update()
        self.ranks.check_others()
        self.step = None
        result = self.ranks.update(request)
        self.step = request.step
        return result

    def load(self, checkpoint: Checkpoint) -> None:
        """Restore the ranks, and what `state_dict` returned."""
        self.ranks.load(checkpoint.trainer_folder, checkpoint.files)
        self.step = checkpoint.step

    def state_dict(self) -> dict[str, Any]:
        """Return the part of the run's state that the ranks do not save."""
        return dict(self._state)

    def begin_save(self, folder: Path) -> Callable[[], Files]:
        """Begin to write the trainer's part of a checkpoint, also beside engines on its GPUs.

        Return a function that waits for the files and returns them. Raise CheckpointError if a rank
        is still writing the previous save, which was late.
        """
        # asked first, because an exception in begin_save would end the ranks
        if any(self.ranks.call_all("is_writing")):
            raise CheckpointError("trainer ranks are still writing the previous save")
        return self.ranks.begin_save(folder)


class StepTrainer(TrainerState):
    """The trainer with the rest of training's state: adaptive coefficients and pretraining data."""

    def __init__(
        self,
        trainer: Trainer,
        gpus: GpuSharing,
        algorithm: AlgorithmConfig,
        pretraining_data: PretrainingStream | None = None,
        probe: ParityProbe | None = None,
    ) -> None:
        """`probe`: compares the engines' weights with the trainer's; None without engines."""
        super().__init__(trainer, gpus)
        self._probe = probe
        control, objective = algorithm.kl_control, algorithm.objective
        self._kl_controller = KlController(control, objective.kl_reward_coef)
        self._old_kl_controller = KlController(control.of_old_policy, objective.old_kl_coef)
        self._entropy_controller = EntropyController(
            algorithm.entropy_control, objective.entropy_coef
        )
        self._passes, self._pretraining = algorithm.passes, algorithm.pretraining
        self._pretraining_data = pretraining_data

    def update(
        self, batch: PackedBatch, step: int, *, checks_first_ratio: bool = True
    ) -> UpdateResult:
        """Train on one step's batch while engines score some of its stale tokens (`finish_probe`).

        `checks_first_ratio`: whether GPUs measure the first ratio.
        """
        request = UpdateRequest(
            batch=batch,
            policy_version=step - 1,
            step=step,
            kl_reward_coef=self._kl_controller.coef,
            old_kl_coef=self._old_kl_controller.coef,
            entropy_coef=self._entropy_controller.coef,
            checks_first_ratio=checks_first_ratio,
            pretraining=self._next_pretraining_batch(self._passes * len(batch.mini_batches)),
        )
        if self._probe is not None:
            self._probe.begin(batch, policy_version=step - 1)
        result = self.apply(request)
        result = replace(result, metrics={**result.metrics, **self._entropy_controller.metrics})
        # at a learning rate of 0 the policy does not change, nor its KL divergence and entropy
        if result.metrics["policy/lr"]:
            self._kl_controller.observe(result.metrics["kl/mean"], batch.num_sequences)
            self._old_kl_controller.observe(result.metrics["kl/from_old"], batch.num_sequences)
            self._entropy_controller.observe(result.metrics["policy/entropy"])
        return result

    def finish_probe(self, result: UpdateResult) -> UpdateResult:
        """Return the update's result with the metrics of the engines' scores; wait for them.

        Engines may fail here, so the step must already count as complete.
        """
        if self._probe is None:
            return result
        return replace(result, metrics=result.metrics | self._probe.metrics(result.recorded))

    def load(self, checkpoint: Checkpoint) -> None:
        """Restore the ranks, and what `state_dict` returned."""
        super().load(checkpoint)
        state = checkpoint.state
        self._kl_controller.load_state_dict(state.get(KL_CONTROL_STATE, {}))
        self._old_kl_controller.load_state_dict(state.get(OLD_KL_CONTROL_STATE, {}))
        self._entropy_controller.load_state_dict(state.get(ENTROPY_CONTROL_STATE, {}))
        # a run that adds pretraining data starts with its first document
        if self._pretraining_data is not None and PRETRAINING_STATE in state:
            self._pretraining_data.load_state_dict(state[PRETRAINING_STATE])

    def state_dict(self) -> dict[str, Any]:
        """Return the part of the run's state that the ranks do not save."""
        state: dict[str, Any] = {
            KL_CONTROL_STATE: self._kl_controller.state_dict(),
            OLD_KL_CONTROL_STATE: self._old_kl_controller.state_dict(),
            ENTROPY_CONTROL_STATE: self._entropy_controller.state_dict(),
        }
        if self._pretraining_data is not None:
            state[PRETRAINING_STATE] = self._pretraining_data.state_dict()
        return state

    def _next_pretraining_batch(self, num_updates: int) -> PackedBatch | None:
        if self._pretraining_data is None:
            return None
        num_tokens = self._pretraining.tokens_per_mini_batch
        parts = [self._pretraining_data.take(num_tokens) for _ in range(num_updates)]
        return pack_pretraining(parts, coef=self._pretraining.coef)
