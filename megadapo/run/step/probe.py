"""The parity probe: engines score stale tokens of a batch with the weights that train it.

Fresh tokens show whether trainer and engines agree. Stale tokens cannot: other weights sampled
them. But before the update the engines have the weights with which the trainer computes the old
log-probs of the batch, so both must give the same tokens the same log-probs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np

from megadapo.config import RunConfig
from megadapo.data.batch import PackedBatch
from megadapo.data.group import NO_VERSION
from megadapo.rollout.pool.engines import Engines
from megadapo.rollout.pool.handle import PendingScores
from megadapo.rollout.types import MAX_ONE_PASS, ScoreRequest
from megadapo.trainer.types import Metrics, RecordedTokens

NUM_SEQUENCES = 4
"""Sequences that each engine scores in a step, at most 4 * MAX_ONE_PASS tokens: one prefill. Their
mean has a few percent of noise, while a slice of wrong weights moves nearly every token."""
MIN_RESPONSE = 256
"""Response tokens that are read if the prompt leaves less of MAX_ONE_PASS."""
MAX_REQUESTS = 16
"""Tokens of a sequence that are scored if each costs a request of its own."""


Probed = Mapping[int, ScoreRequest]
"""Stale tokens that engines score again, by the index of their sequence in the batch."""


def probed_sequences(batch: PackedBatch, config: RunConfig, *, policy_version: int) -> Probed:
    """Return the first groups' sequences with the most stale tokens; empty without stale tokens.

    The choice depends on the batch alone, so a repeated step has the same metrics. It follows the
    training order: the trainer has log-probs of the first mini-batch at least.

    `policy_version`: of the weights that train the batch.
    """
    if config.trainer.router_replay:
        # the trainer takes the experts that earlier weights chose, the engine chooses its own
        return {}
    if config.algorithm.importance.stale_logprobs == "none":
        return {}  # no stale token is trained on
    versions = batch.policy_versions
    is_stale = (versions != NO_VERSION) & (versions != policy_version)
    if not is_stale.any():
        return {}
    is_scored = is_stale & (batch.loss_weights != 0.0) & np.isfinite(batch.logprobs_rollout)
    found: dict[int, ScoreRequest] = {}
    for first, end in pairwise(np.cumsum([0, *batch.group_sizes]).tolist()):
        requests = {
            sequence: _request(batch, is_scored, sequence, config) for sequence in range(first, end)
        }
        best = max(requests, key=lambda one: len(requests[one].positions))
        if len(requests[best].positions):
            found[best] = requests[best]
        if len(found) == NUM_SEQUENCES:
            break
    return found


def _request(
    batch: PackedBatch, is_scored: np.ndarray, sequence: int, config: RunConfig
) -> ScoreRequest:
    start, end = batch.cu_seqlens[sequence : sequence + 2].tolist()
    num_prompt = int(batch.prompt_lengths[sequence])
    # the last token is left out: vLLM needs room for one more
    limit = min(max(MAX_ONE_PASS, num_prompt + MIN_RESPONSE), end - 1 - start)
    positions = np.flatnonzero(is_scored[start : start + limit])
    read = int(positions[-1]) + 1 if len(positions) else 0
    request = ScoreRequest(
        token_ids=tuple(batch.tokens[start : start + read].tolist()),
        positions=positions,
        temperature=config.rollout.temperature,
    )
    if not request.in_one_pass:
        # with branching, vLLM's older runner would take the probable tokens of its entropies away
        # from all responses that run beside such requests
        number = 0 if config.sampling.branching.is_on else MAX_REQUESTS
        request = replace(request, positions=_spread(positions, number))
    return request


def _spread(positions: np.ndarray, number: int) -> np.ndarray:
    """Return up to `number` of the positions, the last one among them, at even distances."""
    if len(positions) <= number:
        return positions
    chosen: np.ndarray = positions[np.arange(1, number + 1) * len(positions) // max(1, number) - 1]
    return chosen


class ParityProbe:
    """The comparison of every engine's weights with the trainer's, once a step.

    All engines score the same tokens. So a fault of one is seen in the step in which it happens,
    its mean is not diluted by the others, and the number of engines does not change the metrics.
    """

    def __init__(self, config: RunConfig, engines: Engines) -> None:
        self._config, self._engines = config, engines
        self._pending: tuple[PackedBatch, Probed, PendingScores] | None = None

    def begin(self, batch: PackedBatch, *, policy_version: int) -> None:
        """Let the engines score stale tokens of the batch, if it has any.

        Engines that share the trainer's memory have answered when it returns; others work beside
        the update.
        """
        self._pending = None
        chosen = probed_sequences(batch, self._config, policy_version=policy_version)
        if chosen:
            scores = self._engines.score([*chosen.values()])
            if self._engines.shares_gpus:
                scores.result()
            self._pending = (batch, chosen, scores)

    def metrics(self, recorded: RecordedTokens | None) -> Metrics:
        """Wait for the engines and return the probe's metrics; empty without stale tokens.

        `recorded`: the tokens of the batch's recorded sequences.
        """
        if self._pending is None:
            return {}
        assert recorded is not None, "the update records the probed sequences"
        (batch, chosen, scores), self._pending = self._pending, None
        return compare(trainer_logprobs(batch, chosen, recorded), scores.result())


def trainer_logprobs(
    batch: PackedBatch, chosen: Probed, recorded: RecordedTokens
) -> list[np.ndarray]:
    """Return the trainer's log-probs of the tokens that engines score, before the update."""
    members = np.asarray(batch.recorded, dtype=np.int64)
    lengths = np.diff(batch.cu_seqlens)[members] - batch.prompt_lengths[members]
    starts = dict(zip(members.tolist(), np.cumsum(lengths) - lengths, strict=True))
    return [
        recorded.proximal[starts[one] + request.positions - batch.prompt_lengths[one]]
        for one, request in chosen.items()
    ]


def compare(known: Sequence[np.ndarray], scores: Sequence[Sequence[np.ndarray]]) -> Metrics:
    """Return the metrics of the engine that differs most from the trainer.

    Args:
        known: the trainer's log-probs of each sequence; NaN where it computed none, as in updates
            that `algorithm.max_kl` left out.
        scores: the same of each engine; NaN breaks every bound.
    """
    trainer = np.concatenate(known).astype(np.float64)
    has_value = np.isfinite(trainer)
    gaps = [np.abs(np.concatenate(own) - trainer)[has_value] for own in scores]
    if not gaps or not has_value.any():
        return {"parity/probe_abs_mean": None, "parity/probe_abs_max": None}
    return {
        "parity/probe_abs_mean": float(np.max([gap.mean() for gap in gaps])),
        "parity/probe_abs_max": float(np.max([gap.max() for gap in gaps])),
    }
