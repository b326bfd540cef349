"""Faults of what a run depends on: its file server, judge, sockets, daemons and clock."""

from __future__ import annotations

import mmap
import os
import random
import signal
import struct
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.support import REPOSITORY  # noqa: E402 - needs the path above
from tests.support.processes.fake_server import FakeServer, Reply  # noqa: E402

FILE_FAULTS = {
    "files fail": "EIO",
    "files hang": "hang",
    "disk full": "ENOSPC",
    "stale file": "once ESTALE",
}
"""Contents of the file server's control file; see file_server.py."""
FAULTS = (*FILE_FAULTS, "judge away", "sockets reset", "daemon stopped", "clock jump")
SHORTEST_S, LONGEST_S = 20.0, 40.0
"""Seconds that a fault lasts."""
LARGEST_JUMP_S = 7200.0
MOUNT_S = 20.0
"""Seconds in which the file server must have started."""


class Judge(FakeServer):
    """A judge that counts a response's different characters, or closes each connection."""

    is_away = False

    def answer(self, path: str, body: dict[str, Any]) -> Reply:
        if self.is_away:
            return b""
        score = len(set(body["messages"][0]["content"])) % 11
        return 200, {"choices": [{"message": {"content": f"Score: {score}"}}]}


class Infrastructure:
    """A file server, a judge and a clock of which every one can fail.

    The file server shows FOLDER/served at FOLDER/mount. As root, with libfuse and mfusepy.
    """

    def __init__(self, folder: Path, python: str) -> None:
        """`python`: one that has mfusepy."""
        self.served, self.mount = folder / "served", folder / "mount"
        self._control = folder / "files"
        self._clock = folder / "clock"
        for path in (self.served, self.mount):
            path.mkdir(parents=True, exist_ok=True)
        self._control.write_text("")
        self._clock.write_bytes(bytes(8))
        subprocess.run(["umount", "-l", str(self.mount)], capture_output=True)
        server = Path(__file__).with_name("file_server.py")
        words = [python, str(server), str(self.served), str(self.mount), str(self._control)]
        self._server = subprocess.Popen(words, start_new_session=True)
        until = time.monotonic() + MOUNT_S
        while not os.path.ismount(self.mount):
            if self._server.poll() is not None or time.monotonic() > until:
                raise SystemExit(f"the file server does not start: {' '.join(words)}")
            time.sleep(0.1)
        self.judge = Judge()

    def close(self) -> None:
        """End the file server and the judge."""
        self._control.write_text("")
        subprocess.run(["umount", "-l", str(self.mount)], check=True)
        self._server.wait(timeout=MOUNT_S)
        self.judge.__exit__()

    @property
    def overrides(self) -> tuple[str, ...]:
        """Settings of a run that asks the judge."""
        options = f'url = "{self.judge.url}/v1", model = "judge"'
        judge = (
            f'function = "judge", weight = 0.1, timeout_s = 65.0, on_failure = "retry", '
            f"options = {{{options}}}"
        )
        return (f'--reward.functions=["rule", {{{judge}}}]',)

    @property
    def environment(self) -> dict[str, str]:
        """Variables of a run whose clock can jump."""
        paths = [str(REPOSITORY / "tests/nodes/clock"), os.environ.get("PYTHONPATH", "")]
        return {
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "CLOCK_AHEAD_FILE": str(self._clock),
        }

    def cause(self, fault: str, processes: list[psutil.Process], choose: random.Random) -> str:
        """Cause a fault and end it; return what it was.

        Args:
            processes: of the run: engines for "sockets reset", daemons for "daemon stopped".
        """
        lasts_s = choose.uniform(SHORTEST_S, LONGEST_S)
        if fault in FILE_FAULTS:
            self._control.write_text(FILE_FAULTS[fault])
            if fault != "stale file":
                time.sleep(lasts_s)
                self._control.write_text("")
        elif fault == "judge away":
            self.judge.is_away = True
            time.sleep(lasts_s)
            self.judge.is_away = False
        elif fault == "clock jump":
            ahead_s = choose.uniform(-LARGEST_JUMP_S, LARGEST_JUMP_S)
            with self._clock.open("r+b") as file, mmap.mmap(file.fileno(), 8) as values:
                values[:] = struct.pack("d", ahead_s)
            return f"{ahead_s:+.0f} s"
        elif fault == "sockets reset":
            return _reset_sockets(choose.choice(processes))
        elif fault == "daemon stopped":
            process = choose.choice(processes)
            process.send_signal(signal.SIGSTOP)
            time.sleep(lasts_s)
            with suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGCONT)
            return f"{process.pid} for {lasts_s:.0f} s"
        else:
            raise ValueError(f"{fault} is none of {', '.join(FAULTS)}")
        return f"for {lasts_s:.0f} s"


def _reset_sockets(process: psutil.Process) -> str:
    """Reset all connections of a process, as a router does that forgets them."""
    pairs = [
        (connection.laddr.port, connection.raddr.port)
        for connection in process.net_connections("tcp")
        if connection.status == psutil.CONN_ESTABLISHED
    ]
    for own, other in pairs:
        for source, target in ((own, other), (other, own)):
            words = f"ss -K -t sport = :{source} and dport = :{target}".split()
            subprocess.run(words, check=True, capture_output=True)
    return f"{len(pairs)} of process {process.pid}"
