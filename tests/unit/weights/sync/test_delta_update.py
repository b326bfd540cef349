"""Delta updates: the weights of engine ranks afterwards, and refused updates."""

import pytest
import torch

from megadapo.errors import WeightError
from megadapo.weights.sync.buckets import checksum
from megadapo.weights.sync.plan import EngineShape
from megadapo.weights.sync.transports.in_place import SharedMemoryInbox
from tests.support.weights.connection import BUCKET, Connection, Live

TRAINER = {"tp_size": 2, "pp_size": 2}


class Kept(Live):
    """Unpacked shards, from which the engine's parameters are made at each update."""

    def __init__(self, shapes, dtype):
        super().__init__(shapes, dtype)
        self.made = {}

    def complete(self, name, tensor):
        self.made[name] = tensor.clone()


def train(connection, share, *, seed=0):
    """Change some elements of every parameter, replicas equally."""
    for params in connection.params:
        for name, param in params.items():
            generator = torch.Generator().manual_seed(seed * 1000 + len(name) + sum(map(ord, name)))
            is_changed = torch.rand(param.shape, generator=generator) < share
            param.mul_(torch.where(is_changed, 1.01, 1.0))


def live_targets(connection, kind=Live):
    return [kind(receiver.shapes, connection.dtype) for receiver in connection.receivers]


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
def test_deltas_give_bits_of_full_update(model_folders, family, trainer, engine, dtype):
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
    assert_same_bits(targets, connection.run(targets=live_targets(connection)))
    for target in targets:
        assert all(torch.equal(target.made[name], target.done[name]) for name in target.done)


def test_delta_compares_with_pinned_weights(model_folders):
    connection = Connection(model_folders["Qwen2"], {}, EngineShape(), torch.bfloat16, deltas=True)
    (sender,), (params,) = connection.senders, connection.params
    sender.pin()
    (target,) = connection.run(targets=live_targets(connection), version=1)
    for param in params.values():
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
    """Return a connection after a full update to version 1, and its targets."""
    connection = Connection(
        model_folders["Qwen2"], TRAINER, EngineShape(tp_size=2), torch.bfloat16, deltas=True
    )
    targets = live_targets(connection)
    connection.run(targets=targets, version=1)
    return connection, targets


def test_lost_repeated_and_unfinished_updates_are_refused(published):
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


def test_reconnected_sender_sends_all_weights(published):
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


def test_section_of_previous_update_is_refused(published):
    connection, targets = published
    train(connection, 0.02)
    first = connection.encode(1, 2)
    connection.run(targets=targets, version=2, delta=first)
    again = connection.encode(2, 3)
    connection.begin(again)
    kept = connection.receivers[0]
    kept.start(targets[0], connection.inbox, with_checksums=False, version=3, delta=again)
    with pytest.raises(WeightError, match=r"A delta has (base version|magic|version|bundle)"):
        kept.take(0)


def test_damaged_section_changes_nothing(published):
    connection, targets = published
    train(connection, 0.02)
    delta = connection.encode(1, 2)
    before = [one.clone() for target in targets for one in target.done.values()]

    def damage(number):
        for rank in range(len(connection.senders)):
            connection.flip_bit(rank, number, 100)

    with pytest.raises(WeightError, match="differs from its checksum"):
        connection.run(targets=targets, version=2, delta=delta, damage=damage)
    after = [one for target in targets for one in target.done.values()]
    assert all(torch.equal(*pair) for pair in zip(before, after, strict=True))


def test_checksums_find_engine_with_other_bits(published):
    connection, targets = published
    train(connection, 0.02)
    delta = connection.encode(1, 2, with_checksums=True)
    targets[1].done["model.layers.1.mlp.down_proj.weight"].view(torch.int16)[3, 5] ^= 1
    with pytest.raises(WeightError, match=r"Checksums .* differ for model\.layers\.1.*down_proj"):
        connection.run(targets=targets, version=2, delta=delta)


def test_too_many_changes_need_full_update(published, monkeypatch):
    connection, targets = published
    monkeypatch.setattr("megadapo.weights.sync.delta.ALWAYS_ENCODED", 0)
    train(connection, 1.0)
    assert connection.encode(1, 2, max_share=0.25) is None
    connection.run(targets=targets, version=2)
    train(connection, 0.01)
    delta = connection.encode(2, 3, max_share=0.9)
    connection.run(targets=targets, version=3, delta=delta)
    assert_same_bits(targets, connection.run(targets=live_targets(connection)))
