"""Updates that send only what changed: what engine ranks hold afterwards, and what is refused."""

from __future__ import annotations

import pytest
import torch

from megadapo.errors import WeightError
from megadapo.weights.sync.buckets import checksum
from megadapo.weights.sync.plan import EngineShape
from megadapo.weights.sync.sender import PinnedWeightSender
from megadapo.weights.sync.transports.in_place import SharedMemoryInbox
from tests.support.weights.connection import BUCKET, Connection, Live

TRAINER = {"tp_size": 2, "pp_size": 2}


class Kept(Live):
    """Shards in memory of their own, from which the engine's parameters are made anew each time."""

    def __init__(self, shapes, dtype):
        super().__init__(shapes, dtype)
        self.made = {}

    def complete(self, name, tensor):
        self.made[name] = tensor.clone()


def train(connection, share, *, seed=0):
    """Change some of every full tensor's elements a little, the same on all ranks that hold them.

    Replicated parameters have equal changes because the generator depends on the name alone.
    """
    for sender in connection.senders:
        for name, param in sender._params.items():
            generator = torch.Generator().manual_seed(seed * 1000 + len(name) + sum(map(ord, name)))
            is_changed = torch.rand(param.shape, generator=generator) < share
            param.mul_(torch.where(is_changed, 1.01, 1.0))


def live_targets(connection, kind=Live):
    return [kind(receiver.shapes, connection.dtype) for receiver in connection.receivers]


def in_full(connection):
    """What another connection's full update of the same weights leads to."""
    targets = live_targets(connection)
    before = [receiver.version for receiver in connection.receivers]
    connection.run(targets=targets)
    for receiver, version in zip(connection.receivers, before, strict=True):
        receiver.version = version
    return targets


def assert_same_bits(targets, expected):
    for target, other in zip(targets, expected, strict=True):
        for name, tensor in other.done.items():
            bits = [one.contiguous().view(torch.uint8) for one in (target.done[name], tensor)]
            assert torch.equal(*bits), name


@pytest.mark.parametrize("family,trainer,engine,dtype", [
    ("Qwen2", TRAINER, EngineShape(tp_size=2), torch.float32),
    ("Qwen2", TRAINER, EngineShape(tp_size=2), torch.bfloat16),
    ("Qwen3", {"num_dp": 3}, EngineShape(tp_size=2, pp_size=2), torch.bfloat16),
    ("Qwen3Moe", {"tp_size": 2, "ep_size": 2, "num_dp": 2}, EngineShape(tp_size=2), torch.bfloat16),
    ("Llama", {"tp_size": 4}, EngineShape(), torch.bfloat16),
])  # fmt: skip
def test_changes_lead_to_the_bits_of_a_full_update(model_folders, family, trainer, engine, dtype):
    """Catches an element that is lost, misplaced or changed twice, over many updates, with shards
    that are replicated, cut by columns, stacked and tied."""
    connection = Connection(model_folders[family], trainer, engine, dtype, deltas=True)
    targets = live_targets(connection, Kept)
    connection.run(targets=targets, version=1)
    full = sum(receiver.num_bytes for receiver in connection.receivers)
    for version, share in enumerate([0.02, 0.0, 0.3, 0.05, 1.0, 0.01], start=2):
        train(connection, share, seed=version)
        delta = connection.encode(version - 1, version, with_checksums=True)
        connection.run(targets=targets, version=version, delta=delta)
        moved = sum(receiver.num_bytes for receiver in connection.receivers)
        assert share > 0.1 or moved < 0.6 * full
    last = [Live(receiver.shapes, dtype) for receiver in connection.receivers]
    connection.run(targets=last)
    assert_same_bits(targets, last)
    for target in targets:
        assert all(torch.equal(target.made[name], target.done[name]) for name in target.done)


def test_what_is_held_is_what_changes_are_told_from(model_folders):
    """Catches changes between the present weights and those held, for which nobody asked."""
    connection = Connection(
        model_folders["Qwen2"], {}, EngineShape(), torch.bfloat16, PinnedWeightSender, deltas=True
    )
    (sender,) = connection.senders
    sender.pin()
    (target,) = connection.run(targets=live_targets(connection), version=1)
    for param in sender._live.values():
        param.mul_(1.01)
    delta = connection.encode(1, 2)
    before = {name: tensor.clone() for name, tensor in target.done.items()}
    connection.run(targets=[target], version=2, delta=delta)
    assert all(torch.equal(target.done[name], before[name]) for name in before)
    sender.pin()
    delta = connection.encode(2, 3)
    connection.run(targets=[target], version=3, delta=delta)
    assert_same_bits([target], connection.run(targets=live_targets(connection)))


