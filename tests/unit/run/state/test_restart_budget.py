"""Starts without progress are repeated for a time, others are counted, and no error is repeated."""

import pytest

from megadapo.run.state.supervisor import (
    LONGEST_WAIT_S,
    MAX_SAME_ENDS,
    DriverEnd,
    RestartBudget,
)


def ended(code: int = 5, *, progress: bool = True, step: int = 3, journal: int = 0, reason="lost"):
    return DriverEnd(
        code=code, made_progress=progress, step=step, journal_bytes=journal, reason=reason
    )


@pytest.fixture
def clock(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr("megadapo.run.state.supervisor.time.monotonic", lambda: now[0])
    return now


def test_waits_double_up_to_a_limit_and_are_not_restarts(clock):
    budget, waits = RestartBudget(1, 86400.0, 5.0), []
    for _ in range(9):
        assert budget.charge(ended(progress=False)) is None
        waits.append(budget.wait_s)
        clock[0] += budget.wait_s
    assert waits == [5, 10, 20, 40, 80, 160, LONGEST_WAIT_S, LONGEST_WAIT_S, LONGEST_WAIT_S]
    assert budget.num_charged == 0


def test_time_without_progress_counts_from_the_last_progress(clock):
    budget = RestartBudget(9, 3600.0, 5.0)
    clock[0] += 3500
    assert budget.charge(ended()) is None
    clock[0] += 3500
    assert budget.charge(ended(progress=False)) is None
    clock[0] += 200
    assert "1:00:00 (--give-up-after)" in budget.charge(ended(progress=False))


def test_five_kills_while_starting_do_not_end_a_run(clock):
    """Each came before the first token, and the third ended the run."""
    budget = RestartBudget(1, 86400.0, 5.0)
    assert [budget.charge(ended(-9, progress=False)) for _ in range(5)] == [None] * 5


def charges(*ends):
    budget = RestartBudget(100, 86400.0, 5.0)
    return [budget.charge(end) for end in ends]


@pytest.mark.parametrize(
    "last",
    [
        ended(journal=1),
        ended(step=4),
        ended(step=2),
        ended(reason="the reward function failed"),
        ended(75),
    ],
    ids=["another-group-saved", "later-step", "earlier-step", "other-message", "preempted"],
)
def test_only_one_step_with_one_message_is_given_up(last):
    same = [ended(reason=f"lost (pid {1000 + n}, 0x7f{n})") for n in range(MAX_SAME_ENDS)]
    assert charges(*same)[:-1] == [None] * (MAX_SAME_ENDS - 1)
    assert "step 4 ended 5 times in a row with the same message" in charges(*same)[-1]
    assert charges(*[ended()] * (MAX_SAME_ENDS - 1), last)[-1] is None


def test_kills_from_outside_in_one_step_are_only_counted():
    """A step that is longer than the time between two kills would end the run."""
    killed = ended(-9, reason="SIGKILL")
    assert charges(*[killed] * 20) == [None] * 20
    hung = ended(-9, reason="the driver has made no progress for 2:00:00")
    assert "with the same message" in charges(*[hung] * MAX_SAME_ENDS)[-1]


@pytest.mark.parametrize("code", [2, 3, 4, 6])
@pytest.mark.parametrize("progress", [True, False])
def test_permanent_errors_are_final(code, progress):
    assert f"a restart cannot fix exit code {code}" in charges(ended(code, progress=progress))[0]
