"""Send a model's random weights to another process on the same GPU, or on the CPU.

    python tools/first_gpu/weight_update.py MODEL --json=FILE

FILE gets the seconds, bytes and copies of full updates. The other process compares the checksum of
every slice of the first and the last one, between which all weights change.
"""

from __future__ import annotations

import multiprocessing
import sys
import time
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from megadapo.lab.record import write_record
from megadapo.weights.config import WeightsConfig
from megadapo.weights.disk.sources import open_layout
from megadapo.weights.layout.placement import replica_positions
from megadapo.weights.sync.buckets import max_bundle_bytes, pack
from megadapo.weights.sync.plan import EngineShape, UpdatePlan
from megadapo.weights.sync.planning import make_plan
from megadapo.weights.sync.receiver import WeightReceiver
from megadapo.weights.sync.sender import WeightSender
from megadapo.weights.sync.transports.interface import Offer, Transport

DTYPE = torch.bfloat16
VERIFIED = (True, False, False, False, True)
"""Whether each update is verified, which takes time."""
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TRANSPORT: Transport = "cuda_ipc" if DEVICE.type == "cuda" else "shared_memory"
# a rehearsal's model has several rounds too
BUCKET_BYTES = int(WeightsConfig().bucket_mib * 2**20) if DEVICE.type == "cuda" else 2**19


class Parameters:
    """The engine's parameters, written in place."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._parameters = {
            name: torch.zeros(shape, dtype=DTYPE, device=DEVICE) for name, shape in shapes.items()
        }

    def begin(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        return self._parameters[name]

    def complete(self, name: str, tensor: torch.Tensor) -> None:
        """Do nothing: the slices are already in the parameter."""


def receive(model: Path, plan: UpdatePlan, offer: Offer, trainer: Connection) -> None:
    """Receive the updates, as an engine does."""
    shards = open_layout(model).engine_shards(plan.engine.position(0))
    receiver = WeightReceiver(
        plan, shards, receiver=0, engine_rank=0, bucket_bytes=BUCKET_BYTES, dtype=DTYPE
    )
    inbox = receiver.open_inbox(TRANSPORT, [offer], DEVICE)
    parameters = Parameters(receiver.shapes)
    trainer.send("open")
    for verifies in VERIFIED:
        receiver.start(parameters, inbox, with_checksums=verifies)
        for number in range(pack(plan, BUCKET_BYTES).num_rounds):
            assert receiver.take(number), "the sender has ended"
        if verifies:
            receiver.verify(trainer.recv())
        receiver.finish()
        trainer.send("complete")
    inbox.close()


def send(sender: WeightSender, num_rounds: int, engine: Connection, *, verifies: bool) -> float:
    """Return the seconds of one update."""
    started = time.perf_counter()
    sender.begin(None)
    sums = sender.fill_rounds(range(num_rounds), with_checksums=verifies)
    if verifies:
        engine.send([sums])
    engine.recv()
    return time.perf_counter() - started


def main() -> int:
    """Send all updates; return 1 if the engine's process fails."""
    model, option = sys.argv[1:]
    layout = open_layout(model)
    (position,) = replica_positions(layout)
    parameters = {
        shard.name: torch.empty(shard.shape, dtype=DTYPE, device=DEVICE)
        for shard in layout.megatron_shards(position)
    }
    sender = WeightSender(parameters, layout, position, 0)
    bundle = max_bundle_bytes(BUCKET_BYTES)
    plan = make_plan(layout, [position], EngineShape(), itemsize=2, max_bundle_bytes=bundle)
    offer = sender.prepare(plan, bucket_bytes=BUCKET_BYTES, dtype=DTYPE, transport=TRANSPORT)
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    engine = context.Process(target=receive, args=(Path(model), plan, offer, theirs))
    engine.start()
    # so that the end of the engine's process ends every wait for it
    theirs.close()
    ours.recv()
    sender.opened()
    num_rounds, seconds = pack(plan, BUCKET_BYTES).num_rounds, []
    for verifies in VERIFIED:
        for parameter in parameters.values():
            parameter.normal_(0.0, 0.02)
        seconds.append(send(sender, num_rounds, ours, verifies=verifies))
        print(f"{plan.num_bytes:,} bytes in {seconds[-1]:.3f} s", "verified" if verifies else "")
    record = {
        "transport": TRANSPORT,
        "seconds": seconds,
        "verified": VERIFIED,
        "bytes": plan.num_bytes,
        "rounds": num_rounds,
        # into a bucket, and out of it
        "copies": 2 * sum(len(plan.bundle(one).copies) for one in plan.transfers),
    }
    write_record(Path(option.removeprefix("--json=")), record)
    engine.join()
    return int(engine.exitcode != 0)


if __name__ == "__main__":
    sys.exit(main())
