"""A check that ranks never wait for a message that is not sent."""

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence

Message = tuple[int, bool, int]
"""Other rank, whether this rank sends, and bytes."""


def stuck_ranks(batches: Mapping[int, Sequence[Sequence[Message]]]) -> dict[int, list[Message]]:
    """Return the ranks that never finish their batches, with the messages that they wait for.

    As in NCCL, a batch starts when the last one has been matched, in order and in equal sizes.
    """
    offered: dict[tuple[int, int, bool], deque[tuple[int, int]]] = defaultdict(deque)
    position = dict.fromkeys(batches, -1)
    open_messages = dict.fromkeys(batches, 0)
    waiting: dict[int, list[Message]] = {rank: [] for rank in batches}
    ready = deque(batches)
    while ready:
        rank = ready.popleft()
        if open_messages[rank] or position[rank] + 1 >= len(batches[rank]):
            continue
        position[rank] += 1
        batch = batches[rank][position[rank]]
        open_messages[rank] = len(batch)
        waiting[rank] = list(batch)
        ready.append(rank)
        for peer, sends, size in batch:
            pair = (rank, peer) if sends else (peer, rank)
            others = offered[*pair, not sends]
            if not others:
                offered[*pair, sends].append((rank, size))
                continue
            other, its_size = others.popleft()
            assert its_size == size, f"{pair}: {size} bytes meet {its_size}"
            for one, partner, its_sends in ((rank, peer, sends), (other, rank, not sends)):
                open_messages[one] -= 1
                waiting[one].remove((partner, its_sends, size))
            ready.append(other)
    return {rank: left for rank, left in waiting.items() if left}
