"""Take the pages' pictures of `megadapo report RUN` and `megadapo top RUN --web`.

    python tools/report_screenshots.py RUN          the report on a phone
    python tools/report_screenshots.py RUN --live   the live page of a run that works

This needs chromium on the PATH.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))

from megadapo.observe.report.page import write_report  # noqa: E402 - the repository's own
from tests.support.processes.chromium import Page, chromium  # noqa: E402 - needs the path above

RESULTS = REPOSITORY / "benchmarks" / "results"
SIZE = (1440, 1080)
PHONE = (390, 844)
# Charts and tooltips are drawn some frames after their cause.
SETTLE_S = 0.7


def main(run: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        report = write_report([run], Path(folder) / "report.html")
        with chromium(Path(folder)) as page:
            page.prefer("light")
            page.resize(*PHONE, scale=2)
            page.open(report)
            take(page, RESULTS / "report-phone-light.png")
            assert not page.errors, page.errors


def picture_live(run: Path) -> None:
    """Show the page after it has read the run again."""
    command = [sys.executable, "-m", "megadapo.cli", "top", str(run), "--web", "--port=0"]
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server,
        tempfile.TemporaryDirectory() as folder,
        chromium(Path(folder)) as page,
    ):
        assert server.stdout is not None
        page.resize(*SIZE)
        page.prefer("light")
        page.open(server.stdout.readline().split()[0])
        page.wait("document.getElementById('live').innerText.startsWith('live')")
        take(page, RESULTS / "report-live.png")
        server.send_signal(signal.SIGTERM)


def take(page: Page, path: Path) -> None:
    time.sleep(SETTLE_S)
    page.screenshot(path)
    print(path)


if __name__ == "__main__":
    (picture_live if "--live" in sys.argv else main)(Path(sys.argv[1]))
