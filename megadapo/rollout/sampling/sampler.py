"""Dynamic sampling: questions go out and come back scored until the batch is full.

DAPO (arXiv 2503.14476) section 3.2. Prompts go to the engines as slots get free, so that none
waits for another; which groups make the batch follows from the order they were asked in alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from megadapo.algorithm.advantages import is_mixed
from megadapo.data.batch import Group
from megadapo.data.prompts import PromptStream, render
from megadapo.errors import CheckpointError, SamplingError
from megadapo.observe.config import SavedGroups
from megadapo.rollout.config import SamplingConfig
from megadapo.rollout.journal.journal import Journal
from megadapo.rollout.sampling.asking import KeepRate
from megadapo.rollout.sampling.difficulty import Difficulty
from megadapo.rollout.sampling.drawing import PromptCursor
from megadapo.rollout.sampling.plans import PartialPlan, Plan, RoundsPlan, SyncPlan
from megadapo.rollout.sampling.reserve import Reserve, Unfinished
from megadapo.rollout.sampling.sampled_batch import (
    GroupStats,
    RejectedGroups,
    SampledBatch,
    StepCounters,
    accuracy_histogram,
)
from megadapo.rollout.sampling.scoring import (
    Answer,
    PromptRequest,
    ScoringPool,
    SupportsGenerate,
    SupportsScore,
)
from megadapo.rollout.sampling.selection import describe_shortfall
from megadapo.rollout.sampling.step import Step, group_of
from megadapo.rollout.types import SamplingSettings, response_seeds

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
        scoring: Callable[[], Executor] | None = None,
        journal: Journal | None = None,
    ) -> None:
        """Start at the first prompt, with an empty reserve.

        Args:
            seed: the run's; with a group's place in asking order it decides every response.
            saved_groups: how many groups each batch names for being saved.
            is_mixed: which groups train; by default those within the bounds of accuracy.
            scoring: makes what a step's groups are scored in; by default the scorer's threads.
            journal: where groups are kept that no checkpoint holds yet, and looked for before they
                are asked for; None: nowhere.
        """
        self._engines = engines
        self._scorer = scorer
        self._config = config
        self._settings = settings
        self._tokenizer = tokenizer
        self._seed = seed
        self._saved_groups = saved_groups
        self._scoring = scoring
        self._journal = journal
        self._has_signal = is_mixed or self._is_mixed
        self._difficulty = Difficulty(rest_after=config.rest_after, rest_epochs=config.rest_epochs)
        self._drawing = PromptCursor(prompts, self._difficulty)
        self._reserve = Reserve(config.reserve_size)
        self._unfinished: list[Unfinished] = []

    def next_batch(self) -> SampledBatch:
        """Return prompts_per_step groups with a signal.

        Raises:
            SamplingError: the bound on groups asked for was met with too few, and either none at
                all was found or `sampling.on_shortfall` is "stop".
            InfraError: an engine failed.
        """
        self._engines.activity()  # what came before does not belong to the step
        tally = StepCounters(thrown_away=RejectedGroups(self._saved_groups))
        reserved = self._take_reserved(tally)
        pools = self._config.mode == "partial"
        executor = None if self._scoring is None else self._scoring()
        with ScoringPool(self._engines, self._scorer, executor) as inquiry:
            plan = self._plan(self._config.prompts_per_step - (0 if pools else len(reserved)))
            step = Step(plan=plan, inquiry=inquiry, tally=tally)
            if pools:
                self._go_on(step, reserved)
            while not step.plan.is_full:
                self._ask(step)
                step.drop_hopeless()
                if step.plan.is_full or not inquiry.open:
                    break
                for answer in inquiry.answers():
                    self._take(step, answer)
            self._unfinished += step.stop(keep=pools)
        if self._journal is not None:
            self._journal.end_step()
        tally.reward_seconds = inquiry.reward_seconds
        tally.engines = self._engines.activity()
        return self._finish(step, [] if pools else reserved)

    def wait(self) -> None:
        """Nothing is sampled behind the caller's back."""

    def state_dict(self) -> dict[str, Any]:
        """Return where sampling stands, as JSON can hold it; tokens that wait included."""
        return {
            "drawing": self._drawing.state_dict(),
            "difficulty": self._difficulty.state_dict(),
            "reserve": self._reserve.state_dict(),
            "unfinished": [entry.to_json() for entry in self._unfinished],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state_dict` was taken.

        Raises:
            CheckpointError: the state is damaged.
            DataError: it belongs to other prompts.
        """
        try:
            self._drawing.load_state_dict(state["drawing"])
            self._difficulty.load_state_dict(state["difficulty"])
            self._reserve.load_state_dict(state["reserve"])
            self._unfinished = [Unfinished.from_json(entry) for entry in state["unfinished"]]
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"the saved state of sampling is damaged: {error!r}") from error

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
            # no group can come back for nothing, so none has to be asked for beyond the batch
            return RoundsPlan(num_needed, max_asked, round_size=num_needed)
        return SyncPlan(num_needed, max_asked)

    def _take_reserved(self, tally: StepCounters) -> list[Group]:
        """The reserve's groups, oldest first, without those that have grown too old."""
        oldest = self._engines.policy_version - self._config.sampler_staleness
        partial = self._config.mode == "partial"
        limit = len(self._reserve) if partial else self._config.prompts_per_step
        groups, expired = self._reserve.take(limit, oldest_version=oldest)
        tally.dropped += expired
        return groups

    def _go_on(self, step: Step, reserved: Sequence[Group]) -> None:
        """Go on where the step before was stopped: with what is ready, and what is unfinished.

        Both are looked at together, or groups that are due could find the batch full of younger
        ones.
        """
        plan, unfinished = step.plan, sorted(self._unfinished, key=lambda entry: entry.order)
        assert isinstance(plan, PartialPlan), "only partial rollouts leave anything unfinished"
        for group in reserved:
            plan.hold(group.order)
            step.kept[group.order] = group
        due = self._engines.policy_version - self._config.sampler_staleness
        for entry in unfinished:
            estimate = self._estimate(entry.order)
            plan.carry(entry.order, estimate, due=entry.oldest_version <= due)
        if unfinished and not plan.is_full:
            self._unfinished = []
            questions = [self._question(entry.order, entry) for entry in unfinished]
            step.inquiry.ask([q for q in questions if not self._recall(step, q)], self._settings)

    def _ask(self, step: Step) -> None:
        """Ask for as many groups as the plan wants and the engines have room for."""
        capacity = self._engines.capacity // self._config.responses_at_once
        capacity = max(capacity, not step.inquiry.open)
        if not capacity:
            return
        questions: list[PromptRequest] = []
        while len(questions) < capacity and not step.plan.is_full:
            if not step.plan.wants(self._estimate(self._drawing.next_order)):
                break
            order = self._drawing.draw()
            step.plan.ask(order, self._estimate(order))
            question = self._question(order)
            if not self._recall(step, question):
                questions.append(question)
        if self._config.longest_first:
            questions.sort(key=lambda one: self._expected_length(one.key), reverse=True)
        if questions:
            step.inquiry.ask(questions, self._settings)

    def _recall(self, step: Step, question: PromptRequest) -> bool:
        """Take the group of a question from the journal, where it is in there."""
        found = None if self._journal is None else self._journal.find(question, self._settings)
        if found is None:
            return False
        group, outcome = found
        step.tally.num_from_journal += 1
        # what a signal is may have changed
        self._settle(step, group, replace(outcome, is_mixed=self._keeps(group)))
        return True

    def _take(self, step: Step, answer: Answer) -> None:
        group, response = group_of(answer), answer.response
        outcome = GroupStats.of(
            group,
            is_mixed=self._keeps(group),
            seconds=response.seconds,
            responses=response.responses,
        )
        if self._journal is not None:
            self._journal.append(answer.question, self._settings, group, outcome)
        self._settle(step, group, outcome)

    def _settle(self, step: Step, group: Group, outcome: GroupStats) -> None:
        step.settle(group, outcome)
        self._difficulty.see(group.prompt.id, outcome.is_mixed)

    def _estimate(self, order: int) -> KeepRate:
        """The yield of prompts like the one at this place."""
        return self._difficulty.estimate(self._drawing.prompt(order).id)

    def _expected_length(self, order: int) -> float:
        return self._difficulty.mean_length(self._drawing.prompt(order).id)

    def _question(self, order: int, unfinished: Unfinished | None = None) -> PromptRequest:
        prompt = self._drawing.prompt(order)
        return PromptRequest(
            key=order,
            prompt=prompt,
            prompt_ids=tuple(render(prompt, self._tokenizer)),
            seeds=response_seeds(
                self._config.responses_per_prompt, self._seed, "train", order, prompt.id
            ),
            priority=order,
            begun=() if unfinished is None else unfinished.responses,
        )

    def _keeps(self, group: Group) -> bool:
        return self._config.selection == "all" or self._has_signal(group)

    def _is_mixed(self, group: Group) -> bool:
        return is_mixed(
            group.correct,
            min_accuracy=self._config.min_accuracy,
            max_accuracy=self._config.max_accuracy,
        )

    def _finish(self, step: Step, reserved: Sequence[Group]) -> SampledBatch:
        """The batch, with surplus groups put where they belong and all estimates brought up."""
        chosen = step.plan.chosen()
        if step.plan.is_full and self._config.forgets_surplus:
            step.tally.forget_after(chosen[-1])
            self._drawing.begin_at(chosen[-1] + 1)
        else:
            self._put_aside(step.surplus(chosen), step.tally)
            self._drawing.requeue(step.stopped)
        step.tally.num_resting = self._drawing.take_num_resting()
        self._difficulty.end_step(step.tally.outcomes, self._drawing.epoch)
        kept = [*reserved, *(step.kept[order] for order in chosen)]
        kept.sort(key=lambda group: group.order)
        self._check(kept, step.tally)
        version = self._engines.policy_version
        stale = [group for group in kept if group.oldest_version < version]
        return step.tally.batch(kept, stale, self._saved_groups)

    def _put_aside(self, surplus: Sequence[Group], tally: StepCounters) -> None:
        """Keep surplus groups for the next step, as far as there is room."""
        if self._config.mode == "rounds":
            tally.surplus += surplus
            return
        num_stored = self._reserve.put(surplus)
        tally.to_reserve += surplus[:num_stored]
        tally.dropped += surplus[num_stored:]

    def _check(self, kept: Sequence[Group], tally: StepCounters) -> None:
        needed = self._config.prompts_per_step
        if len(kept) == needed or (kept and self._config.on_shortfall == "train"):
            return
        raise SamplingError(
            describe_shortfall(
                len(kept),
                needed,
                accuracy_histogram(tally.outcomes),
                self._config.responses_per_prompt,
            )
        )
