"""Senders, buckets and receivers together, without vLLM: turns, versions and rounds."""

import os
import tempfile
import threading
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from megadapo.errors import ConfigError, InfraError, WeightError
from megadapo.rollout.pool.publish import Publisher
from megadapo.weights.config import WeightsConfig
from megadapo.weights.disk.sources import open_layout
from megadapo.weights.layout.placement import joined_chunks, replica_positions, stage_chunks
from megadapo.weights.sync.delta import FULL_EVERY, UpdateVersions
from megadapo.weights.sync.plan import EngineShape
from megadapo.weights.sync.planning import make_plan
from megadapo.weights.sync.transports.in_place import (
    _HANDLE_FIELDS,
    MEMORY_FOLDER,
    CudaIpcOutbox,
    InPlaceInbox,
    SharedMemoryOutbox,
)
from megadapo.weights.sync.transports.interface import Message
from megadapo.weights.sync.transports.point_to_point import PointToPointOutbox
from tests.support.models.tiny_models import FAMILY_NAMES, make_model
from tests.support.weights.connection import BUCKET, Connection, Shards, receiver_of

CPU = torch.device("cpu")
MESSAGE = Message(sender=0, target=7, offset=0, num_bytes=8)


@pytest.mark.parametrize("family", FAMILY_NAMES)
@pytest.mark.parametrize("trainer,engine,dtype", [
    ({}, EngineShape(), torch.float32),
    ({"tp_size": 4, "pp_size": 2}, EngineShape(tp_size=2), torch.float32),
    ({"tp_size": 2, "num_dp": 2}, EngineShape(tp_size=4), torch.bfloat16),
    ({"pp_size": 2, "stages": [(0, 1, 3), (2, 4)]}, EngineShape(tp_size=2, pp_size=2),
     torch.float32),
    ({"tp_size": 2}, EngineShape(tp_size=2, expert_parallel=True), torch.float32),
])  # fmt: skip
def test_engine_ranks_receive_exactly_their_shards(model_folders, family, trainer, engine, dtype):
    connection = Connection(model_folders[family], trainer, engine, dtype)
    assert connection.num_rounds > 1
    connection.assert_received(connection.run())
    for rank, receiver in enumerate(connection.receivers):
        runs = sum(
            span.size * shard.numel_per_row
            for shard in connection.layout.engine_shards(engine.position(rank))
            for span in shard.spans
        )
        assert receiver.num_bytes == runs * dtype.itemsize


@pytest.mark.parametrize("family", ["Qwen2", "Qwen3Moe"])
@pytest.mark.parametrize("engine", [EngineShape(tp_size=2), EngineShape(pp_size=2)])
def test_interleaved_stages_send_own_layers(tmp_path, family, engine):
    stages = joined_chunks(stage_chunks(4, pp_size=2, vpp_size=2))
    assert stages == [(0, 2), (1, 3)]
    folder = make_model(tmp_path / "model", family, num_hidden_layers=4)
    connection = Connection(folder, {"pp_size": 2, "stages": stages}, engine)
    connection.assert_received(connection.run())
    for transfer in connection.plan.transfers:
        layer = connection.plan.blocks[transfer.block].layer
        assert layer is None or layer in stages[transfer.sender]


@pytest.mark.parametrize("trainer", [{"tp_size": 2, "pp_size": 2}, {"num_dp": 2}])
def test_pinned_weights_do_not_change(model_folders, trainer):
    connection = Connection(model_folders["Qwen3"], trainer, EngineShape(tp_size=2))
    for sender, params in zip(connection.senders, connection.params, strict=True):
        sender.pin()
        for param in params.values():
            param.fill_(torch.nan)
    for _ in range(2):
        connection.assert_received(connection.run())
    fingerprints = [sender.fingerprint() for sender in connection.senders]
    connection.senders[0].pin()
    assert connection.senders[0].fingerprint() != fingerprints[0]


