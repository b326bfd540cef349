"""From groups of responses to the packed batch one training step gets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import DTypeLike

from megadapo.algorithm.advantages import Advantages
from megadapo.algorithm.groups import Branch, Steps
from megadapo.algorithm.mini_batches import mini_batches
from megadapo.data.policy_versions import NO_VERSION
from megadapo.data.prompts import Prompt


@dataclass(frozen=True, kw_only=True, eq=False)
class Sample:
    """One response as the engine gave it; its tokens are never re-tokenised.

    Arrays, because 8,192 responses of 5,000 tokens are gigabytes as Python numbers.
    """

    prompt_ids: tuple[int, ...]
    response_ids: np.ndarray  # [n] int32
    """With the end-of-sequence token where the engine emitted it, and with what tools put out."""
    logprobs_rollout: np.ndarray  # [n] float32
    """The engine's log-prob of each response token; NaN where it gave none."""
    finish_reason: Literal["stop", "length"]
    policy_versions: np.ndarray  # [n] int32
    """Number of the weight publication that the engine sampled each token from; NO_VERSION on what
    a tool put out, which nothing is learned from."""
    text: str
    """The response decoded without special tokens."""
    branch: Branch | None = None
    """Where it left another response of its group; None where it began at the prompt."""
    experts: np.ndarray | None = None  # [m, layers, K] as in data/routed_experts.py
    """The engine's, of prompt and response; None where they were not asked for."""

    @property
    def truncated(self) -> bool:
        return self.finish_reason == "length"

    @property
    def is_sampled(self) -> np.ndarray:
        """[n] bool: which tokens the policy wrote; the others are a tool's."""
        return np.asarray(self.policy_versions != NO_VERSION)


