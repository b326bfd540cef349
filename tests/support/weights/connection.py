"""Trainer ranks and engine ranks in one process, connected as an update connects them."""

import torch
from safetensors.torch import load_file

from megadapo.weights.disk.sources import open_layout
from megadapo.weights.layout.placement import replica_positions
from megadapo.weights.sync.buckets import pack
from megadapo.weights.sync.delta import combine
from megadapo.weights.sync.planning import make_plan
from megadapo.weights.sync.receiver import WeightReceiver
from megadapo.weights.sync.sender import WeightSender
from tests.support.weights.ranks import import_weights

BUCKET = 4096


class Shards:
    """A target that collects whole shards, as vLLM's layerwise reload gets them."""

    def __init__(self, dtype=torch.float32):
        self.dtype, self.open, self.done, self.old = dtype, set(), {}, {}
        self.most_open = 0

    def begin(self, name, shape):
        self.open.add(name)
        self.most_open = max(self.most_open, len(self.open))
        return self.old.get(name, torch.zeros(shape, dtype=self.dtype))

    def complete(self, name, tensor):
        self.open.remove(name)
        assert name not in self.done
        self.done[name] = tensor

    def compare(self, folder, layout, position):
        """Check that these are the weights of a folder at an engine rank's position."""
        expected = expected_shards(folder, layout, position, self.dtype)
        assert self.done.keys() == expected.keys()
        assert all(torch.equal(self.done[name], expected[name]) for name in expected)


class Live(Shards):
    """A target whose parameters are written in place, as on CUDA."""

    def __init__(self, shapes, dtype=torch.float32):
        super().__init__(dtype)
        self.done = {name: torch.full(shape, torch.nan).to(dtype) for name, shape in shapes.items()}
        for name, shape in shapes.items():
            # rows with gaps between them, as some kernels need
            if len(shape) == 2 and name.endswith("proj.weight"):
                wide = torch.zeros(shape[0], shape[1] + 8, dtype=dtype)
                self.done[name] = wide[:, : shape[1]]
            elif "embed" in name or "lm_head" in name:
                self.done[name].zero_()

    def begin(self, name, shape):
        return self.done[name]

    def complete(self, name, tensor):
        """Do nothing: it is written in place."""


def rank_params(folder, layout, position):
    """Return the weights of a trainer rank, read from a folder; NaN shows gaps."""
    shards = layout.megatron_shards(position)
    params = {shard.name: torch.full(shard.shape, torch.nan) for shard in shards}
    import_weights(folder, params, layout, position)
    return params


class Connection:
    """All trainer ranks and all ranks of one engine, connected by shared memory."""

    def __init__(self, folder, trainer, engine, dtype=torch.float32, *, deltas=False):
        self.folder, self.layout = folder, open_layout(folder)
        self.engine, self.dtype = engine, dtype
        positions = replica_positions(self.layout, **trainer)
        self.senders, self.params = [], []
        for rank, position in enumerate(positions):
            params = rank_params(folder, self.layout, position)
            self.params.append(params)
            self.senders.append(WeightSender(params, self.layout, position, rank))
        self.plan = make_plan(
            self.layout, positions, engine, itemsize=dtype.itemsize, max_bundle_bytes=BUCKET
        )
        self.schedule = pack(self.plan, BUCKET)
        self.num_rounds = self.schedule.num_rounds
        offers = [
            sender.prepare(
                self.plan, bucket_bytes=BUCKET, dtype=dtype, deltas=deltas,
                transport="shared_memory",
            )
            for sender in self.senders
        ]  # fmt: skip
        assert all(offer["num_bytes"] <= BUCKET for offer in offers)
        self.receivers = [
            receiver_of(self.plan, self.layout, engine_rank=rank, dtype=dtype)
            for rank in range(engine.num_ranks)
        ]
        self.connect(offers)

    def connect(self, offers):
        """Open the buckets that the senders offer."""
        self.inboxes = [
            receiver.open_inbox("shared_memory", offers, torch.device("cpu"))
            for receiver in self.receivers
        ]
        for sender in self.senders:
            sender.opened()

    def run(self, *, with_checksums=None, damage=None, targets=None, version=0, delta=None):
        """Run one update, with the senders one round ahead as in a real update."""
        if with_checksums is None:
            with_checksums = delta is None
        targets = targets or [Shards(self.dtype) for _ in self.receivers]
        for receiver, target, inbox in zip(self.receivers, targets, self.inboxes, strict=True):
            receiver.start(
                target, inbox, with_checksums=with_checksums, version=version, delta=delta
            )
        count = self.begin(delta)
        sums = [self.fill(0, with_checksums)]
        for number in range(count):
            if number + 1 < count:
                sums.append(self.fill(number + 1, with_checksums))
            if damage is not None:
                damage(number)
            for receiver in self.receivers:
                receiver.take(number)
        for receiver in self.receivers:
            receiver.verify([list(rounds) for rounds in zip(*sums, strict=True)])
            receiver.finish()
        return targets

    def assert_received(self, targets):
        """Compare the shards of all engine ranks with the Hugging Face tensors."""
        for rank, target in enumerate(targets):
            target.compare(self.folder, self.layout, self.engine.position(rank))

    def begin(self, delta):
        """Start an update on all senders; return its number of rounds."""
        for sender in self.senders:
            sender.begin(None if delta is None else delta.sizes)
        if delta is None:
            return self.num_rounds
        return self.schedule.repack(delta.sizes).num_rounds

    def encode(self, base, version, *, max_share=1.0, with_checksums=False):
        """Return the delta since the last update; None if it exceeds `max_share` on a rank."""
        encoded = [
            sender.encode(
                base=base, version=version, max_share=max_share, with_checksums=with_checksums
            )
            for sender in self.senders
        ]
        return None if None in encoded else combine(self.plan, encoded, base)

    def flip_bit(self, rank, number, offset):
        """Flip a bit in the bucket of a trainer rank."""
        self.senders[rank]._outbox._memory[number % 2, offset] ^= 4

    def fill(self, number, with_checksums):
        return [sender.fill(number, with_checksums=with_checksums) for sender in self.senders]


def receiver_of(
    plan, layout, *, receiver=0, engine_rank=0, dtype=torch.float32, bucket_bytes=BUCKET
):
    """Return the receiver of an engine rank."""
    return WeightReceiver(
        plan, layout.engine_shards(plan.engine.position(engine_rank)), receiver=receiver,
        engine_rank=engine_rank, bucket_bytes=bucket_bytes, dtype=dtype,
    )  # fmt: skip


def expected_shards(folder, layout, position, dtype):
    """Return engine parameters, copied from the Hugging Face tensors."""
    hf = load_file(folder / "model.safetensors")
    expected = {}
    for shard in layout.engine_shards(position):
        local = torch.zeros(shard.shape)
        for offset, span in shard.placed_spans():
            piece = hf[span.tensor].narrow(shard.axis, span.start, span.size)
            local.narrow(shard.axis, offset, span.size).copy_(piece)
        expected.setdefault(shard.name, []).append(local.to(dtype))
    stacked = {s.name for s in layout.engine_shards(position) if s.expert is not None}
    return {
        name: torch.stack(parts) if name in stacked else parts[0]
        for name, parts in expected.items()
    }
