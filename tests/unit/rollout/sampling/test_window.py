"""The window: batches that depend on who finishes first, and too few or too many requests."""

import itertools
import math
import random
from dataclasses import dataclass, field

import pytest

from megadapo.rollout.config import SamplingConfig
from megadapo.rollout.sampling.window import (
    ExpectedMixed,
    KeepRate,
    Window,
    adapted_lead,
    num_places,
    should_oversample,
    would_go_stale,
)

ANY = KeepRate()


@dataclass
class Step:
    """All that has happened in a step, and the rules of its mode as functions of it."""

    mode: str
    needed: int
    limit: int
    size: int
    """Groups of a round."""
    staleness: int
    asked: list[int] = field(default_factory=list)
    open: list[int] = field(default_factory=list)
    due: set[int] = field(default_factory=set)
    finished: dict[int, bool] = field(default_factory=dict)
    """Whether each finished group is mixed."""
    most_open: int = 1

    @property
    def mixed(self) -> list[int]:
        return sorted(index for index, is_mixed in self.finished.items() if is_mixed)

    @property
    def is_in_a_round(self) -> bool:
        return len(self.asked) < self.limit and len(self.asked) % self.size > 0

    def chosen(self) -> list[int]:
        if self.mode != "sync":
            return self.mixed[: self.needed]
        # a batch of the groups that finish first would be one of short responses
        whole = itertools.takewhile(self.finished.__contains__, self.asked)
        return [index for index in whole if self.finished[index]][: self.needed]

    def is_full(self) -> bool:
        if len(self.chosen()) < self.needed:
            return False
        match self.mode:
            case "rounds":
                return not self.open and not self.is_in_a_round
            case "partial":
                return self.due.isdisjoint(self.open)
        return True

    def useless(self) -> list[int]:
        if self.mode != "sync" or len(self.mixed) < self.needed:
            return []
        last = self.mixed[self.needed - 1]
        return [index for index in self.open if index > last]

    def wants(self) -> bool:
        if len(self.asked) >= self.limit:
            return False
        if self.mode == "rounds":
            return self.is_in_a_round or not self.open
        expected, num_mixed = expected_mixed(len(self.open), ANY), len(self.mixed)
        if self.mode == "partial":
            usable = self.needed + self.staleness * self.needed // 2
            return not would_go_stale(usable, num_mixed, expected)
        missing = self.needed - num_mixed
        return should_oversample(missing, expected, ANY, num_at_once=self.most_open)


def step_and_window(source: random.Random) -> tuple[Step, Window]:
    """Return a step of a random mode, maybe with carried groups, and the window in this mode."""
    needed, limit = source.randint(1, 6), source.randint(6, 40)
    mode, staleness = source.choice(["sync", "rounds", "partial"]), source.randint(1, 3)
    step = Step(mode, needed, limit, source.randint(needed, limit), staleness)
    if mode != "partial":
        return step, Window(needed, limit, round_size=step.size if mode == "rounds" else None)
    window = Window(needed, limit, step=5, max_staleness=staleness)
    for index in range(source.randint(0, 5)):
        if source.random() < 0.5:
            step.finished[index] = True
            window.carry(index, None, 4)
        else:
            version = source.randint(4 - staleness, 4)
            step.open.append(index)
            step.due |= {index} if version == 4 - staleness else set()
            window.carry(index, ANY, version)
    return step, window


@pytest.mark.parametrize("part", range(10))
def test_window_follows_the_rule_of_its_mode(part):
    """On 10,000 random orders of finishing."""
    for seed in range(1000 * part, 1000 * (part + 1)):
        source = random.Random(seed)
        step, window = step_and_window(source)
        indices = itertools.count(10)
        while not step.is_full():
            wants = step.wants()
            assert not window.is_full and window.wants(ANY, 4) == wants
            if wants and (not step.open or source.random() < 0.8):
                step.asked.append(index := next(indices))
                step.open.append(index)
                step.most_open = max(step.most_open, len(step.open))
                window.ask(index, ANY, 4)
                continue
            useless = step.useless()
            assert sorted(window.cannot_make_batch()) == useless
            step.open = [index for index in step.open if index not in useless]
            window.drop(useless)
            assert list(window.open) == step.open
            if not step.open:
                break
            done, is_mixed = source.choice(step.open), source.random() < 0.4
            step.open.remove(done)
            step.finished[done] = is_mixed
            window.finish(done, is_mixed)
        assert window.is_full == step.is_full() and window.chosen() == step.chosen()


