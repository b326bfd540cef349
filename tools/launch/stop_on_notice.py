"""Stops a run in time when the cloud announces that this machine will end.

    python tools/launch/stop_on_notice.py RUN --cloud aws

Start it on every node, beside Ray. It asks the metadata service of AWS (spot interruption) or
Google Cloud (preemption, maintenance) every five seconds. On a notice it writes RUN/stop and ends.
The driver then saves and stops, and with --restarts the run starts again when it has its nodes
back. The program needs only the standard library.
"""

from __future__ import annotations

import argparse
import http.client
import socket
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

AWS = "http://169.254.169.254"
GOOGLE = "http://metadata.google.internal"
TIMEOUT_S = 2.0


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


def wait_for_notice(ask: Callable[[], str | None], *, every_s: float) -> str:
    """Return the first notice."""
    while (notice := ask()) is None:
        time.sleep(every_s)
    return notice


def write_stop_file(run_folder: Path, notice: str) -> None:
    """Ask the driver of a run, which may be on another machine, to save and stop."""
    own = run_folder / f"stop.{socket.gethostname()}"
    # "restart" tells a supervisor that the run must continue
    own.write_text(f"restart: {socket.gethostname()} ends: {notice}\n", encoding="utf-8")
    own.replace(run_folder / "stop")


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
    parser.add_argument("--cloud", choices=("aws", "google"), required=True)
    parser.add_argument("--server", help="another address of the metadata service")
    parser.add_argument("--every", type=float, default=5.0, metavar="SECONDS")
    arguments = parser.parse_args()
    if arguments.cloud == "aws":
        server, ask = arguments.server or AWS, aws_notice
    else:
        server, ask = arguments.server or GOOGLE, google_notice
    notice = wait_for_notice(lambda: ask(server), every_s=arguments.every)
    print(f"stop_on_notice: {notice}", flush=True)
    write_stop_file(arguments.run_folder, notice)
    return 0


if __name__ == "__main__":
    sys.exit(main())
