"""CUDA IPC: buckets on a GPU, read by another process on the same GPU."""

import time
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp

from megadapo.weights.layout.layout import layout_for
from megadapo.weights.layout.placement import replica_positions
from megadapo.weights.sync.buckets import pack
from megadapo.weights.sync.delta import Stamp, decode, encode
from megadapo.weights.sync.plan import EngineShape
from megadapo.weights.sync.planning import make_plan
from megadapo.weights.sync.receiver import change_in_place
from megadapo.weights.sync.sender import WeightSender
from tests.support.weights.connection import receiver_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

CONFIG = {
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_size": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "num_hidden_layers": 3,
    "intermediate_size": 512,
    "vocab_size": 1000,
}
BUCKET = 1 << 18
ENGINE = EngineShape()


class Live:
    """GPU parameters into which slices are written, as in vLLM."""

    def __init__(self, shapes):
        self.parameters = {
            name: torch.zeros(shape, dtype=torch.bfloat16, device="cuda")
            for name, shape in shapes.items()
        }

    def begin(self, name, shape):
        return self.parameters[name]

    def complete(self, name, tensor):
        """Written in place."""


def receive(plan, offers, filled, taken, results: Path) -> None:
    """Run the engine's process: open the offers, receive every round, save the result."""
    layout = layout_for(CONFIG)
    receiver = receiver_of(plan, layout, bucket_bytes=BUCKET, dtype=torch.bfloat16)
    live = Live(receiver.shapes)
    inbox = receiver.open_inbox("cuda_ipc", offers, torch.device("cuda"))
    taken.put("opened")
    receiver.start(live, inbox, with_checksums=False)
    for number in iter(filled.get, None):
        receiver.take(number)
        torch.cuda.synchronize()
        taken.put(number)
    receiver.finish()
    torch.save({name: one.cpu() for name, one in live.parameters.items()}, results)
    inbox.close()


def test_other_process_reads_buckets(tmp_path):
    """Catches handles in the wrong order, buckets read before they are written, and wrong slices"""
    layout = layout_for(CONFIG)
    positions = replica_positions(layout, tp_size=2)
    plan = make_plan(layout, positions, ENGINE, itemsize=2, max_bundle_bytes=BUCKET)
    senders = []
    for rank, position in enumerate(positions):
        params = {
            shard.name: torch.randn(shard.shape, dtype=torch.bfloat16, device="cuda")
            for shard in layout.megatron_shards(position)
        }
        senders.append((WeightSender(params, layout, position, rank), params))
    # Replicated weights are equal on both ranks of a real trainer.
    for name, param in senders[0][1].items():
        if "layernorm" in name:
            senders[1][1][name].copy_(param)
    sizes = {"bucket_bytes": BUCKET, "dtype": torch.bfloat16, "transport": "cuda_ipc"}
    offers = [sender.prepare(plan, **sizes) for sender, _ in senders]
    context = mp.get_context("spawn")
    filled, taken = context.Queue(), context.Queue()
    results = tmp_path / "received.pt"
    engine = context.Process(target=receive, args=(plan, offers, filled, taken, results))
    engine.start()
    assert taken.get(timeout=120) == "opened"
    for sender, _ in senders:
        sender.opened()
    for number in range(pack(plan, BUCKET).num_rounds):
        for sender, _ in senders:
            sender.fill(number)
        filled.put(number)
        assert taken.get(timeout=120) == number
    filled.put(None)
    engine.join(timeout=120)
    assert engine.exitcode == 0
    received = torch.load(results, weights_only=True)
    for transfer in plan.transfers:
        for _, copy in plan.slices(transfer):
            source = senders[transfer.owner][1][copy.source_name]
            expected = source.narrow(copy.axis, copy.source_offset, copy.size).cpu()
            target = received[copy.target_name]
            assert torch.equal(target.narrow(copy.axis, copy.target_offset, copy.size), expected)


def hold(offer, opened) -> None:
    """Run an engine's process: open the offer and keep it until the process is killed."""
    from megadapo.weights.sync.transports.in_place import InPlaceInbox

    inbox = InPlaceInbox([offer], 0, torch.device("cuda"))
    opened.put(inbox is not None)
    time.sleep(600)


def test_buckets_of_killed_engine_are_freed():
    """Catches memory that torch keeps for a receiver that never closes it."""
    from megadapo.weights.sync.transports.in_place import CudaIpcOutbox

    num_bytes, device = 1 << 26, torch.device("cuda", torch.cuda.current_device())
    context = mp.get_context("spawn")
    before = torch.cuda.memory_allocated()
    for _ in range(2):
        outbox, opened = CudaIpcOutbox(num_bytes, device), context.Queue()
        engine = context.Process(target=hold, args=(outbox.offer(), opened))
        engine.start()
        assert opened.get(timeout=120)
        outbox.opened()
        assert torch.cuda.memory_allocated() >= before + 2 * num_bytes
        engine.kill()
        engine.join()
        outbox.close()
        assert torch.cuda.memory_allocated() == before


def test_delta_on_gpu_equals_cpu():
    """Catches a section that depends on the device, and a wrong row of a strided parameter."""
    torch.manual_seed(0)
    before = torch.randn(512, 256).mul_(0.02).bfloat16()
    after = before.clone()
    after.view(torch.int16)[torch.rand(512, 256) < 0.046] += 1
    after[3, 5:9] = torch.tensor([torch.nan, torch.inf, -0.0, 7.0])
    images = [one.view(-1).view(torch.uint8) for one in (before, after)]
    stamp = Stamp(base=1, version=2, bundle=3)
    expected, count = encode(*images, stamp, itemsize=2)
    section, its_count = encode(*[one.cuda() for one in images], stamp, itemsize=2)
    assert torch.equal(section.cpu(), expected) and its_count == count
    live = torch.zeros(512, 264, dtype=torch.bfloat16, device="cuda")[:, :256]
    live.copy_(before)
    change_in_place(live, decode(section, stamp, itemsize=2, num_elements=before.numel()))
    assert torch.equal(live.cpu().view(torch.int16), after.view(torch.int16))
