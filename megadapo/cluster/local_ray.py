"""The Ray that a run starts on its machine: daemons with a private folder and one end.

Ray lets every user write to the folder of its sockets and logs, so the folder is inside one that
only this user can enter.
"""

from __future__ import annotations

import atexit
import fcntl
import logging
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from megadapo.cluster.watch.guard import MARK, Guard, kill_marked, marked_processes, start_time
from megadapo.errors import ConfigError, InfraError

QUIET: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
"""Arguments of ray.init that keep Ray's messages out of the console."""
SOCKET_BYTES = 107
"""Longest path of a socket on Linux."""
_PREFIX = "megadapo-"
_LOCK = "lock"
"""File in a private folder that its process has locked."""
_LONGEST_SOCKET = (
    f"/{_PREFIX}12345678/ray/session_2026-11-28_09-00-00_123456_4194304/sockets/plasma_store"
)
DAEMONS = {
    "gcs_server": "Ray's control service (gcs_server)",
    "raylet": "Ray's daemon of this node (raylet)",
}
"""Names in messages of the processes without which Ray does not work."""
_LOGGER = logging.getLogger("megadapo.cluster")


class LocalRay:
    """The Ray that this process has started. It ends with the process, also after SIGKILL."""

    def __init__(self, num_cpus: int) -> None:
        """Start Ray. `num_cpus`: number of slots; may exceed the number of cores."""
        self.folder = private_folder()
        self._mark = self.folder.name
        # first, because a kill while Ray starts would leave what has started
        self._guard = Guard("mark", [self._mark, str(self.folder)])
        atexit.register(self._end_at_exit)
        self.processes: dict[int, str | None] = {}
        """Start time by pid of Ray's own processes."""
        self._daemons: dict[int, str] = {}
        """Name in messages by pid of the daemons without which Ray does not work."""
        try:
            self._start(num_cpus)
        except BaseException:
            self.end()
            raise

    def _start(self, num_cpus: int) -> None:
        import ray
        from ray._private import ray_constants
        from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined]

        # Ray binds 127.0.0.1, as on desktops; by default it takes the network's address
        os.environ[ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR] = "0"  # for the processes it starts
        ray_constants.ENABLE_RAY_CLUSTER = False  # this process has read the variable already
        # every user of this machine reaches loopback; only this process and its children see the
        # token, and not the file in the home folder that Ray would write for everyone to read
        os.environ["RAY_AUTH_MODE"] = "token"
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
        # a process without a GPU share sees no GPU, instead of all of them
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "1")
        # the control service would store the duration of every call, which is never read
        os.environ.setdefault("RAY_task_events_report_interval_ms", "0")
        # Ray's default of 15 lets trainer and engines starve beside any other program
        os.environ.setdefault("RAY_worker_niceness", "0")
        # this process has read the mode already, and a token too if it ran another Ray before
        Config.initialize("")
        AuthenticationTokenLoader.instance().reset_cache()
        # for Ray's processes alone: this one starts others that may outlive it
        variables = {
            MARK: self._mark,
            # else a process that sets its title, as Ray's agents do, overwrites the mark
            "SPT_NOENV": "1",
        }
        with _daemons_with(variables):
            ray.init(
                # without "local" Ray would join any cluster that this machine is a node of
                address="local",
                num_cpus=num_cpus,
                include_dashboard=False,
                _temp_dir=str(self.folder / "ray"),
                **QUIET,
            )
        self.processes = {pid: start_time(pid) for pid in marked_processes(self._mark)}
        for pid in self.processes:
            with suppress(psutil.NoSuchProcess, KeyError):
                self._daemons[pid] = DAEMONS[psutil.Process(pid).name()]

    def lost_daemon(self) -> str | None:
        """Return the name of a daemon that has ended; None if all run."""
        ended = (n for pid, n in self._daemons.items() if start_time(pid) != self.processes[pid])
        return next(ended, None)

    def keep_logs(self, folder: Path) -> None:
        """Copy Ray's own logs into a folder, in place of those of an earlier start."""
        shutil.rmtree(folder, ignore_errors=True)
        try:
            folder.mkdir(parents=True)
            for log in (self.folder / "ray" / "session_latest" / "logs").iterdir():
                if log.is_file():
                    shutil.copyfile(log, folder / log.name)
        except OSError as error:
            _LOGGER.warning("Ray's logs were not copied to %s: %s", folder, error.strerror)

    def end(self) -> None:
        """Kill what is left of Ray, and remove its folder; safe to call again."""
        atexit.unregister(self._end_at_exit)
        kill_marked(self._mark)
        shutil.rmtree(self.folder, ignore_errors=True)
        self._guard.dismiss()

    def _end_at_exit(self) -> None:
        import ray

        ray.shutdown()
        self.end()


def private_folder() -> Path:
    """Return a new folder that only this user can enter, with a path short enough for sockets.

    Remove those of processes that were killed together with their guards.
    """
    longest = SOCKET_BYTES - len(_LONGEST_SOCKET)
    given = os.environ.get("RAY_TMPDIR")
    if given is not None and len(os.fsencode(given)) > longest:
        raise ConfigError(
            f"RAY_TMPDIR = {given}: the paths of Ray's sockets would be longer than the "
            f"{SOCKET_BYTES} bytes that Linux allows: name a folder of at most {longest} bytes"
        )
    parent = given or tempfile.gettempdir()
    if len(os.fsencode(parent)) > longest:
        parent = "/tmp"
    try:
        Path(parent).mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
        # stays open, and locked, until this process ends; visible to others when it is locked
        new = folder / f"new-{_LOCK}"
        fcntl.flock(os.open(new, os.O_CREAT | os.O_RDWR), fcntl.LOCK_EX)
        new.rename(folder / _LOCK)
    except OSError as error:
        raise InfraError(f"no folder for sockets in {parent}: {error.strerror}") from error
    for lock in Path(parent).glob(f"{_PREFIX}*/{_LOCK}"):
        # a live process has locked it, or it has just been removed
        with suppress(OSError), lock.open() as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(lock.parent, ignore_errors=True)
    return folder


@contextmanager
def _daemons_with(variables: Mapping[str, str]) -> Iterator[None]:
    """Start each of Ray's daemons with these environment variables and in a new session.

    A signal to this process's group, as from `timeout` or a closed terminal, would end them before
    the run is saved.
    """
    from ray._private import services

    popen: Any = services.ConsolePopen

    def start(*words: Any, env: Mapping[str, str], **options: Any) -> Any:
        return popen(*words, env={**env, **variables}, start_new_session=True, **options)

    vars(services).update(ConsolePopen=start)
    try:
        yield
    finally:
        vars(services).update(ConsolePopen=popen)
