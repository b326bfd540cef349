"""Delta updates: sections, the weights of engine ranks afterwards, and refused updates."""

import pytest
import torch

from megadapo.errors import WeightError
from megadapo.weights.sync.buckets import checksum
from megadapo.weights.sync.delta import HEADER_BYTES, Stamp, decode, encode
from megadapo.weights.sync.plan import EngineShape
from megadapo.weights.sync.transports.in_place import InPlaceInbox
from tests.support.weights.connection import BUCKET, Connection, Live

TRAINER = {"tp_size": 2, "pp_size": 2}
STAMP = Stamp(base=7, version=8, bundle=3)
NUM_ELEMENTS = 40_000
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn]


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
    receiver.start(targets[0], connection.inboxes[0], with_checksums=False, version=5, delta=delta)
    with pytest.raises(WeightError, match="Incomplete weight update"):
        receiver.finish()
    with pytest.raises(WeightError, match="the engine has None"):
        receiver.start(
            targets[0], connection.inboxes[0], with_checksums=False, version=5, delta=delta
        )


def test_reconnected_sender_sends_all_weights(published):
    connection, targets = published
    train(connection, 0.02)
    connection.run(targets=targets, version=2, delta=connection.encode(1, 2))
    sizes = {"bucket_bytes": BUCKET, "dtype": torch.bfloat16, "transport": "shared_memory"}
    offers = [sender.prepare(connection.plan, **sizes) for sender in connection.senders]
    connection.connect(offers)
    new = live_targets(connection)
    for receiver, target, inbox in zip(connection.receivers, new, connection.inboxes, strict=True):
        receiver.start(target, inbox, with_checksums=False)
    for number in range(connection.num_rounds):
        connection.fill(number, False)
        for receiver in connection.receivers:
            receiver.take(number)
    assert_same_bits(targets, new)


def test_section_of_previous_update_is_refused(published, monkeypatch):
    connection, targets = published
    monkeypatch.setattr(InPlaceInbox, "wait", lambda inbox, messages: True)
    train(connection, 0.02)
    first = connection.encode(1, 2)
    connection.run(targets=targets, version=2, delta=first)
    again = connection.encode(2, 3)
    connection.begin(again)
    kept = connection.receivers[0]
    kept.start(targets[0], connection.inboxes[0], with_checksums=False, version=3, delta=again)
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


def image(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8)


