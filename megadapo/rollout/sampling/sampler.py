"""Dynamic sampling: request groups and score them until the batch is full.

DAPO (arXiv 2503.14476) section 3.2. Prompts go to the engines as slots become free, so no request
waits for another. Which groups are in the batch depends only on the order of the prompts.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from megadapo.algorithm.advantages import is_mixed
from megadapo.data.group import MIN_RESPONSES, Failure, Group, Response
from megadapo.data.prompts import PromptStream, render
from megadapo.errors import CheckpointError, InfraError, SamplingError
from megadapo.observe.config import SavedGroups
from megadapo.rollout.config import SamplingConfig
from megadapo.rollout.journal.journal import Journal, group_digest
from megadapo.rollout.sampling.plans import KeepRate, PartialPlan, Plan, RoundsPlan, SyncPlan
from megadapo.rollout.sampling.prompt_cursor import PromptCursor, PromptHistory
from megadapo.rollout.sampling.reserve import Reserve, decode_unfinished, encode_unfinished
from megadapo.rollout.sampling.sampled_batch import SampledBatch, decode_batch, encode_batch
from megadapo.rollout.sampling.scoring import ScoringPool, SupportsGenerate, SupportsScore
from megadapo.rollout.sampling.step import (
    RejectedGroups,
    SamplingStep,
    StepCounters,
    accuracy_histogram,
    describe_shortfall,
)
from megadapo.rollout.types import OpenGroup, SamplingSettings, response_seeds

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Sampler:
    """Fills batches from the prompt stream; its state is all that a resumed run needs."""

    def __init__(
        self,
        engines: SupportsGenerate,
        prompts: PromptStream,
        scorer: SupportsScore,
        config: SamplingConfig,
        *,
        settings: SamplingSettings,
        tokenizer: PreTrainedTokenizerBase,
        seed: int,
        saved_groups: SavedGroups = 0,
        is_mixed: Callable[[Group], bool] | None = None,
        new_executor: Callable[[], Executor] | None = None,
        journal: Journal | None = None,
        max_failed_share: float = 1.0,
    ) -> None:
        """Start at the first prompt, with an empty reserve.

        Args:
            seed: the run's seed; seed and prompt index determine every response.
            saved_groups: number of groups of each batch to save.
            is_mixed: returns whether a group is kept; by default if its accuracy is within
                sampling.accuracy_range.
            new_executor: returns the executor for a step's scoring; by default a thread pool.
            journal: keeps groups until a checkpoint holds them, and returns those of a killed
                process.
            max_failed_share: share of a step's responses on which reward functions may fail.
        """
        self._engines = engines
        self._scorer = scorer
        self._config = config
        self._settings = settings
        self._tokenizer = tokenizer
        self._seed = seed
        self._saved_groups = saved_groups
        self._new_executor = new_executor
        self._journal = journal
        self._max_failed_share = max_failed_share
        self._is_mixed = is_mixed
        self._history = PromptHistory(rest_after=config.rest_after, rest_epochs=config.rest_epochs)
        self._cursor = PromptCursor(prompts, self._history)
        self._reserve = Reserve(config.reserve_size)
        self._unfinished: dict[int, tuple[Response, ...]] = {}
        """Responses so far of the groups that continue in the next step, by prompt index."""

    def next_batch(self) -> SampledBatch:
        """Return prompts_per_step mixed groups.

        If groups may wait for a later step, the batch depends on the engines' speed. The journal
        then keeps the whole step, so that a run that repeats it after a kill trains on the same
        batch.

        Raises:
            SamplingError: max_asked_per_prompt is reached without a mixed group, or with too few
                and `sampling.on_shortfall` is "stop".
            InfraError: an engine failed, or reward functions failed on too many responses.
        """
        if self._journal is None or not self._config.follows_speed:
            return self._sample()
        digest = self._position_digest()
        known = self._journal.find(digest)
        if known is not None:
            self.load_state_dict(known["state"])
            batch = decode_batch(known["batch"])
            return replace(batch, num_from_journal=batch.num_sampled)
        batch = self._sample()
        entry = {"batch": encode_batch(batch), "state": self.state_dict()}
        self._journal.append_step(digest, entry)
        return batch

    def wait(self) -> None:
        """Do nothing; nothing is sampled between calls of `next_batch`."""

    def state_dict(self) -> dict[str, Any]:
        """Return the position and all waiting groups as JSON values."""
        return {
            "cursor": self._cursor.state_dict(),
            "difficulty": self._history.state_dict(),
            "reserve": self._reserve.state_dict(),
            "unfinished": encode_unfinished(self._unfinished),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state that `state_dict` returned.

        Raises:
            CheckpointError: the state is damaged.
            DataError: the state belongs to other prompts.
        """
        try:
            self._cursor.load_state_dict(state["cursor"])
            self._history.load_state_dict(state["difficulty"])
            self._reserve.load_state_dict(state["reserve"])
            self._unfinished = decode_unfinished(state["unfinished"])
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"the saved state of sampling is damaged: {error!r}") from error

    def _sample(self) -> SampledBatch:
        self._engines.activity()  # reset: earlier activity does not belong to the step
        counters = StepCounters(rejected=RejectedGroups(self._saved_groups))
        reserved = self._take_reserved(counters)
        partial = self._config.mode == "partial"
        executor = None if self._new_executor is None else self._new_executor()
        with ScoringPool(self._engines, self._scorer, self._cursor.prompt, executor) as pool:
            plan = self._plan(self._config.prompts_per_step - (0 if partial else len(reserved)))
            step = SamplingStep(plan=plan, pool=pool, counters=counters)
            if partial:
                self._resume(step, reserved)
            while not step.plan.is_full:
                self._submit(step)
                step.drop_unneeded()
                if step.plan.is_full or not pool.open:
                    break
                for group in pool.wait():
                    self._take(step, group)
            stopped = step.stop(keep=partial)
            self._unfinished |= {group.key: group.responses for group in stopped}
        if self._journal is not None:
            self._journal.sync()
        counters.reward_seconds = pool.reward_seconds
        counters.engines = self._engines.activity()
        return self._finish(step, [] if partial else reserved)

    def _plan(self, num_needed: int) -> Plan:
        config = self._config
        max_asked = config.max_asked_per_step
        if config.mode == "rounds":
            return RoundsPlan(num_needed, max_asked, round_size=config.round_size)
        if config.mode == "partial":
            return PartialPlan(
                num_needed,
                max_asked,
                num_usable=num_needed + config.max_staleness * config.prompts_per_step // 2,
            )
        if config.selection == "all":
            # every group is kept, so no surplus is needed
            return RoundsPlan(num_needed, max_asked, round_size=num_needed)
        return SyncPlan(num_needed, max_asked)

    def _take_reserved(self, counters: StepCounters) -> list[Group]:
        """Return the reserve's first groups, and count too old ones as dropped."""
        oldest = self._engines.policy_version - self._config.sampler_staleness
        partial = self._config.mode == "partial"
        limit = len(self._reserve) if partial else self._config.prompts_per_step
        groups, expired = self._reserve.take(limit, oldest_version=oldest)
        counters.dropped += expired
        return groups

    def _resume(self, step: SamplingStep, reserved: Sequence[Group]) -> None:
        """Continue a partial step with finished and unfinished groups of the step before.

        Both kinds are added before anything is submitted. Otherwise younger groups could fill the
        batch before groups that are due.
        """
        plan = step.plan
        assert isinstance(plan, PartialPlan), "only partial rollouts leave unfinished groups"
        for group in reserved:
            plan.add_reserved(group.prompt_index)
            step.kept[group.prompt_index] = group
        due = self._engines.policy_version - self._config.sampler_staleness
        unfinished = [self._open(*entry) for entry in sorted(self._unfinished.items())]
        for one in unfinished:
            oldest = min((response.oldest_version for response in one.responses), default=math.inf)
            plan.resume(one.key, self._keep_rate(one.key), due=oldest <= due)
        if unfinished and not plan.is_full:
            self._unfinished = {}
            step.pool.submit([one for one in unfinished if not self._recall(step, one)])

    def _submit(self, step: SamplingStep) -> None:
        """Submit as many groups as the plan wants and the engines have capacity for."""
        capacity = self._engines.capacity // self._config.responses_at_once
        capacity = max(capacity, not step.pool.open)
        if not capacity:
            return
        groups: list[OpenGroup] = []
        while len(groups) < capacity and not step.plan.is_full:
            if not step.plan.wants(self._keep_rate(self._cursor.next_index)):
                break
            prompt_index = self._cursor.draw()
            step.plan.ask(prompt_index, self._keep_rate(prompt_index))
            group = self._open(prompt_index)
            if not self._recall(step, group):
                groups.append(group)
        if groups:
            step.pool.submit(groups)

    def _recall(self, step: SamplingStep, group: OpenGroup) -> bool:
        """Take the finished group from the journal; return False if it is not there."""
        if self._journal is None:
            return False
        digest = group_digest(self._cursor.prompt(group.key), group)
        step.digests[group.key] = digest
        finished = self._journal.find_group(digest)
        if finished is None:
            return False
        step.counters.num_from_journal += 1
        self._add(step, finished)
        return True

    def _take(self, step: SamplingStep, group: Group) -> None:
        # a restarted run scores a group with failures again
        if self._journal is not None and not group.failures:
            self._journal.append_group(step.digests[group.prompt_index], group)
        if len(group.responses) < MIN_RESPONSES:
            step.leave_out(group)
        else:
            self._add(step, group)
        if group.failures:
            self._check_failures(step.counters, group.failures[-1])

    def _check_failures(self, counters: StepCounters, last: Failure) -> None:
        """Raise InfraError if reward functions failed on too many responses of a step.

        It compares with a whole batch at least, and not at the end of the step: a function that
        always fails must not use up the prompts.
        """
        num_failed = counters.num_excluded
        num_scored = sum(group.num_responses for group in counters.stats)
        planned = self._config.prompts_per_step * self._config.responses_per_prompt
        share = num_failed / max(planned, num_failed + num_scored)
        if share > self._max_failed_share:
            raise InfraError(
                f"reward functions failed on {num_failed} responses of the step, {share:.1%} of "
                f"them, and reward.max_failed_share = {self._max_failed_share:g}; the last one is "
                f"{last.function}: {last.reason}. Nothing of the step is trained on. Mend the "
                "function or its server, or raise reward.max_failed_share"
            )

    def _add(self, step: SamplingStep, group: Group) -> None:
        config = self._config
        if config.selection == "all":
            mixed = True
        elif self._is_mixed is not None:
            mixed = self._is_mixed(group)
        else:
            low, high = config.accuracy_range
            mixed = is_mixed(group.correct, min_accuracy=low, max_accuracy=high)
        step.add(group, is_mixed=mixed)
        self._history.keep_rate(group.prompt.id).add(mixed)

    def _keep_rate(self, prompt_index: int) -> KeepRate:
        return self._history.keep_rate(self._cursor.prompt(prompt_index).id)

    def _open(self, prompt_index: int, responses: tuple[Response, ...] = ()) -> OpenGroup:
        prompt = self._cursor.prompt(prompt_index)
        num_responses = self._config.responses_per_prompt
        return OpenGroup(
            key=prompt_index,
            prompt_ids=tuple(render(prompt, self._tokenizer)),
            seeds=response_seeds(num_responses, self._seed, "train", prompt_index, prompt.id),
            responses=responses,
            settings=self._settings,
            priority=prompt_index,
        )

    def _finish(self, step: SamplingStep, reserved: Sequence[Group]) -> SampledBatch:
        """Return the batch, keep surplus groups, and add the step to the prompts' history."""
        chosen, counters = step.plan.chosen(), step.counters
        if step.plan.is_full and self._config.discards_surplus:
            counters.forget_after(chosen[-1])
            self._cursor.rewind(chosen[-1] + 1)
        else:
            self._keep_surplus(step.surplus(chosen), counters)
            self._cursor.requeue(step.stopped)
        counters.num_resting = self._cursor.take_num_skipped()
        self._history.end_step(counters.stats, self._cursor.epoch)
        kept = [*reserved, *(step.kept[index] for index in chosen)]
        kept.sort(key=lambda group: group.prompt_index)
        self._check_size(kept, counters)
        version = self._engines.policy_version
        stale = [group for group in kept if group.oldest_version < version]
        return counters.batch(kept, stale, self._saved_groups)

    def _keep_surplus(self, surplus: Sequence[Group], counters: StepCounters) -> None:
        if self._config.mode == "rounds":
            counters.surplus += surplus
            return
        num_stored = self._reserve.put(surplus)
        counters.to_reserve += surplus[:num_stored]
        counters.dropped += surplus[num_stored:]

    def _check_size(self, kept: Sequence[Group], counters: StepCounters) -> None:
        needed = self._config.prompts_per_step
        if len(kept) == needed or (kept and self._config.on_shortfall == "train"):
            return
        histogram = accuracy_histogram(counters.stats)
        num_responses = self._config.responses_per_prompt
        raise SamplingError(describe_shortfall(len(kept), needed, histogram, num_responses))

    def _position_digest(self) -> bytes:
        """Return a digest of the position and the settings, given the weights."""
        state = self.state_dict()
        waiting = [
            [entry["prompt_index"] for entry in state[key]] for key in ("reserve", "unfinished")
        ]
        config = self._config.model_dump(mode="json")
        name = json.dumps([config, state["cursor"], waiting], sort_keys=True)
        return hashlib.sha256(name.encode()).digest()
