"""Buckets that trainer ranks and engine ranks pass to each other without the driver."""

import threading
import time

import pytest
import torch

from megadapo.errors import InfraError
from megadapo.weights.sync.plan import EngineShape
from megadapo.weights.sync.transports.interface import Message
from megadapo.weights.sync.transports.turns import FillingTurns, ReadingTurns
from tests.support.weights.connection import Connection, Shards

CPU = torch.device("cpu")
MESSAGE = Message(sender=0, target=7, offset=0, num_bytes=8)


def connected(*targets: int, patience_s: float = 30.0) -> tuple[FillingTurns, list[ReadingTurns]]:
    filling = FillingTurns(patience_s)
    readers = [ReadingTurns([{"turns": filling.name}], target, CPU) for target in targets]
    filling.opened()
    return filling, readers


@pytest.mark.parametrize("late", ["sender", "receiver"])
def test_many_rounds_in_one_call_move_every_bit(model_folders, late):
    """Catches a bucket that is filled again before it is read, or read before it is full."""
    connection = Connection(model_folders["Qwen2"], {"tp_size": 2}, EngineShape(tp_size=2))
    # both read both senders' buckets
    filling = [FillingTurns(30.0) for _ in connection.senders]
    for sender, turns in zip(connection.senders, filling, strict=True):
        sender._turns.close()
        sender._turns = turns
    offers = [{"turns": turns.name} for turns in filling]
    for rank, receiver in enumerate(connection.receivers):
        receiver._turns = ReadingTurns(offers, receiver._plan.engine_rank_number(0, rank), CPU)
        receiver.start(targets := Shards(), connection.inbox, with_checksums=False)
        receiver.target_of_test = targets
    for turns in filling:
        turns.opened()
    rounds = range(connection.num_rounds)
    assert len(rounds) > 4

    def fill(sender):
        for number in rounds:
            time.sleep(0.01 if late == "sender" else 0.0)
            sender.fill_rounds([number], with_checksums=False)

    def take(receiver):
        for number in rounds:
            time.sleep(0.01 if late == "receiver" else 0.0)
            receiver.take(number)

    work = [threading.Thread(target=fill, args=(one,)) for one in connection.senders]
    work += [threading.Thread(target=take, args=(one,)) for one in connection.receivers]
    for thread in work:
        thread.start()
    for thread in work:
        thread.join(30.0)
        assert not thread.is_alive()
    connection.assert_received([one.target_of_test for one in connection.receivers])


def test_reader_that_ends_is_not_waited_for():
    """Catches an update that a killed engine stops, and a turn that goes to another engine rank."""
    filling, (first, second, _) = connected(7, 7, 8)
    started = time.monotonic()
    for number in range(4):
        filling.wait(number)
        filling.give(number, [MESSAGE])
        second.wait([MESSAGE])
        second.give([MESSAGE])
        if number == 0:
            first.close()
    assert time.monotonic() - started < 10.0


def test_reader_that_hangs_is_left_out_and_learns_it():
    """It may have read a bucket that was filled again: its weights must not count."""
    filling, (hanging, other) = connected(7, 7, patience_s=0.2)
    filling.give(0, [MESSAGE])
    for one in (hanging, other):
        one.wait([MESSAGE])
    other.give([MESSAGE])
    filling.wait(2)
    filling.give(2, [MESSAGE])
    other.wait([MESSAGE])
    with pytest.raises(InfraError, match="Trainer rank 0 left out"):
        hanging.give([MESSAGE])
    assert not hanging.wait([MESSAGE])


def test_reader_learns_that_its_sender_has_ended():
    filling, (reader,) = connected(7)
    filling.close()
    assert not reader.wait([MESSAGE])
