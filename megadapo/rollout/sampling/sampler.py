"""Dynamic sampling: request groups and score them until the next batch is full.

DAPO (arXiv 2503.14476) section 3.2. Prompts go to the engines as slots become free, so no request
waits for another. Two properties make the modes: whether groups that miss a batch continue
(`SamplingConfig.carries`), and whether sampling continues beside the update (`overlaps`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from functools import partial
from typing import Any

from megadapo.algorithm.advantages import is_mixed, rewards_differ
from megadapo.codec import decode
from megadapo.data.group import MIN_RESPONSES, Group
from megadapo.data.prompts import PromptStream
from megadapo.errors import CheckpointError, InfraError, SamplingError
from megadapo.observe.config import SavedGroups
from megadapo.rollout.config import SamplingConfig
from megadapo.rollout.episodes.actor import EpisodeHostActor
from megadapo.rollout.episodes.requests import EpisodeRequests
from megadapo.rollout.journal.journal import Journal, group_digest
from megadapo.rollout.sampling.reserve import OpenEntry, PromptHistory, Reserve, SamplerState
from megadapo.rollout.sampling.schedule import SamplingSchedule, Take, WeightPause
from megadapo.rollout.sampling.scoring import ScoringPool, SupportsGenerate, SupportsScore
from megadapo.rollout.sampling.statistics import SampledBatch
from megadapo.rollout.sampling.window import (
    KeepRate,
    Window,
    adapted_lead,
    bounded_lead,
    num_places,
)
from megadapo.rollout.types import OpenGroup, SamplingSettings, response_seeds


def check_failures(
    batch: SampledBatch, config: SamplingConfig, max_share: float, group: Group
) -> None:
    """Check the share of a step's responses that reward functions or environments failed on.

    The share is of a whole batch at least. It is checked after every group, so that a function that
    always fails ends the run before it has used up the prompts.

    Args:
        max_share: largest share, reward.max_failed_share.
        group: the latest group; the share cannot have grown if none of its responses failed.

    Raises:
        InfraError: the share is larger, or a whole batch has failed.
    """
    if not group.failures:
        return
    # a restart is no fault, and must not be the cause of the next one
    num_failed = batch.num_excluded - batch.num_interrupted
    num_scored = sum(group.num_responses for group in batch.stats)
    planned = config.prompts_per_step * config.responses_per_prompt
    share = num_failed / max(planned, num_failed + num_scored)
    if share > max_share or (not num_scored and num_failed >= planned):
        last = group.failures[-1]
        raise InfraError(
            f"reward functions or environments failed on {num_failed} responses of the step, "
            f"{share:.1%} of them, and reward.max_failed_share = {max_share:g}; the last failure "
            f"is of {last.source}: {last.reason}. Nothing of the step is trained on. Mend it or "
            "its server, let it return a score for such responses, or raise "
            "reward.max_failed_share"
        )


def check_enough_groups(
    num_found: int, batch: SampledBatch, config: SamplingConfig, verdict: str
) -> None:
    """Check the number of mixed groups of a batch.

    `verdict`: what says whether a response is correct.

    Raises:
        SamplingError: it is 0, or too small and sampling.on_shortfall is "stop".
    """
    needed = config.prompts_per_step
    if num_found == needed or (num_found and config.on_shortfall == "train"):
        return
    known = [group.num_correct for group in batch.stats if group.num_correct is not None]
    scores = [score for group in batch.stats for score in group.reward_range]
    span = f"{min(scores, default=0.0):g} to {max(scores, default=0.0):g}"
    num_responses = config.responses_per_prompt
    if len(known) == len(batch.stats):
        text = describe_shortfall(num_found, needed, Counter(known), num_responses)
        raise SamplingError(f"{text}\nrewards are from {span}; {verdict} says what is correct")
    raise SamplingError(
        f"the batch has only {num_found} of {needed} groups after {len(batch.stats)} requests: "
        f"in {batch.num_at('equal')} groups the rewards of all responses are equal, up to "
        f"rounding, and no function says what is correct; rewards are from {span}. Use a finer "
        "score or other problems, set right_above in reward.functions, or raise "
        "sampling.responses_per_prompt or sampling.max_asked_per_prompt"
    )


def describe_shortfall(
    num_found: int, num_needed: int, histogram: Mapping[int, int], num_responses: int
) -> str:
    """Return the message for a batch with too few mixed groups, with a histogram and advice.

    `histogram`: number of groups by their number of correct responses.
    """
    num_asked = sum(histogram.values())
    num_wrong = histogram.get(0, 0)
    num_correct = histogram.get(num_responses, 0)
    bars = "\n".join(
        f"  {correct:>3} of {num_responses} correct: {count} groups"
        for correct, count in sorted(histogram.items())
    )
    advice = (
        "the problems are too hard for the model, or the scorer cannot read the answers: check both"
        if num_wrong >= num_correct
        else "the problems are too easy for the model: use harder ones"
    )
    return (
        f"the batch has only {num_found} of {num_needed} groups after {num_asked} requests: "
        f"{num_wrong} groups were all incorrect, {num_correct} all correct\n{bars}\n{advice}, or "
        "raise sampling.responses_per_prompt or sampling.max_asked_per_prompt"
    )


class Sampler:
    """Fills batches from the prompt stream; its state is all that a resumed run needs.

    The caller repeats `turn` until `can_take`, and then calls `take`. Around each publication of
    weights it calls `pause_for_weights` and `resume_sampling`. One thread uses it at a time.
    A group is open until it is settled: scored, and counted in the step's statistics.
    """

    def __init__(
        self,
        engines: SupportsGenerate,
        prompts: PromptStream,
        scorer: SupportsScore,
        config: SamplingConfig,
        *,
        settings: SamplingSettings,
        episodes: EpisodeRequests,
        saved_groups: SavedGroups = 0,
        is_mixed: Callable[[Group], bool] | None = None,
        new_executor: Callable[[], Executor] | None = None,
        journal: Journal[Group] | None = None,
        schedule: SamplingSchedule | None = None,
        max_failed_share: float = 1.0,
        verdict: str = "",
        host: EpisodeHostActor | None = None,
    ) -> None:
        """Start at the first prompt, with an empty reserve.

        Args:
            episodes: the environments of prompts, and the run's seed; seed and prompt index
                determine every response.
            is_mixed: returns whether a group is kept; by default by sampling.accuracy_range.
            new_executor: returns the executor for scoring; by default a thread pool.
            journal: keeps scored groups until a checkpoint holds them.
            schedule: repeats takes and pauses, and records them; used if groups may wait.
            max_failed_share: largest share of a step's responses without a score.
            verdict: what says whether a response is correct, for messages.
        """
        self.config, self._engines = config, engines
        self._is_mixed = is_mixed or partial(_has_accuracy, config)
        self._saved_groups, self._max_failed_share = saved_groups, max_failed_share
        self._verdict = verdict
        self._settings, self._episodes, self._host = settings, episodes, host
        self._journal = journal
        self._digests: dict[int, bytes] = {}
        """Digest of each request since the last weights, by prompt index, if there is a journal."""
        self._schedule = schedule or SamplingSchedule()
        self._history = PromptHistory()
        self._prompts, self._next_index = prompts, 0
        self._pool = ScoringPool(engines, scorer, prompts.at, new_executor)
        self._reserve = Reserve()
        self._unsent: list[int] = []
        """Prompt indices of open groups that the engines do not have."""
        self._held: dict[int, Group] = {}
        """Scored groups that the repeated schedule settles later, by prompt index."""
        self._most_untrained = num_places(config)
        """Largest number of groups of async mode that are open or wait for a batch."""
        self._start_batch(is_ahead=False)

    def _start_batch(self, *, is_ahead: bool) -> None:
        self._batch = SampledBatch(saved_groups=self._saved_groups)
        """The next batch so far."""
        self._window: Window | None = None
        """The window of the next batch; None until its first turn."""
        self._first_index = self._next_index
        """Prompt index at which the next batch begins, if groups cannot wait."""
        self._is_ahead = is_ahead
        """Whether the next batch is for weights that are not published yet."""

    @property
    def step(self) -> int:
        """The step that trains on the next batch."""
        return self._engines.policy_version + 1 + self._is_ahead

    def next_batch(self) -> SampledBatch:
        """Return the next batch when it is complete; errors are those of `turn` and `take`."""
        while not self.can_take:
            self.turn()
        return self.take()

    @property
    def can_take(self) -> bool:
        """Whether the next batch can be taken."""
        window, record = self._window, self._schedule.next
        if window is None:
            return False
        if record is None:
            return window.is_full or (not window.open and not self._wants(window))
        return (self.config.overlaps or not self._pool.open) and self._is_due(Take)

    @property
    def can_pause(self) -> bool:
        """Whether a pause now leaves the next batch as the mode defines it."""
        if not self.config.carries:
            return self.can_take
        return self._schedule.next is None or (not self._pool.open and self._is_due(WeightPause))

    def turn(self, timeout_s: float | None = None) -> bool:
        """Request groups as the engines have capacity for, and settle finished ones.

        It waits `timeout_s` for them, or until there is something to do, and returns whether groups
        are in flight.
        """
        window = self._window = self._window or self._begin()
        never_waits = self.config.carries and self.config.overlaps
        if self.can_take and not never_waits:
            return False
        self._submit(window)
        if not window.is_full and (useless := window.cannot_make_batch()):
            self._discard(window, useless)
        if self._pool.open and (never_waits or not self.can_take):
            for group in self._pool.wait(timeout_s):
                # a restarted run scores a group with failures again
                if self._journal is not None and not group.failures:
                    self._journal.append(self._digests[group.prompt_index], group)
                self._settle(window, group)
                check_failures(self._batch, self.config, self._max_failed_share, group)
            for stopped in self._pool.take_stopped():
                self._reserve.park(stopped.key, stopped.responses)
        if self.config.carries:
            self._batch.count_overdue(window.num_overdue)
        elif window.is_full:
            # the engines are free until the next weights
            self._discard(window)
            self._batch.engines = self._engines.activity()
        return bool(self._pool.open)

    def take(self) -> SampledBatch:
        """Return the next batch; groups that are not in it continue, or are dropped."""
        window, batch, config = self._window, self._batch, self.config
        assert window is not None, "the batch is not complete"
        if config.carries and not config.overlaps:
            self.pause_for_weights()
        kept = [self._reserve.take(index) for index in window.chosen()]
        batch.counts["groups/carried"] = len(window.open)
        left = [group for _, group in sorted(self._reserve.finished.items())]
        if config.carries:
            batch.to_reserve, batch.engines = left, self._engines.activity()
        else:
            self._reserve = Reserve()
            if config.mode == "rounds":
                batch.surplus = left
            elif window.is_full:
                batch.forget_after(kept[-1].prompt_index)
                # as if no later prompt had been drawn
                self._next_index = kept[-1].prompt_index + 1
        self._most_untrained = adapted_lead(config, self._most_untrained, len(left))
        self._sync_journal()
        batch.counts |= self._pool.take_counts()
        batch.stats.sort(key=lambda group: group.prompt_index)
        self._history.end_step(batch.stats)
        check_enough_groups(len(kept), batch, config, self._verdict)
        batch.take(kept)
        if config.carries:
            self._schedule.take(self.step, self._next_index, window.open, kept)
        self._start_batch(is_ahead=config.overlaps)
        return batch

    def pause_for_weights(self) -> None:
        """Stop everything in flight, so that the engines can take weights."""
        for group in self._pool.stop():
            self._reserve.park(group.key, group.responses)
        for index, held in self._held.items():
            self._reserve.park(index, held.responses)
        self._held.clear()
        self._unsent = sorted(self._reserve.open)
        self._sync_journal()

    def resume_sampling(self, policy_version: int, weights: str = "") -> None:
        """Continue with new weights, whose fingerprint is `weights`."""
        self._is_ahead = False
        # no group is in flight, and those that continue are requested again
        self._digests.clear()
        if self._journal is not None:
            self._journal.begin(policy_version, weights)
        if self._host is not None:
            self._host.begin(policy_version, weights)
        if self.config.carries:
            counts = self._reserve.counts(self.config.responses_per_prompt)
            if self._schedule.pause(policy_version, weights, self._next_index, counts):
                self._batch.counts["tokens/recomputed"] += sum(map(sum, counts.values()))

    def close(self) -> None:
        """End all scoring."""
        self._pool.close()

    def state_dict(self) -> SamplerState:
        """Return the position and all waiting groups."""
        window = self._window
        keeps = self.config.carries or (window is not None and window.is_full)
        return SamplerState(
            cursor={
                "next_index": self._next_index if keeps else self._first_index,
                "prompts": self._prompts.state_dict(),
            },
            difficulty=self._history.copy(),
            schedule=self._schedule.position,
            most_untrained=self._most_untrained,
            reserve=self._reserve.copy() if keeps else Reserve(),
            counters=self._batch.copy() if keeps else None,
        )

    def load_state_dict(self, entry: Mapping[str, Any]) -> None:
        """Restore the state that `state_dict` returned, as JSON values.

        Raises:
            CheckpointError: another version of megadapo wrote it.
        """
        try:
            state = decode(SamplerState, entry)
            self._next_index = self._first_index = state.cursor["next_index"]
        except (KeyError, ValueError) as error:
            raise CheckpointError(f"the saved state of sampling is damaged: {error}") from error
        self._history, self._reserve = state.difficulty, state.reserve
        if state.counters is not None:
            self._batch = replace(state.counters, saved_groups=self._saved_groups)
        self._schedule.resume_at(state.schedule)
        self._most_untrained = bounded_lead(self.config, state.most_untrained)
        self._unsent = sorted(self._reserve.open)

    def _begin(self) -> Window:
        """Return the window of the next batch, with all groups that wait for it."""
        window = Window.for_step(self.config, self.step, self._most_untrained)
        for index, group in sorted(self._reserve.finished.items()):
            if window.is_too_old(group.oldest_version):
                self._batch.dropped.append(self._reserve.take(index))
            else:
                window.carry(index, None, self._reserve.versions[index])
        for index, entry in sorted(self._reserve.open.items()):
            window.carry(index, self._keep_rate(index), entry.version)
        if not self._pool.open:
            self._engines.activity()  # reset: earlier activity does not belong to the step
        held, self._held = self._held, {}
        for group in held.values():
            self._settle(window, group)
        return window

    def _is_due(self, kind: type[Take | WeightPause]) -> bool:
        return self._schedule.is_due(kind, self._next_index, self._reserve.open)

    def _submit(self, window: Window) -> None:
        """Submit the groups that continue, and as many new ones as the engines can take."""
        unsent, self._unsent = self._unsent, []
        groups = [group for index in unsent if (group := self._request(window, index)) is not None]
        capacity = self._engines.capacity // self.config.responses_at_once - len(groups)
        capacity = max(capacity, not self._pool.open and not groups)
        while capacity > 0 and self._wants(window):
            index, version = self._next_index, self._engines.policy_version
            self._next_index += 1
            window.ask(index, self._keep_rate(index), version)
            self._reserve.open[index] = OpenEntry(version, ())
            if (group := self._request(window, index)) is not None:
                groups.append(group)
                capacity -= 1
        if groups:
            self._pool.submit(groups)

    def _wants(self, window: Window) -> bool:
        """Return whether to request another group now."""
        record, next_index = self._schedule.next, self._next_index
        if record is not None:
            return next_index < record.next_index
        if window.is_full and not self.config.overlaps:
            return False
        return window.wants(self._keep_rate(next_index), self._engines.policy_version)

    def _keep_rate(self, prompt_index: int) -> KeepRate:
        return self._history.keep_rate(self._prompts.at(prompt_index).id)

    def _request(self, window: Window, prompt_index: int) -> OpenGroup | None:
        """Return the group to submit; None if it has ended or waits for the next weights.

        Seed, prompt index and tokens so far determine it.
        """
        responses = self._reserve.open[prompt_index].responses
        prompt, size = self._prompts.at(prompt_index), self.config.responses_per_prompt
        num_tokens = tuple(len(response.token_ids) for response in responses)
        stop_at = self._schedule.stop_at_tokens(prompt_index)
        if stop_at and stop_at == (num_tokens or (0,) * size):
            return None
        group = OpenGroup(
            key=prompt_index,
            prompt_ids=self._episodes.prompt_ids(prompt),
            seeds=response_seeds(size, self._episodes.seed, "train", prompt_index, prompt.id),
            episode=self._episodes.request(prompt),
            responses=responses,
            settings=self._settings,
            priority=prompt_index,
            stop_at_tokens=stop_at,
        )
        if self._journal is None:
            return group
        digest = self._digests[prompt_index] = group_digest(prompt, group)
        if (scored := self._journal.find(digest)) is None:
            return group
        self._batch.counts["groups/from_journal"] += 1
        self._settle(window, scored)
        return None

    def _sync_journal(self) -> None:
        if self._journal is not None:
            self._journal.sync()

    def _settle(self, window: Window, group: Group) -> None:
        """Count a scored group, unless the repeated schedule counts it later."""
        if not self._schedule.may_settle(group.prompt_index):
            self._held[group.prompt_index] = group
            return
        has_scores = len(group.responses) >= MIN_RESPONSES
        mixed = has_scores and (self.config.selection == "all" or self._is_mixed(group))
        window.finish(group.prompt_index, mixed)
        self._reserve.finish(group, is_mixed=mixed)
        if has_scores:
            self._batch.add(group, is_mixed=mixed)
            self._history.keep_rate(group.prompt.id).add(mixed)
        else:
            self._batch.unscored.append(group)

    def _discard(self, window: Window, prompt_indices: Sequence[int] | None = None) -> None:
        """Stop open groups that no batch needs, by default all."""
        discarded = list(window.open) if prompt_indices is None else prompt_indices
        window.drop(discarded)
        for index in discarded:
            del self._reserve.open[index]
        self._batch.counts["groups/stopped"] += len(discarded)
        self._batch.counts["tokens/stopped"] += self._pool.drop(prompt_indices)


def _has_accuracy(config: SamplingConfig, group: Group) -> bool:
    if group.correct is None:
        return rewards_differ(group.rewards)
    low, high = config.accuracy_range
    return is_mixed(group.correct, min_accuracy=low, max_accuracy=high)