def test_a_batch_leaves_room_for_groups_that_are_due_soon():
    """Otherwise the next batch would have more due groups than places, and drop some."""
    window = Window(2, 100, step=5, max_staleness=2, most_untrained=6)
    for index in (1, 2, 3):
        window.carry(index, ANY, 3)
    window.carry(4, None, 4)
    window.carry(5, None, 4)
    assert not window.is_full and window.num_awaited == 3
    window.finish(2, True)
    assert window.is_full and window.chosen() == [2, 4]


@pytest.mark.parametrize(("mixed", "fewest", "most"), [(10**6, 128, 128), (35 * 10**4, 250, 400)])
def test_requests_leave_a_place_for_each_mixed_group(mixed, fewest, most):
    """Without it groups are dropped; one for each open group leaves engines without work."""
    rate = keep_rate(10**6, mixed)
    for seed in range(200):
        window = Window(64, 1000, step=5, max_staleness=2, most_untrained=1000)
        index = 0
        while window.wants(rate, 4):
            window.ask(index, rate, 4)
            index += 1
        assert fewest <= index <= most
        source, true_rate = random.Random(seed), min(1.0, 1.25 * rate.value)
        assert sum(source.random() < true_rate for _ in range(index)) <= 192


def test_batches_leave_out_the_last_groups_if_there_are_too_many():
    """Otherwise the groups that finish last would be left out: the long ones."""
    rare = keep_rate(10**6, 10)
    window = Window(2, 1000, step=5, max_staleness=2, most_untrained=6)
    for index in range(9):
        window.carry(index, rare, 2)
    for index in (8, 3, 5, 4, 6, 7, 0, 1):
        window.finish(index, True)
    assert window.num_overdue == 1 and not window.is_full, "the last one is due and not open"
    window.finish(2, True)
    assert window.is_full and window.chosen() == [0, 1]


def test_group_is_too_old_once_no_batch_may_train_on_it():
    """One step later, and the batch has tokens older than max_staleness allows."""
    window = Window(2, 100, step=5, max_staleness=2)
    assert [version for version in range(5) if window.is_too_old(version)] == [0, 1]
    assert not Window(2, 100, step=5).is_too_old(0), "a batch without staleness was whole before"


def test_lead_follows_the_groups_that_batches_leave():
    """Engines that are faster than the trainer would make all tokens max_staleness old."""
    config = SamplingConfig(mode="async", max_staleness=3, prompts_per_step=16)
    assert num_places(config) == 64
    lead = {left: adapted_lead(config, 40, left) for left in (0, 2, 3, 8, 9, 20, 60)}
    assert lead == {0: 48, 2: 48, 3: 40, 8: 40, 9: 36, 20: 30, 60: 16}
    assert adapted_lead(config, 60, 0) == 64
    odd = SamplingConfig(mode="async", max_staleness=3, prompts_per_step=17)
    assert str(adapted_lead(odd, 40, 0)) == "48"


def test_async_requests_no_more_groups_than_its_lead():
    """Most groups here are not mixed, and partial requests three times as many."""
    counts = {}
    for mode in ("partial", "async"):
        config = SamplingConfig(mode=mode, max_staleness=2, prompts_per_step=4)
        window = Window.for_step(config, 5, num_places(config))
        rare, index = keep_rate(1000, 100), 0
        while window.wants(rare, 4):
            window.ask(index, rare, 4)
            index += 1
        counts[mode] = index
    assert counts["async"] == num_places(config) == 12 and counts["partial"] > 36


def keep_rate(num_asked: int, num_mixed: int) -> KeepRate:
    rate = KeepRate()
    rate.end_step(num_asked, num_mixed)
    return rate


def expected_mixed(num_groups: int, rate: KeepRate) -> ExpectedMixed:
    expected = ExpectedMixed()
    expected.add(rate, num_groups)
    return expected


