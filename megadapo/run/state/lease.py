"""The lease on a run's folder: at most one living driver per run."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import tempfile
import threading
import time
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from megadapo.cluster.this_node import pid_namespace
from megadapo.cluster.watch.guard import start_time
from megadapo.errors import InfraError

LEASE_FILE = "lease.json"
HEARTBEAT_S = 10.0
STALE_S = 120.0
"""Seconds without a heartbeat after which a driver on another machine counts as dead: twelve
heartbeats, and longer than a network folder caches file times."""
UNKNOWN_S = 60.0
"""Seconds that a driver continues without being able to read its lease."""
_LOGGER = logging.getLogger("megadapo.run")


@dataclass(frozen=True)
class Driver:
    """The process that holds a lease; its start time tells it from others with the same pid."""

    host: str
    machine: str
    """Boot of the machine and pid namespace, in which `pid` identifies a process."""
    pid: int
    started: str | None
    token: str

    @classmethod
    def here(cls) -> Self:
        pid = os.getpid()
        host, machine, token = socket.gethostname(), pid_namespace(), uuid.uuid4().hex
        return cls(host, machine, pid, start_time(pid), token)


class Lease:
    """The right to drive the run in a folder, kept by a heartbeat until `close`."""

    def __init__(self, folder: Path, driver: Driver, heartbeat_s: float) -> None:
        self._path = folder / LEASE_FILE
        self._driver = driver
        self._checked = time.monotonic()
        """Time of the last check that could read the lease."""
        self._closed = threading.Event()
        self._thread = threading.Thread(
            target=self._send_heartbeats, args=(heartbeat_s,), daemon=True
        )
        self._thread.start()

    @classmethod
    def take(
        cls, folder: Path, *, heartbeat_s: float = HEARTBEAT_S, stale_s: float = STALE_S
    ) -> Self:
        """Take the lease on a run's folder, also from a dead driver.

        If that driver ran on another machine, wait until its heartbeat is overdue.
        """
        driver = Driver.here()
        _take(folder / LEASE_FILE, driver, stale_s)
        return cls(folder, driver, heartbeat_s)

    def check(self) -> None:
        """Raise InfraError if another driver took the lease, as after a suspension of this one.

        The same holds if the folder has been unreadable for `UNKNOWN_S`.
        """
        try:
            holder = _read(self._path)
        except OSError as error:
            if time.monotonic() - self._checked < UNKNOWN_S:
                return
            raise InfraError(
                f"{self._path} cannot be read for {UNKNOWN_S:g} s: {error.strerror}"
            ) from error
        self._checked = time.monotonic()
        if holder is None or holder.token != self._driver.token:
            who = "no process" if holder is None else f"process {holder.pid} on {holder.host}"
            raise InfraError(
                f"{self._path} is held by {who}: this driver's heartbeat was late and it has lost "
                "the run's folder; it writes no more to it"
            )

    def is_lost(self) -> bool:
        """Return whether another driver is known to have taken the lease."""
        try:
            holder = _read(self._path)
        except OSError:
            return False
        return holder is not None and holder.token != self._driver.token

    def close(self) -> None:
        """Release the lease if this driver still holds it."""
        self._closed.set()
        self._thread.join()
        # if the folder refuses, the lease becomes stale when this process has ended
        with contextlib.suppress(OSError):
            holder = _read(self._path)
            if holder is not None and holder.token == self._driver.token:
                self._path.unlink(missing_ok=True)

    def _send_heartbeats(self, every_s: float) -> None:
        while not self._closed.wait(every_s):
            try:
                holder = _read(self._path)
                # another driver's lease must expire if that driver dies
                if holder is not None and holder.token == self._driver.token:
                    os.utime(self._path)
            except OSError:
                # the folder may be unreachable for a moment; `check` finds one that stays away
                continue


def heartbeat_of(folder: Path, pid: int) -> float | None:
    """Return the time of the last heartbeat of process `pid`; None if it holds no lease here."""
    path = folder / LEASE_FILE
    try:
        holder = _read(path)
        if holder is not None and (holder.machine, holder.pid) == (pid_namespace(), pid):
            return _heartbeat_time(path)
    except OSError:
        # an unreachable folder says nothing about the process
        return None
    return None


def holder_of(folder: Path) -> Driver | None:
    """Return the living driver of a run, or None."""
    path = folder / LEASE_FILE
    holder = _read(path)
    if holder is None:
        return None
    with contextlib.suppress(FileNotFoundError):
        if _lives(holder, age_s=age_s(path), stale_s=STALE_S):
            return holder
    return None


def age_s(path: Path) -> float:
    """Return the seconds since a file was last written or touched, infinity if it is missing.

    The clock is the one of the file's disk, so clocks of machines do not matter, unless this user
    may not write to the folder.
    """
    written = _heartbeat_time(path)
    if written is None:
        return float("inf")
    try:
        with tempfile.TemporaryFile(dir=path.parent) as fresh:
            return os.fstat(fresh.fileno()).st_mtime - written
    except OSError:
        return time.time() - written


def _take(path: Path, driver: Driver, stale_s: float) -> None:
    """Create the lease, or replace a dead driver's; a kill leaves none without a holder.

    Raise InfraError if its driver is alive; it may end soon, so a supervisor tries again.
    """
    own = path.with_name(f"{path.name}.{driver.token}")
    try:
        with own.open("x", encoding="utf-8") as file:
            json.dump(asdict(driver), file)
            file.flush()
            os.fsync(file.fileno())
        while not _is_linked(own, path):
            holder = _read(path)
            _check_dead(path, holder, stale_s)
            # the name depends on the dead driver, so only one process at a time replaces its lease
            mark = path.with_name(f"{path.name}.{holder.token if holder else 'unreadable'}.dead")
            _take(mark, driver, stale_s)
            try:
                # by now the lease may belong to another driver, which was quicker
                if path.exists() and _read(path) == holder:
                    own.replace(path)
                    return
            finally:
                with contextlib.suppress(OSError):
                    mark.unlink(missing_ok=True)
    except OSError as error:
        raise InfraError(
            f"{path} cannot be written: {error.strerror}; if its driver is dead, delete it by hand"
        ) from error
    finally:
        with contextlib.suppress(OSError):
            own.unlink(missing_ok=True)


def _is_linked(own: Path, path: Path) -> bool:
    """Return whether a file could be given the name of the lease, which no other has then."""
    try:
        os.link(own, path)
    except FileExistsError:
        # a file server repeats a request whose answer was lost: the link may be our own
        with contextlib.suppress(OSError):
            return path.samefile(own)
        return False
    return True


def _check_dead(path: Path, holder: Driver | None, stale_s: float) -> None:
    if _lives(holder, age_s=age_s(path), stale_s=stale_s) and not _is_overdue(path, stale_s):
        who = "a driver that is starting"
        if holder is not None:
            who = f"process {holder.pid} on {holder.host}"
        raise InfraError(
            f"{path.parent} is driven by {who}: wait for it, stop it, or choose another "
            f"run.folder. If it is dead, {path} expires {stale_s:.0f} s after its last heartbeat"
        )


def _lives(holder: Driver | None, *, age_s: float, stale_s: float) -> bool:
    if holder is not None and holder.machine == pid_namespace():
        return holder.started is not None and start_time(holder.pid) == holder.started
    return age_s < stale_s


def _is_overdue(path: Path, stale_s: float) -> bool:
    """Wait for the heartbeat of a driver on another machine; return whether it is overdue."""
    holder = _read(path)
    if holder is not None and holder.machine == pid_namespace():
        return False
    who = "an unknown process" if holder is None else f"process {holder.pid} on {holder.host}"
    _LOGGER.warning("%s is held by %s: waiting for its next heartbeat", path, who)
    heartbeat = _heartbeat_time(path)
    while _heartbeat_time(path) == heartbeat:
        if age_s(path) >= stale_s:
            return True
        time.sleep(min(1.0, stale_s / 10))
    return _read(path) is None


def _heartbeat_time(path: Path) -> float | None:
    """Return the time of the last heartbeat by the clock of the lease's disk."""
    try:
        # opening the file makes a network folder refresh its cached times
        with path.open("rb") as file:
            return os.fstat(file.fileno()).st_mtime
    except FileNotFoundError:
        return None


def _read(path: Path) -> Driver | None:
    """Return the holder of a lease; None without a lease or while it is being written."""
    try:
        return Driver(**json.loads(path.read_text(encoding="utf-8")))
    except (FileNotFoundError, ValueError, TypeError):
        return None
