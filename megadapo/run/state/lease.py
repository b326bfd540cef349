"""One driver a run: the lease on its folder, which says who drives and whether it still lives."""

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

from megadapo.cluster.this_node import this_machine
from megadapo.cluster.watch.guard import start_time
from megadapo.errors import ConfigError, InfraError

LEASE_FILE = "lease.json"
HEARTBEAT_S = 10.0
STALE_S = 120.0
"""A driver of another machine that has not touched its lease for so long is taken for dead: twelve
heartbeats, and longer than a network folder may answer from its cache."""
_LOGGER = logging.getLogger("megadapo.run")


@dataclass(frozen=True)
class Driver:
    """The process that holds a lease, told apart from any other that ever had its number."""

    host: str
    machine: str
    """This boot of the machine and its container's process numbers: where `pid` means a process."""
    pid: int
    started: str | None
    token: str

    @classmethod
    def here(cls) -> Self:
        return cls(
            socket.gethostname(), _machine(), os.getpid(), start_time(os.getpid()), uuid.uuid4().hex
        )


class Lease:
    """The right to drive the run in a folder; a heartbeat keeps it. Release it with `close`."""

    def __init__(self, folder: Path, driver: Driver, heartbeat_s: float) -> None:
        self._path = folder / LEASE_FILE
        self._driver = driver
        self._closed = threading.Event()
        self._heart = threading.Thread(target=self._beat, args=(heartbeat_s,), daemon=True)
        self._heart.start()

    @classmethod
    def take(
        cls, folder: Path, *, heartbeat_s: float = HEARTBEAT_S, stale_s: float = STALE_S
    ) -> Self:
        """Take the lease on a run's folder, over from a driver that is dead if need be.

        Where the driver was on another machine, its next heartbeat is waited for.

        Raises:
            ConfigError: another driver is alive; nothing was changed.
            InfraError: the folder cannot be written to.
        """
        driver = Driver.here()
        while not _claim(folder / LEASE_FILE, driver):
            _remove_stale(folder / LEASE_FILE, stale_s)
        return cls(folder, driver, heartbeat_s)

    def check(self) -> None:
        """Make sure that the lease is still this driver's.

        Raises:
            InfraError: it was taken over, as happens to one that was suspended for long.
        """
        holder = _read(self._path)
        if holder is None or holder.token != self._driver.token:
            who = "nobody" if holder is None else f"process {holder.pid} on {holder.host}"
            raise InfraError(
                f"{self._path} is held by {who}: this driver did not touch it in time and has lost "
                "the run's folder; nothing more is written to it"
            )

    def close(self) -> None:
        """Give the lease back, unless it is another's by now."""
        self._closed.set()
        self._heart.join()
        # where the folder refuses, it counts as left behind when this process has ended
        with contextlib.suppress(OSError):
            holder = _read(self._path)
            if holder is not None and holder.token == self._driver.token:
                self._path.unlink(missing_ok=True)

    def _beat(self, every_s: float) -> None:
        while not self._closed.wait(every_s):
            try:
                os.utime(self._path)
            except OSError:
                # a folder that is away for a moment; one that stays away is found by `check`
                continue


def heartbeat_of(folder: Path, pid: int) -> float | None:
    """When process `pid` of this machine last touched its lease on a run; None: it holds none."""
    path = folder / LEASE_FILE
    try:
        holder = _read(path)
        if holder is not None and (holder.machine, holder.pid) == (_machine(), pid):
            return _beat_of(path)
    except OSError:
        # a folder that is away for a moment says nothing of the process
        return None
    return None


def holder_of(folder: Path, *, stale_s: float = STALE_S) -> Driver | None:
    """Return the living driver of a run, if there is one; writes nothing."""
    path = folder / LEASE_FILE
    holder = _read(path)
    if holder is None:
        return None
    with contextlib.suppress(FileNotFoundError):
        if _lives(holder, age_s=time.time() - path.stat().st_mtime, stale_s=stale_s):
            return holder
    return None


def _claim(path: Path, driver: Driver) -> bool:
    """Create the lease, unless there is one; a kill cannot leave one that names nobody."""
    own = path.with_name(f"{path.name}.{driver.token}")
    try:
        with own.open("x", encoding="utf-8") as file:
            json.dump(asdict(driver), file)
            file.flush()
            os.fsync(file.fileno())
        os.link(own, path)
    except FileExistsError:
        return False
    except OSError as error:
        raise InfraError(f"{path} cannot be written: {error.strerror}") from error
    finally:
        with contextlib.suppress(OSError):
            own.unlink(missing_ok=True)
    return True


def _remove_stale(path: Path, stale_s: float) -> None:
    """Remove the lease of a dead driver.

    Raises:
        ConfigError: its driver is alive.
    """
    holder = _read(path)
    if _lives(holder, age_s=_age_s(path), stale_s=stale_s) and not _falls_silent(path, stale_s):
        who = "a driver that is just starting"
        if holder is not None:
            who = f"process {holder.pid} on {holder.host}"
        raise ConfigError(
            f"{path.parent} is driven by {who}: wait for it, stop it, or choose another "
            f"run.folder. If it is dead, {path} counts as left behind {stale_s:.0f} s after its "
            "last heartbeat"
        )
    aside = path.with_name(f"{path.name}.{uuid.uuid4().hex}")
    try:
        path.rename(aside)
    except FileNotFoundError:
        return
    if _read(aside) != holder:
        # another driver was quicker: what was moved is its lease
        aside.rename(path)
        return
    aside.unlink()


def _lives(holder: Driver | None, *, age_s: float, stale_s: float) -> bool:
    if holder is not None and holder.machine == _machine():
        return holder.started is not None and start_time(holder.pid) == holder.started
    return age_s < stale_s


def _falls_silent(path: Path, stale_s: float) -> bool:
    """Wait for the next heartbeat of a driver elsewhere; whether there is none in time."""
    holder = _read(path)
    if holder is not None and holder.machine == _machine():
        return False
    who = "somebody" if holder is None else f"process {holder.pid} on {holder.host}"
    _LOGGER.warning("%s is of %s: waiting for its next heartbeat", path, who)
    beat = _beat_of(path)
    while _beat_of(path) == beat:
        if _age_s(path) >= stale_s:
            return True
        time.sleep(min(1.0, stale_s / 10))
    return _read(path) is None


def _beat_of(path: Path) -> float | None:
    """When a lease was touched last, by the clock of the disk it is on."""
    try:
        # opening a file makes a network folder ask for its true times
        with path.open("rb") as file:
            return os.fstat(file.fileno()).st_mtime
    except FileNotFoundError:
        return None


def _age_s(path: Path) -> float:
    """Seconds since a file was touched, by the clock of the disk it is on; clocks may differ."""
    beat = _beat_of(path)
    if beat is None:
        return float("inf")
    try:
        with tempfile.TemporaryFile(dir=path.parent) as fresh:
            return os.fstat(fresh.fileno()).st_mtime - beat
    except OSError as error:
        raise InfraError(f"{path.parent} cannot be written to: {error.strerror}") from error


def _read(path: Path) -> Driver | None:
    """Return who holds a lease; None where there is none, or it is not yet written."""
    try:
        return Driver(**json.loads(path.read_text(encoding="utf-8")))
    except (FileNotFoundError, ValueError, TypeError):
        return None


def _machine() -> str:
    return f"{this_machine()} {os.stat('/proc/self/ns/pid').st_ino}"
