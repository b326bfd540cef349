"""Processes forked off one that has torch and Megatron loaded: imports once, not once a process."""

import multiprocessing
from collections.abc import Callable
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from typing import Any

import pytest


def fork_context() -> ForkServerContext:
    """Start the one that others are forked off, unless it runs; their torch has one thread."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.support.processes.preload"])
    with pytest.MonkeyPatch.context() as patch:
        # an idle group's threads still wake up all the time
        patch.setenv("OMP_NUM_THREADS", "1")
        forkserver.ensure_running()
    return context


def run_processes(
    function: Callable[..., Any], args: tuple[Any, ...], count: int, *, fresh: bool = False
) -> None:
    """Run `function(index, *args)` in so many processes; an error of one is raised here.

    `fresh`: each imports for itself, as it must where its memory is measured: pages of a fork
    that it has not touched yet would be taken for growth.
    """
    from torch.multiprocessing import start_processes

    if not fresh:
        fork_context()
    method = "spawn" if fresh else "forkserver"
    start_processes(function, args, nprocs=count, start_method=method)
