"""The supervisor restarts what a restart can fix, for as long as it may help."""

import json
import os

import pytest

from megadapo.run.state.status import read_status
from megadapo.run.state.supervisor import LONGEST_WAIT_S, MAX_SAME_ENDS, DriverEnd, RestartBudget
from tests.support.processes.supervised import supervise


def test_failures_preemption_and_kills_are_restarted(tmp_path):
    code, output, starts = supervise(
        tmp_path,
        """
        resume_and_complete(num)
        if num == 1: sys.exit(5)
        if num == 2: sys.exit(75)
        if num == 3: os.kill(os.getpid(), signal.SIGKILL)
        """,
    )
    assert (code, len(starts)) == (0, 4)
    assert "exit code 5 after step 1; restart 1 of 5" in output and "SIGKILL after step 3" in output


def test_unexpected_end_is_restarted(tmp_path):
    """Ray's core ends the process with exit code 1, as Python does after an unforeseen error."""
    _, _, starts = supervise(
        tmp_path,
        """
        status = StatusFile(folder, num_steps=9)
        if num == 1: status.end(ValueError("no number"))
        os._exit(1 if num < 3 else 2)
        """,
        restarts=2,
    )
    assert len(starts) == 3


def test_starts_that_never_reach_the_run_are_repeated_for_a_time(tmp_path):
    """A head that reboots for an hour ended a run of two weeks within 35 s."""
    code, output, starts = supervise(tmp_path, "sys.exit(5 if num < 5 else 0)", restarts=1)
    assert (code, len(starts)) == (0, 5)
    assert "try 5 since the last progress in 0.08 s" in output


def test_starts_that_never_reach_the_run_end_after_a_time(tmp_path):
    """The progress of an earlier driver is not the new one's."""
    status = {"num_steps": 9, "step": 5, "checkpoint_step": 5, "resumed_from": 0}
    process = {"host": "h", "pid": os.getpid(), "started": "t", "updated": "t"}
    (tmp_path / "status.json").write_text(json.dumps(status | process))
    code, output, starts = supervise(tmp_path, "sys.exit(5)", restarts=50, give_up_after_s=2.0)
    assert code == 5 and len(starts) > 1
    assert "(--give-up-after) made no progress" in output
    assert read_status(tmp_path).state == "failed"


def test_update_that_fails_at_once_is_given_up(tmp_path):
    """Its batch is in the journal, so no counter of progress moves, as in a failed start."""
    code, _, starts = supervise(
        tmp_path,
        """
        status = StatusFile(folder, num_steps=9)
        status.update(phase="train")
        status.end(RuntimeError("out of memory"))
        sys.exit(5)
        """,
        restarts=50,
    )
    assert (code, len(starts)) == (5, MAX_SAME_ENDS)


def test_resume_option_is_kept_until_the_first_own_checkpoint(tmp_path):
    """Too long, it throws training away; too short, the run begins from the model's own weights."""
    _, _, starts = supervise(
        tmp_path,
        """
        status = resume_and_complete(5)
        if num >= 2: status.update(checkpoint_step=5)
        sys.exit(5 if num < 4 else 0)
        """,
    )
    assert starts == ["", "", "--run.resume=auto", "--run.resume=auto"]


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
        # a third kill before the first token ended a run
        assert budget.charge(ended(-9, progress=False)) is None
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


def test_number_of_restarts_is_limited_despite_progress():
    budget = RestartBudget(2, 86400.0, 5.0)
    assert [budget.charge(ended(step=step)) for step in (1, 2)] == [None, None]
    assert "the limit of 2 restarts is reached" in budget.charge(ended(step=3))


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