def num_asked(num_needed: int, rate: KeepRate, *, num_at_once: int) -> int:
    """Return the number of groups requested before any of them finishes."""
    count = 0
    while should_oversample(num_needed, expected_mixed(count, rate), rate, num_at_once=num_at_once):
        count += 1
    return count


def test_initial_keep_rate_is_uniform():
    assert KeepRate().value == 0.5
    assert KeepRate().variance == pytest.approx(1 / 12)  # of a flat distribution


def test_newest_step_has_the_largest_weight():
    rate = KeepRate()
    for _ in range(20):
        rate.end_step(100, 0)
    for _ in range(4):
        rate.end_step(100, 100)
    assert rate.value > 0.9


def test_step_without_requests_keeps_the_rate():
    """A level that is requested once per epoch would be forgotten in between."""
    rate = keep_rate(100, 30)
    before = rate.value
    for _ in range(10):
        rate.end_step(0, 0)
    assert rate.value == before


def test_counts_of_current_step_are_replaced_at_its_end():
    rate = KeepRate()
    for _ in range(10):
        rate.add(True)
    assert rate.value > 0.9
    rate.end_step(4, 1)
    assert rate.value == keep_rate(4, 1).value


def test_requests_reach_the_expected_batch_size():
    for yield_ in (0.1, 0.35, 0.9):
        rate = keep_rate(100_000, int(100_000 * yield_))
        assert num_asked(100, rate, num_at_once=1) == math.ceil(100 / rate.value)


def test_oversampling_grows_with_concurrency_and_uncertainty():
    """With many concurrent groups, another group costs each of them little."""
    rate, vague = keep_rate(100_000, 35_000), keep_rate(100, 35)
    counts = [num_asked(128, rate, num_at_once=n) for n in (1, 16, 256, 4096)]
    assert counts == sorted(counts) and counts[0] < counts[-1] < 1.5 * counts[0]
    assert num_asked(128, vague, num_at_once=4096) > counts[-1]


def test_first_requests_fill_most_batches():
    """Requests for the mean alone would need a second round in every other step."""
    rate, source = keep_rate(100_000, 35_000), random.Random(0)
    asked = num_asked(512, rate, num_at_once=2048)
    full = sum(sum(source.random() < 0.35 for _ in range(asked)) >= 512 for _ in range(300))
    assert full > 0.8 * 300


def test_no_oversampling_for_full_or_certain_batches():
    rate = keep_rate(100, 50)
    assert not should_oversample(0, ExpectedMixed(), rate, num_at_once=1000)
    assert not should_oversample(-3, ExpectedMixed(), rate, num_at_once=1000)
    assert not should_oversample(1, ExpectedMixed(mean=1.0), rate, num_at_once=1000)


def test_expectations_of_different_rates_add_up():
    """A mean rate would treat prompts with 0.99 and 0.01 as two coin flips."""
    sure, coin = keep_rate(10**9, 10**9), keep_rate(10**9, 5 * 10**8)
    expected = expected_mixed(2, sure)
    expected.add(coin, 1)
    assert expected.mean == pytest.approx(2.5)
    assert expected.variance == pytest.approx(0.25, abs=1e-3)


def test_errors_of_one_rate_are_correlated():
    """Independent errors would make an uncertain rate look certain."""
    vague, other = keep_rate(7, 3), keep_rate(7, 3)
    together = expected_mixed(20, vague)
    apart = expected_mixed(10, vague)
    apart.add(other, 10)
    coins = 20 * vague.value * (1 - vague.value)
    assert together.variance - coins == pytest.approx(20**2 * vague.variance)
    assert apart.variance - coins == pytest.approx(2 * 10**2 * vague.variance)


def test_would_go_stale_has_a_margin():
    rate = keep_rate(10**9, 5 * 10**8)
    assert not would_go_stale(20, 0, expected_mixed(10, rate))
    assert would_go_stale(20, 0, expected_mixed(40, rate))
    assert would_go_stale(20, 20, ExpectedMixed())
    # two standard deviations: 30 groups give 15 +- 2.7
    assert would_go_stale(20, 0, expected_mixed(30, rate))
    assert not would_go_stale(21, 0, expected_mixed(30, rate))
