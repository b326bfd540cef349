"""The processes that the tests of this folder share: one that is lost must not cost the rest."""

import os
import signal

import pytest

from megadapo.trainer.types import Rendezvous


def own_pid(rendezvous: Rendezvous) -> int:
    return os.getpid()


def end_on_the_last_rank(rendezvous: Rendezvous) -> None:
    if rendezvous.rank == rendezvous.world_size - 1:
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_rank_that_dies_fails_one_test_by_its_name(ranks):
    before = ranks.run(2, own_pid)
    with pytest.raises(AssertionError, match="rank 1 died with exit code -9"):
        ranks.run(2, end_on_the_last_rank)
    after = ranks.run(2, own_pid)
    assert not set(before) & set(after)
    os.kill(after[0], signal.SIGKILL)
    with pytest.raises(AssertionError, match="rank 0 died with exit code -9"):
        ranks.run(2, own_pid)
    assert len(set(ranks.run(4, own_pid))) == 4
