"""A run on fewer trainer ranks and engines than its recipe asks for, after nodes were lost.

A checkpoint loads at any split, and an update does not depend on the number of data-parallel ranks,
so a lost node costs speed instead of the run.
"""

from __future__ import annotations

import time
from collections.abc import Container, Iterator, Sequence
from functools import partial
from math import lcm

from megadapo.cluster.health import nodes_to_leave_out
from megadapo.cluster.nodes import alive_nodes
from megadapo.cluster.ray_connection import connect_to_ray
from megadapo.config import RunConfig, from_dict, to_dict
from megadapo.errors import ConfigError, InfraError

POLL_S = 2.0


def fit_to_cluster(config: RunConfig, *, has_engines: bool = True) -> tuple[RunConfig, list[str]]:
    """Join the cluster, wait for its nodes, and return the largest run that they have room for.

    Return a warning too if the run is smaller than the recipe's. The configuration is for this
    start only: the run's folder keeps the recipe's, so that the next start asks for all nodes.
    Raise InfraError if after `cluster.start_timeout_s` there is not even room for one
    data-parallel rank and one engine.

    `has_engines`: whether the run starts engines; stages of training on rows of data do not.
    """
    if config.cluster.address is None:
        raise ConfigError("--allow-fewer needs a cluster of several nodes: set cluster.address")
    connect_to_ray(config.cluster, 0)
    until = time.monotonic() + config.cluster.start_timeout_s
    fit = partial(largest_that_fits, config, has_engines=has_engines)
    while fit(_slots(config)) != config and time.monotonic() < until:
        time.sleep(POLL_S)
    slots = _slots(config, without=nodes_to_leave_out(config.cluster))
    fitting = fit(slots)
    if fitting == config:
        return config, []
    found = f"{len(slots)} healthy nodes with {sum(slots)} {_resource(config)}s"
    if fitting is None:
        raise InfraError(
            f"the cluster has {found}, too few for one data-parallel rank"
            f"{' and one engine' if has_engines else ''}: start Ray on more nodes"
        )
    warning = (
        f"--allow-fewer: the cluster has {found}. This start trains on "
        f"{fitting.trainer.data_parallel} of trainer.data_parallel = {config.trainer.data_parallel}"
    )
    if has_engines:
        warning += (
            f" and generates on {fitting.rollout.num_engines} of rollout.num_engines = "
            f"{config.rollout.num_engines}"
        )
    return fitting, [warning]


def _slots(config: RunConfig, *, without: Container[str] = ()) -> list[int]:
    """Return the number of GPUs, or cores without GPUs, of each node that is up."""
    nodes = (node for node in alive_nodes() if node["NodeID"] not in without)
    return [int(node["Resources"].get(_resource(config), 0)) for node in nodes]


def _resource(config: RunConfig) -> str:
    return "GPU" if config.cluster.uses_cuda else "CPU"


def largest_that_fits(
    config: RunConfig, slots: Sequence[int], *, has_engines: bool = True
) -> RunConfig | None:
    """Return the run with most data-parallel ranks and engines; None if the smallest has no room.

    `slots`: GPUs of each node, or cores without GPUs.
    """
    trainer, rollout = config.trainer, config.rollout
    # neither a tensor-parallel group nor an engine may span nodes
    unit = lcm(trainer.tensor_parallel, rollout.ranks_per_engine if has_engines else 1)
    room = sum(count // unit * unit for count in slots)
    plain = to_dict(config)
    for data_parallel, num_engines in _sizes(config, room, has_engines=has_engines):
        plain["trainer"]["data_parallel"] = data_parallel
        plain["rollout"]["num_engines"] = num_engines
        try:
            return from_dict(plain)
        except ConfigError:
            continue  # such as experts that these ranks cannot share
    return None


def _sizes(config: RunConfig, room: int, *, has_engines: bool) -> Iterator[tuple[int, int]]:
    """Yield numbers of data-parallel ranks and engines with room, most of the recipe's first."""
    most_ranks, most_engines = config.trainer.data_parallel, config.rollout.num_engines
    ranks_per_copy = config.trainer.num_ranks // most_ranks
    if not has_engines:
        fitting = min(most_ranks, room // ranks_per_copy)
        yield from ((ranks, most_engines) for ranks in range(fitting, 0, -1))
        return
    per_engine, evaluating = config.rollout.ranks_per_engine, config.evaluation.num_engines
    shared = config.cluster.placement == "colocated"
    sizes = []
    for ranks in range(1, most_ranks + 1):
        left = room if shared else room - ranks * ranks_per_copy
        if shared and config.cluster.uses_cuda:
            # every GPU with an engine has a trainer rank
            left = min(room, ranks * ranks_per_copy)
        engines = min(most_engines, left // per_engine - evaluating)
        if engines >= 1 and ranks * ranks_per_copy <= room:
            share = min(ranks / most_ranks, engines / most_engines)
            sizes.append((share, ranks + engines, ranks, engines))
    yield from ((ranks, engines) for *_, ranks, engines in sorted(sizes, reverse=True))