def weights(dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    torch.manual_seed(0)
    return (torch.randn(NUM_ELEMENTS) * 0.02).to(dtype)


def decoded(section: torch.Tensor, before: torch.Tensor, stamp: Stamp = STAMP) -> torch.Tensor:
    itemsize = before.itemsize
    changes = decode(section, stamp, itemsize=itemsize, num_elements=len(before))
    words = changes.bits.dtype
    result = before.clone()
    result.view(words)[changes.indices] = changes.after(before.view(words)[changes.indices])
    return result


def sent(before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    section, count = encode(image(before), image(after), STAMP, itemsize=before.itemsize)
    assert section is not None and len(section) < after.nbytes
    words = {1: torch.int8, 2: torch.int16, 4: torch.int32}[before.itemsize]
    assert count == int((before.view(words) != after.view(words)).sum())
    return section


def assert_comes_back(before: torch.Tensor, after: torch.Tensor) -> None:
    assert torch.equal(image(decoded(sent(before, after), before)), image(after))


def changed_at_random(before: torch.Tensor, share: float) -> torch.Tensor:
    """Give some elements random bits, including NaN payloads and infinities."""
    random = torch.randint(-(2**31), 2**31, (len(before),)).to(torch.int32).view(torch.uint8)
    bits = random[: before.nbytes] if before.itemsize < 4 else random
    return torch.where(torch.rand(len(before)) < share, bits.view(before.dtype), before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("share", [0.0, 1e-4, 0.002, 0.046, 0.1])
def test_every_bit_comes_back(dtype, share):
    before = changed_at_random(weights(dtype), 0.05)
    after = changed_at_random(before, share)
    assert_comes_back(before, after)


@pytest.mark.parametrize("places", [
    [], [0], [NUM_ELEMENTS - 1], [0, NUM_ELEMENTS - 1], [254], [255], [256], [0, 255], [0, 256],
    [0, 257], list(range(300)), [5, 300, 301, 39_000],
])  # fmt: skip
def test_all_gap_lengths_are_decoded(places):
    before = weights()
    after = before.clone()
    after.view(torch.int16)[places] += 1
    assert_comes_back(before, after)


@pytest.mark.parametrize("step", [1, -1, 127, -127, 128, -128, 129, 32767, -32768])
def test_all_step_sizes_are_decoded(step):
    """Among them steps between 0.0 and -0.0, and between the payloads of NaN."""
    before = torch.tensor([0.0, -0.0, torch.nan, torch.inf, -1e-40, 3.0], dtype=torch.bfloat16)
    before = before.repeat(200)
    after = before.clone()
    after.view(torch.int16)[::11] += step
    assert_comes_back(before, after)


def test_one_unit_in_the_last_place_takes_two_bytes():
    """Catches an encoding above five percent of a full update."""
    before = torch.randn(1 << 20).mul_(0.02).bfloat16()
    after = before.clone()
    is_changed = torch.rand(1 << 20) < 0.046
    after.view(torch.int16)[is_changed] += 1
    assert len(sent(before, after)) <= 0.05 * before.nbytes


@pytest.mark.parametrize("size", [8, 40, 1000])
def test_larger_section_is_not_encoded(size):
    before = weights()[:size]
    after = changed_at_random(before, 1.0)
    assert encode(image(before), image(after), STAMP, itemsize=2)[0] is None


def some_section() -> tuple[torch.Tensor, torch.Tensor]:
    before = weights()
    after = changed_at_random(before, 0.002)
    after.view(torch.int16)[100:900:3] += 1
    return before, sent(before, after)


def refused(
    section: torch.Tensor,
    message: str = "A delta",
    *,
    stamp: Stamp = STAMP,
    itemsize: int = 2,
    num_elements: int = NUM_ELEMENTS,
) -> None:
    with pytest.raises(WeightError, match=message):
        decode(section, stamp, itemsize=itemsize, num_elements=num_elements)


def test_section_of_wrong_length_is_refused():
    _, section = some_section()
    for length in (0, 1, HEADER_BYTES - 1, HEADER_BYTES, len(section) - 16, len(section) - 1):
        refused(section[:length], "A delta")
    refused(torch.cat([section, section[:16]]), "bytes, but its header says")


@pytest.mark.parametrize("expected", [
    {"stamp": Stamp(base=6, version=8, bundle=3)}, {"stamp": Stamp(base=7, version=7, bundle=3)},
    {"stamp": Stamp(base=8, version=9, bundle=3)}, {"stamp": Stamp(base=7, version=8, bundle=4)},
    {"itemsize": 4}, {"num_elements": NUM_ELEMENTS - 1},
    {"itemsize": 1, "num_elements": 2 * NUM_ELEMENTS},
])  # fmt: skip
def test_section_with_other_stamp_shape_or_type_is_refused(expected):
    refused(some_section()[1], "but the update has", **expected)


def test_any_flipped_bit_is_found():
    _, section = some_section()
    torch.manual_seed(1)
    for place in [*range(HEADER_BYTES), *torch.randint(len(section), (200,)).tolist()]:
        damaged = section.clone()
        damaged[place] ^= 1 << (place % 8)
        refused(damaged)


def test_changes_between_have_indices_from_start():
    before = weights()
    after = before.clone()
    places = [0, 9, 10, 19, 20, 39_999]
    after.view(torch.int16)[places] += 1
    changes = decode(sent(before, after), STAMP, itemsize=2, num_elements=NUM_ELEMENTS)
    parts = changes.split([(10, 20), (20, 20), (20, NUM_ELEMENTS)])
    assert [part.indices.tolist() for part in parts] == [[0, 9], [], [0, 39_979]]