@pytest.fixture
def published(model_folders):
    """A connection over which everything was sent once, as version 1."""
    connection = Connection(
        model_folders["Qwen2"], TRAINER, EngineShape(tp_size=2), torch.bfloat16, deltas=True
    )
    targets = live_targets(connection)
    connection.run(targets=targets, version=1)
    return connection, targets


def test_a_lost_a_repeated_and_an_unfinished_update_are_noticed_before_anything_is_written(
    published,
):
    """Catches changes that are added to other bits than those they were taken from."""
    connection, targets = published
    train(connection, 0.02)
    connection.encode(1, 2)  # which never arrives
    train(connection, 0.02, seed=1)
    delta = connection.encode(2, 3)
    before = [checksum(one) for target in targets for one in target.done.values()]
    with pytest.raises(WeightError, match="changes version 2, but the engine has 1"):
        connection.run(targets=targets, version=3, delta=delta)
    assert [checksum(one) for target in targets for one in target.done.values()] == before

    connection.run(targets=targets, version=3)
    train(connection, 0.02, seed=2)
    delta = connection.encode(3, 4)
    connection.run(targets=targets, version=4, delta=delta)
    with pytest.raises(WeightError, match="changes version 3, but the engine has 4"):
        connection.run(targets=targets, version=4, delta=delta)

    delta = connection.encode(4, 5)
    receiver = connection.receivers[0]
    receiver.start(targets[0], connection.inbox, with_checksums=False, version=5, delta=delta)
    with pytest.raises(WeightError, match="Incomplete weight update"):
        receiver.finish()
    with pytest.raises(WeightError, match="the engine has None"):
        receiver.start(targets[0], connection.inbox, with_checksums=False, version=5, delta=delta)


def test_a_sender_that_connects_anew_sends_everything(published):
    """Catches a publisher of full updates that is handed the changes of the one before it."""
    connection, targets = published
    train(connection, 0.02)
    connection.run(targets=targets, version=2, delta=connection.encode(1, 2))
    sizes = {"bucket_bytes": BUCKET, "dtype": torch.bfloat16, "transport": "shared_memory"}
    offers = [sender.prepare(connection.plan, **sizes) for sender in connection.senders]
    inbox = SharedMemoryInbox(offers)
    new = live_targets(connection)
    for receiver, target in zip(connection.receivers, new, strict=True):
        receiver.start(target, inbox, with_checksums=False)
    for number in range(connection.num_rounds):
        connection.fill(number, False)
        for receiver in connection.receivers:
            receiver.take(number)
    assert_same_bits(targets, new)


def test_sections_of_another_update_are_refused(published):
    """Catches a bucket that still holds the round of the update before."""
    connection, targets = published
    train(connection, 0.02)
    first = connection.encode(1, 2)
    connection.run(targets=targets, version=2, delta=first)
    again = connection.encode(2, 3)
    connection.begin(again)
    kept = connection.receivers[0]
    kept.start(targets[0], connection.inbox, with_checksums=False, version=3, delta=again)
    with pytest.raises(WeightError, match=r"A delta has (base version|magic|version|place)"):
        kept.take(0)


def test_a_damaged_section_is_refused_and_its_bundle_left_as_it_was(published):
    """Catches memory that changes between trainer and engine, and half of a section applied."""
    connection, targets = published
    train(connection, 0.02)
    delta = connection.encode(1, 2)
    before = [one.clone() for target in targets for one in target.done.values()]

    def damage(number, senders):
        for sender in senders:
            sender._ready.outbox.bucket(number)[100] ^= 4

    with pytest.raises(WeightError, match="differs from its checksum"):
        connection.run(targets=targets, version=2, delta=delta, damage=damage)
    after = [one for target in targets for one in target.done.values()]
    assert all(torch.equal(*pair) for pair in zip(before, after, strict=True))


def test_an_engine_whose_bits_differ_is_found_by_the_checksums(published):
    """Catches changes that are right, added to parameters that something else has changed."""
    connection, targets = published
    train(connection, 0.02)
    delta = connection.encode(1, 2, with_checksums=True)
    targets[1].done["model.layers.1.mlp.down_proj.weight"].view(torch.int16)[3, 5] ^= 1
    with pytest.raises(WeightError, match=r"Checksums .* differ for model\.layers\.1.*down_proj"):
        connection.run(targets=targets, version=2, delta=delta)


def test_an_update_that_changes_nearly_everything_is_for_a_full_one(published, monkeypatch):
    """Catches a rank that holds more than its share of the model in encoded form."""
    connection, targets = published
    monkeypatch.setattr("megadapo.weights.sync.delta.state.ALWAYS_ENCODED", 0)
    train(connection, 1.0)
    assert connection.encode(1, 2, max_share=0.25) is None
    connection.run(targets=targets, version=2)
    train(connection, 0.01)
    delta = connection.encode(2, 3, max_share=0.9)
    connection.run(targets=targets, version=3, delta=delta)
    assert_same_bits(targets, in_full(connection))