def test_pinned_copies_wait_for_no_other_in_the_same_memory(model_folders, monkeypatch):
    """Catches seconds of each asynchronous step for copies one by one, into new memory."""
    (sender,) = Connection(model_folders["Qwen3"], {}, EngineShape()).senders
    waits, put = [], torch.Tensor.copy_

    def start(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> Any:
        waits.append(not non_blocking)
        return put(target, source)

    monkeypatch.setattr(torch.Tensor, "copy_", start)
    addresses = []
    for _ in range(2):
        sender.pin()
        addresses.append([sender._weights_of(name).data_ptr() for name in sender._params])
    assert waits and not any(waits) and addresses[0] == addresses[1]


def test_fingerprint_shows_single_bit(model_folders):
    one, other = (Connection(model_folders["Qwen2"], {}, EngineShape()) for _ in range(2))
    (sender,), (same,) = one.senders, other.senders
    assert sender.fingerprint() == same.fingerprint()
    for param in other.params[0].values():
        before = same.fingerprint()
        words = param.data.view(-1).view(torch.int32)
        words[len(words) // 2] ^= 1
        assert same.fingerprint() != before


def test_few_shards_are_open_at_once(model_folders):
    """Catches a schedule that mixes all layers: the engine would need a second model copy."""
    connection = Connection(model_folders["Llama"], {"tp_size": 2}, EngineShape())
    (target,) = connection.run()
    assert target.most_open < len(target.done) / 3


def test_checksum_names_damaged_slice(model_folders):
    connection = Connection(model_folders["Qwen2"], {}, EngineShape())
    with pytest.raises(WeightError, match=r"differ for model\..*from trainer rank 0, bucket 0"):
        connection.run(damage=lambda number: connection.flip_bit(0, number, 17))


def test_rank_with_only_padding_completes_vocabulary(tmp_path):
    folder = make_model(tmp_path / "small", "Qwen2", vocab_size=20)
    connection = Connection(folder, {}, EngineShape(tp_size=4))
    *_, last = connection.run()
    assert torch.equal(last.done["model.embed_tokens.weight"], torch.zeros(16, 32))


def test_shared_memory_leaves_no_file_behind():
    folder = MEMORY_FOLDER if MEMORY_FOLDER.is_dir() else Path(tempfile.gettempdir())
    before = set(folder.glob("megadapo-weights-*"))
    outbox = SharedMemoryOutbox(64)
    inbox = InPlaceInbox([outbox.offer(), None], 2, CPU)
    outbox.opened()
    assert set(folder.glob("megadapo-weights-*")) == before
    outbox.bucket(3)[5] = 77
    message = Message(sender=0, target=2, offset=4, num_bytes=8)
    assert [one.tolist() for one in inbox.receive(1, [message])] == [[0, 77, 0, 0, 0, 0, 0, 0]]
    assert [one.tolist() for one in inbox.receive(2, [message])] == [[0] * 8]
    with pytest.raises(InfraError, match="is not there"):
        InPlaceInbox([outbox.offer()], 2, CPU)


@pytest.mark.parametrize("can_reach", [True, False])
def test_buckets_of_other_gpus_are_mapped_on_own_gpu(monkeypatch, can_reach):
    """Catches a context (0.5 GiB) on every GPU of an engine, and a wait for the buckets' events."""
    opened = []

    def open_storage(device, handle, *rest):
        opened.append((device, handle, rest[-1]))
        return torch.UntypedStorage(2 * BUCKET)

    for name, function in {
        "init": lambda: None,
        "current_device": lambda: 1,
        "device_count": lambda: 4,
        "get_device_properties": lambda index: SimpleNamespace(uuid=f"GPU-{index}"),
        "can_device_access_peer": lambda own, theirs: can_reach,
    }.items():
        monkeypatch.setattr(torch.cuda, name, function)
    monkeypatch.setattr(torch.UntypedStorage, "_new_shared_cuda", open_storage)
    outbox = SharedMemoryOutbox(8)
    turns = {"turns": outbox.offer()["turns"]}
    plain = dict.fromkeys(_HANDLE_FIELDS, 0) | {"event_sync_required": True} | turns
    offers = [
        plain | {"device": 0, "handle": "aGFuZGxl", "num_bytes": BUCKET, "gpu": f"GPU-{gpu}"}
        for gpu in (2, 1)
    ]
    InPlaceInbox([*offers, None], 0, torch.device("cuda"))
    assert opened == [(1 if can_reach else 2, b"handle", False), (1, b"handle", False)]


@pytest.mark.parametrize("opens", [True, False])
def test_gpu_buckets_wait_for_no_receiver_to_be_freed(monkeypatch, opens):
    """Catches buckets that a killed engine holds forever, also one that had not opened them."""
    counters = {("/torch_1", 7): 1}

    def release(handle: bytes, offset: int) -> None:
        counters[handle.decode(), offset] -= 1

    shared = (0, b"handle", 2 * BUCKET, 0, b"/torch_1", 7, b"event", True)
    monkeypatch.setattr(torch.UntypedStorage, "_share_cuda_", lambda storage: shared)
    monkeypatch.setattr(torch.UntypedStorage, "_release_ipc_counter_cuda", release)
    uuid = SimpleNamespace(uuid="GPU-0")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: uuid)
    outbox = CudaIpcOutbox(BUCKET, torch.device("cpu"))
    assert outbox.offer()["ref_counter_offset"] == 7
    if opens:
        outbox.opened()
    outbox.close()
    assert counters == {("/torch_1", 7): 0}


def test_receiver_opens_only_buckets_it_reads(model_folders):
    layout = open_layout(model_folders["Qwen2"])
    positions = replica_positions(layout, num_dp=3)
    engine = EngineShape(nodes=("engine 0", "engine 1"))
    plan = make_plan(
        layout, positions, engine, itemsize=4, max_bundle_bytes=BUCKET,
        source_nodes=["engine 0", "engine 1", ""],
    )  # fmt: skip
    receiver = receiver_of(plan, layout, receiver=1)
    outbox = SharedMemoryOutbox(BUCKET)
    elsewhere = outbox.offer() | {"path": "/nowhere"}
    offers = [elsewhere, outbox.offer(), elsewhere]
    receiver.open_inbox("shared_memory", offers, torch.device("cpu"))
    receiver.open_inbox("cuda_ipc", [elsewhere, None, elsewhere], torch.device("cpu"))
    with pytest.raises(InfraError, match="is not there"):
        receiver.open_inbox("shared_memory", [elsewhere] * 3, torch.device("cpu"))


def test_buckets_beyond_shared_memory_are_refused():
    """Catches a process that dies at the first page that cannot be allocated."""
    with pytest.raises(InfraError, match="lower weights.bucket_mib"):
        SharedMemoryOutbox(1 << 55)


def test_store_listens_on_node_address_only():
    outbox = PointToPointOutbox(8, torch.device("cpu"), rank=0, num_ranks=2)
    offer = outbox.offer()
    at_port = [
        connection.laddr.ip.removeprefix("::ffff:")
        for connection in psutil.Process(os.getpid()).net_connections("inet")
        if connection.status == "LISTEN" and connection.laddr.port == offer["port"]
    ]
    outbox.close()
    assert at_port == [offer["address"]] == ["127.0.0.1"]


def send_update(versions: UpdateVersions, *, in_full: bool) -> bool:
    """Send one update; return whether it was verified."""
    version = versions.begin()
    verified = versions.verifies(in_full=in_full)
    versions.finish(version, in_full=in_full)
    return verified


@pytest.mark.parametrize(
    ("verify", "expected"),
    [
        ("off", [0, 0, 0, 0, 0, 0, 0]),
        ("first", [1, 0, 0, 0, 0, 0, 0]),
        (3, [1, 0, 0, 1, 0, 0, 1]),
        (1, [1, 1, 1, 1, 1, 1, 1]),
        ("every", [1, 1, 1, 1, 1, 1, 1]),
    ],
)
def test_number_verifies_first_and_every_nth_update(verify, expected):
    versions = UpdateVersions(WeightsConfig(verify=verify), deltas=False)
    assert [int(send_update(versions, in_full=True)) for _ in expected] == expected


def test_deltas_count_and_new_connection_starts_with_verification():
    """Catches uncounted deltas, and a count that each new connection restarts."""
    versions = UpdateVersions(WeightsConfig(verify=4), deltas=True)
    full = [True, False, False, False, False, True, False]
    expected = [True, False, False, False, True, True, False]
    assert [send_update(versions, in_full=one) for one in full] == expected
    versions.reset()
    assert send_update(versions, in_full=True)


def test_delta_needs_its_base_on_every_rank_of_every_engine():
    """Catches a delta that is added to other weights on one rank: wrong weights, unnoticed."""
    versions = UpdateVersions(WeightsConfig(), deltas=True)
    version = versions.begin()
    versions.finish(version, in_full=True)
    assert versions.base == version
    assert versions.all_have_base({0: [version, version], 2: [version, version]})
    for other in (version - 1, version + 1, None):
        assert not versions.all_have_base({0: [version, version], 2: [version, other]})
        assert not versions.all_have_base({0: [other, version], 2: [version, version]})
        assert not versions.all_have_base({0: [other, other], 2: [version, version]})


def test_update_after_a_failed_one_sends_all_weights():
    """Catches trust in the old base, which some engines have lost in the middle of the update."""
    versions = UpdateVersions(WeightsConfig(), deltas=True)
    first = versions.begin()
    versions.finish(first, in_full=True)
    failed = versions.begin()
    assert versions.base is None
    again = versions.begin()
    assert len({first, failed, again}) == 3
    versions.finish(again, in_full=True)
    assert versions.base == again


def test_all_weights_are_sent_after_many_deltas():
    """Catches uncounted deltas, after which a lost byte would stay for the rest of a run."""
    versions = UpdateVersions(WeightsConfig(), deltas=True)
    send_update(versions, in_full=True)
    for _ in range(FULL_EVERY - 1):
        assert versions.base is not None
        send_update(versions, in_full=False)
    assert versions.base is None
    send_update(versions, in_full=True)
    assert versions.base is not None


@pytest.mark.parametrize("value", [0, -1, True, "seldom", 2.5])
def test_invalid_verify_is_refused(value):
    with pytest.raises(ConfigError, match="weights.verify"):
        WeightsConfig(verify=value)


class StartingEngines:
    """Engines of which none can take weights yet."""

    policy_version = 0

    def __init__(self, calls: list[str]) -> None:
        self._calls = calls

    def publishing(self):
        return nullcontext()

    def updatable(self):
        return []

    def finish_weight_update(self, indices, policy_version, *, timeout_s, republish, any_time):
        self._calls.append(f"version {policy_version}")


def test_generation_is_stopped_also_without_an_engine_to_update():
    """The caller makes its cut there, and the next update finds no engine with the old base."""
    calls: list[str] = []
    config = WeightsConfig()
    publisher = Publisher([], StartingEngines(calls), config, tensor_parallel=1, dtype=torch.int8)
    versions = publisher._versions = UpdateVersions(config, deltas=True)
    send_update(versions, in_full=True)
    publisher.publish(3, stop_generating=lambda: calls.append("stop"))
    assert calls == ["stop", "version 3"]
    assert versions.base is None


def connected(
    *targets: int, patience_s: float = 30.0
) -> tuple[SharedMemoryOutbox, list[InPlaceInbox]]:
    outbox = SharedMemoryOutbox(8, patience_s)
    readers = [InPlaceInbox([outbox.offer()], target, CPU) for target in targets]
    outbox.opened()
    return outbox, readers


def read(reader: InPlaceInbox) -> bool:
    return reader.wait([MESSAGE]) and len([*reader.receive(0, [MESSAGE])]) == 1


@pytest.mark.parametrize("late", ["sender", "receiver"])
def test_many_rounds_in_one_call_move_every_bit(model_folders, late):
    """Catches a bucket that is filled again before it is read, or read before it is full."""
    connection = Connection(model_folders["Qwen2"], {"tp_size": 2}, EngineShape(tp_size=2))
    for receiver, inbox in zip(connection.receivers, connection.inboxes, strict=True):
        receiver.start(targets := Shards(), inbox, with_checksums=False)
        receiver.target_of_test = targets
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


def test_update_is_incomplete_if_its_sender_ends_before_a_bucket_is_read(model_folders):
    """The engine would fail and be started again for a trainer rank's end, at times only."""
    connection = Connection(model_folders["Qwen2"], {}, EngineShape())
    (sender,), (receiver,) = connection.senders, connection.receivers
    receiver.start(Shards(), connection.inboxes[0], with_checksums=False)
    sender.fill_rounds([0], with_checksums=False)
    sender._outbox.close()
    assert not receiver.take(0)
    with pytest.raises(WeightError, match="has ended, or left out"):
        receiver.finish()


def test_reader_that_ends_is_not_waited_for():
    """Catches an update that a killed engine stops, and a turn that goes to another engine rank."""
    outbox, (first, second, _) = connected(7, 7, 8)
    started = time.monotonic()
    for number in range(4):
        outbox.bucket(number)
        outbox.post(number, [MESSAGE])
        assert read(second)
        if number == 0:
            first.close()
    assert time.monotonic() - started < 10.0


def test_reader_that_hangs_is_left_out_and_learns_it():
    """It may have read a bucket that was filled again: its weights must not count."""
    outbox, (hanging, other) = connected(7, 7, patience_s=0.2)
    outbox.post(0, [MESSAGE])
    assert read(other) and hanging.wait([MESSAGE])
    outbox.bucket(2)
    outbox.post(2, [MESSAGE])
    assert other.wait([MESSAGE])
    with pytest.raises(ConnectionError):
        list(hanging.receive(0, [MESSAGE]))
    assert not hanging.wait([MESSAGE])


def test_reader_learns_that_its_sender_has_ended():
    outbox, (reader,) = connected(7)
    outbox.close()
    assert not reader.wait([MESSAGE])