@dataclass(frozen=True, kw_only=True)
class Group:
    """One prompt with its G responses: the unit of sampling, selection and advantage."""

    order: int
    """Position in which the group was asked for, increasing over the run."""
    prompt: Prompt
    samples: tuple[Sample, ...]
    rewards: tuple[float, ...]
    """The verifier's reward of each response, before any shaping."""
    correct: tuple[bool, ...]
    """Whether each response is right: what selection and accuracy look at."""
    answers: tuple[str, ...]
    """What the verifier read as the answer of each response."""
    symbolic_correct: tuple[bool | None, ...]
    """Verdict of the symbolic comparison on each response; None where it gave none."""
    reward_parts: tuple[tuple[tuple[str, float], ...], ...] = ()
    """(name, value) of each part of a response's reward, where more than the rule scores."""
    steps: tuple[Steps, ...] = ()
    """The scored steps of each response, where any has some."""

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each response, what tools put out included."""
        return tuple(len(sample.response_ids) for sample in self.samples)

    @property
    def num_sampled(self) -> tuple[int, ...]:
        """Tokens of each response that the policy wrote."""
        return tuple(int(sample.is_sampled.sum()) for sample in self.samples)

    @property
    def branches(self) -> tuple[Branch | None, ...]:
        """Where each response left another one."""
        return tuple(sample.branch for sample in self.samples)

    @property
    def num_generated(self) -> int:
        """Sampled tokens of all responses, those that several share counted once."""
        own = (sample.branch.num_tokens if sample.branch else 0 for sample in self.samples)
        pairs = zip(self.samples, own, strict=True)
        return sum(int(sample.is_sampled[first:].sum()) for sample, first in pairs)

    @property
    def oldest_version(self) -> int:
        """The earliest policy version among the sampled tokens of all responses."""
        return min(int(sample.policy_versions[sample.is_sampled].min()) for sample in self.samples)

    @property
    def truncated(self) -> tuple[bool, ...]:
        """Whether each response was cut at the length limit."""
        return tuple(sample.truncated for sample in self.samples)


@dataclass(frozen=True, kw_only=True)
class PackedBatch:
    """Flat tokens of S sequences (T in all), each a prompt followed by its response; no padding.

    Entry t of a per-token array belongs to token t; the hidden state that predicts it is the one
    at t - 1 of the same sequence.
    """

    tokens: np.ndarray  # [T] int64
    cu_seqlens: np.ndarray  # [S + 1] int64, sequence i is tokens[cu_seqlens[i]:cu_seqlens[i + 1]]
    prompt_lengths: np.ndarray  # [S] int64
    logprobs_rollout: np.ndarray  # [T] float32, NaN on prompt tokens and tools' output
    advantages: np.ndarray  # [T] float32, 0 on prompt tokens
    loss_weights: np.ndarray  # [T] float32, 0 on prompts, tools' output and left-out responses
    policy_versions: np.ndarray  # [T] int32, -1 on prompt tokens and tools' output
    mini_batches: tuple[np.ndarray, ...]  # sequence indices of each optimizer update, in order
    rewards: np.ndarray  # [S] float64, shaped
    group_sizes: np.ndarray  # [K] int64, sequences of each group, in order
    experts: tuple[np.ndarray, ...] = ()
    """[m, layers, K] of each sequence (data/routed_experts.py); none where any sequence has none.
    They are not copied into one array: of a large model they are gigabytes."""

    @property
    def num_sequences(self) -> int:
        return len(self.prompt_lengths)

    @property
    def num_response_tokens(self) -> int:
        return int(len(self.tokens) - self.prompt_lengths.sum())


def pack(
    groups: Sequence[Group],
    advantages: Advantages,
    loss_weights: np.ndarray,
    *,
    mini_batch_size: int,
    rewards: np.ndarray,
) -> PackedBatch:
    """Pack the responses of one step's groups, in order.

    Args:
        groups: with S responses in all.
        advantages: [S] of each response, given to all of its tokens; or S arrays with one a token.
        loss_weights: [S] weight of each sampled token of a response.
        mini_batch_size: responses behind one optimizer update.
        rewards: [S] shaped reward of each response, for ranks that make advantages themselves.
    """
    samples = [sample for group in groups for sample in group.samples]
    weights = zip(samples, loss_weights, strict=True)
    return _packed(
        samples,
        advantages,
        [sample.is_sampled * weight for sample, weight in weights],
        rewards=rewards,
        group_sizes=[len(group.samples) for group in groups],
        mini_batch_size=mini_batch_size,
    )


def pack_samples(
    samples: Sequence[Sample],
    advantages: np.ndarray,
    loss_weights: np.ndarray,
    *,
    mini_batch_size: int,
) -> PackedBatch:
    """Pack S responses that need not belong to groups; arguments as for `pack`.

    Each is a group of its own, whose reward is its advantage.
    """
    return _packed(
        samples,
        advantages,
        loss_weights,
        rewards=advantages,
        group_sizes=[1] * len(samples),
        mini_batch_size=mini_batch_size,
    )


def _packed(
    samples: Sequence[Sample],
    advantages: Advantages,
    loss_weights: np.ndarray | Sequence[np.ndarray],
    *,
    rewards: np.ndarray,
    group_sizes: Sequence[int],
    mini_batch_size: int,
) -> PackedBatch:
    prompt_lengths = np.array([len(s.prompt_ids) for s in samples], dtype=np.int64)
    lengths = np.array([len(s.response_ids) for s in samples], dtype=np.int64)
    parts = np.stack([prompt_lengths, lengths], axis=1).ravel()
    is_response = np.repeat(np.tile([False, True], len(samples)), parts)

    def on_response(pieces: Sequence[np.ndarray], fill: float, dtype: DTypeLike) -> np.ndarray:
        """[T]: the pieces behind each other on the response tokens."""
        spread = np.full(len(is_response), fill, dtype=dtype)
        spread[is_response] = np.concatenate(pieces)
        return spread

    return PackedBatch(
        tokens=np.concatenate(
            [ids for s in samples for ids in (np.array(s.prompt_ids), s.response_ids)]
        ).astype(np.int64),
        cu_seqlens=np.concatenate([[0], np.cumsum(prompt_lengths + lengths)]).astype(np.int64),
        prompt_lengths=prompt_lengths,
        logprobs_rollout=on_response([s.logprobs_rollout for s in samples], np.nan, np.float32),
        advantages=on_response(_of_tokens(advantages, lengths), 0.0, np.float32),
        loss_weights=on_response(_of_tokens(loss_weights, lengths), 0.0, np.float32),
        policy_versions=on_response([s.policy_versions for s in samples], NO_VERSION, np.int32),
        mini_batches=mini_batches(group_sizes, mini_batch_size),
        rewards=np.asarray(rewards, dtype=np.float64),
        group_sizes=np.array(group_sizes, dtype=np.int64),
        experts=_of_all([sample.experts for sample in samples]),
    )


def _of_all(experts: Sequence[np.ndarray | None]) -> tuple[np.ndarray, ...]:
    """One a sequence, or none at all."""
    known = tuple(one for one in experts if one is not None)
    return known if len(known) == len(experts) else ()


def _of_tokens(
    values: np.ndarray | Sequence[np.ndarray], lengths: np.ndarray
) -> Sequence[np.ndarray]:
    """Of each response, the value of each of its tokens; `values`: of responses or of tokens."""
    if isinstance(values, np.ndarray):
        return [np.repeat(values, lengths)]
    return values
