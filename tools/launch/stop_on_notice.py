"""Stops a run in time when this machine will end.

    python tools/launch/stop_on_notice.py RUN --cloud aws

Start it on every node, beside Ray. It asks for a notice every five seconds: the metadata service of
AWS (spot interruption) or Google Cloud (preemption, maintenance), or a file that another program
creates (--file). With --signal SIGTERM is a notice, and with --now there is one already, as in a
hook that runs when the machine ends.

On a notice it writes RUN/stop and ends. With --wait it ends when the run's driver has ended, and
does nothing if there is no driver. The driver saves and stops, and with --restarts the run starts
again when it has its nodes back. The program needs only the standard library.

With --leave-node ADDRESS only the engines on this node leave (`megadapo engines`, which must be
installed), if there are no trainer ranks on it; ADDRESS is the node's in the Ray cluster.
"""

from __future__ import annotations

import argparse
import http.client
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path

AWS = "http://169.254.169.254"
GOOGLE = "http://metadata.google.internal"
TIMEOUT_S = 2.0
STALE_S = 150.0
"""Seconds without a heartbeat after which a driver is dead."""


def aws_notice(server: str) -> str | None:
    """Return the action that AWS announces for a spot machine, or None."""
    lifetime = {"X-aws-ec2-metadata-token-ttl-seconds": "60"}
    token = _ask(f"{server}/latest/api/token", lifetime, method="PUT")
    headers = {"X-aws-ec2-metadata-token": token} if token else {}
    return _ask(f"{server}/latest/meta-data/spot/instance-action", headers)


def google_notice(server: str) -> str | None:
    """Return the preemption or the maintenance that Google Cloud announces, or None."""
    folder, headers = f"{server}/computeMetadata/v1/instance", {"Metadata-Flavor": "Google"}
    if _ask(f"{folder}/preempted", headers) == "TRUE":
        return "preempted"
    event = _ask(f"{folder}/maintenance-event", headers)
    # a machine with GPUs cannot migrate; one that can continues
    return event if event is not None and event.startswith("TERMINATE") else None


def wait_for_notice(asks: Sequence[Callable[[], str | None]], *, every_s: float) -> str:
    """Return the first notice, or SIGTERM if it is blocked and comes first."""
    while True:
        for ask in asks:
            if (notice := ask()) is not None:
                return notice
        if signal.sigtimedwait({signal.SIGTERM}, every_s) is not None:
            return "SIGTERM"


def write_stop_file(run_folder: Path, notice: str) -> None:
    """Ask the driver of a run, which may be on another machine, to save and stop."""
    own = run_folder / f"stop.{socket.gethostname()}"
    # "restart" tells a supervisor that the run must continue
    own.write_text(f"restart: {socket.gethostname()} ends: {notice}\n", encoding="utf-8")
    own.replace(run_folder / "stop")


def leave_node(run_folder: Path, address: str, within_s: float) -> bool:
    """Ask the engines of a node to leave; return whether the run can do without the node."""
    words = ["engines", str(run_folder), "--leave-node", address, "--within", f"{within_s:g}"]
    return subprocess.run([sys.executable, "-m", "megadapo.cli", *words]).returncode == 0


def read_lease(run_folder: Path) -> tuple[str | None, float]:
    """Return what identifies the driver of a run, if there is one, and its last heartbeat."""
    lease = run_folder / "lease.json"
    try:
        return lease.read_text(encoding="utf-8"), lease.stat().st_mtime
    except FileNotFoundError:
        return None, 0.0


def wait_for_end(run_folder: Path, driver: str | None, *, limit_s: float) -> None:
    """Wait until a driver has ended or is dead, for at most `limit_s`."""
    started = heard = time.monotonic()
    last = 0.0
    while time.monotonic() - started < limit_s:
        present, heartbeat = read_lease(run_folder)
        if heartbeat != last:
            last, heard = heartbeat, time.monotonic()
        if driver is None or present != driver or time.monotonic() - heard > STALE_S:
            return
        time.sleep(1.0)


def _ask(url: str, headers: dict[str, str], *, method: str = "GET") -> str | None:
    """Return the text at a URL; None without a text or a service."""
    request = urllib.request.Request(url, headers=headers, method=method)
    # a proxy would answer for its own machine
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=TIMEOUT_S) as answer:
            text: str = answer.read().decode("utf-8", errors="replace").strip()
            return text
    except (urllib.error.URLError, http.client.HTTPException, OSError):
        return None


def main() -> int:
    parser = argparse.ArgumentParser(description="stop a run when this machine will end")
    parser.add_argument("run_folder", type=Path, metavar="RUN")
    parser.add_argument("--cloud", choices=("aws", "google"))
    parser.add_argument("--server", help="another address of the cloud's metadata service")
    parser.add_argument("--file", type=Path, help="a file that exists when the machine will end")
    parser.add_argument("--signal", action="store_true", help="take SIGTERM as a notice")
    parser.add_argument("--now", metavar="NOTICE", help="stop the run at once for this reason")
    parser.add_argument("--leave-node", metavar="ADDRESS", help="let engines leave, if possible")
    parser.add_argument(
        "--within", type=float, default=60.0, metavar="SECONDS", help="time for these engines"
    )
    parser.add_argument("--every", type=float, default=5.0, metavar="SECONDS")
    parser.add_argument(
        "--wait", type=float, default=0.0, metavar="SECONDS", help="limit on a wait for its end"
    )
    arguments = parser.parse_args()
    asks: list[Callable[[], str | None]] = [lambda: arguments.now]
    if arguments.cloud == "aws":
        asks.append(lambda: aws_notice(arguments.server or AWS))
    elif arguments.cloud == "google":
        asks.append(lambda: google_notice(arguments.server or GOOGLE))
    if arguments.file is not None:
        asks.append(lambda: f"{arguments.file} exists" if arguments.file.exists() else None)
    if len(asks) == 1 and arguments.now is None and not arguments.signal:
        parser.error("name a source of notices: --cloud, --file, --signal or --now")
    if arguments.signal:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    notice = wait_for_notice(asks, every_s=arguments.every)
    print(f"stop_on_notice: {notice}", flush=True)
    address, within_s = arguments.leave_node, arguments.within
    if address is not None and leave_node(arguments.run_folder, address, within_s):
        return 0
    driver, _ = read_lease(arguments.run_folder)
    if arguments.wait and driver is None:
        return 0
    write_stop_file(arguments.run_folder, notice)
    wait_for_end(arguments.run_folder, driver, limit_s=arguments.wait)
    return 0


if __name__ == "__main__":
    sys.exit(main())
