"""Dynamic sampling: request groups and score them until the next batch is full.

DAPO (arXiv 2503.14476) section 3.2. Prompts go to the engines as slots become free, so no request
waits for another. Two properties make the modes: whether groups that miss a batch continue
(`SamplingConfig.carries`), and whether sampling continues beside the update (`overlaps`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from typing import TYPE_CHECKING, Any

from megadapo.algorithm.advantages import is_mixed
from megadapo.data.group import MIN_RESPONSES, Group, Response
from megadapo.data.prompts import PromptStream
from megadapo.errors import CheckpointError
from megadapo.observe.config import SavedGroups
from megadapo.rollout.config import SamplingConfig
from megadapo.rollout.episodes.actor import EpisodeHostActor
from megadapo.rollout.episodes.requests import EpisodeRequests
from megadapo.rollout.journal.journal import Journal
from megadapo.rollout.sampling.keep_rate import KeepRate
from megadapo.rollout.sampling.prompt_cursor import PromptCursor, PromptHistory
from megadapo.rollout.sampling.requests import GroupRequests
from megadapo.rollout.sampling.reserve import OpenEntry, Reserve, SamplerState
from megadapo.rollout.sampling.sampled_batch import SampledBatch
from megadapo.rollout.sampling.schedule import Cut, Schedule, Take
from megadapo.rollout.sampling.scoring import ScoringPool, SupportsGenerate, SupportsScore
from megadapo.rollout.sampling.shortfall import check_failures, check_size
from megadapo.rollout.sampling.statistics import RejectedGroups, StepCounters
from megadapo.rollout.sampling.window import Window
from megadapo.rollout.types import OpenGroup, SamplingSettings

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Sampler:
    """Fills batches from the prompt stream; its state is all that a resumed run needs.

    The caller repeats `turn` until `can_take`, and then calls `take`. Around each publication of
    weights it calls `cut` and `go_on`. One thread uses it at a time.
    """

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
        schedule: Schedule | None = None,
        max_failed_share: float = 1.0,
        episodes: EpisodeRequests | None = None,
        host: EpisodeHostActor | None = None,
    ) -> None:
        """Start at the first prompt, with an empty reserve.

        Args:
            seed: the run's seed; seed and prompt index determine every response.
            saved_groups: number of groups of each batch to save.
            is_mixed: returns whether a group is kept; by default if its accuracy is within
                sampling.accuracy_range.
            new_executor: returns the executor for scoring; by default a thread pool.
            journal: keeps groups until a checkpoint holds them, and returns those of a killed
                process.
            schedule: repeats takes and cuts, and records them; used if groups may wait.
            max_failed_share: share of a step's responses on which reward functions and
                environments may fail.
            episodes: the environments of prompts; by default all prompts have a single turn.
            host: plays the episodes of the engines' responses.
        """
        self._engines = engines
        self.config = config
        self._saved_groups = saved_groups
        size = config.responses_per_prompt
        episodes = episodes or EpisodeRequests(tokenizer=tokenizer, seed=seed)
        self._requests = GroupRequests(settings, episodes, size, journal, host)
        self._schedule = schedule or Schedule()
        self._max_failed_share = max_failed_share
        self._is_mixed = is_mixed
        self._history = PromptHistory(rest_after=config.rest_after, rest_epochs=config.rest_epochs)
        self._cursor = PromptCursor(prompts, self._history)
        executor = None if new_executor is None else new_executor()
        self._pool = ScoringPool(engines, scorer, self._cursor.prompt, executor)
        self._reserve = Reserve()
        self._window: Window | None = None
        self._counters = StepCounters(rejected=RejectedGroups(saved_groups))
        self._unsent: list[int] = []
        """Open groups to submit."""
        self._held: dict[int, Group] = {}
        """Scored groups that the repeated schedule settles later."""
        self._first_index = 0
        """Prompt index at which the next batch begins, if groups cannot wait."""
        self._num_places = (config.max_staleness + 1) * config.prompts_per_step
        """Number of groups in the batches that may train on the present weights' tokens."""
        self._most_untrained = self._num_places
        """Largest number of groups of async mode that are open or wait for a batch."""
        self._is_ahead = False
        """Whether the next batch is for weights that are not published yet."""

    @property
    def step(self) -> int:
        """The step that trains on the next batch."""
        return self._engines.policy_version + 1 + self._is_ahead

    def next_batch(self) -> SampledBatch:
        """Return prompts_per_step mixed groups.

        Raises:
            SamplingError: max_asked_per_prompt is reached without a mixed group, or with too few
                and `sampling.on_shortfall` is "stop".
            InfraError: an engine failed, or reward functions failed on too many responses.
        """
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
        is_still = self.config.overlaps or not self._pool.open
        return is_still and self._is_due(Take)

    @property
    def can_cut(self) -> bool:
        """Whether the engines can be stopped without another batch than the mode's."""
        if not self.config.carries:
            return self.can_take
        return self._schedule.next is None or (not self._pool.open and self._is_due(Cut))

    def turn(self, timeout_s: float | None = None) -> bool:
        """Request groups as the engines have capacity for, and settle finished ones.

        Args:
            timeout_s: longest wait for the engines; None: until there is something to do.

        Returns:
            Whether groups are in flight.
        """
        if self._window is None:
            self._window = self._begin()
        window = self._window
        goes_on = self.config.carries and self.config.overlaps
        if self.can_take and not goes_on:
            return False
        self._submit(window)
        if not window.is_full and (hopeless := window.cannot_make_batch()):
            self._forget(window, hopeless)
            self._counters.num_tokens_stopped += self._pool.drop(hopeless)
        if self._pool.open and (goes_on or not self.can_take):
            for group in self._pool.wait(timeout_s):
                self._take_scored(window, group)
            for stopped in self._pool.take_stopped():
                self._park(stopped.key, stopped.responses)
        if self.config.carries:
            has_enough = len(window.mixed) >= window.num_needed
            self._counters.count_overdue(window.num_awaited if has_enough else 0)
        if window.is_full and not self.config.carries:
            # the engines are free until the next weights
            self._forget(window, list(window.open))
            self._counters.num_tokens_stopped += self._pool.stop(keep=False).num_tokens
            self._counters.engines = self._engines.activity()
        return bool(self._pool.open)

    def take(self) -> SampledBatch:
        """Return the next batch; groups that are not in it continue, or are dropped.

        Raises:
            SamplingError: there are too few mixed groups.
            OracleError: the batch differs from the one that the run repeats.
        """
        window, counters, config = self._window, self._counters, self.config
        assert window is not None, "the batch is not complete"
        if config.carries and not config.overlaps:
            self.cut()
        chosen, is_full = window.chosen(), window.is_full
        counters.num_carried = len(window.open)
        kept = [self._reserve.take(index) for index in chosen]
        left = [group for _, group in sorted(self._reserve.finished.items())]
        if config.carries:
            counters.to_reserve = left
            counters.engines = self._engines.activity()
        else:
            self._reserve = Reserve()
            if config.mode == "rounds":
                counters.surplus = left
            elif is_full:
                counters.forget_after(chosen[-1])
                self._cursor.rewind(chosen[-1] + 1)
        self._adapt_lead(len(left))
        self._requests.sync()
        counters.num_resting = self._cursor.take_num_skipped()
        counters.reward_seconds = self._pool.take_reward_seconds()
        counters.failures = self._pool.take_failures()
        counters.stats.sort(key=lambda group: group.prompt_index)
        self._history.end_step(counters.stats, self._cursor.epoch)
        check_size(len(kept), counters, config)
        batch = counters.batch(kept, self._saved_groups)
        if config.carries:
            self._schedule.take(self.step, self._cursor.next_index, window.open, kept)
        self._counters = StepCounters(rejected=RejectedGroups(self._saved_groups))
        self._window, self._first_index = None, self._cursor.next_index
        self._is_ahead = config.overlaps
        return batch

    def cut(self) -> None:
        """Stop everything in flight, so that the engines can take weights."""
        for group in self._pool.stop(keep=True).unfinished:
            self._park(group.key, group.responses)
        for index, held in self._held.items():
            self._park(index, held.responses)
        self._held.clear()
        self._unsent = sorted(self._reserve.open)
        self._requests.sync()

    def go_on(self, policy_version: int, weights: str = "") -> None:
        """Continue with new weights, whose fingerprint is `weights`.

        Raises:
            OracleError: weights or numbers of tokens differ from the repeated run.
        """
        self._is_ahead = False
        self._requests.begin(policy_version, weights)
        if not self.config.carries:
            return
        none = (0,) * self.config.responses_per_prompt
        counts = {
            index: tuple(len(one.token_ids) for one in responses) or none
            for index, (_, responses) in self._reserve.open.items()
        }
        if self._schedule.cut(policy_version, weights, self._cursor.next_index, counts):
            self._counters.num_recomputed += sum(map(sum, counts.values()))

    def close(self) -> None:
        """End all scoring."""
        self._pool.close()

    def state_dict(self) -> SamplerState:
        """Return the position and all waiting groups."""
        config, window = self.config, self._window
        cursor = self._cursor.state_dict()
        plain = {
            "cursor": cursor,
            "difficulty": self._history.state_dict(),
            "schedule": self._schedule.position,
        }
        if config.carries or (window is not None and window.is_full):
            return SamplerState(plain, self._reserve.copy(), self._counters.copy())
        cursor |= {"next_index": self._first_index, "skipped": []}
        return SamplerState(plain, Reserve(), None)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state that `state_dict` returned, as JSON values.

        Raises:
            CheckpointError: the state is damaged.
            DataError: the state belongs to other prompts.
        """
        try:
            self._cursor.load_state_dict(state["cursor"])
            self._history.load_state_dict(state["difficulty"])
            self._reserve = Reserve.from_json(state["reserve"])
            if state["counters"] is not None:
                self._counters = StepCounters.from_json(state["counters"], self._saved_groups)
            self._schedule.resume_at(int(state["schedule"]))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"the saved state of sampling is damaged: {error!r}") from error
        self._unsent = sorted(self._reserve.open)
        self._first_index = self._cursor.next_index

    def _begin(self) -> Window:
        """Return the window of the next batch, with all groups that wait for it."""
        config, window = self.config, self._new_window()
        for index, group in sorted(self._reserve.finished.items()):
            if config.carries and self._last_step(group.oldest_version) < self.step:
                self._counters.dropped.append(self._reserve.take(index))
            else:
                window.carry(index, None, self._last_step(self._reserve.versions[index]))
        for index, entry in sorted(self._reserve.open.items()):
            window.carry(index, self._keep_rate(index), self._last_step(entry.version))
        if not self._pool.open:
            self._engines.activity()  # reset: earlier activity does not belong to the step
        for index in [index for index in self._held if self._schedule.may_settle(index)]:
            self._add(window, self._held.pop(index))
        return window

    def _new_window(self) -> Window:
        """Return the window of the next batch, without groups."""
        return Window.for_step(self.config, self.step, self._most_untrained)

    def _adapt_lead(self, num_left: int) -> None:
        """Request less in advance if batches wait for the trainer, and more if it waits for them.

        Otherwise fast engines would make all tokens as old as max_staleness allows.
        """
        size, most = self.config.prompts_per_step, self._most_untrained
        if num_left > size // 2:
            self._most_untrained = max(size, most - num_left // 2)
        elif num_left <= size // 8:
            self._most_untrained = min(self._num_places, most + size // 2)

    def _last_step(self, version: float) -> int:
        """Return the last step that may train on tokens of this version."""
        return int(version) + self.config.max_staleness + 1

    def _wants(self, window: Window) -> bool:
        record, next_index = self._schedule.next, self._cursor.next_index
        if record is not None:
            return next_index < record.next_index
        last_step = self._last_step(self._engines.policy_version)
        return window.wants(self._keep_rate(next_index), last_step)

    def _is_due(self, kind: type[Take | Cut]) -> bool:
        return self._schedule.is_due(kind, self._cursor.next_index, self._reserve.open)

    def _submit(self, window: Window) -> None:
        """Submit the groups that continue, and as many new ones as the engines can take."""
        unsent, self._unsent = self._unsent, []
        groups = [group for index in unsent if (group := self._to_send(window, index)) is not None]
        capacity = self._engines.capacity // self.config.responses_at_once - len(groups)
        capacity = max(capacity, not self._pool.open and not groups)
        while capacity > 0 and not self._is_enough(window) and self._wants(window):
            index = self._cursor.draw()
            version = self._engines.policy_version
            window.ask(index, self._keep_rate(index), self._last_step(version))
            self._reserve.open[index] = OpenEntry(version, ())
            if (group := self._to_send(window, index)) is not None:
                groups.append(group)
                capacity -= 1
        if groups:
            self._pool.submit(groups)

    def _is_enough(self, window: Window) -> bool:
        """Return whether a batch without surplus is full."""
        return window.is_full and not self.config.overlaps and self._schedule.next is None

    def _to_send(self, window: Window, prompt_index: int) -> OpenGroup | None:
        """Return the group to submit; None if it has ended or stays as it is until the next cut."""
        prompt = self._cursor.prompt(prompt_index)
        responses = self._reserve.open[prompt_index].responses
        until = self._schedule.until(prompt_index)
        group = self._requests.make(prompt_index, prompt, responses, until)
        if group is None:
            return None
        finished = self._requests.find(prompt_index)
        if finished is None:
            return group
        self._counters.num_from_journal += 1
        self._settle(window, finished)
        return None

    def _park(self, prompt_index: int, responses: tuple[Response, ...]) -> None:
        """Keep the tokens of a group that the engines have stopped."""
        version = self._reserve.open[prompt_index].version
        num_tokens = sum(len(one.token_ids) for one in responses)
        self._reserve.open[prompt_index] = OpenEntry(version, responses if num_tokens else ())

    def _forget(self, window: Window, prompt_indices: Sequence[int]) -> None:
        """Count open groups as stopped, which the batch does not need."""
        window.drop(prompt_indices)
        for index in prompt_indices:
            del self._reserve.open[index]
        self._counters.num_stopped += len(prompt_indices)

    def _take_scored(self, window: Window, group: Group) -> None:
        self._requests.keep(group)
        self._settle(window, group)
        if group.failures:
            share = self._max_failed_share
            check_failures(self._counters, self.config, share, group.failures[-1])

    def _settle(self, window: Window, group: Group) -> None:
        """Count a scored group, or hold it back until the repeated schedule counts it."""
        if not self._schedule.may_settle(group.prompt_index):
            self._held[group.prompt_index] = group
        else:
            self._add(window, group)

    def _add(self, window: Window, group: Group) -> None:
        if len(group.responses) < MIN_RESPONSES:
            # it says nothing about its prompt
            window.finish(group.prompt_index, is_mixed=False)
            self._reserve.finish(group, is_mixed=False)
            self._counters.unscored.append(group)
            return
        config = self.config
        if config.selection == "all":
            mixed = True
        elif self._is_mixed is not None:
            mixed = self._is_mixed(group)
        else:
            low, high = config.accuracy_range
            mixed = is_mixed(group.correct, min_accuracy=low, max_accuracy=high)
        window.finish(group.prompt_index, mixed)
        self._reserve.finish(group, is_mixed=mixed)
        self._counters.add(group, is_mixed=mixed)
        self._history.keep_rate(group.prompt.id).add(mixed)

    def _keep_rate(self, prompt_index: int) -> KeepRate:
        return self._history.keep_rate(self._cursor.prompt(prompt_index).id)
