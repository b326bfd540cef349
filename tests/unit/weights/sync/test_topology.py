"""Receivers and transports for the placements of a cluster."""

from megadapo.weights.sync.planning import find_topology


def on_gpus(nodes: int, per_node: int) -> list[tuple[str, str]]:
    return [(f"n{node}", str(gpu)) for node in range(nodes) for gpu in range(per_node)]


def test_engines_of_one_node_share_memory():
    places = find_topology([("n0", None)] * 4, ["n0", "n0"], [(), ()])
    assert places.transport == "shared_memory"
    assert places.receiver_of == [0, 0] and places.receivers == ["n0"]
    assert places.sources == ["n0"] * 4 and places.engines_per_receiver == ()


def test_cpu_engines_use_memory_of_own_node_or_messages():
    ranks = [("n0", None), ("n1", None)]
    spread = find_topology(ranks, ["n1", "n0"], [(), ()])
    assert spread.transport == "shared_memory" and spread.sources == ["n0", "n1"]
    assert spread.receivers == ["n1", "n0"]
    apart = find_topology(ranks, ["n1", "n2"], [(), ()])
    assert apart.transport == "nccl" and apart.sources is None


def test_engine_opens_only_visible_gpus():
    gpus = [tuple("0123"), tuple("4567")] * 2
    nodes = ["n0", "n0", "n1", "n1"]
    places = find_topology(on_gpus(2, 8), nodes, gpus)
    assert places.transport == "cuda_ipc" and places.receiver_of == [0, 1, 2, 3]
    assert places.sources == [f"engine {rank // 4}" for rank in range(16)]


def test_engines_on_other_gpus_get_messages_once_per_node():
    nodes, gpus = ["n1", "n2", "n1", "n1"], [(gpu,) for gpu in "0012"]
    places = find_topology(on_gpus(1, 4), nodes, gpus)
    assert places.transport == "nccl" and places.sources is None
    assert places.receivers == ["n1", "n2"] and places.receiver_of == [0, 1, 0, 0]
    assert places.engines_per_receiver == (3, 1) and places.member_of_each == [0, 0, 1, 2]
    # The same GPU numbers on another node are other GPUs.
    assert find_topology(on_gpus(1, 4), ["n1"], [tuple("01")]).transport == "nccl"
